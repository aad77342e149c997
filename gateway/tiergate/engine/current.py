"""Which version of a key is current: the directory's word, checked against the origin where others may write."""

import asyncio
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass, field, replace

from tiergate.directory.base import Seen
from tiergate.engine.outage import AWAY, Outage
from tiergate.engine.rooms import Rooms, log_name
from tiergate.errors import ConflictError, DirectoryUnavailableError, MemoryFullError, NotFoundError, invariant
from tiergate.model import Body, Holder, ObjectName, Part, Record, Role, State, Version, new_uid
from tiergate.observe.logs import get_logger
from tiergate.origin.client import OriginObject

RECENT_PARTS_COUNT = 10_000
"""Parts of the versions that a process remembers for when the directory is away."""

AWAY_PATIENCE_S = 1.0
"""How long a directory that did not answer the last reader is waited for by one that can do without it."""

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Current:
    """The current version of a key and the record that says so."""

    record: Record
    version: Version
    holders: frozenset[Holder] = field(default=frozenset(), compare=False)
    """In a cluster: who said to hold the version's bytes."""

    @property
    def etags(self) -> tuple[str, ...]:
        """ETags a condition may name: ours, and the origin's for readers that learnt it there (P6)."""
        if self.record.origin_etag and self.record.origin_etag != self.version.etag:
            return (self.version.etag, self.record.origin_etag)
        return (self.version.etag,)


def no_such_key(name: ObjectName) -> NotFoundError:
    """S3's answer for a key that does not exist."""
    return NotFoundError("NoSuchKey", "The specified key does not exist.", **log_name(name))


class Recent:
    """What this process saw last of keys that are never overwritten, for when a cluster's directory does not answer."""

    def __init__(self) -> None:
        self._found: OrderedDict[ObjectName, Current] = OrderedDict()
        self._parts_count = 0

    def get(self, name: ObjectName) -> Current | None:
        """What was seen of a key."""
        return self._found.get(name)

    def note(self, name: ObjectName, found: Current | None) -> None:
        """A key was looked up; None: it does not exist."""
        old = self._found.pop(name, None)
        self._parts_count -= len(old.version.parts) if old is not None else 0
        if found is None:
            return
        self._found[name] = found
        self._parts_count += len(found.version.parts)
        while self._parts_count > RECENT_PARTS_COUNT:
            _, oldest = self._found.popitem(last=False)
            self._parts_count -= len(oldest.version.parts)


