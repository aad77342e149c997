"""The rows of a transition over etcd: read from a snapshot, changed in memory, committed as one guarded transaction.

A transition that reads what was not fetched yet is stopped and run again once it was: it has changed nothing. All that
it read becomes a guard, so that the change happens only if it would come out the same.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

from tiergate.checkpoints.markers import ancestor_scopes, reach_of, scope_of
from tiergate.directory.base import Committed, Finished
from tiergate.directory.codec import Orphan, pack, unpack
from tiergate.directory.committer import Change
from tiergate.directory.keys import Keys
from tiergate.errors import HolderLostError
from tiergate.etcd.client import EtcdClient
from tiergate.etcd.values import Delete, Field, Guard, KeyValue, Put, Range, Relation
from tiergate.model import (
    Holder,
    Kind,
    ObjectName,
    OriginUpload,
    Part,
    Pending,
    Plan,
    Record,
    Role,
    Run,
    State,
    Step,
    Upload,
)

OWN_REVISION = (1 << 63) - 1
"""Stands for the revision of the transaction that wrote it, which only the store tells: later than all known ones."""

EARLY_COUNT = 40
"""More disturbed markers than this are written before the rest, in transactions of so many."""

RANGES_COUNT = 40
"""More guarded ranges than this become one for each table, that covers all in it."""

READS_COUNT = 100
"""Ranges in one read; etcd takes 128 operations in a transaction."""

T = TypeVar("T")


class NotReadError(Exception):
    """A transition needs these to be fetched first."""

    def __init__(self, wanted: Sequence[Range]) -> None:
        super().__init__(wanted)
        self.wanted = wanted


@dataclass(frozen=True, slots=True)
class Large:
    """A large put in the index of those that others may wait for."""

    place: int


@dataclass(frozen=True, slots=True)
class Stored:
    """A record with where it stands in the order of clean ones."""

    record: Record
    age: int


class Snapshot:
    """What was read of the store, all of one revision: that of the first read, or one given."""

    def __init__(self, revision: int = 0) -> None:
        self.revision = revision
        self.rows: dict[bytes, KeyValue | None] = {}
        self.ranges: dict[bytes, tuple[KeyValue, ...]] = {}

    async def fetch(self, client: EtcdClient, wanted: Sequence[Range]) -> None:
        """Read more.

        Raises:
            CompactedError: the revision is no longer kept; start anew.
        """
        for start in range(0, len(wanted), READS_COUNT):
            part = wanted[start : start + READS_COUNT]
            outcome = await client.read(*(replace(each, revision=self.revision) for each in part))
            self.revision = self.revision or outcome.revision
            for index, each in enumerate(part):
                self._keep(each, outcome.found(index))

    def _keep(self, asked: Range, rows: tuple[KeyValue, ...]) -> None:
        if asked.end:
            self.ranges[asked.key] = rows
            self.rows.update((row.key, row) for row in rows)
        else:
            self.rows[asked.key] = rows[0] if rows else None


_REVISIONS: dict[type, tuple[str, ...]] = {
    Record: ("revision", "modified"),
    Pending: ("place", "revision"),
    Large: ("place",),
    Committed: ("revision",),
    Plan: ("revision", "dropped"),
}


def settled(value: T, revision: int) -> T:
    """A value with the revision it was written at in the place of `OWN_REVISION`."""
    own = {name: revision for name in _REVISIONS.get(type(value), ()) if getattr(value, name) == OWN_REVISION}
    return replace(cast(Any, value), **own) if own else value


def record_of(row: KeyValue) -> Record:
    """The record in a row."""
    return settled(unpack(Stored, row.value).record, row.mod_revision)


def value_of(kind: type[T], row: KeyValue) -> T:
    """Any other value in a row."""
    return settled(unpack(kind, row.value), row.mod_revision)


class ClusterRows:
    """Implements `tiergate.directory.view.Rows`; see there."""

    def __init__(self, keys: Keys, snapshot: Snapshot, me: Holder | None) -> None:
        self._keys = keys
        self._me = me
        self._snapshot = snapshot
        self._guards: dict[tuple[bytes, bytes], Guard] = {}
        self._written: dict[bytes, bytes | None] = {}
        self._cleared: list[Range] = []
        self._disturbed: dict[bytes, Put] = {}
        self._markers: set[bytes] = set()
        self._let_go: set[Holder] = set()
        self._owed: dict[ObjectName, None] = {}

    @property
    def me(self) -> Holder | None:
        return self._me

    @property
    def let_go(self) -> frozenset[Holder]:
        """Who held versions that are current no more."""
        return frozenset(self._let_go)

    @property
    def revision(self) -> int:
        """Of which revision all of it was read."""
        return self._snapshot.revision

    def owed(self) -> list[tuple[ObjectName, Pending | None, Record | None]]:
        """The pending writes that were changed, None for one that is over, with their records as far as those are known
        here."""
        found: list[tuple[ObjectName, Pending | None, Record | None]] = []
        for name in self._owed:
            value, row = self._written.get(self._keys.pending(name)), self._snapshot.rows.get(self._keys.record(name))
            record = record_of(row) if row else None
            if stored := self._written.get(self._keys.record(name)):
                record = unpack(Stored, stored).record
            found.append((name, unpack(Pending, value) if value is not None else None, record))
        return found

    def early(self) -> list[Change]:
        """What must be done before, after which the transition is run anew: it then has less to change."""
        if len(self._disturbed) <= EARLY_COUNT:
            return []
        puts = list(self._disturbed.values())
        groups = (puts[start : start + EARLY_COUNT] for start in range(0, len(puts), EARLY_COUNT))
        return [Change(tuple(self._guard(put.key) for put in group), tuple(group), self._me) for group in groups]

    def change(self) -> Change | None:
        """What was changed, None for nothing."""
        writes: list[Put | Delete] = [Delete(each.key, each.end) for each in self._cleared]
        for key, value in self._written.items():
            writes.append(Delete(key) if value is None else Put(key, value))
        if not writes:
            return None
        single = [guard for guard in self._guards.values() if not guard.end]
        single += [self._guard(key) for key in self._disturbed]
        return Change((*single, *self._range_guards()), (*writes, *self._disturbed.values()), self._me)

    def _range_guards(self) -> list[Guard]:
        ranges = [guard for guard in self._guards.values() if guard.end]
        if len(ranges) <= RANGES_COUNT:
            return ranges
        tables: dict[bytes, list[Guard]] = {}
        for guard in ranges:
            tables.setdefault(self._keys.table_of(guard.key), []).append(guard)
        return [
            replace(each[0], key=min(guard.key for guard in each), end=max(guard.end for guard in each))
            for each in tables.values()
        ]

    # -- plain access
    def expect(self, wanted: Iterable[Range]) -> None:
        """Have all of these fetched at once."""
        snapshot = self._snapshot
        missing = [each for each in wanted if each.key not in (snapshot.ranges if each.end else snapshot.rows)]
        if missing:
            raise NotReadError(missing)

    def _row(self, key: bytes) -> KeyValue | None:
        if key not in self._snapshot.rows:
            raise NotReadError([Range(key)])
        if key not in self._markers:
            self._guards[key, b""] = self._guard(key)
        return self._snapshot.rows[key]

    def _guard(self, key: bytes) -> Guard:
        row = self._snapshot.rows[key]
        return Guard(key, Field.MODIFIED, row.mod_revision if row else 0)

    def _range(self, wanted: Range, also: Iterable[Range] = ()) -> list[bytes]:
        """The keys in a range, as they are after this transition's own changes. What is missing is fetched with
        `also`."""
        found = self._snapshot.ranges.get(wanted.key)
        if found is None:
            more = (each for each in also if each.key not in self._snapshot.ranges)
            raise NotReadError(list({each.key: each for each in (wanted, *more)}.values()))
        bound = self._snapshot.revision + 1
        self._guards[wanted.key, wanted.end] = Guard(wanted.key, Field.MODIFIED, bound, Relation.LESS, wanted.end)
        keys = {row.key for row in found}
        keys |= {key for key in self._written if wanted.key <= key < wanted.end}
        return sorted(key for key in keys if self._written.get(key, b"") is not None)

    def _values(self, kind: type[T], wanted: Range) -> list[T]:
        """The values in a range that this transition has not changed. That one of them goes is not guarded against."""
        rows = (self._snapshot.rows[key] for key in self._range(wanted))
        return [value_of(kind, row) for row in rows if row is not None]

    def _get(self, kind: type[T], key: bytes) -> T | None:
        if key in self._written:
            value = self._written[key]
            return unpack(kind, value) if value is not None else None
        row = self._row(key)
        return value_of(kind, row) if row else None

    def _put(self, key: bytes, value: object) -> None:
        self._written[key] = pack(value)

    def _delete(self, key: bytes) -> None:
        self._written[key] = None

    def next_revision(self) -> int:
        return OWN_REVISION

    # -- records
    def record(self, name: ObjectName) -> Record | None:
        stored = self._stored(name)
        return stored.record if stored else None

    def _stored(self, name: ObjectName) -> Stored | None:
        key = self._keys.record(name)
        if key in self._written:
            return self._get(Stored, key)
        row = self._row(key)
        if row is None:
            return None
        stored = unpack(Stored, row.value)
        return Stored(settled(stored.record, row.mod_revision), stored.age)

    def put_record(self, record: Record) -> None:
        name, version = record.name, record.version
        old = self._unindex(name, keep_uid=version.uid if version else None)
        if old is not None and old.role is Role.MARKER and record.role is not Role.MARKER:
            self._delete(self._keys.marker(name))
        if record.role is Role.MARKER:
            # Anew each time: whoever looks at the markers of the scope rests on no other being committed.
            self._written[self._keys.marker(name)] = b""
        age = 0
        if record.state is State.CLEAN and version is not None:
            age = min(record.revision, self._snapshot.revision)
            self._written[self._clean_key(record, age)] = version.uid.encode()
        self._put(self._keys.record(name), Stored(record, age))

    def touch_record(self, record: Record) -> None:
        stored = self._stored(record.name)
        self._put(self._keys.record(record.name), Stored(record, stored.age if stored else 0))

    def drop_record(self, name: ObjectName) -> None:
        old = self._unindex(name, keep_uid=None)
        if old is not None and old.role is Role.MARKER:
            self._delete(self._keys.marker(name))
        self._written[self._keys.slot(name)] = b""
        self._delete(self._keys.record(name))

    def _unindex(self, name: ObjectName, keep_uid: str | None) -> Record | None:
        stored = self._stored(name)
        if stored is None:
            return None
        old = stored.record
        if old.state is State.CLEAN:
            self._delete(self._clean_key(old, stored.age))
        if old.version is not None and old.version.uid != keep_uid:
            self._clear_holders(name, old.version.uid)
        return old

    def _clear_holders(self, name: ObjectName, uid: str) -> None:
        self._cleared.append(self._keys.holders(name, uid))
        every = self._keys.all_holders(name)
        self._range(every)
        for row in self._snapshot.ranges[every.key]:
            of_uid, node = self._keys.holder_of(name, row.key)
            if of_uid == uid:
                self._let_go.add(value_of(Holder, row))
                self._delete(self._keys.held(node, name, uid))

    def _clean_key(self, record: Record, age: int) -> bytes:
        return self._keys.clean(record.name, age, marker=record.role is Role.MARKER)

    def drops(self, name: ObjectName) -> int:
        row = self._row(self._keys.slot(name))
        return row.version if row else 0

    def marker_names(self, bucket: str, scope: str) -> list[ObjectName]:
        wanted = self._keys.markers(bucket, scope)
        around = (self._keys.markers(bucket, each) for each in ancestor_scopes(scope)) if scope else ()
        names = [self._keys.marker_name(bucket, scope, key) for key in self._range(wanted, around)]
        # Whoever asks for markers looks at each.
        rows = [self._keys.pending(name) for name in names]
        self.expect(Range(key) for key in rows)
        self._markers.update(key for key in rows if (key, b"") not in self._guards and key not in self._written)
        return names

    # -- pending writes
    def pending(self, name: ObjectName) -> Pending | None:
        return self._get(Pending, self._keys.pending(name))

    def put_pending(self, write: Pending) -> None:
        self._index(self.pending(write.name), write)
        self._put(self._keys.pending(write.name), write)
        self._owed[write.name] = None

    def _index(self, old: Pending | None, new: Pending | None) -> None:
        before, after = self._indexed(old), self._indexed(new)
        self._written.update((key, None) for key in before if key not in after)
        self._written.update((key, value) for key, value in after.items() if before.get(key) != value)

    def _indexed(self, write: Pending | None) -> dict[bytes, bytes]:
        """The rows that mirror a pending write."""
        if write is None:
            return {}
        found = {self._keys.owed(write): b"%d" % write.size_bytes}
        if write.role is Role.LARGE and write.kind is Kind.PUT and write.is_owed:
            found[self._keys.large(write.name)] = pack(Large(write.place))
        return found

    def disturb(self, write: Pending) -> None:
        key = self._keys.pending(write.name)
        if key in self._markers:
            self._disturbed[key] = Put(key, pack(write))
        else:
            self.put_pending(write)

    def drop_pending(self, name: ObjectName) -> None:
        old = self.pending(name)
        if old is not None:
            self._index(old, None)
            self._delete(self._keys.pending(name))
            self._owed[name] = None

    def orphan(self, name: ObjectName, upload: OriginUpload) -> None:
        self._put(self._keys.orphan(name, upload), Orphan(name, upload))

    def drop_orphan(self, name: ObjectName, upload: OriginUpload) -> None:
        self._delete(self._keys.orphan(name, upload))

    # -- plans of sets
    def plan(self, bucket: str, prefix: str) -> Plan | None:
        return self._get(Plan, self._keys.plan(bucket, prefix))

    def put_plan(self, plan: Plan) -> None:
        self._put(self._keys.plan(plan.bucket, plan.prefix), plan)

    def drop_plan(self, plan: Plan) -> None:
        self._delete(self._keys.plan(plan.bucket, plan.prefix))

    def run(self, bucket: str, prefix: str) -> Run | None:
        return self._get(Run, self._keys.run(bucket, prefix))

    def put_run(self, run: Run) -> None:
        self._put(self._keys.run(run.bucket, run.prefix), run)

    # -- steps under way
    def steps_near(self, step: Step) -> list[Step]:
        bucket, key = step.name.bucket, step.name.key
        ranges = [self._keys.steps(step.name)]
        if _takes(step):
            ranges += [self._keys.speaking_for(bucket, scope) for scope in ancestor_scopes(key)]
        if step.role is Role.MARKER:
            ranges.append(self._keys.below("t", bucket, reach_of(scope_of(key))))
        self.expect(ranges)
        return [each for wanted in ranges for each in self._values(Step, wanted)]

    def put_step(self, step: Step) -> None:
        self.drop_step(step)
        self._put(self._keys.step(step), step)
        if _takes(step):
            self._put(self._keys.taking(step), step)
        if step.role is Role.MARKER:
            self._put(self._keys.speaking(step), step)

    def drop_step(self, step: Step) -> None:
        for key in (self._keys.step(step), self._keys.taking(step), self._keys.speaking(step)):
            self._delete(key)

    # -- clients' multipart uploads
    def upload(self, upload_id: str) -> Upload | None:
        return self._get(Upload, self._keys.upload(upload_id))

    def put_upload(self, upload: Upload) -> None:
        self._put(self._keys.upload(upload.upload_id), upload)

    def drop_upload(self, upload: Upload) -> None:
        self._delete(self._keys.upload(upload.upload_id))
        self._cleared.append(self._keys.parts(upload.upload_id))

    def part(self, upload_id: str, number: int) -> Part | None:
        return self._get(Part, self._keys.part(upload_id, number))

    def put_part(self, upload_id: str, part: Part) -> None:
        self._put(self._keys.part(upload_id, part.number), part)

    def parts(self, upload_id: str) -> list[Part]:
        return self._values(Part, self._keys.parts(upload_id))

    def put_finished(self, upload_id: str, finished: Finished) -> None:
        self._put(self._keys.finished(upload_id), finished)

    # -- only in a cluster
    def hold(self, name: ObjectName, uid: str, holders: Sequence[Holder]) -> None:
        """Note who holds a version.

        Raises:
            HolderLostError: one of them no longer is what it was.
        """
        self.see_alive(holders)
        for holder in holders:
            self._put(self._keys.holder(name, uid, holder.node), holder)
            self._put(self._keys.held(holder.node, name, uid), holder)

    def release(self, name: ObjectName, uid: str, node: str) -> None:
        """A node no longer holds a version."""
        self._delete(self._keys.holder(name, uid, node))
        self._delete(self._keys.held(node, name, uid))

    def see_alive(self, holders: Sequence[Holder]) -> None:
        """See that nodes are what they were.

        Raises:
            HolderLostError: one of them is gone, or began anew.
        """
        self.expect(Range(self._keys.node(each.node)) for each in holders)
        for holder in holders:
            if self.epoch_of(holder.node) != holder.epoch:
                raise HolderLostError("a node that was to hold a copy is gone", node=holder.node, epoch=holder.epoch)

    def epoch_of(self, node: str) -> int:
        """The epoch of a member, 0 for none."""
        key = self._keys.node(node)
        row = self._row(key)
        epoch = row.create_revision if row else 0
        # It may tell of its free memory all the time.
        self._guards[key, b""] = Guard(key, Field.CREATED, epoch)
        return epoch


def _takes(step: Step) -> bool:
    """Whether it takes something from the sets around its key (see `checkpoints.markers.collide`)."""
    return step.replaces and step.role is not Role.POINTER
