"""The fence's rules one by one."""

from dataclasses import replace
from itertools import count

import pytest

from tiergate.model import NO_BASE, UNKNOWN_BASE, Kind, ObjectName, Pending, Role
from tiergate.writeback.fence import Blocked, FenceMode, PendingView, Reason, blockers

NOW_S = 1000.0
QUIET_S = 60.0
AUTO, STRICT, OFF = FenceMode.AUTO, FenceMode.STRICT, FenceMode.OFF


def write(
    key: str,
    revision: int,
    role: Role = Role.SMALL,
    kind: Kind = Kind.PUT,
    *,
    place: int | None = None,
    start: int = 0,
    base: str = NO_BASE,
    disturbed_s: float = 0.0,
    quarantined: str = "",
    bucket: str = "bucket",
) -> Pending:
    return Pending(
        name=ObjectName(bucket, key),
        uid=f"{key}#{revision}",
        kind=kind,
        role=role,
        place=revision if place is None else place,
        revision=revision,
        start_revision=start,
        committed_s=0.0,
        size_bytes=1,
        base=base,
        disturbed_s=disturbed_s,
        quarantined=quarantined,
    )


def marker(key: str, revision: int, *, place: int | None = None, disturbed_s: float = 0.0) -> Pending:
    return write(key, revision, Role.MARKER, place=place, disturbed_s=disturbed_s)


def ask(subject: Pending, *others: Pending, mode: FenceMode = AUTO, now_s: float = NOW_S) -> Blocked | None:
    return blockers(subject, PendingView([subject, *others]), mode, now_s, QUIET_S)


def waits(subject: Pending, other: Pending, mode: FenceMode = AUTO) -> Reason | None:
    """Why `subject` waits for `other`, None if it does not."""
    blocked = ask(subject, other, mode=mode)
    assert blocked is None or blocked.waits_for == other.name
    return blocked.reason if blocked else None


# -- markers
@pytest.mark.parametrize("key", ["s/1/shard", "s/1/deep/er/shard", "s/1/shard.metadata", "s/1/"])
@pytest.mark.parametrize("kind", list(Kind))
def test_marker_earlier_in_scope_waits(key: str, kind: Kind) -> None:
    assert waits(marker("s/1/.metadata", 5), write(key, 4, kind=kind)) is Reason.SET_INCOMPLETE


@pytest.mark.parametrize("key", ["s/2/shard", "s/1", "s/10/shard", "shard", "s/.metadata"])
def test_marker_out_of_scope_goes(key: str) -> None:
    assert ask(marker("s/1/.metadata", 5), write(key, 4)) is None


def test_marker_other_bucket_goes() -> None:
    assert ask(marker("s/1/.metadata", 5), write("s/1/shard", 4, bucket="other")) is None


def test_marker_at_the_root_waits_for_the_bucket() -> None:
    assert waits(marker(".metadata", 5), write("a/b/c", 4)) is Reason.SET_INCOMPLETE


def test_marker_brand_new_later_key_goes() -> None:
    assert ask(marker("run/.metadata", 5), write("run/2/shard", 6)) is None


@pytest.mark.parametrize(
    "change",
    [
        write("s/1/shard", 6, base="etag"),
        write("s/1/shard", 6, base=UNKNOWN_BASE),
        write("s/1/shard", 6, kind=Kind.DELETE),
    ],
)
def test_marker_member_changed_later_waits(change: Pending) -> None:
    assert waits(marker("s/1/.metadata", 5), change) is Reason.SET_CHANGED


def test_marker_member_superseded_later_waits() -> None:
    """The shard's version that the marker named is gone; its successor took its place."""
    assert waits(marker("s/1/.metadata", 5), write("s/1/shard", 6, place=4)) is Reason.SET_INCOMPLETE


def test_marker_that_replaced_a_pending_one_waits_for_what_it_names() -> None:
    """It has the place of the first one, but names what was committed in between."""
    assert waits(marker("run/.metadata", 9, place=2), write("run/2/shard", 5)) is Reason.SET_INCOMPLETE


def test_marker_inner_marker_goes_first() -> None:
    outer, inner = marker("run/.metadata", 5), marker("run/1/.metadata", 4)
    assert waits(outer, inner) is Reason.SET_INCOMPLETE
    assert waits(inner, outer) is None


def test_marker_inner_marker_changed_later_goes_first() -> None:
    outer, inner = marker("run/.metadata", 5), replace(marker("run/1/.metadata", 6), base="etag")
    assert waits(outer, inner) is Reason.SET_CHANGED
    assert waits(inner, outer) is None


