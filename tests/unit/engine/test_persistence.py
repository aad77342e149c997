"""What stays in memory by policy: how writes are decided, and who takes them out of there."""

import json
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import pytest
from tests.dcp import dcp_list
from tests.unit.engine.cluster import BUCKET, Cluster, content, etag_of, name_of

from tiergate.engine.acks import ACK_HEADER
from tiergate.engine.checkpoints import Checkpoints
from tiergate.engine.wholesets import WholeSets
from tiergate.errors import RequestError
from tiergate.model import LOST, Pending, Plan, Stage
from tiergate.writeback.keeper import Found, Keeper, has_marker
from tiergate.writeback.promotion import Promotion

KEPT, SENT = "memory:1; kept=memory", "memory:1"
POINTER = "run/checkpoint_manager_snapshot.json"
NAMES = ("__0_0.distcp", "__1_0.distcp", ".metadata")

Start = Callable[..., Cluster]


@pytest.fixture
def policy(start: Start) -> Callable[..., Cluster]:
    """One node under a policy."""

    def policy(persist: str = "none", **more: object) -> Cluster:
        table = {"uri": f"s3://{BUCKET}/run/", "persist": persist, **more}
        text = ", ".join(f"{key} = {json.dumps(value)}" for key, value in table.items())
        return start(1, alone=True, prefixes=["{" + text + "}"])

    return policy


def promotion_of(one: Cluster) -> Promotion:
    rooms = one["a"].rooms
    return Promotion(rooms.directory, rooms.settings.prefix_for, rooms.clock, rooms.metrics, lambda: None)


def keeper_of(one: Cluster, judge: Callable[[Found], Awaitable[bool]] = has_marker) -> Keeper:
    rooms = one["a"].rooms
    return Keeper(
        rooms.directory,
        rooms.origin,
        promotion_of(one),
        rooms.settings.prefixes,
        rooms.clock,
        rooms.metrics,
        judge,
        0.0,
        lambda: True,
        rooms.replaced,
    )


Headers = Mapping[str, str]


async def put(one: Cluster, key: str, data: bytes = b"x" * 100, headers: Headers | None = None) -> str:
    """Write an object; the rule it was acknowledged under."""
    answer = await one["a"].ask("PutObject", "PUT", key, body=data, headers=headers)
    return answer.headers[ACK_HEADER]


async def save(one: Cluster, step: int, shards_count: int = 2, headers: Headers | None = None) -> list[str]:
    """Write a set; the rules its objects were acknowledged under."""
    keys = [f"run/step_{step}/__{rank}_0.distcp" for rank in range(shards_count)]
    return [await put(one, key, headers=headers) for key in (*keys, f"run/step_{step}/.metadata")]


async def plan_of(one: Cluster, step: int) -> Plan:
    plan = await one.directory.get_plan(BUCKET, f"run/step_{step}/")
    assert plan is not None
    return plan


async def pending_of(one: Cluster, key: str) -> Pending:
    write = (await one.directory.get(name_of(key))).pending
    assert write is not None
    return write


async def keys_in_memory(one: Cluster) -> set[str]:
    return {write.name.key for write in await one.directory.parked()}


async def keys_of(one: Cluster) -> set[str]:
    return {record.name.key for record in await one.directory.scan(BUCKET, "", "", 999) if record.version}


def snapshot(*steps: int) -> bytes:
    return json.dumps({"checkpoint_results": [{"checkpoint_dir_name": f"step_{step}"} for step in steps]}).encode()


# -- what is decided
async def test_all_of_a_set_follows_its_first_object(policy: Start) -> None:
    one = policy("every 2")
    rules = [set(await save(one, step)) for step in range(4)]
    assert rules == [{SENT}, {KEPT}, {SENT}, {KEPT}]
    assert {key.split("/")[1] for key in await keys_in_memory(one)} == {"step_1", "step_3"}
    assert {write.name.key.split("/")[1] for write in await one.directory.pending()} == {"step_0", "step_2"}


