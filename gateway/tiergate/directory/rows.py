"""The rows of the embedded directory: tables, codec, and the primitives that keep its indexes true.

Every index is changed here, together with the row it belongs to, so that a transition cannot forget one.
"""

import hashlib
import struct
from collections.abc import Iterator
from typing import TypeVar, cast

import lmdb

from tiergate.checkpoints.markers import scope_of
from tiergate.directory.base import Finished
from tiergate.directory.codec import Named, Orphan, decode, encode
from tiergate.lmdbfile import object_key, prefix_key, tie_key
from tiergate.model import (
    Agreement,
    Bucket,
    ObjectName,
    OriginUpload,
    Part,
    Pending,
    PinnedPrefix,
    Plan,
    QuarantinedSet,
    Record,
    Role,
    Run,
    State,
    Step,
    Upload,
)

_NUMBER = struct.Struct(">Q")
_PART_NUMBER = struct.Struct(">H")
_AGE = struct.Struct(">d")
"""A time after 1970; IEEE numbers without a sign sort by their bytes."""
_COMMIT = struct.Struct(">QQ")

N = TypeVar("N", Record, Pending)

TABLE_NAMES = (
    "meta",
    "records",
    "pending",
    "ages",
    "markers",
    "clean",
    "uploads",
    "parts",
    "finished",
    "orphans",
    "steps",
    "buckets",
    "pins",
    "plans",
    "runs",
    "quarantine",
    "agreed",
)


class Tables:
    """The named databases of one environment.

    `records`, `pending`: by object · `ages`: commit time, object of what is owed and not quarantined · `markers`:
    scope, name → object · `clean`: revision, last change → object and uid · `parts`: upload id, number.
    """

    def __init__(self, environment: lmdb.Environment) -> None:
        self.by_name = {name: environment.open_db(name.encode()) for name in TABLE_NAMES}


