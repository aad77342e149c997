"""Both directories, driven by the same random calls, say the same: revisions differ, their order does not."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, cast

import pytest
from tests.directoryrows import check_rows

from tiergate.clock import SystemClock
from tiergate.config import Persist
from tiergate.directory.base import Committed, Directory, Intent, Seen
from tiergate.directory.clustered import ClusteredDirectory
from tiergate.directory.embedded import EmbeddedDirectory
from tiergate.directory.keys import Keys
from tiergate.errors import ConflictError, FencedError, NotFoundError
from tiergate.etcd.client import EtcdClient
from tiergate.model import (
    NO_BASE,
    UNKNOWN_BASE,
    ObjectName,
    OriginUpload,
    Pending,
    Plan,
    Record,
    Role,
    Stage,
    Step,
    new_uid,
)
from tiergate.policy.persistence import Beginning
from tiergate.testing.directory_contract import make_completed, make_part, make_upload, make_version
from tiergate.testing.etcd import needs_etcd

pytestmark = needs_etcd

T = TypeVar("T")

NAMES = [
    ObjectName(bucket, key)
    for bucket in ("b", "b2")
    for key in ("r/1/s", "r/1/t", "r/1/.metadata", "r/.metadata", "r/1/p.json", "é/s", "k" * 600)
]
HISTORIES_COUNT = 40
CALLS_COUNT = 60
SET = "r/1/"
"""The one that has plans."""

Call = Callable[[Directory, Seen], Awaitable[Any]]


def role_of(name: ObjectName) -> Role:
    if name.key.endswith(".metadata"):
        return Role.MARKER
    return Role.POINTER if name.key.endswith(".json") else Role.SMALL


class Pair:
    """The two, and what each revision of the second is in the first."""

    def __init__(self, first: Directory, second: Directory) -> None:
        self.first = first
        self.second = second
        self.revisions = {0: 0}

    async def call(self, name: ObjectName, call: Call) -> None:
        seen = await self.first.get(name), await self.second.get(name)
        before = await self.first.revision()
        ends = [await attempt(call(*each)) for each in zip((self.first, self.second), seen, strict=True)]
        after = await self.first.revision()
        if after != before:
            self.revisions[await self.second.revision()] = after
        assert self.as_first(ends[1]) == plain(ends[0])

    async def compare(self, read: Callable[[Directory], Awaitable[Any]]) -> None:
        assert self.as_first(await read(self.second)) == plain(await read(self.first))

    def as_first(self, value: Any) -> Any:
        """A value of the second directory with the revisions of the first."""
        if isinstance(value, list | tuple):
            return [self.as_first(each) for each in value]
        if isinstance(value, Seen):
            return self.as_first(value.record), self.as_first(value.pending)
        own = (
            {"revision", "modified", "place", "start_revision", "dropped"}
            if isinstance(value, Record | Pending | Committed | Plan)
            else set[str]()
        )
        changed = {name: self.revisions[getattr(value, name)] for name in own if hasattr(value, name)}
        return plain(replace(value, **changed) if changed else value)


def plain(value: Any) -> Any:
    """Without what no directory promises: the uid of a delete, and which revision was the newest at a read."""
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, Seen):
        return plain(value.record), plain(value.pending)
    if isinstance(value, Pending) and value.uid.startswith("delete-"):
        return replace(value, uid="delete")
    return value


async def attempt(call: Awaitable[T]) -> T | type[Exception]:
    try:
        return await call
    except (ConflictError, FencedError, NotFoundError) as error:
        return type(error)


def any_call(rng: random.Random, count: int, name: ObjectName, started: list[str]) -> Call:
    """One of all changing calls, with arguments that are the same for both directories. `started`: uploads."""
    now_s, uid, etag = 1000.0 + count, f"v{count}", f"o{count}"
    base, role = rng.choice([UNKNOWN_BASE, NO_BASE, "asked"]), role_of(name)
    guarded, right = rng.random() < 0.3, rng.random() < 0.85
    upload, up, new_up = OriginUpload(rng.choice(["", f"u{count}"]), now_s), rng.choice(started), f"up{count}"
    part = make_part(rng.randrange(1, 4), f"p{count}")
    conditional = rng.random() < 0.2
    share, stage = rng.random(), rng.choice(list(Stage))

    def intent(seen: Seen) -> Intent:
        guard = (seen.guard if right else seen.guard + 1) if guarded else None
        points_to = (SET,) if role is Role.POINTER and share < 0.5 else ()
        return Intent(role, 0, now_s, base, guard, conditional, parked=share > 0.8, points_to=points_to)

    async def put_planned(directory: Directory, seen: Seen) -> Committed:
        plan = await directory.get_plan(name.bucket, SET)
        return await directory.put(name, make_version(uid), replace(intent(seen), base=NO_BASE, plan=plan))

    async def decide(directory: Directory, seen: Seen) -> Plan:
        plan = await directory.get_plan(name.bucket, SET)
        instead_of = plan.revision if plan is not None and guarded else 0
        persist = Persist(2) if share < 0.5 else Persist(0)
        beginning = Beginning(name.bucket, SET, "r/", persist, now_s, right, instead_of=instead_of)
        return await directory.decide(beginning)

    async def change_plan(directory: Directory, seen: Seen) -> object:
        plan = await directory.get_plan(name.bucket, SET)
        if plan is None or guarded:
            return plan and await directory.drop_plan(plan)
        return await directory.change_plan(plan if right else replace(plan, ordinal=99), replace(plan, stage=stage))

    async def promote(directory: Directory, seen: Seen) -> int:
        return await directory.promote([seen.pending] if seen.pending else [], now_s)

    async def park(directory: Directory, seen: Seen) -> bool:
        plan = await directory.get_plan(name.bucket, SET)
        return plan is not None and await directory.park(name, owed(seen), plan)

    def owed(seen: Seen) -> str:
        return seen.pending.uid if seen.pending and right else "other"

    def current(seen: Seen) -> str:
        return seen.record.version.uid if seen.record and seen.record.version and right else "other"

    async def drop_leftovers(directory: Directory, seen: Seen) -> None:
        left = list(seen.pending.leftovers[:1]) if seen.pending else []
        left += [each for named, each in sorted(await directory.orphan_uploads(), key=repr) if named == name][:1]
        await directory.drop_leftovers(name, left)

    async def move_part(directory: Directory, seen: Seen) -> bool:
        parts = await directory.list_parts(up)
        old = parts[0] if parts and right else part
        return await directory.move_part(up, old, replace(old, spilled_etag="s"))

    async def finish_upload(directory: Directory, seen: Seen) -> Committed:
        known = await directory.get_upload(up)
        there = await directory.get(known.name) if known else seen
        parts = await directory.list_parts(up)
        chosen = parts[:2] if right else [part]
        return await directory.finish_upload(up, make_completed(uid, *chosen), [(1, "e")], intent(there))

    uid_of_step = f"t{rng.randrange(2)}{name.bucket}{name.key}"
    step = Step(name, uid_of_step, rng.choice(["worker", "background"]), role, guarded, conditional)

    async def end_step(directory: Directory, seen: Seen) -> None:
        for each in sorted(await directory.steps(), key=lambda each: each.uid)[:1]:
            await directory.end_step(each)

    async def create_upload(directory: Directory, seen: Seen) -> None:
        await directory.create_upload(make_upload(new_up, name, now_s))
        if new_up not in started:
            started.append(new_up)

    calls: list[Call] = [
        lambda directory, seen: directory.put(name, make_version(uid), intent(seen)),
        lambda directory, seen: directory.put_through(name, make_version(uid), etag, intent(seen)),
        lambda directory, seen: directory.delete(name, intent(seen)),
        lambda directory, seen: directory.adopt(
            name, make_version(uid), etag, role, now_s, seen.drops if guarded else None
        ),
        lambda directory, seen: directory.revalidated(name, current(seen), now_s),
        lambda directory, seen: directory.forget(name, current(seen) if guarded else None),
        lambda directory, seen: directory.begin(name, owed(seen), base),
        lambda directory, seen: directory.note_upload(name, owed(seen), upload if right else None),
        lambda directory, seen: directory.rebase(name, owed(seen), etag),
        lambda directory, seen: directory.persisted(name, owed(seen), etag, now_s),
        lambda directory, seen: directory.withdraw(name, current(seen), now_s),
        lambda directory, seen: directory.owe_again(name, current(seen), base, now_s),
        lambda directory, seen: directory.withdrawn(name, owed(seen)),
        lambda directory, seen: directory.quarantine(name, owed(seen), "refused" if guarded else ""),
        drop_leftovers,
        create_upload,
        lambda directory, seen: directory.put_part(up, part),
        lambda directory, seen: directory.note_spill(up, f"s{count}"),
        move_part,
        lambda directory, seen: directory.abort_upload(up),
        finish_upload,
        lambda directory, seen: directory.begin_step(step),
        end_step,
        lambda directory, seen: directory.settled_set(name, owed(seen)),
        lambda directory, seen: directory.end_spilled(up, make_version(uid), [(1, "e")], now_s),
        put_planned,
        decide,
        change_plan,
        promote,
        park,
    ]
    weights = [8, 3, 4, 3, 1, 1, 4, 3, 1, 6, 2, 2, 1, 1, 2, 2, 3, 1, 1, 1, 2, 2, 2, 1, 1, 6, 3, 2, 3, 2]
    return rng.choices(calls, weights)[0]


async def counts_of(directory: Directory) -> dict[str, int]:
    """Without its size, which is the store's own."""
    return {name: count for name, count in (await directory.counts()).items() if name != "used_bytes"}