async def test_without_a_policy_nothing_is_asked(policy: Start) -> None:
    one = policy("none")
    assert await put(one, "elsewhere/step_1/.metadata", headers={"x-tiergate-persist": "memory"}) == SENT
    assert await put(one, "run/config.json") == SENT
    assert await one.directory.plans(BUCKET, "") == []


async def test_client_decides_by_header_or_metadata(policy: Start) -> None:
    one = policy("all")
    assert await save(one, 1, headers={"x-tiergate-persist": "memory"}) == [KEPT] * 3
    assert await save(one, 2, headers={"x-amz-meta-tiergate-persist": "memory"}) == [KEPT] * 3
    assert await save(one, 3) == [SENT] * 3
    with pytest.raises(RequestError):
        await put(one, "run/step_4/a", headers={"x-tiergate-persist": "tape"})
    assert await put(one, "run/step_4/a", headers={"x-amz-meta-tiergate-persist": "tape"}) == SENT


async def test_client_that_wants_a_kept_set_in_s3_gets_all_of_it_there(policy: Start) -> None:
    one = policy("none")
    assert await save(one, 1) == [KEPT] * 3
    assert await put(one, "run/step_1/late", headers={"x-tiergate-persist": "s3"}) == SENT
    assert await keys_in_memory(one) == set()
    assert (await plan_of(one, 1)).stage is Stage.SENT
    assert len(await one.directory.pending()) == 4


async def test_upload_follows_its_set(policy: Start) -> None:
    one = policy("all")
    node, key, data = one["a"], "run/step_1/shard", content(50_000)
    answer = await node.ask(
        "CreateMultipartUpload", "POST", key, query=[("uploads", "")], headers={"x-tiergate-persist": "memory"}
    )
    assert isinstance(answer.body, bytes)
    upload_id = answer.body.decode().partition("<UploadId>")[2].partition("</UploadId>")[0]
    etag = etag_of(await node.part(key, upload_id, 1, data))
    for _ in range(2):  # Said again, it is answered as before.
        assert (await node.complete(key, upload_id, {1: etag})).headers[ACK_HEADER] == KEPT
    assert await put(one, "run/step_1/.metadata") == KEPT
    assert (await node.get(key))[1] == data


async def test_copy_follows_its_set(policy: Start) -> None:
    one = policy("none")
    await put(one, "elsewhere", b"data")
    answer = await one["a"].ask(
        "CopyObject", "PUT", "run/step_1/copy", headers={"x-amz-copy-source": f"{BUCKET}/elsewhere"}
    )
    assert answer.headers[ACK_HEADER] == KEPT
    assert await keys_in_memory(one) == {"run/step_1/copy"}


@pytest.mark.parametrize("exclusive", [False, True])
async def test_set_that_the_origin_has_something_of_is_not_kept(policy: Start, exclusive: bool) -> None:
    one = policy("none", exclusive=exclusive)
    one.origin.put_foreign(name_of("run/step_1/old"), b"old")
    assert set(await save(one, 1)) == {KEPT if exclusive else SENT}


async def test_set_of_which_the_directory_knows_more_is_not_kept(policy: Start) -> None:
    one = policy("none", exclusive=True)
    one.origin.put_foreign(name_of("run/step_1/old"), b"old")
    await one["a"].ask("HeadObject", "HEAD", "run/step_1/old")
    assert set(await save(one, 1)) == {SENT}


async def test_origin_that_is_away_keeps_nothing_in_memory(policy: Start) -> None:
    one = policy("none")
    one.origin.is_away = True
    assert await put(one, "run/step_1/a") == SENT


async def test_overwriting_a_marked_set_begins_another(policy: Start) -> None:
    one = policy("none")
    await save(one, 1)
    first = await plan_of(one, 1)
    assert await save(one, 1) == [KEPT] * 3
    assert (await plan_of(one, 1)).ordinal == first.ordinal + 1
    assert await save(one, 1, headers={"x-tiergate-persist": "s3"}) == [SENT] * 3
    assert await keys_in_memory(one) == set()


