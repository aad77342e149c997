"""Where a set stands in each tier."""

from collections.abc import Mapping
from dataclasses import replace

import pytest

from tiergate.checkpoints.completeness import MISSING_COUNT, Doubts, status_of
from tiergate.checkpoints.documents import document_of, status_from
from tiergate.checkpoints.sets import Manifest, Member, SetName, SetState, SetStatus, Thing, Tier, TierStatus

MARKER, ONE, TWO = "run/step_7/.metadata", "run/step_7/__0_0.distcp", "run/step_7/__1_0.distcp"
NAME = SetName("bucket", "run/step_7/", "dcp", MARKER, 7)
LISTED = Manifest(NAME, (Member(ONE, least_bytes=10), Member(TWO, least_bytes=20)), is_listed=True)
ABSENT, RECEIVING, UPLOADING, COMPLETE, PARTIAL, DAMAGED, QUARANTINED, UNKNOWN = (
    SetState.ABSENT,
    SetState.RECEIVING,
    SetState.UPLOADING,
    SetState.COMPLETE,
    SetState.PARTIAL,
    SetState.DAMAGED,
    SetState.QUARANTINED,
    SetState.UNKNOWN,
)


def things(*, copies_count: int = 1, in_s3: bool = False) -> dict[str, Thing]:
    """The set with all of its objects."""
    sizes = {ONE: 10, TWO: 25, MARKER: 5}
    return {
        key: Thing(key, size_bytes, 100.0 + index, copies_count, in_s3)
        for index, (key, size_bytes) in enumerate(sizes.items())
    }


def changed(found: Mapping[str, Thing], key: str, **changes: object) -> dict[str, Thing]:
    return {**found, key: replace(found[key], **changes)}  # type: ignore[arg-type]


def without(found: Mapping[str, Thing], *keys: str) -> dict[str, Thing]:
    return {key: thing for key, thing in found.items() if key not in keys}


def states(status: SetStatus) -> tuple[SetState, SetState, bool]:
    return status.tiers[Tier.MEMORY].state, status.tiers[Tier.S3].state, status.is_whole


def test_whole_set_in_memory_is_uploading() -> None:
    status = status_of(LISTED, things(copies_count=2))
    assert status == SetStatus(
        NAME,
        step=7,
        objects_count=3,
        size_bytes=40,
        committed_s=102.0,
        is_parked=False,
        is_pinned=False,
        tiers={
            Tier.MEMORY: TierStatus(COMPLETE, 3, 40, 2),
            Tier.S3: TierStatus(UPLOADING, 0, 0, 0, (MARKER, ONE, TWO)),
        },
        is_whole=True,
    )


def test_uploading_counts_what_is_there_and_names_what_is_not() -> None:
    status = status_of(LISTED, changed(things(), TWO, in_s3=True))
    assert status.tiers[Tier.S3] == TierStatus(UPLOADING, 1, 25, 1, (MARKER, ONE))


def test_complete_in_both_tiers_with_the_copies_of_the_least_held() -> None:
    status = status_of(LISTED, changed(things(copies_count=3, in_s3=True), TWO, copies_count=2), is_pinned=True)
    assert status.tiers == {Tier.MEMORY: TierStatus(COMPLETE, 3, 40, 2), Tier.S3: TierStatus(COMPLETE, 3, 40, 1)}
    assert (status.is_whole, status.is_pinned) == (True, True)


@pytest.mark.parametrize("gone", [(ONE,), (ONE, TWO), (MARKER,)])
def test_what_was_evicted_in_part_is_partial(gone: tuple[str, ...]) -> None:
    found = things(in_s3=True)
    for key in gone:
        found = changed(found, key, copies_count=0)
    assert states(status_of(LISTED, found)) == (PARTIAL, COMPLETE, True)


def test_only_s3_has_it() -> None:
    assert states(status_of(LISTED, things(copies_count=0, in_s3=True))) == (ABSENT, COMPLETE, True)


def test_over_both_tiers_it_is_whole_though_neither_has_all() -> None:
    found = changed(things(), ONE, copies_count=0, in_s3=True)
    assert states(status_of(LISTED, found)) == (PARTIAL, UPLOADING, True)


def test_without_its_marker_it_is_receiving_wherever_its_objects_are() -> None:
    found = without(things(), MARKER)
    assert states(status_of(LISTED, found)) == (RECEIVING, ABSENT, False)
    unmarked = replace(LISTED, name=replace(NAME, marker=""))
    status = status_of(unmarked, changed(found, ONE, in_s3=True))
    assert states(status) == (RECEIVING, RECEIVING, False)
    assert (status.objects_count, status.committed_s) == (2, 101.0)


def test_marker_of_a_set_that_misses_a_member_says_damage_where_anything_is() -> None:
    for found in (
        without(things(), TWO),
        changed(things(), TWO, size_bytes=19),
        changed(things(), TWO, copies_count=0),
    ):
        status = status_of(LISTED, found)
        assert states(status) == (DAMAGED, ABSENT, False)
        assert status.tiers[Tier.MEMORY].missing == (TWO,)
    assert states(status_of(LISTED, without(things(in_s3=True), TWO))) == (DAMAGED, DAMAGED, False)
    assert states(status_of(LISTED, without(things(copies_count=0, in_s3=True), TWO))) == (ABSENT, DAMAGED, False)


def test_member_on_its_way_after_the_marker_is_no_damage_yet() -> None:
    found = changed(things(), TWO, is_receiving=True, copies_count=0)
    assert states(status_of(LISTED, found)) == (RECEIVING, ABSENT, False)


