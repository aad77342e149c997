"""Promise P4 for frameworks that save over a committed checkpoint, and for the ways in which clients delete one."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.fs  # type: ignore[import-untyped]  # it has no types
import pytest
import s3fs  # type: ignore[import-untyped]  # it has no types
import torch
from tests.nodes import StartNode
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

from tiergate.checkpoints.markers import ancestor_scopes
from tiergate.testing.completeness import changes_of
from tiergate.testing.faults import FaultyOrigin
from tiergate.testing.node import RunningNode
from tiergate.testing.objects import is_missing, keys_of
from tiergate.testing.origins import MotoOrigin, ProcessOrigin
from tiergate.testing.rules import Seen

pytestmark = [
    pytest.mark.parametrize("origin", [MotoOrigin], ids=["moto"], indirect=True),
    pytest.mark.filterwarnings("ignore::UserWarning:torch"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

LONG = ("--marker-hold", "1h", "--dirty-age-slow", "2h", "--dirty-age-limit", "2h", "--marker-quiet", "1h")
"""Nothing here ends by itself."""

MARKER = "run/last/.metadata"


def state(seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {f"w{number}": torch.rand((64, 1024), generator=generator) for number in range(6)}


def options(endpoint: str) -> dict[str, Any]:
    return {"key": "test", "secret": "test", "endpoint_url": endpoint, "skip_instance_cache": True}


def loaded(bucket: str, endpoint: str) -> dict[str, Any]:
    found = {name: torch.zeros_like(value) for name, value in state(0).items()}
    reader = FsspecReader(f"s3://{bucket}/run/last", **options(endpoint))
    state_dict_loader.load(found, storage_reader=reader, no_dist=True)
    return found


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def save(bucket: str, endpoint: str, seed: int) -> None:
    # A file for each tensor.
    writer = FsspecWriter(f"s3://{bucket}/run/last", single_file_per_rank=False, overwrite=True, **options(endpoint))
    state_dict_saver.save(state(seed), storage_writer=writer, no_dist=True)


def order_of(proxy: FaultyOrigin, bucket: str) -> list[str]:
    return [("" if each.etag else "-") + each.key for each in changes_of(proxy.requests, bucket)]


def gap_of(proxy: FaultyOrigin, bucket: str) -> list[Seen]:
    """The requests that the origin got from the marker's deletion to its put."""
    requests = [each for each in proxy.requests if each.bucket == bucket]
    taken = next(index for index, each in enumerate(requests) if (each.method, each.key) == ("DELETE", MARKER))
    back = next(index for index, each in enumerate(requests) if (each.method, each.key) == ("PUT", MARKER))
    return requests[taken + 1 : back]


def test_stock_dcp_saved_twice_leaves_a_gap_of_just_the_replaced_shards(
    start_node: StartNode, origin: ProcessOrigin, proxy: FaultyOrigin, bucket: str
) -> None:
    node = start_node(*LONG)
    save(bucket, node.endpoint, 1)
    node.wait_settled()
    shards = [key for key in order_of(proxy, bucket) if key.endswith(".distcp")]
    assert len(shards) == len(state(1))
    proxy.forget()

    save(bucket, node.endpoint, 2)
    assert same(loaded(bucket, node.endpoint), state(2))
    node.wait_settled()

    changes = [change for change in order_of(proxy, bucket) if change != f"-{MARKER}.tmp"]
    assert changes[0] == f"-{MARKER}"
    gap = gap_of(proxy, bucket)
    looked = [each for each in gap if each.method == "GET"]
    # The writer deletes the marker itself, and the draft that the new one was made of: either may come to the origin.
    deleted = [each for each in gap if each.operation == "DeleteObject" and each.key in (MARKER, f"{MARKER}.tmp")]
    replaced = [each for each in gap if each not in looked and each not in deleted]
    assert sorted((each.operation, each.key) for each in replaced) == [("PutObject", shard) for shard in sorted(shards)]
    assert len(looked) <= len(ancestor_scopes(MARKER))
    assert {each.operation for each in looked} <= {"ListObjectsV2"}
    assert same(loaded(bucket, origin.endpoint), state(2))


def test_stock_dcp_that_dies_in_its_second_save_leaves_the_first_whole(
    start_node: StartNode, origin: ProcessOrigin, proxy: FaultyOrigin, bucket: str
) -> None:
    node = start_node(*LONG)
    save(bucket, node.endpoint, 1)
    node.wait_settled()
    proxy.forget()
    client = node.client()
    for key in [key for key in keys_of(client, bucket) if key.endswith(".distcp")][:4]:
        client.put_object(Bucket=bucket, Key=key, Body=os.urandom(1000))
    node.wait_status("they are held", lambda status: len(status["writeback"]["fenced"]) == 4)
    assert order_of(proxy, bucket) == []
    assert same(loaded(bucket, origin.endpoint), state(1))


def by_aws_cli(node: RunningNode, bucket: str, folder: Path) -> None:
    environment = os.environ | {
        "AWS_ENDPOINT_URL": node.endpoint,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_CONFIG_FILE": str(folder / "none"),
    }
    command = [str(Path(sys.executable).parent / "aws"), "s3", "rm", "--recursive", f"s3://{bucket}/old/"]
    subprocess.run(command, env=environment, check=True, timeout=120, capture_output=True)


def by_s3fs(node: RunningNode, bucket: str, folder: Path) -> None:
    s3fs.S3FileSystem(**options(node.endpoint)).rm(f"{bucket}/old", recursive=True)


def by_pyarrow(node: RunningNode, bucket: str, folder: Path) -> None:
    """As Ray deletes a checkpoint."""
    system = pyarrow.fs.S3FileSystem(
        access_key="test", secret_key="test", endpoint_override=node.endpoint, region="us-east-1"
    )
    system.delete_dir(f"{bucket}/old")


@pytest.mark.parametrize("delete", [by_aws_cli, by_s3fs, by_pyarrow], ids=["aws s3 rm", "s3fs", "pyarrow"])
@pytest.mark.parametrize("marker", [".metadata", "trainer_state.json", "model.safetensors.index.json"])
def test_set_deleted_by_a_stock_client_loses_its_marker_first(
    node: RunningNode,
    direct: Any,
    proxy: FaultyOrigin,
    bucket: str,
    tmp_path: Path,
    delete: Callable[[RunningNode, str, Path], None],
    marker: str,
) -> None:
    client = node.client()
    for key in ("__0_0.distcp", "zz/deep", "config.json", marker):
        client.put_object(Bucket=bucket, Key=f"old/{key}", Body=os.urandom(1000))
    node.wait_settled()
    proxy.forget()
    delete(node, bucket, tmp_path)
    node.wait_settled()
    in_set = [change for change in order_of(proxy, bucket) if "old/" in change]
    assert in_set[0] == f"-old/{marker}"
    assert is_missing(direct, bucket, f"old/{marker}")
    assert keys_of(direct, bucket) == []
