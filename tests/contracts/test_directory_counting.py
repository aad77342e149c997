"""How many rows there are: counted by each node where they are few, by one for all where they are many."""

from dataclasses import dataclass, field

import pytest

from tiergate.clock import SystemClock
from tiergate.directory import counting
from tiergate.directory.clustered import ClusteredDirectory
from tiergate.directory.counting import COUNTED_KEEP_S
from tiergate.directory.keys import Keys
from tiergate.etcd.client import EtcdClient
from tiergate.etcd.values import Outcome, Range
from tiergate.testing.directory_contract import object_name, put_clean
from tiergate.testing.etcd import needs_etcd

pytestmark = needs_etcd


@dataclass
class Wall(SystemClock):
    """A clock whose wall time a test sets ahead."""

    ahead_s: float = field(default=0.0)

    def wall_s(self) -> float:
        return super().wall_s() + self.ahead_s


@pytest.fixture
def clock() -> Wall:
    return Wall()


@pytest.fixture
def counts_asked(client: EtcdClient, monkeypatch: pytest.MonkeyPatch) -> list[Range]:
    """The ranges that etcd was asked to count."""
    asked: list[Range] = []
    real = client.read

    async def read(*ranges: Range) -> Outcome:
        asked.extend(each for each in ranges if each.count_only)
        return await real(*ranges)

    monkeypatch.setattr(client, "read", read)
    return asked


async def test_many_rows_are_counted_by_one_node_for_all(
    client: EtcdClient, clock: Wall, counts_asked: list[Range], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counting, "MANY_COUNT", 2)
    keys = Keys("/counting")
    directory = ClusteredDirectory(client, keys)
    for key in "abc":
        await put_clean(directory, object_name(key), f"v-{key}", f"o-{key}")
    await directory.count_for_all()
    counts_asked.clear()
    await put_clean(directory, object_name("d"), "v-d", "o-d")
    assert (await directory.counts())["clean"] == 3
    assert counts_asked == []

    # Who counts for all has been away for long.
    clock.ahead_s = COUNTED_KEEP_S
    assert (await directory.counts())["clean"] == 4
    assert counts_asked

    await directory.count_for_all()
    counts_asked.clear()
    assert (await directory.counts())["clean"] == 4
    assert counts_asked == []
    await directory.close()


async def test_few_rows_are_counted_by_each_node(client: EtcdClient, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = Keys("/few")
    directory = ClusteredDirectory(client, keys)
    await put_clean(directory, object_name("a"), "v-a", "o-a")
    monkeypatch.setattr(counting, "MANY_COUNT", 0)
    await directory.count_for_all()
    monkeypatch.undo()
    await directory.count_for_all()  # They have become few.
    assert (await client.read(Range(keys.counted))).found(0) == ()
    await put_clean(directory, object_name("b"), "v-b", "o-b")
    assert (await directory.counts())["clean"] == 2
    await directory.close()
