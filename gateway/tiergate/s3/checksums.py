"""S3's checksum algorithms: computing, and joining those of parts.

https://docs.aws.amazon.com/AmazonS3/latest/userguide/checking-object-integrity.html
"""

import base64
import binascii
import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

from awscrt import checksums as crt  # type: ignore[import-untyped,unused-ignore]
from isal import isal_zlib

from tiergate.errors import InvariantError, invariant
from tiergate.model import Body

Buffer = bytes | bytearray | memoryview
HEADER_PREFIX = "x-amz-checksum-"
FULL_OBJECT = "FULL_OBJECT"
COMPOSITE = "COMPOSITE"

_Running = Callable[[Buffer, int], int]
_Combine = Callable[[int, int, int], int]
# The runtime library computes CRC-32 in software, at a tenth of the speed of the others on x86-64.
_crc32 = cast(_Running, isal_zlib.crc32)
_crc32c = cast(_Running, crt.crc32c)
_crc64nvme = cast(_Running, crt.crc64nvme)
_combine_crc64nvme = cast(_Combine, crt.combine_crc64nvme)


class _Hash(Protocol):
    def update(self, data: Buffer, /) -> None: ...

    def digest(self) -> bytes: ...


class _Crc:
    """A CRC as a hash object; its digest is big-endian."""

    def __init__(self, run: _Running, digest_bytes: int) -> None:
        self._run = run
        self._digest_bytes = digest_bytes
        self._value = 0

    def update(self, data: Buffer, /) -> None:
        self._value = self._run(data, self._value)

    def digest(self) -> bytes:
        return self._value.to_bytes(self._digest_bytes, "big")


class _XxHash:
    """An xxHash as a hash object. The library takes `bytes` only, so other buffers are copied."""

    def __init__(self, native: crt.XXHash) -> None:
        self._native = native

    def update(self, data: Buffer, /) -> None:
        self._native.update(bytes(data))

    def digest(self) -> bytes:
        return bytes(self._native.finalize())


@dataclass(frozen=True, slots=True)
class Algorithm:
    """What one algorithm is: `cheap` ones cost little next to moving the bytes, the others belong in a
    thread.

    `types` are the checksum types a multipart upload may have with it, its default first.
    """

    name: str
    digest_bytes: int
    cheap: bool
    types: tuple[str, ...]
    make: Callable[[], _Hash]
    combine: _Combine | None = None

    @property
    def header(self) -> str:
        return HEADER_PREFIX + self.name

    @property
    def value_bytes(self) -> int:
        """The length of the base64 text."""
        return -(-self.digest_bytes // 3) * 4


# The types: CRC-64/NVME is always of the full object, the CRC-32s may be either, hashes cannot be joined.
# https://docs.aws.amazon.com/AmazonS3/latest/userguide/checking-object-integrity-upload.html
ALGORITHMS: dict[str, Algorithm] = {
    algorithm.name: algorithm
    for algorithm in (
        Algorithm(
            "crc32",
            4,
            True,
            (COMPOSITE, FULL_OBJECT),
            lambda: _Crc(_crc32, 4),
            cast(_Combine, crt.combine_crc32),
        ),
        Algorithm(
            "crc32c",
            4,
            True,
            (COMPOSITE, FULL_OBJECT),
            lambda: _Crc(_crc32c, 4),
            cast(_Combine, crt.combine_crc32c),
        ),
        Algorithm("crc64nvme", 8, True, (FULL_OBJECT,), lambda: _Crc(_crc64nvme, 8), _combine_crc64nvme),
        Algorithm("sha1", 20, False, (COMPOSITE,), hashlib.sha1),
        Algorithm("sha256", 32, False, (COMPOSITE,), hashlib.sha256),
        Algorithm("sha512", 64, False, (COMPOSITE,), hashlib.sha512),
        Algorithm("md5", 16, False, (COMPOSITE,), lambda: hashlib.md5(usedforsecurity=False)),
        Algorithm("xxhash64", 8, True, (COMPOSITE,), lambda: _XxHash(crt.XXHash.new_xxhash64())),
        Algorithm("xxhash3", 8, True, (COMPOSITE,), lambda: _XxHash(crt.XXHash.new_xxhash3_64())),
        Algorithm("xxhash128", 16, True, (COMPOSITE,), lambda: _XxHash(crt.XXHash.new_xxhash3_128())),
    )
}
"""All known algorithms by their name in lower case. A request that names another one must be forwarded."""


class Checksum:
    """One running checksum. Not for use by two threads at once."""

    def __init__(self, algorithm: str) -> None:
        self.algorithm = ALGORITHMS[algorithm]
        self._hash = self.algorithm.make()

    def update(self, data: Buffer) -> None:
        self._hash.update(data)

    def digest(self) -> bytes:
        return self._hash.digest()

    def digest_base64(self) -> str:
        return base64.b64encode(self.digest()).decode()


def block_checksum(data: Buffer, previous: int = 0) -> int:
    """The CRC-64/NVME of `data`, going on from `previous`."""
    return _crc64nvme(data, previous)


def combine_crc64nvme(first: int, second: int, second_bytes: int) -> int:
    """The CRC-64/NVME of two neighbours from the CRCs of each; `second_bytes` is the length of the second."""
    return _combine_crc64nvme(first, second, second_bytes)


def bodies_crc64nvme(bodies: Iterable[Body]) -> str | None:
    """The base64 CRC-64/NVME of bodies one after the other, from the checksums kept of their blocks.

    None when a body was never proved.
    """
    value = 0
    for body in bodies:
        for index in range(body.block_count):
            block = body.block_checksum(index)
            if block is None:
                return None
            value = combine_crc64nvme(value, block, body.block_size_bytes(index))
    return base64.b64encode(value.to_bytes(8, "big")).decode()


def decode_value(algorithm: str, text: str) -> bytes | None:
    """The digest in a base64 `text`, or None when it is not one of `algorithm`."""
    try:
        digest = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return None
    return digest if len(digest) == ALGORITHMS[algorithm].digest_bytes else None


def full_object(algorithm: str, parts: Sequence[tuple[str, int]]) -> str:
    """The checksum of a whole object from those of its parts: (base64 value, size in bytes) in order.

    Raises:
        InvariantError: for an algorithm that cannot do it, or a part's value that is none of it.
    """
    known = ALGORITHMS[algorithm]
    if known.combine is None:
        raise InvariantError("only CRCs can be joined", algorithm=algorithm)
    value = 0
    for text, size_bytes in parts:
        value = known.combine(value, int.from_bytes(_digest_of(algorithm, text), "big"), size_bytes)
    return base64.b64encode(value.to_bytes(known.digest_bytes, "big")).decode()


def composite(algorithm: str, parts: Sequence[str]) -> str:
    """The composite checksum of an object from its parts' base64 values in order: `base64-N`.

    Raises:
        InvariantError: for an algorithm that has no composite form, or a part's value that is none of it.
    """
    invariant(COMPOSITE in ALGORITHMS[algorithm].types, "no composite form", algorithm=algorithm)
    total = Checksum(algorithm)
    total.update(b"".join(_digest_of(algorithm, text) for text in parts))
    return f"{total.digest_base64()}-{len(parts)}"


def _digest_of(algorithm: str, text: str) -> bytes:
    digest = decode_value(algorithm, text)
    if digest is None:
        raise InvariantError("a part has a checksum of another form", algorithm=algorithm)
    return digest
