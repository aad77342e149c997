"""Nodes that die, freeze, come back, come back empty, or leave in order: what they owed is finished by others, once,
and what they still believe harms nobody."""

from typing import Any

import pytest
from botocore.exceptions import BotoCoreError, ClientError
from tests.cluster.clusters import Cluster
from tests.cluster.conftest import StartCluster, thorough

from tiergate.testing.journal import value_of
from tiergate.testing.objects import body_of, is_missing
from tiergate.testing.rules import Gate, Hold

VISIBLE = ("PutObject", "CompleteMultipartUpload", "DeleteObject")


def hold_writes(cluster: Cluster) -> Gate:
    """What would become visible in the origin waits before it gets there."""
    gate = Gate()
    cluster.standing.proxy.inject(Hold(gate), where=lambda seen: seen.operation in VISIBLE, times=None)
    return gate


def put(cluster: Cluster, name: str, key: str, body: bytes) -> dict[str, Any]:
    """An acknowledged write through a node."""
    client = cluster.patient(name)
    return cluster.journal.write(
        key, value_of(body), lambda: client.put_object(Bucket=cluster.bucket, Key=key, Body=body)
    )


def delete(cluster: Cluster, name: str, key: str) -> None:
    """An acknowledged deletion through a node."""
    client = cluster.patient(name)
    cluster.journal.write(key, None, lambda: client.delete_object(Bucket=cluster.bucket, Key=key))


def test_survivors_finish_what_a_killed_owner_owed(start_cluster: StartCluster) -> None:
    cluster = start_cluster()
    cluster.trainer("n0").save(0)
    gate = hold_writes(cluster)
    trainer = cluster.trainer("n0", run="owed")
    trainer.train(2)
    gate.wait_reached()
    cluster.node("n0").kill9()
    gate.release()
    cluster.wait_gone("n0")
    # What n0 had on the wire may still land; what survivors serve is right at once.
    client = cluster.patient("n1")
    for step in trainer.saved:
        assert body_of(client, cluster.bucket, f"{trainer.prefix(step)}.metadata")
    cluster.standing.proxy.heal()
    cluster.trainer("n1", "n2", run="after").train(2)
    cluster.end(but=["n0"])


@thorough
def test_promises_to_the_dead_end(start_cluster: StartCluster) -> None:
    """What peers kept for a sender that died in between is given back, once their promise is over."""
    cluster = start_cluster(brief=True)
    gate = hold_writes(cluster)
    with cluster.training("n0") as trainer:
        cluster.wait_saved(trainer)
        cluster.node("n0").kill9()
    gate.release()
    cluster.standing.proxy.heal()
    cluster.end(but=["n0"])


def test_what_a_zombie_sends_harms_nothing(start_cluster: StartCluster) -> None:
    cluster = start_cluster()
    for key in ("kept", "replaced", "deleted"):
        put(cluster, "n0", key, b"first of " + key.encode())
    # The late put of a key that the origin did not have may bring it back (SEMANTICS, Limits).
    cluster.node("n0").wait_settled()
    gate = hold_writes(cluster)
    for key in ("kept", "replaced", "deleted", "new"):
        put(cluster, "n0", key, b"second of " + key.encode())
    gate.wait_reached()
    cluster.node("n0").freeze()
    cluster.standing.proxy.heal()  # Before anybody takes over: what others send is not held.
    cluster.wait_gone("n0")
    put(cluster, "n1", "replaced", b"third")
    delete(cluster, "n2", "deleted")
    survivor = cluster.node("n1")
    survivor.wait_until("the origin has it", lambda: in_origin(cluster, "replaced") == b"third")
    survivor.wait_until("the origin has lost it", lambda: is_missing(cluster.direct, cluster.bucket, "deleted"))
    # Now what the frozen node had on the wire arrives, and then it goes on where it stopped.
    gate.release()
    cluster.node("n0").thaw()
    cluster.end()


def in_origin(cluster: Cluster, key: str) -> bytes | None:
    """An object as the origin has it."""
    try:
        return body_of(cluster.direct, cluster.bucket, key)
    except cluster.direct.exceptions.NoSuchKey:
        return None


@thorough
def test_two_of_three_die_and_the_third_finishes(start_cluster: StartCluster) -> None:
    cluster = start_cluster(copies_count=3)
    gate = hold_writes(cluster)
    cluster.trainer("n0", "n1").train(2)
    assert set(cluster.journal.rules) == {"memory:3"}
    gate.wait_reached()
    for name in ("n0", "n1"):
        cluster.node(name).kill9()
    gate.release()
    cluster.standing.proxy.heal()
    cluster.wait_gone("n0")
    cluster.wait_gone("n1")
    # The rule cannot be met any more, so a write goes the safer way and says so.
    answer = put(cluster, "n2", "alone", b"alone")
    assert answer["ResponseMetadata"]["HTTPHeaders"]["x-tiergate-ack"] == "origin"
    cluster.end(but=["n0", "n1"])


