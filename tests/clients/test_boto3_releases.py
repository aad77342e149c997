"""The same driver under boto3 as it is now, and as it was before it sent checksums by default."""

import sys
from pathlib import Path

import pytest
from tests.clients.conftest import BUCKET, Readers, Run
from tests.clients.environments import python_of

pytestmark = pytest.mark.timeout(300)  # many processes

DRIVER = Path(__file__).parent / "drivers" / "boto3_release.py"


@pytest.mark.parametrize(
    "environment_name",
    [
        pytest.param(None, marks=pytest.mark.client("boto3"), id="now"),
        pytest.param("boto3-1.35", marks=pytest.mark.client("boto3 1.35"), id="1.35"),
    ],
)
def test_boto3_release_writes_and_reads(environment_name: str | None, run: Run, prefix: str, readers: Readers) -> None:
    python = python_of(environment_name) if environment_name else sys.executable
    run(python, str(DRIVER), "write", BUCKET, prefix)
    for _ in readers():
        run(python, str(DRIVER), "read", BUCKET, prefix)
