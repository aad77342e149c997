"""Promise P4 on the wire: at no instant does the origin show a marker whose set is not whole there."""

import os
import random
from dataclasses import dataclass, field
from typing import Any

import pytest
from tests.nodes import StartNode

from tiergate.testing.completeness import Acked, changes_of, false_completes
from tiergate.testing.faults import FaultyOrigin
from tiergate.testing.node import RunningNode
from tiergate.testing.objects import body_of, is_missing, keys_of
from tiergate.testing.origins import MotoOrigin
from tiergate.testing.rules import Answer, Cut, Gate, Hold, Seen

pytestmark = pytest.mark.parametrize("origin", [MotoOrigin], ids=["moto"], indirect=True)

MARKER = ".metadata"


def is_marker(key: str) -> bool:
    return key.rpartition("/")[2] == MARKER


@dataclass
class Writer:
    """One client that writes one after the other, and remembers what was acknowledged."""

    client: Any
    bucket: str
    acked: list[Acked] = field(default_factory=list)
    data: dict[str, bytes] = field(default_factory=dict)

    def put(self, key: str, data: bytes) -> None:
        answer = self.client.put_object(Bucket=self.bucket, Key=key, Body=data)
        self.acked.append(Acked(key, answer["ETag"].strip('"')))
        self.data[key] = data

    def copy(self, source: str, key: str) -> None:
        answer = self.client.copy_object(Bucket=self.bucket, Key=key, CopySource={"Bucket": self.bucket, "Key": source})
        self.acked.append(Acked(key, answer["CopyObjectResult"]["ETag"].strip('"')))
        self.data[key] = self.data[source]

    def delete(self, key: str) -> None:
        self.client.delete_object(Bucket=self.bucket, Key=key)
        self.acked.append(Acked(key, ""))
        self.data.pop(key, None)

    def save(self, prefix: str, shards: int = 4, size: int = 300_000) -> None:
        """As stock DCP does: shards, then the marker by a rename, which is a copy and a deletion."""
        for index in range(shards):
            self.put(f"{prefix}__{index}_0.distcp", os.urandom(size))
        self.put(f"{prefix}.metadata.tmp", os.urandom(2000))
        self.copy(f"{prefix}.metadata.tmp", f"{prefix}{MARKER}")
        self.delete(f"{prefix}.metadata.tmp")


@pytest.fixture
def writer(s3: Any, bucket: str) -> Writer:
    return Writer(s3, bucket)


def check_whole(proxy: FaultyOrigin, writer: Writer, direct: Any) -> None:
    """The origin never showed a false marker, and ends with what was acknowledged."""
    assert false_completes(proxy.requests, writer.bucket, writer.acked, is_marker) == []
    assert keys_of(direct, writer.bucket) == sorted(writer.data)
    for key, data in writer.data.items():
        assert body_of(direct, writer.bucket, key) == data, key


def order_of(proxy: FaultyOrigin, bucket: str) -> list[str]:
    return [("" if each.etag else "-") + each.key for each in changes_of(proxy.requests, bucket)]


@pytest.mark.semantics("P4.1")
def test_stock_dcp_save_sends_marker_after_all_shards(
    node: RunningNode, writer: Writer, proxy: FaultyOrigin, direct: Any
) -> None:
    writer.save("step-1/")
    node.wait_settled()

    check_whole(proxy, writer, direct)
    sent = order_of(proxy, writer.bucket)
    assert sent.index(f"step-1/{MARKER}") > max(sent.index(f"step-1/__{index}_0.distcp") for index in range(4))


def test_stock_dcp_save_into_fresh_prefix_needs_no_quiet_time(
    start_node: StartNode, proxy: FaultyOrigin, direct: Any, bucket: str
) -> None:
    # The rename of .metadata.tmp deletes its source after the marker is committed. Nothing was replaced, so neither
    # is the marker withdrawn nor does it wait for quiet, which here would never come.
    own = start_node("--marker-quiet", "1h")
    writer = Writer(own.client(), bucket)
    writer.save("step-1/")
    own.wait_settled()

    check_whole(proxy, writer, direct)
    assert f"-step-1/{MARKER}" not in order_of(proxy, bucket)


@pytest.mark.semantics("P4.1")
def test_held_shard_keeps_marker_back_until_it_lands(
    node: RunningNode, writer: Writer, proxy: FaultyOrigin, direct: Any
) -> None:
    gate = Gate()
    held = "step-1/__2_0.distcp"
    proxy.inject(Hold(gate), operation="PutObject", key=held)
    writer.save("step-1/")
    gate.wait_reached()
    # Everything but the shard and the marker is through; what is left waits for the shard and says so.
    status = node.wait_status(
        "two are left", lambda status: status["writeback"]["pending"] == 2 and status["writeback"]["fenced"]
    )
    (fenced,) = status["writeback"]["fenced"]
    assert fenced["uri"].endswith(f"/step-1/{MARKER}")
    assert held in fenced["waits"]
    # Whoever asks the gateway sees the set whole all the while.
    assert body_of(writer.client, writer.bucket, f"step-1/{MARKER}") == writer.data[f"step-1/{MARKER}"]
    # Another set is not held up: its marker passing proves that the uploader went on meanwhile.
    writer.save("step-2/")
    proxy.wait_finished("PutObject", f"step-2/{MARKER}")
    assert is_missing(direct, writer.bucket, f"step-1/{MARKER}")

    gate.release()
    node.wait_settled()
    check_whole(proxy, writer, direct)


