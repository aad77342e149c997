"""Bytes between a process and its node: through shared memory, over HTTP, and past a gateway that is gone."""

import json
import logging
import multiprocessing
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from tiergate.s3.checksums import Checksum
from tiergate.shm import ProcessLease
from tiergate.testing.node import RunningNode
from tiergate.testing.objects import body_of, keys_of
from tiergate.testing.origins import MotoOrigin
from tiergate_adapters import slabs
from tiergate_adapters.place import Place
from tiergate_adapters.route import Route
from tiergate_adapters.store import ObjectWriter, Store, UnreachableError
from tiergate_adapters.uploads import Asked, Upload

MIB = 1 << 20
BUCKET = "store"
FIGURES = ("used_bytes", "receiving_bytes", "reserved_bytes", "pinned_bytes", "dirty_bytes")


@pytest.fixture(scope="module")
def origin() -> Iterator[MotoOrigin]:
    with MotoOrigin() as running:
        client = running.client()
        client.create_bucket(Bucket=BUCKET)
        client.close()
        yield running


@pytest.fixture(scope="module")
def node(origin: MotoOrigin) -> Iterator[RunningNode]:
    with RunningNode(origin.endpoint, memory_limit="256MiB", workers=2, keep_ports=True) as running:
        yield running
        assert running.metric("tiergate_http_broken_invariants_total") == 0, running.log_tail()


