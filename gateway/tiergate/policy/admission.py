"""Whether a write may begin, given what the origin lacks already (promise P9)."""

from collections.abc import Iterable
from dataclasses import dataclass

LONGEST_DELAY_S = 2.0
"""How long a writer is held up just before writes are refused."""


@dataclass(frozen=True, slots=True)
class LossBound:
    """Bounds of one measure of what would be lost, in its unit: from `slow` on writers are slowed, from `refuse` on
    refused. 0 switches a bound off."""

    slow: float
    refuse: float

    def share(self, amount: float) -> float:
        """How much of the bound an amount is: from 1 on writes are refused. 0 where none are."""
        return amount / self.refuse if self.refuse else 0.0


@dataclass(frozen=True, slots=True)
class Admission:
    """`delay_s` is how long the writer is held up first; `refused` that it must come back later."""

    delay_s: float = 0.0
    refused: bool = False


def admit(measured: Iterable[tuple[float, LossBound]]) -> Admission:
    """What the measure that is worst asks for: slow writers linearly between its two bounds, refuse beyond the
    second."""
    found = [_admit(amount, bound) for amount, bound in measured]
    return Admission(max((each.delay_s for each in found), default=0.0), any(each.refused for each in found))


def _admit(amount: float, bound: LossBound) -> Admission:
    if bound.refuse and amount >= bound.refuse:
        return Admission(refused=True)
    if not bound.slow or amount < bound.slow:
        return Admission()
    if not bound.refuse:
        return Admission(delay_s=LONGEST_DELAY_S)
    return Admission(delay_s=LONGEST_DELAY_S * (amount - bound.slow) / (bound.refuse - bound.slow))
