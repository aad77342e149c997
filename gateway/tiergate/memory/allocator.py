"""Free room in the slabs: pure functions over a transaction.

Two tables describe it, by offset (to join neighbours) and by length (to find the best fit). All offsets and
lengths are multiples of `ALIGNMENT_BYTES`. A piece that no single run can take is laid out over several,
so the only waste is the alignment.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tiergate.errors import invariant
from tiergate.memory.rows import pack_number, unpack_number
from tiergate.shm import ALIGNMENT_BYTES

if TYPE_CHECKING:
    from tiergate.memory.rows import Extent, Tables, Txn


def has_run(txn: Txn, tables: Tables, length: int) -> bool:
    """Whether one free run takes `length` bytes."""
    with txn.cursor(db=tables.free_by) as cursor:
        return cursor.set_range(pack_number(length))


def allocate(txn: Txn, tables: Tables, length: int) -> list[Extent]:
    """Take `length` bytes: from the smallest run that has them, else from the largest runs in turn.

    Raises:
        InvariantError: less than `length` is free in all, or `length` is not aligned. Nothing may be
            committed then.
    """
    invariant(length > 0 and length % ALIGNMENT_BYTES == 0, "an unaligned length", length=length)
    found: list[Extent] = []
    left = length
    with txn.cursor(db=tables.free_by) as cursor:
        while left:
            if not cursor.set_range(pack_number(left)):
                invariant(cursor.last(), "the slabs have less free room than was counted", left=left)
            key = cursor.key()
            run, offset = unpack_number(key[:8]), unpack_number(key[8:])
            _remove(txn, tables, offset, run)
            taken = min(run, left)
            if taken < run:
                _insert(txn, tables, offset + taken, run - taken)
            found.append((offset, taken))
            left -= taken
    return found


def release(txn: Txn, tables: Tables, offset: int, length: int) -> None:
    """Give a run back and join it with its free neighbours.

    Raises:
        InvariantError: part of it is free already. Nothing may be committed then.
    """
    with txn.cursor(db=tables.free_at) as cursor:
        after: Extent | None = None
        before: Extent | None = None
        if cursor.set_range(pack_number(offset)):
            after = unpack_number(cursor.key()), unpack_number(cursor.value())
            previous = cursor.prev()
        else:
            previous = cursor.last()
        if previous:
            before = unpack_number(cursor.key()), unpack_number(cursor.value())
    invariant(after is None or after[0] >= offset + length, "freed twice", offset=offset, length=length)
    invariant(before is None or sum(before) <= offset, "freed twice", offset=offset, length=length)
    if after is not None and after[0] == offset + length:
        _remove(txn, tables, *after)
        length += after[1]
    if before is not None and sum(before) == offset:
        _remove(txn, tables, *before)
        offset, length = before[0], before[1] + length
    _insert(txn, tables, offset, length)


def _insert(txn: Txn, tables: Tables, offset: int, length: int) -> None:
    txn.put(pack_number(offset), pack_number(length), db=tables.free_at)
    txn.put(pack_number(length) + pack_number(offset), b"", db=tables.free_by)


def _remove(txn: Txn, tables: Tables, offset: int, length: int) -> None:
    txn.delete(pack_number(offset), db=tables.free_at)
    removed = txn.delete(pack_number(length) + pack_number(offset), db=tables.free_by)
    invariant(removed, "the two tables of free room differ", offset=offset, length=length)
