"""Taking a request body into memory: room is reserved before the first byte is read, and given back on any failure."""

import asyncio
import hashlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

from tiergate.engine.calls import IncomingBody
from tiergate.engine.rooms import Rooms
from tiergate.errors import OverloadedError, RequestError
from tiergate.memory.memory import Receiving
from tiergate.model import Body, ObjectName
from tiergate.policy.admission import LossBounds, admit

INLINE_HASH_BYTES = 32 << 10


@dataclass(frozen=True, slots=True)
class Taken:
    """A body that is sealed in memory: proved, held for its holder, not yet committed."""

    body: Body
    md5_hex: str | None
    checksums: dict[str, str]


class Intake:
    """Admits bodies into this node's memory."""

    def __init__(self, rooms: Rooms) -> None:
        self._rooms = rooms

    async def admit(self) -> None:
        """Hold up or refuse a write while the oldest un-persisted one is too old.

        Raises:
            OverloadedError: the bound of loss is reached.
        """
        settings = self._rooms.settings
        bounds = LossBounds(settings.dirty_age_slow_s, settings.dirty_age_limit_s)
        oldest_s = await self._rooms.directory.oldest_pending_s()
        age_s = self._rooms.clock.wall_s() - oldest_s if oldest_s is not None else 0.0
        decision = admit(age_s, bounds)
        if decision.refused:
            self._rooms.metrics.refused_writes.inc()
            raise OverloadedError("un-persisted data is older than the configured bound", retry_after_s=5)
        if decision.delay_s:
            self._rooms.metrics.slowed_writes.inc()
            await self._rooms.clock.sleep(decision.delay_s)

    def reserve(self, body_uid: str, body: IncomingBody, holder: str) -> Receiving:
        """Room for the whole body.

        Raises:
            MemoryFullError: none to be had; the body is untouched.
            RequestError: EntityTooLarge.
        """
        size = body.size_bytes
        if size is None:
            return self._rooms.memory.receive_unsized(body_uid, holder, self._rooms.settings.max_body_bytes)
        if size > self._rooms.settings.max_body_bytes:
            raise RequestError("EntityTooLarge", "Your proposed upload exceeds the maximum allowed size")
        return self._rooms.memory.receive(body_uid, size, holder)

    def wants_md5(self, name: ObjectName, size_bytes: int | None) -> bool:
        """Whether the ETag of such a body is its MD5 (design section 6); for an unknown length: whether it may be."""
        settings = self._rooms.settings
        if settings.prefix_for(name.bucket, name.key).etag == "exact":
            return True
        return size_bytes is None or size_bytes <= settings.exact_etag_bytes

    async def take(self, name: ObjectName, body: IncomingBody, receiving: Receiving) -> Taken:
        """Stream the body into the reserved room, prove it and seal it. Gives the room back on any failure,
        cancellation included."""
        try:
            md5_hex = await self._pour(name, body.pieces(), receiving, body.size_bytes)
            checksums = await body.verify()
            sealed = receiving.seal()
        except BaseException:
            receiving.abort()
            raise
        self._rooms.metrics.ingested_bytes.inc(sealed.size_bytes)
        return Taken(sealed, md5_hex, checksums)

    async def copy(
        self, name: ObjectName, pieces: AsyncIterator[bytes | memoryview], receiving: Receiving, size_bytes: int
    ) -> Taken:
        """Like `take`, for bytes that come from another object and so are proved already."""
        try:
            md5_hex = await self._pour(name, pieces, receiving, size_bytes)
            return Taken(receiving.seal(), md5_hex, {})
        except BaseException:
            receiving.abort()
            raise

    async def _pour(
        self,
        name: ObjectName,
        pieces: AsyncIterator[bytes | memoryview],
        receiving: Receiving,
        size_bytes: int | None,
    ) -> str | None:
        """Write all pieces into memory; the MD5 in hexadecimal where the ETag is to be exact."""
        md5 = hashlib.md5(usedforsecurity=False) if self.wants_md5(name, size_bytes) else None
        async for piece in pieces:
            receiving.write(piece)
            if md5 is not None and size_bytes is None and not self.wants_md5(name, receiving.received_bytes):
                md5 = None  # Its length was unknown; it turns out to be a large one.
            if md5 is None:
                continue
            if len(piece) <= INLINE_HASH_BYTES:
                md5.update(piece)
            else:
                await asyncio.to_thread(md5.update, piece)
        return md5.hexdigest() if md5 else None
