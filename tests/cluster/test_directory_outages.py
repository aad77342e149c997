"""etcd loses its leader, all of its members, or its data."""

from tests.cluster.conftest import StartCluster
from tests.cluster.test_deaths import hold_writes, put

from tiergate.testing.objects import body_of


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


def test_all_members_start_again_under_load(start_cluster: StartCluster) -> None:
    cluster = start_cluster(members_count=3)
    with cluster.training() as trainer:
        cluster.wait_saved(trainer)
        cluster.etcd.restart()
        cluster.wait_saved(trainer)
    assert cluster.journal.failures == []
    cluster.end()


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
    cluster.end()
