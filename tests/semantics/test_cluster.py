"""What several nodes promise together. Network faults, frozen nodes and random histories are in tests/cluster."""

import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import Any
from urllib.parse import urlencode
from urllib.request import Request, urlopen

import pytest
from tests.etcds import StartCluster
from tests.nodes import FLAGS

from tiergate.testing.cluster import RunningCluster
from tiergate.testing.completeness import changes_of
from tiergate.testing.etcd import EtcdServer, needs_etcd
from tiergate.testing.faults import FaultyOrigin
from tiergate.testing.objects import ack_of, body_of, is_missing, keys_of, refusal, uploads_of
from tiergate.testing.rules import Cut, Gate, Hold

pytestmark = needs_etcd

MIB = 1 << 20
MARKER = "run/s1/.metadata"
SHARDS = ["run/s1/__0_0.distcp", "run/s1/__1_0.distcp"]
LEASE = ("--lease", "3s")
"""The shortest, so that tests wait for the dead no longer than they must."""


@pytest.fixture(scope="module")
def standing_cluster(standing_proxy: FaultyOrigin, etcd: EtcdServer) -> Iterator[RunningCluster]:
    with RunningCluster(standing_proxy.endpoint, 3, etcd=etcd, flags=FLAGS) as cluster:
        yield cluster


@pytest.fixture
def cluster(standing_cluster: RunningCluster, proxy: FaultyOrigin) -> Iterator[RunningCluster]:
    """Three nodes that tests share: they leave all running, and nothing pending."""
    yield standing_cluster
    proxy.heal()
    standing_cluster.wait_settled()


def begin_upload(client: Any, bucket: str, key: str) -> dict[str, Any]:
    """An upload, as its operations name it."""
    begun = client.create_multipart_upload(Bucket=bucket, Key=key)
    return {"Bucket": bucket, "Key": key, "UploadId": begun["UploadId"]}


def clients_of(cluster: RunningCluster) -> list[Any]:
    return [cluster.client(index) for index in range(len(cluster.nodes))]


def save(clients: list[Any], bucket: str, data: bytes) -> None:
    """A checkpoint: each shard through a node of its own, the marker through the last."""
    for client, key in zip(clients, SHARDS, strict=False):
        assert ack_of(client.put_object(Bucket=bucket, Key=key, Body=data)) == "memory:2"
    clients[-1].put_object(Bucket=bucket, Key=MARKER, Body=b"marker")


@pytest.mark.semantics("P2.5")
def test_acknowledged_write_survives_the_loss_of_a_nodes_memory(
    start_cluster: StartCluster, proxy: FaultyOrigin, direct: Any, bucket: str
) -> None:
    cluster = start_cluster(3, *LEASE, "--prefix", f"{{uri = 's3://{bucket}/', exclusive = true}}")
    a, b, c = clients_of(cluster)
    a.put_object(Bucket=bucket, Key="known", Body=b"")  # so that the bucket is
    cluster.wait_settled()
    proxy.inject(Cut(), times=None)
    data = os.urandom(9 * MIB)
    assert ack_of(a.put_object(Bucket=bucket, Key="k", Body=data)) == "memory:2"
    assert ack_of(a.put_object(Bucket=bucket, Key="empty", Body=b"")) == "memory:2"
    cluster.nodes[0].kill9()
    cluster.nodes[0].wipe()
    for client in (b, c):
        assert body_of(client, bucket, "k") == data
        assert body_of(client, bucket, "empty") == b""
    proxy.heal()
    cluster.nodes[1].wait_until("both are in the origin", lambda: set(keys_of(direct, bucket)) >= {"k", "empty"})
    assert body_of(direct, bucket, "k") == data


