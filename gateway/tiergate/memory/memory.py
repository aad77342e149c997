"""The memory of this node as one process sees it.

Every change is one write transaction of a few microseconds (some more where the slabs grow); nothing
awaits inside. The objects are not thread-safe. Any process may die at any instruction: what it had sealed
and the directory knows stays, the rest is given back by `reap` and `reconcile`, which any process may call
at any time.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from tiergate.errors import invariant
from tiergate.memory.claims import Claims
from tiergate.memory.inventory import IndexFullError
from tiergate.memory.pins import Pin, Pins
from tiergate.memory.receiving import BlockReceiving, Receiving
from tiergate.memory.rows import (
    BodyRow,
    Counters,
    HolderRow,
    Level,
    Rank,
    aligned,
    name_bytes,
    owner_of,
    scan,
    split_pair,
    split_receiving,
)
from tiergate.memory.sharing import Sharing
from tiergate.memory.store import MemoryLimits, Store
from tiergate.model import Body

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from tiergate.clock import Clock
    from tiergate.memory.inventory import Inventory

__all__ = [
    "BlockReceiving",
    "BodyFound",
    "Level",
    "Mark",
    "Memory",
    "MemoryLimits",
    "MemoryStats",
    "Pin",
    "Rank",
    "Receiving",
]

CHUNK_COUNT = 64
"""Changes made in one transaction where a caller asks for many that do not depend on each other."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Mark:
    """A moment before the directory was read: the last transaction by then, and the processes dead by
    then."""

    sequence: int
    dead: frozenset[str]


@dataclass(frozen=True, slots=True)
class BodyFound:
    """What is in memory of a body. `is_whole`: all its blocks."""

    size_bytes: int
    is_whole: bool


@dataclass(frozen=True, slots=True)
class MemoryStats:
    """`slab_bytes` are grown, of them `used_bytes` hold bodies: dirty, being received, or clean.
    `reserved_bytes` are promised to bodies being received. `evictable_bytes` is the part of clean that
    nobody reads."""

    budget_bytes: int
    slab_bytes: int
    used_bytes: int
    dirty_bytes: int
    clean_bytes: int
    receiving_bytes: int
    reserved_bytes: int
    evictable_bytes: int
    pinned_bytes: int
    bodies: int
    evictions: int
    index_used_bytes: int
    index_bytes: int
    spare_bytes: int

    @property
    def room_bytes(self) -> int:
        """What bodies may take in all."""
        return self.budget_bytes - self.index_bytes - self.spare_bytes

    @property
    def available_bytes(self) -> int:
        """What a new body could get now: room never used yet, free, or taken by bodies that may be
        evicted."""
        return max(0, self.room_bytes - self.used_bytes - self.reserved_bytes + self.evictable_bytes)


