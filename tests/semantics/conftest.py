"""One origin and one node for all sentences that need nothing special; nodes of their own for the others."""

import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, Protocol

import pytest

from tiergate.testing.faults import FaultyOrigin
from tiergate.testing.node import RunningNode
from tiergate.testing.origins import MotoOrigin, ProcessOrigin

FLAGS = ("--origin-attempts", "2", "--origin-backoff", "20ms", "--origin-backoff-max", "200ms", "--marker-quiet", "1s")
"""So that what must be tried again, or left alone for a while, is so within a test's patience."""

SMALL = "32MiB"
"""A budget that a few objects fill."""


class StartNode(Protocol):
    """Starts a node in front of the test's proxy; it ends with the test."""

    def __call__(self, *flags: str, **options: Any) -> RunningNode: ...


@pytest.fixture(scope="session")
def origin() -> Iterator[ProcessOrigin]:
    with MotoOrigin() as server:
        yield server


@pytest.fixture(scope="session")
def standing_proxy(origin: ProcessOrigin) -> Iterator[FaultyOrigin]:
    with FaultyOrigin(origin.endpoint) as proxy:
        yield proxy


@pytest.fixture
def proxy(standing_proxy: FaultyOrigin) -> Iterator[FaultyOrigin]:
    """Between nodes and the origin; without faults and with an empty record at the start of each test."""
    standing_proxy.forget()
    yield standing_proxy
    standing_proxy.heal()


@pytest.fixture(scope="session")
def standing_node(standing_proxy: FaultyOrigin) -> Iterator[RunningNode]:
    with RunningNode(standing_proxy.endpoint, flags=FLAGS) as node:
        yield node


@pytest.fixture
def node(standing_node: RunningNode, proxy: FaultyOrigin) -> RunningNode:
    """A node in front of `proxy` that tests share: they leave it running, and nothing pending."""
    return standing_node


@pytest.fixture
def start_node(proxy: FaultyOrigin) -> Iterator[StartNode]:
    """For tests that kill their node, or need it set up otherwise."""
    with ExitStack() as stack:

        def start(*flags: str, **options: Any) -> RunningNode:
            return stack.enter_context(RunningNode(proxy.endpoint, flags=(*FLAGS, *flags), **options))

        yield start


@pytest.fixture
def direct(origin: ProcessOrigin) -> Iterator[Any]:
    """A client of the origin itself."""
    client = origin.client()
    yield client
    client.close()


@pytest.fixture
def bucket(direct: Any) -> str:
    """A fresh bucket in the origin."""
    name = f"semantics-{uuid.uuid4().hex[:12]}"
    direct.create_bucket(Bucket=name)
    return name


@pytest.fixture
def s3(node: RunningNode) -> Iterator[Any]:
    """A client of `node`."""
    client = node.client()
    yield client
    client.close()
