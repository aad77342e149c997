"""The directory of a cluster: etcd. Every transition is one guarded transaction over the rows it read, tried again when
somebody was faster. The place of a commit in the order is etcd's revision; commits that went together share theirs.
"""

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

from tiergate.directory import counting, ownership, plans, reinsertion, transitions, uploads
from tiergate.directory.base import Committed, Finished, Held, Intent, Seen
from tiergate.directory.beside import Beside
from tiergate.directory.bynode import ByNode
from tiergate.directory.changes import Changes
from tiergate.directory.clusterreads import At, Reader
from tiergate.directory.clusterrows import (
    READS_COUNT,
    ClusterRows,
    Snapshot,
    record_of,
    value_of,
)
from tiergate.directory.codec import Orphan, pack
from tiergate.directory.committer import Change, Standing
from tiergate.directory.era import Era
from tiergate.directory.keys import Keys
from tiergate.directory.ledger import Entry, Ledger
from tiergate.directory.owed import OwedChanges
from tiergate.directory.view import Rows
from tiergate.errors import MemoryFullError
from tiergate.etcd.client import EtcdClient
from tiergate.etcd.values import Delete, Field, Found, Guard, KeyValue, Put, Range
from tiergate.model import (
    Agreement,
    Bucket,
    Holder,
    Kind,
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
    Version,
    new_uid,
)
from tiergate.policy.persistence import Beginning

TRIM_COUNT = 1000
"""Clean records dropped in one call at most."""

TRIM_GROUP_COUNT = 10
"""Clean records dropped in one transaction."""

PROMOTE_GROUP_COUNT = 15
"""Parked writes promoted in one transaction."""

DELETE_GROUP_COUNT = 60
"""Outdated rows deleted in one transaction."""


T = TypeVar("T")


