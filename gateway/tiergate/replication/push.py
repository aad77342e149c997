"""One body on its way to one peer: pieces go into the socket as they come, nothing is stored in between."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator

from aiohttp import ClientError, ClientResponse, ClientSession, ClientTimeout, Payload
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http import StreamWriter
from yarl import URL

from tiergate.errors import InvariantError
from tiergate.model import BLOCK_BYTES
from tiergate.replication.wire import PeerFaultError, Reason, Taken

ReadTaken = Callable[[ClientResponse], Awaitable[Taken]]
"""Judges and reads a peer's answer; raises PeerFaultError."""


class Push:
    """A PUT to a peer. Belongs to one request; `finish`ed or `abort`ed in the end.

    A peer is given up when it keeps the body waiting for `idle_timeout_s` in all while it takes one block of it, or for
    that long to be reached or to answer. Whatever happens to it, `write` goes on and raises nothing.
    """

    def __init__(
        self,
        session: ClientSession,
        url: URL,
        headers: dict[str, str],
        size_bytes: int | None,
        read_taken: ReadTaken,
        fail: Callable[[Reason, str], PeerFaultError],
        connect_timeout_s: float,
        idle_timeout_s: float,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._read_taken = read_taken
        self._fail = fail
        self._idle_timeout_s = idle_timeout_s
        self._copies_views = url.scheme == "https"  # TLS may keep what it was given, and with `high=0` never resumes.
        self._size_bytes = size_bytes
        self._writer: StreamWriter | None = None
        self._transport: asyncio.Transport | None = None
        self._opened = asyncio.Event()
        self._ended = asyncio.Event()
        self._deadline = asyncio.timeout(None)
        self._waited_s = 0.0
        self._waiting_since_s: float | None = None
        self._rest_of_block = BLOCK_BYTES
        self.sent_bytes = 0
        self.error: PeerFaultError | None = None
        """Why the peer was given up, if it was."""
        self._watch = self._loop.call_later(idle_timeout_s, self._look)
        patience = ClientTimeout(total=None, connect=connect_timeout_s, sock_connect=connect_timeout_s)
        self._task = asyncio.create_task(self._run(session, url, headers, patience))
        self._task.add_done_callback(self._done)

    # -- for whoever has the body
    async def write(self, piece: bytes | memoryview) -> None:
        """Send a piece, and wait until the socket has it."""
        await self.feed(piece)
        await self.settle()

    async def feed(self, piece: bytes | memoryview) -> None:
        """Send a piece; before it may be reused, `settle`."""
        if self._writer is None and self.error is None:
            with self._waiting():
                await self._opened.wait()
        if self._writer is None or self.error is not None:
            return
        if self._copies_views and isinstance(piece, memoryview):
            piece = bytes(piece)
        self.sent_bytes += len(piece)
        # A connection that is lost is the task's to tell.
        with contextlib.suppress(ClientError, ConnectionError):
            await self._writer.write(piece, drain=False)
        self._rest_of_block -= len(piece)
        if self._rest_of_block <= 0:
            self._rest_of_block = BLOCK_BYTES
            self._waited_s = 0.0

    async def settle(self) -> None:
        """Wait until the socket has all that was fed."""
        writer = self._writer
        if writer is None or self.error is not None or not writer.protocol.writing_paused:
            return
        with self._waiting(), contextlib.suppress(ClientError, ConnectionError):
            await writer.drain()

    def end(self) -> None:
        """The body is complete: the peer's time to answer begins. `finish` does it too."""
        if not self._ended.is_set():
            self._ended.set()
            self._waited_s, self._waiting_since_s = 0.0, self._loop.time()

    @property
    def may_be_held(self) -> bool:
        """Whether the peer may have the body."""
        return self._ended.is_set() and (self.error is None or self.error.reason is Reason.SILENT)

    async def finish(self) -> Taken:
        """Wait for the peer's answer.

        Raises:
            PeerFaultError: the peer did not take it.
        """
        self.end()
        return await self._task

    async def abort(self) -> None:
        """Give up. Nothing of the body is sent, or referred to, afterwards. Does nothing after `finish`."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    # -- the request
    async def _run(self, session: ClientSession, url: URL, headers: dict[str, str], patience: ClientTimeout) -> Taken:
        body = _Fed(self, self._size_bytes)
        try:
            async with (
                self._deadline,
                session.put(url, data=body, headers=headers, allow_redirects=False, timeout=patience) as answer,
            ):
                taken = await self._read_taken(answer)
                if self.sent_bytes == self._size_bytes:
                    # The peer may know that the body is complete before whoever has it says so.
                    self.end()
            if not self._ended.is_set():
                raise self._fail(Reason.BROKEN, "it answered before it had the body")
            return taken
        except TimeoutError as error:
            self._cut()
            if self._deadline.expired():
                raise self._fail(Reason.SILENT, "it does not take the body, or does not answer") from error
            raise self._fail(Reason.UNREACHABLE, str(error)) from error
        except (ClientError, OSError) as error:
            self._cut()
            raise self._fail(Reason.UNREACHABLE, str(error) or type(error).__name__) from error
        except BaseException:  # Cancelled too: what waits in the connection may be memory that is used anew.
            self._cut()
            raise

    async def carry(self, writer: AbstractStreamWriter) -> None:
        """Called when there is a connection: hand it to whoever has the body, until that is complete."""
        if not isinstance(writer, StreamWriter) or writer.transport is None:
            raise InvariantError("a connection without a transport")
        if not self._copies_views:
            # With no room for waiting bytes, a write is settled once the kernel has them all.
            writer.transport.set_write_buffer_limits(high=0)
        self._writer, self._transport = writer, writer.transport
        self._opened.set()
        await self._ended.wait()

    def _cut(self) -> None:
        """Drop the connection with what it has not sent: that may be memory which is used for something else next.
        (aiohttp would close it, which sends the rest first.)"""
        if self._transport is not None and self._transport.get_write_buffer_size():
            self._transport.abort()

    def _done(self, task: asyncio.Task[Taken]) -> None:
        self._watch.cancel()
        if task.cancelled():
            self.error = PeerFaultError(Reason.UNREACHABLE, "given up")
        elif isinstance(error := task.exception(), PeerFaultError):
            self.error = error
        elif error is not None:
            self.error = PeerFaultError(Reason.BROKEN, type(error).__name__)
        self._opened.set()

    # -- its patience
    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        began_s = self._waiting_since_s = self._loop.time()
        try:
            yield
        finally:
            self._waited_s += self._loop.time() - began_s
            self._waiting_since_s = None

    def _look(self) -> None:
        """One timer serves the whole body: a timeout around each piece would cost as much as sending it."""
        now_s = self._loop.time()
        left_s = self._idle_timeout_s - self._waited_s
        if self._waiting_since_s is not None:
            left_s -= now_s - self._waiting_since_s
        if left_s <= 0 and not self._task.done():
            self._deadline.reschedule(now_s)
        elif left_s > 0:
            self._watch = self._loop.call_later(left_s, self._look)


class _Fed(Payload):
    """The body of a `Push` as aiohttp wants it."""

    _autoclose = True

    def __init__(self, push: Push, size_bytes: int | None) -> None:
        super().__init__(push, content_type="application/octet-stream")
        self._push = push
        self._size = size_bytes

    @property
    def consumed(self) -> bool:
        """What was sent once cannot be sent again on another connection."""
        return self._push.sent_bytes > 0

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        raise InvariantError("a body that is sent as it comes is nowhere whole")

    async def write(self, writer: AbstractStreamWriter) -> None:
        await self._push.carry(writer)

    async def write_with_length(self, writer: AbstractStreamWriter, content_length: int | None) -> None:
        await self._push.carry(writer)
