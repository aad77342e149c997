"""Bodies that are evicted with a set: in which order, all together, or never."""

from collections.abc import Callable

import pytest

from tiergate.clock import Clock
from tiergate.errors import MemoryFullError
from tiergate.memory.memory import Level, Memory, Rank
from tiergate.model import Body

BLOCK = 4096
NOW_S = 1e9
"""After all that the tests do."""
Content = Callable[[str, int], bytes]


def put(memory: Memory, content: Content, uids: str, blocks_count: int = 8) -> None:
    """Dirty bodies; eight of eight blocks fill the memory."""
    for uid in uids:
        receiving = memory.receive(uid, blocks_count * BLOCK, "v")
        receiving.write(content(uid, blocks_count * BLOCK))
        receiving.seal()
        memory.confirm("v", [uid])


def put_clean(memory: Memory, content: Content, uids: str, blocks_count: int = 8) -> None:
    put(memory, content, uids, blocks_count)
    memory.clean("v", list(uids))


def here(memory: Memory, uids: str) -> str:
    return "".join(uid for uid in uids if memory.is_known(uid))


def test_sets_go_in_the_order_of_their_ranks_and_others_in_between(memory: Memory, content: Content) -> None:
    put_clean(memory, content, "abcdefgh")
    memory.rank(
        {
            "a": Rank(Level.LATE, 5, 1),
            "b": Rank(Level.LAST, 1, 2),
            "c": Rank(Level.LATE, 5, 1),
            "d": Rank(Level.LATE, 4, 3),
            "e": Rank(Level.FIRST, 7, 4),
            "f": Rank(Level.FIRST, 7, 4),
            "g": Rank(Level.LAST, 2, 5),
        },
        NOW_S,
    )
    left = []
    for uid in "12345678":
        put(memory, content, uid)
        left.append(here(memory, "abcdefgh"))
    assert left == ["abcdgh", "abcdgh", "abcdg", "abcg", "bg", "bg", "g", ""]


def test_dirty_and_read_bodies_of_a_set_stay(memory: Memory, content: Content) -> None:
    put_clean(memory, content, "abcd")
    put(memory, content, "efgh")
    memory.rank({uid: Rank(Level.FIRST, 1, 1) for uid in "abcdefgh"}, NOW_S)
    with memory.pin("b") or pytest.fail("it is here"):
        memory.receive("1", 8 * BLOCK, "v").abort()
        assert here(memory, "abcdefgh") == "befgh"
    memory.receive("1", 32 * BLOCK, "v").abort()
    assert here(memory, "abcdefgh") == "efgh"


def test_pinned_rank_is_not_evicted_and_counts_as_no_room(memory: Memory, content: Content) -> None:
    put_clean(memory, content, "ab", 32)
    memory.rank({"a": Rank(Level.PINNED, 0, 1)}, NOW_S)
    assert memory.stats().evictable_bytes == 32 * BLOCK
    with pytest.raises(MemoryFullError):
        memory.receive("c", 33 * BLOCK, "v")
    assert here(memory, "ab") == "ab"
    memory.rank({}, NOW_S)
    memory.receive("c", 33 * BLOCK, "v").abort()
    assert here(memory, "ab") == ""


def test_large_set_is_evicted_in_steps_that_nothing_gets_between(
    memory: Memory, content: Content, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_clean(memory, content, "abcdefgh")
    late = {uid: Rank(Level.LATE, 1, 1) for uid in "abcd"}
    memory.rank(late | {uid: Rank(Level.LATE, 2, 2) for uid in "efgh"}, NOW_S)
    monkeypatch.setattr("tiergate.memory.inventory.SET_WORK", 1)
    memory.receive("1", BLOCK, "v").abort()
    assert here(memory, "abcd") == "bcd"
    memory.rank(late | {uid: Rank(Level.FIRST, 0, 2) for uid in "efgh"}, NOW_S)
    memory.receive("2", 16 * BLOCK, "v").abort()
    assert here(memory, "abcdefgh") == "cdefgh"
    while memory.evict_going():
        continue
    assert here(memory, "abcdefgh") == "efgh"


def test_rank_of_a_body_goes_with_it(memory: Memory, content: Content) -> None:
    put_clean(memory, content, "a")
    memory.rank({"a": Rank(Level.PINNED, 0, 1), "unknown": Rank(Level.PINNED, 0, 1)}, NOW_S)
    memory.drop("v", ["a"])
    put_clean(memory, content, "a")
    memory.receive("b", 64 * BLOCK, "v").abort()
    assert here(memory, "a") == ""


def test_found_says_how_much_is_here(memory: Memory, content: Content) -> None:
    put(memory, content, "a", 2)
    block = memory.receive_block(Body("b", 2 * BLOCK), 0, "v")
    assert block is not None
    block.write(content("b", 2 * BLOCK)[:BLOCK])
    block.seal()
    receiving = memory.receive("c", BLOCK, "v")
    found = memory.found(["a", "b", "c", "d"])
    receiving.abort()
    assert {uid: (each.size_bytes, each.is_whole) for uid, each in found.items()} == {
        "a": (2 * BLOCK, True),
        "b": (BLOCK, False),
    }


def test_what_comes_in_for_a_set_is_evicted_with_it_until_it_is_judged(
    memory: Memory, content: Content, clock: Clock
) -> None:
    def put_in_group(uid: str) -> None:
        receiving = memory.receive(uid, 8 * BLOCK, "v", group=7)
        receiving.write(content(uid, 8 * BLOCK))
        receiving.seal()
        memory.confirm("v", [uid])
        memory.clean("v", [uid])

    for uid in "ab":
        put_in_group(uid)
    put_clean(memory, content, "cdef")
    judged_s = clock.monotonic_s()
    put_in_group("g")
    memory.rank({"c": Rank(Level.LATE, 1, 1)}, judged_s)
    arriving = memory.receive("h", 8 * BLOCK, "v", group=7)
    memory.rank({"c": Rank(Level.LATE, 1, 1)}, NOW_S / 2)
    arriving.write(content("h", 8 * BLOCK))
    arriving.seal()
    memory.confirm("v", ["h"])
    memory.clean("v", ["h"])
    memory.receive("1", 48 * BLOCK, "v").abort()
    assert here(memory, "abcdefgh") == "ch"
    memory.receive("1", 56 * BLOCK, "v").abort()
    assert here(memory, "abcdefgh") == "h"


def test_judged_by_a_look_that_began_before_stays_in_the_making(memory: Memory, content: Content, clock: Clock) -> None:
    judged_s = clock.monotonic_s()
    for uid in "ab":
        receiving = memory.receive(uid, 8 * BLOCK, "v", group=7)
        receiving.write(content(uid, 8 * BLOCK))
        receiving.seal()
        memory.confirm("v", [uid])
        memory.clean("v", [uid])
    put_clean(memory, content, "cdefgh")
    memory.rank({}, judged_s)
    memory.receive("1", 48 * BLOCK, "v").abort()
    assert here(memory, "abcdefgh") == "ab"
    memory.receive("1", 49 * BLOCK, "v").abort()
    assert here(memory, "abcdefgh") == ""
