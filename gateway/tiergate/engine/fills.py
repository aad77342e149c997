"""Read-through: blocks that are missing in memory are fetched from a peer or the origin once, however many ask.

Askers in one process share a task per block; askers in other processes of the node find the claim in the
inventory and wait for the block to appear. A block is handed out only when it is whole and its checksum (where one was
proved) matches, so bytes that do not match never leave the node.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Iterable

from tiergate.engine.rooms import Rooms
from tiergate.errors import (
    IntegrityError,
    MemoryFullError,
    OriginRefusedError,
    OriginTemporaryError,
    PeerError,
    TiergateError,
)
from tiergate.memory.memory import BlockReceiving, Pin
from tiergate.model import BLOCK_BYTES, Body, Holder, ObjectName
from tiergate.observe.logs import get_logger
from tiergate.policy.backoff import delay_s
from tiergate.s3.checksums import block_checksum

BESIDE_COUNT = 16
"""Blocks that may pass through the heap at a time when memory has no room for them."""

FIRST_POLL_S = 0.002
LAST_POLL_S = 0.05

log = get_logger(__name__)


class ForeignVersionError(OriginRefusedError):
    """The origin holds another version than the one asked for: read the directory and the origin again."""


class VanishedError(TiergateError):
    """Bytes that only memory had are not there, nor with any peer that can be asked."""


class PeerFailedError(PeerError):
    """A peer did not give a block as it was acknowledged: ask another."""

    def __init__(self, peer: Holder) -> None:
        super().__init__("a peer did not give a block", node=peer.node)
        self.peer = peer


class Route:
    """Where one reader finds what this node's memory has not: peers, nearest first, then the origin. A peer that failed
    is not asked again by that reader. `origin_etag`: what the origin must have; None where it has not got the bytes."""

    __slots__ = ("_peers", "origin_etag")

    def __init__(self, peers: Iterable[Holder], origin_etag: str | None) -> None:
        self._peers = list(peers)
        self.origin_etag = origin_etag

    @property
    def peer(self) -> Holder | None:
        """The peer to ask next."""
        return self._peers[0] if self._peers else None

    @property
    def tier(self) -> str:
        """What the next block comes from."""
        return "peer" if self._peers else "origin"

    @property
    def is_spent(self) -> bool:
        """Whether nobody is left to ask."""
        return not self._peers and self.origin_etag is None

    def give_up(self, peer: Holder) -> None:
        """Ask this one no more."""
        if peer in self._peers:
            self._peers.remove(peer)


class Source:
    """Where one body's bytes lie: on a route, and there in an object, from the body's offset in it on."""

    __slots__ = ("body", "holder", "name", "offset_bytes", "route")

    def __init__(self, name: ObjectName, route: Route, holder: str, body: Body, offset_bytes: int) -> None:
        self.name = name
        self.route = route
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
            except (MemoryFullError, VanishedError):
                return  # Reading ahead is a favour; the block is fetched when it is asked for.

    async def peers_block(self, source: Source, index: int) -> "Pin | bytes | None":
        """As `block`, but None where the origin would have to be asked, or nobody is left."""
        while source.route.peer is not None:
            try:
                return await self._block(source, index)
            except PeerFailedError as failed:
                source.route.give_up(failed.peer)
            except VanishedError:
                return None
        return None

    async def block(self, source: Source, index: int) -> "Pin | bytes":
        """Block `index`: a pin on it in memory (the caller releases it), or its bytes where memory has no room.

        Raises:
            VanishedError: nobody on the route has it.
            ForeignVersionError: the origin holds another version now.
            OriginTemporaryError, OriginExhaustedError, OriginRefusedError: as the origin client.
            IntegrityError: the origin's bytes are not those that were acknowledged.
        """
        while True:
            try:
                return await self._block(source, index)
            except PeerFailedError as failed:
                source.route.give_up(failed.peer)

    async def _block(self, source: Source, index: int) -> "Pin | bytes":
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
        if source.route.is_spent:
            raise VanishedError("nobody has a block", body=source.body.uid, block=index)
        receiving = self._rooms.memory.receive_block(source.body, index, source.holder)
        if receiving is None:
            return None
        task = asyncio.create_task(self._fetch_into(source, index, source.route.peer, receiving))
        self._running[key] = task

        def ended(done: asyncio.Task[None]) -> None:
            del self._running[key]
            if not done.cancelled():
                done.exception()  # Whoever awaited it has it; a prefetch that nobody awaited is asked again.

        task.add_done_callback(ended)
        return task

    async def _fetch_into(self, source: Source, index: int, peer: Holder | None, receiving: BlockReceiving) -> None:
        try:
            async for data in self._read(source, index, peer):
                receiving.write(data)
            receiving.seal()
        except (PeerError, IntegrityError) as error:
            receiving.abort()
            self._count(peer, error)
            if peer is None:
                raise
            raise self._given_up(source, index, peer, error) from error
        except BaseException:  # Cancelled too: another reader must be able to claim the block.
            receiving.abort()
            raise
        metrics, size_bytes = self._rooms.metrics, source.body.block_size_bytes(index)
        (metrics.fills if peer is None else metrics.peer_fills).inc()
        (metrics.filled_bytes if peer is None else metrics.peer_filled_bytes).inc(size_bytes)

    async def _fetch_beside(self, source: Source, index: int) -> bytes:
        """Without room in memory, a block passes through the heap; how many at once is bounded."""
        peer = source.route.peer
        if source.route.is_spent:
            raise VanishedError("nobody has a block", body=source.body.uid, block=index)
        try:
            async with self._direct:
                data = b"".join([piece async for piece in self._read(source, index, peer)])
            expected = source.body.block_checksum(index)
            if len(data) != source.body.block_size_bytes(index):
                raise IntegrityError("a block is shorter than what was acknowledged", key=source.name.key)
            if expected is not None and block_checksum(data) != expected:
                raise IntegrityError("a block's bytes differ from those acknowledged", key=source.name.key)
        except (PeerError, IntegrityError) as error:
            self._count(peer, error)
            if peer is None:
                raise
            raise self._given_up(source, index, peer, error) from error
        return data

    def _count(self, peer: Holder | None, error: TiergateError) -> None:
        is_corrupt = isinstance(error, IntegrityError)
        if is_corrupt:
            self._rooms.metrics.integrity_failures.inc(1, "origin" if peer is None else "peer")
        if peer is not None:
            self._rooms.metrics.read_peer_failures.inc(1, "corrupt" if is_corrupt else "silent")

    def _given_up(self, source: Source, index: int, peer: Holder, error: TiergateError) -> PeerFailedError:
        source.route.give_up(peer)
        log.warning("a peer failed a read", error=error, node=peer.node, body=source.body.uid, block=index)
        return PeerFailedError(peer)

    async def _read(self, source: Source, index: int, peer: Holder | None) -> AsyncIterator[bytes]:
        """One block's bytes, never more than the block has."""
        if peer is None:
            async for data in self._read_origin(source, index):
                yield data
            return
        left_bytes = source.body.block_size_bytes(index)
        async for data in self._rooms.replication.read(peer, source.body, index):
            left_bytes -= len(data)
            if left_bytes < 0:
                raise PeerError("a peer sent more than the block", node=peer.node)
            yield data

    async def _read_origin(self, source: Source, index: int) -> AsyncIterator[bytes]:
        size = source.body.block_size_bytes(index)
        start = source.offset_bytes + index * BLOCK_BYTES
        origin, etag = self._rooms.origin, source.route.origin_etag
        try:
            async with origin.get_object(source.name, start, start + size, etag) as (_, pieces):
                async for data in pieces:
                    yield data
        except OriginRefusedError as refused:
            if refused.status in (404, 412, 416):
                raise ForeignVersionError(refused.status, refused.code) from refused
            raise
