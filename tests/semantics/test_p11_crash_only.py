"""P11 Crash-only."""

import os
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from typing import Any

import pytest
from tests.nodes import StartNode

from tiergate.child import LEFT_BEHIND_STATUS
from tiergate.testing.faults import FaultyOrigin
from tiergate.testing.node import Victim
from tiergate.testing.objects import body_of, listed, uploads_of
from tiergate.testing.rules import Answer, Gate, Hold

MIB = 1 << 20


def half_put(endpoint: str, bucket: str, key: str) -> HTTPConnection:
    """A PUT of 2 MiB, of which half is sent."""
    connection = HTTPConnection(endpoint.removeprefix("http://"), timeout=30)
    connection.putrequest("PUT", f"/{bucket}/{key}")
    connection.putheader("Content-Length", str(2 * MIB))
    connection.endheaders(b"a" * MIB)
    return connection


def kept_alive(endpoint: str) -> socket.socket:
    """A connection on which a request was answered."""
    host, _, port = endpoint.removeprefix("http://").partition(":")
    connection = socket.create_connection((host, int(port)), timeout=30)
    connection.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    assert connection.recv(1 << 16).startswith(b"HTTP/1.1 ")
    return connection


@pytest.mark.semantics("P11.1", "P11.2")
@pytest.mark.parametrize("which", ["all", "parent", "worker", "background"])
def test_kill_loses_nothing_acknowledged_and_no_identity(
    start_node: StartNode, direct: Any, proxy: FaultyOrigin, bucket: str, which: Victim
) -> None:
    node = start_node()
    client = node.client()
    gate = Gate()
    proxy.inject(Hold(gate), operation="PutObject", where=lambda seen: seen.bucket == bucket, times=None)
    data = {f"k{index}": os.urandom(MIB * index + 1) for index in range(7)}
    for key, body in data.items():
        client.put_object(Bucket=bucket, Key=key, Body=body, Metadata={"of": key})
    client.delete_object(Bucket=bucket, Key="k0")
    del data["k0"]
    gate.wait_reached()
    shown = ("ETag", "LastModified", "ContentLength", "Metadata")

    def look() -> list[Any]:
        heads = [client.head_object(Bucket=bucket, Key=key) for key in data]
        return [[head[name] for name in shown] for head in heads] + [listed(client, bucket)]

    before = look()
    node.kill9(which)
    gate.release()
    if which in ("all", "parent"):
        node.restart()
    client = node.client()
    assert look() == before
    assert {key: body_of(client, bucket, key) for key in data} == data
    node.wait_settled()
    assert {key: body_of(direct, bucket, key) for key, _, _ in listed(direct, bucket)} == data
    assert look() == before


@pytest.mark.semantics("P11.3")
def test_body_in_the_middle_gives_its_memory_back_when_its_process_dies(start_node: StartNode, bucket: str) -> None:
    node = start_node()
    node.client().put_object(Bucket=bucket, Key="first", Body=b"data")
    node.wait_settled()
    before = node.status()["memory"]
    connection = HTTPConnection(node.endpoint.removeprefix("http://"), timeout=10)
    connection.putrequest("PUT", f"/{bucket}/k")
    connection.putheader("Content-Length", str(20 * MIB))
    connection.endheaders(os.urandom(9 * MIB))
    node.wait_status("receiving", lambda status: status["memory"]["receiving_bytes"] > 0)
    node.kill9("worker")
    after = node.wait_status("given back", lambda status: status["memory"]["receiving_bytes"] == 0)["memory"]
    connection.close()
    assert after["used_bytes"] == before["used_bytes"]
    assert after["available_bytes"] == before["available_bytes"]
    assert after["pinned_bytes"] == 0


