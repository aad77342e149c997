"""The bound on open client connections."""

import socket

import pytest
from tests.nodes import StartNode

from tiergate.testing.node import RunningNode
from tiergate.testing.origins import MotoOrigin

pytestmark = pytest.mark.parametrize("origin", [MotoOrigin], ids=["moto"], indirect=True)

ASK = b"GET /%b HTTP/1.1\r\nHost: node\r\n\r\n"


def connect(node: RunningNode) -> socket.socket:
    host, _, port = node.endpoint.removeprefix("http://").partition(":")
    return socket.create_connection((host, int(port)), timeout=20)


def ask(connection: socket.socket, bucket: str) -> tuple[bytes, bool]:
    """The head of the answer to a listing, and whether the connection ends with it."""
    connection.sendall(ASK % bucket.encode())
    answer = b""
    while b"</ListBucketResult>" not in answer:
        piece = connection.recv(65536)
        if not piece:
            return answer, True
        answer += piece
    return answer, False


def test_connections_beyond_the_bound_are_told_to_slow_down(start_node: StartNode, bucket: str) -> None:
    node = start_node("--connections", "3")
    kept = [connect(node) for _ in range(3)]
    for connection in kept:
        assert ask(connection, bucket)[0].startswith(b"HTTP/1.1 200")
    excess = connect(node)
    answer, is_closed = ask(excess, bucket)
    head = answer.partition(b"\r\n\r\n")[0].lower()
    assert answer.startswith(b"HTTP/1.1 503")
    assert b"<Code>SlowDown</Code>" in answer
    assert is_closed
    assert b"\r\nretry-after: " in head
    assert b"\r\nconnection: close" in head
    for connection in kept:
        assert ask(connection, bucket)[0].startswith(b"HTTP/1.1 200")
    assert node.metric("tiergate_http_active_connections") == 3
    assert node.metric("tiergate_http_refused_connections_total") == 1

    kept.pop().close()
    node.wait_until("a free place", lambda: node.metric("tiergate_http_active_connections") == 2)
    kept.append(connect(node))
    assert ask(kept[-1], bucket)[0].startswith(b"HTTP/1.1 200")
    for connection in (*kept, excess):
        connection.close()


def test_silent_connections_beyond_the_bound_are_closed(start_node: StartNode, bucket: str) -> None:
    node = start_node("--connections", "2")
    silent = [connect(node) for _ in range(7)]
    for connection in silent[2:]:
        assert connection.recv(1) == b""
    node.wait_until("those within the bound", lambda: node.metric("tiergate_http_active_connections") == 2)
    assert ask(silent[0], bucket)[0].startswith(b"HTTP/1.1 200")
    for connection in silent:
        connection.close()
