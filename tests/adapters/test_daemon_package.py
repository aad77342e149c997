"""The unmodified package amzn-sagemaker-checkpointing against the gateway: its memory tier is the gateway's memory, its
S3 half goes through it too."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.adapters.stock import config_of, load, proxied, save, weights
from tests.conformance.gateway import CLIENT, checking_node
from tests.daemon import DaemonClient

from tiergate.testing.cluster import RunningCluster
from tiergate.testing.etcd import needs_etcd
from tiergate.testing.node import RunningNode
from tiergate.testing.objects import keys_of
from tiergate.testing.origins import MotoOrigin, ProcessOrigin

pytestmark = pytest.mark.filterwarnings("ignore")  # the package's own, and torch's of how it is used

BUCKET = "stock-package"
BASE = f"s3://{BUCKET}/checkpoints"
DAEMON = ("--daemon-listen", "127.0.0.1:0", "--daemon-uri", f"s3://{BUCKET}/daemon")
WORLD = 2

Use = Callable[[RunningNode], dict[str, str]]


@pytest.fixture(scope="module")
def store() -> Iterator[ProcessOrigin]:
    with MotoOrigin() as running:
        client = running.client()
        client.create_bucket(Bucket=BUCKET)
        client.close()
        yield running


@pytest.fixture(scope="module")
def gateway(store: ProcessOrigin) -> Iterator[RunningNode]:
    """A node that keeps its addresses: the package keeps what it found first."""
    with checking_node(store, *DAEMON, keep_ports=True) as node:
        yield node
        assert node.metric("tiergate_http_broken_invariants_total") == 0, node.log_tail()


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Use:
    """Has this process's environment, and a copy for another, lead to a node."""

    def apply(node: RunningNode) -> dict[str, str]:
        values = {
            **proxied(node.daemon, node.endpoint),
            "AWS_ACCESS_KEY_ID": CLIENT.access_key,
            "AWS_SECRET_ACCESS_KEY": CLIENT.secret_key,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_REGION": "us-east-1",
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_EC2_METADATA_DISABLED": "true",
        }
        for name, value in values.items():
            monkeypatch.setenv(name, value)
        root = Path(__file__).parents[2]
        path = os.pathsep.join(str(root / part) for part in ("gateway", "adapters", ""))
        return dict(os.environ) | values | {"PYTHONPATH": path}

    return apply


@pytest.fixture
def namespace(request: pytest.FixtureRequest, gateway: RunningNode, use: Use) -> str:
    """A namespace of the test's own; the environment leads to the node."""
    use(gateway)
    return str(request.node.name).replace("[", "-").replace("]", "")


def state_of(step: int) -> dict[str, Any]:
    return {"w": weights(step), "epoch": step}


def blank() -> dict[str, Any]:
    return {"w": torch.zeros_like(weights()), "epoch": 0}


def loaded(namespace: str, step: int | None = None, world: int = 1) -> int:
    """Loads the newest step, or this one, and finds in it what was saved as it; which it was."""
    state = blank()
    found = load(config_of(namespace, world, BASE), state, step, no_dist=True)
    assert torch.equal(state["w"], weights(found)), found
    assert state["epoch"] == found
    return found


def save_alone(namespace: str, step: int, *, save_to_s3: bool = False, world: int = 1) -> None:
    save(config_of(namespace, world, BASE, save_to_s3=save_to_s3), step, state_of(step), no_dist=True)


def test_memory_only_saves_are_listed_restored_and_retained(
    gateway: RunningNode, store: ProcessOrigin, namespace: str
) -> None:
    daemon = DaemonClient(gateway.daemon)
    for step in (10, 20, 30, 40):
        save_alone(namespace, step)
    assert daemon.latest(namespace) == [40, 30, 20]
    assert loaded(namespace) == 40
    assert loaded(namespace, 20) == 20
    assert daemon.ask("GET", f"/v1/cp/namespaces/{namespace}").json == {
        "num_ranks": 2,
        "steps_to_retain_per_rank": 3,
    }
    save_alone(namespace, 15)
    assert daemon.latest(namespace) == [40, 30, 15], "after a roll-back the step just written stays"
    assert loaded(namespace, 15) == 15
    client = store.client()
    assert [key for key in keys_of(client, BUCKET) if namespace in key] == []
    client.close()


