"""Proves that sets load: all their objects there, as long as they must be, with the bytes that were acknowledged, and
heads that a loader can read. What is wrong is named, and on demand mended from where it is right."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from tiergate.checkpoints.sets import SetName, Tier
from tiergate.checkpoints.verification import Damage, Fault
from tiergate.engine.checkpoints import Checkpoints
from tiergate.engine.looks import Finding, Wish
from tiergate.engine.mending import Mending
from tiergate.engine.proving import Proof, Proving
from tiergate.engine.rooms import Rooms
from tiergate.model import ObjectName, Role
from tiergate.observe.logs import get_logger

log = get_logger(__name__)

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


class Verify:
    """Of one process; `close`d by whoever made it. `checkpoints` finds the sets, and is the caller's."""

    def __init__(self, rooms: Rooms, checkpoints: Checkpoints, mending: Mending) -> None:
        self._rooms = rooms
        self._checkpoints = checkpoints
        self._mending = mending
        self._proving = Proving(rooms, checkpoints)

    async def close(self) -> None:
        """End what runs in the background."""
        await self._proving.close()

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
        found = await self._proving.sets(place)
        progress.total_count = sum(len(each.manifest.members) for each in found)
        progress.total_bytes = sum(each.status.size_bytes for each in found)

        def told(finding: Finding) -> None:
            progress.done_count += 1
            progress.done_bytes += finding.version.size_bytes if finding.version else 0

        for each in found:
            proof = await self._proving.prove(each, wish, told)
            if proof is not None:
                await self._conclude(proof, wish, progress, repair=repair)

    # -- one set
    async def _conclude(self, proof: Proof, wish: Wish, progress: Verification, *, repair: bool) -> None:
        """Say what was found of a set, after mending it if that is wished for."""
        status, manifest = proof.found.status, proof.found.manifest
        name, damages, unasked = manifest.name, proof.all_damages, proof.all_unasked
        progress.damages += damages
        verdict = Verdict.SOUND if name.marker and not proof.is_rewritten else Verdict.UNMARKED
        if damages:
            verdict = Verdict.DAMAGED
            if repair and await self._repair(proof, wish, progress):
                verdict = Verdict.UNKNOWN if unasked else Verdict.REPAIRED
        elif unasked:
            verdict = Verdict.UNKNOWN
        progress.unasked += unasked[:UNASKED_COUNT]
        if len(unasked) > UNASKED_COUNT:
            progress.unasked.append(f"{name.prefix}: {len(unasked) - UNASKED_COUNT} more objects")
        if set(Tier) <= wish.tiers and (verdict is Verdict.REPAIRED or (verdict is Verdict.SOUND and wish.deep)):
            await self._release(name)
        size_bytes, count = status.size_bytes, len(proof.targets)
        progress.sets.append(Judged(name, status.step, verdict, manifest.is_listed, count, size_bytes))

    async def _release(self, name: SetName) -> None:
        """It is proved to be right: who asks for the newest may have it again."""
        for each in await self._rooms.directory.quarantined_sets(name.bucket):
            if each.prefix == name.prefix and await self._rooms.directory.release_set(each):
                log.info("a checkpoint is sound again", bucket=name.bucket, prefix=name.prefix)

    async def _repair(self, proof: Proof, wish: Wish, progress: Verification) -> bool:
        """Mend what can be mended; whether a second look finds nothing wrong."""
        name, damages, proving = proof.found.manifest.name, proof.all_damages, self._proving
        targets = {target.member.key: target for target in proof.targets}
        owed: set[ObjectName] = set()
        for key in self._markers_last(name.bucket, damages):
            own = [damage for damage in damages if damage.key == key]
            if key not in targets:
                progress.unrepaired += [(damage, "nobody has it as it should be") for damage in own]
                continue
            finding = await proving.looks.look(name.bucket, targets[key], Wish(deep=True))
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
        again = await proving.look_at_all(name.bucket, list(targets.values()), wish)
        if proof.damages:
            # What a list says was not known before it was mended.
            plans = [await proving.plan(each) for each in await proving.again(name)]
            again += [each for at in plans for each in await proving.look_at_all(name.bucket, at.targets, wish)]
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
