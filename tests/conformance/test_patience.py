"""Clients that are slow, silent or gone, and answers that cannot be finished: no wait is endless, nothing is kept."""

import os
from collections.abc import Iterator
from dataclasses import replace

import pytest
from tests.conformance.gateway import CLIENT, checking_node
from tests.conformance.rows import Row, answered
from tests.conformance.wire import UNSIGNED, Ask, Bucket
from tests.several import one_node

from tiergate.testing.node import RunningNode
from tiergate.testing.origins import FaultyOrigin, ProcessOrigin, Truncate

MIB = 1 << 20


@pytest.fixture(scope="module")
def hasty(origin: ProcessOrigin) -> Iterator[RunningNode]:
    with checking_node(origin, "--body-idle-timeout", "0.5s", "--header-timeout", "0.5s") as running:
        yield running
        assert running.metric("tiergate_http_broken_invariants_total") == 0, running.log_tail()


@pytest.fixture
def s3(hasty: RunningNode) -> Bucket:
    return Bucket(hasty, CLIENT, "conformance")


def test_client_that_stops_in_a_body_is_told_and_the_room_given_back(
    s3: Bucket, hasty: RunningNode, prefix: str
) -> None:
    ask = Ask("PUT", s3.path(f"{prefix}o"), payload=UNSIGNED, length=MIB)
    with s3.wire() as wire:
        wire.begin(ask)
        wire.pour(bytes(1000))
        reply = wire.reply("PUT")
        answered(Row("stops", ask, 400, "RequestTimeout", closes=True), reply)
    assert s3.get(f"{prefix}o").status == 404
    assert hasty.status()["memory"]["receiving_bytes"] == 0


def test_client_that_never_sends_what_it_was_invited_to(s3: Bucket, prefix: str) -> None:
    ask = Ask("PUT", s3.path(f"{prefix}o"), headers={"Expect": "100-continue"}, payload=UNSIGNED, length=MIB)
    with s3.wire() as wire:
        wire.begin(ask)
        reply = wire.reply("PUT")
        assert reply.interim == (100,)
        answered(Row("never sends", ask, 400, "RequestTimeout", closes=True), reply)


@one_node("a connection without a request leads to none of several nodes")
@pytest.mark.parametrize("start", [b"", b"GET /conformance HTTP/1.1\r\nHost: h\r\nA: "], ids=["nothing", "half_a_head"])
def test_connection_without_a_request_is_closed(s3: Bucket, start: bytes) -> None:
    with s3.wire() as wire:
        wire.pour(start)
        assert wire.rest() == b""


@one_node("a connection that waits for its next request leads to none of several nodes")
def test_idle_connection_is_closed(s3: Bucket) -> None:
    with s3.wire() as wire:
        assert wire.ask(Ask("HEAD", "/conformance")).status == 200
        assert wire.rest() == b""


def test_slow_client_that_keeps_sending_is_served(s3: Bucket, prefix: str) -> None:
    body = os.urandom(8)
    ask = Ask("PUT", s3.path(f"{prefix}o"), payload=UNSIGNED, length=len(body))
    with s3.wire() as wire:
        wire.begin(ask)
        for byte in body:
            assert wire.is_silent(0.1)
            wire.pour(bytes([byte]))
        assert wire.reply("PUT").status == 200
    assert s3.get(f"{prefix}o").body == body


def test_reader_that_stops_lets_go_of_the_memory(s3: Bucket, hasty: RunningNode, prefix: str) -> None:
    s3.put(f"{prefix}o", bytes(32 * MIB))
    with s3.wire() as wire:
        wire.begin(Ask("GET", s3.path(f"{prefix}o")))
        hasty.wait_status("pinned", lambda status: status["memory"]["pinned_bytes"])
        hasty.wait_status("let go", lambda status: status["memory"]["pinned_bytes"] == 0)
        assert len(wire.rest()) < 32 * MIB


def test_reader_that_vanishes_lets_go_of_the_memory(s3: Bucket, hasty: RunningNode, prefix: str) -> None:
    s3.put(f"{prefix}o", bytes(32 * MIB))
    with s3.wire() as wire:
        wire.begin(Ask("GET", s3.path(f"{prefix}o")))
        hasty.wait_status("pinned", lambda status: status["memory"]["pinned_bytes"])
        wire.reset()
    hasty.wait_status("let go", lambda status: status["memory"]["pinned_bytes"] == 0)


def test_answer_that_the_origin_breaks_off_is_broken_off_too(origin: ProcessOrigin, prefix: str) -> None:
    """After the head is out, only the end of the connection can tell: never a second answer in the first one's body."""
    body = os.urandom(12 * MIB)
    with (
        FaultyOrigin(origin.endpoint) as faulty,
        checking_node(origin, "--origin", faulty.endpoint, "--fill-ahead", "0", "--origin-attempts", "1") as node,
    ):
        s3 = Bucket(node, CLIENT, "conformance")
        s3.put(f"{prefix}o", body)
        node.restart_cold()
        faulty.inject(Truncate(1000), operation="GetObject", key=f"{prefix}o", nth=2)
        ask = Ask("GET", s3.path(f"{prefix}o"))
        with s3.wire() as wire:
            wire.send(replace(ask))
            received = wire.rest()
        head, _, sent = received.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 ")
        assert 0 < len(sent) < len(body)
        assert body.startswith(sent)
        assert node.metric("tiergate_http_broken_requests_total") == 1
        assert node.metric("tiergate_http_broken_invariants_total") == 0
        assert s3.get(f"{prefix}o").body == body
