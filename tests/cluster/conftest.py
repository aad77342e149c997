"""Several nodes on etcd in a network that tests break."""

import functools
from collections.abc import Iterator

import pytest

from tiergate.testing import netns
from tiergate.testing.netns import Network

missing = functools.cache(netns.missing)


@pytest.fixture
def network() -> Iterator[Network]:
    """A network of the test's own."""
    if missing():
        pytest.skip(missing())
    with Network() as network:
        yield network
