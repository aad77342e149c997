"""Several nodes on etcd in a network that tests break: real processes, real etcd, real addresses.

What is here takes minutes, so only one test of each kind runs always. TIERGATE_TEST_CLUSTER=all runs the others too.
Without root, or what else namespaces take, or etcd, there is nothing to break, and the tests are skipped.
"""

import functools
import os
import random
import shutil
import signal
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from tests.cluster.clusters import Cluster, Standing, standing_in

from tiergate.testing import netns
from tiergate.testing.netns import Network

missing = functools.cache(netns.missing)

HERE = Path(__file__).parent
TIMEOUT_S = 300
"""Of a test, on a machine that has other things to do."""

thorough = pytest.mark.skipif(
    os.environ.get("TIERGATE_TEST_CLUSTER") != "all", reason="TIERGATE_TEST_CLUSTER=all runs it"
)
"""Marks a test that is not run always."""

CLUSTERS = pytest.StashKey[list[Cluster]]()

StartCluster = Callable[..., Cluster]


def pytest_configure() -> None:
    """So that `timeout` leaves no process and no memory behind: fixtures are torn down as after Ctrl-C."""
    signal.signal(signal.SIGTERM, lambda *_: pytest.exit("ended by SIGTERM"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give the tests of this folder more time."""
    for item in items:
        if item.path.is_relative_to(HERE) and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(TIMEOUT_S))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A test that failed shows what its nodes logged, and what its clients met."""
    report = yield
    if report.failed:
        for cluster in item.stash.get(CLUSTERS, []):
            report.sections += [(f"log of {name}", node.log_tail()) for name, node in cluster.nodes.items()]
            report.sections.append(("failures", "\n".join(cluster.journal.failures)))
            report.sections.append(("replay", f"TIERGATE_TEST_SEED={cluster.seed}"))
    return report


@pytest.fixture(scope="session")
def whole_network() -> Iterator[Network]:
    if missing():
        pytest.skip(missing())
    with Network() as network:
        yield network


@pytest.fixture
def network() -> Iterator[Network]:
    """A network of the test's own."""
    if missing():
        pytest.skip(missing())
    with Network() as network:
        yield network


@pytest.fixture(scope="session")
def standing(whole_network: Network) -> Iterator[Standing]:
    """What all clusters have in common."""
    with standing_in(whole_network) as standing:
        yield standing


@pytest.fixture
def seed() -> str:
    """What all chance of a test comes from; TIERGATE_TEST_SEED replays it."""
    return os.environ.get("TIERGATE_TEST_SEED", "") or str(random.SystemRandom().randrange(1 << 30))


@pytest.fixture
def start_cluster(request: pytest.FixtureRequest, standing: Standing, seed: str) -> Iterator[StartCluster]:
    """Starts a cluster; it ends with the test."""
    with ExitStack() as stack:

        def start(**options: Any) -> Cluster:
            if not options.get("alone") and shutil.which("etcd") is None:
                pytest.skip("there is no etcd binary on PATH")
            standing.proxy.heal()
            cluster = Cluster(standing, seed, **options)
            request.node.stash.setdefault(CLUSTERS, []).append(cluster)
            return stack.enter_context(cluster)

        yield start
        standing.proxy.heal()