@thorough
def test_node_comes_back_with_its_memory(start_cluster: StartCluster) -> None:
    cluster = start_cluster()
    gate = hold_writes(cluster)
    cluster.trainer("n0").train(1)
    gate.wait_reached()
    cluster.node("n0").kill9()
    cluster.node("n0").start()
    gate.release()
    cluster.standing.proxy.heal()
    cluster.end()


def test_node_comes_back_empty_under_its_name(start_cluster: StartCluster) -> None:
    cluster = start_cluster()
    cluster.trainer("n0").train(1)
    gate = hold_writes(cluster)
    cluster.trainer("n0", run="owed").train(1)
    node = cluster.node("n0")
    node.kill9()
    node.wipe()
    node.start()
    # It holds nothing now, whatever is written of its name: all is read from where it is.
    client = cluster.patient("n0")
    assert body_of(client, cluster.bucket, "owed/step-0/.metadata")
    gate.release()
    cluster.standing.proxy.heal()
    cluster.trainer().train(2)
    cluster.end()


@thorough
@pytest.mark.parametrize("victim", ["worker", "background", "parent"])
def test_single_processes_die_under_load(start_cluster: StartCluster, victim: Any) -> None:
    cluster = start_cluster()
    with cluster.training() as trainer:
        for name in ("n0", "n1"):
            cluster.wait_saved(trainer)
            cluster.node(name).kill9(victim)
            if victim == "parent":
                cluster.node(name).start()
    cluster.end()


def test_rolling_restart_costs_no_client_an_error(start_cluster: StartCluster) -> None:
    cluster = start_cluster(flags=("--drain", "10s"))
    with cluster.training(may_move=False) as trainer:
        for node in cluster.nodes.values():
            cluster.wait_saved(trainer)
            assert node.stop() == 0
            node.start()
        cluster.wait_saved(trainer)
    assert cluster.journal.failures == []
    cluster.end()


@thorough
def test_drain_brings_what_is_owed_to_the_origin(start_cluster: StartCluster) -> None:
    cluster = start_cluster(flags=("--drain", "20s"))
    trainer = cluster.trainer("n0")
    trainer.train(2)
    assert cluster.node("n0").stop() == 0
    for step in trainer.saved:
        assert in_origin(cluster, f"{trainer.prefix(step)}.metadata") is not None
    cluster.end(but=["n0"])


def test_drain_without_an_origin_leaves_it_to_peers(start_cluster: StartCluster) -> None:
    cluster = start_cluster(flags=("--drain", "5s", "--origin-read-timeout", "1s"))
    put(cluster, "n0", "known", b"so that the bucket is known")
    cluster.cut_from_origin(*cluster.nodes)
    trainer = cluster.trainer("n0")
    trainer.train(2)
    assert cluster.node("n0").stop() == 0
    # It left in order: nobody waits for its lease.
    assert not cluster.is_member("n0")
    client = cluster.patient("n1")
    for step in trainer.saved:
        assert body_of(client, cluster.bucket, f"{trainer.prefix(step)}.metadata")
    cluster.standing.network.heal()
    cluster.end(but=["n0"])


@thorough
def test_dead_node_is_no_reason_to_fail(start_cluster: StartCluster) -> None:
    """Before its lease is over, too: whoever has copies there finds others."""
    cluster = start_cluster()
    cluster.trainer().train(1)
    cluster.node("n2").kill9()
    trainer = cluster.trainer("n0", "n1")
    trainer.train(2)
    assert cluster.journal.failures == []
    cluster.end(but=["n2"])


@thorough
def test_nothing_is_acknowledged_that_only_the_dead_held(start_cluster: StartCluster) -> None:
    """A node dies right after each acknowledgement that it gave, and all it acknowledged is there."""
    cluster = start_cluster(nodes_count=2)
    gate = hold_writes(cluster)
    for number in range(3):
        put(cluster, "n0", f"k{number}", b"body of %d" % number)
    cluster.node("n0").kill9()
    cluster.wait_gone("n0")
    client = cluster.patient("n1")
    for number in range(3):
        assert body_of(client, cluster.bucket, f"k{number}") == b"body of %d" % number
    with pytest.raises((ClientError, BotoCoreError)):
        cluster.client("n0").head_bucket(Bucket=cluster.bucket)
    gate.release()
    cluster.standing.proxy.heal()
    cluster.end(but=["n0"])
