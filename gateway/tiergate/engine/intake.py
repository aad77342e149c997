"""Taking a request body into memory, here and on peers at the same time: room is reserved before the first byte is
read, and given back on any failure."""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

from tiergate.checkpoints.recognition import set_prefix_of
from tiergate.checkpoints.retention import group_of
from tiergate.config import Settings
from tiergate.engine.afterwards import Afterwards
from tiergate.engine.calls import IncomingBody
from tiergate.engine.holding import Holding
from tiergate.engine.outage import Outage
from tiergate.engine.rooms import Rooms, log_name
from tiergate.errors import OverloadedError, RequestError, TooFewCopiesError
from tiergate.memory.receiving import Reception
from tiergate.memory.sharing import Granted
from tiergate.model import Body, ObjectName
from tiergate.policy.admission import LossBound, admit
from tiergate.replication.base import Copies, Copying

INLINE_HASH_BYTES = 32 << 10

KEPT_S = 1.0
"""How long is believed what a directory behind a network said of what the origin lacks: of its size, which takes a
longer reading; of the age of the oldest write, while that is below half of the bounds."""


@dataclass(frozen=True, slots=True)
class Taken:
    """A body that is sealed in memory: proved, held for its holder, not yet committed. `copies`: where else it is."""

    body: Body
    md5_hex: str | None
    checksums: dict[str, str]
    copies: Copies


def age_bound(settings: Settings) -> LossBound:
    """How old what a node owes the origin may become, in seconds."""
    return LossBound(settings.dirty_age_slow_s, settings.dirty_age_limit_s)


def size_bound(settings: Settings) -> LossBound:
    """How much a node may owe the origin, in bytes."""
    return LossBound(settings.dirty_size_slow_bytes, settings.dirty_size_limit_bytes)


class Arrival(Holding):
    """A body on its way into memory. A context, as any holding; enter it at once."""

    def __init__(
        self,
        rooms: Rooms,
        afterwards: Afterwards,
        name: ObjectName,
        holder: str,
        known: Callable[[], Awaitable[bool]],
        receiving: Reception,
        copying: Copying,
        copies_count: int,
    ) -> None:
        super().__init__(rooms, afterwards, name, holder, known, self._abort)
        self._receiving = receiving
        self._copying = copying
        self._asked_count = copies_count

    @property
    def received_bytes(self) -> int:
        """How much has come."""
        return self._receiving.received_bytes

    async def write(self, piece: bytes | memoryview) -> None:
        """Take the next piece, here and on peers.

        Raises:
            MemoryFullError: as `Receiving.write`.
        """
        self._receiving.write(piece)
        await self._copying.write(piece)

    async def seal(self) -> Body:
        """The body is whole, here and on enough peers.

        Raises:
            TooFewCopiesError: the peers that are left are too few.
        """
        body = self._receiving.seal()
        self.held([body], await self._copying.seal(body), self._asked_count)
        return body

    async def _abort(self) -> None:
        self._receiving.abort()
        await self._copying.abort()


