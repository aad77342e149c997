"""Random histories of sets under a policy, with real write-back and a real keeper whose steps fail now and then.

What the origin shows is judged after each of its changes, and what memory holds after each deletion.
"""

import asyncio
import json
import random
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import pytest
from tests.unit.engine.cluster import BUCKET, Cluster, name_of

from tiergate.checkpoints.markers import scope_of
from tiergate.directory.base import Committed, Intent
from tiergate.engine.acks import ACK_HEADER
from tiergate.errors import DirectoryUnavailableError, TiergateError
from tiergate.model import ObjectName, Pending, Plan, Stage, Version
from tiergate.server.wiring import open_uploader
from tiergate.writeback.keeper import Keeper, has_marker
from tiergate.writeback.promotion import Promotion
from tiergate.writeback.standing import Standing

T = TypeVar("T")

SETS_COUNT = 10
SHARDS = ("__0_0.distcp", "__1_0.distcp", "deep/__2_0.distcp")
MARKER = ".metadata"
POINTER = "run/checkpoint_manager_snapshot.json"
FAULT_SHARE = 0.1
PATIENCE_S = 60.0


def keys_of(step: int) -> list[str]:
    return [f"run/step_{step}/{name}" for name in (*SHARDS, MARKER)]


class Judge:
    """What was committed, and whether what is shown is allowed by it."""

    def __init__(self, one: Cluster) -> None:
        self._one = one
        self.written: dict[str, list[tuple[int, str]]] = defaultdict(list)
        """By key, the revision and uid of each version; an empty uid for a deletion."""
        self.had_one = False
        self.checks_count = 0
        self.faults: list[str] = []

    def _check(self, is_right: bool, fault: str) -> None:
        """Whoever changed the origin must not see an error of the test's."""
        if not is_right:
            self.faults.append(fault)

    def note(self, name: ObjectName, uid: str, revision: int) -> None:
        self.written[name.key].append((revision, uid))
        whole = [step for step in range(SETS_COUNT) if all(self._is_current(key) for key in keys_of(step))]
        self._check(bool(whole) or not self.had_one, "the run has lost its only complete set")
        self.had_one = self.had_one or bool(whole)

    def _is_current(self, key: str) -> bool:
        return bool(self.written.get(key)) and self.written[key][-1][1] != ""

    def look(self) -> None:
        """The origin has changed."""
        self.checks_count += 1
        shown = {name.key: held for name, held in self._one.origin.objects.items()}
        for key, held in shown.items():
            if key.endswith(MARKER):
                self._check_marker(key, held.uid)
            elif key == POINTER:
                for each in json.loads(held.data)["checkpoint_results"]:
                    step = int(each["checkpoint_dir_name"].removeprefix("step_"))
                    missing = [member for member in keys_of(step) if member not in shown]
                    self._check(not missing, f"a pointer {held.uid} names {missing}")
            self._check_kept(key)

    def _check_marker(self, marker: str, uid: str) -> None:
        """P4: all that was there before it is there, with the bytes that were acknowledged."""
        revision = next(revision for revision, written in self.written[marker] if written == uid)
        for key, versions in self.written.items():
            before = [version for version in versions if version[0] < revision]
            is_gone = any(at > revision and not deleted for at, deleted in versions)
            if not key.startswith(scope_of(marker)) or key == marker or not before or is_gone or not before[-1][1]:
                continue
            held = self._one.origin.objects.get(name_of(key))
            self._check(held is not None, f"{marker} is there without {key}")
            self._check(held is None or held.uid == before[-1][1], f"{marker} is there with another {key}")

    def _check_kept(self, key: str) -> None:
        with self._one.directory._reading() as rows:
            plan = rows.plan(BUCKET, "/".join(key.split("/")[:2]) + "/")
        is_kept = plan is not None and plan.stage in (Stage.KEPT, Stage.DROPPED)
        self._check(not is_kept, f"{key} was to stay in memory")


