"""The rows of the inventory: their keys and their packed values. Integers in keys are big-endian, so they
sort."""

from __future__ import annotations

import struct
from dataclasses import dataclass, fields
from enum import IntEnum
from typing import TYPE_CHECKING

import lmdb

from tiergate.errors import InvariantError, invariant
from tiergate.shm import ALIGNMENT_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator

    Txn = lmdb.Transaction[bytes]
    Table = lmdb._Database

Extent = tuple[int, int]
"""Offset and length in the slab file, both multiples of `ALIGNMENT_BYTES`."""

MAX_NAME_BYTES = 160
"""Bound of body uids and holders: two of them and a separator fit into an LMDB key."""

BLOCK_SEALED = 1
BLOCK_FILLING = 2

_BODY = struct.Struct("<QQQIIIIIBB")
_RANK = struct.Struct(">BQQ")
RANK_BYTES = _RANK.size
_COUNTERS = struct.Struct("<QQQQQQQ")
_EXTENT = struct.Struct("<QQ")
_INDEX = struct.Struct(">I")
_NUMBER = struct.Struct(">Q")
_WHOLE = 0xFFFFFFFF
COUNTERS_KEY = b"counters"
MAKING = (1 << 64) - 1
"""The order of what comes in for a set that nobody has judged since: after all others of its level."""

GOING_KEY = b"going"
"""The rank of a set whose eviction has begun and is not done."""


@dataclass(frozen=True, slots=True)
class Tables:
    """The named databases of the inventory.

    `state`: the counters · `bodies`: uid → BodyRow · `blocks`: uid, index → BlockRow · `holders`: uid,
    holder → HolderRow · `pins`: uid, who pins it (see `owner_of`) → nothing · `receivings`: process token, uid,
    index → bytes still reserved, and of a grant what it is for · `lru`: time of use, uid → nothing, exactly the
    bodies without a rank that may be evicted · `free_at`: offset → length · `free_by`: length, offset → nothing ·
    `ranks`: uid → packed Rank · `sets`: packed Rank, uid → nothing, exactly those with a rank that may be evicted.
    """

    state: Table
    bodies: Table
    blocks: Table
    holders: Table
    pins: Table
    receivings: Table
    lru: Table
    free_at: Table
    free_by: Table
    ranks: Table
    sets: Table

    @classmethod
    def open(cls, environment: lmdb.Environment) -> Tables:
        """Open all of them, making those that are absent."""
        return cls(*(environment.open_db(name.encode()) for name in TABLE_NAMES))

    def used_bytes(self, txn: Txn) -> int:
        """Pages of the index that hold rows."""
        used_bytes = 0
        for name in TABLE_NAMES:
            stat = txn.stat(getattr(self, name))
            pages = stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"]
            used_bytes += pages * stat["psize"]
        return used_bytes


TABLE_NAMES = tuple(entry.name for entry in fields(Tables))


class Level(IntEnum):
    """When the bodies of a set are evicted."""

    FIRST = 0
    """Before all others."""
    LATE = 1
    """Once nothing is left of what has no rank."""
    LAST = 2
    PINNED = 3
    """Never."""


@dataclass(frozen=True, slots=True)
class Rank:
    """The set that a body is evicted with: all bodies of one rank go together. Lower ones go first, of one level those
    of the least `order` (from 0 on). `group` tells sets apart."""

    level: Level
    order: int
    group: int

    def pack(self) -> bytes:
        return _RANK.pack(self.level, self.order, self.group)

    @classmethod
    def unpack(cls, value: bytes) -> Rank:
        level, order, group = _RANK.unpack(value)
        return cls(Level(level), order, group)


@dataclass(slots=True)
class BodyRow:
    """What is known of a body. Counts are of rows in the other tables; `allocated_bytes` are its extents'
    bytes.

    `present` counts sealed blocks, `fills` blocks that are being received one by one, `receiving` says
    that the whole body is being received and invisible. `listed` says that it stands in `lru` at `used_us`, or
    in `sets` at its rank.
    """

    size_bytes: int
    allocated_bytes: int = 0
    used_us: int = 0
    present: int = 0
    holders: int = 0
    dirty: int = 0
    pins: int = 0
    fills: int = 0
    receiving: bool = False
    listed: bool = False

    def pack(self) -> bytes:
        return _BODY.pack(
            self.size_bytes,
            self.allocated_bytes,
            self.used_us,
            self.present,
            self.holders,
            self.dirty,
            self.pins,
            self.fills,
            self.receiving,
            self.listed,
        )

    @classmethod
    def unpack(cls, value: bytes) -> BodyRow:
        size, allocated, used, present, holders, dirty, pins, fills, receiving, listed = _BODY.unpack(value)
        return cls(size, allocated, used, present, holders, dirty, pins, fills, bool(receiving), bool(listed))

    @property
    def is_needed(self) -> bool:
        """Whether somebody holds, reads or receives it."""
        return bool(self.holders or self.pins or self.fills or self.receiving)

    @property
    def is_evictable(self) -> bool:
        """Whether all who hold it are clean and nobody is at it."""
        return bool(self.holders) and not (self.dirty or self.pins or self.fills or self.receiving)


