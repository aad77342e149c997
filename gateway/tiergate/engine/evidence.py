"""The bytes of a version in one place, to be looked at there and nowhere else: nothing is filled or forgotten."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Protocol

from tiergate.checkpoints.sets import Tier
from tiergate.engine.outage import BOUND_S
from tiergate.engine.reads import cut, spans
from tiergate.engine.rooms import Rooms, bodies_of, log_name
from tiergate.errors import OriginError, OriginRefusedError, OriginTemporaryError, PeerError, TiergateError
from tiergate.memory.memory import Memory, Pin
from tiergate.model import BLOCK_BYTES, Body, Holder, ObjectName, Version
from tiergate.replication.wire import PeerFaultError, Reason
from tiergate.s3.checksums import block_checksum

WINDOW_BYTES = 64 << 10
"""So much is read of the origin at once where less is asked for: heads lie close together."""


class AbsentError(TiergateError):
    """The bytes are not there."""


class UnaskedError(TiergateError):
    """Who has the bytes cannot be asked now. The message says why."""


class Place(Protocol):
    """Where all bytes of a version are, or some. `node`: whose memory; empty in S3 and on a node alone."""

    tier: Tier
    node: str

    async def block(self, offset_bytes: int, body: Body, index: int) -> Sequence[memoryview]:
        """A block of a body, which begins at `offset_bytes` of the object. Valid until the next call.

        Raises:
            AbsentError, UnaskedError.
        """
        ...

    async def read(self, start: int, end: int) -> bytes:
        """The bytes [start, end) of the object, fewer where it ends before.

        Raises:
            AbsentError, UnaskedError.
        """
        ...


class OwnMemory(AbstractContextManager["OwnMemory"]):
    """What this node's slabs have of a version, pinned while inside."""

    tier = Tier.MEMORY

    def __init__(self, memory: Memory, version: Version, node: str) -> None:
        self.node = node
        self._memory = memory
        self._bodies = bodies_of(version)
        self._stack = ExitStack()
        self._pins: dict[str, Pin] = {}

    def __enter__(self) -> "OwnMemory":
        for _, body in self._bodies:
            pin = self._memory.pin(body.uid) if body.size_bytes else None
            if pin is not None:
                self._pins[body.uid] = self._stack.enter_context(pin)
        return self

    def __exit__(self, *_: object) -> None:
        self._pins.clear()
        self._stack.close()

    @property
    def has_any(self) -> bool:
        """Whether something of it is here, or there is nothing to have."""
        return bool(self._pins) or not any(body.size_bytes for _, body in self._bodies)

    async def block(self, offset_bytes: int, body: Body, index: int) -> Sequence[memoryview]:
        """See `Place`."""
        pin = self._pins.get(body.uid)
        views = pin.block(index) if pin is not None else None
        if views is None:
            raise AbsentError("a block is not in memory")
        return views

    async def read(self, start: int, end: int) -> bytes:
        """See `Place`."""
        return await _read_blocks(self, self._bodies, start, end)


class PeersMemory:
    """What another node's memory has of a version."""

    tier = Tier.MEMORY

    def __init__(self, rooms: Rooms, version: Version, holder: Holder) -> None:
        self.node = holder.node
        self._holder = holder
        self._replication = rooms.replication
        self._bodies = bodies_of(version)
        self._last: tuple[str, int] = ("", 0)
        self._bytes = b""

    async def block(self, offset_bytes: int, body: Body, index: int) -> Sequence[memoryview]:
        """See `Place`."""
        if self._last != (body.uid, index):
            pieces: list[bytes] = []
            left_bytes = body.block_size_bytes(index)
            try:
                async for piece in self._replication.read(self._holder, body, index):
                    left_bytes -= len(piece)
                    if left_bytes < 0:
                        break  # More than there should be: it will not match.
                    pieces.append(bytes(piece))
            except PeerFaultError as error:
                if error.reason is Reason.MISSING:
                    raise AbsentError("a block is not in memory") from error
                raise UnaskedError(error.message) from error
            except PeerError as error:
                raise UnaskedError(error.message) from error
            if not pieces:
                raise AbsentError("a block is not in memory")
            self._last, self._bytes = (body.uid, index), b"".join(pieces)
        return [memoryview(self._bytes)]

    async def read(self, start: int, end: int) -> bytes:
        """See `Place`."""
        return await _read_blocks(self, self._bodies, start, end)


