"""Ray Train through real nodes: checkpoints saved in the background, kept, deleted, and gone on from after deaths."""

import builtins
import os
import pickle
import signal
import ssl
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from pyarrow.fs import FileSystem  # type: ignore[import-untyped]  # has no types
from ray.cluster_utils import Cluster
from ray.train import CheckpointConfig, FailureConfig, Result, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from ray.train.v2.api.exceptions import WorkerGroupError
from tests.adapters import readme
from tests.adapters.conftest import aws_environment, sources_path
from tests.adapters.raytraining import Course, load, loop, weights_at
from tests.authority import Authority

from tiergate.testing.cluster import RunningCluster
from tiergate.testing.etcd import needs_etcd
from tiergate.testing.faults import FaultyOrigin
from tiergate.testing.node import RunningNode
from tiergate.testing.origins import MotoOrigin
from tiergate.testing.rules import Gate, Hold
from tiergate_adapters.ray import filesystem

BUCKET = "training"
RANKS_COUNT = 2
OBJECT_STORE_BYTES = 80 << 20

RAY_TIMEOUT_S = 600

pytestmark = [
    pytest.mark.timeout(RAY_TIMEOUT_S),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]


@pytest.fixture(scope="module")
def proxy() -> Iterator[FaultyOrigin]:
    """The origin, with a record of what is asked of it."""
    with MotoOrigin() as moto, FaultyOrigin(moto.endpoint) as proxy:
        client = moto.client()
        client.create_bucket(Bucket=BUCKET)
        client.close()
        yield proxy


@pytest.fixture
def gate(proxy: FaultyOrigin) -> Iterator[Gate]:
    """Where requests to the origin are held until the test is over, at the latest."""
    gate = Gate()
    yield gate
    gate.release()
    proxy.heal()


@pytest.fixture(scope="module")
def machines(proxy: FaultyOrigin) -> Iterator[list[RunningNode]]:
    """The gateways of two machines; of one where there is no etcd."""
    flags = ("--marker-quiet", "1s", "--marker-hold", "1s")
    with ExitStack() as stack:
        if needs_etcd.args[0]:
            yield [stack.enter_context(RunningNode(proxy.endpoint, flags=flags, keep_ports=True))]
        else:
            yield stack.enter_context(RunningCluster(proxy.endpoint, 2, flags=flags)).nodes


@pytest.fixture(scope="module")
def cluster(machines: list[RunningNode]) -> Iterator[Cluster]:
    """Ray on the first machine; this process is its driver."""
    with tempfile.TemporaryDirectory(prefix="ray") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", folder)  # Ray keeps a token there
        patch.setattr(builtins, "print", print)  # which Ray replaces for good
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.2")
        for name, value in aws_environment(machines[0].endpoint, "any", "any").items():
            patch.setenv(name, value)
        cluster = Cluster()
        on_sigterm = signal.getsignal(signal.SIGTERM)
        options: dict[str, Any] = {
            "include_dashboard": False,
            "node_ip_address": "127.0.0.2",  # Ray takes 127.0.0.1 for the address of an interface
            "temp_dir": folder,
            "_system_config": {"health_check_initial_delay_ms": 0, "health_check_period_ms": 1000},
        }
        try:
            cluster.add_node(num_cpus=RANKS_COUNT, object_store_memory=OBJECT_STORE_BYTES, **options)
            ray.init(address=cluster.address, log_to_driver=False)
            signal.signal(signal.SIGTERM, on_sigterm)
            yield cluster
        finally:
            ray.shutdown()
            cluster.shutdown()  # type: ignore[no-untyped-call]


def fit(course: Course, name: str, *, attempts_count: int = 2, **scaling: Any) -> Result:
    """Train under this name, or go on with what was trained under it."""
    trainer = TorchTrainer(
        loop,
        train_loop_config={"course": course},
        scaling_config=ScalingConfig(num_workers=RANKS_COUNT, **scaling),
        run_config=RunConfig(
            name=name,
            storage_path=BUCKET,
            storage_filesystem=filesystem(),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
            failure_config=FailureConfig(max_failures=attempts_count - 1),
        ),
    )
    return trainer.fit()


def steps(node: RunningNode, name: str) -> list[int]:
    """The steps of which anything is left."""
    pages = node.client().get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=f"{name}/step_")
    keys = [each["Key"] for page in pages for each in page.get("Contents", ())]
    return sorted(set(map(step_of_key, keys)))