async def test_pointer_that_is_text_follows_too(policy: Start) -> None:
    one = policy("every 2")
    await put(one, "run/global_step1/mp_rank_00_model_states.pt")
    assert await put(one, "run/latest", b"global_step1") == SENT
    await put(one, "run/global_step2/mp_rank_00_model_states.pt")
    assert await put(one, "run/latest", b"global_step2") == KEPT


# -- pointers
async def test_pointer_follows_what_it_names(policy: Start) -> None:
    one = policy("every 2")
    await save(one, 0)
    assert await put(one, POINTER, snapshot(0)) == SENT
    await save(one, 1)
    assert await put(one, POINTER, snapshot(0, 1)) == KEPT
    await save(one, 2)
    assert await put(one, POINTER, snapshot(0, 2)) == SENT


async def test_pointer_to_nothing_is_kept_until_it_is_there(policy: Start) -> None:
    one = policy("all")
    assert await put(one, POINTER, snapshot(7)) == KEPT
    keeper = keeper_of(one)
    await keeper.round()
    assert (await pending_of(one, POINTER)).parked
    await save(one, 7)
    await keeper.round()
    write = await pending_of(one, POINTER)
    assert not write.parked
    assert write.place > (await pending_of(one, "run/step_7/.metadata")).place


async def test_pointer_to_what_the_origin_has_goes(policy: Start) -> None:
    one = policy("none")
    one.origin.put_foreign(name_of("run/step_7/.metadata"), b"old")
    assert await put(one, POINTER, snapshot(7)) == SENT


async def test_promoted_set_takes_its_pointer_along(policy: Start) -> None:
    one = policy("none")
    await save(one, 1)
    await save(one, 2)
    assert await put(one, POINTER, snapshot(1, 2)) == KEPT
    keeper = keeper_of(one)
    await promotion_of(one).under(BUCKET, "run/step_1/")
    await keeper.round()
    assert await keys_in_memory(one) == {POINTER, *(f"run/step_2/{name}" for name in NAMES)}
    await promotion_of(one).under(BUCKET, "run/step_2/")
    await keeper.round()
    assert await keys_in_memory(one) == set()


# -- what needs the origin
async def test_forwarded_operation_takes_the_whole_set_out_of_memory(policy: Start) -> None:
    one = policy("none")
    await save(one, 1)
    await save(one, 2)
    await promotion_of(one).owe(name_of("run/step_1/__0_0.distcp"))
    assert await keys_in_memory(one) == {f"run/step_2/{name}" for name in NAMES}
    assert set(await save(one, 3)) == {KEPT}


@pytest.mark.parametrize("name", NAMES)
async def test_what_has_no_plan_any_more_takes_what_lies_beside_it_along(policy: Start, name: str) -> None:
    """A marker is not owed before the set that it speaks for."""
    one = policy("none")
    await save(one, 1)
    await save(one, 2)
    assert await one.directory.change_plan(await plan_of(one, 1), None)
    await promotion_of(one).owe(name_of(f"run/step_1/{name}"))
    assert await keys_in_memory(one) == {f"run/step_2/{each}" for each in NAMES}


@pytest.mark.parametrize("through", [False, True])
async def test_set_that_lost_its_plan_goes_before_what_is_written_of_it(policy: Start, through: bool) -> None:
    one = policy("none")
    await save(one, 1)
    assert await one.directory.change_plan(await plan_of(one, 1), None)
    if through:
        marker = name_of("run/step_1/other.metadata")
        await promotion_of(one).clear(marker, one["a"].rooms.role_of(marker, 1))
    else:
        assert await put(one, "run/step_1/.metadata", headers={"x-tiergate-persist": "s3"}) == SENT
    assert await keys_in_memory(one) == set()


async def test_write_through_takes_the_set_out_of_memory_first(policy: Start) -> None:
    one = policy("none")
    assert await put(one, "run/step_1/a") == KEPT
    await promotion_of(one).clear(name_of("run/step_1/big"), one["a"].rooms.role_of(name_of("run/step_1/big"), 1))
    assert await keys_in_memory(one) == set()
    assert await put(one, "run/step_1/.metadata") == SENT


