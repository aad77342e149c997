"""Commits of a process, in groups: one transaction is under way, the next takes all that waited meanwhile.

Each transaction also writes the writer's *receipt*, a row of its own, guarded by what the receipt was before. So a
transaction whose answer was lost can be sent again: it happens once, and afterwards the receipt says so. And one that
is still under way somewhere after its writer has given it up can no longer happen once the writer's next one has.

A node's transactions also write its *witness*, a row of the node, guarded to be as new as what any process of the node
knows to have happened. So none happens in an etcd that went back behind that, however far others have brought it since.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from tiergate.directory.keys import Keys
from tiergate.errors import (
    CompactedError,
    MembershipOverError,
    MemoryFullError,
    OutcomeUnknownError,
    TiergateError,
    invariant,
)
from tiergate.etcd.client import PATIENCE_S, EtcdClient
from tiergate.etcd.values import Delete, Field, Guard, KeyValue, Outcome, Put, Range, Relation, Request, Txn
from tiergate.model import Holder, new_uid

OPERATIONS_COUNT = 120
"""The width of a transaction (see `width`); etcd takes 128."""

GUARDS_COUNT = 100
"""Of one change."""

GROUP_COUNT = 30
"""Writes that go into a nested transaction of their own where a change has many, and of those into another."""

BATCH_BYTES = 1 << 20
"""Of the changes in one transaction; etcd takes 1.5 MiB."""

CHANGE_BYTES = 1400 << 10
"""Of one change, which then goes alone: what its length in the protocol adds is little."""


@dataclass(frozen=True, slots=True)
class Change:
    """To be done if all guards hold. Writes do not overlap. `me`: as which member it was made up, `generation`: over
    which directory (see `EtcdClient.generation`), if that matters."""

    guards: tuple[Guard, ...]
    writes: tuple[Put | Delete, ...]
    me: Holder | None = None
    generation: int | None = None

    @property
    def size_bytes(self) -> int:
        """About what it takes in a transaction."""
        keys = sum(len(each.key) + len(each.end) + 16 for each in self.guards)
        return keys + sum(len(each.key) + (len(each.value) if isinstance(each, Put) else 64) for each in self.writes)


class Standing(Protocol):
    """A node's membership: its writes are guarded by it. The next one may follow when it is over."""

    @property
    def me(self) -> Holder:
        """The node, in the epoch that stands now.

        Raises:
            MembershipOverError: none does, by the node's own clock.
        """
        ...


@dataclass(frozen=True, slots=True)
class _Waiting:
    change: Change
    me: Holder | None
    done: asyncio.Future[int | None]


