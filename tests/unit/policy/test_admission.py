"""Slowing and refusing writers by the age of the oldest un-persisted write."""

import pytest

from tiergate.policy.admission import Admission, LossBounds, admit

BOUNDS = LossBounds(slow_s=100.0, refuse_s=200.0, longest_delay_s=2.0)


@pytest.mark.parametrize(("age_s", "delay_s"), [(0.0, 0.0), (99.9, 0.0), (100.0, 0.0), (150.0, 1.0), (199.0, 1.98)])
def test_admit_between_the_bounds_slows_linearly(age_s: float, delay_s: float) -> None:
    found = admit(age_s, BOUNDS)
    assert found.delay_s == pytest.approx(delay_s)
    assert not found.refused


@pytest.mark.parametrize("age_s", [200.0, 1e9])
def test_admit_at_the_second_bound_refuses(age_s: float) -> None:
    assert admit(age_s, BOUNDS) == Admission(refused=True)


@pytest.mark.parametrize("age_s", [0.0, 150.0, 1e9])
def test_admit_no_bounds_admits_at_any_age(age_s: float) -> None:
    assert admit(age_s, LossBounds(0.0, 0.0)) == Admission()


def test_admit_no_first_bound_only_refuses() -> None:
    bounds = LossBounds(0.0, 200.0)
    assert admit(199.0, bounds) == Admission()
    assert admit(200.0, bounds) == Admission(refused=True)


@pytest.mark.parametrize("refuse_s", [0.0, 50.0, 100.0])
def test_admit_no_room_between_the_bounds_delays_longest_or_refuses(refuse_s: float) -> None:
    bounds = LossBounds(100.0, refuse_s, 2.0)
    expected = Admission(refused=True) if refuse_s else Admission(delay_s=2.0)
    assert admit(101.0, bounds) == expected
    assert admit(40.0, bounds) == Admission()
