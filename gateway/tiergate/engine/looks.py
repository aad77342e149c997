"""Looks at one object of a set in each tier, and says what is wrong with it there."""

from dataclasses import dataclass, field

from tiergate.checkpoints.sets import Tier
from tiergate.checkpoints.verification import BrokenHeadError, Damage, Fault, Target, check_of
from tiergate.directory.base import Seen
from tiergate.engine.evidence import (
    AbsentError,
    OriginObjectBytes,
    OwnMemory,
    PeersMemory,
    Place,
    UnaskedError,
    blocks_of,
    is_proved,
)
from tiergate.engine.outage import Outage
from tiergate.engine.rooms import Rooms, bodies_of, log_name
from tiergate.engine.whereabouts import identity_of
from tiergate.errors import OriginRefusedError, OverloadedError
from tiergate.model import LOST, NO_BASE, Holder, ObjectName, Record, State, Version
from tiergate.origin.answers import OriginObject

ATTEMPTS_COUNT = 4
"""How often an object is looked at anew because it changed meanwhile."""


@dataclass(frozen=True, slots=True)
class Wish:
    """What to look at. `deep`: all bytes in S3, too. `quick`: of each object its heads, and that its bytes are there,
    in the nearest place that has it; checksums of what is in memory are not worked out. `as_found`: what the origin has
    counts, also where it is not what was written through the gateway (`Proving`: of a set whose marker is so)."""

    tiers: frozenset[Tier] = frozenset(Tier)
    deep: bool = False
    quick: bool = False
    as_found: bool = False


@dataclass(slots=True)
class Finding:
    """What was found of an object. `unasked`: why a tier could not be looked at. `is_here`, `peers`, `is_in_s3`: who
    has all of its bytes, and the right ones (in S3: as far as was looked). `origin_etag`: what S3 has it under
    (NO_BASE: nothing; None: not asked)."""

    name: ObjectName
    seen: Seen
    damages: list[Damage] = field(default_factory=list)
    unasked: list[str] = field(default_factory=list)
    is_here: bool = False
    peers: list[Holder] = field(default_factory=list)
    is_in_s3: bool = False
    origin_etag: str | None = None

    @property
    def record(self) -> Record | None:
        """What the directory knows of it."""
        return self.seen.record

    @property
    def version(self) -> Version | None:
        """The version that is current, as far as the directory knows."""
        return self.seen.record.version if self.seen.record else None

    def is_behind(self, there: OriginObject) -> bool:
        """Whether the origin's object is the current version."""
        record, version = self.record, self.version
        if record is None or version is None:
            return False
        return there.etag == record.origin_etag or (there.stamp is not None and there.stamp.uid == version.uid)

    def damage(self, tier: Tier, fault: Fault, detail: str, node: str = "") -> None:
        """Note something that is wrong."""
        self.damages.append(Damage(self.name.key, tier, fault, detail, node))


