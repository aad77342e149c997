"""The cases that need a failing origin, a full memory, or somebody else's writes (BC43, BC45, BC48)."""

import os
from collections.abc import Iterator

import pytest
from tests.conformance.gateway import CLIENT, checking_node
from tests.conformance.wire import Bucket
from tests.several import memory_ack

from tiergate.testing.node import RunningNode
from tiergate.testing.origins import Answer, Cut, FaultyOrigin, ProcessOrigin

MIB = 1 << 20
BUCKET = "conformance"
MAKING_VISIBLE = frozenset({"CreateMultipartUpload", "UploadPart", "PutObject", "CompleteMultipartUpload"})


@pytest.fixture
def faulty(origin: ProcessOrigin) -> Iterator[FaultyOrigin]:
    with FaultyOrigin(origin.endpoint) as proxy:
        yield proxy


@pytest.fixture
def small(origin: ProcessOrigin, faulty: FaultyOrigin) -> Iterator[RunningNode]:
    """A node with 64 MiB that asks the origin at every read, before an origin that can be made to fail."""
    flags = ("--origin", faulty.endpoint, "--revalidate", "0s", "--origin-backoff-max", "0.2s", "--through-wait", "1s")
    with checking_node(origin, *flags, memory_limit="64MiB") as running:
        yield running
        assert running.metric("tiergate_http_broken_invariants_total") == 0, running.log_tail()


@pytest.fixture
def s3(small: RunningNode) -> Bucket:
    return Bucket(small, CLIENT, BUCKET)


def test_bc43_change_behind_the_gateway_is_seen_at_once_if_asked_for(
    s3: Bucket, small: RunningNode, origin: ProcessOrigin, prefix: str
) -> None:
    key = f"{prefix}o"
    s3.put(key, b"one")
    small.wait_settled()
    assert s3.get(key).body == b"one"
    client = origin.client()
    client.put_object(Bucket=BUCKET, Key=key, Body=b"second")
    client.put_object(Bucket=BUCKET, Key=f"{prefix}new", Body=b"n")
    got, head = s3.get(key), s3.head(key)
    assert got.body == b"second"
    assert (head.etag, head.headers["content-length"]) == (got.etag, "6")
    assert s3.get(f"{prefix}new").body == b"n"
    assert s3.keys(prefix) == [f"{prefix}new", key]
    client.delete_object(Bucket=BUCKET, Key=key)
    client.close()
    assert s3.get(key).status == 404
    assert s3.keys(prefix) == [f"{prefix}new"]


def test_bc45_origin_that_says_slow_down_and_hangs_up_loses_nothing(
    s3: Bucket, small: RunningNode, faulty: FaultyOrigin, origin: ProcessOrigin, prefix: str
) -> None:
    for action, nth, times in ((Answer(503, "SlowDown"), 1, 5), (Answer(500, "InternalError"), 1, 3), (Cut(), 1, 3)):
        faulty.inject(action, where=lambda seen: seen.operation in MAKING_VISIBLE, nth=nth, times=times)
    bodies = {f"{prefix}{number}": os.urandom(6 * MIB + number) for number in range(3)}
    for key, body in bodies.items():
        assert s3.put(key, body).headers["x-tiergate-ack"] == memory_ack()
        assert s3.get(key).body == body
    assert small.metric("tiergate_writeback_pending_bytes") > 0
    upload_key = f"{prefix}multi"
    s3.multipart(upload_key, [bytes(5 * MIB), b"end"])
    bodies[upload_key] = bytes(5 * MIB) + b"end"
    small.wait_settled()
    client = origin.client()
    for key, body in bodies.items():
        assert client.get_object(Bucket=BUCKET, Key=key)["Body"].read() == body
        assert s3.get(key).body == body
    assert "Uploads" not in client.list_multipart_uploads(Bucket=BUCKET, Prefix=prefix)
    client.close()


def test_bc48_full_memory_of_dirty_data_refuses_and_keeps_what_it_acknowledged(
    s3: Bucket, small: RunningNode, faulty: FaultyOrigin, prefix: str
) -> None:
    faulty.inject(Answer(503, "SlowDown"), where=lambda seen: seen.operation in MAKING_VISIBLE, times=None)
    acknowledged: dict[str, bytes] = {}
    refused = []
    for number in range(10):
        key, body = f"{prefix}{number}", os.urandom(20 * MIB)
        reply = s3.call("PUT", key, body)
        if reply.status == 200:
            acknowledged[key] = body
        else:
            assert (reply.status, reply.code) == (503, "SlowDown"), str(reply)
            assert int(reply.headers["retry-after"]) >= 1
            refused.append(key)
        memory = small.status()["memory"]
        assert memory["used_bytes"] <= memory["limit_bytes"]
    assert acknowledged
    assert refused
    for key, body in acknowledged.items():
        assert s3.get(key).body == body
    faulty.heal()
    small.wait_settled()
    for key in refused:
        body = os.urandom(20 * MIB)
        s3.put(key, body)
        acknowledged[key] = body
    small.wait_settled()
    for key, body in acknowledged.items():
        assert s3.get(key).body == body
    assert s3.keys(prefix) == sorted(acknowledged)
