"""The ranks of a job, each a process: `python -m tests.adapters.ranks WHAT RANK WORLD FILE URI`.

Each says in a line of JSON what it found; the test knows what that must be.
"""

import json
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save, save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tiergate_adapters.dcp import TieredStorageReader, TieredStorageWriter

RANKS_TIMEOUT_S = 150


def run(environment: Mapping[str, str], what: str, world: int, folder: Path, uri: str) -> list[dict[str, Any]]:
    """What each rank found."""
    store = folder / f"store-{what}-{world}"
    return answers_of(environment, ("tests.adapters.ranks", what), world, (str(store), uri), RANKS_TIMEOUT_S)


def answers_of(
    environment: Mapping[str, str], module: Sequence[str], world: int, more: Sequence[str], timeout_s: float
) -> list[dict[str, Any]]:
    """What each rank of a job says in its last line. Each runs a module with its words, rank, `world` and `more`."""
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", *module, str(rank), str(world), *more],
            env=dict(environment) | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        told = [rank.communicate(timeout=timeout_s) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    for rank, (_, errors) in zip(ranks, told, strict=True):
        assert rank.returncode == 0, errors[-6000:]
    return [json.loads(out.splitlines()[-1]) for out, _ in told]


def tensors() -> dict[str, torch.Tensor]:
    """The same in each process. Their sizes divide by no number of ranks here."""
    random = torch.Generator().manual_seed(7)
    shapes = {"rows": (7, 5), "columns": (4, 11), "replicated": (3, 3), "wide": (1, 1000), "few": (1,)}
    return {name: torch.rand(shape, generator=random) for name, shape in shapes.items()}


PLACEMENTS = {
    "rows": Shard(0),
    "columns": Shard(1),
    "replicated": Replicate(),
    "wide": Shard(1),
    "few": Shard(0),
}


def sharded(values: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {name: distribute_tensor(value, mesh, [PLACEMENTS[name]]) for name, value in values.items()}


def whole(values: Mapping[str, Any]) -> bool:
    """Whether all ranks together have what was saved."""
    expected = tensors()
    return all(torch.equal(each.full_tensor(), expected[name]) for name, each in values.items())


def zeros() -> dict[str, Any]:
    return sharded({name: torch.zeros_like(value) for name, value in tensors().items()})


def loaded(uri: str, **options: Any) -> bool:
    found = zeros()
    load(found, storage_reader=TieredStorageReader(uri), **options)
    return whole(found)


class Model(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.second = nn.Linear(13, 7), nn.Linear(7, 3)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.second(torch.relu(self.first(given)))
        return found


class Training:
    """FSDP2 of a small model with an optimizer that has a state."""

    def __init__(self, seed: int) -> None:
        self.model = Model(seed)
        fully_shard(self.model.first)
        fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)

    def step(self) -> None:
        random = torch.Generator().manual_seed(3)
        self.model(torch.rand(6, 13, generator=random)).square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def restore(self, state: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )

    def sums(self) -> list[float]:
        """Something of all parameters, the same for any number of ranks."""
        found = [each.full_tensor() if isinstance(each, DTensor) else each for each in self.model.parameters()]
        return [round(float(each.detach().double().sum()), 4) for each in found]


def saved_aside(uri: str, kind: AsyncCheckpointerType) -> bool:
    """Whether what was there when the save began is loaded, though it was replaced meanwhile."""
    changing = sharded(tensors())
    writer = TieredStorageWriter(f"{uri}/none")
    future = async_save(
        changing, storage_writer=writer, checkpoint_id=f"{uri}/{kind.value}", async_checkpointer_type=kind
    )
    for each in changing.values():
        each.to_local().zero_()
    assert isinstance(future, Future)
    assert isinstance(future.result(), Metadata)
    return loaded(f"{uri}/{kind.value}")


def save_all(rank: int, world: int, uri: str) -> dict[str, Any]:
    """Two ranks save in each way; what they load themselves."""
    found: dict[str, Any] = {}
    values = sharded(tensors())
    save(values, storage_writer=TieredStorageWriter(f"{uri}/plain"))
    found["plain"] = loaded(f"{uri}/plain")
    save(values, storage_writer=TieredStorageWriter(f"{uri}/each", single_file_per_rank=False, thread_count=2))
    found["each"] = loaded(f"{uri}/each")
    save(values, storage_writer=TieredStorageWriter(f"{uri}/alone"), use_collectives=False)
    found["alone"] = loaded(f"{uri}/alone")
    found["thread"] = saved_aside(uri, AsyncCheckpointerType.THREAD)
    training = Training(1)
    training.step()
    save(training.state(), storage_writer=TieredStorageWriter(f"{uri}/fsdp"))
    training.step()
    found["sums"] = training.sums()
    for step in (0, 30, 4):
        save(values, storage_writer=TieredStorageWriter(f"{uri}/run/step_{step}"))
    try:
        load(values, storage_reader=TieredStorageReader(f"{uri}/nothing"))
    except FileNotFoundError as error:
        found["nothing"] = str(error)
    return found


def load_all(rank: int, world: int, uri: str) -> dict[str, Any]:
    """So many ranks load what the two saved."""
    found: dict[str, Any] = {way: loaded(f"{uri}/{way}") for way in ("plain", "each", "thread")}
    reader, values = TieredStorageReader.newest(f"{uri}/run"), zeros()
    load(values, storage_reader=reader)
    assert reader.chosen is not None
    found["newest"] = (reader.chosen.step, reader.checkpoint_id, whole(values))
    try:
        load(values, storage_reader=TieredStorageReader.newest(f"{uri}/nothing"))
    except FileNotFoundError as error:
        found["nothing"] = str(error)
    training = Training(2)
    training.step()
    state = training.state()
    load(state, storage_reader=TieredStorageReader(f"{uri}/fsdp"))
    training.restore(state)
    training.step()
    found["sums"] = training.sums()
    return found


class Dying(DefaultSavePlanner):
    """Its process dies in the middle of a file."""

    def resolve_data(self, write_item: WriteItem) -> Any:
        if write_item.index.fqn == "second":
            os.kill(os.getpid(), signal.SIGKILL)
        return super().resolve_data(write_item)


def die(rank: int, world: int, uri: str) -> dict[str, Any]:
    """The process that writes for this one does so once, and dies the next time; what the training process hears."""
    process = saved_aside(uri, AsyncCheckpointerType.PROCESS)
    values = {"first": torch.ones(5 << 18), "second": torch.ones(5 << 18)}
    future = async_save(
        values,
        storage_writer=TieredStorageWriter(f"{uri}/dead"),
        planner=Dying(),
        async_checkpointer_type=AsyncCheckpointerType.PROCESS,
    )
    assert isinstance(future, Future)
    return {"process": process, "error": str(future.exception())}


def main() -> None:
    what, rank, world, store, uri = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5]
    warnings.filterwarnings("ignore")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    acts = {"save_all": save_all, "load_all": load_all, "die": die}
    found = acts[what](rank, world, uri)
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
