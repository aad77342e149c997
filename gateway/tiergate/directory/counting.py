"""How much stands in the directory of a cluster. etcd goes through all rows that it counts, so where they are many one
node does it for all and leaves a row that says what it found."""

from dataclasses import dataclass, replace

from tiergate.directory.changes import Changes
from tiergate.directory.clusterrows import value_of
from tiergate.directory.codec import pack
from tiergate.directory.committer import Change
from tiergate.directory.keys import Keys
from tiergate.etcd.client import EtcdClient
from tiergate.etcd.values import Delete, Found, Put, Range

MANY_COUNT = 10_000
"""Up to so many rows each node counts itself: it takes etcd some milliseconds."""

COUNTED_KEEP_S = 60.0
"""So long what another node counted is taken."""


@dataclass(frozen=True, slots=True)
class Counted:
    """Clean records, uploads in progress and markers of the whole cluster, as of a wall-clock time."""

    at_s: float
    clean: int
    uploads: int
    markers: int

    @property
    def rows_count(self) -> int:
        return self.clean + self.uploads + self.markers


async def counted(client: EtcdClient, keys: Keys) -> Counted:
    """What another node counted a moment ago, or what there is now."""
    rows = (await client.read(Range(keys.counted))).found(0)
    if rows:
        known = value_of(Counted, rows[0])
        if client.clock.wall_s() - known.at_s < COUNTED_KEEP_S:
            return known
    return await count(client, keys)


async def count(client: EtcdClient, keys: Keys) -> Counted:
    """What there is now."""
    now_s = client.clock.wall_s()
    outcome = await client.read(*(replace(keys.all(table), count_only=True) for table in "ckum"))
    clean, clean_markers, uploads, markers = (each.count for each in outcome.answers if isinstance(each, Found))
    return Counted(now_s, clean + clean_markers, uploads, markers)


async def count_for_all(client: EtcdClient, keys: Keys, changes: Changes) -> None:
    """Count, and let the others know if there is much."""
    found = await count(client, keys)
    if found.rows_count > MANY_COUNT:
        await changes.commit(Change((), (Put(keys.counted, pack(found)),)))
    elif (await client.read(Range(keys.counted))).found(0):
        await changes.commit(Change((), (Delete(keys.counted),)))
