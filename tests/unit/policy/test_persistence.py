"""Which sets of a run stay in memory."""

import pytest

from tiergate.config import Persist
from tiergate.model import Plan, Run, Stage
from tiergate.policy.persistence import Beginning, Wish, begin, stays

ALL, NONE = Persist(), Persist(0)


def beginning(persist: Persist, *, may_park: bool = True, wish: Wish | None = None, now_s: float = 0.0) -> Beginning:
    return Beginning("b", "run/1/", "run/", persist, now_s, may_park, wish)


def history(persist: Persist, times_s: list[float]) -> list[bool]:
    """Which of the sets that begin at these times go to the origin."""
    run, sent = Run("b", "run/"), []
    for number, now_s in enumerate(times_s):
        plan, run = begin(beginning(persist, now_s=now_s), None, run, number + 1)
        sent.append(plan.stage is Stage.SENT)
    return sent


@pytest.mark.parametrize(
    ("persist", "sent"),
    [
        (ALL, [True] * 6),
        (NONE, [False] * 6),
        (Persist(every_count=2), [True, False, True, False, True, False]),
        (Persist(every_count=4), [True, False, False, False, True, False]),
        (Persist(every_count=0, every_s=25.0), [True, False, False, True, False, False]),
    ],
)
def test_sets_of_a_run(persist: Persist, sent: list[bool]) -> None:
    assert history(persist, [0.0, 10.0, 20.0, 30.0, 40.0, 50.0]) == sent


def test_time_counts_from_the_last_that_was_sent() -> None:
    assert history(Persist(0, 60.0), [0.0, 59.0, 61.0, 120.0, 121.0]) == [True, False, True, False, True]


def test_wish_of_the_client_wins_and_counts() -> None:
    run = Run("b", "run/", 1, 1, 5.0)
    assert stays(Persist(2), run, 9.0, Wish.MEMORY)
    assert not stays(NONE, run, 9.0, Wish.S3)
    plan, after = begin(beginning(Persist(5), wish=Wish.S3, now_s=9.0), None, run, 7)
    assert (plan.stage, after) == (Stage.SENT, Run("b", "run/", 2, 2, 9.0))


def test_what_the_origin_knows_is_sent_whatever_is_wished() -> None:
    plan, _ = begin(beginning(NONE, may_park=False, wish=Wish.MEMORY), None, Run("b", "run/"), 1)
    assert plan.stage is Stage.SENT


@pytest.mark.parametrize("stage", [Stage.KEPT, Stage.PROMOTING, Stage.PARKING, Stage.DROPPED])
def test_set_in_the_place_of_a_kept_one_that_is_to_be_sent_takes_it_along(stage: Stage) -> None:
    before = Plan("b", "run/1/", "run/", stage, 1, 3, 0.0, dropped=9 if stage is Stage.DROPPED else 0)
    plan, _ = begin(beginning(ALL), before, Run("b", "run/", 1), 12)
    assert (plan.stage, plan.dropped) == (Stage.PROMOTING, 0)
    plan, _ = begin(beginning(NONE), before, Run("b", "run/", 1), 12)
    assert plan.stage is Stage.KEPT
