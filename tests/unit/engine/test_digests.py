"""Checksums of what is in memory: of all of it, or none."""

import base64
import os
from collections.abc import Iterator
from hashlib import md5
from pathlib import Path

import pytest

from tiergate.clock import SystemClock
from tiergate.engine.digests import NotInMemoryError, bodies_digest
from tiergate.memory.memory import Memory, MemoryLimits
from tiergate.model import BLOCK_BYTES, Body

MIB = 1 << 20


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Memory]:
    opened = Memory.open(tmp_path / "memory", MemoryLimits(64 * MIB, MIB, 8 * MIB), SystemClock())
    yield opened
    opened.close()


def received(memory: Memory, uid: str, data: bytes) -> Body:
    receiving = memory.receive(uid, len(data), f"holder-of-{uid}")
    receiving.write(data)
    return receiving.seal()


async def test_bodies_are_digested_one_after_the_other(memory: Memory) -> None:
    texts = [os.urandom(BLOCK_BYTES + 7), b"", os.urandom(3)]
    bodies = [received(memory, f"uid-{number}", text) for number, text in enumerate(texts)]
    digest = await bodies_digest(memory, bodies, "md5")
    assert base64.b64decode(digest) == md5(b"".join(texts), usedforsecurity=False).digest()


async def test_what_went_from_memory_has_no_digest(memory: Memory) -> None:
    bodies = [received(memory, f"uid-{number}", os.urandom(BLOCK_BYTES + 7)) for number in range(2)]
    memory.drop("holder-of-uid-1", ["uid-1"])
    with pytest.raises(NotInMemoryError):
        await bodies_digest(memory, bodies, "md5")


async def test_a_block_that_never_came_makes_no_digest(memory: Memory) -> None:
    """A body filled from elsewhere has some of its blocks only."""
    data = os.urandom(2 * BLOCK_BYTES)
    body = Body("uid-filled", len(data))
    block = memory.receive_block(body, 1, "holder")
    assert block is not None
    block.write(data[BLOCK_BYTES:])
    block.seal()
    with pytest.raises(NotInMemoryError):
        await bodies_digest(memory, [body], "md5")