class Looks:
    """Of one process. `outage`: the caller's."""

    def __init__(self, rooms: Rooms, outage: Outage) -> None:
        self._rooms = rooms
        self._outage = outage

    async def look(self, bucket: str, target: Target, wish: Wish, known: str = "") -> Finding:
        """What is wrong with an object. `known`: by what directory and origin were just seen to mean the same by it
        (`identity_of`); a quick look asks the origin for nothing then that memory has.

        Raises:
            OverloadedError: the directory does not answer.
        """
        name = ObjectName(bucket, target.member.key)
        attempts_count = 0
        while True:
            finding = Finding(name, await self._rooms.directory.get(name))
            if wish.quick:
                await self._look_quickly(finding, target, wish, known)
            else:
                if Tier.MEMORY in wish.tiers:
                    await _InMemory(self._rooms, finding, target, wish).look()
                if Tier.S3 in wish.tiers:
                    await self._look_in_s3(finding, target, wish)
            if not finding.damages and not finding.unasked:
                return finding
            if (await self._rooms.directory.get(name)).guard == finding.seen.guard:
                return finding
            attempts_count += 1
            if attempts_count == ATTEMPTS_COUNT:
                return Finding(name, finding.seen, unasked=[f"{name.key}: it keeps changing"])

    async def _look_quickly(self, finding: Finding, target: Target, wish: Wish, known: str) -> None:
        record, version = finding.record, finding.version
        if record is not None and version is not None:
            is_current = record.state is not State.CLEAN or identity_of(record) == known
            memory = _InMemory(self._rooms, finding, target, wish)
            if is_current and await memory.has_it():
                return
            if record.state is not State.CLEAN:
                # Nobody has it whole, or nobody says so: which of them, the copies tell one by one.
                await memory.look()
                return
        await self._look_in_s3(finding, target, wish)

    # -- in S3
    async def _look_in_s3(self, finding: Finding, target: Target, wish: Wish) -> None:
        record, key = finding.record, finding.name.key
        if record is not None and record.state is not State.CLEAN:
            if Tier.MEMORY not in wish.tiers or record.version is None:
                write = finding.seen.pending
                why = f"S3 refused it: {write.quarantined}" if write and write.quarantined else "it is not there yet"
                finding.damage(Tier.S3, Fault.MISSING, why if record.version else "it was deleted")
            return
        if self._outage.is_on:
            finding.unasked.append(f"{key}: S3 does not answer")  # Nobody waits for it object by object.
            return
        try:
            async with self._outage.bounded(**log_name(finding.name)):
                there = await self._rooms.origin.head_object(finding.name)
        except (OverloadedError, OriginRefusedError) as error:
            finding.unasked.append(f"{key}: {error.message}")
            return
        finding.origin_etag = there.etag if there is not None else NO_BASE
        before = len(finding.damages), len(finding.unasked)
        if there is None:
            finding.damage(Tier.S3, Fault.MISSING, "S3 does not have it")
        elif self._is_fit(finding, target, there, wish):
            await self._look_at_bytes(finding, target, there, wish)
        finding.is_in_s3 = (len(finding.damages), len(finding.unasked)) == before

    def _is_fit(self, finding: Finding, target: Target, there: OriginObject, wish: Wish) -> bool:
        """Whether S3 has the object that it should have, by what it says of it."""
        version, member = finding.version, target.member
        is_ours = finding.is_behind(there)
        if version is not None and not version.foreign and (is_ours or not wish.as_found):
            if not is_ours:
                finding.damage(Tier.S3, Fault.CHANGED, "it is not the object that was written through the gateway")
                return False
            if there.size_bytes != version.size_bytes:
                detail = f"{there.size_bytes} bytes, {version.size_bytes} were acknowledged"
                finding.damage(Tier.S3, Fault.SIZE, detail)
                return False
        if not member.fits(there.size_bytes):
            wanted = f"at least {member.least_bytes}" if member.size_bytes is None else member.size_bytes
            finding.damage(Tier.S3, Fault.SIZE, f"{there.size_bytes} bytes, the set says {wanted}")
            return False
        return True

    async def _look_at_bytes(self, finding: Finding, target: Target, there: OriginObject, wish: Wish) -> None:
        place = OriginObjectBytes(self._rooms, finding.name, there.etag, there.size_bytes)
        version = finding.version
        try:
            if wish.deep and version is not None and is_proved(version) and finding.is_behind(there):
                async for offset_bytes, is_right in blocks_of(place, version):
                    if not is_right:
                        detail = f"the block at byte {offset_bytes} differs from what was acknowledged"
                        finding.damage(Tier.S3, Fault.CHECKSUM, detail)
                        return
            await look_at_heads(finding, target, place, there.size_bytes)
        except (AbsentError, UnaskedError) as error:
            finding.unasked.append(f"{finding.name.key}: {error.message}")


