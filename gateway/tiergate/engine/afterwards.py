"""What must still be done when its request is over: whatever a request leaves open is brought to an end here."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from tiergate.clock import Clock
from tiergate.errors import TiergateError
from tiergate.observe.logs import get_logger

FIRST_PAUSE_S = 0.25
LAST_PAUSE_S = 5.0

AT_ONCE_COUNT = 16
"""Of what is left open, so much is tried at a time."""

log = get_logger(__name__)

T = TypeVar("T")


class Afterwards:
    """Works of this process that are tried until they are done. What they are about lives in memory or in the
    directory, so there are never more than requests came while the directory was away. `close` gives them up: what is
    left is found as that of a dead process."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._tasks: set[asyncio.Task[Any]] = set()
        self._slots = asyncio.Semaphore(AT_ONCE_COUNT)

    async def settled(self) -> None:
        """Wait until nothing is left open."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    def add(self, work: Callable[[], Awaitable[bool]]) -> None:
        """Try `work` again and again, ever less often, until it says that it is done. It may fail with any
        TiergateError."""
        self._begun(self._until_done(work))

    async def carry(self, work: Coroutine[Any, Any, T]) -> T:
        """Await work that must not be left half done: where the caller is cancelled meanwhile, it goes on here."""
        return await asyncio.shield(self._begun(work))

    def _begun(self, work: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: "asyncio.Task[Any]") -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # Whoever waits for it hears of it; nobody may.

    async def _until_done(self, work: Callable[[], Awaitable[bool]]) -> None:
        pause_s = FIRST_PAUSE_S
        while True:
            async with self._slots:
                try:
                    if await work():
                        return
                except TiergateError as error:
                    log.warning("left open by a request, tried again later", error=error)
            await self._clock.sleep(pause_s)
            pause_s = min(pause_s * 2, LAST_PAUSE_S)

    async def close(self) -> None:
        """Give up what is left."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def to_its_end(work: Coroutine[Any, Any, T]) -> T:
    """Await work that must not be left half done: it ends before this does, also where the caller is cancelled
    meanwhile (as often as may be), which then shows."""
    task = asyncio.create_task(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        if not task.cancelled():
            task.exception()
        raise cancelled
    return task.result()
