"""aws-chunked framing without signatures and with one trailing checksum. Pure.

https://docs.aws.amazon.com/AmazonS3/latest/API/sigv4-streaming-trailers.html
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

from tiergate.errors import InvariantError, RequestError

CHUNK_BYTES = 64 << 10
"""S3 wants at least 8 KiB in all chunks but the last."""

# Characters of a digest in base64.
_DIGEST_CHARS = {
    "x-amz-checksum-crc32": 8,
    "x-amz-checksum-crc32c": 8,
    "x-amz-checksum-crc64nvme": 12,
    "x-amz-checksum-md5": 24,
    "x-amz-checksum-sha1": 28,
    "x-amz-checksum-sha256": 44,
    "x-amz-checksum-sha512": 88,
    "x-amz-checksum-xxhash128": 24,
    "x-amz-checksum-xxhash3": 12,
    "x-amz-checksum-xxhash64": 12,
}


@dataclass(frozen=True, slots=True)
class Trailer:
    """A checksum that follows the body. `value` is asked once the last piece of the body was taken."""

    name: str
    value: Callable[[], Awaitable[str]]


def framed_size_bytes(size_bytes: int, trailer_name: str) -> int:
    """Length of a body of `size_bytes` with its framing.

    Raises:
        RequestError: InvalidRequest, for a trailer of unknown length.
    """
    digest_chars = _DIGEST_CHARS.get(trailer_name.lower())
    if digest_chars is None:
        raise RequestError("InvalidRequest", "The value specified in the x-amz-trailer header is not supported")
    whole, rest = divmod(size_bytes, CHUNK_BYTES)
    total = whole * (len(_chunk_head(CHUNK_BYTES)) + CHUNK_BYTES + 2)
    total += (len(_chunk_head(rest)) + rest + 2) if rest else 0
    return total + len(b"0\r\n") + len(trailer_name) + 1 + digest_chars + len(b"\r\n\r\n")


async def framed(
    pieces: AsyncIterator[bytes | memoryview], size_bytes: int, trailer: Trailer
) -> AsyncIterator[bytes | memoryview]:
    """The body in chunks, then the trailer. Pieces are cut, not copied.

    Raises:
        InvariantError: the body or the trailer has not the length that was announced.
    """
    left = size_bytes
    chunk_left = 0
    async for piece in pieces:
        view = memoryview(piece).cast("B")
        if len(view) > left:
            raise InvariantError("a body is longer than announced", size_bytes=size_bytes)
        while view:
            if not chunk_left:
                chunk_left = min(CHUNK_BYTES, left)
                yield _chunk_head(chunk_left)
            cut = view[:chunk_left]
            yield cut
            view = view[len(cut) :]
            left -= len(cut)
            chunk_left -= len(cut)
            if not chunk_left:
                yield b"\r\n"
    if left:
        raise InvariantError("a body is shorter than announced", size_bytes=size_bytes)
    value = await trailer.value()
    if len(value) != _DIGEST_CHARS[trailer.name.lower()]:
        raise InvariantError("a checksum of another length", trailer=trailer.name)
    yield f"0\r\n{trailer.name}:{value}\r\n\r\n".encode("ascii")


def _chunk_head(size_bytes: int) -> bytes:
    return b"%x\r\n" % size_bytes
