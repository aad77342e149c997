"""Nodes that are members of one cluster: how they come, stay, go and come back. What they do for each other: elsewhere.

etcd, nodes and origin are real processes; nothing else would show what they show.
"""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest
from botocore.exceptions import ClientError
from tests.etcds import StartCluster
from tests.nodes import FLAGS, StartNode

from tiergate.child import LEFT_BEHIND_STATUS
from tiergate.testing.cluster import RunningCluster
from tiergate.testing.etcd import EtcdServer, needs_etcd
from tiergate.testing.faults import FaultyOrigin
from tiergate.testing.node import NodeEndedError, RunningNode
from tiergate.testing.objects import ack_of, body_of, is_missing
from tiergate.testing.origins import MotoOrigin
from tiergate.testing.rules import Answer, Gate, Hold

pytestmark = [needs_etcd, pytest.mark.parametrize("origin", [MotoOrigin], ids=["moto"], indirect=True)]

POLL_S = 0.05
PART_BYTES = 5 << 20


def epoch_of(node: RunningNode) -> int:
    epoch: int = node.status()["cluster"]["epoch"]
    return epoch


def is_ready(node: RunningNode) -> bool:
    try:
        node._ask("GET", "/readyz")  # pyright: ignore[reportPrivateUsage]
    except HTTPError as error:
        assert error.code == 503
        return False
    return True


def put_status(client: Any, bucket: str, key: str) -> int:
    """The HTTP status of a put."""
    try:
        client.put_object(Bucket=bucket, Key=key, Body=b"x")
    except ClientError as error:
        status: int = error.response["ResponseMetadata"]["HTTPStatusCode"]
        return status
    return 200


