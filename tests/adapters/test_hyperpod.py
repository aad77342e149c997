"""The names of SageMaker's package, and the real package: what lands in S3, who reads it, what stays in memory."""

import dataclasses
import inspect
import logging
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from amzn_sagemaker_checkpointing.checkpointing.filesystem import filesystem as stock
from amzn_sagemaker_checkpointing.checkpointing.filesystem import storage_base
from amzn_sagemaker_checkpointing.config import s3_path_strategy as stock_strategies
from amzn_sagemaker_checkpointing.config.in_memory_client import InMemoryClientConfig
from amzn_sagemaker_checkpointing.config.sagemaker_checkpoint_config import (
    SageMakerCheckpointConfig as StockConfig,
)
from amzn_sagemaker_checkpointing.storage.clients.inmemory import inmemory_client
from tests.adapters import hyperpodranks
from tests.adapters.conftest import BUCKET, Environment
from tests.adapters.states import empty_of, same
from tests.conformance.gateway import CLIENT
from tests.several import make_node
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from tiergate.testing.faults import FaultyOrigin
from tiergate.testing.node import RunningNode
from tiergate.testing.origins import MotoOrigin
from tiergate.testing.rules import Cut
from tiergate_adapters import hyperpod
from tiergate_adapters.hyperpod import (
    SageMakerCheckpointConfig,
    SageMakerTieredStorageReader,
    SageMakerTieredStorageWriter,
    promote,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

Beyond = Callable[[], Mapping[str, bytes]]

STRATEGIES = pytest.mark.parametrize(
    ("strategy", "folder"),
    [
        pytest.param("DefaultS3PathStrategy", "job/rank_0/step_{}", id="a folder for each rank"),
        pytest.param("RayS3PathStrategy", "job/step_{}/rank_0", id="a folder for each step"),
    ],
)


# -- one node, behind which the origin can fail
@pytest.fixture(scope="module")
def proxy(origin: MotoOrigin) -> Iterator[FaultyOrigin]:
    with FaultyOrigin(origin.endpoint) as running:
        yield running


@pytest.fixture(scope="module")
def node(origin: MotoOrigin, proxy: FaultyOrigin) -> Iterator[RunningNode]:
    """One with a policy: what says that it shall stays in memory. Below keeping-one/ only one set does."""
    keys = {"TIERGATE_ACCESS_KEY_ID": CLIENT.access_key, "TIERGATE_SECRET_ACCESS_KEY": CLIENT.secret_key}
    flags = (
        *("--marker-quiet", "0.1s", "--marker-hold", "1s"),
        *("--prefix", f"{{uri = 's3://{BUCKET}/', persist = 'all', keep = 99}}"),
        *("--prefix", f"{{uri = 's3://{BUCKET}/keeping-one/', persist = 'all', keep = 1}}"),
    )
    running = make_node(
        proxy.endpoint,
        flags=flags,
        environment=keys,
        memory_limit="128MiB",
        access_key=origin.access_key,
        secret_key=origin.secret_key,
    )
    with running:
        yield running
        assert running.metric("tiergate_http_broken_invariants_total") == 0, running.log_tail()


# -- the stock package, without the memory service that only HyperPod has
@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch, environment: Environment, origin: MotoOrigin) -> Callable[[], None]:
    """From here on this process talks to S3 itself, and the stock package finds no memory."""
    nobody = partial(InMemoryClientConfig, base_url="http://127.0.0.1:1", log_requests=False)
    monkeypatch.setattr(inmemory_client, "InMemoryClientConfig", nobody)
    quiet = staticmethod(lambda *_: logging.LoggerAdapter(logging.getLogger("stock"), {}))
    monkeypatch.setattr(storage_base._TieredStorageBase, "_setup_logger", quiet)  # It would write to /var/log.
    logging.getLogger("stock").setLevel(logging.CRITICAL)
    return lambda: void(environment(origin.endpoint, origin.access_key, origin.secret_key))


def void(_: object) -> None:
    pass


def stock_config(uri: str, strategy: str, **more: Any) -> Any:
    chosen = getattr(stock_strategies, strategy)(uri)
    return StockConfig("job", 1, s3_path_strategy=chosen, **more)


