"""Whether a set of a run is whole, for who looks again and again: judged anew only when something of it changed."""

from dataclasses import dataclass

from tiergate.clock import Clock
from tiergate.engine.checkpoints import Checkpoints
from tiergate.writeback.keeper import Found

KNOWN_COUNT = 1000
"""Sets whose judgement is remembered."""

AGAIN_S = 30.0
"""A set that was not whole is looked at again after that: what it lacked may be in the origin alone."""


@dataclass(frozen=True, slots=True)
class _Judged:
    fingerprint: tuple[int, float, int, tuple[str, ...]]
    is_whole: bool
    at_s: float


class WholeSets:
    """Judges sets by their own lists, over all tiers (`Checkpoints`)."""

    def __init__(self, checkpoints: Checkpoints, clock: Clock) -> None:
        self._checkpoints = checkpoints
        self._clock = clock
        self._known: dict[tuple[str, str], _Judged] = {}

    async def judge(self, found: Found) -> bool:
        """Whether everything of a set is somewhere: of each checkpoint under its prefix, if there are several.

        Raises:
            TiergateError: it cannot be told now.
        """
        place = found.plan.bucket, found.plan.prefix
        aside = await self._checkpoints.quarantined_under(*place)
        fingerprint = found.plan.revision, found.newest_s, len(found.records), aside
        known, now_s = self._known.get(place), self._clock.monotonic_s()
        if known is not None and known.fingerprint == fingerprint and (known.is_whole or now_s < known.at_s + AGAIN_S):
            return known.is_whole
        sets = (await self._checkpoints.under(*place)).sets
        is_whole = bool(sets) and all(each.status.is_whole for each in sets)
        if len(self._known) >= KNOWN_COUNT:
            self._known.clear()
        self._known[place] = _Judged(fingerprint, is_whole, now_s)
        return is_whole
