"""Which heads are looked at, and what is wrong with them."""

import io
import json
import random
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from tiergate.checkpoints.sets import Manifest, Member, SetName
from tiergate.checkpoints.verification import (
    BrokenHeadError,
    Form,
    Piece,
    Target,
    check_of,
    lists_of,
    targets_of,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:torch"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


def look(data: bytes, *pieces: Piece) -> int:
    """Look at the pieces of an object; how many bytes were read."""
    check, read_bytes = check_of(pieces, len(data)), 0
    try:
        start, end = next(check)
        while True:
            assert 0 <= start <= end
            piece = data[start:end]
            read_bytes += len(piece)
            start, end = check.send(piece)
    except StopIteration:
        return read_bytes


def archive(value: Any) -> bytes:
    body = io.BytesIO()
    torch.save(value, body)
    return body.getvalue()


def safetensors(header: object, data_bytes: int) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(data_bytes)


def tensor(begin: int, end: int, shape: list[int] | None = None, dtype: str = "U8") -> dict[str, Any]:
    return {"dtype": dtype, "shape": [end - begin] if shape is None else shape, "data_offsets": [begin, end]}


WHOLE = Piece(Form.ARCHIVE)
TENSORS = Piece(Form.SAFETENSORS)


def test_what_torch_saves_is_read_at_its_ends_only() -> None:
    body = archive({"w": torch.rand(1000, 100)})
    assert look(body, WHOLE) < 200
    assert look(body, Piece(Form.PERHAPS_ARCHIVE)) < 200
    assert look(b"any other bytes", Piece(Form.PERHAPS_ARCHIVE)) == 4
    assert look(b"", Piece(Form.PERHAPS_ARCHIVE)) == 0
    assert look(b"x") == 0


@pytest.mark.parametrize("cut_bytes", [1, 22, 64, 5000])
def test_archive_that_ends_early_is_broken(cut_bytes: int) -> None:
    body = archive(torch.rand(4000))
    with pytest.raises(BrokenHeadError):
        look(body[:-cut_bytes], Piece(Form.PERHAPS_ARCHIVE))
    with pytest.raises(BrokenHeadError, match="ends at byte"):
        look(body[:-cut_bytes], Piece(Form.ARCHIVE, 0, len(body)))


def test_archive_damaged_at_its_ends_is_broken_and_no_damage_is_an_error_of_ours() -> None:
    body = archive(torch.rand(400))
    for at in (0, len(body) - 22, len(body) - 19):
        broken = bytearray(body)
        broken[at] ^= 1
        with pytest.raises(BrokenHeadError):
            look(bytes(broken), WHOLE)
    draw = random.Random(0)
    for _ in range(2000):
        broken = bytearray(body)
        for _ in range(draw.randrange(1, 4)):
            broken[draw.choice((draw.randrange(len(body)), -draw.randrange(1, 99)))] = draw.choice((0, 255, 80))
        try:
            look(bytes(broken), WHOLE)
        except BrokenHeadError:
            continue


def test_archive_of_64_bits_is_followed_to_its_directory() -> None:
    body = archive(torch.rand(10))
    count, size, offset = struct.unpack_from("<HII", body, len(body) - 12)
    record = b"PK\x06\x06" + bytes(20) + struct.pack("<QQQQ", count, count, size, offset)
    locator = b"PK\x06\x07" + bytes(4) + struct.pack("<Q", offset + size) + bytes(4)
    end = b"PK\x05\x06" + bytes(4) + struct.pack("<HHIIH", 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0)
    whole = body[: offset + size] + record + locator + end
    assert look(whole, WHOLE) > 0
    for wrong in (whole.replace(b"PK\x06\x06", b"PK\x06\x05"), whole.replace(b"PK\x06\x07", b"PK\x06\x05")):
        with pytest.raises(BrokenHeadError):
            look(wrong, WHOLE)


def test_header_of_safetensors_fills_the_file() -> None:
    good = {"__metadata__": {"format": "pt"}, "b": tensor(8, 20), "a": tensor(0, 8, [2, 1], "F32"), "c": tensor(20, 20)}
    assert look(safetensors(good, 20), TENSORS) == len(safetensors(good, 0))
    assert look(safetensors(good, 20), Piece(Form.SAFETENSORS, tensors=frozenset("ab"))) > 0
    assert look(safetensors({}, 0), TENSORS) == 10
    assert look(safetensors({"a": tensor(0, 3, [7], "F3_FUTURE")}, 3), TENSORS) > 0


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "no header"),
        (b"\x08\0\0\0\0\0\0\0{}", "no header"),
        (b"\xff" * 20, "no header"),
        (b"\x02\0\0\0\0\0\0\0[]", "no JSON object"),
        (b"\x02\0\0\0\0\0\0\0{{", "no JSON object"),
        (safetensors({"a": tensor(0, 8)}, 7), "end at byte"),
        (safetensors({"a": tensor(0, 8)}, 9), "end at byte"),
        (safetensors({"a": tensor(0, 8), "b": tensor(9, 10)}, 10), "begins at 9"),
        (safetensors({"a": tensor(0, 8), "b": tensor(7, 10)}, 10), "begins at 7"),
        (safetensors({"a": tensor(0, 8, [3], "F32")}, 8), "not its shape"),
        (safetensors({"a": tensor(8, 0)}, 8), "does not tell"),
        (safetensors({"a": tensor(0, 8) | {"shape": [True]}}, 8), "does not tell"),
        (safetensors({"a": tensor(0, 8) | {"shape": [1] * 100}}, 8), "does not tell"),
        (safetensors({"a": [0, 8]}, 8), "does not tell"),
        (safetensors({"a": tensor(0, 8, [2**61] * 9)}, 8), "not its shape"),
    ],
)
def test_header_of_safetensors_that_is_none_is_broken(data: bytes, why: str) -> None:
    with pytest.raises(BrokenHeadError, match=why):
        look(data, TENSORS)


