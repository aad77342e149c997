"""What is decided for sets: which of them stay in memory."""

from dataclasses import replace

import pytest

from tiergate.config import Persist
from tiergate.directory.base import Directory
from tiergate.errors import NotParkableError, PlanOverError
from tiergate.model import NO_BASE, ObjectName, Plan, Role, Run, Stage
from tiergate.policy.persistence import Beginning, Wish
from tiergate.testing.directory_contract.values import (
    BUCKET,
    MARKER,
    SHARD,
    make_intent,
    object_name,
    pending_of,
    put,
    put_clean,
    record_of,
)

RUN = "run/"
STEP = "run/step_1/"
POINTER = ObjectName(BUCKET, "run/latest")


def beginning(
    prefix: str = STEP,
    *,
    persist: Persist | None = None,
    now_s: float = 100.0,
    may_park: bool = True,
    wish: Wish | None = None,
    instead_of: int = 0,
) -> Beginning:
    """Of a set that stays in memory, unless said otherwise."""
    return Beginning(BUCKET, prefix, RUN, persist or Persist(0), now_s, may_park, wish, instead_of)


async def put_planned(directory: Directory, name: ObjectName, uid: str, plan: Plan, role: Role = Role.SMALL) -> bool:
    """A write under a plan; whether it is parked."""
    committed = await put(directory, name, uid, make_intent(role, base=NO_BASE, plan=plan))
    assert committed.parked is (await pending_of(directory, name)).parked
    return committed.parked


async def plan_of(directory: Directory, prefix: str = STEP) -> Plan:
    """The plan of a set that must have one."""
    plan = await directory.get_plan(BUCKET, prefix)
    assert plan is not None
    return plan