@pytest.mark.semantics("P9.7")
def test_status_says_what_the_loss_of_a_node_or_zone_would_cost(
    start_cluster: StartCluster, proxy: FaultyOrigin, bucket: str
) -> None:
    prefix = f"{{uri = 's3://{bucket}/one/', replicas = 1}}"
    cluster = start_cluster(3, *LEASE, "--prefix", prefix, zones=("east", "east", "west"))
    a, b, c = clients_of(cluster)
    gate = Gate()
    proxy.inject(Hold(gate), operation="PutObject", times=None)
    a.put_object(Bucket=bucket, Key="run/shard", Body=bytes(1000))  # copied into the other zone
    a.put_object(Bucket=bucket, Key="one/a", Body=bytes(200))
    b.put_object(Bucket=bucket, Key="one/b", Body=bytes(30))
    c.put_object(Bucket=bucket, Key="one/c", Body=bytes(4))
    c.put_object(Bucket=bucket, Key="one/.metadata", Body=b"")
    found = {
        (each["place"], each["name"]): (each["bytes"], each["sets"])
        for each in cluster.nodes[1].status()["loss"]["places"]
    }
    assert found == {
        ("memory", ""): (1234, 1),
        ("node", "b"): (30, 1),
        ("node", "a"): (200, 1),
        ("node", "c"): (4, 1),
        ("zone", "east"): (230, 1),
        ("zone", "west"): (4, 1),
    }
    a_node = cluster.nodes[0]
    a_node.wait_until("repair has looked", lambda: a_node.metric("tiergate_writeback_only_here_bytes") == 200)
    gate.release()
    cluster.wait_settled()


@pytest.mark.semantics("P2.7")
def test_copies_that_cannot_be_had_are_not_acknowledged(
    start_cluster: StartCluster, proxy: FaultyOrigin, direct: Any, bucket: str
) -> None:
    cluster = start_cluster(1, *LEASE, "--replicas", "2")
    (client,) = clients_of(cluster)
    assert ack_of(client.put_object(Bucket=bucket, Key="k", Body=b"data")) == "origin"
    assert body_of(direct, bucket, "k") == b"data"
    proxy.inject(Cut(), times=None)
    status, _ = refusal(lambda: client.put_object(Bucket=bucket, Key="k", Body=b"other")) or (200, "")
    assert status == 503
    proxy.heal()
    assert body_of(client, bucket, "k") == b"data"


@pytest.mark.semantics("P2.8")
def test_copies_that_went_with_a_node_are_made_anew(
    start_cluster: StartCluster, proxy: FaultyOrigin, bucket: str
) -> None:
    exclusive = f"{{uri = 's3://{bucket}/', exclusive = true}}"
    cluster = start_cluster(3, *LEASE, "--restart-grace", "1s", "--prefix", exclusive)
    clients, nodes = clients_of(cluster), cluster.nodes
    clients[0].put_object(Bucket=bucket, Key="known", Body=b"")  # so that the bucket is
    cluster.wait_settled()
    proxy.inject(Cut(), times=None)
    data = os.urandom(6 * MIB)
    assert ack_of(clients[0].put_object(Bucket=bucket, Key="k", Body=data)) == "memory:2"
    holder = next(index for index in (1, 2) if nodes[index].status()["memory"]["dirty_bytes"] >= len(data))
    nodes[holder].kill9()
    nodes[holder].wipe()
    nodes[0].wait_until("the copy is missed", lambda: nodes[0].metric("tiergate_writeback_short_writes") == 1)
    copied = "tiergate_writeback_repaired_bytes_total"
    nodes[0].wait_until("it is made anew", lambda: nodes[0].metric(copied) == len(data))
    nodes[0].kill9()
    nodes[0].wipe()
    assert body_of(clients[3 - holder], bucket, "k") == data


@pytest.mark.semantics("P3.7")
def test_what_one_node_acknowledged_every_node_shows_at_once(
    cluster: RunningCluster, proxy: FaultyOrigin, bucket: str
) -> None:
    a, b, c = clients_of(cluster)
    proxy.inject(Cut(), method="PUT", times=None)  # nothing reaches the origin meanwhile
    for version in (b"one", b"other"):
        a.put_object(Bucket=bucket, Key="k", Body=version)
        for client in (b, c):
            assert body_of(client, bucket, "k") == version
            assert keys_of(client, bucket) == ["k"]
    assert refusal(lambda: b.put_object(Bucket=bucket, Key="k", Body=b"", IfNoneMatch="*")) == (
        412,
        "PreconditionFailed",
    )
    etag = c.head_object(Bucket=bucket, Key="k")["ETag"]
    b.put_object(Bucket=bucket, Key="k", Body=b"third", IfMatch=etag)
    assert body_of(a, bucket, "k") == b"third"
    c.delete_object(Bucket=bucket, Key="k")
    for client in (a, b):
        assert is_missing(client, bucket, "k")
        assert keys_of(client, bucket) == []


