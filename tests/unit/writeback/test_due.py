"""What write-back begins, and when it looks again."""

from collections.abc import Collection, Mapping
from dataclasses import replace

from tiergate.model import Kind, ObjectName, Pending, Role
from tiergate.writeback.due import Limits, Plan, plan
from tiergate.writeback.fence import Blocked, PendingView, Reason


def write(key: str, place: int, role: Role = Role.SMALL, kind: Kind = Kind.PUT) -> Pending:
    return Pending(ObjectName("bucket", key), f"{key}#{place}", kind, role, place, place, 0, 0.0, 1)


A, B, C = write("a", 1), write("b", 2), write("c", 3)


def due(
    *pending: Pending,
    in_flight: Collection[Pending] = (),
    waiting: Collection[Pending] = (),
    count: int = 10,
    not_before: Mapping[ObjectName, float] | None = None,
    blocked: Mapping[ObjectName, Blocked] | None = None,
) -> Plan:
    return plan(
        PendingView(pending),
        {item.name for item in in_flight},
        {item.name for item in waiting},
        Limits(count),
        100.0,
        not_before or {},
        lambda item: (blocked or {}).get(item.name),
    )


def test_plan_nothing_pending_is_empty() -> None:
    assert due() == Plan((), None)


def test_plan_starts_by_place_up_to_the_bound() -> None:
    assert due(C, A, B, count=2) == Plan((A, B), None)


def test_plan_in_flight_takes_room_unless_it_waits() -> None:
    assert due(A, B, C, in_flight=[A], count=2).start == (B,)
    assert due(A, B, C, in_flight=[A], waiting=[A], count=2).start == (B, C)
    assert due(A, B, C, in_flight=[A, B], count=2).start == ()


def test_plan_key_in_flight_is_not_begun_again() -> None:
    newer = replace(A, uid="a#9", revision=9)
    assert due(newer, in_flight=[A]).start == ()


def test_plan_quarantined_is_left_alone() -> None:
    assert due(replace(A, quarantined="refused"), B).start == (B,)


def test_plan_backing_off_is_skipped_and_woken_for() -> None:
    assert due(A, B, C, not_before={A.name: 130.0, B.name: 120.0}) == Plan((C,), 120.0)
    assert due(A, not_before={A.name: 100.0}) == Plan((A,), None)


def test_plan_held_back_takes_no_room() -> None:
    blocked = {A.name: Blocked(Reason.SET_INCOMPLETE, B.name)}
    assert due(A, B, count=1, blocked=blocked) == Plan((B,), None)


def test_plan_disturbed_marker_is_woken_for() -> None:
    assert due(A, blocked={A.name: Blocked(Reason.SET_BUSY, until_s=160.0)}) == Plan((), 160.0)


def test_plan_held_back_large_put_begins_for_its_parts() -> None:
    large = write("l", 1, Role.LARGE)
    blocked = {large.name: Blocked(Reason.STRICT_ORDER, A.name)}
    assert due(large, blocked=blocked).start == (large,)
    assert due(replace(large, kind=Kind.DELETE), blocked=blocked).start == ()


def test_plan_begun_and_waiting_for_time_is_woken_for() -> None:
    blocked = {A.name: Blocked(Reason.SET_BUSY, until_s=160.0)}
    assert due(A, in_flight=[A], waiting=[A], blocked=blocked) == Plan((), 160.0)
    assert due(A, in_flight=[A], blocked=blocked) == Plan((), None)
