from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from tests.unit.engine.cluster import BLOCK_BYTES, Cluster

from tiergate import model
from tiergate.engine import fills, reads
from tiergate.memory import inventory, store


@pytest.fixture
async def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Callable[..., Cluster]]:
    """Starts clusters with small blocks; they are closed, and found sound, after the test."""
    for module in (model, fills, reads, inventory, store):
        monkeypatch.setattr(module, "BLOCK_BYTES", BLOCK_BYTES)
    async with AsyncExitStack() as stack:
        count = 0

        def start(nodes_count: int = 3, **more: Any) -> Cluster:
            nonlocal count
            count += 1
            cluster = Cluster(tmp_path / str(count), nodes_count, **more)
            stack.push_async_callback(cluster.close)
            return cluster

        yield start


@pytest.fixture
def cluster(start: Callable[..., Cluster]) -> Cluster:
    return start()