class Intake:
    """Admits bodies into this node's memory."""

    def __init__(self, rooms: Rooms, afterwards: Afterwards, outage: Outage) -> None:
        self._rooms = rooms
        self._afterwards = afterwards
        self._outage = outage
        self._age: tuple[float, float] | None = None
        """The age of the oldest un-persisted write, and when it was asked for."""
        self._size: tuple[int, float] | None = None
        """The size of what is un-persisted, and when it was asked for."""

    async def admit(self) -> None:
        """Hold up or refuse a write while what this node owes the origin is too old, or too much.

        Raises:
            OverloadedError: a bound of loss is reached.
        """
        settings = self._rooms.settings
        age, size = age_bound(settings), size_bound(settings)
        decision = admit([(await self._oldest_age_s(age), age), (await self._owed_bytes(size), size)])
        if decision.refused:
            self._rooms.metrics.refused_writes.inc()
            raise OverloadedError("un-persisted data is older, or more, than the configured bound", retry_after_s=5)
        if decision.delay_s:
            self._rooms.metrics.slowed_writes.inc()
            await self._rooms.clock.sleep(decision.delay_s)

    async def _oldest_age_s(self, bound: LossBound) -> float:
        now_s = self._rooms.clock.monotonic_s()
        if self._age is not None and not self._rooms.is_alone:
            age_s, asked_s = self._age
            nearest_s = min((each for each in (bound.slow, bound.refuse) if each), default=float("inf"))
            if now_s - asked_s < KEPT_S and age_s + KEPT_S < nearest_s / 2:
                return age_s
        oldest_s = await self._rooms.directory.oldest_pending_s()
        age_s = self._rooms.clock.wall_s() - oldest_s if oldest_s is not None else 0.0
        self._age = (age_s, now_s)
        return age_s

    async def _owed_bytes(self, bound: LossBound) -> int:
        if not (bound.slow or bound.refuse):
            return 0
        now_s = self._rooms.clock.monotonic_s()
        if self._size is not None and not self._rooms.is_alone:
            size_bytes, asked_s = self._size
            if now_s - asked_s < KEPT_S:
                return size_bytes
            self._size = (size_bytes, now_s)  # Others need not ask while this one does.
        size_bytes = await self._rooms.directory.owed_bytes()
        self._size = (size_bytes, now_s)
        return size_bytes

    def check_size(self, name: ObjectName, size_bytes: int | None) -> None:
        """Raises:
        RequestError: EntityTooLarge; not of what stays in memory only, which memory itself refuses.
        """
        if self._rooms.is_memory_only(name):
            return
        if size_bytes is not None and size_bytes > self._rooms.settings.max_body_bytes:
            raise RequestError("EntityTooLarge", "Your proposed upload exceeds the maximum allowed size")

    def has_nodes(self, name: ObjectName) -> bool:
        """Whether there are enough nodes for the copies that the key's rule asks for. Those that failed a moment ago
        are tried only where the origin, which is written to instead, is away."""
        replication, copies_count = self._rooms.replication, self._rooms.copies_count(name)
        return replication.is_ready(copies_count) or (self._outage.is_on and replication.can_reach(copies_count))

    def reserve(
        self,
        name: ObjectName,
        body_uid: str,
        holder: str,
        size_bytes: int | None,
        known: Callable[[], Awaitable[bool]],
        granted: Granted | None = None,
    ) -> Arrival:
        """Room for the whole body; that of `granted`, if it is there already. `known`: whether the directory knows of
        it, should that come into doubt.

        Raises:
            RequestError: NoSuchGrant: it was used meanwhile.
            MemoryFullError: none to be had; the body is untouched.
            TooFewCopiesError: as `has_nodes`; likewise.
        """
        memory, replication = self._rooms.memory, self._rooms.replication
        copies_count = self._rooms.copies_count(name)
        if not self.has_nodes(name):
            raise TooFewCopiesError("too few nodes for the copies", copies=copies_count, **log_name(name))
        receiving: Reception
        if granted is not None:
            granted.take(holder)
            receiving = granted
        elif size_bytes is None:
            receiving = memory.receive_unsized(body_uid, holder, self._limit_bytes(name), self.group_of(name))
        else:
            receiving = memory.receive(body_uid, size_bytes, holder, self.group_of(name))
        try:
            copying = replication.begin(name, holder, body_uid, size_bytes, copies_count)
        except BaseException:  # Whatever it was, the room was reserved for nothing.
            receiving.abort()
            raise
        return Arrival(self._rooms, self._afterwards, name, holder, known, receiving, copying, copies_count)

    def _limit_bytes(self, name: ObjectName) -> int:
        settings = self._rooms.settings
        return settings.largest_body_bytes if self._rooms.is_memory_only(name) else settings.max_body_bytes

    def group_of(self, name: ObjectName) -> int | None:
        """With which set the key's bytes are evicted, until background work has judged it."""
        run = self._rooms.settings.prefix_for(name.bucket, name.key)
        prefix = set_prefix_of(name.key, run.prefix) if run.is_run else ""
        return group_of(name.bucket, prefix) if prefix else None

    def wants_md5(self, name: ObjectName, size_bytes: int | None) -> bool:
        """Whether the ETag of such a body is its MD5 (design section 6); for an unknown length: whether it may be."""
        settings = self._rooms.settings
        if settings.prefix_for(name.bucket, name.key).etag == "exact":
            return True
        return size_bytes is None or size_bytes <= settings.exact_etag_bytes

    async def take(self, name: ObjectName, body: IncomingBody, arrival: Arrival) -> Taken:
        """Stream the body into the reserved room, prove it and seal it."""
        md5_hex = await self._pour(name, body.pieces(), arrival, body.size_bytes)
        checksums = await body.verify()
        sealed = await arrival.seal()
        self._rooms.metrics.ingested_bytes.inc(sealed.size_bytes)
        return Taken(sealed, md5_hex, checksums, arrival.copies)

    async def copy(
        self, name: ObjectName, pieces: AsyncIterator[bytes | memoryview], arrival: Arrival, size_bytes: int
    ) -> Taken:
        """Like `take`, for bytes that come from another object and so are proved already."""
        md5_hex = await self._pour(name, pieces, arrival, size_bytes)
        return Taken(await arrival.seal(), md5_hex, {}, arrival.copies)

    async def _pour(
        self,
        name: ObjectName,
        pieces: AsyncIterator[bytes | memoryview],
        arrival: Arrival,
        size_bytes: int | None,
    ) -> str | None:
        """Write all pieces into memory; the MD5 in hexadecimal where the ETag is to be exact."""
        md5 = hashlib.md5(usedforsecurity=False) if self.wants_md5(name, size_bytes) else None
        async for piece in pieces:
            await arrival.write(piece)
            if md5 is not None and size_bytes is None and not self.wants_md5(name, arrival.received_bytes):
                md5 = None  # Its length was unknown; it turns out to be a large one.
            if md5 is None:
                continue
            if len(piece) <= INLINE_HASH_BYTES:
                md5.update(piece)
            else:
                await asyncio.to_thread(md5.update, piece)
        return md5.hexdigest() if md5 else None
