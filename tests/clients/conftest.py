"""Stock clients against one node: each test writes and reads warm; what it left is read again from a cold node."""

import os
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path

import pytest
from tests.conformance.gateway import CLIENT, checking_node, restart_cold

from tiergate.testing.node import RunningNode
from tiergate.testing.origins import MotoOrigin

BUCKET = "clients"


@pytest.fixture(scope="module")
def node() -> Iterator[RunningNode]:
    with MotoOrigin() as origin:
        client = origin.client()
        client.create_bucket(Bucket=BUCKET)
        client.close()
        with checking_node(origin, "--marker-quiet", "1s") as running:
            yield running
            assert running.metric("tiergate_http_broken_invariants_total") == 0, running.log_tail()


@pytest.fixture
def prefix(request: pytest.FixtureRequest) -> str:
    return f"t{sha256(request.node.nodeid.encode()).hexdigest()[:10]}"


@pytest.fixture
def environment(node: RunningNode, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[], dict[str, str]]:
    """Sets what clients read from the environment; call it again after the node was started anew."""

    def apply() -> dict[str, str]:
        values = {
            "AWS_ENDPOINT_URL": node.endpoint,
            "AWS_ACCESS_KEY_ID": CLIENT.access_key,
            "AWS_SECRET_ACCESS_KEY": CLIENT.secret_key,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_REGION": "us-east-1",
            "AWS_CONFIG_FILE": str(tmp_path / "no-config"),
            "AWS_EC2_METADATA_DISABLED": "true",
        }
        for name, value in values.items():
            monkeypatch.setenv(name, value)
        return dict(os.environ) | values

    apply()
    return apply


@pytest.fixture
def cold(node: RunningNode, environment: Callable[[], dict[str, str]]) -> Callable[[], None]:
    """Starts the node anew with fresh memory: all that was written comes from the origin then."""

    def restart() -> None:
        restart_cold(node)
        environment()

    return restart
