"""HTTP/1.1 on the wire, read only as far as is needed to find where a message ends."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

MAX_HEAD_BYTES = 1 << 20
PIECE_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class Head:
    """A start line and its headers. `raw` are their bytes as they came, blank line included."""

    raw: bytes
    start: tuple[str, str, str]
    headers: tuple[tuple[str, str], ...]

    def header(self, name: str) -> str:
        """The first value of a header (name in lower case), or ""."""
        return next((value for known, value in self.headers if known == name), "")

    @property
    def is_last(self) -> bool:
        """Whether the connection ends with this message: HTTP/1.0 keeps it only where it says so."""
        said = self.header("connection").lower()
        return "close" in said or ("HTTP/1.0" in self.start and "keep-alive" not in said)


async def read_head(reader: asyncio.StreamReader) -> Head | None:
    """The next message's head; None if the peer is gone."""
    try:
        raw = await reader.readuntil(b"\r\n\r\n")
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    lines = raw.decode("latin-1").split("\r\n")
    first, second, third = (*lines[0].split(" ", 2), "", "")[:3]
    pairs = (line.partition(":") for line in lines[1:] if line)
    headers = tuple((name.strip().lower(), value.strip()) for name, _, value in pairs)
    return Head(raw, (first, second, third), headers)


async def read_body(reader: asyncio.StreamReader, head: Head, until_close: bool) -> AsyncIterator[tuple[bytes, bytes]]:
    """The body as (bytes on the wire, bytes of payload in them). `until_close`: a message without a length
    ends with its connection (answers) rather than being empty (requests).

    Raises:
        ConnectionError: the peer went away before the end.
    """
    try:
        if "chunked" in head.header("transfer-encoding").lower():
            async for piece in _chunks(reader):
                yield piece
        elif head.header("content-length"):
            left = int(head.header("content-length"))
            while left:
                data = await reader.read(min(left, PIECE_BYTES))
                if not data:
                    raise ConnectionError(f"the peer left {left} bytes early")
                left -= len(data)
                yield data, data
        elif until_close:
            while data := await reader.read(PIECE_BYTES):
                yield data, data
    except asyncio.IncompleteReadError as error:
        raise ConnectionError("the peer left within a chunk") from error


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[tuple[bytes, bytes]]:
    while True:
        line = await reader.readuntil(b"\r\n")
        try:
            size = int(line.split(b";")[0], 16)
        except ValueError:
            yield line, b""  # Whom it is for says what is wrong with it.
            return
        if not size:
            trailer = line
            while line != b"\r\n":
                line = await reader.readuntil(b"\r\n")
                trailer += line
            yield trailer, b""
            return
        data = await reader.readexactly(size + 2)
        yield line + data, data[:-2]
