"""The unmodified package amzn-sagemaker-checkpointing, as training code uses it.

Its client knows one address for the memory daemon, a name inside a Kubernetes cluster. A proxy for HTTP leads that to a
daemon here; what it sends to S3 goes where AWS_ENDPOINT_URL says.

As a program it is one rank of a world: RANK WORLD STORE NAMESPACE S3_BASE. It saves a sharded tensor as step 1 to
memory only, and twice of it as step 2 to S3 too; loads the newest step; and says what it got.
"""

import json
import logging
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from amzn_sagemaker_checkpointing.checkpointing.filesystem.filesystem import (
    SageMakerTieredStorageReader,
    SageMakerTieredStorageWriter,
)
from amzn_sagemaker_checkpointing.config.sagemaker_checkpoint_config import (
    SageMakerCheckpointConfig,
)
from torch.distributed.checkpoint.state_dict_loader import load as load_state
from torch.distributed.checkpoint.state_dict_saver import save as save_state
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

ROWS = 8


def proxied(daemon: str, endpoint: str) -> dict[str, str]:
    """The environment in which the package finds a daemon and the S3 of a gateway."""
    return {
        "all_proxy": daemon,  # which `requests` heeds, and no client of S3
        "no_proxy": "127.0.0.1,localhost",
        "AWS_ENDPOINT_URL": endpoint,
    }


def quiet_logger(namespace: str) -> logging.Logger:
    """A logger that the package finds to have its file already, so that it opens none below /var/log."""
    logger = logging.getLogger(f"stock.{namespace}")
    logger.propagate = False
    if not logger.handlers:
        place = f"/var/log/sagemaker_checkpointing/{namespace}_checkpointing.log"
        handler = logging.FileHandler(place, delay=True)
        handler.setLevel(logging.CRITICAL + 1)
        logger.addHandler(handler)
    return logger


def config_of(namespace: str, world: int, base: str, *, save_to_s3: bool = False) -> Any:
    return SageMakerCheckpointConfig(
        namespace=namespace,
        world_size=world,
        s3_tier_base_path=base,
        save_to_s3=save_to_s3,
        logger=quiet_logger(namespace),
    )


def save(config: Any, step: int, state: dict[str, Any], **how: Any) -> None:
    save_state(state, storage_writer=SageMakerTieredStorageWriter(config, step=step), **how)


def load(config: Any, state: dict[str, Any], step: int | None = None, **how: Any) -> int:
    """Load the newest step, or this one; which it was."""
    reader = SageMakerTieredStorageReader(config, step=step)
    load_state(state, storage_reader=reader, **how)
    assert reader.step is not None
    return reader.step


def weights(scale: float = 1.0) -> torch.Tensor:
    return torch.arange(ROWS * 3, dtype=torch.float32).reshape(ROWS, 3) * scale


def main() -> None:
    rank, world, store, namespace, base = sys.argv[1:]
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(world))
    mesh = init_device_mesh("cpu", (int(world),))
    rows = ROWS // int(world)
    own = slice(int(rank) * rows, (int(rank) + 1) * rows)

    def sharded(scale: float) -> dict[str, Any]:
        return {"w": DTensor.from_local(weights(scale)[own].clone(), mesh, [Shard(0)]), "epoch": int(scale)}

    save(config_of(namespace, int(world), base), 1, sharded(1.0))
    save(config_of(namespace, int(world), base, save_to_s3=True), 2, sharded(2.0))
    state = sharded(0.0)
    step = load(config_of(namespace, int(world), base), state)
    sys.stdout.write(json.dumps({"step": step, "w": state["w"].to_local().tolist(), "epoch": state["epoch"]}) + "\n")
    sys.stdout.flush()
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # Threads of the package's S3 client need not be waited for.


if __name__ == "__main__":
    main()
