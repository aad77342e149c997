"""The sets under a prefix and where each of them stands, over all tiers and all nodes."""

import asyncio
import hashlib
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any

from tiergate.checkpoints import recognition
from tiergate.checkpoints.completeness import Doubts, is_own, status_of
from tiergate.checkpoints.layouts import home_of
from tiergate.checkpoints.markers import scope_of
from tiergate.checkpoints.recognition import DamagedSetError
from tiergate.checkpoints.sets import Manifest, Member, SetName, SetStatus, Thing, Tier
from tiergate.engine.current import Resolver
from tiergate.engine.fills import Fills
from tiergate.engine.outage import Outage
from tiergate.engine.reads import Openings
from tiergate.engine.rooms import Rooms, log_name
from tiergate.engine.whereabouts import Lookout, Whereabouts, identity_of, is_rewritten
from tiergate.errors import OriginRefusedError, OverloadedError, RequestError, TiergateError
from tiergate.model import ObjectName, Pending, QuarantinedSet
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
    """A set, what it must hold, and what of it the origin lacks. `identities`: of those of its objects that can be had,
    what changes when their bytes do, and once when the origin has them; `uids`: what does not, as far as known."""

    status: SetStatus
    manifest: Manifest
    owed: tuple[Pending, ...]
    identities: Mapping[str, str] = field(default_factory=dict)
    uids: Mapping[str, str] = field(default_factory=dict)

    def is_same(self, other: "FoundSet") -> bool:
        """Whether it has the same objects as at another look."""
        if self.identities.keys() != other.identities.keys():
            return False
        return all(
            identity == other.identities[key] or (key in self.uids and self.uids[key] == other.uids.get(key))
            for key, identity in self.identities.items()
        )

    @property
    def bodies(self) -> str:
        """Its fingerprint: another one where an object of it is another, came or went."""
        found = hashlib.blake2b(digest_size=16)
        for key in sorted(self.identities):
            found.update(f"{key}\0{self.identities[key]}\0".encode())
        return found.hexdigest()


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
    """Of one process; `close`d by whoever made it. `remembered_count`: see `Manifests`."""

    def __init__(self, rooms: Rooms, *, remembered_count: int = REMEMBERED_MEMBERS_COUNT) -> None:
        self._rooms = rooms
        self._outage = Outage(rooms.origin, rooms.clock)
        self._fills = Fills(rooms)
        self._openings = Openings(rooms, Resolver(rooms, self._outage), self._fills, self._outage)
        self._lookout = Lookout(rooms, self._outage)
        self._manifests = Manifests(remembered_count)
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

    async def quarantined_under(self, bucket: str, prefix: str) -> tuple[str, ...]:
        """The fingerprints of the quarantined sets under a prefix."""
        found = await self._rooms.directory.quarantined_sets(bucket)
        return tuple(each.bodies for each in found if each.prefix.startswith(prefix))

    async def under(self, bucket: str, prefix: str) -> Place:
        """The sets that have objects whose keys begin with `prefix`.

        Raises:
            NotFoundError: NoSuchBucket.
            RequestError: too many objects are under the prefix.
            OverloadedError: the directory does not answer.
        """
        listed = prefix
        while True:
            found = await self._lookout.under(bucket, listed)
            names = await asyncio.to_thread(recognition.sets_of, bucket, found.things, self._rooms.markers)
            # All that tells of a set must be seen to judge it.
            wider = [place for place in map(recognition.around, names) if not place.startswith(listed)]
            if not wider:
                break
            listed = scope_of(shared_start(listed, *wider))
        keys = Keys(found.things)
        wanted = [name for name in names if any(key.startswith(prefix) for key in keys.of(name))]
        pins = [pin.prefix for pin in await self._rooms.directory.pinned_prefixes() if pin.bucket == bucket]
        aside = {each.prefix: each for each in await self._rooms.directory.quarantined_sets(bucket)}
        sets: list[FoundSet] = []
        for start in range(0, len(wanted), AT_ONCE_COUNT):
            some = (
                self._judge(name, names, keys, found, pins, aside) for name in wanted[start : start + AT_ONCE_COUNT]
            )
            for result in await asyncio.gather(*some, return_exceptions=True):
                if isinstance(result, BaseException):
                    raise result
                sets.append(result)
        knows_all = not found.origin_fault or self._rooms.settings.prefix_for(bucket, prefix).exclusive
        unseen = frozenset[Tier]() if knows_all else frozenset({Tier.S3})
        return Place(bucket, prefix, tuple(sets), unseen, found.origin_fault)

    async def _judge(
        self,
        name: SetName,
        names: Sequence[SetName],
        keys: "Keys",
        found: Whereabouts,
        pins: Sequence[str],
        aside: Mapping[str, QuarantinedSet],
    ) -> FoundSet:
        own = keys.of(name)
        # What a pointer speaks for is told by what lies beside it, too.
        beside = [] if name.marker else keys.under(recognition.around(name))
        things = {key: found.things[key] for key in (*beside, *own)}
        damage = unread = ""
        manifest = Manifest(name, tuple(Member(key) for key in own), is_listed=False)
        if not name.marker or can_be_had(things[name.marker]):
            try:
                manifest = await self._manifest(name, things, found)
            except DamagedSetError as error:
                damage = error.message
            except TiergateError as error:
                log.warning("a set cannot be judged now", error=error, bucket=name.bucket, prefix=name.prefix)
                unread = error.message
        # Neither what is lost nor what is on its way in was there to be read: it is of the set all the same.
        lacking = [key for key in own if not can_be_had(things[key]) and home(key, names) == name]
        if manifest.name.marker:
            lacking = [key for key in lacking if not things[key].is_receiving]  # It may have been given up long ago.
        members = {member.key: member for member in (*map(Member, lacking), *manifest.members)}
        manifest = replace(manifest, members=tuple(members.values()))
        marker = things.get(manifest.name.marker)
        if marker is not None and is_own(manifest.name) and marker.in_s3 and is_rewritten(marker.key, members, found):
            things[marker.key] = replace(marker, is_disturbed=True)
        doubts = Doubts(damage, unread, is_s3_unseen=bool(found.origin_fault))
        is_pinned = any(name.prefix.startswith(pin) for pin in pins)
        status = status_of(manifest, things, doubts=doubts, is_pinned=is_pinned)
        owed = tuple(found.writes[key] for key in members if key in found.writes)
        there = [key for key in own if can_be_had(things[key])]
        identities = {key: found.identities[key] for key in there}
        uids = {key: found.uids[key] for key in there if key in found.uids}
        judged = FoundSet(status, manifest, owed, identities, uids)
        known = aside.get(name.prefix)
        if known is None or known.bodies != judged.bodies:
            return judged
        doubts = replace(doubts, quarantined=known.reason)
        return replace(judged, status=status_of(manifest, things, doubts=doubts, is_pinned=is_pinned))

    async def _manifest(self, name: SetName, things: Mapping[str, Thing], found: Whereabouts) -> Manifest:
        """What a set must hold, as its marker and lists tell.

        Raises:
            DamagedSetError: they are not what they should be.
            TiergateError: they cannot be read now.
        """
        there = {key: thing for key, thing in things.items() if can_be_had(thing)}
        fingerprint = hash(frozenset((key, found.identities[key]) for key in there))
        known = self._manifests.get(name, fingerprint)
        if known is not None:
            return known
        sizes = {key: thing.size_bytes for key, thing in there.items()}
        reading = Reading(self._rooms, self._openings, self._outage, name.bucket, found)
        self._readings.add(reading)
        try:
            loop = asyncio.get_running_loop()
            manifest = await loop.run_in_executor(self._threads, recognition.manifest_of, name, sizes, reading)
        finally:
            reading.end()
            self._readings.discard(reading)
        if reading.is_of_what_was_listed:
            self._manifests.note(name, fingerprint, manifest)
        return manifest


