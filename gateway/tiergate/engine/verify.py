"""Proves that sets load: all their objects there, as long as they must be, with the bytes that were acknowledged, and
heads that a loader can read. What is wrong is named, and on demand mended from where it is right."""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from tiergate.checkpoints import recognition
from tiergate.checkpoints.completeness import is_own
from tiergate.checkpoints.sets import Manifest, Member, SetName, SetState, SetStatus, Tier
from tiergate.checkpoints.verification import Damage, Fault, Target, lists_of, targets_of
from tiergate.engine.checkpoints import READ_LIMIT_BYTES, Checkpoints, FoundSet, Place, home
from tiergate.engine.evidence import OriginObjectBytes, OwnMemory, PeersMemory, UnaskedError, blocks_of
from tiergate.engine.evidence import Place as Bytes
from tiergate.engine.looks import ATTEMPTS_COUNT, Finding, Looks, Wish
from tiergate.engine.mending import Mending
from tiergate.engine.outage import Outage
from tiergate.engine.rooms import Rooms, log_name
from tiergate.engine.whereabouts import PAGE_COUNT, check_count
from tiergate.errors import OriginRefusedError, OverloadedError
from tiergate.model import ObjectName, Role, State, Version

OBJECTS_COUNT = 4
"""Objects that are looked at at a time. Of each a block is in hand, or a head."""


UNASKED_COUNT = 20
"""So many objects of a set that cannot be looked at are named at most."""


class Verdict(StrEnum):
    """What a set was found to be."""

    SOUND = "sound"
    DAMAGED = "damaged"
    REPAIRED = "repaired"
    UNKNOWN = "unknown"
    """A tier could not be asked for some of it, and nothing wrong was seen."""
    UNMARKED = "unmarked"
    """Nothing wrong was seen, but no marker says that it is whole: it is being written, or rewritten in place."""


@dataclass(frozen=True, slots=True)
class Judged:
    """A set that was looked at. `is_listed`: by its own list, not merely by what is there."""

    name: SetName
    step: int | None
    verdict: Verdict
    is_listed: bool
    objects_count: int
    size_bytes: int


@dataclass(slots=True)
class Verification:
    """How far it is, and what was found. `damages`: all that was found; `unrepaired`: what of it could not be mended,
    and why; `unasked`: what could not be looked at, and why; `fault`: why not all was tried, empty if it was."""

    total_count: int = 0
    total_bytes: int = 0
    done_count: int = 0
    done_bytes: int = 0
    sets: list[Judged] = field(default_factory=list)
    damages: list[Damage] = field(default_factory=list)
    unrepaired: list[tuple[Damage, str]] = field(default_factory=list)
    unasked: list[str] = field(default_factory=list)
    fault: str = ""


@dataclass(slots=True)
class _Plan:
    """A set, and what is to be looked at of it. `damages`: what is known before. `is_rewritten`: an object of it was
    replaced or deleted after its marker was written."""

    status: SetStatus
    manifest: Manifest
    targets: list[Target] = field(default_factory=list)
    damages: list[Damage] = field(default_factory=list)
    unasked: list[str] = field(default_factory=list)
    is_rewritten: bool = False


