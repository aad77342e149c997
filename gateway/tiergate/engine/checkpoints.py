"""The sets under a prefix and where each of them stands, over all tiers and all nodes."""

import asyncio
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from tiergate.checkpoints import recognition
from tiergate.checkpoints.completeness import Doubts, status_of
from tiergate.checkpoints.recognition import DamagedSetError
from tiergate.checkpoints.sets import Manifest, Member, SetName, SetStatus, Thing, Tier
from tiergate.engine.current import Resolver
from tiergate.engine.fills import Fills
from tiergate.engine.outage import Outage
from tiergate.engine.reads import Openings
from tiergate.engine.rooms import Rooms
from tiergate.engine.whereabouts import Lookout, Whereabouts, identity_of, is_rewritten
from tiergate.errors import OverloadedError, RequestError, TiergateError
from tiergate.model import ObjectName, Pending
from tiergate.observe.logs import get_logger

log = get_logger(__name__)

READ_LIMIT_BYTES = 64 << 20
"""A marker or list beyond this is not read: who has it is not called whole."""

AT_ONCE_COUNT = 8
"""Sets that are judged at a time, each on a thread: to read its marker and lists is work for a processor."""

REMEMBERED_MEMBERS_COUNT = 250_000
"""Members of the manifests that are kept until their sets change."""


@dataclass(frozen=True, slots=True)
class FoundSet:
    """A set, and what of it the origin lacks."""

    status: SetStatus
    owed: tuple[Pending, ...]


@dataclass(frozen=True, slots=True)
class Place:
    """What was found under a prefix. `unseen`: the tiers that may hold sets which are not among these. `origin_fault`:
    why the origin did not say what it has (where only gateways write, the directory knows). `fault`: why nobody
    looked."""

    bucket: str
    prefix: str
    sets: tuple[FoundSet, ...] = ()
    unseen: frozenset[Tier] = frozenset()
    origin_fault: str = ""
    fault: str = ""


class Manifests:
    """What was read of sets that have not changed since."""

    def __init__(self, limit_count: int = REMEMBERED_MEMBERS_COUNT) -> None:
        self._limit_count = limit_count
        self._members_count = 0
        self._found: OrderedDict[SetName, tuple[int, Manifest]] = OrderedDict()

    def get(self, name: SetName, fingerprint: int) -> Manifest | None:
        """What a set must hold, if it is what it was."""
        known = self._found.get(name)
        if known is None or known[0] != fingerprint:
            return None
        self._found.move_to_end(name)
        return known[1]

    def note(self, name: SetName, fingerprint: int, manifest: Manifest) -> None:
        """Keep it, and forget what was asked for longest ago where it is too much."""
        self._forget(name)
        self._found[name] = fingerprint, manifest
        self._members_count += len(manifest.members)
        while self._members_count > self._limit_count:
            self._forget(next(iter(self._found)))

    def _forget(self, name: SetName) -> None:
        known = self._found.pop(name, None)
        self._members_count -= len(known[1].members) if known else 0


