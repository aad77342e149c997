"""Read-through: blocks that are missing in memory are fetched from the origin once, however many ask.

Askers in one process share a task per run of blocks; askers in other processes of the node find the claim in the
inventory and wait for the block to appear. A block is handed out only when it is whole and its checksum (where one was
proved) matches, so bytes that do not match never leave the node.
"""

import asyncio
import random
from collections.abc import AsyncIterator

from tiergate.engine.rooms import Rooms
from tiergate.errors import IntegrityError, MemoryFullError, OriginRefusedError, OriginTemporaryError
from tiergate.memory.memory import BlockReceiving, Pin
from tiergate.model import BLOCK_BYTES, Body, ObjectName
from tiergate.policy.backoff import delay_s
from tiergate.s3.checksums import block_checksum

BESIDE_COUNT = 16
"""Blocks that may pass through the heap at a time when memory has no room for them."""

FIRST_POLL_S = 0.002
LAST_POLL_S = 0.05


class ForeignVersionError(OriginRefusedError):
    """The origin holds another version than the one asked for: read the directory and the origin again."""


class Source:
    """Where one body's bytes lie in the origin: an object, the ETag it must still have, the body's offset in it."""

    __slots__ = ("body", "holder", "name", "offset_bytes", "origin_etag")

    def __init__(self, name: ObjectName, origin_etag: str, holder: str, body: Body, offset_bytes: int) -> None:
        self.name = name
        self.origin_etag = origin_etag
        self.holder = holder
        self.body = body
        self.offset_bytes = offset_bytes


class Fills:
    """The fills of this process. Owns their tasks; `close` ends them."""

    def __init__(self, rooms: Rooms) -> None:
        self._rooms = rooms
        self._running: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._random = random.Random()
        self._direct = asyncio.Semaphore(BESIDE_COUNT)

    async def close(self) -> None:
        """Cancel all fills and wait for their ends."""
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def prefetch(self, source: Source, first: int, count: int) -> None:
        """Start fetching up to `count` blocks from `first` on; failures show when somebody asks for the block."""
        for index in range(first, min(first + count, source.body.block_count)):
            try:
                self._start(source, index)
            except MemoryFullError:
                return  # Reading ahead is a favour; the block is fetched when it is asked for.

    async def block(self, source: Source, index: int) -> "Pin | bytes":
        """Block `index`: a pin on it in memory (the caller releases it), or its bytes where memory has no room.

        Raises:
            ForeignVersionError: the origin holds another version now.
            OriginTemporaryError, OriginExhaustedError, OriginRefusedError: as the origin client.
            IntegrityError: the origin's bytes are not those that were acknowledged.
        """
        poll_s, attempt = FIRST_POLL_S, 0
        if (source.body.uid, index) in self._running:
            self._rooms.metrics.shared_fills.inc()
        while True:
            pin = self._rooms.memory.pin(source.body.uid)
            if pin is not None:
                if pin.block(index) is not None:
                    return pin
                pin.release()
            try:
                task = self._start(source, index)
                if task is not None:
                    await asyncio.shield(task)
                    continue
            except MemoryFullError:
                return await self._fetch_beside(source, index)
            except OriginTemporaryError:
                # The client retries what fails before the first byte; a body that breaks off is begun again here.
                attempt += 1
                if attempt >= self._rooms.settings.origin_attempts_count:
                    raise
                await self._rooms.clock.sleep(delay_s(attempt, self._random, FIRST_POLL_S, 1.0))
                continue
            # Another process of this node fetches it, or died doing so.
            await self._rooms.clock.sleep(poll_s)
            if poll_s >= LAST_POLL_S:
                self._rooms.metrics.reaped_pins.inc(self._rooms.memory.reap())
            poll_s = min(poll_s * 2, LAST_POLL_S)

    def _start(self, source: Source, index: int) -> asyncio.Task[None] | None:
        """The running fetch of a block, begun if need be; None if another process has it."""
        key = (source.body.uid, index)
        task = self._running.get(key)
        if task is not None:
            return task
        receiving = self._rooms.memory.receive_block(source.body, index, source.holder)
        if receiving is None:
            return None
        task = asyncio.create_task(self._fetch_into(source, index, receiving))
        self._running[key] = task

        def ended(done: asyncio.Task[None]) -> None:
            del self._running[key]
            if not done.cancelled():
                done.exception()  # Whoever awaited it has it; a prefetch that nobody awaited is asked again.

        task.add_done_callback(ended)
        return task

    async def _fetch_into(self, source: Source, index: int, receiving: BlockReceiving) -> None:
        try:
            async for data in self._read(source, index):
                receiving.write(data)
            receiving.seal()
        except IntegrityError:
            self._rooms.metrics.integrity_failures.inc(1, "origin")
            raise
        except BaseException:
            receiving.abort()
            raise
        self._rooms.metrics.fills.inc()
        self._rooms.metrics.filled_bytes.inc(source.body.block_size_bytes(index))

    async def _fetch_beside(self, source: Source, index: int) -> bytes:
        """Without room in memory, a block passes through the heap; how many at once is bounded."""
        async with self._direct:
            data = b"".join([piece async for piece in self._read(source, index)])
        expected = source.body.block_checksum(index)
        if expected is not None and block_checksum(data) != expected:
            self._rooms.metrics.integrity_failures.inc(1, "origin")
            raise IntegrityError("the origin's bytes differ from those acknowledged", key=source.name.key)
        return data

    async def _read(self, source: Source, index: int) -> AsyncIterator[bytes]:
        """One block's bytes from the origin, exactly as long as the block."""
        size = source.body.block_size_bytes(index)
        start = source.offset_bytes + index * BLOCK_BYTES
        try:
            async with self._rooms.origin.get_object(source.name, start, start + size, source.origin_etag) as (
                _,
                pieces,
            ):
                async for data in pieces:
                    yield data
        except OriginRefusedError as refused:
            if refused.status in (404, 412, 416):
                raise ForeignVersionError(refused.status, refused.code) from refused
            raise
