"""Adapters on real frameworks, before one real node and a real origin. Each test has a place of its own."""

import os
from collections.abc import Callable, Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import boto3
import pytest
from tests.conformance.gateway import CLIENT, checking_node

from tiergate.testing.node import RunningNode
from tiergate.testing.origins import MotoOrigin

BUCKET = "adapters"

Environment = Callable[..., dict[str, str]]


@pytest.fixture(scope="session")
def origin() -> Iterator[MotoOrigin]:
    """The real S3, with the bucket of all tests in it."""
    with MotoOrigin() as running:
        client = running.client()
        client.create_bucket(Bucket=BUCKET)
        client.close()
        yield running


@pytest.fixture(scope="module")
def flags() -> tuple[str, ...]:
    """Further flags of the node; a module may have its own."""
    return ()


@pytest.fixture(scope="module")
def memory_limit() -> str:
    """The node's memory; a module may have its own."""
    return "256MiB"


@pytest.fixture(scope="module")
def node(origin: MotoOrigin, flags: tuple[str, ...], memory_limit: str) -> Iterator[RunningNode]:
    """The gateway of this machine. It checks signatures; `environment` has its keys."""
    running = checking_node(
        origin, "--marker-quiet", "1s", "--marker-hold", "1s", *flags, memory_limit=memory_limit, keep_ports=True
    )
    with running:
        yield running
        assert running.metric("tiergate_http_broken_invariants_total") == 0, running.log_tail()


def aws_environment(endpoint: str, access_key: str, secret_key: str) -> dict[str, str]:
    """What says to any AWS client, and to the adapters, where S3 is and who asks."""
    return {
        "AWS_ENDPOINT_URL_S3": endpoint,
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": access_key,
        "AWS_SECRET_ACCESS_KEY": secret_key,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_REGION": "us-east-1",
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        "AWS_EC2_METADATA_DISABLED": "true",
    }


@pytest.fixture
def environment(node: RunningNode, monkeypatch: pytest.MonkeyPatch) -> Environment:
    """Has this process's environment name the node, as training code finds it; call it again with another endpoint or
    other keys to name those. What it gives is a whole environment for a process of its own: that, with the sources on
    its path."""

    def apply(
        endpoint: str = "", access_key: str = CLIENT.access_key, secret_key: str = CLIENT.secret_key
    ) -> dict[str, str]:
        values = aws_environment(endpoint or node.endpoint, access_key, secret_key)
        for name, value in values.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(boto3, "DEFAULT_SESSION", None)  # which keeps the keys that it found first
        return dict(os.environ) | values | {"PYTHONPATH": sources_path()}

    apply()
    return apply


@pytest.fixture
def uri(request: pytest.FixtureRequest, environment: Environment) -> str:
    """A place that only this test uses; the environment names the node."""
    return f"s3://{BUCKET}/t{sha256(request.node.nodeid.encode()).hexdigest()[:10]}"


@pytest.fixture
def beyond(node: RunningNode, origin: MotoOrigin, uri: str) -> Callable[[], Mapping[str, bytes]]:
    """What the origin alone holds below the test's place once all was written back, by names below it."""

    def objects() -> dict[str, bytes]:
        node.wait_settled()
        client: Any = origin.client()
        prefix = uri.removeprefix(f"s3://{BUCKET}/") + "/"
        pages = client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=prefix)
        keys = [each["Key"] for page in pages for each in page.get("Contents", ())]
        found = {key.removeprefix(prefix): client.get_object(Bucket=BUCKET, Key=key)["Body"].read() for key in keys}
        client.close()
        return found

    return objects


def sources_path() -> str:
    """PYTHONPATH of a process that imports the gateway, the adapters and these tests."""
    root = Path(__file__).parents[2]
    given = os.environ.get("PYTHONPATH", "")
    return os.pathsep.join([str(root / "gateway"), str(root / "adapters"), str(root), *filter(None, [given])])
