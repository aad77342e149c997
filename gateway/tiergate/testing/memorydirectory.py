"""A directory of a cluster in the heap, for simulations: the shared transitions over dictionaries.

One `State` is what all nodes share; each process has its own `MemoryDirectory`, whose calls go over a link that the
test may delay or cut. Implements `tiergate.directory.base.ClusterDirectory`; see there.
"""

from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import count
from typing import Any, Protocol, TypeVar

from tiergate.checkpoints.markers import scope_of
from tiergate.directory import transitions, uploads
from tiergate.directory.base import Committed, Finished, Held, Intent, Seen
from tiergate.errors import HolderLostError, MembershipOverError
from tiergate.model import (
    LOST,
    NO_BASE,
    Bucket,
    Holder,
    Kind,
    Live,
    Node,
    ObjectName,
    OriginUpload,
    Part,
    Pending,
    Record,
    Role,
    Step,
    Upload,
    Version,
)
from tiergate.model import (
    State as RecordState,
)

T = TypeVar("T")


@dataclass(slots=True)
class Tables:
    """All rows. `holders`: by object and uid, node to epoch."""

    revision: int = 0
    records: dict[ObjectName, Record] = field(default_factory=dict)
    pending: dict[ObjectName, Pending] = field(default_factory=dict)
    drops: dict[ObjectName, int] = field(default_factory=dict)
    orphans: dict[tuple[ObjectName, OriginUpload], None] = field(default_factory=dict)
    steps: dict[tuple[str, str], Step] = field(default_factory=dict)
    uploads: dict[str, Upload] = field(default_factory=dict)
    parts: dict[tuple[str, int], Part] = field(default_factory=dict)
    finished: dict[str, Finished] = field(default_factory=dict)
    buckets: dict[str, Bucket] = field(default_factory=dict)
    holders: dict[tuple[ObjectName, str], dict[str, int]] = field(default_factory=dict)

    def copy(self) -> "Tables":
        """One that may be changed."""
        names = [each.name for each in fields(self) if each.name not in ("revision", "holders")]
        copies: dict[str, Any] = {name: dict(getattr(self, name)) for name in names}
        return Tables(
            revision=self.revision, holders={key: dict(nodes) for key, nodes in self.holders.items()}, **copies
        )


class State:
    """What the nodes share: the rows, and who is a member. `on_commit` is told of each commit of a version (its uid) or
    a deletion ("") and `on_hold` of each holder that is noted."""

    def __init__(self) -> None:
        self.tables = Tables()
        self.numbers = count(1)
        self.nodes: dict[str, Node] = {}
        self.on_commit: Callable[[ObjectName, str, int], None] = lambda name, uid, revision: None
        self.on_hold: Callable[[str, str], None] = lambda uid, node: None
        self.on_persisted: Callable[[Pending], None] = lambda write: None

    @property
    def live(self) -> Live:
        """The members now."""
        return Live(self.tables.revision, dict(self.nodes))

    def transact(self, me: Holder | None, transition: Callable[["MemoryRows"], T]) -> T:
        """Do all of it or, when it raises, nothing.

        Raises:
            MembershipOverError: `me` is no member.
        """
        if me is not None and not self.live.still([me]):
            raise MembershipOverError("the membership is over")
        rows = MemoryRows(self.tables.copy(), me)
        result = transition(rows)
        self.tables = rows.tables
        return result

    def hold(self, rows: "MemoryRows", name: ObjectName, uid: str, holders: Iterable[Holder]) -> None:
        """Note holders.

        Raises:
            HolderLostError: one of them is no member of that epoch.
        """
        for holder in holders:
            if not self.live.still([holder]):
                raise HolderLostError("a node that was to hold a copy is gone", node=holder.node)
            rows.tables.holders.setdefault((name, uid), {})[holder.node] = holder.epoch
            self.on_hold(uid, holder.node)


