"""The stamp: written once, read back, and never at the cost of the user's metadata."""

import pytest

from tiergate.model import ObjectName, Version
from tiergate.origin.stamp import METADATA_LIMIT_BYTES, STAMP_HEADER, described, read_stamp, stamp_header

NAME = ObjectName("b", "k")


def version(metadata: dict[str, str]) -> Version:
    return Version("0123abcd", 5, "f00d-3", 1_700_000_000, (), metadata=metadata)


def test_stamp_reads_back_and_leaves_user_metadata() -> None:
    (value,) = stamp_header(version({}), NAME).values()
    metadata = {"tiergate": value, "color": "red"}
    stamp = read_stamp(metadata)
    assert stamp is not None
    assert (stamp.uid, stamp.etag, stamp.modified_s) == ("0123abcd", "f00d-3", 1_700_000_000)
    assert stamp.is_of(NAME)
    assert not stamp.is_of(ObjectName("b", "copy"))
    assert metadata == {"color": "red"}


def test_stamp_header_name_is_hidden_metadata() -> None:
    assert list(stamp_header(version({}), NAME)) == [STAMP_HEADER] == ["x-amz-meta-tiergate"]


def test_stamp_is_left_out_exactly_when_metadata_would_grow_too_large() -> None:
    (value,) = stamp_header(version({}), NAME).values()
    room = METADATA_LIMIT_BYTES - len("tiergate") - len(value) - len("k")
    assert stamp_header(version({"k": "v" * room}), NAME) != {}
    assert stamp_header(version({"k": "v" * (room + 1)}), NAME) == {}
    assert stamp_header(version({"k": "é" * (room // 2 + 1)}), NAME) == {}


@pytest.mark.parametrize("value", ["", "mine", "2;a;b;3", "1;a;b", "1;a;b;c", "1;a;b;3", "1;a;b;3;4", "1;;b;3"])
def test_other_values_are_the_user_s(value: str) -> None:
    metadata = {"tiergate": value}
    assert read_stamp(metadata) is None
    assert metadata == {"tiergate": value}


def test_origin_is_always_told_the_content_type_that_readers_are_shown() -> None:
    """SeaweedFS guesses one from the bytes."""
    assert described(version({}), NAME)["content-type"] == "binary/octet-stream"
    told = Version("0123abcd", 5, "f00d-3", 1_700_000_000, (), headers={"content-type": "text/csv"})
    assert described(told, NAME)["content-type"] == "text/csv"
