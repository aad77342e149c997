import pytest

from tiergate.errors import RequestError
from tiergate.s3.conditions import (
    COPY_SOURCE_PREFIX,
    Conditions,
    check_copy_source,
    check_read,
    check_write,
    copy_source_conditions,
    etag_matches,
    has_conditions,
    range_applies,
    read_conditions,
    restated,
)
from tiergate.s3.operations import parse, split_target

OURS, ORIGINS = "abc-1", "0cc175b9c0f1b6a831c399e269772661"
ETAGS = (OURS, ORIGINS)
MODIFIED_S = 784_111_777
AT = "Sun, 06 Nov 1994 08:49:37 GMT"
BEFORE = "Sun, 06 Nov 1994 08:49:36 GMT"


def read_code(headers: dict[str, str]) -> str:
    params = parse("GetObject", split_target("/bkt/k", "h", []), headers, b"")
    try:
        check_read(read_conditions(params), ETAGS, MODIFIED_S)
    except RequestError as error:
        return error.code
    return "OK"


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({}, "OK"),
        ({"If-Match": f'"{OURS}"'}, "OK"),
        ({"If-Match": OURS}, "OK"),
        ({"If-Match": f'"{ORIGINS}"'}, "OK"),
        ({"If-Match": f'"x", "{OURS}"'}, "OK"),
        ({"If-Match": "*"}, "OK"),
        ({"If-Match": '"x"'}, "PreconditionFailed"),
        ({"If-Match": f'W/"{OURS}"'}, "PreconditionFailed"),
        ({"If-None-Match": f'"{OURS}"'}, "NotModified"),
        ({"If-None-Match": f'W/"{OURS}"'}, "NotModified"),
        ({"If-None-Match": ORIGINS}, "NotModified"),
        ({"If-None-Match": "*"}, "NotModified"),
        ({"If-None-Match": '"x"'}, "OK"),
        ({"If-Modified-Since": AT}, "NotModified"),
        ({"If-Modified-Since": BEFORE}, "OK"),
        ({"If-Modified-Since": "rubbish"}, "OK"),
        ({"If-Unmodified-Since": AT}, "OK"),
        ({"If-Unmodified-Since": BEFORE}, "PreconditionFailed"),
        # the two rules of precedence in the API reference
        ({"If-Match": OURS, "If-Unmodified-Since": BEFORE}, "OK"),
        ({"If-None-Match": OURS, "If-Modified-Since": BEFORE}, "NotModified"),
        ({"If-None-Match": "x", "If-Modified-Since": AT}, "OK"),
        ({"If-Match": "x", "If-None-Match": OURS}, "PreconditionFailed"),
        ({"If-Match": OURS, "If-None-Match": OURS}, "NotModified"),
        ({"If-Match": OURS, "If-Modified-Since": AT}, "NotModified"),
    ],
)
def test_check_read_follows_the_precedence_of_s3(headers: dict[str, str], code: str) -> None:
    assert read_code(headers) == code


def test_not_modified_carries_the_shown_etag() -> None:
    with pytest.raises(RequestError) as caught:
        check_read(Conditions(if_none_match=ORIGINS), ETAGS, MODIFIED_S)
    assert caught.value.context == {"etag": OURS, "modified_s": MODIFIED_S}


@pytest.mark.parametrize(
    ("headers", "condition"),
    [
        ({"x-amz-copy-source-if-match": '"x"'}, "x-amz-copy-source-If-Match"),
        ({"x-amz-copy-source-if-none-match": f'"{OURS}"'}, "x-amz-copy-source-If-None-Match"),
        ({"x-amz-copy-source-if-modified-since": AT}, "x-amz-copy-source-If-Modified-Since"),
        ({"x-amz-copy-source-if-unmodified-since": BEFORE}, "x-amz-copy-source-If-Unmodified-Since"),
        ({"x-amz-copy-source-if-match": OURS, "x-amz-copy-source-if-unmodified-since": BEFORE}, None),
        ({}, None),
    ],
)
def test_check_copy_source_fails_with_412_only(headers: dict[str, str], condition: str | None) -> None:
    headers = {"x-amz-copy-source": "b/k", **headers}
    conditions = copy_source_conditions(parse("CopyObject", split_target("/bkt/k", "h", []), headers, b""))
    assert conditions.any == (len(headers) > 1)
    if condition is None:
        check_copy_source(conditions, ETAGS, MODIFIED_S)
        return
    with pytest.raises(RequestError) as caught:
        check_copy_source(conditions, ETAGS, MODIFIED_S)
    assert caught.value.code == "PreconditionFailed"
    assert caught.value.context == {"condition": condition}


