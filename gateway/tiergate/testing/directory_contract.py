"""What every directory must do: subclass `DirectoryContract` and give it a `directory` fixture."""

import asyncio
from collections.abc import Sequence

import pytest

from tiergate.directory.base import Committed, Directory, Intent
from tiergate.errors import ConflictError, FencedError, NotFoundError
from tiergate.model import (
    NO_BASE,
    UNKNOWN_BASE,
    Body,
    Bucket,
    Kind,
    ObjectName,
    OriginUpload,
    Part,
    Pending,
    Record,
    Role,
    State,
    Upload,
    Version,
)

BUCKET = "bucket"
SHARD = ObjectName(BUCKET, "run/step_1/__0_0.distcp")
MARKER = ObjectName(BUCKET, "run/step_1/.metadata")
RUN_MARKER = ObjectName(BUCKET, "run/.metadata")


def object_name(key: str, bucket: str = BUCKET) -> ObjectName:
    """A name in the bucket that most tests use."""
    return ObjectName(bucket, key)


def make_version(uid: str, size_bytes: int = 10, *, foreign: bool = False) -> Version:
    """A version of one part, with something in every field that must come back as it was."""
    body = Body(f"body-{uid}", size_bytes, b"\x01\x02\x03\x04\x05\x06\x07\x08")
    part = Part(1, body, f"etag-{uid}", 1_700_000_000, {"crc32": "AAAAAA=="})
    return Version(
        uid=uid,
        size_bytes=size_bytes,
        etag=f"etag-{uid}",
        modified_s=1_700_000_000,
        parts=(part,),
        headers={"content-type": "application/x-tensor"},
        metadata={"step": "ü"},
        tagging="a=b",
        checksums={"crc64nvme": "AAAAAAAAAAA="},
        checksum_type="FULL_OBJECT",
        foreign=foreign,
    )


def make_intent(
    role: Role = Role.SMALL,
    *,
    start_revision: int = 0,
    now_s: float = 1000.0,
    base: str = UNKNOWN_BASE,
    guard: int | None = None,
    conditional: bool = False,
) -> Intent:
    """An unconditional write of a small object, unless said otherwise."""
    return Intent(role, start_revision, now_s, base, guard, conditional)


def make_upload(upload_id: str, name: ObjectName = SHARD, started_s: float = 5.0) -> Upload:
    """A client's upload without parts."""
    return Upload(upload_id, name, make_version(upload_id, 0), started_s, "crc32", "COMPOSITE")


def make_part(number: int, uid: str) -> Part:
    """A part of an upload."""
    return Part(number, Body(uid, 10), f"etag-{uid}", 7, {"crc32": "BBBBBB=="})


async def put(
    directory: Directory, name: ObjectName, uid: str, intent: Intent | None = None, size_bytes: int = 10
) -> Committed:
    """Commit a version of its own kind."""
    return await directory.put(name, make_version(uid, size_bytes), intent or make_intent())


async def record_of(directory: Directory, name: ObjectName) -> Record:
    """The record of a key that must have one."""
    record = (await directory.get(name)).record
    assert record is not None
    return record


async def pending_of(directory: Directory, name: ObjectName) -> Pending:
    """The pending write of a key that must have one."""
    pending = (await directory.get(name)).pending
    assert pending is not None
    return pending


async def put_clean(directory: Directory, name: ObjectName, uid: str, etag: str, role: Role = Role.SMALL) -> None:
    """A version that was committed and written back."""
    await put(directory, name, uid, make_intent(role))
    await directory.begin(name, uid, NO_BASE)
    assert await directory.persisted(name, uid, etag, 2000.0) is not None


def keys_of(found: Sequence[Record | Pending | Upload]) -> list[str]:
    """The keys, in the order found."""
    return [item.name.key for item in found]


