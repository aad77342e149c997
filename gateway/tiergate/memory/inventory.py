"""What this node holds: every change of it is a method here, and runs inside one write transaction.

A body is freed when nobody holds, reads or receives it; it may be evicted when all who hold it are clean,
nobody reads or receives it, and its rank does not pin it. Both follow from its row and its rank alone, and `_close`
draws the conclusion after each change, so no method can forget to.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tiergate.errors import InvariantError, MemoryFullError, TiergateError, invariant
from tiergate.memory import allocator
from tiergate.memory.rows import (
    BLOCK_FILLING,
    BLOCK_SEALED,
    GOING_KEY,
    MAKING,
    RANK_BYTES,
    BodyRow,
    Counters,
    HolderRow,
    Level,
    Rank,
    aligned,
    block_index,
    block_key,
    grant_purpose,
    lru_key,
    needed,
    pack_block,
    pack_number,
    pair_key,
    receiving_key,
    scan,
    split_pair,
    split_receiving,
    unpack_block,
    unpack_number,
)
from tiergate.model import BLOCK_BYTES, Body

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tiergate.memory.rows import Extent, Table, Tables, Txn

INDEX_FILL_LIMIT = 0.5
"""Share of the index that rows may fill before bodies are evicted for its sake. The rest is for
copy-on-write: a page that is changed is written anew, and the old one is free again only two transactions
later."""

SET_WORK = 4096
"""Bodies and blocks of a set that are evicted in one transaction. The rest goes first in the next ones."""

INDEX_EVICTIONS = 16
"""Bodies evicted for each new one while the index is that full."""

BLOCK_ROW_BYTES = 128
"""About what a block takes of the index, with its share of half-full pages."""


class IndexFullError(MemoryFullError):
    """The inventory's rows have no room. A change of fewer rows may still have."""


class SlabsShortError(TiergateError):
    """The slabs should grow before this change; nothing of it was done. Never leaves the room."""


