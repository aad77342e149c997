"""Cuts in the network, and narrow places: nobody sees anything older than what was acknowledged, and all ends well."""

import functools
import os

import pytest
from botocore.exceptions import BotoCoreError, ClientError
from tests.cluster.clusters import Cluster
from tests.cluster.conftest import StartCluster, thorough
from tests.cluster.test_deaths import put

from tiergate.testing.histories import Did, Value
from tiergate.testing.journal import status_of, value_of
from tiergate.testing.objects import body_of

MIB = 1 << 20
SHORT = ("--origin-read-timeout", "1s", "--peer-timeout", "1s")


def read(cluster: Cluster, name: str, key: str) -> Value | None:
    """What a node shows of a key, noted for the judges; None if it does not answer (nor then claims anything)."""
    client = cluster.client(name)
    from_s = cluster.journal.now_s()
    try:
        value = value_of(body_of(client, cluster.bucket, key))
    except BotoCoreError:
        return None
    except ClientError as error:
        assert status_of(error) >= 500, error
        return None
    cluster.journal.saw(key, Did.READ, value, from_s)
    return value


@thorough
def test_two_nodes_that_do_not_hear_each_other(start_cluster: StartCluster) -> None:
    cluster = start_cluster(flags=SHORT)
    cluster.trainer().train(1)
    with cluster.training() as trainer:
        cluster.cut_apart("n0", "n1")
        cluster.wait_saved(trainer, 2)
        cluster.standing.network.heal()
        cluster.wait_saved(trainer)
    assert cluster.journal.failures == []
    cluster.end()


def test_node_that_hears_no_other_node(start_cluster: StartCluster) -> None:
    """It cannot have copies anywhere: what it acknowledges, it acknowledges at the origin."""
    cluster = start_cluster(flags=SHORT)
    put(cluster, "n1", "before", b"before")
    cluster.cut_apart("n0", "n1", "n2")
    for number in range(3):
        client = cluster.client("n0")
        key, body = f"k{number}", os.urandom(1000)
        try:
            call = functools.partial(client.put_object, Bucket=cluster.bucket, Key=key, Body=body)
            cluster.journal.write(key, value_of(body), call)
        except (BotoCoreError, ClientError) as error:
            assert status_of(error) in (0, 503), error
    put(cluster, "n1", "before", b"after")
    assert read(cluster, "n0", "before") in (None, value_of(b"after"))
    cluster.standing.network.heal()
    cluster.end()


def test_node_that_does_not_reach_etcd(start_cluster: StartCluster) -> None:
    """Others take over what it owes; it shows nothing older than what they acknowledge, and acknowledges nothing."""
    cluster = start_cluster(flags=SHORT)
    put(cluster, "n0", "k", b"first")
    cluster.cut_from_etcd("n0")
    cluster.wait_gone("n0")
    put(cluster, "n1", "k", b"second")
    assert read(cluster, "n0", "k") in (None, value_of(b"second"))
    client = cluster.client("n0")
    with pytest.raises((BotoCoreError, ClientError)):
        cluster.journal.write(
            "k", value_of(b"third"), lambda: client.put_object(Bucket=cluster.bucket, Key="k", Body=b"third")
        )
    with cluster.training("n1", "n2") as trainer:
        cluster.wait_saved(trainer)
        cluster.standing.network.heal()
        cluster.wait_saved(trainer)
    cluster.node("n0").wait_until("n0 is back", lambda: cluster.is_member("n0"))
    put(cluster, "n0", "k", b"fourth")
    cluster.end()


@thorough
def test_nodes_that_do_not_reach_the_origin(start_cluster: StartCluster) -> None:
    """First one, then all: saves go on, and all is written back once the origin is there again."""
    cluster = start_cluster(flags=SHORT)
    cluster.trainer().train(1)
    with cluster.training(shard_bytes=(3000, 100_000)) as trainer:
        cluster.cut_from_origin("n0")
        cluster.wait_saved(trainer)
        cluster.cut_from_origin("n1", "n2")
        cluster.wait_saved(trainer)
        cluster.standing.network.heal()
        cluster.wait_saved(trainer)
    assert cluster.journal.failures == []
    cluster.end()


@thorough
def test_node_cut_from_everything_at_once(start_cluster: StartCluster) -> None:
    """Its switch dies in mid-save: to others it is dead, to itself all others are; then it is there again."""
    cluster = start_cluster(flags=SHORT)
    with cluster.training() as trainer:
        cluster.wait_saved(trainer)
        cluster.cut_from_etcd("n0")
        cluster.cut_from_origin("n0")
        cluster.cut_apart("n0", "n1", "n2")
        cluster.wait_gone("n0")
        with cluster.training("n1", "n2", run="elsewhere") as elsewhere:
            cluster.wait_saved(elsewhere)
        cluster.standing.network.heal()
        cluster.wait_saved(trainer)
    cluster.node("n0").wait_until("n0 is back", lambda: cluster.is_member("n0"))
    cluster.end()


@thorough
def test_narrow_link_to_a_node(start_cluster: StartCluster) -> None:
    cluster = start_cluster(flags=SHORT)
    cluster.standing.network.throttle(cluster.places["n1"], 4 * MIB)
    trainer = cluster.trainer("n0", "n2", shard_bytes=(MIB,))
    trainer.train(3)
    assert cluster.journal.failures == []
    # Copies went there, too, or what it reads now comes through the narrow place.
    for step in trainer.saved:
        assert len(body_of(cluster.patient("n1"), cluster.bucket, f"{trainer.prefix(step)}__0_0.distcp")) == MIB
    cluster.end()


@thorough
def test_peer_without_room_is_passed_over(start_cluster: StartCluster) -> None:
    """One peer's memory is full of what the origin does not take: what has no room there goes to the origin, or
    waits; nothing is acknowledged at less."""
    cluster = start_cluster(memory_limits={"n1": "32MiB"}, flags=SHORT)
    put(cluster, "n0", "known", b"so that the bucket is known")
    cluster.cut_from_origin(*cluster.nodes)
    trainer = cluster.trainer("n1", ranks_count=2, shard_bytes=(4 * MIB,))
    trainer.save(0)
    trainer.save(1)
    other = cluster.trainer("n0", "n2", run="other", ranks_count=2, shard_bytes=(4 * MIB,))
    other.train(2)
    assert other.saves_count == 2
    cluster.standing.network.heal()
    cluster.end()