async def test_nothing_of_a_marker_is_owed_before_its_members(policy: Start) -> None:
    """Whoever looks in the middle of a promotion finds the marker after its set, or not at all."""
    one = policy("none")
    await save(one, 1, shards_count=5)
    directory, seen = one.directory, list[bool]()
    promote = directory.promote

    async def watched(writes: Sequence[Pending], now_s: float) -> int:
        count = await promote(writes, now_s)
        marker = await pending_of(one, "run/step_1/.metadata")
        shards = [await pending_of(one, f"run/step_1/__{rank}_0.distcp") for rank in range(5)]
        assert marker.parked or not any(shard.parked for shard in shards)
        assert all(shard.place < marker.revision for shard in shards)
        seen.append(marker.parked)
        return count

    directory.promote = watched  # type: ignore[method-assign]
    assert await promotion_of(one).promote(await plan_of(one, 1)) == 6
    assert seen == [True, False]


async def test_promotion_that_was_interrupted_is_seen_through(policy: Start) -> None:
    one = policy("none")
    await save(one, 1)
    plan = await plan_of(one, 1)
    assert await one.directory.change_plan(plan, replace(plan, stage=Stage.PROMOTING))
    await keeper_of(one).round()
    assert await keys_in_memory(one) == set()
    await save(one, 2)
    plan = await plan_of(one, 2)
    assert await one.directory.change_plan(plan, replace(plan, stage=Stage.SENT))
    await keeper_of(one).round()
    assert await keys_in_memory(one) == set()


# -- retention
async def test_superseded_sets_are_dropped_whole(policy: Start) -> None:
    one = policy("none", keep=2)
    keeper = keeper_of(one)
    for step in range(5):
        await save(one, step)
        await keeper.round()
        assert {key.split("/")[1] for key in await keys_of(one)} == {
            f"step_{each}" for each in range(max(0, step - 1), step + 1)
        }
    assert one["a"].counted("persistence_dropped_sets_total") == 3
    assert one["a"].memory.stats().bodies == 6
    assert await one.directory.pending() == []


async def test_marker_of_a_dropped_set_goes_first(policy: Start) -> None:
    one = policy("none", keep=1)
    await save(one, 1)
    await save(one, 2)
    gone: list[str] = []
    keeper = keeper_of(one)
    keeper._released = lambda name, committed: gone.append(name.key)
    await keeper.round()
    assert gone[0] == "run/step_1/.metadata"
    assert sorted(gone) == sorted(f"run/step_1/{name}" for name in NAMES)


async def test_incomplete_sets_supersede_nothing(policy: Start) -> None:
    one = policy("none", keep=1)
    keeper = keeper_of(one)
    await save(one, 1)
    await put(one, "run/step_2/__0_0.distcp")
    await put(one, "run/step_3/__0_0.distcp")
    await keeper.round()
    assert "run/step_1/.metadata" in await keys_of(one)
    await save(one, 4)
    await keeper.round()
    assert {key.split("/")[1] for key in await keys_of(one)} == {"step_4"}


async def test_set_that_is_lost_supersedes_nothing(policy: Start) -> None:
    one = policy("none", keep=1)
    await save(one, 1)
    await save(one, 2)
    shard = await pending_of(one, "run/step_2/__0_0.distcp")
    await one.directory.quarantine(shard.name, shard.uid, LOST)
    await keeper_of(one).round()
    assert "run/step_1/.metadata" in await keys_of(one)


async def test_set_whose_own_list_is_not_met_supersedes_nothing(policy: Start) -> None:
    async def is_complete(found: Found) -> bool:
        return found.plan.prefix != "run/step_2/"

    one = policy("none", keep=1)
    await save(one, 1)
    await save(one, 2)
    await keeper_of(one, is_complete).round()
    assert "run/step_1/.metadata" in await keys_of(one)


async def test_dropped_set_may_be_written_again(policy: Start) -> None:
    one = policy("none", keep=1)
    keeper = keeper_of(one)
    await save(one, 1)
    await save(one, 2)
    await keeper.round()
    assert await save(one, 1) == [KEPT] * 3
    await keeper.round()
    assert {key.split("/")[1] for key in await keys_of(one)} == {"step_1"}


