"""P15 The memory daemon's protocol: every row of it and every refusal, on real nodes. The package that speaks it:
tests/adapters/test_daemon_package.py."""

import json
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
from tests.daemon import DaemonClient, checksum_of, meta_of, shard_of
from tests.dcp import dcp_list
from tests.etcds import StartCluster
from tests.nodes import FLAGS, StartNode

from tiergate.child import LEFT_BEHIND_STATUS
from tiergate.testing.etcd import needs_etcd
from tiergate.testing.faults import FaultyOrigin
from tiergate.testing.node import RunningNode
from tiergate.testing.objects import body_of, keys_of, refusal
from tiergate.testing.origins import ProcessOrigin
from tiergate.testing.rules import Cut

MIB = 1 << 20
PLACE = "daemon"
DROPPED = "tiergate_daemon_dropped_shards_total"
REQUESTS = "tiergate_daemon_requests_total"


def daemon_flags(bucket: str) -> tuple[str, ...]:
    return "--daemon-listen", "127.0.0.1:0", "--daemon-uri", f"s3://{bucket}/{PLACE}"


@pytest.fixture(scope="module")
def standing(origin: ProcessOrigin) -> Iterator[RunningNode]:
    """A node that tests share, each with namespaces of its own."""
    client = origin.client()
    client.create_bucket(Bucket="daemon-bucket")
    client.close()
    flags = (*FLAGS, *daemon_flags("daemon-bucket"), "--max-body", "1MiB")
    with RunningNode(origin.endpoint, workers=2, memory_limit="64MiB", flags=flags) as node:
        yield node
        assert node.metric("tiergate_http_broken_invariants_total") == 0, node.log_tail()


@pytest.fixture
def daemon(standing: RunningNode) -> DaemonClient:
    return DaemonClient(standing.daemon)


@pytest.fixture
def namespace(request: pytest.FixtureRequest, daemon: DaemonClient) -> Iterator[str]:
    """A namespace for three ranks that keep three steps."""
    name = "".join(letter if letter.isalnum() else "-" for letter in request.node.name)
    assert daemon.create(name).status == 200
    yield name
    daemon.ask("DELETE", f"/v1/cp/namespaces/{name}")


@pytest.mark.semantics("P15.1")
def test_namespaces(daemon: DaemonClient) -> None:
    path = "/v1/cp/namespaces/job-1_A"
    assert daemon.ask("GET", path).status == 404
    assert daemon.ask("DELETE", path).status == 404
    assert daemon.create("job-1_A", 5, 2).status == 200
    again = daemon.create("job-1_A", 9, 9)
    assert (again.status, "job-1_A" in again.json["error"]) == (409, True)
    got = daemon.ask("GET", path)
    assert (got.status, got.json) == (200, {"num_ranks": 5, "steps_to_retain_per_rank": 2})
    assert got.headers["Content-Type"].startswith("application/json")
    assert daemon.ask("DELETE", path).status == 200
    assert daemon.ask("GET", path).status == 404


@pytest.mark.semantics("P15.1")
def test_shards(daemon: DaemonClient, namespace: str) -> None:
    body = os.urandom(100_000)
    path = f"/v1/cp/checkpoints/{namespace}/0/100"
    assert daemon.get(namespace, 0, 100).status == 404
    assert daemon.ask("DELETE", path).status == 404
    assert daemon.ask("POST", path, body, meta_of(body)).status == 200
    assert daemon.read(namespace, 0, 100) == body
    assert daemon.read(namespace, 1, 100) is None
    assert daemon.ask("DELETE", path).status == 200
    assert daemon.ask("DELETE", path).status == 404
    assert daemon.read(namespace, 0, 100) is None


