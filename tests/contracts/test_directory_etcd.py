"""The directory of a cluster keeps the directory's contract; and what only it must do."""

import asyncio
import base64
import random
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from tests.directoryrows import check_rows

from tiergate.clock import SystemClock
from tiergate.directory.base import Committed, Directory
from tiergate.directory.clustered import ClusteredDirectory
from tiergate.directory.codec import pack
from tiergate.directory.committer import Change
from tiergate.directory.keys import Keys
from tiergate.errors import DirectoryUnavailableError, MemoryFullError, NotFoundError, OutcomeUnknownError
from tiergate.etcd.client import TRY_S, Access, EtcdClient
from tiergate.etcd.values import Field, Guard, Outcome, Put, Range, Txn
from tiergate.model import BLOCK_BYTES, Body, Bucket, OriginUpload, Part, Role, Step, Version, new_uid
from tiergate.testing.directory_contract import (
    MARKER,
    SHARD,
    DirectoryContract,
    make_completed,
    make_intent,
    make_part,
    make_upload,
    make_version,
    object_name,
    pending_of,
    put,
    record_of,
)
from tiergate.testing.etcd import EtcdServer, needs_etcd

pytestmark = needs_etcd


@pytest.fixture
def keys() -> Keys:
    """A place that no other test uses."""
    return Keys(f"/{new_uid(SystemClock().wall_s())}")


@pytest.fixture
async def clustered(client: EtcdClient, keys: Keys) -> AsyncIterator[ClusteredDirectory]:
    directory = ClusteredDirectory(client, keys)
    yield directory
    await check_rows(client, keys)
    await directory.close()


class TestClusteredDirectory(DirectoryContract):
    @pytest.fixture
    def directory(self, clustered: ClusteredDirectory) -> Directory:
        return clustered


# -- in groups, from many sides
class Lossy(EtcdClient):
    """A client whose answers to transactions get lost when told so, after or before they were sent."""

    lose_after: int = 0
    lose_before: int = 0

    async def txn(self, txn: Txn) -> Outcome:
        if self.lose_before:
            self.lose_before -= 1
            raise OutcomeUnknownError("lost before")
        outcome = await super().txn(txn)
        if self.lose_after:
            self.lose_after -= 1
            raise OutcomeUnknownError("lost after")
        return outcome


class Counting(EtcdClient):
    """A client that counts its ways to etcd."""

    ways_count = 0

    async def _call(self, name: str, message: Any, try_s: float = TRY_S) -> Any:
        self.ways_count += 1
        return await super()._call(name, message, try_s)


async def test_look_takes_one_way_to_etcd_and_a_commit_two_or_three(etcd: EtcdServer, keys: Keys) -> None:
    client = Counting(Access(etcd.endpoints), SystemClock(), random.Random(0))
    directory = ClusteredDirectory(client, keys)
    bucket = Bucket(SHARD.bucket, "us-east-1", False, 1.0)
    await directory.put_bucket(bucket)
    # What replaces a version looks for the markers that it disturbs.
    for uid, ways_count in (("v0", 2), ("v1", 3)):
        client.ways_count = 0
        seen = await directory.get(SHARD)
        assert (client.ways_count, seen.bucket) == (1, bucket)
        client.ways_count = 0
        await put(directory, SHARD, uid)
        assert client.ways_count == ways_count
    await directory.forget_bucket(SHARD.bucket)
    assert (await directory.get(SHARD)).bucket is None
    await directory.close()
    await client.close()


@pytest.fixture
async def lossy(etcd: EtcdServer) -> AsyncIterator[Lossy]:
    client = Lossy(Access(etcd.endpoints), SystemClock(), random.Random(0))
    yield client
    await client.close()


@pytest.fixture
async def through_lossy(lossy: Lossy, keys: Keys) -> AsyncIterator[ClusteredDirectory]:
    directory = ClusteredDirectory(lossy, keys)
    yield directory
    await directory.close()


async def versions_of(client: EtcdClient, key: bytes) -> int:
    """How often a row was written since it was created."""
    return (await client.read(Range(key))).found(0)[0].version


async def test_many_commits_share_few_transactions(clustered: ClusteredDirectory) -> None:
    names = [object_name(f"k{index}") for index in range(300)]
    ends = await asyncio.gather(*(put(clustered, name, name.key) for name in names))
    assert len({end.revision for end in ends}) < 60
    assert {write.uid for write in await clustered.pending()} == {name.key for name in names}


