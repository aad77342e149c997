"""LMDB as this product uses it: how an environment is opened, and S3 names as LMDB keys.

LMDB keys end at 511 bytes while a bucket and a key have up to 63 + 1 + 1,024. A long name is stored under an
ordered prefix plus a digest; its full text belongs in the row's value:

- Rows sort by the UTF-8 bytes of their name, but rows of equal `tie_key` come in any order: a reader sorts
  such a run by the full key.
- `prefix_key` is where a scan starts; rows there may still lie before the prefix (they tie with it), so
  a reader compares full keys.
"""

import hashlib
import os
from pathlib import Path

import lmdb

from tiergate.errors import ConfigError, invariant
from tiergate.lmdbwake import wake_waiters

MAX_KEY_BYTES = 511
"""LMDB's own bound (MDB_MAXKEYSIZE of the stock build)."""

DIGEST_BYTES = 32
ORDERED_BYTES = MAX_KEY_BYTES - DIGEST_BYTES
"""Names up to this length are stored as they are; of longer ones this much keeps its order."""

MAX_READERS = 1024
"""Read transactions of all processes of a node at one time."""

LOCK_FILE_BYTES = (MAX_READERS + 64) * 64
"""A cache line for each reader, and the table's head."""


def open_environment(path: Path, map_bytes: int, databases: int, *, preallocate: bool = False) -> lmdb.Environment:
    """Open (or create) the environment in folder `path` for this process; never inherit it over a fork.

    Nothing is synced: the files live in memory and survive the death of any process, not of the machine.
    Readers left by dead processes are cleared, and who sleeps at a lock that the dead left is woken.
    `map_bytes` bounds the data; a transaction that needs more raises `lmdb.MapFullError`, which the caller
    translates to `MemoryFullError`. With `preallocate` all of it is taken from the file system now, so that
    later no commit fails because others filled it.

    Raises:
        ConfigError: the folder cannot be made or written, is no LMDB environment, or has no room.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        wake_waiters(path)
        _allocate_locks(path / "lock.mdb")
        environment = lmdb.open(
            str(path),
            map_size=map_bytes,
            subdir=True,
            sync=False,
            metasync=False,
            writemap=False,
            max_dbs=databases,
            max_readers=MAX_READERS,
        )
    except (OSError, lmdb.Error) as error:
        raise ConfigError(f"{path}: cannot open the LMDB environment: {error}") from error
    try:
        environment.reader_check()
        if preallocate:
            _preallocate(path / "data.mdb", map_bytes)
    except (OSError, lmdb.Error) as error:
        environment.close()
        raise ConfigError(f"{path}: cannot prepare the LMDB environment: {error}") from error
    return environment


def _allocate_locks(path: Path) -> None:
    """Give the reader table its pages: LMDB maps it, and touching a hole of a full tmpfs kills with SIGBUS.

    Only a new table, which nobody has open: closing any descriptor of the file would drop LMDB's own POSIX
    locks of this process.
    """
    if not path.exists() or path.stat().st_size < LOCK_FILE_BYTES:
        path.touch()
        _preallocate(path, LOCK_FILE_BYTES)


def _preallocate(path: Path, size_bytes: int) -> None:
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        os.posix_fallocate(descriptor, 0, size_bytes)
    finally:
        os.close(descriptor)


def object_key(bucket: str, key: str) -> bytes:
    """The LMDB key of an object: at most 511 bytes, one for each name, ordered up to `tie_key`."""
    raw = _raw(bucket, key)
    if len(raw) <= ORDERED_BYTES:
        return raw
    return raw[:ORDERED_BYTES] + hashlib.blake2b(raw, digest_size=DIGEST_BYTES).digest()


def prefix_key(bucket: str, prefix: str) -> bytes:
    """A position such that every row of `bucket` whose key is at or after `prefix` comes at or after it."""
    return _raw(bucket, prefix)[:ORDERED_BYTES]


def tie_key(db_key: bytes) -> bytes:
    """What of an LMDB key is ordered. Rows that are equal in it must be sorted by their full key."""
    return db_key[:ORDERED_BYTES]


def _raw(bucket: str, key: str) -> bytes:
    invariant("\0" not in bucket, "a bucket name holds a NUL", bucket=bucket)
    return bucket.encode() + b"\0" + key.encode()