class MemoryRows:
    """Implements `tiergate.directory.view.Rows`; see there."""

    def __init__(self, tables: Tables, me: Holder | None) -> None:
        self.tables = tables
        self._me = me
        self._next = 0

    @property
    def me(self) -> Holder | None:
        return self._me

    def next_revision(self) -> int:
        if not self._next:
            self.tables.revision += 1
            self._next = self.tables.revision
        return self._next

    def record(self, name: ObjectName) -> Record | None:
        return self.tables.records.get(name)

    def put_record(self, record: Record) -> None:
        self._unheld(record.name, record.version.uid if record.version else None)
        self.tables.records[record.name] = record

    def _unheld(self, name: ObjectName, keep_uid: str | None) -> None:
        old = self.record(name)
        if old is not None and old.version is not None and old.version.uid != keep_uid:
            self.tables.holders.pop((name, old.version.uid), None)

    def touch_record(self, record: Record) -> None:
        self.tables.records[record.name] = record

    def drop_record(self, name: ObjectName) -> None:
        self._unheld(name, None)
        self.tables.drops[name] = self.drops(name) + 1
        self.tables.records.pop(name, None)

    def drops(self, name: ObjectName) -> int:
        return self.tables.drops.get(name, 0)

    def marker_names(self, bucket: str, scope: str) -> list[ObjectName]:
        markers = (name for name, record in self.tables.records.items() if record.role is Role.MARKER)
        return sorted(name for name in markers if name.bucket == bucket and scope_of(name.key) == scope)

    def pending(self, name: ObjectName) -> Pending | None:
        return self.tables.pending.get(name)

    def put_pending(self, write: Pending) -> None:
        self.tables.pending[write.name] = write

    def disturb(self, write: Pending) -> None:
        self.put_pending(write)

    def drop_pending(self, name: ObjectName) -> None:
        self.tables.pending.pop(name, None)

    def orphan(self, name: ObjectName, upload: OriginUpload) -> None:
        self.tables.orphans[name, upload] = None

    def drop_orphan(self, name: ObjectName, upload: OriginUpload) -> None:
        self.tables.orphans.pop((name, upload), None)

    def steps_near(self, step: Step) -> list[Step]:
        return list(self.tables.steps.values())

    def put_step(self, step: Step) -> None:
        self.tables.steps[step.name.bucket, step.uid] = step

    def drop_step(self, step: Step) -> None:
        self.tables.steps.pop((step.name.bucket, step.uid), None)

    def upload(self, upload_id: str) -> Upload | None:
        return self.tables.uploads.get(upload_id)

    def put_upload(self, upload: Upload) -> None:
        self.tables.uploads[upload.upload_id] = upload

    def drop_upload(self, upload: Upload) -> None:
        for part in self.parts(upload.upload_id):
            del self.tables.parts[upload.upload_id, part.number]
        self.tables.uploads.pop(upload.upload_id, None)

    def part(self, upload_id: str, number: int) -> Part | None:
        return self.tables.parts.get((upload_id, number))

    def put_part(self, upload_id: str, part: Part) -> None:
        self.tables.parts[upload_id, part.number] = part

    def parts(self, upload_id: str) -> list[Part]:
        return [part for (owner, _), part in sorted(self.tables.parts.items()) if owner == upload_id]

    def put_finished(self, upload_id: str, finished: Finished) -> None:
        self.tables.finished[upload_id] = finished


class Link(Protocol):
    """Carries a call to the state and its answer back. `changes`: it is no mere read."""

    def __call__(self, call: Callable[[], T], *, changes: bool) -> Awaitable[T]: ...


async def at_once(call: Callable[[], T], *, changes: bool) -> T:
    """A link without any distance."""
    return call()


