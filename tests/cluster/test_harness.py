"""The harness on nodes without a cluster: what its judges say of a sound node, and that they see what is not."""

import functools
import os
import random

import pytest
from tests.cluster.clusters import CLIENT
from tests.cluster.conftest import StartCluster, thorough

from tiergate.clock import SystemClock
from tiergate.etcd.client import Access, EtcdClient
from tiergate.etcd.values import Put, Txn
from tiergate.testing.endstate import memory_problems
from tiergate.testing.etcd import EtcdServer, needs_etcd
from tiergate.testing.front import Front
from tiergate.testing.journal import Journal, value_of
from tiergate.testing.objects import body_of
from tiergate.testing.origins import s3_client
from tiergate.testing.rules import Answer, Seen, Slow


@thorough
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


@thorough
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


@thorough
def test_judge_sees_what_is_owed(start_cluster: StartCluster) -> None:
    cluster = start_cluster(nodes_count=1, alone=True)
    cluster.standing.proxy.inject(Answer(503, "SlowDown"), operation="PutObject", times=None)
    cluster.trainer(ranks_count=1, shard_bytes=(10,)).train(1)
    with pytest.raises(AssertionError, match="n0 has pending writes"):
        cluster.end(deadline_s=0.5)
    cluster.standing.proxy.heal()
    cluster.end()


@thorough
def test_memory_of_a_dead_node_is_audited(start_cluster: StartCluster) -> None:
    cluster = start_cluster(nodes_count=1, alone=True)
    cluster.trainer().train(1)
    node = cluster.node("n0")
    limit_bytes = node.status()["memory"]["limit_bytes"]
    node.kill9()
    assert memory_problems(node.memory_dir / "slabs", limit_bytes, is_alone=True) == []


@needs_etcd
async def test_etcd_goes_back_to_a_copy_and_to_nothing() -> None:
    with EtcdServer() as etcd:

        async def put(key: bytes) -> None:
            client = EtcdClient(Access(etcd.endpoints), SystemClock(), random.Random(0))
            await client.repeat(lambda: client.txn(Txn((), (Put(key, b"value"),))))
            await client.close()

        await put(b"/first")
        copy = etcd.save()
        await put(b"/second")
        assert [bytes(each.key) for each in etcd.rows(b"/")] == [b"/first", b"/second"]
        etcd.restore(copy)
        assert [bytes(each.key) for each in etcd.rows(b"/")] == [b"/first"]
        before = etcd.status(etcd.members[0]).header.cluster_id
        etcd.restore(None)
        assert etcd.rows(b"/") == []
        assert etcd.status(etcd.members[0]).header.cluster_id != before


def test_front_sends_each_request_where_it_is_told(start_cluster: StartCluster) -> None:
    cluster = start_cluster(nodes_count=2, alone=True)
    one, other = (cluster.node(name) for name in ("n0", "n1"))

    def route(seen: Seen) -> str:
        return other.endpoint if seen.method == "GET" else one.endpoint

    with Front(route) as front:
        client = s3_client(front.endpoint, CLIENT["TIERGATE_ACCESS_KEY_ID"], CLIENT["TIERGATE_SECRET_ACCESS_KEY"])
        body = os.urandom(100_000)
        client.put_object(Bucket=cluster.bucket, Key="k", Body=body)
        one.wait_settled()
        assert body_of(client, cluster.bucket, "k") == body
        client.close()
    assert one.metric("tiergate_http_requests_total") == 1
    assert other.metric("tiergate_http_requests_total") == 1