def step_of_key(key: str) -> int:
    return int(key.split("/")[1].removeprefix("step_"))


def assert_kept(node: RunningNode, name: str, newest: list[int], *, began: int) -> None:
    """These steps are left. And what is older than that from which the run went on, if it had not come to Ray's record
    by then: nobody manages it."""
    left = steps(node, name)
    assert left[-len(newest) :] == newest
    assert all(step < began - 1 for step in left[: -len(newest)])


def assert_holds(path: str, step: int) -> None:
    found = load(path, [0, 1])
    assert all(torch.equal(found[rank], weights_at(rank, step)) for rank in found)


def test_goes_on_from_the_newest_whole_checkpoint_after_a_worker_was_killed(
    cluster: Cluster, machines: list[RunningNode], tmp_path: Path
) -> None:
    result = fit(Course(steps_count=6, folder=str(tmp_path), killed_at=3, bare_at=4), "killed")
    assert result.metrics == {"step": 5, "began": 3, "same": True}
    assert result.checkpoint is not None
    assert result.checkpoint.path == f"{BUCKET}/killed/step_5"
    assert_kept(machines[0], "killed", [4, 5], began=3)
    for step in (4, 5):
        assert_holds(f"{BUCKET}/killed/step_{step}", step)


@needs_etcd
def test_goes_on_from_memory_after_a_machine_was_lost(
    cluster: Cluster, machines: list[RunningNode], proxy: FaultyOrigin, gate: Gate, tmp_path: Path
) -> None:
    here, there = machines
    # Nothing gets to S3 until all have gone on: that from which they do is in memory only.
    proxy.inject(Hold(gate), where=lambda seen: seen.method in ("PUT", "POST"), times=None)
    machine = cluster.add_node(
        num_cpus=1,
        object_store_memory=OBJECT_STORE_BYTES,
        node_ip_address="127.0.0.3",
        env_vars=aws_environment(there.endpoint, "any", "any"),
    )
    course = Course(steps_count=5, folder=str(tmp_path), lost_at=2, lost_on=there.endpoint)

    def lose() -> None:
        course.wait("lost")
        there.kill9()
        cluster.remove_node(machine, allow_graceful=False)
        for rank in range(RANKS_COUNT):
            course.wait(f"loaded-{rank}")
        gate.release()
        proxy.heal()

    loser = threading.Thread(target=lose, daemon=True)
    loser.start()
    result = fit(course, "lost", placement_strategy="SPREAD")
    loser.join()
    assert result.metrics == {"step": 4, "began": 3, "same": True}
    assert not [seen for seen in proxy.seen("GetObject") if seen.key.startswith("lost/step_")]
    here.wait_settled()
    assert_kept(here, "lost", [3, 4], began=3)
    for step in (3, 4):
        assert_holds(f"{BUCKET}/lost/step_{step}", step)


def test_what_ray_deletes_goes_marker_first_or_is_never_sent_and_a_failed_save_ends_the_run(
    cluster: Cluster, machines: list[RunningNode], proxy: FaultyOrigin, gate: Gate, tmp_path: Path
) -> None:
    course = Course(steps_count=6, folder=str(tmp_path), waiting_at=2, failing_at=5)

    def stop_the_origin() -> None:
        course.wait("waits")
        machines[0].wait_settled()
        proxy.inject(Hold(gate), method="PUT", where=lambda seen: seen.key.startswith("deleted/step_"), times=None)
        course.first("go")

    proxy.forget()
    stopper = threading.Thread(target=stop_the_origin, daemon=True)
    stopper.start()
    with pytest.raises(WorkerGroupError, match="no room"):
        fit(course, "deleted", attempts_count=1)
    stopper.join()
    begun = {seen.key for seen in proxy.requests if seen.method == "PUT"}
    assert steps(machines[0], "deleted") == [3, 4, 5]  # what the others wrote of the failed one, without a marker
    gate.release()
    machines[0].wait_settled()

    asked = [seen for seen in proxy.requests if seen.key.startswith("deleted/step_")]
    for step in (0, 1):  # S3 had them
        gone = [seen for seen in asked if seen.method == "DELETE" and step_of_key(seen.key) == step]
        assert gone[0].key == f"deleted/step_{step}/.metadata"
        assert gone[0].finished_s is not None
        assert all(gone[0].finished_s <= seen.started_s for seen in gone[1:])
    sent = {seen.key for seen in asked if seen.method == "PUT" and step_of_key(seen.key) == 2}
    assert sent <= begun
    assert "deleted/step_2/.metadata" not in sent
    for step in (3, 4):
        assert_holds(f"{BUCKET}/deleted/step_{step}", step)