@pytest.mark.semantics("P15.1")
@pytest.mark.parametrize("size_bytes", [0, 1, 3 * MIB + 1], ids="{} bytes".format)
def test_shards_of_all_kinds_of_bodies(daemon: DaemonClient, namespace: str, size_bytes: int) -> None:
    """With the header, without it, in chunks; larger than bodies of S3 requests may be here."""
    body = os.urandom(size_bytes)
    pieces = [body[start : start + 70_001] for start in range(0, size_bytes, 70_001)]
    paths = [f"/v1/cp/checkpoints/{namespace}/{rank}/1" for rank in range(3)]
    assert daemon.ask("POST", paths[0], body).status == 200
    assert daemon.ask("POST", paths[1], iter(pieces), meta_of(body)).status == 200
    assert daemon.ask("POST", paths[2], iter(pieces), {"Shard-Meta": json.dumps({"checksum": checksum_of(body)})})
    assert [daemon.read(namespace, rank, 1) for rank in range(3)] == [body] * 3


@pytest.mark.semantics("P15.1", "P15.2")
def test_a_shard_that_is_not_what_its_header_says_is_refused_and_changes_nothing(
    daemon: DaemonClient, namespace: str
) -> None:
    path, body = f"/v1/cp/checkpoints/{namespace}/0/1", b"what was there"
    headers = [
        meta_of(b"something else"),
        {"Shard-Meta": json.dumps({"checksum": checksum_of(b"new"), "algorithm": "sha256"})},
        {"Shard-Meta": json.dumps({"checksum": "AAAA"})},
        {"Shard-Meta": "{}"},
        {"Shard-Meta": "no JSON"},
    ]
    for header in headers:
        assert daemon.ask("POST", path, b"new", header).status == 400, header
        assert daemon.get(namespace, 0, 1).status == 404
    assert daemon.ask("POST", path, body).status == 200
    for header in headers:
        assert daemon.ask("POST", path, iter([b"new"]), header).status == 400, header
        assert daemon.read(namespace, 0, 1) == body


@pytest.mark.semantics("P15.1")
def test_whatever_is_asked_of_an_unknown_namespace_is_404(daemon: DaemonClient) -> None:
    for method, path in (
        ("POST", "/v1/cp/checkpoints/nobody/0/1"),
        ("GET", "/v1/cp/checkpoints/nobody/0/1"),
        ("DELETE", "/v1/cp/checkpoints/nobody/0/1"),
        ("GET", "/v1/cp/checkpoints/nobody/latest?limit=3"),
        ("GET", "/v1/cp/namespaces/nobody"),
        ("DELETE", "/v1/cp/namespaces/nobody"),
    ):
        body = b"data" if method == "POST" else None
        assert daemon.ask(method, path, body).status == 404, (method, path)


@pytest.mark.semantics("P15.1")
@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", "/v1/cp/namespaces/x", 400),
        ("POST", "/v1/cp/namespaces/x?num_ranks=3", 400),
        ("POST", "/v1/cp/namespaces/x?num_ranks=0&steps_retained=1", 400),
        ("POST", "/v1/cp/namespaces/x?num_ranks=3&steps_retained=0", 400),
        ("POST", "/v1/cp/namespaces/x?num_ranks=three&steps_retained=1", 400),
        ("POST", "/v1/cp/namespaces/x.y?num_ranks=3&steps_retained=1", 400),
        ("GET", "/v1/cp/checkpoints/x/latest?limit=-1", 400),
        ("GET", "/v1/cp/checkpoints/x/rank/1", 400),
        ("POST", "/v1/cp/checkpoints/x/0/-1", 400),
        ("GET", "/v1/cp/checkpoints/x%2F0%2F1", 404),
        ("GET", "/v1/cp/cluster/reset", 405),
        ("PUT", "/v1/cp/checkpoints/x/0/1", 405),
        ("GET", "/daemon-bucket/k", 404),
        ("GET", "/status", 404),
        ("GET", "/", 404),
    ],
)
def test_what_the_table_does_not_have(daemon: DaemonClient, method: str, path: str, status: int) -> None:
    reply = daemon.ask(method, path, b"data" if method in ("POST", "PUT") else None)
    assert reply.status == status
    assert reply.json["error"]


