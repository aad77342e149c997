"""P13 Nobody in who does not belong, between the nodes of a cluster. Mutual TLS: tests/e2e/test_cluster_tls.py."""

import os
import subprocess
import sys
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path

import pytest
from tests.nodes import FLAGS

from tiergate.clock import SystemClock
from tiergate.config import Secret
from tiergate.replication.auth import STREAMED, Signable, authorization, digest
from tiergate.replication.wire import HELD, NOTICES, PULL
from tiergate.testing.cluster import RunningCluster
from tiergate.testing.etcd import EtcdServer, needs_etcd
from tiergate.testing.faults import FaultyOrigin
from tiergate.testing.node import RunningNode

SECRET = "secret-of-peers-7fd2"

BODY = "/peer/v1/bodies/some-body"
PUT, GET, DELETE = f"{BODY}?holder=h&size=4", f"{BODY}/blocks/0", f"{BODY}?holder=h"

HOUR_S = 3600.0


class Knocker:
    """Sends requests to an address, and keeps what is answered."""

    def __init__(self, address: str) -> None:
        self._connection = HTTPConnection(address, timeout=10)
        self.answers: list[bytes] = []

    def ask(self, method: str, target: str, body: bytes = b"", signed: str | None = None) -> tuple[int, bytes]:
        """Status and body of the answer; `signed`: the Authorization header."""
        headers = {} if signed is None else {"Authorization": signed}
        self._connection.request(method, target, body=body or None, headers=headers)
        response = self._connection.getresponse()
        answer = response.read()
        self.answers += [answer, str(response.headers).encode()]
        return response.status, answer

    def close(self) -> None:
        self._connection.close()


def sign(
    method: str, target: str, body: bytes, *, secret: str = SECRET, ago_s: float = 0.0, receiver: str = "a"
) -> str:
    payload = STREAMED if method == "PUT" else digest(body)
    request = Signable(method, target, "b", receiver, payload)
    return authorization(Secret(secret), request, SystemClock().wall_s() - ago_s, "nonce")


@pytest.fixture
def member(standing_proxy: FaultyOrigin, etcd: EtcdServer) -> Iterator[RunningNode]:
    environment = {"TIERGATE_CLUSTER_SECRET": SECRET}
    flags = (*FLAGS, "--log-level", "debug")
    with RunningCluster(standing_proxy.endpoint, 1, etcd=etcd, flags=flags, environment=environment) as cluster:
        yield cluster.nodes[0]


@needs_etcd
@pytest.mark.semantics("P13.3", "P13.5")
def test_unsigned_forged_and_old_requests_change_nothing_and_no_secret_gets_out(member: RunningNode) -> None:
    peer = Knocker(member.peers)
    kept = sign("PUT", PUT, b"kept")
    assert peer.ask("PUT", PUT, b"kept", kept)[0] == 200
    before = member.status()["memory"]
    assert before["dirty_bytes"] > 0

    other = PUT.replace("some-body", "other-body")
    requests = [("PUT", other, b"data"), ("GET", GET, b""), ("DELETE", DELETE, b""), ("POST", PULL, b"{}")]
    requests += [("POST", NOTICES, b'{"notices":[]}'), ("POST", HELD, b'{"bodies":[]}')]
    refused_count = 0
    for method, target, body in requests:
        good = sign(method, target, body)
        forged = [
            None,
            "",
            "TIERGATE-HMAC-SHA256 ",
            "AWS4-HMAC-SHA256 Credential=x",
            sign(method, target, body, secret="guessed"),
            sign(method, target, body, ago_s=HOUR_S),
            sign(method, target, body, ago_s=-HOUR_S),
            sign(method, target, body, receiver="c"),
            sign(method, f"{target}x", body),
            sign("PATCH", target, body),
            good[:-1] + ("0" if good[-1] != "0" else "1"),
        ]
        for signed in forged:
            status, answer = peer.ask(method, target, body, signed)
            assert (status, b"kept" in answer) == (403, False), (method, target, signed)
            refused_count += 1
    # What was signed is another document.
    assert peer.ask("POST", NOTICES, b'{"notices":[] }', sign("POST", NOTICES, b'{"notices":[]}'))[0] == 403

    after = member.status()["memory"]
    assert [after[name] for name in ("bodies", "dirty_bytes")] == [before[name] for name in ("bodies", "dirty_bytes")]
    assert peer.ask("GET", GET, b"", sign("GET", GET, b"")) == (200, b"kept")
    assert member.metric("tiergate_replication_refused_peers_total") >= refused_count
    peer.close()

    files = [path for path in member.memory_dir.rglob("*") if path.is_file() and path.stat().st_size < 1 << 20]
    told = [member.log.encode(), str(member.status()).encode(), member.metrics().encode(), *peer.answers]
    assert not [text for text in (*told, *map(Path.read_bytes, files)) if SECRET.encode() in text]


@needs_etcd
@pytest.mark.semantics("P13.6")
def test_routes_of_peers_are_at_their_own_address_only(member: RunningNode) -> None:
    peer = Knocker(member.peers)
    assert peer.ask("PUT", PUT, b"kept", sign("PUT", PUT, b"kept"))[0] == 200
    requests = [("PUT", PUT, b"data"), ("GET", GET, b""), ("DELETE", DELETE, b""), ("POST", PULL, b"{}")]
    requests += [("POST", NOTICES, b"{}"), ("POST", HELD, b"{}")]
    before = member.status()["memory"]["bodies"]
    for url in (member.endpoint, member.admin):
        stranger = Knocker(url.removeprefix("http://"))
        for method, target, body in requests:
            for signed in (None, sign(method, target, body)):
                status, answer = stranger.ask(method, target, body, signed)
                assert status >= 400
                assert b"kept" not in answer
        stranger.close()
    assert member.status()["memory"]["bodies"] == before
    for target in ("/", "/healthz", "/status", "/metrics", "/some-bucket", "/some-bucket/key"):
        assert peer.ask("GET", target, b"", sign("GET", target, b""))[0] == 404
    assert peer.ask("GET", GET, b"", sign("GET", GET, b"")) == (200, b"kept")
    peer.close()


@pytest.mark.parametrize(
    "flags",
    [
        ("--advertise", "10.1.2.3:7001"),
        ("--advertise", "node-a.example:7001"),
        ("--advertise", "127.0.0.1:7001", "--peer-listen", "0.0.0.0:7001"),
    ],
)
@pytest.mark.semantics("P13.7")
def test_member_open_to_others_without_credentials_does_not_start(tmp_path: Path, flags: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "tiergate", "serve", "--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0"]
    command += ["--memory-dir", str(tmp_path), "--memory-limit", "16MiB", "--cluster", "etcd://127.0.0.1:1"]
    command += ["--node-name", "a", *flags]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TIERGATE_")}
    kept["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    ended = subprocess.run(command, env=kept, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2
    assert "is not a loopback address and peers need no credentials" in ended.stderr
    assert "ready" not in ended.stdout
