"""The uploader's loop: it survives whatever goes wrong, and never tries again at once."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import pytest

from tiergate.directory.embedded import EmbeddedDirectory
from tiergate.errors import FencedError, IntegrityError, MemoryFullError, OriginCredentialsError, OriginExhaustedError
from tiergate.model import NO_BASE, ObjectName, OriginUpload, Pending, Role
from tiergate.observe.metrics import Metrics
from tiergate.testing.directory_contract import make_intent, make_version
from tiergate.writeback.fence import FenceMode
from tiergate.writeback.gate import Gate
from tiergate.writeback.holds import HoldBounds
from tiergate.writeback.sender import Sender, Visible, all_of
from tiergate.writeback.standing import Standing
from tiergate.writeback.uploader import Uploader, UploaderSettings

BACKOFF_S = 10.0
QUIET_S = 60.0


class HandClock:
    """Wall time goes by hand; who sleeps waits for `wakes`."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.sleeps: list[float] = []

    def wall_s(self) -> float:
        return self.now_s

    def monotonic_s(self) -> float:
        return self.now_s

    async def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        await asyncio.sleep(0)


Work = Callable[[Pending, Visible], Awaitable[None]]


@dataclass
class ScriptedSender:
    """Does with each write what the test says; by default it lands."""

    directory: EmbeddedDirectory
    work: dict[str, Work] = field(default_factory=dict)
    tries: list[str] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    abort_error: Exception | None = None

    async def put(self, write: Pending, visible: Visible) -> None:
        self.tries.append(write.name.key)
        work = self.work.get(write.name.key)
        if work is not None:
            await work(write, visible)
            return
        async with visible(write):
            await self.directory.persisted(write.name, write.uid, "etag", 1.0)

    async def abort(self, name: ObjectName, upload: OriginUpload) -> None:
        self.aborted.append(upload.upload_id)
        if self.abort_error is not None:
            raise self.abort_error


class BrokenDirectory(EmbeddedDirectory):
    """Fails as often as told when it is asked what is pending."""

    failures: int = 0

    async def pending(self) -> list[Pending]:
        if self.failures:
            self.failures -= 1
            raise RuntimeError("a bug")
        return await super().pending()


NO_HOLD = HoldBounds(0.0, lambda: True)


class Node:
    def __init__(self, folder: Path, slots_count: int, hold: HoldBounds = NO_HOLD) -> None:
        directory = BrokenDirectory.open(folder, 2 << 20)
        self.directory = BrokenDirectory(directory._environment)
        self.clock = HandClock()
        self.metrics = Metrics()
        self.sender = ScriptedSender(self.directory)
        slots = asyncio.Semaphore(slots_count)
        self.gate = Gate(
            self.directory, self.clock, lambda name: FenceMode.AUTO, QUIET_S, hold, Standing("uploader"), slots
        )
        self.uploader = Uploader(
            self.directory,
            cast(Sender, self.sender),
            self.gate,
            self.clock,
            self.metrics,
            UploaderSettings(2, BACKOFF_S, BACKOFF_S),
            slots,
        )
        self.runner: asyncio.Task[None] | None = None

    async def idle(self) -> None:
        self.uploader.wake()
        for _ in range(30):
            await asyncio.sleep(0)

    async def pass_time(self, seconds: float) -> None:
        self.clock.now_s += seconds
        await self.idle()

    async def put(self, key: str, uid: str, role: Role = Role.SMALL, start_revision: int = 0) -> None:
        intent = make_intent(role, now_s=self.clock.now_s, base=NO_BASE, start_revision=start_revision)
        await self.directory.put(ObjectName("bucket", key), make_version(uid), intent)

    async def keys(self) -> list[str]:
        return [write.name.key for write in await self.directory.pending()]


@asynccontextmanager
async def running(folder: Path, slots_count: int = 2, hold: HoldBounds = NO_HOLD) -> AsyncIterator[Node]:
    node = Node(folder, slots_count, hold)
    node.runner = asyncio.create_task(node.uploader.run())
    try:
        yield node
        assert not node.runner.done(), "the loop ended"
    finally:
        node.runner.cancel()
        await asyncio.gather(node.runner, return_exceptions=True)
        node.directory.close()
        node.metrics.close()


async def test_look_fails_unexpectedly_goes_on_after_a_pause(tmp_path: Path) -> None:
    async with running(tmp_path) as node:
        node.directory.failures = 3
        await node.put("a", "a1")
        await node.idle()
        assert await node.keys() == []
        assert len(node.clock.sleeps) == 3
        assert all(0.0 <= pause_s <= BACKOFF_S for pause_s in node.clock.sleeps)