# -- the file system
@pytest.fixture
def two_places(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[FaultyOrigin, FaultyOrigin]]:
    """Two endpoints that keep a record; nobody is behind them."""
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)
    with MotoOrigin() as moto, FaultyOrigin(moto.endpoint) as one, FaultyOrigin(moto.endpoint) as other:
        yield one, other


def look(system: FileSystem, environment: dict[str, str]) -> None:
    """Use a file system as a process on another node does, to which it was sent."""
    sent = pickle.dumps(system)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        pickle.loads(sent).get_file_info("bucket/run")


@pytest.mark.parametrize("variable", ["AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"])
def test_a_uri_goes_to_the_gateway_without_a_change_but_to_that_of_the_driver(
    two_places: tuple[FaultyOrigin, FaultyOrigin], monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    here, there = two_places
    for name, value in aws_environment(there.endpoint, "any", "any").items():
        monkeypatch.setenv(name, value)
    if variable == "AWS_ENDPOINT_URL":
        monkeypatch.delenv("AWS_ENDPOINT_URL_S3")
    monkeypatch.setenv(variable, here.endpoint)
    system, path = FileSystem.from_uri("s3://bucket/run")
    assert path == "bucket/run"
    look(system, aws_environment(there.endpoint, "any", "any"))
    assert here.requests
    assert not there.requests


@pytest.mark.parametrize("named", ["by a variable", "in a profile", "by the caller"])
def test_the_file_system_goes_to_the_gateway_of_the_node_that_uses_it(
    two_places: tuple[FaultyOrigin, FaultyOrigin], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, named: str
) -> None:
    here, there = two_places
    for name, value in aws_environment(here.endpoint, "any", "any").items():
        monkeypatch.setenv(name, value)
    environment = aws_environment(there.endpoint, "any", "any")
    if named == "in a profile":
        profile = tmp_path / "config"
        profile.write_text(f"[default]\nendpoint_url = {there.endpoint}\n")
        environment = {"AWS_CONFIG_FILE": str(profile), "AWS_ENDPOINT_URL": "", "AWS_ENDPOINT_URL_S3": ""}
    system = filesystem(there.endpoint if named == "by the caller" else None)
    look(system, environment if named != "by the caller" else {})
    assert there.requests
    assert not here.requests
    system.get_file_info("bucket/run")
    assert bool(here.requests) == (named != "by the caller")


def test_the_file_system_outlives_its_gateway_being_killed_and_started_anew(
    machines: list[RunningNode], monkeypatch: pytest.MonkeyPatch
) -> None:
    here = machines[0]
    for name, value in aws_environment(here.endpoint, "any", "any").items():
        monkeypatch.setenv(name, value)
    system = filesystem()
    with system.open_output_stream(f"{BUCKET}/outlives/a") as stream:
        stream.write(b"before")
    here.kill9()
    with ThreadPoolExecutor() as pool:
        started = pool.submit(here.start)
        with system.open_input_stream(f"{BUCKET}/outlives/a") as stream:
            assert stream.read() == b"before"
        started.result()


def test_the_file_system_speaks_tls_with_whom_the_environment_trusts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Asked(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            paths.append(self.path)
            self.send_response(200)
            self.send_header("Content-Length", "7")
            self.end_headers()

    paths: list[str] = []
    authority = Authority(tmp_path, "authority")
    issued = authority.issue("gateway")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(issued.certificate, issued.key)
    with ThreadingHTTPServer(("127.0.0.1", 0), Asked) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for name, value in aws_environment(f"https://127.0.0.1:{server.server_port}", "any", "any").items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("AWS_CA_BUNDLE", str(authority.file))
        found = filesystem().get_file_info("bucket/run")
        server.shutdown()
    assert (found.size, paths) == (7, ["/bucket/run"])


@pytest.mark.parametrize("heading", [name for name in readme.examples() if name.startswith("Ray Train")])
def test_example_runs_as_it_stands(cluster: Cluster, machines: list[RunningNode], tmp_path: Path, heading: str) -> None:
    readme.run(heading, tmp_path, os.environ | {"RAY_ADDRESS": cluster.address, "PYTHONPATH": sources_path()})
