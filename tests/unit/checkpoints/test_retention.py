"""Which sets of a run stay in memory."""

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from tiergate.checkpoints.retention import HeldSet, Keep, keeps, within


def a_set(order: int, *, marked: bool = True, whole: bool = True, owed: bool = False, size_bytes: int = 10) -> HeldSet:
    return HeldSet("b", f"run/{order}/", order, size_bytes, is_marked=marked, is_whole=whole, is_owed=owed)


def named(sets: list[HeldSet], keep_count: int) -> dict[int, Keep]:
    return {each.order: keep for each, keep in keeps(sets, keep_count).items()}


def test_the_newest_whole_sets_are_kept_and_older_ones_go_first() -> None:
    found = named([a_set(order) for order in (3, 1, 4, 2)], 2)
    assert found == {4: Keep.NEWEST, 3: Keep.KEPT, 2: Keep.SURPLUS, 1: Keep.SURPLUS}


def test_a_set_in_the_making_takes_nobodys_place() -> None:
    found = named([a_set(1), a_set(2), a_set(3, marked=False, whole=True, owed=True)], 1)
    assert found == {3: Keep.KEPT, 2: Keep.NEWEST, 1: Keep.SURPLUS}


def test_a_set_that_was_given_up_goes() -> None:
    assert named([a_set(1), a_set(2, marked=False), a_set(3)], 2) == {3: Keep.NEWEST, 2: Keep.SURPLUS, 1: Keep.KEPT}
    assert named([a_set(1, marked=False), a_set(2, marked=False)], 1) == {1: Keep.KEPT, 2: Keep.KEPT}


def test_a_set_that_memory_has_in_part_takes_nobodys_place() -> None:
    assert named([a_set(1), a_set(2), a_set(3, whole=False)], 1) == {
        3: Keep.SURPLUS,
        2: Keep.NEWEST,
        1: Keep.SURPLUS,
    }


def test_what_s3_lacks_goes_after_all_others() -> None:
    found = named([a_set(1, owed=True), a_set(2, owed=True), a_set(3, owed=True)], 2)
    assert found == {3: Keep.OWED, 2: Keep.OWED, 1: Keep.OWED}


def test_pins_are_taken_in_their_order_as_far_as_they_fit() -> None:
    sizes = {"a": 40, "b": 50, "c": 30, "d": 20}
    assert within(sizes, ["b", "a", "d", "c"], 100) == ["b", "a"]
    assert within(sizes, ["b", "c", "a", "d"], 100) == ["b", "c", "d"]
    assert within(sizes, ["a"], 0) == []
    assert within({}, ["empty"], 0) == ["empty"]


@dataclass
class Memory:
    """A memory that evicts as the ranks say, at any time: what it may lose, it loses in their order."""

    keep_count: int
    sets: dict[int, HeldSet] = field(default_factory=dict)
    pinned: set[int] = field(default_factory=set)

    def levels(self) -> dict[int, Keep]:
        judged = keeps(self.sets.values(), self.keep_count)
        return {each.order: Keep.PINNED if each.order in self.pinned else keep for each, keep in judged.items()}

    def evict(self) -> None:
        """A set goes, as a whole; one that S3 lacks a part of, or that is pinned, stays in this model."""
        order = sorted((keep, order) for order, keep in self.levels().items() if keep < Keep.OWED)
        going = [order for _, order in order if not self.sets[order].is_owed]
        if going:
            del self.sets[going[0]]


STEPS = st.lists(st.tuples(st.sampled_from(["begin", "end", "persist", "evict", "pin", "unpin"]), st.integers(0, 9)))


@given(STEPS, st.integers(1, 3))
def test_however_a_run_goes_the_newest_whole_set_is_the_last_to_go(
    steps: list[tuple[str, int]], keep_count: int
) -> None:
    memory, number = Memory(keep_count), 0
    for step, at in steps:
        chosen = sorted(memory.sets)[at % len(memory.sets)] if memory.sets else None
        before = {order for order, each in memory.sets.items() if each.is_complete}
        if step == "begin":
            number += 1
            memory.sets[number] = a_set(number, marked=False, owed=True)
        elif step == "evict":
            memory.evict()
        elif chosen is not None:
            was = memory.sets[chosen]
            if step == "end":
                memory.sets[chosen] = a_set(chosen, marked=True, owed=was.is_owed)
            elif step == "persist":
                memory.sets[chosen] = a_set(chosen, marked=was.is_marked, owed=False)
            elif step == "pin":
                memory.pinned.add(chosen)
            else:
                memory.pinned.discard(chosen)
        left = {order for order, each in memory.sets.items() if each.is_complete}
        gone = before - left
        assert len(gone) <= 1
        assert not gone & memory.pinned
        could_go = {order for order in left - memory.pinned if not memory.sets[order].is_owed}
        if gone and could_go:
            assert max(could_go) > min(gone), "the newest went before an older one that could have gone"
        levels = memory.levels()
        newest = sorted(left)[-keep_count:]
        assert all(levels[order] > Keep.SURPLUS for order in newest)
