"""P5 Bytes in are bytes out."""

import base64
import hashlib
import io
import os
from typing import Any

import pytest
from boto3.s3.transfer import TransferConfig
from botocore.exceptions import BotoCoreError, ClientError
from tests.nodes import StartNode
from tests.semantics.conftest import SMALL
from tests.semantics.test_p03_read_after_write import evict
from urllib3.exceptions import HTTPError

from tiergate.testing.faults import FaultyOrigin
from tiergate.testing.node import RunningNode
from tiergate.testing.objects import body_of, refusal
from tiergate.testing.rules import Corrupt, Truncate

MIB = 1 << 20


def base64_of(digest: bytes) -> str:
    return base64.b64encode(digest).decode()


@pytest.mark.semantics("P5.1")
def test_body_that_is_not_what_was_proved_is_refused_and_changes_nothing(
    node: RunningNode, s3: Any, bucket: str
) -> None:
    s3.put_object(Bucket=bucket, Key="k", Body=b"as it was")
    sent, other = os.urandom(100_000), os.urandom(100_000)
    md5 = base64_of(hashlib.md5(other, usedforsecurity=False).digest())
    proofs = [{"ContentMD5": md5}, {"ChecksumSHA256": base64_of(hashlib.sha256(other).digest())}]
    proofs += [{"ChecksumCRC32": "AAAAAA=="}, {"ChecksumCRC64NVME": "AAAAAAAAAAA="}]
    for proof in proofs:
        found = refusal(lambda proof=proof: s3.put_object(Bucket=bucket, Key="k", Body=sent, **proof))  # type: ignore[misc]
        assert found == (400, "BadDigest"), proof
    assert body_of(s3, bucket, "k") == b"as it was"
    node.wait_settled()


@pytest.mark.semantics("P5.2")
@pytest.mark.parametrize("offset", [17, 5 * MIB], ids=["first block", "later block"])
def test_damaged_bytes_from_origin_are_not_served(
    start_node: StartNode, proxy: FaultyOrigin, bucket: str, offset: int
) -> None:
    node = start_node("--fill-ahead", "0", memory_limit=SMALL)
    client = node.client()
    data = os.urandom(6 * MIB)
    client.put_object(Bucket=bucket, Key="k", Body=data)
    node.wait_settled()
    evict(node, client, bucket, "k")
    # The blocks of 4 MiB are fetched one by one: the damage is in one of them, whichever request fetches it.
    first = f"bytes={offset // (4 * MIB) * 4 * MIB}-"
    proxy.inject(
        Corrupt(offset % (4 * MIB)),
        operation="GetObject",
        key="k",
        where=lambda seen: seen.headers.get("range", "").startswith(first),
        times=None,
    )
    with pytest.raises((ClientError, BotoCoreError, HTTPError)):
        body_of(client, bucket, "k")
    proxy.heal()
    assert body_of(client, bucket, "k") == data


@pytest.mark.semantics("P5.3")
def test_write_back_sends_checksums_for_origin_to_check(
    node: RunningNode, s3: Any, proxy: FaultyOrigin, bucket: str
) -> None:
    s3.put_object(Bucket=bucket, Key="one", Body=os.urandom(100_000))
    config = TransferConfig(multipart_threshold=MIB, multipart_chunksize=5 * MIB)
    s3.upload_fileobj(io.BytesIO(os.urandom(11 * MIB)), bucket, "parts", Config=config)
    node.wait_settled()
    (put,) = proxy.seen("PutObject", "one")
    parts = proxy.seen("UploadPart", "parts")
    assert len(parts) == 3
    for request in (put, *parts):
        algorithm = request.headers["x-amz-sdk-checksum-algorithm"].lower()
        assert request.headers[f"x-amz-checksum-{algorithm}"]


@pytest.mark.semantics("P5.4")
def test_object_of_others_is_read_with_if_match_and_never_mixed(
    start_node: StartNode, direct: Any, proxy: FaultyOrigin, bucket: str
) -> None:
    client = start_node("--fill-ahead", "0").client()
    old, new = os.urandom(6 * MIB), os.urandom(6 * MIB)
    etag = direct.put_object(Bucket=bucket, Key="k", Body=old)["ETag"]
    assert body_of(client, bucket, "k", Range="bytes=0-99") == old[:100]
    assert {seen.headers.get("if-match") for seen in proxy.seen("GetObject", "k")} == {etag}
    direct.put_object(Bucket=bucket, Key="k", Body=new)
    # Its first block is held, its second is gone for good: the answer cannot be the old object.
    answer = client.get_object(Bucket=bucket, Key="k", Range="bytes=5000000-5000099")
    assert answer["Body"].read() == new[5000000:5000100]
    assert body_of(client, bucket, "k") == new


@pytest.mark.semantics("P5.5")
def test_answer_of_origin_that_ends_early_is_asked_for_again(
    start_node: StartNode, direct: Any, proxy: FaultyOrigin, bucket: str
) -> None:
    client = start_node().client()
    data = os.urandom(6 * MIB)
    direct.put_object(Bucket=bucket, Key="k", Body=data)
    proxy.inject(Truncate(1000), operation="GetObject", key="k")
    assert body_of(client, bucket, "k") == data
