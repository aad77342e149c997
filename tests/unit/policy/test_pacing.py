"""The pace of what has no hurry."""

from hypothesis import given
from hypothesis import strategies as st

from tiergate.policy.pacing import Pace


@given(st.lists(st.integers(0, 10_000), min_size=1, max_size=30), st.floats(1, 1e6))
def test_who_waits_as_told_never_takes_more_than_the_rate(sizes: list[int], rate: float) -> None:
    pace, now_s = Pace(rate, 100.0), 100.0
    for taken, size in enumerate(sizes, 1):
        now_s += pace.take(size, now_s)
        assert now_s - 100.0 >= sum(sizes[:taken]) / rate - 1e-6


def test_idle_time_is_not_saved_up() -> None:
    pace = Pace(100, 0.0)
    assert pace.take(50, 1000.0) == 0.5
    assert pace.take(50, 1000.0) == 1.0


def test_no_rate_is_no_bound() -> None:
    assert Pace(0, 0.0).take(1 << 40, 0.0) == 0.0
