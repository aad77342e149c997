"""`tiergate prefetch`: a node whose memory is empty is filled before anybody asks, from peers and from the origin."""

import json
import random
import subprocess
import sys
from typing import Any
from urllib.request import Request, urlopen

import pytest
from tests.etcds import StartCluster
from tests.nodes import StartNode

from tiergate.testing.etcd import needs_etcd
from tiergate.testing.faults import FaultyOrigin
from tiergate.testing.node import RunningNode
from tiergate.testing.objects import body_of
from tiergate.testing.origins import MotoOrigin
from tiergate.testing.rules import Answer, Cut, Gate, Hold

pytestmark = pytest.mark.parametrize("origin", [MotoOrigin], ids=["moto"], indirect=True)

MIB = 1 << 20


def command(name: str, node: RunningNode, uri: str) -> "subprocess.CompletedProcess[str]":
    words = [name, uri, "--memory-dir", str(node.memory_dir), "--admin-listen", "127.0.0.1:0"]
    return subprocess.run(
        [sys.executable, "-m", "tiergate", *words], capture_output=True, text=True, timeout=60, check=False
    )


def prefetch(node: RunningNode, uri: str) -> "subprocess.CompletedProcess[str]":
    return command("prefetch", node, uri)


def content(size_bytes: int, seed: int) -> bytes:
    return random.Random(seed).randbytes(size_bytes)


def test_a_node_alone_holds_what_only_the_origin_knew(
    start_node: StartNode, proxy: FaultyOrigin, direct: Any, bucket: str
) -> None:
    bodies = {f"run/step-{step}/shard-{part}": content(5 * MIB, part) for step in (1, 2) for part in range(3)}
    bodies |= {"run/empty": b"", "run/step-1/.metadata": b"1", "run/step-2/.metadata": b"2"}
    for key, body in bodies.items():
        direct.put_object(Bucket=bucket, Key=key, Body=body)
    direct.put_object(Bucket=bucket, Key="other", Body=b"x")
    node = start_node("--prefix", f"{{uri='s3://{bucket}/', exclusive=true}}")
    done = prefetch(node, f"s3://{bucket}/run/")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == "9 of 9 objects, 31.5 MB of 31.5 MB"
    assert not proxy.seen(operation="GetObject", key="other")
    proxy.inject(Cut(), times=None)
    client = node.client()
    assert {key: body_of(client, bucket, key) for key in bodies} == bodies

    # All is here: nothing is fetched again.
    proxy.heal()
    proxy.forget()
    again = prefetch(node, f"s3://{bucket}/run/")
    assert (again.returncode, again.stdout.splitlines()[-1]) == (0, "9 of 9 objects, 31.5 MB of 31.5 MB")
    assert not proxy.seen(operation="GetObject")


def test_what_does_not_fit_is_left_and_nothing_brought_is_evicted(
    start_node: StartNode, proxy: FaultyOrigin, direct: Any, bucket: str
) -> None:
    bodies = {f"run/{part:02}": content(3 * MIB, part) for part in range(16)}
    for key, body in bodies.items():
        direct.put_object(Bucket=bucket, Key=key, Body=body)
    node = start_node("--prefix", f"{{uri='s3://{bucket}/', exclusive=true}}", memory_limit="32MiB")
    done = prefetch(node, f"s3://{bucket}/run/")
    here_count = int(done.stdout.splitlines()[-1].split()[0])
    assert 4 <= here_count < 11
    assert done.returncode == 1
    assert done.stderr == f"tiergate: {16 - here_count} of 16 objects are not in memory: memory has no room for more\n"
    assert node.metric("tiergate_memory_evictions_total") == 0
    client = node.client()
    heads = {key: client.head_object(Bucket=bucket, Key=key)["ResponseMetadata"]["HTTPHeaders"] for key in bodies}
    here = [key for key, headers in heads.items() if headers["x-tiergate-tier"] == "memory"]
    assert len(here) == here_count
    proxy.inject(Cut(), times=None)
    assert all(body_of(client, bucket, key) == bodies[key] for key in here)