class MemoryDirectory:
    """See the module. `me`: the process' membership when it calls, None for nobody's member."""

    def __init__(self, state: State, me: Callable[[], Holder | None] = lambda: None, link: Link = at_once) -> None:
        self._state = state
        self._me = me
        self._link = link

    async def _change(self, transition: Callable[[MemoryRows], T]) -> T:
        me = self._me()
        return await self._link(lambda: self._state.transact(me, transition), changes=True)

    async def _read(self, look: Callable[[Tables], T]) -> T:
        return await self._link(lambda: look(self._state.tables), changes=False)

    async def _commit(
        self,
        name_of: Callable[[MemoryRows], ObjectName],
        uid: str,
        holders: Sequence[Holder],
        do: Callable[[MemoryRows], T],
    ) -> T:
        def transition(rows: MemoryRows) -> T:
            name = name_of(rows)
            result = do(rows)
            self._state.hold(rows, name, uid, holders)
            if isinstance(result, Committed):
                self._state.on_commit(name, uid, result.revision)
            return result

        return await self._change(transition)

    # -- objects
    async def revision(self) -> int:
        return await self._read(lambda tables: tables.revision)

    async def get(self, name: ObjectName) -> Seen:
        return await self._read(lambda tables: _seen(tables, name))

    async def scan(self, bucket: str, prefix: str, after: str, limit: int) -> list[Record]:
        return await self._read(lambda tables: _under(tables.records, bucket, prefix, after)[:limit])

    async def scan_unpersisted(self, bucket: str, prefix: str, after: str, limit: int) -> list[Record]:
        def look(tables: Tables) -> list[Record]:
            writes = _under(tables.pending, bucket, prefix, after)[:limit]
            return [tables.records[write.name] for write in writes if write.name in tables.records]

        return await self._read(look)

    async def put(self, name: ObjectName, version: Version, intent: Intent) -> Committed:
        return await self._commit(
            lambda rows: name, version.uid, intent.holders, lambda rows: transitions.put(rows, name, version, intent)
        )

    async def put_through(self, name: ObjectName, version: Version, origin_etag: str, intent: Intent) -> Committed:
        return await self._commit(
            lambda rows: name,
            version.uid,
            intent.holders,
            lambda rows: transitions.put_through(rows, name, version, origin_etag, intent),
        )

    async def delete(self, name: ObjectName, intent: Intent) -> Committed | None:
        uid = f"delete-{next(self._state.numbers)}"
        return await self._commit(lambda rows: name, "", (), lambda rows: transitions.delete(rows, name, uid, intent))

    async def adopt(
        self, name: ObjectName, version: Version, origin_etag: str, role: Role, now_s: float, since: int | None = None
    ) -> Record:
        return await self._change(lambda rows: transitions.adopt(rows, name, version, origin_etag, role, now_s, since))

    async def revalidated(self, name: ObjectName, uid: str, now_s: float) -> None:
        await self._change(lambda rows: transitions.revalidated(rows, name, uid, now_s))

    async def forget(self, name: ObjectName, uid: str | None) -> Version | None:
        return await self._change(lambda rows: transitions.forget(rows, name, uid))

    async def trim_clean(self, keep_count: int) -> list[Version]:
        def trim(rows: MemoryRows) -> list[Version]:
            clean = [each for each in rows.tables.records.values() if each.state is RecordState.CLEAN]
            oldest = sorted((each for each in clean if each.role is not Role.MARKER), key=lambda each: each.revision)
            return transitions.drop_clean(rows, [each.name for each in oldest[: max(0, len(clean) - keep_count)]])

        return await self._change(trim)

    # -- write-back
    async def pending(self) -> list[Pending]:
        me = self._me()
        found = await self._read(lambda tables: list(tables.pending.values()))
        return _by_place(write for write in found if me is None or write.owner == me)

    async def beside(self, writes: Sequence[Pending], whole: Collection[str] = ()) -> list[Pending]:
        return _by_place(await self._read(lambda tables: list(tables.pending.values())))

    async def pending_under(self, bucket: str, prefix: str, limit: int) -> list[Pending]:
        return await self._read(lambda tables: _under(tables.pending, bucket, prefix, "")[:limit])

    async def oldest_pending_s(self) -> float | None:
        return min((write.committed_s for write in await self.pending() if not write.quarantined), default=None)

    async def begin(self, name: ObjectName, uid: str, base: str) -> Pending:
        return await self._owned(name, uid, lambda write: replace(write, begun=True, base=base))

    async def note_upload(self, name: ObjectName, uid: str, upload: OriginUpload | None) -> Pending:
        return await self._owned(name, uid, lambda write: replace(write, upload=upload))

    async def rebase(self, name: ObjectName, uid: str, base: str) -> Pending:
        return await self._owned(name, uid, lambda write: replace(write, base=base))

    async def _owned(self, name: ObjectName, uid: str, change: Callable[[Pending], Pending]) -> Pending:
        return await self._change(lambda rows: transitions.change_owned(rows, name, uid, change))

    async def _if_pending(self, name: ObjectName, uid: str, change: Callable[[Pending], Pending]) -> None:
        await self._change(lambda rows: transitions.change_if_pending(rows, name, uid, change))

    async def drop_leftovers(self, name: ObjectName, dropped: Sequence[OriginUpload]) -> None:
        await self._change(lambda rows: transitions.drop_leftovers(rows, name, dropped))

    async def orphan_uploads(self) -> list[tuple[ObjectName, OriginUpload]]:
        return await self._read(lambda tables: list(tables.orphans))

    async def persisted(self, name: ObjectName, uid: str, origin_etag: str, now_s: float) -> Version | None:
        def transition(rows: MemoryRows) -> Version | None:
            write = rows.pending(name)
            result = transitions.persisted(rows, name, uid, origin_etag, now_s)
            if write is not None and write.uid == uid:
                self._state.on_persisted(write)
            return result

        return await self._change(transition)

    async def standing_markers(self, bucket: str, scopes: Sequence[str]) -> list[Seen]:
        def look(tables: Tables) -> list[Seen]:
            rows = MemoryRows(tables, None)
            for scope in scopes:
                if names := rows.marker_names(bucket, scope):
                    return [_seen(tables, name) for name in names]
            return []

        return await self._read(look)

    async def withdraw(self, name: ObjectName, uid: str, now_s: float) -> Pending | None:
        return await self._change(lambda rows: transitions.withdraw(rows, name, uid, now_s))

    async def withdrawn(self, name: ObjectName, uid: str) -> None:
        await self._if_pending(name, uid, lambda write: replace(write, base=NO_BASE, withdrawn=True))

    async def settled_set(self, name: ObjectName, uid: str) -> None:
        await self._if_pending(name, uid, lambda write: replace(write, disturbed_s=0.0))

    async def quarantine(self, name: ObjectName, uid: str, reason: str) -> None:
        me = self._me()

        def transition(rows: MemoryRows) -> None:
            write = rows.pending(name)
            if write is None or write.uid != uid:
                return
            if write.owner in (None, me) or not self._state.live.still([write.owner]):
                rows.put_pending(replace(write, quarantined=reason))

        await self._change(transition)

    # -- steps under way
    async def begin_step(self, step: Step) -> bool:
        return await self._change(lambda rows: transitions.begin_step(rows, step))

    async def steps(self) -> list[Step]:
        return await self._read(lambda tables: list(tables.steps.values()))

    async def end_step(self, step: Step) -> None:
        await self._change(lambda rows: rows.drop_step(step))

    # -- multipart uploads of clients
    async def create_upload(self, upload: Upload) -> None:
        await self._change(lambda rows: rows.put_upload(upload))

    async def get_upload(self, upload_id: str) -> Upload | None:
        return await self._read(lambda tables: tables.uploads.get(upload_id))

    async def list_uploads(self, bucket: str, prefix: str) -> list[Upload]:
        every = await self._read(lambda tables: list(tables.uploads.values()))
        found = [each for each in every if each.name.bucket == bucket and each.name.key.startswith(prefix)]
        return sorted(found, key=lambda upload: (upload.name.key.encode(), upload.started_s, upload.upload_id))

    async def put_part(self, upload_id: str, part: Part) -> Part | None:
        return await self._change(lambda rows: uploads.put_part(rows, upload_id, part))

    async def note_spill(self, upload_id: str, spill_id: str) -> str:
        return await self._change(lambda rows: uploads.note_spill(rows, upload_id, spill_id))

    async def move_part(self, upload_id: str, part: Part, moved: Part) -> bool:
        return await self._change(lambda rows: uploads.move_part(rows, upload_id, part, moved))

    async def origin_upload_ids(self, bucket: str) -> set[str]:
        def look(tables: Tables) -> set[str]:
            found = {upload.upload_id for name, upload in tables.orphans if name.bucket == bucket}
            writes = [write for write in tables.pending.values() if write.name.bucket == bucket]
            found |= {upload.upload_id for write in writes for upload in transitions.leftovers_of(write)}
            return found | {each.spill_id for each in tables.uploads.values() if each.name.bucket == bucket}

        return await self._read(look) - {""}

    async def list_parts(self, upload_id: str) -> list[Part]:
        return await self._read(lambda tables: MemoryRows(tables, None).parts(upload_id))

    async def abort_upload(self, upload_id: str) -> list[Part] | None:
        return await self._change(lambda rows: uploads.abort(rows, upload_id))

    async def finish_upload(
        self, upload_id: str, version: Version, part_list: Sequence[tuple[int, str]], intent: Intent
    ) -> Committed:
        return await self._commit(
            lambda rows: uploads.known(rows, upload_id).name,
            version.uid,
            intent.holders,
            lambda rows: uploads.finish(rows, upload_id, version, part_list, intent),
        )

    async def end_spilled(
        self, upload_id: str, version: Version, part_list: Sequence[tuple[int, str]], now_s: float
    ) -> None:
        await self._change(lambda rows: uploads.end_spilled(rows, upload_id, version, part_list, now_s))

    async def finished_upload(self, upload_id: str) -> Finished | None:
        return await self._read(lambda tables: tables.finished.get(upload_id))

    async def expire_finished(self, before_s: float) -> int:
        def expire(rows: MemoryRows) -> int:
            old = [key for key, each in rows.tables.finished.items() if each.finished_s < before_s]
            for key in old:
                del rows.tables.finished[key]
            return len(old)

        return await self._change(expire)

    # -- buckets
    async def get_bucket(self, name: str) -> Bucket | None:
        return await self._read(lambda tables: tables.buckets.get(name))

    async def put_bucket(self, bucket: Bucket) -> None:
        await self._change(lambda rows: rows.tables.buckets.update({bucket.name: bucket}))

    async def forget_bucket(self, name: str) -> None:
        await self._change(lambda rows: rows.tables.buckets.pop(name, None))

    # -- holders
    async def live_holders(self) -> set[str]:
        me = self._me()

        def look(tables: Tables) -> set[str]:
            found = {
                record.version.uid
                for record in tables.records.values()
                if record.version is not None
                and (me is None or me.node in tables.holders.get((record.name, record.version.uid), {}))
            }
            return found | set(tables.uploads)

        return await self._read(look)

    async def owed_holders(self) -> set[str]:
        def look(tables: Tables) -> set[str]:
            return {write.uid for write in tables.pending.values() if write.kind is Kind.PUT} | set(tables.uploads)

        return await self._read(look)

    async def counts(self) -> dict[str, int]:
        def look(tables: Tables) -> dict[str, int]:
            records = tables.records.values()
            found = {str(state): sum(record.state is state for record in records) for state in RecordState}
            found["pending"] = len(tables.pending)
            found["pending_bytes"] = sum(write.size_bytes for write in tables.pending.values())
            found["uploads"] = len(tables.uploads)
            found["markers"] = sum(record.role is Role.MARKER for record in records)
            return found

        return await self._read(look)

    # -- only in a cluster
    async def hold(self, name: ObjectName, uid: str, holders: Sequence[Holder]) -> bool:
        def transition(rows: MemoryRows) -> bool:
            record = rows.record(name)
            if record is None or record.version is None or record.version.uid != uid:
                return False
            self._state.hold(rows, name, uid, holders)
            return True

        return await self._change(transition)

    async def release(self, name: ObjectName, uid: str, node: str) -> None:
        await self._change(lambda rows: rows.tables.holders.get((name, uid), {}).pop(node, None))

    async def held_by(self, node: str) -> list[Held]:
        def look(tables: Tables) -> list[Held]:
            rows = sorted(tables.holders.items())
            return [Held(name, uid, nodes[node]) for (name, uid), nodes in rows if node in nodes]

        return await self._read(look)

    async def owed_by(self, node: str) -> list[Pending]:
        found = await self._read(lambda tables: list(tables.pending.values()))
        return _by_place(write for write in found if write.owner is not None and write.owner.node == node)

    async def owners(self) -> set[str]:
        found = await self._read(lambda tables: list(tables.pending.values()))
        return {write.owner.node for write in found if write.owner is not None}

    async def claim(self, name: ObjectName, uid: str) -> Pending | None:
        me = self._me()

        def transition(rows: MemoryRows) -> Pending | None:
            write = rows.pending(name)
            if write is None or write.uid != uid:
                return None
            is_owned = write.owner is not None and self._state.live.still([write.owner])
            if is_owned and (write.owner == me or write.quarantined != LOST):
                return write if write.owner == me else None
            return transitions.change(rows, replace(write, owner=me))

        return await self._change(transition)

    async def give(self, name: ObjectName, uid: str, to: Holder) -> bool:
        me = self._me()

        def transition(rows: MemoryRows) -> bool:
            write = rows.pending(name)
            if write is None or write.uid != uid or write.owner != me:
                return False
            if not self._state.live.still([to]):
                raise HolderLostError("the other node is gone", node=to.node)
            transitions.change(rows, replace(write, owner=to))
            return True

        return await self._change(transition)


N = TypeVar("N", Record, Pending)


def _under(rows: dict[ObjectName, N], bucket: str, prefix: str, after: str) -> list[N]:
    found = [row for name, row in rows.items() if name.bucket == bucket and name.key.startswith(prefix)]
    found = [row for row in found if row.name.key.encode() > after.encode()]
    return sorted(found, key=lambda row: row.name.key.encode())


def _by_place(writes: Iterable[Pending]) -> list[Pending]:
    return sorted(writes, key=lambda write: (write.place, write.name))


def _seen(tables: Tables, name: ObjectName) -> Seen:
    holders = {
        uid: frozenset(Holder(node, epoch) for node, epoch in nodes.items())
        for (owner, uid), nodes in tables.holders.items()
        if owner == name
    }
    return Seen(tables.records.get(name), tables.pending.get(name), tables.revision, tables.drops.get(name, 0), holders)
