"""Which copies are made good, by whom, and how fast."""

from tiergate.model import About, Holder, Kind, Live, Node, ObjectName, Pending, Role
from tiergate.policy.bandwidth import TokenBucket
from tiergate.testing.directory_contract import make_version
from tiergate.writeback.repair import Kept, short, since

A, B, C = Holder("a", 1), Holder("b", 2), Holder("c", 3)
GONE = Holder("gone", 9)


def live(*holders: Holder) -> Live:
    return Live(10, {each.node: Node(each.node, each.epoch, About("")) for each in holders})


def kept(place: int, *holders: Holder, count: int = 2) -> Kept:
    uid = f"uid{place}"
    write = Pending(ObjectName("bucket", uid), uid, Kind.PUT, Role.SMALL, place, place, 0, 0.0, 1, owner=A)
    return Kept(write, make_version(uid), frozenset(holders), count)


def test_short_is_what_lost_a_copy_oldest_first() -> None:
    found = short([kept(3, A, GONE), kept(1, A), kept(2, A, B)], A, live(A, B, C))
    assert [each.write.place for each in found] == [1, 3]


def test_short_exactly_one_of_those_that_hold_it_mends_it() -> None:
    every = [kept(place, A, B, GONE, count=3) for place in range(20)]
    by_node = [{each.write.uid for each in short(every, me, live(A, B, C))} for me in (A, B, C)]
    assert sorted(uid for found in by_node for uid in found) == sorted(each.write.uid for each in every)
    assert all(by_node[:2])
    assert not by_node[2]


def test_short_not_where_no_other_node_lives() -> None:
    assert short([kept(1, A, GONE)], A, live(A)) == []
    assert short([kept(1, A, GONE, count=3)], A, live(A, B)) != []


def test_since_goes_on_while_it_is_short() -> None:
    first = since([kept(1, A), kept(2, A)], {}, 5.0)
    assert since([kept(2, A), kept(3, A)], first, 9.0) == {"uid2": 5.0, "uid3": 9.0}


def test_token_bucket_holds_the_average() -> None:
    bucket = TokenBucket(100.0)
    now_s, sent_bytes = 1000.0, 0
    for size_bytes in (50, 50, 300, 10, 500, 100):
        now_s += bucket.take(size_bytes, now_s)
        sent_bytes += size_bytes
    assert now_s - 1000.0 >= (sent_bytes - 100 - 100) / 100.0


def test_token_bucket_idle_time_allows_no_more_than_a_second_at_once() -> None:
    bucket = TokenBucket(100.0)
    bucket.take(1, 0.0)
    assert bucket.take(100, 1000.0) == 0.0
    assert bucket.take(100, 1000.0) == 0.0
    assert bucket.take(100, 1000.0) == 1.0


def test_token_bucket_without_bound_never_waits() -> None:
    bucket = TokenBucket(0.0)
    assert [bucket.take(1 << 40, 0.0) for _ in range(3)] == [0.0] * 3