class Memory:
    """See the module. Made by `open`, once a process."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._claims = Claims()
        self._pins = Pins(store)
        self.sharing = Sharing(store, self._claims)
        """What processes outside of this node's own receive and read."""
        self._owns_environment = False

    @classmethod
    def open(cls, folder: Path, limits: MemoryLimits, clock: Clock) -> Memory:
        """Open the memory folder (made if new) in this process. Never carry it over a fork.

        Raises:
            ConfigError: the folder cannot be written, has no room for the index, is of another layout, or
                holds more than the budget.
        """
        memory = cls(Store.prepare(folder, limits, clock))
        memory._owns_environment = True
        return memory

    def share(self) -> Memory:
        """A second memory on the same folder as if of another process (its own lease), for tests and
        tools."""
        return Memory(self._store.share())

    def close(self) -> None:
        """Let go of everything; open receptions and pins are reaped by whoever comes next."""
        self._store.close()
        if self._owns_environment:
            self._store.environment.close()

    def watch_evictions(self, on_evicted: Callable[[int, int], None]) -> None:
        """Call `on_evicted(bodies, size_bytes)` after each change of this process that evicted some."""
        self._store.on_evicted = on_evicted

    @property
    def store(self) -> Store:
        """The files underneath, for `audit`."""
        return self._store

    @property
    def token(self) -> str:
        """Names this process to the others of the node for as long as it lives."""
        return self._store.lease.token

    def is_alive(self, token: str) -> bool:
        """Whether the process of that name still lives."""
        return self._store.is_alive(token)

    # -- receiving

    def receive(self, body_uid: str, size_bytes: int, holder: str, group: int | None = None) -> Receiving:
        """Begin to receive a body of a known length; room for all of it is promised (clean bodies are
        evicted, those of sets by their rank and others least recently used first, if it must be). `body_uid`
        is fresh. The caller seals or aborts. `group`: of the set that it is to belong to, with which it is
        evicted until `rank` says otherwise.

        Raises:
            MemoryFullError: there is no room; nothing was reserved or evicted.
        """
        name_bytes(body_uid)
        name_bytes(holder)
        return Receiving(self._store, self._claims, body_uid, size_bytes, holder, sized=True, group=group)

    def receive_unsized(self, body_uid: str, holder: str, limit_bytes: int, group: int | None = None) -> Receiving:
        """Like `receive` for a body whose length nobody declared: it takes room block by block, so its
        `write` raises MemoryFullError when there is none, or when it passes `limit_bytes`."""
        name_bytes(body_uid)
        name_bytes(holder)
        return Receiving(self._store, self._claims, body_uid, limit_bytes, holder, sized=False, group=group)

    def receive_block(self, body: Body, index: int, holder: str) -> BlockReceiving | None:
        """Begin to fill block `index` of a body from elsewhere; None if it is present, or somebody on this
        node is receiving it already. Other bodies may be evicted, never this one. The caller seals or aborts.

        Raises:
            MemoryFullError: there is no room.
        """
        invariant(0 <= index < body.block_count, "no such block", uid=body.uid, index=index)
        uid, charge = name_bytes(body.uid), aligned(body.block_size_bytes(index))
        name_bytes(holder)
        extents = self._store.change_with_room(
            lambda inventory: inventory.begin_fill(uid, body.size_bytes, index, charge)
        )
        return None if extents is None else BlockReceiving(self._store, body, index, holder, extents)

    def confirm(self, holder: str, body_uids: Sequence[str] | None = None) -> None:
        """The directory knows `holder` now (None: of all its bodies that this process sealed): end the
        claims, so that the holder lives and dies with what the directory says."""
        known = sorted(self._claims.of(holder) if body_uids is None else body_uids)
        name = name_bytes(holder)
        self._each(known, lambda inventory, body_uid: inventory.confirm(name_bytes(body_uid), name))
        for body_uid in known:
            self._claims.remove(holder, body_uid)

    # -- reading

    def pin(self, body_uid: str) -> Pin | None:
        """Pin what is in memory of a body, None if nothing is. The caller releases the pin; it dies with
        the process.

        While pinned, present blocks are neither evicted nor recycled, even if the last holder drops the body.
        """
        return self._pins.pin(body_uid)

    def holds_whole(self, body: Body) -> bool:
        """Whether every block of the body is in memory now. Without a pin it may be evicted the next
        moment."""
        if body.size_bytes == 0:
            return True
        with self._store.read() as txn:
            value = txn.get(body.uid.encode(), db=self._store.tables.bodies)
        if value is None:
            return False
        row = BodyRow.unpack(value)
        return not row.receiving and row.present == body.block_count

    def is_known(self, body_uid: str) -> bool:
        """Whether there is anything of the body here, be it only somebody who is receiving it."""
        with self._store.read() as txn:
            return txn.get(body_uid.encode(), db=self._store.tables.bodies) is not None

    def is_pinned(self, body_uid: str) -> bool:
        """Whether somebody on this node reads the body now."""
        with self._store.read() as txn:
            return any(True for _ in scan(txn, self._store.tables.pins, body_uid.encode() + b"\0"))

    # -- holders

    def hold(self, body_uid: str, holder: str, dirty: bool) -> bool:
        """See `hold_all`, for one body."""
        return self.hold_all([body_uid], holder, dirty)

    def hold_all(self, body_uids: Sequence[str], holder: str, dirty: bool) -> bool:
        """Add a holder to bodies that are whole in memory (a copy shares the bytes), or turn it dirty
        again. A new holder is claimed by this process until `confirm`. False if one of them is not whole:
        nothing was done."""
        names = [(body_uid, name_bytes(body_uid)) for body_uid in body_uids]
        name = name_bytes(holder)

        def change(inventory: Inventory) -> list[str]:
            fresh = []
            for body_uid, uid in names:
                is_new = inventory.hold(uid, name, dirty)
                if is_new is None:
                    raise _NotWholeError
                if is_new:
                    fresh.append(body_uid)
            return fresh

        try:
            fresh = self._store.change(change)
        except _NotWholeError:
            return False
        for body_uid in fresh:
            self._claims.add(holder, body_uid)
        return True

    def clean(self, holder: str, body_uids: Sequence[str]) -> None:
        """The origin has the holder's bytes: they may be evicted from now on, once all other holders are
        clean too."""
        name = name_bytes(holder)
        self._each(body_uids, lambda inventory, body_uid: inventory.clean(name_bytes(body_uid), name))

    def drop(self, holder: str, body_uids: Sequence[str]) -> None:
        """The holder lets go. A body without a holder is freed at once, or when its last pin goes."""
        name = name_bytes(holder)
        self._each(body_uids, lambda inventory, body_uid: inventory.drop(name_bytes(body_uid), name))
        for body_uid in body_uids:
            self._claims.remove(holder, body_uid)

    # -- sets

    def found(self, body_uids: Sequence[str]) -> dict[str, BodyFound]:
        """What is here of bodies, those that are not being received as a whole."""
        with self._store.read() as txn:
            values = [(body_uid, txn.get(body_uid.encode(), db=self._store.tables.bodies)) for body_uid in body_uids]
        rows = {body_uid: BodyRow.unpack(value) for body_uid, value in values if value is not None}
        return {
            body_uid: BodyFound(row.allocated_bytes, row.present == Body("", row.size_bytes).block_count)
            for body_uid, row in rows.items()
            if not row.receiving
        }

    def rank(self, ranks: Mapping[str, Rank], judged_s: float) -> None:
        """Say with which sets bodies are evicted: of all that are here, just these have a rank from now on, and what
        came in for a set after `judged_s`, by the monotonic clock."""
        with self._store.read() as txn:
            before = {key.decode(): bytes(value) for key, value in scan(txn, self._store.tables.ranks, b"")}
        judged_us = int(judged_s * 1e6)
        changes: list[tuple[str, Rank | None]] = [(uid, None) for uid in before if uid not in ranks]
        changes += [(uid, rank) for uid, rank in ranks.items() if before.get(uid) != rank.pack()]
        self._each(changes, lambda inventory, change: inventory.rank(name_bytes(change[0]), change[1], judged_us))

    def evict_going(self) -> bool:
        """Go on a little with the eviction of a set that has begun; False if there is none."""
        return self._store.change(lambda inventory: inventory.evict_going())

    # -- recovery and upkeep

    def reap(self) -> int:
        """Give back what dead processes were receiving, filling and reading; how many pins there were."""
        tables = self._store.tables
        with self._store.read() as txn:
            receptions = [key for key, _ in scan(txn, tables.receivings, b"")]
            pins = [key for key, _ in scan(txn, tables.pins, b"")]
        tokens = {split_receiving(key)[0] for key in receptions} | {owner_of(split_pair(key)[1]) for key in pins}
        dead = {token for token in tokens if not self._store.is_alive(token.decode())}
        self._each(
            [key for key in receptions if split_receiving(key)[0] in dead],
            lambda inventory, key: inventory.reap_reception(key),
        )
        left = [key for key in pins if owner_of(split_pair(key)[1]) in dead]
        self._each(left, lambda inventory, key: inventory.reap_pin(key))
        self._store.environment.reader_check()
        self._store.sweep_leases()
        return len(left)

    def mark(self) -> Mark:
        """Take this before asking the directory for its live holders, and hand both to `reconcile`."""
        sequence = self._store.environment.info()["last_txnid"]
        tokens = {row.claim for _, _, row in self._holders() if row.claim}
        return Mark(sequence, frozenset(token for token in tokens if not self._store.is_alive(token)))

    def reconcile(self, live_holders: set[str], mark: Mark, *, keep_clean: bool = False) -> int:
        """Drop the holders that the directory does not know (`keep_clean`: of those only who may not be evicted
        anyway), then `reap`; returns what that does.

        `live_holders` was read from the directory after `mark` was taken. A holder that came to be, or was
        confirmed, after the mark is left alone, and so is one that a process vouches for which lived at
        the mark: the directory may have learnt of it since it was read.
        """

        def settle(inventory: Inventory, seen: tuple[bytes, bytes, HolderRow]) -> None:
            uid, holder, row = seen
            if inventory.holder_row(uid, holder) != row:
                return
            if holder.decode() in live_holders:
                inventory.confirm(uid, holder)
            else:
                inventory.drop(uid, holder)

        unsettled = self._unsettled(live_holders, mark)
        if keep_clean:
            unsettled = [seen for seen in unsettled if seen[2].dirty or seen[1].decode() in live_holders]
        self._each(unsettled, settle)
        return self.reap()

    def _unsettled(self, live_holders: set[str], mark: Mark) -> list[tuple[bytes, bytes, HolderRow]]:
        """Holders that `reconcile` must change: unknown ones, and known ones whose claimant died."""
        found: list[tuple[bytes, bytes, HolderRow]] = []
        for uid, holder, row in self._holders():
            if row.since > mark.sequence or (row.claim and row.claim not in mark.dead):
                continue
            if row.claim or holder.decode() not in live_holders:
                found.append((uid, holder, row))
        return found

    def settle_holders(self, owed: set[str], mark: Mark) -> None:
        """Let bytes be evicted that the origin has: those of holders that are dirty here, are not in `owed` (read from
        the directory after `mark` was taken) and did not change since."""
        stale: list[tuple[bytes, bytes, HolderRow]] = []
        for uid, holder, row in self._holders():
            is_old = row.dirty and not row.claim and row.since <= mark.sequence
            if is_old and holder.decode() not in owed:
                stale.append((uid, holder, row))

        def settle(inventory: Inventory, seen: tuple[bytes, bytes, HolderRow]) -> None:
            uid, holder, row = seen
            if inventory.holder_row(uid, holder) == row:
                inventory.clean(uid, holder)

        self._each(stale, settle)

    def dirty_holders(self) -> set[str]:
        """Who holds bytes here that may not be evicted."""
        return {holder.decode() for _, holder, row in self._holders() if row.dirty}

    def _holders(self) -> Iterator[tuple[bytes, bytes, HolderRow]]:
        """All holders as of now: body, holder, row. Copied first: what a transaction sees cannot be used again."""
        with self._store.read() as txn:
            found = list(scan(txn, self._store.tables.holders, b""))
        for key, value in found:
            uid, holder = split_pair(key)
            yield uid, holder, HolderRow.unpack(value)

    def stats(self) -> MemoryStats:
        """The node's memory at one moment."""
        tables, limits = self._store.tables, self._store.limits
        with self._store.read() as txn:
            counters = Counters.load(txn, tables)
            pinned = {split_pair(key)[0] for key, _ in scan(txn, tables.pins, b"")}
            rows = [txn.get(uid, db=tables.bodies) for uid in pinned]
            bodies = txn.stat(tables.bodies)["entries"]
            index_used = tables.used_bytes(txn)
        return MemoryStats(
            budget_bytes=limits.budget_bytes,
            slab_bytes=counters.grown_bytes,
            used_bytes=counters.used_bytes,
            dirty_bytes=counters.dirty_bytes,
            clean_bytes=counters.used_bytes - counters.dirty_bytes - counters.receiving_bytes,
            receiving_bytes=counters.receiving_bytes,
            reserved_bytes=counters.reserved_bytes,
            evictable_bytes=counters.evictable_bytes,
            pinned_bytes=sum(BodyRow.unpack(row).allocated_bytes for row in rows if row is not None),
            bodies=bodies,
            evictions=counters.evictions,
            index_used_bytes=index_used,
            index_bytes=limits.budget_bytes - self._store.slab_budget,
            spare_bytes=limits.spare_bytes,
        )

    def _each(self, items: Sequence[T], change: Callable[[Inventory, T], None]) -> None:
        """Change many things, each on its own, some at a time in one transaction; fewer if the index is so
        full that copy-on-write has little room."""
        for start in range(0, len(items), CHUNK_COUNT):
            chunk = items[start : start + CHUNK_COUNT]
            try:
                self._store.change(partial(_change_all, items=chunk, change=change))
            except IndexFullError:
                if len(chunk) == 1:
                    raise
                for item in chunk:
                    self._each([item], change)


class _NotWholeError(Exception):
    """Ends a transaction that found a body which is not whole."""


def _change_all(inventory: Inventory, items: Sequence[T], change: Callable[[Inventory, T], None]) -> None:
    for item in items:
        change(inventory, item)
