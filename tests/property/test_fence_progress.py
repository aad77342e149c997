"""The fence never stops everything: whatever is pending, something may go."""

from collections.abc import Sequence
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from tiergate.model import NO_BASE, UNKNOWN_BASE, Kind, ObjectName, Pending, Role
from tiergate.writeback.fence import FenceMode, PendingView, Reason, blockers

NAMES = [
    ObjectName("bucket", key)
    for key in (
        "run/.metadata",
        "run/pointer",
        "run/model.index.json",
        "run/latest",
        "run/1/.metadata",
        "run/1/model.index.json",
        "run/1/pointer",
        "run/1/shard",
        "run/1/large",
        "run/1/deep/.metadata",
        "run/1/deep/large",
        "run/2/.metadata",
        "run/2/shard",
        "top",
        ".metadata",
    )
]
QUIET_S = 60.0
LATE_S = 1e6


def role_of(name: ObjectName) -> Role:
    if name.key.endswith((".metadata", ".index.json")):
        return Role.MARKER
    if name.key.endswith("pointer"):
        return Role.POINTER
    return Role.LARGE if name.key.endswith("large") else Role.SMALL


@st.composite
def histories(draw: st.DrawFn, quarantine: bool = False) -> list[Pending]:
    """What may be pending after commits of some names in some order, each perhaps several times."""
    commits = draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=24))
    places: dict[ObjectName, int] = {}
    found: dict[ObjectName, Pending] = {}
    for revision, name in enumerate(commits, start=1):
        kind = draw(st.sampled_from([Kind.PUT, Kind.PUT, Kind.DELETE]))
        role = role_of(name)
        found[name] = Pending(
            name=name,
            uid=f"u{revision}",
            kind=kind,
            role=Role.SMALL if kind is Kind.DELETE and role is Role.LARGE else role,
            place=places.setdefault(name, revision),
            revision=revision,
            start_revision=draw(st.integers(0, revision - 1)),
            committed_s=float(revision),
            size_bytes=1,
            base=draw(st.sampled_from([NO_BASE, UNKNOWN_BASE, "etag"])),
            disturbed_s=draw(st.sampled_from([0.0, 10.0])),
            withdrawn=draw(st.booleans()),
            quarantined=draw(st.sampled_from(["", "", "refused"])) if quarantine else "",
        )
    return list(found.values())


modes = st.lists(
    st.sampled_from([FenceMode.AUTO, FenceMode.STRICT, FenceMode.OFF]),
    min_size=len(NAMES),
    max_size=len(NAMES),
)


def free(pending: Sequence[Pending], mode_of: Sequence[FenceMode], now_s: float = LATE_S) -> list[Pending]:
    view = PendingView(pending)
    return [
        write
        for write in pending
        if not write.quarantined and blockers(write, view, mode_of[NAMES.index(write.name)], now_s, QUIET_S) is None
    ]


@settings(max_examples=600, deadline=None)
@given(histories(), modes)
def test_progress_any_modes_all_of_it_goes_in_the_end(pending: list[Pending], mode_of: list[FenceMode]) -> None:
    while pending:
        going = free(pending, mode_of)
        assert going, pending
        pending = [write for write in pending if write is not going[0]]


@settings(max_examples=600, deadline=None)
@given(histories(quarantine=True), modes)
def test_progress_with_quarantine_only_markers_above_it_stay(pending: list[Pending], mode_of: list[FenceMode]) -> None:
    quarantined = [write for write in pending if write.quarantined]
    while going := free(pending, mode_of):
        pending = [write for write in pending if write is not going[-1]]
    for write in pending:
        if write.quarantined:
            continue
        assert write.role in (Role.MARKER, Role.POINTER)
        assert write.kind is Kind.PUT
        scope = write.name.key[: write.name.key.rfind("/") + 1]
        assert any(other.name.key.startswith(scope) for other in quarantined)


@settings(max_examples=300, deadline=None)
@given(histories(), st.sampled_from(list(FenceMode)))
def test_blocked_names_something_pending_or_a_time(pending: list[Pending], mode: FenceMode) -> None:
    view = PendingView(pending)
    names = {write.name for write in pending}
    for write in pending:
        blocked = blockers(write, view, mode, 30.0, QUIET_S)
        if blocked is None:
            continue
        if blocked.reason is Reason.SET_BUSY:
            assert blocked.waits_for is None
            assert blocked.until_s == 70.0
            still = blockers(write, view, mode, blocked.until_s, QUIET_S)
            assert still is None or still.reason is Reason.STRICT_ORDER
        else:
            assert blocked.waits_for in names - {write.name}


@settings(max_examples=300, deadline=None)
@given(histories(), st.sampled_from(NAMES))
def test_subject_outside_the_view_waits_for_all_of_its_scope(pending: list[Pending], name: ObjectName) -> None:
    """A write-through, which is not committed yet."""
    others = [write for write in pending if write.name != name]
    far = 1 << 62
    subject = Pending(name, "", Kind.PUT, Role.MARKER, far, far, far, 0.0, 0)
    scope = name.key[: name.key.rfind("/") + 1]
    blocked = blockers(subject, PendingView(others), FenceMode.AUTO, LATE_S, QUIET_S)
    assert (blocked is None) == (not any(write.name.key.startswith(scope) for write in others))
    strict = blockers(subject, PendingView(others), FenceMode.STRICT, LATE_S, QUIET_S)
    assert (strict is None) == (not others)
    assert blockers(replace(subject, role=Role.LARGE), PendingView(others), FenceMode.AUTO, 0.0, 0.0) is None