class _InMemory:
    """A look at all copies of an object in the memories of the nodes."""

    def __init__(self, rooms: Rooms, finding: Finding, target: Target, wish: Wish) -> None:
        self._rooms = rooms
        self._finding = finding
        self._target = target
        self._wish = wish
        self._is_memory_alone = Tier.S3 not in wish.tiers
        self._are_heads_seen = False

    async def look(self) -> None:
        """Look at each copy: its blocks; and at the heads, once where the bytes are proved to be the same."""
        finding, version, rooms = self._finding, self._finding.version, self._rooms
        if version is None or finding.record is None:
            if self._is_memory_alone:
                finding.damage(Tier.MEMORY, Fault.MISSING, "no memory has it")
            return
        is_owed = finding.record.state is State.DIRTY
        if is_owed and not self._target.member.fits(version.size_bytes):
            finding.damage(Tier.MEMORY, Fault.SIZE, f"{version.size_bytes} bytes, which is not what the set says")
        holders, me = finding.seen.holders.get(version.uid, frozenset()), rooms.replication.me
        node = me.node if me is not None else ""
        with OwnMemory(rooms.memory, version, node) as own:
            is_missed = is_owed and (rooms.is_alone or me in holders)
            if own.has_any or is_missed:
                finding.is_here = await self._is_whole(own, version, is_missed)
        for holder in rooms.replication.sources(holders):
            if await self._is_whole(PeersMemory(rooms, version, holder), version, is_owed):
                finding.peers.append(holder)
        if finding.is_here or finding.peers or finding.damages or finding.unasked:
            return
        if is_owed:
            write = finding.seen.pending
            if self._wish.quick and not rooms.is_alone and (write is None or write.quarantined != LOST):
                finding.unasked.append(f"{finding.name.key}: the nodes that have it may come back")
                return
            finding.damage(Tier.MEMORY, Fault.MISSING, "no living node has it, nor has S3")
        elif self._is_memory_alone:
            finding.damage(Tier.MEMORY, Fault.MISSING, "no memory has all of it")

    async def has_it(self) -> bool:
        """Whether a memory has all of it, with heads that can be read, as far as the nearest ones say; what is wrong
        with the heads is noted."""
        finding, version, rooms = self._finding, self._finding.version, self._rooms
        if version is None or not self._target.member.fits(version.size_bytes):
            return False
        me = rooms.replication.me
        with OwnMemory(rooms.memory, version, me.node if me else "") as own:
            if rooms.holds_whole(version):
                finding.is_here = await self._has_heads(own, version)
                return finding.is_here or bool(finding.damages)
        bodies = [body for _, body in bodies_of(version) if body.size_bytes]
        for holder in rooms.replication.sources(finding.seen.holders.get(version.uid, frozenset())):
            if {body.uid for body in bodies} <= await rooms.replication.held(holder, bodies):
                if await self._has_heads(PeersMemory(rooms, version, holder), version):
                    finding.peers.append(holder)
                if finding.peers or finding.damages:
                    return True
        return False

    async def _has_heads(self, place: Place, version: Version) -> bool:
        try:
            return await look_at_heads(self._finding, self._target, place, version.size_bytes)
        except (AbsentError, UnaskedError):
            return False  # It went meanwhile, or its node did: another place may have it.

    async def _is_whole(self, place: Place, version: Version, is_missed: bool) -> bool:
        """Whether a copy is whole and right; what is wrong with it is noted. `is_missed`: whether it must be whole."""
        finding, is_whole = self._finding, True
        try:
            async for offset_bytes, is_right in blocks_of(place, version):
                if is_right is None:
                    is_whole = False
                elif not is_right:
                    detail = f"the block at byte {offset_bytes} differs from what was acknowledged"
                    finding.damage(Tier.MEMORY, Fault.CHECKSUM, detail, place.node)
                    return False
            if is_whole and not self._are_heads_seen:
                self._are_heads_seen = is_proved(version)
                return await look_at_heads(finding, self._target, place, version.size_bytes)
        except AbsentError:
            is_whole = False
        except UnaskedError as error:
            finding.unasked.append(f"{finding.name.key}: {place.node} does not give its copy: {error.message}")
            return False
        if not is_whole and is_missed:
            finding.damage(Tier.MEMORY, Fault.MISSING, "a block of it is not there", place.node)
        return is_whole


async def look_at_heads(finding: Finding, target: Target, place: Place, size_bytes: int) -> bool:
    """Look at an object's heads in one place; whether they can be read.

    Raises:
        AbsentError, UnaskedError: their bytes cannot be had there.
    """
    check = check_of(target.pieces, size_bytes)
    try:
        start, end = next(check)
        while True:
            start, end = check.send(await place.read(start, end))
    except StopIteration:
        return True
    except BrokenHeadError as error:
        finding.damage(place.tier, Fault.HEADER, error.message, place.node)
        return False
