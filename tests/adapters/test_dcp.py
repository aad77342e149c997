"""torch.distributed.checkpoint through the adapter, in one process: what lands, who can read it, what is refused."""

import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.adapters.conftest import BUCKET, Environment
from tests.conformance.gateway import CLIENT
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from tiergate.testing.node import RunningNode
from tiergate.testing.origins import MotoOrigin
from tiergate_adapters.dcp import TieredStorageReader, TieredStorageWriter

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:Detected an existing checkpoint"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

Beyond = Callable[[], Mapping[str, bytes]]


def state(seed: int) -> dict[str, Any]:
    """Tensors of several kinds and strides, views of larger ones, objects, numbers."""
    torch.manual_seed(seed)
    base = torch.rand(300, 200)
    return {
        "model": {
            "whole": base,
            "rows": base[10:40],
            "columns": base[:, 5:9],
            "transposed": torch.rand(40, 60).t(),
            "half": torch.rand(1000).to(torch.bfloat16),
            "eight": torch.rand(64).to(torch.float8_e4m3fn),
            "flags": torch.rand(77) > 0.5,
            "complex": torch.rand(9, dtype=torch.complex64),
            "conjugate": torch.rand(9, dtype=torch.complex64).conj(),
            "last": torch.rand(2, 3, 8, 8).to(memory_format=torch.channels_last),
            "scalar": torch.tensor(seed),
            "empty": torch.empty(0, 4),
            "parameter": torch.nn.Parameter(torch.rand(11)),
        },
        "step": seed,
        "extra": {"names": ["a", "b"], "rate": 0.1 * seed},
    }


def empty_of(full: Any) -> Any:
    """Its tensors zero, its other values none."""
    if isinstance(full, dict):
        return {name: empty_of(value) for name, value in full.items()}
    if isinstance(full, torch.Tensor):
        return torch.zeros_like(full.detach())
    return type(full)()


def same(left: Any, right: Any) -> bool:
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[name], right[name]) for name in left)
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and torch.equal(left.detach().to(right.dtype), right)
    return bool(left == right)


