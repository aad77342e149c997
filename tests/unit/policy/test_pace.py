"""How fast write-back has gone lately."""

import pytest

from tiergate.model import Holder, Kind, ObjectName, Pending, Role
from tiergate.policy.pace import Pace, arrival_s


def test_nothing_is_known_before_something_was_sent() -> None:
    pace = Pace()
    pace.look(0.0, 500, is_busy=True)
    assert pace.bytes_per_s is None
    pace.look(1.0, 500, is_busy=True)
    assert pace.bytes_per_s is None


def test_only_busy_time_counts() -> None:
    pace = Pace()
    pace.look(0.0, 0, is_busy=False)
    pace.look(10.0, 1000, is_busy=True)
    assert pace.bytes_per_s == 100.0
    pace.look(500.0, 1000, is_busy=False)
    assert pace.bytes_per_s == 100.0
    # A large object comes late, and all at once.
    pace.look(520.0, 1000, is_busy=True)
    pace.look(530.0, 5000, is_busy=True)
    assert pace.bytes_per_s == 125.0
    # What was begun and over between two looks took no longer than that.
    pace.look(540.0, 10_000, is_busy=False)
    assert pace.bytes_per_s == 200.0


def test_what_was_long_ago_is_forgotten() -> None:
    pace = Pace(window_s=20.0)
    for index in range(5):
        pace.look(index * 10.0, index * 100, is_busy=True)
    for index in range(5, 9):
        pace.look(index * 10.0, 400 + (index - 4) * 1000, is_busy=True)
    assert pace.bytes_per_s == 100.0
    for index in range(9, 12):
        pace.look(index * 10.0, 4400, is_busy=True)
    assert pace.bytes_per_s is None


A, B = Holder("a", 1), Holder("b", 2)


def write(place: int, size_bytes: int, owner: Holder | None = None, quarantined: str = "") -> Pending:
    name = ObjectName("bucket", str(place))
    uid = f"{place}-{owner}"
    return Pending(
        name, uid, Kind.PUT, Role.LARGE, place, place, 0, 1.0, size_bytes, quarantined=quarantined, owner=owner
    )


@pytest.mark.parametrize("owner", [None, A])
def test_what_is_ahead_in_the_order_goes_first(owner: Holder | None) -> None:
    own = [write(place, 100, owner) for place in range(1, 6)]
    assert arrival_s(own[1:3], own, 50.0) == 6.0
    own[0] = write(1, 100, owner, quarantined="403")
    assert arrival_s(own[1:3], own, 50.0) == 4.0


def test_other_nodes_send_meanwhile() -> None:
    own = [write(1, 100, A)]
    others = [write(2, 300, B), write(3, 50, B)]
    assert arrival_s([*own, *others], own, 10.0) == 35.0
    assert arrival_s(others[1:], own, 10.0) == 5.0


def test_nothing_owed_is_there_and_what_nobody_can_tell_is_not_told() -> None:
    assert arrival_s([], [], None) == 0.0
    own = [write(1, 100)]
    assert arrival_s(own, own, None) is arrival_s([write(1, 1, quarantined="403")], own, 9.0) is None
