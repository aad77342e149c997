"""What comes in for a run is evicted with its set from the first byte on."""

from collections.abc import Callable

import pytest
from tests.unit.engine.cluster import BUCKET, Cluster, Node, content

from tiergate.checkpoints.retention import group_of
from tiergate.memory.memory import Level, Rank
from tiergate.memory.rows import MAKING, scan

RUN = "{uri = 's3://bucket/run/', keep = 1}"
DATA = content(1000)


def ranks(node: Node) -> list[Rank]:
    store = node.memory.store
    with store.read() as txn:
        return [Rank.unpack(value) for _, value in scan(txn, store.tables.ranks, b"")]


def made(prefix: str) -> Rank:
    return Rank(Level.LATE, MAKING, group_of(BUCKET, prefix))


@pytest.fixture
def node(start: Callable[..., Cluster]) -> Node:
    return start(1, alone=True, prefixes=RUN)["a"]


async def test_put_belongs_to_the_set_of_its_folder(node: Node) -> None:
    await node.put("run/5/deep/shard", DATA)
    assert ranks(node) == [made("run/5/")]


async def test_parts_belong_to_the_set_of_their_object(node: Node) -> None:
    upload_id = await node.create("run/5/large")
    await node.part("run/5/large", upload_id, 1, DATA)
    assert ranks(node) == [made("run/5/")]
    await node.abort("run/5/large", upload_id)
    assert ranks(node) == []


async def test_what_is_in_no_set_belongs_to_none(node: Node) -> None:
    await node.put("run/latest", DATA)
    await node.put("elsewhere/5/shard", DATA)
    assert ranks(node) == []
