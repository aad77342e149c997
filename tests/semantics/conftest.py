"""One origin and one node for all sentences that need nothing special; nodes of their own for the others."""

from collections.abc import Iterator

import pytest
from tests.etcds import etcd as etcd
from tests.etcds import start_cluster as start_cluster
from tests.nodes import *  # noqa: F403 - fixtures

from tiergate.testing.origins import MotoOrigin, ProcessOrigin

SMALL = "32MiB"
"""A budget that a few objects fill."""


@pytest.fixture(scope="session")
def origin() -> Iterator[ProcessOrigin]:
    with MotoOrigin() as server:
        yield server
