"""Every operation of botocore's model that the gateway does not own, and every member of the owned ones that it does
not carry out: forwarded, the answer is the one the origin gives when asked directly, whatever the node holds.

Each request is sent twice, to the origin for one bucket and through the gateway for its twin.
"""

import base64
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from tests.conformance.gateway import CLIENT
from tests.conformance.modelrequests import (
    VALUES,
    is_left_out,
    is_of_object,
    members_of,
    model_of,
    operation_names,
    request_of,
)
from tests.conformance.sides import Sides
from tests.conformance.wire import Ask, Reply, Wire

from tiergate.engine.owned import OWNED_MEMBERS
from tiergate.origin.stamp import STAMP_HEADER
from tiergate.s3.checksums import block_checksum
from tiergate.testing.origins import Gate, Hold

TWINS = ("twin-a", "twin-b")
BODY = b"a,b\n1,2\n"
PUT_HEADERS = {
    "Content-Type": "text/csv",
    "x-amz-meta-m": "1",
    "x-amz-tagging": "old=1",
    "Cache-Control": "no-cache",
    # What S3 itself computes when the client gives none; moto does not.
    "x-amz-checksum-crc64nvme": base64.b64encode(block_checksum(BODY).to_bytes(8, "big")).decode(),
    "x-amz-sdk-checksum-algorithm": "CRC64NVME",
}

CONNECTION = re.compile(
    r"date|server|connection|transfer-encoding|x-amz-request-id|x-amz-id-2|x-amzn-requestid|access-control-.*|x-tiergate-.*"
)
"""Headers that speak of the connection, name the request, or are of moto's web server."""

UNSTABLE = re.compile(rb"<(RequestId|HostId|LastModified|CreationDate|UploadId|VersionId|AccessKeyId|Expiration)>[^<]*")
UNSTABLE_HEADERS = {
    "last-modified",
    "x-amz-version-id",
    "x-amz-content-sha256",
    "x-amz-sdk-checksum-algorithm",
    "content-md5",
    STAMP_HEADER,
}
"""moto keeps headers of the request with an object and shows them."""

FORWARDED = [name for name in operation_names() if name not in OWNED_MEMBERS]
UPLOADS = {name for name in OWNED_MEMBERS if "UploadId" in members_of(name)}
"""On uploads that are the gateway's own: see test_forwarding_changes."""


@dataclass(frozen=True)
class Case:
    """An operation with its required members and some more."""

    operation: str
    full: bool = False
    members: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "-".join((self.operation, *self.members, *(["full"] if self.full else [])))

    def ask(self, bucket: str, key: str) -> Ask:
        more: dict[str, Any] = {} if self.full or not self.members else member_values(self)
        if self.operation == "CopyObject":
            more |= {"CopySource": f"{bucket}/{key}", "MetadataDirective": "REPLACE"}
        if self.operation == "DeleteObjects":
            more["Delete"] = {"Objects": [{"Key": key}, {"Key": f"{key}.none"}]}
        return request_of(self.operation, bucket, key, full=self.full, **more)


def member_values(case: Case) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for member in case.members:
        child = members_of(case.operation)[member]
        found[member] = (
            VALUES.get(member) or next(iter(child.metadata.get("enum", ())), None) or _plain(child.type_name)
        )
    return found


def _plain(type_name: str) -> Any:
    return {"boolean": True, "integer": 1, "long": 8, "timestamp": VALUES["RetainUntilDate"]}.get(type_name, "text")


def unowned_members() -> Iterator[Case]:
    for operation, owned in OWNED_MEMBERS.items():
        for member in members_of(operation):
            if member not in owned and not is_left_out(member) and operation not in UPLOADS:
                yield Case(operation, members=(member,))


OF_OBJECTS = [name for name in FORWARDED if is_of_object(name)]
MEMBER_CASES = [case for case in unowned_members() if is_of_object(case.operation) or case.operation == "DeleteObjects"]
DIRTY_CASES = [Case(name) for name in OF_OBJECTS] + MEMBER_CASES
SETTLED_CASES = {
    "clean": [Case(name) for name in OF_OBJECTS] + [case for case in MEMBER_CASES if case.members == ("RequestPayer",)],
    "cold": [Case(name, full=True) for name in OF_OBJECTS],
}


@pytest.fixture(scope="module")
def twins(sides: Sides) -> Sides:
    """The sides, with both buckets."""
    for name in TWINS:
        assert sides.direct(Ask("PUT", f"/{name}")).status == 200
    return sides