class World:
    """One node under a policy: its clients, its write-back, its keeper."""

    def __init__(self, folder: Path, rng: random.Random) -> None:
        self.rng = rng
        self.step = 0
        persist = rng.choice(["every 2", "every 3", "none", "all"])
        more = f"keep = {rng.choice([1, 2])}, skip_superseded = {rng.choice(['true', 'false'])}"
        exclusive = rng.choice(["true", "false"])
        table = f"{{uri = 's3://{BUCKET}/run/', persist = '{persist}', exclusive = {exclusive}, {more}}}"
        self.one = Cluster(
            folder,
            1,
            alone=True,
            prefixes=[table],
            marker_quiet_s="1ms",
            origin_backoff_s="1ms",
            origin_backoff_max_s="5ms",
            writeback_concurrency_count="1",
        )
        self.judge = Judge(self.one)
        self.one.origin._after = self.judge.look
        rooms = self.one["a"].rooms
        self.uploader = open_uploader(rooms, Standing(rooms.memory.token))
        self.promotion = Promotion(
            rooms.directory, rooms.settings.prefix_for, rooms.clock, rooms.metrics, self.uploader.wake
        )
        self.keeper = Keeper(
            rooms.directory,
            rooms.origin,
            self.promotion,
            rooms.settings.prefixes,
            rooms.clock,
            rooms.metrics,
            has_marker,
            0.0,
            lambda: True,
            rooms.replaced,
        )
        self._watch()

    def _watch(self) -> None:
        directory: Any = self.one.directory
        put, delete = directory.put, directory.delete

        async def put_noted(name: ObjectName, version: Version, intent: Intent) -> Committed:
            committed: Committed = await put(name, version, intent)
            self.judge.note(name, version.uid, committed.revision)
            return committed

        async def delete_noted(name: ObjectName, intent: Intent) -> Committed | None:
            committed: Committed | None = await delete(name, intent)
            if committed is not None:
                self.judge.note(name, "", committed.revision)
            return committed

        directory.put, directory.delete = put_noted, delete_noted
        for method in ("change_plan", "drop_plan", "promote", "park"):
            setattr(directory, method, self._faulty(getattr(directory, method)))

    def _faulty(self, method: Callable[..., Awaitable[T]]) -> Callable[..., Awaitable[T]]:
        async def call(*words: Any) -> T:
            await self.pause()
            if self.rng.random() < FAULT_SHARE / 2:
                raise DirectoryUnavailableError("away")
            result = await method(*words)
            if self.rng.random() < FAULT_SHARE / 2:
                raise DirectoryUnavailableError("its answer is lost")
            return result

        return call

    async def pause(self) -> None:
        for _ in range(self.rng.randrange(4)):
            await asyncio.sleep(0)

    async def put(self, key: str, data: bytes, wish: str = "") -> str:
        """As a client does that tries again."""
        headers = {"x-tiergate-persist": wish} if wish else {}
        while True:
            await self.pause()
            with suppress(DirectoryUnavailableError):
                answer = await self.one["a"].ask("PutObject", "PUT", key, body=data, headers=headers)
                return answer.headers[ACK_HEADER]

    async def save(self, step: int) -> None:
        self.step = step
        wish = self.rng.choice(["", "", "", "memory", "s3"])
        for key in keys_of(step):
            await self.put(key, self.rng.randbytes(self.rng.randrange(1, 300)), wish)
        if self.rng.random() < 0.5:
            named = {step, *self.rng.sample(range(step + 1), self.rng.randrange(min(2, step + 1)))}
            whole = [each for each in sorted(named) if all(self.judge._is_current(key) for key in keys_of(each))]
            body = json.dumps({"checkpoint_results": [{"checkpoint_dir_name": f"step_{each}"} for each in whole]})
            await self.put(POINTER, body.encode())

    async def write(self) -> None:
        """A training run: sets one after the other, some again in their place while they are kept."""
        for step in range(SETS_COUNT):
            await self.save(step)
            self.uploader.wake()
            plan = await self.one.directory.get_plan(BUCKET, f"run/step_{step}/")
            if plan is not None and plan.stage is Stage.KEPT and self.rng.random() < 0.3:
                await self.save(step)
            for _ in range(self.rng.randrange(60)):
                await asyncio.sleep(0)

    async def keep(self) -> None:
        while True:
            with suppress(TiergateError):
                await self.keeper.round()
            await asyncio.sleep(0)

    async def promote(self) -> None:
        while True:
            for _ in range(self.rng.randrange(200)):
                await asyncio.sleep(0)
            step = self.rng.choice([self.step, self.rng.randrange(SETS_COUNT)])
            with suppress(TiergateError):
                await self.promotion.under(BUCKET, f"run/step_{step}/")

    async def owes_nothing(self) -> None:
        """Take all that is kept to the origin, and wait until it is there."""
        while not self.judge.faults and (await self.left() or await self.one.directory.pending()):
            with suppress(TiergateError):
                await self.promotion.under(BUCKET, "")
            self.uploader.wake()
            await self.one.clock.sleep(0.01)

    async def left(self) -> list[Pending]:
        """What is parked, but for a pointer to what was dropped: that never goes."""
        gone = {plan.prefix for plan in await self.one.directory.plans(BUCKET, "") if plan.stage is Stage.DROPPED}
        return [write for write in await self.one.directory.parked() if not gone & set(write.points_to)]


