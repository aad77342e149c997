"""What must be looked at to prove that a set loads, beyond that its objects are there: the heads of its tensors. Pure.

A check asks for the bytes it must see (`yield start, end`, sent back as they are read, fewer where the object ends) and
raises `BrokenHeadError` where they are not what a loader needs. It never holds more than a head: of an archive the two
ends, of a safetensors file its header.
"""

import json
import math
import struct
from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from tiergate.checkpoints import dcpmetadata, lists
from tiergate.checkpoints.layouts import file_of, is_list, parent_of
from tiergate.checkpoints.sets import Manifest, Member, Tier
from tiergate.errors import TiergateError


class Fault(StrEnum):
    """What is wrong with an object in a tier."""

    MISSING = "missing"
    SIZE = "size"
    """Not as long as the set, or the directory, says."""
    CHANGED = "changed"
    """Another object than the one that was written here."""
    CHECKSUM = "checksum"
    """Bytes differ from those that were acknowledged."""
    HEADER = "header"
    """A tensor's head, or a list, cannot be read."""


@dataclass(frozen=True, slots=True)
class Damage:
    """Something wrong with an object. `node`: whose copy it is; empty in S3, and on a node alone."""

    key: str
    tier: Tier
    fault: Fault
    detail: str
    node: str = ""

    def __str__(self) -> str:
        place = f"{self.tier} of {self.node}" if self.node else str(self.tier)
        return f"{self.key}: {self.fault} in {place}: {self.detail}"


class BrokenHeadError(TiergateError):
    """What a loader reads first is not what it must be."""


Check = Generator[tuple[int, int], bytes, None]


class Form(StrEnum):
    """How tensors lie in a piece of a file."""

    ARCHIVE = "archive"
    """As torch.save writes: a zip archive."""
    PERHAPS_ARCHIVE = "perhaps archive"
    """As torch.save writes, if it begins so; else nobody can tell."""
    SAFETENSORS = "safetensors"


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of an object: `length_bytes` (None: up to the end) from `offset_bytes` on. `tensors`: names that must be
    in it."""

    form: Form
    offset_bytes: int = 0
    length_bytes: int | None = None
    tensors: frozenset[str] = frozenset()
    what: str = ""


@dataclass(frozen=True, slots=True)
class Target:
    """A member, and the pieces whose heads are looked at."""

    member: Member
    pieces: tuple[Piece, ...] = ()


def lists_of(manifest: Manifest) -> list[str]:
    """The members that are the set's own lists."""
    return [member.key for member in manifest.members if is_list(member.key)]


def targets_of(manifest: Manifest, bodies: Mapping[str, bytes]) -> tuple[list[Target], dict[str, str]]:
    """What is to be looked at of each member, and why a list cannot be read, by its key. `bodies`: of the set's lists,
    those that can be had. A list that is too long to be read tells nothing of heads."""
    wanted = _Wanted()
    for key, body in bodies.items():
        try:
            if file_of(key).endswith(".index.json"):
                wanted.add_index(key, body)
            else:
                wanted.add_dcp(key, body)
        except dcpmetadata.MetadataTooLargeError:
            continue
        except (dcpmetadata.MetadataError, lists.DamagedSetError, BrokenHeadError) as wrong:
            wanted.broken[key] = wrong.message
    return [Target(member, wanted.pieces_of(member.key)) for member in manifest.members], wanted.broken


@dataclass(slots=True)
class _Wanted:
    """What the lists of a set say of heads."""

    pieces: dict[str, list[Piece]] = field(default_factory=dict)
    tensors: dict[str, set[str]] = field(default_factory=dict)
    broken: dict[str, str] = field(default_factory=dict)

    def add_dcp(self, key: str, body: bytes) -> None:
        for item in dcpmetadata.read(body).items:
            is_tiered = file_of(key) == "metadata.metadata"
            file = lists.tiered(key, item.file) if is_tiered else parent_of(key) + item.file
            is_sure = item.kind == "tensor" and not is_tiered and not item.is_transformed
            form = Form.ARCHIVE if is_sure else Form.PERHAPS_ARCHIVE
            piece = Piece(form, item.offset_bytes, item.length_bytes, what=item.fqn)
            self.pieces.setdefault(file, []).append(piece)

    def add_index(self, key: str, body: bytes) -> None:
        try:
            weight_map: object = json.loads(body).get("weight_map")
        except (ValueError, RecursionError, AttributeError):
            raise BrokenHeadError("it is no JSON object") from None
        for tensor, shard in (weight_map if isinstance(weight_map, dict) else {}).items():
            self.tensors.setdefault(f"{parent_of(key)}{shard}", set()).add(str(tensor))

    def pieces_of(self, key: str) -> tuple[Piece, ...]:
        file = file_of(key)
        if file.endswith(".safetensors"):
            return (Piece(Form.SAFETENSORS, tensors=frozenset(self.tensors.get(key, ()))),)
        if key in self.pieces:
            return tuple(sorted(self.pieces[key], key=lambda piece: piece.offset_bytes))
        return (Piece(Form.PERHAPS_ARCHIVE),) if file.endswith(_ARCHIVE_SUFFIXES) else ()


_ARCHIVE_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")