async def test_commits_of_one_key_in_a_group_replace_one_another(clustered: ClusteredDirectory) -> None:
    ends = await asyncio.gather(*(put(clustered, SHARD, f"v{index}") for index in range(20)))
    check_chain([(end.revision, f"v{index}", end.replaced) for index, end in enumerate(ends)], set())


@pytest.mark.parametrize("times", [1, 2])
async def test_answer_lost_after_it_happened_counts_once(
    lossy: Lossy, through_lossy: ClusteredDirectory, keys: Keys, times: int
) -> None:
    await put(through_lossy, SHARD, "v1")
    lossy.lose_after = times
    committed = await put(through_lossy, SHARD, "v2")
    assert committed.replaced == make_version("v1")
    assert (await pending_of(through_lossy, SHARD)).revision == committed.revision
    assert await versions_of(lossy, keys.record(SHARD)) == 2


async def test_transaction_lost_before_it_was_sent_is_sent_again(
    lossy: Lossy, through_lossy: ClusteredDirectory, keys: Keys
) -> None:
    lossy.lose_before = 2
    await put(through_lossy, SHARD, "v1")
    assert await versions_of(lossy, keys.record(SHARD)) == 1


async def test_group_with_a_lost_answer_tells_each_apart(
    lossy: Lossy, through_lossy: ClusteredDirectory, clustered: ClusteredDirectory, keys: Keys
) -> None:
    """Of two changes in one transaction, one had a rival that was faster."""
    guards = [Guard(keys.bucket(name), Field.MODIFIED, 0) for name in "ab"]
    changes = [Change((guard,), (Put(guard.key, b"x"),)) for guard in guards]
    rival = Bucket("b", "eu-west-1", False, 1.0)
    await clustered.put_bucket(rival)
    lossy.lose_after = 1
    done, lost = await asyncio.gather(*(through_lossy._changes._committer.commit(change) for change in changes))
    assert lost is None
    assert done == (await lossy.read(Range(guards[0].key))).found(0)[0].mod_revision
    assert await clustered.get_bucket("b") == rival


async def test_given_up_commit_cannot_happen_after_the_next_one(
    lossy: Lossy, through_lossy: ClusteredDirectory, clustered: ClusteredDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    committer = through_lossy._changes._committer
    committer._patience_s = 0.0
    await put(through_lossy, object_name("warm"), "w")
    sent: list[Txn] = []
    real = lossy.txn

    async def late(txn: Txn) -> Outcome:
        sent.append(txn)
        raise OutcomeUnknownError("on its way for long")

    monkeypatch.setattr(lossy, "txn", late)
    with pytest.raises(OutcomeUnknownError):
        await put(through_lossy, SHARD, "late")
    monkeypatch.setattr(lossy, "txn", real)
    # The key is new again by then, as the late one's own guards want it.
    await put(through_lossy, SHARD, "v1", make_intent(base=""))
    await clustered.delete(SHARD, make_intent())
    assert (await clustered.get(SHARD)).record is None
    assert not (await lossy.txn(sent[0])).succeeded
    assert (await clustered.get(SHARD)).record is None


async def test_given_up_commit_that_happens_in_time_harms_no_later_one(
    lossy: Lossy, through_lossy: ClusteredDirectory, keys: Keys
) -> None:
    through_lossy._changes._committer._patience_s = 0.0
    lossy.lose_after = 1
    with pytest.raises(OutcomeUnknownError):
        await put(through_lossy, SHARD, "v1")
    committed = await put(through_lossy, SHARD, "v2")
    assert committed.replaced == make_version("v1")
    assert await versions_of(lossy, keys.record(SHARD)) == 2


async def test_writer_whose_receipt_was_cleared_goes_on(
    clustered: ClusteredDirectory, client: EtcdClient, keys: Keys
) -> None:
    await put(clustered, SHARD, "v1")
    other = ClusteredDirectory(client, keys)
    await other.expire_finished(SystemClock().wall_s() + 3600.0)
    assert (await put(clustered, SHARD, "v2")).replaced == make_version("v1")
    await other.close()


async def test_cancelled_commit_leaves_the_others_alone(clustered: ClusteredDirectory) -> None:
    tasks = [asyncio.ensure_future(put(clustered, object_name(f"k{index}"), f"v{index}")) for index in range(10)]
    await clustered.get(SHARD)
    for task in tasks[::2]:
        task.cancel()
    ends = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(end, Committed) for end in ends[1::2])
    for index in range(0, 10, 2):
        record = (await clustered.get(object_name(f"k{index}"))).record
        assert record is None or record.version == make_version(f"v{index}")