def put(send: Callable[[Ask], Reply], bucket: str, key: str) -> None:
    reply = send(Ask("PUT", f"/{bucket}/{key}", headers=PUT_HEADERS, body=BODY))
    assert reply.status == 200, str(reply)


@pytest.fixture(scope="module")
def settled(twins: Sides) -> None:
    """An object for each case, written back; the node holds those for the state `clean`, and of others nothing."""
    for state in ("cold", "clean"):
        for case in SETTLED_CASES[state]:
            put(twins.direct, TWINS[0], f"{state}/{case}")
            put(twins.through, TWINS[1], f"{state}/{case}")
        if state == "cold":
            twins.node.restart_cold()
    twins.node.wait_settled()


def told(reply: Reply, bucket: str) -> dict[str, str | int | bytes]:
    """An answer without what differs from one request, or one bucket, to the next."""
    body = UNSTABLE.sub(rb"<\1>", reply.body).replace(bucket.encode(), b"twin-?")
    found: dict[str, str | int | bytes] = {"status": reply.status, "body": body}
    for name, value in reply.headers.items():
        if not CONNECTION.fullmatch(name) and name not in UNSTABLE_HEADERS:
            found[name] = value.replace(bucket, "twin-?")
    if reply.body and "content-length" in found:
        found["content-length"] = len(body)
    return found


