"""The values of rows: a schema byte and the msgpack of a frozen dataclass."""

import zlib
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import msgspec

from tiergate.errors import invariant
from tiergate.model import ObjectName, OriginUpload

SCHEMA = b"\x01"
PACKED_SCHEMA = b"\x81"

PACKED_BYTES = 1024
"""From this length on the names of fields, repeated for each part, are worth squeezing out."""

PACKED_LEVEL = 1

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Orphan:
    """An upload in the origin that no pending write owns any more."""

    name: ObjectName
    upload: OriginUpload


@dataclass(frozen=True, slots=True)
class Named:
    """A name in an index whose keys are too short for it."""

    name: ObjectName
    uid: str


def encode(value: object) -> bytes:
    """A row's value."""
    return SCHEMA + msgspec.msgpack.encode(value)


def pack(value: object) -> bytes:
    """A row's value, small: for a store where each byte is replicated and kept for a while."""
    plain = encode(value)
    if len(plain) < PACKED_BYTES:
        return plain
    return PACKED_SCHEMA + zlib.compress(plain, PACKED_LEVEL)


def unpack(kind: type[T], data: bytes) -> T:
    """The value of a row that was packed, or not.

    Raises:
        InvariantError: it was written by another version of the schema.
    """
    return decode(kind, zlib.decompress(data[1:]) if data[:1] == PACKED_SCHEMA else data)


_decoders: dict[type, msgspec.msgpack.Decoder[Any]] = {}
"""Made once for each kind: making one costs more than many uses."""


def _decoder(kind: type) -> msgspec.msgpack.Decoder[Any]:
    found = _decoders.get(kind)
    if found is None:
        found = _decoders[kind] = msgspec.msgpack.Decoder(kind)
    return found


def decode(kind: type[T], data: bytes) -> T:
    """The value of a row.

    Raises:
        InvariantError: it was written by another version of the schema.
    """
    invariant(data[:1] == SCHEMA, "a directory row has another schema", schema=data[:1].hex())
    return cast(T, _decoder(kind).decode(memoryview(data)[1:]))
