"""What is under a prefix, and in which tiers: the directory's word and the origin's listing as one."""

import asyncio
from collections.abc import AsyncIterator, Collection
from dataclasses import dataclass, field, replace

from tiergate.checkpoints.sets import Thing
from tiergate.directory.base import Seen
from tiergate.engine.outage import Outage
from tiergate.engine.rooms import Rooms
from tiergate.errors import NotFoundError, OriginRefusedError, OverloadedError, RequestError
from tiergate.model import Body, Holder, Kind, Pending, Record, Role, State, Upload
from tiergate.origin.answers import OriginEntry

PAGE_COUNT = 1000
"""Rows and keys read at once."""

THINGS_LIMIT_COUNT = 250_000
"""Objects that are looked at together."""


@dataclass(slots=True)
class Whereabouts:
    """What is under a prefix. `things` by key: the current objects, and what clients upload in parts where there is no
    current object. `identities`: what changes when an object's bytes do, and once when the origin has them; `uids`: of
    the versions that the directory knows, that does not. `revisions`: when markers were committed, as
    far as known. `writes`: what the origin lacks. `origin_fault`: why the origin did not say what it has; empty if it
    did. Then `in_s3` is what was known of it last, and what the directory forgot is not there."""

    things: dict[str, Thing] = field(default_factory=dict)
    identities: dict[str, str] = field(default_factory=dict)
    uids: dict[str, str] = field(default_factory=dict)
    revisions: dict[str, int] = field(default_factory=dict)
    writes: dict[str, Pending] = field(default_factory=dict)
    origin_fault: str = ""
    claims: dict[Holder, list[tuple[str, tuple[Body, ...]]]] = field(default_factory=dict)
    """Which peers said to hold what they may have evicted since: keys, and the bodies of their versions."""


