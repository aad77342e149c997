"""Before a member of a committed set changes in the origin, the set's marker is taken out of the origin (promise P4).

The marker stays what it was for every client of the gateway: its record turns dirty again, its bytes are kept, and
write-back puts it back when the fence says that the set is whole.
"""

from collections.abc import Callable

from tiergate.checkpoints.markers import Markers, ancestor_scopes
from tiergate.clock import Clock
from tiergate.directory.base import Directory, Seen
from tiergate.errors import OriginTemporaryError
from tiergate.memory.memory import Memory
from tiergate.model import BLOCK_BYTES, NO_BASE, ObjectName, Record, Role, State, Version
from tiergate.observe.logs import get_logger
from tiergate.observe.metrics import Metrics
from tiergate.origin.client import OriginClient, OriginObject

log = get_logger(__name__)


class Withdrawals:
    """Takes markers out of the origin. `version_of` makes the identity of an object found there."""

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
    ) -> None:
        self._directory = directory
        self._memory = memory
        self._origin = origin
        self._markers = markers
        self._clock = clock
        self._metrics = metrics
        self._version_of = version_of
        self._revalidate_s = revalidate_s
        self._looked: dict[tuple[str, str], float] = {}

    async def clear_way(self, name: ObjectName) -> None:
        """Called before `name`, which the origin holds, is replaced or deleted there: no marker whose set holds it
        is in the origin when this returns.

        Raises:
            OriginError: as the origin client; nothing may be made visible then.
        """
        scopes = ancestor_scopes(name.key)
        await self._learn_foreign(name.bucket, scopes)
        for seen in await self._directory.standing_markers(name.bucket, scopes):
            marker = seen.record.name if seen.record else None
            if marker is not None and marker != name:
                await self._withdraw(marker, seen)

    async def _withdraw(self, marker: ObjectName, seen: Seen) -> None:
        record, pending = seen.record, seen.pending
        if record is None:
            return
        if pending is None:
            if record.state is not State.CLEAN or record.version is None:
                return
            await self._bring_in(record, record.version)
            pending = await self._directory.withdraw(marker, record.version.uid, self._clock.wall_s())
            if pending is None:
                # Somebody committed the marker anew just now: that is pending, and stands on the old one.
                await self._withdraw(marker, await self._directory.get(marker))
                return
        if pending.base == NO_BASE:
            return
        await self._origin.delete_object(marker)
        await self._directory.withdrawn(marker, pending.uid)
        self._metrics.withdrawals.inc()
        log.info("marker withdrawn", bucket=marker.bucket, key=marker.key)

    async def _bring_in(self, record: Record, version: Version) -> None:
        """Have every byte of the marker in memory and hold it, so that it can be put back."""
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
                    async with self._origin.get_object(record.name, start, end, record.origin_etag) as (
                        _,
                        data,
                    ):
                        async for piece in data:
                            receiving.write(piece)
                    receiving.seal()
                except BaseException:
                    receiving.abort()
                    raise
            if not self._memory.hold(body.uid, version.uid, dirty=True):
                raise OriginTemporaryError(
                    "a marker was evicted while it was brought in", key=record.name.key
                )
            offset += body.size_bytes

    async def _learn_foreign(self, bucket: str, scopes: list[str]) -> None:
        """Record markers that somebody put into the origin without the gateway; looked for once per revalidation
        time, the stated limit for changes behind the gateway."""
        now_s = self._clock.monotonic_s()
        for scope in scopes:
            looked_s = self._looked.get((bucket, scope))
            if looked_s is not None and now_s - looked_s < self._revalidate_s:
                continue
            after = ""
            while True:
                page = await self._origin.list_objects(bucket, scope, "/", after, 1000)
                for entry in page.entries:
                    name = ObjectName(bucket, entry.key)
                    if self._markers.role_of(name, entry.size_bytes) is Role.MARKER:
                        await self._adopt(name)
                if not page.is_truncated:
                    break
                after = page.last_key
            if len(self._looked) >= LOOKED_LIMIT_COUNT:
                self._looked.clear()
            self._looked[(bucket, scope)] = now_s

    async def _adopt(self, name: ObjectName) -> None:
        seen = await self._directory.get(name)
        if seen.record is not None:
            return
        there = await self._origin.head_object(name)
        if there is not None:
            now_s = self._clock.wall_s()
            version = self._version_of(there, now_s)
            role = self._markers.role_of(name, version.size_bytes)
            await self._directory.adopt(name, version, there.etag, role, now_s)


LOOKED_LIMIT_COUNT = 10_000
"""How many scopes are remembered as looked at; past it all are looked at again."""