def config(uri: str, strategy: str = "DefaultS3PathStrategy", **more: Any) -> SageMakerCheckpointConfig:
    chosen = getattr(hyperpod, strategy)(uri)
    return SageMakerCheckpointConfig("job", 1, s3_path_strategy=chosen, **more)


def state(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    base = torch.rand(30, 20)
    return {
        "model": {
            "whole": base,
            "rows": base[10:14],
            "columns": base[:, 5:9],
            "half": torch.rand(1000).to(torch.bfloat16),
            "scalar": torch.tensor(seed),
            "empty": torch.empty(0, 4),
            "parameter": torch.nn.Parameter(torch.rand(11)),
        },
        "step": seed,
        "extra": {"names": ["a", "b"], "rate": 0.1 * seed},
    }


def saved(writer: Any, seed: int, **how: Any) -> None:
    save(state(seed), storage_writer=writer, no_dist=True, **how)


def loaded(reader: Any, **how: Any) -> dict[str, Any]:
    found: dict[str, Any] = empty_of(state(0))
    load(found, storage_reader=reader, no_dist=True, **how)
    return found


# -- S3, both ways
@STRATEGIES
def test_the_stock_reader_loads_from_s3_alone_what_was_saved_here(
    uri: str, alone: Callable[[], None], beyond: Beyond, proxy: FaultyOrigin, strategy: str, folder: str
) -> None:
    for seed in (3, 4):  # the second time in place
        saved(SageMakerTieredStorageWriter(config(uri, strategy, save_to_s3=True), step=7), seed)
    assert set(beyond()) == {f"{folder.format(7)}/{name}" for name in ("checkpoint.pt", "metadata.metadata")}
    assert proxy.seen("PutObject")[-1].key.endswith("metadata.metadata")
    alone()
    for step in (7, None):
        assert same(loaded(stock.SageMakerTieredStorageReader(stock_config(uri, strategy), step)), state(4))


@STRATEGIES
def test_what_the_stock_writer_saved_to_s3_is_loaded_here(
    uri: str, alone: Callable[[], None], environment: Environment, strategy: str, folder: str
) -> None:
    alone()
    saved(stock.SageMakerTieredStorageWriter(stock_config(uri, strategy, save_to_s3=True), step=7), 4)
    environment()
    for step in (7, None):
        reader = SageMakerTieredStorageReader(config(uri, strategy), step)
        assert same(loaded(reader), state(4))
        assert reader.step == 7
        assert reader.checkpoint_id == f"{uri}/{folder.format(7)}/metadata.metadata"


def test_a_shard_is_its_items_back_to_back_as_torch_saves_them(uri: str, beyond: Beyond) -> None:
    saved(SageMakerTieredStorageWriter(config(uri, save_to_s3=True), step=1), 4)
    objects = beyond()
    shard, listed = (
        objects["job/rank_0/step_1/checkpoint.pt"],
        pickle.loads(objects["job/rank_0/step_1/metadata.metadata"]),
    )
    spans = sorted((piece.offset, piece.offset + piece.length) for piece in listed.storage_data.values())
    assert [start for start, _ in spans] == [0, *(end for _, end in spans[:-1])]
    assert spans[-1][1] == len(shard)
    assert {type(piece).__module__ for piece in listed.storage_data.values()} == {
        "amzn_sagemaker_checkpointing.checkpointing.filesystem.storage_info"
    }


@pytest.mark.parametrize("flat", [True, False])
def test_planners_that_flatten_and_that_do_not(uri: str, flat: bool) -> None:
    planner = DefaultSavePlanner(flatten_state_dict=flat, flatten_sharded_tensors=flat)
    full = state(3)["model"]
    save(full, storage_writer=SageMakerTieredStorageWriter(config(uri), step=1), planner=planner, no_dist=True)
    found = empty_of(full)
    reader = SageMakerTieredStorageReader(config(uri), 1)
    planning = DefaultLoadPlanner(flatten_state_dict=flat, flatten_sharded_tensors=flat)
    load(found, storage_reader=reader, planner=planning, no_dist=True)
    assert same(found, full)


# -- what it is called
def test_signatures_and_fields_are_those_of_the_stock_package() -> None:
    def parameters(what: Any) -> list[tuple[str, Any]]:
        return [(each.name, each.default) for each in inspect.signature(what).parameters.values()]

    for name in ("SageMakerTieredStorageWriter", "SageMakerTieredStorageReader"):
        theirs, ours = parameters(getattr(stock, name)), parameters(getattr(hyperpod, name))
        assert ours[: len(theirs)] == theirs
    theirs, ours = [
        [(each.name, each.default) for each in dataclasses.fields(kind)]
        for kind in (StockConfig, SageMakerCheckpointConfig)
    ]
    assert ours[: len(theirs)] == theirs


@pytest.mark.parametrize(
    "path", ["run/step_12", "step_3/x", "step_5_old", "a/step_x", "steps/3", "", Path("a/step_8/b")]
)
@pytest.mark.parametrize("step", [-1, 0, 5, -7])
def test_the_step_is_taken_from_where_the_stock_package_takes_it(uri: str, step: int, path: Any) -> None:
    def answer(of: Callable[[], int]) -> Any:
        try:
            return of()
        except Exception as error:
            return type(error).__name__

    theirs = answer(lambda: stock.SageMakerTieredStorageWriter._get_step_val(step, path))
    assert answer(lambda: SageMakerTieredStorageWriter(config(uri), path, step).step) == theirs


BAD: list[dict[str, Any]] = [
    {"namespace": "", "world_size": 1, "s3_tier_base_path": "s3://b/p"},
    {"namespace": "job", "world_size": 0, "s3_tier_base_path": "s3://b/p"},
    {"namespace": "job", "world_size": 1, "save_to_s3": True},
    {"namespace": "job", "world_size": 1, "s3_tier_base_path": "/local"},
    {"namespace": "job", "world_size": 1, "s3_tier_base_path": "s3://"},
    {"namespace": "job", "world_size": 1, "s3_tier_base_path": "s3://b/p", "s3_path_strategy": "both"},
]


@pytest.mark.parametrize("given", BAD, ids=range(len(BAD)))
@pytest.mark.parametrize("kind", ["SageMakerTieredStorageWriter", "SageMakerTieredStorageReader"])
def test_bad_arguments_are_the_same_errors(alone: Callable[[], None], kind: str, given: dict[str, Any]) -> None:
    errors = []
    for package, config_of in ((stock, StockConfig), (hyperpod, SageMakerCheckpointConfig)):
        with pytest.raises(Exception, match=r".") as caught:
            getattr(package, kind)(config_of(**given), step=1)
        errors.append([each.__name__ for each in type(caught.value).__mro__])
    assert errors[0] == errors[1]


def test_the_folder_is_known_before_anything_is_written(uri: str) -> None:
    writer = SageMakerTieredStorageWriter(config(uri, "RayS3PathStrategy"), step=100)
    assert writer.s3_checkpoint_dir == f"{uri}/job/step_100"
    with pytest.raises(NotImplementedError):
        _ = SageMakerTieredStorageWriter(config(uri), step=100).s3_checkpoint_dir


IN_RAY_TRAIN = """
import sys
from ray.train import RunConfig, ScalingConfig
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
from tiergate_adapters.hyperpod import SageMakerCheckpointConfig

def tell():
    strategy = SageMakerCheckpointConfig("job", 1, s3_tier_base_path="s3://b/p").get_s3_strategy()
    print("told", type(strategy).__name__, strategy.base_path)

tell()
run_config = RunConfig(storage_path=sys.argv[1])
DataParallelTrainer(tell, scaling_config=ScalingConfig(num_workers=0), run_config=run_config).fit()
"""


def test_within_ray_train_the_layout_is_rays(environment: Environment, tmp_path: Path) -> None:
    # A process of its own: it stays within Ray Train once it was.
    command = [sys.executable, "-c", IN_RAY_TRAIN, str(tmp_path)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr
    told = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("told")]
    assert told == [["DefaultS3PathStrategy", "s3://b/p"], ["RayS3PathStrategy", "s3://b/p"]]


# -- tiers
@STRATEGIES
def test_only_steps_that_are_to_go_to_s3_do_and_others_can_be_promoted(
    uri: str, node: RunningNode, beyond: Beyond, strategy: str, folder: str
) -> None:
    settings = config(uri, strategy)
    for step in (1, 2, 3):
        settings.save_to_s3 = step == 2
        saved(SageMakerTieredStorageWriter(settings, step=step), step)
    assert set(beyond()) == {f"{folder.format(2)}/{name}" for name in ("checkpoint.pt", "metadata.metadata")}
    reader = SageMakerTieredStorageReader(settings)
    assert same(loaded(reader), state(3))
    assert reader.step == 3
    for step in (1, 2):
        assert same(loaded(SageMakerTieredStorageReader(settings, step)), state(step))
    assert promote(settings, 1) == 2
    assert promote(settings, 1) == 0
    assert set(beyond()) == {
        f"{folder.format(step)}/{name}" for step in (1, 2) for name in ("checkpoint.pt", "metadata.metadata")
    }


def test_steps_in_memory_go_when_newer_ones_are_whole(environment: Environment, node: RunningNode) -> None:
    settings = config(f"s3://{BUCKET}/keeping-one")
    for step in (1, 2, 3):
        saved(SageMakerTieredStorageWriter(settings, step=step), step)
    node.wait_until("two are dropped", lambda: node.metric("tiergate_persistence_dropped_sets_total") == 2)
    for step in (1, 2):
        with pytest.raises(FileNotFoundError, match=f"step {step}"):
            loaded(SageMakerTieredStorageReader(settings, step))
    assert same(loaded(SageMakerTieredStorageReader(settings)), state(3))


def test_a_save_can_wait_for_s3(uri: str, origin: MotoOrigin) -> None:
    settings = config(uri, save_to_s3=True, wait_for_s3=True)
    writer = SageMakerTieredStorageWriter(settings, step=1)
    saved(writer, 1)
    assert writer.s3_success
    client: Any = origin.client()
    prefix = uri.removeprefix(f"s3://{BUCKET}/")
    assert client.list_objects_v2(Bucket=BUCKET, Prefix=f"{prefix}/")["KeyCount"] == 2
    client.close()


def test_a_save_without_a_gateway_goes_to_s3_and_waits_no_longer(
    uri: str, environment: Environment, origin: MotoOrigin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIERGATE_ORIGIN", origin.endpoint)
    environment("http://127.0.0.1:1", origin.access_key, origin.secret_key)
    settings = config(uri, save_to_s3=True, wait_for_s3=True, wait_for_s3_timeout_s=60.0)
    writer = SageMakerTieredStorageWriter(settings, step=1)
    saved(writer, 1)
    assert writer.s3_success
    environment(origin.endpoint, origin.access_key, origin.secret_key)
    assert same(loaded(SageMakerTieredStorageReader(settings, 1)), state(1))


def test_a_save_that_waits_in_vain_says_what_s3_lacks(
    uri: str, node: RunningNode, proxy: FaultyOrigin, beyond: Beyond
) -> None:
    settings = config(uri, save_to_s3=True, wait_for_s3=True, wait_for_s3_timeout_s=0.3)
    node.client().head_bucket(Bucket=BUCKET)
    proxy.inject(Cut(), times=None)
    try:
        with pytest.raises(CheckpointException) as caught:
            saved(SageMakerTieredStorageWriter(settings, step=1), 1)
        (error,) = [each for each, _ in caught.value.failures.values()]
        assert isinstance(error, hyperpod.SageMakerS3TierError)
        assert "job/rank_0/step_1/checkpoint.pt" in str(error)
        assert same(loaded(SageMakerTieredStorageReader(settings, 1)), state(1))
    finally:
        proxy.heal()
    assert len(beyond()) == 2


# -- reading
def test_nothing_to_load_is_said_by_load_itself(uri: str) -> None:
    with pytest.raises(FileNotFoundError):
        loaded(SageMakerTieredStorageReader(config(uri)))
    with pytest.raises(FileNotFoundError, match=r"no step 0\b"):
        loaded(SageMakerTieredStorageReader(config(uri), 0))


def test_a_step_that_is_not_whole_is_not_the_newest(uri: str, node: RunningNode) -> None:
    for step in (0, 1):
        saved(SageMakerTieredStorageWriter(config(uri), step=step), step)
    prefix = uri.removeprefix(f"s3://{BUCKET}/")
    node.client().delete_object(Bucket=BUCKET, Key=f"{prefix}/job/rank_0/step_1/checkpoint.pt")
    reader = SageMakerTieredStorageReader(config(uri))
    assert same(loaded(reader), state(0))
    assert reader.step == 0


def test_only_what_is_wanted_is_read(
    uri: str, environment: Environment, beyond: Beyond, origin: MotoOrigin, proxy: FaultyOrigin
) -> None:
    full = {name: torch.rand(1 << 20) for name in ("a", "b", "c")}
    settings = config(uri, save_to_s3=True)
    save(full, storage_writer=SageMakerTieredStorageWriter(settings, step=1), no_dist=True)
    shard = beyond()["job/rank_0/step_1/checkpoint.pt"]
    # From S3 alone, where every request can be seen.
    environment(proxy.endpoint, origin.access_key, origin.secret_key)
    proxy.forget()
    found = {"b": torch.zeros(1 << 20)}
    load(found, storage_reader=SageMakerTieredStorageReader(settings, 1), no_dist=True)
    assert torch.equal(found["b"], full["b"])
    spans = [each.headers["range"] for each in proxy.requests if each.method == "GET" and each.key.endswith(".pt")]
    assert len(spans) == 1
    start, _, end = spans[0].removeprefix("bytes=").partition("-")
    assert 4 << 20 < int(end) - int(start) < 5 << 20 < len(shard)


def test_a_list_that_would_run_something_is_not_loaded(uri: str, node: RunningNode) -> None:
    key = f"{uri.removeprefix(f's3://{BUCKET}/')}/job/rank_0/step_1/metadata.metadata"
    node.client().put_object(Bucket=BUCKET, Key=key, Body=pickle.dumps(print))
    with pytest.raises(CheckpointException) as caught:
        loaded(SageMakerTieredStorageReader(config(uri), 1))
    assert "builtins.print" in str(caught.value)


def test_a_save_that_nobody_could_read_is_refused(uri: str) -> None:
    writer = SageMakerTieredStorageWriter(config(uri), step=1)
    with pytest.raises(hyperpod.SageMakerTieredStorageError, match="collectives"):
        writer.set_up_storage_writer(True, rank=0, use_collectives=False)
    writer.rank = 1
    with pytest.raises(hyperpod.SageMakerTieredStorageError, match="rank 1"):
        writer.set_up_storage_writer(True)


# -- several ranks
def test_two_ranks_save_in_every_way_and_one_loads(
    uri: str, environment: Environment, alone: Callable[[], None], beyond: Beyond, tmp_path: Path
) -> None:
    steps = {way: step for step, way in enumerate(hyperpodranks.WAYS, 1)}
    for rank in hyperpodranks.run(environment(), 2, tmp_path, uri):
        assert rank == {"nothing": True} | {way: [step, True] for way, step in steps.items()}

    def whole(step: int) -> dict[str, Any]:
        found = {name: torch.zeros(shape) for name, shape in hyperpodranks.SHAPES.items()}
        load(found, storage_reader=SageMakerTieredStorageReader(settings, step), no_dist=True)
        return found

    settings = SageMakerCheckpointConfig("job", 1, s3_tier_base_path=uri)
    for step in steps.values():
        assert same(whole(step), hyperpodranks.tensors(step))
    assert set(beyond()) == {
        *(f"job/rank_{rank}/step_2/checkpoint.pt" for rank in (0, 1)),
        "job/rank_0/step_2/metadata.metadata",
    }
    alone()
    found = {name: torch.zeros(shape) for name, shape in hyperpodranks.SHAPES.items()}
    reader = stock.SageMakerTieredStorageReader(StockConfig("job", 2, s3_tier_base_path=uri))
    load(found, storage_reader=reader, no_dist=True)
    assert same(found, hyperpodranks.tensors(2))
