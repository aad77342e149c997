"""etcd is slow or away, or loses its leader, all of its members, or its data."""

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest
from botocore.exceptions import ClientError
from tests.cluster.clusters import CLIENT, LONG_LEASE_S, PATIENT_S, Cluster
from tests.cluster.conftest import StartCluster, thorough
from tests.cluster.test_deaths import hold_writes, in_origin, put
from tests.conformance.wire import UNSIGNED, Ask, Bucket, Identity, Wire

from tiergate.testing.journal import status_of, value_of
from tiergate.testing.objects import ACK_HEADER, ack_of, body_of, uploads_of

PART_BYTES = 6 << 20
REFUSED_S = 60.0
TOLD = "etcd was told what this node holds"


def test_leader_dies_under_load(start_cluster: StartCluster) -> None:
    cluster = start_cluster(members_count=3)
    with cluster.training() as trainer:
        cluster.wait_saved(trainer)
        leader = cluster.etcd.leader()
        leader.kill()
        cluster.wait_saved(trainer, 2)
        cluster.etcd.start(leader)
        cluster.wait_saved(trainer)
    assert cluster.journal.failures == []
    cluster.etcd.wait_ready()
    cluster.end()


@thorough
def test_all_members_start_again_under_load(start_cluster: StartCluster) -> None:
    cluster = start_cluster(members_count=3)
    with cluster.training() as trainer:
        cluster.wait_saved(trainer)
        cluster.etcd.restart()
        cluster.wait_saved(trainer)
    assert cluster.journal.failures == []
    cluster.end()


@thorough
def test_frozen_etcd_is_waited_for_or_said(start_cluster: StartCluster) -> None:
    """Longer than a lease: nothing is acknowledged in the dark, and all is as it was afterwards."""
    cluster = start_cluster(flags=("--directory-patience", "2s"))
    put(cluster, "n0", "k", b"before")
    member = cluster.etcd.members[0]
    with cluster.training() as trainer:
        cluster.wait_saved(trainer)
        member.freeze()
        node = cluster.node("n0")
        end_s = cluster.journal.now_s() + cluster.lease_s + 1
        node.wait_until("the lease is over", lambda: cluster.journal.now_s() > end_s)
        member.thaw()
        cluster.wait_saved(trainer)
    assert body_of(cluster.patient("n2"), cluster.bucket, "k") == b"before"
    cluster.end()


@thorough
def test_slow_etcd_costs_time_only(start_cluster: StartCluster) -> None:
    """As far away as another continent: nobody loses a lease, no client gets an error."""
    cluster = start_cluster(etcd_delay_s=0.1, lease_s=LONG_LEASE_S)
    epochs = cluster.epochs
    trainer = cluster.trainer(shard_bytes=(3000, 100_000))
    trainer.train(2)
    assert cluster.journal.failures == []
    assert cluster.epochs == epochs
    cluster.end()


def refused(call: Callable[..., Any], **params: Any) -> None:
    """A call ends so that S3's clients know to try it again."""
    with pytest.raises(ClientError) as raised:
        call(**params)
    assert status_of(raised.value) == 503
    has_body = raised.value.operation_name != "HeadObject"
    assert raised.value.response["Error"]["Code"] == ("SlowDown" if has_body else "503")
    assert "retry-after" in raised.value.response["ResponseMetadata"]["HTTPHeaders"]


def test_etcd_is_away_for_all(start_cluster: StartCluster) -> None:
    """Somebody may have written anything meanwhile, for all they know: so nodes show nothing, take nothing, and make
    nothing visible in the origin, but under a prefix whose keys are written once."""
    cluster = start_cluster(flags=("--directory-patience", "1s"), prefix="immutable = true, fence = 'off'")
    put(cluster, "n0", "k", b"first")
    put(cluster, "n0", "once/a", b"a")
    cluster.node("n0").wait_settled()
    assert body_of(cluster.patient("n1"), cluster.bucket, "once/a") == b"a"
    shown = identity_of(cluster.patient("n1").head_object(Bucket=cluster.bucket, Key="once/a"))
    cluster.cut_from_origin(*cluster.nodes)
    put(cluster, "n0", "k", b"second")
    cluster.cut_from_etcd(*cluster.nodes)
    for name in cluster.nodes:
        cluster.wait_gone(name)
    cluster.standing.network.heal(cluster.standing.proxy_host)

    with ThreadPoolExecutor() as pool:
        for name in cluster.nodes:
            client, bucket = cluster.client(name), cluster.bucket
            calls = [
                partial(client.get_object, Key="k"),
                partial(client.head_object, Key="k"),
                partial(client.put_object, Key="k", Body=b"third"),
                # Of keys that the origin lacks, somebody's memory may hold some.
                *(partial(read, Key="once/not") for read in (client.get_object, client.head_object)),
                *(partial(client.list_objects_v2, Prefix=prefix) for prefix in ("", "once/")),
            ]
            list(pool.map(lambda call, bucket=bucket: refused(call, Bucket=bucket), calls))
            # n2 was not asked for it before: it is the origin's to say.
            got = client.get_object(Bucket=bucket, Key="once/a")
            assert identity_of(client.head_object(Bucket=bucket, Key="once/a")) == identity_of(got) == shown
            assert got["Body"].read() == b"a"
            answer = put(cluster, name, f"once/{name}", b"new")
            assert answer["ResponseMetadata"]["HTTPHeaders"][ACK_HEADER] == "origin"
            with pytest.raises(ClientError, match="PreconditionFailed"):
                client.put_object(Bucket=bucket, Key=f"once/{name}", Body=b"again")
    assert in_origin(cluster, "k") == b"first"

    cluster.standing.network.heal()
    one = cluster.node("n0")
    one.wait_until("all are back", lambda: all(cluster.is_member(name) for name in cluster.nodes))
    assert body_of(cluster.patient("n2"), cluster.bucket, "k") == b"second"
    assert identity_of(cluster.patient("n2").head_object(Bucket=cluster.bucket, Key="once/a")) == shown
    cluster.end()


