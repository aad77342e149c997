"""P14 What stays in memory."""

import json
import os
from collections import Counter
from typing import Any
from urllib.request import Request, urlopen

import pytest
from tests.dcp import dcp_list
from tests.etcds import StartCluster
from tests.nodes import StartNode
from tests.several import memory_ack
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex

from tiergate.child import LEFT_BEHIND_STATUS
from tiergate.testing.etcd import needs_etcd
from tiergate.testing.faults import FaultyOrigin
from tiergate.testing.objects import ack_of, body_of, keys_of
from tiergate.testing.rules import Cut
from tiergate_adapters.metadata import TieredPiece, write_tiered_list

SHARDS = ("__0_0.distcp", "__1_0.distcp")
NAMES = (*SHARDS, ".metadata")
LIST = dcp_list(*SHARDS)
POINTER = "run/checkpoint_manager_snapshot.json"
DROPPED = "tiergate_persistence_dropped_sets_total"


def policy(bucket: str, more: str) -> tuple[str, str]:
    """The flags of a node that has a policy for run/."""
    return "--prefix", f"{{uri = 's3://{bucket}/run/', {more}}}"


def save(client: Any, bucket: str, step: int, **how: Any) -> set[str]:
    """A checkpoint; under which rules its objects were acknowledged."""
    bodies = dict.fromkeys(SHARDS, b"shard") | {".metadata": LIST}
    return {
        ack_of(client.put_object(Bucket=bucket, Key=f"run/step_{step}/{name}", Body=body, **how))
        for name, body in bodies.items()
    }


def steps_of(client: Any, bucket: str) -> set[str]:
    """The sets of which anything is there."""
    return {key.split("/")[1] for key in keys_of(client, bucket, "run/") if key.count("/") == 2}


def snapshot(*steps: int) -> bytes:
    return json.dumps({"checkpoint_results": [{"checkpoint_dir_name": f"step_{step}"} for step in steps]}).encode()


def kept() -> str:
    return f"{memory_ack()}; kept=memory"


def puts(proxy: FaultyOrigin, prefix: str = "run/") -> list[str]:
    """The keys that were put into the origin, in that order."""
    return [seen.key for seen in proxy.seen("PutObject") if seen.key.startswith(prefix)]


@pytest.mark.semantics("P14.1", "P14.2")
def test_every_second_set_goes_to_the_origin_and_all_are_shown(
    start_node: StartNode, direct: Any, proxy: FaultyOrigin, bucket: str
) -> None:
    node = start_node(*policy(bucket, "persist = 'every 2', keep = 9"))
    client = node.client()
    assert [save(client, bucket, step) for step in range(4)] == [{memory_ack()}, {kept()}, {memory_ack()}, {kept()}]
    node.wait_settled()
    assert steps_of(direct, bucket) == {"step_0", "step_2"}
    etags = {key: client.head_object(Bucket=bucket, Key=key)["ETag"] for key in keys_of(client, bucket)}
    assert len(etags) == 12
    status = node.status()["writeback"]
    assert (status["pending"], status["parked"]) == (0, 6)
    assert node.metric("tiergate_writeback_oldest_pending_seconds") == 0.0
    assert node.metric("tiergate_persistence_parked_writes") == 6
    assert node.metric("tiergate_persistence_parked_bytes") == 4 * len(b"shard") + 2 * len(LIST)
    node.kill9()
    node.start()
    assert {key: node.client().head_object(Bucket=bucket, Key=key)["ETag"] for key in etags} == etags
    assert body_of(node.client(), bucket, "run/step_3/.metadata") == LIST
    assert steps_of(direct, bucket) == {"step_0", "step_2"}


