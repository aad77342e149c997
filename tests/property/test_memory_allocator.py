"""Free room against a model: a set of units. Whatever is taken and given back, nothing overlaps and
nothing is lost."""

import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiergate.errors import InvariantError
from tiergate.lmdbfile import open_environment
from tiergate.memory import allocator
from tiergate.memory.rows import TABLE_NAMES, Tables, scan, unpack_number
from tiergate.shm import ALIGNMENT_BYTES

UNITS = 64
Step = tuple[str, int]
STEPS = st.lists(st.tuples(st.sampled_from(["take", "give"]), st.integers(1, 30)), max_size=60)


def units_of(extents: list[tuple[int, int]]) -> list[int]:
    return [
        unit
        for offset, length in extents
        for unit in range(offset // ALIGNMENT_BYTES, (offset + length) // ALIGNMENT_BYTES)
    ]


@given(STEPS)
@settings(deadline=None)
def test_allocate_and_release_any_order_tile_the_room(steps: list[Step]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        environment = open_environment(Path(folder), 1 << 20, len(TABLE_NAMES))
        tables = Tables.open(environment)
        with environment.begin(write=True) as txn:
            allocator.release(txn, tables, 0, UNITS * ALIGNMENT_BYTES)
            free = set(range(UNITS))
            held: list[list[tuple[int, int]]] = []
            for kind, number in steps:
                if kind == "give" and held:
                    for offset, length in held.pop(number % len(held)):
                        free |= set(units_of([(offset, length)]))
                        allocator.release(txn, tables, offset, length)
                elif kind == "take" and number <= len(free):
                    one_run = allocator.has_run(txn, tables, number * ALIGNMENT_BYTES)
                    extents = allocator.allocate(txn, tables, number * ALIGNMENT_BYTES)
                    taken = units_of(extents)
                    assert len(taken) == number == len(set(taken))
                    assert set(taken) <= free
                    assert len(extents) == 1 or not one_run
                    free -= set(taken)
                    held.append(extents)
                runs = [(unpack_number(k), unpack_number(v)) for k, v in scan(txn, tables.free_at, b"")]
                assert sorted(units_of(runs)) == sorted(free)
                starts = {offset for offset, _ in runs}
                assert all(offset + length not in starts for offset, length in runs)
        environment.close()


def test_allocate_takes_the_smallest_run_that_fits() -> None:
    with tempfile.TemporaryDirectory() as folder:
        environment = open_environment(Path(folder), 1 << 20, len(TABLE_NAMES))
        tables = Tables.open(environment)
        with environment.begin(write=True) as txn:
            for offset, length in ((0, 8), (10, 3), (20, 5)):
                allocator.release(txn, tables, offset * ALIGNMENT_BYTES, length * ALIGNMENT_BYTES)
            assert allocator.allocate(txn, tables, 3 * ALIGNMENT_BYTES) == [(10 * ALIGNMENT_BYTES, 3 * ALIGNMENT_BYTES)]
            with pytest.raises(InvariantError):
                allocator.release(txn, tables, 7 * ALIGNMENT_BYTES, 2 * ALIGNMENT_BYTES)
            with pytest.raises(InvariantError):
                allocator.allocate(txn, tables, 14 * ALIGNMENT_BYTES)
            with pytest.raises(InvariantError):
                allocator.allocate(txn, tables, 100)
        environment.close()
