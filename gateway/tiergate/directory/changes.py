"""How the directory of a cluster changes rows: a transition over what it read, committed in one guarded transaction,
tried again when somebody was faster, and noted in the ledger as far as it is this node's."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from tiergate.directory.base import Committed, Intent
from tiergate.directory.clusterrows import ClusterRows, NotReadError, Snapshot, settled
from tiergate.directory.committer import Change, Committer, Standing
from tiergate.directory.keys import Keys
from tiergate.directory.ledger import Entry, Ledger
from tiergate.errors import CompactedError, OutcomeUnknownError, OverloadedError
from tiergate.etcd.client import EtcdClient
from tiergate.etcd.values import Range
from tiergate.model import Holder, ObjectName
from tiergate.policy.backoff import delay_s

ATTEMPTS_COUNT = 40
"""So often a transition is tried while others change what it read."""

RIVAL_PAUSE_BASE_S = 0.002
RIVAL_PAUSE_CAP_S = 0.25

T = TypeVar("T")


class Changes:
    """Of one process. Arguments and errors as `tiergate.directory.clustered.ClusteredDirectory` has them."""

    def __init__(
        self, client: EtcdClient, keys: Keys, standing: Standing | None, ledger: Ledger | None, era: Callable[[], int]
    ) -> None:
        self._client = client
        self._keys = keys
        self._standing = standing
        self._ledger = ledger
        self._era = era
        self._committer = Committer(client, keys, standing, self._newest)

    @property
    def me(self) -> Holder | None:
        """The node's membership; None for one that is nobody's.

        Raises:
            MembershipOverError: between two.
        """
        return self._standing.me if self._standing else None

    @property
    def receipt(self) -> bytes:
        """The row that every transaction of this writer writes."""
        return self._committer.receipt

    async def close(self) -> None:
        """Stop committing. The client stays open."""
        await self._committer.close()

    async def make(self, transition: Callable[[ClusterRows], T], *first: bytes | Range) -> T:
        """Run a transition and commit what it changed. `first`: what it surely reads."""
        wanted = [each if isinstance(each, Range) else Range(each) for each in first]
        for attempt in range(1, ATTEMPTS_COUNT + 1):
            generation, era = self._client.generation, self._era()
            try:
                rows, result = await self._run(transition, wanted)
            except CompactedError:
                continue
            if early := rows.early():
                await asyncio.gather(*(self.commit(change, generation, era) for change in early))
                continue
            change = rows.change()
            if change is None:
                return result
            revision = await self.commit(change, generation, era)
            if revision is not None:
                self._note(rows, era, revision)
                if generation != self._client.generation:
                    # What this node told another directory meanwhile may lack this.
                    raise OutcomeUnknownError("this node works with another directory now")
                return settled(result, revision)
            pause_s = delay_s(attempt, self._client.rng, RIVAL_PAUSE_BASE_S, RIVAL_PAUSE_CAP_S)
            await self._client.clock.sleep(pause_s)
        raise OverloadedError("others keep changing what this change rests on", attempts=ATTEMPTS_COUNT)

    async def commit(self, change: Change, generation: int | None = None, era: int = 0) -> int | None:
        """Commit over the directory of a generation and an era, or the present one; see `Committer.commit`."""
        if generation is None:
            generation, era = self._client.generation, self._era()
        revision = await self._committer.commit(replace(change, generation=generation))
        if revision is not None and self._ledger is not None:
            self._ledger.changed(era, revision)
        return revision

    async def of_object(self, name: ObjectName, transition: Callable[[ClusterRows], T]) -> T:
        """`make` of what begins with the record and the pending write of a key."""
        return await self.make(transition, self._keys.record(name), self._keys.pending(name))

    async def committing(self, commit: Callable[[ClusterRows], Committed], *first: bytes | Range) -> Committed:
        """`make` of a commit, which also tells who held what it replaced."""

        def transition(rows: ClusterRows) -> Committed:
            committed = commit(rows)
            return replace(committed, held_by=rows.let_go)

        return await self.make(transition, *first)

    def replacing(self, name: ObjectName, intent: Intent | None = None) -> list[Range]:
        """What a commit of a key reads."""
        keys = self._keys
        found = [Range(keys.record(name)), Range(keys.pending(name)), keys.all_holders(name)]
        if intent is not None:
            found += [Range(keys.node(each.node)) for each in intent.holders]
            prefixes = (intent.plan.prefix,) if intent.plan is not None else intent.points_to
            found += [Range(keys.plan(name.bucket, prefix)) for prefix in prefixes]
        return found

    def _note(self, rows: ClusterRows, era: int, revision: int) -> None:
        """Keep in the ledger what this commit made of pending writes, as far as they are this node's."""
        if self._ledger is None:
            return
        for name, write, record in rows.owed():
            known = self._ledger.find(name)
            is_known = known is not None and write is not None and known.write.uid == write.uid
            if write is None:
                if known is not None:
                    self._ledger.drop(name, known.write.uid)
            elif is_known or write.owner == rows.me:
                if record is None and known is not None and is_known and known.era == era:
                    record = known.record
                if record is not None:  # else it is noted when the ledger is refreshed
                    self._ledger.note(Entry(era, settled(record, revision), settled(write, revision)))

    async def _run(self, transition: Callable[[ClusterRows], T], wanted: Sequence[Range]) -> tuple[ClusterRows, T]:
        snapshot, me = Snapshot(), self.me
        while True:
            await snapshot.fetch(self._client, wanted)
            rows = ClusterRows(self._keys, snapshot, me)
            try:
                return rows, transition(rows)
            except NotReadError as error:
                wanted = error.wanted

    def _newest(self) -> int:
        return self._ledger.newest(self._era()) if self._ledger is not None else 0