@needs_etcd
@pytest.mark.semantics("P14.2")
def test_set_in_memory_outlives_a_node_and_is_promoted_whole(
    start_cluster: StartCluster, direct: Any, bucket: str
) -> None:
    cluster = start_cluster(3, "--lease", "3s", "--restart-grace", "1s", *policy(bucket, "persist = 'none'"))
    a, b, c = (cluster.client(index) for index in range(3))
    data = os.urandom(100_000)
    for client, name in zip((a, b, c), NAMES, strict=True):
        put = client.put_object(Bucket=bucket, Key=f"run/step_1/{name}", Body=data)
        assert ack_of(put) == "memory:2; kept=memory"
    cluster.nodes[0].kill9()
    cluster.nodes[0].wipe()
    for client in (b, c):
        assert steps_of(client, bucket) == {"step_1"}
        for name in NAMES:
            assert body_of(client, bucket, f"run/step_1/{name}") == data
    others = cluster.nodes[1:]

    def is_claimed() -> bool:
        counts: list[int] = [node.status()["writeback"].get("parked", 0) for node in others]
        return sum(counts) == 3

    others[0].wait_until("survivors answer for all of it", is_claimed)
    assert keys_of(direct, bucket) == []
    assert others[0].promote(bucket, "run/") == 3
    others[0].wait_until("all is in the origin", lambda: len(keys_of(direct, bucket)) == 3)
    assert body_of(direct, bucket, "run/step_1/__0_0.distcp") == data


@pytest.mark.semantics("P14.3")
def test_client_says_where_its_set_stays(start_node: StartNode, direct: Any, bucket: str) -> None:
    direct.put_object(Bucket=bucket, Key="run/step_4/old", Body=b"old")
    node = start_node(*policy(bucket, "persist = 'all'"))
    client = node.client()

    def asked(params: dict[str, Any], **_: Any) -> None:
        params["headers"]["x-tiergate-persist"] = "memory"

    assert save(client, bucket, 1, Metadata={"tiergate-persist": "memory"}) == {kept()}
    client.meta.events.register("before-call.s3.PutObject", asked)
    assert save(client, bucket, 2) == {kept()}
    assert save(client, bucket, 4) == {memory_ack()}
    client.meta.events.unregister("before-call.s3.PutObject", asked)
    assert save(client, bucket, 3) == {memory_ack()}
    node.wait_settled()
    assert steps_of(direct, bucket) == {"step_3", "step_4"}


@pytest.mark.semantics("P14.4", "P14.5")
def test_pointer_goes_when_what_it_names_does_and_a_set_goes_whole(
    start_node: StartNode, direct: Any, proxy: FaultyOrigin, bucket: str
) -> None:
    node = start_node(*policy(bucket, "persist = 'none', keep = 9, promote_idle = '1h'"))
    client = node.client()
    for step in (1, 2, 3):
        save(client, bucket, step)
    assert ack_of(client.put_object(Bucket=bucket, Key=POINTER, Body=snapshot(1))) == kept()
    tags = {"TagSet": [{"Key": "a", "Value": "b"}]}
    client.put_object_tagging(Bucket=bucket, Key="run/step_2/__0_0.distcp", Tagging=tags)
    node.wait_settled()
    assert steps_of(direct, bucket) == {"step_2"}
    assert puts(proxy)[-1] == "run/step_2/.metadata"
    assert node.promote(bucket, "run/step_1/") == 3
    node.wait_until("the pointer follows", lambda: POINTER in keys_of(direct, bucket))
    assert steps_of(direct, bucket) == {"step_1", "step_2"}
    assert puts(proxy)[-2:] == ["run/step_1/.metadata", POINTER]
    assert node.metric("tiergate_persistence_promoted_sets_total") == 2


@pytest.mark.semantics("P14.5")
def test_newest_set_of_a_run_that_ended_goes_to_the_origin(start_node: StartNode, direct: Any, bucket: str) -> None:
    node = start_node(*policy(bucket, "persist = 'none', promote_idle = '1s'"))
    client = node.client()
    save(client, bucket, 1)
    save(client, bucket, 2)
    client.put_object(Bucket=bucket, Key="run/step_3/__0_0.distcp", Body=b"not whole")
    node.wait_until("it is there", lambda: len(keys_of(direct, bucket)) == 3)
    assert steps_of(direct, bucket) == {"step_2"}


@pytest.mark.semantics("P14.5")
def test_node_that_stops_sends_the_newest_set(start_node: StartNode, direct: Any, bucket: str) -> None:
    node = start_node(*policy(bucket, "persist = 'none'"))
    save(node.client(), bucket, 1)
    save(node.client(), bucket, 2)
    assert node.stop() == LEFT_BEHIND_STATUS
    assert steps_of(direct, bucket) == {"step_2"}
    assert len(keys_of(direct, bucket)) == 3
    node.start()
    assert steps_of(node.client(), bucket) == {"step_1", "step_2"}


