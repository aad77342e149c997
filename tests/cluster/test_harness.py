"""The harness on nodes without a cluster: what its judges say of a sound node, and that they see what is not."""

import functools
import os

import pytest
from tests.cluster.conftest import StartCluster

from tiergate.testing.endstate import memory_problems
from tiergate.testing.journal import Journal, value_of
from tiergate.testing.rules import Answer, Slow


def test_training_on_one_node_ends_well(start_cluster: StartCluster) -> None:
    cluster = start_cluster(nodes_count=1, alone=True)
    cluster.standing.proxy.inject(Slow(0.02), times=None)
    trainer = cluster.trainer()
    trainer.train(4)
    assert trainer.saved
    assert cluster.journal.failures == []
    cluster.node("n0").kill9()
    cluster.node("n0").start()
    trainer.train(2)
    cluster.end()


def test_cut_from_origin_is_survived(start_cluster: StartCluster) -> None:
    cluster = start_cluster(nodes_count=1, alone=True, flags=("--origin-read-timeout", "1s"))
    trainer = cluster.trainer()
    trainer.train(1)
    cluster.cut_from_origin("n0")
    trainer.train(2)
    assert cluster.journal.failures == []
    assert cluster.node("n0").status()["writeback"]["pending"]
    cluster.standing.network.heal()
    cluster.end()


def test_judges_see_what_is_wrong(start_cluster: StartCluster) -> None:
    cluster = start_cluster(nodes_count=1, alone=True)
    client = cluster.client("n0")
    journal, bucket = cluster.journal, cluster.bucket
    body = os.urandom(1000)
    for key in ("run/a", "run/b", "run/.metadata"):
        put = functools.partial(client.put_object, Bucket=bucket, Key=key, Body=body)
        journal.write(key, value_of(body), put)
    cluster.end()

    cluster.direct.put_object(Bucket=bucket, Key="run/a", Body=b"other")
    with pytest.raises(AssertionError, match="the origin holds of run/a 5"):
        cluster.end()
    pretend(journal, "run/c")
    with pytest.raises(AssertionError, match="no order of what was done to run/c"):
        cluster.end()
    body = os.urandom(1000)
    journal.write(
        "run/.metadata",
        value_of(body),
        lambda: client.put_object(Bucket=bucket, Key="run/.metadata", Body=body),
    )
    with pytest.raises(AssertionError, match=r"run/\.metadata appeared while run/c was absent"):
        cluster.end()


def pretend(journal: Journal, key: str) -> None:
    """Note a write as acknowledged that never was."""
    journal.write(key, value_of(b"lost"), lambda: {"ETag": '"lost"', "ResponseMetadata": {"HTTPHeaders": {}}})


def test_judge_sees_what_is_owed(start_cluster: StartCluster) -> None:
    cluster = start_cluster(nodes_count=1, alone=True)
    cluster.standing.proxy.inject(Answer(503, "SlowDown"), operation="PutObject", times=None)
    cluster.trainer(ranks_count=1, shard_bytes=(10,)).train(1)
    with pytest.raises(AssertionError, match="n0 has pending writes"):
        cluster.end(deadline_s=0.5)
    cluster.standing.proxy.heal()
    cluster.end()


def test_memory_of_a_dead_node_is_audited(start_cluster: StartCluster) -> None:
    cluster = start_cluster(nodes_count=1, alone=True)
    cluster.trainer().train(1)
    node = cluster.node("n0")
    limit_bytes = node.status()["memory"]["limit_bytes"]
    node.kill9()
    assert memory_problems(node.memory_dir / "slabs", limit_bytes) == []
