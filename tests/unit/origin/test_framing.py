"""aws-chunked framing: its announced length and its content."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiergate.errors import InvariantError, RequestError
from tiergate.origin.framing import CHUNK_BYTES, Trailer, framed, framed_size_bytes

NAME = "x-amz-checksum-crc32"


async def value() -> str:
    return "AAAAAA=="


async def pieces_of(data: bytes, sizes: list[int]) -> AsyncIterator[bytes | memoryview]:
    start = 0
    for size in sizes:
        yield data[start : start + size]
        start += size
    yield memoryview(data)[start:]


def frame(data: bytes, sizes: list[int], announced: int | None = None) -> bytes:
    async def run() -> bytes:
        size_bytes = len(data) if announced is None else announced
        return b"".join([bytes(p) async for p in framed(pieces_of(data, sizes), size_bytes, Trailer(NAME, value))])

    return asyncio.run(run())


def unframe(framed_bytes: bytes) -> tuple[bytes, bytes]:
    data = b""
    while True:
        head, _, rest = framed_bytes.partition(b"\r\n")
        size = int(head, 16)
        if not size:
            return data, rest
        assert rest[size : size + 2] == b"\r\n"
        data += rest[:size]
        framed_bytes = rest[size + 2 :]


@given(
    st.sampled_from([0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES]),
    st.lists(st.integers(0, 100_000), max_size=5),
)
def test_framed_body_reads_back_and_has_the_announced_length(size_bytes: int, sizes: list[int]) -> None:
    data = (bytes(range(251)) * (size_bytes // 251 + 1))[:size_bytes]
    sent = frame(data, sizes)
    assert unframe(sent) == (data, b"x-amz-checksum-crc32:AAAAAA==\r\n\r\n")
    assert len(sent) == framed_size_bytes(size_bytes, NAME)


def test_body_of_another_length_is_an_error() -> None:
    for announced in (4, 6):
        with pytest.raises(InvariantError):
            frame(b"fives", [2], announced)


def test_unknown_trailer_is_refused() -> None:
    with pytest.raises(RequestError) as refused:
        framed_size_bytes(1, "x-amz-checksum-crc99")
    assert refused.value.code == "InvalidRequest"
