import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tiergate import model
from tiergate.memory.audit import audit
from tiergate.memory.memory import Memory, MemoryLimits

BLOCK_BYTES = 4096


class ManualClock:
    """A clock that goes on by a millisecond at each look, and by hand."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def wall_s(self) -> float:
        return self.now_s

    def monotonic_s(self) -> float:
        self.now_s += 0.001
        return self.now_s

    async def sleep(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> MemoryLimits:
    """64 blocks of 4 KiB beside the index, grown eight at a time."""
    monkeypatch.setattr(model, "BLOCK_BYTES", BLOCK_BYTES)
    return MemoryLimits((1 << 20) + 64 * BLOCK_BYTES, 1 << 20, 8 * BLOCK_BYTES)


@pytest.fixture
def memory(tmp_path: Path, limits: MemoryLimits, clock: ManualClock) -> Iterator[Memory]:
    """A memory that is found sound after the test."""
    opened = Memory.open(tmp_path / "memory", limits, clock)
    yield opened
    problems = audit(opened.store)
    opened.close()
    assert problems == []


@pytest.fixture
def content() -> Callable[[str, int], bytes]:
    """The bytes that a body of this uid and size has."""
    return lambda uid, size_bytes: random.Random(uid).randbytes(size_bytes)