@pytest.mark.semantics("P3.8")
def test_upload_goes_over_several_nodes(cluster: RunningCluster, direct: Any, bucket: str) -> None:
    clients = clients_of(cluster)
    begun = clients[0].create_multipart_upload(Bucket=bucket, Key="k")["UploadId"]
    upload = {"Bucket": bucket, "Key": "k", "UploadId": begun}
    bodies = [os.urandom(5 * MIB + number) for number in range(1, 4)]
    parts = []
    for number, (client, body) in enumerate(zip(clients, bodies, strict=True), 1):
        etag = client.upload_part(**upload, PartNumber=number, Body=body)["ETag"]
        parts.append({"PartNumber": number, "ETag": etag})
    assert len(clients[1].list_parts(**upload)["Parts"]) == 3
    clients[2].complete_multipart_upload(**upload, MultipartUpload={"Parts": parts})
    for client in clients:
        assert body_of(client, bucket, "k") == b"".join(bodies)
    other = clients[0].create_multipart_upload(Bucket=bucket, Key="k")["UploadId"]
    clients[1].upload_part(Bucket=bucket, Key="k", UploadId=other, PartNumber=1, Body=b"part")
    clients[2].abort_multipart_upload(Bucket=bucket, Key="k", UploadId=other)
    assert "Uploads" not in clients[0].list_multipart_uploads(Bucket=bucket)
    cluster.wait_settled()
    assert body_of(direct, bucket, "k") == b"".join(bodies)


@pytest.mark.semantics("P4.11")
def test_marker_on_one_node_waits_for_shards_on_others(
    cluster: RunningCluster, proxy: FaultyOrigin, direct: Any, bucket: str
) -> None:
    gate = Gate()
    proxy.inject(Hold(gate), operation="PutObject", key=SHARDS[0], times=None)
    save(clients_of(cluster), bucket, os.urandom(10_000))
    proxy.wait_finished("PutObject", SHARDS[1])
    cluster.nodes[2].wait_status("the marker waits", lambda status: bool(status["writeback"]["fenced"]))
    assert is_missing(direct, bucket, MARKER)
    gate.release()
    cluster.wait_settled()
    assert [change.key for change in changes_of(proxy.requests, bucket)][-1] == MARKER


@pytest.mark.semantics("P4.17")
def test_list_of_a_tiered_checkpoint_waits_for_ranks_on_other_nodes(
    cluster: RunningCluster, proxy: FaultyOrigin, direct: Any, bucket: str
) -> None:
    shards = [f"ns/rank_{rank}/step_7/checkpoint.pt" for rank in range(3)]
    marker = "ns/rank_0/step_7/metadata.metadata"
    gate = Gate()
    proxy.inject(Hold(gate), operation="PutObject", key=shards[2], times=None)
    clients = clients_of(cluster)
    for client, key in zip(clients, shards, strict=True):
        client.put_object(Bucket=bucket, Key=key, Body=os.urandom(10_000))
    clients[0].put_object(Bucket=bucket, Key=marker, Body=b"list")
    proxy.wait_finished("PutObject", shards[0])
    proxy.wait_finished("PutObject", shards[1])
    cluster.nodes[0].wait_status("the list waits", lambda status: bool(status["writeback"]["fenced"]))
    assert is_missing(direct, bucket, marker)
    gate.release()
    cluster.wait_settled()
    assert [change.key for change in changes_of(proxy.requests, bucket)][-1] == marker


@pytest.mark.semantics("P6.8")
def test_identity_is_the_same_from_every_node(cluster: RunningCluster, bucket: str) -> None:
    clients = clients_of(cluster)
    shown = ("ETag", "LastModified", "ContentLength", "ContentType", "Metadata")
    clients[0].put_object(Bucket=bucket, Key="k", Body=os.urandom(6 * MIB), ContentType="a/b", Metadata={"m": "n"})

    def identities() -> list[dict[str, Any]]:
        heads = [client.head_object(Bucket=bucket, Key="k") for client in clients]
        return [{name: head[name] for name in shown} for head in heads]

    before = identities()
    cluster.wait_settled()
    assert identities() == before == [before[0]] * 3


