"""What stays in a real memory, as a real directory and real markers say: single cases, and random histories."""

import random
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import cast

import pytest

from tiergate import model
from tiergate.checkpoints.markers import Markers
from tiergate.checkpoints.retention import Keep
from tiergate.clock import SystemClock
from tiergate.config.settings import PrefixSettings
from tiergate.directory.base import ClusterDirectory, Directory, Intent
from tiergate.directory.embedded import EmbeddedDirectory
from tiergate.errors import MemoryFullError, RequestError
from tiergate.memory.audit import audit
from tiergate.memory.memory import Memory, MemoryLimits
from tiergate.model import NO_BASE, About, Holder, Node, ObjectName, Part, Version
from tiergate.observe.metrics import Metrics
from tiergate.testing.memorydirectory import MemoryDirectory, State
from tiergate.writeback.retaining import Held, Retaining

BUCKET, RUN = "bucket", "run/"
BLOCK = 4096
BLOCKS = 64
RUNS = (PrefixSettings(BUCKET, RUN, is_run=True, keep_count=2), PrefixSettings(BUCKET, f"{RUN}inner/"))


class Place:
    """One node's memory and directory, and what is written to them."""

    def __init__(self, memory: Memory, directory: Directory, retaining: Retaining) -> None:
        self.memory, self.directory, self.retaining = memory, directory, retaining
        self.markers = Markers(lambda bucket, key: (), 1 << 30)
        self.versions: dict[str, Version] = {}
        self._number = 0

    async def put(self, key: str, blocks_count: int = 4) -> None:
        """Commit an object, dirty."""
        self._number += 1
        uid, size_bytes = f"v{self._number}", blocks_count * BLOCK
        receiving = self.memory.receive(uid, size_bytes, uid)
        receiving.write(bytes(size_bytes))
        version = Version(uid, size_bytes, "e", 0, (Part(1, receiving.seal(), "e"),))
        name = ObjectName(BUCKET, key)
        role = self.markers.role_of(name, size_bytes)
        committed = await self.directory.put(name, version, Intent(role, 0, 1.0, NO_BASE, holders=self.holders))
        self.memory.confirm(uid)
        if committed.replaced is not None:
            self.memory.drop(committed.replaced.uid, [part.body.uid for part in committed.replaced.parts])
        self.versions[key] = version

    holders: tuple[Holder, ...] = ()

    async def persist(self, key: str) -> None:
        """The origin has it."""
        version = self.versions[key]
        await self.directory.persisted(ObjectName(BUCKET, key), version.uid, "o", 2.0)
        self.memory.clean(version.uid, [part.body.uid for part in version.parts])

    async def save(self, step: int, *, persist: bool = True, blocks_count: int = 4) -> None:
        """A set of two shards and a marker."""
        keys = [f"{RUN}{step}/__{rank}_0.distcp" for rank in range(2)] + [f"{RUN}{step}/.metadata"]
        for key in keys:
            await self.put(key, 1 if key.endswith(".metadata") else blocks_count)
        for key in keys if persist else ():
            await self.persist(key)

    def press(self, blocks_count: int) -> None:
        """Somebody needs room for a moment."""
        self.memory.receive(f"press{random.random()}", blocks_count * BLOCK, "press").abort()

    def here(self) -> dict[str, int]:
        """How many objects of each set are in memory."""
        found: dict[str, int] = {}
        for key, version in self.versions.items():
            if self.memory.found([version.parts[0].body.uid]):
                prefix = key[: key.rfind("/") + 1].removeprefix(RUN)
                found[prefix] = found.get(prefix, 0) + 1
        return found

    def kept(self) -> dict[str, Keep]:
        sets = self.retaining.report.runs[0].sets
        return {each.prefix.removeprefix(RUN): keep for each, keep in sets.items()}


@contextmanager
def opened(folder: Path, limit_blocks: int = 30) -> Iterator[Place]:
    with ExitStack() as stack:
        limits = MemoryLimits((1 << 20) + BLOCKS * BLOCK, 1 << 20, 8 * BLOCK)
        memory = Memory.open(folder / "memory", limits, SystemClock())
        stack.callback(memory.close)
        directory = EmbeddedDirectory.open(folder / "directory", 4 << 20)
        stack.callback(directory.close)
        markers = Markers(lambda bucket, key: (), 1 << 30)
        held = Held(directory, memory)
        retaining = Retaining(directory, memory, markers, held, RUNS, limit_blocks * BLOCK, SystemClock(), Metrics())
        yield Place(memory, directory, retaining)
        assert audit(memory.store) == []


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "BLOCK_BYTES", BLOCK)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    with opened(tmp_path) as place:
        yield place