def identity_of(answer: dict[str, Any]) -> dict[str, Any]:
    """What an object is known by, as GET and HEAD show it."""
    return {name: answer[name] for name in ("ETag", "LastModified", "ContentLength", "ContentType", "Metadata")}


def test_uploads_go_on_where_they_were_when_etcd_is_back(start_cluster: StartCluster) -> None:
    """What comes meanwhile is refused, and acknowledged when it is tried again; a part whose answer was lost on the
    way leaves nothing behind."""
    cluster = start_cluster(nodes_count=2, flags=("--directory-patience", "1s"), brief=True)
    client, bucket = cluster.client("n0"), cluster.bucket
    uploads = {key: Uploading(cluster, key) for key in ("completed", "aborted", "late", "left")}
    for upload in uploads.values():
        upload.send_part(client, 1)
    (member,) = cluster.etcd.members
    left = uploads["left"]
    calls = [
        partial(refused, client.create_multipart_upload, Bucket=bucket, Key="new"),
        partial(refused, client.upload_part, **left.named, PartNumber=3, Body=b"third"),
        partial(refused, client.list_parts, **left.named),
        partial(refused, client.complete_multipart_upload, **left.named, MultipartUpload={"Parts": left.parts}),
        partial(refused, client.abort_multipart_upload, **left.named),
    ]
    with ThreadPoolExecutor(len(calls)) as pool, ExitStack() as stack:
        halves = [uploads[key].begin_part(stack, 2) for key in ("late", "left")]
        member.freeze()
        for wire, rest in halves:
            wire.pour(rest)
        asked = [pool.submit(call) for call in calls]
        for wire, _ in halves:
            reply = wire.reply("PUT")
            assert (reply.status, reply.code) == (503, "SlowDown")
        for ask in asked:
            ask.result()
        late = Retrying(cluster, pool, lambda client: uploads["late"].send_part(client, 2))
        completed = Retrying(cluster, pool, uploads["completed"].complete)
        aborted = Retrying(cluster, pool, lambda client: client.abort_multipart_upload(**uploads["aborted"].named))
        for each in (late, completed, aborted):
            each.wait_refused()
        member.thaw()
        for each in (late, completed, aborted):
            each.answer()
    assert ack_of(uploads["late"].complete(cluster.patient("n1"))) == "memory:2"
    for key in ("completed", "late"):
        assert body_of(cluster.patient("n1"), bucket, key) == uploads[key].body
    open_uploads = uploads_of(cluster.patient("n1"), bucket)
    assert open_uploads == [("left", left.named["UploadId"])]
    cluster.end()
    assert in_origin(cluster, "late") == uploads["late"].body


