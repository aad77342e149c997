"""The bandwidth that what has no hurry may take."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiergate.policy.bandwidth import TokenBucket


@given(st.lists(st.integers(0, 10_000), min_size=1, max_size=30), st.floats(1, 1e6))
def test_who_waits_as_told_takes_the_rate_and_a_second_more_at_most(sizes: list[int], rate: float) -> None:
    bucket, now_s = TokenBucket(rate), 100.0
    for begun, size in enumerate(sizes):
        now_s += bucket.take(size, now_s)
        assert now_s - 100.0 >= sum(sizes[:begun]) / rate - 1.0 - 1e-6


def test_a_pause_saves_up_one_second_and_no_more() -> None:
    bucket = TokenBucket(100)
    assert bucket.take(100, 1000.0) == 0.0
    assert bucket.take(50, 1000.0) == 0.0
    assert bucket.take(50, 1000.0) == pytest.approx(0.5)


def test_no_rate_is_no_bound() -> None:
    bucket = TokenBucket(0)
    assert bucket.take(1 << 40, 0.0) == 0.0
    assert bucket.take(1, 0.0) == 0.0
