"""Which checkpoint a restart takes: the newest whole one under a prefix, over all tiers, looked at before it is named.
What is found damaged is quarantined, and passed over from then on by everybody."""

import asyncio
from collections.abc import Collection
from dataclasses import dataclass

from tiergate.checkpoints.newest import UnseenTierError, newest, next_in_turn
from tiergate.checkpoints.sets import SetStatus, Tier
from tiergate.checkpoints.verification import Fault
from tiergate.engine.checkpoints import Checkpoints, FoundSet, Place
from tiergate.engine.looks import Finding, Wish
from tiergate.engine.proving import Proof, Proving
from tiergate.engine.rooms import Rooms
from tiergate.errors import OverloadedError
from tiergate.model import QuarantinedSet
from tiergate.observe.logs import get_logger

ATTEMPTS_COUNT = 4
"""How often all is looked at anew because the newest set changed meanwhile."""

AGAIN_S = 5
"""What could not be looked at may be there again after that."""

REASONS_COUNT = 3
"""So many faults of a set are named."""

REMEMBERED_COUNT = 50_000
"""Members of manifests that a process keeps, which may be one of many."""

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class PassedOver:
    """A set that would be newer, and why it is not taken."""

    status: SetStatus
    reason: str


@dataclass(frozen=True, slots=True)
class Newest:
    """The newest whole set, None if there is none, and what was passed over on the way to it, the newest first."""

    status: SetStatus | None
    passed_over: tuple[PassedOver, ...] = ()


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked for. `trusted`: tiers whose word is enough where others cannot be asked; `deep`: all bytes are read
    and compared with what was acknowledged, in every tier."""

    bucket: str
    prefix: str
    trusted: frozenset[Tier] = frozenset()
    deep: bool = False


class ChangedError(OverloadedError):
    """A set changed while it was looked at."""


class Chooser:
    """Of one process; `close`d by whoever made it. It looks at one place at a time: who asks meanwhile waits, and all
    that ask the same get what the first look that began after them found."""

    def __init__(self, rooms: Rooms) -> None:
        self._rooms = rooms
        self._checkpoints = Checkpoints(rooms, remembered_count=REMEMBERED_COUNT)
        self._proving = Proving(rooms, self._checkpoints)
        self._one = asyncio.Lock()
        self._turn = 0
        self._last: tuple[Question, int, Newest | OverloadedError] | None = None

    async def close(self) -> None:
        """End what runs in the background."""
        await self._proving.close()
        await self._checkpoints.close()

    async def choose(self, question: Question) -> Newest:
        """The newest whole set under a prefix, proved to load.

        Raises:
            NotFoundError: NoSuchBucket.
            RequestError: too many objects are under the prefix.
            OverloadedError: nobody can say now: a tier, a node or the directory does not answer, or it keeps changing.
        """
        self._turn += 1
        asked = self._turn
        async with self._one:
            if self._last is None or self._last[0] != question or self._last[1] <= asked:
                self._turn += 1
                began, self._last = self._turn, None
                try:
                    self._last = question, began, await self._choose(question)
                except OverloadedError as error:
                    self._last = question, began, error
            found = self._last[2]
        if isinstance(found, OverloadedError):
            raise found.with_traceback(None)  # It is raised to many.
        return found

    async def _choose(self, question: Question) -> Newest:
        for _ in range(ATTEMPTS_COUNT):
            try:
                return await self._look(question)
            except ChangedError as error:
                log.info("looking for the newest checkpoint again", reason=error.message, prefix=question.prefix)
        raise OverloadedError("the newest set keeps changing", prefix=question.prefix)

    async def _look(self, question: Question) -> Newest:
        known = await self._rooms.directory.quarantined_sets(question.bucket)
        place = await self._checkpoints.under(question.bucket, question.prefix)
        # Nobody but the origin tells of what only it has.
        newest((), place.unseen & question.trusted if question.trusted else place.unseen)
        await self._forget_what_changed(place, known)
        left = {each.status.name: each for each in await self._proving.sets(place)}
        passed: list[PassedOver] = []
        while (status := next_in_turn(each.status for each in left.values())) is not None:
            found = left.pop(status.name)
            reason = status.quarantined or await self._fault_of(found, place, question)
            if not reason:
                return Newest(status, tuple(passed))
            passed.append(PassedOver(status, reason))
        return Newest(None, tuple(passed))

    async def _forget_what_changed(self, place: Place, known: Collection[QuarantinedSet]) -> None:
        """A set that is another now, or went, is passed over no longer."""
        if place.origin_fault:
            return
        aside = {each.status.name.prefix for each in place.sets if each.status.quarantined}
        changed = [each for each in known if each.prefix.startswith(place.prefix) and each.prefix not in aside]
        for each in changed:
            if await self._rooms.directory.release_set(each):
                log.info("a quarantined checkpoint was written anew, or deleted", **_named(each))

    async def _fault_of(self, found: FoundSet, place: Place, question: Question) -> str:
        """Why a set is not to be taken; empty if it is sound. What is damaged is quarantined.

        Raises:
            OverloadedError: it cannot be said now.
            ChangedError: it changed meanwhile.
        """
        try:
            if found.status.is_damaged and place.origin_fault:
                raise UnseenTierError(f"whether {found.status.name.prefix} is whole is not known: {place.origin_fault}")
            newest([found.status] if found.status.is_unknown else [])
            faults, now = await self._faults_of(found, question)
        except (ChangedError, UnseenTierError) as error:
            if question.trusted and isinstance(error, UnseenTierError):
                return error.message
            raise
        if not faults:
            return ""
        more = f"; and {len(faults) - REASONS_COUNT} more" if len(faults) > REASONS_COUNT else ""
        name, reason = found.status.name, "; ".join(faults[:REASONS_COUNT]) + more
        damaged = QuarantinedSet(name.bucket, name.prefix, now.bodies, reason, self._rooms.clock.wall_s())
        await self._rooms.directory.quarantine_set(damaged)
        self._rooms.metrics.quarantined_sets.inc()
        log.warning(
            "a checkpoint is damaged: it is passed over", reason=reason, step=found.status.step, **_named(damaged)
        )
        return reason

    async def _faults_of(self, found: FoundSet, question: Question) -> tuple[list[str], FoundSet]:
        """What is wrong with a set, and the set as it is after that was seen.

        Raises:
            UnseenTierError: it cannot be said now.
            ChangedError: it changed meanwhile.
        """
        name = found.status.name
        proof = await self._proving.prove(found, Wish(deep=question.deep, quick=not question.deep, as_found=True))
        now = next((each for each in await self._proving.again(name) if each.status.name.prefix == name.prefix), None)
        if proof is None or now is None or not found.is_same(now):
            raise ChangedError(f"{name.prefix} changed meanwhile")
        faults = faults_of(proof)
        if faults:
            return faults, now
        unasked = proof.unasked + [
            why for each in proof.findings if question.deep or not _is_had(each) for why in each.unasked
        ]
        if unasked:
            raise UnseenTierError(f"{name.prefix} cannot be looked at now: {unasked[0]}", retry_after_s=AGAIN_S)
        if now.status.is_damaged:
            missing = {key for tier in now.status.tiers.values() for key in tier.missing}
            return [now.status.fault or f"missing: {', '.join(sorted(missing))}"], now
        if not now.status.is_whole:
            raise ChangedError(f"{name.prefix} changed meanwhile")
        return [], now


def faults_of(proof: Proof) -> list[str]:
    """What of a set cannot be had as it must be: that a copy is damaged, or gone, is none where another is right; but
    what S3 does not have as it should, nobody may have tomorrow. Pure."""
    found = [str(damage) for damage in proof.damages]
    for finding in proof.findings:
        for damage in finding.damages:
            if damage.tier is Tier.S3 or damage.fault is Fault.SIZE or not _is_had(finding):
                found.append(str(damage))
    return found


def _is_had(finding: Finding) -> bool:
    """Whether somebody has the object, and as it should be."""
    return finding.is_here or bool(finding.peers) or finding.is_in_s3


def _named(each: QuarantinedSet) -> dict[str, str]:
    return {"bucket": each.bucket, "prefix": each.prefix}
