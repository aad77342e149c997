"""P2 Ack means ack."""

import io
import os
from typing import Any

import pytest
from boto3.s3.transfer import TransferConfig
from botocore.exceptions import ClientError
from tests.nodes import StartNode
from tests.semantics.conftest import SMALL

from tiergate.testing.faults import FaultyOrigin
from tiergate.testing.node import RunningNode
from tiergate.testing.objects import ack_of, body_of, is_missing, keys_of, uploads_of
from tiergate.testing.rules import Answer, Gate, Hold

MIB = 1 << 20


@pytest.mark.semantics("P2.1")
def test_write_acknowledged_from_memory_is_whole_before_origin_has_it(
    node: RunningNode, s3: Any, direct: Any, proxy: FaultyOrigin, bucket: str
) -> None:
    gate = Gate()
    proxy.inject(Hold(gate), operation="PutObject", key="k")
    data = os.urandom(9 * MIB)
    assert ack_of(s3.put_object(Bucket=bucket, Key="k", Body=data)) == "memory:1"
    gate.wait_reached()
    assert is_missing(direct, bucket, "k")
    assert body_of(s3, bucket, "k") == data
    gate.release()
    node.wait_settled()


@pytest.mark.semantics("P2.2")
def test_object_larger_than_memory_is_in_origin_when_acknowledged(
    start_node: StartNode, direct: Any, bucket: str
) -> None:
    client = start_node(memory_limit=SMALL).client()
    data = os.urandom(40 * MIB)
    assert ack_of(client.put_object(Bucket=bucket, Key="k", Body=data)) == "origin"
    assert body_of(direct, bucket, "k") == data
    assert body_of(client, bucket, "k") == data


@pytest.mark.semantics("P2.3")
def test_multipart_larger_than_memory_arrives(start_node: StartNode, direct: Any, bucket: str) -> None:
    client = start_node(memory_limit=SMALL).client()
    data = os.urandom(60 * MIB)
    acks = []
    client.meta.events.register(
        "after-call.s3.CompleteMultipartUpload",
        lambda http_response, **_: acks.append(http_response.headers["x-tiergate-ack"]),
    )
    config = TransferConfig(multipart_threshold=MIB, multipart_chunksize=8 * MIB, max_concurrency=2)
    client.upload_fileobj(io.BytesIO(data), bucket, "k", Config=config)
    assert acks == ["origin"]
    assert body_of(direct, bucket, "k") == data
    assert body_of(client, bucket, "k") == data
    assert uploads_of(direct, bucket) == []


@pytest.mark.semantics("P2.4")
def test_write_without_room_nor_origin_is_refused_and_not_visible(
    start_node: StartNode, proxy: FaultyOrigin, bucket: str
) -> None:
    client = start_node(memory_limit=SMALL).client()
    client.put_object(Bucket=bucket, Key="first", Body=b"learns of the bucket")
    proxy.inject(Answer(503, "SlowDown"), operation="PutObject", key="k", times=None)
    with pytest.raises(ClientError) as refused:
        client.put_object(Bucket=bucket, Key="k", Body=bytes(40 * MIB))
    assert refused.value.response["Error"]["Code"] == "SlowDown"
    answer = refused.value.response["ResponseMetadata"]
    assert answer["HTTPStatusCode"] == 503
    assert int(answer["HTTPHeaders"]["retry-after"]) >= 1
    assert is_missing(client, bucket, "k")
    assert keys_of(client, bucket) == ["first"]
