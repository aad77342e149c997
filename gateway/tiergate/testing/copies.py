"""Nodes of a cluster in one process: real memories that keep each other's copies, and fail when told to.

`Peers.of(node)` is what the engine of a node gets as its replication. Nothing goes over a network; what a peer does is
done at once, after the caller has been suspended, so that a test can cancel it there. `HoldersDirectory` is the
embedded directory with what only a cluster's has: who holds a version, and commits whose outcome is lost.
"""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar

import lmdb

from tiergate.clock import Clock
from tiergate.directory.base import Committed, Intent, Seen
from tiergate.directory.embedded import EmbeddedDirectory
from tiergate.directory.rows import LmdbRows
from tiergate.errors import (
    DirectoryUnavailableError,
    HolderLostError,
    MembershipOverError,
    MemoryFullError,
    OutcomeUnknownError,
    PeerError,
    TooFewCopiesError,
)
from tiergate.memory.memory import Memory, Pin, Receiving
from tiergate.model import Body, Holder, ObjectName, Part, Version
from tiergate.replication.base import Copies, Notice

COMMIT_S = 30.0

PIECE_BYTES = 1 << 14

T = TypeVar("T")


class Peers:
    """The nodes by name, and what is wrong with them. `epochs`: those that live. What a node does for others a process
    of its own does; `close` ends these."""

    def __init__(self, clock: Clock, memories: Mapping[str, Memory]) -> None:
        self.clock = clock
        self.own = dict(memories)
        self.memories = {name: memory.share() for name, memory in memories.items()}
        self.epochs = {name: number for number, name in enumerate(memories, 1)}
        self.shunned: set[str] = set()
        """Nodes that failed a moment ago."""
        self.full: set[str] = set()
        """These take no body."""
        self.corrupt: set[str] = set()
        """These change a byte of what they give or take."""
        self.dies_after: dict[str, int] = {}
        """These die once they have given or taken so many bytes more."""
        self.commit_s = COMMIT_S
        """How long copies are promised for."""
        self.notices: list[tuple[Holder, Notice]] = []

    def close(self) -> None:
        """Let go of the memories."""
        for memory in self.memories.values():
            memory.close()

    def of(self, node: str) -> "PeersReplication":
        """What the engine of a node gets."""
        return PeersReplication(self, node)

    def holder(self, node: str) -> Holder:
        """A living node as a holder."""
        return Holder(node, self.epochs[node])

    def kill(self, node: str) -> None:
        """The node is gone, with what it held."""
        self.epochs.pop(node, None)

    def begin_anew(self, node: str) -> None:
        """The node is a member under another epoch."""
        self.epochs[node] = 1 + max(self.epochs.values(), default=0) + self.epochs.get(node, 0)

    def lives(self, holder: Holder) -> bool:
        """Whether the node is a member still, of that epoch."""
        return self.epochs.get(holder.node) == holder.epoch

    def order(self, holder: str) -> list[str]:
        """The living nodes, those first that a holder's bytes have their place on."""
        return sorted(self.epochs, key=lambda node: hashlib.blake2b(f"{holder}\0{node}".encode()).digest())

    def passed(self, node: str, size_bytes: int) -> None:
        """A node gave or took so many bytes.

        Raises:
            PeerError: that was too much for it.
        """
        if node in self.dies_after:
            self.dies_after[node] -= size_bytes
            if self.dies_after[node] < 0:
                self.kill(node)
        if node not in self.epochs:
            raise PeerError("dead", node=node)


class PeersCopying:
    """Implements `tiergate.replication.base.Copying`."""

    def __init__(self, replication: "PeersReplication", holder: str, body_uid: str, size_bytes: int | None) -> None:
        self._replication = replication
        self._peers = replication.peers
        self._holder = holder
        self._body_uid = body_uid
        self._size_bytes = size_bytes
        self._receiving: dict[str, Receiving] = {}
        self._wanted_count = 1

    def start(self, copies_count: int) -> None:
        """Reserve room on as many others as are wanted, where there is any."""
        self._wanted_count = copies_count
        for node in self._replication.others(self._holder):
            if len(self._receiving) < copies_count - 1 and node not in self._peers.full:
                self._receiving[node] = self._receive(node)

    def _receive(self, node: str) -> Receiving:
        memory = self._peers.memories[node]
        if self._size_bytes is None:
            return memory.receive_unsized(self._body_uid, self._holder, 1 << 30)
        return memory.receive(self._body_uid, self._size_bytes, self._holder)

    async def write(self, piece: bytes | memoryview) -> None:
        await asyncio.sleep(0)
        for node, receiving in list(self._receiving.items()):
            data = bytearray(piece)
            if node in self._peers.corrupt and data:
                data[0] ^= 1
            try:
                self._peers.passed(node, len(data))
                receiving.write(bytes(data))
            except (PeerError, MemoryFullError):
                self._receiving.pop(node).abort()

    async def seal(self, body: Body) -> Copies:
        await asyncio.sleep(0)
        for node, receiving in list(self._receiving.items()):
            if node not in self._peers.epochs or receiving.seal() != body:
                self._receiving.pop(node).abort()
        holders = [self._replication.required, *(self._peers.holder(node) for node in self._receiving)]
        copies = Copies(tuple(holders), self._peers.clock.monotonic_s() + self._peers.commit_s)
        if copies.count >= self._wanted_count:
            return copies
        at = {body.uid: copies.holders}
        return await self._replication.spread(ObjectName("", ""), self._holder, [body], self._wanted_count, at)

    async def abort(self) -> None:
        await asyncio.sleep(0)
        while self._receiving:
            _, receiving = self._receiving.popitem()
            receiving.abort()
            await asyncio.sleep(0)
        for node in self._replication.others(self._holder):
            self._peers.memories[node].drop(self._holder, [self._body_uid])