@pytest.mark.parametrize(
    "fault",
    [Answer(500, "InternalError"), Cut(after_origin=True), Answer(503, "SlowDown", after_origin=True)],
    ids=["refused", "answer lost", "done but refused"],
)
@pytest.mark.semantics("P4.5")
def test_shard_that_fails_at_first_is_waited_for(
    node: RunningNode, writer: Writer, proxy: FaultyOrigin, direct: Any, fault: Answer | Cut
) -> None:
    proxy.inject(fault, operation="PutObject", key="s/__1_0.distcp", times=5)
    writer.save("s/")
    node.wait_settled()
    check_whole(proxy, writer, direct)


def test_multipart_shard_is_visible_before_marker(
    node: RunningNode, writer: Writer, proxy: FaultyOrigin, direct: Any
) -> None:
    key = "s/__0_0.distcp"
    upload_id = writer.client.create_multipart_upload(Bucket=writer.bucket, Key=key)["UploadId"]
    parts = [os.urandom(5 << 20), os.urandom(100_000)]
    etags = [
        writer.client.upload_part(Bucket=writer.bucket, Key=key, UploadId=upload_id, PartNumber=number, Body=data)[
            "ETag"
        ]
        for number, data in enumerate(parts, 1)
    ]
    listed = [{"PartNumber": number, "ETag": etag} for number, etag in enumerate(etags, 1)]
    done = writer.client.complete_multipart_upload(
        Bucket=writer.bucket, Key=key, UploadId=upload_id, MultipartUpload={"Parts": listed}
    )
    writer.acked.append(Acked(key, done["ETag"].strip('"')))
    writer.data[key] = b"".join(parts)
    gate = Gate()
    proxy.inject(Hold(gate), operation="CompleteMultipartUpload", key=key)
    writer.put(f"s/{MARKER}", b"marker")
    gate.wait_reached()
    node.wait_status("the marker waits", lambda status: status["writeback"]["fenced"])
    assert is_missing(direct, writer.bucket, f"s/{MARKER}")

    gate.release()
    node.wait_settled()
    check_whole(proxy, writer, direct)


@pytest.mark.semantics("P4.2")
def test_overwriting_a_committed_set_withdraws_marker_first_and_puts_it_back(
    node: RunningNode, writer: Writer, proxy: FaultyOrigin, direct: Any
) -> None:
    writer.save("latest/")
    node.wait_settled()
    first = len(order_of(proxy, writer.bucket))
    gate = Gate()
    proxy.inject(Hold(gate), operation="PutObject", key="latest/__0_0.distcp")
    writer.save("latest/")
    gate.wait_reached()
    assert is_missing(direct, writer.bucket, f"latest/{MARKER}")
    assert body_of(writer.client, writer.bucket, f"latest/{MARKER}")

    gate.release()
    node.wait_settled()

    check_whole(proxy, writer, direct)
    sent = order_of(proxy, writer.bucket)[first:]
    shards = [f"latest/__{index}_0.distcp" for index in range(4)]
    assert sent.index(f"-latest/{MARKER}") < min(sent.index(shard) for shard in shards)
    assert sent.index(f"latest/{MARKER}") > max(sent.index(shard) for shard in shards)


@pytest.mark.semantics("P4.3")
def test_overwriting_one_shard_only_brings_marker_back_once_quiet(
    node: RunningNode, writer: Writer, proxy: FaultyOrigin, direct: Any
) -> None:
    writer.save("latest/")
    node.wait_settled()
    first = len(order_of(proxy, writer.bucket))
    marker = writer.client.head_object(Bucket=writer.bucket, Key=f"latest/{MARKER}")
    writer.put("latest/__3_0.distcp", os.urandom(1000))
    node.wait_settled()

    check_whole(proxy, writer, direct)
    assert order_of(proxy, writer.bucket)[first:] == [
        f"-latest/{MARKER}",
        "latest/__3_0.distcp",
        f"latest/{MARKER}",
    ]
    again = writer.client.head_object(Bucket=writer.bucket, Key=f"latest/{MARKER}")
    assert (again["ETag"], again["LastModified"]) == (marker["ETag"], marker["LastModified"])


def test_overwrite_waits_while_marker_cannot_be_withdrawn(
    node: RunningNode, writer: Writer, proxy: FaultyOrigin, direct: Any
) -> None:
    writer.save("latest/")
    node.wait_settled()
    proxy.inject(Answer(503, "SlowDown"), operation="DeleteObject", key=f"latest/{MARKER}", times=4)
    writer.save("latest/")
    node.wait_settled()
    check_whole(proxy, writer, direct)


