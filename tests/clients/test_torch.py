"""PyTorch's distributed checkpoints, through s3fs and through s3torchconnector."""

from typing import IO, Any, cast

import pytest
import s3torchconnector
import torch
from s3torchconnector.dcp import S3StorageReader, S3StorageWriter
from tests.clients.conftest import BUCKET, Readers
from tests.conformance.gateway import CLIENT
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

from tiergate.testing.node import RunningNode

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:torch"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


def state(seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "model": {f"w{n}": torch.rand((256, 1024 * (n + 1)), generator=generator) for n in range(4)},
        "step": torch.tensor(seed),
    }


def empty() -> dict[str, Any]:
    return {"model": {f"w{n}": torch.zeros((256, 1024 * (n + 1))) for n in range(4)}, "step": torch.tensor(0)}


def same(left: dict[str, Any], right: dict[str, Any]) -> bool:
    names = left["model"].keys() == right["model"].keys()
    return (
        names
        and all(torch.equal(left["model"][name], right["model"][name]) for name in left["model"])
        and torch.equal(left["step"], right["step"])
    )


def fsspec_options(node: RunningNode) -> dict[str, Any]:
    return {
        "key": CLIENT.access_key,
        "secret": CLIENT.secret_key,
        "endpoint_url": node.endpoint,
        "skip_instance_cache": True,
    }


@pytest.mark.client("s3fs")
def test_dcp_saves_overwrites_and_loads_through_s3fs(node: RunningNode, prefix: str, readers: Readers) -> None:
    path = f"s3://{BUCKET}/{prefix}/step=10 (a)+"

    def loaded() -> dict[str, Any]:
        found = empty()
        state_dict_loader.load(found, storage_reader=FsspecReader(path, **fsspec_options(node)), no_dist=True)
        return found

    for seed in (1, 2):
        writer = FsspecWriter(path, overwrite=True, **fsspec_options(node))
        state_dict_saver.save(state(seed), storage_writer=writer, no_dist=True)
        assert same(loaded(), state(seed))
    for _ in readers():
        assert same(loaded(), state(2))


@pytest.mark.client("s3torchconnector")
def test_dcp_saves_and_loads_through_s3torchconnector(node: RunningNode, prefix: str, readers: Readers) -> None:
    path = f"s3://{BUCKET}/{prefix}/step-10"
    forced = s3torchconnector.S3ClientConfig(force_path_style=True)  # which an address needs not, but a name would

    def loaded() -> dict[str, Any]:
        found = empty()
        state_dict_loader.load(
            found,
            storage_reader=S3StorageReader(region="us-east-1", path=path, s3client_config=forced),
            no_dist=True,
        )
        return found

    for seed in (1, 2):
        writer = S3StorageWriter(region="us-east-1", path=path, overwrite=True, s3client_config=forced)
        state_dict_saver.save(state(seed), storage_writer=writer, no_dist=True)
        assert same(loaded(), state(seed))
    for _ in readers():
        assert same(loaded(), state(2))


@pytest.mark.client("s3torchconnector")
def test_s3checkpoint_writes_and_reads(node: RunningNode, prefix: str, readers: Readers) -> None:
    uri = f"s3://{BUCKET}/{prefix}/model.pt"

    def loaded() -> dict[str, Any]:
        checkpoint = s3torchconnector.S3Checkpoint(region="us-east-1")
        with checkpoint.reader(uri) as reader:
            found: dict[str, Any] = torch.load(cast(IO[bytes], reader))
        return found

    for seed in (1, 2):
        with s3torchconnector.S3Checkpoint(region="us-east-1").writer(uri) as writer:
            torch.save(state(seed), cast(IO[bytes], writer))
        assert same(loaded(), state(seed))
    for _ in readers():
        assert same(loaded(), state(2))