async def compare_all(pair: Pair, started: list[str]) -> None:
    for name in NAMES:
        await pair.compare(lambda directory, name=name: directory.get(name))  # type: ignore[misc]
    for bucket in ("b", "b2"):
        for prefix in ("", "r/", "k"):
            await pair.compare(lambda directory, at=(bucket, prefix): directory.scan(*at, "", 100))  # type: ignore[misc]
            await pair.compare(
                lambda directory, at=(bucket, prefix): directory.scan_unpersisted(*at, "r/1/s", 100)  # type: ignore[misc]
            )
        await pair.compare(lambda directory, at=bucket: directory.standing_markers(at, ["r/1/", "r/", ""]))  # type: ignore[misc]
        await pair.compare(lambda directory, at=bucket: directory.list_uploads(at, ""))  # type: ignore[misc]
        await pair.compare(lambda directory, at=bucket: directory.plans(at, "r/"))  # type: ignore[misc]
        await pair.compare(lambda directory, at=bucket: directory.get_run(at, "r/"))  # type: ignore[misc]
        first, second = [await each.origin_upload_ids(bucket) for each in (pair.first, pair.second)]
        assert second <= first
    await pair.compare(lambda directory: directory.pending())
    await pair.compare(lambda directory: directory.parked())
    await pair.compare(lambda directory: directory.oldest_pending_s())
    await pair.compare(lambda directory: directory.owed_bytes())
    await pair.compare(lambda directory: directory.live_holders())
    await pair.compare(counts_of)
    steps = [sorted(await each.steps(), key=repr) for each in (pair.first, pair.second)]
    assert steps[0] == steps[1]
    for up in started:
        await pair.compare(lambda directory, up=up: directory.list_parts(up))  # type: ignore[misc]
        await pair.compare(lambda directory, up=up: directory.finished_upload(up))  # type: ignore[misc]
    orphans = [sorted(await each.orphan_uploads(), key=repr) for each in (pair.first, pair.second)]
    assert orphans[0] == orphans[1]
    trimmed = [await each.trim_clean(0) for each in (pair.first, pair.second)]
    assert {version.uid for version in trimmed[0]} == {version.uid for version in trimmed[1]}
    await pair.compare(counts_of)


