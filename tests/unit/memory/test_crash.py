"""kill -9 of processes at any instruction: nothing that was committed is lost, nothing leaks (promise
P11)."""

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tiergate import model
from tiergate.clock import SystemClock
from tiergate.memory.audit import audit
from tiergate.memory.memory import Memory, MemoryLimits
from tiergate.model import Body

BLOCK = 4096
LIMITS = MemoryLimits((2 << 20) + 256 * BLOCK, 2 << 20, 16 * BLOCK)
CHILD = Path(__file__).with_name("crash_child.py")
ROUNDS = 8


@contextmanager
def child(folder: Path, journal: Path, seed: int) -> Iterator["subprocess.Popen[bytes]"]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(CHILD), str(folder), str(journal), str(seed)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as process:
        try:
            yield process
        finally:
            process.kill()


def wait_turns(process: "subprocess.Popen[bytes]", turns: int) -> None:
    """Until the child has done so many turns; it goes on meanwhile, so what follows meets it anywhere."""
    assert process.stdout is not None
    assert len(process.stdout.read(turns)) == turns, "the child ended by itself"


def committed(journal: Path) -> dict[str, tuple[str, int]]:
    """holder → body uid and size, as the journal says."""
    found: dict[str, tuple[str, int]] = {}
    for line in journal.read_text().splitlines():
        kind, holder, uid, size = line.split()
        if kind == "put":
            found[holder] = (uid, int(size))
        else:
            del found[holder]
    return found


def check_recovered(memory: Memory, journal: Path) -> None:
    """After everybody died: exactly what is committed is there, byte for byte."""
    mark = memory.mark()
    live = committed(journal)
    memory.reconcile(set(live), mark)
    assert audit(memory.store) == []
    sizes = dict(live.values())
    for uid, size_bytes in sizes.items():
        with memory.pin(uid) or pytest.fail(f"{uid} was lost") as pin:
            blocks = [pin.block(index) or [] for index in range(Body(uid, size_bytes).block_count)]
            data = b"".join(bytes(view) for views in blocks for view in views)
            assert data == random.Random(uid).randbytes(size_bytes)
    stats = memory.stats()
    assert stats.bodies == len(sizes)
    assert (stats.receiving_bytes, stats.reserved_bytes, stats.pinned_bytes) == (0, 0, 0)
    assert stats.used_bytes == sum(-(-size_bytes // 512) * 512 for size_bytes in sizes.values())
    assert [path.name for path in (memory.store.folder / "leases").iterdir()] == [memory.store.lease.token]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "BLOCK_BYTES", BLOCK)


def test_kill_any_time_recovers_exactly_what_was_committed(tmp_path: Path) -> None:
    seed = int(os.environ.get("TIERGATE_TEST_SEED", random.SystemRandom().randrange(1 << 30)))
    choice = random.Random(seed)
    folder, journal = tmp_path / "m", tmp_path / "journal"
    journal.touch()
    for turn in range(ROUNDS):
        where = f"TIERGATE_TEST_SEED={seed}, round {turn}"
        with ExitStack() as stack:
            first = stack.enter_context(child(folder, journal, choice.randrange(1 << 30)))
            second = stack.enter_context(child(folder, journal, choice.randrange(1 << 30)))
            wait_turns(first, choice.randrange(1, 150))
            wait_turns(second, choice.randrange(1, 150))
            first.kill()
            first.wait()
            # One is dead, the other one works: recovery now must leave the living alone.
            memory = Memory.open(folder, LIMITS, SystemClock())
            mark = memory.mark()
            memory.reconcile(set(committed(journal)), mark)
            problems = audit(memory.store)
            assert problems == [], where
            wait_turns(second, choice.randrange(1, 50))
            second.kill()
            second.wait()
            check_recovered(memory, journal)
            memory.close()


def test_kill_while_making_the_folder_leaves_one_that_opens(tmp_path: Path) -> None:
    seed = int(os.environ.get("TIERGATE_TEST_SEED", random.SystemRandom().randrange(1 << 30)))
    journal = tmp_path / "journal"
    journal.touch()
    for turn in range(4):
        folder = tmp_path / f"m{turn}"
        with child(folder, journal, seed + turn) as process:
            while not folder.exists() and process.poll() is None:
                os.sched_yield()
            process.kill()
            process.wait()
        memory = Memory.open(folder, LIMITS, SystemClock())
        memory.reap()
        assert audit(memory.store) == [], f"TIERGATE_TEST_SEED={seed}"
        memory.close()


READER = """
import sys
from pathlib import Path
from tiergate.lmdbfile import open_environment
environment = open_environment(Path(sys.argv[1]), 1 << 20, 9)
txn = environment.begin()
sys.stdout.write("reading\\n")
sys.stdout.flush()
sys.stdin.read()
"""


def test_kill_in_the_middle_of_a_read_does_not_fill_the_index(tmp_path: Path) -> None:
    memory = Memory.open(tmp_path / "m", MemoryLimits(2 << 20, 1 << 20, 1 << 18), SystemClock())
    memory.receive("a", 5, "v1").abort()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, "-c", READER, str(tmp_path / "m" / "index")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
    ) as reader:
        assert reader.stdout is not None
        assert reader.stdout.readline() == b"reading\n"
        reader.kill()
    for _ in range(500):
        receiving = memory.receive("a", 5, "v1")
        receiving.write(b"hello")
        receiving.seal()
        receiving.abort()
    assert audit(memory.store) == []
    memory.close()
