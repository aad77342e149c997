"""The newest complete set over all tiers."""

from itertools import permutations

import pytest

from tiergate.checkpoints.newest import UnseenTierError, newest, next_in_turn
from tiergate.checkpoints.sets import SetName, SetState, SetStatus, Tier, TierStatus


def status(
    step: int | None,
    committed_s: float = 1.0,
    prefix: str = "",
    *,
    is_whole: bool = True,
    state: SetState = SetState.RECEIVING,
    quarantined: str = "",
) -> SetStatus:
    name = SetName("bucket", prefix or f"run/{step}/", "dcp", "", step)
    tiers = {Tier.S3: TierStatus(state, 1, 1, 1)}
    return SetStatus(
        name,
        step,
        1,
        1,
        committed_s,
        is_parked=False,
        is_pinned=False,
        tiers=tiers,
        is_whole=is_whole,
        quarantined=quarantined,
    )


@pytest.mark.parametrize(
    ("sets", "step"),
    [
        ([status(0)], 0),
        ([status(2, 5.0), status(10, 1.0), status(9, 9.0)], 10),
        ([status(10, is_whole=False), status(9)], 9),
        ([status(None, 99.0), status(0, 1.0)], 0),
        ([status(0, is_whole=False), status(None, 99.0)], None),
    ],
)
def test_highest_whole_step_wins_in_whatever_order(sets: list[SetStatus], step: int | None) -> None:
    for order in permutations(sets):
        found = newest(order)
        assert found is not None
        assert found.step == step


def test_of_equal_steps_the_one_committed_last_wins_and_names_decide_the_rest() -> None:
    sets = [status(3, 1.0, "z/"), status(3, 2.0, "a/"), status(3, 2.0, "b/")]
    assert {found.name.prefix for order in permutations(sets) if (found := newest(order))} == {"b/"}


def test_none_is_said_only_where_every_tier_was_seen() -> None:
    assert newest([]) is newest([status(1, is_whole=False)]) is None
    for sets in ([], [status(5)]):
        with pytest.raises(UnseenTierError, match="what s3 holds"):
            newest(sets, {Tier.S3})


def test_newer_set_that_nobody_can_judge_now_is_an_error_and_an_older_one_is_not() -> None:
    unknown = status(7, is_whole=False, state=SetState.UNKNOWN)
    for sets in ([unknown], [status(6), unknown]):
        with pytest.raises(UnseenTierError, match="run/7/"):
            newest(sets)
    assert newest([status(8), unknown]) == status(8)


def test_who_looks_for_the_newest_comes_by_all_but_those_that_are_not_finished() -> None:
    torn = status(9, is_whole=False)
    damaged = status(8, is_whole=False, state=SetState.DAMAGED)
    unknown = status(7, is_whole=False, state=SetState.UNKNOWN)
    aside = status(6, is_whole=False, state=SetState.QUARANTINED, quarantined="a shard is gone")
    refused = status(5, is_whole=False, state=SetState.QUARANTINED)
    whole, first = status(4), status(0)
    left, order = [first, unknown, whole, damaged, refused, torn, aside], list[SetStatus]()
    while (turn := next_in_turn(left)) is not None:
        order.append(turn)
        left.remove(turn)
    assert order == [damaged, unknown, aside, whole, first]
    assert newest([aside, first]) == first