class Reading:
    """The reads of one set, asked for by a thread and done by the loop that made this, until it is over. Implements
    `checkpoints.sets.ReadBody`."""

    def __init__(self, rooms: Rooms, openings: Openings, outage: Outage, bucket: str, found: Whereabouts) -> None:
        self._origin = rooms.origin
        self._openings = openings
        self._outage = outage
        self._bucket = bucket
        self._found = found
        self._loop = asyncio.get_running_loop()
        self._is_over = False
        self._task: asyncio.Task[Any] | None = None
        self.is_of_what_was_listed = True
        """Whether all that was read is of the versions that were found; who reads may be told of an older or newer."""

    def __call__(self, key: str, start: int = 0, end: int | None = None, /) -> bytes:
        """Bytes of an object, for the thread.

        Raises:
            TiergateError: as the read does; it would be too much; or nobody waits for it any more.
        """
        try:
            return asyncio.run_coroutine_threadsafe(self._read(key, start, end), self._loop).result()
        except CancelledError as error:
            raise OverloadedError("nobody waits for this any more") from error

    async def _read(self, key: str, start: int, end: int | None) -> bytes:
        if self._is_over:
            raise OverloadedError("nobody waits for this any more")
        self._task = asyncio.current_task()
        thing, name = self._found.things[key], ObjectName(self._bucket, key)
        end = thing.size_bytes if end is None else min(end, thing.size_bytes)
        if end - start > READ_LIMIT_BYTES:
            raise DamagedSetError(f"{key}: more than {READ_LIMIT_BYTES} bytes must be read to know what it says")
        if start >= end:
            return b""
        if not thing.copies_count:
            return await self._from_origin(name, start, end)
        record, data = await self._openings.read(name, start, end)
        self.is_of_what_was_listed &= identity_of(record) == self._found.identities[key]
        return data

    async def _from_origin(self, name: ObjectName, start: int, end: int) -> bytes:
        """Bytes that are in no memory, without taking them in: what is looked at once evicts nothing."""
        async with self._outage.bounded(**log_name(name)):
            try:
                async with self._origin.get_object(name, start, end, self._found.identities[name.key]) as (_, pieces):
                    return b"".join([bytes(piece) async for piece in pieces])
            except OriginRefusedError as error:
                if error.status in (404, 412, 416):
                    raise OverloadedError("it changes while it is looked at", **log_name(name)) from error
                raise

    def end(self) -> None:
        """What is being read is not wanted any more, nor anything else."""
        self._is_over = True
        if self._task is not None:
            self._task.cancel()


