"""Random histories of sets: whatever is written, deleted, brought to S3, evicted, lost, or changed behind the gateway,
each set is told as a model of sets and tiers says."""

import asyncio
import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.engine.cluster import BUCKET, Cluster, name_of

from tiergate.checkpoints.newest import newest
from tiergate.checkpoints.sets import SetState, SetStatus, Tier
from tiergate.engine.checkpoints import Checkpoints
from tiergate.model import Version

INDEX = "model.safetensors.index.json"
FILES = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", INDEX)
BODIES = dict.fromkeys(FILES, b"x" * 10) | {
    INDEX: json.dumps({"weight_map": {name: name for name in FILES[:2]}}).encode()
}
STEPS = (0, 1)
KEYS = tuple(f"run/step-{step}/{name}" for step in STEPS for name in FILES)


@dataclass(slots=True)
class Thing:
    """The current object of a key. `order`: when it was written; 0 where the directory does not know it. `disturbed`:
    of a marker that is pending."""

    order: int
    memory: bool = True
    s3: bool = False
    disturbed: bool = False

    @property
    def can_be_had(self) -> bool:
        return self.memory or self.s3


@dataclass(slots=True)
class Model:
    """What there is. `pending`: when the write was made that S3 lacks, also of deletions; `known`: when the version was
    written that the directory takes for the current one."""

    things: dict[str, Thing] = field(default_factory=dict)
    pending: dict[str, int] = field(default_factory=dict)
    known: dict[str, int] = field(default_factory=dict)
    order: int = 0

    def change(self, key: str, thing: Thing | None) -> None:
        """A key was written or deleted."""
        old, marker_key = self.things.pop(key, None), key[: key.rfind("/") + 1] + INDEX
        marker = self.things.get(marker_key)
        known_order = self.known.pop(key, None)
        is_after = marker is not None and known_order is not None and marker.order > known_order
        if marker is not None and is_after and key != marker_key and marker_key in self.pending:
            marker.disturbed = True
        if thing is not None:
            self.things[key], self.known[key] = thing, self.order
        if thing is not None or old is not None or key not in self.pending:
            self.pending[key] = self.order

    def is_rewritten(self, step: int) -> bool:
        """Whether something of a set changed after its marker was written, and S3 lacks it yet."""
        prefix = f"run/step-{step}/"
        marker = self.things.get(prefix + INDEX)
        if marker is None or marker.disturbed:
            return marker is not None
        others = [self.pending.get(prefix + name, 0) for name in FILES[:2]]
        return marker.s3 and max(others) > marker.order

    def check(self, step: int, status: SetStatus | None) -> bool:
        """Hold what is told of a set against what there is; whether it is whole."""
        here = {name: self.things.get(f"run/step-{step}/{name}") for name in FILES}
        if status is None:
            assert not any(here.values())
            return False
        had = {name: thing for name, thing in here.items() if thing is not None and thing.can_be_had}
        is_rewritten = INDEX in had and self.is_rewritten(step)
        memory, s3 = status.tiers[Tier.MEMORY], status.tiers[Tier.S3]
        is_whole = len(had) == len(FILES) and not is_rewritten
        assert status.is_whole == is_whole
        assert memory.objects_count == sum(thing.memory for thing in had.values())
        assert s3.objects_count == sum(thing.s3 for thing in had.values())
        assert (memory.state is SetState.COMPLETE) == (is_whole and memory.objects_count == len(FILES))
        assert (s3.state is SetState.COMPLETE) == (is_whole and s3.objects_count == len(FILES))
        assert (s3.state is SetState.UPLOADING) == (is_whole and s3.objects_count < len(FILES))
        is_damaged = INDEX in had and not is_rewritten and len(had) < len(FILES)
        assert (memory.state is SetState.DAMAGED) == (is_damaged and memory.objects_count > 0)
        assert (s3.state is SetState.DAMAGED) == (is_damaged and s3.objects_count > 0)
        assert (memory.state is SetState.ABSENT) == (memory.objects_count == 0)
        assert not status.is_unknown
        return is_whole


