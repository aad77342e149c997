"""Which nodes make up the cluster. A node registers under a lease; while it renews it, it is a member of one *epoch*.

Whoever writes guards by the epoch, so that a node whose membership is over can change nothing, whatever it believes. It
also knows by its own clock, a margin before etcd lets anybody else see it gone, that it must acknowledge nothing more.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass

from tiergate.clock import Clock
from tiergate.directory.codec import pack, unpack
from tiergate.directory.keys import Keys
from tiergate.errors import (
    CompactedError,
    ConfigError,
    DirectoryUnavailableError,
    FencedError,
    MembershipOverError,
    invariant,
)
from tiergate.etcd.client import TRY_S, EtcdClient
from tiergate.etcd.values import Field, Guard, KeyValue, Put, Range, Txn
from tiergate.etcd.watch import Watch
from tiergate.model import About, Holder, Live, Node
from tiergate.observe.logs import get_logger

LEASE_S = 5
"""After so long without a renewal a node is gone for all others."""

SHORTEST_LEASE_S = 3

MARGIN_S = 1.0
"""So long before that it stops by itself: for clocks that run apart, and for what is under way."""

RENEWALS_COUNT = 4
"""Renewals in the time of one lease."""

NAME_WAIT_LEASES_COUNT = 3
"""So many lease times a starting node waits for one of the same name to go: a new leader of etcd gives each its time
once more."""

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Ticket:
    """What a node keeps in its memory folder to go on with its membership after a restart."""

    lease_id: int
    epoch: int


@dataclass(frozen=True, slots=True)
class Epoch:
    """One membership as all processes of a node guard by it. `deadline_s`: until when it stands, by the monotonic clock
    that they share. Implements `tiergate.directory.committer.Standing`."""

    holder: Holder
    deadline_s: Callable[[], float]
    clock: Clock

    @property
    def number(self) -> int:
        """The epoch itself."""
        return self.holder.epoch

    def stands(self) -> bool:
        """Whether this node may still act as a member."""
        return self.clock.monotonic_s() < self.deadline_s()

    @property
    def me(self) -> Holder:
        """The node in this epoch.

        Raises:
            MembershipOverError: it is over, or nobody renewed it in time.
        """
        if not self.stands():
            raise MembershipOverError("this node's lease was not renewed in time", epoch=self.number)
        return self.holder


class Membership:
    """A node's own. `join`, then `run` for as long as it lasts; one that is over can be joined anew."""

    def __init__(
        self,
        client: EtcdClient,
        keys: Keys,
        name: str,
        about: About,
        *,
        lease_s: int = LEASE_S,
        post: Callable[["Membership"], None] = lambda _: None,
    ) -> None:
        """`post` is called after each change of `ticket`, `about` or `deadline_s`, before anything rests on it."""
        invariant(lease_s >= SHORTEST_LEASE_S, "a lease is too short to be kept", lease_s=lease_s)
        self.name = name
        self._client = client
        self._clock = client.clock
        self._key = keys.node(name)
        self._about = about
        self._lease_s = lease_s
        self._ticket = Ticket(0, 0)
        self._deadline_s = 0.0
        self._post = post

    @property
    def about(self) -> About:
        """What was announced last."""
        return self._about

    def _stand(self, ticket: Ticket, deadline_s: float) -> None:
        self._ticket, self._deadline_s = ticket, deadline_s
        self._post(self)

    @property
    def ticket(self) -> Ticket:
        """To be kept for `join` after a restart."""
        return self._ticket

    def deadline_s(self) -> float:
        """Until when the membership stands, by the monotonic clock."""
        return self._deadline_s

    @property
    def epoch(self) -> Epoch:
        """The membership joined last."""
        return Epoch(Holder(self.name, self._ticket.epoch), self.deadline_s, self._clock)

    async def join(self, ticket: Ticket | None = None) -> Epoch:
        """Become a member: of the epoch of `ticket` if its lease and registration still stand, else of a new one.

        Raises:
            ConfigError: another node of this name is alive, or etcd does not take our user.
            DirectoryUnavailableError: etcd does not answer.
        """
        await self._client.connect()
        if ticket is not None and await self._resume(ticket):
            return self.epoch
        try:
            async with asyncio.timeout(NAME_WAIT_LEASES_COUNT * self._lease_s):
                while not await self._register():
                    await self._await_end()
        except TimeoutError as error:
            raise ConfigError(f"a node named {self.name} is alive: names must differ") from error
        log.info("joined the cluster", node=self.name, epoch=self._ticket.epoch)
        return self.epoch

    async def _resume(self, ticket: Ticket) -> bool:
        sent_s = self._clock.monotonic_s()
        ttl_s = await self._client.repeat(lambda: self._client.keep_alive(ticket.lease_id))
        rows = (await self._client.read(Range(self._key))).found(0)
        if ttl_s > 0 and rows and (rows[0].lease_id, rows[0].create_revision) == (ticket.lease_id, ticket.epoch):
            self._stand(ticket, sent_s + ttl_s - MARGIN_S)
            await self.announce(self._about)
            return True
        # So nobody waits for what is left of it.
        await self._client.revoke(ticket.lease_id)
        return False

    async def _register(self) -> bool:
        sent_s = self._clock.monotonic_s()
        lease_id = await self._client.grant(self._lease_s)
        absent = Guard(self._key, Field.CREATED, 0)
        txn = Txn((absent,), (Put(self._key, pack(self._about), lease_id),), (Range(self._key),))
        try:
            # A repetition fails if the first try happened; then the row hangs on this lease.
            outcome = await self._client.repeat(lambda: self._client.txn(txn))
        except FencedError:
            # It took longer than the lease lasts.
            return False
        epoch = outcome.revision
        if not outcome.succeeded:
            rows = outcome.found(0)
            if not rows or rows[0].lease_id != lease_id:
                await self._client.revoke(lease_id)
                return False
            epoch = rows[0].create_revision
        self._stand(Ticket(lease_id, epoch), sent_s + self._lease_s - MARGIN_S)
        return True

    async def _await_end(self) -> None:
        """Wait until no node of this name is registered."""
        outcome = await self._client.read(Range(self._key))
        if not outcome.found(0):
            return
        async with Watch(self._client, self._key, b"", outcome.revision + 1) as watch:
            while all(event.row is not None for event in await watch.next()):
                continue

    async def run(self) -> None:
        """Renew the lease until cancelled.

        Raises:
            MembershipOverError: it is over; whatever rests on it must stop.
        """
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._renew())
                group.create_task(self._watch_itself())
        except ExceptionGroup as group_error:
            self._stand(self._ticket, 0.0)
            raise group_error.exceptions[0] from group_error

    async def _renew(self) -> None:
        pause_s = self._lease_s / RENEWALS_COUNT
        while True:
            await self._clock.sleep(pause_s)
            sent_s = self._clock.monotonic_s()
            try:
                ttl_s = await self._client.keep_alive(self._ticket.lease_id)
            except DirectoryUnavailableError:
                # The client went on to the next member.
                pause_s = self._client.rng.uniform(0.0, TRY_S / RENEWALS_COUNT)
                continue
            if ttl_s <= 0:
                raise MembershipOverError("this node's lease is gone", node=self.name, epoch=self._ticket.epoch)
            self._stand(self._ticket, sent_s + ttl_s - MARGIN_S)
            pause_s = self._lease_s / RENEWALS_COUNT

    async def _watch_itself(self) -> None:
        """Old servers renew a lease that was revoked: the registration tells."""
        while True:
            outcome = await self._client.read(Range(self._key))
            rows = outcome.found(0)
            self._see(rows[0] if rows else None)
            async with Watch(self._client, self._key, b"", outcome.revision + 1) as watch:
                try:
                    while True:
                        for event in await watch.next():
                            self._see(event.row)
                except CompactedError:
                    continue

    def _see(self, row: KeyValue | None) -> None:
        if row is None or row.create_revision != self._ticket.epoch:
            raise MembershipOverError("this node's registration is gone", node=self.name, epoch=self._ticket.epoch)

    async def announce(self, about: About) -> None:
        """Tell others something new of this node.

        Raises:
            MembershipOverError: the membership is over.
        """
        self._about = about
        guard = Guard(self._key, Field.CREATED, self._ticket.epoch)
        txn = Txn((guard,), (Put(self._key, pack(about), self._ticket.lease_id),))
        try:
            # It says the same however often it is said.
            is_done = (await self._client.repeat(lambda: self._client.txn(txn))).succeeded
        except FencedError:
            is_done = False
        if not is_done:
            raise MembershipOverError("this node's registration is gone", node=self.name, epoch=self._ticket.epoch)
        self._post(self)

    async def leave(self) -> None:
        """End the membership at once."""
        self._stand(self._ticket, 0.0)
        await self._client.revoke(self._ticket.lease_id)


class Nodes:
    """The members, as anybody may see them."""

    def __init__(self, client: EtcdClient, keys: Keys) -> None:
        self._client = client
        self._all = keys.all("n")

    async def live(self) -> Live:
        """The members now."""
        outcome = await self._client.read(self._all)
        return Live(outcome.revision, {node.name: node for node in map(self._node, outcome.found(0))})

    async def watch(self) -> AsyncGenerator[Live, None]:
        """The members now, then anew after each change. Close it in the end."""
        while True:
            live = await self.live()
            yield live
            nodes = dict(live.nodes)
            async with Watch(self._client, self._all.key, self._all.end, live.revision + 1) as watch:
                try:
                    while True:
                        events = await watch.next()
                        for event in events:
                            nodes.pop(self._name(event.key), None)
                            if event.row is not None:
                                node = self._node(event.row)
                                nodes[node.name] = node
                        yield Live(events[-1].revision, dict(nodes))
                except CompactedError:
                    # What was missed is seen in the next list.
                    continue

    def _name(self, key: bytes) -> str:
        return key[len(self._all.key) :].decode()

    def _node(self, row: KeyValue) -> Node:
        return Node(self._name(row.key), row.create_revision, unpack(About, row.value))
