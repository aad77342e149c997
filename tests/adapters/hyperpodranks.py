"""Ranks of a job that uses the names of SageMaker's package: `python -m tests.adapters.hyperpodranks RANK WORLD STORE
URI`. Each tells in a line of JSON what it found; the test knows what that must be."""

import json
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests.adapters.ranks import answers_of
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save, save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tiergate_adapters.hyperpod import (
    SageMakerCheckpointConfig,
    SageMakerTieredStorageReader,
    SageMakerTieredStorageWriter,
)

TIMEOUT_S = 300
WAYS = ("plain", "thread", "process")
PLACEMENTS = {"rows": Shard(0), "columns": Shard(1), "replicated": Replicate(), "few": Shard(0)}
SHAPES = {"rows": (7, 5), "columns": (4, 11), "replicated": (3, 3), "few": (1,)}


def run(environment: Mapping[str, str], world: int, folder: Path, uri: str) -> list[dict[str, Any]]:
    """What each rank found."""
    return answers_of(environment, ("tests.adapters.hyperpodranks",), world, (str(folder / "store"), uri), TIMEOUT_S)


def tensors(step: int) -> dict[str, torch.Tensor]:
    """The same in each process. Their sizes divide by no number of ranks here."""
    random = torch.Generator().manual_seed(step)
    return {name: torch.rand(shape, generator=random) for name, shape in SHAPES.items()}


def sharded(values: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {name: distribute_tensor(value, mesh, [PLACEMENTS[name]]) for name, value in values.items()}


def loaded(settings: SageMakerCheckpointConfig, step: int | None) -> tuple[int | None, bool]:
    """The step that is loaded, and whether all ranks together have what was saved in it."""
    found = sharded({name: torch.zeros(shape) for name, shape in SHAPES.items()})
    reader = SageMakerTieredStorageReader(settings, step)
    load(found, storage_reader=reader)
    expected = tensors(reader.step or 0)
    return reader.step, all(torch.equal(each.full_tensor(), expected[name]) for name, each in found.items())


def save_all(settings: SageMakerCheckpointConfig) -> dict[str, Any]:
    """A step in each way, every second to S3."""
    found: dict[str, Any] = {}
    try:
        loaded(settings, None)
    except FileNotFoundError as error:
        found["nothing"] = isinstance(error, OSError)
    for step, way in enumerate(WAYS, 1):
        values = sharded(tensors(step))
        settings.save_to_s3 = step == 2
        writer = SageMakerTieredStorageWriter(settings, path=f"step_{step}")
        if way == "plain":
            save(values, storage_writer=writer)
        else:
            kind = AsyncCheckpointerType(way)
            future: Any = async_save(values, storage_writer=writer, async_checkpointer_type=kind)
            for each in values.values():
                each.to_local().zero_()
            future.result()
        found[way] = loaded(settings, None)
    return found


def main() -> None:
    rank, world, store, uri = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
    warnings.filterwarnings("ignore")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    settings = SageMakerCheckpointConfig("job", world, s3_tier_base_path=uri)
    found = save_all(settings)
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