@pytest.mark.semantics("P10.1")
def test_survivors_bring_what_the_dead_owed_in_order(
    start_cluster: StartCluster, proxy: FaultyOrigin, direct: Any, bucket: str
) -> None:
    cluster = start_cluster(3, *LEASE)
    proxy.inject(Cut(), method="PUT", times=None)
    data = os.urandom(6 * MIB)
    save([cluster.client(0)] * 3, bucket, data)
    cluster.nodes[0].kill9()
    proxy.heal()
    cluster.nodes[1].wait_until("the marker is there", lambda: MARKER in keys_of(direct, bucket))
    assert [body_of(direct, bucket, key) for key in SHARDS] == [data, data]
    for node in cluster.nodes[1:]:
        node.wait_settled()
    assert sum(node.metric("tiergate_writeback_takeovers_total") for node in cluster.nodes[1:]) == 3
    changes = [change.key for change in changes_of(proxy.requests, bucket)]
    assert sorted(changes) == sorted([*SHARDS, MARKER])
    assert changes[-1] == MARKER


@pytest.mark.semantics("P10.2")
def test_node_without_lease_changes_nothing(
    start_cluster: StartCluster, proxy: FaultyOrigin, direct: Any, bucket: str
) -> None:
    cluster = start_cluster(2, *LEASE)
    a, b = clients_of(cluster)
    gate = Gate()
    proxy.inject(Hold(gate), method="PUT", key="k")
    a.put_object(Bucket=bucket, Key="k", Body=b"old")
    gate.wait_reached()
    cluster.nodes[0].freeze()
    cluster.wait_members("b")
    cluster.nodes[1].wait_until("it says so", lambda: "a node is gone" in cluster.nodes[1].log)
    b.put_object(Bucket=bucket, Key="k", Body=b"new")
    b.delete_object(Bucket=bucket, Key="gone")
    cluster.nodes[1].wait_settled()
    gate.release()
    with ThreadPoolExecutor(1) as pool:
        cluster.nodes[0].thaw()
        refused = pool.submit(lambda: refusal(lambda: a.put_object(Bucket=bucket, Key="k2", Body=b"late")))
        cluster.wait_members()
        assert refused.result() in (None, (503, "SlowDown"))
    cluster.wait_settled()
    assert body_of(direct, bucket, "k") == b"new"
    assert body_of(a, bucket, "k") == b"new"


@pytest.mark.semantics("P10.3", "P11.7")
def test_lost_write_is_said_to_be_lost_until_its_node_is_back(
    start_cluster: StartCluster, proxy: FaultyOrigin, direct: Any, bucket: str
) -> None:
    cluster = start_cluster(2, *LEASE, "--replicas", "1", "--restart-grace", "1s")
    a, b = clients_of(cluster)
    a.put_object(Bucket=bucket, Key="k", Body=b"older")
    cluster.wait_settled()
    proxy.inject(Cut(), method="PUT", times=None)
    assert ack_of(a.put_object(Bucket=bucket, Key="k", Body=b"newer")) == "memory:1"
    cluster.nodes[0].kill9()
    cluster.nodes[1].wait_until("the loss is noticed", lambda: "is lost unless" in cluster.nodes[1].log)
    assert refusal(lambda: body_of(b, bucket, "k")) == (503, "SlowDown")
    proxy.heal()
    cluster.nodes[0].start()
    cluster.wait_members()
    cluster.wait_settled()
    assert body_of(b, bucket, "k") == body_of(direct, bucket, "k") == b"newer"
    assert cluster.nodes[1].metric("tiergate_writeback_lost_writes_total") == 1
    assert cluster.nodes[0].metric("tiergate_writeback_found_writes_total") == 1