class PeersReplication:
    """Implements `tiergate.replication.base.Replication` for one node."""

    def __init__(self, peers: Peers, node: str) -> None:
        self.peers = peers
        self._node = node
        self.spread_count = 0
        """How often bodies were spread."""

    @property
    def me(self) -> Holder | None:
        return self.required

    @property
    def required(self) -> Holder:
        """This node's membership.

        Raises:
            MembershipOverError: it is over.
        """
        if self._node not in self.peers.epochs:
            raise MembershipOverError("no member", node=self._node)
        return self.peers.holder(self._node)

    def others(self, holder: str) -> list[str]:
        """The other living nodes, best first."""
        return [node for node in self.peers.order(holder) if node != self._node]

    def rule(self, asked_count: int | None) -> int:
        return asked_count or min(2, len(self.peers.epochs))

    def can_reach(self, copies_count: int) -> bool:
        return copies_count <= len(self.peers.epochs)

    def is_ready(self, copies_count: int) -> bool:
        return copies_count <= len(self.peers.epochs.keys() - self.peers.shunned)

    def begin(
        self, name: ObjectName, holder: str, body_uid: str, size_bytes: int | None, copies_count: int
    ) -> PeersCopying:
        copying = PeersCopying(self, holder, body_uid, size_bytes)
        copying.start(copies_count)
        return copying

    async def spread(
        self,
        name: ObjectName,
        holder: str,
        bodies: Sequence[Body],
        copies_count: int,
        at: Mapping[str, Sequence[Holder]],
    ) -> Copies:
        self.spread_count += 1
        until_s = self.peers.clock.monotonic_s() + self.peers.commit_s
        holders: list[Holder] = []
        for node in [self._node, *self.others(holder)]:
            if len(holders) == copies_count:
                break
            try:
                for body in bodies:
                    await self._bring(node, holder, body, at.get(body.uid, ()))
            except PeerError:
                continue
            holders.append(self.peers.holder(node))
        if len(holders) < copies_count:
            raise TooFewCopiesError("too few nodes could take a copy", holders=len(holders))
        return Copies(tuple(holders), until_s)

    async def _bring(self, node: str, holder: str, body: Body, at: Sequence[Holder]) -> None:
        """Have a body whole on a node."""
        await asyncio.sleep(0)
        memory = self.peers.own[node] if node == self._node else self.peers.memories[node]
        if node != self._node and node in self.peers.full | self.peers.corrupt:
            raise PeerError("full, or not to be trusted", node=node)
        if not body.size_bytes or memory.hold_all([body.uid], holder, dirty=True):
            return
        for source in [self._node, *(each.node for each in at if self.peers.lives(each))]:
            given = self.peers.memories[source]
            if source != node and given.holds_whole(body):
                for index in range(body.block_count):
                    receiving = memory.receive_block(body, index, holder)
                    with _pinned(given, body) as pin:
                        for view in pin.block(index) or ():
                            for each in {source, node} - {self._node}:
                                self.peers.passed(each, len(view))
                            if receiving is not None:
                                receiving.write(view)
                    if receiving is not None:
                        receiving.seal()
                    await asyncio.sleep(0)
                if memory.hold_all([body.uid], holder, dirty=True):
                    return
        raise PeerError("a body is nowhere", body=body.uid)

    def sources(self, holders: Iterable[Holder]) -> list[Holder]:
        return sorted(each for each in holders if self.peers.lives(each) and each.node != self._node)

    async def read(self, source: Holder, body: Body, index: int) -> AsyncIterator[bytes]:
        await asyncio.sleep(0)
        if not self.peers.lives(source):
            raise PeerError("dead", node=source.node)
        with _pinned(self.peers.memories[source.node], body) as pin:
            for view in pin.block(index) or ():
                for start in range(0, len(view), PIECE_BYTES):
                    piece = bytearray(view[start : start + PIECE_BYTES])
                    self.peers.passed(source.node, len(piece))
                    if source.node in self.peers.corrupt:
                        piece[0] ^= 1
                    yield bytes(piece)
                    await asyncio.sleep(0)

    async def held(self, source: Holder, bodies: Sequence[Body]) -> set[str]:
        await asyncio.sleep(0)
        if not self.peers.lives(source):
            return set()
        memory = self.peers.memories[source.node]
        return {body.uid for body in bodies if memory.holds_whole(body)}

    async def have_dropped(self, source: Holder, holder: str, body_uids: Sequence[str]) -> None:
        if not self.peers.lives(source):
            raise PeerError("dead", node=source.node)
        self.peers.memories[source.node].drop(holder, body_uids)

    def notice(self, holders: Iterable[Holder], notices: Sequence[Notice]) -> None:
        self.peers.notices += [(holder, each) for holder in sorted(holders) for each in notices]

    async def close(self) -> None:
        pass


