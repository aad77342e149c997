"""The values of rows: a schema byte and the msgpack of a frozen dataclass."""

from dataclasses import dataclass
from typing import Any, TypeVar, cast

import msgspec

from tiergate.directory.base import Finished
from tiergate.errors import invariant
from tiergate.model import Bucket, ObjectName, OriginUpload, Part, Pending, Record, Step, Upload

SCHEMA = b"\x01"

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


_DECODERS: dict[type, msgspec.msgpack.Decoder[Any]] = {
    kind: msgspec.msgpack.Decoder(kind)
    for kind in (Record, Pending, Upload, Part, Finished, Orphan, Step, Bucket, Named)
}


def decode(kind: type[T], data: bytes) -> T:
    """The value of a row.

    Raises:
        InvariantError: it was written by another version of the schema.
    """
    invariant(data[:1] == SCHEMA, "a directory row has another schema", schema=data[:1].hex())
    return cast(T, _DECODERS[kind].decode(memoryview(data)[1:]))
