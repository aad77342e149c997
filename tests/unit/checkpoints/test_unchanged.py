"""Which objects of two sets stand for each other, and when they hold the same bytes."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiergate.checkpoints.unchanged import folder_of, is_unchanged, past, place_of
from tiergate.model import BLOCK_BYTES, Body, Part, Version
from tiergate.s3.checksums import block_checksum


def part(number: int, data: bytes, **checksums: str) -> Part:
    pieces = [data[at : at + BLOCK_BYTES] for at in range(0, len(data), BLOCK_BYTES)]
    blocks = b"".join(block_checksum(piece).to_bytes(8, "big") for piece in pieces)
    return Part(number, Body(f"body-{number}-{len(data)}", len(data), blocks), f"etag-{number}", checksums=checksums)


def version(*parts: Part, **checksums: str) -> Version:
    size_bytes = sum(each.body.size_bytes for each in parts)
    return Version("uid", size_bytes, "etag", 1, parts, checksums=checksums, multipart=len(parts) > 1)


@pytest.mark.parametrize(
    ("key", "run", "expected"),
    [
        ("run/step-1/a/b", "run/", ("run/step-1/", "a/b")),
        ("run/step-1/a", "run", ("run/step-1/", "a")),
        ("step-1/a", "", ("step-1/", "a")),
        ("run/a", "run/", ("", "")),
        ("run/step-1/", "run/", ("", "")),
        ("run2/step-1/a", "run", ("", "")),
        ("run//a", "run/", ("run//", "a")),
    ],
)
def test_place_in_its_set(key: str, run: str, expected: tuple[str, str]) -> None:
    assert place_of(key, run) == expected


@given(st.text("ab/0~ü", min_size=1), st.text("ab/0~ü", min_size=1))
def test_past_is_after_its_set_and_before_other_sets(one: str, other: str) -> None:
    mine, theirs = f"run/{one}", f"run/{other}"
    prefix, _ = place_of(mine, "run/")
    if not prefix:
        return
    after = past(prefix).encode()
    assert mine.encode() < after
    if place_of(theirs, "run/")[0] not in ("", prefix) and theirs.encode() > mine.encode():
        assert theirs.encode() > after


def test_folder_of_a_run() -> None:
    assert [folder_of(prefix) for prefix in ("", "run", "run/")] == ["", "run/", "run/"]


def test_same_blocks_are_the_same_bytes() -> None:
    data = bytes(range(256)) * 40_000
    assert is_unchanged(version(part(1, data)), version(part(1, data)))


def test_one_other_bit_is_seen_wherever_it_is() -> None:
    data = bytes(BLOCK_BYTES + 100)
    for at in (0, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 99):
        changed = bytearray(data)
        changed[at] ^= 1
        assert not is_unchanged(version(part(1, data)), version(part(1, bytes(changed))))


def test_other_parts_of_the_same_bytes_are_not_compared() -> None:
    data = bytes(100)
    assert not is_unchanged(version(part(1, data)), version(part(1, data[:50]), part(2, data[50:])))


@pytest.mark.parametrize(
    ("ours", "theirs", "same"),
    [
        ({"sha256": "a"}, {"sha256": "a"}, True),
        ({"sha256": "a"}, {"sha256": "b"}, False),
        ({"sha256": "a"}, {}, False),
        ({}, {"sha256": "a"}, False),
        ({"crc32": "a"}, {}, True),
        ({"crc32": "a"}, {"crc32": "b"}, False),
        ({"crc32": "a"}, {"crc32c": "b"}, True),
    ],
)
def test_checksums_of_clients_must_agree(ours: dict[str, str], theirs: dict[str, str], same: bool) -> None:
    data = bytes(10)
    assert is_unchanged(version(part(1, data), **ours), version(part(1, data), **theirs)) is same
    assert is_unchanged(version(part(1, data, **ours)), version(part(1, data, **theirs))) is same


def test_what_was_not_proved_or_not_ours_is_nothing_to_go_by() -> None:
    mine = version(part(1, bytes(10)))
    assert not is_unchanged(mine, replace(mine, foreign=True))
    bare = replace(mine, parts=(replace(mine.parts[0], body=replace(mine.parts[0].body, blocks=b"")),))
    assert not is_unchanged(bare, bare)