class Verify:
    """Of one process; `close`d by whoever made it. `checkpoints` finds the sets, and is the caller's."""

    def __init__(self, rooms: Rooms, checkpoints: Checkpoints, mending: Mending) -> None:
        self._rooms = rooms
        self._checkpoints = checkpoints
        self._mending = mending
        self._outage = Outage(rooms.origin, rooms.clock)
        self._looks = Looks(rooms, self._outage)

    async def close(self) -> None:
        """End what runs in the background."""
        await self._outage.close()

    async def run(self, bucket: str, prefix: str, wish: Wish, progress: Verification, *, repair: bool = False) -> None:
        """Look at the sets under a prefix, and say in `progress` what was found.

        Raises:
            NotFoundError: NoSuchBucket.
            RequestError: too many objects are under the prefix.
            OverloadedError: the directory does not answer.
        """
        place = await self._checkpoints.under(bucket, prefix)
        if place.origin_fault and Tier.S3 in wish.tiers:
            progress.unasked.append(f"S3 did not say what it has: {place.origin_fault}")
        found = await self._found(place)
        progress.total_count = sum(len(each.manifest.members) for each in found)
        progress.total_bytes = sum(each.status.size_bytes for each in found)
        for each in found:
            await self._judge(each, wish, progress, repair=repair)

    # -- which sets, and which objects of them
    async def _found(self, place: Place) -> list[FoundSet]:
        """The sets, with what the directory knows to be in S3 and S3 does not list: without a list of its own, nobody
        else tells that it is missing."""
        known = {member.key for each in place.sets for member in each.manifest.members}
        lost: dict[SetName, list[Member]] = {}
        homeless: dict[str, int] = {}
        names = [each.status.name for each in place.sets]
        for key, size_bytes in (await self._clean(place)).items():
            if key in known or self._rooms.role_of(ObjectName(place.bucket, key), size_bytes) is Role.POINTER:
                continue
            name = home(key, names)
            if name is None:
                homeless[key] = size_bytes
            else:
                lost.setdefault(name, []).append(Member(key))
        found = [self._with_lost(each, lost.get(each.status.name, ())) for each in place.sets]
        for name in recognition.sets_of(place.bucket, homeless, self._rooms.markers):
            members = tuple(Member(key) for key in homeless if recognition.is_in(name, key))
            size_bytes = sum(homeless[member.key] for member in members)
            status = SetStatus(name, name.step, len(members), size_bytes, 0.0, is_parked=False, is_pinned=False)
            found.append(FoundSet(status, Manifest(name, members, is_listed=False), ()))
        return [self._with_marker(each) for each in found]

    async def _clean(self, place: Place) -> dict[str, int]:
        """What the directory knows to be in S3 under the place, with its length."""
        found: dict[str, int] = {}
        after = ""
        while page := await self._rooms.directory.scan(place.bucket, place.prefix, after, PAGE_COUNT):
            for record in page:
                if record.state is State.CLEAN and record.version is not None:
                    found[record.name.key] = record.version.size_bytes
            after = page[-1].name.key
            check_count(found)
        return found

    def _with_lost(self, found: FoundSet, lost: Iterable[Member]) -> FoundSet:
        """What a set's own list does not name of what it might govern is no member: it was left by another save."""
        manifest, lost = found.manifest, tuple(lost)
        if not lost or manifest.is_listed:
            return found
        members = (*manifest.members, *lost)
        name, keys = manifest.name, [member.key for member in members]
        if not name.marker:
            again = recognition.sets_of(name.bucket, keys, self._rooms.markers)
            name = next((each for each in again if each.prefix == name.prefix), name)
        return replace(found, manifest=replace(manifest, name=name, members=members))

    def _with_marker(self, found: FoundSet) -> FoundSet:
        manifest = found.manifest
        keys = {member.key for member in manifest.members}
        if not is_own(manifest.name) or manifest.name.marker in keys:
            return found
        marker = Member(manifest.name.marker)
        return replace(found, manifest=replace(manifest, members=(*manifest.members, marker)))

    async def _plan(self, found: FoundSet) -> _Plan:
        """What is to be looked at, as the set's lists tell it, read where their bytes are right."""
        plan = _Plan(found.status, found.manifest)
        bodies: dict[str, bytes] = {}
        places: dict[str, Bytes] = {}
        for key in lists_of(found.manifest):
            read = await self._read_list(ObjectName(found.status.name.bucket, key))
            if read is not None:
                places[key], bodies[key] = read
        plan.targets, broken = await asyncio.to_thread(targets_of, found.manifest, bodies)
        states = {each.state for each in found.status.tiers.values()}
        plan.is_rewritten = bool(found.status.name.marker) and states <= {SetState.RECEIVING, SetState.ABSENT}
        if plan.is_rewritten:
            # Its list is that of the save before: of this one it tells neither lengths nor heads.
            plan.targets = [Target(Member(target.member.key)) for target in plan.targets]
        for key, why in broken.items():
            plan.damages.append(Damage(key, places[key].tier, Fault.HEADER, why, places[key].node))
        fault = found.status.fault
        if fault and found.status.is_unknown:
            plan.unasked.append(fault)
        elif fault and not plan.damages:
            at = found.status.name.marker or found.status.name.prefix
            plan.damages.append(Damage(at, Tier.S3, Fault.HEADER, fault))
        return plan

    async def _read_list(self, name: ObjectName) -> tuple[Bytes, bytes] | None:
        """A list's bytes, and where they are right; None where they cannot be had. What is wrong with them is found
        when it is its turn."""
        seen = await self._rooms.directory.get(name)
        record = seen.record
        version = record.version if record is not None else None
        if version is not None and version.size_bytes <= READ_LIMIT_BYTES:
            me = self._rooms.replication.me
            with OwnMemory(self._rooms.memory, version, me.node if me else "") as own:
                body = await self._proved(own, version)
                if body is not None:
                    return own, body
            for holder in self._rooms.replication.sources(seen.holders.get(version.uid, ())):
                peer = PeersMemory(self._rooms, version, holder)
                body = await self._proved(peer, version)
                if body is not None:
                    return peer, body
        if record is not None and record.state is not State.CLEAN:
            return None
        try:
            async with self._outage.bounded(**log_name(name)):
                there = await self._rooms.origin.head_object(name)
        except (OverloadedError, OriginRefusedError):
            return None
        if there is None or there.size_bytes > READ_LIMIT_BYTES:
            return None
        place = OriginObjectBytes(self._rooms, name, there.etag, there.size_bytes)
        try:
            return place, await place.read(0, there.size_bytes)
        except UnaskedError:
            return None

    async def _proved(self, place: Bytes, version: Version) -> bytes | None:
        """All bytes of a small version, if they are there and right."""
        try:
            async for _, is_right in blocks_of(place, version):
                if not is_right:
                    return None
            return await place.read(0, version.size_bytes)
        except UnaskedError:
            return None

    # -- one set
    async def _judge(self, found: FoundSet, wish: Wish, progress: Verification, *, repair: bool) -> None:
        bucket = found.manifest.name.bucket
        attempts_count = 0
        while True:
            guard = await self._marker_guard(found)
            plan = await self._plan(found)
            findings = await self._look_at_all(bucket, plan.targets, wish, None if attempts_count else progress)
            damages = plan.damages + [damage for finding in findings for damage in finding.damages]
            unasked = plan.unasked + [why for finding in findings for why in finding.unasked]
            attempts_count += 1
            if not damages or await self._marker_guard(found) == guard:
                await self._conclude(plan, damages, unasked, wish, progress, repair=repair)
                return
            if attempts_count == ATTEMPTS_COUNT:
                await self._conclude(plan, [], [f"{plan.manifest.name.prefix}: it keeps changing"], wish, progress)
                return
            # It was written anew meanwhile, or deleted: what its list said then is not what it says now.
            again = await self._again(found.manifest.name)
            if not again:
                return
            found = again[0]

    async def _conclude(
        self,
        plan: _Plan,
        damages: Sequence[Damage],
        unasked: Sequence[str],
        wish: Wish,
        progress: Verification,
        *,
        repair: bool = False,
    ) -> None:
        """Say what was found of a set, after mending it if that is wished for."""
        name = plan.manifest.name
        progress.damages += damages
        verdict = Verdict.SOUND if name.marker and not plan.is_rewritten else Verdict.UNMARKED
        if damages:
            verdict = Verdict.DAMAGED
            if repair and await self._repair(plan, damages, wish, progress):
                verdict = Verdict.UNKNOWN if unasked else Verdict.REPAIRED
        elif unasked:
            verdict = Verdict.UNKNOWN
        progress.unasked += unasked[:UNASKED_COUNT]
        if len(unasked) > UNASKED_COUNT:
            progress.unasked.append(f"{name.prefix}: {len(unasked) - UNASKED_COUNT} more objects")
        size_bytes, count = plan.status.size_bytes, len(plan.targets)
        progress.sets.append(Judged(name, plan.status.step, verdict, plan.manifest.is_listed, count, size_bytes))

    async def _marker_guard(self, found: FoundSet) -> int:
        """What changes when a set's marker does; 0 for none."""
        name = found.manifest.name
        return (await self._rooms.directory.get(ObjectName(name.bucket, name.marker))).guard if name.marker else 0

    async def _again(self, name: SetName) -> list[FoundSet]:
        """A set as it is now; none if it went."""
        place = await self._checkpoints.under(name.bucket, name.prefix)
        return [each for each in await self._found(place) if each.status.name.prefix == name.prefix]

    async def _look_at_all(
        self, bucket: str, targets: Sequence[Target], wish: Wish, progress: Verification | None = None
    ) -> list[Finding]:
        """`progress`: told of each object; None: of none. Only what is wrong is kept."""
        work, found = iter(targets), list[Finding]()

        async def look_at_some() -> None:
            for target in work:
                finding = await self._looks.look(bucket, target, wish)
                if finding.damages or finding.unasked:
                    found.append(finding)
                if progress is not None:
                    progress.done_count += 1
                    progress.done_bytes += finding.version.size_bytes if finding.version else 0

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(OBJECTS_COUNT):
                    group.create_task(look_at_some())
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None
        return found

    async def _repair(self, plan: _Plan, damages: Sequence[Damage], wish: Wish, progress: Verification) -> bool:
        """Mend what can be mended; whether a second look finds nothing wrong."""
        name = plan.manifest.name
        targets = {target.member.key: target for target in plan.targets}
        owed: set[ObjectName] = set()
        for key in self._markers_last(name.bucket, damages):
            own = [damage for damage in damages if damage.key == key]
            if key not in targets:
                progress.unrepaired += [(damage, "nobody has it as it should be") for damage in own]
                continue
            finding = await self._looks.look(name.bucket, targets[key], Wish(deep=True))
            for damage in finding.damages:
                if damage.tier in wish.tiers:
                    why = await self._mending.mend(finding, damage)
                    if why:
                        progress.unrepaired.append((damage, why))
                    elif damage.tier is Tier.S3:
                        owed.add(finding.name)
            if not finding.damages:
                progress.unrepaired += [
                    (damage, "it is as it was acknowledged") for damage in own if self._stays(damage)
                ]
        for why in await self._mending.settled(owed, ObjectName(name.bucket, name.marker) if name.marker else None):
            progress.unasked.append(why)
        again = await self._look_at_all(name.bucket, list(targets.values()), wish)
        if plan.damages:
            # What a list says was not known before it was mended.
            plans = [await self._plan(each) for each in await self._again(name)]
            again += [each for at in plans for each in await self._look_at_all(name.bucket, at.targets, wish)]
            if any(at.damages for at in plans) or not plans:
                return False
        return not any(finding.damages or finding.unasked for finding in again)

    def _markers_last(self, bucket: str, damages: Sequence[Damage]) -> list[str]:
        """The keys, so that a marker finds what it must wait for owed."""
        keys = dict.fromkeys(damage.key for damage in damages)
        return sorted(keys, key=lambda key: self._rooms.role_of(ObjectName(bucket, key), 0) is Role.MARKER)

    def _stays(self, damage: Damage) -> bool:
        """Whether it is wrong in itself, wherever its bytes are."""
        return damage.fault is Fault.HEADER
