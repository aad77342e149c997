"""The members of the cluster as one process sees them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

from tiergate.clock import Clock
from tiergate.directory.membership import Nodes
from tiergate.errors import TiergateError
from tiergate.model import Live
from tiergate.observe.logs import get_logger

RETRY_S = 1.0

FIRST_WAIT_S = 5.0
"""So long a process waits for its first look; then it begins with no members, as if it were alone."""

log = get_logger(__name__)


class LiveView:
    """What `Nodes.watch` said last. It lags by what a message takes, and stays as it is while etcd does not answer: who
    acts on it must be refused by guards where it is wrong."""

    def __init__(self, nodes: Nodes, clock: Clock) -> None:
        self._nodes = nodes
        self._clock = clock
        self._live = Live(0, {})
        self._next = asyncio.Event()

    def live(self) -> Live:
        """The members; none, at revision 0, before the first look."""
        return self._live

    async def changed(self, since: Live) -> Live:
        """The members once they are others than `since`, which `live` or `changed` gave."""
        while self._live is since:
            await self._next.wait()
        return self._live

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Keep the view up to date within the block, which begins with a first look (see `FIRST_WAIT_S`)."""
        task = asyncio.create_task(self._watch())
        try:
            try:
                async with asyncio.timeout(FIRST_WAIT_S):
                    await self.changed(self._live)
            except TimeoutError:
                log.warning("the members of the cluster are not known yet")
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _watch(self) -> None:
        while True:
            try:
                async with aclosing(self._nodes.watch()) as lives:
                    async for live in lives:
                        self._see(live)
            except TiergateError as error:
                log.warning("the members of the cluster cannot be watched, tried again", error=error)
            except Exception as error:  # Whatever it is: nobody else would go on with it.
                log.exception("watching the members of the cluster failed unexpectedly, tried again", error=error)
            await self._clock.sleep(RETRY_S)

    def _see(self, live: Live) -> None:
        self._live = live
        self._next.set()
        self._next = asyncio.Event()
