"""Every declared metric moves when its event happens."""

import re
import shutil
import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest
from tests.nodes import StartNode

from tiergate.observe.metrics import Metrics
from tiergate.testing.faults import FaultyOrigin
from tiergate.testing.node import RunningNode
from tiergate.testing.objects import body_of, is_missing, refusal
from tiergate.testing.origins import MotoOrigin, s3_client
from tiergate.testing.rules import Answer, Corrupt, Gate, Hold

MIB = 1 << 20
KEYS = {"TIERGATE_ACCESS_KEY_ID": "client", "TIERGATE_SECRET_ACCESS_KEY": "client-secret"}
FLAGS = ("--revalidate", "0s", "--marker-hold", "0s", "--dirty-age-slow", "1ms", "--dirty-age-limit", "1h")

ELSEWHERE = {
    "tiergate_checkpoints_quarantined_total": "tests/adapters/test_newest.py",
    "tiergate_daemon_dropped_shards_total": "tests/semantics/test_p15_memory_daemon.py",
    "tiergate_daemon_requests_total": "tests/semantics/test_p15_memory_daemon.py",
    "tiergate_http_broken_invariants_total": "tests/unit/server/test_internal_error.py",
    "tiergate_http_refused_connections_total": "tests/e2e/test_connections.py",
    "tiergate_memory_granted_bytes_total": "tests/adapters/test_store.py",
    "tiergate_memory_grants_total": "tests/adapters/test_store.py",
    "tiergate_memory_kept_set_bytes": "tests/semantics/test_p08_always_one.py",
    "tiergate_memory_kept_sets": "tests/semantics/test_p08_always_one.py",
    "tiergate_memory_pinned_set_bytes": "tests/semantics/test_p08_always_one.py",
    "tiergate_observe_scrape_faults_total": "tests/unit/observe/test_metrics.py",
    "tiergate_observe_series_dropped_total": "tests/unit/observe/test_metrics.py",
    "tiergate_persistence_dropped_sets_total": "tests/semantics/test_p14_persistence.py",
    "tiergate_persistence_parked_bytes": "tests/semantics/test_p14_persistence.py",
    "tiergate_persistence_parked_writes": "tests/semantics/test_p14_persistence.py",
    "tiergate_persistence_promoted_sets_total": "tests/semantics/test_p14_persistence.py",
    "tiergate_persistence_skipped_sets_total": "tests/semantics/test_p14_persistence.py",
    "tiergate_read_mapped_bytes_total": "tests/adapters/test_store.py",
    "tiergate_read_mapped_total": "tests/adapters/test_store.py",
    "tiergate_read_peer_failures_total": "tests/unit/engine/test_cluster_reads.py",
    "tiergate_read_peer_filled_bytes_total": "tests/e2e/test_prefetch.py",
    "tiergate_read_peer_fills_total": "tests/unit/engine/test_cluster_reads.py",
    "tiergate_writeback_reused_bytes_total": "tests/e2e/test_reuse.py",
    "tiergate_replication_dropped_notices_total": "tests/contracts/test_replication.py",
    "tiergate_replication_peer_failures_total": "tests/contracts/test_replication.py",
    "tiergate_replication_pulled_bytes_total": "tests/contracts/test_replication.py",
    "tiergate_replication_pushed_bytes_total": "tests/contracts/test_replication.py",
    "tiergate_replication_read_bytes_total": "tests/contracts/test_replication.py",
    "tiergate_replication_refused_peers_total": "tests/contracts/test_replication.py",
    "tiergate_replication_served_bytes_total": "tests/contracts/test_replication.py",
    "tiergate_replication_taken_bytes_total": "tests/contracts/test_replication.py",
    "tiergate_writeback_found_writes_total": "tests/semantics/test_cluster.py",
    "tiergate_writeback_lost_writes_total": "tests/semantics/test_cluster.py",
    "tiergate_writeback_refused_writes_total": "tests/semantics/test_p09_bounded_loss.py",
    "tiergate_writeback_repaired_bytes_total": "tests/semantics/test_cluster.py",
    "tiergate_writeback_short_writes": "tests/semantics/test_cluster.py",
    "tiergate_writeback_takeovers_total": "tests/semantics/test_cluster.py",
}
"""Metrics that need a fault of their own, and the file of the test that injects it and looks at them."""


