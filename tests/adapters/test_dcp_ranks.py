"""torch.distributed.checkpoint through the adapter, in jobs of several ranks on gloo."""

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from tests.adapters import ranks
from tests.adapters.conftest import Environment
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load

from tiergate_adapters.dcp import TieredStorageReader

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def test_two_ranks_save_in_every_way_and_any_number_loads(
    uri: str, environment: Environment, beyond: Callable[[], Mapping[str, bytes]], tmp_path: Path
) -> None:
    saved = ranks.run(environment(), "save_all", 2, tmp_path, uri)
    sums = saved[0]["sums"]
    for rank in saved:
        assert rank.pop("nothing") == f"{uri}/nothing holds no checkpoint"
        assert rank.pop("sums") == sums
        assert rank == {"plain": True, "each": True, "alone": True, "thread": True}
    # In other numbers than they were saved by.
    for rank in ranks.run(environment(), "load_all", 3, tmp_path, uri):
        assert rank.pop("nothing") == f"no whole checkpoint is under {uri}/nothing"
        assert rank.pop("newest") == [30, f"{uri}/run/step_30", True]
        assert rank == {"plain": True, "each": True, "thread": True, "sums": sums}
    for way in ("plain", "each", "thread"):
        found = {name: torch.zeros_like(value) for name, value in ranks.tensors().items()}
        load(found, storage_reader=TieredStorageReader(f"{uri}/{way}"), no_dist=True)
        assert all(torch.equal(found[name], value) for name, value in ranks.tensors().items())
    # What is in S3 alone, by torch's own reader.
    for name, body in beyond().items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(body)
    for way in ("plain", "each", "thread"):
        found = {name: torch.zeros_like(value) for name, value in ranks.tensors().items()}
        load(found, storage_reader=FileSystemReader(tmp_path / way), no_dist=True)
        assert all(torch.equal(found[name], value) for name, value in ranks.tensors().items())
    assert {path.name for path in (tmp_path / "alone").iterdir()} == {
        "__0.metadata",
        "__0_0.distcp",
        "__1.metadata",
        "__1_0.distcp",
    }


def test_a_writing_process_that_dies_fails_the_save_and_leaves_no_list(
    uri: str, environment: Environment, beyond: Callable[[], Mapping[str, bytes]], tmp_path: Path
) -> None:
    (rank,) = ranks.run(environment(), "die", 1, tmp_path, uri)
    assert rank["process"]
    assert "process is dead" in rank["error"]
    assert set(beyond()) == {"process/.metadata", "process/__0_0.distcp"}
    with pytest.raises(FileNotFoundError):
        load({"first": torch.zeros(1)}, storage_reader=TieredStorageReader(f"{uri}/dead"), no_dist=True)
