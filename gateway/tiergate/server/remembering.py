"""What this node remembers for a directory that forgets: kept up to date while all is well, told when it is needed."""

from collections.abc import Callable

from tiergate.clock import Clock
from tiergate.directory.clustered import ClusteredDirectory
from tiergate.directory.committer import Standing
from tiergate.directory.era import Era
from tiergate.directory.ledger import Entry, Ledger
from tiergate.directory.reinsertion import SET_ASIDE
from tiergate.errors import TiergateError
from tiergate.memory.memory import Memory
from tiergate.model import Holder, Kind, Pending
from tiergate.observe.logs import get_logger
from tiergate.server.cluster import Cluster
from tiergate.writeback.survivors import hold_here

REFRESH_S = 10.0
"""So long what a node holds for others may be unknown to its ledger."""

GRACE_S = 30.0
"""By then the other nodes have told what they hold. Until then no marker of what was told goes to the origin."""

SET_ASIDE_S = 1.0
"""How often is looked while some are set aside."""

log = get_logger(__name__)


class Remembering:
    """The one of a node. `on_released`: something is to be written back now that was set aside."""

    def __init__(
        self,
        cluster: Cluster,
        memory: Memory,
        clock: Clock,
        on_released: Callable[[], None] = lambda: None,
        grace_s: float = GRACE_S,
    ) -> None:
        self._cluster = cluster
        self._ledger: Ledger = cluster.ledger
        self._memory = memory
        self._clock = clock
        self._on_released = on_released
        self._grace_s = grace_s
        self._aside_since_s: dict[str, float] = {}

    async def run(self) -> None:
        """Keep the ledger up to date, until cancelled."""
        while True:
            await self._clock.sleep(SET_ASIDE_S if self._aside_since_s else REFRESH_S)
            try:
                await self.refresh()
            except TiergateError as error:
                log.warning("the ledger could not be refreshed, tried again later", error=error)

    async def refresh(self) -> None:
        """Note what others committed and this node holds; drop what is no longer so; let go what was set aside.

        Raises:
            MembershipOverError: this node is no member now.
            OverloadedError: the directory does not answer.
        """
        directory, era = self._cluster.directory, self._cluster.standing.era()
        me = self._cluster.standing.me
        # Whatever is noted from here on is no older than what is read.
        entries = {entry.write.uid: entry for entry in self._ledger.entries() if entry.era == era}
        newest = max((entry.record.revision for entry in entries.values()), default=0)
        owed = await directory.owed_here(self._memory.dirty_holders())
        for write in owed:
            entry = entries.pop(write.uid, None)
            if entry is None or entry.write != write:
                seen = await directory.get(write.name)
                if seen.record is not None and seen.pending is not None and seen.pending.uid == write.uid:
                    self._ledger.note(Entry(era, seen.record, seen.pending))
                    newest = max(newest, seen.record.revision)
        if entries or newest > self._ledger.newest(era):
            # Who made these changes may be lost together with etcd's data: from now on this node, too, misses them.
            await directory.attest()
        for entry in entries.values():
            self._ledger.drop(entry.record.name, entry.write.uid)
        await self._release([write for write in owed if write.quarantined == SET_ASIDE and write.owner == me])

    async def _release(self, aside: list[Pending]) -> None:
        now_s = self._clock.monotonic_s()
        self._aside_since_s = {write.uid: self._aside_since_s.get(write.uid, now_s) for write in aside}
        due = [write for write in aside if now_s >= self._aside_since_s[write.uid] + self._grace_s]
        for write in due:
            await self._cluster.directory.settle_reinserted(write, self._clock.wall_s())
            del self._aside_since_s[write.uid]
        if due:
            self._on_released()

    async def retell(self, standing: Standing, era: Era) -> None:
        """Tell a directory that forgot. `standing`: the membership that nobody else rests on yet.

        Raises:
            TiergateError: not all was told; it may be begun again.
        """
        directory = ClusteredDirectory(
            self._cluster.client, self._cluster.keys, standing, self._ledger, lambda: era.number
        )
        try:
            kept = await directory.kept(era)
            entries = [entry for entry in self._ledger.entries() if entry.era != era.number]
            dirty = self._memory.dirty_holders()
            if era.previous:
                await self._forget_finished(directory, standing.me, entries, dirty, era)
            for entry in entries:
                now_s = self._clock.wall_s()
                if not self._is_here(entry, dirty) or not await directory.reinsert(entry, era, kept, now_s):
                    self._ledger.drop(entry.record.name, entry.write.uid)
        finally:
            await directory.close()

    def _is_here(self, entry: Entry, dirty: set[str]) -> bool:
        """Whether this node can still answer for a write: bytes that may be evicted are in the origin, or of a version
        that was replaced."""
        version = entry.record.version
        if version is None:
            return True
        return version.uid in dirty and hold_here(self._memory, version, dirty=True)

    async def _forget_finished(
        self, directory: ClusteredDirectory, me: Holder, entries: list[Entry], dirty: set[str], era: Era
    ) -> None:
        """Of what a snapshot says that this node owes or holds, what it knows to be over."""
        known = {entry.write.uid for entry in entries} | dirty
        owed = {write.uid: write for write in await directory.owed_by(me.node)}
        for held in await directory.held_by(me.node):
            write = (await directory.get(held.name)).pending
            if write is not None and write.uid == held.uid and write.kind is Kind.PUT:
                owed[write.uid] = write
        for uid, write in owed.items():
            if uid not in known:
                await directory.forget_finished(write, era)
