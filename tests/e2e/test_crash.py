"""Promise P11: kill -9 of any process at any instruction loses nothing acknowledged and leaks nothing."""

import hashlib
import http.client
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from botocore.exceptions import BotoCoreError
from tests.nodes import StartNode

from tiergate.testing.faults import FaultyOrigin
from tiergate.testing.node import RunningNode, Victim
from tiergate.testing.objects import ack_of, body_of, is_missing, keys_of, uploads_of
from tiergate.testing.origins import MotoOrigin
from tiergate.testing.rules import Gate, Hold

pytestmark = pytest.mark.parametrize("origin", [MotoOrigin], ids=["moto"], indirect=True)

MIB = 1 << 20
VICTIMS = ["all", "parent", "worker", "background"]


@pytest.fixture
def own(start_node: StartNode) -> RunningNode:
    return start_node()


def kill_and_start(node: RunningNode, victim: Victim) -> Any:
    """Kill, start again where the node itself does not, and a client for what runs then."""
    node.kill9(victim)
    if victim in ("all", "parent"):
        node.restart()
    return node.client()


def begun_upload(node: RunningNode, path: str, size: int, sent: int) -> http.client.HTTPConnection:
    """A PUT whose body stops after `sent` bytes; the connection stays open."""
    parts = urlsplit(node.endpoint)
    assert parts.hostname is not None
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=30)
    connection.putrequest("PUT", path)
    connection.putheader("Content-Length", str(size))
    connection.endheaders()
    connection.send(os.urandom(sent))
    return connection


@pytest.mark.parametrize("victim", VICTIMS)
def test_kill_during_write_back_keeps_every_acknowledged_object(
    own: RunningNode, proxy: FaultyOrigin, direct: Any, bucket: str, victim: Victim
) -> None:
    client = own.client()
    client.put_object(Bucket=bucket, Key="k0", Body=b"deleted later")
    own.wait_settled()
    gate = Gate()
    proxy.inject(Hold(gate), where=lambda seen: seen.operation in ("PutObject", "DeleteObject"), times=None)
    data = {f"k{index}": os.urandom(index * 700_000 + 1) for index in range(1, 8)}
    etags = {}
    for key, body in data.items():
        answer = client.put_object(Bucket=bucket, Key=key, Body=body)
        assert ack_of(answer) == "memory:1"
        etags[key] = answer["ETag"]
    client.delete_object(Bucket=bucket, Key="k0")
    gate.wait_reached()

    client = kill_and_start(own, victim)

    for key, body in data.items():
        assert hashlib.sha256(body_of(client, bucket, key)).digest() == hashlib.sha256(body).digest(), key
        assert client.head_object(Bucket=bucket, Key=key)["ETag"] == etags[key]
    gate.release()
    status = own.wait_settled()
    assert keys_of(direct, bucket) == keys_of(client, bucket) == sorted(data)
    for key, body in data.items():
        assert body_of(direct, bucket, key) == body_of(client, bucket, key) == body, key
    memory = status["memory"]
    assert (memory["receiving_bytes"], memory["dirty_bytes"]) == (0, 0)


def put_in_two_parts(client: Any, bucket: str, key: str) -> tuple[bytes, str]:
    """A completed multipart upload: its bytes and its ETag."""
    upload_id = client.create_multipart_upload(Bucket=bucket, Key=key)["UploadId"]
    parts = [os.urandom(5 * MIB), os.urandom(1 * MIB)]
    answers = [
        client.upload_part(Bucket=bucket, Key=key, UploadId=upload_id, PartNumber=number, Body=body)
        for number, body in enumerate(parts, 1)
    ]
    listed = [{"PartNumber": number, "ETag": answer["ETag"]} for number, answer in enumerate(answers, 1)]
    done = client.complete_multipart_upload(
        Bucket=bucket, Key=key, UploadId=upload_id, MultipartUpload={"Parts": listed}
    )
    return b"".join(parts), done["ETag"]


