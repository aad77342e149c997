"""What uploads without room in memory begin in the origin: whatever becomes of their requests, nothing stays there that
nobody knows of."""

from collections.abc import Callable

import pytest
from tests.unit.engine.cluster import BUCKET, Cluster, Node, content, etag_of, name_of
from tests.unit.engine.test_cluster_writes import cancelled_at, settled

from tiergate.errors import NotFoundError, OriginTemporaryError, OutcomeUnknownError
from tiergate.model import ObjectName

ACK = "x-tiergate-ack"
FIRST = content(150_000)
PAUSE_S = 0.01

pytestmark = pytest.mark.usefixtures("soon")


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiergate.engine.afterwards.FIRST_PAUSE_S", PAUSE_S)
    monkeypatch.setattr("tiergate.engine.afterwards.LAST_PAUSE_S", PAUSE_S)


@pytest.fixture
def full(start: Callable[..., Cluster]) -> Cluster:
    """A cluster whose node a has no room."""
    cluster = start(3)
    memory = cluster["a"].memory
    memory.receive("hog", memory.stats().available_bytes, "hog")
    return cluster


def open_in_origin(cluster: Cluster, key: str) -> set[str]:
    """The uploads of a key in the origin."""
    return {upload_id for upload_id, upload in cluster.origin.uploads.items() if upload.name == name_of(key)}


async def spilled(node: Node, key: str, upload_id: str) -> str:
    """A part that went on to the origin; its ETag."""
    answer = await node.part(key, upload_id, 1, FIRST)
    assert answer.headers[ACK] == "origin"
    return etag_of(answer)


@pytest.mark.parametrize("happened", [True, False])
async def test_upload_in_the_origin_that_may_not_be_known_is_taken_by_the_next_part(
    full: Cluster, happened: bool
) -> None:
    upload_id = await full["a"].create("k")
    full.directory.lose_answer, full.directory.lose_request = happened, not happened
    with pytest.raises(OutcomeUnknownError):
        await full["a"].part("k", upload_id, 1, FIRST)
    etag = await spilled(full["a"], "k", upload_id)
    await settled(full)
    assert len(open_in_origin(full, "k")) == 1
    await full["a"].complete("k", upload_id, {1: etag})
    assert open_in_origin(full, "k") == set()
    assert full.origin.objects[name_of("k")].data == FIRST


@pytest.mark.parametrize("happened", [True, False])
async def test_upload_in_the_origin_that_may_not_be_known_ends_with_its_own(full: Cluster, happened: bool) -> None:
    upload_id = await full["a"].create("k")
    full.directory.lose_answer, full.directory.lose_request = happened, not happened
    with pytest.raises(OutcomeUnknownError):
        await full["a"].part("k", upload_id, 1, FIRST)
    await full["a"].abort("k", upload_id)
    await settled(full)
    assert open_in_origin(full, "k") == set()


async def test_upload_in_the_origin_that_came_too_late_is_aborted_as_soon_as_may_be(
    full: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload_id = await full["a"].create("k")
    note, abort = full.directory.note_spill, full.origin.abort_multipart_upload
    tries_count = 0

    async def ended_first(upload_id: str, spill_id: str) -> str:
        await full["b"].abort("k", upload_id)
        return await note(upload_id, spill_id)

    async def away_first(name: ObjectName, upload_id: str) -> None:
        nonlocal tries_count
        tries_count += 1
        if tries_count == 1:
            raise OriginTemporaryError("away")
        await abort(name, upload_id)

    monkeypatch.setattr(full.directory, "note_spill", ended_first)
    monkeypatch.setattr(full.origin, "abort_multipart_upload", away_first)
    with pytest.raises(NotFoundError):
        await full["a"].part("k", upload_id, 1, FIRST)
    await settled(full)
    assert open_in_origin(full, "k") == set()
    assert tries_count == 2


async def test_part_cancelled_anywhere_leaves_no_upload_that_nobody_knows(full: Cluster) -> None:
    step, begun_count = 1, 0
    while True:
        key = f"k{step}"
        upload_id = await full["a"].create(key)
        if not await cancelled_at(step, full["a"].part(key, upload_id, 1, FIRST)):
            break
        await settled(full)
        assert open_in_origin(full, key) <= await full.directory.origin_upload_ids(BUCKET), step
        begun_count += len(open_in_origin(full, key))
        await full["a"].abort(key, upload_id)
        assert open_in_origin(full, key) == set(), step
        step += 1
    assert begun_count
