"""The README's examples are run as they stand, against a node on its default-like endpoint."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tiergate.testing.node import RunningNode
from tiergate.testing.origins import MotoOrigin

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
DEFAULT_ADDRESS = "127.0.0.1:9000"
EXAMPLE_TIMEOUT_S = 90


def section(heading: str) -> tuple[str, str]:
    """Language and code of the one block under a heading."""
    text = README.split(f"\n### {heading}\n", 1)[1].split("\n#", 1)[0]
    found = re.findall(r"```(\w+)\n(.*?)```", text, re.S)
    assert len(found) == 1, heading
    language, code = found[0]
    return language, code


def headings() -> list[str]:
    part = README.split("\n## Point your tools at it\n", 1)[1].split("\n## ", 1)[0]
    return re.findall(r"^### (.+)$", part, re.M)


@pytest.fixture(scope="module")
def node() -> Iterator[RunningNode]:
    with MotoOrigin() as origin:
        origin.client().create_bucket(Bucket="training")
        with RunningNode(origin.endpoint) as running:
            yield running


@pytest.mark.parametrize("heading", headings())
def test_example_runs_as_it_stands(heading: str, node: RunningNode, tmp_path: Path) -> None:
    language, code = section(heading)
    address = node.endpoint.removeprefix("http://")
    code = code.replace(DEFAULT_ADDRESS, address)
    environment = os.environ | {
        "AWS_ENDPOINT_URL": node.endpoint,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": "any",
        "AWS_SECRET_ACCESS_KEY": "any",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    command = [sys.executable, "-c", code] if language == "python" else ["bash", "-ec", code]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=EXAMPLE_TIMEOUT_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_set_up_is_two_commands_of_one_line_each() -> None:
    for heading in ("See it work", "Run the tests"):
        part = README.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]
        (command,) = re.findall(r"```bash\n(.*?)```", part, re.S)
        assert command.count("\n") == 1
        assert command.startswith("python3 -m venv ")