@pytest.mark.parametrize("after_origin", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("victim", ["all", "background"])
def test_kill_around_a_completion_lands_it_once_and_leaves_no_upload(
    own: RunningNode, proxy: FaultyOrigin, direct: Any, bucket: str, victim: Victim, after_origin: bool
) -> None:
    """The origin's own multipart upload is taken up again, or found done."""
    client = own.client()
    gate = Gate()
    proxy.inject(Hold(gate, after_origin=after_origin), operation="CompleteMultipartUpload")
    data, etag = put_in_two_parts(client, bucket, "big")
    gate.wait_reached()

    client = kill_and_start(own, victim)
    own.wait_settled()
    gate.release()  # What the dead process had sent comes late, and finds no upload.

    assert body_of(direct, bucket, "big") == body_of(client, bucket, "big") == data
    assert client.head_object(Bucket=bucket, Key="big")["ETag"] == etag
    assert uploads_of(direct, bucket) == []
    # No second generation: what the origin had was not sent again.
    assert len(proxy.seen("UploadPart")) == 2
    assert len(proxy.seen("CreateMultipartUpload")) == 1


def test_completion_of_a_dead_process_that_lands_while_its_successor_looks_leaves_no_upload(
    own: RunningNode, proxy: FaultyOrigin, direct: Any, bucket: str
) -> None:
    client = own.client()
    late, looking = Gate(), Gate()
    proxy.inject(Hold(late), operation="CompleteMultipartUpload", key="big")
    data, etag = put_in_two_parts(client, bucket, "big")
    late.wait_reached()
    own.kill9("all")
    # The successor has seen that nothing landed, and is about to see how far the upload is.
    proxy.inject(Hold(looking), operation="ListParts", key="big")
    own.restart()
    looking.wait_reached()
    late.release()
    proxy.wait_finished("CompleteMultipartUpload", "big")
    looking.release()
    own.wait_settled()

    client = own.client()
    assert body_of(direct, bucket, "big") == body_of(client, bucket, "big") == data
    assert client.head_object(Bucket=bucket, Key="big")["ETag"] == etag
    own.wait_until("no upload is left", lambda: uploads_of(direct, bucket) == [], deadline_s=10)


@pytest.mark.parametrize("victim", ["all", "background"])
def test_kill_while_a_put_lands_does_not_send_a_second(
    own: RunningNode, proxy: FaultyOrigin, direct: Any, bucket: str, victim: Victim
) -> None:
    client = own.client()
    gate = Gate()
    proxy.inject(Hold(gate, after_origin=True), operation="PutObject", key="k")
    client.put_object(Bucket=bucket, Key="k", Body=b"data")
    gate.wait_reached()

    client = kill_and_start(own, victim)
    gate.release()
    own.wait_settled()

    assert body_of(direct, bucket, "k") == b"data"
    assert len(proxy.seen("PutObject", "k")) == 1


@pytest.mark.parametrize("victim", ["all", "worker"])
def test_kill_during_a_write_through_lets_the_marker_of_its_set_come_back(
    start_node: StartNode, proxy: FaultyOrigin, direct: Any, bucket: str, victim: Victim
) -> None:
    node = start_node("--marker-quiet", "100ms", memory_limit="64MiB")
    client = node.client()
    client.put_object(Bucket=bucket, Key="s/shard", Body=b"first")
    client.put_object(Bucket=bucket, Key="s/.metadata", Body=b"marker")
    node.wait_settled()
    gate = Gate()
    proxy.inject(Hold(gate), operation="PutObject", key="s/shard")
    with closing(begun_upload(node, f"/{bucket}/s/shard", 80 * MIB, MIB)):
        gate.wait_reached()
        assert is_missing(direct, bucket, "s/.metadata")
        client = kill_and_start(node, victim)
    gate.release()
    node.wait_settled()
    assert body_of(direct, bucket, "s/.metadata") == b"marker"
    assert body_of(direct, bucket, "s/shard") == body_of(client, bucket, "s/shard") == b"first"


@pytest.mark.parametrize("victim", ["all", "worker"])
def test_write_through_that_lands_after_its_sender_died_overwrites_nothing(
    own: RunningNode, proxy: FaultyOrigin, direct: Any, bucket: str, victim: Victim
) -> None:
    direct.put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": "Enabled"})
    client = own.client()
    for key in ("old", "new"):
        gate = Gate()
        if key == "old":
            assert ack_of(client.put_object(Bucket=bucket, Key=key, Body=b"first")) == "origin"
        proxy.inject(Hold(gate), operation="PutObject", key=key)
        with ThreadPoolExecutor(1) as pool:
            late = pool.submit(client.put_object, Bucket=bucket, Key=key, Body=b"late")
            gate.wait_reached()
            client = kill_and_start(own, victim)
            assert isinstance(late.exception(), BotoCoreError)
        client.put_object(Bucket=bucket, Key=key, Body=b"acknowledged")
        gate.release()
        proxy.wait_finished("PutObject", key, count=3 if key == "old" else 2)
        assert body_of(direct, bucket, key) == body_of(client, bucket, key) == b"acknowledged"


@pytest.mark.parametrize("victim", ["all", "parent", "worker"])
def test_half_received_uploads_are_gone_with_their_memory(own: RunningNode, bucket: str, victim: Victim) -> None:
    client = own.client()
    kept = os.urandom(3 * MIB)
    client.put_object(Bucket=bucket, Key="kept", Body=kept)
    before = own.wait_settled()["memory"]
    upload_id = client.create_multipart_upload(Bucket=bucket, Key="multi")["UploadId"]
    with (
        closing(begun_upload(own, f"/{bucket}/half", 40 * MIB, 20 * MIB)),
        closing(begun_upload(own, f"/{bucket}/multi?partNumber=1&uploadId={upload_id}", 30 * MIB, 15 * MIB)),
    ):
        own.wait_status("both are in memory", lambda status: status["memory"]["receiving_bytes"] >= 35 * MIB)
        client = kill_and_start(own, victim)
    after = own.wait_status(
        "memory is as before",
        lambda status: status["memory"]["receiving_bytes"] == 0 and status["memory"]["pinned_bytes"] == 0,
    )["memory"]

    assert after["used_bytes"] == before["used_bytes"]
    assert after["bodies"] == before["bodies"]
    assert keys_of(client, bucket) == ["kept"]
    assert body_of(client, bucket, "kept") == kept


@pytest.mark.parametrize("victim", VICTIMS)
def test_multipart_upload_goes_on_under_its_id(own: RunningNode, direct: Any, bucket: str, victim: Victim) -> None:
    client = own.client()
    upload_id = client.create_multipart_upload(Bucket=bucket, Key="big", Metadata={"a": "b"})["UploadId"]
    parts = [os.urandom(5 * MIB), os.urandom(5 * MIB), os.urandom(1000)]
    first = client.upload_part(Bucket=bucket, Key="big", UploadId=upload_id, PartNumber=1, Body=parts[0])

    client = kill_and_start(own, victim)

    shown = client.list_parts(Bucket=bucket, Key="big", UploadId=upload_id)["Parts"]
    assert [(part["PartNumber"], part["ETag"]) for part in shown] == [(1, first["ETag"])]
    listed = [{"PartNumber": 1, "ETag": first["ETag"]}]
    for number in (2, 3):
        part = client.upload_part(
            Bucket=bucket, Key="big", UploadId=upload_id, PartNumber=number, Body=parts[number - 1]
        )
        listed.append({"PartNumber": number, "ETag": part["ETag"]})
    client.complete_multipart_upload(Bucket=bucket, Key="big", UploadId=upload_id, MultipartUpload={"Parts": listed})
    own.wait_settled()
    assert body_of(direct, bucket, "big") == body_of(client, bucket, "big") == b"".join(parts)
    assert direct.head_object(Bucket=bucket, Key="big")["Metadata"]["a"] == "b"
    assert uploads_of(direct, bucket) == []
    assert own.status()["objects"]["uploads"] == 0


def test_reader_killed_in_the_middle_leaves_no_pin(own: RunningNode, bucket: str) -> None:
    client = own.client()
    client.put_object(Bucket=bucket, Key="k", Body=os.urandom(40 * MIB))
    own.wait_settled()
    stream = client.get_object(Bucket=bucket, Key="k")["Body"]
    stream.read(1000)
    own.wait_status("it is pinned", lambda status: status["memory"]["pinned_bytes"] > 0)

    own.kill9("worker")

    own.wait_status("nothing is pinned", lambda status: status["memory"]["pinned_bytes"] == 0)
    stream.close()


def test_restarts_over_and_over_grow_nothing(own: RunningNode, direct: Any, bucket: str) -> None:
    sizes = []
    for turn in range(3):
        client = own.client()
        client.put_object(Bucket=bucket, Key="same", Body=os.urandom(5 * MIB))
        if turn == 1:
            assert own.stop() == 0
        else:
            own.kill9("all")
        own.restart()
        memory = own.wait_settled()["memory"]
        sizes.append((memory["used_bytes"], memory["bodies"]))
        assert memory["slab_bytes"] <= 32 * MIB
    assert sizes == [sizes[0]] * 3
    assert keys_of(direct, bucket) == ["same"]


def test_kill_of_all_leaves_no_process(start_node: StartNode, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor one that the parent starts in the place of one killed, if it can."""
    mark = f"node-of-{os.urandom(8).hex()}"
    node = start_node(environment={"MARK": mark})
    before = processes_with(mark)
    assert len(before) == 3
    (parent,) = (pid for pid, command in before.items() if "\0serve\0" in command)
    kill = signal.pidfd_send_signal

    def kill_and_let_parent_react(pidfd: int, number: signal.Signals) -> None:
        kill(pidfd, number)
        node.wait_until(
            "started another, or cannot", lambda: processes_with(mark).keys() - before or is_stopped(parent)
        )

    with monkeypatch.context() as patch:
        patch.setattr(signal, "pidfd_send_signal", kill_and_let_parent_react)
        node.kill9("all")
    assert processes_with(mark) == {}


def processes_with(mark: str) -> dict[int, str]:
    """The command lines, by process id, of the processes that have `mark` in their environment."""
    found: dict[int, str] = {}
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            if mark.encode() in (process / "environ").read_bytes():
                found[int(process.name)] = (process / "cmdline").read_bytes().decode()
    return found


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