class Plans:
    """One plan for a set, whoever writes its first object."""

    async def test_plan_is_decided_once(self, directory: Directory) -> None:
        assert await directory.get_plan(BUCKET, STEP) is None
        assert await directory.get_run(BUCKET, RUN) is None
        plan = await directory.decide(beginning())
        assert (plan.prefix, plan.run, plan.stage, plan.ordinal, plan.decided_s) == (STEP, RUN, Stage.KEPT, 1, 100.0)
        assert plan.revision == await directory.revision()
        assert await directory.decide(beginning(wish=Wish.S3, now_s=200.0)) == plan
        assert await directory.get_plan(BUCKET, STEP) == plan
        assert await directory.get_run(BUCKET, RUN) == Run(BUCKET, RUN, 1)

    async def test_run_counts_its_sets(self, directory: Directory) -> None:
        every = Persist(every_count=3)
        stages = [
            (await directory.decide(beginning(f"run/{step}/", persist=every, now_s=float(step)))).stage
            for step in range(7)
        ]
        sent, kept = Stage.SENT, Stage.KEPT
        assert stages == [sent, kept, kept, sent, kept, kept, sent]
        assert await directory.get_run(BUCKET, RUN) == Run(BUCKET, RUN, 7, 7, 6.0)
        assert [plan.ordinal for plan in await directory.plans(BUCKET, "run/")] == [1, 2, 3, 4, 5, 6, 7]

    async def test_plans_by_prefix(self, directory: Directory) -> None:
        long = "run/" + "x" * 600
        for prefix in ("run/b/", "run/a/", f"{long}2/", f"{long}1/", "other/"):
            await directory.decide(beginning(prefix))
        found = [plan.prefix for plan in await directory.plans(BUCKET, RUN)]
        assert found == ["run/a/", "run/b/", f"{long}1/", f"{long}2/"]
        assert [plan.prefix for plan in await directory.plans(BUCKET, long)] == found[2:]
        assert await directory.plans("elsewhere", "") == []

    async def test_set_that_the_origin_knows_is_not_kept(self, directory: Directory) -> None:
        plan = await directory.decide(beginning(may_park=False, wish=Wish.MEMORY))
        assert plan.stage is Stage.SENT
        assert await directory.get_run(BUCKET, RUN) == Run(BUCKET, RUN, 1, 1, 100.0)

    async def test_writes_follow_their_plan(self, directory: Directory) -> None:
        kept = await directory.decide(beginning())
        assert await put_planned(directory, SHARD, "v1", kept)
        assert await put_planned(directory, MARKER, "m1", kept, Role.MARKER)
        sent = await directory.decide(beginning("run/step_2/", wish=Wish.S3))
        assert not await put_planned(directory, object_name("run/step_2/a"), "v2", sent)

    async def test_writes_follow_their_plan_as_it_is_now(self, directory: Directory) -> None:
        """What the writer saw of the plan may be old."""
        plan = await directory.decide(beginning())
        promoting = replace(plan, stage=Stage.PROMOTING)
        assert await directory.change_plan(plan, promoting)
        assert not await put_planned(directory, SHARD, "v1", plan)
        assert await put_planned(directory, MARKER, "m1", plan, Role.MARKER)
        assert await directory.change_plan(promoting, replace(plan, stage=Stage.SENT))
        assert not await put_planned(directory, MARKER, "m2", plan, Role.MARKER)

    async def test_change_of_a_plan_that_changed_does_nothing(self, directory: Directory) -> None:
        plan = await directory.decide(beginning())
        sent = replace(plan, stage=Stage.SENT)
        assert await directory.change_plan(plan, sent)
        assert not await directory.change_plan(plan, replace(plan, stage=Stage.PARKING))
        assert not await directory.change_plan(plan, None)
        assert await directory.drop_plan(plan) is None
        assert await directory.get_plan(BUCKET, STEP) == sent
        assert await directory.change_plan(sent, None)
        assert await directory.get_plan(BUCKET, STEP) is None

    async def test_dropped_plan_takes_no_writes(self, directory: Directory) -> None:
        plan = await directory.decide(beginning())
        await put_planned(directory, SHARD, "v1", plan)
        dropped = await directory.drop_plan(plan)
        assert dropped is not None
        assert dropped == await directory.get_plan(BUCKET, STEP)
        assert (await record_of(directory, SHARD)).revision < dropped.dropped
        with pytest.raises(PlanOverError):
            await put_planned(directory, SHARD, "v2", plan)
        again = await directory.decide(beginning())
        assert (again.stage, again.dropped, again.ordinal) == (Stage.KEPT, 0, 2)
        assert await put_planned(directory, SHARD, "v2", again)
        assert (await record_of(directory, SHARD)).revision > dropped.dropped

    async def test_forgotten_plan_takes_no_writes(self, directory: Directory) -> None:
        plan = await directory.decide(beginning())
        assert await directory.change_plan(plan, None)
        with pytest.raises(PlanOverError):
            await put_planned(directory, SHARD, "v1", plan)
        assert (await directory.get(SHARD)).record is None

    async def test_overwriting_a_marked_set_begins_another(self, directory: Directory) -> None:
        plan = await directory.decide(beginning())
        other = object_name(STEP + "other")
        await put_planned(directory, SHARD, "v1", plan)
        await put_planned(directory, SHARD, "v2", plan)  # Tried again: no marker says that it was whole.
        await put_planned(directory, MARKER, "m1", plan, Role.MARKER)
        await put_planned(directory, MARKER, "m2", plan, Role.MARKER)
        await put_planned(directory, other, "o1", plan)  # Some write more after the first marker.
        before = await directory.get(SHARD)
        with pytest.raises(PlanOverError):
            await put_planned(directory, SHARD, "v3", plan)
        assert await directory.get(SHARD) == before
        again = await directory.decide(beginning(instead_of=plan.revision))
        assert (again.stage, again.ordinal) == (Stage.KEPT, 2)
        for name in (SHARD, other):
            assert await put_planned(directory, name, "v4", again)
        assert await put_planned(directory, MARKER, "m3", again, Role.MARKER)
        assert await directory.decide(beginning(instead_of=plan.revision)) == again

    async def test_overwriting_another_ranks_shard_of_a_marked_set_begins_another(self, directory: Directory) -> None:
        prefix = "run/rank_0/step_1/"
        plan = await directory.decide(beginning(prefix))
        shard, marker = object_name("run/rank_1/step_1/checkpoint.pt"), object_name(prefix + "metadata.metadata")
        await put_planned(directory, shard, "v1", plan)
        await put_planned(directory, marker, "m1", plan, Role.MARKER)
        with pytest.raises(PlanOverError):
            await put_planned(directory, shard, "v2", plan)

    async def test_set_that_is_sent_takes_what_was_kept_along(self, directory: Directory) -> None:
        plan = await directory.decide(beginning())
        await put_planned(directory, SHARD, "v1", plan)
        await put_planned(directory, MARKER, "m1", plan, Role.MARKER)
        again = await directory.decide(beginning(wish=Wish.S3, instead_of=plan.revision))
        assert again.stage is Stage.PROMOTING
        assert not await put_planned(directory, SHARD, "v2", again)
        assert await put_planned(directory, MARKER, "m2", again, Role.MARKER)

    async def test_plan_cannot_park_what_stands_on_something(self, directory: Directory) -> None:
        await put_clean(directory, SHARD, "v0", "o0")
        plan = await directory.decide(beginning())
        with pytest.raises(NotParkableError):
            await put_planned(directory, SHARD, "v1", plan)

    @pytest.mark.parametrize("becomes", ["kept", "promoting", "sent", "dropped", "forgotten"])
    async def test_pointer_follows_what_it_names(self, directory: Directory, becomes: str) -> None:
        plan = await directory.decide(beginning())
        if becomes == "promoting":
            assert await directory.change_plan(plan, replace(plan, stage=Stage.PROMOTING))
        if becomes == "sent":
            assert await directory.change_plan(plan, replace(plan, stage=Stage.SENT))
        if becomes == "dropped":
            assert await directory.drop_plan(plan) is not None
        if becomes == "forgotten":
            assert await directory.change_plan(plan, None)
        intent = make_intent(Role.POINTER, points_to=("run/step_0/", STEP))
        committed = await put(directory, POINTER, "p1", intent)
        write = await pending_of(directory, POINTER)
        assert committed.parked is write.parked is (becomes in ("kept", "promoting", "dropped"))
        assert write.points_to == ("run/step_0/", STEP)

    async def test_pointer_is_promoted_with_what_it_names_only(self, directory: Directory) -> None:
        plan = await directory.decide(beginning())
        await put(directory, POINTER, "p1", make_intent(Role.POINTER, points_to=("run/step_0/", STEP)))
        assert await directory.promote(await directory.parked(), 5.0) == 0
        promoting = replace(plan, stage=Stage.PROMOTING)
        assert await directory.change_plan(plan, promoting)
        assert await directory.promote(await directory.parked(), 5.0) == 0
        assert (await pending_of(directory, POINTER)).parked
        assert await directory.change_plan(promoting, replace(plan, stage=Stage.SENT))
        assert await directory.promote(await directory.parked(), 5.0) == 1