@needs_etcd
@pytest.mark.semantics("P14.5")
def test_member_that_stops_sends_the_newest_set(start_cluster: StartCluster, direct: Any, bucket: str) -> None:
    cluster = start_cluster(2, "--lease", "3s", *policy(bucket, "persist = 'none'"))
    save(cluster.client(0), bucket, 1)
    save(cluster.client(0), bucket, 2)
    assert cluster.nodes[0].stop() == 0
    assert steps_of(direct, bucket) == {"step_2"}
    assert len(keys_of(direct, bucket)) == 3
    assert steps_of(cluster.client(1), bucket) == {"step_1", "step_2"}


@pytest.mark.semantics("P14.6")
@pytest.mark.parametrize("pinned", ["run/step_1/", "run/step_1/__0_0"])
def test_superseded_set_that_is_pinned_is_kept(start_node: StartNode, direct: Any, bucket: str, pinned: str) -> None:
    node = start_node(*policy(bucket, "persist = 'none', keep = 1"))
    client = node.client()
    save(client, bucket, 1)
    assert node.pin(bucket, pinned) > 0
    save(client, bucket, 2)
    save(client, bucket, 3)
    node.wait_until("the other one is dropped", lambda: node.metric(DROPPED) == 1)
    assert steps_of(client, bucket) == {"step_1", "step_3"}
    node.unpin(bucket, pinned)
    node.wait_until("it is dropped too", lambda: steps_of(client, bucket) == {"step_3"})
    assert keys_of(direct, bucket) == []


@pytest.mark.semantics("P14.6")
def test_superseded_sets_are_dropped_whole_and_not_before(
    start_node: StartNode, proxy: FaultyOrigin, direct: Any, bucket: str
) -> None:
    node = start_node(*policy(bucket, "persist = 'none', keep = 1"))
    client = node.client()
    save(client, bucket, 1)
    client.put_object(Bucket=bucket, Key="run/step_2/__0_0.distcp", Body=b"never whole")
    save(client, bucket, 3)
    node.wait_until("older ones are dropped", lambda: node.metric(DROPPED) == 2)
    assert steps_of(client, bucket) == {"step_3"}
    # What its own list does not find whole supersedes nothing.
    client.put_object(Bucket=bucket, Key="run/step_4/__0_0.distcp", Body=b"shard")
    client.put_object(Bucket=bucket, Key="run/step_4/.metadata", Body=LIST)
    save(client, bucket, 5)
    node.wait_until("only the last is whole", lambda: node.metric(DROPPED) == 4)
    assert steps_of(client, bucket) == {"step_5"}
    assert keys_of(direct, bucket) == []
    assert [seen for seen in proxy.requests if seen.method == "DELETE" and seen.bucket == bucket] == []


@pytest.mark.semantics("P14.7")
def test_superseded_sets_are_skipped_under_backlog(
    start_node: StartNode, proxy: FaultyOrigin, direct: Any, bucket: str
) -> None:
    node = start_node(*policy(bucket, "persist = 'all', keep = 9, skip_superseded = true, exclusive = true"))
    client = node.client()
    client.head_bucket(Bucket=bucket)
    proxy.inject(Cut(), times=None)
    for step in range(3):
        assert save(client, bucket, step) == {memory_ack()}
    skipped = "tiergate_persistence_skipped_sets_total"
    node.wait_until("older ones are left in memory", lambda: node.metric(skipped) == 2)
    proxy.heal()
    node.wait_settled()
    assert steps_of(direct, bucket) == {"step_2"}
    assert steps_of(client, bucket) == {"step_0", "step_1", "step_2"}


def save_tiered(client: Any, bucket: str, step: int, ranks: tuple[int, ...] = (1, 0, 2)) -> set[str]:
    """A tiered checkpoint, its shards in that order; under which rules its objects were acknowledged."""
    keys = [f"run/rank_{rank}/step_{step}/checkpoint.pt" for rank in ranks]
    bodies = dict.fromkeys(keys, b"shard") | {f"run/rank_0/step_{step}/metadata.metadata": tiered_list(*ranks)}
    return {ack_of(client.put_object(Bucket=bucket, Key=key, Body=body)) for key, body in bodies.items()}


def tiered_list(*ranks: int) -> bytes:
    """A list that names a piece of each rank's shard."""
    pieces = {MetadataIndex(f"part {rank}"): TieredPiece(rank, 0, 5) for rank in ranks}
    described: Any = {index.fqn: BytesStorageMetadata() for index in pieces}
    return write_tiered_list(Metadata(described, storage_data=pieces))


