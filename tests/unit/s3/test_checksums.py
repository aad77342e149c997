"""Checksum values everybody knows, joins, and which algorithm may be what."""

import base64
import hashlib
import zlib
from typing import Any

import boto3
import pytest

from tiergate.errors import InvariantError
from tiergate.model import BLOCK_BYTES, Body
from tiergate.s3.checksums import (
    ALGORITHMS,
    COMPOSITE,
    FULL_OBJECT,
    Checksum,
    block_checksum,
    bodies_crc64nvme,
    combine_crc64nvme,
    composite,
    decode_value,
    full_object,
)

DIGITS = b"123456789"
# The check values of the CRC catalogue and of the hashes' specifications.
KNOWN = {
    "crc32": "cbf43926",
    "crc32c": "e3069283",
    "crc64nvme": "ae8b14860a799888",
    "sha1": "f7c3bc1d808e04732adf679965ccc34ca7ae3441",
    "sha256": "15e2b0d3c33891ebb0f1ef609ec419420c20e320ce94c65fbc8c3312448eb225",
    "md5": "25f9e794323b453885f5181f1b624d0b",
    "xxhash64": "8cb841db40e6ae83",
}


@pytest.mark.parametrize("algorithm", KNOWN)
def test_checksum_known_value_computed(algorithm: str) -> None:
    checksum = Checksum(algorithm)
    checksum.update(DIGITS)
    assert checksum.digest().hex() == KNOWN[algorithm]
    assert checksum.digest_base64() == base64.b64encode(bytes.fromhex(KNOWN[algorithm])).decode()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_checksum_any_buffer_in_any_cut_same_value(algorithm: str) -> None:
    whole = Checksum(algorithm)
    whole.update(DIGITS * 100)
    for make in (bytes, bytearray, memoryview, lambda data: memoryview(bytearray(data))):
        cut = Checksum(algorithm)
        for start in range(0, 900, 7):
            cut.update(make((DIGITS * 100)[start : start + 7]))
        assert cut.digest() == whole.digest()
    assert len(whole.digest()) == ALGORITHMS[algorithm].digest_bytes
    assert len(whole.digest_base64()) == ALGORITHMS[algorithm].value_bytes
    assert decode_value(algorithm, whole.digest_base64()) == whole.digest()


def test_algorithms_all_of_the_service_model_known() -> None:
    client: Any = boto3.Session("a", "b", region_name="us-east-1").client("s3")
    names = client.meta.service_model.shape_for("ChecksumAlgorithm").enum
    client.close()
    assert {name.lower() for name in names} == set(ALGORITHMS)


def test_algorithms_types_as_documented() -> None:
    assert ALGORITHMS["crc64nvme"].types == (FULL_OBJECT,)
    assert set(ALGORITHMS["crc32"].types) == set(ALGORITHMS["crc32c"].types) == {COMPOSITE, FULL_OBJECT}
    assert ALGORITHMS["crc32"].types[0] == ALGORITHMS["crc32c"].types[0] == COMPOSITE
    assert ALGORITHMS["sha1"].types == ALGORITHMS["sha256"].types == (COMPOSITE,)
    assert {name for name, one in ALGORITHMS.items() if not one.cheap} == {"sha1", "sha256", "sha512", "md5"}


@pytest.mark.parametrize("text", ["", "AAAA", "AAAAAA", "AAAAAA=", "AAAA AA==", "AAAAAAAA", "_-AAAA==", "ä"])
def test_decode_value_of_another_form_none(text: str) -> None:
    assert decode_value("crc32", text) is None


def test_block_checksum_goes_on_from_the_previous() -> None:
    assert block_checksum(DIGITS) == int(KNOWN["crc64nvme"], 16)
    assert block_checksum(DIGITS[4:], block_checksum(DIGITS[:4])) == block_checksum(DIGITS)


def test_combine_crc64nvme_of_an_empty_neighbour_unchanged() -> None:
    value = block_checksum(DIGITS)
    assert combine_crc64nvme(value, 0, 0) == value
    assert combine_crc64nvme(0, value, len(DIGITS)) == value


def test_bodies_crc64nvme_from_blocks_as_computed_directly() -> None:
    data = [b"a" * (BLOCK_BYTES + 5), b"", b"b" * 7]
    bodies = [
        Body(
            "u",
            len(one),
            b"".join(
                block_checksum(one[at : at + BLOCK_BYTES]).to_bytes(8, "big") for at in range(0, len(one), BLOCK_BYTES)
            ),
        )
        for one in data
    ]
    whole = Checksum("crc64nvme")
    whole.update(b"".join(data))
    assert bodies_crc64nvme(bodies) == whole.digest_base64()
    assert bodies_crc64nvme([*bodies, Body("u", 3)]) is None


def test_composite_as_s3_computes_it() -> None:
    parts = [hashlib.sha256(data).digest() for data in (b"one", b"two")]
    expected = base64.b64encode(hashlib.sha256(b"".join(parts)).digest()).decode() + "-2"
    assert composite("sha256", [base64.b64encode(part).decode() for part in parts]) == expected
    crcs = [zlib.crc32(data).to_bytes(4, "big") for data in (b"one", b"two")]
    expected = base64.b64encode(zlib.crc32(b"".join(crcs)).to_bytes(4, "big")).decode() + "-2"
    assert composite("crc32", [base64.b64encode(crc).decode() for crc in crcs]) == expected


def test_joins_an_algorithm_cannot_do_refused() -> None:
    with pytest.raises(InvariantError):
        composite("crc64nvme", ["AAAAAAAAAAA="])
    with pytest.raises(InvariantError):
        full_object("sha256", [(base64.b64encode(b"a" * 32).decode(), 1)])
    with pytest.raises(InvariantError):
        full_object("crc32", [("AAAAAAAAAAA=", 1)])