class Checkpoints:
    """Of one process; `close`d by whoever made it."""

    def __init__(self, rooms: Rooms) -> None:
        self._rooms = rooms
        self._outage = Outage(rooms.origin, rooms.clock)
        self._fills = Fills(rooms)
        self._openings = Openings(rooms, Resolver(rooms, self._outage), self._fills, self._outage)
        self._lookout = Lookout(rooms, self._outage)
        self._manifests = Manifests()
        self._readings: set[Reading] = set()
        self._threads = ThreadPoolExecutor(AT_ONCE_COUNT, thread_name_prefix="checkpoints")

    async def close(self) -> None:
        """End what runs in the background."""
        for reading in self._readings:
            reading.end()
        await asyncio.to_thread(self._threads.shutdown)
        await self._fills.close()
        await self._outage.close()

    async def everywhere(self) -> list[Place]:
        """The sets of all buckets that this node or its cluster has to do with. One that cannot be looked into says
        why.

        Raises:
            OverloadedError: the directory does not answer.
        """
        places: list[Place] = []
        for bucket in await self._rooms.directory.buckets():
            try:
                places.append(await self.under(bucket.name, ""))
            except RequestError as error:
                places.append(Place(bucket.name, "", unseen=frozenset(Tier), fault=error.message))
        return places

    async def under(self, bucket: str, prefix: str) -> Place:
        """The sets whose objects begin with `prefix`, and those that it lies in.

        Raises:
            NotFoundError: NoSuchBucket.
            RequestError: too many objects are under the prefix.
            OverloadedError: the directory does not answer.
        """
        whole = prefix
        while True:
            found = await self._lookout.under(bucket, whole)
            keys = sorted(found.things)
            names = await asyncio.to_thread(recognition.sets_of, bucket, keys, self._rooms.markers)
            # Of a set that begins further up, all must be seen to judge it.
            above = [name.prefix for name in names if not name.prefix.startswith(whole)]
            if not above:
                break
            whole = min(above, key=len)
        names = [name for name in names if name.prefix.startswith(prefix) or prefix.startswith(name.prefix)]
        sets: list[FoundSet] = []
        for start in range(0, len(names), AT_ONCE_COUNT):
            some = (self._judge(name, keys, found) for name in names[start : start + AT_ONCE_COUNT])
            for result in await asyncio.gather(*some, return_exceptions=True):
                if isinstance(result, BaseException):
                    raise result
                sets.append(result)
        knows_all = not found.origin_fault or self._rooms.settings.prefix_for(bucket, prefix).exclusive
        unseen = frozenset[Tier]() if knows_all else frozenset({Tier.S3})
        return Place(bucket, prefix, tuple(sets), unseen, found.origin_fault)

    async def _judge(self, name: SetName, keys: Sequence[str], found: Whereabouts) -> FoundSet:
        things = things_of(name, keys, found.things)
        damage = unread = ""
        manifest = plain(name, things)
        marker = things.get(name.marker)
        if marker is not None and (marker.in_s3 or marker.copies_count):
            try:
                manifest = await self._manifest(name, things, found.identities)
            except DamagedSetError as error:
                damage = error.message
            except TiergateError as error:
                log.warning("a set cannot be judged now", error=error, bucket=name.bucket, prefix=name.prefix)
                unread = error.message
            if marker.in_s3 and is_rewritten(name.marker, [member.key for member in manifest.members], found):
                things[name.marker] = replace(marker, is_disturbed=True)
        doubts = Doubts(damage, unread, is_s3_unseen=bool(found.origin_fault))
        status = status_of(manifest, things, needs_marker=recognition.needs_marker(name), doubts=doubts)
        owed = [found.writes.get(member.key) for member in (*manifest.members, Member(name.marker))]
        return FoundSet(status, tuple(dict.fromkeys(write for write in owed if write is not None)))

    async def _manifest(self, name: SetName, things: Mapping[str, Thing], identities: Mapping[str, str]) -> Manifest:
        """What a set must hold, as its marker and lists tell.

        Raises:
            DamagedSetError: they are not what they should be.
            TiergateError: they cannot be read now.
        """
        fingerprint = hash(frozenset((key, identities[key]) for key in things))
        known = self._manifests.get(name, fingerprint)
        if known is not None:
            return known
        # What only is on its way in is none of the set: it may have been given up long ago.
        sizes = {key: thing.size_bytes for key, thing in things.items() if not thing.is_receiving}
        reading = Reading(self._openings, name.bucket)
        self._readings.add(reading)
        try:
            loop = asyncio.get_running_loop()
            manifest = await loop.run_in_executor(self._threads, recognition.manifest_of, name, sizes, reading)
        finally:
            reading.end()
            self._readings.discard(reading)
        # Who reads may be told of a version that is older or newer than what was listed.
        if all(key in things and identities[key] == identity for key, identity in reading.seen.items()):
            self._manifests.note(name, fingerprint, manifest)
        return manifest


class Reading:
    """The reads of one set, asked for by a thread and done by the loop that made this, until it is over. Implements
    `checkpoints.sets.ReadBody`."""

    def __init__(self, openings: Openings, bucket: str) -> None:
        self._openings = openings
        self._bucket = bucket
        self._loop = asyncio.get_running_loop()
        self._is_over = False
        self._task: asyncio.Task[Any] | None = None
        self.seen: dict[str, str] = {}
        """What was read, and as what."""

    def __call__(self, key: str, start: int = 0, end: int | None = None, /) -> bytes:
        """Bytes of an object, for the thread.

        Raises:
            TiergateError: as the read does; or nobody waits for it any more.
        """
        try:
            return asyncio.run_coroutine_threadsafe(self._read(key, start, end), self._loop).result()
        except CancelledError as error:
            raise OverloadedError("nobody waits for this any more") from error

    async def _read(self, key: str, start: int, end: int | None) -> bytes:
        if self._is_over:
            raise OverloadedError("nobody waits for this any more")
        self._task = asyncio.current_task()
        self.seen[key] = ""
        record, data = await self._openings.read(ObjectName(self._bucket, key), start, end, READ_LIMIT_BYTES)
        self.seen[key] = identity_of(record)
        return data

    def end(self) -> None:
        """What is being read is not wanted any more, nor anything else."""
        self._is_over = True
        if self._task is not None:
            self._task.cancel()


def things_of(name: SetName, keys: Sequence[str], things: Mapping[str, Thing]) -> dict[str, Thing]:
    """The objects under a set's prefix. `keys`: all of them, sorted."""
    found: dict[str, Thing] = {}
    for key in keys[bisect_left(keys, name.prefix) :]:
        if not key.startswith(name.prefix):
            break
        found[key] = things[key]
    return found


def plain(name: SetName, things: Mapping[str, Thing]) -> Manifest:
    """A set that says nothing of itself: what is found is what there is."""
    return Manifest(name, tuple(Member(key) for key in things), is_listed=False)