class ClusteredDirectory(OwedChanges):
    """Implements `tiergate.directory.base.ClusterDirectory`; see there. One for a process.

    Beyond what is said there, any method raises `DirectoryUnavailableError` when etcd does not answer, and one that
    changes something `OutcomeUnknownError` when the answer was lost for good, `OverloadedError` when rivals win all the
    time. After an unknown outcome: a change that was given up can happen later, until another change made through this
    object has returned; from then on `get` tells for good whether it did, by the version's uid.

    `standing`: the node's membership. Without one this is nobody's: what it commits has no owner, and it answers for
    the whole cluster where a member answers for itself. `ledger`: where the node notes what it would have to tell a
    directory that forgot it; `era` names this one.
    """

    def __init__(
        self,
        client: EtcdClient,
        keys: Keys,
        standing: Standing | None = None,
        ledger: Ledger | None = None,
        era: Callable[[], int] = lambda: 0,
    ) -> None:
        self._client = client
        self._keys = keys
        self._reader = Reader(client)
        self._by_node = ByNode(client, self._reader, keys)
        self._ledger = ledger
        self._changes = Changes(client, keys, standing, ledger, era)

    @property
    def _me(self) -> Holder | None:
        return self._changes.me

    async def close(self) -> None:
        """Stop committing. The client stays open."""
        await self._changes.close()

    # -- objects
    async def revision(self) -> int:
        return (await self._client.read(Range(self._keys.table("o")))).revision

    async def get(self, name: ObjectName) -> Seen:
        keys = self._keys
        outcome = await self._client.read(
            Range(keys.record(name)),
            Range(keys.pending(name)),
            Range(keys.slot(name)),
            Range(keys.bucket(name.bucket)),
            keys.all_holders(name),
        )
        record, write, slot, bucket = (next(iter(outcome.found(index)), None) for index in range(4))
        seen = _seen(record, write, outcome.revision, slot.version if slot else 0)
        holders: dict[str, set[Holder]] = {}
        for row in outcome.found(4):
            holders.setdefault(keys.holder_of(name, row.key)[0], set()).add(value_of(Holder, row))
        return replace(
            seen,
            holders={uid: frozenset(each) for uid, each in holders.items()},
            bucket=value_of(Bucket, bucket) if bucket else None,
        )

    async def records(self, bucket: str, keys: Sequence[str]) -> list[Record]:
        names = [ObjectName(bucket, key) for key in keys]
        return await self._reader.consistent(partial(self._records_at, names))

    async def scan(self, bucket: str, prefix: str, after: str, limit: int) -> list[Record]:
        wanted = self._keys.under("o", bucket, prefix, after)
        return [record_of(row) for row in await self._reader.rows(wanted, limit)]

    async def scan_unpersisted(self, bucket: str, prefix: str, after: str, limit: int) -> list[Record]:
        wanted = self._keys.under("q", bucket, prefix, after)
        if wanted is None:
            return []

        async def read(at: At) -> list[Record]:
            names = [value_of(Pending, row).name async for row in self._reader.walk(wanted, at, limit)]
            return await self._records_at(names, at)

        return await self._reader.consistent(read)

    async def _records_at(self, names: Sequence[ObjectName], at: At) -> list[Record]:
        snapshot = Snapshot(at.revision)
        keys = [self._keys.record(name) for name in names]
        await snapshot.fetch(self._client, [Range(key) for key in keys])
        return [record_of(row) for row in map(snapshot.rows.__getitem__, keys) if row is not None]

    async def survey(self, bucket: str, prefix: str, after: str, limit: int) -> list[Seen]:
        wanted = self._keys.under("o", bucket, prefix, after)
        if wanted is None:
            return []

        async def read(at: At) -> list[Seen]:
            records = [record_of(row) async for row in self._reader.walk(wanted, at, limit)]
            if not records:
                return []
            first, last = records[0].name, records[-1].name
            found = await self._reader.values_at(Pending, self._keys.between("q", first, last), at)
            writes = {write.name: write for write in found}
            holders: dict[ObjectName, dict[str, frozenset[Holder]]] = {}
            async for row in self._reader.walk(self._keys.between("h", first, last), at):
                name, uid = self._keys.held_at(row.key)
                of_name = holders.setdefault(name, {})
                of_name[uid] = of_name.get(uid, frozenset()) | {value_of(Holder, row)}
            return [
                Seen(record, writes.get(record.name), at.revision, holders=holders.get(record.name, {}))
                for record in records
            ]

        return await self._reader.consistent(read)

    async def put(self, name: ObjectName, version: Version, intent: Intent) -> Committed:
        def commit(rows: ClusterRows) -> Committed:
            rows.hold(name, version.uid, intent.holders)
            return transitions.put(rows, name, version, intent)

        return await self._changes.committing(commit, *self._changes.replacing(name, intent))

    async def put_through(self, name: ObjectName, version: Version, origin_etag: str, intent: Intent) -> Committed:
        def commit(rows: ClusterRows) -> Committed:
            rows.hold(name, version.uid, intent.holders)
            return transitions.put_through(rows, name, version, origin_etag, intent)

        return await self._changes.committing(commit, *self._changes.replacing(name, intent))

    async def delete(self, name: ObjectName, intent: Intent) -> Committed | None:
        uid = f"delete-{new_uid(intent.now_s)}"

        def transition(rows: ClusterRows) -> Committed | None:
            committed = transitions.delete(rows, name, uid, intent)
            return replace(committed, held_by=rows.let_go) if committed else None

        return await self._changes.make(transition, *self._changes.replacing(name))

    async def adopt(
        self,
        name: ObjectName,
        version: Version,
        origin_etag: str,
        role: Role,
        now_s: float,
        since: int | None = None,
    ) -> Record:
        keys = (self._keys.record(name), self._keys.slot(name))
        return await self._changes.make(
            lambda rows: transitions.adopt(rows, name, version, origin_etag, role, now_s, since), *keys
        )

    async def revalidated(self, name: ObjectName, uid: str, now_s: float) -> None:
        await self._changes.of_object(name, lambda rows: transitions.revalidated(rows, name, uid, now_s))

    async def forget(self, name: ObjectName, uid: str | None) -> Version | None:
        return await self._changes.of_object(name, lambda rows: transitions.forget(rows, name, uid))

    async def trim_clean(self, keep_count: int) -> list[Version]:
        clean, markers = self._keys.all("c"), self._keys.all("k")
        outcome = await self._client.read(replace(clean, count_only=True), replace(markers, count_only=True))
        total = sum(answer.count for answer in outcome.answers if isinstance(answer, Found))
        excess = min(TRIM_COUNT, total - keep_count)
        if excess <= 0:
            return []
        oldest = (await self._client.read(replace(clean, limit=excess, keys_only=True))).found(0)
        names = [self._keys.clean_name(row.key) for row in oldest]
        dropped: list[Version] = []
        for start in range(0, len(names), TRIM_GROUP_COUNT):
            group = names[start : start + TRIM_GROUP_COUNT]
            dropped += await self._trim(group)
        return dropped

    async def _trim(self, names: Sequence[ObjectName]) -> list[Version]:
        first = [wanted for name in names for wanted in (Range(self._keys.record(name)), self._keys.all_holders(name))]
        try:
            return await self._changes.make(lambda rows: transitions.drop_clean(rows, names), *first)
        except MemoryFullError:
            if len(names) == 1:
                raise
        # Very many nodes hold them.
        return [version for name in names for version in await self._trim([name])]

    # -- write-back
    async def pending(self) -> list[Pending]:
        me = self._me
        if me is not None:
            return await self._by_node.owed_as(me)
        return [write for write in await self._writes() if not write.parked]

    async def parked(self) -> list[Pending]:
        me = self._me
        if me is not None:
            return await self._by_node.parked_as(me)
        return [write for write in await self._writes() if write.parked]

    async def _writes(self) -> list[Pending]:
        found = await self._reader.values(Pending, self._keys.all("q"))
        return sorted(found, key=lambda write: (write.place, write.name))

    async def promote(self, writes: Sequence[Pending], now_s: float) -> int:
        count = 0
        for start in range(0, len(writes), PROMOTE_GROUP_COUNT):
            part = writes[start : start + PROMOTE_GROUP_COUNT]
            first = [self._keys.pending(write.name) for write in part]
            count += await self._changes.make(partial(transitions.promote, writes=part, now_s=now_s), *first)
        return count

    async def get_plan(self, bucket: str, prefix: str) -> Plan | None:
        return await self._reader.one(Plan, self._keys.plan(bucket, prefix))

    async def plans(self, bucket: str, under: str) -> list[Plan]:
        return await self._reader.values(Plan, self._keys.under("g", bucket, under, ""))

    async def get_run(self, bucket: str, prefix: str) -> Run | None:
        return await self._reader.one(Run, self._keys.run(bucket, prefix))

    async def decide(self, beginning: Beginning) -> Plan:
        keys = (self._keys.plan(beginning.bucket, beginning.prefix), self._keys.run(beginning.bucket, beginning.run))
        return await self._changes.make(lambda rows: plans.decide(rows, beginning), *keys)

    async def _change_plan(self, plan: Plan, transition: Callable[[Rows], T]) -> T:
        return await self._changes.make(transition, self._keys.plan(plan.bucket, plan.prefix))

    async def beside(self, writes: Sequence[Pending], whole: Collection[str] = ()) -> list[Pending]:
        return await self._reader.consistent(lambda at: Beside(self._reader, self._keys, at).read(writes, whole))

    async def pending_under(self, bucket: str, prefix: str, limit: int) -> list[Pending]:
        return await self._reader.values(Pending, self._keys.under("q", bucket, prefix, ""), limit)

    async def oldest_pending_s(self) -> float | None:
        me = self._me
        if me is not None:
            return await self._by_node.oldest_owed_s(me)
        return min((write.committed_s for write in await self.pending() if write.is_owed), default=None)

    async def owed_bytes(self) -> int:
        me = self._me
        if me is not None:
            return await self._by_node.owed_bytes(me)
        return sum(write.size_bytes for write in await self.pending() if write.is_owed)

    async def _change_pending(self, name: ObjectName, transition: Callable[[Rows], T]) -> T:
        return await self._changes.make(transition, self._keys.pending(name))

    async def orphan_uploads(self) -> list[tuple[ObjectName, OriginUpload]]:
        return [(orphan.name, orphan.upload) for orphan in await self._reader.values(Orphan, self._keys.all("x"))]

    async def persisted(self, name: ObjectName, uid: str, origin_etag: str, now_s: float) -> Version | None:
        return await self._changes.of_object(
            name, lambda rows: transitions.persisted(rows, name, uid, origin_etag, now_s)
        )

    async def standing_markers(self, bucket: str, scopes: Sequence[str]) -> list[Seen]:
        ranges = [self._keys.markers(bucket, scope) for scope in scopes]

        async def read(at: At) -> list[Seen]:
            snapshot = Snapshot()
            await snapshot.fetch(self._client, ranges)
            for scope, wanted in zip(scopes, ranges, strict=True):
                names = [self._keys.marker_name(bucket, scope, row.key) for row in snapshot.ranges[wanted.key]]
                if names:
                    keys = [(self._keys.record(name), self._keys.pending(name)) for name in names]
                    await snapshot.fetch(self._client, [Range(key) for pair in keys for key in pair])
                    return [
                        _seen(snapshot.rows[record], snapshot.rows[write], snapshot.revision) for record, write in keys
                    ]
            return []

        return await self._reader.consistent(read)

    async def withdraw(self, name: ObjectName, uid: str, now_s: float) -> Pending | None:
        return await self._owed_here(name, uid, lambda rows: transitions.withdraw(rows, name, uid, now_s))

    async def owe_again(self, name: ObjectName, uid: str, base: str, now_s: float) -> Pending | None:
        return await self._owed_here(name, uid, lambda rows: transitions.owe_again(rows, name, uid, base, now_s))

    async def _owed_here(
        self, name: ObjectName, uid: str, owe: Callable[[ClusterRows], Pending | None]
    ) -> Pending | None:
        """Run a transition by which this node, which holds the bytes, comes to owe a version."""

        def transition(rows: ClusterRows) -> Pending | None:
            write = owe(rows)
            if write is not None and write.owner is not None:
                rows.hold(name, uid, [write.owner])
            return write

        return await self._changes.of_object(name, transition)

    async def quarantine(self, name: ObjectName, uid: str, reason: str) -> None:
        await self._changes.make(lambda rows: ownership.quarantine(rows, name, uid, reason), self._keys.pending(name))

    # -- steps under way
    async def begin_step(self, step: Step) -> bool:
        return await self._changes.make(lambda rows: transitions.begin_step(rows, step))

    async def steps(self) -> list[Step]:
        return await self._reader.values(Step, self._keys.all("s"))

    async def end_step(self, step: Step) -> None:
        await self._changes.make(lambda rows: rows.drop_step(step))

    # -- multipart uploads of clients
    async def create_upload(self, upload: Upload) -> None:
        await self._changes.make(lambda rows: rows.put_upload(upload))

    async def get_upload(self, upload_id: str) -> Upload | None:
        return await self._reader.one(Upload, self._keys.upload(upload_id))

    async def list_uploads(self, bucket: str, prefix: str) -> list[Upload]:
        every = await self._reader.values(Upload, self._keys.all("u"))
        found = [each for each in every if each.name.bucket == bucket and each.name.key.startswith(prefix)]
        return sorted(found, key=lambda upload: (upload.name.key.encode(), upload.started_s, upload.upload_id))

    async def put_part(self, upload_id: str, part: Part) -> Part | None:
        keys = (self._keys.upload(upload_id), self._keys.part(upload_id, part.number))
        return await self._changes.make(lambda rows: uploads.put_part(rows, upload_id, part), *keys)

    async def note_spill(self, upload_id: str, spill_id: str) -> str:
        return await self._changes.make(
            lambda rows: uploads.note_spill(rows, upload_id, spill_id), self._keys.upload(upload_id)
        )

    async def move_part(self, upload_id: str, part: Part, moved: Part) -> bool:
        return await self._changes.make(
            lambda rows: uploads.move_part(rows, upload_id, part, moved), self._keys.part(upload_id, part.number)
        )

    async def origin_upload_ids(self, bucket: str) -> set[str]:
        async def read(at: At) -> set[str]:
            orphans = await self._reader.values_at(Orphan, self._keys.under("x", bucket, "", ""), at)
            writes = await self._reader.values_at(Pending, self._keys.under("q", bucket, "", ""), at)
            every = await self._reader.values_at(Upload, self._keys.all("u"), at)
            found = {orphan.upload.upload_id for orphan in orphans}
            found |= {upload.upload_id for write in writes for upload in transitions.leftovers_of(write)}
            return found | {upload.spill_id for upload in every if upload.name.bucket == bucket}

        return await self._reader.consistent(read) - {""}

    async def list_parts(self, upload_id: str) -> list[Part]:
        return await self._reader.values(Part, self._keys.parts(upload_id))

    async def abort_upload(self, upload_id: str) -> list[Part] | None:
        return await self._changes.make(lambda rows: uploads.abort(rows, upload_id), self._keys.upload(upload_id))

    async def finish_upload(
        self, upload_id: str, version: Version, part_list: Sequence[tuple[int, str]], intent: Intent
    ) -> Committed:
        def commit(rows: ClusterRows) -> Committed:
            name = uploads.known(rows, upload_id).name
            rows.expect(self._changes.replacing(name, intent))
            rows.hold(name, version.uid, intent.holders)
            return uploads.finish(rows, upload_id, version, part_list, intent)

        return await self._changes.committing(commit, self._keys.upload(upload_id), self._keys.parts(upload_id))

    async def end_spilled(
        self, upload_id: str, version: Version, part_list: Sequence[tuple[int, str]], now_s: float
    ) -> None:
        await self._changes.make(
            lambda rows: uploads.end_spilled(rows, upload_id, version, part_list, now_s), self._keys.upload(upload_id)
        )

    async def finished_upload(self, upload_id: str) -> Finished | None:
        return await self._reader.one(Finished, self._keys.finished(upload_id))

    async def expire_finished(self, before_s: float) -> int:
        # A receipt's value begins with its time; its writer wrote nothing since, and will find out if it still lives.
        # Our own is renewed by this.
        before, own = new_uid(max(before_s, 0.0)).encode()[:12], self._changes.receipt
        await self._delete(await self._select("r", lambda row: row.value < before and row.key != own))
        old = await self._select("f", lambda row: value_of(Finished, row).finished_s < before_s)
        old += await self._select("a", lambda row: value_of(Agreement, row).agreed_s < before_s)
        return await self._delete(old)

    async def _select(self, table: str, chosen: Callable[[KeyValue], bool]) -> list[KeyValue]:
        """Some rows of a table, without their values: those may be large."""

        async def read(at: At) -> list[KeyValue]:
            rows = self._reader.walk(self._keys.all(table), at)
            return [replace(row, value=b"") async for row in rows if chosen(row)]

        return await self._reader.consistent(read)

    async def _delete(self, rows: Sequence[KeyValue]) -> int:
        """Delete rows that are still what they were; how many."""
        count = 0
        for start in range(0, len(rows), DELETE_GROUP_COUNT):
            part = rows[start : start + DELETE_GROUP_COUNT]
            guards = tuple(Guard(row.key, Field.MODIFIED, row.mod_revision) for row in part)
            if await self._changes.commit(Change(guards, tuple(Delete(row.key) for row in part))) is not None:
                count += len(part)
        return count

    # -- buckets
    async def get_bucket(self, name: str) -> Bucket | None:
        return await self._reader.one(Bucket, self._keys.bucket(name))

    async def buckets(self) -> list[Bucket]:
        return await self._reader.values(Bucket, self._keys.all("b"))

    async def put_bucket(self, bucket: Bucket) -> None:
        await self._changes.commit(Change((), (Put(self._keys.bucket(bucket.name), pack(bucket)),)))

    async def forget_bucket(self, name: str) -> None:
        await self._changes.commit(Change((), (Delete(self._keys.bucket(name)),)))

    # -- pinned prefixes
    async def pin_prefix(self, pinned: PinnedPrefix) -> None:
        key = self._keys.pinned(pinned.bucket, pinned.prefix)
        await self._changes.commit(Change((Guard(key, Field.MODIFIED, 0),), (Put(key, pack(pinned)),)))

    async def unpin_prefix(self, bucket: str, prefix: str) -> bool:
        key = self._keys.pinned(bucket, prefix)
        rows = (await self._client.read(Range(key))).found(0)
        return bool(await self._delete(rows))

    async def pinned_prefixes(self) -> list[PinnedPrefix]:
        found = await self._reader.values(PinnedPrefix, self._keys.all("y"))
        return sorted(found, key=lambda each: each.pinned_s)

    # -- which checkpoint a restart takes
    async def quarantine_set(self, found: QuarantinedSet) -> None:
        key = self._keys.quarantined(found.bucket, found.prefix)
        await self._changes.commit(Change((), (Put(key, pack(found)),)))

    async def release_set(self, found: QuarantinedSet) -> bool:
        key = self._keys.quarantined(found.bucket, found.prefix)
        rows = (await self._client.read(Range(key))).found(0)
        return bool(await self._delete([row for row in rows if value_of(QuarantinedSet, row) == found]))

    async def quarantined_sets(self, bucket: str) -> list[QuarantinedSet]:
        return await self._reader.values(QuarantinedSet, self._keys.under("z", bucket, "", ""))

    async def agree(self, proposed: Agreement) -> Agreement:
        key = self._keys.agreement(proposed.bucket, proposed.prefix, proposed.name)
        change = Change((Guard(key, Field.MODIFIED, 0),), (Put(key, pack(proposed)),))
        while True:
            found = await self.agreed(proposed.bucket, proposed.prefix, proposed.name)
            if found is not None:
                return found
            if await self._changes.commit(change) is not None:
                return proposed

    async def agreed(self, bucket: str, prefix: str, name: str) -> Agreement | None:
        return await self._reader.one(Agreement, self._keys.agreement(bucket, prefix, name))

    # -- holders
    async def live_holders(self) -> set[str]:
        me = self._me

        async def read(at: At) -> set[str]:
            if me is not None:
                return await self._by_node.held_uids(me.node, at) | await self._upload_ids(at)
            found: set[str] = set()
            for table in ("c", "k"):
                found |= {row.value.decode() async for row in self._reader.walk(self._keys.all(table), at)}
            writes = await self._reader.values_at(Pending, self._keys.all("q"), at)
            found |= {write.uid for write in writes if write.kind is Kind.PUT}
            return found | await self._upload_ids(at)

        return await self._reader.consistent(read)

    async def owed_holders(self) -> set[str]:
        me = self._me

        async def read(at: At) -> set[str]:
            if me is not None:
                return await self._by_node.held_owed_uids(me.node, at) | await self._upload_ids(at)
            writes = await self._reader.values_at(Pending, self._keys.all("q"), at)
            return {write.uid for write in writes if write.kind is Kind.PUT} | await self._upload_ids(at)

        return await self._reader.consistent(read)

    async def _upload_ids(self, at: At) -> set[str]:
        wanted = replace(self._keys.all("u"), keys_only=True)
        return {row.key[len(wanted.key) :].decode() async for row in self._reader.walk(wanted, at)}

    async def counts(self) -> dict[str, int]:
        writes, parked = await self.pending(), await self.parked()
        total = await counting.counted(self._client, self._keys)
        puts_count = sum(write.kind is Kind.PUT for write in writes)
        return {
            str(State.CLEAN): total.clean,
            str(State.DIRTY): puts_count + len(parked),
            str(State.TOMBSTONE): len(writes) - puts_count,
            "pending": len(writes),
            "pending_bytes": sum(write.size_bytes for write in writes),
            "parked": len(parked),
            "parked_bytes": sum(write.size_bytes for write in parked),
            "uploads": total.uploads,
            "markers": total.markers,
            "used_bytes": await self._client.used_bytes(),
        }

    async def count_for_all(self) -> None:
        await counting.count_for_all(self._client, self._keys, self._changes)

    # -- only in a cluster: who holds and owes what
    async def hold(self, name: ObjectName, uid: str, holders: Sequence[Holder]) -> bool:
        nodes = [self._keys.node(each.node) for each in holders]
        return await self._changes.make(
            lambda rows: ownership.hold(rows, name, uid, holders), self._keys.record(name), *nodes
        )

    async def release(self, name: ObjectName, uid: str, node: str) -> None:
        await self._changes.make(lambda rows: rows.release(name, uid, node))

    async def held_by(self, node: str) -> list[Held]:
        return await self._by_node.held_by(node)

    async def owed_by(self, node: str) -> list[Pending]:
        return await self._by_node.owed_by(node)

    async def owed_here(self, dirty: Collection[str]) -> list[Pending]:
        """What the origin does not have and this node owes, or holds as one of `dirty`, by `place`. `dirty`: the
        versions whose bytes it may not evict; most of what a node holds the origin has, and that is not looked at."""
        me = self._me
        return await self._by_node.owed_here(me, dirty) if me is not None else await self.pending()

    async def attest(self) -> None:
        """Make this node one whose own changes show whether the directory still has what it has now."""
        await self._changes.commit(Change((), ()))

    async def kept(self, era: Era) -> int:
        """The revision up to which the snapshot that an era began on surely is what this node knew; 0 if unknown. To be
        asked before the first `reinsert`."""
        if self._ledger is None or self._me is None:
            return 0
        rows = (await self._client.read(Range(self._keys.witness(self._me.node)))).found(0)
        witnessed = max((row.mod_revision for row in rows), default=0)
        # Where nothing of this node was lost it may have gone on in an etcd that went back.
        return witnessed if witnessed <= era.since and witnessed < self._ledger.newest(era.previous) else 0

    async def reinsert(self, entry: Entry, era: Era, kept: int, now_s: float) -> bool:
        """Tell a directory that forgot it of a write that this node holds or owes, under the directory's new era, whose
        snapshot surely is true up to `kept`. Whether it is pending now."""
        name = entry.record.name
        return await self._changes.make(
            lambda rows: reinsertion.insert(rows, entry, era, kept, now_s), *self._changes.replacing(name)
        )

    async def settle_reinserted(self, write: Pending, now_s: float) -> None:
        """Let a marker or pointer that was told again go, behind everything that was told since."""
        await self._changes.of_object(write.name, lambda rows: reinsertion.put_behind(rows, write, now_s))

    async def forget_finished(self, write: Pending, era: Era) -> None:
        """A pending write of a snapshot is over since, as its node knows."""
        await self._changes.make(
            lambda rows: reinsertion.forget_finished(rows, write.name, write.uid, era),
            *self._changes.replacing(write.name),
        )

    async def forget_clean(self) -> None:
        """Forget what a snapshot says of the origin, which may hold something else since; and what was uploaded in
        parts."""
        for table in ("c", "k"):
            rows = await self._select(table, lambda row: True)
            names = [self._keys.clean_name(row.key) for row in rows]
            for start in range(0, len(names), TRIM_GROUP_COUNT):
                await asyncio.gather(*(self.forget(name, None) for name in names[start : start + TRIM_GROUP_COUNT]))
        for upload in await self._reader.values(Upload, self._keys.all("u")):
            await self.abort_upload(upload.upload_id)

    async def unpersisted(self, limit: int) -> list[tuple[Pending, frozenset[Holder]]]:
        async def read(at: At) -> list[tuple[Pending, frozenset[Holder]]]:
            rows = self._reader.walk(self._keys.all("q"), at, limit)
            writes = [value_of(Pending, row) async for row in rows]
            puts = [write for write in writes if write.kind is Kind.PUT]
            wanted = [self._keys.holders(write.name, write.uid) for write in puts]
            held: dict[str, frozenset[Holder]] = {}
            async for index, found in self._reader.heads(wanted, 0, at, READS_COUNT):
                held[puts[index].uid] = frozenset(value_of(Holder, row) for row in found)
            return [(write, held.get(write.uid, frozenset())) for write in writes]

        return await self._reader.consistent(read)

    async def owners(self) -> set[str]:
        return await self._by_node.owners()

    async def claim(self, name: ObjectName, uid: str) -> Pending | None:
        keys = (self._keys.pending(name), self._keys.record(name))
        return await self._changes.make(lambda rows: ownership.claim(rows, name, uid), *keys)

    async def give(self, name: ObjectName, uid: str, to: Holder) -> bool:
        return await self._changes.make(
            lambda rows: ownership.give(rows, name, uid, to), self._keys.pending(name), self._keys.node(to.node)
        )


def _seen(record: KeyValue | None, write: KeyValue | None, revision: int, drops: int = 0) -> Seen:
    return Seen(record_of(record) if record else None, value_of(Pending, write) if write else None, revision, drops)
