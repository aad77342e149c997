"""Bodies on the wire: a request's as it arrives, decoded and proved; an answer's as it leaves."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Self

from aiohttp import HttpVersion11, web
from aiohttp.streams import StreamReader

from tiergate.engine.calls import Framing
from tiergate.errors import RequestError
from tiergate.s3.bodyverifier import BodyVerifier
from tiergate.s3.chunked import ChunkedDecoder

CONTINUE = "100-continue"

HASH_BATCH_BYTES = 1 << 20
"""How much of a body is gathered before a hash that is slow leaves the event loop."""


INLINE_HASH_BYTES = 64 << 10
"""Up to this much is hashed where it is: a thread would cost more."""


SKIPPED_BYTES = 64 << 20
"""The rest of a refused body up to which the connection is kept: reading past it costs less than a new one."""


SILENT = "Your socket connection to the server was not read from or written to within the timeout period."


class ClientGoneError(ConnectionError):
    """The client closed the connection in the middle of its request: nobody is left to answer."""


class IdleWatch:
    """Ends a read from a client that waits for too long: `content` raises TimeoutError then. One timer serves a whole
    body; a timeout around each piece would cost as much as checking it."""

    def __init__(self, content: StreamReader, idle_timeout_s: float) -> None:
        self._content = content
        self._idle_timeout_s = idle_timeout_s
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(idle_timeout_s, self._look)
        self.time_s = self._loop.time
        self.waiting_since_s: float | None = None
        """When the read under way began; None while there is none."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()

    def _look(self) -> None:
        left_s = self._idle_timeout_s
        if self.waiting_since_s is not None:
            left_s += self.waiting_since_s - self.time_s()
        if left_s > 0:
            self._timer = self._loop.call_later(left_s, self._look)
        else:
            self._content.set_exception(TimeoutError("the client is silent"))


def awaits_continue(request: web.BaseRequest) -> bool:
    """Whether the client asks for `100 Continue` and understands it.

    https://www.rfc-editor.org/rfc/rfc9110.html#section-10.1.1: an HTTP/1.0 client must not get one.
    """
    return request.version >= HttpVersion11 and request.headers.get("Expect", "").lower() == CONTINUE


