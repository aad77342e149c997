"""Whether a write may begin, given how old the oldest un-persisted write is (promise P9)."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LossBounds:
    """Ages of the oldest pending write, in seconds: beyond `slow_s` writers are slowed, beyond `refuse_s` refused.
    0 switches a bound off."""

    slow_s: float
    refuse_s: float
    longest_delay_s: float = 2.0


@dataclass(frozen=True, slots=True)
class Admission:
    """`delay_s` is how long the writer is held up first; `refused` that it must come back later."""

    delay_s: float = 0.0
    refused: bool = False


def admit(oldest_age_s: float, bounds: LossBounds) -> Admission:
    """Slow writers linearly between the two bounds, refuse beyond the second."""
    if bounds.refuse_s and oldest_age_s >= bounds.refuse_s:
        return Admission(refused=True)
    if not bounds.slow_s or oldest_age_s < bounds.slow_s:
        return Admission()
    if not bounds.refuse_s or bounds.refuse_s <= bounds.slow_s:
        return Admission(delay_s=bounds.longest_delay_s)
    share = (oldest_age_s - bounds.slow_s) / (bounds.refuse_s - bounds.slow_s)
    return Admission(delay_s=bounds.longest_delay_s * share)
