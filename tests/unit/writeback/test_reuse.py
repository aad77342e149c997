"""What is copied inside the origin, from where, and what is learnt of an origin meanwhile."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tiergate.directory.base import Intent
from tiergate.directory.embedded import EmbeddedDirectory
from tiergate.errors import OriginCredentialsError, OriginRefusedError
from tiergate.model import NO_BASE, Body, ObjectName, Part, Pending, Role, Version
from tiergate.observe.metrics import Metrics
from tiergate.origin.answers import Condition
from tiergate.s3.checksums import block_checksum
from tiergate.testing.modelorigin import ModelOrigin
from tiergate.writeback import reuse as module
from tiergate.writeback.reuse import CHANGED_COUNT, LOOK_COUNT, PROBE_PART, Reuse

BUCKET = "bucket"
SAME, OTHER = b"the same bytes", b"other bytes---"
ABSENT = Condition.if_absent()


class World:
    """A directory, an origin that holds what the directory says, and what finds copies in it."""

    def __init__(self, path: Path) -> None:
        self.directory = EmbeddedDirectory.open(path, 1 << 22)
        self.origin = ModelOrigin()
        self.origin.eager = True
        self.metrics = Metrics()
        self.reuse = Reuse(self.directory, self.origin.client, self.metrics, lambda name: "run/")
        self.count = 0

    async def write(self, key: str, data: bytes = SAME, role: Role = Role.LARGE) -> tuple[Pending, Version]:
        """Commit a version, which is then owed."""
        self.count += 1
        uid = f"uid-{self.count}"
        part = Part(1, Body(f"{uid}.1", len(data), block_checksum(data).to_bytes(8, "big")), f"part-{uid}")
        version = Version(uid, len(data), f"etag-{uid}", 1, (part,))
        name = ObjectName(BUCKET, key)
        await self.directory.put(name, version, Intent(role, await self.directory.revision(), 1.0, NO_BASE))
        pending = (await self.directory.get(name)).pending
        assert pending is not None
        return pending, version

    async def hold(self, key: str, data: bytes = SAME) -> None:
        """A version that the origin holds."""
        write, version = await self.write(key, data)
        etag = self.origin.put_foreign(write.name, data)
        await self.directory.begin(write.name, write.uid, NO_BASE)
        await self.directory.persisted(write.name, version.uid, etag, 2.0)

    async def source(self, key: str, data: bytes = SAME, role: Role = Role.LARGE) -> str | None:
        found = await self.reuse.source_of(*await self.write(key, data, role))
        return found.name.key if found else None

    @property
    def done(self) -> list[str]:
        return [operation for operation, _ in self.origin.done]


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setattr(module, "LEAST_BYTES", len(SAME))
    world = World(tmp_path / "directory")
    yield world
    world.directory.close()
    world.metrics.close()


async def test_source_is_the_same_place_of_the_newest_set_that_has_the_bytes(world: World) -> None:
    for key in ("run/9/w/a", "run/10/w/a", "run/10/b", "run/a", "elsewhere/1/w/a"):
        await world.hold(key)
    assert await world.source("run/11/w/a") == "run/10/w/a"
    assert await world.source("run/11/c") is None
    assert await world.source("run/12/w/a", OTHER) is None
    await world.hold("run/13/w/a", OTHER)
    assert await world.source("run/14/w/a") == "run/10/w/a"


async def test_markers_small_objects_and_those_outside_of_sets_are_sent(world: World) -> None:
    for key in ("run/1/a", "run/a"):
        await world.hold(key, SAME)
    assert await world.source("run/2/a", role=Role.MARKER) is None
    assert await world.source("run/2/a", role=Role.POINTER) is None
    assert await world.source("run/2/a", SAME[:-1]) is None
    assert await world.source("run/b") is None
    assert await world.source("run/2/a") == "run/1/a"


async def test_what_the_origin_does_not_hold_is_no_source(world: World) -> None:
    await world.write("run/1/a")
    assert await world.source("run/2/a") is None


async def test_bounded_look(world: World) -> None:
    await world.hold("run/00/a")
    for step in range(1, CHANGED_COUNT):
        await world.hold(f"run/{step:02}/a", OTHER)
    assert await world.source("run/50/a") == "run/00/a"
    await world.hold("run/49/a", OTHER)
    assert await world.source("run/51/a") is None
    for step in range(60, 60 + LOOK_COUNT):
        await world.hold(f"run/{step}/b")
    await world.hold("run/99/a")
    assert await world.source("run/98/a") == "run/99/a"


async def whole(world: World, key: str, source_key: str = "run/1/a") -> tuple[str, Condition, Version]:
    """Copy a version of the same bytes at once: the uid of what the origin then holds, the condition of an upload."""
    write, version = await world.write(key)
    source = await world.reuse.source_of(write, version)
    assert source is not None
    assert source.name.key == source_key
    answer, condition = await world.reuse.whole(write, version, source, "", ABSENT)
    held = world.origin.objects.get(write.name)
    assert (answer is not None) is (held is not None and held.uid == version.uid)
    return held.uid if held else "", condition, version


async def test_conditions_are_tried_once_before_the_first_copy(world: World) -> None:
    await world.hold("run/1/a")
    uid, _, version = await whole(world, "run/2/a")
    assert uid == version.uid
    assert world.done == ["copy", "copy", "copy"]
    await whole(world, "run/3/a")
    assert world.done == ["copy"] * 4
    counted = {series.name: series.values[0] for series in world.metrics.store.read()}
    assert counted[world.metrics.reused_bytes.metric.name] == 2 * len(SAME)


async def test_what_lands_though_a_condition_does_not_hold_has_no_stamp_and_is_sent_over(world: World) -> None:
    world.origin.heeds_copy_conditions = False
    await world.hold("run/1/a")
    uid, condition, _ = await whole(world, "run/2/a")
    there = world.origin.objects[ObjectName(BUCKET, "run/2/a")]
    assert (uid, condition) == ("", Condition.if_match(there.etag))
    uid, condition, _ = await whole(world, "run/3/a")
    assert (uid, condition) == ("", ABSENT)
    assert world.done == ["copy"]


async def test_conditional_write_is_not_what_conditions_are_tried_on(world: World) -> None:
    await world.hold("run/1/a")
    write, version = await world.write("run/2/a")
    source = await world.reuse.source_of(write, version)
    assert source is not None
    assert (await world.reuse.whole(replace(write, conditional=True), version, source, "", ABSENT))[0] is None
    assert world.done == []


@pytest.mark.parametrize(("status", "again"), [(501, False), (405, False), (403, True), (404, True)])
async def test_what_is_not_implemented_is_not_asked_for_again(world: World, status: int, again: bool) -> None:
    await world.hold("run/1/a")
    world.origin.refuse["copy"] = OriginRefusedError(status, "NotImplemented" if status == 501 else "Http")
    assert (await whole(world, "run/2/a"))[0] == ""
    assert bool((await whole(world, "run/3/a"))[0]) is again


async def test_refused_keys_are_not_hidden(world: World) -> None:
    await world.hold("run/1/a")
    world.origin.refuse["copy"] = OriginCredentialsError(403, "ExpiredToken")
    with pytest.raises(OriginCredentialsError):
        await whole(world, "run/2/a")


@pytest.mark.parametrize("told", ["", "the right one", "another"])
async def test_checksum_that_the_origin_tells_of_a_copy_must_be_ours(world: World, told: str) -> None:
    await world.hold("run/1/a")
    write, version = await world.write("run/2/a")
    version = replace(version, checksums={"crc32": "the right one"})
    source = await world.reuse.source_of(write, version)
    assert source is not None
    world.origin.told_of_copies = {"x-amz-checksum-crc32": told} if told else {}
    answer, condition = await world.reuse.whole(write, version, source, "crc32", ABSENT)
    there = world.origin.objects[write.name]
    expected = (None, Condition.if_match(there.etag)) if told == "another" else (there.etag, ABSENT)
    assert (answer.etag if answer else None, condition) == expected


async def test_parts_are_copied_after_a_try_that_no_completion_names(world: World) -> None:
    await world.hold("run/1/a")
    write, version = await world.write("run/2/a")
    upload_id = await world.origin.create_multipart_upload(write.name, {})
    copies = await world.reuse.parts(write, version, upload_id, "")
    assert copies is not None
    etag = await copies.copy(version.parts[0])
    assert world.origin.uploads[upload_id].parts == {1: (etag, SAME)}
    world.origin.heeds_copy_conditions = False
    fresh = Reuse(world.directory, world.origin.client, world.metrics, lambda name: "run/")
    assert await fresh.parts(write, version, upload_id, "") is None
    assert set(world.origin.uploads[upload_id].parts) == {1, PROBE_PART}
    assert world.origin.uploads[upload_id].parts[PROBE_PART][1] == SAME[:1]


async def test_after_one_refusal_the_other_parts_are_sent(world: World) -> None:
    await world.hold("run/1/a")
    write, version = await world.write("run/2/a")
    upload_id = await world.origin.create_multipart_upload(write.name, {})
    copies = await world.reuse.parts(write, version, upload_id, "")
    assert copies is not None
    world.origin.put_foreign(ObjectName(BUCKET, "run/1/a"), OTHER)
    count = len(world.done)
    assert await copies.copy(version.parts[0]) is None
    assert await copies.copy(version.parts[0]) is None
    assert len(world.done) == count + 1