def test_marker_inner_marker_put_anew_and_withdrawn_goes_first() -> None:
    """The outer one names the inner one's older version, which is not in the origin any more."""
    outer, inner = marker("run/.metadata", 5), replace(marker("run/1/.metadata", 6), withdrawn=True)
    assert waits(outer, inner) is Reason.SET_CHANGED


def test_markers_of_one_scope_go_by_place() -> None:
    first, second = marker("s/a.index.json", 9, place=1), marker("s/.metadata", 5, place=2)
    assert waits(second, first) is Reason.SET_INCOMPLETE
    assert waits(first, second) is None


def test_marker_disturbed_waits_for_quiet() -> None:
    subject = marker("s/.metadata", 5, disturbed_s=NOW_S - 1)
    assert ask(subject) == Blocked(Reason.SET_BUSY, None, NOW_S + QUIET_S - 1)
    assert ask(subject, now_s=NOW_S + QUIET_S - 1) is None
    assert ask(subject, write("s/shard", 1)) == Blocked(Reason.SET_INCOMPLETE, ObjectName("bucket", "s/shard"))


def test_marker_quarantined_member_waits() -> None:
    assert waits(marker("s/.metadata", 5), write("s/shard", 4, quarantined="refused")) is Reason.SET_INCOMPLETE


def test_marker_deletion_waits_for_nothing() -> None:
    subject = write("s/.metadata", 5, Role.MARKER, Kind.DELETE)
    assert ask(subject, write("s/shard", 4), write("s/shard2", 3, kind=Kind.DELETE)) is None


# -- pointers
def test_pointer_earlier_in_scope_waits() -> None:
    assert waits(write("run/pointer", 5, Role.POINTER), write("run/1/shard", 4)) is Reason.SET_INCOMPLETE


def test_pointer_later_change_goes() -> None:
    subject = write("run/pointer", 5, Role.POINTER, disturbed_s=NOW_S)
    assert ask(subject, write("run/1/shard", 6, base="etag")) is None


# -- small and large
def test_small_large_acknowledged_before_its_request_waits() -> None:
    large = write("s/large", 4, Role.LARGE)
    assert waits(write("s/latest", 9, start=4), large) is Reason.LARGE_FIRST
    assert waits(write("s/latest", 9, start=3), large) is None


@pytest.mark.parametrize(
    "other",
    [
        write("s/small", 4),
        write("other/large", 4, Role.LARGE),
        write("s/large", 4, Role.LARGE, Kind.DELETE),
        write("s/large", 4, Role.LARGE, quarantined="refused"),
    ],
)
def test_small_anything_else_goes(other: Pending) -> None:
    assert ask(write("s/latest", 9, start=8), other) is None


def test_large_waits_for_nothing() -> None:
    assert ask(write("s/large", 9, Role.LARGE, start=8), write("s/l2", 1, Role.LARGE), marker("s/.metadata", 2)) is None


# -- deletions
@pytest.mark.parametrize("mode", list(FenceMode))
@pytest.mark.parametrize("revision", [1, 9])
def test_deletion_marker_of_its_set_goes_first(mode: FenceMode, revision: int) -> None:
    shard = write("s/1/deep/shard", 5, kind=Kind.DELETE)
    gone = write("s/1/.metadata", revision, Role.MARKER, Kind.DELETE)
    assert waits(shard, gone, mode) is Reason.MARKER_FIRST
    assert ask(gone, shard, mode=mode) is None


@pytest.mark.parametrize("mode", [AUTO, OFF])
def test_deletion_of_another_set_goes(mode: FenceMode) -> None:
    others = [
        write("s/2/.metadata", 1, Role.MARKER, Kind.DELETE),
        marker("s/1/.metadata", 2),
        write("s/1/large", 3, Role.LARGE),
    ]
    assert ask(write("s/1/shard", 5, kind=Kind.DELETE), *others, mode=mode) is None


# -- modes
def test_off_puts_wait_for_nothing() -> None:
    others = [write("s/shard", 1), write("s/large", 2, Role.LARGE)]
    for role in Role:
        assert ask(write("s/x", 5, role, start=4, disturbed_s=NOW_S), *others, mode=OFF) is None


