"""A directory of a cluster in the heap, for simulations: the shared transitions over dictionaries.

One `State` is what all nodes share; each process has its own `MemoryDirectory`, whose calls go over a link that the
test may delay or cut. Implements `tiergate.directory.base.ClusterDirectory`; see there.
"""

from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol, TypeVar

from tiergate.directory import plans, transitions, uploads
from tiergate.directory.base import Committed, Finished, Held, Intent, Seen
from tiergate.directory.owed import OwedChanges
from tiergate.directory.view import Rows
from tiergate.errors import HolderLostError
from tiergate.model import (
    LOST,
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
    Step,
    Upload,
    Version,
)
from tiergate.model import (
    State as RecordState,
)
from tiergate.policy.persistence import Beginning
from tiergate.testing.memoryrows import MemoryRows, State, Tables

__all__ = ["Link", "MemoryDirectory", "State"]

T = TypeVar("T")


class Link(Protocol):
    """Carries a call to the state and its answer back. `changes`: it is no mere read."""

    def __call__(self, call: Callable[[], T], *, changes: bool) -> Awaitable[T]: ...


async def at_once(call: Callable[[], T], *, changes: bool) -> T:
    """A link without any distance."""
    return call()


class MemoryDirectory(OwedChanges):
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

    async def records(self, bucket: str, keys: Sequence[str]) -> list[Record]:
        def look(tables: Tables) -> list[Record]:
            names = [ObjectName(bucket, key) for key in keys]
            return [tables.records[name] for name in names if name in tables.records]

        return await self._read(look)

    async def scan(self, bucket: str, prefix: str, after: str, limit: int) -> list[Record]:
        return await self._read(lambda tables: _under(tables.records, bucket, prefix, after)[:limit])

    async def scan_unpersisted(self, bucket: str, prefix: str, after: str, limit: int) -> list[Record]:
        def look(tables: Tables) -> list[Record]:
            writes = _under(tables.pending, bucket, prefix, after)[:limit]
            return [tables.records[write.name] for write in writes if write.name in tables.records]

        return await self._read(look)

    async def survey(self, bucket: str, prefix: str, after: str, limit: int) -> list[Seen]:
        def look(tables: Tables) -> list[Seen]:
            records = _under(tables.records, bucket, prefix, after)[:limit]
            return [_seen(tables, record.name) for record in records]

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
        return [write for write in await self._own() if not write.parked]

    async def parked(self) -> list[Pending]:
        return [write for write in await self._own() if write.parked]

    async def _own(self) -> list[Pending]:
        me = self._me()
        found = await self._read(lambda tables: list(tables.pending.values()))
        return _by_place(write for write in found if me is None or write.owner == me)

    async def promote(self, writes: Sequence[Pending], now_s: float) -> int:
        return await self._change(lambda rows: transitions.promote(rows, writes, now_s))

    async def get_plan(self, bucket: str, prefix: str) -> Plan | None:
        return await self._read(lambda tables: tables.plans.get((bucket, prefix)))

    async def plans(self, bucket: str, under: str) -> list[Plan]:
        every = await self._read(lambda tables: list(tables.plans.values()))
        found = [plan for plan in every if plan.bucket == bucket and plan.prefix.startswith(under)]
        return sorted(found, key=lambda plan: plan.prefix.encode())

    async def get_run(self, bucket: str, prefix: str) -> Run | None:
        return await self._read(lambda tables: tables.runs.get((bucket, prefix)))

    async def decide(self, beginning: Beginning) -> Plan:
        return await self._change(lambda rows: plans.decide(rows, beginning))

    async def beside(self, writes: Sequence[Pending], whole: Collection[str] = ()) -> list[Pending]:
        found = await self._read(lambda tables: list(tables.pending.values()))
        return _by_place(write for write in found if not write.parked)

    async def pending_under(self, bucket: str, prefix: str, limit: int) -> list[Pending]:
        return await self._read(lambda tables: _under(tables.pending, bucket, prefix, "")[:limit])

    async def oldest_pending_s(self) -> float | None:
        return min((write.committed_s for write in await self.pending() if write.is_owed), default=None)

    async def owed_bytes(self) -> int:
        return sum(write.size_bytes for write in await self.pending() if write.is_owed)

    async def _change_pending(self, name: ObjectName, transition: Callable[[Rows], T]) -> T:
        return await self._change(transition)

    async def _change_plan(self, plan: Plan, transition: Callable[[Rows], T]) -> T:
        return await self._change(transition)

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

    async def owe_again(self, name: ObjectName, uid: str, base: str, now_s: float) -> Pending | None:
        return await self._change(lambda rows: transitions.owe_again(rows, name, uid, base, now_s))

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
            void = [key for key, each in rows.tables.agreed.items() if each.agreed_s < before_s]
            for name in void:
                del rows.tables.agreed[name]
            return len(old) + len(void)

        return await self._change(expire)

    # -- buckets
    async def get_bucket(self, name: str) -> Bucket | None:
        return await self._read(lambda tables: tables.buckets.get(name))

    async def buckets(self) -> list[Bucket]:
        return await self._read(lambda tables: [tables.buckets[name] for name in sorted(tables.buckets)])

    async def put_bucket(self, bucket: Bucket) -> None:
        await self._change(lambda rows: rows.tables.buckets.update({bucket.name: bucket}))

    async def forget_bucket(self, name: str) -> None:
        await self._change(lambda rows: rows.tables.buckets.pop(name, None))

    # -- pinned prefixes
    async def pin_prefix(self, pinned: PinnedPrefix) -> None:
        await self._change(lambda rows: rows.tables.pins.setdefault((pinned.bucket, pinned.prefix), pinned))

    async def unpin_prefix(self, bucket: str, prefix: str) -> bool:
        return await self._change(lambda rows: rows.tables.pins.pop((bucket, prefix), None)) is not None

    async def pinned_prefixes(self) -> list[PinnedPrefix]:
        return await self._read(lambda tables: sorted(tables.pins.values(), key=lambda each: each.pinned_s))

    # -- which checkpoint a restart takes
    async def quarantine_set(self, found: QuarantinedSet) -> None:
        await self._change(lambda rows: rows.tables.quarantined.update({(found.bucket, found.prefix): found}))

    async def release_set(self, found: QuarantinedSet) -> bool:
        def release(rows: MemoryRows) -> bool:
            is_said = rows.tables.quarantined.get((found.bucket, found.prefix)) == found
            if is_said:
                del rows.tables.quarantined[found.bucket, found.prefix]
            return is_said

        return await self._change(release)

    async def quarantined_sets(self, bucket: str) -> list[QuarantinedSet]:
        def look(tables: Tables) -> list[QuarantinedSet]:
            found = [each for each in tables.quarantined.values() if each.bucket == bucket]
            return sorted(found, key=lambda each: each.prefix.encode())

        return await self._read(look)

    async def agree(self, proposed: Agreement) -> Agreement:
        key = proposed.bucket, proposed.prefix, proposed.name
        return await self._change(lambda rows: rows.tables.agreed.setdefault(key, proposed))

    async def agreed(self, bucket: str, prefix: str, name: str) -> Agreement | None:
        return await self._read(lambda tables: tables.agreed.get((bucket, prefix, name)))

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

    async def count_for_all(self) -> None:
        """There is nothing to do: all count at once."""

    async def counts(self) -> dict[str, int]:
        def look(tables: Tables) -> dict[str, int]:
            records = tables.records.values()
            found = {str(state): sum(record.state is state for record in records) for state in RecordState}
            for name, parked in (("pending", False), ("parked", True)):
                writes = [write for write in tables.pending.values() if write.parked is parked]
                found[name] = len(writes)
                found[f"{name}_bytes"] = sum(write.size_bytes for write in writes)
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

    async def unpersisted(self, limit: int) -> list[tuple[Pending, frozenset[Holder]]]:
        def look(tables: Tables) -> list[tuple[Pending, frozenset[Holder]]]:
            writes = sorted(tables.pending.values(), key=lambda write: f"{write.name.bucket}/{write.name.key}".encode())
            return [(write, _holders(tables.holders.get((write.name, write.uid), {}))) for write in writes[:limit]]

        return await self._read(look)

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


def _holders(nodes: Mapping[str, int]) -> frozenset[Holder]:
    return frozenset(Holder(node, epoch) for node, epoch in nodes.items())


def _seen(tables: Tables, name: ObjectName) -> Seen:
    holders = {uid: _holders(nodes) for (owner, uid), nodes in tables.holders.items() if owner == name}
    return Seen(tables.records.get(name), tables.pending.get(name), tables.revision, tables.drops.get(name, 0), holders)