@pytest.mark.semantics("P13.9")
def test_neither_address_leads_to_what_is_the_others(standing: RunningNode, daemon: DaemonClient) -> None:
    assert daemon.create("apart").status == 200
    for address in (standing.endpoint, standing.admin):
        other = DaemonClient(address)
        for method, path in (
            ("GET", "/v1/cp/namespaces/apart"),
            ("POST", "/v1/cp/namespaces/more?num_ranks=1&steps_retained=1"),
            ("DELETE", "/v1/cp/namespaces/apart"),
            ("POST", "/v1/cp/cluster/reset"),
        ):
            assert other.ask(method, path).status >= 400, (address, method, path)
    assert daemon.ask("GET", "/v1/cp/namespaces/apart").status == 200
    assert daemon.ask("GET", "/v1/cp/namespaces/more").status == 404
    for path in ("/daemon-bucket/k", "/status", "/metrics", "/bodies/x"):
        assert daemon.ask("GET", path).status == 404
    assert daemon.ask("DELETE", "/v1/cp/namespaces/apart").status == 200


@pytest.mark.semantics("P13.8")
def test_only_who_is_named_may_use_it(start_node: StartNode, bucket: str, tmp_path: Path) -> None:
    place = f"s3://{bucket}/{PLACE}"
    open_to = ("--daemon-listen", "0.0.0.0:0", "--daemon-uri", place, "--daemon-allow")
    node = start_node(*open_to, "10.0.0.0/8,::1/128")
    local = node.daemon.replace("0.0.0.0", "127.0.0.1")
    for method, path in (
        ("POST", "/v1/cp/namespaces/job?num_ranks=1&steps_retained=1"),
        ("GET", "/v1/cp/namespaces/job"),
        ("POST", "/v1/cp/cluster/reset"),
        ("GET", "/health"),
        ("GET", "/nothing"),
    ):
        assert DaemonClient(local).ask(method, path).status == 403, (method, path)
    assert keys_of(node.client(), bucket) == []
    node.stop()
    node.flags = (*FLAGS, *open_to, "127.0.0.0/8")
    node.start()
    assert DaemonClient(node.daemon.replace("0.0.0.0", "127.0.0.1")).create("job").status == 200

    command = [sys.executable, "-m", "tiergate", "serve", "--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0"]
    command += ["--memory-dir", str(tmp_path), "--memory-limit", "16MiB", *open_to[:-1]]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TIERGATE_")}
    kept["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    ended = subprocess.run(command, env=kept, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode != 0
    assert "not a loopback address and the protocol has no credentials" in ended.stderr
    assert "ready" not in ended.stdout


@pytest.mark.semantics("P15.1")
def test_it_is_alive(daemon: DaemonClient) -> None:
    assert daemon.ask("GET", "/health").status == 200


@pytest.mark.semantics("P15.5")
def test_latest_offers_whole_steps_the_greatest_first(daemon: DaemonClient, namespace: str) -> None:
    assert daemon.latest(namespace) == []
    for step in (20, 5, 100):
        daemon.save(namespace, step)
    assert daemon.latest(namespace) == [100, 20, 5]
    assert [daemon.latest(namespace, limit) for limit in (0, 1, 2, 9)] == [[], [100], [100, 20], [100, 20, 5]]
    assert daemon.ask("DELETE", f"/v1/cp/checkpoints/{namespace}/1/20").status == 200
    assert daemon.latest(namespace) == [100, 5], "rank 1 has nothing of it"
    assert daemon.put(namespace, 0, 100, b"other tensors") == 200
    assert daemon.latest(namespace) == [5], "rank 1 holds tensors of another save"
    daemon.save(namespace, 100)
    assert daemon.latest(namespace) == [100, 5]
    daemon.save(namespace, 7, ranks=2)
    assert daemon.latest(namespace) == [100, 5], "a save that is not over"


@pytest.mark.semantics("P15.4")
def test_each_rank_keeps_what_it_wrote_last(standing: RunningNode, daemon: DaemonClient, namespace: str) -> None:
    before, asked = standing.metric(DROPPED), standing.metric(REQUESTS)
    for step in (10, 20, 30, 40):
        daemon.save(namespace, step)
    assert daemon.latest(namespace) == [40, 30, 20]
    assert standing.metric(DROPPED) == before + 3
    assert standing.metric(REQUESTS) > asked
    daemon.save(namespace, 15)
    assert daemon.latest(namespace) == [40, 30, 15], "after a roll-back the step just written stays"
    daemon.save(namespace, 30)
    daemon.save(namespace, 16)
    assert daemon.latest(namespace) == [30, 16, 15], "written again counts as written last"
    assert daemon.read(namespace, 0, 40) is None
    assert daemon.read(namespace, 2, 30) == shard_of(2, 30)


@pytest.mark.semantics("P15.4")
def test_the_newest_whole_step_stays_until_another_is_whole(daemon: DaemonClient, namespace: str) -> None:
    def save(step: int, *ranks: int) -> None:
        for rank in ranks:
            assert daemon.put(namespace, rank, step, dcp_list("__0_0.distcp") if rank == 2 else b"") == 200

    save(1, 0, 1, 2)
    for step in (2, 3, 4, 5):
        save(step, 0)
        save(step, 2)
    assert daemon.latest(namespace) == [1], "rank 1 never came again"
    assert [daemon.read(namespace, 0, step) is None for step in (1, 2, 3, 4, 5)] == [False, True, False, False, False]
    save(6, 0, 1, 2)
    save(7, 0)
    assert daemon.latest(namespace) == [6]
    assert [daemon.read(namespace, 0, step) is None for step in (1, 4, 5, 6, 7)] == [True, True, False, False, False]


@pytest.mark.semantics("P15.1", "P15.2")
def test_requests_at_the_same_time(daemon: DaemonClient, namespace: str) -> None:
    bodies = [os.urandom(MIB) for _ in range(6)]
    start = threading.Barrier(len(bodies))

    def put(body: bytes) -> int:
        start.wait(30)
        return daemon.put(namespace, 0, 1, body)

    def create(number: int) -> int:
        start.wait(30)
        return daemon.create("race", number + 1).status

    with ThreadPoolExecutor(len(bodies)) as pool:
        assert list(pool.map(put, bodies)) == [200] * len(bodies)
        assert Counter(pool.map(create, range(len(bodies)))) == {200: 1, 409: len(bodies) - 1}
    assert daemon.read(namespace, 0, 1) in bodies
    assert daemon.ask("DELETE", "/v1/cp/namespaces/race").status == 200


@pytest.mark.semantics("P15.2")
def test_a_shard_that_breaks_off_was_never_there(daemon: DaemonClient, namespace: str, standing: RunningNode) -> None:
    assert daemon.put(namespace, 0, 1, b"what was there") == 200
    broken = standing.metric("tiergate_http_broken_requests_total")
    connection = HTTPConnection(daemon.host, timeout=30)
    connection.putrequest("POST", f"/v1/cp/checkpoints/{namespace}/0/1")
    connection.putheader("Content-Length", str(4 * MIB))
    connection.endheaders()
    connection.send(os.urandom(MIB))
    connection.close()
    standing.wait_until("it is noticed", lambda: standing.metric("tiergate_http_broken_requests_total") > broken)
    assert daemon.read(namespace, 0, 1) == b"what was there"


@pytest.mark.semantics("P15.3")
def test_what_memory_has_no_room_for_is_refused(
    daemon: DaemonClient, namespace: str, standing: RunningNode, direct: Any
) -> None:
    body, path = bytes(70 * MIB), f"/v1/cp/checkpoints/{namespace}/0/1"
    assert daemon.ask("POST", path, body).status == 507
    assert daemon.ask("POST", path, iter([body[:MIB]] * 70)).status == 507
    assert daemon.read(namespace, 0, 1) is None
    assert daemon.put(namespace, 0, 1, body[: 30 * MIB]) == 200
    assert daemon.put(namespace, 1, 1, body[: 30 * MIB]) == 507, "nothing of it may be evicted"
    assert daemon.read(namespace, 0, 1) == body[: 30 * MIB]
    assert keys_of(direct, "daemon-bucket") == []


@pytest.mark.semantics("P15.1")
def test_what_is_dropped_is_gone(start_node: StartNode, bucket: str) -> None:
    node = start_node(*daemon_flags(bucket))
    daemon = DaemonClient(node.daemon)
    for name in ("one", "two"):
        assert daemon.create(name).status == 200
        daemon.save(name, 1)
    assert daemon.ask("DELETE", "/v1/cp/namespaces/one").status == 200
    assert daemon.create("one").status == 200
    assert (daemon.latest("one"), daemon.latest("two")) == ([], [1])
    assert daemon.read("one", 0, 1) is None
    assert daemon.ask("POST", "/v1/cp/cluster/reset").status == 200
    assert [daemon.ask("GET", f"/v1/cp/namespaces/{name}").status for name in ("one", "two")] == [404, 404]
    status = node.status()["writeback"]
    assert (status["parked"], status["pending"]) == (0, 0)
    assert keys_of(node.client(), bucket) == []


@pytest.mark.semantics("P15.2", "P15.3")
def test_shards_outlive_kills_and_are_never_sent(
    start_node: StartNode, bucket: str, direct: Any, proxy: FaultyOrigin
) -> None:
    direct.put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": "Enabled"})
    run = f"{{uri = 's3://{bucket}/run/', persist = 'every 2', keep = 1, promote_idle = '1s'}}"
    node = start_node(*daemon_flags(bucket), "--prefix", run)
    daemon = DaemonClient(node.daemon)
    assert daemon.create("job").status == 200
    for step in (1, 2, 3):
        daemon.save("job", step)
    node.kill9()
    node.restart()
    daemon = DaemonClient(node.daemon)
    assert daemon.latest("job") == [3, 2, 1]
    proxy.inject(Cut(), times=None)
    node.kill9("worker")
    daemon.save("job", 4)
    assert daemon.latest("job") == [4, 3, 2]
    assert daemon.ask("DELETE", "/v1/cp/checkpoints/job/0/3").status == 200
    assert daemon.create("other").status == 200
    proxy.heal()
    assert node.stop() == LEFT_BEHIND_STATUS
    node.restart()
    daemon = DaemonClient(node.daemon)
    assert daemon.latest("job") == [4, 2]
    assert daemon.read("job", 1, 4) == shard_of(1, 4)
    node.wait_settled()
    assert direct.list_object_versions(Bucket=bucket).get("Versions", []) == []
    assert body_of(node.client(), bucket, f"{PLACE}/job/rank_1/step_4") == shard_of(1, 4)


@pytest.mark.semantics("P15.3")
def test_what_is_promoted_is_the_origins_too_until_it_is_dropped(
    start_node: StartNode, bucket: str, direct: Any
) -> None:
    node = start_node(*daemon_flags(bucket))
    daemon = DaemonClient(node.daemon)
    assert daemon.create("job", 2, 1).status == 200
    daemon.save("job", 1, ranks=2)
    keys = [f"{PLACE}/job/rank_{rank}/step_1" for rank in range(2)]
    assert node.promote(bucket, f"{PLACE}/job/rank_") == 2
    node.wait_settled()
    assert keys_of(direct, bucket) == keys
    assert body_of(direct, bucket, keys[0]) == shard_of(0, 1)
    assert daemon.latest("job") == [1]
    assert daemon.put("job", 0, 1, b"anew") == 200
    assert daemon.read("job", 0, 1) == b"anew"
    daemon.save("job", 2, ranks=2)
    assert daemon.latest("job") == [2]
    node.wait_settled()
    assert keys_of(direct, bucket) == []
    # A node that knows of no such place brings what it holds to the origin.
    node.stop()
    node.flags = FLAGS
    node.start()
    node.wait_until("all is there", lambda: len(keys_of(direct, bucket)) == 3)
    assert body_of(direct, bucket, f"{PLACE}/job/rank_1/step_2") == shard_of(1, 2)


@pytest.mark.semantics("P15.3")
def test_what_the_origin_is_owed_does_not_hold_up_shards(
    start_node: StartNode, bucket: str, proxy: FaultyOrigin
) -> None:
    node = start_node(*daemon_flags(bucket), "--dirty-size-limit", "1MiB")
    daemon, client = DaemonClient(node.daemon), node.client()
    assert daemon.create("job", 2).status == 200
    proxy.inject(Cut(), times=None)
    client.put_object(Bucket=bucket, Key="k", Body=bytes(2 * MIB))
    assert refusal(lambda: client.put_object(Bucket=bucket, Key="l", Body=b"")) == (503, "SlowDown")
    for step in (1, 2):
        daemon.save("job", step, ranks=2)
    assert daemon.latest("job") == [2, 1]
    assert node.status()["writeback"]["pending"] == 1


@needs_etcd
@pytest.mark.semantics("P15.6")
def test_every_node_answers_the_same(start_cluster: StartCluster, bucket: str, direct: Any) -> None:
    cluster = start_cluster(3, *daemon_flags(bucket), "--lease", "3s")
    one, two, three = (DaemonClient(node.daemon) for node in cluster.nodes)
    assert one.create("job").status == 200
    assert two.create("job").status == 409
    for rank, client in enumerate((one, two, three)):
        assert client.put("job", rank, 1, shard_of(rank, 1)) == 200
    for client in (one, two, three):
        assert client.latest("job") == [1]
        assert [client.read("job", rank, 1) for rank in range(3)] == [shard_of(rank, 1) for rank in range(3)]
    for step in (2, 3, 4):
        two.save("job", step)
    assert three.latest("job") == [4, 3, 2]
    cluster.nodes[1].kill9()
    assert one.latest("job") == [4, 3, 2], "each shard is on two nodes"
    assert three.read("job", 0, 4) == shard_of(0, 4)
    three.save("job", 5)
    assert one.latest("job") == [5, 4, 3]
    assert three.ask("DELETE", "/v1/cp/namespaces/job").status == 200
    assert one.ask("GET", "/v1/cp/checkpoints/job/latest").status == 404
    assert keys_of(direct, bucket) == []


@needs_etcd
@pytest.mark.semantics("P15.5")
def test_a_step_of_which_all_copies_are_gone_is_not_offered(start_cluster: StartCluster, bucket: str) -> None:
    cluster = start_cluster(2, *daemon_flags(bucket), "--lease", "3s", "--replicas", "1", "--restart-grace", "1s")
    one, two = (DaemonClient(node.daemon) for node in cluster.nodes)
    assert one.create("job", 2).status == 200
    one.save("job", 1, ranks=2)
    two.save("job", 2, ranks=2)
    assert one.latest("job") == [2, 1]
    cluster.nodes[1].kill9()
    cluster.nodes[0].wait_until("it is gone", lambda: one.latest("job") == [1])
    cluster.nodes[0].wait_until("it is lost", lambda: one.get("job", 0, 2).status == 404)
    cluster.nodes[1].start()
    cluster.nodes[0].wait_until("it is back", lambda: one.latest("job") == [2, 1])
    assert one.read("job", 0, 2) == shard_of(0, 2)
