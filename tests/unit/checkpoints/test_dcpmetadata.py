"""torch's list of a checkpoint, read without torch: what it says, and that a hostile one is refused at no cost."""

import io
import os
import pickle
import tracemalloc
from collections.abc import Callable
from pathlib import PurePosixPath
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
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
from tiergate.checkpoints.dcpmetadata import DcpItem, MetadataError, MetadataTooLargeError

SHAPE = (8, 4)


def torchs(**changes: Any) -> Metadata:
    """A list as torch makes it: a tensor in two pieces of two files, and an object."""
    chunks = [ChunkStorageMetadata(torch.Size((at, 0)), torch.Size((4, 4))) for at in (0, 4)]
    tensor = TensorStorageMetadata(TensorProperties(dtype=torch.bfloat16), torch.Size(SHAPE), chunks)
    storage = {
        MetadataIndex("w", (at * 4, 0), at): _StorageInfo(f"__{at}_0.distcp", 100 * at, 1000 + at) for at in (0, 1)
    }
    storage[MetadataIndex("step")] = _StorageInfo("__0_0.distcp", 1000, 60)
    made = Metadata(
        {"w": tensor, "step": BytesStorageMetadata()},
        planner_data={"w": ("w",), "step": ("step",)},
        storage_data=storage,
        storage_meta=StorageMeta(PurePosixPath("run/step_3"), "id"),
    )
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def pickled(**changes: Any) -> bytes:
    return pickle.dumps(torchs(**changes))


@pytest.mark.parametrize("protocol", [4, 5])
def test_list_of_torch_is_read(protocol: int) -> None:
    read = dcpmetadata.read(pickle.dumps(torchs(), protocol))
    assert read.files == {"__0_0.distcp": 1060, "__1_0.distcp": 1101}
    assert read.items == (
        DcpItem("w", "tensor", "__0_0.distcp", 0, 1000, "bfloat16", (4, 4)),
        DcpItem("w", "tensor", "__1_0.distcp", 100, 1001, "bfloat16", (4, 4)),
        DcpItem("step", "bytes", "__0_0.distcp", 1000, 60),
    )


def test_python_pickler_and_long_lists_are_read() -> None:
    made = torchs()
    made.storage_data = {
        MetadataIndex("step", (at,)): _StorageInfo(f"a/__{at}_0.distcp", (1 << 40) + at, 5) for at in range(3000)
    }
    stream = io.BytesIO()
    pickle._Pickler(stream, 4).dump(made)
    for data in (stream.getvalue(), pickle.dumps(made)):
        files = dcpmetadata.read(data).files
        assert len(files) == 3000
        assert files["a/__2999_0.distcp"] == (1 << 40) + 3004


def test_list_without_tensors_is_read() -> None:
    assert dcpmetadata.read(pickled(state_dict_metadata={}, storage_data={})).files == {}


@pytest.mark.parametrize(
    ("file", "offset", "length"),
    [
        ("", 0, 1),
        ("/etc/passwd", 0, 1),
        ("../x", 0, 1),
        ("a/../../x", 0, 1),
        ("x" * 2000, 0, 1),
        ("x", -1, 1),
        ("x", 0, -1),
        ("x", 1 << 70, 1),
        ("x", True, 1),
        ("x", 0, "1"),
        (b"x", 0, 1),
        (None, 0, 1),
    ],
)
def test_piece_that_cannot_be_is_refused(file: Any, offset: Any, length: Any) -> None:
    with pytest.raises(MetadataError):
        dcpmetadata.read(pickled(storage_data={MetadataIndex("step"): _StorageInfo(file, offset, length)}))


@pytest.mark.parametrize(
    "changes",
    [
        {"storage_data": None},
        {"storage_data": [1]},
        {"storage_data": {"w": _StorageInfo("x", 0, 1)}},
        {"storage_data": {MetadataIndex("w"): "x"}},
        {"storage_data": {MetadataIndex("w"): MetadataIndex("w")}},
        {"storage_data": {_StorageInfo: _StorageInfo("x", 0, 1)}},
        {"state_dict_metadata": None},
        {"state_dict_metadata": {"w": 1}},
        {"state_dict_metadata": {1: TensorStorageMetadata(TensorProperties(), torch.Size(()), [])}},
        {"state_dict_metadata": {"w": TensorStorageMetadata(TensorProperties(), torch.Size(()), ())}},  # type: ignore[arg-type]
        {"planner_data": {"a": print}},
        {"planner_data": {"a": os.system}},
        {"planner_data": {"a": getattr}},
        {"planner_data": {"a": torch.load}},
        {"planner_data": {"a": torch.nn.Linear}},
        {"planner_data": complex(1, 2)},
    ],
)
def test_list_of_wrong_things_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(MetadataError):
        dcpmetadata.read(pickled(**changes))