@pytest.mark.semantics("P11.4", "P11.5")
def test_multipart_upload_outlives_a_crash_and_leaves_none_in_origin(
    start_node: StartNode, direct: Any, proxy: FaultyOrigin, bucket: str
) -> None:
    node = start_node()
    client = node.client()
    parts = [os.urandom(5 * MIB), os.urandom(5 * MIB), os.urandom(1000)]
    upload = {"Bucket": bucket, "Key": "k"}
    upload["UploadId"] = client.create_multipart_upload(**upload)["UploadId"]
    etags = [client.upload_part(**upload, PartNumber=1, Body=parts[0])["ETag"]]
    node.kill9()
    node.restart()
    client = node.client()
    etags += [client.upload_part(**upload, PartNumber=number, Body=parts[number - 1])["ETag"] for number in (2, 3)]
    gate = Gate()
    proxy.inject(Hold(gate), operation="UploadPart", key="k", nth=2)
    listed_parts = [{"PartNumber": number, "ETag": etag} for number, etag in enumerate(etags, 1)]
    client.complete_multipart_upload(**upload, MultipartUpload={"Parts": listed_parts})
    gate.wait_reached()
    node.kill9()
    gate.release()
    node.restart()
    node.wait_settled()
    assert body_of(direct, bucket, "k") == b"".join(parts)
    node.wait_until("no upload is left", lambda: uploads_of(direct, bucket) == [])
    assert uploads_of(node.client(), bucket) == []


@pytest.mark.semantics("P11.6")
def test_second_node_on_the_same_memory_does_not_start(start_node: StartNode, bucket: str) -> None:
    node = start_node()
    command = [sys.executable, "-m", "tiergate", "serve", "--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0"]
    command += ["--origin", node.origin, "--memory-dir", str(node.memory_dir), "--memory-limit", "64MiB"]
    source = os.pathsep.join(path for path in sys.path if path)
    ended = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": source}, capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode not in (0, None)
    assert str(node.memory_dir) in ended.stderr
    assert "ready" not in ended.stdout
    node.client().put_object(Bucket=bucket, Key="k", Body=b"the first one goes on")
    node.wait_settled()


@pytest.mark.semantics("P11.9")
def test_node_that_stops_first_brings_away_what_it_owes(
    start_node: StartNode, direct: Any, proxy: FaultyOrigin, bucket: str
) -> None:
    node = start_node("--drain", "1h")
    gate = Gate()
    proxy.inject(Hold(gate), operation="PutObject", where=lambda seen: seen.bucket == bucket, times=None)
    client = node.client()
    for key in ("later", "run/step_1/__0_0.distcp", "run/step_1/.metadata"):
        client.put_object(Bucket=bucket, Key=key, Body=b"x")
    gate.wait_reached()
    with ThreadPoolExecutor(1) as pool:
        stopping = pool.submit(node.stop)
        node.wait_until("its clients are answered", lambda: "draining" in node.log)
        gate.release()
        assert stopping.result() == 0
    assert [key for key, _, _ in listed(direct, bucket)] == ["later", "run/step_1/.metadata", "run/step_1/__0_0.distcp"]


@pytest.mark.semantics("P11.9")
@pytest.mark.parametrize("drain", ["0", "500ms"])
def test_node_that_cannot_bring_all_away_says_what_it_keeps_and_goes_on_with_it(
    start_node: StartNode, direct: Any, proxy: FaultyOrigin, bucket: str, drain: str
) -> None:
    node = start_node("--drain", drain)
    proxy.inject(Answer(503), operation="PutObject", where=lambda seen: seen.bucket == bucket, times=None)
    node.client().put_object(Bucket=bucket, Key="run/step_1/__0_0.distcp", Body=b"x")
    assert node.stop() == LEFT_BEHIND_STATUS
    said = node.log.splitlines()[-20:]
    assert any(
        f"s3://{bucket}/run/step_1/" in line and "in the memory folder of this node only" in line for line in said
    )
    proxy.heal()
    node.start()
    node.wait_settled()
    assert body_of(direct, bucket, "run/step_1/__0_0.distcp") == b"x"
    assert node.stop() == 0


