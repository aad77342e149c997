"""Writes and reads with whatever boto3 runs this: `boto3_release.py write|read BUCKET PREFIX`.

Bodies follow from their keys, so that a reader knows what a writer wrote. Endpoint and keys come from the environment.
"""

import io
import random
import sys
from typing import Any

import boto3
import botocore.httpchecksum
from boto3.s3.transfer import TransferConfig
from botocore.config import Config

MIB = 1 << 20
SMALL_BYTES = 100_000
BIG_BYTES = 5 * MIB + 1000
PARTS = TransferConfig(multipart_threshold=5 * MIB, multipart_chunksize=5 * MIB, preferred_transfer_client="classic")
ALGORITHMS: tuple[str, ...] = tuple(
    name.upper() for name in vars(botocore.httpchecksum)["_SUPPORTED_CHECKSUM_ALGORITHMS"]
)
"""Those that this release can work out; it knows more by name."""
FULL_OBJECT = ("CRC32", "CRC32C", "CRC64NVME")
KINDS: dict[str, list[str]] = {
    "FULL_OBJECT": [name for name in FULL_OBJECT if name in ALGORITHMS],
    "COMPOSITE": [name for name in ("CRC32", "CRC32C", "SHA1", "SHA256") if name in ALGORITHMS],
}


def body_of(key: str, size_bytes: int) -> bytes:
    return random.Random(key).randbytes(size_bytes)


def client() -> Any:
    return boto3.client("s3", config=Config(retries={"total_max_attempts": 1}, s3={"addressing_style": "path"}))


def has_types(s3: Any) -> bool:
    """Whether this release knows that a checksum may be of the full object."""
    created = s3.meta.service_model.operation_model("CreateMultipartUpload").input_shape
    return "ChecksumType" in created.members


def in_parts(s3: Any, bucket: str, key: str, algorithm: str, kind: str) -> None:
    """A multipart upload by hand, whose parts and whole carry checksums."""
    typed = {"ChecksumType": kind} if has_types(s3) else {}
    named = {"Bucket": bucket, "Key": key}
    named["UploadId"] = s3.create_multipart_upload(**named, ChecksumAlgorithm=algorithm, **typed)["UploadId"]
    body, parts = body_of(key, BIG_BYTES), []
    for number, start in enumerate(range(0, len(body), 5 * MIB), 1):
        part = s3.upload_part(
            **named, PartNumber=number, Body=body[start : start + 5 * MIB], ChecksumAlgorithm=algorithm
        )
        checksum = f"Checksum{algorithm}"
        parts.append({"PartNumber": number, "ETag": part["ETag"], checksum: part[checksum]})
    done = s3.complete_multipart_upload(**named, MultipartUpload={"Parts": parts}, **typed)
    assert done[f"Checksum{algorithm}"].endswith("-2") is (kind == "COMPOSITE"), done


def small_keys(prefix: str) -> dict[str, dict[str, str]]:
    """Keys that are put whole, and how."""
    explicit = {f"{prefix}/put/{name}": {"ChecksumAlgorithm": name} for name in ALGORITHMS}
    return {f"{prefix}/put/as it comes": {}, **explicit}


def transferred_keys(prefix: str) -> dict[str, tuple[int, dict[str, str]]]:
    """Keys that the transfer manager uploads: their sizes, and how."""
    sizes: dict[str, tuple[int, dict[str, str]]] = {
        f"{prefix}/transfer/{size}": (size, {}) for size in (0, 1, 5 * MIB, 16 * MIB + 3)
    }
    with_checksum = {f"{prefix}/transfer/{name}": (BIG_BYTES, {"ChecksumAlgorithm": name}) for name in ALGORITHMS}
    return sizes | with_checksum


def kinds(s3: Any) -> dict[str, list[str]]:
    return KINDS if has_types(s3) else {"COMPOSITE": KINDS["COMPOSITE"]}


def write(bucket: str, prefix: str) -> None:
    s3 = client()
    for key, more in small_keys(prefix).items():
        s3.put_object(Bucket=bucket, Key=key, Body=body_of(key, SMALL_BYTES), Metadata={"step": "10"}, **more)
    for key, (size_bytes, more) in transferred_keys(prefix).items():
        source = io.BytesIO(body_of(key, size_bytes))
        s3.upload_fileobj(source, bucket, key, Config=PARTS, ExtraArgs=more)
    for kind, names in kinds(s3).items():
        for name in names:
            in_parts(s3, bucket, f"{prefix}/parts/{kind}-{name}", name, kind)
    key = f"{prefix}/put/as it comes"
    s3.copy({"Bucket": bucket, "Key": key}, bucket, f"{prefix}/copied")
    doomed = [f"{prefix}/doomed/{n}" for n in range(3)]
    for each in doomed:
        s3.put_object(Bucket=bucket, Key=each, Body=b"x")
    gone = s3.delete_objects(Bucket=bucket, Delete={"Objects": [{"Key": each} for each in doomed]})
    assert sorted(each["Key"] for each in gone["Deleted"]) == doomed, gone


def read(bucket: str, prefix: str) -> None:
    s3 = client()
    bodies = {key: body_of(key, SMALL_BYTES) for key in small_keys(prefix)}
    bodies |= {key: body_of(key, size_bytes) for key, (size_bytes, _) in transferred_keys(prefix).items()}
    by_hand = [f"{prefix}/parts/{kind}-{name}" for kind, names in kinds(s3).items() for name in names]
    bodies |= {key: body_of(key, BIG_BYTES) for key in by_hand}
    bodies[f"{prefix}/copied"] = bodies[f"{prefix}/put/as it comes"]
    pages = s3.get_paginator("list_objects_v2").paginate(
        Bucket=bucket, Prefix=f"{prefix}/", PaginationConfig={"PageSize": 7}
    )
    listed = {each["Key"]: each["Size"] for page in pages for each in page.get("Contents", [])}
    assert listed == {key: len(body) for key, body in bodies.items()}, listed
    for key, body in bodies.items():
        named = {"Bucket": bucket, "Key": key}
        if "/transfer/" in key:
            out = io.BytesIO()
            s3.download_fileobj(bucket, key, out, Config=PARTS)
            assert out.getvalue() == body, key
        else:
            assert s3.get_object(**named, ChecksumMode="ENABLED")["Body"].read() == body, key
        if key in small_keys(prefix):
            assert s3.get_object(**named, Range="bytes=90-109")["Body"].read() == body[90:110], key
            assert s3.head_object(**named, ChecksumMode="ENABLED")["Metadata"] == {"step": "10"}, key


if __name__ == "__main__":
    {"write": write, "read": read}[sys.argv[1]](*sys.argv[2:])
