"""The parts of the memory budget never add up to more than the limit."""

import mmap
from pathlib import Path

import pytest

from tiergate.clock import SystemClock
from tiergate.config import Machine, Settings, load
from tiergate.lmdbfile import LOCK_FILE_BYTES
from tiergate.memory.memory import Memory
from tiergate.server.budget import ENVIRONMENTS_COUNT, SMALL_FILES_COUNT, split

MIB = 1 << 20
LIMITS = (8 * MIB, 8 * MIB + 1, 16 * MIB, 31 * MIB + 4095, 64 * MIB, 1 << 30, 100 << 30, 2 << 40)


def settings_of(limit_bytes: int, workers_count: int) -> Settings:
    machine = Machine(ram_bytes=4 * limit_bytes, cores_count=1, user_id=1)
    return load(config_file=None, environ={"TIERGATE_WORKERS": str(workers_count)}, flags={}, machine=machine).settings


@pytest.mark.parametrize("limit_bytes", LIMITS)
@pytest.mark.parametrize("workers_count", [1, 4, 256])
def test_parts_fit_the_limit(limit_bytes: int, workers_count: int) -> None:
    budget = split(settings_of(limit_bytes, workers_count))
    small_files = ENVIRONMENTS_COUNT * LOCK_FILE_BYTES + SMALL_FILES_COUNT * mmap.PAGESIZE
    metrics = (workers_count + 2) * budget.metrics_file_bytes
    assert budget.memory.budget_bytes + budget.directory_bytes + small_files + metrics <= limit_bytes
    assert metrics > 0
    budget.memory.check()


@pytest.mark.parametrize("limit_bytes", LIMITS)
def test_split_is_the_same_for_any_number_of_workers(limit_bytes: int) -> None:
    first, second = split(settings_of(limit_bytes, 1)), split(settings_of(limit_bytes, 256))
    assert (first.directory_bytes, first.memory) == (second.directory_bytes, second.memory)


def test_smallest_limit_holds_a_body(tmp_path: Path) -> None:
    memory = Memory.open(tmp_path, split(settings_of(LIMITS[0], 1)).memory, SystemClock())
    receiving = memory.receive("body", MIB, "holder")
    receiving.write(bytes(MIB))
    assert receiving.seal().size_bytes == MIB
    memory.close()
