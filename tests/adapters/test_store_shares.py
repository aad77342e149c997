"""What a process has of the memory of nodes: who ends it, and what becomes of it when nodes or processes change."""

import gc
import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest
from tests.adapters.test_store import (
    BUCKET,
    MIB,
    calm,
    denied,
    figures,
    moved,
    written,
)
from tests.adapters.test_store import environment as environment
from tests.adapters.test_store import node as node
from tests.adapters.test_store import origin as origin
from tests.adapters.test_store import store as store

from tiergate.shm import ProcessLease
from tiergate.testing.node import RunningNode
from tiergate.testing.objects import body_of
from tiergate.testing.origins import MotoOrigin
from tiergate_adapters import slabs, uploads
from tiergate_adapters.store import Store


def test_child_ends_nothing_of_its_parent(node: RunningNode, store: Store) -> None:
    """What it opened itself it ends."""
    calm(node)
    data = os.urandom(21 * MIB)
    written(store, "x", data)
    node.wait_settled()
    writers = {name: store.create(name) for name in ("closed", "left", "aborted", "dropped", "parts")}
    for name, writer in writers.items():
        writer.write(data if name == "parts" else data[: 2 * MIB])
    assert all(part.done.result() for part in writers["parts"]._upload._parts)
    reader = store.open("x")
    held = reader.range(0, len(data))
    before = figures(node)

    def end() -> None:
        assert reader.range(3, len(data)) == data[3:]
        assert figures(node)["pinned_bytes"] >= before["pinned_bytes"]
        reader.close()
        for name in ("closed", "parts"):
            with pytest.raises(RuntimeError, match="by the process that began it"):
                writers[name].close()
        with pytest.raises(ZeroDivisionError), writers["left"]:
            raise ZeroDivisionError
        writers["aborted"].abort()
        writers["dropped"].__del__()
        uploads.senders().shutdown()

    process: Any = multiprocessing.get_context("fork").Process(target=end)
    process.start()
    process.join()
    assert process.exitcode == 0
    assert figures(node) == before
    for name, writer in writers.items():
        writer.write(data[2 * MIB : 3 * MIB])
        writer.close()
        expected = data + data[2 * MIB : 3 * MIB] if name == "parts" else data[: 3 * MIB]
        assert body_of(node.client(), BUCKET, store.place.key(name)) == expected
    assert held == data
    reader.close()
    calm(node)


def lead(store: Store, endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on its endpoint leads elsewhere, which it does not know."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    store.route._clients.clear()
    store.route._endpoint = None


@pytest.mark.parametrize("size_bytes", [2 * MIB, 23 * MIB])
def test_endpoint_that_leads_to_s3_meanwhile_is_sent_the_bytes(
    origin: MotoOrigin, node: RunningNode, store: Store, monkeypatch: pytest.MonkeyPatch, size_bytes: int
) -> None:
    data = os.urandom(size_bytes)
    writer = store.create("x", size_bytes=size_bytes)
    writer.write(data[: 2 * MIB])
    lead(store, origin.endpoint, monkeypatch)
    writer.write(data[2 * MIB :])
    writer.close()
    assert writer.ack == ""
    direct = origin.client()
    assert body_of(direct, BUCKET, store.place.key("x")) == data
    direct.close()


def test_endpoint_that_leads_to_several_nodes_ends_nothing(
    origin: MotoOrigin, node: RunningNode, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was had of one stays while another answers; it ends with whoever has it."""
    calm(node)
    data = os.urandom(9 * MIB)
    written(store, "x", data)
    node.wait_settled()
    share, writer = store.route.share(), store.create("y")
    writer.write(data)
    reader = store.open("x")
    held = reader.range(0, len(data))
    before = figures(node)

    def write_at(endpoint: str, name: str) -> slabs.Share | None:
        lead(store, endpoint, monkeypatch)
        written(store, name, data)
        return store.route.share()

    with RunningNode(origin.endpoint, memory_limit="128MiB") as other:
        theirs = write_at(other.endpoint, "z")
        assert theirs is not None
        assert theirs is not share
        assert figures(node) == before
        assert write_at(node.endpoint, "w") is share, "it is found again"
        lease = theirs.memory.leases, theirs.token
        assert ProcessLease.is_alive(Path(lease[0]), lease[1])
        del theirs
        gc.collect()
        assert not ProcessLease.is_alive(Path(lease[0]), lease[1]), "nobody has it any more"
    writer.close()
    assert held == data
    assert body_of(node.client(), BUCKET, store.place.key("y")) == data
    reader.close()
    calm(node)


def test_node_comes_back_with_another_limit(
    origin: MotoOrigin, store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What was mapped before stays as it is; what lies beyond it is mapped, or goes over HTTP where that cannot be."""
    data = [os.urandom(16 * MIB) for _ in range(7)]

    def write_and_read(node: RunningNode, name: str) -> int:
        """How many objects were written into memory and read there."""
        before = moved(node, "memory_grants_total", "read_mapped_total")
        for index, body in enumerate(data):
            written(store, f"{name}{index}", body, size_bytes=len(body))
            with store.open(f"{name}{index}") as reader:
                assert reader.range(0, len(body)) == body
            node.wait_settled()
        grants, maps = moved(node, "memory_grants_total", "read_mapped_total")
        return int(min(grants - before[0], maps - before[1]))

    with RunningNode(origin.endpoint, memory_limit="64MiB", keep_ports=True) as node:
        monkeypatch.setenv("AWS_ENDPOINT_URL", node.endpoint)
        written(store, "first", data[0])
        share = store.route.share()
        assert share is not None
        reader = store.open("first")
        held = reader.range(0, len(data[0]))
        for limit in ("384MiB", "320MiB"):
            node.wait_settled()
            node.stop()
            node._memory_limit = limit
            node.start()
            if limit == "384MiB":
                with monkeypatch.context() as patch:
                    patch.setattr(slabs, "SlabFile", denied)
                    write_and_read(node, limit)
                assert "cannot be mapped" in caplog.text
            assert write_and_read(node, f"{limit}-") == len(data)
        assert store.route.share() is share
        assert held == data[0]
        reader.close()
        calm(node)
