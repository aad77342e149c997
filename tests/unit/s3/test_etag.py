"""ETags: stable, of S3's shape, and S3's own where MD5s are known."""

import hashlib

import pytest

from tiergate.errors import InvariantError
from tiergate.s3 import etag


def test_opaque_etag_same_uid_same_value_of_multipart_shape() -> None:
    one = etag.opaque_etag("uid")
    assert one == etag.opaque_etag("uid")
    assert one != etag.opaque_etag("uid2")
    digits, mark, count = one.partition("-")
    assert (len(bytes.fromhex(digits)), mark, count) == (16, "-", "1")


def test_part_opaque_etag_no_dash_and_unlike_the_object() -> None:
    part = etag.part_opaque_etag("uid")
    assert len(bytes.fromhex(part)) == 16
    assert not etag.opaque_etag("uid").startswith(part)


def test_multipart_etag_of_md5_parts_as_s3() -> None:
    parts = [hashlib.md5(data).digest() for data in (b"a" * 5, b"b")]
    expected = hashlib.md5(b"".join(parts)).hexdigest() + "-2"
    assert etag.multipart_etag([part.hex() for part in parts]) == expected


@pytest.mark.parametrize("parts", [[], ["zz"], ["0" * 32 + "-1"], ['"' + "0" * 32 + '"']])
def test_multipart_etag_of_something_else_refused(parts: list[str]) -> None:
    with pytest.raises(InvariantError):
        etag.multipart_etag(parts)


def test_quote_then_unquote_unchanged() -> None:
    assert etag.quote("abc-1") == '"abc-1"'
    assert etag.unquote('"abc-1"') == "abc-1"
    assert etag.unquote("abc-1") == "abc-1"