async def test_sets_beyond_the_newest_go_first_and_whole(place: Place) -> None:
    for step in range(1, 5):
        await place.save(step)
    await place.put("other/file", 4)
    await place.persist("other/file")
    await place.retaining.round()
    assert place.kept() == {"4/": Keep.NEWEST, "3/": Keep.KEPT, "2/": Keep.SURPLUS, "1/": Keep.SURPLUS}
    place.press(27)  # 24 are free
    assert place.here() == {"2/": 3, "3/": 3, "4/": 3, "other/": 1}
    place.press(36)
    assert {"2/", "1/"}.isdisjoint(place.here())
    place.press(46)
    assert set(place.here()) == {"3/", "4/"}
    place.press(47)
    assert place.here() == {"4/": 3}
    place.press(64)
    assert place.here() == {}


async def test_set_that_s3_lacks_a_part_of_stays_whole(place: Place) -> None:
    await place.save(1)
    await place.save(2, persist=False)
    await place.persist(f"{RUN}2/__0_0.distcp")
    await place.retaining.round()
    assert place.kept() == {"2/": Keep.OWED, "1/": Keep.KEPT}
    place.press(55)
    assert place.here() == {"2/": 3}
    with pytest.raises(MemoryFullError):
        place.press(56)
    for key in (f"{RUN}2/__1_0.distcp", f"{RUN}2/.metadata"):
        await place.persist(key)
        await place.retaining.round()
    place.press(56)
    assert place.here() == {}


async def test_set_that_comes_in_while_older_ones_are_kept_is_in_the_making(place: Place) -> None:
    for step in (1, 2, 3):
        await place.save(step)
    await place.put(f"{RUN}4/__0_0.distcp")
    await place.persist(f"{RUN}4/__0_0.distcp")
    await place.put(f"{RUN}latest", 1)
    await place.retaining.round()
    assert place.kept() == {"4/": Keep.KEPT, "3/": Keep.NEWEST, "2/": Keep.KEPT, "1/": Keep.SURPLUS}


async def test_what_another_prefix_speaks_of_is_no_set_of_the_run(place: Place) -> None:
    await place.save(1)
    await place.put(f"{RUN}inner/7/.metadata", 1)
    await place.persist(f"{RUN}inner/7/.metadata")
    await place.retaining.round()
    assert place.kept() == {"1/": Keep.NEWEST}


async def test_layout_without_a_marker_is_whole_once_nothing_is_owed(place: Place) -> None:
    for step in (1, 2, 3):
        key = f"{RUN}global_step{step}/mp_rank_00_model_states.pt"
        await place.put(key)
        if step != 3:
            await place.persist(key)
    await place.retaining.round()
    assert place.kept() == {
        "global_step3/": Keep.KEPT,
        "global_step2/": Keep.NEWEST,
        "global_step1/": Keep.KEPT,
    }


async def test_overwritten_in_place_is_one_set(place: Place) -> None:
    for _ in range(3):
        await place.save(7)
    await place.retaining.round()
    assert place.kept() == {"7/": Keep.NEWEST}
    assert place.here() == {"7/": 3}


async def test_pinned_set_stays_and_outlives_a_restart(tmp_path: Path) -> None:
    with opened(tmp_path) as place:
        for step in range(1, 5):
            await place.save(step)
        assert await place.retaining.pin(BUCKET, f"{RUN}1/") == 9 * BLOCK
        await place.retaining.round()
        place.press(55)
        assert place.here() == {"1/": 3}
        versions = place.versions
    with opened(tmp_path) as place:
        place.versions = versions
        await place.retaining.round()
        (pin,) = place.retaining.report.pins
        assert (pin.size_bytes, pin.is_kept) == (9 * BLOCK, True)
        with pytest.raises(MemoryFullError):
            place.press(60)
        assert await place.retaining.unpin(BUCKET, f"{RUN}1/")
        assert not await place.retaining.unpin(BUCKET, f"{RUN}1/")
        await place.retaining.round()
        place.press(60)
        assert place.here() == {}


async def test_pins_are_bounded(place: Place) -> None:
    for step in range(1, 5):
        await place.save(step)
    for step in (1, 2, 3):
        await place.retaining.pin(BUCKET, f"{RUN}{step}/")
    with pytest.raises(RequestError, match="pinned_limit"):
        await place.retaining.pin(BUCKET, f"{RUN}4/")
    await place.retaining.pin(BUCKET, f"{RUN}3/")  # It is.
    await place.put(f"{RUN}1/more", 8)
    await place.persist(f"{RUN}1/more")
    await place.retaining.round()
    kept = {each.pinned.prefix: each.is_kept for each in place.retaining.report.pins}
    assert kept == {f"{RUN}1/": True, f"{RUN}2/": True, f"{RUN}3/": False}
    assert place.retaining.report.pinned_bytes == 26 * BLOCK


async def test_nothing_is_looked_at_while_nothing_changed(place: Place) -> None:
    await place.save(1)
    await place.retaining.round()
    report = place.retaining.report
    await place.retaining.round()
    assert place.retaining.report is report
    await place.save(2)
    await place.retaining.round()
    assert set(place.kept()) == {"1/", "2/"}