@pytest.mark.parametrize("made", [None, 1, "x", {}, [], (), b"", MetadataIndex("x"), Metadata, torch.Size((1,))])
def test_pickle_of_another_thing_is_refused(made: object) -> None:
    with pytest.raises(MetadataError):
        dcpmetadata.read(pickle.dumps(made, 4))


class Call:
    """Pickled as a call of `function`."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.made_of = (function, arguments)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.made_of


@pytest.mark.parametrize("protocol", range(6))
def test_calls_are_refused_and_not_made(protocol: int, tmp_path: os.PathLike[str]) -> None:
    witness = os.path.join(tmp_path, "called")
    for call in (
        Call(os.system, f"touch {witness}"),
        Call(eval, f"open({witness!r}, 'w')"),
        Call(open, witness, "w"),
        Call(getattr, Call(getattr, "x", "upper"), "__self__"),
        Call(__import__, "os"),
        Call(torch.load, witness),
        Call(torch.Size, Call(os.system, f"touch {witness}")),
    ):
        for data in (pickle.dumps(call, protocol), pickle.dumps(torchs(planner_data=call), protocol)):
            with pytest.raises(MetadataError):
                dcpmetadata.read(data)
    assert not os.path.exists(witness)


def text(value: str) -> bytes:
    return b"\x8c" + bytes([len(value)]) + value.encode()


def named(module: str, name: str) -> bytes:
    return text(module) + text(name) + b"\x93"


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("os", "system"),
        ("posix", "system"),
        ("builtins", "getattr"),
        ("builtins", "eval"),
        ("torch", "load"),
        ("torch", "Size.__init__"),
        ("torch", "Size.__reduce_ex__"),
        ("torch", "float32.__class__"),
        ("torch", "float"),
        ("torch.serialization", "load"),
        ("torch.serialization", "_get_layout.__globals__"),
        ("torch.distributed.checkpoint.metadata", "torch"),
        ("torch.distributed.checkpoint.metadata", "os.system"),
        ("torch.distributed.checkpoint.filesystem", "pickle"),
        ("pathlib", "os"),
        ("collections", "_sys"),
        ("", ""),
    ],
)
def test_names_outside_the_table_are_refused(module: str, name: str) -> None:
    with pytest.raises(MetadataError, match="which no such list needs"):
        dcpmetadata.read(b"\x80\x04" + named(module, name) + text("id") + b"\x85R.")


SIZE = named("torch", "Size")
INDEX = named("torch.distributed.checkpoint.metadata", "MetadataIndex")


@pytest.mark.parametrize(
    "program",
    [
        b"",
        b"\x80",
        b"\x80\x04",
        b"\x80\x04.",
        b"\x80\x03}.",
        b"\x80\xff}.",
        b"\x80\x04}}.",
        b"\x80\x04(}.",
        b"\x80\x04b.",
        b"\x80\x04(b.",
        b"\x80\x04}(\x94.",
        b"\x80\x04}(u",
        b"\x80\x04}(Nu.",
        b"\x80\x04N(NNu.",
        b"\x80\x04]N(a.",
        b"\x80\x04NNa.",
        b"\x80\x04]e.",
        b"\x80\x04t.",
        b"\x80\x04h\x00.",
        b"\x80\x04j\xff\xff\xff\xff.",
        b"\x80\x04r\xff\xff\xff\xff.",
        b"\x80\x04Nr\xff\xff\xff\x7f.",
        b"\x80\x04\x8e" + b"\xff" * 7 + b"\x7f.",
        b"\x80\x04\x8d" + b"\xff" * 7 + b"\x7f.",
        b"\x80\x04B\xff\xff\xff\xff.",
        b"\x80\x04X\xff\xff\xff\xff.",
        b"\x80\x04\x8c\x02\xff\xfe.",
        b"\x80\x04\x8c\x03\xed\xa0\x80.",
        b"\x80\x04\x95" + b"\xff" * 8 + b".",
        b"\x80\x04\x8b\xff\xff\xff\x7f.",
        b"\x80\x04" + SIZE + b"N\x81.",
        b"\x80\x04" + SIZE + b")\x81.",
        b"\x80\x04" + SIZE + b"]R.",
        b"\x80\x04" + INDEX + b")R.",
        b"\x80\x04" + INDEX + b"N\x85\x81.",
        b"\x80\x04" + INDEX + b")\x81}b}b.",
        b"\x80\x04" + SIZE + b"}b.",
        b"\x80\x04N)R.",
        b"\x80\x04NN\x93.",
        b"\x80\x04\x97.",
        b"\x80\x04\x82\x01.",
        b"\x80\x04P1\n.",
        b"\x80\x04NQ.",
        b"cos\nsystem\n(S'true'\ntR.",
        b"(dp0\n.",
    ],
)
def test_broken_programs_are_refused(program: bytes) -> None:
    with pytest.raises(MetadataError):
        dcpmetadata.read(program)


def test_every_cut_is_refused() -> None:
    whole = pickled()
    for end in range(len(whole)):
        with pytest.raises(MetadataError):
            dcpmetadata.read(whole[:end])


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_damage_is_read_or_refused(data: st.DataObject) -> None:
    damaged = bytearray(WHOLE)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    try:
        read = dcpmetadata.read(bytes(damaged))
    except MetadataError:
        return
    assert all(isinstance(length, int) and length >= 0 for length in read.files.values())


WHOLE = pickled()


def in_planner_data(program: bytes) -> bytes:
    """A list that is good but for what somebody put where nobody looks. The program must leave the memo alone."""
    name = b"planner_data"
    whole = pickle.dumps(torchs(planner_data=None), 4)
    at = whole.index(name) + len(name)
    assert whole[at : at + 2] == b"\x94N"
    return whole[:2] + whole[11 : at + 1] + program + whole[at + 2 :]  # Without the frame, whose length is another now.


COUNT = 30_000
TUPLES = b")" + b"\x85" * COUNT
OBJECTS = INDEX + b")\x81"


@pytest.mark.parametrize(
    ("program", "is_good"),
    [
        (b"N", True),
        (TUPLES, False),
        (b"]" * 9_000 + b"a" * 8_999, False),
        (b"}" + TUPLES + b"Ns", False),
        (b"(" * 70_000, False),
        (b"(" * 9_000 + b"t" * 9_000, False),
        (OBJECTS * 1_000 + b"b" * 999, True),
        (b"]" * COUNT, False),
        (b"](" + b"]" * COUNT + b"e", False),
        (b"](" + b"N" * 70_000 + b"e", False),
        (b"](" + b"N" * 20_000 + b"e", True),
        (b"}" + b"}Ns" * COUNT, False),
        (b"](" + b"\x8c\x00" * COUNT + b"e", False),
        (b"](" + (b"\x8a\xff" + b"\x7f" * 255) * 1_000 + b"e", True),
        (b"N0" * COUNT + b"N", False),
        (b"N2" * COUNT + b"N", False),
    ],
)
def test_bombs_stay_within_a_multiple_of_their_length(program: bytes, is_good: bool) -> None:
    data = in_planner_data(program)
    tracemalloc.start()
    try:
        if is_good:
            assert dcpmetadata.read(data).files
        else:
            with pytest.raises(MetadataError):
                dcpmetadata.read(data)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < 30 * len(data) + 200_000


def test_laughs_are_not_counted_out() -> None:
    """Sixty levels of ten times the level below: nobody walks them."""
    laughs: Any = []
    for _ in range(60):
        laughs = [laughs] * 10
    assert dcpmetadata.read(pickled(planner_data=laughs)).files
    with pytest.raises(MetadataError):
        dcpmetadata.read(pickle.dumps(laughs, 4))
    for wrong in ({"state_dict_metadata": {"w": laughs}}, {"storage_data": {MetadataIndex("w"): laughs}}):
        with pytest.raises(MetadataError):
            dcpmetadata.read(pickled(**wrong))


def test_shared_parts_are_not_read_again_and_again() -> None:
    """A long state, size or list of chunks that very many pieces share is refused, or looked at in one place only."""
    piece = TensorStorageMetadata(TensorProperties(), torch.Size(()), [])
    piece.chunks = [ChunkStorageMetadata(torch.Size((at,)), torch.Size((1,))) for at in range(2_000)]
    many = {f"w{at}": piece for at in range(2_000)}
    storage = {MetadataIndex(fqn, (7,), 7): _StorageInfo("x", 0, 1) for fqn in many}
    read = dcpmetadata.read(pickled(state_dict_metadata=many, storage_data=storage))
    assert {item.shape for item in read.items} == {(1,)}
    wide = torch.Size((1,) * 65)
    piece.chunks = [ChunkStorageMetadata(wide, wide)]
    with pytest.raises(MetadataError, match="no size"):
        dcpmetadata.read(pickled(state_dict_metadata={"w": piece}, storage_data={MetadataIndex("w", wide, 0): INFO}))
    fat = _StorageInfo("x", 0, 1)
    fat.__dict__.update({f"a{at}": at for at in range(100)})
    with pytest.raises(MetadataError, match="state"):
        dcpmetadata.read(pickled(storage_data={MetadataIndex("w"): fat}))


INFO = _StorageInfo("x", 0, 1)


def test_list_that_is_too_long_is_not_read() -> None:
    with pytest.raises(MetadataTooLargeError):
        dcpmetadata.read(bytes(dcpmetadata.METADATA_LIMIT_BYTES + 1))
