"""How long what is held stays held: over a real directory, in time that goes by hand."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tiergate.directory.base import Intent
from tiergate.directory.embedded import EmbeddedDirectory
from tiergate.model import UNKNOWN_BASE, ObjectName, Pending, Role
from tiergate.testing.directory_contract import make_version
from tiergate.writeback.fence import FenceMode
from tiergate.writeback.holds import FOLDERS_COUNT, HoldBounds, Holds
from tiergate.writeback.renewal import held_by

HOLD_S = 10.0


class HandClock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def wall_s(self) -> float:
        return self.now_s

    def monotonic_s(self) -> float:
        return self.now_s

    async def sleep(self, seconds: float) -> None:
        raise AssertionError("nobody sleeps here")


class World:
    def __init__(self, directory: EmbeddedDirectory) -> None:
        self.directory = directory
        self.clock = HandClock()
        self.has_room = True
        self.mode = FenceMode.AUTO
        self.holds = self.new()
        self.count = 0

    def new(self, hold_s: float = HOLD_S) -> Holds:
        bounds = HoldBounds(hold_s, lambda: self.has_room)
        return Holds(self.directory, self.clock, lambda name: self.mode, bounds)

    async def put(self, key: str) -> Pending:
        self.count += 1
        name = ObjectName("bucket", key)
        role = Role.MARKER if key.endswith(".metadata") else Role.SMALL
        intent = Intent(role, 0, self.clock.now_s, UNKNOWN_BASE)
        await self.directory.put(name, make_version(f"u{self.count}"), intent)
        found = (await self.directory.get(name)).pending
        assert found is not None
        return found

    async def save(self, *keys: str) -> None:
        """Written, and brought to the origin."""
        for key in keys:
            write = await self.put(key)
            await self.directory.persisted(write.name, write.uid, f"etag-{write.uid}", self.clock.now_s)

    async def until_s(self, write: Pending) -> float:
        """Until when a look says that the write is held; 0: it is not."""
        await self.holds.look(await self.directory.pending())
        held = held_by(write, self.holds.sets)
        return held.until_s if held else 0.0


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    directory = EmbeddedDirectory.open(tmp_path, 2 << 20)
    yield World(directory)
    directory.close()


async def test_hold_begins_with_the_first_new_object(world: World) -> None:
    await world.save("s/a", "s/b", "s/.metadata")
    first = await world.put("s/a")
    world.clock.now_s += 4
    second = await world.put("s/b")
    assert await world.until_s(first) == await world.until_s(second) == 1000.0 + HOLD_S
    assert world.holds.any


async def test_hold_does_not_begin_anew_with_each_new_version(world: World) -> None:
    """A save that never ends."""
    await world.save("s/a", "s/.metadata")
    for _ in range(5):
        write = await world.put("s/a")
        assert await world.until_s(write) == 1000.0 + HOLD_S
        world.clock.now_s += 4


async def test_hold_begins_anew_after_a_whole_save(world: World) -> None:
    await world.save("s/a", "s/.metadata")
    await world.put("s/a")
    await world.put("s/.metadata")
    await world.holds.look(await world.directory.pending())
    assert not world.holds.any
    world.clock.now_s += 4
    assert await world.until_s(await world.put("s/a")) == 1004.0 + HOLD_S


async def test_hold_counts_from_the_commit_after_a_restart(world: World) -> None:
    await world.save("s/a", "s/.metadata")
    write = await world.put("s/a")
    world.clock.now_s += 4
    world.holds = world.new()
    assert await world.until_s(write) == 1000.0 + HOLD_S


async def test_hold_is_no_longer_than_its_bound_by_a_clock_that_was_set_back(world: World) -> None:
    await world.save("s/a", "s/.metadata")
    write = await world.put("s/a")
    world.clock.now_s -= 500
    assert await world.until_s(write) == 500.0 + HOLD_S


@pytest.mark.parametrize("why", ["memory", "off", "no time"])
async def test_nothing_is_held_any_more(world: World, why: str) -> None:
    await world.save("s/a", "s/.metadata")
    write = await world.put("s/a")
    assert await world.until_s(write) > 0
    if why == "memory":
        world.has_room = False
    elif why == "off":
        world.mode = FenceMode.OFF
    else:
        world.holds = world.new(0.0)
    assert await world.until_s(write) == 0.0
    await world.holds.ask(write)
    held = held_by(write, world.holds.sets)
    assert held is None or held.until_s == 0.0


async def test_node_that_stops_holds_what_no_new_marker_speaks_for(world: World) -> None:
    await world.save("s/a", "s/b", "s/.metadata")
    write = await world.put("s/a")
    world.has_room = False
    assert await world.until_s(write) == 0.0
    world.holds.stop()
    assert await world.until_s(write) == 1000.0 + HOLD_S
    await world.put("s/.metadata")
    assert await world.until_s(write) == 0.0
    assert await world.until_s(await world.put("s/b")) == 0.0


async def test_node_that_stops_holds_nothing_where_all_would_wait_for_it(world: World) -> None:
    world.mode = FenceMode.STRICT
    await world.save("s/a", "s/.metadata")
    write = await world.put("s/a")
    assert await world.until_s(write) > 0
    world.holds.stop()
    assert await world.until_s(write) == 0.0


async def test_set_that_nobody_asked_for_at_a_look_is_asked_for_in_turn(world: World) -> None:
    writes = []
    for number in range(FOLDERS_COUNT + 1):
        await world.save(f"s/{number:03}/a", f"s/{number:03}/.metadata")
    for number in range(FOLDERS_COUNT + 1):
        writes.append(await world.put(f"s/{number:03}/a"))
    assert await world.until_s(writes[0]) > 0
    assert await world.until_s(writes[-1]) == 0.0
    await world.holds.ask(writes[-1])
    held = held_by(writes[-1], world.holds.sets)
    assert held is not None
    assert held.until_s == 1000.0 + HOLD_S


async def test_ask_sees_that_the_marker_was_written_anew(world: World) -> None:
    await world.save("s/a", "s/.metadata")
    write = await world.put("s/a")
    assert await world.until_s(write) > 0
    await world.put("s/.metadata")
    await world.holds.ask(write)
    assert held_by(write, world.holds.sets) is None
    assert held_by(replace(write, revision=write.revision + 2), world.holds.sets) is not None
