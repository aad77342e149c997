"""Bodies from peers into this node's memory, block by block; each is checked as it is sealed there."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing

from tiergate.clock import Clock
from tiergate.errors import IntegrityError
from tiergate.model import Body, Node
from tiergate.observe.metrics import Metrics
from tiergate.replication.channel import PeerChannel
from tiergate.replication.roster import Roster
from tiergate.replication.seams import HoldingMemory, PinnedBody
from tiergate.replication.wire import PeerFaultError, Reason

BLOCKS_COUNT = 4
"""Blocks of one body that are fetched at a time."""

FIRST_POLL_S = 0.005
LAST_POLL_S = 0.1
ROUNDS_COUNT = 40
"""How often a block is looked for that somebody else on this node is receiving; some seconds in all."""

OnBlock = Callable[[], Awaitable[None]]


async def _unnoticed() -> None:
    pass


class Fetching:
    """Fetches what other nodes have."""

    def __init__(
        self, memory: HoldingMemory, channel: PeerChannel, roster: Roster, clock: Clock, metrics: Metrics
    ) -> None:
        self._memory = memory
        self._channel = channel
        self._roster = roster
        self._clock = clock
        self._metrics = metrics

    async def hold(self, body: Body, holder: str, sources: Sequence[Node], on_block: OnBlock = _unnoticed) -> None:
        """Hold a body whole and dirty under `holder`, fetching what is missing from the first of `sources` that has
        it. `on_block` is awaited after each block.

        Raises:
            PeerFaultError: nobody has it, or who has it does not send it.
            MemoryFullError: this node has no room.
        """
        if body.size_bytes == 0:
            return
        left = list(sources)
        poll_s = FIRST_POLL_S
        for _ in range(ROUNDS_COUNT):
            if self._memory.hold_all([body.uid], holder, dirty=True):
                return
            if not await self._fetch_missing(body, holder, left, on_block):
                # Another process of this node receives what is missing, or died doing so.
                await self._clock.sleep(poll_s)
                poll_s = min(LAST_POLL_S, poll_s * 2)
        raise PeerFaultError(Reason.BUSY, "somebody else has been receiving a body for too long", uid=body.uid)

    async def _fetch_missing(self, body: Body, holder: str, sources: list[Node], on_block: OnBlock) -> int:
        """Fetch each block that nobody here has or receives; how many those were. Sources that fail are taken out."""
        indexes = iter(range(body.block_count))
        kept = _Kept(self._memory, body.uid)

        async def fetch_some() -> int:
            count = 0
            for index in indexes:
                if await self._fetch(body, index, holder, sources):
                    kept.keep()
                    count += 1
                    await on_block()
            return count

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(fetch_some()) for _ in range(min(BLOCKS_COUNT, body.block_count))]
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        finally:
            kept.release()
        return sum(task.result() for task in tasks)

    async def _fetch(self, body: Body, index: int, holder: str, sources: list[Node]) -> bool:
        """Fetch one block; False if it is here, or being received."""
        while (receiving := self._memory.receive_block(body, index, holder)) is not None:
            source = sources[0] if sources else None
            try:
                if source is None:
                    raise PeerFaultError(Reason.MISSING, "nobody has the block", uid=body.uid, index=index)
                pieces = self._channel.block(source, body.uid, index, body.block_size_bytes(index))
                async with aclosing(pieces):
                    async for piece in pieces:
                        receiving.write(piece)
                receiving.seal()
                return True
            except IntegrityError:
                self._metrics.integrity_failures.inc(1, "peer")
            except PeerFaultError as error:
                if source is None:
                    raise
                if error.reason is not Reason.MISSING:
                    self._roster.shun(source.name)
            finally:
                receiving.abort()
            if source in sources:
                sources.remove(source)
        return False


class _Kept:
    """What was fetched of a body is not evicted before all of it is here."""

    def __init__(self, memory: HoldingMemory, body_uid: str) -> None:
        self._memory = memory
        self._body_uid = body_uid
        self._pin: PinnedBody | None = None

    def keep(self) -> None:
        if self._pin is None:
            self._pin = self._memory.pin(self._body_uid)

    def release(self) -> None:
        if self._pin is not None:
            self._pin.release()
