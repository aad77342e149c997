"""What Ray's workers run in the tests: weights of which it is known what they are after each step."""

import os
import signal
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from ray import train
from ray.train import Checkpoint, CheckpointConsistencyMode, CheckpointUploadMode
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from tiergate_adapters.dcp import TieredStorageReader, TieredStorageWriter
from tiergate_adapters.ray import Saves, run_uri, wait_for

WEIGHTS_COUNT = 50_000
"""Of each rank."""


@dataclass(frozen=True, slots=True)
class Course:
    """A training of so many steps, and what happens in it.

    Attributes:
        killed_at: Rank 1 is killed in the midst of saving this step, once.
        lost_at: Once this step is saved, the one whose gateway is `lost_on` says so, and waits for its end, once.
        waiting_at: All wait before this step until somebody makes a file "go".
        failing_at: Rank 1's part of this step cannot be written.
        bare_at: This step is reported by Ray's own function, and what must be said to it is forgotten.
        folder: Where it notes what happened.
    """

    steps_count: int
    folder: str
    killed_at: int = -1
    lost_at: int = -1
    lost_on: str = ""
    waiting_at: int = -1
    failing_at: int = -1
    bare_at: int = -1

    def first(self, name: str) -> bool:
        """Whether this is the first time, over all attempts."""
        try:
            (Path(self.folder) / name).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def wait(self, name: str) -> None:
        """Wait until a file of this name is made."""
        never = threading.Event()
        while not (Path(self.folder) / name).exists():
            never.wait(0.05)


def weights_at(rank: int, step: int) -> torch.Tensor:
    """What a rank knows after a step."""
    return torch.arange(WEIGHTS_COUNT, dtype=torch.float64) * (rank + 1) + sum(range(step + 1))


def step_of(path: str) -> int:
    return int(path.rpartition("step_")[2])


def load(path: str, ranks: list[int]) -> dict[int, torch.Tensor]:
    """The weights of these ranks in a checkpoint."""
    state: dict[str, Any] = {f"w{rank}": torch.zeros(WEIGHTS_COUNT, dtype=torch.float64) for rank in ranks}
    state_dict_loader.load(state, storage_reader=TieredStorageReader(f"s3://{path}"), no_dist=True)
    return {rank: state[f"w{rank}"] for rank in ranks}


class Dying(TieredStorageWriter):
    """Its process is killed once its files are written."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        super().write_data(plan, planner)
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("killed")


class Failing(TieredStorageWriter):
    """It writes nothing."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        raise OSError("no room")


def loop(config: dict[str, Any]) -> None:
    course: Course = config["course"]
    rank = train.get_context().get_world_rank()
    saves = Saves()
    before = saves.newest()
    step, weights = -1, weights_at(rank, 0)
    if before is not None:
        step, weights = step_of(before.path), load(before.path, [rank])[rank]
        course.first(f"loaded-{rank}")
    began = step + 1
    for step in range(began, course.steps_count):
        if step == course.waiting_at:
            course.first("waits")
            course.wait("go")
        weights += step
        metrics = {"step": step, "began": began, "same": torch.equal(weights, weights_at(rank, step))}
        writer = TieredStorageWriter(f"{run_uri()}/step_{step}")
        if rank == 1 and step == course.killed_at and course.first("killed"):
            writer = Dying(writer.checkpoint_id)
        if step == course.failing_at:
            saves.wait()
            train.get_all_reported_checkpoints(consistency_mode=CheckpointConsistencyMode.COMMITTED)
            writer = Failing(writer.checkpoint_id) if rank == 1 else writer
        if step == course.bare_at:
            assert is_refused(saves, f"{run_uri()}-aside/step_{step}")
            assert is_refused(saves, run_uri())
            assert is_refused(saves, f"{run_uri()}/step_{step - 1}")  # saved to before
            bare(metrics, {f"w{rank}": weights}, writer, saves)
            continue
        saves.save(metrics, {f"w{rank}": weights}, writer)
        if step == course.lost_at and os.environ["AWS_ENDPOINT_URL"] == course.lost_on:
            saves.wait()
            course.first("lost")
            threading.Event().wait()


def is_refused(saves: Saves, uri: str) -> bool:
    try:
        saves.save({}, {"w": torch.zeros(1)}, TieredStorageWriter(uri))
    except ValueError:
        return True
    return False


def bare(metrics: dict[str, Any], state: dict[str, Any], writer: TieredStorageWriter, saves: Saves) -> None:
    """What Ray documents, without `delete_local_checkpoint_after_upload=False`."""
    future = saves.async_save(state, storage_writer=writer)
    train.report(
        metrics,
        checkpoint=Checkpoint(writer.checkpoint_id),
        checkpoint_upload_mode=CheckpointUploadMode.ASYNC,
        checkpoint_upload_fn=wait_for(future),
    )
