"""Sees to it that a version is on as many nodes as the rule says, and that the directory knows which."""

from collections.abc import Callable

from tiergate.clock import Clock
from tiergate.directory.base import ClusterDirectory
from tiergate.errors import HolderLostError, TooFewCopiesError
from tiergate.model import ObjectName, Version
from tiergate.replication.base import Replication

ATTEMPTS_COUNT = 3
"""How often others are looked for in the place of nodes that go away meanwhile."""


class Copier:
    """`asked_of`: how many copies the configuration asks for of a key (None: nothing)."""

    def __init__(
        self,
        directory: ClusterDirectory,
        replication: Replication,
        clock: Clock,
        asked_of: Callable[[ObjectName], int | None],
    ) -> None:
        self._directory = directory
        self._replication = replication
        self._clock = clock
        self._asked_of = asked_of

    def rule(self, name: ObjectName) -> int:
        """On how many nodes a version is to be."""
        return self._replication.rule(self._asked_of(name))

    async def copy(self, name: ObjectName, version: Version) -> bool:
        """Have enough nodes hold a version, this one among them; as many as live where they are too few. False if it
        no longer is the current one.

        Raises:
            TooFewCopiesError: nodes go away faster than they are found, or a body is nowhere any more.
        """
        seen = await self._directory.get(name)
        holders = seen.holders.get(version.uid, frozenset())
        count = self.rule(name)
        while count > 1 and not self._replication.can_reach(count):
            count -= 1
        for _ in range(ATTEMPTS_COUNT):
            bodies = [part.body for part in version.parts if part.body.size_bytes]
            at = {body.uid: sorted(holders) for body in bodies}
            copies = await self._replication.spread(name, version.uid, bodies, count, at)
            if self._clock.monotonic_s() >= copies.until_s:
                continue
            try:
                return await self._directory.hold(name, version.uid, copies.holders)
            except HolderLostError:
                continue
        raise TooFewCopiesError("nodes that were to hold a copy keep going away", key=name.key)
