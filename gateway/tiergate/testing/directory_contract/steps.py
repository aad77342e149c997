"""Steps under way: which exclude each other."""

import asyncio
from dataclasses import replace

from tiergate.directory.base import Directory
from tiergate.model import ObjectName, Role, Step
from tiergate.testing.directory_contract.values import MARKER, RUN_MARKER, SHARD, object_name


def through(name: ObjectName, uid: str, role: Role = Role.SMALL, *, replaces: bool = True) -> Step:
    """A write-through of some worker."""
    return Step(name, uid, "worker", role, through=True, replaces=replaces)


def marker_put(name: ObjectName, uid: str, role: Role = Role.MARKER) -> Step:
    """A marker, or pointer, that write-back puts."""
    return Step(name, uid, "background", role, through=False, replaces=False)


class Steps:
    """Steps under way: which exclude each other."""

    async def test_begin_step_stands_until_it_ends(self, directory: Directory) -> None:
        step = through(SHARD, "t1")
        assert await directory.begin_step(step)
        assert await directory.steps() == [step]
        await directory.end_step(step)
        assert await directory.steps() == []
        await directory.end_step(step)

    async def test_begin_step_may_be_of_what_is_in_no_bucket(self, directory: Directory) -> None:
        first, second = (through(ObjectName("", f"{uid}/1"), uid, Role.POINTER, replaces=False) for uid in ("u1", "u2"))
        assert await directory.begin_step(first)
        assert await directory.begin_step(second)
        assert not await directory.begin_step(replace(first, uid="again"))
        await directory.end_step(first)
        assert await directory.steps() == [second]

    async def test_begin_step_again_is_what_it_says_now(self, directory: Directory) -> None:
        assert await directory.begin_step(through(SHARD, "t1"))
        assert not await directory.begin_step(marker_put(MARKER, "m1"))
        assert await directory.begin_step(through(SHARD, "t1", replaces=False))
        assert await directory.begin_step(marker_put(MARKER, "m1"))
        assert not await directory.begin_step(through(SHARD, "t1"))

    async def test_begin_step_marker_and_member_of_its_set_exclude_each_other(self, directory: Directory) -> None:
        for marker in (MARKER, RUN_MARKER):
            for first, second in (
                (through(SHARD, "t1"), marker_put(marker, "m1")),
                (marker_put(marker, "m1"), through(SHARD, "t1")),
                (through(marker, "m1", Role.MARKER), through(SHARD, "t1")),
            ):
                assert await directory.begin_step(first)
                assert not await directory.begin_step(second)
                await directory.end_step(first)
                assert await directory.begin_step(second)
                await directory.end_step(second)

    async def test_begin_step_of_write_back_exclude_each_other_too(self, directory: Directory) -> None:
        member = Step(SHARD, "m", "other", Role.LARGE, through=False, replaces=True)
        for marker in (MARKER, RUN_MARKER):
            for first, second in ((member, marker_put(marker, "m1")), (marker_put(marker, "m1"), member)):
                assert await directory.begin_step(first)
                assert not await directory.begin_step(second)
                assert not await directory.begin_step(replace(second, holder=first.holder))
                await directory.end_step(first)
                assert await directory.begin_step(second)
                await directory.end_step(second)

    async def test_begin_step_of_one_key_exclude_each_other(self, directory: Directory) -> None:
        assert await directory.begin_step(through(SHARD, "t1", replaces=False))
        assert not await directory.begin_step(through(SHARD, "t2", replaces=False))

    async def test_begin_step_those_of_no_common_set_go_together(self, directory: Directory) -> None:
        steps = [
            marker_put(MARKER, "m1"),
            marker_put(RUN_MARKER, "m2"),
            through(object_name("other/__0_0.distcp"), "t1", replaces=False),
            through(ObjectName("elsewhere", SHARD.key), "t2"),
            through(object_name(f"{MARKER.key}.tmp"), "t3", Role.POINTER),
            through(object_name(f"{SHARD.key}.2"), "t4", replaces=False),
        ]
        for step in steps:
            assert await directory.begin_step(step), step
        assert {step.uid for step in await directory.steps()} == {step.uid for step in steps}

    async def test_begin_step_at_once_only_one_is_granted(self, directory: Directory) -> None:
        rivals = [marker_put(MARKER, "m1"), *(through(SHARD, f"t{n}") for n in range(5))]
        granted = await asyncio.gather(*(directory.begin_step(step) for step in rivals))
        assert granted.count(True) == 1
        assert [step.uid for step in await directory.steps()] == [rivals[granted.index(True)].uid]
