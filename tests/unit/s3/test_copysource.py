from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiergate.errors import RequestError
from tiergate.s3.copysource import parse_copy_source

KEYS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=30)


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ("bkt/key", ("bkt", "key", None)),
        ("/bkt/key", ("bkt", "key", None)),
        ("bkt%2Fa%2Fb", ("bkt", "a/b", None)),
        ("%2Fbkt%2Fa", ("bkt", "a", None)),
        ("bkt//lead", ("bkt", "/lead", None)),
        ("bkt/a+b", ("bkt", "a+b", None)),
        ("bkt/a%2Bb%20c", ("bkt", "a+b c", None)),
        ("bkt/100%25", ("bkt", "100%", None)),
        ("bkt/%2541", ("bkt", "%41", None)),
        ("bkt/k?versionId=v%201", ("bkt", "k", "v 1")),
        ("bkt/k%3FversionId=v", ("bkt", "k?versionId=v", None)),
        ("bkt/k?x?versionId=null", ("bkt", "k?x", "null")),
        ("bkt/\udce2\udc82\udcac", ("bkt", "€", None)),
        ("arn:aws:s3:us-east-1:1:accesspoint/p/object/k", None),
        ("arn%3Aaws%3As3%3Aus-east-1%3A1%3Aaccesspoint/p/object/k", None),
    ],
)
def test_copy_source_forms_are_read(header: str, expected: tuple[str, str, str | None] | None) -> None:
    assert parse_copy_source(header) == expected


@pytest.mark.parametrize(
    ("header", "code"),
    [
        ("", "InvalidArgument"),
        ("bkt", "InvalidArgument"),
        ("bkt/", "InvalidArgument"),
        ("/bkt", "InvalidArgument"),
        ("//k", "InvalidArgument"),
        ("bkt/100%", "InvalidArgument"),
        ("bkt/%ff", "InvalidArgument"),
        ("bkt/k?versionId=", "InvalidArgument"),
        ("b/k", "InvalidBucketName"),
        ("bkt/" + "k" * 1025, "KeyTooLongError"),
    ],
)
def test_bad_copy_source_is_refused_with_the_code(header: str, code: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_copy_source(header)
    assert caught.value.code == code


@given(KEYS, st.sampled_from(["", "/", "/~"]), st.sampled_from(["bkt/", "/bkt/"]))
def test_every_encoding_of_a_key_is_read_back(key: str, safe: str, start: str) -> None:
    assert parse_copy_source(start + quote(key, safe=safe)) == ("bkt", key, None)
    assert parse_copy_source(quote(start + key, safe="")) == ("bkt", key, None)
