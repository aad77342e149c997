import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiergate.errors import RequestError
from tiergate.s3.ranges import content_range, parse_copy_range, parse_range


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        (None, None),
        ("", None),
        ("bytes=0-0", (0, 1)),
        ("bytes=0-", (0, 10)),
        ("bytes=9-9", (9, 10)),
        ("bytes=3-99", (3, 10)),
        ("bytes=3-" + "9" * 5000, (3, 10)),
        ("bytes=-3", (7, 10)),
        ("bytes=-10", (0, 10)),
        ("bytes=-99", (0, 10)),
        ("bytes=-" + "9" * 5000, (0, 10)),
        ("BYTES = 1 - 2", (1, 3)),
        ("bytes=00001-0000002", (1, 3)),
        ("bytes=-", None),
        ("bytes=5-3", None),
        ("bytes=" + "9" * 30 + "-3", None),
        ("bytes=0-1,3-4", None),
        ("items=0-1", None),
        ("bytes 0-1", None),
        ("bytes=a-b", None),
        ("bytes=1-b", None),
        ("bytes=--1", None),
        ("bytes=+1-2", None),
        ("bytes=1_0-", None),
        ("bytes=\u0661-", None),
    ],
)
def test_parse_range_of_ten_bytes_follows_s3(header: str | None, expected: tuple[int, int] | None) -> None:
    assert parse_range(header, 10) == expected


@pytest.mark.parametrize(
    ("header", "size_bytes"),
    [
        ("bytes=10-", 10),
        ("bytes=10-11", 10),
        ("bytes=-0", 10),
        ("bytes=0-", 0),
        ("bytes=-5", 0),
        ("bytes=0-0", 0),
    ],
)
def test_parse_range_beyond_the_end_is_invalid(header: str, size_bytes: int) -> None:
    with pytest.raises(RequestError) as caught:
        parse_range(header, size_bytes)
    assert caught.value.code == "InvalidRange"
    assert caught.value.context == {"range_requested": header, "actual_object_size": size_bytes}


@given(st.binary(min_size=1, max_size=20), st.integers(0, 30), st.integers(0, 30))
def test_parse_range_selects_what_slicing_selects(data: bytes, first: int, last: int) -> None:
    if first >= len(data) and last >= first:
        with pytest.raises(RequestError):
            parse_range(f"bytes={first}-{last}", len(data))
        return
    found = parse_range(f"bytes={first}-{last}", len(data))
    assert (found is None) == (last < first)
    if found is not None:
        assert data[slice(*found)] == data[first : last + 1]


def test_content_range_is_inclusive() -> None:
    assert content_range(0, 1, 10) == "bytes 0-0/10"
    assert content_range(3, 10, 10) == "bytes 3-9/10"


@pytest.mark.parametrize(("header", "expected"), [(None, None), ("bytes=0-9", (0, 10)), ("bytes=3-3", (3, 4))])
def test_parse_copy_range_inside_the_source(header: str | None, expected: tuple[int, int] | None) -> None:
    assert parse_copy_range(header, 10) == expected


@pytest.mark.parametrize(
    ("header", "code"),
    [
        ("bytes=0-10", "InvalidRange"),
        ("bytes=10-11", "InvalidRange"),
        ("bytes=0-" + "9" * 5000, "InvalidRange"),
        ("bytes=5-3", "InvalidArgument"),
        ("bytes=0-", "InvalidArgument"),
        ("bytes=-3", "InvalidArgument"),
        ("bytes=0-1,3-4", "InvalidArgument"),
        ("0-1", "InvalidArgument"),
        ("", "InvalidArgument"),
    ],
)
def test_parse_copy_range_is_strict(header: str, code: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_copy_range(header, 10)
    assert caught.value.code == code
