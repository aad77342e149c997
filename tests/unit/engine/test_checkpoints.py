"""Sets over all tiers and nodes, as an engine finds them."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from tests.unit.engine.cluster import BUCKET, Cluster, Node, name_of

from tiergate.checkpoints import recognition
from tiergate.checkpoints.newest import UnseenTierError, newest
from tiergate.checkpoints.sets import Manifest, ReadBody, SetName, SetState, SetStatus, Tier
from tiergate.engine.checkpoints import Checkpoints, Place
from tiergate.engine.reads import Openings
from tiergate.errors import NotFoundError, OriginTemporaryError, OverloadedError, RequestError
from tiergate.model import Bucket, Record
from tiergate.origin.answers import OriginPage

Start = Callable[..., Cluster]

INDEX = "model.safetensors.index.json"
SHARDS = tuple(f"model-0000{part}-of-00002.safetensors" for part in (1, 2))
COMPLETE, ABSENT, UPLOADING, RECEIVING, PARTIAL, DAMAGED, UNKNOWN = (
    SetState.COMPLETE,
    SetState.ABSENT,
    SetState.UPLOADING,
    SetState.RECEIVING,
    SetState.PARTIAL,
    SetState.DAMAGED,
    SetState.UNKNOWN,
)


def shard(step: int, part: int) -> bytes:
    head = json.dumps({"w": {"dtype": "U8", "shape": [step + part], "data_offsets": [0, step + part]}}).encode()
    return len(head).to_bytes(8, "little") + head + bytes(step + part)


def files(step: int) -> dict[str, bytes]:
    """A checkpoint in the order in which it is written."""
    prefix = f"run/step-{step}/"
    index = {"metadata": {}, "weight_map": {f"w{part}": name for part, name in enumerate(SHARDS)}}
    found = {prefix + name: shard(step, part) for part, name in enumerate(SHARDS)}
    return found | {prefix + INDEX: json.dumps(index).encode()}


async def save(node: Node, step: int) -> dict[str, bytes]:
    found = files(step)
    for key, body in found.items():
        await node.put(key, body)
    return found


async def persist(cluster: Cluster, bodies: Mapping[str, bytes]) -> None:
    for key, body in bodies.items():
        await cluster.persist(key, body)


@pytest.fixture
async def watch() -> AsyncIterator[Callable[[Node], Checkpoints]]:
    """Makes what finds sets, as a node sees them."""
    async with AsyncExitStack() as stack:

        def watch(node: Node) -> Checkpoints:
            found = Checkpoints(node.rooms)
            stack.push_async_callback(found.close)
            return found

        yield watch


Watch = Callable[[Node], Checkpoints]


async def sets_under(checkpoints: Checkpoints, prefix: str = "run/") -> dict[int | None, SetStatus]:
    place = await checkpoints.under(BUCKET, prefix)
    assert not place.unseen
    return by_step(place)


def by_step(place: Place) -> dict[int | None, SetStatus]:
    found = {each.status.name.step: each.status for each in place.sets}
    assert len(found) == len(place.sets)
    return found


def states(status: SetStatus) -> tuple[SetState, SetState, bool]:
    return status.tiers[Tier.MEMORY].state, status.tiers[Tier.S3].state, status.is_whole


async def test_set_from_its_first_object_to_s3_on_every_node(cluster: Cluster, watch: Watch) -> None:
    bodies = files(4)
    here, there = watch(cluster["a"]), watch(cluster["c"])
    assert await sets_under(here) == {}
    for key, body in bodies.items():
        assert all(states(each) == (RECEIVING, ABSENT, False) for each in (await sets_under(here)).values())
        await cluster["a"].put(key, body)
    seen = (await sets_under(here))[4]
    assert states(seen) == (COMPLETE, UPLOADING, True)
    assert (seen.objects_count, seen.size_bytes) == (3, sum(map(len, bodies.values())))
    assert seen.tiers[Tier.MEMORY].copies_count == 2
    assert (await sets_under(there))[4] == seen
    place = await there.under(BUCKET, "run/")
    assert sorted(write.name.key for write in place.sets[0].owed) == sorted(bodies)
    for count, (key, body) in enumerate(bodies.items()):
        assert (await sets_under(here))[4].tiers[Tier.S3].objects_count == count
        await cluster.persist(key, body)
    assert states((await sets_under(there))[4]) == (COMPLETE, COMPLETE, True)
    assert (await there.under(BUCKET, "run/")).sets[0].owed == ()


async def test_what_s3_alone_holds_is_seen_and_read(start: Start, watch: Watch) -> None:
    cluster = start(1, alone=True)
    for step in (0, 3):
        for key, body in files(step).items():
            cluster.origin.put_foreign(name_of(key), body)
    del cluster.origin.objects[name_of(f"run/step-3/{SHARDS[1]}")]
    found = await sets_under(watch(cluster["a"]))
    assert states(found[0]) == (ABSENT, COMPLETE, True)
    assert states(found[3]) == (ABSENT, DAMAGED, False)
    assert found[3].tiers[Tier.S3].missing == (f"run/step-3/{SHARDS[1]}",)
    assert newest(found.values()) == found[0]


async def test_marker_that_cannot_be_read_is_a_damage_with_a_reason(start: Start, watch: Watch) -> None:
    cluster = start(1, alone=True)
    await save(cluster["a"], 1)
    await cluster["a"].put(f"run/step-1/{INDEX}", b"\x80 no JSON")
    found = (await sets_under(watch(cluster["a"])))[1]
    assert states(found) == (DAMAGED, UPLOADING if found.is_whole else ABSENT, False)
    assert found.fault


@pytest.mark.parametrize("exclusive", [False, True])
async def test_origin_that_is_away_is_told_and_never_taken_for_nothing(
    start: Start, watch: Watch, exclusive: bool
) -> None:
    prefix = [f"{{uri='s3://{BUCKET}/', exclusive={str(exclusive).lower()}}}"]
    cluster = start(1, alone=True, prefixes=prefix)
    old = await save(cluster["a"], 1)
    await persist(cluster, old)
    await save(cluster["a"], 2)
    go_away(cluster)
    place = await watch(cluster["a"]).under(BUCKET, "run/")
    assert place.origin_fault == "the origin does not answer"
    found = by_step(place)
    assert states(found[1]) == (COMPLETE, COMPLETE, True)
    assert states(found[2]) == (COMPLETE, UPLOADING, True)
    if exclusive:
        assert newest(found.values(), place.unseen) == found[2]
    else:
        assert place.unseen == {Tier.S3}
        with pytest.raises(UnseenTierError):
            newest(found.values(), place.unseen)
    # Nothing that was ever heard of is no reason to say none, either.
    nothing = await watch(cluster["a"]).under(BUCKET, "other/")
    assert nothing.sets == ()
    assert bool(nothing.unseen) != exclusive


async def test_what_the_directory_forgot_is_unknown_while_the_origin_is_away(start: Start, watch: Watch) -> None:
    cluster = start(1, alone=True, prefixes=[f"{{uri='s3://{BUCKET}/', exclusive=true}}"])
    for step in (1, 2):
        await persist(cluster, await save(cluster["a"], step))
    await cluster.directory.trim_clean(5)
    checkpoints = watch(cluster["a"])
    assert states((await sets_under(checkpoints))[1]) == (PARTIAL, COMPLETE, True)
    go_away(cluster)
    place = await checkpoints.under(BUCKET, "run/")
    found = by_step(place)
    assert states(found[1]) == (UNKNOWN, UNKNOWN, False)
    assert newest(found.values(), place.unseen) == found[2]
    with pytest.raises(UnseenTierError):
        newest([found[1]], place.unseen)


async def test_marker_that_cannot_be_had_now_is_unknown(start: Start, watch: Watch) -> None:
    cluster = start(1, alone=True)
    for key, body in files(1).items():
        cluster.origin.put_foreign(name_of(key), body)
    checkpoints = watch(cluster["a"])
    given = cluster.origin.get_object

    @asynccontextmanager
    async def nothing(*words: object, **named: object) -> AsyncIterator[None]:
        raise OriginTemporaryError("away")
        yield

    cluster.origin.get_object = nothing  # type: ignore[assignment,method-assign]
    found = (await sets_under(checkpoints))[1]
    assert (states(found), found.fault) == ((ABSENT, UNKNOWN, False), "the origin does not answer")
    cluster.origin.get_object = given  # type: ignore[method-assign]
    assert states((await sets_under(checkpoints))[1]) == (ABSENT, COMPLETE, True)


@pytest.mark.semantics("P7.4")
async def test_what_is_rewritten_in_place_is_not_whole_until_its_marker_is_back(start: Start, watch: Watch) -> None:
    cluster = start(1, alone=True)
    node, checkpoints = cluster["a"], watch(cluster["a"])
    old = await save(node, 1)
    first = f"run/step-1/{SHARDS[0]}"
    await node.put(first, shard(1, 0))
    assert states((await sets_under(checkpoints))[1]) == (RECEIVING, ABSENT, False)
    await save(node, 1)
    assert states((await sets_under(checkpoints))[1]) == (COMPLETE, UPLOADING, True)
    await persist(cluster, old)
    await node.put(first, shard(1, 0))
    assert states((await sets_under(checkpoints))[1]) == (RECEIVING, RECEIVING, False)
    await save(node, 1)
    assert states((await sets_under(checkpoints))[1]) == (COMPLETE, UPLOADING, True)
    await node.ask("DeleteObject", "DELETE", first)
    assert (await sets_under(checkpoints))[1].is_whole is False


async def test_part_of_an_upload_is_receiving(start: Start, watch: Watch) -> None:
    cluster = start(1, alone=True)
    node, checkpoints = cluster["a"], watch(cluster["a"])
    key = f"run/step-1/{SHARDS[0]}"
    upload_id = await node.create(key)
    await node.part(key, upload_id, 1, shard(1, 0))
    (found,) = (await sets_under(checkpoints)).values()
    assert (states(found), found.size_bytes) == ((RECEIVING, ABSENT, False), len(shard(1, 0)))
    await node.abort(key, upload_id)
    assert await sets_under(checkpoints) == {}


async def test_copies_that_went_are_not_counted_and_the_only_one_is_damage(cluster: Cluster, watch: Watch) -> None:
    bodies = await save(cluster["a"], 1)
    for node in await cluster.holders(next(iter(bodies))) - {"a"}:
        cluster.peers.kill(node)
    found = (await sets_under(watch(cluster["a"])))[1]
    assert found.tiers[Tier.MEMORY].copies_count == 1
    other = next(name for name in "bc" if name in cluster.peers.epochs)
    cluster.peers.kill("a")
    assert (await sets_under(watch(cluster[other])))[1].is_whole is False


async def test_copies_that_peers_evicted_are_not_counted(cluster: Cluster, watch: Watch) -> None:
    bodies = await save(cluster["a"], 1)
    await persist(cluster, bodies)
    here, there = watch(cluster["a"]), watch(cluster["c"])
    assert (await sets_under(here))[1].tiers[Tier.MEMORY].copies_count == 2
    first = next(iter(bodies))
    held = (await cluster.directory.get(name_of(first))).record
    assert held is not None
    assert held.version is not None
    for node in await cluster.holders(first):
        cluster.memories[node].drop(held.version.uid, [part.body.uid for part in held.version.parts])
    for checkpoints in (here, there):
        found = (await sets_under(checkpoints))[1]
        assert states(found) == (PARTIAL, COMPLETE, True)
        assert found.tiers[Tier.MEMORY].objects_count == 2


async def test_change_behind_the_gateway_is_seen_at_once(start: Start, watch: Watch) -> None:
    cluster = start(1, alone=True)
    bodies = await save(cluster["a"], 1)
    await persist(cluster, bodies)
    checkpoints = watch(cluster["a"])
    assert states((await sets_under(checkpoints))[1]) == (COMPLETE, COMPLETE, True)
    first = f"run/step-1/{SHARDS[0]}"
    del cluster.origin.objects[name_of(first)]
    assert states((await sets_under(checkpoints))[1]) == (DAMAGED, DAMAGED, False)
    cluster.origin.put_foreign(name_of(first), bodies[first])
    assert states((await sets_under(checkpoints))[1]) == (PARTIAL, COMPLETE, True)


async def test_what_becomes_clean_while_the_origin_is_asked_is_there(start: Start, watch: Watch) -> None:
    cluster = start(1, alone=True)
    bodies = await save(cluster["a"], 1)
    asked = cluster.origin.list_objects

    async def late(*words: object, **named: object) -> OriginPage:
        page = await asked(*words, **named)  # type: ignore[arg-type]
        await persist(cluster, bodies)
        return page

    cluster.origin.list_objects = late  # type: ignore[method-assign]
    assert states((await sets_under(watch(cluster["a"])))[1]) == (COMPLETE, COMPLETE, True)


async def test_deletion_that_is_carried_out_while_the_origin_is_asked_holds(start: Start, watch: Watch) -> None:
    cluster = start(1, alone=True)
    node = cluster["a"]
    bodies = await save(node, 1)
    await persist(cluster, bodies)
    for key in reversed(bodies):
        await node.ask("DeleteObject", "DELETE", key)
    asked = cluster.origin.list_objects

    async def late(*words: object, **named: object) -> OriginPage:
        page = await asked(*words, **named)  # type: ignore[arg-type]
        for write in await cluster.directory.pending():
            del cluster.origin.objects[write.name]
            await cluster.directory.persisted(write.name, write.uid, "", 1.0)
        return page

    cluster.origin.list_objects = late  # type: ignore[method-assign]
    assert await sets_under(watch(node)) == {}


async def test_prefix_inside_a_set_finds_the_set_whole(start: Start, watch: Watch) -> None:
    cluster = start(1, alone=True)
    for step in (1, 10, 11):
        await save(cluster["a"], step)
    checkpoints = watch(cluster["a"])
    for prefix, steps in (("run/step-10/model-0000", [10]), ("run/step-1/", [1]), ("run/step-1", [11, 10, 1])):
        found = await sets_under(checkpoints, prefix)
        assert list(found) == steps
        assert all(states(each) == (COMPLETE, UPLOADING, True) for each in found.values())


async def test_set_in_the_folders_of_its_ranks_is_one_from_wherever_it_is_asked_for(start: Start, watch: Watch) -> None:
    cluster = start(1, alone=True)
    for rank in range(3):
        await cluster["a"].put(f"job/rank_{rank}/step_5/checkpoint.pt", b"x" * 10)
    await cluster["a"].put("job/rank_0/step_6/checkpoint.pt", b"x")
    checkpoints = watch(cluster["a"])
    for prefix in ("job/", "job/rank_2/", "job/rank_0/step_5/"):
        found = (await sets_under(checkpoints, prefix))[5]
        assert (found.objects_count, found.size_bytes, found.name.prefix) == (3, 30, "job/rank_0/step_5/")
        assert states(found) == (RECEIVING, ABSENT, False)


async def test_set_that_a_pointer_beside_it_speaks_for(start: Start, watch: Watch) -> None:
    cluster = start(1, alone=True)
    node, checkpoints = cluster["a"], watch(cluster["a"])
    for step in (1, 2):
        for name in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"):
            await node.put(f"run/global_step{step}/{name}", b"x" * step)
    assert all(states(each) == (RECEIVING, ABSENT, False) for each in (await sets_under(checkpoints)).values())
    await node.put("run/latest", b"global_step1")
    for prefix in ("run/", "run/global_step1/"):
        found = (await sets_under(checkpoints, prefix))[1]
        assert (states(found), found.objects_count, found.size_bytes) == ((COMPLETE, UPLOADING, True), 2, 2)
    assert states((await sets_under(checkpoints))[2]) == (RECEIVING, ABSENT, False)
    await node.put("run/latest", b"global_step2")
    assert newest((await sets_under(checkpoints)).values()) == (await sets_under(checkpoints))[2]


async def test_markers_are_read_once_for_as_long_as_their_sets_stay_what_they_are(
    start: Start, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = start(1, alone=True, revalidate_s="0s")
    for step in (1, 2):
        for key, body in files(step).items():
            cluster.origin.put_foreign(name_of(key), body)
    checkpoints, read, asked = watch(cluster["a"]), list[int | None](), recognition.manifest_of

    def counted(name: SetName, sizes: Mapping[str, int], body: ReadBody) -> Manifest:
        read.append(name.step)
        return asked(name, sizes, body)

    monkeypatch.setattr(recognition, "manifest_of", counted)
    for _ in range(3):
        assert all(each.is_whole for each in (await sets_under(checkpoints)).values())
    assert sorted(map(str, read)) == ["1", "2"]
    cluster.origin.put_foreign(name_of(f"run/step-1/{INDEX}"), b'{"weight_map": {"w": "other.safetensors"}}')
    found = await sets_under(checkpoints)
    assert (found[1].tiers[Tier.S3].state, found[1].is_whole, found[2].is_whole) == (DAMAGED, False, True)
    assert read[2:] == [1]


async def test_what_was_read_of_another_version_than_was_listed_is_not_remembered(
    start: Start, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = start(1, alone=True, revalidate_s="0s")
    await persist(cluster, await save(cluster["a"], 1))
    checkpoints, name = watch(cluster["a"]), name_of(f"run/step-1/{INDEX}")
    listed, read = cluster.origin.objects[name], Openings.read

    async def late(openings: Openings, *words: Any) -> tuple[Record, bytes]:
        cluster.origin.put_foreign(name, b'{"weight_map": {"w": "other.safetensors"}}')
        return await read(openings, *words)

    with monkeypatch.context() as patched:
        patched.setattr(Openings, "read", late)
        assert (await sets_under(checkpoints))[1].is_whole is False
    cluster.origin.objects[name] = listed
    assert (await sets_under(checkpoints))[1].is_whole is True


async def test_everywhere_looks_into_all_buckets_and_says_where_it_could_not(start: Start, watch: Watch) -> None:
    cluster = start(1, alone=True)
    await save(cluster["a"], 1)
    checkpoints = watch(cluster["a"])
    await cluster.directory.put_bucket(Bucket("gone", "us-east-1", False, 1.0))
    asked = cluster.origin.list_objects

    async def refusing(bucket: str, *words: object, **named: object) -> OriginPage:
        if bucket == "gone":
            raise NotFoundError("NoSuchBucket", "The specified bucket does not exist")
        return await asked(bucket, *words, **named)  # type: ignore[arg-type]

    cluster.origin.list_objects = refusing  # type: ignore[method-assign]
    here, gone = await checkpoints.everywhere()
    assert (here.bucket, len(here.sets), here.unseen) == (BUCKET, 1, frozenset())
    assert (gone.bucket, gone.fault) == ("gone", "The specified bucket does not exist")
    with pytest.raises(NotFoundError):
        await checkpoints.under("gone", "")


async def test_more_than_can_be_looked_at_is_refused(
    start: Start, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = start(1, alone=True)
    await save(cluster["a"], 1)
    monkeypatch.setattr("tiergate.engine.whereabouts.THINGS_LIMIT_COUNT", 2)
    with pytest.raises(RequestError, match="name one with fewer"):
        await watch(cluster["a"]).under(BUCKET, "")


async def test_directory_that_is_away_is_an_error(cluster: Cluster, watch: Watch) -> None:
    await save(cluster["a"], 1)
    cluster.directory.is_away = True
    with pytest.raises(OverloadedError):
        await watch(cluster["a"]).under(BUCKET, "run/")
    with pytest.raises(OverloadedError):
        await watch(cluster["a"]).everywhere()
    cluster.directory.is_away = False


async def test_end_lets_nobody_wait(start: Start) -> None:
    cluster = start(1, alone=True)
    for key, body in files(1).items():
        cluster.origin.put_foreign(name_of(key), body)
    checkpoints = Checkpoints(cluster["a"].rooms)
    held = asyncio.Event()

    @asynccontextmanager
    async def hang(*words: object, **named: object) -> AsyncIterator[None]:
        held.set()
        await asyncio.Event().wait()
        yield

    cluster.origin.get_object = hang  # type: ignore[assignment,method-assign]
    looking = asyncio.create_task(checkpoints.under(BUCKET, "run/"))
    await held.wait()
    await checkpoints.close()
    (found,) = (await looking).sets
    assert found.status.is_unknown


def go_away(cluster: Cluster) -> None:
    async def away(*words: object, **named: object) -> OriginPage:
        raise OriginTemporaryError("away")

    cluster.origin.is_away = True
    cluster.origin.list_objects = away  # type: ignore[method-assign]