class Play:
    """A node alone and the model, side by side."""

    def __init__(self, folder: Path) -> None:
        self.cluster = Cluster(folder, 1, alone=True, revalidate_s="0s")
        self.node = self.cluster["a"]
        self.checkpoints = Checkpoints(self.node.rooms)
        self.model = Model()

    async def close(self) -> None:
        await self.checkpoints.close()
        await self.cluster.close()

    async def put(self, key: str) -> None:
        await self.node.put(key, BODIES[key[key.rfind("/") + 1 :]])
        self.model.change(key, Thing(self.model.order))

    async def delete(self, key: str) -> None:
        await self.node.ask("DeleteObject", "DELETE", key)
        self.model.change(key, None)

    async def persist(self, key: str) -> None:
        """Write-back of a key, as soon as the fence lets it go: a marker after the others of its set."""
        directory, name, model = self.cluster.directory, name_of(key), self.model
        write = (await directory.get(name)).pending
        prefix, thing = key[: key.rfind("/") + 1], model.things.get(key)
        if write is None or (thing is not None and not thing.memory):
            return
        if key.endswith(INDEX) and any(prefix + other in model.pending for other in FILES[:2]):
            return
        if write.disturbed_s:
            await directory.settled_set(name, write.uid)
        if thing is None:
            self.cluster.origin.objects.pop(name, None)
            await directory.persisted(name, write.uid, "", 1.0)
        else:
            await self.cluster.persist(key, BODIES[key[len(prefix) :]])
            thing.s3, thing.disturbed = True, False
        del model.pending[key]

    async def version(self, key: str) -> Version | None:
        record = (await self.cluster.directory.get(name_of(key))).record
        return record.version if record is not None else None

    async def lose(self, key: str) -> None:
        """The bytes go from memory: evicted where S3 has them, else lost."""
        version = await self.version(key)
        if version is not None:
            self.node.memory.drop(version.uid, [part.body.uid for part in version.parts])
        if key in self.model.things:
            self.model.things[key].memory = False

    async def forget(self, key: str) -> None:
        """The directory has no room for what S3 has."""
        if key in self.model.known and key not in self.model.pending and not key.endswith(INDEX):
            self.node.rooms.let_go(await self.cluster.directory.forget(name_of(key), None))
            del self.model.known[key]
            if key in self.model.things:
                self.model.things[key].memory = False

    async def behind(self, key: str) -> None:
        """Somebody deletes, or writes, behind the gateway what it does not owe."""
        if key in self.model.pending:
            return
        if self.model.things.pop(key, None) is not None:
            del self.cluster.origin.objects[name_of(key)]
        else:
            self.cluster.origin.put_foreign(name_of(key), BODIES[key[key.rfind("/") + 1 :]])
            self.model.things[key] = Thing(0, memory=False, s3=True)

    async def check(self) -> None:
        place = await self.checkpoints.under(BUCKET, "run/")
        assert (place.unseen, place.origin_fault) == (frozenset(), "")
        found = {each.status.name.step: each.status for each in place.sets}
        assert len(found) == len(place.sets)
        whole = [step for step in STEPS if self.model.check(step, found.get(step))]
        best = newest(found.values(), place.unseen)
        assert (best.step if best is not None else None) == max(whole, default=None)


ACTIONS: dict[str, Callable[[Play, str], Any]] = {
    "put": Play.put,
    "delete": Play.delete,
    "persist": Play.persist,
    "lose": Play.lose,
    "forget": Play.forget,
    "behind": Play.behind,
}
MOVES = st.tuples(
    st.sampled_from(["put"] * 3 + ["persist"] * 3 + ["delete", "lose", "forget", "behind"]), st.sampled_from(KEYS)
)


@settings(max_examples=60, deadline=None)
@given(moves=st.lists(MOVES, max_size=30))
def test_sets_are_told_as_they_are(moves: list[tuple[str, str]]) -> None:
    async def run(folder: Path) -> None:
        play = Play(folder)
        try:
            for action, key in moves:
                play.model.order += 1
                await ACTIONS[action](play, key)
                await play.check()
        finally:
            await play.close()

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(run(Path(folder)))
