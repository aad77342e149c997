"""Before a member of a committed set changes in the origin, the set's marker is taken out of the origin (promise P4).

The marker stays what it was for every client of the gateway: its record turns dirty again, its bytes are kept, and
write-back puts it back when the fence says that the set is whole.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, suppress
from weakref import WeakValueDictionary

from tiergate.checkpoints.markers import Markers, ancestor_scopes, scope_of
from tiergate.clock import Clock
from tiergate.directory.base import Directory
from tiergate.errors import ConflictError, IntegrityError, OriginRefusedError, OriginTemporaryError
from tiergate.memory.memory import Memory
from tiergate.model import BLOCK_BYTES, NO_BASE, Holder, ObjectName, Pending, Record, Role, State, Version
from tiergate.observe.logs import get_logger
from tiergate.observe.metrics import Metrics
from tiergate.origin.client import OriginClient, OriginObject
from tiergate.writeback.copier import Copier
from tiergate.writeback.scopes import replaces
from tiergate.writeback.standing import ALONE, Standing

log = get_logger(__name__)

LOOKED_LIMIT_COUNT = 10_000
"""How many scopes are remembered as looked at; past it all are looked at again."""

CHANGES_LIMIT_COUNT = 1000
"""Where more is pending in a set, it counts as changed just now."""

WITHDRAW_ATTEMPTS_COUNT = 4
"""How often a marker that changes meanwhile is looked at anew."""


class Withdrawals:
    """Takes markers out of the origin. `version_of` makes the identity of an object found there. `copier`: in a
    cluster, who sees to it that what the origin is about to lack is on enough nodes."""

    def __init__(
        self,
        directory: Directory,
        memory: Memory,
        origin: OriginClient,
        markers: Markers,
        clock: Clock,
        metrics: Metrics,
        version_of: Callable[[OriginObject, float], Version],
        revalidate_s: float,
        standing: Standing = ALONE,
        copier: Copier | None = None,
    ) -> None:
        self._directory = directory
        self._memory = memory
        self._origin = origin
        self._markers = markers
        self._clock = clock
        self._metrics = metrics
        self._version_of = version_of
        self._revalidate_s = revalidate_s
        self._standing = standing
        self._copier = copier
        self._looked: dict[tuple[str, str], float] = {}
        self._turns: WeakValueDictionary[ObjectName, asyncio.Lock] = WeakValueDictionary()
        """So that of several who need a marker away, one withdraws it; and one looks for those in a scope."""

    async def clear_way(self, name: ObjectName, by: Holder | None, *, deleting: bool = False) -> None:
        """Called before `name`, which the origin holds, is replaced or deleted there: no marker that this would make
        untrue is in the origin when this returns. Those are the markers of all scopes that hold it; of a deletion
        only the innermost that has any: an old set going does not touch what points at the newest. A marker is no
        member of the set it speaks for, a pointer of none. `by`: the membership under which that was announced.

        Raises:
            OriginError: as the origin client; nothing may be made visible then.
            MembershipOverError: that membership is over.
        """
        role = self._markers.role_of(name, 0)
        if role is Role.POINTER:
            return
        scopes = ancestor_scopes(name.key)[1 if role is Role.MARKER else 0 :]
        await self._learn_foreign(name.bucket, scopes)
        # From the outside inwards: a marker is itself a member of the sets around its own.
        for group in [scopes] if deleting else [[scope] for scope in reversed(scopes)]:
            for seen in await self._directory.standing_markers(name.bucket, group):
                if seen.record is not None and seen.record.name != name:
                    async with self._turn(seen.record.name):
                        await self._withdraw(seen.record.name, by)

    async def _withdraw(self, marker: ObjectName, by: Holder | None) -> None:
        for _ in range(WITHDRAW_ATTEMPTS_COUNT):
            seen = await self._directory.get(marker)
            record, pending = seen.record, seen.pending
            if pending is None:
                if record is None or record.state is not State.CLEAN or record.version is None:
                    return
                pending = await self._owe_marker(record, record.version)
                if pending is None:
                    continue
            if pending.base == NO_BASE and not pending.begun:
                return
            # One that has begun may have landed, though nobody heard of it.
            self._standing.check(by)
            await self._origin.delete_object(marker)
            await self._directory.withdrawn(marker, pending.uid)
            self._metrics.withdrawals.inc()
            log.info("marker withdrawn", bucket=marker.bucket, key=marker.key)
            return
        raise OriginTemporaryError("a marker keeps changing", key=marker.key)

    async def _owe_marker(self, record: Record, version: Version) -> Pending | None:
        """Make the clean marker pending, with its bytes held; None if it is not what it was any more."""
        try:
            await self._bring_in(record, version)
        except OriginRefusedError as refused:
            if refused.status != 412 and refused.code != "NoSuchKey":
                raise
            # Somebody changed it behind the gateway: what is known of it is void.
            await self._directory.forget(record.name, version.uid)
            await self._let_go(record.name, version)
            await self.learn(record.name)
            return None

        async def withdraw() -> Pending | None:
            changed_s = await self._last_change_s(record.name)
            return await self._directory.withdraw(record.name, version.uid, changed_s)

        return await self._owed(record, version, withdraw)

    async def owe_again(self, record: Record, version: Version, base: str) -> Pending | None:
        """Make a clean version, whose bytes are in this node's memory, pending again: the origin lost it, or holds
        other bytes, under the ETag `base` (NO_BASE: nothing). None if it is not what it was any more.

        Raises:
            OriginTemporaryError: its bytes were evicted meanwhile.
            TooFewCopiesError: it cannot be had on enough nodes.
        """
        now_s = self._clock.wall_s()
        return await self._owed(
            record, version, lambda: self._directory.owe_again(record.name, version.uid, base, now_s)
        )

    async def _owed(
        self, record: Record, version: Version, owe: Callable[[], Awaitable[Pending | None]]
    ) -> Pending | None:
        """Come to owe a version by `owe`, with its bytes held where they must be."""
        bodies = bodies_of(version)
        with ExitStack() as pins:
            for body in bodies:
                pin = self._memory.pin(body)
                if pin is None:
                    raise evicted(record)
                pins.enter_context(pin)
            if not self._memory.hold_all(bodies, version.uid, dirty=True):
                raise evicted(record)
            if self._copier is not None and not await self._copier.copy(record.name, version):
                await self._let_go(record.name, version)
                return None
            pending = await owe()
            if pending is None:
                await self._let_go(record.name, version)
            # Another process, late to hear that the origin had it, may have allowed its eviction just now.
            elif not self._memory.hold_all(bodies, version.uid, dirty=True):
                raise evicted(record)
            else:
                self._memory.confirm(version.uid, bodies)
        return pending

    async def _last_change_s(self, marker: ObjectName) -> float:
        """When a member of the marker's set was last replaced or deleted: what is pending now may have been held for
        longer than a set must be quiet."""
        found = await self._directory.pending_under(marker.bucket, scope_of(marker.key), CHANGES_LIMIT_COUNT)
        changes_s = [write.committed_s for write in found if replaces(write)]
        now_s = self._clock.wall_s()
        return min(now_s, max(changes_s)) if changes_s and len(found) < CHANGES_LIMIT_COUNT else now_s

    async def _let_go(self, name: ObjectName, version: Version) -> None:
        """Hold no bytes for a version that is not current any more."""
        current = (await self._directory.get(name)).record
        if current is None or current.version is None or current.version.uid != version.uid:
            self._memory.drop(version.uid, bodies_of(version))

    async def _bring_in(self, record: Record, version: Version) -> None:
        """Have every byte of the marker in memory."""
        offset = 0
        for part in version.parts:
            body = part.body
            for index in range(body.block_count):
                receiving = self._memory.receive_block(body, index, version.uid)
                if receiving is None:
                    continue
                start = offset + index * BLOCK_BYTES
                end = start + body.block_size_bytes(index)
                try:
                    async with self._origin.get_object(record.name, start, end, record.origin_etag) as (_, data):
                        async for piece in data:
                            receiving.write(piece)
                    receiving.seal()
                except IntegrityError:
                    self._metrics.integrity_failures.inc(1, "origin")
                    raise
                except BaseException:  # Cancelled too: the next who needs the block must be able to claim it.
                    receiving.abort()
                    raise
            offset += body.size_bytes

    async def _learn_foreign(self, bucket: str, scopes: list[str]) -> None:
        """Record markers that somebody put into the origin without the gateway; looked for once per revalidation
        time, the stated limit for changes behind the gateway."""
        for scope in scopes:
            async with self._turn(ObjectName(bucket, scope)):
                await self._look_in(bucket, scope)

    async def _look_in(self, bucket: str, scope: str) -> None:
        now_s = self._clock.monotonic_s()
        looked_s = self._looked.get((bucket, scope))
        if looked_s is not None and now_s - looked_s < self._revalidate_s:
            return
        after = ""
        while True:
            page = await self._origin.list_objects(bucket, scope, "/", after, 1000)
            for entry in page.entries:
                name = ObjectName(bucket, entry.key)
                if self._markers.role_of(name, entry.size_bytes) is Role.MARKER:
                    await self.learn(name)
            if not page.is_truncated:
                break
            after = page.last_key
        if len(self._looked) >= LOOKED_LIMIT_COUNT:
            self._looked.clear()
        self._looked[(bucket, scope)] = now_s

    def _turn(self, name: ObjectName) -> asyncio.Lock:
        return self._turns.setdefault(name, asyncio.Lock())

    async def learn(self, name: ObjectName) -> None:
        """Record a marker that the origin holds and the directory does not know."""
        seen = await self._directory.get(name)
        if seen.record is not None:
            return
        there = await self._origin.head_object(name, tags=True)
        if there is not None:
            now_s = self._clock.wall_s()
            version = self._version_of(there, now_s)
            role = self._markers.role_of(name, version.size_bytes)
            # Deleted while the origin was asked: there is nothing to learn then.
            with suppress(ConflictError):
                await self._directory.adopt(name, version, there.etag, role, now_s, seen.drops)


def bodies_of(version: Version) -> list[str]:
    """The bodies that have bytes."""
    return [part.body.uid for part in version.parts if part.body.size_bytes]


def evicted(record: Record) -> OriginTemporaryError:
    """The bytes went while they were brought in; nothing happened in the origin."""
    return OriginTemporaryError("what is to be owed again was evicted", key=record.name.key)
