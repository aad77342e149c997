"""What one node holds and owes, read of the indices by node: whatever others hold and owe costs nothing."""

from collections.abc import Collection
from dataclasses import replace

from tiergate.directory.base import Held
from tiergate.directory.clusterreads import FIRST_PAGE_COUNT, At, Reader
from tiergate.directory.clusterrows import value_of
from tiergate.directory.keys import Keys
from tiergate.etcd.client import EtcdClient
from tiergate.etcd.values import Range
from tiergate.model import Holder, Kind, Pending


class ByNode:
    """Reads through a client."""

    def __init__(self, client: EtcdClient, reader: Reader, keys: Keys) -> None:
        self._client = client
        self._reader = reader
        self._keys = keys

    async def owed_as(self, owner: Holder) -> list[Pending]:
        """What a node owes in one epoch, by `place`."""
        return await self._owed(self._keys.owed_as(owner))

    async def parked_as(self, owner: Holder) -> list[Pending]:
        """What a node keeps parked in one epoch, by `place`."""
        return await self._owed(self._keys.parked_as(owner))

    async def owed_by(self, node: str) -> list[Pending]:
        """What a node owes or keeps parked, in whatever epoch, by `place`."""
        return await self._owed(self._keys.owed_by(node))

    async def _owed(self, wanted: Range) -> list[Pending]:
        async def read(at: At) -> list[Pending]:
            names = [self._keys.owed_parts(row.key)[0] async for row in self._reader.walk(wanted, at)]
            return await self._reader.points(Pending, [self._keys.pending(name) for name in names], at)

        return sorted(await self._reader.consistent(read), key=lambda write: (write.place, write.name))

    async def oldest_owed_s(self, owner: Holder) -> float | None:
        """When the oldest that is not set aside of what a node owes was committed."""
        first = (await self._client.read(replace(self._keys.owed_as(owner), limit=1))).found(0)
        return self._keys.owed_parts(first[0].key)[1] if first else None

    async def owed_bytes(self, owner: Holder) -> int:
        """The bytes of what a node owes, but for what is set aside."""
        rows = await self._reader.rows(self._keys.owed_as(owner))
        # Rows that an earlier version wrote say no size.
        return sum(int(row.value or b"0") for row in rows if self._keys.owed_parts(row.key)[1] is not None)

    async def owners(self) -> set[str]:
        """The nodes that owe anything; of each a page of rows is read at most."""
        every = replace(self._keys.all("w"), limit=FIRST_PAGE_COUNT, keys_only=True)
        found: set[str] = set()
        while rows := (await self._client.read(every)).found(0):
            found |= {self._keys.owner(row.key) for row in rows}
            every = replace(every, key=self._keys.owed_by(self._keys.owner(rows[-1].key)).end)
        return found

    async def held_by(self, node: str) -> list[Held]:
        """What a node said to hold, in whatever epoch."""
        return await self._reader.consistent(lambda at: self._held(node, at))

    async def _held(self, node: str, at: At) -> list[Held]:
        found: list[Held] = []
        async for row in self._reader.walk(self._keys.held_by(node), at):
            name, uid = self._keys.held_version(node, row.key)
            found.append(Held(name, uid, value_of(Holder, row).epoch))
        return found

    async def held_uids(self, node: str, at: At) -> set[str]:
        """The versions that a node said to hold."""
        return {held.uid for held in await self._held(node, at)}

    async def owed_here(self, me: Holder, dirty: Collection[str]) -> list[Pending]:
        """What the origin does not have and a node owes, or holds as one of `dirty`, by `place`."""
        owed = await self._owed(self._keys.written_as(me))
        others = set(dirty) - {write.uid for write in owed}
        if not others:
            return owed

        async def read(at: At) -> list[Pending]:
            held = [each for each in await self._held(me.node, at) if each.uid in others and each.epoch == me.epoch]
            return await self._reader.points(Pending, [self._keys.pending(each.name) for each in held], at)

        owed += [write for write in await self._reader.consistent(read) if write.uid in others]
        return sorted(owed, key=lambda write: (write.place, write.name))

    async def held_owed_uids(self, node: str, at: At) -> set[str]:
        """Those of them that the origin does not have."""
        held = await self._held(node, at)
        keys = [self._keys.pending(each.name) for each in held]
        owed = {write.uid for write in await self._reader.points(Pending, keys, at) if write.kind is Kind.PUT}
        return owed & {each.uid for each in held}
