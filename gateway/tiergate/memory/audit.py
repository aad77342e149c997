"""Check the whole inventory against itself: every count, sum and extent. For tests and the doctor, not for
requests.

One read transaction sees one moment, and every change is one transaction, so a sound inventory passes at
any time, whoever is working or has just died.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from tiergate.memory.rows import (
    BLOCK_FILLING,
    BLOCK_SEALED,
    COUNTERS_KEY,
    GOING_KEY,
    TABLE_NAMES,
    BodyRow,
    Counters,
    HolderRow,
    Level,
    block_index,
    lru_key,
    scan,
    split_pair,
    split_receiving,
    unpack_block,
    unpack_number,
)
from tiergate.model import Body

if TYPE_CHECKING:
    from tiergate.memory.rows import Extent
    from tiergate.memory.store import Store


def audit(store: Store) -> list[str]:
    """What is wrong, a line for each; empty if all is well."""
    with store.read() as txn:
        # Copied first and judged later: as long as a reader reads, replaced pages of the index are not
        # free again.
        counters = Counters.load(txn, store.tables)
        rows = {name: list(scan(txn, getattr(store.tables, name), b"")) for name in TABLE_NAMES}
    found = _Audit(rows, counters)
    found.free_room()
    found.bodies()
    found.sums()
    found.strays()
    problems = found.problems
    if counters.grown_bytes > store.slab_budget:
        problems.append(f"slabs of {counters.grown_bytes} bytes pass the budget of {store.slab_budget}")
    if store.slabs.allocated_bytes < counters.grown_bytes:
        problems.append(f"only {store.slabs.allocated_bytes} of {counters.grown_bytes} bytes are allocated")
    index_bytes = (store.folder / "index" / "data.mdb").stat().st_size
    if counters.grown_bytes + index_bytes > store.limits.budget_bytes:
        problems.append("slabs and index together pass the budget")
    return problems


class _Audit:
    def __init__(self, rows: dict[str, list[tuple[bytes, bytes]]], counters: Counters) -> None:
        self._rows = rows
        self.problems: list[str] = []
        self.counters = counters
        self._blocks_of: dict[bytes, list[tuple[bytes, bytes]]] = {}
        for row in rows["blocks"]:
            self._blocks_of.setdefault(row[0][:-5], []).append(row)
        self._sums = Counters(grown_bytes=self.counters.grown_bytes, evictions=self.counters.evictions)
        self._extents: list[tuple[int, int, str]] = []
        self._known: set[bytes] = set()
        self._lru: set[bytes] = set()
        self._sets: set[bytes] = set()
        self._receivings = [(*split_receiving(key), unpack_number(value)) for key, value in rows["receivings"]]

    def free_room(self) -> None:
        """The two free lists say the same, and no two free runs touch."""
        by_offset = {(unpack_number(key), unpack_number(value)) for key, value in self._rows["free_at"]}
        by_length = {(unpack_number(key[8:]), unpack_number(key[:8])) for key, _ in self._rows["free_by"]}
        if by_offset != by_length:
            self.problems.append(f"free lists differ: {sorted(by_offset ^ by_length)[:4]}")
        ends = {offset + length for offset, length in by_offset}
        touching = [offset for offset, _ in by_offset if offset in ends]
        if touching:
            self.problems.append(f"free runs are not joined at {sorted(touching)[:4]}")
        self._extents += [(offset, length, "free") for offset, length in by_offset]

    def bodies(self) -> None:
        """Each body's row says what the other tables say of it."""
        ranks = dict(self._rows["ranks"])
        holders, dirty, pins = Counter[bytes](), Counter[bytes](), Counter[bytes]()
        for key, value in self._rows["holders"]:
            uid, _ = split_pair(key)
            holders[uid] += 1
            dirty[uid] += HolderRow.unpack(value).dirty
        for key, _ in self._rows["pins"]:
            pins[split_pair(key)[0]] += 1
        whole = {uid for _, uid, index, _ in self._receivings if index is None}
        fills = Counter(uid for _, uid, index, _ in self._receivings if index is not None)
        for uid, value in self._rows["bodies"]:
            self._known.add(uid)
            row = BodyRow.unpack(value)
            self._sums.account(row, 1)
            self._sums.used_bytes += row.allocated_bytes
            rank = ranks.get(uid)
            if row.listed and rank is None:
                self._lru.add(lru_key(row.used_us, uid))
            elif row.listed and rank is not None:
                self._sets.add(rank + uid)
            is_evictable = row.is_evictable and not (rank is not None and rank[0] == Level.PINNED)
            allocated, present, filling = self._blocks(uid, row)
            seen = (allocated, filling, fills[uid], holders[uid], dirty[uid], pins[uid])
            said = (row.allocated_bytes, row.fills, row.fills, row.holders, row.dirty, row.pins)
            if seen != said:
                self.problems.append(f"body {uid.decode()}: its row says {said}, the tables say {seen}")
            if row.receiving != (uid in whole) or row.listed != is_evictable:
                self.problems.append(f"body {uid.decode()}: its flags are wrong: {row}")
            if not row.receiving and present != row.present:
                self.problems.append(f"body {uid.decode()}: {row.present} blocks counted, {present} present")
            if not row.is_needed:
                self.problems.append(f"body {uid.decode()}: nobody needs it")

    def _blocks(self, uid: bytes, row: BodyRow) -> tuple[int, int, int]:
        """Bytes allocated, blocks present, blocks being filled."""
        allocated = 0
        flags: list[int] = []
        body = Body(uid.decode(), row.size_bytes)
        for key, value in self._blocks_of.get(uid, ()):
            flag, extents = unpack_block(value)
            flags.append(flag)
            length = sum(extent[1] for extent in extents)
            allocated += length
            self._extents += [(*extent, f"{body.uid}/{block_index(key)}") for extent in extents]
            if length < body.block_size_bytes(block_index(key)):
                self.problems.append(f"body {body.uid}: block {block_index(key)} is shorter than it should be")
        return allocated, flags.count(BLOCK_SEALED), flags.count(BLOCK_FILLING)

    def sums(self) -> None:
        """Counters are the sums they claim to be, and extents and free runs tile the slabs exactly."""
        self._sums.reserved_bytes = sum(promised for *_, promised in self._receivings)
        if self._sums != self.counters:
            self.problems.append(f"counters say {self.counters}, rows say {self._sums}")
        at = 0
        for offset, length, owner in sorted(self._extents):
            if offset != at:
                what = "overlaps what is before it" if offset < at else f"leaves {offset - at} bytes lost"
                self.problems.append(f"extent {offset}+{length} of {owner} {what}")
            at = max(at, offset + length)
        if at != self.counters.grown_bytes:
            self.problems.append(f"extents end at {at}, the slabs at {self.counters.grown_bytes}")

    def strays(self) -> None:
        """No row belongs to a body that is not there; the eviction order holds just the evictable bodies."""
        owners = {
            "block": {key[:-5] for key, _ in self._rows["blocks"]},
            "holder": {split_pair(key)[0] for key, _ in self._rows["holders"]},
            "pin": {split_pair(key)[0] for key, _ in self._rows["pins"]},
            "reception": {uid for _, uid, _, _ in self._receivings},
            "rank": {uid for uid, _ in self._rows["ranks"]},
        }
        for kind, uids in owners.items():
            for uid in sorted(uids - self._known):
                self.problems.append(f"a {kind} of {uid.decode()}, which is not there")
        listed = {key for key, _ in self._rows["lru"]}
        if listed != self._lru:
            self.problems.append(f"the eviction order differs in {sorted(listed ^ self._lru)[:4]}")
        ranked = {key for key, _ in self._rows["sets"]}
        if ranked != self._sets:
            self.problems.append(f"the eviction order of sets differs in {sorted(ranked ^ self._sets)[:4]}")
        if {key for key, _ in self._rows["state"]} - {COUNTERS_KEY, GOING_KEY}:
            self.problems.append("unknown rows of state")


def extents_of(store: Store, body_uid: str) -> list[list[Extent]]:
    """Where a body's blocks lie now, for the doctor."""
    with store.read() as txn:
        rows = scan(txn, store.tables.blocks, body_uid.encode() + b"\0")
        return [unpack_block(value)[1] for _, value in rows]