@pytest.mark.parametrize(
    ("if_match", "if_none_match", "etags", "code"),
    [
        (None, None, None, "OK"),
        (None, None, ETAGS, "OK"),
        (None, "*", None, "OK"),
        (None, '"*"', None, "OK"),
        (None, "*", ETAGS, "PreconditionFailed"),
        (None, '"x"', None, "NotImplemented"),
        (f'"{OURS}"', None, ETAGS, "OK"),
        (ORIGINS, None, ETAGS, "OK"),
        ("*", None, ETAGS, "OK"),
        ('"x"', None, ETAGS, "PreconditionFailed"),
        ('"x"', None, None, "NoSuchKey"),
        ("*", None, None, "PreconditionFailed"),
        (OURS, "*", ETAGS, "PreconditionFailed"),
    ],
)
def test_check_write_guards_creation_and_update(
    if_match: str | None, if_none_match: str | None, etags: tuple[str, ...] | None, code: str
) -> None:
    if code == "OK":
        check_write(if_match, if_none_match, etags)
        return
    with pytest.raises(RequestError) as caught:
        check_write(if_match, if_none_match, etags, bucket="bkt", key="k")
    assert caught.value.code == code
    assert caught.value.context["key"] == "k"


def test_etag_matches_reads_lists_and_ignores_empty_pieces() -> None:
    assert etag_matches('"a" , b,,W/"c"', ["b"], weak=False)
    assert not etag_matches('"a" , b,,W/"c"', ["c"], weak=False)
    assert etag_matches('"a" , b,,W/"c"', ["c"], weak=True)
    assert not etag_matches("", ["a"], weak=True)


QUOTED = f'"{ORIGINS}"'
AFTER = "Sun, 06 Nov 1994 08:49:38 GMT"


@pytest.mark.parametrize("prefix", ["", COPY_SOURCE_PREFIX])
@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ({"if-match": '"abc-1"'}, {"if-match": QUOTED}),
        ({"if-match": "abc-1"}, {"if-match": QUOTED}),
        ({"if-match": '"a", "abc-1"'}, {"if-match": QUOTED}),
        ({"if-match": ORIGINS}, {"if-match": QUOTED}),
        ({"if-match": '"a"'}, {"if-match": '"a"'}),
        ({"if-match": "*"}, {"if-match": "*"}),
        ({"if-match": 'W/"abc-1"'}, {"if-match": 'W/"abc-1"'}),
        ({"if-none-match": 'W/"abc-1"'}, {"if-none-match": QUOTED}),
        ({"if-none-match": "*"}, {"if-none-match": "*"}),
        ({"if-unmodified-since": BEFORE}, {"if-unmodified-since": BEFORE}),
        ({"if-unmodified-since": AT}, {}),
        ({"if-unmodified-since": AFTER}, {}),
        ({"if-unmodified-since": "some day"}, {"if-unmodified-since": "some day"}),
        ({"if-modified-since": BEFORE}, {"if-modified-since": BEFORE}),
        ({"if-modified-since": AT}, {"if-none-match": QUOTED}),
        ({"if-modified-since": AFTER, "if-none-match": '"a"'}, {"if-none-match": '"a"'}),
        ({"if-match": "abc-1", "if-unmodified-since": BEFORE}, {"if-match": QUOTED, "if-unmodified-since": BEFORE}),
    ],
)
def test_condition_is_restated_for_who_knows_another_identity(
    prefix: str, said: dict[str, str], meant: dict[str, str]
) -> None:
    headers = {prefix + name: value for name, value in said.items()} | {"range": "bytes=0-1"}
    assert has_conditions(headers, prefix)
    found = restated(headers, prefix, ETAGS, ORIGINS, MODIFIED_S)
    assert found == {prefix + name: value for name, value in meant.items()} | {"range": "bytes=0-1"}


@pytest.mark.parametrize(
    ("if_range", "applies"),
    [
        (None, True),
        (f'"{OURS}"', True),
        (QUOTED, True),
        ('W/"abc-1"', False),
        ('"other"', False),
        ("*", False),
        (AT, True),
        (BEFORE, False),
        (AFTER, False),
    ],
)
def test_range_counts_for_the_version_that_if_range_names(if_range: str | None, applies: bool) -> None:
    assert range_applies(if_range, ETAGS, MODIFIED_S) is applies
    headers = {} if if_range is None else {"if-range": if_range}
    meant = {"if-range": QUOTED} if applies and if_range else headers
    assert restated(headers, "", ETAGS, ORIGINS, MODIFIED_S) == meant
