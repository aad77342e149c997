"""What this node would have to tell a directory that forgot it: the versions and deletions that the origin does not
have yet and whose bytes, or whose duty, lie here.

etcd may be restored from a snapshot, or begin empty, after its members were lost for good. What was acknowledged since
is then known to nobody but the nodes that hold it. Each keeps these entries in its memory folder, beside the bytes,
shared by its processes; the directory's word always wins while there is one.
"""

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import lmdb

from tiergate.directory.codec import decode, encode
from tiergate.lmdbfile import object_key, open_environment
from tiergate.model import ObjectName, Pending, Record
from tiergate.observe.logs import get_logger

_NUMBER = struct.Struct(">Q")
_OWN = b"\0"
"""No bucket's name begins so."""

_NEWEST = _OWN + b"newest "
_DOUBTED = _OWN + b"doubted "
"""Both with the number of an era. They stay: eras are few, and one may come back."""

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Entry:
    """One write as its directory had it. `era` names that directory: its revisions mean nothing in another."""

    era: int
    record: Record
    write: Pending


class Ledger:
    """One for a process. No method waits for anything but LMDB's lock."""

    def __init__(self, environment: lmdb.Environment) -> None:
        self._environment = environment

    @classmethod
    def open(cls, folder: Path, map_bytes: int) -> "Ledger":
        """Open it in this process, made if new. All of `map_bytes` is taken from the file system.

        Raises:
            ConfigError: the folder cannot be used.
        """
        return cls(open_environment(folder, map_bytes, 0, preallocate=True))

    def close(self) -> None:
        """Let go of the environment."""
        self._environment.close()

    def note(self, entry: Entry) -> None:
        """Keep an entry in the place of any other of its key. One for which there is no room is left out, loudly: it is
        a second line of defence, and no reason to refuse what the directory and the peers have."""
        name = entry.record.name
        try:
            with self._changing() as txn:
                txn.put(_key(name), encode(entry))
        except lmdb.MapFullError:
            self._environment.reader_check()
            log.error("the ledger is full: a lost directory would not get this back", bucket=name.bucket, key=name.key)

    def changed(self, era: int, revision: int) -> None:
        """Remember the newest change that this node made in a directory. Where there is no room, loudly not."""
        if revision <= self.newest(era):
            return
        try:
            with self._changing() as txn:
                if revision > _newest(txn, era):
                    txn.put(_of_era(_NEWEST, era), _NUMBER.pack(revision))
        except lmdb.MapFullError:
            log.error("the ledger is full: that etcd went back may be seen too late", revision=revision)

    def newest(self, era: int) -> int:
        """The revision of that; 0 where none is known of this era."""
        with self._environment.begin() as txn:
            return _newest(txn, era)

    def doubt(self, era: int) -> None:
        """Remember that a directory, other than 0, went back: all processes of this node hear so."""
        if era and not self.is_doubted(era):
            try:
                with self._changing() as txn:
                    txn.put(_of_era(_DOUBTED, era), b"")
            except lmdb.MapFullError:
                log.error("the ledger is full: other processes are not told that etcd went back")

    def is_doubted(self, era: int) -> bool:
        """Whether a process of this node saw that a directory went back."""
        with self._environment.begin() as txn:
            return txn.get(_of_era(_DOUBTED, era)) is not None

    def drop(self, name: ObjectName, uid: str) -> None:
        """A write is finished or superseded; nothing if its key has another entry."""
        with self._changing() as txn:
            value = cast(bytes | None, txn.get(_key(name)))
            if value is not None and decode(Entry, value).write.uid == uid:
                txn.delete(_key(name))

    def find(self, name: ObjectName) -> Entry | None:
        """The entry of a key."""
        with self._environment.begin() as txn:
            value = txn.get(_key(name))
        return decode(Entry, value) if value is not None else None

    def entries(self) -> list[Entry]:
        """All entries in the order in which they were committed."""
        with self._environment.begin() as txn:
            rows = [(bytes(key), bytes(value)) for key, value in txn.cursor().iternext()]
        entries = (decode(Entry, value) for key, value in rows if not key.startswith(_OWN))
        return sorted(entries, key=lambda entry: entry.record.revision)

    @contextmanager
    def _changing(self) -> Iterator[lmdb.Transaction]:
        with self._environment.begin(write=True) as txn:
            yield txn


def _key(name: ObjectName) -> bytes:
    return object_key(name.bucket, name.key)


def _newest(txn: lmdb.Transaction, era: int) -> int:
    value = cast(bytes | None, txn.get(_of_era(_NEWEST, era)))
    revision: int = _NUMBER.unpack(value)[0] if value is not None else 0
    return revision


def _of_era(kind: bytes, era: int) -> bytes:
    return kind + _NUMBER.pack(era)
