"""Tags in x-amz-tagging, by S3's rules."""

import pytest

from tiergate.errors import RequestError
from tiergate.s3.tagging import parse_tagging


@pytest.mark.parametrize(
    ("header", "tags"),
    [
        ("", {}),
        ("a=b", {"a": "b"}),
        ("a=b&", {"a": "b"}),
        ("a", {"a": ""}),
        ("a=", {"a": ""}),
        ("a=b=c", {"a": "b=c"}),
        ("a+b=c%20d", {"a b": "c d"}),
        ("k%3D1=%2B-%3D._:/%40", {"k=1": "+-=._:/@"}),
        ("%D0%BA%D0%BB=%E5%80%BC", {"кл": "值"}),
        ("A=1&a=2", {"A": "1", "a": "2"}),
        ("k" * 128 + "=" + "v" * 256, {"k" * 128: "v" * 256}),
        ("&".join(f"k{n}=v" for n in range(10)), {f"k{n}": "v" for n in range(10)}),
    ],
)
def test_tags_are_read(header: str, tags: dict[str, str]) -> None:
    assert parse_tagging(header) == tags


@pytest.mark.parametrize(
    ("header", "code"),
    [
        ("a=b&a=c", "InvalidArgument"),
        ("a=%", "InvalidArgument"),
        ("a=%zz", "InvalidArgument"),
        ("a=%ff", "InvalidArgument"),
        ("&".join(f"k{n}=v" for n in range(11)), "BadRequest"),
        ("=v", "InvalidTag"),
        ("k" * 129 + "=v", "InvalidTag"),
        ("k=" + "v" * 257, "InvalidTag"),
        ("k=" + "%F0%9D%92%9C" * 129, "InvalidTag"),
        ("k=%00", "InvalidTag"),
        ("k=a%0Ab", "InvalidTag"),
        ("k=<", "InvalidTag"),
        ("k%26=v", "InvalidTag"),
        ("aws:k=v", "InvalidTag"),
        ("AWS:k=v", "InvalidTag"),
    ],
)
def test_tags_that_no_object_may_have_are_refused(header: str, code: str) -> None:
    with pytest.raises(RequestError) as refused:
        parse_tagging(header)
    assert refused.value.code == code