async def test_too_many_objects_are_a_fault_and_no_more(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    await place.save(1)
    await place.retaining.pin(BUCKET, f"{RUN}1/__0")
    monkeypatch.setattr("tiergate.writeback.retaining.OBJECTS_COUNT", 2)
    await place.retaining.round()
    assert "more than 2 objects" in place.retaining.report.fault
    assert place.retaining.report.pins[0].is_kept


async def test_member_keeps_its_part_by_markers_that_lie_elsewhere(tmp_path: Path) -> None:
    """The marker of each set was written on another node: here are shards only."""
    state = State()
    me, other = Holder("a", 1), Holder("b", 2)
    for each in (me, other):
        state.nodes[each.node] = Node(each.node, each.epoch, About(""))
    with opened(tmp_path) as place:
        directory = MemoryDirectory(state, lambda: me)
        elsewhere = MemoryDirectory(state, lambda: other)
        place.directory = cast(Directory, directory)
        held = Held(place.directory, place.memory, cast(ClusterDirectory, directory), lambda: me)
        place.retaining = Retaining(
            place.directory, place.memory, place.markers, held, RUNS, 30 * BLOCK, SystemClock(), Metrics()
        )
        place.holders = (me,)
        for step in range(1, 5):
            shard, marker = f"{RUN}{step}/__0_0.distcp", ObjectName(BUCKET, f"{RUN}{step}/.metadata")
            await place.put(shard, 8)
            if step != 4:
                uid = f"m{step}"
                version = Version(uid, 1, "e", 0, (Part(1, model.Body(uid, 1), "e"),))
                role = place.markers.role_of(marker, 1)
                await elsewhere.put(marker, version, Intent(role, 0, 1.0, NO_BASE, holders=(other,)))
            if step != 2:
                await place.persist(shard)
        await place.retaining.round()
        assert place.kept() == {"4/": Keep.KEPT, "3/": Keep.NEWEST, "2/": Keep.OWED, "1/": Keep.SURPLUS}


# -- random histories
class History:
    """Saves, write-backs, pressure and pins in random order; what must hold after each."""

    def __init__(self, place: Place, seed: int) -> None:
        self.place = place
        self.rng = random.Random(seed)
        self.owed: dict[int, list[str]] = {}
        self.steps: list[int] = []
        self.pinned: set[int] = set()

    async def go_on(self) -> None:
        before = self.place.here()
        may_go = {step for step in self.steps if not self.owed.get(step) and step not in self.pinned}
        acts: list[Callable[[], Awaitable[None]]] = [self.save, self.persist, self.press, self.press, self.pin]
        await self.rng.choice(acts)()
        after = self.place.here()
        gone = {step for step in may_go if before.get(f"{step}/") and not after.get(f"{step}/")}
        for step in self.steps:
            assert after.get(f"{step}/", 0) in (0, 3), f"set {step} is here in part"
            if step not in may_go and before.get(f"{step}/"):
                assert after.get(f"{step}/") == 3, f"set {step} may not be evicted"
        left = {step for step in may_go - gone if after.get(f"{step}/")}
        if gone and left:
            assert max(gone) < max(left), "the newest whole set went before an older one"
            assert max(gone) < min(left), "sets went in another order than their age"
        await self.place.retaining.round()

    async def save(self) -> None:
        step = len(self.steps) + 1
        blocks_count = self.rng.randint(1, 5)
        try:
            self.place.press(2 * blocks_count + 1)
        except MemoryFullError:
            return
        await self.place.save(step, persist=False, blocks_count=blocks_count)
        self.steps.append(step)
        self.owed[step] = [key for key in self.place.versions if key.startswith(f"{RUN}{step}/")]

    async def persist(self) -> None:
        waiting = [step for step, keys in self.owed.items() if keys]
        if waiting:
            keys = self.owed[self.rng.choice(waiting)]
            for _ in range(self.rng.randint(1, 3)):
                if keys:
                    await self.place.persist(keys.pop(0))

    async def press(self) -> None:
        try:
            self.place.press(self.rng.randint(1, BLOCKS))
        except MemoryFullError:
            return

    async def pin(self) -> None:
        if not self.steps:
            return
        step = self.rng.choice(self.steps)
        if step in self.pinned:
            await self.place.retaining.unpin(BUCKET, f"{RUN}{step}/")
            self.pinned.discard(step)
            return
        try:
            await self.place.retaining.pin(BUCKET, f"{RUN}{step}/")
        except RequestError:
            return
        self.pinned.add(step)


@pytest.mark.parametrize("seed", range(12))
async def test_random_histories_lose_sets_whole_and_oldest_first(tmp_path: Path, seed: int) -> None:
    with opened(tmp_path) as place:
        history = History(place, seed)
        for _ in range(60):
            await history.go_on()
        assert history.steps
