"""HTTP to the origin: exact requests out, streamed answers in, foreign exceptions translated.

A body may lie in memory that is recycled once the call is over, so whatever was not sent by then is thrown
away with its connection; nothing is flushed later."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
from aiohttp.abc import AbstractStreamWriter
from yarl import URL

from tiergate.errors import OriginTemporaryError, TiergateError
from tiergate.origin.signing import UNSIGNED_PAYLOAD

MAX_ERROR_BYTES = 1 << 20
MAX_HEADER_BYTES = 64 << 10

_AUTOMATIC = ("Accept", "Accept-Encoding", "Content-Type", "User-Agent")
"""Headers that aiohttp would add to a request that does not name them."""


@dataclass(frozen=True, slots=True)
class Stream:
    """A request body of exactly `size_bytes`, read anew by `chunks()` for each try.

    A piece must stay as it is until the next one is asked for. `payload_hash` is what the signature says of
    it."""

    size_bytes: int
    chunks: Callable[[], AsyncIterator[bytes | memoryview]]
    payload_hash: str = UNSIGNED_PAYLOAD


class _Payload(aiohttp.Payload):
    """Writes a stream piece by piece. Knows the connection, so that it can cut it."""

    _consumed = True  # aiohttp must not send it twice by itself.
    _autoclose = True

    def __init__(self, stream: Stream, stall_s: float) -> None:
        super().__init__(stream)
        self._size = stream.size_bytes
        self._stream = stream
        self._stall_s = stall_s
        self._transport: asyncio.BaseTransport | None = None
        self._ended = asyncio.Event()
        self._unneeded = False
        self.whole = False
        self.source_error: Exception | None = None

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        raise TypeError("a streamed body is not text")

    async def write(self, writer: AbstractStreamWriter) -> None:
        await self.write_with_length(writer, None)

    async def write_with_length(self, writer: AbstractStreamWriter, content_length: int | None) -> None:
        self._transport = writer.transport
        pieces: AsyncIterator[bytes | memoryview] | None = None
        try:
            pieces = self._begin()  # may fail: a source that can be read once only is asked again after a failed try
            sent = 0
            async for piece in self._guarded(pieces):
                if self._unneeded:
                    return
                sent += len(piece)
                if sent > self._stream.size_bytes:
                    raise self._wrong_size(sent)
                async with asyncio.timeout(self._stall_s):
                    await writer.write(piece)
            if sent != self._stream.size_bytes:
                raise self._wrong_size(sent)
            self.whole = True
        except BaseException:
            self.cut()
            raise
        finally:
            self._ended.set()
            close = getattr(pieces, "aclose", None)
            if close is not None:
                await close()

    def _begin(self) -> AsyncIterator[bytes | memoryview]:
        try:
            return self._stream.chunks()
        except Exception as error:
            self.source_error = error
            raise

    async def _guarded(self, pieces: AsyncIterator[bytes | memoryview]) -> AsyncIterator[bytes | memoryview]:
        try:
            async for piece in pieces:
                yield piece.cast("B") if isinstance(piece, memoryview) and piece.itemsize != 1 else piece
        except Exception as error:
            self.source_error = error
            raise

    def _wrong_size(self, sent: int) -> ValueError:
        self.source_error = ValueError(f"a body of {self._stream.size_bytes} bytes had {sent}")
        return self.source_error

    def give_up(self) -> None:
        """The answer came before the body was sent: stop asking for more."""
        self._unneeded = True

    def cut(self) -> None:
        """Reset the connection; nothing that is still buffered is sent."""
        if isinstance(self._transport, asyncio.WriteTransport):
            self._transport.abort()

    def unsent(self) -> bool:
        """Whether some of the body has not left this process."""
        if not self.whole:
            return True
        transport = self._transport
        return isinstance(transport, asyncio.WriteTransport) and transport.get_write_buffer_size() > 0

    async def ended(self) -> None:
        """Wait until nobody touches the stream's pieces any more."""
        if self._transport is not None:
            await self._ended.wait()