async def test_drop_that_was_interrupted_is_seen_through(policy: Start) -> None:
    one = policy("none")
    await save(one, 1)
    dropped = await one.directory.drop_plan(await plan_of(one, 1))
    assert dropped is not None
    await keeper_of(one).round()
    assert await keys_of(one) == set()


# -- when the run ends, under backlog
async def test_idle_run_has_its_newest_complete_set_promoted(policy: Start) -> None:
    one = policy("none", promote_idle="1ms")
    await save(one, 1)
    await save(one, 2)
    await put(one, "run/step_3/__0_0.distcp")
    await one.clock.sleep(1.1)  # An object's own time has whole seconds.
    await keeper_of(one).round()
    assert {key.split("/")[1] for key in await keys_in_memory(one)} == {"step_1", "step_3"}


async def test_run_that_is_not_idle_keeps_its_sets(policy: Start) -> None:
    one = policy("none", promote_idle="1h")
    await save(one, 1)
    await keeper_of(one).round()
    assert len(await keys_in_memory(one)) == 3


async def test_node_that_stops_promotes_the_newest_set(policy: Start) -> None:
    one = policy("none")
    await save(one, 1)
    await save(one, 2)
    await keeper_of(one).promote_newest()
    assert {key.split("/")[1] for key in await keys_in_memory(one)} == {"step_1"}


async def test_superseded_sets_that_have_not_begun_are_skipped_whole(policy: Start) -> None:
    one = policy("all", skip_superseded=True, keep=9)
    for step in range(3):
        assert await save(one, step) == [SENT] * 3
    await put(one, "run/step_3/__0_0.distcp")
    await keeper_of(one).round()
    assert {key.split("/")[1] for key in await keys_in_memory(one)} == {"step_0", "step_1"}
    assert len(await keys_in_memory(one)) == 6
    assert one["a"].counted("persistence_skipped_sets_total") == 2


@pytest.mark.parametrize("begun", NAMES)
async def test_set_of_which_a_part_has_begun_is_not_skipped(policy: Start, begun: str) -> None:
    one = policy("all", skip_superseded=True)
    await save(one, 1)
    await save(one, 2)
    write = await pending_of(one, f"run/step_1/{begun}")
    await one.directory.begin(write.name, write.uid, "")
    await keeper_of(one).round()
    assert await keys_in_memory(one) == set()


@pytest.mark.parametrize("begun", NAMES)
async def test_set_that_begins_while_it_is_skipped_is_sent_whole(policy: Start, begun: str) -> None:
    one = policy("all", skip_superseded=True)
    await save(one, 1)
    await save(one, 2)
    directory, write = one.directory, await pending_of(one, f"run/step_1/{begun}")
    change_plan = directory.change_plan

    async def begins(before: Plan, after: Plan | None) -> bool:
        if after is not None and after.stage is Stage.PARKING:
            await directory.begin(write.name, write.uid, "")
        return await change_plan(before, after)

    directory.change_plan = begins  # type: ignore[method-assign]
    await keeper_of(one).round()
    assert await keys_in_memory(one) == set()
    assert (await plan_of(one, 1)).stage is Stage.SENT


async def test_set_that_a_pointer_names_is_not_skipped(policy: Start) -> None:
    one = policy("all", skip_superseded=True)
    await save(one, 1)
    assert await put(one, POINTER, snapshot(1)) == SENT
    await save(one, 2)
    await keeper_of(one).round()
    assert await keys_in_memory(one) == set()


async def test_what_is_parked_where_no_policy_is_any_more_is_owed(policy: Start) -> None:
    one = policy("none")
    await save(one, 1)
    keeper = keeper_of(one)
    keeper._promotion._policy_of = lambda bucket, key: one.settings.prefix_for(bucket, "elsewhere")
    await keeper.round()
    assert await keys_in_memory(one) == set()
    assert len(await one.directory.pending()) == 3