def test_what_cannot_be_had_is_named(start_node: StartNode, proxy: FaultyOrigin, direct: Any, bucket: str) -> None:
    for key in ("run/a", "run/b", "run/c"):
        direct.put_object(Bucket=bucket, Key=key, Body=b"data")
    node = start_node()
    proxy.inject(Answer(403, code="InvalidObjectState"), operation="GetObject", key="run/b", times=None)
    done = prefetch(node, f"s3://{bucket}/run/")
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1].startswith("2 of 3 objects")
    first, last = done.stderr.splitlines()
    assert first.startswith(f"tiergate: s3://{bucket}/run/b could not be had: ")
    assert last == "tiergate: 1 of 3 objects are not in memory: 1 could not be had"

    proxy.inject(Cut(), times=None)
    away = prefetch(node, f"s3://{bucket}/run/")
    assert away.returncode == 1
    assert "is not prefetched: the origin does not answer" in away.stderr


@pytest.mark.parametrize(("name", "done"), [("prefetch", "prefetched"), ("promote", "promoted"), ("pin", "pinned")])
def test_bucket_and_node_that_are_not_there(start_node: StartNode, name: str, done: str) -> None:
    node = start_node()
    uri = "s3://no-such-bucket-here/run/"
    missing = command(name, node, uri)
    assert (missing.returncode, missing.stdout) == (1, "")
    assert missing.stderr == f"tiergate: {uri} is not {done}: The specified bucket does not exist\n"
    node.stop()
    gone = command(name, node, uri)
    assert gone.returncode == 4


def test_nothing_to_promote_and_nobody_who_knows_the_bucket(
    start_node: StartNode, proxy: FaultyOrigin, bucket: str
) -> None:
    node = start_node()
    told = (0, f"nothing under s3://{bucket}/run/ stays in memory only\n", "")
    proxy.inject(Cut(), times=None)
    for _ in range(2):
        done = command("promote", node, f"s3://{bucket}/run/")
        assert (done.returncode, done.stdout, done.stderr) == told
        proxy.heal()
    assert command("pin", node, f"s3://{bucket}/run/").returncode == 0


def test_progress_is_told_one_prefetch_runs_at_a_time_and_ends_with_the_node(
    start_node: StartNode, proxy: FaultyOrigin, direct: Any, bucket: str
) -> None:
    for key in ("run/a", "run/b"):
        direct.put_object(Bucket=bucket, Key=key, Body=b"data")
    node = start_node()
    gate = Gate()
    proxy.inject(Hold(gate), operation="GetObject", key="run/b")
    asked = Request(f"{node.admin}/prefetch?bucket={bucket}&prefix=run/", method="POST")
    try:
        with urlopen(asked, timeout=30) as lines:
            line = json.loads(next(lines))
            while line["done_count"] != 1:
                line = json.loads(next(lines))
            assert line == {
                "total_count": 2,
                "total_bytes": 8,
                "done_count": 1,
                "done_bytes": 4,
                "failures": [],
                "is_over": False,
                "fault": "",
            }
            second = prefetch(node, f"s3://{bucket}/run/")
            assert (second.returncode, "another prefetch is running" in second.stderr) == (1, True)
            assert node.stop(deadline_s=4) == 0
            last = [json.loads(each) for each in lines][-1]
            assert (last["is_over"], last["fault"]) == (True, "the node stops")
    finally:
        gate.release()


@needs_etcd
def test_a_replaced_node_is_warmed_from_its_peers_and_serves_alone(
    start_cluster: StartCluster, proxy: FaultyOrigin, bucket: str
) -> None:
    own = f"{{uri='s3://{bucket}/', exclusive=true}}"
    cluster = start_cluster(2, "--replicas", "1", "--lease", "3s", "--prefix", own)
    a, b = cluster.nodes
    bodies = {f"run/shard-{part}": content(5 * MIB, part) for part in range(3)}
    for key, body in bodies.items():
        cluster.client(0).put_object(Bucket=bucket, Key=key, Body=body)
    a.wait_settled()
    proxy.inject(Answer(503), operation="PutObject", times=None)
    bodies["run/.metadata"] = b"of three shards"
    cluster.client(0).put_object(Bucket=bucket, Key="run/.metadata", Body=bodies["run/.metadata"])
    b.restart_cold()
    cluster.wait_members()
    proxy.forget()
    done = prefetch(b, f"s3://{bucket}/run/")
    assert (done.returncode, done.stderr) == (0, "")
    assert not proxy.seen(operation="GetObject")
    assert b.metric("tiergate_read_peer_filled_bytes_total") == sum(map(len, bodies.values()))

    # What the origin does not have is a copy that counts: this node takes it over.
    a.kill9("all")
    proxy.inject(Cut(), times=None)
    b.wait_status("b took over", lambda status: status["writeback"].get("pending") == 1)
    assert {key: body_of(cluster.client(1), bucket, key) for key in bodies} == bodies
    proxy.heal()
    b.wait_settled()
