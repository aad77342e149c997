"""P9 Bounded loss."""

import os
import tempfile
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import pytest
from botocore.exceptions import ClientError
from tests.nodes import StartNode
from tests.semantics.conftest import SMALL

from tiergate.testing.faults import FaultyOrigin
from tiergate.testing.node import RunningNode, allocated_bytes
from tiergate.testing.objects import ack_of, body_of
from tiergate.testing.rules import Gate, Hold

MIB = 1 << 20
SHM = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
OLDEST = "tiergate_writeback_oldest_pending_seconds"


class Sampled:
    """The most that all files of a folder took up together, looked at again and again in a thread of its own."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        self.most_bytes = 0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._end.wait(0.005):
            self.most_bytes = max(self.most_bytes, allocated_bytes(self.folder))


@pytest.mark.semantics("P9.1", "P9.2")
def test_writers_are_refused_while_the_oldest_pending_write_is_too_old(
    start_node: StartNode, proxy: FaultyOrigin, bucket: str
) -> None:
    node = start_node("--marker-hold", "0s", "--dirty-age-slow", "500ms", "--dirty-age-limit", "1s")
    client = node.client()
    gate = Gate()
    upload = client.create_multipart_upload(Bucket=bucket, Key="parts")["UploadId"]
    parts = {"Bucket": bucket, "Key": "parts", "UploadId": upload}
    etag = client.upload_part(**parts, PartNumber=1, Body=b"part")["ETag"]
    proxy.inject(Hold(gate), operation="PutObject", key="old")
    client.put_object(Bucket=bucket, Key="old", Body=b"data")
    gate.wait_reached()
    node.wait_until("the bound", lambda: node.metric(OLDEST) > 1.0)
    listed = {"Parts": [{"PartNumber": 1, "ETag": etag}]}
    source = {"Bucket": bucket, "Key": "old"}
    writes: list[Callable[[], object]] = [
        lambda: client.put_object(Bucket=bucket, Key="new", Body=b"data"),
        lambda: client.upload_part(**parts, PartNumber=2, Body=b"part"),
        lambda: client.upload_part_copy(**parts, PartNumber=2, CopySource=source),
        lambda: client.copy_object(Bucket=bucket, Key="copy", CopySource=source),
        lambda: client.complete_multipart_upload(**parts, MultipartUpload=listed),
    ]
    for count, write in enumerate(writes, 1):
        with pytest.raises(ClientError) as refused:
            write()
        assert refused.value.response["Error"]["Code"] == "SlowDown"
        answer = refused.value.response["ResponseMetadata"]
        assert (answer["HTTPStatusCode"], int(answer["HTTPHeaders"]["retry-after"]) >= 1) == (503, True)
        assert node.metric("tiergate_writeback_refused_writes_total") == count
    assert body_of(client, bucket, "old") == b"data"

    gate.release()
    node.wait_settled()
    assert node.metric(OLDEST) == 0
    client.put_object(Bucket=bucket, Key="new", Body=b"data")
    client.copy_object(Bucket=bucket, Key="copy", CopySource=source)
    client.complete_multipart_upload(**parts, MultipartUpload=listed)
    node.wait_settled()
    assert body_of(client, bucket, "parts") == b"part"


@pytest.mark.semantics("P9.5")
def test_writers_are_refused_while_too_much_is_owed(start_node: StartNode, proxy: FaultyOrigin, bucket: str) -> None:
    node = start_node("--dirty-size-slow", "600KiB", "--dirty-size-limit", "1MiB")
    client = node.client()
    gate = Gate()
    proxy.inject(Hold(gate), operation="PutObject", where=lambda seen: seen.key.startswith("owed/"), times=None)
    for index in range(2):
        client.put_object(Bucket=bucket, Key=f"owed/{index}", Body=bytes(MIB // 2))
    assert node.metric("tiergate_writeback_owed_bytes") == MIB
    assert node.metric("tiergate_writeback_loss_bound_ratio") == 1
    with pytest.raises(ClientError) as refused:
        client.put_object(Bucket=bucket, Key="owed/more", Body=b"data")
    assert refused.value.response["Error"]["Code"] == "SlowDown"
    answer = refused.value.response["ResponseMetadata"]
    assert (answer["HTTPStatusCode"], int(answer["HTTPHeaders"]["retry-after"]) >= 1) == (503, True)
    client.delete_object(Bucket=bucket, Key="owed/1")
    client.put_object(Bucket=bucket, Key="owed/less", Body=bytes(MIB // 4))
    slowed = node.metric("tiergate_writeback_slowed_writes_total")
    client.put_object(Bucket=bucket, Key="owed/slow", Body=b"data")
    assert (slowed, node.metric("tiergate_writeback_slowed_writes_total")) == (0, 1)
    gate.release()
    node.wait_settled()
    assert node.metric("tiergate_writeback_loss_bound_ratio") == 0
    client.put_object(Bucket=bucket, Key="owed/more", Body=b"data")


@pytest.mark.semantics("P9.6")
def test_status_says_what_the_loss_of_memory_would_cost(
    start_node: StartNode, proxy: FaultyOrigin, bucket: str
) -> None:
    node = start_node()
    client = node.client()
    gate = Gate()
    client.put_object(Bucket=bucket, Key="there", Body=b"data")
    node.wait_settled()
    proxy.inject(Hold(gate), where=lambda seen: seen.operation in ("PutObject", "DeleteObject"), times=None)
    client.put_object(Bucket=bucket, Key="run/1/shard", Body=bytes(1000))
    client.put_object(Bucket=bucket, Key="run/1/.metadata", Body=bytes(10))
    client.put_object(Bucket=bucket, Key="run/2/shard", Body=bytes(2000))
    client.delete_object(Bucket=bucket, Key="there")
    loss = node.status()["loss"]
    assert (loss["checked"], loss["is_all"]) == (4, True)
    assert [(each["place"], each["name"]) for each in loss["places"]] == [("memory", ""), ("node", "this node")]
    for place in loss["places"]:
        assert (place["objects"], place["bytes"], place["deletions"], place["sets"]) == (3, 3010, 1, 1)
        assert place["oldest_age_s"] > 0
    assert node.metric("tiergate_writeback_only_here_bytes") == 3010
    gate.release()
    node.wait_settled()
    assert {(each["objects"], each["oldest_age_s"]) for each in node.status()["loss"]["places"]} == {(0, 0.0)}
    assert node.metric("tiergate_writeback_only_here_bytes") == 0


@pytest.mark.semantics("P9.3")
def test_memory_folder_never_grows_past_its_budget(start_node: StartNode, bucket: str) -> None:
    with ExitStack() as stack:
        sampled = Sampled(stack.enter_context(tempfile.TemporaryDirectory(dir=SHM)))
        node = start_node(memory_limit=SMALL, workers=3, memory_dir=sampled.folder)
        stack.enter_context(sampled)
        client = node.client()
        for index in range(24):
            client.put_object(Bucket=bucket, Key=f"k{index}", Body=os.urandom(3 * MIB + index * 100_000))
        node.wait_settled()
        assert sampled.most_bytes > 30 * MIB, "the folder was never full"
        node.kill9()
        node.restart()
        node.client().put_object(Bucket=bucket, Key="after", Body=os.urandom(3 * MIB))
    assert sampled.most_bytes <= 32 * MIB


@pytest.mark.semantics("P9.4")
def test_dirty_bytes_stay_however_much_is_written_and_read(
    start_node: StartNode, direct: Any, proxy: FaultyOrigin, bucket: str
) -> None:
    node: RunningNode = start_node(memory_limit=SMALL)
    client = node.client()
    gate = Gate()
    proxy.inject(Hold(gate), operation="PutObject", where=lambda seen: seen.key.startswith("dirty/"), times=None)
    dirty = {f"dirty/{index}": os.urandom(4 * MIB) for index in range(3)}
    for key, data in dirty.items():
        assert ack_of(client.put_object(Bucket=bucket, Key=key, Body=data)) == "memory:1"
    gate.wait_reached()
    others = {f"other/{index}": os.urandom(7 * MIB) for index in range(6)}
    for key, data in others.items():
        client.put_object(Bucket=bucket, Key=key, Body=data)
    for key, data in (others | dirty).items():
        assert body_of(client, bucket, key) == data
    gate.release()
    node.wait_settled()
    for key, data in dirty.items():
        assert body_of(direct, bucket, key) == data
