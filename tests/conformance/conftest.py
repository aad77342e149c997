"""One origin and one node for all conformance tests; a prefix of its own for each test."""

from collections.abc import Iterator
from hashlib import sha256

import pytest
from tests.conformance.gateway import CLIENT, checking_node
from tests.conformance.sides import Sides
from tests.conformance.wire import Bucket

from tiergate.testing.node import RunningNode
from tiergate.testing.origins import FaultyOrigin, MotoOrigin, ProcessOrigin

BUCKET = "conformance"


@pytest.fixture(scope="session")
def origin() -> Iterator[ProcessOrigin]:
    with MotoOrigin() as server:
        client = server.client()
        client.create_bucket(Bucket=BUCKET)
        client.close()
        yield server


@pytest.fixture(scope="session")
def node(origin: ProcessOrigin) -> Iterator[RunningNode]:
    """A node that checks signatures. When all is done it must not have met a bug of its own."""
    with checking_node(origin) as running:
        yield running
        assert "broken_invariants_total" in running.metrics()
        assert running.metric("tiergate_http_broken_invariants_total") == 0, running.log_tail()


@pytest.fixture(scope="session")
def s3(node: RunningNode) -> Bucket:
    return Bucket(node, CLIENT, BUCKET)


@pytest.fixture
def prefix(request: pytest.FixtureRequest) -> str:
    return f"t{sha256(request.node.nodeid.encode()).hexdigest()[:10]}/"


@pytest.fixture(scope="module")
def sides(origin: ProcessOrigin) -> Iterator[Sides]:
    """A node of the module's own behind a proxy that can hold its requests."""
    with FaultyOrigin(origin.endpoint) as proxy, checking_node(origin, "--origin", proxy.endpoint) as running:
        yield Sides(running, origin, proxy)
        assert running.metric("tiergate_http_broken_invariants_total") == 0, running.log_tail()
