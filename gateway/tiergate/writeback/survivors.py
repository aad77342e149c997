"""What a node of a cluster does about those that are gone: it takes over what they owed, ends what they announced, and
takes up again what it held itself before it came back.

Everything here may be done by several nodes at once, or twice: the directory decides who owns what.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from tiergate.clock import Clock
from tiergate.directory.base import ClusterDirectory, Held, Seen
from tiergate.errors import FencedError, HolderLostError, TiergateError
from tiergate.memory.memory import Memory
from tiergate.model import LOST, Actor, Holder, Kind, Live, Pending, Version
from tiergate.observe.logs import get_logger
from tiergate.observe.metrics import Metrics
from tiergate.policy.rendezvous import housekeeper
from tiergate.writeback.recovery import doubt
from tiergate.writeback.standing import Standing
from tiergate.writeback.takeover import Absences, Patience, Verdict, judge
from tiergate.writeback.uploader import context
from tiergate.writeback.withdrawal import bodies_of

log = get_logger(__name__)

AT_ONCE_COUNT = 32
"""Versions that are taken up again at the same time."""


@dataclass(frozen=True, slots=True)
class RoundTimes:
    """`round_s`: how often to look though no node came or went; `again_s`: while something waits for time to pass."""

    round_s: float = 30.0
    again_s: float = 1.0


class Survivors:
    """The one of a node, beside its uploader. `live`: the members as this process sees them. `on_claimed`: something is
    to be written back now that was not."""

    def __init__(
        self,
        directory: ClusterDirectory,
        memory: Memory,
        standing: Standing,
        live: Callable[[], Live],
        clock: Clock,
        metrics: Metrics,
        on_claimed: Callable[[], None],
        patience: Patience,
        times: RoundTimes,
    ) -> None:
        self._directory = directory
        self._memory = memory
        self._standing = standing
        self._live = live
        self._clock = clock
        self._metrics = metrics
        self._on_claimed = on_claimed
        self._patience = patience
        self._times = times
        self._absences = Absences()
        self._adopted: Holder | None = None
        self._settled: dict[str, int] = {}
        """Nodes that owe nothing of an epoch before this one."""
        self._changed = asyncio.Event()

    def wake(self) -> None:
        """A node came, went or began anew; or this one did."""
        self._changed.set()

    async def run(self) -> None:
        """Work until cancelled."""
        while True:
            self._changed.clear()
            pause_s = self._times.again_s
            try:
                if not await self.round():
                    pause_s = self._times.round_s
            except TiergateError as error:
                log.warning("taking over what others owed failed, tried again", error=error)
            except Exception as error:  # Whatever it is: nobody else would go on with it.
                log.exception("taking over what others owed failed unexpectedly, tried again", error=error)
            with suppress(TimeoutError):
                # Not `wait_for`, which before Python 3.12 swallows a cancellation that meets the wake-up.
                async with asyncio.timeout(pause_s):
                    await self._changed.wait()

    async def round(self) -> bool:
        """Look once. Whether something waits for time to pass.

        Raises:
            MembershipOverError: this node is no member now.
            OverloadedError: the directory does not answer.
        """
        me, live = self._standing.me(), self._live()
        self._standing.check(me)
        if me is None or not live.still([me]):
            return True
        if self._adopted != me:
            await self._readopt(me)
            self._adopted = me
        await self._look_for_bytes(me, live)
        owed = await self._orphans(me, live)
        steps = [step for step in await self._directory.steps() if Actor.parse(step.holder).holder]
        named = {write.owner for write in owed if write.owner}
        named |= {holder for step in steps if (holder := Actor.parse(step.holder).holder)}
        now_s = self._clock.monotonic_s()
        self._absences.see(named, live, now_s)
        await self._take_over(owed, me, live, now_s)
        for step in steps:
            if self._is_over(Actor.parse(step.holder), me, now_s):
                if step.through:
                    await doubt(self._directory, step.name)
                await self._directory.end_step(step)
        return bool(named - live.still(named))

    def _is_over(self, actor: Actor, me: Holder, now_s: float) -> bool:
        """Whether who announced a step is dead, and nothing of it can come any more."""
        is_neighbour = actor.holder is not None and actor.holder.node == me.node and actor.token != ""
        if is_neighbour and not self._memory.is_alive(actor.token):
            return True
        return self._absences.gone_s(actor.holder, now_s) >= self._patience.settle_s

    # -- what others owed
    async def _orphans(self, me: Holder, live: Live) -> list[Pending]:
        """Pending writes whose owner's membership is over, as far as they may be this node's affair."""
        found: list[Pending] = []
        for name in sorted(await self._directory.owners()):
            node = live.nodes.get(name)
            if node is not None and self._settled.get(name) == node.epoch:
                continue
            orphans = [write for write in await self._directory.owed_by(name) if not is_owned(write, live)]
            if node is not None and not orphans:
                # What a node owed in earlier epochs only becomes less.
                self._settled[name] = node.epoch
            found += orphans
        return found

    async def _take_over(self, owed: list[Pending], me: Holder, live: Live, now_s: float) -> None:
        if not owed:
            return
        mine = {held.uid for held in await self._directory.held_by(me.node) if held.epoch == me.epoch}
        for write in owed:
            if write.kind is Kind.PUT and write.uid not in mine and housekeeper(live.nodes) != me.node:
                continue
            gone_s = self._absences.gone_s(write.owner, now_s)
            seen = await self._directory.get(write.name)
            if seen.pending is None or seen.pending.uid != write.uid or seen.pending.owner != write.owner:
                continue
            verdict = judge(seen.pending, holders_of(seen, write.uid), me, live, gone_s, self._patience)
            if verdict is Verdict.CLAIM:
                await self._claim(seen, seen.pending, me)
            elif verdict is Verdict.LOST:
                await self._set_aside(seen.pending)

    async def _claim(self, seen: Seen, write: Pending, me: Holder) -> None:
        if write.kind is Kind.PUT and not self._keep(seen, write.uid):
            await self._directory.release(write.name, write.uid, me.node)
            return
        claimed = await self._directory.claim(write.name, write.uid)
        if claimed is None or claimed.uid != write.uid:
            return
        self._metrics.takeovers.inc(1, write.kind)
        log.info("took over a write", owner=str(write.owner), **context(write))
        self._on_claimed()

    def _keep(self, seen: Seen, uid: str) -> bool:
        """See to it that the version's bytes are not evicted; whether they are all here."""
        version = seen.record.version if seen.record else None
        return version is not None and version.uid == uid and hold_here(self._memory, version, dirty=True)

    async def _set_aside(self, write: Pending) -> None:
        """Nobody can bring it to the origin. It is owned by who says so, until a holder returns."""
        if await self._directory.claim(write.name, write.uid) is None or write.quarantined == LOST:
            return
        await self._directory.quarantine(write.name, write.uid, LOST)
        self._metrics.lost_writes.inc()
        log.error("an acknowledged write is lost unless a node that held it comes back", **context(write))

    async def _look_for_bytes(self, me: Holder, live: Live) -> None:
        """What this node owes or keeps and does not hold: it was lost, or is about to be; or its bytes are somewhere
        again."""
        dirty = self._memory.dirty_holders()
        for write in (*await self._directory.pending(), *await self._directory.parked()):
            if write.kind is Kind.DELETE or (write.uid in dirty and write.quarantined != LOST):
                continue
            seen = await self._directory.get(write.name)
            if seen.pending is None or seen.pending.uid != write.uid or seen.pending.owner != me:
                continue
            with suppress(FencedError, HolderLostError):  # Somebody was faster, or the holder is gone again.
                if self._keep(seen, write.uid):
                    await self._release(write)
                elif others := sorted(live.still(holders_of(seen, write.uid)) - {me}):
                    await self._directory.give(write.name, write.uid, others[0])
                elif not write.quarantined:
                    await self._set_aside(write)

    async def _release(self, write: Pending) -> None:
        if write.quarantined != LOST:
            return
        await self._directory.quarantine(write.name, write.uid, "")
        self._metrics.found_writes.inc()
        log.warning("a lost write was found", **context(write))
        self._on_claimed()

    # -- what this node held before
    async def _readopt(self, me: Holder) -> None:
        """Say again, under this epoch, what is held; then claim what this node owed."""
        held_before = [held for held in await self._directory.held_by(me.node) if held.epoch != me.epoch]
        # It may be very much, and one by one each would take its own way to the directory and back.
        for start in range(0, len(held_before), AT_ONCE_COUNT):
            some = (self._readopt_one(held, me) for held in held_before[start : start + AT_ONCE_COUNT])
            for error in await asyncio.gather(*some, return_exceptions=True):
                if error is not None:
                    raise error
        for write in await self._directory.owed_by(me.node):
            if write.owner == me:
                continue
            seen = await self._directory.get(write.name)
            if seen.pending is None or seen.pending.uid != write.uid:
                continue
            if write.kind is Kind.DELETE or me in holders_of(seen, write.uid):
                await self._claim(seen, seen.pending, me)

    async def _readopt_one(self, held: Held, me: Holder) -> None:
        seen = await self._directory.get(held.name)
        version = seen.record.version if seen.record else None
        is_owed = seen.pending is not None and seen.pending.uid == held.uid
        if (
            version is None
            or version.uid != held.uid
            or not hold_here(self._memory, version, dirty=is_owed)
            or not await self._directory.hold(held.name, held.uid, [me])
        ):
            await self._directory.release(held.name, held.uid, me.node)
        elif seen.pending is not None and seen.pending.quarantined == LOST:
            claimed = await self._directory.claim(held.name, held.uid)
            if claimed is not None:
                await self._release(claimed)


def is_owned(write: Pending, live: Live) -> bool:
    """Whether a living node owns it."""
    return write.owner is not None and bool(live.still([write.owner]))


def holders_of(seen: Seen, uid: str) -> frozenset[Holder]:
    """Who said to hold a version."""
    return seen.holders.get(uid, frozenset())


def hold_here(memory: Memory, version: Version, *, dirty: bool) -> bool:
    """Hold a version's bytes in this node's memory, whose directory row is known or about to be written; False if they
    are not all here."""
    bodies = bodies_of(version)
    if not all(memory.holds_whole(part.body) for part in version.parts):
        return False
    if not memory.hold_all(bodies, version.uid, dirty=dirty):
        return False
    memory.confirm(version.uid, bodies)
    return True
