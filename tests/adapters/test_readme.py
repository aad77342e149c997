"""The README's examples are run as they stand, against a node. Those for Ray run where Ray does, in test_ray.py."""

import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from tests.adapters import readme
from tests.adapters.conftest import aws_environment, sources_path

from tiergate.testing.node import RunningNode
from tiergate.testing.origins import MotoOrigin

pytestmark = pytest.mark.timeout(2 * readme.EXAMPLE_TIMEOUT_S)


@pytest.fixture(scope="module")
def node() -> Iterator[RunningNode]:
    """It lets anybody in; the bucket is the README's."""
    with MotoOrigin() as origin:
        client = origin.client()
        client.create_bucket(Bucket="training")
        client.close()
        with RunningNode(origin.endpoint, flags=("--marker-quiet", "1s", "--marker-hold", "1s")) as running:
            yield running
            running.wait_settled()


WITHOUT_TRITON = """
import sys, types
kernels = types.ModuleType("torchtitan.models.moe.kernels")
kernels.generate_permute_indices = None
sys.modules[kernels.__name__] = kernels
"""
"""torchtitan imports triton with the kernels of one kind of model, whatever is trained; torch for CPUs lacks triton."""


@pytest.mark.parametrize("heading", [name for name in readme.examples() if not name.startswith("Ray Train")])
def test_example_runs_as_it_stands(heading: str, node: RunningNode, tmp_path: Path) -> None:
    environment = aws_environment(node.endpoint, "any", "any") | {"PYTHONPATH": sources_path()}
    needs_triton = heading == "torchtitan" and find_spec("triton") is None
    readme.run(heading, tmp_path, os.environ | environment, WITHOUT_TRITON if needs_triton else "")
