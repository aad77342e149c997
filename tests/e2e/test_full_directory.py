"""A directory without room: new writes are put off, everything else goes on."""

from typing import Any

import pytest
from botocore.exceptions import ClientError
from tests.nodes import StartNode

from tiergate.testing.faults import FaultyOrigin
from tiergate.testing.objects import body_of, keys_of
from tiergate.testing.origins import MotoOrigin
from tiergate.testing.rules import Gate, Hold

pytestmark = pytest.mark.parametrize("origin", [MotoOrigin], ids=["moto"], indirect=True)

LONG: dict[str, Any] = {"Metadata": {"note": "x" * 1800}, "ContentDisposition": "x" * 5000}
"""So that few objects fill the directory."""

MANY = 2000


def fill(client: Any, bucket: str) -> tuple[list[str], dict[str, Any]]:
    """Put objects until one is refused; the keys taken, and the refusal."""
    taken: list[str] = []
    for index in range(MANY):
        key = f"k{index:04}"
        try:
            client.put_object(Bucket=bucket, Key=key, Body=key.encode(), **LONG)
        except ClientError as error:
            return taken, dict(error.response)
        taken.append(key)
    raise AssertionError("the directory was never full")


def test_full_directory_puts_writes_off_and_reads_go_on(
    start_node: StartNode, proxy: FaultyOrigin, direct: Any, bucket: str
) -> None:
    node = start_node(memory_limit="8MiB")
    client, gate = node.client(), Gate()
    other = f"{bucket}-other"
    direct.create_bucket(Bucket=other)
    for place in (bucket, other):
        direct.put_object(Bucket=place, Key="foreign", Body=b"of somebody else")
    proxy.inject(Hold(gate), operation="PutObject", times=None)
    taken, refused = fill(client, bucket)
    assert len(taken) > 50
    answer = refused["ResponseMetadata"]
    assert (answer["HTTPStatusCode"], refused["Error"]["Code"]) == (503, "SlowDown")
    assert int(answer["HTTPHeaders"]["retry-after"]) >= 1

    assert body_of(client, bucket, taken[-1]) == taken[-1].encode()
    for place in (bucket, other):
        assert body_of(client, place, "foreign") == b"of somebody else"
        assert client.head_object(Bucket=place, Key="foreign")["ContentLength"] == 16
    assert keys_of(client, bucket) == ["foreign", *taken]
    assert keys_of(client, other) == ["foreign"]

    gate.release()
    node.wait_settled()
    client.put_object(Bucket=bucket, Key="after", Body=b"data", **LONG)
    node.wait_settled()
    assert keys_of(direct, bucket) == ["after", "foreign", *taken]


def test_reading_more_objects_than_the_directory_holds_forgets_the_oldest(
    start_node: StartNode, direct: Any, bucket: str
) -> None:
    node = start_node(memory_limit="8MiB")
    client = node.client()
    for index in range(200):
        direct.put_object(Bucket=bucket, Key=f"k{index:04}", Body=b"data", **LONG)
    for index in range(200):
        client.head_object(Bucket=bucket, Key=f"k{index:04}")
    node.wait_status("room again", lambda status: status["objects"]["clean"] < 180)
    client.put_object(Bucket=bucket, Key="after", Body=b"data")
