"""The list of a checkpoint that torch.distributed.checkpoint wrote (`.metadata`), read without torch. Pure.

It is a pickle, which `dcppickle` carries out; what that built is read here, by the shape that it must have. No part
of it is walked again for each that shares it, so that time and memory stay within a fixed multiple of the length.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from tiergate.checkpoints.dcppickle import Built, MetadataError, Pairs, load

__all__ = ["DcpItem", "DcpMetadata", "MetadataError", "MetadataTooLargeError", "read"]

METADATA_LIMIT_BYTES = 64 << 20
"""A longer list is not read: about half a million pieces of tensors."""
DIMENSIONS_LIMIT_COUNT = 64
STATE_LIMIT_COUNT = 32
PATH_LIMIT_CHARS = 1_024
"""A key of S3 is no longer."""


class MetadataTooLargeError(MetadataError):
    """It may be a good list, but it is longer than the gateway reads."""


@dataclass(frozen=True, slots=True)
class DcpItem:
    """A stored piece: of the tensor or object `fqn`, `length_bytes` at `offset_bytes` of `file`. `kind`: tensor or
    bytes. `dtype` and `shape` (of this piece of the tensor) where the list tells them. `is_transformed`: its bytes were
    compressed or the like after torch.save."""

    fqn: str
    kind: str
    file: str
    offset_bytes: int
    length_bytes: int
    dtype: str = ""
    shape: tuple[int, ...] | None = None
    is_transformed: bool = False


@dataclass(frozen=True, slots=True)
class DcpMetadata:
    """`files`: each file that the list names, relative to the list's folder, with the length it has at least. A tiered
    checkpoint of SageMaker names ranks instead: `rank_<R>`."""

    files: Mapping[str, int]
    items: tuple[DcpItem, ...]


def read(data: bytes) -> DcpMetadata:
    """Read a `.metadata`.

    Raises:
        MetadataTooLargeError: it is longer than METADATA_LIMIT_BYTES.
        MetadataError: it is not what torch writes; the message says what is wrong.
    """
    if len(data) > METADATA_LIMIT_BYTES:
        raise MetadataTooLargeError(f"a list of {len(data)} bytes is not read, {METADATA_LIMIT_BYTES} at most")
    return _Reading(load(data)).metadata()


@dataclass(slots=True)
class _Tensor:
    dtype: str
    chunks: list[object]


@dataclass(slots=True)
class _Reading:
    """Reads what the machine built, by the shape that it must have."""

    built: object
    _tensors: dict[str, _Tensor] = field(default_factory=dict)

    def metadata(self) -> DcpMetadata:
        """The list, checked."""
        state = _state(self.built, "Metadata")
        for fqn, stored in _pairs(state.get("state_dict_metadata"), "state_dict_metadata"):
            if not isinstance(stored, Built) or stored.what != "BytesStorageMetadata":
                self._tensors[_text(fqn)] = _tensor(stored)
        files: dict[str, int] = {}
        items = []
        for index, info in _pairs(state.get("storage_data"), "storage_data"):
            item = self._item(index, info)
            files[item.file] = max(files.get(item.file, 0), item.offset_bytes + item.length_bytes)
            items.append(item)
        return DcpMetadata(files, tuple(items))

    def _item(self, index: object, info: object) -> DcpItem:
        place = _state(index, "MetadataIndex")
        fqn = _text(place.get("fqn"))
        tensor = self._tensors.get(fqn)
        file, offset_bytes, length_bytes = _where(info)
        is_transformed = isinstance(info, Built) and bool(_state(info, info.what).get("transform_descriptors"))
        if tensor is None:
            return DcpItem(fqn, "bytes", file, offset_bytes, length_bytes, is_transformed=is_transformed)
        shape = _shape(tensor.chunks, place.get("index"), place.get("offset"))
        return DcpItem(fqn, "tensor", file, offset_bytes, length_bytes, tensor.dtype, shape, is_transformed)


def _tensor(stored: object) -> _Tensor:
    state = _state(stored, "TensorStorageMetadata")
    chunks = state.get("chunks")
    if type(chunks) is not list:
        raise MetadataError("the chunks of a tensor are no list")
    return _Tensor(_dtype(state.get("properties")), chunks)


def _shape(chunks: list[object], index: object, offset: object) -> tuple[int, ...] | None:
    """Of the chunk that the index names, if that is where it says."""
    if type(index) is not int or not 0 <= index < len(chunks) or offset is None:
        return None
    chunk = _state(chunks[index], "ChunkStorageMetadata")
    return _size(chunk.get("sizes")) if _size(chunk.get("offsets")) == _size(offset) else None


def _where(info: object) -> tuple[str, int, int]:
    if isinstance(info, Built) and info.what == "TieredStorageInfo":
        state = _state(info, "TieredStorageInfo")
        file = f"rank_{_count(state.get('rank'), 'rank')}"
    else:
        state = _state(info, "StorageInfo")
        file = _text(state.get("relative_path"))
        if not file or len(file) > PATH_LIMIT_CHARS or file.startswith("/") or ".." in file.split("/"):
            raise MetadataError(f"a piece is in {file[:80]!r}")
    return file, _count(state.get("offset"), "offset"), _count(state.get("length"), "length")


def _state(built: object, what: str) -> dict[str, object]:
    """The attributes of an object that must be a `what`."""
    if not isinstance(built, Built) or built.what != what:
        raise MetadataError(f"no {what} where one must be")
    state = built.state
    if type(state) is not Pairs or len(state) > STATE_LIMIT_COUNT:
        raise MetadataError(f"the state of a {what} is none")
    return {key: value for key, value in state if isinstance(key, str)}


def _pairs(pairs: object, what: str) -> Pairs:
    if type(pairs) is not Pairs:
        raise MetadataError(f"{what} is no dictionary")
    return pairs


def _text(text: object) -> str:
    if not isinstance(text, str):
        raise MetadataError("no text where one must be")
    return text


def _count(number: object, what: str) -> int:
    if type(number) is not int or not 0 <= number < 1 << 60:
        raise MetadataError(f"no {what} where one must be")
    return number


def _size(size: object) -> tuple[int, ...]:
    arguments = size.state if isinstance(size, Built) and size.what == "Size" else None
    if not isinstance(arguments, tuple) or len(arguments) > 1:
        raise MetadataError("no size where one must be")
    numbers: object = arguments[0] if arguments else ()
    if not isinstance(numbers, tuple | list) or len(numbers) > DIMENSIONS_LIMIT_COUNT:
        raise MetadataError("no size where one must be")
    return tuple(_count(number, "dimension") for number in numbers)


def _dtype(properties: object) -> str:
    """Of TensorProperties, whose state is a tuple that begins with the dtype."""
    if isinstance(properties, Built) and properties.what == "TensorProperties" and isinstance(properties.state, tuple):
        first: object = properties.state[0] if properties.state else None
        if isinstance(first, str):
            return first.removeprefix("torch.")
    return ""
