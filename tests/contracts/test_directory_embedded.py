"""The embedded directory keeps the directory's contract; and what only it must do."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from tiergate.directory.base import Committed, Directory
from tiergate.directory.embedded import EmbeddedDirectory
from tiergate.errors import ConfigError, InvariantError, MemoryFullError
from tiergate.model import Bucket
from tiergate.testing.directory_contract import (
    SHARD,
    DirectoryContract,
    make_intent,
    make_upload,
    object_name,
    pending_of,
    put,
    put_clean,
)


@pytest.fixture
def embedded(tmp_path: Path) -> Iterator[EmbeddedDirectory]:
    directory = EmbeddedDirectory.open(tmp_path / "directory", 4 << 20)
    yield directory
    directory.close()


class TestEmbeddedDirectory(DirectoryContract):
    @pytest.fixture
    def directory(self, embedded: EmbeddedDirectory) -> Directory:
        return embedded


async def test_revision_counts_commits(embedded: EmbeddedDirectory) -> None:
    assert await embedded.revision() == 0
    assert (await put(embedded, SHARD, "v1")).revision == 1
    assert (await put(embedded, SHARD, "v2")).revision == 2


async def test_open_again_finds_everything(tmp_path: Path) -> None:
    first = EmbeddedDirectory.open(tmp_path, 4 << 20)
    await put(first, SHARD, "v1")
    await first.create_upload(make_upload("up1"))
    await first.put_bucket(Bucket("bucket", "us-east-1", False, 1.0))
    seen, counts = await first.get(SHARD), await first.counts()
    first.close()
    second = EmbeddedDirectory.open(tmp_path, 4 << 20)
    assert await second.get(SHARD) == seen
    assert await second.counts() == counts
    assert await second.get_upload("up1") == make_upload("up1")
    second.close()


def test_open_folder_that_cannot_be_made_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError):
        EmbeddedDirectory.open(tmp_path / "file" / "directory", 4 << 20)


async def test_row_of_another_schema_is_refused(tmp_path: Path) -> None:
    directory = EmbeddedDirectory.open(tmp_path, 4 << 20)
    await put(directory, SHARD, "v1")
    environment = directory._environment
    records = environment.open_db(b"records")
    with environment.begin(write=True) as txn:
        key, value = next(iter(txn.cursor(records)))
        txn.put(key, b"\xff" + value[1:], db=records)
    with pytest.raises(InvariantError):
        await directory.get(SHARD)
    directory.close()


async def fill(directory: EmbeddedDirectory, *, clean: bool) -> int:
    """Commit until there is no room; how many went in."""
    count = 0
    while True:
        name = object_name(f"run/step_{count // 100}/shard_{count}")
        try:
            await put(directory, name, f"v{count}")
        except MemoryFullError:
            return count
        if clean:
            await directory.persisted(name, f"v{count}", "o", 1.0)
        count += 1


async def test_full_of_dirty_refuses_the_new_and_finishes_the_old(embedded: EmbeddedDirectory) -> None:
    count = await fill(embedded, clean=False)
    assert count > 500
    before = await embedded.revision()
    with pytest.raises(MemoryFullError):
        await embedded.create_upload(make_upload("up1"))
    with pytest.raises(MemoryFullError):
        await embedded.delete(object_name("unknown"), make_intent())
    assert await embedded.revision() == before
    for write in await embedded.pending():
        await embedded.begin(write.name, write.uid, "")
        assert await embedded.persisted(write.name, write.uid, "etag-of-the-origin", 1.0) is not None
    assert (await embedded.counts())["clean"] == count


async def test_full_of_clean_makes_room_by_trimming(embedded: EmbeddedDirectory) -> None:
    count = await fill(embedded, clean=True)
    dropped = await embedded.trim_clean(1_000_000)
    assert dropped[0].uid == "v0"
    assert 0 < len(dropped) <= count
    await put(embedded, SHARD, "new")
    while await embedded.trim_clean(1_000_000):
        continue
    assert (await embedded.counts())["clean"] > 0


async def test_trim_clean_with_room_keeps_all_up_to_the_number(embedded: EmbeddedDirectory) -> None:
    await put_clean(embedded, SHARD, "v1", "o1")
    assert await embedded.trim_clean(1) == []


async def beside_a_reader(directory: EmbeddedDirectory) -> "asyncio.Task[Committed]":
    """Overwrite a key until a change waits for the reader that the caller keeps open."""
    for count in range(1000):
        task = asyncio.create_task(put(directory, SHARD, f"v{count}"))
        await asyncio.sleep(0)  # its first step: a change that meets no reader is done after it
        if not task.done():
            return task
        await task
    raise AssertionError("the reader never kept a page")


async def test_change_waits_for_a_slow_reader(embedded: EmbeddedDirectory) -> None:
    with embedded._environment.begin():
        task = await beside_a_reader(embedded)
        revision = await embedded.revision()
    assert (await task).revision == revision + 1
    assert (await pending_of(embedded, SHARD)).uid == f"v{revision}"


async def test_reader_that_stays_makes_changes_temporary_errors_and_reads_go_on(
    embedded: EmbeddedDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tiergate.directory.embedded.READER_PAUSES_S", (0.0, 0.001))
    with embedded._environment.begin():
        task = await beside_a_reader(embedded)
        with pytest.raises(MemoryFullError) as caught:
            await task
        assert caught.value.retry_after_s > 0
        before = await embedded.revision()
        assert (await embedded.get(SHARD)).revision == before
        assert len(await embedded.pending()) == len(await embedded.scan("bucket", "", "", 10)) == 1
    assert (await put(embedded, SHARD, "after")).revision == before + 1


async def test_cancelled_while_it_waits_changes_nothing(embedded: EmbeddedDirectory) -> None:
    with embedded._environment.begin():
        task = await beside_a_reader(embedded)
        before = await embedded.get(SHARD)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert await embedded.get(SHARD) == before
