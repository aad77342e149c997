"""The embedded directory against a model of dictionaries: two processes' worth of handles, any order of calls."""

import asyncio
import shutil
import tempfile
from collections.abc import Coroutine
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from tiergate.directory.base import Committed, Intent
from tiergate.directory.embedded import EmbeddedDirectory
from tiergate.errors import ConflictError, FencedError
from tiergate.lmdbfile import object_key
from tiergate.model import (
    NO_BASE,
    UNKNOWN_BASE,
    Kind,
    ObjectName,
    OriginUpload,
    Pending,
    Record,
    Role,
    State,
    Version,
)
from tiergate.testing.directory_contract import make_version

T = TypeVar("T")

NAMES = [
    ObjectName(bucket, key)
    for bucket in ("b", "b2")
    for key in ("r/1/s", "r/1/.metadata", "r/.metadata", "é/s", "k" * 600 + "1", "k" * 600 + "2", "k" * 478)
]
names = st.sampled_from(NAMES)
bases = st.sampled_from([UNKNOWN_BASE, NO_BASE, "asked"])


def scope_of(key: str) -> str:
    return key[: key.rfind("/") + 1]


def role_of(name: ObjectName) -> Role:
    return Role.MARKER if name.key.endswith(".metadata") else Role.SMALL


@dataclass
class Entry:
    record: Record
    pending: Pending | None


class Model:
    """What the contract says, in the plainest form."""

    def __init__(self) -> None:
        self.revision = 0
        self.entries: dict[ObjectName, Entry] = {}
        self.orphans: set[tuple[ObjectName, OriginUpload]] = set()

    def next(self) -> int:
        self.revision += 1
        return self.revision

    def guard(self, name: ObjectName) -> int:
        entry = self.entries.get(name)
        return entry.record.modified if entry else 0

    def owed(self, name: ObjectName) -> Pending | None:
        entry = self.entries.get(name)
        return entry.pending if entry else None

    def owed_now(self) -> list[Pending]:
        found = [entry.pending for entry in self.entries.values() if entry.pending]
        return sorted(found, key=lambda write: (write.place, object_key(write.name.bucket, write.name.key)))

    def commit(self, name: ObjectName, version: Version | None, intent: Intent, uid: str) -> Committed | None:
        entry, before = self.entries.get(name), self.owed(name)
        if intent.guard is not None and intent.guard != self.guard(name):
            raise ConflictError("")
        base = intent.base
        if before is not None and (before.begun or before.base != UNKNOWN_BASE):
            base = UNKNOWN_BASE if before.begun else before.base
        elif before is None and entry is not None:
            base = entry.record.origin_etag
        if version is None:
            if entry and entry.record.state is State.TOMBSTONE:
                return None
            if entry is None and base == NO_BASE:
                return None
        revision = self.next()
        replaced = entry.record.version if entry else None
        left = before.leftovers + ((before.upload,) if before.upload else ()) if before else ()
        if version is None and base == NO_BASE and before is not None and not before.begun:
            self.orphans |= {(name, upload) for upload in left}
            del self.entries[name]
        else:
            state, kind = (State.DIRTY, Kind.PUT) if version else (State.TOMBSTONE, Kind.DELETE)
            self.entries[name] = Entry(
                Record(name, state, revision, revision, version, role=intent.role),
                Pending(
                    name,
                    uid,
                    kind,
                    intent.role,
                    before.place if before else revision,
                    revision,
                    intent.start_revision,
                    intent.now_s,
                    version.size_bytes if version else 0,
                    base,
                    leftovers=left,
                    withdrawn=bool(version and before and before.withdrawn),
                ),
            )
        if entry and replaced:
            self.disturb(name, entry.record.revision, intent, deleting=version is None)
        return Committed(revision, replaced)

    def disturb(self, name: ObjectName, revision: int, intent: Intent, *, deleting: bool) -> None:
        scopes = {
            scope_of(other.key)
            for other in self.entries
            if other.bucket == name.bucket
            and role_of(other) is Role.MARKER
            and name.key.startswith(scope_of(other.key))
            and not (intent.role is Role.MARKER and scope_of(other.key) == scope_of(name.key))
        }
        if deleting and scopes:
            scopes = {max(scopes, key=len)}
        for other, entry in self.entries.items():
            write = entry.pending
            if other.bucket != name.bucket or scope_of(other.key) not in scopes or not write:
                continue
            if write.role is Role.MARKER and write.kind is Kind.PUT and write.revision > revision:
                entry.pending = replace(write, disturbed_s=intent.now_s)

    def persisted(self, name: ObjectName, uid: str, etag: str, now_s: float) -> Version | None:
        entry = self.entries.get(name)
        if entry is None or entry.pending is None:
            return None
        if entry.pending.uid != uid:
            entry.pending = replace(entry.pending, base=etag, begun=False)
            return None
        self.orphans |= {(name, upload) for upload in entry.pending.leftovers}
        if entry.pending.kind is Kind.DELETE:
            del self.entries[name]
            return None
        record = replace(entry.record, state=State.CLEAN, modified=self.next(), origin_etag=etag, validated_s=now_s)
        self.entries[name] = Entry(record, None)
        return record.version


class DirectoryMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        shm = Path("/dev/shm")
        self.folder = Path(tempfile.mkdtemp(dir=shm if shm.is_dir() else None))
        self.runner = asyncio.Runner()
        first = EmbeddedDirectory.open(self.folder, 4 << 20)
        self.handles = [first, EmbeddedDirectory(first._environment)]
        self.model = Model()
        self.count = 0

    def teardown(self) -> None:
        self.runner.close()
        self.handles[0].close()
        shutil.rmtree(self.folder)

    def ask(self, call: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(call)

    @property
    def directory(self) -> EmbeddedDirectory:
        return self.handles[self.count % 2]

    def intent(self, name: ObjectName, base: str, guarded: int) -> Intent:
        guard = [None, self.model.guard(name), self.model.guard(name) + 1][guarded]
        return Intent(role_of(name), self.model.revision, 1000.0 + self.count, base, guard)

    @rule(name=names, base=bases, guarded=st.sampled_from([0, 0, 0, 1, 2]))
    def put(self, name: ObjectName, base: str, guarded: int) -> None:
        self.count += 1
        version, intent = make_version(f"v{self.count}", self.count), self.intent(name, base, guarded)
        try:
            expected = self.model.commit(name, version, intent, version.uid)
        except ConflictError:
            with pytest.raises(ConflictError):
                self.ask(self.directory.put(name, version, intent))
            return
        assert self.ask(self.directory.put(name, version, intent)) == expected

    @rule(name=names, base=bases, guarded=st.sampled_from([0, 0, 1]))
    def delete(self, name: ObjectName, base: str, guarded: int) -> None:
        self.count += 1
        intent = self.intent(name, base, guarded)
        done = self.ask(self.directory.delete(name, intent))
        pending = self.ask(self.directory.get(name)).pending
        assert self.model.commit(name, None, intent, pending.uid if pending else "") == done

    @rule(name=names, base=bases)
    def begin(self, name: ObjectName, base: str) -> None:
        write = self.model.owed(name)
        if write is None:
            with pytest.raises(FencedError):
                self.ask(self.directory.begin(name, "v0", base))
            return
        self.model.entries[name].pending = replace(write, begun=True, base=base)
        assert self.ask(self.directory.begin(name, write.uid, base)) == self.model.owed(name)

    @rule(name=names, number=st.integers(0, 3))
    def note_upload(self, name: ObjectName, number: int) -> None:
        write = self.model.owed(name)
        if write is not None:
            upload = OriginUpload(f"u{number}" if number else "", float(self.count))
            self.model.entries[name].pending = replace(write, upload=upload)
            self.ask(self.directory.note_upload(name, write.uid, upload))

    @rule(name=names, superseded=st.sampled_from([False, False, True]))
    def persisted(self, name: ObjectName, superseded: bool) -> None:
        write = self.model.owed(name)
        uid = "another" if superseded or write is None else write.uid
        etag = "" if write is not None and write.kind is Kind.DELETE else f"o{self.count}"
        expected = self.model.persisted(name, uid, etag, 5.0)
        assert self.ask(self.directory.persisted(name, uid, etag, 5.0)) == expected

    @rule(name=names)
    def put_through(self, name: ObjectName) -> None:
        self.count += 1
        entry, write = self.model.entries.get(name), self.model.owed(name)
        version, intent = make_version(f"v{self.count}"), self.intent(name, UNKNOWN_BASE, 0)
        revision = self.model.next()
        if write is not None:
            left = write.leftovers + ((write.upload,) if write.upload else ())
            self.model.orphans |= {(name, upload) for upload in left}
        record = Record(name, State.CLEAN, revision, revision, version, "o", intent.now_s, role_of(name))
        self.model.entries[name] = Entry(record, None)
        if entry and entry.record.version:
            self.model.disturb(name, entry.record.revision, intent, deleting=False)
        committed = self.ask(self.directory.put_through(name, version, "o", intent))
        assert committed == Committed(revision, entry.record.version if entry else None)

    @rule(name=names)
    def adopt(self, name: ObjectName) -> None:
        self.count += 1
        version = make_version(f"f{self.count}", foreign=True)
        if name not in self.model.entries:
            modified = self.model.next()
            revision = modified if role_of(name) is Role.MARKER else 0
            record = Record(name, State.CLEAN, revision, modified, version, "o", 3.0, role_of(name))
            self.model.entries[name] = Entry(record, None)
        found = self.ask(self.directory.adopt(name, version, "o", role_of(name), 3.0))
        assert found == self.model.entries[name].record

    @rule(name=names)
    def forget(self, name: ObjectName) -> None:
        entry = self.model.entries.get(name)
        gone = entry is not None and entry.record.state is State.CLEAN
        version = self.ask(self.directory.forget(name, None))
        assert version == (entry.record.version if gone and entry else None)
        if gone:
            del self.model.entries[name]

    @rule(name=st.sampled_from([name for name in NAMES if role_of(name) is Role.MARKER]))
    def withdraw(self, name: ObjectName) -> None:
        entry = self.model.entries.get(name)
        record = entry.record if entry else None
        uid = record.version.uid if record and record.version else "v0"
        found = self.ask(self.directory.withdraw(name, uid, 77.0))
        if record is None or record.version is None or record.state is not State.CLEAN:
            assert found is None
            return
        write = Pending(
            name,
            uid,
            Kind.PUT,
            Role.MARKER,
            record.revision,
            record.revision,
            record.revision,
            77.0,
            record.version.size_bytes,
            record.origin_etag,
            disturbed_s=77.0,
            withdrawn=True,
        )
        dirty = replace(record, state=State.DIRTY, modified=self.model.next(), origin_etag="")
        self.model.entries[name] = Entry(dirty, write)
        assert found == write

    @rule(name=names, base=st.sampled_from(["", "behind"]))
    def owe_again(self, name: ObjectName, base: str) -> None:
        entry = self.model.entries.get(name)
        record = entry.record if entry else None
        uid = record.version.uid if record and record.version else "v0"
        found = self.ask(self.directory.owe_again(name, uid, base, 88.0))
        if record is None or record.version is None or record.state is not State.CLEAN:
            assert found is None
            return
        place, size_bytes = record.revision, record.version.size_bytes
        write = Pending(name, uid, Kind.PUT, record.role, place, place, place, 88.0, size_bytes, base)
        dirty = replace(record, state=State.DIRTY, modified=self.model.next(), origin_etag="")
        self.model.entries[name] = Entry(dirty, write)
        assert found == write

    @rule(name=names)
    def settled_set(self, name: ObjectName) -> None:
        write = self.model.owed(name)
        if write is not None:
            self.model.entries[name].pending = replace(write, disturbed_s=0.0)
            self.ask(self.directory.settled_set(name, write.uid))

    @rule(name=names, reason=st.sampled_from(["", "refused"]))
    def quarantine(self, name: ObjectName, reason: str) -> None:
        write = self.model.owed(name)
        if write is not None:
            self.model.entries[name].pending = replace(write, quarantined=reason)
            self.ask(self.directory.quarantine(name, write.uid, reason))

    @rule(keep_count=st.integers(0, 3))
    def trim_clean(self, keep_count: int) -> None:
        clean = [entry.record for entry in self.model.entries.values() if entry.record.state is State.CLEAN]
        clean.sort(key=lambda record: (record.revision, record.modified))
        members = [record for record in clean if record.role is not Role.MARKER]
        gone = members[: max(0, len(clean) - keep_count)]
        assert self.ask(self.directory.trim_clean(keep_count)) == [record.version for record in gone]
        for record in gone:
            del self.model.entries[record.name]

    @rule(bucket=st.sampled_from(["b", "b2"]), prefix=st.sampled_from(["", "r/", "r/1/", "k" * 600, "z"]), after=names)
    def scan(self, bucket: str, prefix: str, after: ObjectName) -> None:
        keys = sorted((name.key for name in self.model.entries if name.bucket == bucket), key=str.encode)
        keys = [key for key in keys if key.startswith(prefix) and key.encode() > after.key.encode()]
        found = self.ask(self.directory.scan(bucket, prefix, after.key, 3))
        assert [record.name.key for record in found] == keys[:3]

    @invariant()
    def says_what_the_model_says(self) -> None:
        assert self.ask(self.directory.revision()) == self.model.revision
        assert self.ask(self.directory.pending()) == self.model.owed_now()
        for name in NAMES:
            seen, entry = self.ask(self.directory.get(name)), self.model.entries.get(name)
            assert seen.record == (entry.record if entry else None)
            assert seen.pending == self.model.owed(name)
        assert set(self.ask(self.directory.orphan_uploads())) == self.model.orphans
        ages = [write.committed_s for write in self.model.owed_now() if not write.quarantined]
        assert self.ask(self.directory.oldest_pending_s()) == min(ages, default=None)
        owed = [write.size_bytes for write in self.model.owed_now() if not write.quarantined]
        assert self.ask(self.directory.owed_bytes()) == sum(owed)

    @invariant()
    def counts_are_true(self) -> None:
        records = [entry.record for entry in self.model.entries.values()]
        expected = {str(state): sum(record.state is state for record in records) for state in State}
        expected["pending"] = len(self.model.owed_now())
        expected["pending_bytes"] = sum(write.size_bytes for write in self.model.owed_now())
        counts = self.ask(self.directory.counts())
        assert {name: counts[name] for name in expected} == expected
        uids = {record.version.uid for record in records if record.version}
        assert self.ask(self.directory.live_holders()) == uids

    @invariant()
    def standing_markers_are_the_innermost(self) -> None:
        for scopes in (["r/1/", "r/", ""], ["r/", ""], [""]):
            for scope in scopes:
                expected = {
                    name
                    for name in self.model.entries
                    if name.bucket == "b" and role_of(name) is Role.MARKER and scope_of(name.key) == scope
                }
                if expected:
                    break
            else:
                expected = set()
            found = self.ask(self.directory.standing_markers("b", scopes))
            assert {seen.record.name for seen in found if seen.record} == expected


def test_directory_any_calls_does_what_the_model_does() -> None:
    run_state_machine_as_test(
        DirectoryMachine, settings=settings(max_examples=60, stateful_step_count=40, deadline=None)
    )
