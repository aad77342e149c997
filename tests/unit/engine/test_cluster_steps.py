"""Steps in the origin: they end, and doubts are noted, also where the directory does not take that at once."""

import asyncio
from collections.abc import Callable

import pytest
from tests.unit.engine.cluster import Cluster, content, name_of

from tiergate.engine.afterwards import Afterwards
from tiergate.engine.turn import Turn
from tiergate.errors import DirectoryUnavailableError, FencedError, OverloadedError
from tiergate.model import Role, State, Step
from tiergate.writeback.promotion import Promotion

DATA = content(50_000)


@pytest.fixture
def one(start: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """A cluster of which one node is left: what it writes goes through."""
    monkeypatch.setattr("tiergate.engine.afterwards.FIRST_PAUSE_S", 0.01)
    cluster = start(2, replicas_count="2", through_wait_s="100ms")
    cluster.peers.kill("b")
    return cluster


async def test_write_stands_though_its_step_ends_later(one: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    end, tries = one.directory.end_step, 0

    async def end_late(step: Step) -> None:
        nonlocal tries
        tries += 1
        if tries < 3:
            raise DirectoryUnavailableError("away")
        assert step.holder == one["a"].rooms.step_holder
        await end(step)

    monkeypatch.setattr(one.directory, "end_step", end_late)
    answer = await one["a"].put("k", DATA)
    assert answer.headers["x-tiergate-ack"] == "origin"
    assert len(await one.directory.steps()) == 1
    await one["a"].service.settled()
    assert await one.directory.steps() == []


async def test_commit_that_fails_after_the_origin_took_the_write_leaves_a_doubt(
    one: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    await one["a"].put("k", b"old")
    put_through = one.directory.put_through

    async def away(*_: object) -> None:
        raise DirectoryUnavailableError("away")

    monkeypatch.setattr(one.directory, "put_through", away)
    with pytest.raises(OverloadedError):
        await one["a"].put("k", DATA)
    monkeypatch.setattr(one.directory, "put_through", put_through)
    assert one.origin.objects[name_of("k")].data == DATA
    assert (await one["a"].get("k"))[1] == DATA
    assert await one.directory.steps() == []


async def test_new_marker_whose_commit_fails_is_known_all_the_same(
    one: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def away(*_: object) -> None:
        raise DirectoryUnavailableError("away")

    monkeypatch.setattr(one.directory, "put_through", away)
    with pytest.raises(OverloadedError):
        await one["a"].put("run/.metadata", DATA)
    record = (await one.directory.get(name_of("run/.metadata"))).record
    assert record is not None
    assert (record.state, record.role) == (State.CLEAN, Role.MARKER)


async def test_fenced_settling_of_a_set_is_no_error(one: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = 0

    async def fenced(*_: object) -> None:
        nonlocal asked
        asked += 1
        raise FencedError("another node's")

    monkeypatch.setattr(one.directory, "settled_set", fenced)
    await one["a"].put("run/.metadata", b"first")
    # A clean marker is withdrawn, and so owed again, disturbed.
    uid = await one.uid("run/.metadata")
    assert await one.directory.withdraw(name_of("run/.metadata"), uid, one.clock.wall_s()) is not None
    with pytest.raises(OverloadedError):
        await one["a"].put("run/.metadata", b"second")
    assert asked
    assert await one.directory.steps() == []


MARKER_STEP = Step(name_of("run/.metadata"), "m@holder", "holder", Role.MARKER, through=False, replaces=False)


def turn_of(one: Cluster) -> Turn:
    rooms = one["a"].rooms
    promotion = Promotion(rooms.directory, rooms.settings.prefix_for, rooms.clock, rooms.metrics, rooms.wake)
    return Turn(rooms, Afterwards(one.clock), promotion)


async def test_forwarded_deletion_withdraws_no_marker_that_goes_in(one: Cluster) -> None:
    await one["a"].put("run/.metadata", b"marker")
    assert await one.directory.begin_step(MARKER_STEP)
    turn = turn_of(one)
    with pytest.raises(OverloadedError):
        await turn.come_to_delete([name_of("run/a")], past=())
    assert one.origin.objects[name_of("run/.metadata")].data == b"marker"
    assert await one.directory.steps() == [MARKER_STEP]


async def test_marker_does_not_go_in_while_a_forwarded_deletion_withdraws_it(one: Cluster) -> None:
    await one["a"].put("run/.metadata", b"marker")
    turn = turn_of(one)
    one.origin.eager = False
    names = [name_of("run/a"), name_of("run/b"), name_of("run/.metadata")]
    deleting = asyncio.create_task(turn.come_to_delete(names, past=names))
    asked: list[str] = []
    while "delete" not in asked:
        for call in one.origin.open_calls():
            asked.append(call.operation)
            assert not await one.directory.begin_step(MARKER_STEP)
            one.origin.let(call)
        await asyncio.sleep(0)
    with pytest.raises(OverloadedError):  # The marker that was withdrawn stays pending.
        await deleting
    assert asked.count("delete") == 1
    assert name_of("run/.metadata") not in one.origin.objects
    assert await one.directory.begin_step(MARKER_STEP)
