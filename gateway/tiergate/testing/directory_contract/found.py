"""What is found in the origin: adopted, revalidated, forgotten, trimmed."""

import pytest

from tiergate.directory.base import Directory
from tiergate.model import (
    Role,
    State,
)
from tiergate.testing.directory_contract.values import (
    BUCKET,
    MARKER,
    SHARD,
    keys_of,
    make_intent,
    make_version,
    object_name,
    put,
    put_clean,
    record_of,
)


class FoundInOrigin:
    """What is found in the origin: adopted, revalidated, forgotten, trimmed."""

    async def test_adopt_new_key_is_clean(self, directory: Directory) -> None:
        version = make_version("f1", foreign=True)
        record = await directory.adopt(SHARD, version, "o1", Role.SMALL, 33.0)
        assert record == (await directory.get(SHARD)).record
        assert (record.state, record.version, record.origin_etag) == (State.CLEAN, version, "o1")
        assert (record.validated_s, record.modified) == (33.0, await directory.revision())

    async def test_adopt_known_key_returns_what_is_there(self, directory: Directory) -> None:
        await directory.delete(SHARD, make_intent())
        record = await directory.adopt(SHARD, make_version("f1"), "o1", Role.SMALL, 33.0)
        assert record.state is State.TOMBSTONE

    async def test_adopt_several_keys_all_can_go(self, directory: Directory) -> None:
        for index in range(3):
            await directory.adopt(object_name(f"k{index}"), make_version(f"f{index}"), "o", Role.SMALL, 1.0)
        assert (await directory.counts())["clean"] == 3
        assert len(await directory.trim_clean(0)) == 3

    async def test_revalidated_current_version_notes_time(self, directory: Directory) -> None:
        await put_clean(directory, SHARD, "v1", "o1")
        guard = (await directory.get(SHARD)).guard
        await directory.revalidated(SHARD, "v1", 3000.0)
        assert (await record_of(directory, SHARD)).validated_s == 3000.0
        assert (await directory.get(SHARD)).guard == guard

    async def test_revalidated_other_version_does_nothing(self, directory: Directory) -> None:
        await put_clean(directory, SHARD, "v1", "o1")
        before = await directory.get(SHARD)
        await directory.revalidated(SHARD, "v0", 3000.0)
        assert await directory.get(SHARD) == before

    @pytest.mark.parametrize("uid", ["v1", None])
    async def test_forget_clean_drops_it(self, directory: Directory, uid: str | None) -> None:
        await put_clean(directory, SHARD, "v1", "o1")
        assert await directory.forget(SHARD, uid) == make_version("v1")
        assert (await directory.get(SHARD)).record is None

    async def test_forget_other_version_keeps_it(self, directory: Directory) -> None:
        await put_clean(directory, SHARD, "v1", "o1")
        assert await directory.forget(SHARD, "v0") is None
        assert (await record_of(directory, SHARD)).state is State.CLEAN

    async def test_forget_dirty_or_tombstone_keeps_it(self, directory: Directory) -> None:
        await put(directory, SHARD, "v1")
        await directory.delete(MARKER, make_intent())
        assert await directory.forget(SHARD, None) is None
        assert await directory.forget(SHARD, "v1") is None
        assert await directory.forget(MARKER, None) is None
        assert (await record_of(directory, SHARD)).state is State.DIRTY
        assert (await record_of(directory, MARKER)).state is State.TOMBSTONE

    async def test_trim_clean_drops_oldest_commits(self, directory: Directory) -> None:
        for index in range(5):
            await put(directory, object_name(f"k{index}"), f"v{index}")
        for index in (4, 0, 3, 1):
            await directory.persisted(object_name(f"k{index}"), f"v{index}", "o", 1.0)
        dropped = await directory.trim_clean(2)
        assert {version.uid for version in dropped} == {"v0", "v1"}
        assert keys_of(await directory.scan(BUCKET, "", "", 10)) == ["k2", "k3", "k4"]
        assert await directory.trim_clean(2) == []

    async def test_trim_clean_keeps_markers(self, directory: Directory) -> None:
        await put_clean(directory, MARKER, "m1", "o1", Role.MARKER)
        await put_clean(directory, SHARD, "v1", "o1")
        assert [version.uid for version in await directory.trim_clean(0)] == ["v1"]
        assert (await record_of(directory, MARKER)).state is State.CLEAN