AWKWARD_KEYS = sorted(
    {
        "a",
        "a/",
        "a/b",
        "a0",
        "ab",
        "é",
        "\uffff",
        "\U0001f600",
        "~",
        " ",
        *("p/" + "x" * length for length in (398, 399, 400, 401, 468, 469, 470, 471, 472, 473, 500, 1022)),
        *("p/" + "x" * 470 + tail for tail in ("0", "1", "/0", "/00", "é", "\U0001f600", "x" * 500 + "!")),
        *("q/" + "é" * length for length in (200, 233, 234, 235, 236, 500, 511)),
        *("q/" + "é" * 300 + tail for tail in ("a", "b", "/a", "/b/c")),
    },
    key=str.encode,
)
"""Keys around the bound of what LMDB can order: equal prefixes, multi-byte characters, up to 1,024 bytes."""


class DirectoryContract:
    """The contract of `tiergate.directory.base.Directory`."""

    @pytest.fixture
    def directory(self) -> Directory:
        """A new, empty directory."""
        raise NotImplementedError

    # -- objects
    async def test_revision_new_directory_is_zero(self, directory: Directory) -> None:
        assert await directory.revision() == 0
        assert await directory.pending() == []
        assert await directory.oldest_pending_s() is None

    async def test_get_unknown_key_finds_nothing(self, directory: Directory) -> None:
        seen = await directory.get(SHARD)
        assert (seen.record, seen.pending, seen.revision, seen.guard) == (None, None, 0, 0)

    async def test_put_new_key_is_dirty_and_owed(self, directory: Directory) -> None:
        version = make_version("v1", 123)
        intent = make_intent(Role.LARGE, start_revision=0, now_s=50.0, base=NO_BASE, conditional=True)
        committed = await directory.put(SHARD, version, intent)
        seen = await directory.get(SHARD)
        assert committed == Committed(1, None)
        assert seen.revision == await directory.revision() == 1
        assert seen.record == Record(SHARD, State.DIRTY, 1, 1, version, role=Role.LARGE)
        assert seen.pending == Pending(
            SHARD, "v1", Kind.PUT, Role.LARGE, 1, 1, 0, 50.0, 123, base=NO_BASE, conditional=True
        )

    async def test_put_unasked_base_is_unknown(self, directory: Directory) -> None:
        await put(directory, SHARD, "v1")
        assert (await pending_of(directory, SHARD)).base == UNKNOWN_BASE

    async def test_put_over_pending_inherits(self, directory: Directory) -> None:
        await put(directory, SHARD, "v1", make_intent(base=NO_BASE))
        await put(directory, object_name("other"), "o1")
        await directory.note_upload(SHARD, "v1", OriginUpload("u1", 1.0))
        committed = await put(directory, SHARD, "v2", make_intent(start_revision=2, now_s=1001.0))
        pending = await pending_of(directory, SHARD)
        assert committed == Committed(3, make_version("v1"))
        assert (pending.place, pending.revision, pending.start_revision) == (1, 3, 2)
        assert (pending.base, pending.begun, pending.upload) == (NO_BASE, False, None)
        assert pending.leftovers == (OriginUpload("u1", 1.0),)
        assert pending.committed_s == 1001.0

    async def test_put_over_begun_base_is_unknown(self, directory: Directory) -> None:
        await put(directory, SHARD, "v1", make_intent(base=NO_BASE))
        await directory.begin(SHARD, "v1", NO_BASE)
        await put(directory, SHARD, "v2", make_intent())
        pending = await pending_of(directory, SHARD)
        assert (pending.base, pending.begun, pending.place) == (UNKNOWN_BASE, False, 1)

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
        assert committed == Committed(1, None)
        assert seen.record == Record(SHARD, State.TOMBSTONE, 1, 1, None)
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
        assert committed == Committed(2, make_version("v1"))
        seen = await directory.get(SHARD)
        assert (seen.record, seen.pending) == (None, None)

    async def test_delete_begun_follows_the_upload(self, directory: Directory) -> None:
        await put(directory, SHARD, "v1", make_intent(base=NO_BASE))
        await directory.begin(SHARD, "v1", NO_BASE)
        await directory.note_upload(SHARD, "v1", OriginUpload("u1", 1.0))
        await directory.delete(SHARD, make_intent())
        pending = await pending_of(directory, SHARD)
        assert (pending.kind, pending.place, pending.base) == (Kind.DELETE, 1, UNKNOWN_BASE)
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

    # -- what is found in the origin
    async def test_adopt_new_key_is_clean(self, directory: Directory) -> None:
        version = make_version("f1", foreign=True)
        record = await directory.adopt(SHARD, version, "o1", Role.SMALL, 33.0)
        assert record == (await directory.get(SHARD)).record
        assert (record.state, record.version, record.origin_etag) == (State.CLEAN, version, "o1")
        assert (record.validated_s, record.modified) == (33.0, await directory.revision())

    async def test_adopt_known_key_returns_what_is_there(self, directory: Directory) -> None:
        await directory.delete(SHARD, make_intent())
        record = await directory.adopt(SHARD, make_version("f1"), "o1", Role.SMALL, 33.0)
        assert record.state is State.TOMBSTONE

    async def test_adopt_several_keys_all_can_go(self, directory: Directory) -> None:
        for index in range(3):
            await directory.adopt(object_name(f"k{index}"), make_version(f"f{index}"), "o", Role.SMALL, 1.0)
        assert (await directory.counts())["clean"] == 3
        assert len(await directory.trim_clean(0)) == 3

    async def test_revalidated_current_version_notes_time(self, directory: Directory) -> None:
        await put_clean(directory, SHARD, "v1", "o1")
        guard = (await directory.get(SHARD)).guard
        await directory.revalidated(SHARD, "v1", 3000.0)
        assert (await record_of(directory, SHARD)).validated_s == 3000.0
        assert (await directory.get(SHARD)).guard == guard

    async def test_revalidated_other_version_does_nothing(self, directory: Directory) -> None:
        await put_clean(directory, SHARD, "v1", "o1")
        before = await directory.get(SHARD)
        await directory.revalidated(SHARD, "v0", 3000.0)
        assert await directory.get(SHARD) == before

    @pytest.mark.parametrize("uid", ["v1", None])
    async def test_forget_clean_drops_it(self, directory: Directory, uid: str | None) -> None:
        await put_clean(directory, SHARD, "v1", "o1")
        assert await directory.forget(SHARD, uid) == make_version("v1")
        assert (await directory.get(SHARD)).record is None

    async def test_forget_other_version_keeps_it(self, directory: Directory) -> None:
        await put_clean(directory, SHARD, "v1", "o1")
        assert await directory.forget(SHARD, "v0") is None
        assert (await record_of(directory, SHARD)).state is State.CLEAN

    async def test_forget_dirty_or_tombstone_keeps_it(self, directory: Directory) -> None:
        await put(directory, SHARD, "v1")
        await directory.delete(MARKER, make_intent())
        assert await directory.forget(SHARD, None) is None
        assert await directory.forget(SHARD, "v1") is None
        assert await directory.forget(MARKER, None) is None
        assert (await record_of(directory, SHARD)).state is State.DIRTY
        assert (await record_of(directory, MARKER)).state is State.TOMBSTONE

    async def test_trim_clean_drops_oldest_commits(self, directory: Directory) -> None:
        for index in range(5):
            await put(directory, object_name(f"k{index}"), f"v{index}")
        for index in (4, 0, 3, 1):
            await directory.persisted(object_name(f"k{index}"), f"v{index}", "o", 1.0)
        dropped = await directory.trim_clean(2)
        assert {version.uid for version in dropped} == {"v0", "v1"}
        assert keys_of(await directory.scan(BUCKET, "", "", 10)) == ["k2", "k3", "k4"]
        assert await directory.trim_clean(2) == []

    async def test_trim_clean_keeps_markers(self, directory: Directory) -> None:
        await put_clean(directory, MARKER, "m1", "o1", Role.MARKER)
        await put_clean(directory, SHARD, "v1", "o1")
        assert [version.uid for version in await directory.trim_clean(0)] == ["v1"]
        assert (await record_of(directory, MARKER)).state is State.CLEAN

    # -- scans
    async def test_scan_pages_through_in_key_order(self, directory: Directory) -> None:
        for key in reversed(AWKWARD_KEYS):
            await put(directory, object_name(key), key[:4])
        await put(directory, object_name("a", "bucket2"), "z")
        await put(directory, object_name("a", "bucke"), "z")
        found: list[str] = []
        while page := await directory.scan(BUCKET, "", found[-1] if found else "", 3):
            found += keys_of(page)
        assert found == AWKWARD_KEYS
        assert keys_of(await directory.pending_under(BUCKET, "", 1000)) == AWKWARD_KEYS

    async def test_scan_every_prefix_finds_exactly_its_keys(self, directory: Directory) -> None:
        for key in AWKWARD_KEYS:
            await put(directory, object_name(key), "v")
        prefixes = {key[:length] for key in AWKWARD_KEYS for length in (1, 2, 3, 300, 468, 474, len(key))}
        for prefix in prefixes:
            expected = [key for key in AWKWARD_KEYS if key.startswith(prefix)]
            assert keys_of(await directory.scan(BUCKET, prefix, "", 1000)) == expected
            assert keys_of(await directory.pending_under(BUCKET, prefix, 1000)) == expected
            after = expected[len(expected) // 2]
            rest = [key for key in expected if key.encode() > after.encode()]
            assert keys_of(await directory.scan(BUCKET, prefix, after, 1000)) == rest
            assert keys_of(await directory.scan_unpersisted(BUCKET, prefix, after, 2)) == rest[:2]

    async def test_scan_after_beyond_prefix_finds_nothing(self, directory: Directory) -> None:
        await put(directory, object_name("a/1"), "v")
        await put(directory, object_name("b/1"), "v")
        assert await directory.scan(BUCKET, "a/", "b", 10) == []
        assert keys_of(await directory.scan(BUCKET, "b/", "a", 10)) == ["b/1"]

    async def test_get_long_keys_that_differ_late_are_apart(self, directory: Directory) -> None:
        first, second = object_name("x" * 1000 + "1"), object_name("x" * 1000 + "2")
        await put(directory, first, "v1")
        await put(directory, second, "v2")
        await directory.delete(first, make_intent(base=NO_BASE))
        assert (await pending_of(directory, second)).uid == "v2"
        assert (await record_of(directory, second)).version == make_version("v2")

    async def test_scan_unpersisted_leaves_out_clean(self, directory: Directory) -> None:
        await put_clean(directory, object_name("a"), "v1", "o1")
        await put(directory, object_name("b"), "v2")
        await directory.delete(object_name("c"), make_intent())
        found = await directory.scan_unpersisted(BUCKET, "", "", 10)
        assert [(item.name.key, item.state) for item in found] == [("b", State.DIRTY), ("c", State.TOMBSTONE)]

    # -- write-back
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
        await put(directory, SHARD, "v1")
        await directory.begin(SHARD, "v1", NO_BASE)
        assert await directory.persisted(SHARD, "v1", "o1", 60.0) == make_version("v1")
        seen = await directory.get(SHARD)
        assert seen.pending is None
        assert seen.record is not None
        assert (seen.record.state, seen.record.origin_etag) == (State.CLEAN, "o1")
        assert (seen.record.validated_s, seen.record.revision) == (60.0, 1)

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

    # -- markers
    async def test_put_over_member_disturbs_later_markers_all_the_way_up(self, directory: Directory) -> None:
        await put(directory, SHARD, "s1")
        for name in (MARKER, RUN_MARKER):
            await put(directory, name, name.key, make_intent(Role.MARKER))
        await put(directory, object_name("other/.metadata"), "m3", make_intent(Role.MARKER))
        await put(directory, SHARD, "s2", make_intent(now_s=5000.0))
        assert (await pending_of(directory, MARKER)).disturbed_s == 5000.0
        assert (await pending_of(directory, RUN_MARKER)).disturbed_s == 5000.0
        assert (await pending_of(directory, object_name("other/.metadata"))).disturbed_s == 0.0

    async def test_put_through_over_member_disturbs_too(self, directory: Directory) -> None:
        await put_clean(directory, SHARD, "s1", "o1")
        await put(directory, MARKER, "m1", make_intent(Role.MARKER))
        await directory.put_through(SHARD, make_version("s2"), "o2", make_intent(now_s=5000.0))
        assert (await pending_of(directory, MARKER)).disturbed_s == 5000.0

    async def test_put_over_adopted_member_disturbs_any_marker(self, directory: Directory) -> None:
        await put(directory, MARKER, "m1", make_intent(Role.MARKER))
        await directory.adopt(SHARD, make_version("s1"), "o1", Role.SMALL, 1.0)
        await put(directory, SHARD, "s2", make_intent(now_s=5000.0))
        assert (await pending_of(directory, MARKER)).disturbed_s == 5000.0

    async def test_put_new_member_disturbs_nobody(self, directory: Directory) -> None:
        await put(directory, MARKER, "m1", make_intent(Role.MARKER))
        await put(directory, SHARD, "s1", make_intent(now_s=5000.0))
        assert (await pending_of(directory, MARKER)).disturbed_s == 0.0

    async def test_put_over_member_later_than_marker_disturbs_nobody(self, directory: Directory) -> None:
        await put(directory, MARKER, "m1", make_intent(Role.MARKER))
        await put(directory, SHARD, "s1")
        await put(directory, SHARD, "s2", make_intent(now_s=5000.0))
        assert (await pending_of(directory, MARKER)).disturbed_s == 0.0

    async def test_delete_of_member_disturbs_its_own_set_only(self, directory: Directory) -> None:
        await put(directory, SHARD, "s1")
        for name in (MARKER, RUN_MARKER):
            await put(directory, name, name.key, make_intent(Role.MARKER))
        await directory.delete(SHARD, make_intent(now_s=5000.0))
        assert (await pending_of(directory, MARKER)).disturbed_s == 5000.0
        assert (await pending_of(directory, RUN_MARKER)).disturbed_s == 0.0

    async def test_put_marker_anew_is_not_disturbed(self, directory: Directory) -> None:
        await put(directory, SHARD, "s1")
        await put(directory, MARKER, "m1", make_intent(Role.MARKER))
        await put(directory, SHARD, "s2", make_intent(now_s=5000.0))
        await put(directory, MARKER, "m2", make_intent(Role.MARKER))
        assert (await pending_of(directory, MARKER)).disturbed_s == 0.0

    async def test_put_marker_over_marker_disturbs_outer_scopes_only(self, directory: Directory) -> None:
        beside = object_name("run/step_1/model.index.json")
        await put(directory, MARKER, "m1", make_intent(Role.MARKER))
        for name in (beside, RUN_MARKER):
            await put(directory, name, name.key, make_intent(Role.MARKER))
        await put(directory, MARKER, "m2", make_intent(Role.MARKER, now_s=5000.0))
        assert (await pending_of(directory, beside)).disturbed_s == 0.0
        assert (await pending_of(directory, RUN_MARKER)).disturbed_s == 5000.0

    async def test_put_pointer_over_pointer_disturbs_nobody(self, directory: Directory) -> None:
        pointer = object_name("run/step_1/pointer.json")
        await put(directory, pointer, "p1", make_intent(Role.POINTER))
        await put(directory, RUN_MARKER, "m1", make_intent(Role.MARKER))
        await put(directory, pointer, "p2", make_intent(Role.POINTER, now_s=5000.0))
        assert (await pending_of(directory, RUN_MARKER)).disturbed_s == 0.0

    async def test_standing_markers_innermost_scope_wins(self, directory: Directory) -> None:
        scopes = ["run/step_1/", "run/", ""]
        assert await directory.standing_markers(BUCKET, scopes) == []
        await put_clean(directory, RUN_MARKER, "m0", "o0", Role.MARKER)
        await put_clean(directory, SHARD, "s1", "o1")
        found = await directory.standing_markers(BUCKET, scopes)
        assert [seen.record.name for seen in found if seen.record] == [RUN_MARKER]
        await put(directory, MARKER, "m1", make_intent(Role.MARKER))
        await put(directory, object_name("run/step_1/deeper/.metadata"), "m2", make_intent(Role.MARKER))
        await put(directory, MARKER, "m3", make_intent(Role.MARKER))
        found = await directory.standing_markers(BUCKET, scopes)
        assert found == [await directory.get(MARKER)]

    async def test_standing_markers_tombstone_counts(self, directory: Directory) -> None:
        await put_clean(directory, MARKER, "m1", "o1", Role.MARKER)
        await directory.delete(MARKER, make_intent(Role.MARKER))
        found = await directory.standing_markers(BUCKET, ["run/step_1/"])
        assert [seen.record.state for seen in found if seen.record] == [State.TOMBSTONE]
        await directory.persisted(MARKER, found[0].pending.uid if found[0].pending else "", "", 1.0)
        assert await directory.standing_markers(BUCKET, ["run/step_1/"]) == []

    async def test_standing_markers_long_scopes_are_apart(self, directory: Directory) -> None:
        scopes = [f"{'d' * 600}{tail}/" for tail in ("1", "2")]
        for scope in scopes:
            await put_clean(directory, object_name(f"{scope}.metadata"), scope[-2:], "o", Role.MARKER)
        for scope in scopes:
            found = await directory.standing_markers(BUCKET, [scope])
            assert [seen.record.name.key for seen in found if seen.record] == [f"{scope}.metadata"]

    async def test_withdraw_clean_marker_is_owed_again(self, directory: Directory) -> None:
        await put_clean(directory, MARKER, "m1", "o1", Role.MARKER)
        clean = await record_of(directory, MARKER)
        pending = await directory.withdraw(MARKER, "m1", 7000.0)
        seen = await directory.get(MARKER)
        assert pending is not None
        assert pending == seen.pending
        assert (pending.uid, pending.kind, pending.role, pending.base) == ("m1", Kind.PUT, Role.MARKER, "o1")
        assert (pending.disturbed_s, pending.withdrawn, pending.begun) == (7000.0, True, False)
        assert (pending.place, pending.revision) == (clean.revision, clean.revision)
        assert seen.record is not None
        assert (seen.record.state, seen.record.version) == (State.DIRTY, make_version("m1"))
        assert seen.guard > clean.modified

    async def test_withdraw_not_current_or_not_clean_does_nothing(self, directory: Directory) -> None:
        assert await directory.withdraw(MARKER, "m1", 1.0) is None
        await put_clean(directory, MARKER, "m1", "o1", Role.MARKER)
        assert await directory.withdraw(MARKER, "m0", 1.0) is None
        await put(directory, MARKER, "m2", make_intent(Role.MARKER))
        assert await directory.withdraw(MARKER, "m2", 1.0) is None

    async def test_withdrawn_stands_on_nothing(self, directory: Directory) -> None:
        await put_clean(directory, MARKER, "m1", "o1", Role.MARKER)
        await directory.withdraw(MARKER, "m1", 7000.0)
        await directory.withdrawn(MARKER, "m1")
        pending = await pending_of(directory, MARKER)
        assert (pending.base, pending.withdrawn) == (NO_BASE, True)
        await put(directory, MARKER, "m2", make_intent(Role.MARKER))
        pending = await pending_of(directory, MARKER)
        assert (pending.base, pending.withdrawn) == (NO_BASE, True)

    async def test_withdrawn_superseded_does_nothing(self, directory: Directory) -> None:
        await put_clean(directory, MARKER, "m1", "o1", Role.MARKER)
        await put(directory, MARKER, "m2", make_intent(Role.MARKER))
        await directory.withdrawn(MARKER, "m1")
        assert (await pending_of(directory, MARKER)).base == "o1"

    async def test_withdrawn_marker_put_back_is_the_same(self, directory: Directory) -> None:
        await put_clean(directory, MARKER, "m1", "o1", Role.MARKER)
        revision = (await record_of(directory, MARKER)).revision
        await directory.withdraw(MARKER, "m1", 7000.0)
        await directory.withdrawn(MARKER, "m1")
        assert await directory.persisted(MARKER, "m1", "o2", 8000.0) == make_version("m1")
        record = await record_of(directory, MARKER)
        assert (record.state, record.origin_etag, record.revision) == (State.CLEAN, "o2", revision)

    # -- multipart uploads of clients
    async def test_create_upload_can_be_read_back(self, directory: Directory) -> None:
        upload = make_upload("up1")
        await directory.create_upload(upload)
        assert await directory.get_upload("up1") == upload
        assert await directory.list_parts("up1") == []

    @pytest.mark.parametrize("upload_id", ["", "nothing", "x" * 5000, "é" * 300])
    async def test_upload_unknown_id_is_none(self, directory: Directory, upload_id: str) -> None:
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
        assert await directory.revision() == 0

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
        assert await directory.open_upload_ids() == {"u1", "u2", "u3", "u4", "u5", "u6", "u7"}

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

    async def test_finish_upload_is_one_transition(self, directory: Directory) -> None:
        await directory.create_upload(make_upload("up1"))
        await directory.put_part("up1", make_part(1, "p1"))
        committed = await directory.finish_upload("up1", make_version("v1"), [(1, "etag-p1")], make_intent(now_s=90.0))
        assert committed == Committed(1, None)
        assert (await pending_of(directory, SHARD)).uid == "v1"
        assert await directory.get_upload("up1") is None
        assert await directory.list_parts("up1") == []
        finished = await directory.finished_upload("up1")
        assert finished is not None
        assert (finished.name, finished.version_uid, finished.etag) == (SHARD, "v1", "etag-v1")
        assert (finished.parts, finished.finished_s) == (((1, "etag-p1"),), 90.0)

    async def test_finish_upload_guard_fails_keeps_the_upload(self, directory: Directory) -> None:
        await put(directory, SHARD, "v0")
        await directory.create_upload(make_upload("up1"))
        await directory.put_part("up1", make_part(1, "p1"))
        with pytest.raises(ConflictError):
            await directory.finish_upload("up1", make_version("v1"), [(1, "e")], make_intent(guard=0))
        assert await directory.list_parts("up1") == [make_part(1, "p1")]
        assert await directory.finished_upload("up1") is None
        assert (await pending_of(directory, SHARD)).uid == "v0"

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

    # -- buckets, holders, counts
    async def test_buckets_are_kept_and_forgotten(self, directory: Directory) -> None:
        bucket = Bucket(BUCKET, "eu-west-1", True, 12.0)
        assert await directory.get_bucket(BUCKET) is None
        await directory.put_bucket(bucket)
        assert await directory.get_bucket(BUCKET) == bucket
        await directory.forget_bucket(BUCKET)
        assert await directory.get_bucket(BUCKET) is None

    async def test_live_holders_are_versions_and_uploads(self, directory: Directory) -> None:
        await put_clean(directory, object_name("clean"), "v1", "o1")
        await put(directory, object_name("dirty"), "v2")
        await put(directory, object_name("dirty"), "v3")
        await directory.delete(object_name("gone"), make_intent())
        await directory.create_upload(make_upload("up1"))
        await put_clean(directory, MARKER, "m1", "o1", Role.MARKER)
        await directory.withdraw(MARKER, "m1", 1.0)
        assert await directory.live_holders() == {"v1", "v3", "up1", "m1"}

    async def test_counts_follow_every_change(self, directory: Directory) -> None:
        await put_clean(directory, object_name("clean"), "v1", "o1")
        await put(directory, object_name("dirty"), "v2", size_bytes=100)
        await put(directory, object_name("dirty"), "v3", size_bytes=40)
        await directory.delete(object_name("gone"), make_intent())
        await directory.create_upload(make_upload("up1"))
        counts = await directory.counts()
        expected = {"clean": 1, "dirty": 1, "tombstone": 1, "pending": 2, "pending_bytes": 40, "uploads": 1}
        assert {name: counts[name] for name in expected} == expected