@pytest.mark.parametrize(
    ("role", "kind"),
    [(role, kind) for role in Role for kind in Kind if (role, kind) != (Role.MARKER, Kind.DELETE)],
)
def test_strict_anything_earlier_in_the_bucket_goes_first(role: Role, kind: Kind) -> None:
    earlier = write("elsewhere", 4)
    assert ask(write("s/x", 5, role, kind), earlier, mode=STRICT) is not None
    assert ask(earlier, write("s/x", 5, role, kind), mode=STRICT) is None
    assert ask(write("s/x", 5, role, kind), replace(earlier, quarantined="refused"), mode=STRICT) is None
    assert ask(write("s/x", 5, role, kind), write("elsewhere", 4, bucket="other"), mode=STRICT) is None


def test_strict_marker_deletion_goes_before_its_set_and_after_the_rest() -> None:
    shard, gone = write("s/shard", 3, kind=Kind.DELETE), write("s/.metadata", 5, Role.MARKER, Kind.DELETE)
    assert ask(gone, shard, write("a", 4), mode=STRICT) is None
    assert waits(gone, write("a", 2), STRICT) is Reason.STRICT_ORDER


def test_strict_marker_put_anew_comes_after_what_it_names() -> None:
    shard, anew = write("run/2/shard", 5), marker("run/.metadata", 9, place=2)
    assert waits(anew, shard, STRICT) is Reason.SET_INCOMPLETE
    assert ask(shard, anew, mode=STRICT) is None


def test_strict_small_put_anew_comes_after_what_was_acknowledged_before_it() -> None:
    """It has the place of the first one, but waits for the large one; so that must not wait for it."""
    large, anew = write("s/large", 5, Role.LARGE), write("s/latest", 20, place=3, start=10)
    assert waits(anew, large, STRICT) is Reason.LARGE_FIRST
    assert ask(large, anew, mode=STRICT) is None


def test_strict_marker_withdrawn_comes_after_the_whole_change() -> None:
    withdrawn = marker("s/.metadata", 5, disturbed_s=NOW_S)
    changes = [write("s/a", 8, base="etag"), write("s/b", 9, base="etag")]
    assert ask(withdrawn, *changes, mode=STRICT, now_s=NOW_S + QUIET_S) is not None
    assert ask(changes[0], withdrawn, changes[1], mode=STRICT) is None


def test_strict_marker_stuck_in_quarantine_holds_up_nobody() -> None:
    refused = write("s/1/shard", 1, quarantined="refused")
    inner, outer, other = marker("s/1/.metadata", 2), marker("s/.metadata", 3), write("other", 4)
    assert ask(other, refused, inner, outer, mode=STRICT) is None
    assert waits(inner, refused, STRICT) is Reason.SET_INCOMPLETE


def test_blocked_reads_as_a_sentence() -> None:
    blocked = ask(marker("s/.metadata", 5), write("s/shard", 4))
    assert str(blocked) == "objects of its set are not in the origin yet: s3://bucket/s/shard"


def test_view_iterates_by_place() -> None:
    numbers = count(1)
    writes = [write(key, next(numbers)) for key in "cab"]
    assert list(PendingView(reversed(writes))) == writes


# -- a tiered checkpoint has a folder for each rank
@pytest.mark.parametrize(
    ("marked", "shard", "elsewhere"),
    [
        ("ns/rank_0/step_7/metadata.metadata", "ns/rank_3/step_7/checkpoint.pt", "ns/rank_3/step_6/checkpoint.pt"),
        ("ns/step_7/rank_0/metadata.metadata", "ns/step_7/rank_3/checkpoint.pt", "ns/step_6/rank_3/checkpoint.pt"),
    ],
)
@pytest.mark.parametrize("mode", [AUTO, STRICT])
def test_list_of_a_tiered_checkpoint_waits_for_all_ranks(
    marked: str, shard: str, elsewhere: str, mode: FenceMode
) -> None:
    assert waits(marker(marked, 9), write(shard, 5), mode) is Reason.SET_INCOMPLETE
    assert waits(marker(marked, 9), write(shard, 10, base="etag"), mode) is Reason.SET_CHANGED
    assert ask(marker(marked, 9), write(shard, 10), mode=mode) is None
    assert ask(marker(marked, 9), write(elsewhere, 5)) is None
    deletion = write(marked, 12, Role.MARKER, Kind.DELETE)
    assert waits(write(shard, 11, kind=Kind.DELETE), deletion, mode) is Reason.MARKER_FIRST
    assert ask(deletion, write(shard, 11, kind=Kind.DELETE), mode=mode) is None
