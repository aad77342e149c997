"""The directory of a node that works alone: LMDB beside the slabs, shared by all processes of the node.

One method, one write transaction, nothing awaited inside: the coroutines wait only where the map has no free page. Read
transactions are short, since what they see cannot be used again: large tables are copied inside and decoded outside.
Nothing is synced: the state lives as long as the bytes it speaks of, in memory.
"""

import asyncio
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TypeVar

import lmdb

from tiergate.directory import plans, transitions, uploads
from tiergate.directory.base import Committed, Finished, Intent, Seen
from tiergate.directory.codec import Named, Orphan, decode
from tiergate.directory.owed import OwedChanges
from tiergate.directory.rows import TABLE_NAMES, LmdbRows, Tables
from tiergate.directory.view import Rows
from tiergate.errors import MemoryFullError
from tiergate.lmdbfile import open_environment
from tiergate.model import (
    Agreement,
    Bucket,
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
"""Clean records dropped in one transaction at most."""

PROMOTE_COUNT = 1000
"""Parked writes promoted in one transaction."""

TRIMMED_SHARE = 0.75
"""From this share of its room on, the directory forgets clean records before their number tells it to."""

ADDING_SHARE = 0.875
"""From this share on nothing new is taken. What is left is for write-back to finish: that too takes pages first, and
gives others back later."""

READER_PAUSES_S = (0.0, *(0.001 * 2**step for step in range(6)), *[0.05] * 40)
"""Waits before a change is tried again that found no free page: some two seconds together."""

FULL_RETRY_S = 5

T = TypeVar("T")


class EmbeddedDirectory(OwedChanges):
    """Implements `tiergate.directory.base.Directory`; see there."""

    def __init__(self, environment: lmdb.Environment) -> None:
        self._environment = environment
        self._tables = Tables(environment)

    @classmethod
    def open(cls, folder: Path, map_bytes: int) -> "EmbeddedDirectory":
        """Open the directory in this process, made if new. All of `map_bytes` is taken from the file system.

        Raises:
            ConfigError: the folder cannot be used.
        """
        return cls(open_environment(folder, map_bytes, len(TABLE_NAMES), preallocate=True))

    def close(self) -> None:
        """Let go of the environment."""
        self._environment.close()

    @contextmanager
    def _reading(self) -> Iterator[LmdbRows]:
        with self._environment.begin() as txn:
            yield LmdbRows(txn, self._tables)

    async def _change(self, transition: Callable[[LmdbRows], T]) -> T:
        """Pages that were replaced are free again only when no reader sees them any more. A reader needs little time,
        but it may have died, or may have lost the processor: this waits for it, while others of this process go on."""
        for pause_s in READER_PAUSES_S:
            try:
                return self._transact(transition)
            except lmdb.MapFullError:
                self._environment.reader_check()
            await asyncio.sleep(pause_s)
        try:
            return self._transact(transition)
        except lmdb.MapFullError as error:
            raise MemoryFullError("the directory is full", retry_after_s=FULL_RETRY_S) from error

    def _transact(self, transition: Callable[[LmdbRows], T]) -> T:
        with self._environment.begin(write=True) as txn:
            return transition(LmdbRows(txn, self._tables))

    async def _add(self, transition: Callable[[LmdbRows], T]) -> T:
        """A change that brings something new: it leaves room for those that finish and forget."""
        if self._is_fuller_than(ADDING_SHARE):
            raise MemoryFullError("the directory is full", retry_after_s=FULL_RETRY_S)
        return await self._change(transition)

    def _is_fuller_than(self, share: float) -> bool:
        page_bytes = self._environment.stat()["psize"]
        info = self._environment.info()
        limit_pages = int(info["map_size"] * share) // page_bytes
        if info["last_pgno"] < limit_pages:
            return False
        with self._reading() as rows:
            return rows.used_pages() >= limit_pages

    # -- objects
    async def revision(self) -> int:
        with self._reading() as rows:
            return rows.revision()

    async def get(self, name: ObjectName) -> Seen:
        with self._reading() as rows:
            return Seen(rows.record(name), rows.pending(name), rows.revision(), rows.drops(name))

    async def records(self, bucket: str, keys: Sequence[str]) -> list[Record]:
        with self._reading() as rows:
            found = [rows.record(ObjectName(bucket, key)) for key in keys]
            return [record for record in found if record is not None]

    async def scan(self, bucket: str, prefix: str, after: str, limit: int) -> list[Record]:
        with self._reading() as rows:
            return list(islice(rows.records_from(bucket, prefix, after), limit))

    async def scan_unpersisted(self, bucket: str, prefix: str, after: str, limit: int) -> list[Record]:
        with self._reading() as rows:
            writes = islice(rows.pending_from(bucket, prefix, after), limit)
            records = [rows.record(write.name) for write in writes]
            return [record for record in records if record is not None]

    async def survey(self, bucket: str, prefix: str, after: str, limit: int) -> list[Seen]:
        with self._reading() as rows:
            revision = rows.revision()
            records = islice(rows.records_from(bucket, prefix, after), limit)
            return [Seen(record, rows.pending(record.name), revision) for record in records]

    async def put(self, name: ObjectName, version: Version, intent: Intent) -> Committed:
        return await self._add(lambda rows: transitions.put(rows, name, version, intent))

    async def put_through(self, name: ObjectName, version: Version, origin_etag: str, intent: Intent) -> Committed:
        return await self._add(lambda rows: transitions.put_through(rows, name, version, origin_etag, intent))

    async def delete(self, name: ObjectName, intent: Intent) -> Committed | None:
        uid = f"delete-{new_uid(intent.now_s)}"
        return await self._add(lambda rows: transitions.delete(rows, name, uid, intent))

    async def adopt(
        self,
        name: ObjectName,
        version: Version,
        origin_etag: str,
        role: Role,
        now_s: float,
        since: int | None = None,
    ) -> Record:
        return await self._add(lambda rows: transitions.adopt(rows, name, version, origin_etag, role, now_s, since))

    async def revalidated(self, name: ObjectName, uid: str, now_s: float) -> None:
        await self._change(lambda rows: transitions.revalidated(rows, name, uid, now_s))

    async def forget(self, name: ObjectName, uid: str | None) -> Version | None:
        return await self._change(lambda rows: transitions.forget(rows, name, uid))

    async def trim_clean(self, keep_count: int) -> list[Version]:
        at_least = TRIM_COUNT if self._is_fuller_than(TRIMMED_SHARE) else 0

        def trim(rows: LmdbRows) -> list[Version]:
            excess = max(0, min(TRIM_COUNT, max(rows.count("clean") - keep_count, at_least)))
            names = (named.name for named in rows.clean_oldest() if not rows.is_marker(named.name))
            return transitions.drop_clean(rows, list(islice(names, excess)))

        return await self._change(trim)

    # -- write-back
    async def pending(self) -> list[Pending]:
        return [write for write in self._writes() if not write.parked]

    async def parked(self) -> list[Pending]:
        with self._reading() as rows:
            if not rows.number("parked"):
                return []  # Much else may be pending.
        return [write for write in self._writes() if write.parked]

    def _writes(self) -> list[Pending]:
        with self._reading() as rows:
            raw = rows.raw("pending")
        return sorted((decode(Pending, value) for value in raw), key=lambda write: write.place)

    async def promote(self, writes: Sequence[Pending], now_s: float) -> int:
        count = 0
        for start in range(0, len(writes), PROMOTE_COUNT):
            part = writes[start : start + PROMOTE_COUNT]
            count += await self._change(partial(transitions.promote, writes=part, now_s=now_s))
        return count

    async def get_plan(self, bucket: str, prefix: str) -> Plan | None:
        with self._reading() as rows:
            return rows.plan(bucket, prefix)

    async def plans(self, bucket: str, under: str) -> list[Plan]:
        with self._reading() as rows:
            raw = rows.raw("plans")
        every = (decode(Plan, value) for value in raw)
        found = [plan for plan in every if plan.bucket == bucket and plan.prefix.startswith(under)]
        return sorted(found, key=lambda plan: plan.prefix.encode())

    async def get_run(self, bucket: str, prefix: str) -> Run | None:
        with self._reading() as rows:
            return rows.run(bucket, prefix)

    async def decide(self, beginning: Beginning) -> Plan:
        return await self._add(lambda rows: plans.decide(rows, beginning))

    async def beside(self, writes: Sequence[Pending], whole: Collection[str] = ()) -> list[Pending]:
        return await self.pending()

    async def pending_under(self, bucket: str, prefix: str, limit: int) -> list[Pending]:
        with self._reading() as rows:
            return list(islice(rows.pending_from(bucket, prefix, ""), limit))

    async def oldest_pending_s(self) -> float | None:
        with self._reading() as rows:
            return rows.oldest_pending_s()

    async def owed_bytes(self) -> int:
        with self._reading() as rows:
            return rows.number("owed_bytes")

    async def _change_pending(self, name: ObjectName, transition: Callable[[Rows], T]) -> T:
        return await self._change(transition)

    async def _change_plan(self, plan: Plan, transition: Callable[[Rows], T]) -> T:
        return await self._change(transition)

    async def orphan_uploads(self) -> list[tuple[ObjectName, OriginUpload]]:
        with self._reading() as rows:
            raw = rows.raw("orphans")
        return [(orphan.name, orphan.upload) for orphan in (decode(Orphan, value) for value in raw)]

    async def persisted(self, name: ObjectName, uid: str, origin_etag: str, now_s: float) -> Version | None:
        return await self._change(lambda rows: transitions.persisted(rows, name, uid, origin_etag, now_s))

    async def standing_markers(self, bucket: str, scopes: Sequence[str]) -> list[Seen]:
        with self._reading() as rows:
            for scope in scopes:
                names = rows.marker_names(bucket, scope)
                if names:
                    revision = rows.revision()
                    return [Seen(rows.record(name), rows.pending(name), revision) for name in names]
        return []

    async def withdraw(self, name: ObjectName, uid: str, now_s: float) -> Pending | None:
        return await self._change(lambda rows: transitions.withdraw(rows, name, uid, now_s))

    async def owe_again(self, name: ObjectName, uid: str, base: str, now_s: float) -> Pending | None:
        return await self._change(lambda rows: transitions.owe_again(rows, name, uid, base, now_s))

    async def quarantine(self, name: ObjectName, uid: str, reason: str) -> None:
        await self._if_pending(name, uid, lambda write: replace(write, quarantined=reason))

    # -- steps under way
    async def begin_step(self, step: Step) -> bool:
        return await self._change(lambda rows: transitions.begin_step(rows, step))

    async def steps(self) -> list[Step]:
        with self._reading() as rows:
            return rows.all_steps()

    async def end_step(self, step: Step) -> None:
        await self._change(lambda rows: rows.drop_step(step))

    # -- multipart uploads of clients
    async def create_upload(self, upload: Upload) -> None:
        await self._add(lambda rows: rows.put_upload(upload))

    async def get_upload(self, upload_id: str) -> Upload | None:
        with self._reading() as rows:
            return rows.upload(upload_id)

    async def list_uploads(self, bucket: str, prefix: str) -> list[Upload]:
        with self._reading() as rows:
            raw = rows.raw("uploads")
        uploads = (decode(Upload, value) for value in raw)
        found = [one for one in uploads if one.name.bucket == bucket and one.name.key.startswith(prefix)]
        return sorted(found, key=lambda upload: (upload.name.key.encode(), upload.started_s, upload.upload_id))

    async def put_part(self, upload_id: str, part: Part) -> Part | None:
        return await self._add(lambda rows: uploads.put_part(rows, upload_id, part))

    async def note_spill(self, upload_id: str, spill_id: str) -> str:
        return await self._change(lambda rows: uploads.note_spill(rows, upload_id, spill_id))

    async def move_part(self, upload_id: str, part: Part, moved: Part) -> bool:
        return await self._change(lambda rows: uploads.move_part(rows, upload_id, part, moved))

    async def origin_upload_ids(self, bucket: str) -> set[str]:
        with self._reading() as rows:
            orphans, writes, uploads = rows.raw("orphans"), rows.raw("pending"), rows.raw("uploads")
        found = {decode(Orphan, value).upload.upload_id for value in orphans}
        for write in (decode(Pending, value) for value in writes):
            if write.name.bucket == bucket:
                found |= {upload.upload_id for upload in transitions.leftovers_of(write)}
        for upload in (decode(Upload, value) for value in uploads):
            if upload.name.bucket == bucket:
                found.add(upload.spill_id)
        return found - {""}

    async def list_parts(self, upload_id: str) -> list[Part]:
        with self._reading() as rows:
            raw = rows.raw_parts(upload_id)
        return [decode(Part, value) for value in raw]

    async def abort_upload(self, upload_id: str) -> list[Part] | None:
        return await self._change(lambda rows: uploads.abort(rows, upload_id))

    async def finish_upload(
        self, upload_id: str, version: Version, part_list: Sequence[tuple[int, str]], intent: Intent
    ) -> Committed:
        return await self._change(lambda rows: uploads.finish(rows, upload_id, version, part_list, intent))

    async def end_spilled(
        self, upload_id: str, version: Version, part_list: Sequence[tuple[int, str]], now_s: float
    ) -> None:
        await self._change(lambda rows: uploads.end_spilled(rows, upload_id, version, part_list, now_s))

    async def finished_upload(self, upload_id: str) -> Finished | None:
        with self._reading() as rows:
            return rows.finished(upload_id)

    async def expire_finished(self, before_s: float) -> int:
        return await self._change(lambda rows: rows.expire_finished(before_s))

    # -- buckets
    async def get_bucket(self, name: str) -> Bucket | None:
        with self._reading() as rows:
            return rows.bucket(name)

    async def buckets(self) -> list[Bucket]:
        with self._reading() as rows:
            raw = rows.raw("buckets")
        return [decode(Bucket, value) for value in raw]

    async def put_bucket(self, bucket: Bucket) -> None:
        await self._add(lambda rows: rows.put_bucket(bucket))

    async def forget_bucket(self, name: str) -> None:
        await self._change(lambda rows: rows.drop_bucket(name))

    # -- pinned prefixes
    async def pin_prefix(self, pinned: PinnedPrefix) -> None:
        await self._add(lambda rows: rows.put_pin(pinned))

    async def unpin_prefix(self, bucket: str, prefix: str) -> bool:
        return await self._change(lambda rows: rows.drop_pin(bucket, prefix))

    async def pinned_prefixes(self) -> list[PinnedPrefix]:
        with self._reading() as rows:
            raw = rows.raw("pins")
        return sorted((decode(PinnedPrefix, value) for value in raw), key=lambda each: each.pinned_s)

    # -- which checkpoint a restart takes
    async def quarantine_set(self, found: QuarantinedSet) -> None:
        await self._add(lambda rows: rows.put_quarantined(found))

    async def release_set(self, found: QuarantinedSet) -> bool:
        return await self._change(lambda rows: rows.drop_quarantined(found))

    async def quarantined_sets(self, bucket: str) -> list[QuarantinedSet]:
        with self._reading() as rows:
            raw = rows.raw("quarantine")
        found = (decode(QuarantinedSet, value) for value in raw)
        return sorted((each for each in found if each.bucket == bucket), key=lambda each: each.prefix.encode())

    async def agree(self, proposed: Agreement) -> Agreement:
        return await self._add(lambda rows: rows.agree(proposed))

    async def agreed(self, bucket: str, prefix: str, name: str) -> Agreement | None:
        with self._reading() as rows:
            return rows.agreed(bucket, prefix, name)

    # -- holders
    async def live_holders(self) -> set[str]:
        with self._reading() as rows:
            clean, writes, uploads = rows.raw("clean"), rows.raw("pending"), rows.raw("uploads")
        found = {decode(Named, value).uid for value in clean}
        found |= {write.uid for write in (decode(Pending, value) for value in writes) if write.kind is Kind.PUT}
        found |= {decode(Upload, value).upload_id for value in uploads}
        return found

    async def owed_holders(self) -> set[str]:
        with self._reading() as rows:
            writes, uploads = rows.raw("pending"), rows.raw("uploads")
        found = {write.uid for write in (decode(Pending, value) for value in writes) if write.kind is Kind.PUT}
        return found | {decode(Upload, value).upload_id for value in uploads}

    async def counts(self) -> dict[str, int]:
        with self._reading() as rows:
            found = {str(state): rows.number(f"count.{state}") for state in State}
            found["parked"] = rows.number("parked")
            found["parked_bytes"] = rows.number("parked_bytes")
            found["pending"] = rows.count("pending") - found["parked"]
            found["pending_bytes"] = rows.number("pending_bytes")
            found["uploads"] = rows.count("uploads")
            found["markers"] = rows.count("markers")
            found["used_bytes"] = rows.used_pages() * self._environment.stat()["psize"]
        return found