class OriginAnswer:
    """One answer of the origin, any status. Must be closed; closing before its end drops the connection."""

    def __init__(self, response: aiohttp.ClientResponse, payload: _Payload | None) -> None:
        self._response = response
        self._payload = payload
        self.status = response.status
        self.reason = response.reason or ""
        self.headers: list[tuple[str, str]] = [
            (name.decode("latin-1"), value.decode("utf-8", "surrogateescape")) for name, value in response.raw_headers
        ]

    @property
    def is_success(self) -> bool:
        return 200 <= self.status < 300

    def header(self, name: str) -> str:
        """The first value of a header, or ""."""
        return self._response.headers.get(name, "")

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body as it arrives.

        Raises:
            OriginTemporaryError: it ended early, or the origin fell silent.
        """
        try:
            async for piece in self._response.content.iter_any():
                yield piece
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise OriginTemporaryError("the origin's answer broke off", reason=_why(error)) from error

    async def read(self, limit_bytes: int) -> bytes:
        """The whole body of a small answer, and close.

        Raises:
            OriginTemporaryError: as `pieces`, or the body is larger than `limit_bytes`.
        """
        found = bytearray()
        try:
            async for piece in self.pieces():
                found += piece
                if len(found) > limit_bytes:
                    raise OriginTemporaryError("the origin's answer is too large", limit_bytes=limit_bytes)
        finally:
            await self.close()
        return bytes(found)

    async def close(self) -> None:
        """Let the connection go, for reuse if request and answer are through. May be called twice."""
        payload, self._payload = self._payload, None
        is_unsent = payload is not None and payload.unsent()
        if payload is not None and is_unsent:
            payload.cut()
        if self._response.content.at_eof() and not is_unsent:
            self._response.release()
        else:
            self._response.close()
        if payload is not None:
            await payload.ended()


class Wire:
    """The connections of this process to the origin. Opened on first use, inside a running loop."""

    def __init__(self, connect_timeout_s: float, read_timeout_s: float, connections_count: int) -> None:
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=connect_timeout_s, sock_read=read_timeout_s)
        self._stall_s = read_timeout_s
        self._connections_count = connections_count
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        """Close all connections."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=self._connections_count),
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=self._timeout,
                auto_decompress=False,
                skip_auto_headers=_AUTOMATIC,
                max_line_size=MAX_HEADER_BYTES,
                max_field_size=MAX_HEADER_BYTES,
                max_headers=1024,
                # As a middleware, since aiohttp would repeat a request by itself after some of these errors.
                middlewares=(_translated,),
            )
        return self._session

    async def send(
        self, method: str, url: str, headers: Iterable[tuple[str, str]], body: bytes | Stream | None
    ) -> OriginAnswer:
        """Send one request, once, and wait for the head of its answer. Follows no redirect.

        Raises:
            OriginTemporaryError: no connection, no answer in time, or the connection broke.
            Exception: whatever the body's own source raised, unchanged.
        """
        payload = _Payload(body, self._stall_s) if isinstance(body, Stream) else None
        data: Any = payload if payload is not None else body
        try:
            response = await self._opened().request(
                method, URL(url, encoded=True), headers=_pairs(headers), data=data, allow_redirects=False
            )
        except BaseException as error:
            if payload is not None:
                payload.cut()
                await payload.ended()
                if payload.source_error is not None and isinstance(error, OriginTemporaryError):
                    raise payload.source_error from None
            raise
        if payload is not None and response.status >= 300:
            payload.give_up()
        return OriginAnswer(response, payload)


async def _translated(request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType) -> aiohttp.ClientResponse:
    try:
        return await handler(request)
    except TiergateError:
        raise
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise OriginTemporaryError("the origin does not answer", reason=_why(error)) from error


def _pairs(headers: Iterable[tuple[str, str]]) -> Sequence[tuple[str, str]]:
    # aiohttp would silently drop what is not UTF-8; S3 takes such bytes as Latin-1.
    pairs = []
    for name, value in headers:
        try:
            value.encode()
        except UnicodeEncodeError:
            value = value.encode("utf-8", "surrogateescape").decode("latin-1")
        pairs.append((name, value))
    return pairs


def _why(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:200]