@pytest.mark.semantics("P11.9")
def test_body_that_arrives_while_the_node_stops_is_taken(start_node: StartNode, direct: Any, bucket: str) -> None:
    node = start_node()
    idle, connection = kept_alive(node.endpoint), half_put(node.endpoint, bucket, "k")
    with idle, ThreadPoolExecutor(1) as pool:
        node.wait_status("receiving", lambda status: status["memory"]["receiving_bytes"] > 0)
        stopping = pool.submit(node.stop)
        while idle.recv(1 << 16):  # Ends at once, though a request is in flight beside it.
            pass
        assert not stopping.done()
        # What comes behind the body was not asked for in time.
        connection.send(b"b" * MIB + f"PUT /{bucket}/late HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n".encode())
        assert connection.sock is not None
        answer = connection.sock.makefile("rb").read()
        connection.close()
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert answer.count(b"HTTP/1.1 ") == 1
        assert stopping.result() == 0
    assert [key for key, _, _ in listed(direct, bucket)] == ["k"]
    assert body_of(direct, bucket, "k") == b"a" * MIB + b"b" * MIB


@pytest.mark.semantics("P11.9")
def test_body_that_does_not_come_holds_a_stop_up_for_the_grace_only(start_node: StartNode, bucket: str) -> None:
    node = start_node("--shutdown-grace", "200ms")
    connection = half_put(node.endpoint, bucket, "k")
    node.wait_status("receiving", lambda status: status["memory"]["receiving_bytes"] > 0)
    assert node.stop() == 0
    connection.close()
    assert "did not stop in time" not in node.log


@pytest.mark.semantics("P11.9")
@pytest.mark.parametrize("fault", ["error", "hang"])
def test_set_in_memory_that_cannot_be_judged_keeps_nothing_else_from_the_origin(
    start_node: StartNode, direct: Any, proxy: FaultyOrigin, bucket: str, fault: str
) -> None:
    drain = "1h" if fault == "error" else "3s"
    node = start_node("--drain", drain, "--prefix", f"{{uri = 's3://{bucket}/run/', persist = 'none'}}")
    client, sending, asked = node.client(), Gate(), Gate()
    proxy.inject(Hold(sending), operation="PutObject", where=lambda seen: seen.bucket == bucket, times=None)
    for key in ("run/step_1/__0_0.distcp", "run/step_1/.metadata", "other/a"):
        client.put_object(Bucket=bucket, Key=key, Body=b"x")
    sending.wait_reached()
    answer = Answer(404, "NoSuchBucket") if fault == "error" else Hold(asked)
    proxy.inject(answer, operation="ListObjectsV2", where=lambda seen: seen.bucket == bucket, times=None)
    with ThreadPoolExecutor(1) as pool:
        stopping = pool.submit(node.stop)
        node.wait_until("its clients are answered", lambda: "draining" in node.log)
        sending.release()
        assert stopping.result() == LEFT_BEHIND_STATUS
    asked.release()
    proxy.heal()
    assert [key for key, _, _ in listed(direct, bucket)] == ["other/a"]
    said = node.log.splitlines()[-20:]
    assert any(
        f"s3://{bucket}/run/step_1/" in line and "in the memory folder of this node only" in line for line in said
    )


@pytest.mark.semantics("P11.9")
def test_overwrite_in_place_that_a_stop_cuts_leaves_the_origin_its_set(
    start_node: StartNode, direct: Any, bucket: str
) -> None:
    node = start_node("--drain", "1h", "--marker-hold", "10m")
    client = node.client()
    members = [f"run/step_1/__{rank}_0.distcp" for rank in range(3)]
    before = dict.fromkeys([*members, "run/step_1/.metadata"], b"before")
    for key, body in before.items():
        client.put_object(Bucket=bucket, Key=key, Body=body)
    node.wait_settled()
    for key in members[:2]:
        client.put_object(Bucket=bucket, Key=key, Body=b"after")
    client.put_object(Bucket=bucket, Key="other", Body=b"x")
    assert node.stop() == LEFT_BEHIND_STATUS
    assert {key: body_of(direct, bucket, key) for key, _, _ in listed(direct, bucket)} == before | {"other": b"x"}
    node.start()
    for key in (members[2], "run/step_1/.metadata"):
        node.client().put_object(Bucket=bucket, Key=key, Body=b"after")
    assert node.stop() == 0
    after = dict.fromkeys(before, b"after") | {"other": b"x"}
    assert {key: body_of(direct, bucket, key) for key, _, _ in listed(direct, bucket)} == after