def tiered_steps(client: Any, bucket: str) -> dict[str, int]:
    """How many objects there are of each step."""
    return dict(Counter(key.split("/")[2] for key in keys_of(client, bucket, "run/")))


@pytest.mark.semantics("P14.8")
def test_steps_with_a_folder_for_each_rank_go_stay_and_are_dropped_whole(
    start_node: StartNode, direct: Any, proxy: FaultyOrigin, bucket: str
) -> None:
    node = start_node(*policy(bucket, "persist = 'every 2', keep = 1"))
    client = node.client()
    assert [save_tiered(client, bucket, step) for step in range(4)] == [
        {memory_ack()},
        {kept()},
        {memory_ack()},
        {kept()},
    ]
    node.wait_until("the first is superseded", lambda: node.metric(DROPPED) == 1)
    node.wait_settled()
    assert tiered_steps(client, bucket) == {"step_0": 4, "step_2": 4, "step_3": 4}
    assert tiered_steps(direct, bucket) == {"step_0": 4, "step_2": 4}
    assert [seen for seen in proxy.requests if seen.method == "DELETE" and seen.bucket == bucket] == []
    assert node.promote(bucket, "run/rank_1/step_3/") == 4
    node.wait_settled()
    assert tiered_steps(direct, bucket) == {"step_0": 4, "step_2": 4, "step_3": 4}
    assert puts(proxy)[-1] == "run/rank_0/step_3/metadata.metadata"


@needs_etcd
@pytest.mark.semantics("P14.8")
def test_ranks_on_several_nodes_follow_one_decision(start_cluster: StartCluster, direct: Any, bucket: str) -> None:
    direct.put_object(Bucket=bucket, Key="run/rank_2/step_1/checkpoint.pt", Body=b"of an attempt before")
    cluster = start_cluster(3, "--lease", "3s", *policy(bucket, "persist = 'none'"))

    def put(rank: int, step: int, name: str) -> str:
        key = f"run/rank_{rank}/step_{step}/{name}"
        return ack_of(cluster.client(rank).put_object(Bucket=bucket, Key=key, Body=b"shard"))

    order = [(1, "checkpoint.pt"), (0, "checkpoint.pt"), (2, "checkpoint.pt"), (0, "metadata.metadata")]
    assert [put(rank, 2, name) for rank, name in order] == ["memory:2; kept=memory"] * 4
    # Rank 2 finds something in its folder: then all of the step goes.
    assert [put(rank, 1, name) for rank, name in order][2:] == ["memory:2"] * 2
    cluster.nodes[0].wait_until("it is there", lambda: tiered_steps(direct, bucket) == {"step_1": 4})
    assert body_of(direct, bucket, "run/rank_2/step_1/checkpoint.pt") == b"shard"


@pytest.mark.semantics("P14.9")
def test_what_the_origin_lacks_is_told_and_promoted_on_the_s3_address(
    start_node: StartNode, direct: Any, proxy: FaultyOrigin, bucket: str
) -> None:
    node = start_node(*policy(bucket, "persist = 'none'"))
    client = node.client()

    def own(method: str, verb: str, prefix: str) -> dict[str, Any]:
        url = f"{node.endpoint}/{bucket}?x-tiergate-{verb}&prefix={prefix}"
        with urlopen(Request(url, method=method), timeout=60) as answer:
            told: dict[str, Any] = json.load(answer)
            return told

    save_tiered(client, bucket, 1)
    save_tiered(client, bucket, 2)
    scope = "run/rank_0/step_1/"
    told = own("GET", "owed", scope)
    assert (told["count"], told["bytes"]) == (4, 15 + len(tiered_list(1, 0, 2)))
    assert {each["key"].split("/")[2] for each in told["objects"]} == {"step_1"}
    assert [each["stays_in_memory"] for each in told["objects"]] == [True] * 4
    proxy.inject(Cut(), times=None)
    assert own("POST", "promote", scope) == {"promoted": 4}
    told = own("GET", "owed", scope)
    assert [each["stays_in_memory"] for each in told["objects"]] == [False] * 4
    assert own("GET", "owed", "run/")["count"] == 8
    proxy.heal()
    node.wait_until("it is told that all is there", lambda: own("GET", "owed", scope)["count"] == 0)
    assert tiered_steps(direct, bucket) == {"step_1": 4}