def test_members_see_each_other_and_one_namespace(start_cluster: StartCluster, bucket: str) -> None:
    cluster = start_cluster(3, zones=["east", "east", "west"])
    statuses = [node.status()["cluster"] for node in cluster.nodes]
    seen = [[(each["node"], each["zone"], each["epoch"]) for each in status["nodes"]] for status in statuses]
    assert seen[0] == seen[1] == seen[2]
    assert [(name, zone) for name, zone, _ in seen[0]] == [("a", "east"), ("b", "east"), ("c", "west")]
    assert [epoch for _, _, epoch in seen[0]] == [status["epoch"] for status in statuses]
    addresses = [each["address"] for each in statuses[0]["nodes"]]
    assert addresses == [node.peers for node in cluster.nodes]
    assert {status["housekeeper"] for status in statuses} <= set("abc")
    assert len({status["housekeeper"] for status in statuses}) == 1
    assert all(is_ready(node) for node in cluster.nodes)

    cluster.client(0).put_object(Bucket=bucket, Key="k", Body=b"written on a")
    cluster.nodes[0].wait_settled()
    assert cluster.client(1).get_object(Bucket=bucket, Key="k")["Body"].read() == b"written on a"
    assert cluster.client(2).list_objects_v2(Bucket=bucket)["KeyCount"] == 1

    shown = subprocess.run(
        [sys.executable, "-m", "tiergate", "status", "--admin-listen", cluster.nodes[0].admin.removeprefix("http://")],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "cluster: nodes" in shown
    assert "west" in shown


def test_node_that_leaves_is_gone_at_once_and_comes_back_anew(start_cluster: StartCluster) -> None:
    # Nobody waits for a lease here: it is longer than a test may take.
    cluster = start_cluster(2, "--lease", "10m")
    a, b = cluster.nodes
    epoch, addresses = epoch_of(a), (a.endpoint, a.admin, a.peers)
    assert (a.memory_dir / "member.json").exists()
    assert a.stop() == 0
    cluster.wait_members("b")
    assert not (a.memory_dir / "member.json").exists()
    a.start()
    cluster.wait_members()
    assert epoch_of(a) > epoch
    assert (a.endpoint, a.admin, a.peers) == addresses
    assert b.stop() == 0


def test_node_that_stops_first_brings_away_what_it_owes(
    start_cluster: StartCluster, proxy: FaultyOrigin, bucket: str, direct: Any
) -> None:
    cluster = start_cluster(1, "--drain", "60s")
    (a,) = cluster.nodes
    gate = Gate()
    proxy.inject(Hold(gate), operation="PutObject")
    assert put_status(cluster.client(0), bucket, "owed") == 200
    gate.wait_reached()
    with ThreadPoolExecutor(1) as pool:
        stopping = pool.submit(a.stop)
        while "draining" not in a.log:
            assert not wait([stopping], POLL_S).done
        gate.release()
        assert stopping.result() == 0
    assert direct.get_object(Bucket=bucket, Key="owed")["Body"].read() == b"x"
    assert "owes_nothing=True" in a.log


def test_node_that_may_not_drain_keeps_what_it_owes(
    start_cluster: StartCluster, proxy: FaultyOrigin, bucket: str, direct: Any
) -> None:
    cluster = start_cluster(1, "--drain", "0")
    (a,) = cluster.nodes
    proxy.inject(Answer(503), operation="PutObject", times=None)
    assert put_status(cluster.client(0), bucket, "owed") == 200
    assert a.stop() == LEFT_BEHIND_STATUS
    assert is_missing(direct, bucket, "owed")
    assert (a.memory_dir / "member.json").exists()


def test_killed_node_goes_on_with_its_epoch(start_cluster: StartCluster, bucket: str) -> None:
    cluster = start_cluster(1, "--lease", "10m")
    (a,) = cluster.nodes
    epoch = epoch_of(a)
    client = cluster.client(0)
    # Its workers go on meanwhile, with what the board said last.
    a.kill9("background")
    assert put_status(client, bucket, "one") == 200
    a.wait_status("a member again", lambda status: status["cluster"]["member"])
    assert epoch_of(a) == epoch
    a.kill9("all")
    a.restart()
    cluster.wait_members()
    assert epoch_of(a) == epoch
    assert put_status(cluster.client(0), bucket, "two") == 200
    a.wait_settled()
    assert cluster.client(0).list_objects_v2(Bucket=bucket)["KeyCount"] == 2


def test_member_that_lost_its_lease_refuses_until_it_has_another(start_cluster: StartCluster, bucket: str) -> None:
    cluster = start_cluster(2, "--lease", "3s")
    a, b = cluster.nodes
    epoch = epoch_of(a)
    assert put_status(cluster.client(0), bucket, "before") == 200
    a.wait_settled()
    a.freeze("background")
    cluster.wait_members("b")
    assert put_status(cluster.client(0), bucket, "refused") == 503
    assert put_status(cluster.client(1), bucket, "elsewhere") == 200
    a.thaw("background")
    cluster.wait_members()
    assert epoch_of(a) > epoch
    assert is_ready(a)
    assert put_status(cluster.client(0), bucket, "after") == 200
    cluster.wait_settled()
    assert "this node is no longer a member of its cluster" in a.log
    keys = [each["Key"] for each in cluster.client(1).list_objects_v2(Bucket=bucket)["Contents"]]
    assert keys == ["after", "before", "elsewhere"]
    assert b.stop() == 0


def test_second_node_of_a_name_is_refused(start_cluster: StartCluster) -> None:
    cluster = start_cluster(1, "--lease", "3s")
    with pytest.raises(NodeEndedError, match="a node named a is alive: names must differ"), cluster.make("a"):
        pass
    assert is_ready(cluster.nodes[0])


def test_node_waits_for_etcd_and_says_so(proxy: FaultyOrigin) -> None:
    with EtcdServer() as server, ThreadPoolExecutor(1) as pool:
        (member,) = server.members
        member.kill()
        node = RunningCluster(proxy.endpoint, 1, etcd=server, flags=("--directory-patience", "1s")).make("a")
        with ExitStack() as stack:
            starting = pool.submit(stack.enter_context, node)
            while "cannot join the cluster yet" not in node.log_tail():
                assert not wait([starting], POLL_S).done
            assert member.endpoint in node.log
            server.start(member)
            starting.result()
            assert is_ready(node)


def test_worker_that_dies_while_etcd_is_away_is_replaced_and_its_node_ends_in_time(
    proxy: FaultyOrigin, bucket: str, direct: Any
) -> None:
    flags = (*FLAGS, "--lease", "3s", "--directory-patience", "1s", "--drain", "1s")
    with EtcdServer() as server, RunningCluster(proxy.endpoint, 1, etcd=server, flags=flags) as cluster:
        (a,) = cluster.nodes
        proxy.inject(Answer(503), operation="PutObject", times=None)
        assert put_status(cluster.client(0), bucket, "owed") == 200
        background = a.children["background-0"]
        (member,) = server.members
        member.kill()
        a.kill9("worker")
        a.wait_until("it cleans up again and again", lambda: a.log.count("cleaning up after the dead failed") > 1)
        # The new worker begins while its node is no member.
        assert put_status(cluster.client(0), bucket, "refused") == 503
        assert "directory" in a.status()
        assert not is_ready(a)
        assert a.children["background-0"] == background
        assert a.stop() == LEFT_BEHIND_STATUS
        assert (a.memory_dir / "member.json").exists()

        proxy.heal()
        server.start(member)
        server.wait_ready()
        a.start()
        a.wait_settled()
        assert direct.get_object(Bucket=bucket, Key="owed")["Body"].read() == b"x"
        assert is_missing(direct, bucket, "refused")
        assert a.stop() == 0


def test_node_alone_knows_nothing_of_clusters(start_node: StartNode) -> None:
    node = start_node()
    assert "cluster" not in node.status()
    for pid in node.children.values():
        loaded = Path(f"/proc/{pid}/maps").read_text()
        assert "lmdb" in loaded
        assert "grpc" not in loaded


def test_memory_of_a_member_is_of_no_use_to_another(start_cluster: StartCluster, start_node: StartNode) -> None:
    cluster = start_cluster(1)
    (a,) = cluster.nodes
    a.kill9("all")
    with pytest.raises(NodeEndedError, match=f"holds what node a of {cluster.url} may still owe"):
        start_node(memory_dir=a.memory_dir)
    with pytest.raises(NodeEndedError, match="holds what node a of"), cluster.make("b", memory_dir=a.memory_dir):
        pass
    a.restart()
    cluster.wait_members()


def test_what_a_node_alone_owes_keeps_it_from_joining(
    start_cluster: StartCluster, start_node: StartNode, proxy: FaultyOrigin, bucket: str
) -> None:
    cluster = start_cluster(1)
    alone = start_node()
    proxy.inject(Answer(503), operation="PutObject", times=None)
    assert put_status(alone.client(), bucket, "owed") == 200
    alone.kill9("all")
    with pytest.raises(NodeEndedError, match="holds 1 writes that this node owes to the origin from when it was alone"):
        with cluster.make("b", memory_dir=alone.memory_dir):
            pass
    proxy.heal()
    alone.restart()
    alone.wait_settled()
    alone.stop()
    with cluster.make("b", memory_dir=alone.memory_dir) as b:
        assert not (alone.memory_dir / "index" / "directory").exists()
        assert b.client().get_object(Bucket=bucket, Key="owed")["Body"].read() == b"x"


def test_upload_without_enough_nodes_for_its_copies_goes_on_to_the_origin(
    start_cluster: StartCluster, bucket: str, direct: Any
) -> None:
    cluster = start_cluster(1, "--replicas", "2")
    client, named = cluster.client(0), {"Bucket": bucket, "Key": "k"}
    named["UploadId"] = client.create_multipart_upload(**named)["UploadId"]
    bodies = [bytes([number]) * PART_BYTES for number in (1, 2)]
    parts = [
        {"PartNumber": number, "ETag": client.upload_part(**named, PartNumber=number, Body=body)["ETag"]}
        for number, body in enumerate(bodies, 1)
    ]
    answer = client.complete_multipart_upload(**named, MultipartUpload={"Parts": parts})
    assert ack_of(answer) == "origin"
    assert body_of(direct, bucket, "k") == body_of(client, bucket, "k") == b"".join(bodies)
    assert cluster.nodes[0].metric("tiergate_http_broken_invariants_total") == 0


def test_deletion_in_a_versioned_bucket_is_seen_by_the_other_node_at_once(
    start_cluster: StartCluster, bucket: str, direct: Any
) -> None:
    direct.put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": "Enabled"})
    cluster = start_cluster(2)
    one, other = cluster.client(0), cluster.client(1)
    for key in map(str, range(12)):
        one.put_object(Bucket=bucket, Key=key, Body=b"x")
        assert body_of(other, bucket, key) == b"x"
        other.delete_object(Bucket=bucket, Key=key)
        assert is_missing(one, bucket, key), key
