"""Writes and deletes of objects: what is current, what is owed, what the guards hold."""

import asyncio
from dataclasses import replace

import pytest

from tiergate.directory.base import Committed, Directory
from tiergate.errors import ConflictError
from tiergate.model import (
    NO_BASE,
    UNKNOWN_BASE,
    Kind,
    OriginUpload,
    Pending,
    Record,
    Role,
    State,
)
from tiergate.testing.directory_contract.values import (
    SHARD,
    make_intent,
    make_version,
    object_name,
    pending_of,
    put,
    put_clean,
    record_of,
)


class ObjectTransitions:
    """Writes and deletes of objects: what is current, what is owed, what the guards hold."""

    async def test_new_directory_owes_nothing(self, directory: Directory) -> None:
        assert await directory.pending() == []
        assert await directory.oldest_pending_s() is None

    async def test_get_unknown_key_finds_nothing(self, directory: Directory) -> None:
        seen = await directory.get(SHARD)
        assert (seen.record, seen.pending, seen.guard) == (None, None, 0)
        assert seen.revision == await directory.revision()

    async def test_revision_grows_with_each_commit(self, directory: Directory) -> None:
        revisions = [await directory.revision()]
        for index in range(3):
            revisions.append((await put(directory, object_name(f"k{index}"), "v")).revision)
            assert await directory.revision() == revisions[-1]
        assert revisions == sorted(set(revisions))

    async def test_put_new_key_is_dirty_and_owed(self, directory: Directory) -> None:
        version = make_version("v1", 123)
        intent = make_intent(Role.LARGE, start_revision=0, now_s=50.0, base=NO_BASE, conditional=True)
        committed = await directory.put(SHARD, version, intent)
        seen = await directory.get(SHARD)
        at = committed.revision
        assert committed.replaced is None
        assert seen.revision == await directory.revision() == at
        assert seen.record == Record(SHARD, State.DIRTY, at, at, version, role=Role.LARGE)
        assert seen.pending is not None
        assert replace(seen.pending, owner=None) == Pending(
            SHARD, "v1", Kind.PUT, Role.LARGE, at, at, 0, 50.0, 123, base=NO_BASE, conditional=True
        )

    async def test_put_unasked_base_is_unknown(self, directory: Directory) -> None:
        await put(directory, SHARD, "v1")
        assert (await pending_of(directory, SHARD)).base == UNKNOWN_BASE

    async def test_put_over_pending_inherits(self, directory: Directory) -> None:
        first = await put(directory, SHARD, "v1", make_intent(base=NO_BASE))
        other = await put(directory, object_name("other"), "o1")
        await directory.note_upload(SHARD, "v1", OriginUpload("u1", 1.0))
        committed = await put(directory, SHARD, "v2", make_intent(start_revision=2, now_s=1001.0))
        pending = await pending_of(directory, SHARD)
        assert committed.replaced == make_version("v1")
        assert committed.revision > other.revision
        assert (pending.place, pending.revision, pending.start_revision) == (first.revision, committed.revision, 2)
        assert (pending.base, pending.begun, pending.upload) == (NO_BASE, False, None)
        assert pending.leftovers == (OriginUpload("u1", 1.0),)
        assert pending.committed_s == 1001.0

    async def test_put_over_begun_base_is_unknown(self, directory: Directory) -> None:
        first = await put(directory, SHARD, "v1", make_intent(base=NO_BASE))
        await directory.begin(SHARD, "v1", NO_BASE)
        await put(directory, SHARD, "v2", make_intent())
        pending = await pending_of(directory, SHARD)
        assert (pending.base, pending.begun, pending.place) == (UNKNOWN_BASE, False, first.revision)

    async def test_nothing_in_the_origin_is_foreign_to_what_follows_a_begun_write(self, directory: Directory) -> None:
        """It may land after its successor was decided on, and looked at the origin: what that holds changes, by us."""
        await put(directory, SHARD, "v1", make_intent(base="e1"))
        await directory.begin(SHARD, "v1", "e1")
        await directory.delete(SHARD, make_intent())
        for uid in ("v2", "v3"):
            seen = await directory.get(SHARD)
            await put(directory, SHARD, uid, make_intent(base="e1", guard=seen.guard, conditional=True))
            assert not (await pending_of(directory, SHARD)).conditional

    async def test_put_over_pending_unknown_base_takes_the_callers(self, directory: Directory) -> None:
        await put(directory, SHARD, "v1")
        await put(directory, SHARD, "v2", make_intent(base="asked"))
        assert (await pending_of(directory, SHARD)).base == "asked"

    async def test_put_twice_over_uploads_keeps_all_leftovers(self, directory: Directory) -> None:
        await put(directory, SHARD, "v1")
        await directory.note_upload(SHARD, "v1", OriginUpload("u1", 1.0))
        await put(directory, SHARD, "v2")
        await directory.note_upload(SHARD, "v2", OriginUpload("u2", 2.0))
        await put(directory, SHARD, "v3")
        assert set((await pending_of(directory, SHARD)).leftovers) == {
            OriginUpload("u1", 1.0),
            OriginUpload("u2", 2.0),
        }

    async def test_put_over_clean_stands_on_its_etag(self, directory: Directory) -> None:
        await put_clean(directory, SHARD, "v1", "o1")
        committed = await put(directory, SHARD, "v2")
        pending = await pending_of(directory, SHARD)
        assert committed.replaced == make_version("v1")
        assert (pending.base, pending.place) == ("o1", committed.revision)

    async def test_put_over_quarantined_is_not_quarantined(self, directory: Directory) -> None:
        await put(directory, SHARD, "v1")
        await directory.quarantine(SHARD, "v1", "AccessDenied")
        await put(directory, SHARD, "v2")
        assert (await pending_of(directory, SHARD)).quarantined == ""

    async def test_put_guard_holds_commits(self, directory: Directory) -> None:
        await put(directory, SHARD, "v1", make_intent(guard=0))
        guard = (await directory.get(SHARD)).guard
        await put(directory, SHARD, "v2", make_intent(guard=guard))
        assert (await pending_of(directory, SHARD)).uid == "v2"

    @pytest.mark.parametrize("guard", [0, 7])
    async def test_put_guard_fails_changes_nothing(self, directory: Directory, guard: int) -> None:
        await put(directory, SHARD, "v1")
        before = await directory.get(SHARD)
        with pytest.raises(ConflictError):
            await put(directory, SHARD, "v2", make_intent(guard=guard))
        with pytest.raises(ConflictError):
            await directory.delete(SHARD, make_intent(guard=guard))
        with pytest.raises(ConflictError):
            await directory.put_through(SHARD, make_version("v2"), "o2", make_intent(guard=guard))
        assert await directory.get(SHARD) == before

    async def test_guard_state_changed_conflicts(self, directory: Directory) -> None:
        await put(directory, SHARD, "v1")
        guard = (await directory.get(SHARD)).guard
        await directory.persisted(SHARD, "v1", "o1", 1.0)
        with pytest.raises(ConflictError):
            await put(directory, SHARD, "v2", make_intent(guard=guard))

    async def test_put_concurrent_guards_one_wins(self, directory: Directory) -> None:
        tries = [put(directory, SHARD, f"v{index}", make_intent(guard=0)) for index in range(8)]
        ends = await asyncio.gather(*tries, return_exceptions=True)
        assert sum(isinstance(end, Committed) for end in ends) == 1
        assert sum(isinstance(end, ConflictError) for end in ends) == 7

    async def test_put_through_is_clean_and_supersedes(self, directory: Directory) -> None:
        await put(directory, SHARD, "v1")
        await directory.note_upload(SHARD, "v1", OriginUpload("u1", 1.0))
        committed = await directory.put_through(SHARD, make_version("v2"), "o2", make_intent(now_s=77.0))
        seen = await directory.get(SHARD)
        assert committed.replaced == make_version("v1")
        assert seen.pending is None
        assert seen.record == Record(
            SHARD, State.CLEAN, committed.revision, committed.revision, make_version("v2"), "o2", 77.0
        )
        assert await directory.orphan_uploads() == [(SHARD, OriginUpload("u1", 1.0))]

    async def test_delete_unknown_key_leaves_tombstone(self, directory: Directory) -> None:
        committed = await directory.delete(SHARD, make_intent(now_s=9.0))
        seen = await directory.get(SHARD)
        assert committed == Committed(seen.revision, None)
        assert seen.record == Record(SHARD, State.TOMBSTONE, seen.revision, seen.revision, None)
        assert seen.pending is not None
        assert (seen.pending.kind, seen.pending.base) == (Kind.DELETE, UNKNOWN_BASE)
        assert (seen.pending.size_bytes, seen.pending.committed_s) == (0, 9.0)

    async def test_delete_surely_absent_key_owes_nothing(self, directory: Directory) -> None:
        assert await directory.delete(SHARD, make_intent(base=NO_BASE)) is None
        assert (await directory.get(SHARD)).record is None

    async def test_delete_tombstone_does_nothing(self, directory: Directory) -> None:
        await directory.delete(SHARD, make_intent())
        before = await directory.get(SHARD)
        assert await directory.delete(SHARD, make_intent()) is None
        assert await directory.get(SHARD) == before

    async def test_delete_clean_owes_a_delete(self, directory: Directory) -> None:
        await put_clean(directory, SHARD, "v1", "o1")
        committed = await directory.delete(SHARD, make_intent())
        pending = await pending_of(directory, SHARD)
        assert committed is not None
        assert committed.replaced == make_version("v1")
        assert (await record_of(directory, SHARD)).state is State.TOMBSTONE
        assert (pending.kind, pending.base) == (Kind.DELETE, "o1")
        assert pending.uid != "v1"

    async def test_delete_not_begun_absent_from_origin_cancels(self, directory: Directory) -> None:
        await put(directory, SHARD, "v1", make_intent(base=NO_BASE))
        committed = await directory.delete(SHARD, make_intent())
        seen = await directory.get(SHARD)
        assert committed == Committed(seen.revision, make_version("v1"))
        assert (seen.record, seen.pending) == (None, None)

    async def test_delete_begun_follows_the_upload(self, directory: Directory) -> None:
        first = await put(directory, SHARD, "v1", make_intent(base=NO_BASE))
        await directory.begin(SHARD, "v1", NO_BASE)
        await directory.note_upload(SHARD, "v1", OriginUpload("u1", 1.0))
        await directory.delete(SHARD, make_intent())
        pending = await pending_of(directory, SHARD)
        assert (pending.kind, pending.place, pending.base) == (Kind.DELETE, first.revision, UNKNOWN_BASE)
        assert pending.leftovers == (OriginUpload("u1", 1.0),)

    async def test_delete_after_overwrite_of_begun_follows_too(self, directory: Directory) -> None:
        await put(directory, SHARD, "v1", make_intent(base=NO_BASE))
        await directory.begin(SHARD, "v1", NO_BASE)
        await put(directory, SHARD, "v2")
        await directory.delete(SHARD, make_intent())
        assert (await pending_of(directory, SHARD)).kind is Kind.DELETE

    async def test_put_over_tombstone_inherits_place(self, directory: Directory) -> None:
        await put_clean(directory, SHARD, "v1", "o1")
        await directory.delete(SHARD, make_intent())
        place = (await pending_of(directory, SHARD)).place
        committed = await put(directory, SHARD, "v2")
        pending = await pending_of(directory, SHARD)
        assert committed.replaced is None
        assert (pending.kind, pending.place, pending.base) == (Kind.PUT, place, "o1")
