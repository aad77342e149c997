"""P12 The gateway never takes training down."""

import os
from typing import Any

import pytest
from tests.nodes import StartNode

from tiergate.testing.faults import FaultyOrigin
from tiergate.testing.objects import ack_of, body_of, is_missing, keys_of, refusal
from tiergate.testing.rules import Cut

ANSWERS = "tiergate_read_origin_outage_answers_total"


@pytest.mark.semantics("P12.1", "P12.2", "P12.4")
def test_saves_and_restores_go_on_through_an_outage_and_reach_origin_after_it(
    start_node: StartNode, direct: Any, proxy: FaultyOrigin, bucket: str
) -> None:
    node = start_node("--revalidate", "0")
    client = node.client()
    old = os.urandom(5_000_000)
    client.put_object(Bucket=bucket, Key="old", Body=old)
    node.wait_settled()
    proxy.inject(Cut(), times=None)
    new = os.urandom(5_000_000)
    assert ack_of(client.put_object(Bucket=bucket, Key="new", Body=new)) == "memory:1"
    answered = node.metric(ANSWERS)
    assert body_of(client, bucket, "old") == old
    assert body_of(client, bucket, "new") == new
    assert node.metric(ANSWERS) > answered
    assert is_missing(direct, bucket, "new")

    proxy.heal()
    node.wait_settled()
    assert body_of(direct, bucket, "new") == new


@pytest.mark.semantics("P12.3")
def test_only_exclusive_prefixes_are_answered_for_without_origin(
    start_node: StartNode, proxy: FaultyOrigin, bucket: str
) -> None:
    prefix = f"{{uri = 's3://{bucket}/own/', exclusive = true}}"
    node = start_node("--prefix", prefix)
    client = node.client()
    client.put_object(Bucket=bucket, Key="own/there", Body=b"data")
    client.put_object(Bucket=bucket, Key="shared/there", Body=b"data")
    node.wait_settled()
    proxy.inject(Cut(), times=None)
    client.put_object(Bucket=bucket, Key="own/new", Body=b"data")
    assert keys_of(client, bucket, "own/") == ["own/new", "own/there"]
    assert is_missing(client, bucket, "own/none")
    assert refusal(lambda: client.list_objects_v2(Bucket=bucket, Prefix="shared/")) == (503, "SlowDown")
    assert refusal(lambda: client.get_object(Bucket=bucket, Key="shared/none")) == (503, "SlowDown")
    proxy.heal()
    node.wait_settled()