@pytest.mark.parametrize(
    "error",
    [
        OriginExhaustedError("down"),
        OriginCredentialsError(403, "ExpiredToken"),
        MemoryFullError("the directory is full"),
        RuntimeError("a bug"),
        ExceptionGroup("several", [ValueError("a bug")]),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_try_fails_is_put_off_and_tried_again(tmp_path: Path, error: Exception) -> None:
    async def fail(write: Pending, visible: Visible) -> None:
        raise error

    async with running(tmp_path) as node:
        node.sender.work["a"] = fail
        await node.put("a", "a1")
        await node.put("b", "b1")
        await node.idle()
        await node.idle()
        # Full jitter may be as short as nothing, but time stands still here.
        assert node.sender.tries == ["a", "b"]
        assert [write.quarantined for write in await node.directory.pending()] == [""]
        del node.sender.work["a"]
        await node.pass_time(BACKOFF_S)
        assert await node.keys() == []


async def test_bytes_damaged_is_quarantined(tmp_path: Path) -> None:
    async def fail(write: Pending, visible: Visible) -> None:
        raise IntegrityError("damaged")

    async with running(tmp_path) as node:
        node.sender.work["a"] = fail
        await node.put("a", "a1")
        await node.idle()
        assert [write.quarantined for write in await node.directory.pending()] == ["IntegrityError: damaged"]
        await node.pass_time(BACKOFF_S)
        assert node.sender.tries == ["a"]


async def test_superseded_while_sent_its_failure_is_nobodys(tmp_path: Path) -> None:
    async with running(tmp_path) as node:

        async def fail(write: Pending, visible: Visible) -> None:
            del node.sender.work["a"]
            await node.put("a", "a2")
            raise IntegrityError("the bytes are gone, as they were let go of")

        node.sender.work["a"] = fail
        await node.put("a", "a1")
        await node.idle()
        assert node.sender.tries == ["a", "a"]
        assert await node.keys() == []


async def test_quarantine_itself_fails_is_put_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(write: Pending, visible: Visible) -> None:
        raise IntegrityError("damaged")

    async def full(name: ObjectName, uid: str, reason: str) -> None:
        raise MemoryFullError("the directory is full")

    async with running(tmp_path) as node:
        node.sender.work["a"] = fail
        monkeypatch.setattr(node.directory, "quarantine", full)
        await node.put("a", "a1")
        await node.idle()
        assert node.sender.tries == ["a"]
        monkeypatch.undo()
        await node.pass_time(BACKOFF_S)
        assert node.sender.tries == ["a", "a"]
        assert [write.quarantined for write in await node.directory.pending()] == ["IntegrityError: damaged"]


async def test_orphan_refused_does_not_hold_up_others_nor_writes(tmp_path: Path) -> None:
    async with running(tmp_path) as node:
        for number in (1, 2):
            name = ObjectName("bucket", f"gone{number}")
            await node.put(name.key, "v")
            await node.directory.note_upload(name, "v", OriginUpload(f"u{number}", 1.0))
            await node.directory.put_through(name, make_version("through"), "etag", make_intent())
        node.sender.abort_error = OriginExhaustedError("down")
        await node.put("a", "a1")
        await node.idle()
        await node.idle()
        assert node.sender.aborted == ["u1", "u2"]
        assert await node.keys() == []
        node.sender.abort_error = None
        await node.pass_time(BACKOFF_S)
        await node.pass_time(BACKOFF_S)
        assert node.sender.aborted == ["u1", "u2", "u1", "u2"]
        assert await node.directory.orphan_uploads() == []


@pytest.mark.parametrize("slots_count", [1, 2])
async def test_waiting_for_its_turn_with_all_slots_taken_comes_to_an_end(tmp_path: Path, slots_count: int) -> None:
    """Waiting and being granted a turn must not need what those hold who are to be waited for."""
    async with running(tmp_path, slots_count) as node:
        let = asyncio.Event()

        async def slowly(write: Pending, visible: Visible) -> None:
            async with visible(write):
                await let.wait()
                await node.directory.persisted(write.name, write.uid, "etag", 1.0)

        async def waits(write: Pending, visible: Visible) -> None:
            # Committed after this has begun, so that it waits inside.
            await node.put("run/a", "a2")
            async with visible(write):
                await node.directory.persisted(write.name, write.uid, "etag", 1.0)

        await node.put("run/a", "a1")
        await node.idle()
        node.sender.work = {"run/.metadata": waits, "run/a": slowly, "b": slowly, "c": slowly}
        await node.put("run/.metadata", "m1", Role.MARKER)
        await node.idle()
        assert node.gate.waiting == {ObjectName("bucket", "run/.metadata")}
        await node.put("b", "b1")
        await node.put("c", "c1")
        await node.idle()
        let.set()
        await node.idle()
        assert await node.keys() == ["run/.metadata"]
        await node.pass_time(QUIET_S)
        assert await node.keys() == []


async def test_superseded_while_it_waits_its_turn_is_fenced(tmp_path: Path) -> None:
    async with running(tmp_path) as node:
        ends: list[str] = []

        async def waits(write: Pending, visible: Visible) -> None:
            if write.uid == "m1":
                await node.put("run/b", "b1")
                await node.put("run/.metadata", "m2", Role.MARKER)
            try:
                async with visible(write):
                    ends.append(f"{write.uid} seen")
                    await node.directory.persisted(write.name, write.uid, "etag", 1.0)
            except FencedError:
                ends.append(f"{write.uid} fenced")
                raise

        node.sender.work["run/.metadata"] = waits
        await node.put("run/.metadata", "m1", Role.MARKER)
        await node.idle()
        assert ends == ["m1 fenced", "m2 seen"]
        assert await node.keys() == []


async def test_many_begin_as_others_end_without_another_look(tmp_path: Path) -> None:
    async with running(tmp_path) as node:
        for number in range(40):
            await node.put(f"k{number:02}", f"v{number}")
        looks = 0
        look = node.gate.look

        async def counted() -> object:
            nonlocal looks
            looks += 1
            return await look()

        node.gate.look = counted  # type: ignore[method-assign, assignment]
        while await node.keys():
            await node.idle()
        assert node.sender.tries == [f"k{number:02}" for number in range(40)]
        assert looks < 40


async def test_all_of_one_fails_raises_it_as_it_is_and_ends_the_rest() -> None:
    ended: list[str] = []

    async def forever() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("cancelled")

    async def fail() -> None:
        raise OriginExhaustedError("down")

    with pytest.raises(OriginExhaustedError):
        await all_of([forever(), fail()])
    assert ended == ["cancelled"]


async def test_all_of_all_end_gives_results_in_order() -> None:
    async def give(number: int) -> int:
        return number

    assert await all_of([give(number) for number in range(5)]) == [0, 1, 2, 3, 4]


async def test_what_is_held_for_its_set_goes_when_memory_fills(tmp_path: Path) -> None:
    room = True
    async with running(tmp_path, hold=HoldBounds(1e9, lambda: room)) as node:
        await overwrite_in_place(node)
        assert [str(blocked.reason) for _, blocked in node.uploader.held_back(await node.directory.pending())] == [
            "its set stands in the origin and its marker was not written anew yet"
        ]
        room = False
        await node.idle()
        assert await node.keys() == []


async def test_what_is_held_for_its_set_stays_when_the_node_is_to_stop_until_its_marker_comes(tmp_path: Path) -> None:
    async with running(tmp_path, hold=HoldBounds(1e9, lambda: True)) as node:
        await overwrite_in_place(node)
        assert node.uploader.stays(await node.directory.pending()) == set()
        node.uploader.hurry()
        await node.idle()
        await node.put("s/latest", "pointer", Role.POINTER)
        await node.idle()
        owed = await node.directory.pending()
        assert [write.name.key for write in owed] == ["s/a", "s/latest"]
        assert node.uploader.stays(owed) == {write.uid for write in owed}
        await node.put("s/.metadata", "m again", Role.MARKER)
        await node.idle()
        assert await node.keys() == []


async def overwrite_in_place(node: Node) -> None:
    """A set that the origin has, one object of which is written anew."""
    await node.put("s/a", "a before")
    await node.idle()
    await node.put("s/.metadata", "m before", Role.MARKER)
    await node.idle()
    node.sender.tries.clear()
    await node.put("s/a", "a anew")
    await node.idle()
    assert await node.keys() == ["s/a"]
    assert node.sender.tries == []


async def test_what_is_held_for_a_set_that_was_learnt_of_in_its_turn_goes_when_the_hold_is_over(tmp_path: Path) -> None:
    """No look knew of the hold, so that none was due for its end."""
    marker, landed = ObjectName("bucket", "s/.metadata"), asyncio.Event()
    async with running(tmp_path, hold=HoldBounds(5.0, lambda: True)) as node:

        async def work(write: Pending, visible: Visible) -> None:
            await node.directory.adopt(marker, make_version("m"), "m", Role.MARKER, node.clock.now_s)
            async with visible(write):
                await node.directory.persisted(write.name, write.uid, "etag", 1.0)
            landed.set()

        node.sender.work["s/a"] = work
        intent = make_intent(now_s=node.clock.now_s, base="old")
        await node.directory.put(ObjectName("bucket", "s/a"), make_version("a"), intent)
        await node.idle()
        assert node.gate.waiting == {ObjectName("bucket", "s/a")}
        node.clock.now_s += 10.0
        async with asyncio.timeout(30):
            await landed.wait()