@pytest.fixture(autouse=True)
def environment(node: RunningNode, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    values = {
        "AWS_ENDPOINT_URL": node.endpoint,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_CONFIG_FILE": str(tmp_path / "no-config"),
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    yield
    slabs._release_all()


@pytest.fixture
def store(request: pytest.FixtureRequest) -> Store:
    return Store(Place(BUCKET, f"{sha256(request.node.name.encode()).hexdigest()[:16]}/"))


def figures(node: RunningNode) -> dict[str, int]:
    memory = node.status()["memory"]
    return {name: memory[name] for name in FIGURES if name in memory}


def calm(node: RunningNode) -> dict[str, int]:
    """Its figures once nothing is on its way, and what earlier tests held is given back."""
    node.wait_settled()
    node.wait_until("calm", lambda: not any(figures(node)[name] for name in ("receiving_bytes", "pinned_bytes")))
    return figures(node)


def written(store: Store, name: str, data: bytes, piece_bytes: int = MIB, **more: Any) -> ObjectWriter:
    with store.create(name, **more) as writer:
        for start in range(0, len(data), piece_bytes):
            writer.write(memoryview(data)[start : start + piece_bytes])
    return writer


@pytest.mark.parametrize("size_bytes", [0, 1, 4096, MIB, MIB + 1, 5 * MIB + 3, 21 * MIB + 7])
def test_what_is_written_is_what_a_stock_client_reads(node: RunningNode, store: Store, size_bytes: int) -> None:
    data = os.urandom(size_bytes)
    writer = written(store, "x", data)
    client = node.client()
    assert body_of(client, BUCKET, store.place.key("x")) == data
    assert client.head_object(Bucket=BUCKET, Key=store.place.key("x"))["ETag"] == writer.etag
    with store.open("x") as reader:
        assert reader.size_bytes == size_bytes
        assert bytes(reader.range(0, size_bytes)) == data
    node.wait_until("it is let go of", lambda: figures(node)["pinned_bytes"] == 0)


def ask(store: Store, *words: str, **more: Any) -> Any:
    return store.route.ask(*words, **more)


def moved(node: RunningNode, *names: str) -> list[float]:
    return [node.metric(f"tiergate_{name}") for name in names]


def test_large_bytes_go_through_memory_and_not_over_http(node: RunningNode, store: Store) -> None:
    data = os.urandom(21 * MIB + 7)
    before = moved(
        node, "memory_grants_total", "memory_granted_bytes_total", "read_mapped_total", "read_mapped_bytes_total"
    )
    written(store, "x", data, piece_bytes=3 * MIB + 1)
    with store.open("x") as reader:
        assert b"".join(map(bytes, reader.views(5, len(data)))) == data[5:]
        assert bytes(reader.range(7, 4 * MIB + 9)) == data[7 : 4 * MIB + 9]
        assert reader.seek(-3, os.SEEK_END) == len(data) - 3
        assert reader.read(10) == data[-3:]
        reader.seek(0)
        buffer = bytearray(len(data))
        assert reader.readinto(buffer) == len(data)
        assert buffer == data
    grants, granted, maps, mapped = (
        now - old
        for now, old in zip(
            moved(
                node,
                "memory_grants_total",
                "memory_granted_bytes_total",
                "read_mapped_total",
                "read_mapped_bytes_total",
            ),
            before,
            strict=True,
        )
    )
    assert (grants, maps, mapped) == (2, 1, len(data))
    assert granted >= len(data)


def ingested(node: RunningNode) -> float:
    return node.metric("tiergate_http_ingested_bytes_total")


@pytest.mark.parametrize("more_bytes", [0, 1, 511])
def test_length_said_before_takes_that_much_room(node: RunningNode, store: Store, more_bytes: int) -> None:
    data = os.urandom(9 * MIB + more_bytes)
    (before,), sent = moved(node, "memory_granted_bytes_total"), ingested(node)
    writer = written(store, "x", data, size_bytes=len(data))
    assert moved(node, "memory_granted_bytes_total") == [before + len(data)]
    assert ingested(node) - sent == len(data), "it was taken once"
    assert writer.ack == "memory:1"
    assert body_of(node.client(), BUCKET, store.place.key("x")) == data


def test_object_of_several_parts_that_a_stock_client_wrote_is_mapped(node: RunningNode, store: Store) -> None:
    client, named = node.client(), {"Bucket": BUCKET, "Key": store.place.key("x")}
    parts = [os.urandom(size_bytes) for size_bytes in (5 * MIB, 5 * MIB + 1, 77)]
    upload: dict[str, Any] = named | {"UploadId": client.create_multipart_upload(**named)["UploadId"]}
    listed = [
        {"PartNumber": number, "ETag": client.upload_part(**upload, PartNumber=number, Body=body)["ETag"]}
        for number, body in enumerate(parts, 1)
    ]
    client.complete_multipart_upload(**upload, MultipartUpload={"Parts": listed})
    data = b"".join(parts)
    (before,) = moved(node, "read_mapped_total")
    with store.open("x") as reader:
        assert bytes(reader.range(0, len(data))) == data
        assert bytes(reader.range(5 * MIB - 2, 10 * MIB + 10)) == data[5 * MIB - 2 : 10 * MIB + 10]
        assert figures(node)["pinned_bytes"] > 0
        node.wait_settled()
        client.put_object(**named, Body=b"new")
        assert bytes(reader.range(0, len(data))) == data, "what is pinned stays"
    assert moved(node, "read_mapped_total") == [before + 1]
    node.wait_until("it is let go of", lambda: figures(node)["pinned_bytes"] == 0)


def test_what_is_not_in_memory_is_fetched(node: RunningNode, store: Store) -> None:
    data = os.urandom(9 * MIB)
    written(store, "x", data)
    node.restart_cold()
    with store.open("x") as reader:
        assert reader.read(5) == data[:5]
        assert bytes(reader.range(MIB, 9 * MIB)) == data[MIB:]
    with store.open("x") as reader:
        assert bytes(reader.range(0, len(data))) == data


def test_what_was_aborted_or_failed_leaves_nothing(node: RunningNode, store: Store) -> None:
    before = calm(node)

    def fail() -> None:
        with store.create("x") as writer:
            writer.write(os.urandom(20 * MIB))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert store.size("x") is None
    assert store.names() == []
    node.wait_until("it is given back", lambda: figures(node) == before)
    forgotten = store.create("y")
    forgotten.write(bytes(2 * MIB))
    assert figures(node) != before
    del forgotten
    node.wait_until("it is given back", lambda: figures(node) == before)


@pytest.mark.parametrize("ending", ["abort", "close", "forget"])
def test_room_asked_for_ahead_and_not_needed_is_given_back(
    node: RunningNode, store: Store, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    """Though it is granted only when the writer has ended already."""
    calm(node)
    asked, ended, ask_for_room = [], threading.Event(), Upload._ask

    def ask_late(upload: Upload, *wish: Any) -> Asked:
        asked.append(wish)
        if len(asked) > 1:
            assert ended.wait(60)
        return ask_for_room(upload, *wish)

    monkeypatch.setattr(Upload, "_ask", ask_late)
    writer = store.create("x", size_bytes=64 * MIB)
    writer.write(bytes(2 * MIB))
    if ending == "abort":
        writer.abort()
    elif ending == "close":
        writer.close()
    del writer
    ended.set()
    calm(node)
    assert len(asked) == 2
    assert store.size("x") == (2 * MIB if ending == "close" else None)


def test_object_of_a_length_said_is_written_in_rooms_that_were_asked_for_ahead(node: RunningNode, store: Store) -> None:
    data = os.urandom(45 * MIB)
    (before,), sent = moved(node, "memory_grants_total"), ingested(node)
    written(store, "x", data, size_bytes=len(data))
    assert ingested(node) - sent == len(data), "each part was taken once"
    assert moved(node, "memory_grants_total") == [before + 3], "of 16 MiB, a sixteenth of the memory, or less"
    assert body_of(node.client(), BUCKET, store.place.key("x")) == data


def grant_of(store: Store, name: str, size_bytes: int) -> tuple[slabs.Room, dict[str, str]]:
    """A grant, and the headers that use it."""
    share = store.route.share()
    assert share is not None
    query, headers = {"x-tiergate-grant": "", "size": str(size_bytes)}, {"x-tiergate-lease": share.token}
    document = ask(store, "POST", BUCKET, store.place.key(name), query=query, headers=headers).document()
    extents = [tuple(extent) for block in document["extents"] for extent in block]
    return slabs.Room(share, document["grant"], extents, size_bytes, "grant"), headers | {
        "x-tiergate-body": document["grant"]
    }


@pytest.mark.semantics("P5.10")
def test_checksum_is_of_what_is_in_memory(node: RunningNode, store: Store) -> None:
    data = os.urandom(6 * MIB)
    for algorithm, value in (("crc64nvme", checksum(data, "crc64nvme")), ("sha256", checksum(data, "sha256"))):
        room, headers = grant_of(store, "x", len(data))
        room.write(memoryview(data))
        key, proof = store.place.key("x"), f"x-amz-checksum-{algorithm}"
        wrong = checksum(b"other", algorithm)
        room2, headers2 = grant_of(store, "x", len(data))
        room2.write(memoryview(data))
        refused = ask(store, "PUT", BUCKET, key, headers=headers2 | {proof: wrong})
        assert (refused.status, refused.code) == (400, "BadDigest")
        done = ask(store, "PUT", BUCKET, key, headers=headers | {proof: value})
        assert (done.status, done.headers[proof]) == (200, value)
        assert body_of(node.client(), BUCKET, key) == data


def checksum(data: bytes, algorithm: str) -> str:
    found = Checksum(algorithm)
    found.update(data)
    return found.digest_base64()


@pytest.mark.semantics("P13.10")
def test_grant_is_refused_to_all_but_its_own(node: RunningNode, store: Store) -> None:
    room, headers = grant_of(store, "x", 2 * MIB)
    room.write(memoryview(b"x" * MIB))
    key, other = store.place.key("x"), store.place.key("other")
    dead, alive = ProcessLease.acquire(leases_of(room)), ProcessLease.acquire(leases_of(room))
    dead.release()
    post = {"x-tiergate-grant": "", "size": str(MIB)}
    lease, body = "x-tiergate-lease", "x-tiergate-body"
    for method, name, query, changed, code in (
        ("PUT", other, {}, {}, "NoSuchGrant"),
        ("PUT", key, {}, {lease: alive.token}, "NoSuchGrant"),
        ("PUT", key, {}, {lease: dead.token}, "InvalidLease"),
        ("PUT", key, {}, {lease: f"../leases/{alive.token}"}, "InvalidLease"),
        ("PUT", key, {}, {lease: ""}, "InvalidLease"),
        ("PUT", key, {}, {body: "0" * 28}, "NoSuchGrant"),
        ("PUT", key, {}, {body: "0" * 28, "x-tiergate-size": "1"}, "NoSuchGrant"),
        ("PUT", key, {}, {body: ""}, "NoSuchGrant"),
        ("PUT", key, {}, {"x-tiergate-size": str(2 * MIB + 1)}, "InvalidGrant"),
        ("PUT", key, {}, {"x-tiergate-size": "-1"}, "InvalidArgument"),
        ("GET", key, {}, {}, "InvalidRequest"),
        ("POST", key, post, {lease: dead.token}, "InvalidLease"),
        ("POST", key, post | {"size": "0"}, {}, "InvalidArgument"),
        ("POST", key, post | {"size": str((1 << 30) + 1)}, {}, "InvalidArgument"),
        ("POST", "", {"x-tiergate-release": ""}, {}, "MethodNotAllowed"),
    ):
        found = ask(store, method, BUCKET, name, query=query, headers=headers | changed)
        assert found.code == code, (method, name, query, changed, found)
    assert ask(store, "PUT", BUCKET, key, headers=headers, body=b"more").code == "InvalidRequest"
    done = ask(store, "PUT", BUCKET, key, headers=headers | {"x-tiergate-size": str(MIB)})
    assert done.is_done
    assert body_of(node.client(), BUCKET, key) == b"x" * MIB
    assert ask(store, "PUT", BUCKET, key, headers=headers).code == "NoSuchGrant", "it was used"
    mapped = {"x-tiergate-map": dead.token}
    assert ask(store, "GET", BUCKET, key, headers=mapped).code == "InvalidLease"
    for document in (b"[]", b'{"pins": [["\\ud800", "t1"]]}', b'{"pins": [["x", "\\ud800"]]}'):
        refused = ask(store, "POST", query={"x-tiergate-release": ""}, headers=headers, body=document)
        assert refused.code == "InvalidArgument", document
    alive.release()


def leases_of(room: slabs.Room) -> Path:
    return Path(room.share.memory.leases)


WRITER = """
import os, sys
from tiergate_adapters.place import Place
from tiergate_adapters.store import Store
store = Store(Place(sys.argv[1], sys.argv[2]))
for name in "done", "open":
    writer = store.create(name)
    writer.write(os.urandom(20 << 20))
    if name == "done":
        writer.close()
reader = store.open("done")
assert len(reader.range(0, reader.size_bytes)) == 20 << 20
print("ready", flush=True)
sys.stdin.read()
"""


def child(code: str, *words: str) -> "subprocess.Popen[str]":
    environment = dict(os.environ) | {"PYTHONPATH": os.pathsep.join(sys.path)}
    found = subprocess.Popen(
        [sys.executable, "-c", code, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )
    assert found.stdout is not None
    assert found.stdout.readline() == "ready\n"
    return found


@pytest.mark.semantics("P11.8")
def test_memory_of_a_killed_process_is_given_back(node: RunningNode, store: Store) -> None:
    before = calm(node)
    with child(WRITER, BUCKET, store.place.prefix) as writer:
        held = figures(node)
        assert held["receiving_bytes"] > before["receiving_bytes"]
        assert held["pinned_bytes"] >= 20 * MIB
        writer.kill()
    node.client().delete_object(Bucket=BUCKET, Key=store.place.key("done"))
    for upload in node.client().list_multipart_uploads(Bucket=BUCKET).get("Uploads", ()):
        node.client().abort_multipart_upload(Bucket=BUCKET, Key=upload["Key"], UploadId=upload["UploadId"])
    node.wait_settled()
    node.wait_until("it is all given back", lambda: figures(node) == before)
    assert store.names() == []


def test_death_of_the_worker_before_a_body_is_taken_loses_nothing(node: RunningNode, store: Store) -> None:
    data = os.urandom(21 * MIB)
    with store.create("x") as writer:
        writer.write(data)
        for worker in range(2):
            node.kill9("worker", worker)
    assert body_of(node.client(), BUCKET, store.place.key("x")) == data
    node.wait_until("it is let go of", lambda: figures(node)["receiving_bytes"] == 0)


def test_restart_of_the_node_in_the_middle_changes_nothing(node: RunningNode, store: Store) -> None:
    data = os.urandom(25 * MIB)
    with store.create("x") as writer:
        writer.write(data[: 20 * MIB])
        node.kill9()
        node.start()
        writer.write(data[20 * MIB :])
    assert body_of(node.client(), BUCKET, store.place.key("x")) == data


@pytest.mark.parametrize("name", ["a b+c/ü%41&=?#.distcp", "..//.", "~*'()"])
def test_names_of_any_kind(node: RunningNode, store: Store, name: str) -> None:
    data = os.urandom(2 * MIB)
    written(store, name, data)
    assert body_of(node.client(), BUCKET, store.place.key(name)) == data
    with store.open(name) as reader:
        assert bytes(reader.range(5, MIB + 7)) == data[5 : MIB + 7]
    assert store.names() == [name]


def test_length_said_wrong_is_no_error(node: RunningNode, store: Store) -> None:
    data = os.urandom(21 * MIB + 5)
    written(store, "longer", data, size_bytes=3 * MIB)
    written(store, "shorter", data[: 2 * MIB], size_bytes=9 * MIB)
    assert body_of(node.client(), BUCKET, store.place.key("longer")) == data
    assert body_of(node.client(), BUCKET, store.place.key("shorter")) == data[: 2 * MIB]


def test_no_room_is_no_error(node: RunningNode, store: Store, caplog: pytest.LogCaptureFixture) -> None:
    held = []
    while True:
        share = store.route.share()
        assert share is not None
        query, headers = {"x-tiergate-grant": "", "size": str(16 * MIB)}, {"x-tiergate-lease": share.token}
        reply = ask(store, "POST", BUCKET, "held", query=query, headers=headers)
        if not reply.is_done:
            break
        held.append([reply.document()["grant"], "grant"])
    assert (reply.status, reply.code) == (503, "SlowDown")
    data = os.urandom(9 * MIB)
    written(store, "x", data)
    written(store, "y", data)
    assert body_of(node.client(), BUCKET, store.place.key("x")) == data
    assert [each.getMessage() for each in caplog.records if "no room" in each.getMessage()] == [
        "the node gives no room in its memory (SlowDown), bytes are sent to it"
    ], "said once"
    body = json.dumps({"pins": held}).encode()
    released = ask(store, "POST", query={"x-tiergate-release": ""}, headers=headers, body=body)
    assert released.document() == {"released": len(held)}
    assert figures(node)["receiving_bytes"] == 0


def denied(*_: object, **__: object) -> None:
    raise PermissionError("no")


def test_who_may_not_look_sends_bytes(
    node: RunningNode, store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(slabs, "SlabFile", denied)
    data = os.urandom(5 * MIB)
    written(store, "x", data)
    assert body_of(node.client(), BUCKET, store.place.key("x")) == data
    with store.open("x") as reader:
        assert bytes(reader.range(3, 4 * MIB)) == data[3 : 4 * MIB]
    assert "cannot be shared" in caplog.text


def test_versioned_bucket_is_written_through_from_memory(origin: MotoOrigin, node: RunningNode, store: Store) -> None:
    direct, bucket = origin.client(), "store-versioned"
    direct.create_bucket(Bucket=bucket)
    direct.put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": "Enabled"})
    data = os.urandom(9 * MIB)
    versioned = store.at(Place(bucket, ""))
    (before,) = moved(node, "memory_grants_total")
    assert written(versioned, "x", data).ack == "origin"
    assert moved(node, "memory_grants_total") == [before + 1]
    assert body_of(direct, bucket, "x") == data
    assert len(direct.list_object_versions(Bucket=bucket)["Versions"]) == 1
    direct.close()
    node.wait_until("it is let go of", lambda: figures(node)["receiving_bytes"] == 0)


def write_one(store: Store, name: str) -> str:
    """In another process: its lease, once it wrote an object."""
    written(store, name, name.encode() * MIB)
    share = store.route.share()
    assert share is not None
    return share.token


@pytest.mark.parametrize("how", ["fork", "spawn"])
def test_store_goes_with_its_process(node: RunningNode, store: Store, how: str) -> None:
    token = write_one(store, "here")
    share = store.route.share()
    context: Any = multiprocessing.get_context(how)
    if how == "fork":
        receiving, sending = context.Pipe(duplex=False)
        process = context.Process(target=lambda: sending.send(write_one(store, "there")))
        process.start()
        other = receiving.recv()
        process.join()
        assert process.exitcode == 0
    else:
        with context.Pool(1) as pool:
            other = pool.apply(write_one, (pickle.loads(pickle.dumps(store)), "there"))
    assert other != token
    assert share is not None
    leases = Path(share.memory.leases)
    assert not ProcessLease.is_alive(leases, other)
    assert ProcessLease.is_alive(leases, token)
    assert body_of(node.client(), BUCKET, store.place.key("there")) == b"there" * MIB
    written(store, "again", b"x" * 5 * MIB)
    assert store.names() == ["again", "here", "there"]


def test_threads_share_a_store(node: RunningNode, store: Store) -> None:
    data = {f"x{index}": os.urandom(2 * MIB + index) for index in range(6)}
    with ThreadPoolExecutor(3) as pool:
        for done in [pool.submit(written, store, name, body) for name, body in data.items()]:
            done.result()
        readers = {name: pool.submit(store.open, name) for name in data}
        for name, reader in readers.items():
            with reader.result() as opened:
                assert bytes(opened.range(0, opened.size_bytes)) == data[name]
    assert store.names() == sorted(data)


def impatient(store: Store, **more: Any) -> Store:
    """One that gives up soon."""
    route = Route(persist=None, attempts_count=2)
    route.look()
    return Store(store.place, route=route, **more)


@pytest.mark.semantics("P12.8")
def test_gateway_gone_in_the_middle_writes_go_to_s3_and_reads_say_so(
    origin: MotoOrigin, node: RunningNode, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    hasty, trusting = impatient(store), impatient(store, trust=["s3"])
    data = os.urandom(21 * MIB)
    small = os.urandom(MIB // 2)
    written(hasty, "before", small)
    node.wait_settled()
    writer = hasty.create("middle")
    writer.write(data)
    started = hasty.create("started")
    started.write(data[: 2 * MIB])
    reader = hasty.open("before")
    node.kill9()
    try:
        writer.close()
        assert writer.ack == ""
        started.close()
        written(hasty, "after", small)
        direct = origin.client()
        assert body_of(direct, BUCKET, store.place.key("middle")) == data
        assert body_of(direct, BUCKET, store.place.key("started")) == data[: 2 * MIB]
        assert body_of(direct, BUCKET, store.place.key("after")) == small
        direct.close()
        for read in (
            lambda: hasty.open("after"),
            lambda: hasty.open("never"),
            lambda: hasty.size("never"),
            hasty.names,
            lambda: reader.range(0, 5),
        ):
            with pytest.raises(
                UnreachableError, match=r"the gateway does not answer .*S3 lacks what is not written back"
            ):
                read()
        with pytest.raises(UnreachableError):
            hasty.delete(["after"])
        assert trusting.size("never") is None
        assert trusting.names() == ["after", "before", "middle", "started"]
        with trusting.open("middle") as trusted:
            assert bytes(trusted.range(5, len(data))) == data[5:]
    finally:
        node.start()
    said = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert len([each for each in said if "writes go to S3 itself" in each]) == 1
    assert {"used_bytes"} <= figures(node).keys()


@pytest.mark.semantics("P4.18")
def test_marker_does_not_go_to_s3_past_a_gateway_that_owes_its_set(
    origin: MotoOrigin, node: RunningNode, store: Store
) -> None:
    def index_of(*names: str) -> bytes:
        return json.dumps({"weight_map": {name: name for name in names}}).encode()

    shards, marker = ["model-1.safetensors", "model-2.safetensors"], "model.safetensors.index.json"
    torn, other, whole = (store.at(store.place.below(name)) for name in ("torn", "other", "whole"))
    hasty = impatient(torn)
    node.freeze("background")
    for name in shards:
        written(hasty, name, os.urandom(MIB))
    node.kill9()
    try:
        with pytest.raises(UnreachableError, match=r"S3 lacks .*model-1\.safetensors of its set"):
            written(hasty, marker, index_of(*shards))
        elsewhere = Store(other.place, route=hasty.route)
        written(elsewhere, shards[0], os.urandom(MIB))
        with pytest.raises(UnreachableError, match=r"S3 lacks .*model-2\.safetensors of its set"):
            written(elsewhere, marker, index_of(*shards))
        finished = Store(whole.place, route=hasty.route)
        for name in shards:
            written(finished, name, os.urandom(MIB))
        written(finished, marker, index_of(*shards))
        direct = origin.client()
        assert keys_of(direct, BUCKET, whole.place.prefix) == sorted(
            whole.place.key(name) for name in (*shards, marker)
        )
        assert keys_of(direct, BUCKET, torn.place.prefix) == []
        assert keys_of(direct, BUCKET, other.place.prefix) == [other.place.key(shards[0])]
        direct.close()
    finally:
        node.start()


def test_s3_itself_needs_no_gateway(origin: MotoOrigin, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", origin.endpoint)
    plain = Store(store.place)
    data = os.urandom(3 * MIB)
    assert written(plain, "x", data).ack == ""
    with plain.open("x") as reader:
        assert reader.readall() == data
    assert plain.route.node is None
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    away = Store(store.place, route=Route(attempts_count=1))
    with pytest.raises(UnreachableError, match="no other gateway is known, TIERGATE_ENDPOINTS may name some"):
        written(away, "x", data)
    with pytest.raises(UnreachableError, match=r"does not answer .*TIERGATE_ENDPOINTS may name some"):
        away.size("x")
    told = Store(store.place, route=Route(origin=origin.endpoint, attempts_count=1))
    written(told, "y", data)
    assert plain.names() == ["x", "y"]


def test_other_gateways_are_named_by_the_environment(
    node: RunningNode, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("TIERGATE_ENDPOINTS", f"http://127.0.0.1:19, {node.endpoint}/")
    data = os.urandom(6 * MIB)
    there = pickle.loads(pickle.dumps(Store(store.place, route=Route(attempts_count=1))))
    lost = Store(store.place, route=Route(endpoints=("http://127.0.0.1:19",), attempts_count=1))
    with pytest.raises(UnreachableError, match=r"127\.0\.0\.1:19 does not answer") as nobody:
        lost.size("x")
    assert "TIERGATE_ENDPOINTS" not in str(nobody.value)
    monkeypatch.delenv("TIERGATE_ENDPOINTS")
    assert written(there, "x", data).ack == "memory:1"
    with there.open("x") as reader:
        assert bytes(reader.range(1, len(data))) == data[1:]
    assert there.size("never") is None
    there.delete(["x"])
    assert there.names() == []