def test_nothing_but_bodies_on_their_way_is_receiving() -> None:
    found = {ONE: Thing(ONE, 3, 1.0, is_receiving=True)}
    plain = Manifest(replace(NAME, marker=""), (Member(ONE),), is_listed=False)
    assert states(status_of(plain, found)) == (RECEIVING, ABSENT, False)


def test_unlike_its_marker_says_it_is_being_rewritten() -> None:
    found = changed(things(in_s3=True), MARKER, is_disturbed=True)
    assert states(status_of(LISTED, changed(found, ONE, in_s3=False))) == (RECEIVING, RECEIVING, False)
    assert states(status_of(LISTED, without(found, ONE))) == (RECEIVING, RECEIVING, False)


def test_unreadable_marker_is_a_damage() -> None:
    status = status_of(LISTED, things(in_s3=True), doubts=Doubts(damage="no pickle of torch's metadata"))
    assert states(status) == (DAMAGED, DAMAGED, False)
    assert status.fault == "no pickle of torch's metadata"


def test_what_cannot_be_told_now_is_neither_whole_nor_damaged() -> None:
    status = status_of(LISTED, things(copies_count=0, in_s3=True), doubts=Doubts(unread="the origin does not answer"))
    assert states(status) == (ABSENT, UNKNOWN, False)
    assert (status.is_unknown, status.fault) == (True, "the origin does not answer")
    # Of an old set the directory may remember the marker alone.
    unseen = Doubts(is_s3_unseen=True)
    found = without(things(in_s3=True), ONE)
    assert states(status_of(LISTED, found, doubts=unseen)) == (UNKNOWN, UNKNOWN, False)
    assert states(status_of(LISTED, changed(found, MARKER, in_s3=False), doubts=unseen)) == (DAMAGED, DAMAGED, False)
    assert states(status_of(LISTED, things(in_s3=True), doubts=unseen)) == (COMPLETE, COMPLETE, True)


def test_quarantined_set_is_whole_nowhere_whatever_is_there() -> None:
    doubts = Doubts(quarantined="a head is broken")
    status = status_of(LISTED, things(in_s3=True), doubts=doubts)
    assert (states(status), status.quarantined, status.fault) == (
        (QUARANTINED, QUARANTINED, False),
        "a head is broken",
        "",
    )
    assert status_from(document_of(status)) == status
    assert states(status_of(LISTED, things(), doubts=doubts)) == (QUARANTINED, ABSENT, False)
    assert states(status_of(LISTED, things(copies_count=0, in_s3=True), doubts=doubts)) == (ABSENT, QUARANTINED, False)
    torn = without(things(), ONE)
    assert states(status_of(LISTED, torn, doubts=doubts)) == (QUARANTINED, ABSENT, False)


def test_quarantined_member_is_named_first_and_memory_still_has_the_set() -> None:
    status = status_of(LISTED, changed(things(), TWO, quarantined="403 AccessDenied"))
    assert states(status) == (COMPLETE, QUARANTINED, True)
    assert status.tiers[Tier.S3].missing == (TWO, MARKER, ONE)


def test_parked_set_is_not_owed_to_s3() -> None:
    found = {key: replace(thing, is_parked=True) for key, thing in things().items()}
    status = status_of(LISTED, found)
    assert (states(status), status.is_parked) == ((COMPLETE, ABSENT, True), True)


def test_set_that_a_pointer_speaks_for_holds_its_own_objects_only() -> None:
    pointer = "run/latest"
    spoken = Manifest(replace(NAME, marker=pointer), (*LISTED.members, Member(pointer)), is_listed=False)
    found = without(things(), MARKER)
    assert states(status_of(spoken, found)) == (RECEIVING, ABSENT, False)
    found[pointer] = Thing(pointer, 12, 999.0, copies_count=3)
    status = status_of(spoken, found)
    assert states(status) == (COMPLETE, UPLOADING, True)
    assert (status.objects_count, status.size_bytes, status.committed_s) == (2, 35, 101.0)
    assert states(status_of(spoken, without(found, ONE))) == (DAMAGED, ABSENT, False)
    assert states(status_of(Manifest(replace(NAME, marker=""), (), is_listed=False), {})) == (ABSENT, ABSENT, False)


def test_exact_sizes_are_held_to_and_the_step_is_the_markers_own() -> None:
    exact = Manifest(NAME, (Member(ONE, 10), Member(TWO, 24)), is_listed=True, step=0)
    status = status_of(exact, things())
    assert (states(status), status.step, status.size_bytes) == ((DAMAGED, ABSENT, False), 0, 39)


def test_of_many_missing_members_some_are_named() -> None:
    many = Manifest(NAME, tuple(Member(f"run/step_7/{index:04}") for index in range(1000)), is_listed=True)
    status = status_of(many, {MARKER: Thing(MARKER, 5, 1.0, 1)})
    assert status.objects_count == 1001
    assert status.tiers[Tier.MEMORY].missing == tuple(f"run/step_7/{index:04}" for index in range(MISSING_COUNT))


def test_document_of_a_set_is_read_back() -> None:
    status = status_of(LISTED, changed(things(), TWO, in_s3=True), doubts=Doubts(damage="x"))
    assert status_from(document_of(status)) == status
    assert document_of(status)["uri"] == "s3://bucket/run/step_7/"
    with pytest.raises(ValueError, match="bogus"):
        status_from(document_of(status) | {"tiers": {"bogus": {}}})