@dataclass(slots=True)
class Counters:
    """Sums over the inventory. `used_bytes` are allocated extents, `reserved_bytes` are promised to bodies
    that are being received but not allocated yet; `dirty`, `receiving` and `evictable` are shares of
    `used_bytes`."""

    grown_bytes: int = 0
    used_bytes: int = 0
    reserved_bytes: int = 0
    dirty_bytes: int = 0
    receiving_bytes: int = 0
    evictable_bytes: int = 0
    evictions: int = 0

    @classmethod
    def load(cls, txn: Txn, tables: Tables) -> Counters:
        value = txn.get(COUNTERS_KEY, db=tables.state)
        return cls() if value is None else cls(*_COUNTERS.unpack(value))

    def store(self, txn: Txn, tables: Tables) -> None:
        txn.put(
            COUNTERS_KEY,
            _COUNTERS.pack(
                self.grown_bytes,
                self.used_bytes,
                self.reserved_bytes,
                self.dirty_bytes,
                self.receiving_bytes,
                self.evictable_bytes,
                self.evictions,
            ),
            db=tables.state,
        )

    @property
    def free_bytes(self) -> int:
        return self.grown_bytes - self.used_bytes

    def account(self, row: BodyRow, sign: int) -> None:
        """Add (1) or take away (-1) a body's share."""
        amount = sign * row.allocated_bytes
        if row.receiving:
            self.receiving_bytes += amount
        elif row.dirty:
            self.dirty_bytes += amount
        elif row.listed:
            self.evictable_bytes += amount


@dataclass(frozen=True, slots=True)
class HolderRow:
    """One holder of one body. `claim` is the token of the process that vouches for it until the directory
    knows it, or empty; `since` is the transaction that made or confirmed it."""

    dirty: bool
    claim: str
    since: int

    def pack(self) -> bytes:
        return (b"\1" if self.dirty else b"\0") + _NUMBER.pack(self.since) + self.claim.encode()

    @classmethod
    def unpack(cls, value: bytes) -> HolderRow:
        return cls(value[0] == 1, value[9:].decode(), _NUMBER.unpack_from(value, 1)[0])


def pack_block(flag: int, extents: list[Extent]) -> bytes:
    """A block's value: its flag, then its extents in order."""
    return bytes((flag,)) + b"".join(_EXTENT.pack(*extent) for extent in extents)


def unpack_block(value: bytes) -> tuple[int, list[Extent]]:
    """The reverse of `pack_block`."""
    return value[0], list(_EXTENT.iter_unpack(memoryview(value)[1:]))


def pack_number(number: int) -> bytes:
    return _NUMBER.pack(number)


def unpack_number(value: bytes) -> int:
    number: int = _NUMBER.unpack_from(value)[0]
    return number


def grant_purpose(value: bytes) -> bytes:
    """What a reception was granted for to a process outside; empty for a reception of one's own."""
    return value[_NUMBER.size :]


def owner_of(pinner: bytes) -> bytes:
    """The token of the process whose life a pin hangs on. Who pins a body more than once tells the pins apart by what
    follows its token and a slash."""
    return pinner.partition(b"/")[0]


def name_bytes(name: str) -> bytes:
    """A body uid, holder or token as part of a key.

    Raises:
        InvariantError: it is empty, too long or holds a NUL.
    """
    raw = name.encode()
    invariant(0 < len(raw) <= MAX_NAME_BYTES and b"\0" not in raw, "an unfit name", name=name)
    return raw


def needed(value: bytes | None, why: str, uid: bytes) -> bytes:
    """A value that must be there.

    Raises:
        InvariantError: it is not.
    """
    if value is None:
        raise InvariantError(why, uid=uid.decode())
    return value


def pair_key(first: bytes, second: bytes) -> bytes:
    return first + b"\0" + second


def split_pair(key: bytes) -> tuple[bytes, bytes]:
    first, _, second = key.partition(b"\0")
    return first, second


def block_key(uid: bytes, index: int) -> bytes:
    return uid + b"\0" + _INDEX.pack(index)


def block_index(key: bytes) -> int:
    index: int = _INDEX.unpack(key[-4:])[0]
    return index


def receiving_key(token: bytes, uid: bytes, index: int | None) -> bytes:
    """`index` None: the whole body."""
    return token + b"\0" + uid + b"\0" + _INDEX.pack(_WHOLE if index is None else index)


def split_receiving(key: bytes) -> tuple[bytes, bytes, int | None]:
    token, _, rest = key.partition(b"\0")
    index = block_index(rest)
    return token, rest[:-5], None if index == _WHOLE else index


def lru_key(used_us: int, uid: bytes) -> bytes:
    return _NUMBER.pack(used_us) + uid


def aligned(size_bytes: int) -> int:
    """The room that `size_bytes` take in the slabs."""
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def scan(txn: Txn, table: Table, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
    """All rows whose key starts with `prefix`. The table must not be changed meanwhile: collect first."""
    with txn.cursor(db=table) as cursor:
        if not (cursor.set_range(prefix) if prefix else cursor.first()):
            return
        for key, value in cursor.iternext():
            if not key.startswith(prefix):
                return
            yield key, value
