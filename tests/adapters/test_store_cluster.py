"""Bytes from shared memory to peers, and peers in the place of a gateway that is gone."""

import os
from collections.abc import Iterator
from typing import Any

import pytest
from tests.adapters.conftest import aws_environment
from tests.etcds import etcd as etcd

from tiergate.testing.cluster import RunningCluster
from tiergate.testing.etcd import EtcdServer, needs_etcd
from tiergate.testing.objects import body_of
from tiergate.testing.origins import MotoOrigin
from tiergate_adapters import slabs
from tiergate_adapters.place import Place
from tiergate_adapters.route import Route
from tiergate_adapters.store import Store

pytestmark = needs_etcd

MIB = 1 << 20
BUCKET = "peers"
FLAGS = ("--lease", "3s", "--replicas", "2", "--prefix", f"{{uri = 's3://{BUCKET}/run/', persist = 'every 100'}}")


@pytest.fixture(scope="module")
def cluster(etcd: EtcdServer) -> Iterator[RunningCluster]:
    with MotoOrigin() as origin:
        client = origin.client()
        client.create_bucket(Bucket=BUCKET)
        client.close()
        with RunningCluster(origin.endpoint, 3, etcd=etcd, flags=FLAGS, memory_limit="128MiB") as running:
            yield running


@pytest.fixture(autouse=True)
def environment(cluster: RunningCluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, value in aws_environment(cluster.nodes[0].endpoint, "test", "test").items():
        monkeypatch.setenv(name, value)
    yield
    slabs._release_all()


def written(store: Store, name: str, data: bytes, **more: Any) -> str:
    with store.create(name, **more) as writer:
        writer.write(data)
    return writer.ack


@pytest.mark.semantics("P2.9")
def test_what_is_written_into_shared_memory_is_copied_before_it_is_acknowledged(cluster: RunningCluster) -> None:
    store = Store(Place(BUCKET, "copied/"))
    one, several = os.urandom(9 * MIB), os.urandom(21 * MIB)
    before = cluster.nodes[0].metric("tiergate_memory_grants_total")
    assert written(store, "one", one) == "memory:2"
    assert written(store, "several", several) == "memory:2"
    assert cluster.nodes[0].metric("tiergate_memory_grants_total") == before + 3
    for index in (1, 2):
        assert body_of(cluster.client(index), BUCKET, "copied/one") == one
        assert body_of(cluster.client(index), BUCKET, "copied/several") == several
    kept = Store(Place(BUCKET, "run/step1/"), persist="memory")
    assert written(kept, "one", one) == "memory:2; kept=memory"
    assert written(kept, "several", several) == "memory:2; kept=memory"


@pytest.mark.semantics("P12.7")
def test_peers_are_asked_in_the_place_of_a_gateway_that_is_gone(cluster: RunningCluster) -> None:
    route = Route(attempts_count=2)
    store = Store(Place(BUCKET, "peers/"), route=route)
    data = os.urandom(21 * MIB)
    written(store, "before", data)
    assert route.node is not None
    assert sorted(route.node.peers) == sorted(node.endpoint for node in cluster.nodes[1:])
    middle = store.create("middle")
    middle.write(data)
    reader = store.open("before")
    cluster.nodes[0].kill9()
    try:
        middle.close()
        assert middle.ack == "memory:2"
        assert bytes(reader.range(3, len(data))) == data[3:]
        assert store.size("before") == len(data)
        assert store.size("never") is None, "a peer says what the gateway would say"
        assert written(store, "after", data[:MIB]) == "memory:2"
        assert store.names() == ["after", "before", "middle"]
        assert body_of(cluster.client(1), BUCKET, "peers/middle") == data
    finally:
        cluster.nodes[0].start()
        cluster.wait_members()