class Resolver:
    """Finds the current version of a key."""

    def __init__(self, rooms: Rooms, outage: Outage) -> None:
        self._rooms = rooms
        self._outage = outage
        self._recent = Recent()
        self._is_directory_away = False

    async def current(self, name: ObjectName) -> Current:
        """The current version.

        Raises:
            NotFoundError: NoSuchKey, NoSuchBucket.
            OverloadedError: the origin must be asked and does not answer.
        """
        found = await self.find(name)
        if found is None:
            raise no_such_key(name)
        return found

    async def find(self, name: ObjectName) -> Current | None:
        """Like `current`, None for a key that does not exist."""
        if self._rooms.is_alone or not self._is_immutable(name):
            return await self.judge(name, await self._rooms.directory.get(name))
        try:
            found = await self.judge(name, await self._soon(name))
        except DirectoryUnavailableError:
            self._is_directory_away = True
            return await self._without_directory(name)
        self._is_directory_away = False
        self._recent.note(name, found)
        return found

    def _is_immutable(self, name: ObjectName) -> bool:
        return self._rooms.settings.prefix_for(name.bucket, name.key).immutable

    async def _soon(self, name: ObjectName) -> Seen:
        """What the directory says of a key; while it is known to be away, it is not waited for as long as it might.

        Raises:
            DirectoryUnavailableError: it does not answer.
        """
        if not self._is_directory_away:
            return await self._rooms.directory.get(name)
        try:
            async with asyncio.timeout(AWAY_PATIENCE_S):
                return await self._rooms.directory.get(name)
        except TimeoutError as error:
            raise DirectoryUnavailableError("the directory does not answer", **log_name(name)) from error

    async def _without_directory(self, name: ObjectName) -> Current:
        """The version of a key that is never overwritten, as far as it can be told without the directory: what was
        seen of it still is so, and what the origin has of it is all there is.

        Raises:
            DirectoryUnavailableError: neither knows the key. It may be in some node's memory alone.
            OverloadedError: the origin does not answer either.
        """
        seen = self._recent.get(name)
        if seen is not None and (seen.record.state is State.CLEAN or self._rooms.holds_whole(seen.version)):
            return seen
        async with self._outage.bounded(**log_name(name)):
            there = await self._rooms.origin.head_object(name, tags=True)
        if there is None:
            if seen is None:
                raise DirectoryUnavailableError("the directory does not answer", **log_name(name))
            return seen
        now_s = self._rooms.clock.wall_s()
        if seen is not None and there.stamp is not None and there.stamp.uid == seen.version.uid:
            record = replace(seen.record, state=State.CLEAN, origin_etag=there.etag, validated_s=now_s)
            found = replace(seen, record=record)
        else:
            version = foreign_version(there, now_s)
            role = self._rooms.markers.role_of(name, version.size_bytes)
            found = Current(Record(name, State.CLEAN, 0, 0, version, there.etag, now_s, role), version)
        self._recent.note(name, found)
        return found

    async def judge(self, name: ObjectName, seen: Seen) -> Current | None:
        """What a strong read of the directory means, after asking the origin where it has to be asked."""
        record = seen.record
        if record is None:
            return await self._from_origin(name, seen.drops)
        if record.state is State.TOMBSTONE or record.version is None:
            return None
        holders = seen.holders.get(record.version.uid, frozenset())
        if record.state is State.CLEAN and self._is_stale(record):
            return await self._revalidate(name, record, holders)
        return Current(record, record.version, holders)

    def _is_stale(self, record: Record) -> bool:
        if self._is_immutable(record.name):
            return False
        return self._rooms.clock.wall_s() - record.validated_s > self._rooms.settings.revalidate_s

    async def _from_origin(self, name: ObjectName, since: int) -> Current | None:
        exclusive = self._rooms.settings.prefix_for(name.bucket, name.key).exclusive
        try:
            if exclusive:
                there = await self._outage.ask(name.bucket, lambda: self._rooms.origin.head_object(name, tags=True))
            else:
                async with self._outage.bounded(**log_name(name)):
                    there = await self._rooms.origin.head_object(name, tags=True)
        except AWAY:
            # Only gateways write here, so the directory is the whole truth.
            self._rooms.metrics.origin_outage_answers.inc()
            return None
        if there is None:
            return None
        return await self._adopt(name, there, since)

    async def _adopt(self, name: ObjectName, there: OriginObject, since: int) -> Current | None:
        now_s = self._rooms.clock.wall_s()
        version = foreign_version(there, now_s)
        role = self._rooms.markers.role_of(name, version.size_bytes)
        try:
            record = await self._rooms.directory.adopt(name, version, there.etag, role, now_s, since)
        except ConflictError:
            self._rooms.metrics.conflicts.inc()
            # What the origin said may be older than a deletion that it has carried out by now.
            return await self.find(name)
        except MemoryFullError:
            return await self._unrecorded(name, version, there.etag, role, since)
        if record.version is None:
            return None
        return Current(record, record.version)

    async def _unrecorded(
        self, name: ObjectName, version: Version, origin_etag: str, role: Role, since: int
    ) -> Current | None:
        """What `adopt` would say, for a directory without room for one more record: reads go on all the same."""
        seen = await self._rooms.directory.get(name)
        if seen.record is not None or seen.drops != since:
            return await self.judge(name, seen)
        record = Record(name, State.CLEAN, 0, 0, version, origin_etag, self._rooms.clock.wall_s(), role)
        return Current(record, version)

    async def _revalidate(self, name: ObjectName, record: Record, holders: frozenset[Holder]) -> Current | None:
        version = record.version
        invariant(version is not None, "a clean record without a version", **log_name(name))
        if version is None:
            return None
        held = self._rooms.holds_whole(version)
        revalidations = self._rooms.metrics.revalidations
        try:
            if held:
                there = await self._outage.ask(name.bucket, lambda: self._rooms.origin.head_object(name))
            else:
                async with self._outage.bounded(**log_name(name)):
                    there = await self._rooms.origin.head_object(name)
        except AWAY:
            revalidations.inc(1, "unanswered")
            self._rooms.metrics.origin_outage_answers.inc()
            return Current(record, version, holders)
        if there is not None and there.etag == record.origin_etag:
            with suppress(MemoryFullError):  # The next reader asks again then.
                await self._rooms.directory.revalidated(name, version.uid, self._rooms.clock.wall_s())
            revalidations.inc(1, "same")
            return Current(record, version, holders)
        revalidations.inc(1, "changed" if there is not None else "gone")
        await self.forget(name, version.uid)
        return await self.find(name)

    async def forget(self, name: ObjectName, uid: str) -> None:
        """The origin holds something else than clean version `uid`: drop what we know and hold of it."""
        log.info("a change behind the gateway", **log_name(name))
        self._recent.note(name, None)
        self._rooms.metrics.foreign_changes.inc()
        self._rooms.let_go(await self._rooms.directory.forget(name, uid))


def foreign_version(there: OriginObject, now_s: float) -> Version:
    """The identity of an object found in the origin: its stamp's, where the gateway wrote it, else the origin's own."""
    stamp = there.stamp
    uid = new_uid(now_s)
    headers = dict(there.headers)
    if there.version_id:
        headers["x-amz-version-id"] = there.version_id
    return Version(
        uid=uid,
        size_bytes=there.size_bytes,
        etag=(stamp.etag if stamp else "") or there.etag,
        modified_s=stamp.modified_s if stamp else there.modified_s,
        parts=(Part(1, Body(uid, there.size_bytes), there.etag),),
        headers=headers,
        metadata=dict(there.metadata),
        tagging=there.tagging,
        checksums=dict(there.checksums),
        checksum_type=there.checksum_type,
        multipart="-" in there.etag,
        foreign=True,
    )