def test_a_kill_takes_nothing(gateway: RunningNode, namespace: str) -> None:
    save_alone(namespace, 1)
    save_alone(namespace, 2)
    gateway.kill9()
    gateway.restart()
    assert loaded(namespace) == 2
    save_alone(namespace, 3)
    assert loaded(namespace) == 3


def test_without_memory_the_package_goes_on_with_s3(gateway: RunningNode, store: ProcessOrigin, namespace: str) -> None:
    save_alone(namespace, 1, save_to_s3=True)
    save_alone(namespace, 2)
    assert loaded(namespace) == 2
    gateway.wait_settled()
    client = store.client()
    assert [key for key in keys_of(client, BUCKET) if namespace in key] == [
        f"checkpoints/{namespace}/rank_0/step_1/{name}" for name in ("checkpoint.pt", "metadata.metadata")
    ]
    client.close()
    gateway.restart_cold()
    assert DaemonClient(gateway.daemon).ask("GET", f"/v1/cp/namespaces/{namespace}").status == 404
    assert loaded(namespace) == 1
    save_alone(namespace, 3)
    assert loaded(namespace) == 3


def test_a_world_of_two_saves_and_any_world_loads(
    gateway: RunningNode, namespace: str, use: Use, tmp_path: Path
) -> None:
    command = [sys.executable, "-W", "ignore", "-m", "tests.adapters.stock"]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(WORLD), str(tmp_path / "store"), namespace, BASE],
            env=use(gateway),
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(WORLD)
    ]
    try:
        said = [json.loads(each.communicate(timeout=200)[0].splitlines()[-1]) for each in ranks]
    finally:
        for each in ranks:
            each.kill()
            each.wait()
    assert [each["step"] for each in said] == [2, 2]
    assert torch.equal(torch.tensor(said[0]["w"] + said[1]["w"]), weights(2))
    daemon = DaemonClient(gateway.daemon)
    assert daemon.latest(namespace) == [2, 1]
    assert loaded(namespace, world=WORLD) == 2, "one process reads what two wrote"
    # A save of which one rank never came: its metadata is there all the same.
    save_alone(namespace, 3, world=WORLD)
    assert daemon.get(namespace, WORLD, 3).status == 200
    assert daemon.latest(namespace) == [2, 1]
    assert loaded(namespace, world=WORLD) == 2
    # The job goes on with one rank, in a namespace that was made for two.
    save_alone(namespace, 4)
    assert daemon.latest(namespace) == [4, 2], "rank 0 keeps what it wrote last: 2, 3 and 4"
    assert loaded(namespace) == 4
    # A rank's shard is gone from memory: S3 has it.
    assert daemon.ask("DELETE", f"/v1/cp/checkpoints/{namespace}/1/2").status == 200
    assert daemon.latest(namespace) == [4]
    assert loaded(namespace, 2, world=WORLD) == 2


@needs_etcd
def test_what_is_saved_through_one_node_is_restored_through_another(store: ProcessOrigin, use: Use) -> None:
    keys = {"TIERGATE_ACCESS_KEY_ID": CLIENT.access_key, "TIERGATE_SECRET_ACCESS_KEY": CLIENT.secret_key}
    with RunningCluster(store.endpoint, 2, flags=(*DAEMON, "--lease", "3s"), environment=keys) as cluster:
        one, two = cluster.nodes
        use(one)
        save_alone("two-nodes", 1)
        save_alone("two-nodes", 2)
        use(two)
        assert loaded("two-nodes") == 2
        one.kill9()
        assert loaded("two-nodes") == 2
