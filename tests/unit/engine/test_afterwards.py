"""What is done though its request is over."""

import asyncio

import pytest

from tiergate.clock import SystemClock
from tiergate.engine import afterwards
from tiergate.engine.afterwards import Afterwards, to_its_end
from tiergate.errors import DirectoryUnavailableError


async def test_work_ends_before_its_caller_is_cancelled_however_often() -> None:
    go_on, steps = asyncio.Event(), list[str]()

    async def work() -> None:
        steps.append("begun")
        await go_on.wait()
        steps.append("done")

    caller = asyncio.create_task(to_its_end(work()))
    await asyncio.sleep(0)
    for _ in range(3):
        caller.cancel()
        await asyncio.sleep(0)
        assert not caller.done()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert steps == ["begun", "done"]


async def test_result_and_error_of_the_work_are_the_callers() -> None:
    async def result() -> int:
        return 3

    async def fails() -> None:
        raise DirectoryUnavailableError("away")

    assert await to_its_end(result()) == 3
    with pytest.raises(DirectoryUnavailableError):
        await to_its_end(fails())


async def test_work_that_is_carried_goes_on_without_its_caller() -> None:
    left, go_on, steps = Afterwards(SystemClock()), asyncio.Event(), list[str]()

    async def work() -> None:
        await go_on.wait()
        steps.append("done")
        raise DirectoryUnavailableError("nobody hears of it")

    caller = asyncio.create_task(left.carry(work()))
    await asyncio.sleep(0)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    go_on.set()
    await left.settled()
    assert steps == ["done"]


async def test_result_and_error_of_what_is_carried_are_the_callers() -> None:
    left = Afterwards(SystemClock())

    async def result() -> int:
        return 3

    async def fails() -> None:
        raise DirectoryUnavailableError("away")

    assert await left.carry(result()) == 3
    with pytest.raises(DirectoryUnavailableError):
        await left.carry(fails())


async def test_work_is_tried_until_it_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(afterwards, "FIRST_PAUSE_S", 0.001)
    left, tries = Afterwards(SystemClock()), 0

    async def work() -> bool:
        nonlocal tries
        tries += 1
        if tries == 1:
            raise DirectoryUnavailableError("away")
        return tries == 3

    left.add(work)
    await left.settled()
    assert tries == 3


async def test_close_gives_up() -> None:
    left, never = Afterwards(SystemClock()), asyncio.Event()

    async def work() -> bool:
        return await never.wait()

    left.add(work)
    await asyncio.sleep(0)
    await left.close()
    await left.settled()