async def live(folder: Path, seed: int) -> World:
    world = World(folder, random.Random(seed))
    tasks = [asyncio.create_task(work) for work in (world.uploader.run(), world.keep(), world.promote())]
    try:
        async with asyncio.timeout(PATIENCE_S):
            await world.write()
            await world.owes_nothing()
    finally:
        for task in tasks:
            task.cancel()
        ends: Sequence[object] = await asyncio.gather(*tasks, return_exceptions=True)
        await world.one.close()
    assert [end for end in ends if not isinstance(end, asyncio.CancelledError)] == []
    return world


@pytest.mark.parametrize("seed", range(20))
async def test_random_histories_of_sets(tmp_path: Path, seed: int) -> None:
    """A failing seed replays, but for threads, with this test alone."""
    world = await live(tmp_path / "world", seed)
    assert world.judge.faults == []
    current = {key: versions[-1][1] for key, versions in world.judge.written.items() if versions[-1][1]}
    shown = {name.key: held.uid for name, held in world.one.origin.objects.items()}
    for each in (shown, current):  # One that names what was dropped stays where it is.
        each.pop(POINTER, None)
    assert shown == current
    assert world.judge.checks_count > 0


def test_judge_sees_a_marker_without_its_set(tmp_path: Path) -> None:
    """And a kept one that is there."""
    plan = Plan(BUCKET, "run/step_1/", "run/", Stage.KEPT, 1, 1, 0.0)

    async def look() -> None:
        one = Cluster(tmp_path / "one", 1, alone=True)
        judge = Judge(one)
        for revision, key in enumerate(keys_of(1), 1):
            judge.note(name_of(key), f"u{revision}", revision)
        one.origin.put_foreign(name_of("run/step_1/other"), b"")
        judge.look()
        assert judge.faults == []
        await one.directory._change(lambda rows: rows.put_plan(plan))
        judge.look()
        assert judge.faults.pop() == "run/step_1/other was to stay in memory"
        judge.written[keys_of(1)[-1]] = [(9, "")]  # A foreign one has no uid.
        one.origin.objects.clear()
        one.origin.put_foreign(name_of(keys_of(1)[-1]), b"")
        judge.look()
        assert f"{keys_of(1)[-1]} is there without {keys_of(1)[0]}" in judge.faults
        await one.close()

    asyncio.run(look())
