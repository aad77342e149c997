"""torch.distributed.checkpoint through the adapter, in one process: what lands, who can read it, what is refused."""

import io
import os
import pickle
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from tests.adapters.conftest import BUCKET, Environment
from tests.adapters.states import empty_of, same
from tests.conformance.gateway import CLIENT
from torch.distributed.checkpoint._extension import ExtensionRegistry, StreamTransformExtension
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys, load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.serialization import get_crc32_options

from tiergate import cli
from tiergate.testing.node import RunningNode
from tiergate.testing.origins import MotoOrigin, free_ports
from tiergate_adapters.dcp import GAP_BYTES, REQUEST_BYTES, TieredStorageReader, TieredStorageWriter
from tiergate_adapters.store import ObjectReader, ObjectWriter, UnreachableError

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


def test_without_any_gateway_saves_go_to_s3_and_loads_know_nothing(
    uri: str, environment: Environment, origin: MotoOrigin, monkeypatch: pytest.MonkeyPatch
) -> None:
    (port,) = free_ports(1)
    environment(endpoint=f"http://127.0.0.1:{port}")
    monkeypatch.setenv("TIERGATE_ORIGIN", origin.endpoint)
    writer, reader = TieredStorageWriter(uri), TieredStorageReader(uri)
    for each in (writer, reader):
        each._store.route.attempts_count = 1
    save(state(5), storage_writer=writer, no_dist=True)
    access = stock(origin.endpoint, origin.access_key, origin.secret_key)
    assert same(loaded(FsspecReader(uri, **access)), state(5))
    with pytest.raises(UnreachableError):
        loaded(reader)


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


def address(view: Any) -> int:
    return int(np.frombuffer(view, np.uint8).ctypes.data)