def test_what_an_index_names_must_be_in_its_shard() -> None:
    with pytest.raises(BrokenHeadError, match="'w', which is not in it"):
        look(safetensors({"a": tensor(0, 8)}, 8), Piece(Form.SAFETENSORS, tensors=frozenset({"a", "w"})))


def test_each_piece_that_torchs_list_names_is_looked_at(tmp_path: Path) -> None:
    state = {"a": torch.rand(300), "b": torch.rand(4, 5), "step": 3}
    state_dict_saver.save(state, storage_writer=FileSystemWriter(tmp_path), no_dist=True)
    shard = (tmp_path / "__0_0.distcp").read_bytes()
    members = (Member("run/1/.metadata"), Member("run/1/__0_0.distcp"), Member("run/1/notes.txt"))
    manifest = Manifest(SetName("b", "run/1/", "dcp", "run/1/.metadata"), members, is_listed=True)
    assert lists_of(manifest) == ["run/1/.metadata"]
    targets, broken = targets_of(manifest, {"run/1/.metadata": (tmp_path / ".metadata").read_bytes()})
    assert broken == {}
    found = {target.member.key: target.pieces for target in targets}
    assert (found["run/1/.metadata"], found["run/1/notes.txt"]) == ((), ())
    pieces = found["run/1/__0_0.distcp"]
    assert sorted((piece.what, piece.form) for piece in pieces) == [
        ("a", Form.ARCHIVE),
        ("b", Form.ARCHIVE),
        ("step", Form.PERHAPS_ARCHIVE),
    ]
    assert 0 < look(shard, *pieces) < 1000
    for piece in pieces:
        end = piece.offset_bytes + (piece.length_bytes or 0)
        broken_shard = shard[: end - 22] + bytes(22) + shard[end:]
        with pytest.raises(BrokenHeadError, match=piece.what):
            look(broken_shard, *pieces)


def test_lists_that_cannot_be_read_are_named_and_long_ones_tell_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    members = (Member("r/.metadata"), Member("r/model.index.json"), Member("r/x.safetensors"), Member("r/y.bin"))
    manifest = Manifest(SetName("b", "r/", "huggingface", "r/model.index.json"), members, is_listed=True)
    assert lists_of(manifest) == ["r/.metadata", "r/model.index.json"]
    for body in (b"\x80\x04", b"[]", b"{"):
        targets, broken = targets_of(manifest, {"r/model.index.json": body, "r/.metadata": b"\x80\x04cos\nsystem\n."})
        assert set(broken) == {"r/model.index.json", "r/.metadata"}
        assert targets[2:] == [
            Target(members[2], (Piece(Form.SAFETENSORS),)),
            Target(members[3], (Piece(Form.PERHAPS_ARCHIVE),)),
        ]
    monkeypatch.setattr("tiergate.checkpoints.dcpmetadata.METADATA_LIMIT_BYTES", 10)
    assert targets_of(manifest, {"r/.metadata": bytes(11)})[1] == {}
