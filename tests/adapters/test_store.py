"""Bytes between a process and its node: through shared memory, over HTTP, and past a gateway that is gone."""

import logging
import multiprocessing
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tiergate.testing.node import RunningNode
from tiergate.testing.objects import body_of
from tiergate.testing.origins import MotoOrigin
from tiergate_adapters import slabs
from tiergate_adapters.place import Place
from tiergate_adapters.route import Route
from tiergate_adapters.store import ObjectWriter, Store, UnreachableError

MIB = 1 << 20
BUCKET = "store"
FIGURES = ("used_bytes", "receiving_bytes", "reserved_bytes", "pinned_bytes", "dirty_bytes")


@pytest.fixture(scope="module")
def origin() -> Iterator[MotoOrigin]:
    with MotoOrigin() as running:
        client = running.client()
        client.create_bucket(Bucket=BUCKET)
        client.close()
        yield running


@pytest.fixture(scope="module")
def node(origin: MotoOrigin) -> Iterator[RunningNode]:
    with RunningNode(origin.endpoint, memory_limit="256MiB", workers=2, keep_ports=True) as running:
        yield running
        assert running.metric("tiergate_http_broken_invariants_total") == 0, running.log_tail()


@pytest.fixture(autouse=True)
def environment(node: RunningNode, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    values = {
        "AWS_ENDPOINT_URL": node.endpoint,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_CONFIG_FILE": str(tmp_path / "no-config"),
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    yield
    slabs._release_all()


@pytest.fixture
def store(request: pytest.FixtureRequest) -> Store:
    return Store(Place(BUCKET, f"{request.node.name}/"))


def figures(node: RunningNode) -> dict[str, int]:
    memory = node.status()["memory"]
    return {name: memory[name] for name in FIGURES if name in memory}


def written(store: Store, name: str, data: bytes, piece_bytes: int = MIB, **more: Any) -> ObjectWriter:
    with store.create(name, **more) as writer:
        for start in range(0, len(data), piece_bytes):
            writer.write(memoryview(data)[start : start + piece_bytes])
    return writer


@pytest.mark.parametrize("size_bytes", [0, 1, 4096, MIB, MIB + 1, 5 * MIB + 3, 21 * MIB + 7])
def test_what_is_written_is_what_a_stock_client_reads(node: RunningNode, store: Store, size_bytes: int) -> None:
    data = os.urandom(size_bytes)
    writer = written(store, "x", data)
    client = node.client()
    assert body_of(client, BUCKET, store.place.key("x")) == data
    assert client.head_object(Bucket=BUCKET, Key=store.place.key("x"))["ETag"] == writer.etag
    with store.open("x") as reader:
        assert reader.size_bytes == size_bytes
        assert bytes(reader.range(0, size_bytes)) == data
    node.wait_until("it is let go of", lambda: figures(node)["pinned_bytes"] == 0)
