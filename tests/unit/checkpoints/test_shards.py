"""Which steps of the memory daemon's namespaces are whole, and what goes when ranks write on. No node."""

import io
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import Metadata

from tiergate.checkpoints.shards import (
    HEAD_BYTES,
    Shard,
    ShardKind,
    ShardName,
    configuration_key,
    is_configuration,
    kind_of,
    left_by_others,
    shard_key,
    shard_of,
    surplus,
    whole_steps,
)

DATA, METADATA, OPAQUE = ShardKind.DATA, ShardKind.METADATA, ShardKind.OPAQUE


class Written:
    """Shards as they are committed one after the other; one that is written again keeps the place where it began."""

    def __init__(self) -> None:
        self._places = 0
        self.shards: dict[tuple[int, int], Shard] = {}

    def write(self, rank: int, step: int, kind: ShardKind = DATA) -> None:
        self._places += 1
        before = self.shards.get((rank, step))
        began = before.began if before else self._places
        self.shards[rank, step] = Shard(ShardName("n", rank, step), kind, self._places, began)

    def save(self, step: int, world: int, kind: ShardKind = METADATA) -> None:
        for rank in range(world):
            self.write(rank, step, DATA if kind is METADATA else kind)
        self.write(world, step, kind)

    def whole(self, ranks_count: int) -> list[int]:
        return whole_steps(self.shards.values(), ranks_count)


def torch_shard() -> bytes:
    buffer = io.BytesIO()
    torch.save(torch.arange(4), buffer)
    return buffer.getvalue()


def test_a_shard_is_known_by_its_first_bytes() -> None:
    assert kind_of(pickle.dumps(Metadata({}), protocol=pickle.HIGHEST_PROTOCOL)[:HEAD_BYTES]) is METADATA
    assert kind_of(torch_shard()[:HEAD_BYTES]) is DATA
    assert kind_of(b"") is DATA
    assert kind_of(b"anything else") is OPAQUE
    assert kind_of(pickle.dumps({"lr": 1.0})) is OPAQUE


def test_saves_are_whole_with_their_metadata_and_every_rank_below() -> None:
    written = Written()
    written.save(10, 2)
    written.save(30, 2)
    written.save(20, 2)
    assert written.whole(3) == [30, 20, 10]
    del written.shards[1, 20]
    del written.shards[2, 30]
    assert written.whole(3) == [10]


@pytest.mark.parametrize("world", [1, 2, 7], ids="world {}".format)
def test_another_world_than_the_namespace_was_made_for_is_whole_as_well(world: int) -> None:
    written = Written()
    written.save(1, 4)
    written.save(2, world)
    assert written.whole(5) == [2, 1]


def test_a_torn_step_of_a_larger_world_is_no_whole_one_of_a_smaller() -> None:
    written = Written()
    for rank in range(3):
        written.write(rank, 1)
    assert written.whole(3) == [], "rank 2 is where the metadata of the world of before was"
    written.write(3, 1)
    written.write(4, 1, METADATA)
    assert written.whole(3) == [1]


def test_a_step_that_is_being_written_again_is_not_offered() -> None:
    written = Written()
    written.save(1, 2)
    written.write(0, 1)
    assert written.whole(3) == [], "one rank's tensors are newer than the others'"
    written.write(1, 1)
    assert written.whole(3) == []
    written.write(2, 1, METADATA)
    assert written.whole(3) == [1]


def test_a_step_written_again_by_a_smaller_world_goes_by_its_own_metadata() -> None:
    written = Written()
    written.save(1, 4)
    written.save(1, 2)
    assert written.whole(5) == [1]
    del written.shards[1, 1]
    assert written.whole(5) == []


def test_the_order_of_first_writes_does_not_matter() -> None:
    written = Written()
    written.write(2, 1, METADATA)
    written.write(1, 1)
    assert written.whole(3) == []
    written.write(0, 1)
    assert written.whole(3) == [1]


def test_of_what_nobody_knows_the_highest_rank_is_the_metadata() -> None:
    written = Written()
    written.write(0, 1, OPAQUE)
    written.write(1, 1, OPAQUE)
    assert written.whole(3) == []
    written.write(2, 1, OPAQUE)
    assert written.whole(3) == [1]
    written.save(2, 4, OPAQUE)
    assert written.whole(3) == [2, 1]
    del written.shards[1, 2]
    assert written.whole(3) == [1]


def test_a_rank_beyond_all_others_is_no_work() -> None:
    written = Written()
    written.write(10**17, 1, METADATA)
    assert written.whole(3) == []


@given(st.lists(st.integers(0, 6), min_size=1, max_size=30), st.integers(1, 4))
def test_a_rank_keeps_the_steps_that_it_wrote_last(steps: list[int], retained: int) -> None:
    written = Written()
    order: list[int] = []
    for step in steps:
        written.write(0, step)
        order = [*(each for each in order if each != step), step]
        for shard in surplus(list(written.shards.values()), retained, None):
            del written.shards[0, shard.name.step]
        order = order[-retained:]
        assert {step for _, step in written.shards} == set(order)


def test_the_step_that_became_whole_last_stays() -> None:
    written = Written()
    for step in range(5):
        written.write(0, step)
    for newest, gone in ((None, {0, 1, 2}), (1, {0, 2}), (4, {0, 1, 2}), (9, {0, 1, 2})):
        assert {shard.name.step for shard in surplus(list(written.shards.values()), 2, newest)} == gone


def test_what_a_larger_world_left_goes_once_nobody_can_load_it() -> None:
    written = Written()
    written.save(1, 4)
    for step in (2, 3):
        written.save(step, 2)
    gone = left_by_others(list(written.shards.values()), ShardName("n", 2, 3))
    assert gone == [], "rank 0 has the step still"
    del written.shards[0, 1]
    gone = left_by_others(list(written.shards.values()), ShardName("n", 2, 3))
    assert {(shard.name.rank, shard.name.step) for shard in gone} == {(3, 1), (4, 1)}


def test_what_a_larger_world_is_writing_stays() -> None:
    written = Written()
    written.save(1, 2)
    written.write(3, 2)
    assert left_by_others(list(written.shards.values()), ShardName("n", 2, 1)) == []


def test_keys_are_read_as_they_are_written() -> None:
    name = ShardName("job-1", 12, 340)
    assert shard_key("daemon/", name) == "daemon/job-1/rank_12/step_340"
    assert shard_of("daemon/", shard_key("daemon/", name)) == name
    for key in ("job-1/rank_12/step_340", "daemon/job-1/rank_x/step_1", "daemon/job-1/namespace", "daemon/a/rank_1/"):
        assert shard_of("daemon/", key) is None
    assert is_configuration("daemon/", configuration_key("daemon/", "job-1"))
    assert not is_configuration("daemon/", shard_key("daemon/", name))
    assert not is_configuration("daemon/", "other/job-1/namespace")
