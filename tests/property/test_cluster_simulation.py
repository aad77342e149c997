"""Promises P4 and P10 over several nodes, with the real write-back, take-over and repair: whatever dies, freezes or
gets lost, each acknowledged version whose holders did not all lose their memory comes to the origin, once, in order.

A history is made from its seed alone. `TIERGATE_SIMULATIONS=first:count` looks at others than CI does.
"""

import asyncio
import os
import random

import pytest
from tests.property.cluster_world import SimNode, World

from tiergate.testing.virtualtime import run_virtually

KEYS = (
    "run/1/a",
    "run/1/b",
    "run/1/large",
    "run/1/.metadata.tmp",
    "run/1/.metadata",
    "run/2/a",
    "run/2/.metadata",
    "run/.metadata",
    "run/checkpoint_manager_snapshot.json",
)

SETS = (
    ("run/1/a", "run/1/.metadata"),
    ("run/1/a", "run/1/b", "run/1/.metadata"),
    ("run/1/large", "run/1/.metadata", "run/1/.metadata.tmp"),
    ("run/1/a", "run/1/.metadata", "run/.metadata"),
    ("run/1/a",),
)
"""Few keys, so that nodes meet at them."""

PAUSES_S = ((0.0, 0.05, 0.3), (0.05, 0.3, 1.0, 3.0, 8.0, 25.0))
"""Between what happens: in haste, or with time for everything to come to an end."""

OFTEN = (
    ["put"] * 14
    + ["delete"] * 3
    + ["wait"] * 8
    + ["freeze", "thaw", "cut", "mend", "kill", "kill", "drain", "start", "start", "start", "outage", "outage over"]
    + ["duel"] * 6
)

FATES = ("none", "none", "none", "freeze", "freeze", "freeze", "die", "lose")

GROUP_COUNT = 50
CI_COUNT = 450


async def history(seed: int) -> None:
    world = World(seed, node_count=3 + seed % 3)
    rng = world.rng
    try:
        members = asyncio.create_task(world.keep_members())
        for node in world.nodes.values():
            node.join()
            node.start()
        await asyncio.sleep(0.5)
        keys = rng.choice((*SETS, rng.sample(KEYS, rng.randint(2, 5))))
        pauses_s = rng.choice(PAUSES_S)
        for _ in range(rng.randint(10, 80)):
            node = rng.choice(list(world.nodes.values()))
            action = rng.choice(OFTEN)
            if action in ("put", "delete") and node.is_up and node.process is not None:
                call = node.process.put if action == "put" else node.process.delete
                node.process.run(call(rng.choice(keys), rng.randint(0, 3)))
                await asyncio.sleep(rng.choice((0.0, 0.01, 0.1, 0.5)))
            elif action == "wait":
                await asyncio.sleep(rng.choice(pauses_s))
            elif action == "duel":
                await duel(world, rng.choice(keys) if rng.random() < 0.7 else f"run/1/new-{world.count}")
            elif action == "freeze":
                node.thawed.clear()
            elif action == "thaw":
                node.thawed.set()
            elif action in ("cut", "mend"):
                node.is_cut = action == "cut"
            elif action in ("outage", "outage over"):
                world.is_origin_away = action == "outage"
            elif action == "kill":
                await node.kill(wipe=rng.random() < 0.3)
            elif action == "drain" and node.process is not None:
                node.process.drain()
            elif action == "start":
                node.start()
            assert not world.broken, world.broken
        await world.settle()
        world.check_end()
        members.cancel()
    finally:
        await world.close()


async def duel(world: World, key: str) -> None:
    """A node writes; at one of its next steps something befalls it; then others write the same key."""
    rng = world.rng
    up = [node for node in world.nodes.values() if node.is_up]
    if len(up) < 2:
        return
    one, other = rng.sample(up, 2)
    fate = rng.choice(FATES)
    at = rng.randint(1, 20)
    if fate == "freeze":
        one.arm(at, lambda: one.freeze(rng.uniform(6.0, 40.0)))
    elif fate in ("die", "lose"):
        one.arm(at, one.die)
    write_somehow(one, key, rng)
    await asyncio.sleep(rng.choice((0.05, 0.3, 1.0) if fate == "none" else (0.3, 1.0, 5.0, 8.0, 12.0)))
    if fate == "lose":
        await one.kill(wipe=True)
    if fate != "none" and rng.random() < 0.5:
        one.start()
    for _ in range(rng.randint(1, 3)):
        write_somehow(other, key, rng)
        await asyncio.sleep(rng.choice((0.3, 1.0, 4.0)))


def write_somehow(node: SimNode, key: str, rng: random.Random) -> None:
    """A client writes or deletes there."""
    if node.is_up and node.process is not None:
        node.process.run(rng.choice((node.process.put, node.process.delete))(key, rng.randint(0, 3)))


def seeds() -> list[range]:
    first, _, count = os.environ.get("TIERGATE_SIMULATIONS", f"0:{CI_COUNT}").partition(":")
    start, stop = int(first), int(first) + int(count or CI_COUNT)
    return [range(at, min(at + GROUP_COUNT, stop)) for at in range(start, stop, GROUP_COUNT)]


@pytest.mark.parametrize("group", seeds(), ids=lambda group: f"{group.start}-{group.stop - 1}")
def test_acknowledged_writes_reach_the_origin_in_order_whatever_dies(group: range) -> None:
    for seed in group:
        try:
            run_virtually(history(seed))
        except BaseException as error:
            error.add_note(f"TIERGATE_SIMULATIONS={seed}:1 makes this history again")
            raise
