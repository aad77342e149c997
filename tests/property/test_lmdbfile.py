"""S3 names as LMDB keys: whatever the names, a scan over keys can be put into the order of the names."""

from pathlib import Path

import lmdb
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tiergate.errors import ConfigError, InvariantError
from tiergate.lmdbfile import MAX_KEY_BYTES, ORDERED_BYTES, object_key, open_environment, prefix_key, tie_key

BUCKETS = st.sampled_from(["b", "bucket", "bucket-2", "x" * 63])
# Long common starts, so that names differ before, at and after the place where keys are cut.
LONG = "p" * (ORDERED_BYTES - 3)
KEYS = st.one_of(
    st.text(max_size=20),
    st.builds(lambda cut, tail: LONG[cut:] + tail, st.integers(0, 70), st.text(max_size=60)),
    st.builds(lambda count, tail: "é" * count + tail, st.integers(200, 300), st.text(max_size=20)),
)
NAMES = st.tuples(BUCKETS, KEYS)


def order(name: tuple[str, str]) -> tuple[bytes, bytes]:
    return name[0].encode(), name[1].encode()


@given(NAMES)
@example(("x" * 63, "k" * 1024))
def test_object_key_any_name_fits_lmdb(name: tuple[str, str]) -> None:
    assert len(object_key(*name)) <= MAX_KEY_BYTES


@given(NAMES, NAMES)
def test_object_key_two_names_are_ordered_or_tied(one: tuple[str, str], two: tuple[str, str]) -> None:
    assert (object_key(*one) == object_key(*two)) == (one == two)
    ties = tie_key(object_key(*one)), tie_key(object_key(*two))
    if ties[0] != ties[1]:
        assert (ties[0] < ties[1]) == (order(one) < order(two))
        assert (object_key(*one) < object_key(*two)) == (order(one) < order(two))


@given(BUCKETS, KEYS, KEYS)
def test_prefix_key_no_key_at_or_after_the_prefix_lies_before_it(bucket: str, prefix: str, key: str) -> None:
    if key.encode() >= prefix.encode():
        assert object_key(bucket, key) >= prefix_key(bucket, prefix)


@given(st.lists(NAMES, unique=True, max_size=30))
def test_scan_sorted_within_ties_is_the_order_of_names(names: list[tuple[str, str]]) -> None:
    rows = sorted((object_key(*name), name) for name in names)
    found = [name for _, name in sorted(rows, key=lambda row: (tie_key(row[0]), order(row[1])))]
    assert found == sorted(names, key=order)


def test_object_key_bucket_with_nul_raises() -> None:
    with pytest.raises(InvariantError):
        object_key("a\0b", "c")


def test_open_environment_bounds_its_map_and_keeps_its_rows(tmp_path: Path) -> None:
    first = open_environment(tmp_path / "env", 1 << 20, 1, preallocate=True)
    table = first.open_db(b"t")
    with first.begin(write=True) as txn:
        txn.put(b"k", b"v", db=table)
    with pytest.raises(lmdb.MapFullError), first.begin(write=True) as txn:
        txn.put(b"big", bytes(2 << 20), db=table)
    first.close()
    assert (tmp_path / "env" / "data.mdb").stat().st_size == 1 << 20
    locks = (tmp_path / "env" / "lock.mdb").stat()
    assert locks.st_blocks * 512 >= locks.st_size >= 64 * 1024
    again = open_environment(tmp_path / "env", 1 << 20, 1)
    with again.begin() as txn:
        assert txn.get(b"k", db=again.open_db(b"t", create=False, txn=txn)) == b"v"
    again.close()


def test_open_environment_on_rubbish_raises_config_error(tmp_path: Path) -> None:
    (tmp_path / "data.mdb").write_bytes(b"rubbish" * 4096)
    with pytest.raises(ConfigError):
        open_environment(tmp_path, 1 << 20, 1)
