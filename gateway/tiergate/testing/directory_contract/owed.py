"""What is owed to the origin, and the methods of who pays it."""

import pytest

from tiergate.directory.base import Directory
from tiergate.errors import FencedError
from tiergate.model import NO_BASE, OriginUpload, State
from tiergate.testing.directory_contract.values import (
    BUCKET,
    MARKER,
    SHARD,
    keys_of,
    make_intent,
    make_version,
    object_name,
    pending_of,
    put,
    put_clean,
    record_of,
)


class OwedWrites:
    """What is owed to the origin, and the methods of who pays it."""

    async def test_pending_comes_by_place(self, directory: Directory) -> None:
        for key in ("c", "a", "b"):
            await put(directory, object_name(key), f"1{key}")
        await put(directory, object_name("c"), "2c")
        assert keys_of(await directory.pending()) == ["c", "a", "b"]
        assert [write.uid for write in await directory.pending()] == ["2c", "1a", "1b"]

    async def test_pending_under_limits(self, directory: Directory) -> None:
        for key in ("a/2", "a/1", "b"):
            await put(directory, object_name(key), key)
        assert keys_of(await directory.pending_under(BUCKET, "a/", 1)) == ["a/1"]
        assert keys_of(await directory.pending_under(BUCKET, "a/", 9)) == ["a/1", "a/2"]

    async def test_oldest_pending_is_by_time_of_what_is_not_set_aside(self, directory: Directory) -> None:
        await put(directory, object_name("a"), "a1", make_intent(now_s=10.0))
        await put(directory, object_name("b"), "b1", make_intent(now_s=20.0))
        await put(directory, object_name("a"), "a2", make_intent(now_s=30.0))
        assert await directory.oldest_pending_s() == 20.0
        await directory.quarantine(object_name("b"), "b1", "refused")
        assert await directory.oldest_pending_s() == 30.0
        await directory.quarantine(object_name("b"), "b1", "")
        assert await directory.oldest_pending_s() == 20.0
        await directory.persisted(object_name("b"), "b1", "o", 40.0)
        await directory.persisted(object_name("a"), "a2", "o", 40.0)
        assert await directory.oldest_pending_s() is None

    async def test_owed_bytes_are_of_what_is_not_set_aside(self, directory: Directory) -> None:
        assert await directory.owed_bytes() == 0
        await put(directory, object_name("a"), "a1", size_bytes=100)
        await put(directory, object_name("b"), "b1", size_bytes=20)
        await put(directory, object_name("a"), "a2", size_bytes=3)
        await directory.delete(object_name("c"), make_intent())
        assert await directory.owed_bytes() == 23
        await directory.quarantine(object_name("b"), "b1", "refused")
        assert await directory.owed_bytes() == 3
        await directory.quarantine(object_name("b"), "b1", "")
        await directory.begin(object_name("b"), "b1", NO_BASE)
        assert await directory.owed_bytes() == 23
        await directory.persisted(object_name("b"), "b1", "o", 40.0)
        await directory.quarantine(object_name("a"), "a2", "refused")
        await put(directory, object_name("a"), "a4", size_bytes=4)
        assert await directory.owed_bytes() == 4
        await directory.persisted(object_name("a"), "a4", "o", 40.0)
        assert await directory.owed_bytes() == 0

    async def test_begin_marks_and_sets_base(self, directory: Directory) -> None:
        await put(directory, SHARD, "v1")
        begun = await directory.begin(SHARD, "v1", "o0")
        assert (begun.begun, begun.base) == (True, "o0")
        assert begun == await pending_of(directory, SHARD)

    async def test_rebase_changes_the_base_only(self, directory: Directory) -> None:
        await put(directory, SHARD, "v1")
        begun = await directory.begin(SHARD, "v1", NO_BASE)
        rebased = await directory.rebase(SHARD, "v1", "o9")
        assert (rebased.base, rebased.begun, rebased.place) == ("o9", True, begun.place)

    async def test_note_upload_records_and_clears(self, directory: Directory) -> None:
        await put(directory, SHARD, "v1")
        intent = OriginUpload("", 4.0)
        assert (await directory.note_upload(SHARD, "v1", intent)).upload == intent
        assert (await directory.note_upload(SHARD, "v1", None)).upload is None

    async def test_owner_methods_superseded_are_fenced(self, directory: Directory) -> None:
        await put(directory, SHARD, "v1")
        await put(directory, SHARD, "v2")
        before = await directory.get(SHARD)
        with pytest.raises(FencedError):
            await directory.begin(SHARD, "v1", NO_BASE)
        with pytest.raises(FencedError):
            await directory.rebase(SHARD, "v1", NO_BASE)
        with pytest.raises(FencedError):
            await directory.note_upload(SHARD, "v1", None)
        with pytest.raises(FencedError):
            await directory.begin(MARKER, "v1", NO_BASE)
        assert await directory.get(SHARD) == before

    async def test_persisted_put_becomes_clean(self, directory: Directory) -> None:
        committed = await put(directory, SHARD, "v1")
        await directory.begin(SHARD, "v1", NO_BASE)
        assert await directory.persisted(SHARD, "v1", "o1", 60.0) == make_version("v1")
        seen = await directory.get(SHARD)
        assert seen.pending is None
        assert seen.record is not None
        assert (seen.record.state, seen.record.origin_etag) == (State.CLEAN, "o1")
        assert (seen.record.validated_s, seen.record.revision) == (60.0, committed.revision)

    async def test_persisted_delete_removes_the_tombstone(self, directory: Directory) -> None:
        await directory.delete(SHARD, make_intent())
        uid = (await pending_of(directory, SHARD)).uid
        assert await directory.persisted(SHARD, uid, "", 60.0) is None
        seen = await directory.get(SHARD)
        assert (seen.record, seen.pending) == (None, None)

    async def test_persisted_superseded_put_moves_the_base(self, directory: Directory) -> None:
        await put(directory, SHARD, "v1")
        await directory.begin(SHARD, "v1", NO_BASE)
        await put(directory, SHARD, "v2")
        assert await directory.persisted(SHARD, "v1", "o1", 60.0) is None
        pending = await pending_of(directory, SHARD)
        assert (pending.uid, pending.base) == ("v2", "o1")
        assert (await record_of(directory, SHARD)).state is State.DIRTY

    async def test_persisted_superseded_delete_leaves_no_base(self, directory: Directory) -> None:
        await put_clean(directory, SHARD, "v1", "o1")
        await directory.delete(SHARD, make_intent())
        uid = (await pending_of(directory, SHARD)).uid
        await directory.begin(SHARD, uid, "o1")
        await put(directory, SHARD, "v2")
        await directory.persisted(SHARD, uid, "", 60.0)
        assert (await pending_of(directory, SHARD)).base == NO_BASE

    async def test_persisted_twice_does_nothing(self, directory: Directory) -> None:
        await put(directory, SHARD, "v1")
        await directory.persisted(SHARD, "v1", "o1", 60.0)
        before = await directory.get(SHARD)
        assert await directory.persisted(SHARD, "v1", "o2", 61.0) is None
        assert await directory.get(SHARD) == before

    async def test_persisted_with_leftovers_orphans_them(self, directory: Directory) -> None:
        await put(directory, SHARD, "v1")
        await directory.note_upload(SHARD, "v1", OriginUpload("u1", 1.0))
        await put(directory, SHARD, "v2")
        await directory.persisted(SHARD, "v2", "o2", 60.0)
        assert await directory.orphan_uploads() == [(SHARD, OriginUpload("u1", 1.0))]

    async def test_drop_leftovers_forgets_those_named(self, directory: Directory) -> None:
        first, second = OriginUpload("u1", 1.0), OriginUpload("u2", 2.0)
        for uid, upload in (("v1", first), ("v2", second)):
            await put(directory, SHARD, uid)
            await directory.note_upload(SHARD, uid, upload)
        await put(directory, SHARD, "v3")
        await directory.drop_leftovers(SHARD, [first])
        assert (await pending_of(directory, SHARD)).leftovers == (second,)

    async def test_drop_leftovers_forgets_orphans(self, directory: Directory) -> None:
        nameless, later = OriginUpload("", 1.0), OriginUpload("", 2.0)
        for uid, upload in (("v1", nameless), ("v2", later)):
            await put(directory, SHARD, uid, make_intent(base=NO_BASE))
            await directory.note_upload(SHARD, uid, upload)
            await directory.delete(SHARD, make_intent())
        assert set(await directory.orphan_uploads()) == {(SHARD, nameless), (SHARD, later)}
        await directory.drop_leftovers(SHARD, [nameless])
        assert await directory.orphan_uploads() == [(SHARD, later)]

    async def test_quarantine_sets_aside_and_releases(self, directory: Directory) -> None:
        await put(directory, SHARD, "v1")
        await directory.quarantine(SHARD, "v1", "AccessDenied")
        assert (await pending_of(directory, SHARD)).quarantined == "AccessDenied"
        await directory.quarantine(SHARD, "v0", "")
        assert (await pending_of(directory, SHARD)).quarantined == "AccessDenied"
        await directory.quarantine(SHARD, "v1", "")
        assert (await pending_of(directory, SHARD)).quarantined == ""
        await directory.quarantine(MARKER, "v1", "nothing there")
        assert (await directory.get(MARKER)).pending is None
