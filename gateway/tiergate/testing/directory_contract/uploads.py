"""Multipart uploads of clients."""

from dataclasses import replace

import pytest

from tiergate.directory.base import Committed, Directory
from tiergate.errors import ConflictError, NotFoundError, PartsChangedError
from tiergate.model import NO_BASE, Body, OriginUpload, Part
from tiergate.testing.directory_contract.values import (
    BUCKET,
    MARKER,
    SHARD,
    make_completed,
    make_intent,
    make_part,
    make_upload,
    make_version,
    object_name,
    pending_of,
    put,
)


class ClientUploads:
    """Multipart uploads of clients."""

    async def test_create_upload_can_be_read_back(self, directory: Directory) -> None:
        upload = make_upload("up1")
        await directory.create_upload(upload)
        assert await directory.get_upload("up1") == upload
        assert await directory.list_parts("up1") == []

    @pytest.mark.parametrize("upload_id", ["", "nothing", "x" * 5000, "é" * 300])
    async def test_upload_unknown_id_is_none(self, directory: Directory, upload_id: str) -> None:
        before = await directory.revision()
        assert await directory.get_upload(upload_id) is None
        assert await directory.abort_upload(upload_id) is None
        assert await directory.finished_upload(upload_id) is None
        assert await directory.list_parts(upload_id) == []
        with pytest.raises(NotFoundError):
            await directory.put_part(upload_id, make_part(1, "p"))
        with pytest.raises(NotFoundError):
            await directory.note_spill(upload_id, "s")
        with pytest.raises(NotFoundError):
            await directory.finish_upload(upload_id, make_version("v"), [], make_intent())
        assert not await directory.move_part(upload_id, make_part(1, "p"), make_part(1, "p"))
        assert await directory.revision() == before

    async def test_list_uploads_by_key_then_start(self, directory: Directory) -> None:
        for upload_id, key, started_s in (("u4", "b", 1.0), ("u1", "a", 9.0), ("u2", "a", 3.0), ("u3", "é", 1.0)):
            await directory.create_upload(make_upload(upload_id, object_name(key), started_s))
        await directory.create_upload(make_upload("u5", object_name("a", "elsewhere"), 1.0))
        long = "k" * 1000
        await directory.create_upload(make_upload("u7", object_name(long + "2"), 1.0))
        await directory.create_upload(make_upload("u6", object_name(long + "1"), 2.0))
        found = await directory.list_uploads(BUCKET, "")
        assert [upload.upload_id for upload in found] == ["u2", "u1", "u4", "u6", "u7", "u3"]
        assert [upload.upload_id for upload in await directory.list_uploads(BUCKET, "a")] == ["u2", "u1"]
        assert [upload.upload_id for upload in await directory.list_uploads(BUCKET, long + "2")] == ["u7"]
        assert await directory.owed_holders() == {"u1", "u2", "u3", "u4", "u5", "u6", "u7"}

    async def test_put_part_again_returns_the_replaced(self, directory: Directory) -> None:
        await directory.create_upload(make_upload("up1"))
        await directory.create_upload(make_upload("up10"))
        assert await directory.put_part("up1", make_part(10_000, "p3")) is None
        assert await directory.put_part("up1", make_part(2, "p1")) is None
        assert await directory.put_part("up1", make_part(2, "p2")) == make_part(2, "p1")
        await directory.put_part("up10", make_part(1, "other"))
        assert await directory.list_parts("up1") == [make_part(2, "p2"), make_part(10_000, "p3")]

    async def test_move_part_only_the_same_part(self, directory: Directory) -> None:
        await directory.create_upload(make_upload("up1"))
        await directory.put_part("up1", make_part(1, "p1"))
        moved = Part(1, Body("p1", 10), "etag-p1", spilled_etag="so")
        assert not await directory.move_part("up1", make_part(1, "p0"), moved)
        assert await directory.move_part("up1", make_part(1, "p1"), moved)
        assert await directory.list_parts("up1") == [moved]

    async def test_note_spill_first_one_stays(self, directory: Directory) -> None:
        await directory.create_upload(make_upload("up1"))
        assert await directory.note_spill("up1", "s1") == "s1"
        assert await directory.note_spill("up1", "s2") == "s1"
        upload = await directory.get_upload("up1")
        assert upload is not None
        assert upload.spill_id == "s1"

    async def test_abort_upload_returns_parts_and_ends_it(self, directory: Directory) -> None:
        await directory.create_upload(make_upload("up1"))
        await directory.put_part("up1", make_part(1, "p1"))
        assert await directory.abort_upload("up1") == [make_part(1, "p1")]
        assert await directory.abort_upload("up1") is None
        assert await directory.list_parts("up1") == []
        assert await directory.list_uploads(BUCKET, "") == []

    async def test_abort_upload_leaves_its_spill_to_be_aborted(self, directory: Directory) -> None:
        upload = make_upload("up1")
        await directory.create_upload(upload)
        await directory.note_spill("up1", "s1")
        await directory.abort_upload("up1")
        assert await directory.orphan_uploads() == [(upload.name, OriginUpload("s1", upload.started_s))]

    async def test_finish_upload_is_one_transition(self, directory: Directory) -> None:
        await directory.create_upload(make_upload("up1"))
        await directory.put_part("up1", make_part(1, "p1"))
        version = make_completed("v1", make_part(1, "p1"))
        committed = await directory.finish_upload("up1", version, [(1, "etag-p1")], make_intent(now_s=90.0))
        assert committed == Committed(await directory.revision(), None)
        assert (await pending_of(directory, SHARD)).uid == "v1"
        assert await directory.get_upload("up1") is None
        assert await directory.list_parts("up1") == []
        finished = await directory.finished_upload("up1")
        assert finished is not None
        assert (finished.name, finished.version_uid, finished.etag) == (SHARD, "v1", "etag-v1")
        assert (finished.parts, finished.finished_s) == (((1, "etag-p1"),), 90.0)

    async def test_finish_upload_leaves_a_spill_that_it_has_no_use_for_to_be_aborted(
        self, directory: Directory
    ) -> None:
        upload = make_upload("up1")
        await directory.create_upload(upload)
        await directory.note_spill("up1", "s1")
        await directory.put_part("up1", make_part(1, "p1"))
        await directory.finish_upload("up1", make_completed("v1", make_part(1, "p1")), [(1, "e")], make_intent())
        assert await directory.orphan_uploads() == [(upload.name, OriginUpload("s1", upload.started_s))]

    async def test_finish_upload_guard_fails_keeps_the_upload(self, directory: Directory) -> None:
        await put(directory, SHARD, "v0")
        part = make_part(1, "p1")
        await directory.create_upload(make_upload("up1"))
        await directory.put_part("up1", part)
        with pytest.raises(ConflictError):
            await directory.finish_upload("up1", make_completed("v1", part), [(1, "e")], make_intent(guard=0))
        assert await directory.list_parts("up1") == [make_part(1, "p1")]
        assert await directory.finished_upload("up1") is None
        assert (await pending_of(directory, SHARD)).uid == "v0"

    async def test_finish_upload_refuses_parts_that_changed_since_they_were_read(self, directory: Directory) -> None:
        one, two, unlisted = make_part(1, "p1"), make_part(2, "p2"), make_part(3, "p3")
        await directory.create_upload(make_upload("up1"))
        for part in (one, two, unlisted):
            await directory.put_part("up1", part)
        await directory.put_part("up1", make_part(2, "again"))
        await directory.put_part("up1", make_part(3, "not chosen"))
        moved = replace(one, spilled_etag="so")
        for parts in ((one, two), (one, make_part(4, "p4")), (moved,)):
            with pytest.raises(PartsChangedError):
                await directory.finish_upload("up1", make_completed("v1", *parts), [], make_intent())
        assert await directory.move_part("up1", one, moved)
        with pytest.raises(PartsChangedError):
            await directory.finish_upload("up1", make_completed("v1", one), [], make_intent())
        assert (await directory.get(SHARD)).record is None
        assert len(await directory.list_parts("up1")) == 3
        await directory.finish_upload("up1", make_completed("v1", make_part(2, "again")), [], make_intent())
        assert (await pending_of(directory, SHARD)).uid == "v1"

    async def test_end_spilled_remembers_the_answer(self, directory: Directory) -> None:
        await directory.create_upload(make_upload("up1"))
        await directory.end_spilled("up1", make_version("v1"), [(1, "e")], 5.0)
        assert await directory.get_upload("up1") is None
        assert await directory.finished_upload("up1") is not None
        assert (await directory.get(SHARD)).record is None

    async def test_expire_finished_only_older(self, directory: Directory) -> None:
        for upload_id, now_s in (("up1", 10.0), ("up2", 20.0)):
            await directory.create_upload(make_upload(upload_id))
            await directory.end_spilled(upload_id, make_version("v"), [], now_s)
        assert await directory.expire_finished(20.0) == 1
        assert await directory.finished_upload("up1") is None
        assert await directory.finished_upload("up2") is not None

    async def test_origin_upload_ids_are_those_of_the_bucket(self, directory: Directory) -> None:
        await put(directory, SHARD, "v1")
        await directory.note_upload(SHARD, "v1", OriginUpload("leftover", 1.0))
        await put(directory, SHARD, "v2")
        await directory.note_upload(SHARD, "v2", OriginUpload("writeback", 2.0))
        await put(directory, MARKER, "m1", make_intent(base=NO_BASE))
        await directory.note_upload(MARKER, "m1", OriginUpload("orphan", 3.0))
        await directory.delete(MARKER, make_intent())
        await directory.create_upload(make_upload("up1"))
        await directory.create_upload(make_upload("up2"))
        await directory.note_spill("up1", "spill")
        await put(directory, object_name("k", "elsewhere"), "v3")
        await directory.note_upload(object_name("k", "elsewhere"), "v3", OriginUpload("other", 2.0))
        assert await directory.origin_upload_ids(BUCKET) == {"leftover", "writeback", "orphan", "spill"}