@pytest.mark.parametrize("seed", range(HISTORIES_COUNT))
async def test_any_calls_come_out_the_same(client: EtcdClient, tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    first = EmbeddedDirectory.open(tmp_path, 4 << 20)
    second = ClusteredDirectory(client, Keys(f"/{new_uid(SystemClock().wall_s())}"))
    pair = Pair(cast(Directory, first), cast(Directory, second))
    names, started = rng.sample(NAMES, 6), ["none"]
    for count in range(CALLS_COUNT):
        name = rng.choice(names)
        await pair.call(name, any_call(rng, count, name, started))
    await compare_all(pair, started)
    await second.close()
    first.close()


async def call_some(directory: ClusteredDirectory, rng: random.Random, names: list[ObjectName]) -> None:
    started = ["none"]
    for _ in range(CALLS_COUNT):
        name = rng.choice(names)
        call = any_call(rng, rng.randrange(1 << 30), name, started)
        await attempt(call(cast(Directory, directory), await directory.get(name)))


@pytest.mark.parametrize("seed", range(8))
async def test_rows_stay_true_over_calls_from_many_sides(client: EtcdClient, seed: int) -> None:
    keys = Keys(f"/{new_uid(SystemClock().wall_s())}")
    names = random.Random(seed).sample(NAMES, 4)
    directories = [ClusteredDirectory(client, keys) for _ in range(4)]
    await asyncio.gather(
        *(call_some(each, random.Random(f"{seed}-{index}"), names) for index, each in enumerate(directories))
    )
    await check_rows(client, keys)
    for each in directories:
        await each.close()
