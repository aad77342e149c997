"""Clusters over TLS: peers that show each other certificates, and etcd with TLS, a user and a password."""

import http.client
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.authority import Authority
from tests.nodes import FLAGS

from tiergate.etcd.channel import Tls
from tiergate.testing.cluster import RunningCluster
from tiergate.testing.etcd import EtcdServer, needs_etcd
from tiergate.testing.faults import FaultyOrigin
from tiergate.testing.node import NodeEndedError, RunningNode
from tiergate.testing.objects import ACK_HEADER, body_of, refusal
from tiergate.testing.origins import MotoOrigin
from tiergate.testing.rules import Answer

pytestmark = [needs_etcd, pytest.mark.parametrize("origin", [MotoOrigin], ids=["moto"], indirect=True)]

BODY = bytes(range(256)) * 1024

NO_SECRET = {"TIERGATE_CLUSTER_SECRET": ""}


def peer_flags(authority: Authority, name: str, trusted: Authority | None = None) -> list[str]:
    issued = authority.issue(name)
    flags = ["--peer-tls-cert", str(issued.certificate), "--peer-tls-key", str(issued.key)]
    return [*flags, "--peer-tls-ca", str((trusted or authority).file)]


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "ours")


@pytest.fixture
def cluster(proxy: FaultyOrigin, etcd: EtcdServer, authority: Authority) -> Iterator[RunningCluster]:
    """Two nodes that know each other by their certificates alone."""
    flags = (*FLAGS, "--lease", "3s", *peer_flags(authority, "node"))
    with RunningCluster(proxy.endpoint, 2, etcd=etcd, flags=flags, environment=NO_SECRET) as cluster:
        yield cluster


@pytest.mark.semantics("P13.5")
def test_peers_copy_and_read_over_mutual_tls(cluster: RunningCluster, proxy: FaultyOrigin, bucket: str) -> None:
    proxy.inject(Answer(503), operation="PutObject", times=None)
    put = cluster.client(0).put_object(Bucket=bucket, Key="k", Body=BODY)
    assert put["ResponseMetadata"]["HTTPHeaders"][ACK_HEADER] == "memory:2"
    assert body_of(cluster.client(1), bucket, "k") == BODY
    cluster.nodes[0].kill9("all")
    assert body_of(cluster.client(1), bucket, "k") == BODY
    proxy.heal()
    cluster.nodes[1].wait_status("taken over", lambda status: status["writeback"].get("pending") == 0)


def test_node_with_a_certificate_of_another_authority_is_refused_and_refuses(
    cluster: RunningCluster, proxy: FaultyOrigin, bucket: str, tmp_path: Path, authority: Authority
) -> None:
    proxy.inject(Answer(503), operation="PutObject", times=None)
    cluster.client(0).put_object(Bucket=bucket, Key="k", Body=BODY)
    theirs = Authority(tmp_path, "theirs")
    # It takes what others show, so that it is they who refuse; and the other way round.
    for name, flags in (("c", peer_flags(theirs, "c", authority)), ("d", peer_flags(authority, "d", theirs))):
        stranger = cluster.make(name, more=flags)
        with stranger:
            client = stranger.client()
            assert refusal(lambda client=client: client.get_object(Bucket=bucket, Key="k")) == (503, "SlowDown")  # type: ignore[misc]
            assert refusal(lambda client=client: client.put_object(Bucket=bucket, Key="x", Body=BODY)) is not None  # type: ignore[misc]
    proxy.heal()


def knock(node: RunningNode, context: ssl.SSLContext | None) -> bytes:
    """What the listener for peers answers to a request."""
    host, _, port = node.peers.rpartition(":")
    if context is None:
        connection = http.client.HTTPConnection(host, int(port), timeout=10)
    else:
        connection = http.client.HTTPSConnection(host, int(port), timeout=10, context=context)
    try:
        connection.request("GET", "/peer/v1/bodies/some/blocks/0")
        return connection.getresponse().read()
    finally:
        connection.close()


def test_only_certificates_of_the_clusters_authority_get_an_answer(
    cluster: RunningCluster, tmp_path: Path, authority: Authority
) -> None:
    node = cluster.nodes[0]

    def context(shown: Authority | None) -> ssl.SSLContext:
        made = ssl.create_default_context(cafile=authority.file)
        if shown is not None:
            issued = shown.issue("somebody")
            made.load_cert_chain(issued.certificate, issued.key)
        return made

    assert b"the body is not here" in knock(node, context(authority))
    for stranger in (context(None), context(Authority(tmp_path, "theirs"))):
        with pytest.raises((ssl.SSLError, ConnectionError)):
            knock(node, stranger)
    with pytest.raises((http.client.HTTPException, ConnectionError)):
        knock(node, None)


def test_etcd_over_tls_with_user_and_password(
    proxy: FaultyOrigin, bucket: str, tmp_path: Path, authority: Authority
) -> None:
    server_files, node_files = authority.issue("etcd"), authority.issue("node")
    extra = [f"--cert-file={server_files.certificate}", f"--key-file={server_files.key}"]
    extra += [f"--trusted-ca-file={authority.file}", "--client-cert-auth"]
    tls = Tls(authority.file.read_bytes(), node_files.certificate.read_bytes(), node_files.key.read_bytes())
    flags = [*FLAGS, "--etcd-user", "root", "--etcd-tls-ca", str(authority.file)]
    flags += ["--etcd-tls-cert", str(node_files.certificate), "--etcd-tls-key", str(node_files.key)]
    password = "password-of-etcd-91c0"
    with EtcdServer(extra=extra, tls=tls) as server:
        server.require_password(password)
        environment = {"TIERGATE_ETCD_PASSWORD": password}
        options: dict[str, Any] = {"etcd": server, "flags": flags, "environment": environment}
        with RunningCluster(proxy.endpoint, 2, **options) as cluster:
            put = cluster.client(0).put_object(Bucket=bucket, Key="k", Body=BODY)
            assert put["ResponseMetadata"]["HTTPHeaders"][ACK_HEADER] == "memory:2"
            assert body_of(cluster.client(1), bucket, "k") == BODY
            cluster.wait_settled()
            with (
                pytest.raises(NodeEndedError, match="etcd"),
                cluster.make("c", environment={"TIERGATE_ETCD_PASSWORD": "guessed"}),
            ):
                pass
            told = [text for node in cluster.nodes for text in (node.log, str(node.status()), node.metrics())]
            assert not [text for text in told if password in text]