# -- much at once
async def test_upload_of_many_parts_ends_whole(clustered: ClusteredDirectory) -> None:
    parts = [make_part(number, f"p{number}") for number in range(1, 351)]
    for upload_id in ("up1", "up2"):
        await clustered.create_upload(make_upload(upload_id))
        await asyncio.gather(*(clustered.put_part(upload_id, part) for part in parts))
    assert await clustered.abort_upload("up1") == parts
    await clustered.finish_upload("up2", make_completed("v1", *parts), [], make_intent())
    assert await clustered.list_parts("up1") == await clustered.list_parts("up2") == []


async def test_part_put_while_its_upload_is_aborted_is_returned_or_refused(clustered: ClusteredDirectory) -> None:
    for index in range(10):
        upload_id = f"up{index}"
        await clustered.create_upload(make_upload(upload_id))
        put_one = clustered.put_part(upload_id, make_part(1, "p"))
        aborted, ended = await asyncio.gather(clustered.abort_upload(upload_id), put_one, return_exceptions=True)
        assert aborted == ([] if isinstance(ended, NotFoundError) else [make_part(1, "p")])
        assert await clustered.list_parts(upload_id) == []


async def test_many_steps_under_way_stand_together(clustered: ClusteredDirectory) -> None:
    steps = [Step(object_name(f"s{index}/k"), f"t{index}", "w", Role.SMALL, True, False) for index in range(150)]
    for step in steps:
        assert await clustered.begin_step(step)
    assert not await clustered.begin_step(replace(steps[7], uid="rival"))
    assert len(await clustered.steps()) == 150


async def test_member_under_many_markers_disturbs_all(clustered: ClusteredDirectory) -> None:
    markers = [object_name(f"run/step_1/__{rank}_0.metadata") for rank in range(150)]
    await put(clustered, SHARD, "s1")
    await asyncio.gather(*(put(clustered, name, "m", make_intent(Role.MARKER)) for name in markers))
    await put(clustered, SHARD, "s2", make_intent(now_s=5000.0))
    assert {(await pending_of(clustered, name)).disturbed_s for name in markers} == {5000.0}


async def test_key_of_very_many_scopes_can_be_overwritten(clustered: ClusteredDirectory) -> None:
    name = object_name("a/" * 500 + "shard")
    markers = [object_name("a/" * depth + ".metadata") for depth in (500, 250, 0)]
    await put(clustered, name, "s1")
    for marker in markers:
        await put(clustered, marker, "m", make_intent(Role.MARKER))
    await put(clustered, name, "s2", make_intent(now_s=5000.0))
    assert {(await pending_of(clustered, marker)).disturbed_s for marker in markers} == {5000.0}


async def test_write_of_very_many_leftovers_is_persisted(clustered: ClusteredDirectory) -> None:
    uploads = [OriginUpload(f"u{index}", 1.0) for index in range(150)]
    for index, upload in enumerate(uploads):
        await put(clustered, SHARD, f"v{index}")
        await clustered.note_upload(SHARD, f"v{index}", upload)
    await clustered.persisted(SHARD, "v149", "o", 1.0)
    assert {upload for _, upload in await clustered.orphan_uploads()} == set(uploads)
    await clustered.drop_leftovers(SHARD, uploads)
    assert await clustered.orphan_uploads() == []