def differences(one: dict[str, Any], other: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    return {
        name: (one.get(name), other.get(name)) for name in one.keys() | other.keys() if one.get(name) != other.get(name)
    }


def same_afterwards(sides: Sides, bucket: str, key: str) -> None:
    """A read after the operation shows what the origin holds now."""
    for method in ("HEAD", "GET"):
        ask = Ask(method, f"/{bucket}/{key}")
        through, direct = sides.through(ask), sides.direct(ask)
        assert through.status == direct.status
        if direct.status < 400:
            assert differences(told(through, bucket), told(direct, bucket)) == {}, method


@pytest.mark.usefixtures("settled")
@pytest.mark.parametrize(
    ("state", "case"),
    [pytest.param(state, case, id=f"{state}-{case}") for state, cases in SETTLED_CASES.items() for case in cases],
)
def test_operation_on_a_settled_object(twins: Sides, state: str, case: Case) -> None:
    key = f"{state}/{case}"
    through = told(twins.through(case.ask(TWINS[1], key)), TWINS[1])
    assert differences(through, told(twins.direct(case.ask(TWINS[0], key)), TWINS[0])) == {}
    same_afterwards(twins, TWINS[1], key)


@pytest.mark.parametrize("case", DIRTY_CASES, ids=str)
def test_operation_on_a_dirty_object_is_done_once_that_is_written_back(twins: Sides, case: Case) -> None:
    key, gate = f"dirty/{case}", Gate()
    put(twins.direct, TWINS[0], key)
    twins.proxy.forget()
    twins.proxy.inject(Hold(gate), "PutObject", key)
    put(twins.through, TWINS[1], key)
    gate.wait_reached()
    with Wire(twins.node.endpoint, CLIENT) as wire:
        ask = case.ask(TWINS[1], key)
        wire.send(ask)
        gate.release()
        through = told(wire.reply(ask.method), TWINS[1])
    assert differences(through, told(twins.direct(case.ask(TWINS[0], key)), TWINS[0])) == {}
    (written_back, *_) = twins.proxy.seen("PutObject", key)
    assert written_back.finished_s is not None
    others = [each for each in twins.proxy.requests if each.number != written_back.number]
    before = {each.operation for each in others if each.started_s < written_back.finished_s}
    assert before <= {"HeadBucket", "HeadObject"}, "write-back looks at what it replaces"
    same_afterwards(twins, TWINS[1], key)


def sub_resources() -> dict[str, list[str]]:
    """The forwarded operations on buckets by their sub-resource: reads, then writes, then deletions."""
    found: dict[str, list[str]] = {}
    order = {"GET": 0, "PUT": 1, "POST": 1, "DELETE": 2}
    for name in sorted(FORWARDED, key=lambda name: order[model_of(name).http["method"]]):
        uri = model_of(name).http["requestUri"]
        if "{Bucket}?" in uri:
            found.setdefault(uri.partition("?")[2], []).append(name)
    return found


@pytest.mark.parametrize("full", [False, True], ids=["least", "full"])
@pytest.mark.parametrize("names", [pytest.param(names, id=name) for name, names in sub_resources().items()])
def test_sub_resource_of_a_bucket(twins: Sides, names: list[str], full: bool) -> None:
    """Read, change, read, delete, read."""
    reads = [name for name in names if model_of(name).http["method"] == "GET"]
    changes = [name for name in names if name not in reads]
    steps = reads + [step for name in changes for step in (name, *reads)]
    for bucket in TWINS:
        put(twins.direct, bucket, "sub/o")
    for step in steps:
        case = Case(step, full)
        through = told(twins.through(case.ask(TWINS[1], "sub/o")), TWINS[1])
        assert differences(through, told(twins.direct(case.ask(TWINS[0], "sub/o")), TWINS[0])) == {}, step


UNKNOWN: dict[str, Callable[[str, str], Ask]] = {
    "sub-resource": lambda bucket, key: Ask("GET", f"/{bucket}/{key}", "invented-later="),
    "sub-resource of a bucket": lambda bucket, key: Ask("GET", f"/{bucket}", "invented-later="),
    "parameter": lambda bucket, key: Ask("GET", f"/{bucket}/{key}", "inventedLater=1"),
    "header of a read": lambda bucket, key: Ask("GET", f"/{bucket}/{key}", headers={"x-amz-invented": "1"}),
    "header of a write": lambda bucket, key: Ask("PUT", f"/{bucket}/{key}", headers={"x-amz-invented": "1"}, body=b"w"),
    "checksum of a write": lambda bucket, key: Ask(
        "PUT", f"/{bucket}/{key}", headers={"x-amz-checksum-invented": "aa=="}, body=b"w"
    ),
    "storage class": lambda bucket, key: Ask(
        "PUT", f"/{bucket}/{key}", headers={"x-amz-storage-class": "INVENTED"}, body=b"w"
    ),
    "method on an object": lambda bucket, key: Ask("OPTIONS", f"/{bucket}/{key}"),
    "method on a bucket": lambda bucket, key: Ask("OPTIONS", f"/{bucket}"),
    "POST on an object": lambda bucket, key: Ask("POST", f"/{bucket}/{key}", "invented-later=", body=b"x"),
    "version": lambda bucket, key: Ask("GET", f"/{bucket}/{key}", "versionId=never"),
    "tags of a version": lambda bucket, key: Ask("GET", f"/{bucket}/{key}", "tagging=&versionId=never"),
    "range of a version": lambda bucket, key: Ask("GET", f"/{bucket}/{key}", "versionId=null", {"Range": "bytes=2-3"}),
    "listing with an owner": lambda bucket, key: Ask(
        "GET", f"/{bucket}", f"list-type=2&prefix={key}", {"x-amz-expected-bucket-owner": "123456789012"}
    ),
    "attributes in a listing": lambda bucket, key: Ask(
        "GET", f"/{bucket}", f"list-type=2&prefix={key}", {"x-amz-optional-object-attributes": "RestoreStatus"}
    ),
    "versions": lambda bucket, key: Ask("GET", f"/{bucket}", f"prefix={key}&versions="),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_request_with_something_unknown(twins: Sides, name: str) -> None:
    key = f"unknown/{name.replace(' ', '-')}"
    put(twins.direct, TWINS[0], key)
    put(twins.through, TWINS[1], key)
    through = told(twins.through(UNKNOWN[name](TWINS[1], key)), TWINS[1])
    assert differences(through, told(twins.direct(UNKNOWN[name](TWINS[0], key)), TWINS[0])) == {}
    twins.node.wait_settled()
    same_afterwards(twins, TWINS[1], key)


def test_operations_on_a_locked_object(sides: Sides) -> None:
    """A bucket with object lock is versioned, so its writes go through; all operations on one object in turn."""
    names, key = ("lock-a", "lock-b"), "o"
    for name in names:
        made = sides.direct(Ask("PUT", f"/{name}", headers={"x-amz-bucket-object-lock-enabled": "true"}))
        assert made.status == 200, str(made)
    put(sides.direct, names[0], key)
    put(sides.through, names[1], key)
    for name in OF_OBJECTS:
        case = Case(name)
        through = told(sides.through(case.ask(names[1], key)), names[1])
        assert differences(through, told(sides.direct(case.ask(names[0], key)), names[0])) == {}, name
        same_afterwards(sides, names[1], key)