class LmdbRows:
    """Implements `tiergate.directory.view.Rows` over the tables of one LMDB transaction; see there."""

    me = None

    def __init__(self, txn: lmdb.Transaction, tables: Tables) -> None:
        self._txn = txn
        self._tables = tables.by_name

    # -- plain access
    def _get(self, table: str, key: bytes) -> bytes | None:
        return cast(bytes | None, self._txn.get(key, db=self._tables[table]))

    def _put(self, table: str, key: bytes, value: bytes) -> None:
        self._txn.put(key, value, db=self._tables[table])

    def _delete(self, table: str, key: bytes) -> None:
        self._txn.delete(key, db=self._tables[table])

    def scan(self, table: str, start: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Rows from `start` on; the table must not be changed meanwhile."""
        cursor = self._txn.cursor(self._tables[table])
        if cursor.set_range(start):
            yield from cast(Iterator[tuple[bytes, bytes]], cursor.iternext(keys=True, values=True))

    def _scan_prefix(self, table: str, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
        for key, value in self.scan(table, prefix):
            if not key.startswith(prefix):
                return
            yield key, value

    def raw(self, table: str) -> list[bytes]:
        """All values of a table by key, for `decode` once the transaction is over."""
        cursor = self._txn.cursor(self._tables[table])
        return list(cast(Iterator[bytes], cursor.iternext(keys=False, values=True)))

    def count(self, table: str) -> int:
        """How many rows a table has."""
        entries: int = self._txn.stat(self._tables[table])["entries"]
        return entries

    def used_pages(self) -> int:
        """Pages that the tables take."""
        stats = [self._txn.stat(table) for table in self._tables.values()]
        return sum(stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"] for stat in stats)

    # -- numbers
    def revision(self) -> int:
        """The newest revision."""
        return self.number("revision")

    def next_revision(self) -> int:
        """A revision for a change made in this transaction."""
        return self._add("revision", 1)

    def number(self, name: str) -> int:
        """A kept number."""
        value = self._get("meta", name.encode())
        found: int = _NUMBER.unpack(value)[0] if value else 0
        return found

    def _add(self, name: str, amount: int) -> int:
        value = self.number(name) + amount
        self._put("meta", name.encode(), _NUMBER.pack(value))
        return value

    # -- records
    def record(self, name: ObjectName) -> Record | None:
        value = self._get("records", object_key(name.bucket, name.key))
        return decode(Record, value) if value else None

    def put_record(self, record: Record) -> None:
        """Write a record and all that is derived from it."""
        self._unindex(record.name)
        name, key = record.name, object_key(record.name.bucket, record.name.key)
        self._put("records", key, encode(record))
        self._add(f"count.{record.state}", 1)
        if record.role is Role.MARKER:
            self._put("markers", marker_key(name), encode(Named(name, "")))
        if record.state is State.CLEAN and record.version is not None:
            value = encode(Named(name, record.version.uid))
            self._put("clean", _COMMIT.pack(record.revision, record.modified), value)

    def touch_record(self, record: Record) -> None:
        """Write a record whose state, role, revisions and version are what they were."""
        self._put("records", object_key(record.name.bucket, record.name.key), encode(record))

    def drops(self, name: ObjectName) -> int:
        """How often a key of the name's slot lost its record."""
        return self.number(_slot(name))

    def drop_record(self, name: ObjectName) -> None:
        self._add(_slot(name), 1)
        self._unindex(name)
        self._delete("records", object_key(name.bucket, name.key))

    def _unindex(self, name: ObjectName) -> None:
        old = self.record(name)
        if old is None:
            return
        self._add(f"count.{old.state}", -1)
        if old.role is Role.MARKER:
            self._delete("markers", marker_key(name))
        if old.state is State.CLEAN:
            self._delete("clean", _COMMIT.pack(old.revision, old.modified))

    def records_from(self, bucket: str, prefix: str, after: str) -> Iterator[Record]:
        """Records under the prefix beyond `after`, in the order of their keys."""
        return self._named("records", bucket, prefix, after, Record)

    def pending_from(self, bucket: str, prefix: str, after: str) -> Iterator[Pending]:
        """Pending writes under the prefix beyond `after`, in the order of their keys."""
        return self._named("pending", bucket, prefix, after, Pending)

    def _named(self, table: str, bucket: str, prefix: str, after: str, kind: type[N]) -> Iterator[N]:
        first = max(prefix, after, key=str.encode)
        ties: list[N] = []
        tie = b""
        bound = prefix_key(bucket, "")
        for key, value in self.scan(table, prefix_key(bucket, first)):
            if not key.startswith(bound):
                break
            if tie_key(key) != tie:
                yield from _in_order(ties, prefix, after)
                if ties and not _may_follow(ties[-1].name.key, prefix):
                    return
                ties, tie = [], tie_key(key)
            ties.append(decode(kind, value))
        yield from _in_order(ties, prefix, after)

    def clean_oldest(self) -> Iterator[Named]:
        """Clean records by revision."""
        for _, value in self.scan("clean", b""):
            yield decode(Named, value)

    def marker_names(self, bucket: str, scope: str) -> list[ObjectName]:
        """The markers right in a scope."""
        start = prefix_key(bucket, f"{scope}\0")
        names = (decode(Named, value).name for _, value in self._scan_prefix("markers", start))
        return [name for name in names if name.bucket == bucket and scope_of(name.key) == scope]

    def is_marker(self, name: ObjectName) -> bool:
        """Whether the key's record is a marker's."""
        return self._get("markers", marker_key(name)) is not None

    # -- pending writes
    def pending(self, name: ObjectName) -> Pending | None:
        value = self._get("pending", object_key(name.bucket, name.key))
        return decode(Pending, value) if value else None

    def put_pending(self, write: Pending) -> None:
        """Write a pending write and its age."""
        self.drop_pending(write.name)
        self._put("pending", object_key(write.name.bucket, write.name.key), encode(write))
        self._count(write, 1)
        if write.is_owed:
            self._put("ages", _age_key(write), b"")
            self._add("owed_bytes", write.size_bytes)

    def _count(self, write: Pending, sign: int) -> None:
        if write.parked:
            self._add("parked", sign)
        self._add("parked_bytes" if write.parked else "pending_bytes", sign * write.size_bytes)

    def disturb(self, write: Pending) -> None:
        self.put_pending(write)

    def drop_pending(self, name: ObjectName) -> None:
        old = self.pending(name)
        if old is None:
            return
        self._delete("pending", object_key(name.bucket, name.key))
        self._count(old, -1)
        if old.is_owed:
            self._delete("ages", _age_key(old))
            self._delete("ages", _AGE.pack(old.committed_s) + _NUMBER.pack(old.place))  # of an earlier version, too
            # What an earlier version of the product left here was not counted.
            self._add("owed_bytes", -min(old.size_bytes, self.number("owed_bytes")))

    def oldest_pending_s(self) -> float | None:
        """The earliest commit time of what is pending, not parked and not quarantined."""
        for key, _ in self.scan("ages", b""):
            committed_s: float = _AGE.unpack_from(key)[0]
            return committed_s
        return None

    def orphan(self, name: ObjectName, upload: OriginUpload) -> None:
        """Keep an upload that nobody owns until it is aborted."""
        self._put("orphans", _orphan_key(name, upload), encode(Orphan(name, upload)))

    def drop_orphan(self, name: ObjectName, upload: OriginUpload) -> None:
        self._delete("orphans", _orphan_key(name, upload))

    # -- plans of sets
    def plan(self, bucket: str, prefix: str) -> Plan | None:
        value = self._get("plans", object_key(bucket, prefix))
        return decode(Plan, value) if value else None

    def put_plan(self, plan: Plan) -> None:
        self._put("plans", object_key(plan.bucket, plan.prefix), encode(plan))

    def drop_plan(self, plan: Plan) -> None:
        self._delete("plans", object_key(plan.bucket, plan.prefix))

    def run(self, bucket: str, prefix: str) -> Run | None:
        value = self._get("runs", object_key(bucket, prefix))
        return decode(Run, value) if value else None

    def put_run(self, run: Run) -> None:
        self._put("runs", object_key(run.bucket, run.prefix), encode(run))

    # -- steps under way
    def steps_near(self, step: Step) -> list[Step]:
        return self.all_steps()

    def all_steps(self) -> list[Step]:
        """The steps that stand."""
        return [decode(Step, value) for _, value in self.scan("steps", b"")]

    def put_step(self, step: Step) -> None:
        self._put("steps", _text_key(step.uid), encode(step))

    def drop_step(self, step: Step) -> None:
        self._delete("steps", _text_key(step.uid))

    # -- clients' multipart uploads
    def upload(self, upload_id: str) -> Upload | None:
        value = self._get("uploads", _text_key(upload_id))
        return decode(Upload, value) if value else None

    def put_upload(self, upload: Upload) -> None:
        self._put("uploads", _text_key(upload.upload_id), encode(upload))

    def drop_upload(self, upload: Upload) -> None:
        """An upload and its parts."""
        for number in [part.number for part in self.parts(upload.upload_id)]:
            self.drop_part(upload.upload_id, number)
        self._delete("uploads", _text_key(upload.upload_id))

    def part(self, upload_id: str, number: int) -> Part | None:
        value = self._get("parts", _part_key(upload_id, number))
        return decode(Part, value) if value else None

    def put_part(self, upload_id: str, part: Part) -> None:
        self._put("parts", _part_key(upload_id, part.number), encode(part))

    def drop_part(self, upload_id: str, number: int) -> None:
        self._delete("parts", _part_key(upload_id, number))

    def parts(self, upload_id: str) -> Iterator[Part]:
        """Parts of an upload by number."""
        return (decode(Part, value) for value in self.raw_parts(upload_id))

    def raw_parts(self, upload_id: str) -> list[bytes]:
        """Parts of an upload by number, for `decode`."""
        return [value for _, value in self._scan_prefix("parts", _text_key(upload_id) + b"\0")]

    def finished(self, upload_id: str) -> Finished | None:
        value = self._get("finished", _text_key(upload_id))
        return decode(Finished, value) if value else None

    def put_finished(self, upload_id: str, finished: Finished) -> None:
        self._put("finished", _text_key(upload_id), encode(finished))

    def expire_finished(self, before_s: float) -> int:
        """Forget what was finished, or agreed, before a time."""
        old = [key for key, value in self.scan("finished", b"") if decode(Finished, value).finished_s < before_s]
        void = [key for key, value in self.scan("agreed", b"") if decode(Agreement, value).agreed_s < before_s]
        for table, keys in (("finished", old), ("agreed", void)):
            for key in keys:
                self._delete(table, key)
        return len(old) + len(void)

    # -- buckets
    def bucket(self, name: str) -> Bucket | None:
        value = self._get("buckets", name.encode())
        return decode(Bucket, value) if value else None

    def put_bucket(self, bucket: Bucket) -> None:
        self._put("buckets", bucket.name.encode(), encode(bucket))

    def drop_bucket(self, name: str) -> None:
        self._delete("buckets", name.encode())

    # -- pinned prefixes
    def put_pin(self, pinned: PinnedPrefix) -> None:
        """Write a pinned prefix, unless it is one."""
        key = object_key(pinned.bucket, pinned.prefix)
        if self._get("pins", key) is None:
            self._put("pins", key, encode(pinned))

    def drop_pin(self, bucket: str, prefix: str) -> bool:
        """Delete a pinned prefix; whether it was one."""
        key = object_key(bucket, prefix)
        is_pinned = self._get("pins", key) is not None
        self._delete("pins", key)
        return is_pinned

    # -- which checkpoint a restart takes
    def put_quarantined(self, found: QuarantinedSet) -> None:
        """Write what is said of a set."""
        self._put("quarantine", object_key(found.bucket, found.prefix), encode(found))

    def drop_quarantined(self, found: QuarantinedSet) -> bool:
        """Delete what is said of a set, if it is this; whether it was."""
        key = object_key(found.bucket, found.prefix)
        is_said = self._get("quarantine", key) == encode(found)
        if is_said:
            self._delete("quarantine", key)
        return is_said

    def agree(self, proposed: Agreement) -> Agreement:
        """Write an agreement, unless one stands: then that one."""
        found = self.agreed(proposed.bucket, proposed.prefix, proposed.name)
        if found is None:
            key = _agreement_key(proposed.bucket, proposed.prefix, proposed.name)
            self._put("agreed", key, encode(proposed))
        return found or proposed

    def agreed(self, bucket: str, prefix: str, name: str) -> Agreement | None:
        value = self._get("agreed", _agreement_key(bucket, prefix, name))
        return decode(Agreement, value) if value else None


def _age_key(write: Pending) -> bytes:
    key = object_key(write.name.bucket, write.name.key)
    return _AGE.pack(write.committed_s) + hashlib.blake2b(key, digest_size=16).digest()


def _agreement_key(bucket: str, prefix: str, name: str) -> bytes:
    return object_key(bucket, f"{prefix}\0{name}")


def _in_order(ties: list[N], prefix: str, after: str) -> list[N]:
    """Rows that LMDB cannot tell apart, those wanted, sorted by their full key."""
    found = [item for item in ties if item.name.key.startswith(prefix) and item.name.key.encode() > after.encode()]
    return sorted(found, key=lambda item: item.name.key.encode())


def _may_follow(key: str, prefix: str) -> bool:
    """Whether keys of the prefix may come after `key`."""
    return key.startswith(prefix) or key.encode() < prefix.encode()


def _slot(name: ObjectName) -> str:
    """One of 256 numbers that stand for all keys, so that what is kept of deleted ones is bounded."""
    return f"dropped.{hashlib.blake2b(f'{name.bucket}/{name.key}'.encode(), digest_size=1).hexdigest()}"


def marker_key(name: ObjectName) -> bytes:
    """Where a marker stands in the index of its scope. No key holds a NUL."""
    scope = scope_of(name.key)
    return object_key(name.bucket, f"{scope}\0{name.key[len(scope) :]}")


def _orphan_key(name: ObjectName, upload: OriginUpload) -> bytes:
    # Uploads whose ids never became known differ in their start only.
    return object_key(name.bucket, f"{name.key}\0{upload.upload_id}\0{upload.started_s!r}")


def _text_key(text: str) -> bytes:
    return b"u" + text.encode()[:400]


def _part_key(upload_id: str, number: int) -> bytes:
    return _text_key(upload_id) + b"\0" + _PART_NUMBER.pack(number)
