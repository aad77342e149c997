"""boto3 as it comes, with every checksum it knows, presigned URLs of both versions, and conditions."""

import io
import os
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from boto3.s3.transfer import TransferConfig
from botocore.exceptions import ClientError
from tests.clients.conftest import BUCKET, Readers

from tiergate.testing.node import RunningNode

pytestmark = pytest.mark.client("boto3")

MIB = 1 << 20
COMPOSITE = ("CRC32", "CRC32C", "SHA1", "SHA256")
FULL_OBJECT = ("CRC32", "CRC32C", "CRC64NVME")
ALGORITHMS = ("CRC32", "CRC32C", "CRC64NVME", "SHA1", "SHA256")


def read(s3: Any, key: str, **more: Any) -> bytes:
    body: bytes = s3.get_object(Bucket=BUCKET, Key=key, **more)["Body"].read()
    return body


def test_boto3_writes_and_reads_with_every_checksum(node: RunningNode, prefix: str, readers: Readers) -> None:
    s3 = node.client()
    single, whole = os.urandom(100_000), os.urandom(5 * MIB + 1000)
    stored: dict[str, tuple[bytes, str, str]] = {}
    for name in ALGORITHMS:
        answer = s3.put_object(Bucket=BUCKET, Key=f"{prefix}/{name}", Body=single, ChecksumAlgorithm=name)
        stored[f"{prefix}/{name}"] = (single, f"Checksum{name}", answer[f"Checksum{name}"])
    for kind, names in (("COMPOSITE", COMPOSITE), ("FULL_OBJECT", FULL_OBJECT)):
        for name in names:
            key = f"{prefix}/{kind}-{name}"
            upload = {"Bucket": BUCKET, "Key": key, "UploadId": ""}
            created = s3.create_multipart_upload(Bucket=BUCKET, Key=key, ChecksumAlgorithm=name, ChecksumType=kind)
            assert (created["ChecksumAlgorithm"], created["ChecksumType"]) == (name, kind)
            upload["UploadId"] = created["UploadId"]
            parts = []
            for number, body in ((1, whole[: 5 * MIB]), (2, whole[5 * MIB :])):
                part = s3.upload_part(**upload, PartNumber=number, Body=body, ChecksumAlgorithm=name)
                listed = {"PartNumber": number, "ETag": part["ETag"], f"Checksum{name}": part[f"Checksum{name}"]}
                parts.append(listed)
            done = s3.complete_multipart_upload(**upload, MultipartUpload={"Parts": parts}, ChecksumType=kind)
            assert done["ChecksumType"] == kind
            assert done[f"Checksum{name}"].endswith("-2") is (kind == "COMPOSITE")
            stored[key] = (whole, f"Checksum{name}", done[f"Checksum{name}"])

    def check(client: Any) -> None:
        for key, (body, member, value) in stored.items():
            head = client.head_object(Bucket=BUCKET, Key=key, ChecksumMode="ENABLED")
            assert head[member] == value, key
            assert read(client, key) == body
            assert read(client, key, Range="bytes=10-99") == body[10:100]

    for reader in readers():
        check(reader.client())


def test_boto3_transfers_files(node: RunningNode, prefix: str, readers: Readers) -> None:
    config = TransferConfig(multipart_threshold=5 * MIB, multipart_chunksize=5 * MIB, max_concurrency=4)
    bodies = {f"{prefix}/{size}": os.urandom(size) for size in (0, 1, 5 * MIB, 17 * MIB + 3)}
    s3 = node.client()
    for key, body in bodies.items():
        s3.upload_fileobj(
            io.BytesIO(body), BUCKET, key, Config=config, ExtraArgs={"Metadata": {"size": str(len(body))}}
        )

    def check(client: Any) -> None:
        for key, body in bodies.items():
            out = io.BytesIO()
            client.download_fileobj(BUCKET, key, out, Config=config)
            assert out.getvalue() == body
            assert client.head_object(Bucket=BUCKET, Key=key)["Metadata"] == {"size": str(len(body))}

    for reader in readers():
        check(reader.client())


@pytest.mark.parametrize("version", ["s3v4", None], ids=["v4", "default"])
def test_presigned_urls_of_boto3(node: RunningNode, prefix: str, version: str | None) -> None:
    s3 = node.client(**({"signature_version": version} if version else {}))
    named = {"Bucket": BUCKET, "Key": f"{prefix}/a b+c"}
    put = s3.generate_presigned_url("put_object", Params=named, ExpiresIn=60)
    assert ("X-Amz-Signature" in put) is (version is not None)
    with urlopen(Request(put, data=b"through a URL", method="PUT", headers={"Content-Type": ""}), timeout=10) as answer:
        assert answer.status == 200
    get = s3.generate_presigned_url(
        "get_object", Params=named | {"ResponseContentDisposition": 'attachment; filename="x"'}, ExpiresIn=60
    )
    with urlopen(get, timeout=10) as answer:
        assert answer.read() == b"through a URL"
        assert answer.headers["Content-Disposition"] == 'attachment; filename="x"'
    with pytest.raises(HTTPError) as refused:
        urlopen(get.replace("Signature=", "Signature=x"), timeout=10)
    with refused.value as error:
        assert error.code == 403
        assert b"<Code>SignatureDoesNotMatch</Code>" in error.read()


def test_conditions_of_boto3(node: RunningNode, prefix: str) -> None:
    s3 = node.client()
    named = {"Bucket": BUCKET, "Key": f"{prefix}/pointer"}
    etag = s3.put_object(**named, Body=b"1", IfNoneMatch="*")["ETag"]
    for more in ({"IfNoneMatch": "*"}, {"IfMatch": '"0"'}):
        with pytest.raises(ClientError, match="PreconditionFailed"):
            s3.put_object(**named, Body=b"2", **more)
    s3.put_object(**named, Body=b"3", IfMatch=etag)
    with pytest.raises(ClientError, match="PreconditionFailed"):
        s3.get_object(**named, IfMatch=etag)
    with pytest.raises(ClientError, match="304"):
        s3.get_object(**named, IfNoneMatch=s3.head_object(**named)["ETag"])
    assert read(s3, named["Key"]) == b"3"