class Committer:
    """The one of a process. `standing`: None for a writer that is nobody's member. `known`: the revision of the newest
    transaction that the node knows to have happened in this directory, 0 for none."""

    def __init__(
        self,
        client: EtcdClient,
        keys: Keys,
        standing: Standing | None,
        known: Callable[[], int] = lambda: 0,
        *,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._client = client
        self._keys = keys
        self._standing = standing
        self._known = known
        self._patience_s = patience_s
        self._begin_anew()
        self._waiting: deque[_Waiting] = deque()
        self._task: asyncio.Task[None] | None = None

    def _begin_anew(self) -> None:
        self._generation = self._client.generation
        self._receipt = self._keys.receipt(new_uid(self._client.clock.wall_s()))
        self._receipt_modified = 0

    @property
    def receipt(self) -> bytes:
        """The row that every transaction of this writer writes."""
        return self._receipt

    async def close(self) -> None:
        """Stop; what waits is cancelled, what is under way may still happen."""
        for each in self._waiting:
            each.done.cancel()
        self._waiting.clear()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def commit(self, change: Change) -> int | None:
        """The revision it happened at, or None: a guard does not hold and nothing happened. A cancelled call may
        still happen.

        Raises:
            MembershipOverError: this node's membership is over, or another one began since the change was made up.
            OutcomeUnknownError: etcd did not answer: it may have happened, or may yet, until a later call has returned.
            MemoryFullError: etcd has no room, or the change is too large for it.
        """
        if change.size_bytes > CHANGE_BYTES:
            raise MemoryFullError("a change is too large for etcd", size_bytes=change.size_bytes)
        invariant(len(change.guards) <= GUARDS_COUNT, "a change rests on too much", guards=len(change.guards))
        me = self._standing.me if self._standing else None
        waiting = _Waiting(change, change.me or me, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._work())
        return await waiting.done

    async def _work(self) -> None:
        batch: list[_Waiting] = []
        try:
            while batch := self._take():
                try:
                    changes = [each.change for each in batch]
                    ends: Sequence[int | Exception | None] = await self._send(changes, batch[0].me)
                except Exception as error:
                    ends = [error] * len(batch)
                for each, end in zip(batch, ends, strict=True):
                    if each.done.done():
                        continue
                    if isinstance(end, Exception):
                        each.done.set_exception(end)
                    else:
                        each.done.set_result(end)
        finally:
            for each in batch:
                each.done.cancel()

    def _take(self) -> list[_Waiting]:
        """What goes together next. All guards see the state before the transaction, so none may look at what another
        writes."""
        taken: list[_Waiting] = []
        left: list[_Waiting] = []
        footprint = Footprint()
        size_bytes = widest = 0
        while self._waiting:
            each = self._waiting.popleft()
            if each.done.done():
                continue
            wider = max(widest, width(nested(each.change)))
            larger_bytes = size_bytes + each.change.size_bytes
            is_full = len(taken) + 3 + wider > OPERATIONS_COUNT or larger_bytes > BATCH_BYTES
            if taken and (is_full or each.me != taken[0].me):
                left.append(each)
                break
            if footprint.meets(each.change):
                left.append(each)
                continue
            footprint.add(each.change)
            size_bytes, widest = larger_bytes, wider
            taken.append(each)
        self._waiting.extendleft(reversed(left))
        return taken

    async def _send(self, batch: Sequence[Change], me: Holder | None) -> list[int | None]:
        clock = self._client.clock
        if self._generation != self._client.generation:
            self._begin_anew()
        uid = new_uid(clock.wall_s()).encode()
        deadline_s = clock.monotonic_s() + self._patience_s
        attempt = 0
        while True:
            known = self._known() if me is not None else 0
            try:
                outcome = await self._try(batch, uid, me, known)
            except OutcomeUnknownError:
                attempt += 1
                pause_s = self._client.pause_s(attempt)
                if clock.monotonic_s() + pause_s >= deadline_s:
                    raise
                await clock.sleep(pause_s)
                continue
            except TiergateError as error:
                if attempt:
                    raise OutcomeUnknownError("what a lost answer said cannot be asked") from error
                raise
            if outcome.succeeded:
                self._receipt_modified = outcome.revision
                answers = outcome.answers[1 : 1 + len(batch)]
                return [outcome.revision if happened(answer) else None for answer in answers]
            found = outcome.found(0)
            modified = found[0].mod_revision if found else 0
            witnessed = max((row.mod_revision for row in outcome.found(1)), default=0) if known else 0
            if witnessed < known or 0 < modified < self._receipt_modified:
                newest = max(known, self._receipt_modified)
                raise self._client.doubt(self._generation, "etcd went back to an earlier state", known=newest)
            if modified == self._receipt_modified:
                raise MembershipOverError("this node's membership is over")
            self._receipt_modified = modified
            if found and found[0].value == uid:
                return await self._happened_before(batch, modified)
            # One that was given up has happened after all, or the receipt of an idle writer was cleared.

    async def _try(self, batch: Sequence[Change], uid: bytes, me: Holder | None, known: int) -> Outcome:
        generations = {self._generation, *(each.generation for each in batch)} - {None}
        if generations != {self._client.generation}:
            raise MembershipOverError("this node works with another directory now")
        guards = [Guard(self._receipt, Field.MODIFIED, self._receipt_modified)]
        witnesses: list[bytes] = []
        if me is not None:
            if self._standing is None or self._standing.me != me:
                raise MembershipOverError("this node is a member anew", node=me.node, epoch=me.epoch)
            guards.append(Guard(self._keys.node(me.node), Field.CREATED, me.epoch))
            witnesses = [self._keys.witness(me.node)]
        if known:
            guards += (Guard(key, Field.MODIFIED, known - 1, Relation.GREATER) for key in witnesses)
        txn = Txn(
            tuple(guards),
            (Put(self._receipt, uid), *(nested(change) for change in batch), *(Put(key, b"") for key in witnesses)),
            (Range(self._receipt), *(Range(key) for key in witnesses)),
        )
        return await self._client.txn(txn)

    async def _happened_before(self, batch: Sequence[Change], revision: int) -> list[int | None]:
        """Which changes of a transaction happened, by what their guards looked at just before it."""
        guards = [guard for change in batch for guard in change.guards]
        seen: dict[Guard, tuple[KeyValue, ...]] = {}
        try:
            for start in range(0, len(guards), GUARDS_COUNT):
                part = guards[start : start + GUARDS_COUNT]
                ranges = (Range(each.key, each.end, revision=revision - 1, keys_only=True) for each in part)
                outcome = await self._client.read(*ranges)
                seen.update((guard, outcome.found(index)) for index, guard in enumerate(part))
        except CompactedError as error:
            raise OutcomeUnknownError("what a lost answer said can no longer be told") from error
        return [revision if all(holds(guard, seen[guard]) for guard in each.guards) else None for each in batch]


class Footprint:
    """What the changes of a transaction look at and write."""

    def __init__(self) -> None:
        self._looked = _Keys()
        self._written = _Keys()

    def meets(self, change: Change) -> bool:
        """Whether the change cannot go together with these."""
        return any(self._written.meet(each.key, each.end) for each in change.guards) or any(
            self._written.meet(each.key, _end(each)) or self._looked.meet(each.key, _end(each))
            for each in change.writes
        )

    def add(self, change: Change) -> None:
        """Take it in."""
        for guard in change.guards:
            self._looked.add(guard.key, guard.end)
        for write in change.writes:
            self._written.add(write.key, _end(write))


class _Keys:
    def __init__(self) -> None:
        self._single: set[bytes] = set()
        self._ranges: list[tuple[bytes, bytes]] = []

    def add(self, key: bytes, end: bytes) -> None:
        if end:
            self._ranges.append((key, end))
        else:
            self._single.add(key)

    def meet(self, key: bytes, end: bytes) -> bool:
        if not end:
            return key in self._single or any(start <= key < stop for start, stop in self._ranges)
        return any(key <= single < end for single in self._single) or any(
            start < end and key < stop for start, stop in self._ranges
        )


def _end(write: Put | Delete) -> bytes:
    return write.end if isinstance(write, Delete) else b""


def nested(change: Change) -> Txn:
    """A change as a transaction within another."""
    requests: tuple[Request, ...] = change.writes
    while len(requests) > GROUP_COUNT:
        groups = (requests[start : start + GROUP_COUNT] for start in range(0, len(requests), GROUP_COUNT))
        requests = tuple(Txn((), group) for group in groups)
    return Txn(change.guards, requests)


def width(txn: Txn) -> int:
    """What etcd bounds by --max-txn-ops: the operations on one level, and those within the widest of its members."""
    requests = txn.then + txn.otherwise
    here = max(len(txn.guards), len(txn.then), len(txn.otherwise))
    return here + max((width(each) for each in requests if isinstance(each, Txn)), default=0)


def happened(answer: object) -> bool:
    """Whether a nested transaction's guards held."""
    return not isinstance(answer, Outcome) or (answer.succeeded and all(happened(each) for each in answer.answers))


def holds(guard: Guard, rows: Iterable[KeyValue]) -> bool:
    """Whether a guard held while these were the rows it looks at."""
    numbers = [_number(row, guard.field) for row in rows] or [0]
    match guard.relation:
        case Relation.EQUAL:
            return all(number == guard.number for number in numbers)
        case Relation.LESS:
            return all(number < guard.number for number in numbers)
        case Relation.GREATER:
            return all(number > guard.number for number in numbers)


def _number(row: KeyValue, field: Field) -> int:
    match field:
        case Field.VERSION:
            return row.version
        case Field.CREATED:
            return row.create_revision
        case Field.MODIFIED:
            return row.mod_revision
        case Field.LEASE:
            return row.lease_id