class Moved:
    """The names of the metrics that were seen with another value than 0."""

    def __init__(self, node: RunningNode) -> None:
        self._node = node
        self.names: set[str] = set()

    def look(self) -> None:
        for line in self._node.metrics().splitlines():
            name = re.split(r"[{ ]", line, maxsplit=1)[0]
            if not line.startswith("#") and float(line.rpartition(" ")[2]) != 0:
                self.names.add(re.sub("_(count|sum|bucket)$", "", name))


class Drive:
    """One node, its client and what is in its way."""

    def __init__(self, node: RunningNode, proxy: FaultyOrigin, direct: Any, bucket: str) -> None:
        self.node, self.proxy, self.direct, self.bucket = node, proxy, direct, bucket
        self.s3 = node.client()
        self.moved = Moved(node)

    def put(self, key: str, body: bytes = b"data") -> None:
        self.s3.put_object(Bucket=self.bucket, Key=key, Body=body)

    def held(self, operation: str, key: str, *, after_origin: bool = False) -> Gate:
        gate = Gate()
        self.proxy.inject(Hold(gate, after_origin), operation=operation, key=key)
        return gate

    def beside(self, call: Callable[[], object]) -> threading.Thread:
        thread = threading.Thread(target=call)
        thread.start()
        return thread

    def connect(self) -> socket.socket:
        host, _, port = self.node.endpoint.removeprefix("http://").partition(":")
        return socket.create_connection((host, int(port)), timeout=20)


def edge(drive: Drive) -> None:
    """Signatures, loops, bodies that end early, what is forwarded."""
    stranger = s3_client(drive.node.endpoint, "nobody", "nothing")
    assert refusal(lambda: stranger.list_buckets()) == (403, "InvalidAccessKeyId")
    stranger.close()
    via = drive.node.client()
    node_id = drive.s3.head_bucket(Bucket=drive.bucket)["ResponseMetadata"]["HTTPHeaders"]["x-amz-id-2"]
    via.meta.events.register("before-send.s3", lambda request, **_: request.headers.update({"x-tiergate-via": node_id}))
    assert refusal(lambda: via.list_buckets()) is not None
    url = drive.s3.generate_presigned_url("put_object", Params={"Bucket": drive.bucket, "Key": "cut"})
    target = url.removeprefix(drive.node.endpoint)
    with drive.connect() as cut:
        cut.sendall(
            f"PUT {target} HTTP/1.1\r\nHost: {drive.node.endpoint[7:]}\r\nContent-Length: 9\r\n\r\nabc".encode()
        )
    broken = "tiergate_http_broken_requests_total"
    drive.node.wait_until("the broken request", lambda: drive.node.metric(broken))
    drive.s3.get_bucket_acl(Bucket=drive.bucket)


def reading(drive: Drive) -> None:
    """Cold and warm reads, shared fetches, changes behind the gateway, an origin that is away."""
    drive.direct.put_object(Bucket=drive.bucket, Key="cold", Body=b"cold" * 100)
    gate = drive.held("GetObject", "cold")
    reads = [drive.beside(lambda: body_of(drive.s3, drive.bucket, "cold")) for _ in range(2)]
    gate.wait_reached()
    active = "tiergate_http_active_requests"
    drive.node.wait_until("both wait", lambda: drive.node.metric("tiergate_read_shared_fills_total"))
    drive.node.wait_until("both are in progress", lambda: drive.node.metric(active) == 2)
    drive.moved.look()
    gate.release()
    for read in reads:
        read.join()
    body_of(drive.s3, drive.bucket, "cold")
    drive.direct.put_object(Bucket=drive.bucket, Key="cold", Body=b"changed")
    assert body_of(drive.s3, drive.bucket, "cold") == b"changed"
    drive.proxy.inject(Answer(403, "ExpiredToken"), where=lambda seen: seen.key == "cold", times=2)
    assert body_of(drive.s3, drive.bucket, "cold") == b"changed"
    drive.proxy.heal()
    drive.node.wait_until("the origin is back", lambda: "the origin answers again" in drive.node.log)


def conflicts(drive: Drive) -> None:
    """A key that is written and deleted while the origin is asked for it."""
    drive.direct.put_object(Bucket=drive.bucket, Key="moving", Body=b"old")
    gate = drive.held("HeadObject", "moving", after_origin=True)
    look = drive.beside(lambda: is_missing(drive.s3, drive.bucket, "moving"))
    gate.wait_reached()
    drive.put("moving")
    drive.node.wait_settled()
    drive.s3.delete_object(Bucket=drive.bucket, Key="moving")
    drive.node.wait_settled()
    gate.release()
    look.join()


