"""P13 Nobody in who does not belong. Signatures in detail: tests/conformance/test_signatures.py."""

import os
import subprocess
import sys
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
from tests.nodes import StartNode

from tiergate.testing.node import RunningNode
from tiergate.testing.objects import body_of, refusal
from tiergate.testing.origins import s3_client

KEYS = {"TIERGATE_ACCESS_KEY_ID": "CLIENTKEY", "TIERGATE_SECRET_ACCESS_KEY": "secret-of-clients-5d1c"}
ORIGIN_SECRET = "secret-of-origin-83aa"


@pytest.mark.semantics("P13.1", "P13.3")
def test_only_valid_signatures_are_let_in_and_no_secret_gets_out(start_node: StartNode, bucket: str) -> None:
    node = start_node("--log-level", "debug", environment=KEYS, secret_key=ORIGIN_SECRET)
    client = node.client()
    client.put_object(Bucket=bucket, Key="k", Body=b"data")
    assert body_of(client, bucket, "k") == b"data"
    forger = s3_client(node.endpoint, KEYS["TIERGATE_ACCESS_KEY_ID"], "guessed")
    stranger = s3_client(node.endpoint, "SOMEBODY", KEYS["TIERGATE_SECRET_ACCESS_KEY"])
    answers: list[str] = []
    for stray, code in ((forger, "SignatureDoesNotMatch"), (stranger, "InvalidAccessKeyId")):
        stray.meta.events.register(
            "after-call.s3", lambda http_response, **_: answers.append(http_response.content.decode())
        )
        assert refusal(lambda stray=stray: stray.get_object(Bucket=bucket, Key="k")) == (403, code)  # type: ignore[misc]
        stray.close()
    connection = HTTPConnection(node.endpoint.removeprefix("http://"), timeout=10)
    connection.request("GET", f"/{bucket}/k")
    anonymous = connection.getresponse()
    answers.append(anonymous.read().decode())
    assert anonymous.status == 403
    connection.close()
    node.wait_settled()

    files = [path for path in node.memory_dir.rglob("*") if path.is_file() and path.stat().st_size < 1 << 20]
    told = [node.log, str(node.status()), node.metrics(), *answers, *map(text_of, files)]
    for secret in (KEYS["TIERGATE_SECRET_ACCESS_KEY"], ORIGIN_SECRET):
        assert not [text for text in told if secret in text]


def text_of(path: Path) -> str:
    return path.read_bytes().decode("latin-1")


@pytest.mark.semantics("P13.2")
@pytest.mark.parametrize("flag", ["--listen", "--admin-listen"])
def test_node_open_to_others_without_credentials_does_not_start(tmp_path: Path, flag: str) -> None:
    command = [sys.executable, "-m", "tiergate", "serve", "--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0"]
    command += ["--memory-dir", str(tmp_path), "--memory-limit", "16MiB", flag, "0.0.0.0:0"]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TIERGATE_")}
    kept["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    ended = subprocess.run(command, env=kept, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode != 0
    assert "not a loopback address and clients need no credentials" in ended.stderr
    assert "ready" not in ended.stdout


@pytest.mark.semantics("P13.4")
def test_admin_paths_are_buckets_on_the_s3_address(node: RunningNode, s3: Any) -> None:
    connection = HTTPConnection(node.endpoint.removeprefix("http://"), timeout=10)
    for path in ("healthz", "readyz", "status", "metrics"):
        connection.request("GET", f"/{path}")
        answer = connection.getresponse()
        body = answer.read()
        assert (answer.status, b"<Code>NoSuchBucket</Code>" in body) == (404, True), path
    connection.request("POST", "/retry")
    answer = connection.getresponse()
    assert answer.status >= 400
    assert b"released" not in answer.read()
    connection.close()