async def test_marker_committed_meanwhile_is_disturbed_too(
    client: EtcdClient, clustered: ClusteredDirectory, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was not there when the overwriting commit looked, and is when it happens."""
    await put(clustered, SHARD, "s1")
    real = clustered._changes._committer.commit

    async def commit(change: Change) -> int | None:
        monkeypatch.setattr(clustered._changes._committer, "commit", real)
        other = ClusteredDirectory(client, keys)
        await put(other, MARKER, "m1", make_intent(Role.MARKER))
        await other.close()
        return await real(change)

    monkeypatch.setattr(clustered._changes._committer, "commit", commit)
    await put(clustered, SHARD, "s2", make_intent(now_s=5000.0))
    assert (await pending_of(clustered, MARKER)).disturbed_s == 5000.0


def parts_of(count: int, size_bytes: int, checksums: dict[str, int]) -> tuple[Part, ...]:
    """Parts with nothing in them that could be squeezed out. `checksums`: the lengths of their values."""
    rng = random.Random(0)
    return tuple(
        Part(
            number,
            Body(new_uid(1.7e9 + number / 20), size_bytes, rng.randbytes(8 * -(-size_bytes // BLOCK_BYTES))),
            rng.randbytes(16).hex(),
            1_700_000_000 + number // 20,
            {name: base64.b64encode(rng.randbytes(length)).decode() for name, length in checksums.items()},
        )
        for number in range(1, count + 1)
    )


@pytest.mark.parametrize(
    ("count", "size_bytes", "checksums"),
    [
        (10_000, 5 << 20, {"crc64nvme": 8, "sha256": 32}),
        (10_000, 16 << 20, {"crc64nvme": 8}),
        (6_000, 64 << 20, {"crc64nvme": 8}),
    ],
)
async def test_upload_of_very_many_parts_is_completed(
    clustered: ClusteredDirectory,
    client: EtcdClient,
    keys: Keys,
    count: int,
    size_bytes: int,
    checksums: dict[str, int],
) -> None:
    parts = parts_of(count, size_bytes, checksums)
    version = replace(make_version("v1"), parts=parts, size_bytes=count * size_bytes)
    await clustered.create_upload(make_upload("up"))
    for start in range(0, count, 100):
        rows = (Put(keys.part("up", part.number), pack(part)) for part in parts[start : start + 100])
        await client.txn(Txn((), tuple(rows)))
    await clustered.finish_upload("up", version, [(part.number, part.etag) for part in parts], make_intent(Role.LARGE))
    assert (await record_of(clustered, SHARD)).version == version
    finished = await clustered.finished_upload("up")
    assert finished is not None
    assert len(finished.parts) == count
    assert await clustered.expire_finished(finished.finished_s + 1.0) == 1
    assert await clustered.finished_upload("up") is None


async def test_version_too_large_for_etcd_is_refused(clustered: ClusteredDirectory) -> None:
    await put(clustered, SHARD, "v1")
    huge = replace(make_version("v2"), parts=parts_of(10_000, 64 << 20, {"crc64nvme": 8}))
    with pytest.raises(MemoryFullError):
        await clustered.put(SHARD, huge, make_intent())
    assert (await record_of(clustered, SHARD)).version == make_version("v1")


async def test_counts_tell_what_the_store_takes(clustered: ClusteredDirectory, etcd: EtcdServer) -> None:
    before = etcd.status(etcd.members[0]).dbSize
    used_bytes = (await clustered.counts())["used_bytes"]
    assert 0 < before <= used_bytes <= etcd.status(etcd.members[0]).dbSize


async def test_reads_begin_anew_when_history_goes_under_them(
    etcd: EtcdServer, keys: Keys, clustered: ClusteredDirectory
) -> None:
    class Forgetful(EtcdClient):
        """Whatever it reads is compacted at once: what is read next must not be as of then."""

        times = 0

        async def read(self, *ranges: Range) -> Outcome:
            outcome = await super().read(*ranges)
            if self.times:
                self.times -= 1
                await put(clustered, object_name("other"), "o")
                etcd.compact(outcome.revision + 1)
            return outcome

    await asyncio.gather(*(put(clustered, object_name(f"k{index:03}"), f"v{index}") for index in range(150)))
    await put(clustered, object_name(".metadata"), "m", make_intent(Role.MARKER))
    client = Forgetful(Access(etcd.endpoints), SystemClock(), random.Random(0))
    directory = ClusteredDirectory(client, keys)
    for read in (
        lambda: directory.pending(),
        lambda: directory.scan("bucket", "", "", 1000),
        lambda: directory.scan_unpersisted("bucket", "", "", 1000),
        lambda: directory.live_holders(),
        lambda: directory.counts(),
        lambda: directory.standing_markers("bucket", [""]),
        lambda: put(directory, object_name("k001"), "again", make_intent(now_s=9000.0)),
    ):
        client.times = 1
        assert await read()
        assert client.times == 0
    client.times = 1000
    with pytest.raises(DirectoryUnavailableError):
        await directory.pending()
    await directory.close()
    await client.close()


async def test_records_of_many_keys_are_read_together(
    clustered: ClusteredDirectory, client: EtcdClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    await clustered.put(object_name("k249"), make_version("v1"), make_intent())
    asked: list[int] = []
    real = client.read

    async def read(*ranges: Range) -> Outcome:
        asked.append(len(ranges))
        return await real(*ranges)

    monkeypatch.setattr(client, "read", read)
    found = await clustered.records("bucket", [f"k{index}" for index in range(250)])
    assert [record.name.key for record in found] == ["k249"]
    assert asked == [100, 100, 50]


async def test_scan_pages_of_large_records_are_small(
    clustered: ClusteredDirectory, client: EtcdClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(0)
    parts = tuple(Part(number, Body(f"b{number}", 1, rng.randbytes(1000)), "e") for number in range(1, 101))
    version = replace(make_version("v1"), parts=parts)
    names = [object_name(f"k{index:03}") for index in range(130)]
    await asyncio.gather(*(clustered.put(name, version, make_intent()) for name in names))
    asked: list[int] = []
    real = client.read

    async def read(*ranges: Range) -> Outcome:
        asked.extend(each.limit for each in ranges)
        return await real(*ranges)

    monkeypatch.setattr(client, "read", read)
    assert [record.name for record in await clustered.scan("bucket", "", "", 120)] == names[:120]
    assert asked[0] == 100
    assert asked[1] == 20
    asked.clear()
    assert len(await clustered.scan("bucket", "", "", 1000)) == 130
    assert asked[0] == 100
    assert asked[1] < 100


# -- while etcd dies
Commit = tuple[int, str, Version | None]


def check_chain(commits: list[Commit], unknown: set[str]) -> None:
    """Each commit replaced the one before it; those of unknown outcome may be among them."""
    current: str | None = None
    for _, uid, replaced in sorted(commits, key=lambda commit: commit[0]):
        before = replaced.uid if replaced else None
        assert before == current or before in unknown
        current = uid
    uids = [replaced.uid for _, _, replaced in commits if replaced]
    assert len(uids) == len(set(uids)), "a version was replaced twice"


async def write_some(directory: ClusteredDirectory, writer: int, count: int, unknown: set[str]) -> list[list[Commit]]:
    commits: list[list[Commit]] = [[], []]
    for index in range(count):
        uid = f"w{writer}-{index}"
        key = index % 2
        try:
            end = await put(directory, object_name(f"k{key}"), uid)
        except OutcomeUnknownError:
            unknown.add(uid)
        except DirectoryUnavailableError:
            continue
        else:
            commits[key].append((end.revision, uid, end.replaced))
    return commits


@pytest.mark.parametrize("members_count", [1, 3])
async def test_commits_form_one_chain_over_kills_and_restarts(keys: Keys, members_count: int) -> None:
    """Of a single etcd, or of the leader of three."""
    unknown: set[str] = set()
    with EtcdServer(members_count) as server:
        clients = [EtcdClient(Access(server.endpoints), SystemClock(), random.Random(seed)) for seed in range(3)]
        directories = [ClusteredDirectory(client, keys) for client in clients]
        writing = asyncio.gather(*(write_some(each, index, 60, unknown) for index, each in enumerate(directories)))
        killed_count = 0
        for _ in range(3):
            before = await directories[0].revision()
            while not writing.done() and await directories[0].revision() < before + 20:
                continue
            killed_count += not writing.done()
            leader = server.leader()
            leader.kill()
            server.start(leader)
            server.wait_ready()
        found = await writing
        assert killed_count
        for key in (0, 1):
            commits = [commit for commits in found for commit in commits[key]]
            check_chain(commits, unknown)
            current = (await record_of(directories[0], object_name(f"k{key}"))).version
            assert current is not None
            assert current.uid == max(commits)[1] or current.uid in unknown
        for directory, client in zip(directories, clients, strict=True):
            await directory.close()
            await client.close()