@pytest.mark.semantics("P12.5", "P12.6")
def test_without_its_directory_a_node_asks_for_patience(proxy: FaultyOrigin, bucket: str, direct: Any) -> None:
    immutable = f"{{uri = 's3://{bucket}/once/', immutable = true}}"
    with EtcdServer() as own, ExitStack() as stack:
        flags = (*FLAGS, *LEASE, "--directory-patience", "1s", "--prefix", immutable)
        cluster = stack.enter_context(RunningCluster(proxy.endpoint, 2, etcd=own, flags=flags))
        a, b = clients_of(cluster)
        for key in ("k", "once/k"):
            a.put_object(Bucket=bucket, Key=key, Body=b"data")
        cluster.wait_settled()
        etag = a.head_object(Bucket=bucket, Key="once/k")["ETag"]
        uploads = [begin_upload(a, bucket, key) for key in ("whole", "aborted")]
        parts = [
            {"PartNumber": 1, "ETag": a.upload_part(**each, PartNumber=1, Body=b"part")["ETag"]} for each in uploads
        ]
        completion = {"MultipartUpload": {"Parts": parts[:1]}}
        (member,) = own.members
        member.kill()
        calls = [
            partial(a.get_object, Bucket=bucket, Key="k"),
            partial(a.put_object, Bucket=bucket, Key="k", Body=b"other"),
            partial(a.list_objects_v2, Bucket=bucket),
            partial(a.list_objects_v2, Bucket=bucket, Prefix="once/"),
            partial(a.create_multipart_upload, Bucket=bucket, Key="new"),
            partial(a.upload_part, **uploads[0], PartNumber=2, Body=b"part"),
            partial(a.complete_multipart_upload, **uploads[0], **completion),
            partial(a.abort_multipart_upload, **uploads[1]),
        ]
        with ThreadPoolExecutor(len(calls)) as pool:
            assert list(pool.map(refusal, calls)) == [(503, "SlowDown")] * len(calls)
        for client in (a, b):
            assert body_of(client, bucket, "once/k") == b"data"
            assert client.head_object(Bucket=bucket, Key="once/k")["ETag"] == etag
        own.start(member)
        cluster.wait_members()
        cluster.nodes[0].wait_until("it answers", lambda: not is_missing(a, bucket, "k"))
        assert body_of(b, bucket, "k") == body_of(direct, bucket, "k") == b"data"
        assert ack_of(b.complete_multipart_upload(**uploads[0], **completion)) == "memory:2"
        b.abort_multipart_upload(**uploads[1])
        cluster.wait_settled()
        assert body_of(direct, bucket, "whole") == b"part"
        assert uploads_of(a, bucket) == uploads_of(direct, bucket) == []


@pytest.mark.semantics("P8.4", "P8.1")
def test_pins_and_runs_hold_on_every_node(start_cluster: StartCluster, bucket: str) -> None:
    run = f"{{uri = 's3://{bucket}/run/', keep = 1}}"
    cluster = start_cluster(2, *LEASE, "--prefix", run, memory_limit="64MiB")
    a, b = clients_of(cluster)
    for step in (1, 2):
        for client, rank in ((a, 0), (b, 1)):
            shard = f"run/{step}/__{rank}_0.distcp"
            assert ack_of(client.put_object(Bucket=bucket, Key=shard, Body=bytes(2 * MIB))) == "memory:2"
        a.put_object(Bucket=bucket, Key=f"run/{step}/.metadata", Body=b"marker")
        cluster.wait_settled()
    query = urlencode({"bucket": bucket, "prefix": "run/1/"})
    with urlopen(Request(f"{cluster.nodes[0].admin}/pin?{query}", method="POST"), timeout=10) as answer:
        assert json.load(answer)["bytes"] >= 4 * MIB

    def judged(status: dict[str, Any]) -> bool:
        found = status["retention"]
        sets = {each["uri"].split("/")[-2]: (each["keep"], each["complete"]) for each in found["sets"]}
        pinned = [(each["uri"], each["kept"], each["bytes"] >= 4 * MIB) for each in found["pins"]]
        kept = sets == {"1": ("surplus", True), "2": ("newest", True)}
        return kept and pinned == [(f"s3://{bucket}/run/1/", True, True)]

    for node in cluster.nodes:
        node.wait_status("both nodes judge alike", judged)
    for index in range(20):
        a.put_object(Bucket=bucket, Key=f"other/{index}", Body=bytes(4 * MIB))
        cluster.wait_settled()
    for node in cluster.nodes:
        assert judged(node.status())
        assert node.status()["memory"]["evictions"] > 0