def test_marker_that_the_origin_copied_or_took_for_us_is_withdrawn_too(
    start_node: StartNode, writer: Writer, proxy: FaultyOrigin
) -> None:
    node = start_node("--marker-quiet", "0.3s")
    writer.client = node.client()
    for _ in range(2):  # The second looks for markers that somebody put into the origin, and finds none yet.
        writer.put("run/shard", os.urandom(1000))
        node.wait_settled()
    marker = os.urandom(100)
    # What grants access is the origin's to do, so the whole request is.
    answer = writer.client.put_object(Bucket=writer.bucket, Key=f"run/{MARKER}", Body=marker, ACL="private")
    assert answer["ResponseMetadata"]["HTTPHeaders"]["x-tiergate-ack"] == "origin"
    proxy.forget()
    writer.put("run/shard", os.urandom(1000))
    node.wait_settled()
    assert order_of(proxy, writer.bucket) == [f"-run/{MARKER}", "run/shard", f"run/{MARKER}"]


def test_marker_replaced_on_a_condition_while_it_is_withdrawn(
    start_node: StartNode, writer: Writer, proxy: FaultyOrigin, direct: Any
) -> None:
    node = start_node("--marker-quiet", "0.3s")
    writer.client = client = node.client()
    writer.put("run/shard", os.urandom(1000))
    etag = client.put_object(Bucket=writer.bucket, Key=f"run/{MARKER}", Body=b"first")["ETag"]
    node.wait_settled()
    gate = Gate()
    proxy.inject(Hold(gate), operation="DeleteObject")
    writer.put("run/shard", os.urandom(1000))
    gate.wait_reached()
    client.put_object(Bucket=writer.bucket, Key=f"run/{MARKER}", Body=b"second", IfMatch=etag)
    # Once it is gone and put back, nobody hears of that.
    proxy.inject(Answer(500, "InternalError", after_origin=True), operation="PutObject", key=f"run/{MARKER}")
    gate.release()
    status = node.wait_settled()
    assert status["writeback"]["quarantined"] == []
    assert body_of(direct, writer.bucket, f"run/{MARKER}") == b"second"


@pytest.mark.parametrize("order", ["marker last", "marker first", "by DeleteObjects"])
@pytest.mark.semantics("P4.4")
def test_deleting_a_set_takes_marker_first_in_whatever_order(
    node: RunningNode, writer: Writer, proxy: FaultyOrigin, direct: Any, order: str
) -> None:
    writer.save("old/")
    node.wait_settled()
    first = len(order_of(proxy, writer.bucket))
    keys = sorted(writer.data, key=is_marker, reverse=order == "marker first")
    if order == "by DeleteObjects":
        objects = [{"Key": key} for key in keys]
        assert "Errors" not in writer.client.delete_objects(Bucket=writer.bucket, Delete={"Objects": objects})
        writer.acked += [Acked(key, "") for key in keys]
        writer.data.clear()
    else:
        for key in keys:
            writer.delete(key)
    assert keys_of(writer.client, writer.bucket) == []
    node.wait_settled()

    check_whole(proxy, writer, direct)
    assert order_of(proxy, writer.bucket)[first] == f"-old/{MARKER}"


@pytest.mark.semantics("P4.6")
def test_delete_cancels_an_upload_not_begun(
    node: RunningNode, writer: Writer, proxy: FaultyOrigin, direct: Any
) -> None:
    gate = Gate()
    proxy.inject(Hold(gate), operation="PutObject", key="s/__0_0.distcp")
    writer.save("s/", shards=2)
    gate.wait_reached()
    node.wait_status("the marker waits", lambda status: status["writeback"]["pending"] == 2)
    writer.delete(f"s/{MARKER}")

    gate.release()
    node.wait_settled()

    check_whole(proxy, writer, direct)
    assert f"s/{MARKER}" not in order_of(proxy, writer.bucket)


def test_random_saves_overwrites_and_deletes_under_faults_keep_the_promise(
    node: RunningNode, writer: Writer, proxy: FaultyOrigin, direct: Any
) -> None:
    chance = random.Random(f"fence {os.environ.get('TIERGATE_TEST_SEED', '1')}")

    def unlucky(seen: Seen) -> bool:
        return seen.operation in ("PutObject", "DeleteObject", "HeadObject") and chance.random() < 0.2

    # Only requests of the time after the acknowledgements; their number is bounded, so the end comes.
    proxy.inject(Answer(500, "InternalError"), where=unlucky, times=25)
    proxy.inject(Cut(after_origin=True), where=unlucky, times=25)
    for _ in range(12):
        prefix = chance.choice(["a/", "b/", "a/deep/"])
        what = chance.random()
        if what < 0.6:
            writer.save(prefix, shards=3, size=chance.randrange(1, 50_000))
        elif what < 0.8:
            writer.put(f"{prefix}__1_0.distcp", chance.randbytes(1000))
        else:
            for key in [key for key in writer.data if key.startswith(prefix)]:
                writer.delete(key)
    node.wait_settled()
    check_whole(proxy, writer, direct)
