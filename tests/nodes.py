"""Whole nodes as processes in front of an origin: the fixtures of all tests that drive a node through boto3.

A conftest imports them and adds `origin`, a session fixture, for its own folder.
"""

import uuid
from collections.abc import Generator, Iterator
from contextlib import ExitStack
from typing import Any, Protocol

import pytest

from tiergate.testing.faults import FaultyOrigin
from tiergate.testing.node import RunningNode
from tiergate.testing.origins import ProcessOrigin

__all__ = [
    "StartNode",
    "bucket",
    "direct",
    "node",
    "proxy",
    "pytest_runtest_makereport",
    "s3",
    "standing_node",
    "standing_proxy",
    "start_node",
]

FLAGS = (
    *("--origin-attempts", "2", "--origin-backoff", "20ms", "--origin-backoff-max", "200ms"),
    *("--marker-quiet", "1s", "--marker-hold", "1s"),
)
"""So that what must be tried again, or left alone for a while, is so within a test's patience."""

NODES = pytest.StashKey[list[tuple[RunningNode, int]]]()


class StartNode(Protocol):
    """Starts a node in front of the test's proxy, or of `origin`; it ends with the test."""

    def __call__(self, *flags: str, origin: str = "", **options: Any) -> RunningNode: ...


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A test that failed shows what its nodes logged meanwhile."""
    report = yield
    if report.failed:
        for node, from_bytes in item.stash.get(NODES, []):
            report.sections.append((f"log of the node at {node.endpoint}", node.log_tail(from_bytes)))
    return report


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
def node(request: pytest.FixtureRequest, standing_node: RunningNode, proxy: FaultyOrigin) -> Iterator[RunningNode]:
    """A node in front of `proxy` that tests share: they leave it running, and nothing pending."""
    request.node.stash.setdefault(NODES, []).append((standing_node, standing_node.log_bytes))
    yield standing_node
    # One failed test must not be the next one's failure too.
    proxy.heal()
    standing_node.retry()
    standing_node.wait_settled()


@pytest.fixture
def start_node(request: pytest.FixtureRequest, proxy: FaultyOrigin) -> Iterator[StartNode]:
    """For tests that kill their node, or need it set up otherwise."""
    with ExitStack() as stack:

        def start(*flags: str, origin: str = "", **options: Any) -> RunningNode:
            node = RunningNode(origin or proxy.endpoint, flags=(*FLAGS, *flags), **options)
            # Known before it is ready, so that its log shows why it is not.
            request.node.stash.setdefault(NODES, []).append((node, 0))
            return stack.enter_context(node)

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
    name = f"test-{uuid.uuid4().hex[:12]}"
    direct.create_bucket(Bucket=name)
    return name


@pytest.fixture
def s3(node: RunningNode) -> Iterator[Any]:
    """A client of `node`."""
    client = node.client()
    yield client
    client.close()
