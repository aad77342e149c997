"""Trains with Ray and reads its checkpoints back: `ray_training.py train STORAGE NAME STEPS_COUNT` and
`ray_training.py read CHECKPOINT STEP`. Prints facts as JSON; endpoint and keys come from the environment."""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import ray
import torch
from ray import train
from ray.train import Checkpoint, CheckpointConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

FILE = "state.pt"
WEIGHTS_COUNT = 300_000
KEPT_COUNT = 2
OBJECT_STORE_BYTES = 80 << 20


def weights_at(step: int) -> torch.Tensor:
    """What training knows after a step: it can be worked out without training."""
    return torch.arange(WEIGHTS_COUNT, dtype=torch.float64) + sum(range(step + 1))


def saved(checkpoint: Checkpoint) -> dict[str, Any]:
    with checkpoint.as_directory() as folder:
        found: dict[str, Any] = torch.load(Path(folder) / FILE)
        return found


def loop(config: dict[str, Any]) -> None:
    before = train.get_checkpoint()
    state: dict[str, Any] = saved(before) if before else {"step": -1, "weights": weights_at(0)}
    began: int = state["step"] + 1
    for step in range(began, config["steps_count"]):
        state = {"step": step, "weights": state["weights"] + step}
        with tempfile.TemporaryDirectory() as folder:
            torch.save(state, Path(folder) / FILE)
            train.report({"step": step, "began": began}, checkpoint=Checkpoint.from_directory(folder))


def fit(storage: str, name: str, steps_count: int) -> dict[str, Any]:
    """Train, or go on with what was trained under this name."""
    trainer = TorchTrainer(
        loop,
        train_loop_config={"steps_count": steps_count},
        scaling_config=ScalingConfig(num_workers=1),
        run_config=RunConfig(
            name=name, storage_path=storage, checkpoint_config=CheckpointConfig(num_to_keep=KEPT_COUNT)
        ),
    )
    result = trainer.fit()
    assert result.checkpoint is not None
    assert result.metrics is not None
    began = result.metrics["began"]
    return {"checkpoint": result.checkpoint.path, "began": began} | read(result.checkpoint, steps_count - 1)


def read(checkpoint: Checkpoint, step: int) -> dict[str, Any]:
    """Which step a checkpoint is of, and whether it holds what it must after `step`."""
    state = saved(checkpoint)
    return {"step": state["step"], "same": torch.equal(state["weights"], weights_at(step))}


def main(verb: str, *words: str) -> dict[str, Any]:
    if verb == "read":
        path, step = words
        return read(Checkpoint(path), int(step))
    storage, name, steps_count = words
    # Sockets of its own go there, whose paths may not be long.
    with tempfile.TemporaryDirectory(prefix="ray") as folder:
        ray.init(
            num_cpus=2,
            include_dashboard=False,
            log_to_driver=False,
            object_store_memory=OBJECT_STORE_BYTES,
            _node_ip_address="127.0.0.1",
            _temp_dir=folder,
        )
        try:
            return fit(storage, name, int(steps_count))
        finally:
            ray.shutdown()


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(*sys.argv[1:])) + "\n")
