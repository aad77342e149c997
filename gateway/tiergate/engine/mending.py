"""Mends an object of a set in one tier with bytes that are proved to be right in another. Nothing else is touched."""

from collections.abc import Collection
from contextlib import ExitStack

from tiergate.checkpoints.sets import Tier
from tiergate.checkpoints.verification import Damage, Fault
from tiergate.directory.base import ClusterDirectory
from tiergate.engine.evidence import is_proved
from tiergate.engine.fills import Fills, Route, Source
from tiergate.engine.looks import Finding
from tiergate.engine.rooms import Rooms, bodies_of, log_name
from tiergate.errors import MemoryFullError, TiergateError, invariant
from tiergate.model import NO_BASE, Holder, ObjectName, Record, State, Version
from tiergate.observe.logs import get_logger

FIRST_POLL_S, LAST_POLL_S = 0.05, 1.0
"""How often is looked whether write-back has brought what is owed again."""

LET_GO_S, LET_GO_POLL_S = 10.0, 0.01
"""How long readers of damaged bytes are waited for."""

log = get_logger(__name__)


class Mending:
    """Of one process; `close`d by whoever made it. `cluster` is the directory where there are other nodes."""

    def __init__(self, rooms: Rooms, cluster: ClusterDirectory | None = None) -> None:
        self._rooms = rooms
        self._cluster = cluster
        self._fills = Fills(rooms)

    async def close(self) -> None:
        """End what runs in the background."""
        await self._fills.close()

    async def mend(self, finding: Finding, damage: Damage) -> str:
        """Mend one damage of an object; why that cannot be, empty if it was done (in S3: if it is owed again)."""
        record, version = finding.record, finding.version
        if record is None or version is None or version.foreign:
            return "it was not written through this gateway, or was forgotten: nobody knows what it should be"
        if not is_proved(version):
            return "no checksums of it were kept"
        if damage.fault is Fault.HEADER:
            return "these are the bytes that were acknowledged"
        try:
            if damage.tier is Tier.S3:
                return await self._mend_in_s3(finding, record, version)
            return await self._mend_in_memory(finding, damage, record, version)
        except TiergateError as error:
            log.warning("an object could not be mended", error=error, **log_name(finding.name))
            return error.message

    async def settled(self, owed: Collection[ObjectName], marker: ObjectName | None) -> list[str]:
        """Wait until write-back has brought what is owed again, and the marker that was withdrawn for it is back; what
        was refused, and why."""
        refused = []
        for name in (*sorted(owed), *([marker] if marker is not None and owed else [])):
            poll_s = FIRST_POLL_S
            while True:
                pending = (await self._rooms.directory.get(name)).pending
                if pending is None or pending.parked:
                    break
                if pending.quarantined:
                    refused.append(f"{name.key}: S3 refused it: {pending.quarantined}")
                    break
                await self._rooms.clock.sleep(poll_s)
                poll_s = min(poll_s * 2, LAST_POLL_S)
        return refused

    async def _mend_in_memory(self, finding: Finding, damage: Damage, record: Record, version: Version) -> str:
        me = self._rooms.replication.me
        if damage.node and self._cluster is not None and (me is None or damage.node != me.node):
            write = finding.seen.pending
            if write is not None and write.owner is not None and write.owner.node == damage.node:
                return f"{damage.node} owes it to S3: repair it there"
            if write is not None and not finding.is_here and not finding.peers:
                return "nobody has its bytes as they were acknowledged"
            return await self._have_dropped(self._cluster, finding, damage.node, version)
        if not finding.peers and not finding.is_in_s3:
            return "nobody has its bytes as they were acknowledged"
        bodies = [body.uid for _, body in bodies_of(version) if body.size_bytes]
        is_owed = record.state is not State.CLEAN
        if damage.fault is Fault.CHECKSUM:
            if not await self._is_let_go(bodies):
                return "its bytes are being read or sent: try again"
            self._rooms.memory.drop(version.uid, bodies)
        with ExitStack() as pins:
            etag = finding.origin_etag if finding.is_in_s3 else None
            await self._fill(finding.name, version, finding.peers, etag or None, pins)
            if is_owed:
                invariant(self._rooms.memory.hold_all(bodies, version.uid, dirty=True), "what was pinned is gone")
                self._rooms.memory.confirm(version.uid, bodies)
            if self._cluster is not None and me is not None:
                await self._cluster.hold(finding.name, version.uid, [me])
        if is_owed and finding.seen.pending is not None:
            # Write-back may have met the damage, and set it aside for good.
            await self._rooms.directory.quarantine(finding.name, version.uid, "")
            self._rooms.wake()
        return ""

    async def _is_let_go(self, body_uids: Collection[str]) -> bool:
        """Wait a while until nobody reads the bodies: what is read stays as it is when its holder drops it."""
        end_s = self._rooms.clock.monotonic_s() + LET_GO_S
        while True:
            if not any(map(self._rooms.memory.is_pinned, body_uids)):
                return True
            if self._rooms.clock.monotonic_s() >= end_s:
                return False
            await self._rooms.clock.sleep(LET_GO_POLL_S)

    async def _have_dropped(self, cluster: ClusterDirectory, finding: Finding, node: str, version: Version) -> str:
        """Have a copy on another node be none any more: where it is wanted it is made anew."""
        holders = finding.seen.holders.get(version.uid, frozenset())
        for holder in self._rooms.replication.sources(each for each in holders if each.node == node):
            await cluster.release(finding.name, version.uid, node)
            bodies = [body.uid for _, body in bodies_of(version) if body.size_bytes]
            await self._rooms.replication.have_dropped(holder, version.uid, bodies)
            return ""
        return "the node does not answer"

    async def _mend_in_s3(self, finding: Finding, record: Record, version: Version) -> str:
        if record.state is not State.CLEAN:
            return "it is not there yet"
        if not finding.is_here and not finding.peers:
            return "no memory has its bytes as they were acknowledged"
        if finding.origin_etag is None:
            return "S3 did not say what it has"
        with ExitStack() as pins:
            if not finding.is_here:
                await self._fill(finding.name, version, finding.peers, None, pins)
            # As before any change of the set; and where S3 lost an object, its marker is untrue as it is.
            await self._rooms.withdrawals.clear_way(finding.name, self._rooms.replication.me)
            pending = await self._rooms.withdrawals.owe_again(record, version, finding.origin_etag or NO_BASE)
        if pending is None:
            return "it changed meanwhile"
        log.info("an object that S3 lost is owed again", **log_name(finding.name))
        self._rooms.wake()
        return ""

    async def _fill(
        self, name: ObjectName, version: Version, peers: Collection[Holder], etag: str | None, pins: ExitStack
    ) -> None:
        """Have all bytes of a version in this node's memory, proved, and pinned.

        Raises:
            TiergateError: they cannot be had, or memory has no room.
        """
        route = Route(peers, etag)
        for offset_bytes, body in bodies_of(version):
            source = Source(name, route, version.uid, body, offset_bytes)
            for index in range(body.block_count):
                filled = await self._fills.block(source, index)
                if isinstance(filled, bytes):
                    raise MemoryFullError("memory has no room for it")
                if index == 0:
                    pins.enter_context(filled)  # One keeps all of the body.
                else:
                    filled.release()
