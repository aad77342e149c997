"""A relay of plain TCP that makes a way longer: what comes in at one end goes out at the other some time later."""

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, Self

from tiergate.clock import SystemClock
from tiergate.testing.rules import WAIT_TIMEOUT_S

PIECE_BYTES = 64 << 10
QUEUED_COUNT = 256
"""So many pieces are on the way at most; then the sender waits."""


class TcpRelay:
    """In a thread with its own event loop. A context manager.

    Args:
        target: Host and port that connections go on to.
        delay_s: How long each byte is on the way, in each direction; may be set anew at any time.
        host: The address it listens at.
    """

    def __init__(self, target: tuple[str, int], delay_s: float = 0.0, host: str = "127.0.0.1") -> None:
        self.delay_s = delay_s
        self._target = target
        self._host = host
        self._port = 0
        self._clock = SystemClock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="tcp-relay", daemon=True)
        self._started = threading.Event()
        self._stopping = asyncio.Event()

    @property
    def address(self) -> str:
        """host:port that it listens at."""
        return f"{self._host}:{self._port}"

    def __enter__(self) -> Self:
        self._thread.start()
        if not self._started.wait(WAIT_TIMEOUT_S):
            raise TimeoutError("the relay did not start")
        return self

    def __exit__(self, *_: object) -> None:
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join(WAIT_TIMEOUT_S)

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        server = await asyncio.start_server(self._accept, self._host, 0)
        self._port = server.sockets[0].getsockname()[1]
        self._started.set()
        await self._stopping.wait()
        server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await server.wait_closed()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._begin(self._connection(reader, writer))

    def _begin(self, call: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = asyncio.get_running_loop().create_task(call)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection(*self._target)
        except OSError:
            writer.close()
            return
        ways = [self._begin(self._way(reader, far_writer)), self._begin(self._way(far_reader, writer))]
        try:
            await asyncio.gather(*ways, return_exceptions=True)
        finally:
            for end in (writer, far_writer):
                end.close()

    async def _way(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass on what comes, and in the end that there is no more."""
        pieces: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(QUEUED_COUNT)

        async def take() -> None:
            while data := await reader.read(PIECE_BYTES):
                await pieces.put((self._clock.monotonic_s() + self.delay_s, data))
            await pieces.put((self._clock.monotonic_s() + self.delay_s, b""))

        async def give() -> None:
            while True:
                due_s, data = await pieces.get()
                await self._clock.sleep(max(0.0, due_s - self._clock.monotonic_s()))
                if not data:
                    break
                writer.write(data)
                await writer.drain()
            writer.write_eof()

        async with asyncio.TaskGroup() as group:
            group.create_task(take())
            group.create_task(give())
