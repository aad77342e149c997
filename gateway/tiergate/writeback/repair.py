"""New copies in the place of those that went with their nodes, of what the origin does not have yet."""

import asyncio
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from tiergate.clock import Clock
from tiergate.directory.base import ClusterDirectory
from tiergate.errors import TiergateError
from tiergate.memory.memory import Memory
from tiergate.model import Holder, Kind, Live, Pending, Version
from tiergate.observe.logs import get_logger
from tiergate.observe.metrics import Metrics
from tiergate.policy.bandwidth import TokenBucket
from tiergate.policy.rendezvous import ranked
from tiergate.writeback.copier import Copier
from tiergate.writeback.standing import Standing

log = get_logger(__name__)

RETRY_S = 1.0
"""How soon after a failure is looked again."""


@dataclass(frozen=True, slots=True)
class Kept:
    """A version that this node holds and the origin does not have. `copies_count`: on how many nodes it is to be."""

    write: Pending
    version: Version
    holders: frozenset[Holder]
    copies_count: int


def short(kept: Collection[Kept], me: Holder, live: Live) -> list[Kept]:
    """Those that are on fewer living nodes than they should and could be, and that this node is the one to copy; oldest
    first. Pure."""
    found: list[Kept] = []
    for each in kept:
        living = live.still(each.holders)
        wanted_count = min(each.copies_count, len(live.nodes))
        is_short = me in living and len(living) < wanted_count
        if is_short and ranked(each.write.uid, [holder.node for holder in living])[0] == me.node:
            found.append(each)
    return sorted(found, key=lambda each: each.write.place)


def only_here_bytes(kept: Collection[Kept], me: Holder, live: Live) -> int:
    """The bytes of those that no other living node holds. Pure."""
    return sum(each.version.size_bytes for each in kept if live.still(each.holders) <= {me})


def since(found: Collection[Kept], before: Mapping[str, float], now_s: float) -> dict[str, float]:
    """Since when each of them, by uid, has been short. Pure."""
    return {each.write.uid: before.get(each.write.uid, now_s) for each in found}


class Repair:
    """The one of a node. `grace_s`: so long a node may take to come back with its copies. `interval_s`: how often is
    looked."""

    def __init__(
        self,
        directory: ClusterDirectory,
        memory: Memory,
        copier: Copier,
        standing: Standing,
        live: Callable[[], Live],
        clock: Clock,
        metrics: Metrics,
        budget: TokenBucket,
        grace_s: float,
        interval_s: float = 10.0,
    ) -> None:
        self._directory = directory
        self._memory = memory
        self._copier = copier
        self._standing = standing
        self._live = live
        self._clock = clock
        self._metrics = metrics
        self._budget = budget
        self._grace_s = grace_s
        self._interval_s = interval_s
        self._since_s: dict[str, float] = {}

    async def run(self) -> None:
        """Work until cancelled."""
        while True:
            try:
                await self.round()
            except TiergateError as error:
                log.warning("copies could not be made good, tried again", error=error)
            except Exception as error:  # Whatever it is: nobody else would go on with it.
                log.exception("making copies good failed unexpectedly, tried again", error=error)
            await self._clock.sleep(self._interval_s)

    async def round(self) -> None:
        """Copy what has been short for long enough.

        Raises:
            OverloadedError: the directory does not answer, or this node is no member now.
        """
        me = self._standing.me()
        if me is None:
            return
        self._standing.check(me)
        kept, live = await self._kept(me), self._live()
        self._metrics.only_here_bytes.set(only_here_bytes(kept, me, live))
        found = short(kept, me, live)
        now_s = self._clock.monotonic_s()
        self._since_s = since(found, self._since_s, now_s)
        self._metrics.short_writes.set(len(found))
        for each in found:
            if now_s - self._since_s[each.write.uid] < self._grace_s:
                continue
            await self._clock.sleep(self._budget.take(each.version.size_bytes, self._clock.monotonic_s()))
            try:
                await self._copy(each)
            except TiergateError as error:
                # The next may go to other nodes.
                log.warning("a version could not be copied yet", key=each.write.name.key, error=error)

    async def _copy(self, kept: Kept) -> None:
        seen = await self._directory.get(kept.write.name)
        if seen.pending is None or seen.pending.uid != kept.write.uid:
            return
        before = self._live().still(seen.holders.get(kept.write.uid, ()))
        if await self._copier.copy(kept.write.name, kept.version):
            copied_count = max(0, kept.copies_count - len(before))
            self._metrics.repaired_bytes.inc(copied_count * kept.version.size_bytes)

    async def _kept(self, me: Holder) -> list[Kept]:
        """What this node said to hold and may not evict, as far as it is pending."""
        dirty = self._memory.dirty_holders()
        if not dirty:
            return []  # without a look at all that the node holds, most of which the origin has
        found: list[Kept] = []
        for held in await self._directory.held_by(me.node):
            if held.uid not in dirty or held.epoch != me.epoch:
                continue
            seen = await self._directory.get(held.name)
            write, version = seen.pending, seen.record.version if seen.record else None
            if (
                write is None
                or version is None
                or not write.uid == version.uid == held.uid
                or write.kind is not Kind.PUT
            ):
                continue
            holders = seen.holders.get(held.uid, frozenset())
            found.append(Kept(write, version, holders, self._copier.rule(held.name)))
            await asyncio.sleep(0)
        return found
