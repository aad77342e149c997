"""`tiergate test` against nodes and origins, and that its checks can fail."""

import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.error import URLError

import pytest
from botocore.exceptions import ClientError, EndpointConnectionError

import tiergate
from tiergate import cli, selftest
from tiergate.testing.node import RunningNode
from tiergate.testing.origins import MotoOrigin, ProcessOrigin, SeaweedOrigin

KNOWN_FAULTS: dict[type[ProcessOrigin], set[str]] = {
    # GET with a part number gives the whole object; nothing is verified.
    MotoOrigin: {"multipart upload", "checksum", "wrong Content-MD5"},
    # A key that ends with a slash has no body, and two slashes in a row are one.
    SeaweedOrigin: {"awkward keys"},
}


def faults(results: list[selftest.Result]) -> dict[str, str]:
    return {result.name: result.fault for result in results if result.fault}


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "200")


def words(endpoint: str, bucket: str) -> list[str]:
    return ["test", "--endpoint", endpoint, "--access-key", "test", "--secret-key", "test", "--bucket", bucket]


# Not SeaweedFS: what it lists of a key with two slashes in a row is not what was written.
@pytest.mark.parametrize("origin", [MotoOrigin], indirect=True, ids=["moto"])
def test_a_node_passes_and_keeps_nothing(node: RunningNode, direct: Any, bucket: str) -> None:
    command = [sys.executable, "-m", "tiergate", *words(node.endpoint, bucket)]
    environment = {"PYTHONPATH": str(Path(tiergate.__file__).parent.parent), "NO_COLOR": "1", "COLUMNS": "200"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert done.stdout.count("│ ok") == len(selftest.CHECKS)
    assert done.stdout.splitlines()[-1] == f"{len(selftest.CHECKS)} passed, 0 failed"
    node.wait_settled()
    assert "Contents" not in direct.list_objects_v2(Bucket=bucket)
    assert "Uploads" not in direct.list_multipart_uploads(Bucket=bucket)


@pytest.mark.parametrize("origin", [MotoOrigin], indirect=True, ids=["moto"])
def test_a_bucket_that_was_made_for_the_test_is_removed(node: RunningNode, direct: Any, bucket: str) -> None:
    made = f"{bucket}-made"
    client = node.client()
    assert faults(selftest.run_checks(client, made)) == {}
    names = {each["Name"] for each in direct.list_buckets()["Buckets"]}
    assert bucket in names
    assert made not in names


def test_origins_fail_only_where_they_are_known_to_differ(origin: ProcessOrigin, bucket: str) -> None:
    seen: list[selftest.Result] = []
    client = selftest.connect(origin.endpoint, origin.access_key, origin.secret_key)
    results = selftest.run_checks(client, bucket, on_result=seen.append)
    client.close()
    assert seen == results
    assert [result.name for result in results] == list(selftest.CHECKS)
    assert set(faults(results)) == KNOWN_FAULTS[type(origin)]


@pytest.mark.parametrize("origin", [MotoOrigin], indirect=True, ids=["moto"])
def test_a_fault_is_shown_and_fails_the_command(
    origin: ProcessOrigin, bucket: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(words(origin.endpoint, bucket)) == cli.EXIT_FAILED
    shown = capsys.readouterr().out
    assert "a wrong Content-MD5: expected BadDigest, got success" in shown
    assert shown.splitlines()[-1] == f"{len(selftest.CHECKS) - 3} passed, 3 failed"


@pytest.mark.parametrize("origin", [MotoOrigin], indirect=True, ids=["moto"])
def test_what_cannot_be_removed_is_said_below_the_results(
    origin: ProcessOrigin, bucket: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(place: selftest.Place) -> None:
        raise ClientError({"Error": {"Code": "ServiceUnavailable", "Message": "away"}}, "ListMultipartUploads")

    monkeypatch.setattr(selftest, "_empty", away)
    assert cli.main(words(origin.endpoint, bucket)) == cli.EXIT_FAILED
    shown = capsys.readouterr()
    assert shown.out.count("│ ok") == len(selftest.CHECKS) - 3
    assert shown.out.splitlines()[-1] == f"{len(selftest.CHECKS) - 3} passed, 3 failed"
    (line,) = shown.err.splitlines()
    assert line.startswith(f"tiergate: what the test wrote under s3://{bucket}/tiergate-test-")
    assert "could not be removed: " in line
    assert "ServiceUnavailable" in line


@pytest.mark.parametrize("name", list(selftest.CHECKS))
def test_every_check_fails_against_an_endpoint_that_refuses_everything(name: str) -> None:
    client = selftest.connect("http://127.0.0.1:1", "test", "test")
    place = selftest.Place(client, "bucket", "prefix/")
    with pytest.raises((EndpointConnectionError, URLError)):
        selftest.CHECKS[name](place)
    client.close()


def test_no_endpoint_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words("http://127.0.0.1:1", "bucket")) == cli.EXIT_FAILED
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert line.startswith("tiergate: http://127.0.0.1:1 cannot be tested: ")


def test_wrong_flags_are_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["test", "--endpont", "x"]) == cli.EXIT_USAGE
    assert "--endpont" in capsys.readouterr().err
