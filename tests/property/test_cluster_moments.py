"""Histories of the simulated cluster that chance makes too rarely: what is under way, or decided, just when its node
is gone or another writes the same key."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from tests.property.cluster_world import BUCKET, REQUEST_S, SETTLE_S, SimNode, World

from tiergate.errors import FencedError
from tiergate.model import Kind, ObjectName, Pending, Role
from tiergate.testing.virtualtime import run_virtually

KEY = "run/1/a"
NAME = ObjectName(BUCKET, KEY)
MARKER = ObjectName(BUCKET, "run/1/.metadata")
LIMIT_S = 200.0


def play(history: Callable[[World, SimNode, SimNode], Coroutine[Any, Any, None]]) -> None:
    """A history of three nodes, and its end."""

    async def whole() -> None:
        world = World(0, 3)
        world.is_calm = True
        try:
            members = asyncio.create_task(world.keep_members())
            for node in world.nodes.values():
                node.join()
                node.start()
            await asyncio.sleep(0.5)
            await history(world, world.nodes["n0"], world.nodes["n1"])
            await world.settle()
            world.check_end()
            members.cancel()
        finally:
            await world.close()

    run_virtually(whole())


async def until(done: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not done():  # noqa: ASYNC110 - time is virtual, and what is looked at has no event.
            await asyncio.sleep(0.001)


async def put(world: World, node: SimNode, key: str = KEY) -> None:
    """A client puts there, and it comes to the origin."""
    assert node.process is not None
    await node.process.put(key, 0)
    await until(lambda: ObjectName(BUCKET, key) not in world.state.tables.pending)


def lose(world: World, node: SimNode) -> None:
    """It stands still, and others see that at once."""
    node.thawed.clear()
    del world.state.nodes[node.name]
    world.tell()


def in_flight(world: World, node: SimNode, operation: str, seconds: float) -> list[ObjectName]:
    """From now on such requests of a node to the origin are under way for so long; which it sent."""
    sent: list[ObjectName] = []

    def takes_s(name_of_node: str, asked: str, name: ObjectName) -> float | None:
        if (name_of_node, asked) != (node.name, operation):
            return None
        sent.append(name)
        return seconds

    world.takes_s = takes_s
    return sent


@pytest.mark.parametrize("is_member", [False, True], ids=["no member", "member anew"])
@pytest.mark.parametrize("answers_count", range(1, 13))
def test_step_that_was_decided_under_a_membership_that_is_over_is_not_done(answers_count: int, is_member: bool) -> None:
    async def history(world: World, one: SimNode, other: SimNode) -> None:
        await put(world, one)
        assert one.process is not None
        await one.process.delete(KEY, 0)
        one.arm(answers_count, one.thawed.clear)
        await until(lambda: NAME not in world.state.tables.pending)
        await put(world, other)
        assert NAME in world.objects
        one.armed = None
        one.thawed.set()
        if is_member:  # Before anything that stood still there goes on.
            one.renew(world.clock.monotonic_s())
        else:
            one.is_cut = True
        await asyncio.sleep(REQUEST_S)
        assert NAME in world.objects, "a deletion of before took what was acknowledged since"

    play(history)


def test_put_that_a_dead_node_sent_is_waited_for_before_it_is_taken_over() -> None:
    async def history(world: World, one: SimNode, other: SimNode) -> None:
        sent = in_flight(world, one, "put", REQUEST_S)
        assert one.process is not None
        assert other.process is not None
        await one.process.put(KEY, 0)
        await until(lambda: bool(sent))
        lose(world, one)
        await until(lambda: NAME not in world.state.tables.pending)
        await other.process.delete(KEY, 0)
        await until(lambda: NAME not in world.state.tables.pending)
        await asyncio.sleep(REQUEST_S)
        assert NAME not in world.objects, "a request of the dead came after the deletion"

    play(history)


def test_step_of_a_dead_node_stands_while_what_it_sent_is_under_way() -> None:
    async def history(world: World, one: SimNode, other: SimNode) -> None:
        await put(world, one)
        sent = in_flight(world, one, "delete", REQUEST_S)
        assert one.process is not None
        assert other.process is not None
        await one.process.delete(KEY, 0)
        await until(lambda: bool(sent))
        lose(world, one)
        await other.process.put(KEY, 0)
        await until(lambda: not any(one.name in step.holder for step in world.state.tables.steps.values()))
        assert not one.process.sent
        await until(lambda: NAME not in world.state.tables.pending)
        assert NAME in world.objects

    play(history)


def test_what_a_living_node_sent_of_a_superseded_write_is_waited_for() -> None:
    async def history(world: World, one: SimNode, other: SimNode) -> None:
        sent = in_flight(world, one, "put", REQUEST_S - 1.0)
        assert one.process is not None
        assert other.process is not None
        await one.process.put(KEY, 0)
        await until(lambda: bool(sent))
        # What is new to the origin announces no step of its own.
        assert not world.state.tables.steps
        await other.process.delete(KEY, 0)
        await until(lambda: NAME not in world.state.tables.pending)
        await asyncio.sleep(REQUEST_S)
        assert NAME not in world.objects, "a put came after the deletion that superseded it"

    play(history)


def test_request_replaces_no_member_while_another_node_puts_the_marker() -> None:
    async def history(world: World, one: SimNode, other: SimNode) -> None:
        await put(world, one)
        sent = in_flight(world, one, "put", REQUEST_S - 1.0)
        assert one.process is not None
        assert other.process is not None
        await one.process.put(MARKER.key, 0)
        await until(lambda: bool(sent))
        async with other.process.turn_of_requests.taken(NAME, Role.SMALL, world.state.tables.revision):
            assert not world.flying, "a marker goes in"
            assert MARKER not in world.objects

    play(history)


@pytest.mark.parametrize("kind", Kind)
def test_gate_lets_nothing_through_that_another_node_owns(kind: Kind) -> None:
    async def history(world: World, one: SimNode, other: SimNode) -> None:
        await put(world, one)
        world.is_origin_away = True
        assert one.process is not None
        assert other.process is not None
        write = one.process.put if kind is Kind.PUT else one.process.delete
        await write(KEY, 0)
        owed = world.state.tables.pending[NAME]
        assert owed.owner == one.holder
        with pytest.raises(FencedError):
            await go(other, owed)

    async def go(node: SimNode, write: Pending) -> None:
        assert node.process is not None
        async with node.process.slots, node.process.gate.visible(write):
            raise AssertionError("it went through")

    play(history)


@pytest.mark.parametrize("turns_count", range(5))
def test_work_that_is_told_to_end_just_as_it_is_woken_ends(turns_count: int) -> None:
    async def history(world: World, one: SimNode, other: SimNode) -> None:
        process = one.process
        assert process is not None
        for run, wake in (
            (process.uploader.run, process.uploader.wake),
            (process.survivors.run, process.survivors.wake),
        ):
            task = asyncio.create_task(run())
            await asyncio.sleep(3.0)
            wake()
            for _ in range(turns_count):
                await asyncio.sleep(0)
            task.cancel()
            async with asyncio.timeout(5.0):
                await asyncio.wait((task,))
            assert task.cancelled()

    play(history)


def test_settling_takes_longer_than_any_request() -> None:
    assert SETTLE_S > REQUEST_S
