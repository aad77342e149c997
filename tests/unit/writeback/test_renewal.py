"""Which new objects of a set that stands in the origin are held."""

from dataclasses import replace

import pytest

from tiergate.directory.base import Seen
from tiergate.model import NO_BASE, UNKNOWN_BASE, Kind, ObjectName, Pending, Record, Role, State
from tiergate.testing.directory_contract import make_version
from tiergate.writeback.fence import Blocked, FenceMode, PendingView, Reason, blockers
from tiergate.writeback.order import StrictOrder
from tiergate.writeback.renewal import StandingSet, held_by, may_be_held, standing_set
from tiergate.writeback.scopes import Scope, ScopeIndex

NOW_S, UNTIL_S = 1000.0, 1010.0
MARKER = ObjectName("bucket", "s/.metadata")


def write(
    key: str,
    revision: int,
    role: Role = Role.SMALL,
    kind: Kind = Kind.PUT,
    base: str = "etag",
    *,
    withdrawn: bool = False,
    quarantined: str = "",
) -> Pending:
    return Pending(
        name=ObjectName("bucket", key),
        uid=f"{key}#{revision}",
        kind=kind,
        role=role,
        place=revision,
        revision=revision,
        start_revision=0,
        committed_s=0.0,
        size_bytes=1,
        base=base,
        withdrawn=withdrawn,
        quarantined=quarantined,
    )


def seen(state: State, pending: Pending | None = None, name: ObjectName = MARKER) -> Seen:
    version = None if state is State.TOMBSTONE else make_version("m")
    return Seen(Record(name, state, 1, 1, version, role=Role.MARKER), pending, 9)


def anew(revision: int, **changed: object) -> Seen:
    return seen(State.DIRTY, replace(write(MARKER.key, revision, Role.MARKER), **changed))  # type: ignore[arg-type]


CLEAN = seen(State.CLEAN)
OTHER = ObjectName("bucket", "s/x.index.json")


@pytest.mark.parametrize(
    ("markers", "renewed"),
    [
        ([CLEAN], 0),
        ([anew(7)], 7),
        ([anew(7, quarantined="refused")], 0),
        ([anew(7, begun=True)], 7),
        # Several count as one: that which was written anew first is not enough.
        ([CLEAN, seen(State.DIRTY, replace(write(OTHER.key, 8, Role.MARKER)), OTHER)], 0),
        ([anew(7), seen(State.DIRTY, replace(write(OTHER.key, 8, Role.MARKER)), OTHER)], 7),
        # Only what stands counts.
        ([anew(7), seen(State.DIRTY, write(OTHER.key, 8, Role.MARKER, base=NO_BASE), OTHER)], 7),
    ],
)
def test_set_stands_and_is_renewed(markers: list[Seen], renewed: int) -> None:
    found = standing_set(markers)
    assert found is not None
    assert found.renewed == renewed
    assert found.marker in {each.record.name for each in markers if each.record}


@pytest.mark.parametrize(
    "markers",
    [
        [],
        [Seen(None, None, 9)],
        [anew(7, base=NO_BASE)],
        [anew(7, base=UNKNOWN_BASE)],
        # It is about to go, or is gone.
        [anew(7, withdrawn=True)],
        [seen(State.TOMBSTONE, write(MARKER.key, 7, Role.MARKER, Kind.DELETE))],
        [seen(State.TOMBSTONE)],
    ],
)
def test_set_does_not_stand(markers: list[Seen]) -> None:
    assert standing_set(markers) is None


@pytest.mark.parametrize(
    ("subject", "may"),
    [
        (write("s/a", 5), True),
        (write("s/a", 5, Role.LARGE), True),
        (write("s/a", 5, base=NO_BASE), False),
        (write("s/a", 5, base=UNKNOWN_BASE), False),
        (write("s/a", 5, kind=Kind.DELETE), False),
        (write("s/.metadata", 5, Role.MARKER), False),
        (write("s/pointer", 5, Role.POINTER), False),
        (write("s/a", 5, quarantined="refused"), False),
    ],
)
def test_only_a_put_that_replaces_a_member_may_be_held(subject: Pending, may: bool) -> None:
    assert may_be_held(subject) is may
    held = held_by(subject, {Scope("bucket", "s/"): StandingSet(MARKER, 0)})
    assert (held is not None) is may


@pytest.mark.parametrize(
    ("sets", "is_held"),
    [
        ({}, False),
        ({"s/": 0}, True),
        ({"s/": 4}, True),
        ({"s/": 5}, True),
        ({"s/": 6}, False),
        ({"": 0}, True),
        ({"t/": 0}, False),
        # The innermost decides, also where it does not stand.
        ({"s/": 6, "": 0}, False),
        ({"s/": None, "": 0}, False),
        ({"s/": 0, "": 6}, True),
    ],
)
def test_the_innermost_set_holds_until_it_is_renewed(sets: dict[str, int | None], is_held: bool) -> None:
    known = {
        Scope("bucket", prefix): None if renewed is None else StandingSet(MARKER, renewed, UNTIL_S)
        for prefix, renewed in sets.items()
    }
    assert (held_by(write("s/a", 5), known) is not None) is is_held


def ask(subject: Pending, *others: Pending, mode: FenceMode = FenceMode.AUTO, now_s: float = NOW_S) -> Blocked | None:
    sets = {Scope("bucket", "s/"): StandingSet(MARKER, 6, UNTIL_S)}
    return blockers(subject, PendingView([subject, *others], sets), mode, now_s, 0.0)


@pytest.mark.parametrize("mode", [FenceMode.AUTO, FenceMode.STRICT])
def test_fence_holds_for_a_bounded_time(mode: FenceMode) -> None:
    assert ask(write("s/a", 7), mode=mode) == Blocked(Reason.SET_STANDS, MARKER, UNTIL_S)
    assert ask(write("s/a", 7), mode=mode, now_s=UNTIL_S) is None
    assert ask(write("s/a", 5), mode=mode) is None
    assert ask(write("s/new", 7, base=NO_BASE), mode=mode) is None


def test_fence_off_holds_nothing() -> None:
    assert ask(write("s/a", 7), mode=FenceMode.OFF) is None


def test_strict_what_is_held_comes_before_the_marker_that_frees_it() -> None:
    """The order is the same with the hold: what frees a write is never before it."""
    held, marker = write("s/a", 7), write(MARKER.key, 8, Role.MARKER)
    writes = [held, marker]
    order = StrictOrder(writes, ScopeIndex(writes))
    assert order.position(held) < order.position(marker)
    assert order.before(held) is None
    assert order.before(marker) == held.name