class Inventory:
    """The changes, over one write transaction. `growable_bytes` is how much the slabs may still grow; whole bodies
    leave `spare_bytes` to fills. All uids and holders are checked by `name_bytes`; `token` is the process that acts,
    `now_us` its monotonic clock."""

    def __init__(
        self, txn: Txn, tables: Tables, token: str, now_us: int, slab_budget: int, index_bytes: int, spare_bytes: int
    ) -> None:
        self._txn = txn
        self._tables = tables
        self._token = token
        self._token_bytes = token.encode()
        self._now_us = now_us
        self._index_bytes = index_bytes
        self._spare_bytes = spare_bytes
        self.counters = Counters.load(txn, tables)
        self.growable_bytes = max(0, slab_budget - self.counters.grown_bytes)
        self.evicted_bytes = 0

    def flush(self) -> None:
        """Write the counters; the last thing before the commit."""
        self.counters.store(self._txn, self._tables)

    # -- room

    def add_slab(self, offset: int, length: int) -> None:
        """Note that the slab file was grown by [offset, offset + length)."""
        invariant(offset == self.counters.grown_bytes, "slabs grow at their end", offset=offset)
        self.counters.grown_bytes += length
        allocator.release(self._txn, self._tables, offset, length)

    def _reserve(self, charge: int, spare_bytes: int = 0) -> None:
        """Promise `charge` bytes to a body, evicting if need be. Afterwards `spare_bytes` could be had as well.

        Raises:
            MemoryFullError: not even eviction makes the room.
        """
        counters = self.counters
        self._relieve_index(charge // BLOCK_BYTES * BLOCK_ROW_BYTES)
        short = charge + counters.reserved_bytes - counters.free_bytes - self.growable_bytes
        if short + spare_bytes > counters.evictable_bytes:
            raise MemoryFullError(
                "memory is full of bytes that may not be evicted", wanted_bytes=charge, short_bytes=short
            )
        while charge + counters.reserved_bytes > counters.free_bytes + self.growable_bytes:
            invariant(self._evict_oldest(), "less is evictable than was counted")
        counters.reserved_bytes += charge

    def _relieve_index(self, extra_bytes: int = 0) -> None:
        """Before rows are added for a new body or holder: see that the index keeps room for changes.

        Raises:
            IndexFullError: it does not, and nothing is evictable.
        """
        if self._tables.used_bytes(self._txn) + extra_bytes <= self._index_bytes * INDEX_FILL_LIMIT:
            return
        if not self._evict_oldest():
            raise IndexFullError("the index of the memory is full", index_bytes=self._index_bytes)
        for _ in range(INDEX_EVICTIONS - 1):
            self._evict_oldest()

    def _evict_oldest(self) -> bool:
        """Evict the body that is next, or the set; False if nothing may be."""
        if self.evict_going():
            return True
        first = self._first(self._tables.sets)
        if first is not None and first[0] != Level.FIRST:
            first = None if self._first(self._tables.lru) is not None else first
        if first is not None:
            self._txn.put(GOING_KEY, first[:RANK_BYTES], db=self._tables.state)
            return self.evict_going()
        oldest = self._first(self._tables.lru)
        if oldest is None:
            return False
        self._evict(oldest[8:])
        return True

    def _first(self, table: Table, prefix: bytes = b"") -> bytes | None:
        return next((key for key, _ in scan(self._txn, table, prefix)), None)

    def evict_going(self) -> bool:
        """Go on with the set whose eviction has begun; False if there is none."""
        rank = self._txn.get(GOING_KEY, db=self._tables.state)
        if rank is None:
            return False
        work = 0
        while work < SET_WORK and (key := self._first(self._tables.sets, rank)) is not None:
            work += 1 + self._evict(key[RANK_BYTES:])
        if self._first(self._tables.sets, rank) is None:
            self._txn.delete(GOING_KEY, db=self._tables.state)
        return work > 0

    def _evict(self, uid: bytes) -> int:
        """Evict a body; how many blocks of it were there."""
        row = self._opened(uid)
        for key in [key for key, _ in scan(self._txn, self._tables.holders, uid + b"\0")]:
            self._txn.delete(key, db=self._tables.holders)
        row.holders = 0
        self.counters.evictions += 1
        self.evicted_bytes += row.allocated_bytes
        self._close(uid, row)
        return row.present

    def _allocate(self, uid: bytes, row: BodyRow, index: int, flag: int, charge: int) -> list[Extent]:
        """Lay block `index` out over `charge` bytes that were reserved."""
        if self.growable_bytes and not allocator.has_run(self._txn, self._tables, charge):
            raise SlabsShortError()
        while charge > self.counters.free_bytes:
            # Others took the file system's room, so the slabs cannot become as large as was counted on.
            if not self._evict_oldest():
                raise MemoryFullError("the memory file system is full", wanted_bytes=charge)
        extents = allocator.allocate(self._txn, self._tables, charge)
        self._txn.put(block_key(uid, index), pack_block(flag, extents), db=self._tables.blocks)
        self.counters.used_bytes += charge
        self.counters.reserved_bytes -= charge
        row.allocated_bytes += charge
        return extents

    def _free_block(self, row: BodyRow, key: bytes, value: bytes) -> None:
        self._txn.delete(key, db=self._tables.blocks)
        for offset, length in unpack_block(value)[1]:
            allocator.release(self._txn, self._tables, offset, length)
            self.counters.used_bytes -= length
            row.allocated_bytes -= length

    # -- rows of bodies

    def _open(self, uid: bytes) -> BodyRow | None:
        """Take a body's row out of the sums and the eviction order, to change it; `_close` must follow."""
        value = self._txn.get(uid, db=self._tables.bodies)
        if value is None:
            return None
        row = BodyRow.unpack(value)
        self.counters.account(row, -1)
        if row.listed:
            rank = self._txn.get(uid, db=self._tables.ranks)
            if rank is None:
                self._txn.delete(lru_key(row.used_us, uid), db=self._tables.lru)
            else:
                self._txn.delete(rank + uid, db=self._tables.sets)
            row.listed = False
        return row

    def _opened(self, uid: bytes) -> BodyRow:
        row = self._open(uid)
        if row is None:
            raise InvariantError("a body's row is missing", uid=uid.decode())
        return row

    def _close(self, uid: bytes, row: BodyRow) -> None:
        """Put a changed row back, or free the body if nobody needs it any more."""
        if not row.is_needed:
            for key, value in list(scan(self._txn, self._tables.blocks, uid + b"\0")):
                self._free_block(row, key, value)
            invariant(row.allocated_bytes == 0, "a body's blocks are not what was counted", uid=uid.decode())
            self._txn.delete(uid, db=self._tables.bodies)
            self._txn.delete(uid, db=self._tables.ranks)
            return
        if row.is_evictable:
            rank = self._txn.get(uid, db=self._tables.ranks)
            if rank is None:
                row.listed = True
                self._txn.put(lru_key(row.used_us, uid), b"", db=self._tables.lru)
            elif rank[0] != Level.PINNED:
                row.listed = True
                self._txn.put(rank + uid, b"", db=self._tables.sets)
        self.counters.account(row, 1)
        self._txn.put(uid, row.pack(), db=self._tables.bodies)

    # -- receiving whole bodies

    def begin_receive(
        self,
        uid: bytes,
        size_bytes: int,
        charge: int,
        group: int | None = None,
        token: bytes | None = None,
        purpose: bytes = b"",
    ) -> None:
        """Make an invisible body and promise it `charge` bytes. `group`: of the set in the making that it belongs to.
        `token`, `purpose`: of a grant.

        Raises:
            MemoryFullError: there is no room.
        """
        invariant(self._open(uid) is None, "a body is received twice", uid=uid.decode())
        row = BodyRow(size_bytes, used_us=self._now_us, receiving=True)
        self._reserve(charge, self._spare_bytes)
        self._close(uid, row)
        key = receiving_key(token or self._token_bytes, uid, None)
        self._txn.put(key, pack_number(charge) + purpose, db=self._tables.receivings)
        if group is not None:
            self._txn.put(uid, Rank(Level.LATE, MAKING, group).pack(), db=self._tables.ranks)

    def extend(
        self, uid: bytes, first: int, sizes: Sequence[int], reserve: bool, token: bytes | None = None
    ) -> list[list[Extent]]:
        """Lay out the next blocks of a body that is being received, from its promise or (`reserve`) from
        new room.

        Raises:
            SlabsShortError: grow first. MemoryFullError: there is no room.
        """
        key = receiving_key(token or self._token_bytes, uid, None)
        value = needed(self._txn.get(key, db=self._tables.receivings), "a body is extended that nobody receives", uid)
        promised = unpack_number(value)
        row = self._opened(uid)
        found = []
        for index, size_bytes in enumerate(sizes, first):
            charge = aligned(size_bytes)
            if reserve:
                self._reserve(charge, self._spare_bytes)
            else:
                promised -= charge
            found.append(self._allocate(uid, row, index, BLOCK_SEALED, charge))
        invariant(promised >= 0, "a body takes more than it was promised", uid=uid.decode())
        self._close(uid, row)
        self._txn.put(key, pack_number(promised) + grant_purpose(value), db=self._tables.receivings)
        return found

    def seal(self, uid: bytes, holder: bytes, size_bytes: int) -> None:
        """Make a received body visible: whole, dirty for `holder`, claimed by this process. Gives back
        what is allocated past `size_bytes`."""
        self._end_promise(uid)
        row = self._opened(uid)
        row.receiving = False
        row.size_bytes = size_bytes
        row.present = Body("", size_bytes).block_count
        row.used_us = self._now_us
        if row.allocated_bytes > aligned(size_bytes):
            self._trim(uid, row, size_bytes)
        self._put_holder(uid, row, holder, dirty=True, claim=self._token)
        self._close(uid, row)

    def _trim(self, uid: bytes, row: BodyRow, size_bytes: int) -> None:
        index = row.present - 1
        key = block_key(uid, index)
        value = needed(self._txn.get(key, db=self._tables.blocks), "the last block is missing", uid)
        left = aligned(Body("", size_bytes).block_size_bytes(index))
        kept: list[Extent] = []
        for offset, length in unpack_block(value)[1]:
            taken = min(left, length)
            if taken:
                kept.append((offset, taken))
            if taken < length:
                allocator.release(self._txn, self._tables, offset + taken, length - taken)
                self.counters.used_bytes -= length - taken
                row.allocated_bytes -= length - taken
            left -= taken
        self._txn.put(key, pack_block(BLOCK_SEALED, kept), db=self._tables.blocks)

    def abort_receive(self, uid: bytes, token: bytes | None = None) -> None:
        """Give an unsealed body back. What was granted stays where it is for as long as somebody still reads it."""
        self._end_promise(uid, token)
        row = self._opened(uid)
        row.receiving = False
        if row.pins:
            row.present = sum(1 for _ in scan(self._txn, self._tables.blocks, uid + b"\0"))
        self._close(uid, row)

    def _end_promise(self, uid: bytes, token: bytes | None = None) -> None:
        value = self._txn.pop(receiving_key(token or self._token_bytes, uid, None), db=self._tables.receivings)
        self.counters.reserved_bytes -= unpack_number(needed(value, "nobody receives the body", uid))

    # -- receiving single blocks

    def begin_fill(self, uid: bytes, body_bytes: int, index: int, charge: int) -> list[Extent] | None:
        """Lay out a missing block; None if it is there or somebody receives it.

        Raises:
            SlabsShortError: grow first. MemoryFullError: there is no room.
        """
        row = self._open(uid) or BodyRow(body_bytes)
        invariant(row.size_bytes == body_bytes or row.receiving, "two sizes of one body", uid=uid.decode())
        key = block_key(uid, index)
        if row.receiving or self._txn.get(key, db=self._tables.blocks) is not None:
            self._close(uid, row)
            return None
        row.fills += 1
        row.used_us = self._now_us
        self._reserve(charge)
        extents = self._allocate(uid, row, index, BLOCK_FILLING, charge)
        self._txn.put(receiving_key(self._token_bytes, uid, index), pack_number(0), db=self._tables.receivings)
        self._close(uid, row)
        return extents

    def seal_fill(self, uid: bytes, index: int, holder: bytes) -> None:
        """Make a filled block visible, clean for `holder`."""
        row, key, value = self._end_fill(self._token_bytes, uid, index)
        self._txn.put(key, pack_block(BLOCK_SEALED, unpack_block(value)[1]), db=self._tables.blocks)
        row.present += 1
        if self._txn.get(pair_key(uid, holder), db=self._tables.holders) is None:
            self._put_holder(uid, row, holder, dirty=False, claim="")
        self._close(uid, row)

    def abort_fill(self, uid: bytes, index: int, token: bytes | None = None) -> None:
        """Give a block that was being filled back."""
        row, key, value = self._end_fill(token or self._token_bytes, uid, index)
        self._free_block(row, key, value)
        self._close(uid, row)

    def _end_fill(self, token: bytes, uid: bytes, index: int) -> tuple[BodyRow, bytes, bytes]:
        removed = self._txn.delete(receiving_key(token, uid, index), db=self._tables.receivings)
        key = block_key(uid, index)
        invariant(removed, "nobody fills the block", uid=uid.decode(), index=index)
        value = needed(self._txn.get(key, db=self._tables.blocks), "a filling block is missing", uid)
        row = self._opened(uid)
        row.fills -= 1
        return row, key, value

    # -- what processes outside receive

    def grants_count(self, token: bytes) -> int:
        """How many grants of a process are open."""
        return sum(1 for _, value in scan(self._txn, self._tables.receivings, token + b"\0") if grant_purpose(value))

    def begin_grant(
        self, uid: bytes, size_bytes: int, charge: int, group: int | None, token: bytes, purpose: bytes, pinner: bytes
    ) -> None:
        """Begin a reception of another process, and pin what it will hold.

        Raises:
            MemoryFullError: there is no room.
        """
        self.begin_receive(uid, size_bytes, charge, group, token, purpose)
        self.pin_receiving(uid, pinner)

    def purpose_of(self, uid: bytes, token: bytes) -> bytes | None:
        """What a body was granted for; None if nothing (more) of that name is granted to the process."""
        value = self._txn.get(receiving_key(token, uid, None), db=self._tables.receivings)
        return None if value is None else grant_purpose(value) or None

    def take_grant(self, uid: bytes, token: bytes, size_bytes: int) -> bool:
        """Go on with a grant as with a reception of this process, of which `size_bytes` came; what lies beyond is given
        back. False if it is granted no more."""
        if self.purpose_of(uid, token) is None:
            return False
        promised = self._txn.pop(receiving_key(token, uid, None), db=self._tables.receivings)
        left = pack_number(unpack_number(needed(promised, "nobody receives the body", uid)))
        self._txn.put(receiving_key(self._token_bytes, uid, None), left, db=self._tables.receivings)
        row = self._opened(uid)
        invariant(size_bytes <= row.size_bytes, "more came than was granted", uid=uid.decode())
        row.size_bytes = size_bytes
        count = Body("", size_bytes).block_count
        for key, value in list(scan(self._txn, self._tables.blocks, uid + b"\0")):
            if block_index(key) >= count:
                self._free_block(row, key, value)
        self._close(uid, row)
        return True

    def pin_receiving(self, uid: bytes, pinner: bytes) -> None:
        """Pin a body that is being received. It must be there."""
        row = self._opened(uid)
        self._put_pin(uid, row, pinner)
        self._close(uid, row)

    def let_go(self, uid: bytes, token: bytes, pinner: bytes) -> bool:
        """End a pin of another process, and its grant of that body if it is open; False if it had no such pin."""
        if self._txn.get(pair_key(uid, pinner), db=self._tables.pins) is None:
            return False
        if self.purpose_of(uid, token) is not None:
            self.abort_receive(uid, token)
        self.unpin(uid, pinner)
        return True

    # -- pins

    def _put_pin(self, uid: bytes, row: BodyRow, pinner: bytes) -> None:
        fresh = self._txn.put(pair_key(uid, pinner), b"", overwrite=False, db=self._tables.pins)
        invariant(fresh, "a process pins a body twice", uid=uid.decode())
        row.pins += 1
        row.used_us = self._now_us

    def pin(self, uid: bytes, pinner: bytes | None = None) -> bool:
        """Pin a body for this process, or for `pinner`; False if nothing of it is visible."""
        row = self._open(uid)
        if row is None:
            return False
        visible = not row.receiving and (row.present > 0 or row.size_bytes == 0)
        if visible:
            self._put_pin(uid, row, pinner or self._token_bytes)
        self._close(uid, row)
        return visible

    def unpin(self, uid: bytes, pinner: bytes | None = None) -> None:
        """Let go of a pin."""
        removed = self._txn.delete(pair_key(uid, pinner or self._token_bytes), db=self._tables.pins)
        invariant(removed, "no such pin", uid=uid.decode())
        row = self._opened(uid)
        row.pins -= 1
        self._close(uid, row)

    # -- holders

    def _put_holder(self, uid: bytes, row: BodyRow, holder: bytes, *, dirty: bool, claim: str) -> None:
        """Write a holder's row, new or changed, keeping the counts."""
        key = pair_key(uid, holder)
        old = self._txn.get(key, db=self._tables.holders)
        if old is None:
            row.holders += 1
        else:
            row.dirty -= HolderRow.unpack(old).dirty
        row.dirty += dirty
        self._txn.put(key, HolderRow(dirty, claim, self._txn.id()).pack(), db=self._tables.holders)

    def hold(self, uid: bytes, holder: bytes, dirty: bool) -> bool | None:
        """Add a holder to a whole body; whether it is new (and so claimed); None if the body is not whole."""
        row = self._open(uid)
        if row is None:
            return None
        whole = not row.receiving and row.present == Body("", row.size_bytes).block_count
        old = self._txn.get(pair_key(uid, holder), db=self._tables.holders)
        if whole:
            if old is None:
                self._relieve_index()
            held = HolderRow(False, self._token, 0) if old is None else HolderRow.unpack(old)
            self._put_holder(uid, row, holder, dirty=dirty or held.dirty, claim=held.claim)
        self._close(uid, row)
        return (old is None) if whole else None

    def confirm(self, uid: bytes, holder: bytes) -> None:
        """Give up this process's claim: the directory knows the holder now. Nothing if the row is gone."""
        key = pair_key(uid, holder)
        value = self._txn.get(key, db=self._tables.holders)
        if value is not None:
            row = HolderRow(HolderRow.unpack(value).dirty, "", self._txn.id())
            self._txn.put(key, row.pack(), db=self._tables.holders)

    def clean(self, uid: bytes, holder: bytes) -> None:
        """The holder can do without its bytes. Nothing if it does not hold them."""
        value = self._txn.get(pair_key(uid, holder), db=self._tables.holders)
        if value is None or not HolderRow.unpack(value).dirty:
            return
        row = self._opened(uid)
        self._put_holder(uid, row, holder, dirty=False, claim=HolderRow.unpack(value).claim)
        self._close(uid, row)

    def drop(self, uid: bytes, holder: bytes) -> None:
        """The holder lets go. Nothing if it does not hold the body."""
        value = self._txn.pop(pair_key(uid, holder), db=self._tables.holders)
        if value is None:
            return
        row = self._opened(uid)
        row.holders -= 1
        row.dirty -= HolderRow.unpack(value).dirty
        self._close(uid, row)

    # -- sets

    def rank(self, uid: bytes, rank: Rank | None, judged_us: int) -> None:
        """Say with which set a body is evicted; None: by itself, unless it is of a set in the making and not older than
        `judged_us`. Nothing if it is not here."""
        row = self._open(uid)
        if row is None:
            return
        if rank is None:
            before = self._txn.get(uid, db=self._tables.ranks)
            is_new = row.receiving or row.used_us > judged_us
            if not (is_new and before is not None and Rank.unpack(before).order == MAKING):
                self._txn.delete(uid, db=self._tables.ranks)
        else:
            self._txn.put(uid, rank.pack(), db=self._tables.ranks)
        self._close(uid, row)

    # -- recovery

    def holder_row(self, uid: bytes, holder: bytes) -> HolderRow | None:
        value = self._txn.get(pair_key(uid, holder), db=self._tables.holders)
        return None if value is None else HolderRow.unpack(value)

    def reap_reception(self, key: bytes) -> None:
        """Undo what a dead process was receiving. What it sealed stays claimed until the directory was asked
        (`Memory.reconcile`). Nothing if it was undone already."""
        token, uid, index = split_receiving(key)
        if self._txn.get(key, db=self._tables.receivings) is None:
            return
        if index is None:
            self.abort_receive(uid, token)
        else:
            self.abort_fill(uid, index, token)

    def reap_pin(self, key: bytes) -> None:
        """Let go of a dead process's pin. Nothing if that happened already."""
        uid, pinner = split_pair(key)
        if self._txn.get(key, db=self._tables.pins) is not None:
            self.unpin(uid, pinner)
