"""Slowing and refusing writers by what the origin lacks."""

import pytest

from tiergate.policy.admission import LONGEST_DELAY_S, Admission, LossBound, admit

BOUND = LossBound(slow=100.0, refuse=200.0)
OFF = LossBound(0.0, 0.0)


@pytest.mark.parametrize(("amount", "share"), [(0.0, 0.0), (99.9, 0.0), (100.0, 0.0), (150.0, 0.5), (199.0, 0.99)])
def test_admit_between_the_bounds_slows_linearly(amount: float, share: float) -> None:
    found = admit([(amount, BOUND)])
    assert found.delay_s == pytest.approx(share * LONGEST_DELAY_S)
    assert not found.refused


@pytest.mark.parametrize("amount", [200.0, 1e9])
def test_admit_at_the_second_bound_refuses(amount: float) -> None:
    assert admit([(amount, BOUND)]) == Admission(refused=True)


@pytest.mark.parametrize("amount", [0.0, 150.0, 1e18])
def test_admit_no_bounds_admits_any_amount(amount: float) -> None:
    assert admit([(amount, OFF)]) == admit([]) == Admission()


def test_admit_no_first_bound_only_refuses() -> None:
    bound = LossBound(0.0, 200.0)
    assert admit([(199.0, bound)]) == Admission()
    assert admit([(200.0, bound)]) == Admission(refused=True)


@pytest.mark.parametrize("refuse", [0.0, 50.0, 100.0])
def test_admit_no_room_between_the_bounds_delays_longest_or_refuses(refuse: float) -> None:
    bound = LossBound(100.0, refuse)
    expected = Admission(refused=True) if refuse else Admission(delay_s=LONGEST_DELAY_S)
    assert admit([(101.0, bound)]) == expected
    assert admit([(40.0, bound)]) == Admission()


def test_admit_goes_by_the_worst_measure() -> None:
    slowed = admit([(150.0, BOUND)])
    assert admit([(150.0, BOUND), (0.0, BOUND), (9.0, OFF)]) == slowed
    assert admit([(110.0, BOUND), (150.0, BOUND)]) == slowed
    assert admit([(0.0, BOUND), (200.0, BOUND)]).refused


def test_share_is_of_the_bound_that_refuses() -> None:
    assert BOUND.share(50.0) == 0.25
    assert BOUND.share(300.0) == 1.5
    assert LossBound(100.0, 0.0).share(300.0) == 0.0
