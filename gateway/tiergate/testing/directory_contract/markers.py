"""Markers: disturbed, standing, withdrawn."""

from dataclasses import replace

from tiergate.directory.base import Directory
from tiergate.model import (
    NO_BASE,
    Kind,
    Role,
    State,
)
from tiergate.testing.directory_contract.values import (
    BUCKET,
    MARKER,
    RUN_MARKER,
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


class Markers:
    """Markers: disturbed, standing, withdrawn."""

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

    async def test_clean_member_is_owed_again_in_its_own_place(self, directory: Directory) -> None:
        await put_clean(directory, SHARD, "s1", "o1", Role.LARGE)
        clean = await record_of(directory, SHARD)
        await put(directory, MARKER, "m1", make_intent(Role.MARKER))
        pending = await directory.owe_again(SHARD, "s1", "o9", 7000.0)
        seen = await directory.get(SHARD)
        assert pending is not None
        assert pending == seen.pending
        assert (pending.uid, pending.kind, pending.role, pending.base) == ("s1", Kind.PUT, Role.LARGE, "o9")
        assert (pending.disturbed_s, pending.withdrawn, pending.begun) == (0.0, False, False)
        assert (pending.place, pending.revision, pending.committed_s) == (clean.revision, clean.revision, 7000.0)
        assert seen.record is not None
        assert (seen.record.state, seen.record.version) == (State.DIRTY, make_version("s1"))
        assert seen.guard > clean.modified
        assert [write.uid for write in await directory.pending()] == ["s1", "m1"]
        assert (await pending_of(directory, MARKER)).disturbed_s == 0.0
        assert await directory.persisted(SHARD, "s1", "o2", 8000.0) == make_version("s1")
        record = await record_of(directory, SHARD)
        assert (record.state, record.origin_etag, record.revision) == (State.CLEAN, "o2", clean.revision)

    async def test_several_owed_again_at_once_are_all_owed(self, directory: Directory) -> None:
        names = [object_name(key) for key in "abc"]
        for name in names:
            await directory.adopt(name, make_version(f"v-{name.key}"), "o", Role.SMALL, 1.0)
        for name in names:
            assert await directory.owe_again(name, f"v-{name.key}", "o", 5.0) is not None
        for left in ("abc", "bc", "c"):
            assert sorted(keys_of(await directory.pending())) == list(left)
            assert await directory.oldest_pending_s() == 5.0
            assert await directory.persisted(object_name(left[0]), f"v-{left[0]}", "o2", 9.0) is not None
        assert await directory.oldest_pending_s() is None

    async def test_owed_again_not_current_or_not_clean_does_nothing(self, directory: Directory) -> None:
        assert await directory.owe_again(SHARD, "s1", NO_BASE, 1.0) is None
        await put_clean(directory, SHARD, "s1", "o1")
        assert await directory.owe_again(SHARD, "s0", NO_BASE, 1.0) is None
        assert await directory.owe_again(SHARD, "s1", NO_BASE, 1.0) is not None
        assert await directory.owe_again(SHARD, "s1", "o1", 2.0) is None
        assert (await pending_of(directory, SHARD)).base == NO_BASE
        await directory.delete(SHARD, make_intent())
        assert await directory.owe_again(SHARD, "s1", NO_BASE, 1.0) is None

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

    async def test_settled_set_is_undisturbed_and_else_the_same(self, directory: Directory) -> None:
        await put_clean(directory, MARKER, "m1", "o1", Role.MARKER)
        await directory.withdraw(MARKER, "m1", 7000.0)
        before = await pending_of(directory, MARKER)
        await directory.settled_set(MARKER, "m0")
        assert await pending_of(directory, MARKER) == before
        await directory.settled_set(MARKER, "m1")
        assert await pending_of(directory, MARKER) == replace(before, disturbed_s=0.0)