class WireBody:
    """A request body read from one aiohttp connection (implements `engine.calls.IncomingBody`).

    The `100 Continue` a client may wait for is sent when somebody first reads: an early refusal comes before it.
    """

    def __init__(
        self,
        request: web.BaseRequest,
        size_bytes: int | None,
        wire_bytes: int | None,
        decoder: ChunkedDecoder | None,
        verifier: BodyVerifier,
        framing: Framing,
        signed: bool,
        idle_timeout_s: float,
    ) -> None:
        self._request = request
        self._size_bytes = size_bytes
        self._wire_bytes = wire_bytes
        self._decoder = decoder
        self._verifier = verifier
        self._framing = framing
        self._signed = signed
        self._idle_timeout_s = idle_timeout_s
        self._awaits_continue = awaits_continue(request)
        self.timed_out = False
        """Whether the client fell silent in the middle."""
        self._batch: list[bytes | memoryview] = []
        self._batched_bytes = 0
        self._hashing: asyncio.Future[None] | None = None

    @property
    def size_bytes(self) -> int | None:
        return self._size_bytes

    @property
    def framing(self) -> Framing:
        return self._framing

    @property
    def awaits_continue(self) -> bool:
        """Whether the client was promised nothing yet: it may never send the body."""
        return self._awaits_continue

    async def pieces(self) -> AsyncIterator[bytes | memoryview]:
        wire, decoded = 0, 0
        await self._continue()
        async for data in self._arriving():
            wire += len(data)
            for piece in await self._decode(data):
                decoded += len(piece)
                if self._size_bytes is not None and decoded > self._size_bytes:
                    raise RequestError("IncompleteBody", "The request body is longer than declared")
                self._verifier.update_cheap(piece)
                if self._verifier.expensive:
                    await self._hash(piece)
                yield piece
        if self._decoder is not None:
            self._decoder.finish()
        if (self._wire_bytes is not None and wire != self._wire_bytes) or (
            self._size_bytes is not None and decoded != self._size_bytes
        ):
            raise RequestError(
                "IncompleteBody",
                "You did not provide the number of bytes specified by the Content-Length HTTP header",
            )

    async def _decode(self, data: bytes) -> Sequence[bytes | memoryview]:
        if self._decoder is None:
            return (data,)
        if self._signed and len(data) > INLINE_HASH_BYTES:
            return await asyncio.to_thread(self._decoder.feed, data)
        return self._decoder.feed(data)

    async def verify(self) -> dict[str, str]:
        await self._flush_hash()
        if self._hashing is not None:
            await self._hashing
        return self._verifier.finish(self._decoder.trailers if self._decoder else {})

    async def _continue(self) -> None:
        if self._awaits_continue:
            transport = self._request.transport
            if transport is None:
                raise ClientGoneError("connection lost")
            transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            self._awaits_continue = False

    async def _arriving(self) -> AsyncIterator[bytes]:
        content: StreamReader = self._request.content
        # One buffer after the other: `readany` would join what waits, which is one more copy of nearly every byte.
        # Not where the client's own chunks would decide how small the pieces are.
        joined = self._wire_bytes is None
        with IdleWatch(content, self._idle_timeout_s) as watch:
            while True:
                watch.waiting_since_s = watch.time_s()
                try:
                    data = await content.readany() if joined else (await content.readchunk())[0]
                except TimeoutError as error:
                    self.timed_out = True
                    raise RequestError("RequestTimeout", SILENT) from error
                except web.RequestPayloadError as error:
                    if self._request.transport is None or self._request.transport.is_closing():
                        raise ClientGoneError("connection lost") from error
                    raise RequestError("IncompleteBody", "The request body is malformed") from error
                watch.waiting_since_s = None
                if not data:
                    return
                yield data

    async def _hash(self, piece: bytes | memoryview) -> None:
        self._batch.append(piece)
        self._batched_bytes += len(piece)
        if self._batched_bytes >= HASH_BATCH_BYTES:
            await self._flush_hash()

    async def _flush_hash(self) -> None:
        """Hash what is gathered in a thread, one batch at a time, while the next one arrives."""
        if not self._batch:
            return
        batch, size = self._batch, self._batched_bytes
        self._batch, self._batched_bytes = [], 0
        if self._hashing is not None:
            await self._hashing
            self._hashing = None
        if size <= INLINE_HASH_BYTES:
            update_all(self._verifier, batch)
        else:
            loop = asyncio.get_running_loop()
            self._hashing = loop.run_in_executor(None, update_all, self._verifier, batch)

    async def close(self) -> None:
        """Wait for a hash that is still running, whatever became of the request."""
        if self._hashing is not None:
            with contextlib.suppress(asyncio.CancelledError):
                await self._hashing


def update_all(verifier: BodyVerifier, batch: list[bytes | memoryview]) -> None:
    """Feed the slow hashes; runs in a thread."""
    for piece in batch:
        verifier.update_expensive(piece)


def is_spent(request: web.BaseRequest, received: WireBody | None) -> bool:
    """Whether the connection is of no use after the answer, so that the answer must say it ends.

    A client that still waits for `100 Continue` does not send its body after a final answer; what it sends next would
    be taken for that body. Of a body in the middle only a bounded rest is worth reading past; one of unknown length may
    be cut in the middle of its framing.
    """
    if (received is not None and received.timed_out) or request.content.exception() is not None:
        return True
    if received.awaits_continue if received is not None else awaits_continue(request):
        return True
    if request.content.is_eof():
        return False
    length = request.content_length
    return length is None or length - request.content.total_bytes > SKIPPED_BYTES


def abort(request: web.BaseRequest) -> None:
    """Drop the connection with what it has not sent yet: that may be memory which is not pinned any more."""
    if request.transport is not None:
        request.transport.abort()
