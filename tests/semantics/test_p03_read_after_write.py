"""P3 Read-after-write."""

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tests.nodes import StartNode
from tests.semantics.conftest import SMALL

from tiergate.testing.faults import FaultyOrigin
from tiergate.testing.node import RunningNode
from tiergate.testing.objects import body_of, is_missing, keys_of, listed, refusal
from tiergate.testing.rules import Gate, Hold

MIB = 1 << 20


def evict(node: RunningNode, client: Any, bucket: str, key: str) -> None:
    """Push a clean object out of the memory of a small node."""
    for index in range(8):
        client.put_object(Bucket=bucket, Key=f"filler/{index}", Body=os.urandom(8 * MIB))
        node.wait_settled()
    head = client.head_object(Bucket=bucket, Key=key)
    assert head["ResponseMetadata"]["HTTPHeaders"]["x-tiergate-tier"] == "origin"


@pytest.mark.semantics("P3.1")
def test_every_process_shows_each_acknowledged_change(start_node: StartNode, bucket: str) -> None:
    node = start_node(workers=3)
    clients = [node.client() for _ in range(12)]
    for round_, writer in enumerate(clients):
        data = f"{round_}".encode()
        writer.put_object(Bucket=bucket, Key="k", Body=data)
        for reader in clients:
            assert body_of(reader, bucket, "k") == data
            assert reader.head_object(Bucket=bucket, Key="k")["ContentLength"] == len(data)
            assert [(key, size) for key, size, _ in listed(reader, bucket)] == [("k", len(data))]
        writer.delete_object(Bucket=bucket, Key="k")
        for reader in clients:
            assert is_missing(reader, bucket, "k")
            assert keys_of(reader, bucket) == []


@pytest.mark.semantics("P3.2", "P6.2")
def test_object_is_there_and_the_same_through_write_back_and_eviction(
    start_node: StartNode, proxy: FaultyOrigin, bucket: str
) -> None:
    node = start_node(memory_limit=SMALL)
    client = node.client()
    gate = Gate()
    proxy.inject(Hold(gate), operation="PutObject", key="k")
    data = os.urandom(6 * MIB)
    client.put_object(Bucket=bucket, Key="k", Body=data, ContentType="a/b", Metadata={"step": "7"})
    shown = []

    def look() -> None:
        head = client.head_object(Bucket=bucket, Key="k")
        shown.append([head[name] for name in ("ETag", "LastModified", "ContentLength", "ContentType", "Metadata")])
        assert body_of(client, bucket, "k") == data
        assert [row for row in listed(client, bucket) if row[0] == "k"] == [("k", len(data), head["ETag"])]

    gate.wait_reached()
    look()
    gate.release()
    node.wait_settled()
    look()
    evict(node, client, bucket, "k")
    look()
    assert shown == [shown[0]] * 3


@pytest.mark.semantics("P3.3")
@pytest.mark.parametrize("page", [1, 2, 3, 1000])
def test_listing_merges_both_into_exact_pages(
    node: RunningNode, s3: Any, direct: Any, proxy: FaultyOrigin, bucket: str, page: int
) -> None:
    there = ["a", "b/1", "b/2", "d/1", "f", "ü/1"]
    for key in there:
        direct.put_object(Bucket=bucket, Key=key, Body=b"there")
    gate = Gate()
    proxy.inject(Hold(gate), method="PUT", where=lambda seen: seen.bucket == bucket, times=None)
    proxy.inject(Hold(gate), method="DELETE", where=lambda seen: seen.bucket == bucket, times=None)
    for key in ("a0", "b/15", "c/1", "f", "z"):
        s3.put_object(Bucket=bucket, Key=key, Body=b"dirty")
    for key in ("a", "d/1"):
        s3.delete_object(Bucket=bucket, Key=key)
    gate.wait_reached()

    def pages(**options: str) -> list[list[str]]:
        found = s3.get_paginator("list_objects_v2").paginate(
            Bucket=bucket, PaginationConfig={"PageSize": page}, **options
        )
        return [
            sorted(
                [each["Key"] for each in one.get("Contents", [])]
                + [each["Prefix"] for each in one.get("CommonPrefixes", [])]
            )
            for one in found
        ]

    flat = pages()
    rolled = pages(Delimiter="/")
    gate.release()
    node.wait_settled()
    for got, expected in (
        (flat, ["a0", "b/1", "b/15", "b/2", "c/1", "f", "z", "ü/1"]),
        (rolled, ["a0", "b/", "c/", "f", "z", "ü/"]),
    ):
        assert [name for one in got for name in one] == expected
        assert [len(one) for one in got] == [len(expected[at : at + page]) for at in range(0, len(expected), page)]


@pytest.mark.semantics("P3.4")
def test_change_behind_the_gateway_is_seen_once_revalidated(start_node: StartNode, direct: Any, bucket: str) -> None:
    node = start_node("--revalidate", "300ms")
    client = node.client()
    client.put_object(Bucket=bucket, Key="k", Body=b"ours")
    node.wait_settled()
    direct.put_object(Bucket=bucket, Key="k", Body=b"of somebody else")
    node.wait_until("the change", lambda: body_of(client, bucket, "k") == b"of somebody else")
    direct.delete_object(Bucket=bucket, Key="k")
    node.wait_until("the deletion", lambda: is_missing(client, bucket, "k"))


@pytest.mark.semantics("P3.5")
def test_of_concurrent_creations_exactly_one_succeeds(node: RunningNode, bucket: str) -> None:
    clients = [node.client() for _ in range(8)]

    def create(numbered: tuple[int, Any]) -> tuple[int, str] | None:
        number, client = numbered
        return refusal(lambda: client.put_object(Bucket=bucket, Key="k", Body=f"{number}".encode(), IfNoneMatch="*"))

    with ThreadPoolExecutor(len(clients)) as pool:
        refusals = list(pool.map(create, enumerate(clients)))
    assert [found for found in refusals if found is not None] == [(412, "PreconditionFailed")] * 7
    assert body_of(clients[0], bucket, "k") == f"{refusals.index(None)}".encode()
    node.wait_settled()


@pytest.mark.semantics("P3.6")
def test_condition_on_unknown_key_is_decided_on_what_origin_holds(
    node: RunningNode, s3: Any, direct: Any, bucket: str
) -> None:
    etag = direct.put_object(Bucket=bucket, Key="k", Body=b"there")["ETag"]
    put = {"Bucket": bucket, "Key": "k", "Body": b"mine"}
    assert refusal(lambda: s3.put_object(**put, IfNoneMatch="*")) == (412, "PreconditionFailed")
    wrong = '"00000000000000000000000000000000"'
    assert refusal(lambda: s3.put_object(**put, IfMatch=wrong)) == (412, "PreconditionFailed")
    assert refusal(lambda: s3.put_object(**put | {"Key": "none"}, IfMatch=etag)) == (404, "NoSuchKey")
    s3.put_object(**put, IfMatch=etag)
    node.wait_settled()
    assert body_of(direct, bucket, "k") == b"mine"