class OriginObjectBytes:
    """What the origin has under an ETag."""

    tier = Tier.S3
    node = ""

    def __init__(self, rooms: Rooms, name: ObjectName, etag: str, size_bytes: int) -> None:
        self._origin = rooms.origin
        self._attempts_count = rooms.settings.origin_attempts_count
        self._name = name
        self._etag = etag
        self._size_bytes = size_bytes
        self._window_start = 0
        self._window = b""

    async def block(self, offset_bytes: int, body: Body, index: int) -> Sequence[memoryview]:
        """See `Place`."""
        start = offset_bytes + index * BLOCK_BYTES
        return [memoryview(await self._fetch(start, start + body.block_size_bytes(index)))]

    async def read(self, start: int, end: int) -> bytes:
        """See `Place`."""
        end = min(end, self._size_bytes)
        if start >= end:
            return b""
        if end - start > WINDOW_BYTES:
            return await self._fetch(start, end)
        if not self._window_start <= start <= end <= self._window_start + len(self._window):
            self._window_start = start
            self._window = await self._fetch(start, min(start + WINDOW_BYTES, self._size_bytes))
        return self._window[start - self._window_start : end - self._window_start]

    async def _fetch(self, start: int, end: int) -> bytes:
        why = ""
        for _ in range(self._attempts_count):
            try:
                async with (
                    asyncio.timeout(BOUND_S),
                    self._origin.get_object(self._name, start, end, self._etag) as (_, pieces),
                ):
                    return b"".join([bytes(piece) async for piece in pieces])
            except (OriginTemporaryError, TimeoutError) as error:
                why = str(error) or "S3 does not answer"
            except OriginRefusedError as error:
                if error.status in (404, 412, 416):
                    raise UnaskedError("it changes while it is looked at", **log_name(self._name)) from error
                raise UnaskedError(f"S3 refuses: {error.code}") from error
            except OriginError as error:
                raise UnaskedError(error.message) from error
        raise UnaskedError(why)


async def _read_blocks(place: Place, bodies: Sequence[tuple[int, Body]], start: int, end: int) -> bytes:
    offsets = {body.uid: offset for offset, body in bodies}
    found: list[bytes] = []
    for body, low, high in spans(bodies, start, end):
        for index in range(low // BLOCK_BYTES, -(-high // BLOCK_BYTES)):
            views = await place.block(offsets[body.uid], body, index)
            first = index * BLOCK_BYTES
            found += [bytes(view) for view in cut(views, max(low - first, 0), high - first)]
    return b"".join(found)


async def blocks_of(place: Place, version: Version) -> AsyncIterator[tuple[int, bool | None]]:
    """All blocks of a version in one place, one after the other: where each begins in the object, and whether its bytes
    are those that were acknowledged, as far as anybody knows. None: they are not there.

    Raises:
        UnaskedError: at the first block that cannot be looked at.
    """
    for offset, body in bodies_of(version):
        for index in range(body.block_count):
            start = offset + index * BLOCK_BYTES
            try:
                views = await place.block(offset, body, index)
            except AbsentError:
                yield start, None
                continue
            expected, value = body.block_checksum(index), 0
            is_right = sum(map(len, views)) == body.block_size_bytes(index)
            if is_right and expected is not None:
                for view in views:
                    value = await asyncio.to_thread(block_checksum, view, value)
                is_right = value == expected
            yield start, is_right


def is_proved(version: Version) -> bool:
    """Whether checksums of all its bytes were kept."""
    return all(body.blocks or not body.size_bytes for _, body in bodies_of(version))
