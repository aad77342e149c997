"""kill -9 of processes in the middle of changing the directory: what was acknowledged is there (promise P11)."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tiergate.directory.embedded import EmbeddedDirectory
from tiergate.model import Kind, ObjectName, State

CHILD = Path(__file__).with_name("directory_child.py")
LINES_COUNT = 300
KILLS_COUNT = 6
Child = subprocess.Popen[str]


@contextmanager
def child(folder: Path, who: str) -> Iterator[Child]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(CHILD), str(folder), who, who]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def read_lines(process: Child, count: int) -> list[str]:
    """What it said so far; it goes on meanwhile, so a kill after this meets it anywhere."""
    assert process.stdout is not None
    lines = [process.stdout.readline() for _ in range(count)]
    assert all(line.endswith("\n") for line in lines), "the child ended by itself"
    return lines


def kill(process: Child) -> list[str]:
    """Kill it; the rest of what it said. A line cut off was acknowledged all the same."""
    process.kill()
    assert process.stdout is not None
    return [line for line in process.stdout.read().splitlines(keepends=True) if line.endswith("\n")]


async def check_whole(directory: EmbeddedDirectory) -> None:
    """Every index agrees with the rows."""
    records = await directory.scan("bucket", "", "", 10_000)
    pending = {write.name: write for write in await directory.pending()}
    kinds = {State.DIRTY: Kind.PUT, State.TOMBSTONE: Kind.DELETE}
    for record in records:
        write = pending.get(record.name)
        assert (write.kind if write else None) == kinds.get(record.state)
        if write is not None and record.version is not None:
            assert write.uid == record.version.uid
    places = [write.place for write in await directory.pending()]
    assert places == sorted(set(places))
    assert {write.name for write in await directory.pending_under("bucket", "", 10_000)} == set(pending)
    counts = await directory.counts()
    for state in State:
        assert counts[state] == sum(record.state is state for record in records)
    assert counts["pending_bytes"] == sum(write.size_bytes for write in pending.values())
    assert await directory.live_holders() == {record.version.uid for record in records if record.version}
    for record in records:
        if record.name.key.endswith(".metadata"):
            scope = record.name.key[: -len(".metadata")]
            assert [seen.record for seen in await directory.standing_markers("bucket", [scope])] == [record]
    assert len(await directory.trim_clean(0)) == counts["clean"] - sum(
        record.state is State.CLEAN and record.name.key.endswith(".metadata") for record in records
    )


@pytest.mark.parametrize("run", range(3))
async def test_kill_9_while_changing_loses_nothing_acknowledged(tmp_path: Path, run: int) -> None:
    lines: list[str] = []
    names = (f"{run}{letter}" for letter in "abcdef")
    with ExitStack() as stack:
        children = [stack.enter_context(child(tmp_path, next(names))) for _ in range(3)]
        for _ in range(3):
            # All go on, also past a lock that a dead one held.
            for process in children:
                lines += read_lines(process, LINES_COUNT)
            lines += kill(children.pop(0))
            children.append(stack.enter_context(child(tmp_path, next(names))))
        for process in children:
            lines += read_lines(process, LINES_COUNT)
        for process in children:
            lines += kill(process)
    said = [line.split() for line in lines]
    acknowledged = {int(revision): (key, uid) for _, revision, key, uid in said}
    assert len(acknowledged) == len(said), "two commits got one revision"
    directory = EmbeddedDirectory.open(tmp_path, 16 << 20)
    try:
        newest: dict[str, tuple[int, str]] = {}
        for revision, (key, uid) in sorted(acknowledged.items()):
            newest[key] = (revision, uid)
        assert await directory.revision() >= max(acknowledged)
        unsaid = set()
        for key, (revision, uid) in newest.items():
            record = (await directory.get(ObjectName("bucket", key))).record
            if record is not None and record.revision == revision:
                assert (record.version.uid if record.version else "-") == uid
            elif record is not None:
                assert record.revision > revision, f"{key}: an acknowledged commit was lost"
                unsaid.add(key)
            elif uid != "-":
                unsaid.add(key)
        # Each child may have been killed between a commit and saying so.
        assert len(unsaid) <= KILLS_COUNT
        await check_whole(directory)
    finally:
        directory.close()
