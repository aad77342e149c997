"""P8 Always one."""

import subprocess
import sys
from typing import Any

import pytest
from tests.nodes import StartNode

from tiergate.testing.faults import FaultyOrigin
from tiergate.testing.node import RunningNode
from tiergate.testing.objects import ack_of, body_of
from tiergate.testing.rules import Gate, Hold

MIB = 1 << 20
SHARDS = 3
SET_BYTES = SHARDS * 3 * MIB
LIMIT = "48MiB"


def keys_of_set(step: int) -> list[str]:
    return [f"run/{step}/__{rank}_0.distcp" for rank in range(SHARDS)] + [f"run/{step}/.metadata"]


def save(client: Any, bucket: str, step: int) -> None:
    """A checkpoint of 9 MiB, in memory."""
    for key in keys_of_set(step):
        data = bytes(3 * MIB) if key.endswith("distcp") else b"marker"
        assert ack_of(client.put_object(Bucket=bucket, Key=key, Body=data)) == "memory:1"


def run_of(bucket: str, keep: int) -> tuple[str, str]:
    return "--prefix", f"{{uri = 's3://{bucket}/run/', keep = {keep}}}"


def sets_of(node: RunningNode) -> dict[str, tuple[str, bool, int]]:
    """What status says of the sets in memory, by their step."""
    found = node.status()["retention"]["sets"]
    return {each["uri"].split("/")[-2]: (each["keep"], each["complete"], each["bytes"]) for each in found}


def wait_judged(node: RunningNode, **expected: str) -> None:
    wanted = {name.removeprefix("s"): keep for name, keep in expected.items()}
    node.wait_until(f"{wanted}", lambda: {step: keep for step, (keep, _, _) in sets_of(node).items()} == wanted)


def fill(node: RunningNode, bucket: str, count: int, held: int = 0) -> None:
    """Other data of so many times 3 MiB comes by, each in the origin before the next; `held` writes wait there."""
    client = node.client()
    for index in range(count):
        client.put_object(Bucket=bucket, Key=f"other/{index}", Body=bytes(3 * MIB))
        node.wait_status("it is in the origin", lambda status: status["writeback"]["pending"] == held)


def held_steps(node: RunningNode, proxy: FaultyOrigin, bucket: str, steps: list[int]) -> list[int]:
    """Those of the sets that memory has all of; of the others it has nothing. Reading brings them back."""
    whole: list[int] = []
    for step in steps:
        # The marker and whatever is small comes back at once; only what the origin is asked for was not here.
        asked = {key for key in keys_of_set(step) if proxy.seen("GetObject", key)}
        for key in keys_of_set(step):
            assert len(body_of(node.client(), bucket, key)) > 0
        missed = {key for key in keys_of_set(step) if proxy.seen("GetObject", key)} - asked
        assert len(missed) in (0, len(keys_of_set(step))), f"set {step} went in part: {missed}"
        if not missed:
            whole.append(step)
    return whole


@pytest.mark.semantics("P8.1", "P8.2")
def test_newest_sets_stay_and_older_ones_go_whole(start_node: StartNode, proxy: FaultyOrigin, bucket: str) -> None:
    node = start_node(*run_of(bucket, 2), memory_limit=LIMIT)
    client = node.client()
    for step in (1, 2, 3, 4):
        save(client, bucket, step)
        node.wait_settled()
    wait_judged(node, s1="surplus", s2="surplus", s3="kept", s4="newest")
    fill(node, bucket, 3)
    node.wait_settled()
    node.wait_until("the oldest is gone", lambda: "1" not in sets_of(node))
    fill(node, bucket, 12)
    node.wait_settled()
    wait_judged(node, s3="kept", s4="newest")
    assert {step: (whole, size >= SET_BYTES) for step, (_, whole, size) in sets_of(node).items()} == {
        "3": (True, True),
        "4": (True, True),
    }
    assert node.metric("tiergate_memory_kept_sets") == 2
    assert node.metric("tiergate_memory_kept_set_bytes") >= 2 * SET_BYTES
    assert held_steps(node, proxy, bucket, [4, 3, 1]) == [4, 3]


@pytest.mark.semantics("P8.3")
def test_a_set_that_the_origin_lacks_a_part_of_is_not_evicted(
    start_node: StartNode, proxy: FaultyOrigin, bucket: str
) -> None:
    node = start_node(*run_of(bucket, 1), memory_limit=LIMIT)
    client = node.client()
    save(client, bucket, 1)
    node.wait_settled()
    gate = Gate()
    proxy.inject(Hold(gate), operation="PutObject", key="run/2/__2_0.distcp")
    save(client, bucket, 2)
    node.wait_status("the rest is there", lambda status: status["writeback"]["pending"] == 2)
    wait_judged(node, s1="surplus", s2="owed")
    fill(node, bucket, 16, held=2)
    wait_judged(node, s2="owed")
    assert sets_of(node)["2"][1], "it is whole"
    gate.release()
    node.wait_settled()
    wait_judged(node, s2="newest")
    assert held_steps(node, proxy, bucket, [2]) == [2]


def tiergate(node: RunningNode, *words: str) -> "subprocess.CompletedProcess[str]":
    admin = node.admin.removeprefix("http://")
    command = [sys.executable, "-m", "tiergate", *words, "--admin-listen", admin]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.semantics("P8.4")
def test_pinned_sets_stay_until_they_are_unpinned(start_node: StartNode, proxy: FaultyOrigin, bucket: str) -> None:
    node = start_node(*run_of(bucket, 1), "--pinned-limit", "15MiB", memory_limit=LIMIT)
    client = node.client()
    for step in (1, 2, 3):
        save(client, bucket, step)
        node.wait_settled()
    done = tiergate(node, "pin", f"s3://{bucket}/run/1/")
    assert (done.returncode, done.stderr) == (0, "")
    assert f"s3://{bucket}/run/1/ is pinned, with 94" in done.stdout
    done = tiergate(node, "pin", f"s3://{bucket}/run/2/")
    assert done.returncode == 1
    assert "pinned_limit" in done.stderr
    assert len(done.stderr.splitlines()) == 1

    node.kill9()
    node.restart()
    client = node.client()
    node.wait_until("it is looked at", lambda: node.status()["retention"]["pins"])
    fill(node, bucket, 16)
    node.wait_settled()
    status = node.status()["retention"]
    assert [(each["uri"], each["kept"]) for each in status["pins"]] == [(f"s3://{bucket}/run/1/", True)]
    assert status["pinned_bytes"] >= SET_BYTES
    assert node.metric("tiergate_memory_pinned_set_bytes") == status["pinned_bytes"]
    assert held_steps(node, proxy, bucket, [1]) == [1]

    done = tiergate(node, "unpin", f"s3://{bucket}/run/1/")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert tiergate(node, "unpin", f"s3://{bucket}/run/1/").returncode == 1
    node.wait_until("it is looked at", lambda: not node.status()["retention"]["pins"])
    fill(node, bucket, 16)
    node.wait_settled()
    assert held_steps(node, proxy, bucket, [1]) == []
