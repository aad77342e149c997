"""minio-py: puts in parts, copies, compositions, listings, presigned URLs and removal of many."""

import io
import os
from datetime import timedelta
from pathlib import Path
from urllib.request import Request, urlopen

import pytest
from minio import Minio
from minio.commonconfig import ComposeSource, CopySource
from minio.deleteobjects import DeleteObject
from minio.error import S3Error
from tests.clients.conftest import BUCKET, Readers
from tests.conformance.gateway import CLIENT

from tiergate.testing.node import RunningNode

pytestmark = pytest.mark.client("minio-py")

MIB = 1 << 20


def client_of(node: RunningNode) -> Minio:
    address = node.endpoint.removeprefix("http://")
    return Minio(address, CLIENT.access_key, CLIENT.secret_key, secure=False, region="us-east-1")


def read(client: Minio, key: str, offset: int = 0, length: int = 0) -> bytes:
    answer = client.get_object(BUCKET, key, offset=offset, length=length)
    try:
        body: bytes = answer.read()
        return body
    finally:
        answer.close()
        answer.release_conn()


def test_minio_puts_copies_composes_lists_and_removes(
    node: RunningNode, prefix: str, readers: Readers, tmp_path: Path
) -> None:
    client = client_of(node)
    big, small = os.urandom(11 * MIB + 3), os.urandom(100_000)
    (tmp_path / "big").write_bytes(big)
    client.fput_object(BUCKET, f"{prefix}/big", str(tmp_path / "big"), content_type="x/y", part_size=5 * MIB)
    client.put_object(BUCKET, f"{prefix}/dir/small b+c", io.BytesIO(small), len(small), metadata={"step": "10"})
    client.put_object(BUCKET, f"{prefix}/stream", io.BytesIO(big), -1, part_size=5 * MIB)
    client.copy_object(BUCKET, f"{prefix}/copied", CopySource(BUCKET, f"{prefix}/dir/small b+c"))
    sources = [ComposeSource(BUCKET, f"{prefix}/{name}") for name in ("big", "copied")]
    client.compose_object(BUCKET, f"{prefix}/composed", sources)
    bodies = {"big": big, "composed": big + small, "copied": small, "dir/small b+c": small, "stream": big}
    for reader in readers():
        client = client_of(reader)
        found = {each.object_name: each.size for each in client.list_objects(BUCKET, f"{prefix}/", recursive=True)}
        assert found == {f"{prefix}/{name}": len(body) for name, body in bodies.items()}
        later = client.list_objects(BUCKET, f"{prefix}/", start_after=f"{prefix}/copied")
        assert {each.object_name for each in later} == {f"{prefix}/dir/", f"{prefix}/stream"}
        for name, body in bodies.items():
            assert read(client, f"{prefix}/{name}") == body
        assert read(client, f"{prefix}/big", 5 * MIB - 10, 20) == big[5 * MIB - 10 : 5 * MIB + 10]
        client.fget_object(BUCKET, f"{prefix}/big", str(tmp_path / "got"))
        assert (tmp_path / "got").read_bytes() == big
        assert client.stat_object(BUCKET, f"{prefix}/big").content_type == "x/y"
        for name in ("dir/small b+c", "copied"):
            metadata = client.stat_object(BUCKET, f"{prefix}/{name}").metadata
            assert metadata is not None
            assert metadata["x-amz-meta-step"] == "10"
    doomed = [DeleteObject(f"{prefix}/{name}") for name in bodies]
    assert list(client.remove_objects(BUCKET, doomed)) == []
    assert list(client.list_objects(BUCKET, f"{prefix}/")) == []
    with pytest.raises(S3Error, match="NoSuchKey"):
        client.stat_object(BUCKET, f"{prefix}/big")


def test_minio_presigns_urls(node: RunningNode, prefix: str) -> None:
    client = client_of(node)
    key, lasts = f"{prefix}/a b+c", timedelta(seconds=60)
    put = client.presigned_put_object(BUCKET, key, expires=lasts)
    headers = {"Content-Type": "text/plain"}
    with urlopen(Request(put, data=b"through a URL", method="PUT", headers=headers), timeout=10) as answer:
        assert answer.status == 200
    with urlopen(client.presigned_get_object(BUCKET, key, expires=lasts), timeout=10) as answer:
        assert answer.read() == b"through a URL"
    assert client.bucket_exists(BUCKET)
    client.remove_object(BUCKET, key)
    with pytest.raises(S3Error, match="NoSuchKey"):
        client.stat_object(BUCKET, key)
