"""What stays in memory by policy, owed to nobody."""

from dataclasses import replace

import pytest

from tiergate.config import Persist
from tiergate.directory.base import Directory
from tiergate.errors import FencedError, NotParkableError
from tiergate.model import NO_BASE, UNKNOWN_BASE, Kind, ObjectName, OriginUpload, Pending, Plan, Role, Stage, State
from tiergate.policy.persistence import Beginning
from tiergate.testing.directory_contract.values import (
    BUCKET,
    MARKER,
    RUN_MARKER,
    SHARD,
    keys_of,
    make_completed,
    make_intent,
    make_part,
    make_upload,
    make_version,
    object_name,
    pending_of,
    put,
    put_clean,
    record_of,
)

POINTER = ObjectName(BUCKET, "run/latest")
STEP = "run/step_1/"


async def put_parked(
    directory: Directory,
    name: ObjectName,
    uid: str,
    role: Role = Role.SMALL,
    base: str = NO_BASE,
    now_s: float = 1000.0,
) -> None:
    """A version that stays in memory."""
    committed = await put(directory, name, uid, make_intent(role, base=base, parked=True, now_s=now_s))
    assert committed.parked


class ParkedWrites:
    """Writes that stay in memory: dirty for every reader, owed to nobody."""

    async def test_parked_write_is_dirty_and_owed_to_nobody(self, directory: Directory) -> None:
        await put_parked(directory, SHARD, "v1", Role.LARGE)
        write = await pending_of(directory, SHARD)
        assert (write.parked, write.kind, write.base) == (True, Kind.PUT, NO_BASE)
        assert (await record_of(directory, SHARD)).state is State.DIRTY
        assert await directory.pending() == []
        assert await directory.parked() == [write]
        assert await directory.oldest_pending_s() is None
        assert await directory.pending_under(BUCKET, STEP, 9) == [write]
        assert keys_of(await directory.scan_unpersisted(BUCKET, "run/", "", 9)) == [SHARD.key]

    async def test_parked_writes_are_counted_apart(self, directory: Directory) -> None:
        await put(directory, object_name("owed"), "o1", size_bytes=7)
        await put(directory, SHARD, "v1", make_intent(base=NO_BASE, parked=True), size_bytes=30)
        await put(directory, SHARD, "v2", make_intent(base=NO_BASE, parked=True), size_bytes=20)
        expected = {"pending": 1, "pending_bytes": 7, "parked": 1, "parked_bytes": 20, "dirty": 2}
        counts = await directory.counts()
        assert {name: counts[name] for name in expected} == expected
        assert await directory.owed_bytes() == 7
        await directory.promote(await directory.parked(), 5.0)
        counts = await directory.counts()
        assert await directory.owed_bytes() == 27
        expected = {"pending": 2, "pending_bytes": 27, "parked": 0, "parked_bytes": 0, "dirty": 2}
        assert {name: counts[name] for name in expected} == expected

    async def test_parked_write_holds_nothing_back(self, directory: Directory) -> None:
        await put_parked(directory, SHARD, "v1", Role.LARGE)
        await put(directory, RUN_MARKER, "m1", make_intent(Role.MARKER))
        await put(directory, object_name("run/small"), "s1", make_intent(start_revision=await directory.revision()))
        writes = [await pending_of(directory, name) for name in (RUN_MARKER, object_name("run/small"))]
        for whole in ((), (BUCKET,)):
            assert SHARD not in {write.name for write in await directory.beside(writes, whole)}
        await directory.promote(await directory.parked(), 5.0)
        for whole in ((), (BUCKET,)):
            assert SHARD in {write.name for write in await directory.beside(writes, whole)}

    async def test_parked_write_cannot_be_worked_on(self, directory: Directory) -> None:
        await put_parked(directory, SHARD, "v1")
        before = await directory.get(SHARD)
        with pytest.raises(FencedError):
            await directory.begin(SHARD, "v1", NO_BASE)
        with pytest.raises(FencedError):
            await directory.rebase(SHARD, "v1", "o1")
        with pytest.raises(FencedError):
            await directory.note_upload(SHARD, "v1", OriginUpload("", 1.0))
        assert await directory.get(SHARD) == before

    async def test_parked_upload_completes_to_a_parked_write(self, directory: Directory) -> None:
        await directory.create_upload(make_upload("up1"))
        await directory.put_part("up1", make_part(1, "p1"))
        version = make_completed("v1", make_part(1, "p1"))
        committed = await directory.finish_upload(
            "up1", version, [(1, "etag-p1")], make_intent(base=NO_BASE, parked=True)
        )
        assert committed.parked
        assert keys_of(await directory.parked()) == [SHARD.key]

    async def test_parked_delete_leaves_nothing(self, directory: Directory) -> None:
        await put_parked(directory, SHARD, "v1")
        deleted = await directory.delete(SHARD, make_intent())
        assert deleted is not None
        assert deleted.replaced == make_version("v1")
        seen = await directory.get(SHARD)
        assert (seen.record, seen.pending) == (None, None)
        assert await directory.parked() == []
        assert (await directory.counts())["parked_bytes"] == 0

    async def test_parked_write_over_a_parked_one(self, directory: Directory) -> None:
        await put_parked(directory, SHARD, "v1")
        await put_parked(directory, SHARD, "v2", base=UNKNOWN_BASE)
        write = await pending_of(directory, SHARD)
        assert (write.uid, write.parked, write.base) == ("v2", True, NO_BASE)
        assert await directory.parked() == [write]

    async def test_owed_write_over_a_parked_one_is_owed(self, directory: Directory) -> None:
        await put_parked(directory, SHARD, "v1")
        await put(directory, SHARD, "v2")
        write = await pending_of(directory, SHARD)
        assert (write.parked, write.base) == (False, NO_BASE)
        assert await directory.pending() == [write]
        assert await directory.parked() == []

    @pytest.mark.parametrize("stands", ["clean", "owed", "deleted", "unknown"])
    async def test_parked_write_stands_on_nothing_in_the_origin(self, directory: Directory, stands: str) -> None:
        base = UNKNOWN_BASE if stands == "unknown" else NO_BASE
        if stands in ("clean", "deleted"):
            await put_clean(directory, SHARD, "v1", "o1")
        if stands == "owed":
            await put(directory, SHARD, "v1", make_intent(base=NO_BASE))
        if stands == "deleted":
            await directory.delete(SHARD, make_intent())
        before = await directory.get(SHARD)
        for role in (Role.SMALL, Role.LARGE, Role.MARKER):
            with pytest.raises(NotParkableError):
                await put(directory, SHARD, "v2", make_intent(role, base=base, parked=True))
        assert await directory.get(SHARD) == before

    async def test_parked_pointer_may_stand_on_an_older_one(self, directory: Directory) -> None:
        await put_clean(directory, POINTER, "v1", "o1", Role.POINTER)
        await put_parked(directory, POINTER, "v2", Role.POINTER)
        assert (await pending_of(directory, POINTER)).base == "o1"
        await directory.delete(POINTER, make_intent(Role.POINTER))
        assert [(write.kind, write.base) for write in await directory.pending()] == [(Kind.DELETE, "o1")]

    async def test_parked_pointer_over_one_on_its_way(self, directory: Directory) -> None:
        await put(directory, POINTER, "v1", make_intent(Role.POINTER, base=NO_BASE))
        await directory.begin(POINTER, "v1", NO_BASE)
        await put_parked(directory, POINTER, "v2", Role.POINTER)
        assert (await pending_of(directory, POINTER)).base == UNKNOWN_BASE
        assert await directory.persisted(POINTER, "v1", "o1", 60.0) is None
        write = await pending_of(directory, POINTER)
        assert (write.uid, write.parked, write.base) == ("v2", True, "o1")

    async def test_parked_members_disturb_only_parked_markers(self, directory: Directory) -> None:
        await put_parked(directory, SHARD, "v1")
        await put_parked(directory, MARKER, "m1", Role.MARKER)
        await put(directory, RUN_MARKER, "r1", make_intent(Role.MARKER))
        await put_parked(directory, SHARD, "v2", now_s=2000.0)
        assert (await pending_of(directory, MARKER)).disturbed_s == 2000.0
        await directory.delete(MARKER, make_intent(Role.MARKER))
        await directory.delete(SHARD, make_intent())
        assert (await pending_of(directory, RUN_MARKER)).disturbed_s == 0.0

    async def test_promote_owes_from_now_on_by_own_commit(self, directory: Directory) -> None:
        await put_parked(directory, SHARD, "v1", now_s=10.0)
        await put(directory, object_name("other"), "x1", make_intent(now_s=700.0))
        await put_parked(directory, SHARD, "v2", now_s=20.0)
        revision = (await record_of(directory, SHARD)).revision
        parked, owed = await directory.parked(), await directory.pending()
        superseded = [replace(write, uid="v1") for write in parked]
        assert await directory.promote([*superseded, *owed, *parked], 800.0) == 1
        write = await pending_of(directory, SHARD)
        assert (write.parked, write.place, write.revision) == (False, revision, revision)
        assert write.committed_s == 800.0
        assert [each.uid for each in await directory.pending()] == ["x1", "v2"]
        assert await directory.oldest_pending_s() == 700.0
        assert await directory.promote(parked, 900.0) == 0
        assert (await directory.begin(SHARD, "v2", NO_BASE)).begun

    async def test_promote_puts_pointers_behind_everything(self, directory: Directory) -> None:
        await put_parked(directory, POINTER, "p1", Role.POINTER)
        await put(directory, SHARD, "v1")
        await directory.promote(await directory.parked(), 800.0)
        write, record = await pending_of(directory, POINTER), await record_of(directory, POINTER)
        assert write.place == write.revision == record.revision > (await pending_of(directory, SHARD)).place

    async def test_promote_takes_any_number(self, directory: Directory) -> None:
        names = [object_name(f"run/step_1/{number:03}") for number in range(50)]
        for name in names:
            await put_parked(directory, name, name.key, Role.LARGE)
        assert await directory.promote(await directory.parked(), 5.0) == 50
        assert await directory.parked() == []
        assert len(await directory.pending()) == 50

    async def test_park_what_has_not_begun(self, directory: Directory) -> None:
        await put(directory, SHARD, "v1", make_intent(Role.LARGE))
        plan = await parking(directory)
        assert not await directory.park(SHARD, "v0", plan)
        assert not await directory.park(MARKER, "v1", plan)
        assert not await directory.park(SHARD, "v1", replace(plan, stage=Stage.SENT))
        assert await directory.park(SHARD, "v1", plan)
        assert await directory.park(SHARD, "v1", plan)
        write = await pending_of(directory, SHARD)
        assert (write.parked, write.base) == (True, NO_BASE)
        assert await directory.pending() == []
        assert await directory.oldest_pending_s() is None

    @pytest.mark.parametrize("reason", ["begun", "stands", "aside", "leftovers", "withdrawn", "deletion"])
    async def test_park_nothing_that_concerns_the_origin(self, directory: Directory, reason: str) -> None:
        name, uid = SHARD, "v2"
        if reason in ("stands", "deletion"):
            await put_clean(directory, name, "v1", "o1")
        if reason == "leftovers":
            await put(directory, name, "v1")
            await directory.note_upload(name, "v1", OriginUpload("u1", 1.0))
        if reason == "withdrawn":
            name, uid = MARKER, "v2"
            await put_clean(directory, name, uid, "o1", Role.MARKER)
            await directory.withdraw(name, uid, 1.0)
            await directory.withdrawn(name, uid)
        elif reason == "deletion":
            await directory.delete(name, make_intent())
            uid = (await pending_of(directory, name)).uid
        else:
            await put(directory, name, uid)
        if reason == "begun":
            await directory.begin(name, uid, NO_BASE)
        if reason == "aside":
            await directory.quarantine(name, uid, "refused")
        plan, before = await parking(directory), await directory.get(name)
        assert not await directory.park(name, uid, plan)
        assert await directory.get(name) == before
        assert await directory.parked() == []

    async def test_parked_write_set_aside_stays_parked(self, directory: Directory) -> None:
        await put_parked(directory, SHARD, "v1")
        await directory.quarantine(SHARD, "v1", "lost")
        assert [write.quarantined for write in await directory.parked()] == ["lost"]
        assert await directory.pending() == []
        await directory.quarantine(SHARD, "v1", "")
        assert (await pending_of(directory, SHARD)).parked

    async def test_parked_bytes_must_be_kept(self, directory: Directory) -> None:
        owner = (await put_owner(directory)).owner
        holders = (owner,) if owner else ()
        await put(directory, SHARD, "v1", make_intent(base=NO_BASE, parked=True, holders=holders))
        assert "v1" in await directory.live_holders()
        assert "v1" in await directory.owed_holders()


async def parking(directory: Directory) -> Plan:
    """The plan of a set that is being taken back into memory."""
    plan = await directory.decide(Beginning(BUCKET, STEP, "run/", Persist(), 1.0, may_park=False))
    parking = replace(plan, stage=Stage.PARKING)
    assert await directory.change_plan(plan, parking)
    return parking


async def put_owner(directory: Directory) -> Pending:
    """A write of its own, to see who owns it."""
    await put(directory, object_name("own"), "own")
    return await pending_of(directory, object_name("own"))
