"""Which checkpoint a restart takes, as an engine chooses it."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest
from tests.unit.checkpoints.test_recognition import real
from tests.unit.engine.cluster import BUCKET, Cluster, Node, name_of
from tests.unit.engine.test_checkpoints import INDEX, SHARDS, Start, Watch, persist, watch

from tiergate.checkpoints.newest import UnseenTierError
from tiergate.checkpoints.sets import Tier
from tiergate.checkpoints.verification import Damage, Fault
from tiergate.engine.checkpoints import Checkpoints, FoundSet
from tiergate.engine.looks import Finding, Looks, Wish
from tiergate.engine.mending import Mending
from tiergate.engine.newest import ATTEMPTS_COUNT, Chooser, Newest, Question
from tiergate.engine.proving import Proof, Proving
from tiergate.engine.verify import Verdict, Verification, Verify
from tiergate.engine.wholesets import WholeSets
from tiergate.errors import OverloadedError, PeerError
from tiergate.model import LOST, Plan, QuarantinedSet, Stage
from tiergate.writeback.keeper import Found

__all__ = ["watch"]  # a fixture

RUN = Question(BUCKET, "run/")
FIRST = SHARDS[0]


@pytest.fixture
async def chooser() -> AsyncIterator[Callable[[Node], Chooser]]:
    """Makes what chooses, as a node does."""
    async with AsyncExitStack() as stack:

        def make(node: Node) -> Chooser:
            found = Chooser(node.rooms)
            stack.push_async_callback(found.close)
            return found

        yield make


@pytest.fixture
async def verify() -> AsyncIterator[Callable[..., Awaitable[list[Verdict]]]]:
    """Looks at the sets of a run as `tiergate verify` does; what it found of each."""
    async with AsyncExitStack() as stack:

        async def verify(node: Node, wish: Wish, *, repair: bool = False) -> list[Verdict]:
            checkpoints, mending = Checkpoints(node.rooms), Mending(node.rooms)
            made = Verify(node.rooms, checkpoints, mending)
            for each in (checkpoints, mending, made):
                stack.push_async_callback(each.close)
            progress = Verification()
            await made.run(BUCKET, "run/", wish, progress, repair=repair)
            return [each.verdict for each in progress.sets]

        yield verify


Make = Callable[[Node], Chooser]


def shard(step: int, part: int) -> bytes:
    size_bytes = step + part
    tensor = {"dtype": "U8", "shape": [size_bytes], "data_offsets": [0, size_bytes]}
    head = json.dumps({f"w{part}": tensor}).encode()
    return len(head).to_bytes(8, "little") + head + bytes(size_bytes)


def files(step: int) -> dict[str, bytes]:
    """A checkpoint that loads, in the order in which it is written."""
    prefix = f"run/step-{step}/"
    index = {"metadata": {}, "weight_map": {f"w{part}": name for part, name in enumerate(SHARDS)}}
    found = {prefix + name: shard(step, part) for part, name in enumerate(SHARDS)}
    return found | {prefix + INDEX: json.dumps(index).encode()}


async def save(node: Node, step: int) -> dict[str, bytes]:
    for key, body in files(step).items():
        await node.put(key, body)
    return files(step)


def told(found: Newest) -> tuple[int | None, list[int | None]]:
    """The step that was chosen, and those passed over."""
    return found.status.step if found.status else None, [each.status.step for each in found.passed_over]


async def saved(cluster: Cluster, *steps: int) -> None:
    """So many checkpoints, which S3 has as well."""
    for step in steps:
        await persist(cluster, await save(cluster["a"], step))


def before_each_proof(monkeypatch: pytest.MonkeyPatch, act: Callable[[FoundSet], Awaitable[None]]) -> list[int | None]:
    """Have something happen once a set was found, before it is looked at; the steps of those."""
    prove, seen = Proving.prove, list[int | None]()

    async def late(proving: Proving, found: FoundSet, *words: Any) -> Proof | None:
        seen.append(found.status.step)
        await act(found)
        return await prove(proving, found, *words)

    monkeypatch.setattr(Proving, "prove", late)
    return seen


async def test_newest_is_overwritten_while_it_is_looked_at_and_judged_anew(
    start: Start, chooser: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = start(1, alone=True)
    node = cluster["a"]
    await saved(cluster, 1, 2)

    async def overwrite(found: FoundSet) -> None:
        if len(seen) == 1:
            await node.put(f"run/step-2/{FIRST}", shard(2, 0))

    seen = before_each_proof(monkeypatch, overwrite)
    assert told(await chooser(node).choose(RUN)) == (1, [])
    assert seen == [2, 1]
    await save(node, 2)
    assert told(await chooser(node).choose(RUN)) == (2, [])


async def test_newest_is_written_anew_while_it_is_looked_at(
    start: Start, chooser: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = start(1, alone=True)
    await saved(cluster, 1, 2)

    async def overwrite(found: FoundSet) -> None:
        if len(seen) == 1:
            await save(cluster["a"], 2)

    seen = before_each_proof(monkeypatch, overwrite)
    assert told(await chooser(cluster["a"]).choose(RUN)) == (2, [])
    assert seen == [2, 2]


@pytest.mark.parametrize("behind", [False, True])
async def test_newest_goes_while_it_is_looked_at(
    start: Start, chooser: Make, monkeypatch: pytest.MonkeyPatch, behind: bool
) -> None:
    cluster = start(1, alone=True)
    await saved(cluster, 1, 2)

    async def delete(found: FoundSet) -> None:
        if found.status.step == 2:
            for key in reversed(files(2)):
                if behind:
                    cluster.origin.objects.pop(name_of(key), None)
                else:
                    await cluster["a"].ask("DeleteObject", "DELETE", key)

    before_each_proof(monkeypatch, delete)
    assert told(await chooser(cluster["a"]).choose(RUN)) == (1, [])
    assert await cluster.directory.quarantined_sets(BUCKET) == []


async def test_what_keeps_changing_is_an_error_in_the_end(
    start: Start, chooser: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = start(1, alone=True)
    await saved(cluster, 1, 2)

    async def overwrite(found: FoundSet) -> None:
        await save(cluster["a"], 2)

    seen = before_each_proof(monkeypatch, overwrite)
    with pytest.raises(OverloadedError, match="keeps changing"):
        await chooser(cluster["a"]).choose(RUN)
    assert len(seen) == ATTEMPTS_COUNT


async def test_write_back_meanwhile_changes_nothing(
    start: Start, chooser: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = start(1, alone=True)
    bodies = await save(cluster["a"], 1)
    seen = before_each_proof(monkeypatch, lambda found: persist(cluster, bodies))
    assert told(await chooser(cluster["a"]).choose(RUN)) == (1, [])
    assert seen == [1]


async def test_what_memory_has_is_looked_at_without_s3(
    start: Start, chooser: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = start(1, alone=True)
    await saved(cluster, 1)
    asked = list[str]()
    head = cluster.origin.head_object

    async def counted(name: Any, **more: Any) -> Any:
        asked.append(name.key)
        return await head(name, **more)

    cluster.origin.head_object = counted  # type: ignore[method-assign]
    made = chooser(cluster["a"])
    assert told(await made.choose(RUN)) == (1, [])
    assert asked == []
    assert told(await made.choose(Question(BUCKET, "run/", deep=True))) == (1, [])
    assert sorted(set(asked)) == sorted(files(1))


async def test_shard_that_a_client_wrote_short_is_damage_though_only_memory_has_it(start: Start, chooser: Make) -> None:
    cluster = start(1, alone=True)
    node = cluster["a"]
    await save(node, 1)
    for key, body in files(2).items():
        await node.put(key, body[:-1] if key.endswith(FIRST) else body)
    found = await chooser(node).choose(RUN)
    assert told(found) == (1, [2])
    assert f"run/step-2/{FIRST}: header in memory" in found.passed_over[0].reason


async def test_only_what_is_right_nowhere_is_damage_in_memory(start: Start, chooser: Make) -> None:
    cluster = start()
    bodies = await save(cluster["a"], 1)
    first = f"run/step-1/{FIRST}"
    held = (await cluster.directory.get(name_of(first))).record
    assert held is not None
    assert held.version is not None
    uids = [part.body.uid for part in held.version.parts]
    one, other = sorted(await cluster.holders(first))
    # One copy is gone, which nobody said: the other is enough, until that goes as well.
    cluster.memories[one].drop(held.version.uid, uids)
    made = chooser(cluster[one])
    assert told(await made.choose(RUN)) == (1, [])
    cluster.memories[other].drop(held.version.uid, uids)
    found = await made.choose(RUN)
    assert told(found) == (None, [1])
    assert first in found.passed_over[0].reason
    # It is brought again, from where it was saved: nothing is held against it then.
    await cluster["a"].put(first, bodies[first])
    await cluster["a"].put(f"run/step-1/{INDEX}", bodies[f"run/step-1/{INDEX}"])
    assert told(await made.choose(RUN)) == (1, [])
    assert await cluster.directory.quarantined_sets(BUCKET) == []


async def test_node_that_does_not_answer_is_no_damage(
    cluster: Cluster, chooser: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    bodies = await save(cluster["a"], 1)
    first = next(iter(bodies))
    holders = await cluster.holders(first)
    outside = next(name for name in "abc" if name not in holders)
    made = chooser(cluster[outside])

    async def silent(*words: Any) -> AsyncIterator[bytes]:
        raise PeerError("it does not answer")
        yield b""

    async def none(*words: Any) -> set[str]:
        return set()

    for _ in range(2):  # What it must hold is not known yet, then it is.
        with monkeypatch.context() as patched:
            kind = type(cluster[outside].rooms.replication)
            patched.setattr(kind, "held", none)
            patched.setattr(kind, "read", silent)
            with pytest.raises(UnseenTierError, match=r"do not give it|does not answer"):
                await made.choose(RUN)
        assert await cluster.directory.quarantined_sets(BUCKET) == []
        assert told(await made.choose(RUN)) == (1, [])


@pytest.mark.semantics("P7.9")
async def test_nodes_that_are_gone_are_waited_for_until_what_they_held_is_lost(start: Start, chooser: Make) -> None:
    cluster = start(8)  # Three objects, on two nodes each.
    bodies = await save(cluster["a"], 1)
    await persist(cluster, bodies)
    await save(cluster["a"], 2)
    holders = set().union(*[await cluster.holders(key) for key in files(2)])
    outside = next(name for name in "abcdefgh" if name not in holders)
    made = chooser(cluster[outside])
    assert told(await made.choose(RUN)) == (2, [])
    for name in holders:
        cluster.peers.kill(name)
    with pytest.raises(UnseenTierError, match="may come back"):
        await made.choose(RUN)
    assert told(await made.choose(Question(BUCKET, "run/", frozenset({Tier.S3})))) == (1, [2])
    assert await cluster.directory.quarantined_sets(BUCKET) == []
    for write in await cluster.directory.pending():
        await cluster.directory.quarantine(write.name, write.uid, LOST)
    assert told(await made.choose(RUN)) == (1, [2])
    (aside,) = await cluster.directory.quarantined_sets(BUCKET)
    assert aside.prefix == "run/step-2/"


@pytest.mark.parametrize("deep", [False, True])
async def test_set_that_was_written_anew_behind_the_gateway_counts_as_it_is(
    start: Start, chooser: Make, deep: bool
) -> None:
    cluster = start(1, alone=True)
    await saved(cluster, 1, 2)
    for key, body in files(2).items():
        cluster.origin.put_foreign(name_of(key), body)
    made, question = chooser(cluster["a"]), Question(BUCKET, "run/", deep=deep)
    assert told(await made.choose(question)) == (2, [])
    cluster.origin.put_foreign(name_of(f"run/step-1/{FIRST}"), shard(1, 0))
    cluster.origin.put_foreign(name_of(f"run/step-2/{FIRST}"), shard(2, 0)[:-1])
    found = await made.choose(question)
    assert told(found) == (None, [2, 1])
    assert "header in s3" in found.passed_over[0].reason
    assert "changed in s3" in found.passed_over[1].reason


async def test_torn_and_unreadable_sets_are_damage_while_the_origin_speaks(start: Start, chooser: Make) -> None:
    cluster = start(1, alone=True, prefixes=[f"{{uri='s3://{BUCKET}/', exclusive=true}}"])
    await saved(cluster, 1, 2, 3)
    del cluster.origin.objects[name_of(f"run/step-3/{FIRST}")]
    await cluster["a"].put(f"run/step-2/{INDEX}", b"\x80 no JSON")
    await cluster.directory.trim_clean(2)
    cluster.origin.is_away = True
    made = chooser(cluster["a"])
    with pytest.raises(UnseenTierError):
        await made.choose(RUN)
    assert await cluster.directory.quarantined_sets(BUCKET) == []
    cluster.origin.is_away = False
    found = await chooser(cluster["a"]).choose(RUN)
    assert told(found) == (1, [3, 2])


async def test_those_who_ask_meanwhile_share_the_look_that_began_after_them(
    start: Start, chooser: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = start(1, alone=True)
    await save(cluster["a"], 1)
    begun, going = asyncio.Event(), asyncio.Event()

    async def wait(found: FoundSet) -> None:
        begun.set()
        await going.wait()

    seen = before_each_proof(monkeypatch, wait)
    made = chooser(cluster["a"])
    async with asyncio.TaskGroup() as group:
        first = group.create_task(made.choose(RUN))
        await begun.wait()
        await save(cluster["a"], 2)
        others = [group.create_task(made.choose(RUN)) for _ in range(20)]
        elsewhere = group.create_task(made.choose(Question(BUCKET, "other/")))
        await asyncio.sleep(0)
        going.set()
    assert told(first.result()) == (1, [])
    assert [told(each.result()) for each in others] == [(2, [])] * 20
    assert told(elsewhere.result()) == (None, [])
    assert seen == [1, 2]


async def test_one_who_gives_up_takes_nothing_from_the_others(
    start: Start, chooser: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = start(1, alone=True)
    await save(cluster["a"], 1)
    begun, going = asyncio.Event(), asyncio.Event()

    async def wait(found: FoundSet) -> None:
        begun.set()
        await going.wait()

    before_each_proof(monkeypatch, wait)
    made = chooser(cluster["a"])
    first, other = asyncio.create_task(made.choose(RUN)), asyncio.create_task(made.choose(RUN))
    await begun.wait()
    first.cancel()
    going.set()
    assert told(await other) == (1, [])
    with pytest.raises(asyncio.CancelledError):
        await first


@pytest.mark.parametrize("folder", ["ns/rank_{}/step_7/", "ray/step_7/rank_{}/"])
async def test_set_in_folders_of_its_ranks_is_chosen_and_its_lost_shard_is_damage(
    start: Start, chooser: Make, folder: str
) -> None:
    cluster = start(1, alone=True)
    tiered, under = real("sagemaker"), f"base/{folder.partition('/')[0]}/"
    for key in sorted((key for key in tiered.sizes if key.startswith(under)), reverse=True):
        # Of shards nothing but their lengths was kept.
        cluster.origin.put_foreign(name_of(key), tiered.bodies.get(key) or bytes(tiered.sizes[key]))
    made = chooser(cluster["a"])
    found = await made.choose(Question(BUCKET, under))
    assert (told(found), found.status and found.status.objects_count) == ((7, []), 3)
    shard = f"base/{folder.format(1)}checkpoint.pt"
    del cluster.origin.objects[name_of(shard)]
    found = await made.choose(Question(BUCKET, "base/"))
    assert told(found) == (None, [7])
    assert f"{shard}: missing in s3" in found.passed_over[0].reason


async def test_set_that_a_pointer_names_is_chosen_too(start: Start, chooser: Make) -> None:
    cluster = start(1, alone=True)
    node = cluster["a"]
    for step in (1, 2):
        for name in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"):
            await node.put(f"run/global_step{step}/{name}", b"x" * step)
    made = chooser(node)
    assert told(await made.choose(RUN)) == (None, [])
    await node.put("run/latest", b"global_step2")
    found = await made.choose(RUN)
    assert (told(found), found.status and found.status.name.prefix) == ((2, []), "run/global_step2/")


@pytest.mark.semantics("P7.6")
async def test_verification_that_proves_a_set_lifts_its_quarantine(
    start: Start, chooser: Make, verify: Callable[..., Awaitable[list[Verdict]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = start(1, alone=True)
    node = cluster["a"]
    await saved(cluster, 1)
    made, look = chooser(node), Looks.look

    async def wrong(looks: Looks, bucket: str, target: Any, wish: Wish, known: str = "") -> Finding:
        finding = await look(looks, bucket, target, wish, known)
        finding.unasked.clear()
        finding.damages = [*finding.damages, *bad]
        return finding

    # As if a disk of S3 had given other bytes for a while.
    bad = [Damage(f"run/step-1/{FIRST}", Tier.S3, Fault.CHECKSUM, "a block differs")]
    with monkeypatch.context() as patched:
        patched.setattr(Looks, "look", wrong)
        assert told(await made.choose(RUN)) == (None, [1])
    assert told(await made.choose(RUN)) == (None, [1]), "nothing of it changed"
    assert await verify(node, Wish()) == [Verdict.SOUND]
    assert await verify(node, Wish(frozenset({Tier.S3}), deep=True)) == [Verdict.SOUND]
    assert told(await made.choose(RUN)) == (None, [1]), "not all was proved"
    assert await verify(node, Wish(deep=True)) == [Verdict.SOUND]
    assert told(await made.choose(RUN)) == (1, [])


async def test_who_looks_after_runs_hears_of_a_quarantine_though_nothing_was_written(
    start: Start, watch: Watch
) -> None:
    cluster = start(1, alone=True)
    await saved(cluster, 1)
    checkpoints = watch(cluster["a"])
    sets = WholeSets(checkpoints, cluster.clock)
    found = Found(Plan(BUCKET, "run/step-1/", "run/", Stage.SENT, 1, 1, 1.0))
    assert await sets.judge(found)
    (known,) = (await checkpoints.under(BUCKET, "run/")).sets
    aside = QuarantinedSet(BUCKET, "run/step-1/", known.bodies, "a head is broken", 1.0)
    await cluster.directory.quarantine_set(aside)
    assert not await sets.judge(found)
    await cluster.directory.release_set(aside)
    assert await sets.judge(found)
