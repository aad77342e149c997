"""Full jitter."""

import random

import pytest

from tiergate.policy.backoff import delay_s


@pytest.mark.parametrize(("attempt", "bound_s"), [(1, 0.5), (2, 1.0), (3, 2.0), (4, 3.0), (10_000, 3.0)])
def test_delay_is_spread_below_its_bound(attempt: int, bound_s: float) -> None:
    rng = random.Random(7)
    delays = [delay_s(attempt, rng, 0.5, 3.0) for _ in range(500)]
    assert min(delays) >= 0.0
    assert bound_s * 0.9 < max(delays) <= bound_s
    assert min(delays) < bound_s * 0.1


def test_delay_same_randomness_same_delay() -> None:
    assert delay_s(3, random.Random(1), 1.0, 9.0) == delay_s(3, random.Random(1), 1.0, 9.0)