def loaded(reader: Any, seed: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = empty_of(state(seed))
    load(found, storage_reader=reader, no_dist=True)
    return found


def stock(endpoint: str, access_key: str, secret_key: str) -> dict[str, Any]:
    """What s3fs is told."""
    return {"endpoint_url": endpoint, "key": access_key, "secret": secret_key, "skip_instance_cache": True}


def kept_in(folder: Path, objects: Mapping[str, bytes]) -> Path:
    for name, body in objects.items():
        (folder / name).write_bytes(body)
    return folder


WAYS = [
    pytest.param({}, ["__0_0.distcp"], id="a file"),
    pytest.param({"thread_count": 3}, ["__0_0.distcp", "__0_1.distcp", "__0_2.distcp"], id="three threads"),
    pytest.param(
        {"single_file_per_rank": False, "thread_count": 2}, [f"__0_{n}.distcp" for n in range(16)], id="a file each"
    ),
]


@pytest.mark.parametrize(("options", "files"), WAYS)
def test_stock_readers_load_from_s3_alone_what_the_adapter_saved(
    uri: str, origin: MotoOrigin, beyond: Beyond, tmp_path: Path, options: dict[str, Any], files: list[str]
) -> None:
    for seed in (1, 2):  # the second time in place
        save(state(seed), storage_writer=TieredStorageWriter(uri, **options), no_dist=True)
        assert same(loaded(TieredStorageReader(uri)), state(seed))
    objects = beyond()
    assert sorted(objects) == sorted([".metadata", *files])
    access = stock(origin.endpoint, origin.access_key, origin.secret_key)
    assert same(loaded(FsspecReader(uri, **access)), state(2))
    assert same(loaded(FileSystemReader(kept_in(tmp_path, objects))), state(2))


@pytest.mark.parametrize(("options", "files"), WAYS)
def test_what_lands_is_what_torchs_own_writer_writes(
    uri: str, beyond: Beyond, tmp_path: Path, options: dict[str, Any], files: list[str]
) -> None:
    save(state(1), storage_writer=FileSystemWriter(tmp_path, **options), no_dist=True)
    save(state(1), storage_writer=TieredStorageWriter(uri, **options), no_dist=True)
    objects = beyond()
    theirs, ours = pickle.loads((tmp_path / ".metadata").read_bytes()), pickle.loads(objects[".metadata"])
    assert ours.storage_meta.checkpoint_id == uri
    ours.storage_meta = theirs.storage_meta
    # Threads may take the files in any order, so torch's own lists differ in that too.
    assert ours == theirs
    for name in files:
        # All the same but the sums of the archives, which are not computed.
        assert len(objects[name]) == (tmp_path / name).stat().st_size


@pytest.mark.parametrize("options", [{}, {"single_file_per_rank": False}], ids=["a file", "a file each"])
def test_the_adapter_loads_what_stock_writers_saved(
    uri: str, node: RunningNode, tmp_path: Path, options: dict[str, Any]
) -> None:
    access = stock(node.endpoint, CLIENT.access_key, CLIENT.secret_key)
    save(state(3), storage_writer=FsspecWriter(uri, **options, **access), no_dist=True)
    assert same(loaded(TieredStorageReader(uri)), state(3))
    save(state(4), storage_writer=FileSystemWriter(tmp_path, **options), no_dist=True)
    client = node.client()
    for path in tmp_path.iterdir():
        client.put_object(
            Bucket=BUCKET, Key=f"{uri.removeprefix(f's3://{BUCKET}/')}/b/{path.name}", Body=path.read_bytes()
        )
    assert same(loaded(TieredStorageReader(f"{uri}/b")), state(4))


def test_a_checkpoint_id_takes_the_place_of_the_uri(uri: str) -> None:
    writer = TieredStorageWriter(f"{uri}/a")
    save(state(1), storage_writer=writer, checkpoint_id=f"{uri}/b/", no_dist=True)
    assert writer.checkpoint_id == f"{uri}/b"
    reader = TieredStorageReader(f"{uri}/a")
    found = empty_of(state(1))
    load(found, storage_reader=reader, checkpoint_id=f"{uri}/b", no_dist=True)
    assert same(found, state(1))
    with pytest.raises(FileNotFoundError):
        load(found, storage_reader=reader, checkpoint_id=f"{uri}/a", no_dist=True)
    for each in (TieredStorageReader, TieredStorageWriter):
        assert each.validate_checkpoint_id(uri)
        assert not each.validate_checkpoint_id("/tmp/checkpoint")
        assert not each.validate_checkpoint_id(Path("s3://bucket/run"))


def test_nothing_to_load_is_a_file_not_found_error_of_load_itself(uri: str) -> None:
    with pytest.raises(FileNotFoundError, match="holds no checkpoint"):
        load({"w": torch.zeros(1)}, storage_reader=TieredStorageReader(uri), no_dist=True)


def test_a_gateway_that_does_not_answer_is_no_empty_place(uri: str, environment: Environment) -> None:
    environment(access_key="AKIDNOBODY")
    with pytest.raises(Exception, match=r"Forbidden|InvalidAccessKeyId"):
        load({"w": torch.zeros(1)}, storage_reader=TieredStorageReader(uri), no_dist=True)


def test_an_existing_checkpoint_can_be_protected(uri: str) -> None:
    save(state(1), storage_writer=TieredStorageWriter(uri, overwrite=False), no_dist=True)
    with pytest.raises(CheckpointException, match="FileExistsError"):
        save(state(2), storage_writer=TieredStorageWriter(uri, overwrite=False), no_dist=True)
    assert same(loaded(TieredStorageReader(uri)), state(1))


def test_without_collectives_each_rank_has_its_own_list(uri: str, beyond: Beyond, tmp_path: Path) -> None:
    save(state(1), storage_writer=TieredStorageWriter(uri), no_dist=True, use_collectives=False)
    objects = beyond()
    assert sorted(objects) == ["__0.metadata", "__0_0.distcp"]
    assert same(loaded(TieredStorageReader(uri)), state(1))
    assert same(loaded(FileSystemReader(kept_in(tmp_path, objects))), state(1))