def check_of(pieces: Iterable[Piece], size_bytes: int) -> Check:
    """Look at the heads of an object that is so long.

    Raises:
        BrokenHeadError: one is not what it must be.
    """
    for piece in pieces:
        end = size_bytes if piece.length_bytes is None else piece.offset_bytes + piece.length_bytes
        if end > size_bytes:
            raise BrokenHeadError(f"{_named(piece)}ends at byte {end} of {size_bytes}")
        if piece.form is Form.SAFETENSORS:
            yield from _safetensors(size_bytes, piece.tensors)
        else:
            yield from _archive(piece, piece.offset_bytes, end)


def _named(piece: Piece) -> str:
    return f"{piece.what[:80]!r} " if piece.what else ""


# -- archives: https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT, 4.3
_FILE_HEAD, _ENTRY, _END = b"PK\x03\x04", b"PK\x01\x02", b"PK\x05\x06"
_END_64, _LOCATOR_64 = b"PK\x06\x06", b"PK\x06\x07"
_END_BYTES, _LOCATOR_BYTES, _END_64_BYTES = 22, 20, 56


def _archive(piece: Piece, start: int, end: int) -> Check:
    """What torch.save wrote: it begins with a file, its directory is where its end says (no comment follows)."""
    head = yield start, min(start + 4, end)
    if head != _FILE_HEAD:
        if piece.form is Form.ARCHIVE:
            raise BrokenHeadError(f"{_named(piece)}is no archive of torch.save")
        return
    tail_start = max(end - _END_BYTES, start)
    tail = yield tail_start, end
    if len(tail) != _END_BYTES or not tail.startswith(_END):
        raise BrokenHeadError(f"{_named(piece)}has no end")
    count, size, offset = struct.unpack_from("<HII", tail, 10)
    if count == 0xFFFF or 0xFFFFFFFF in (size, offset):
        locator = yield max(tail_start - _LOCATOR_BYTES, start), tail_start
        if len(locator) != _LOCATOR_BYTES or not locator.startswith(_LOCATOR_64):
            raise BrokenHeadError(f"{_named(piece)}has no end")
        (at,) = struct.unpack_from("<Q", locator, 8)
        record = (yield start + at, start + at + _END_64_BYTES) if start + at < tail_start else b""
        if len(record) != _END_64_BYTES or not record.startswith(_END_64):
            raise BrokenHeadError(f"{_named(piece)}has no end")
        count, size, offset = struct.unpack_from("<QQQ", record, 32)
    if not count or start + offset + size > tail_start:
        raise BrokenHeadError(f"{_named(piece)}has no directory within its bytes")
    entry = yield start + offset, start + offset + 4
    if entry != _ENTRY:
        raise BrokenHeadError(f"{_named(piece)}has no directory where its end says")


# -- safetensors: https://huggingface.co/docs/safetensors, Format
_BITS = {"BOOL": 8} | {
    f"{kind}{bits}": bits for kind, widths in (("F", (16, 32, 64)), ("I", (8, 16, 32, 64))) for bits in widths
}
_BITS |= {f"U{bits}": bits for bits in (8, 16, 32, 64)} | {"BF16": 16, "C64": 64, "F8_E4M3": 8, "F8_E5M2": 8}


def _safetensors(size_bytes: int, tensors: frozenset[str]) -> Check:
    """The header's tensors fill the file from the header to its end, without gaps."""
    length = yield 0, 8
    header_bytes = int.from_bytes(length, "little")
    if len(length) < 8 or not 2 <= header_bytes <= min(lists.HEADER_LIMIT_BYTES, size_bytes - 8):
        raise BrokenHeadError("it has no header")
    header = yield 8, 8 + header_bytes
    try:
        parsed: object = json.loads(header)
    except (ValueError, RecursionError):
        parsed = None
    if not isinstance(parsed, dict):
        raise BrokenHeadError("its header is no JSON object")
    spans = sorted((*_span(name, said), name) for name, said in parsed.items() if name != "__metadata__")
    at = 0
    for begin, end, name in spans:
        if begin != at:
            raise BrokenHeadError(f"{name[:80]!r} begins at {begin}, not at {at}")
        at = end
    if 8 + header_bytes + at != size_bytes:
        raise BrokenHeadError(f"its tensors end at byte {8 + header_bytes + at} of {size_bytes}")
    lacking = sorted(tensors - parsed.keys())
    if lacking:
        raise BrokenHeadError(f"the index names {lacking[0][:80]!r}, which is not in it ({len(lacking)} in all)")


def _span(name: str, said: object) -> tuple[int, int]:
    found = said if isinstance(said, dict) else {}
    offsets, shape, dtype = _counts(found.get("data_offsets")), _counts(found.get("shape")), found.get("dtype")
    if offsets is None or len(offsets) != 2 or offsets[0] > offsets[1] or shape is None:
        raise BrokenHeadError(f"the header does not tell where {name[:80]!r} is")
    begin, end = offsets
    bits = _BITS.get(dtype) if isinstance(dtype, str) else None
    if bits is not None and bits * math.prod(shape) != (end - begin) * 8:
        raise BrokenHeadError(f"{name[:80]!r} has {end - begin} bytes, which is not its shape")
    return begin, end


def _counts(numbers: object) -> list[int] | None:
    if not isinstance(numbers, list) or len(numbers) > dcpmetadata.DIMENSIONS_LIMIT_COUNT:
        return None
    found = [number for number in numbers if type(number) is int and 0 <= number < 1 << 62]
    return found if len(found) == len(numbers) else None
