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
        while not done():
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


def come_back(world: World, node: SimNode) -> None:
    """As a member anew, before anything that stood still there goes on."""
    node.thawed.set()
    node.renew(world.clock.monotonic_s())


@pytest.mark.parametrize("is_member", [False, True], ids=["no member", "member anew"])
def test_step_that_was_decided_under_a_membership_that_is_over_is_not_done(is_member: bool) -> None:
    async def history(world: World, one: SimNode, other: SimNode) -> None:
        await put(world, one)
        assert one.process is not None
        await one.process.delete(KEY, 0)
        await until(lambda: any(step.name == NAME for step in world.state.tables.steps.values()))
        one.thawed.clear()  # Before it hears that the step is granted.
        await until(lambda: NAME not in world.state.tables.pending)
        await put(world, other)
        assert NAME in world.objects
        if is_member:
            come_back(world, one)
            assert one.stands()
        else:
            one.is_cut = True
            one.thawed.set()
        await asyncio.sleep(1.0)
        assert NAME in world.objects, "a deletion of before took what was acknowledged since"

    play(history)


@pytest.mark.parametrize("is_superseded", [False, True], ids=["taken over", "superseded"])
def test_what_a_dead_node_sent_is_waited_for(is_superseded: bool) -> None:
    async def history(world: World, one: SimNode, other: SimNode) -> None:
        await put(world, one)
        sent: list[str] = []

        def takes_s(node: str, operation: str, name: ObjectName) -> float | None:
            if node != one.name or operation != "delete":
                return None
            sent.append(operation)
            return REQUEST_S

        world.takes_s = takes_s
        assert one.process is not None
        await one.process.delete(KEY, 0)
        await until(lambda: bool(sent))
        lose(world, one)
        if not is_superseded:
            await until(lambda: NAME not in world.state.tables.pending)
        await put(world, other)
        await asyncio.sleep(REQUEST_S)
        assert NAME in world.objects, "a request of the dead took what was acknowledged since"

    play(history)


def test_what_a_living_node_sent_of_a_superseded_write_is_waited_for() -> None:
    async def history(world: World, one: SimNode, other: SimNode) -> None:
        sent: list[str] = []

        def takes_s(node: str, operation: str, name: ObjectName) -> float | None:
            if node != one.name or operation != "put":
                return None
            sent.append(operation)
            return REQUEST_S - 1.0

        world.takes_s = takes_s
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
        sent: list[str] = []

        def takes_s(node: str, operation: str, name: ObjectName) -> float | None:
            if name != MARKER or operation != "put":
                return None
            sent.append(operation)
            return REQUEST_S - 1.0

        world.takes_s = takes_s
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


def test_settling_takes_longer_than_any_request() -> None:
    assert SETTLE_S > REQUEST_S
