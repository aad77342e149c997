"""Whole nodes as processes, in front of origins that nobody here wrote."""

import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from tests.etcds import etcd as etcd
from tests.etcds import start_cluster as start_cluster
from tests.nodes import *  # noqa: F403 - fixtures

from tiergate.testing.origins import MotoOrigin, ProcessOrigin, SeaweedOrigin


def pytest_configure() -> None:
    """So that `timeout` leaves no process and no memory behind: fixtures are torn down as after Ctrl-C."""
    signal.signal(signal.SIGTERM, lambda *_: pytest.exit("ended by SIGTERM"))


@pytest.fixture(scope="session")
def servers() -> Iterator[Callable[[type[ProcessOrigin]], ProcessOrigin]]:
    """One running origin of each kind, started when it is first asked for."""
    running: dict[type[ProcessOrigin], ProcessOrigin] = {}
    with ExitStack() as stack:

        def server(kind: type[ProcessOrigin]) -> ProcessOrigin:
            if kind not in running:
                running[kind] = stack.enter_context(kind())
            return running[kind]

        yield server


@pytest.fixture(scope="session", params=[MotoOrigin, SeaweedOrigin], ids=["moto", "seaweed"])
def origin(request: pytest.FixtureRequest, servers: Callable[[type[ProcessOrigin]], ProcessOrigin]) -> ProcessOrigin:
    """The origin. Modules that need only one kind say so by indirect parametrisation."""
    return servers(request.param)
