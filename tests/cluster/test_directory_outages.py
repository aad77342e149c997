"""etcd is slow or away, or loses its leader, all of its members, or its data."""

from collections.abc import Callable
from typing import Any

import pytest
from botocore.exceptions import ClientError
from tests.cluster.clusters import LONG_LEASE_S
from tests.cluster.conftest import StartCluster, thorough
from tests.cluster.test_deaths import hold_writes, in_origin, put

from tiergate.testing.journal import status_of
from tiergate.testing.objects import ACK_HEADER, body_of


def test_leader_dies_under_load(start_cluster: StartCluster) -> None:
    cluster = start_cluster(members_count=3)
    with cluster.training() as trainer:
        cluster.wait_saved(trainer)
        leader = cluster.etcd.leader()
        leader.kill()
        cluster.wait_saved(trainer, 2)
        cluster.etcd.start(leader)
        cluster.wait_saved(trainer)
    assert cluster.journal.failures == []
    cluster.etcd.wait_ready()
    cluster.end()


@thorough
def test_all_members_start_again_under_load(start_cluster: StartCluster) -> None:
    cluster = start_cluster(members_count=3)
    with cluster.training() as trainer:
        cluster.wait_saved(trainer)
        cluster.etcd.restart()
        cluster.wait_saved(trainer)
    assert cluster.journal.failures == []
    cluster.end()


@thorough
def test_frozen_etcd_is_waited_for_or_said(start_cluster: StartCluster) -> None:
    """Longer than a lease: nothing is acknowledged in the dark, and all is as it was afterwards."""
    cluster = start_cluster(flags=("--directory-patience", "2s"))
    put(cluster, "n0", "k", b"before")
    member = cluster.etcd.members[0]
    with cluster.training() as trainer:
        cluster.wait_saved(trainer)
        member.freeze()
        node = cluster.node("n0")
        end_s = cluster.journal.now_s() + cluster.lease_s + 1
        node.wait_until("the lease is over", lambda: cluster.journal.now_s() > end_s)
        member.thaw()
        cluster.wait_saved(trainer)
    assert body_of(cluster.patient("n2"), cluster.bucket, "k") == b"before"
    cluster.end()


@thorough
def test_slow_etcd_costs_time_only(start_cluster: StartCluster) -> None:
    """As far away as another continent: nobody loses a lease, no client gets an error."""
    cluster = start_cluster(etcd_delay_s=0.1, lease_s=LONG_LEASE_S)
    epochs = cluster.epochs
    trainer = cluster.trainer(shard_bytes=(3000, 100_000))
    trainer.train(2)
    assert cluster.journal.failures == []
    assert cluster.epochs == epochs
    cluster.end()


def refused(call: Callable[..., Any], **params: Any) -> None:
    """A call ends so that S3's clients know to try it again."""
    with pytest.raises(ClientError) as raised:
        call(**params)
    assert status_of(raised.value) == 503
    assert raised.value.response["Error"]["Code"] == "SlowDown"
    assert "retry-after" in raised.value.response["ResponseMetadata"]["HTTPHeaders"]


def test_etcd_is_away_for_all(start_cluster: StartCluster) -> None:
    """Somebody may have written anything meanwhile, for all they know: so nodes show nothing, take nothing, and make
    nothing visible in the origin, but under a prefix whose keys are written once."""
    cluster = start_cluster(flags=("--directory-patience", "1s"), prefix="immutable = true, fence = 'off'")
    put(cluster, "n0", "k", b"first")
    put(cluster, "n0", "once/a", b"a")
    cluster.node("n0").wait_settled()
    assert body_of(cluster.patient("n1"), cluster.bucket, "once/a") == b"a"
    cluster.cut_from_origin(*cluster.nodes)
    put(cluster, "n0", "k", b"second")
    cluster.cut_from_etcd(*cluster.nodes)
    for name in cluster.nodes:
        cluster.wait_gone(name)
    cluster.standing.network.heal(cluster.standing.proxy_host)

    for name in cluster.nodes:
        client, bucket, new = cluster.client(name), cluster.bucket, f"once/{name}"
        refused(client.get_object, Bucket=bucket, Key="k")
        refused(client.put_object, Bucket=bucket, Key="k", Body=b"third")
        refused(client.list_objects_v2, Bucket=bucket)
        # n2 was not asked for it before: it is the origin's to say.
        assert body_of(client, bucket, "once/a") == b"a"
        answer = put(cluster, name, new, b"new")
        assert answer["ResponseMetadata"]["HTTPHeaders"][ACK_HEADER] == "origin"
        with pytest.raises(ClientError, match="PreconditionFailed"):
            client.put_object(Bucket=bucket, Key=new, Body=b"again")
    assert in_origin(cluster, "k") == b"first"

    cluster.standing.network.heal()
    one = cluster.node("n0")
    one.wait_until("all are back", lambda: all(cluster.is_member(name) for name in cluster.nodes))
    assert body_of(cluster.patient("n2"), cluster.bucket, "k") == b"second"
    cluster.end()


def test_etcd_goes_back_to_a_copy(start_cluster: StartCluster) -> None:
    """What was written back since is read from the origin; what the origin lacks is in memory still."""
    cluster = start_cluster()
    cluster.trainer().train(1)
    cluster.nodes["n0"].wait_settled()
    copy = cluster.etcd.save()
    gate = hold_writes(cluster)
    trainer = cluster.trainer("n0", run="since")
    trainer.train(1)
    gate.wait_reached()
    cluster.etcd.restore(copy)
    gate.release()
    cluster.standing.proxy.heal()
    cluster.trainer(run="after", may_forget=True).train(1)
    cluster.end()


def test_etcd_starts_empty(start_cluster: StartCluster) -> None:
    cluster = start_cluster()
    cluster.trainer().train(1)
    gate = hold_writes(cluster)
    trainer = cluster.trainer("n0", run="since")
    trainer.train(1)
    gate.wait_reached()
    cluster.etcd.restore(None)
    gate.release()
    cluster.standing.proxy.heal()
    cluster.trainer(run="after", may_forget=True).train(1)
    cluster.end()