class Uploading:
    """An upload of a client of `n0`."""

    def __init__(self, cluster: Cluster, key: str) -> None:
        self._cluster = cluster
        self.named = {"Bucket": cluster.bucket, "Key": key}
        self.named["UploadId"] = cluster.patient("n0").create_multipart_upload(**self.named)["UploadId"]
        self.parts: list[dict[str, Any]] = []
        self.body = b""

    def send_part(self, client: Any, number: int) -> dict[str, Any]:
        """A part that is acknowledged in memory."""
        data = os.urandom(PART_BYTES + number)
        answer: dict[str, Any] = client.upload_part(**self.named, PartNumber=number, Body=data)
        assert ack_of(answer) == "memory:2"
        self.parts.append({"PartNumber": number, "ETag": answer["ETag"]})
        self.body += data
        return answer

    def begin_part(self, stack: ExitStack, number: int) -> tuple[Wire, bytes]:
        """Another part, of which the node has taken one half when this returns; its connection, and the other half."""
        node, data = self._cluster.node("n0"), os.urandom(PART_BYTES)
        before = node.status()["memory"]["receiving_bytes"]
        identity = Identity(CLIENT["TIERGATE_ACCESS_KEY_ID"], CLIENT["TIERGATE_SECRET_ACCESS_KEY"])
        bucket = Bucket(node, identity, self._cluster.bucket)
        query = f"partNumber={number}&uploadId={self.named['UploadId']}"
        ask = Ask("PUT", bucket.path(self.named["Key"]), query, payload=UNSIGNED, length=len(data))
        wire = stack.enter_context(bucket.wire())
        wire.begin(ask)
        wire.pour(data[: PART_BYTES // 2])
        node.wait_status("the part arrives", lambda status: status["memory"]["receiving_bytes"] > before)
        return wire, data[PART_BYTES // 2 :]

    def complete(self, client: Any) -> dict[str, Any]:
        """An acknowledged completion."""
        key, listed = self.named["Key"], {"Parts": self.parts}
        return self._cluster.journal.write(
            key, value_of(self.body), lambda: client.complete_multipart_upload(**self.named, MultipartUpload=listed)
        )


class Retrying:
    """A request of a client of `n0` that tries again, made in the background."""

    def __init__(self, cluster: Cluster, pool: ThreadPoolExecutor, call: Callable[[Any], dict[str, Any]]) -> None:
        self._refused = threading.Event()
        client = cluster.patient("n0")
        client.meta.events.register("needs-retry.s3", self._note)
        self._answer: Future[dict[str, Any]] = pool.submit(call, client)

    def _note(self, response: tuple[Any, dict[str, Any]] | None = None, **_: object) -> None:
        if response is not None and response[1].get("Error", {}).get("Code") == "SlowDown":
            self._refused.set()

    def wait_refused(self) -> None:
        """Wait until it was refused once."""
        assert self._refused.wait(REFUSED_S), "it is not refused"

    def answer(self) -> dict[str, Any]:
        """What came of it in the end, which was not the first try."""
        answer = self._answer.result()
        assert answer["ResponseMetadata"]["RetryAttempts"] >= 1
        return answer


def test_etcd_goes_back_to_a_copy(start_cluster: StartCluster) -> None:
    """What was written back since is read from the origin; what the origin lacks is in memory still."""
    cluster = start_cluster()
    cluster.trainer().train(1)
    cluster.nodes["n0"].wait_settled()
    copy = cluster.etcd.save()
    gate = hold_writes(cluster)
    trainer = cluster.trainer("n0", run="since")
    trainer.train(1)
    gate.wait_reached()
    cluster.etcd.restore(copy)
    gate.release()
    cluster.standing.proxy.heal()
    cluster.trainer(run="after", may_forget=True).train(1)
    wait_told(cluster)
    cluster.end()


def wait_told(cluster: Cluster) -> None:
    """Until a node has told etcd what it holds, its keys are as the origin has them."""
    for name, node in cluster.nodes.items():
        node.wait_until(f"{name} has told", lambda node=node: TOLD in node.log, PATIENT_S)  # type: ignore[misc]


def test_others_bring_etcd_past_what_a_node_knew_before_it_looks(start_cluster: StartCluster) -> None:
    """Nothing but the node's own rows shows then that etcd went back."""
    cluster = start_cluster(nodes_count=2, copies_count=1)
    put(cluster, "n0", "before", b"before")
    cluster.node("n0").wait_settled()
    cluster.node("n1").kill9()  # It must know nothing of what follows.
    copy = cluster.etcd.save()
    gate = hold_writes(cluster)
    for key in ("before", "since"):
        put(cluster, "n0", key, b"second of " + key.encode())
    gate.wait_reached()
    cluster.node("n0").freeze()
    newest = revision_of(cluster)
    cluster.etcd.restore(copy)
    cluster.node("n1").start()
    count = 0
    while revision_of(cluster) <= newest:
        count += 1
        put(cluster, "n1", f"passing/{count}", b"passing")
    cluster.node("n0").thaw()
    gate.release()
    cluster.standing.proxy.heal()
    cluster.trainer(run="after", may_forget=True).train(1)
    wait_told(cluster)
    cluster.end()


def revision_of(cluster: Cluster) -> int:
    """How far etcd is."""
    revision: int = cluster.etcd.status(cluster.etcd.members[0]).header.revision
    return revision


def test_etcd_starts_empty(start_cluster: StartCluster) -> None:
    cluster = start_cluster()
    cluster.trainer().train(1)
    gate = hold_writes(cluster)
    trainer = cluster.trainer("n0", run="since")
    trainer.train(1)
    gate.wait_reached()
    cluster.etcd.restore(None)
    gate.release()
    cluster.standing.proxy.heal()
    cluster.trainer(run="after", may_forget=True).train(1)
    wait_told(cluster)
    cluster.end()