def writing(drive: Drive) -> None:
    """Sets and their markers, overwrites while an upload is under way, refusals."""
    drive.put("set/shard")
    drive.put("set/.metadata")
    drive.node.wait_settled()
    gate = drive.held("PutObject", "set/shard")
    drive.put("set/shard", b"again")
    gate.wait_reached()
    drive.put("set/.metadata")
    drive.moved.look()
    gate.release()
    drive.node.wait_settled()

    upload = drive.s3.create_multipart_upload(Bucket=drive.bucket, Key="parts")["UploadId"]
    name = {"Bucket": drive.bucket, "Key": "parts", "UploadId": upload}
    part = drive.s3.upload_part(**name, PartNumber=1, Body=b"part")
    drive.moved.look()
    gate = drive.held("UploadPart", "parts")
    listed = {"Parts": [{"PartNumber": 1, "ETag": part["ETag"]}]}
    drive.s3.complete_multipart_upload(**name, MultipartUpload=listed)
    gate.wait_reached()
    drive.put("parts", b"instead")
    gate.release()
    drive.node.wait_settled()

    drive.proxy.inject(Answer(500, "InternalError"), operation="PutObject", key="later", times=2)
    drive.put("later")
    drive.node.wait_settled()
    drive.proxy.inject(Answer(403, "AccessDenied"), operation="PutObject", key="refused")
    drive.put("refused")
    drive.node.wait_status("quarantined", lambda status: status["writeback"]["quarantined"])
    drive.moved.look()
    drive.node.retry()
    drive.node.wait_settled()


def memory(drive: Drive) -> None:
    """More than fits, damaged bytes, a process that dies while it reads."""
    for index in range(5):
        drive.put(f"large/{index}", bytes([index]) * 6 * MIB)
        drive.node.wait_settled()
    drive.put("huge", bytes(33 * MIB))
    drive.proxy.inject(Corrupt(5), operation="GetObject", key="large/0")
    assert refusal(lambda: body_of(drive.s3, drive.bucket, "large/0")) is not None
    drive.proxy.heal()
    url = drive.s3.generate_presigned_url("get_object", Params={"Bucket": drive.bucket, "Key": "large/4"})
    with drive.connect() as stuck:
        target = url.removeprefix(drive.node.endpoint)
        stuck.sendall(f"GET {target} HTTP/1.1\r\nHost: {drive.node.endpoint[7:]}\r\n\r\n".encode())
        assert stuck.recv(100).startswith(b"HTTP/1.1 200")
        drive.node.kill9("worker")
    drive.node.wait_until("pins taken back", lambda: drive.node.metric("tiergate_memory_reaped_pins_total"))


def lost(drive: Drive) -> None:
    """Memory that is gone while the node was down, before the origin had what it held."""
    gate = drive.held("PutObject", "lost")
    drive.put("lost")
    gate.wait_reached()
    drive.node.kill9()
    gate.release()
    shutil.rmtree(drive.node.memory_dir / "slabs")
    drive.node.restart()
    drive.s3 = drive.node.client()
    assert refusal(lambda: body_of(drive.s3, drive.bucket, "lost")) == (503, "SlowDown")


@pytest.mark.parametrize("origin", [MotoOrigin], ids=["moto"], indirect=True)
def test_every_declared_metric_moves(start_node: StartNode, proxy: FaultyOrigin, direct: Any, bucket: str) -> None:
    node = start_node(*FLAGS, memory_limit="32MiB", environment=KEYS)
    drive = Drive(node, proxy, direct, bucket)
    for part in (edge, reading, conflicts, writing, memory):
        part(drive)
        drive.moved.look()
    totals = node.status()["totals"]
    lost(drive)
    drive.moved.look()
    declared = {name for name, metric in Metrics().declared.items() if name not in ELSEWHERE}
    assert sorted(declared - drive.moved.names) == []
    assert sorted(ELSEWHERE.keys() & drive.moved.names) == []

    assert totals["requests"] > 10
    assert totals["evictions"] > 0
    assert totals["restarts"] == 1


def test_metrics_that_need_a_fault_of_their_own_are_looked_at_where_the_list_says(
    request: pytest.FixtureRequest,
) -> None:
    for name, file in ELSEWHERE.items():
        # Tests of one room leave out what all names begin with.
        assert name.removeprefix("tiergate_") in (request.config.rootpath / file).read_text(), file