class Keys:
    """Keys, to find those of sets among them."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._keys = sorted(keys)
        homes = ((home_of(key), key) for key in self._keys)
        self._apart = sorted((place, key) for place, key in homes if not key.startswith(place))

    def under(self, prefix: str) -> list[str]:
        """Those that begin so."""
        first = bisect_left(self._keys, prefix)
        return list(takewhile(lambda key: key.startswith(prefix), self._keys[first:]))

    def of(self, name: SetName) -> list[str]:
        """Those under a set's prefix, as `recognition.is_in` says."""
        if name.prefix and not name.prefix.endswith("/"):
            return [name.prefix]
        first = bisect_left(self._apart, (name.prefix,))
        apart = takewhile(lambda each: each[0].startswith(name.prefix), self._apart[first:])
        return [*self.under(name.prefix), *(key for _, key in apart if not key.startswith(name.prefix))]


def shared_start(*texts: str) -> str:
    """What all texts begin with."""
    first, last = min(texts), max(texts)
    return "".join(one for one, _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, last, strict=False)))


def can_be_had(thing: Thing) -> bool:
    """Whether some tier has all bytes of an object."""
    return not thing.is_receiving and (thing.in_s3 or thing.copies_count > 0)


def home(key: str, names: Sequence[SetName]) -> SetName | None:
    """The innermost of the sets that a key is in."""
    return max(
        (name for name in names if recognition.is_in(name, key)), key=lambda each: len(each.prefix), default=None
    )