async def test_sets_whose_plan_was_forgotten_go_to_the_origin(policy: Start) -> None:
    """As after a directory that forgot was told of them."""
    one = policy("none")
    await save(one, 1)
    await save(one, 2)
    assert await one.directory.change_plan(await plan_of(one, 1), None)
    await keeper_of(one).round()
    assert {key.split("/")[1] for key in await keys_in_memory(one)} == {"step_2"}


async def test_origin_that_is_away_stops_no_upkeep(policy: Start) -> None:
    one = policy("none", keep=1)
    await save(one, 1)
    await save(one, 2)
    assert await put(one, POINTER, snapshot(7)) == KEPT
    one.origin.is_away = True
    await keeper_of(one).round()
    assert {key.split("/")[1] for key in await keys_of(one) if key != POINTER} == {"step_2"}
    assert (await pending_of(one, POINTER)).parked


async def test_plans_are_forgotten_when_nothing_depends_on_them(policy: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiergate.writeback.keeper.PLANS_COUNT", 2)
    one = policy("none", keep=1)
    keeper = keeper_of(one)
    await save(one, 0, headers={"x-tiergate-persist": "s3"})
    for step in range(1, 6):
        await save(one, step)
        await keeper.round()
    await keeper.round()
    left = {plan.prefix: plan.stage for plan in await one.directory.plans(BUCKET, "")}
    assert left == {"run/step_0/": Stage.SENT, "run/step_4/": Stage.DROPPED, "run/step_5/": Stage.KEPT}
    for write in await one.directory.pending():  # Its plan is kept while it is owed.
        await one.directory.persisted(write.name, write.uid, "etag", 1.0)
    await keeper.round()
    assert await one.directory.get_plan(BUCKET, "run/step_0/") is None


async def test_only_a_set_that_its_own_list_finds_whole_supersedes_others(policy: Start) -> None:
    one = policy("none", keep=1)
    checkpoints = Checkpoints(one["a"].rooms)
    keeper = keeper_of(one, WholeSets(checkpoints, one.clock).judge)
    shards = NAMES[:2]

    async def save_listed(step: int, *there: str) -> None:
        for name in there:
            await put(one, f"run/step_{step}/{name}")
        await put(one, f"run/step_{step}/.metadata", dcp_list(*shards))

    async def steps() -> set[str]:
        return {key.split("/")[1] for key in await keys_in_memory(one)}

    try:
        await save_listed(1, *shards)
        await save_listed(2, shards[0])
        await keeper.round()
        assert await steps() == {"step_1", "step_2"}
        await put(one, f"run/step_2/{shards[1]}")
        await save_listed(3, *shards)
        await keeper.round()
        assert await steps() == {"step_3"}
    finally:
        await checkpoints.close()


# -- sets with a folder for each rank
async def save_tiered(one: Cluster, step: int, ranks: Sequence[int] = (1, 0, 2)) -> list[str]:
    """Write a tiered checkpoint, its shards in that order; the rules its objects were acknowledged under."""
    keys = [f"run/rank_{rank}/step_{step}/checkpoint.pt" for rank in ranks]
    return [await put(one, key) for key in (*keys, f"run/rank_0/step_{step}/metadata.metadata")]


def tiered_steps(keys: Iterable[str]) -> dict[str, int]:
    """How many objects of each step are among the keys."""
    return dict(Counter(key.split("/")[2] for key in keys))


async def test_all_ranks_of_a_step_follow_its_first_object(policy: Start) -> None:
    one = policy("every 2")
    rules = [set(await save_tiered(one, step)) for step in range(4)]
    assert rules == [{SENT}, {KEPT}, {SENT}, {KEPT}]
    assert tiered_steps(await keys_in_memory(one)) == {"step_1": 4, "step_3": 4}
    assert [plan.prefix for plan in await one.directory.plans(BUCKET, "")] == [
        f"run/rank_0/step_{step}/" for step in range(4)
    ]


async def test_both_tiered_layouts_are_sets_of_a_run_that_is_further_up(policy: Start) -> None:
    one = policy("none")
    for key in ("job/rank_1/step_5/checkpoint.pt", "job/rank_0/step_5/metadata.metadata"):
        assert await put(one, f"run/{key}") == KEPT
    for key in ("ray/step_5/rank_1/checkpoint.pt", "ray/step_5/rank_0/metadata.metadata"):
        assert await put(one, f"run/{key}") == KEPT
    prefixes = [plan.prefix for plan in await one.directory.plans(BUCKET, "")]
    assert prefixes == ["run/job/rank_0/step_5/", "run/ray/step_5/"]


async def test_one_rank_that_wants_s3_takes_all_ranks_there(policy: Start) -> None:
    one = policy("none")
    await save_tiered(one, 1)
    assert await put(one, "run/rank_3/step_1/checkpoint.pt", headers={"x-tiergate-persist": "s3"}) == SENT
    assert await keys_in_memory(one) == set()
    assert len(await one.directory.pending()) == 5


@pytest.mark.parametrize("exclusive", [False, True])
@pytest.mark.parametrize("rank", [0, 1, 2])
async def test_step_that_the_origin_has_a_shard_of_is_not_kept(policy: Start, rank: int, exclusive: bool) -> None:
    one = policy("none", exclusive=exclusive)
    one.origin.put_foreign(name_of(f"run/rank_{rank}/step_1/checkpoint.pt"), b"old")
    rules = await save_tiered(one, 1)
    assert rules[-1] == (KEPT if exclusive else SENT)
    assert len(await keys_in_memory(one)) == (4 if exclusive else 0)


async def test_step_of_which_the_directory_knows_a_shard_is_not_kept(policy: Start) -> None:
    one = policy("none", exclusive=True)
    one.origin.put_foreign(name_of("run/rank_2/step_1/checkpoint.pt"), b"old")
    await one["a"].ask("HeadObject", "HEAD", "run/rank_2/step_1/checkpoint.pt")
    assert (await save_tiered(one, 1))[-2:] == [SENT, SENT]
    assert await keys_in_memory(one) == set()


async def test_saving_a_marked_step_again_begins_another_set(policy: Start) -> None:
    one = policy("none")
    await save_tiered(one, 1)
    assert await save_tiered(one, 1) == [KEPT] * 4
    plan = await one.directory.get_plan(BUCKET, "run/rank_0/step_1/")
    assert plan is not None
    assert plan.ordinal == 2


async def test_superseded_steps_are_dropped_with_all_ranks(policy: Start) -> None:
    one = policy("none", keep=1)
    keeper = keeper_of(one)
    for step in range(3):
        await save_tiered(one, step)
        await put(one, f"run/rank_1/step_{step + 1}/checkpoint.pt")
        await keeper.round()
        assert tiered_steps(await keys_of(one)) == {f"step_{step}": 4, f"step_{step + 1}": 1}


@pytest.mark.parametrize("under", ["run/", "run/rank_0/step_1/", "run/rank_2/step_1/"])
async def test_step_is_promoted_with_all_ranks(policy: Start, under: str) -> None:
    one = policy("none")
    await save_tiered(one, 1)
    assert await promotion_of(one).under(BUCKET, under) == 4
    assert await keys_in_memory(one) == set()


async def test_steps_whose_plan_was_forgotten_go_with_all_ranks(policy: Start) -> None:
    one = policy("none")
    for step in (1, 2):
        await save_tiered(one, step)
    plan = await one.directory.get_plan(BUCKET, "run/rank_0/step_1/")
    assert plan is not None
    assert await one.directory.change_plan(plan, None)
    await keeper_of(one).round()
    assert tiered_steps(await keys_in_memory(one)) == {"step_2": 4}


@pytest.mark.parametrize("leftover", ["", "run/rank_2/step_0/checkpoint.pt"])
async def test_superseded_steps_are_skipped_with_all_ranks(policy: Start, leftover: str) -> None:
    one = policy("all", skip_superseded=True, keep=9)
    if leftover:
        one.origin.put_foreign(name_of(leftover), b"old")
    for step in range(3):
        assert set(await save_tiered(one, step)) == {SENT}
    await keeper_of(one).round()
    skipped = {"step_1": 4} if leftover else {"step_0": 4, "step_1": 4}
    assert tiered_steps(await keys_in_memory(one)) == skipped
