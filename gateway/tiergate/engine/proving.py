"""Looks at all objects of a set, as its own lists tell of them: whether it loads."""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tiergate.checkpoints import recognition
from tiergate.checkpoints.completeness import is_own
from tiergate.checkpoints.sets import Manifest, Member, SetName, SetState, SetStatus, Tier
from tiergate.checkpoints.verification import Damage, Fault, Target, lists_of, targets_of
from tiergate.engine.checkpoints import READ_LIMIT_BYTES, Checkpoints, FoundSet, Place, home
from tiergate.engine.evidence import OriginObjectBytes, OwnMemory, PeersMemory, UnaskedError, blocks_of
from tiergate.engine.evidence import Place as Bytes
from tiergate.engine.looks import ATTEMPTS_COUNT, Finding, Looks, Wish
from tiergate.engine.outage import Outage
from tiergate.engine.rooms import Rooms, log_name
from tiergate.engine.whereabouts import PAGE_COUNT, check_count
from tiergate.errors import OriginRefusedError, OverloadedError
from tiergate.model import ObjectName, Role, State, Version

OBJECTS_COUNT, QUICK_COUNT = 4, 16
"""Objects that are looked at at a time. Of each a block is in hand, or a head; where only heads are looked at, most of
the time is the origin's to answer."""


@dataclass(slots=True)
class Proof:
    """A set, and what was seen of it. `damages`, `unasked`: of its lists, and of the whole; `findings`: of those of its
    objects of which something is wrong, or could not be looked at. `is_rewritten`: an object of it was replaced or
    deleted after its marker was written. `is_settled`: it stood still meanwhile."""

    found: FoundSet
    targets: list[Target] = field(default_factory=list)
    damages: list[Damage] = field(default_factory=list)
    unasked: list[str] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    is_rewritten: bool = False
    is_settled: bool = True

    @property
    def all_damages(self) -> list[Damage]:
        """Whatever is wrong, anywhere."""
        return self.damages + [damage for finding in self.findings for damage in finding.damages]

    @property
    def all_unasked(self) -> list[str]:
        """Whatever could not be looked at, and why."""
        return self.unasked + [why for finding in self.findings for why in finding.unasked]


Told = Callable[[Finding], None]
"""Told of each object that was looked at."""


class Proving:
    """Of one process; `close`d by whoever made it. `checkpoints` finds the sets, and is the caller's."""

    def __init__(self, rooms: Rooms, checkpoints: Checkpoints) -> None:
        self._rooms = rooms
        self._checkpoints = checkpoints
        self._outage = Outage(rooms.origin, rooms.clock)
        self.looks = Looks(rooms, self._outage)

    async def close(self) -> None:
        """End what runs in the background."""
        await self._outage.close()

    async def prove(self, found: FoundSet, wish: Wish, told: Told | None = None) -> Proof | None:
        """What is wrong with a set. It is looked at anew while it changes, a few times; None: it went meanwhile.

        Raises:
            OverloadedError: the directory does not answer.
        """
        bucket, attempts_count = found.manifest.name.bucket, 0
        while True:
            guard = await self._marker_guard(found)
            proof = await self.plan(found)
            known = found.identities if wish.quick else {}
            first = told if not attempts_count else None
            marker = found.manifest.name.marker
            # Who wrote a marker behind the gateway spoke for what was there then.
            is_foreign = wish.as_found and marker in found.identities and marker not in found.uids
            seen = replace(wish, as_found=is_foreign)
            proof.findings = await self.look_at_all(bucket, proof.targets, seen, first, known)
            attempts_count += 1
            if not proof.all_damages or await self._marker_guard(found) == guard:
                return proof
            if attempts_count == ATTEMPTS_COUNT:
                return Proof(found, proof.targets, unasked=[f"{found.manifest.name.prefix}: it keeps changing"])
            # It was written anew meanwhile, or deleted: what its list said then is not what it says now.
            again = await self.again(found.manifest.name)
            if not again:
                return None
            found = again[0]

    # -- which sets, and which objects of them
    async def sets(self, place: Place) -> list[FoundSet]:
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

    async def plan(self, found: FoundSet) -> Proof:
        """What is to be looked at, as the set's lists tell it, read where their bytes are right."""
        plan = Proof(found)
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

    async def _marker_guard(self, found: FoundSet) -> int:
        """What changes when a set's marker does; 0 for none."""
        name = found.manifest.name
        return (await self._rooms.directory.get(ObjectName(name.bucket, name.marker))).guard if name.marker else 0

    async def again(self, name: SetName) -> list[FoundSet]:
        """A set as it is now; none if it went."""
        place = await self._checkpoints.under(name.bucket, name.prefix)
        return [each for each in await self.sets(place) if each.status.name.prefix == name.prefix]

    async def look_at_all(
        self,
        bucket: str,
        targets: Sequence[Target],
        wish: Wish,
        told: Told | None = None,
        known: Mapping[str, str] | None = None,
    ) -> list[Finding]:
        """Look at objects; what is kept is those of which something is wrong, or could not be looked at. `known`: see
        `Looks.look`."""
        work, found = iter(targets), list[Finding]()

        async def look_at_some() -> None:
            for target in work:
                finding = await self.looks.look(bucket, target, wish, (known or {}).get(target.member.key, ""))
                if finding.damages or finding.unasked:
                    found.append(finding)
                if told is not None:
                    told(finding)

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(QUICK_COUNT if wish.quick else OBJECTS_COUNT):
                    group.create_task(look_at_some())
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None
        return found
