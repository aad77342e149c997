"""The CRT's transfer manager, of now and of before default checksums.

The older one knows no port but 80 over HTTP, so the node has another loopback address here.
"""

import random
import socket
import sys
from pathlib import Path

import pytest
from tests.clients.conftest import BUCKET, Aside, Readers, Run
from tests.clients.environments import python_of

from tiergate.testing.node import RunningNode

DRIVER = Path(__file__).parent / "drivers" / "crt_transfer.py"
PORT = 80
TRIES_COUNT = 20


@pytest.fixture(scope="module")
def flags() -> tuple[str, ...]:
    """Port 80 of some loopback address, if one can be had: another run of these tests may have some of them."""
    for _ in range(TRIES_COUNT):
        address = f"127.{random.randrange(1, 255)}.{random.randrange(1, 255)}.{random.randrange(1, 255)}"
        with socket.socket() as probe:
            try:
                probe.bind((address, PORT))
            except PermissionError:
                break
            except OSError:
                continue
        return ("--listen", f"{address}:{PORT}")
    return ()


@pytest.mark.parametrize(
    "environment_name",
    [
        pytest.param(None, marks=pytest.mark.client("CRT"), id="now"),
        pytest.param("boto3-1.35", marks=pytest.mark.client("CRT 0.22"), id="0.22"),
    ],
)
def test_crt_uploads_downloads_and_deletes(
    environment_name: str | None,
    node: RunningNode,
    run: Run,
    aside: Aside,
    prefix: str,
    readers: Readers,
    tmp_path: Path,
) -> None:
    if environment_name and not node.endpoint.endswith(f":{PORT}"):
        pytest.skip(f"this user may not listen on port {PORT}, the only one that this CRT client can reach")
    python = python_of(environment_name) if environment_name else sys.executable
    run(python, str(DRIVER), "write", BUCKET, prefix, str(tmp_path))
    for _ in readers():
        run(python, str(DRIVER), "read", BUCKET, prefix, str(tmp_path))
        with aside() as s3:
            assert "Contents" not in s3.list_objects_v2(Bucket=BUCKET, Prefix=f"{prefix}/doomed")
