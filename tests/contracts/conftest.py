"""Origins that nobody here wrote, with faults in between, for the contracts of the origin client and the forwarder;
real etcd for those of a cluster."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.etcds import client, clock, etcd

from tiergate.testing.origins import FaultyOrigin, MotoOrigin, ProcessOrigin, SeaweedOrigin

__all__ = ["client", "clock", "etcd"]

BUCKET = "contract"


@pytest.fixture(scope="module", params=[MotoOrigin, SeaweedOrigin], ids=["moto", "seaweed"])
def server(request: pytest.FixtureRequest) -> Iterator[ProcessOrigin]:
    """An origin with one bucket. Modules that need only one kind say so by indirect parametrisation."""
    kind: Callable[[], ProcessOrigin] = request.param
    with kind() as origin:
        client = origin.client()
        client.create_bucket(Bucket=BUCKET)
        client.close()
        yield origin


@pytest.fixture
def boto(server: ProcessOrigin) -> Iterator[Any]:
    """A client of the origin itself."""
    client = server.client()
    yield client
    client.close()


@pytest.fixture
def proxy(server: ProcessOrigin) -> Iterator[FaultyOrigin]:
    with FaultyOrigin(server.endpoint) as faulty:
        yield faulty


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch, server: ProcessOrigin) -> None:
    """The origin's keys where the AWS chain looks for them, and an endpoint there that must not be used."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", server.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", server.secret_key)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:9")
