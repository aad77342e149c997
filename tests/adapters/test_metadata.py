"""Lists of checkpoints: read without running what they say; those of tiered ones as the stock package has them."""

import os
import pickle
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from amzn_sagemaker_checkpointing.checkpointing.filesystem.storage_info import _SageMakerStorageInfo
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from tiergate.checkpoints import dcpmetadata
from tiergate_adapters.metadata import TieredPiece, read_list, write_tiered_list

_ZERO = torch.Size([0, 0])
_TENSOR = TensorStorageMetadata(
    TensorProperties(torch.bfloat16, memory_format=torch.channels_last),
    torch.Size([8, 4]),
    [ChunkStorageMetadata(_ZERO, torch.Size([8, 4]))],
)


def _of(stored: Any, pieces: int = 1) -> Metadata:
    names = [f"layers.{at}.weight" for at in range(pieces)]
    return Metadata(
        state_dict_metadata=dict.fromkeys(names, _TENSOR) | {"epoch": BytesStorageMetadata()},
        planner_data={name: ("layers", at, "weight") for at, name in enumerate(names)},
        storage_data={MetadataIndex(name, _ZERO, 0): stored for name in names},
        storage_meta=StorageMeta(checkpoint_id="somewhere"),
    )


class _Runs:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.getenv, ("HOME",)


@dataclass
class OfAPlanner:
    """What a planner of one's own may put into a list."""

    rank: int


def test_torchs_own_list_is_read() -> None:
    metadata = _of(_StorageInfo("__0_0.distcp", 0, 64))
    for protocol in (2, 4, 5):
        assert read_list(pickle.dumps(metadata, protocol)) == metadata


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_a_list_that_would_run_something_is_refused(protocol: int) -> None:
    data = pickle.dumps(_of(_Runs()), protocol)
    with pytest.raises(pickle.UnpicklingError, match=r"os\.getenv"):
        read_list(data)


def test_only_types_of_numbers_are_taken_from_torch() -> None:
    for name in ("load", "hub.load", "_C"):
        with pytest.raises(pickle.UnpicklingError, match=rf"torch\.{name}"):
            read_list(f"ctorch\n{name}\n.".encode())


def test_a_class_of_the_callers_own_needs_trust() -> None:
    metadata = _of(OfAPlanner(3))
    data = pickle.dumps(metadata)
    with pytest.raises(pickle.UnpicklingError, match="trust"):
        read_list(data)
    assert read_list(data, trust=[f"{__name__}.OfAPlanner"]) == metadata


@pytest.mark.parametrize("data", [b"", b"no pickle", pickle.dumps(_of(None))[:-20], pickle.dumps({"epoch": 3})])
def test_what_is_no_list_is_refused(data: bytes) -> None:
    with pytest.raises(pickle.UnpicklingError):
        read_list(data)


@pytest.mark.parametrize("pieces", [0, 1, 5_000])
def test_a_tiered_list_is_that_of_the_stock_package(pieces: int) -> None:
    ours, stock = _of(TieredPiece(1, 5, 7), pieces), _of(_SageMakerStorageInfo(1, 5, 7), pieces)
    written = write_tiered_list(ours)
    assert pickle.loads(written) == stock
    assert read_list(written) == ours
    assert read_list(pickle.dumps(stock, pickle.HIGHEST_PROTOCOL)) == ours
    assert dcpmetadata.read(written) == dcpmetadata.read(pickle.dumps(stock, pickle.HIGHEST_PROTOCOL))
    assert b"tiergate" not in written


def test_a_name_beyond_the_first_frame_is_no_reason_to_write_a_list_that_nobody_reads() -> None:
    metadata = _of(TieredPiece(0, 0, 1))
    metadata.storage_data = {MetadataIndex("w" * 70_000): TieredPiece(0, 0, 1)}
    with pytest.raises(ValueError, match="too long"):
        write_tiered_list(metadata)