class Lookout:
    """Finds out what is where. Of one process."""

    def __init__(self, rooms: Rooms, outage: Outage) -> None:
        self._rooms = rooms
        self._outage = outage

    async def under(self, bucket: str, prefix: str) -> Whereabouts:
        """What is under a prefix.

        Raises:
            NotFoundError: NoSuchBucket.
            RequestError: too many objects are under the prefix.
            OverloadedError: the directory does not answer.
        """
        found = Whereabouts()
        # What is clean when the origin is asked is there, if at all, as it was then; what became clean meanwhile is
        # not in its listing. So the directory is looked at before and after; it is the later look that counts.
        before: dict[str, tuple[State, int]] = {}
        async for _, record in self._survey(bucket, prefix):
            before[record.name.key] = record.state, record.modified
            check_count(before)
        there: dict[str, OriginEntry] | None = None
        try:
            there = await self._listing(bucket, prefix)
        except (OverloadedError, OriginRefusedError) as error:
            found.origin_fault = error.message
        async for seen, record in self._survey(bucket, prefix):
            key = record.name.key
            is_same = before.pop(key, None) == (record.state, record.modified)
            entry = there.pop(key, None) if there is not None else None
            if seen.pending is not None:
                found.writes[key] = seen.pending
            is_here = record.version is not None
            if there is not None and record.state is State.CLEAN and is_same:
                # Nothing was done here since: the origin's word counts.
                is_here = entry is not None and entry.etag == record.origin_etag
            if is_here:
                self._note(found, seen, record)
            elif record.version is not None and entry is not None:
                self._note_foreign(found, entry)
            check_count(found.things)
        for key, entry in (there or {}).items():
            # A record that went since was deleted, or had its deletion carried out, unless it was clean: then it may
            # have been forgotten.
            if key not in before or before[key][0] is State.CLEAN:
                self._note_foreign(found, entry)
        check_count(found.things)
        await self._note_uploads(found, bucket, prefix)
        await asyncio.gather(*(self._check(found, holder) for holder in found.claims))
        return found

    async def _survey(self, bucket: str, prefix: str) -> AsyncIterator[tuple[Seen, Record]]:
        after = ""
        while True:
            page = await self._rooms.directory.survey(bucket, prefix, after, PAGE_COUNT)
            for seen in page:
                if seen.record is not None:
                    after = seen.record.name.key
                    yield seen, seen.record
            if len(page) < PAGE_COUNT:
                return
            await asyncio.sleep(0)

    async def _listing(self, bucket: str, prefix: str) -> dict[str, OriginEntry]:
        """What the origin has.

        Raises:
            NotFoundError: NoSuchBucket.
            OriginRefusedError: it does not say.
            OverloadedError: it does not answer.
        """
        found: dict[str, OriginEntry] = {}
        after, is_truncated = "", True
        while is_truncated:
            async with self._outage.bounded(bucket):
                try:
                    page = await self._rooms.origin.list_objects(bucket, prefix, "", after, PAGE_COUNT)
                except OriginRefusedError as error:
                    if error.code == "NoSuchBucket":
                        raise NotFoundError(error.code, "The specified bucket does not exist", bucket=bucket) from error
                    raise
            found |= {entry.key: entry for entry in page.entries}
            after, is_truncated = page.last_key, page.is_truncated
            check_count(found)
        return found

    def _note(self, found: Whereabouts, seen: Seen, record: Record) -> None:
        """A current object, as the directory knows it."""
        version, write, key = record.version, seen.pending, record.name.key
        if version is None:
            return
        others = self._rooms.replication.sources(seen.holders.get(version.uid, ()))
        is_clean = record.state is State.CLEAN
        if is_clean:
            bodies = tuple(Body(part.body.uid, part.body.size_bytes) for part in version.parts if part.body.size_bytes)
            for holder in others:
                found.claims.setdefault(holder, []).append((key, bodies))
        found.things[key] = Thing(
            key,
            version.size_bytes,
            float(version.modified_s),
            copies_count=self._rooms.holds_whole(version) + (0 if is_clean else len(others)),
            in_s3=is_clean,
            is_parked=write is not None and write.parked,
            quarantined=write.quarantined if write else "",
            is_disturbed=write is not None and write.disturbed_s > 0.0,
        )
        found.identities[key] = identity_of(record)
        found.uids[key] = version.uid
        if record.role is Role.MARKER:
            found.revisions[key] = record.revision

    async def _check(self, found: Whereabouts, holder: Holder) -> None:
        """Count what a peer does hold of what it said it holds."""
        claims = found.claims[holder]
        held = await self._rooms.replication.held(holder, [body for _, bodies in claims for body in bodies])
        for key, bodies in claims:
            if all(body.uid in held for body in bodies):
                thing = found.things[key]
                found.things[key] = replace(thing, copies_count=thing.copies_count + 1)

    def _note_foreign(self, found: Whereabouts, entry: OriginEntry) -> None:
        """An object that only the origin knows as it is now."""
        found.things[entry.key] = Thing(entry.key, entry.size_bytes, float(entry.modified_s), in_s3=True)
        found.identities[entry.key] = entry.etag

    async def _note_uploads(self, found: Whereabouts, bucket: str, prefix: str) -> None:
        """What clients upload in parts."""
        for upload in await self._rooms.directory.list_uploads(bucket, prefix):
            if upload.name.key not in found.things:
                parts = await self._rooms.directory.list_parts(upload.upload_id)
                size_bytes = sum(part.body.size_bytes for part in parts)
                found.things[upload.name.key] = arriving(upload, size_bytes)
                found.identities[upload.name.key] = upload.upload_id


def identity_of(record: Record) -> str:
    """What changes when the bytes of a key do."""
    return record.origin_etag or (record.version.uid if record.version else "")


def arriving(upload: Upload, size_bytes: int) -> Thing:
    """An object that a client uploads in parts, as far as it has come."""
    return Thing(upload.name.key, size_bytes, upload.started_s, is_receiving=True)


def is_rewritten(marker: str, members: Collection[str], found: Whereabouts) -> bool:
    """Whether a member of a set whose marker the origin has is being replaced or deleted: that was committed after the
    marker, and the origin may hold what it replaces. (A marker that is on its way itself is `is_disturbed` then.)"""
    revision = found.revisions.get(marker, 0)
    return any(key != marker and key in found.writes and takes(found.writes[key], revision) for key in members)


def takes(write: Pending, revision: int) -> bool:
    """Whether a pending write takes something from the origin that was there at a revision."""
    return write.revision > revision and (write.kind is Kind.DELETE or bool(write.base))


def check_count(found: Collection[object]) -> None:
    """Refuse what is too much to be looked at together.

    Raises:
        RequestError: InvalidArgument.
    """
    if len(found) > THINGS_LIMIT_COUNT:
        message = f"more than {THINGS_LIMIT_COUNT} objects are under the prefix: name one with fewer"
        raise RequestError("InvalidArgument", message)