def _pinned(memory: Memory, body: Body) -> Pin:
    pin = memory.pin(body.uid)
    if pin is None:
        raise PeerError("not here", body=body.uid)
    return pin


class HoldersDirectory(EmbeddedDirectory):
    """See the module. `peers`, to be set after it is opened, says which nodes live."""

    peers: Peers
    is_away = False
    """Nothing is answered."""
    unanswered_count = 0
    lose_answer = False
    """The next commit happens, and its answer is lost."""
    lose_request = False
    """The next commit does not happen, and nobody hears of it."""
    commits_count = 0

    def __init__(self, environment: lmdb.Environment) -> None:
        super().__init__(environment)
        self.held: dict[str, frozenset[Holder]] = {}

    @contextmanager
    def _reading(self) -> Iterator[LmdbRows]:
        self._answers()
        with super()._reading() as rows:
            yield rows

    def _transact(self, transition: Callable[[LmdbRows], T]) -> T:
        self._answers()
        return super()._transact(transition)

    def _answers(self) -> None:
        if self.is_away:
            self.unanswered_count += 1
            raise DirectoryUnavailableError("away")

    async def get(self, name: ObjectName) -> Seen:
        await asyncio.sleep(0)
        seen = await super().get(name)
        return replace(seen, holders=dict(self.held), bucket=await super().get_bucket(name.bucket))

    async def survey(self, bucket: str, prefix: str, after: str, limit: int) -> list[Seen]:
        await asyncio.sleep(0)
        return [replace(each, holders=dict(self.held)) for each in await super().survey(bucket, prefix, after, limit)]

    async def _commit(self, holders: Iterable[Holder], change: Callable[[], Awaitable[T]]) -> T:
        await asyncio.sleep(0)
        self._answers()
        lost = [each for each in holders if not self.peers.lives(each)]
        if lost:
            raise HolderLostError("gone", node=lost[0].node)
        if self.lose_request:
            self.lose_request = False
            raise OutcomeUnknownError("no answer")
        result = await change()
        self.commits_count += 1
        await asyncio.sleep(0)  # It has happened, and the answer is on its way.
        if self.lose_answer:
            self.lose_answer = False
            raise OutcomeUnknownError("no answer")
        return result

    async def put(self, name: ObjectName, version: Version, intent: Intent) -> Committed:
        change = super().put
        return await self._commit(intent.holders, lambda: self._noted(version, intent, change(name, version, intent)))

    async def finish_upload(
        self, upload_id: str, version: Version, part_list: Sequence[tuple[int, str]], intent: Intent
    ) -> Committed:
        change = super().finish_upload
        return await self._commit(
            intent.holders,
            lambda: self._noted(version, intent, change(upload_id, version, part_list, intent)),
        )

    async def delete(self, name: ObjectName, intent: Intent) -> Committed | None:
        change = super().delete

        async def deleted() -> Committed | None:
            done = await change(name, intent)
            return self._held_by(done) if done is not None else None

        return await self._commit((), deleted)

    async def _noted(self, version: Version, intent: Intent, change: Awaitable[Committed]) -> Committed:
        committed = await change
        self.held[version.uid] = frozenset(intent.holders)
        return self._held_by(committed)

    def _held_by(self, committed: Committed) -> Committed:
        uid = committed.replaced.uid if committed.replaced is not None else ""
        return replace(committed, held_by=self.held.pop(uid, frozenset()))

    async def put_part(self, upload_id: str, part: Part) -> Part | None:
        change = super().put_part
        return await self._commit(part.at, lambda: change(upload_id, part))

    async def note_spill(self, upload_id: str, spill_id: str) -> str:
        change = super().note_spill
        return await self._commit((), lambda: change(upload_id, spill_id))

    async def abort_upload(self, upload_id: str) -> list[Part] | None:
        change = super().abort_upload
        return await self._commit((), lambda: change(upload_id))