def test_a_tensors_own_memory_is_handed_to_the_writer(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: set[tuple[int, int]] = set()
    write = ObjectWriter.write

    def noting(self: ObjectWriter, data: Any, /) -> int:
        taken.add((address(data), memoryview(data).nbytes))
        return write(self, data)

    monkeypatch.setattr(ObjectWriter, "write", noting)
    base = torch.rand(1000, 100)
    tensors = {"whole": torch.rand(64, 64), "rows": base[100:300], "parameter": torch.nn.Parameter(torch.rand(500))}
    save(tensors, storage_writer=TieredStorageWriter(uri), no_dist=True)
    assert {(tensor.data_ptr(), tensor.nbytes) for tensor in tensors.values()} <= taken
    found = {name: torch.zeros_like(tensor.detach()) for name, tensor in tensors.items()}
    load(found, storage_reader=TieredStorageReader(uri), no_dist=True)
    assert same(found, {name: tensor.detach() for name, tensor in tensors.items()})


def test_the_callers_setting_for_sums_stays(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    write = ObjectWriter.write

    def looking(self: ObjectWriter, data: Any, /) -> int:
        other = threading.Thread(target=lambda: seen.append(get_crc32_options()))
        other.start()
        other.join()
        return write(self, data)

    monkeypatch.setattr(ObjectWriter, "write", looking)
    save({"w": torch.rand(10)}, storage_writer=TieredStorageWriter(uri), no_dist=True)
    assert seen
    assert all(seen)
    assert get_crc32_options()


@pytest.mark.parametrize("threads", [1, 3])
def test_a_save_that_fails_leaves_no_list_and_nothing_of_the_file(
    uri: str, beyond: Beyond, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    write, aborted = ObjectWriter.write, []

    def failing(self: ObjectWriter, data: Any, /) -> int:
        if memoryview(data).nbytes == 4_000:
            raise OSError("no room")
        return write(self, data)

    def noting(self: ObjectWriter) -> None:
        aborted.append(self)

    monkeypatch.setattr(ObjectWriter, "write", failing)
    monkeypatch.setattr(ObjectWriter, "abort", noting)  # what it does is the store's, and tested there
    tensors = {f"w{size}": torch.rand(size) for size in (10, 1000, 2000)}
    with pytest.raises(CheckpointException, match="no room"):
        save(tensors, storage_writer=TieredStorageWriter(uri, thread_count=threads), no_dist=True)
    assert len(aborted) == 1
    left = beyond()
    assert ".metadata" not in left
    assert len(left) <= threads - 1  # others that had not begun are not written at all


# -- reading
Ranges = list[tuple[int, int]]


@pytest.fixture
def mapped(monkeypatch: pytest.MonkeyPatch) -> Ranges:
    """The ranges that were read where they lie."""
    asked: Ranges = []
    read = ObjectReader.mapped

    def noting(self: ObjectReader, start: int, end: int) -> list[memoryview] | None:
        found = read(self, start, end)
        if found is not None and not self.key.endswith(".metadata"):
            asked.append((start, end))
        return found

    monkeypatch.setattr(ObjectReader, "mapped", noting)
    return asked


@pytest.fixture
def ranges(monkeypatch: pytest.MonkeyPatch) -> Ranges:
    """The ranges of files that are asked for where nothing is mapped."""
    asked: Ranges = []
    read = ObjectReader.fetched

    def noting(self: ObjectReader, start: int, end: int) -> memoryview:
        if not self.key.endswith(".metadata"):
            asked.append((start, end))
        return read(self, start, end)

    monkeypatch.setattr(ObjectReader, "mapped", lambda *_: None)
    monkeypatch.setattr(ObjectReader, "fetched", noting)
    return asked


def test_on_this_node_tensors_are_copied_from_where_they_lie(uri: str, mapped: Ranges) -> None:
    tensors = {f"w{number}": torch.rand(GAP_BYTES) for number in range(3)}
    save(tensors, storage_writer=TieredStorageWriter(uri), no_dist=True)
    found = {name: torch.zeros_like(tensors[name]) for name in ("w0", "w2")}
    load(found, storage_reader=TieredStorageReader(uri), no_dist=True)
    assert same(found, {name: tensors[name] for name in found})
    assert len(mapped) == 2


@pytest.mark.parametrize("is_mapped", [True, False], ids=["mapped", "fetched"])
def test_tensors_of_any_kind_in_however_many_pieces_they_lie(
    uri: str, monkeypatch: pytest.MonkeyPatch, is_mapped: bool
) -> None:
    base = torch.rand(300, 200)
    tensors = {
        "whole": base,
        "rows": base[10:290],
        "part": base[:, 5:190],
        "transposed": base.t(),
        "last": torch.rand(2, 3, 80, 80).to(memory_format=torch.channels_last),
        "half": torch.rand(100_000).to(torch.bfloat16),
        "conjugate": torch.rand(20_000, dtype=torch.complex64).conj(),
        "negative": torch.rand(40_000, dtype=torch.complex64).conj().imag,
        "small": torch.rand(3),
    }
    save(tensors, storage_writer=TieredStorageWriter(uri), no_dist=True)
    read = ObjectReader.mapped

    def torn(self: ObjectReader, start: int, end: int) -> list[memoryview] | None:
        whole = read(self, start, end)
        if whole is None or not is_mapped:
            return None
        return [view[at : at + 30_011] for view in whole for at in range(0, len(view), 30_011)]

    monkeypatch.setattr(ObjectReader, "mapped", torn)
    # Into tensors that lie as those do, into others, and into other types.
    for make in (torch.zeros_like, lambda each: torch.zeros(each.size(), dtype=each.dtype), doubled):
        found = {name: make(tensor) for name, tensor in tensors.items()}
        load(found, storage_reader=TieredStorageReader(uri), no_dist=True)
        assert same(found, {name: tensor.to(found[name].dtype) for name, tensor in tensors.items()})


def doubled(tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros(tensor.size(), dtype=torch.complex128 if tensor.is_complex() else torch.float64)


def test_only_the_pieces_that_are_wanted_are_read(uri: str, ranges: Ranges) -> None:
    tensors = {f"w{number}": torch.rand(GAP_BYTES // 4) for number in range(6)}
    save(tensors, storage_writer=TieredStorageWriter(uri), no_dist=True)
    found = {name: torch.zeros_like(tensors[name]) for name in ("w1", "w4", "w5")}
    load(found, storage_reader=TieredStorageReader(uri), no_dist=True)
    assert same(found, {name: tensors[name] for name in found})
    read = sorted(end - start for start, end in ranges)
    assert len(read) == 2  # of which one is for two neighbours
    assert sum(read) < 3 * (GAP_BYTES + 4096)


def test_neighbours_are_read_together_but_not_more_than_so_much(uri: str, ranges: Ranges) -> None:
    tensors = {f"w{number}": torch.full((REQUEST_BYTES // 16,), float(number)) for number in range(9)}
    save(tensors, storage_writer=TieredStorageWriter(uri), no_dist=True)
    found = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    load(found, storage_reader=TieredStorageReader(uri), no_dist=True)
    assert same(found, tensors)
    assert len(ranges) == 3
    assert max(end - start for start, end in ranges) <= REQUEST_BYTES


def test_a_piece_that_is_wanted_twice_is_read_once(uri: str, ranges: Ranges) -> None:
    class Halves(DefaultLoadPlanner):
        """Reads the two halves of each tensor as if they were pieces of their own."""

        def create_local_plan(self) -> LoadPlan:
            plan = super().create_local_plan()
            (item,) = plan.items
            half = item.lengths[0] // 2
            for start in (0, half):
                at = torch.Size([start])
                self.items.append(replace(item, storage_offsets=at, dest_offsets=at, lengths=torch.Size([half])))
            return replace(plan, items=self.items)

        items: ClassVar[list[ReadItem]] = []

    tensors = {"w": torch.rand(1000)}
    save(tensors, storage_writer=TieredStorageWriter(uri), no_dist=True)
    found = {"w": torch.zeros(1000)}
    load(found, storage_reader=TieredStorageReader(uri), planner=Halves(), no_dist=True)
    assert same(found, tensors)
    assert len(ranges) == 1


def test_the_whole_can_be_loaded_without_knowing_what_is_in_it(uri: str) -> None:
    save(state(1), storage_writer=TieredStorageWriter(uri), no_dist=True)
    with pytest.warns(UserWarning, match="distributed is unavailable"):
        found = _load_state_dict_from_keys(storage_reader=TieredStorageReader(uri))
    expected = state(1)
    expected["model"]["parameter"] = expected["model"]["parameter"].detach()
    assert same(found, expected)


def test_planners_of_ones_own(uri: str) -> None:
    class Doubling(DefaultSavePlanner):
        def resolve_data(self, write_item: Any) -> Any:
            found = super().resolve_data(write_item)
            return found * 2 if isinstance(found, torch.Tensor) else found

    class Renaming(DefaultLoadPlanner):
        def set_up_planner(self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False) -> None:
            super().set_up_planner({f"old.{name}": value for name, value in state_dict.items()}, metadata)

    tensors: dict[str, Any] = {"old.w": torch.rand(10), "old.n": {"deep": torch.rand(2, 2)}}
    save(tensors, storage_writer=TieredStorageWriter(uri), planner=Doubling(), no_dist=True)
    found = {"w": torch.zeros(10)}
    planner = Renaming(allow_partial_load=True)
    load(found, storage_reader=TieredStorageReader(uri), planner=planner, no_dist=True)
    assert torch.equal(found["w"], tensors["old.w"] * 2)


class Inverted(StreamTransformExtension):
    """Turns every bit."""

    class Stream(io.RawIOBase):
        def __init__(self, raw: Any) -> None:
            self._raw = raw

        def readable(self) -> bool:
            return True

        def writable(self) -> bool:
            return True

        def write(self, data: Any, /) -> int:
            self._raw.write(bytes(each ^ 255 for each in bytes(data)))
            return memoryview(data).nbytes

        def readall(self) -> bytes:
            return bytes(each ^ 255 for each in self._raw.read())

        def read(self, size: int = -1, /) -> bytes:
            return self.readall()

    def transform_to(self, output: Any) -> Any:
        return self.Stream(output)

    def transform_from(self, input: Any) -> Any:
        return self.Stream(input)

    def get_descriptor(self) -> str:
        return "inverted"

    @staticmethod
    def registry_name() -> str:
        return "inverted"

    @staticmethod
    def from_descriptor(version: str) -> "Inverted":
        return Inverted()


def test_extensions_of_torch_transform_what_is_stored(uri: str, beyond: Beyond, tmp_path: Path) -> None:
    registry = ExtensionRegistry()
    registry.register(Inverted)
    tensors = {"w": torch.rand(10), "name": "x"}
    save(tensors, storage_writer=TieredStorageWriter(uri, _extensions=[Inverted()]), no_dist=True)
    for reader in (
        TieredStorageReader(uri, _extension_registry=registry),
        FileSystemReader(kept_in(tmp_path, beyond()), _extension_registry=registry),
    ):
        found = {"w": torch.zeros(10), "name": ""}
        load(found, storage_reader=reader, no_dist=True)
        assert same(found, tensors)


# -- lists that were not written by torch
class Evil:
    def __init__(self, *call: Any) -> None:
        self._call = call

    def __reduce__(self) -> Any:
        return self._call


@pytest.mark.parametrize(
    "evil",
    [
        lambda trace: Evil(os.system, (f"touch {trace}",)),
        lambda trace: Evil(eval, (f"open('{trace}', 'w')",)),
        lambda trace: {"fqn": Evil(Path.touch, (Path(trace),))},
        lambda trace: torch.nn.Linear(1, 1),
    ],
    ids=["system", "eval", "nested", "module"],
)
def test_a_list_runs_nothing(uri: str, node: RunningNode, tmp_path: Path, evil: Callable[[str], Any]) -> None:
    trace = tmp_path / "trace"
    body = pickle.dumps(Metadata({}, planner_data=evil(str(trace))))
    node.client().put_object(Bucket=BUCKET, Key=f"{uri.removeprefix(f's3://{BUCKET}/')}/.metadata", Body=body)
    with pytest.raises(CheckpointException, match="which no list of torch's own needs"):
        load({"w": torch.zeros(1)}, storage_reader=TieredStorageReader(uri), no_dist=True)
    assert not trace.exists()


@dataclass
class Note:
    """What a planner of one's own keeps in the list."""

    rounds: int


def test_a_list_may_name_what_the_caller_trusts(uri: str) -> None:
    class Noting(DefaultSavePlanner):
        def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
            plans, metadata = super().create_global_plan(all_plans)
            return plans, replace(metadata, planner_data=Note(3))

    class Reading(DefaultLoadPlanner):
        def set_up_planner(self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False) -> None:
            assert metadata.planner_data == Note(3)
            super().set_up_planner(state_dict, replace(metadata, planner_data={}), is_coordinator)

    save({"w": torch.ones(3)}, storage_writer=TieredStorageWriter(uri), planner=Noting(), no_dist=True)
    found = {"w": torch.zeros(3)}
    with pytest.raises(CheckpointException, match="Note, which no list"):
        load(found, storage_reader=TieredStorageReader(uri), planner=Reading(), no_dist=True)
    trusting = TieredStorageReader(uri, trust=[f"{__name__}.Note"])
    load(found, storage_reader=trusting, planner=Reading(), no_dist=True)
    assert torch.equal(found["w"], torch.ones(3))


def test_a_writer_is_pickled_with_nothing_live(uri: str) -> None:
    writer = TieredStorageWriter(f"{uri}/a", thread_count=2, persist="s3")
    save(state(1), storage_writer=writer, no_dist=True)
    again = pickle.loads(pickle.dumps(writer))
    again.reset(f"{uri}/b")
    save(state(2), storage_writer=again, no_dist=True)
    assert same(loaded(TieredStorageReader(f"{uri}/a")), state(1))
    assert same(loaded(TieredStorageReader(f"{uri}/b")), state(2))


def test_verify_accepts_what_was_saved(uri: str, node: RunningNode, beyond: Beyond) -> None:
    save(state(1), storage_writer=TieredStorageWriter(uri), no_dist=True)
    beyond()
    where = ["--memory-dir", str(node.memory_dir), "--admin-listen", node.admin.removeprefix("http://")]
    assert cli.main(["verify", uri, "--deep", *where]) == 0
