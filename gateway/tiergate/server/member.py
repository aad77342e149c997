"""This node's membership of its cluster, kept by the background process: joined, renewed, announced, joined anew when
it was lost, and left in the end. All other processes of the node learn of it from the board."""

import asyncio
import os
import secrets
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import msgspec

from tiergate.child import Belonging, ChildContext
from tiergate.clock import Clock
from tiergate.config import Address
from tiergate.directory.board import Posted
from tiergate.directory.clustered import ClusteredDirectory
from tiergate.directory.committer import Standing
from tiergate.directory.era import Era, begin_era, era_of, find_era
from tiergate.directory.membership import Membership, Ticket
from tiergate.errors import (
    CompactedError,
    ConfigError,
    DirectoryUnavailableError,
    FencedError,
    ForeignDirectoryError,
    MembershipOverError,
    TiergateError,
)
from tiergate.etcd.client import Known
from tiergate.etcd.values import Range
from tiergate.etcd.watch import Watch
from tiergate.model import About
from tiergate.observe.logs import get_logger
from tiergate.server.cluster import Cluster, known_of

FIRST_JOIN_S = 45.0
"""So long a node that starts waits for etcd before it gives up."""

REJOIN_PAUSE_S = 1.0

LEAVE_S = 3.0
"""So long a node that stops tries to say so. If it cannot, its lease ends by itself."""

ANNOUNCE_INTERVAL_S = 10.0

DOUBTS_INTERVAL_S = 0.5
"""How often is looked whether another process of this node saw that etcd went back."""

ANNOUNCE_SHARE = 16
"""What is free is announced when it changed by this part of the limit: each announcement goes to all nodes."""

_KERNEL_BOOT = Path("/proc/sys/kernel/random/boot_id")

AfterJoin = Callable[[int, bool], Awaitable[None]]
"""Called with the epoch of a membership that began, and whether it is one that had begun before a restart."""

Retell = Callable[[Standing, Era], Awaitable[None]]
"""Called with a membership and the era it began in, of a directory that forgot this node. When it returns, that knows
what this node holds."""

NOBODYS_CLUSTER = 1
"""Posted while no process may rest on anything that etcd says."""

EVERY_HOST = ("0.0.0.0", "::")

log = get_logger(__name__)


class NotKeptError(ConfigError):
    """A membership cannot be written down, so a restart could not go on with it."""


async def nothing_to_tell(standing: Standing, era: Era) -> None:
    """Of a node without a memory."""


class Member:
    """`join` once, then `run` until cancelled, then `leave`."""

    def __init__(
        self,
        cluster: Cluster,
        context: ChildContext,
        clock: Clock,
        free_bytes: Callable[[], int],
        retell: Retell = nothing_to_tell,
    ) -> None:
        self._cluster = cluster
        self._retell = retell
        self._era = 0
        self._is_retelling = False
        self._settings = context.settings
        self._path = context.folders.member_file
        self._clock = clock
        self._free_bytes = free_bytes
        self._belonging = self._read()
        self._resumed = False
        self._fault = "did not join yet"
        about = About(
            str(advertised(context)),
            context.settings.zone,
            self._belonging.boot,
            free_bytes=self._free_bytes(),
            s3=reachable(context.listen_address, advertised(context)),
        )
        self._membership = Membership(
            cluster.client,
            cluster.keys,
            cluster.node,
            about,
            lease_s=int(context.settings.lease_s),
            post=self._post,
        )

    @property
    def fault(self) -> str:
        """Why this node is no member now; empty while it is one."""
        if self._cluster.standing.stands():
            return ""
        return self._fault or "the lease was not renewed in time"

    async def join(self) -> None:
        """Become a member, of the epoch before a restart if that still stands.

        Raises:
            ConfigError: etcd does not take us, or a node of this name is alive.
            DirectoryUnavailableError: etcd does not answer for `FIRST_JOIN_S`.
        """
        settings = self._settings
        log.info("joining the cluster", etcd=settings.cluster, node=settings.node_name)
        give_up_s = self._clock.monotonic_s() + FIRST_JOIN_S
        while True:
            try:
                return await self._join()
            except (DirectoryUnavailableError, FencedError) as error:
                if self._clock.monotonic_s() >= give_up_s:
                    raise DirectoryUnavailableError(f"{settings.cluster} does not answer: {error.message}") from error
                log.warning("cannot join the cluster yet, tried again", etcd=settings.cluster, error=error)
                await self._clock.sleep(REJOIN_PAUSE_S)

    async def run(self, after_join: AfterJoin) -> None:
        """Keep the membership until cancelled. One that is lost is followed by a new one; in between, this node
        acknowledges nothing. `after_join` is called for each, and again later if it fails with one of our errors."""
        while True:
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._membership.run())
                    group.create_task(self._watch_era())
                    group.create_task(self._watch_doubts())
                    group.create_task(self._announce())
                    group.create_task(self._call(after_join))
            except ExceptionGroup as errors:
                ours, unexpected = errors.split(TiergateError)
                if unexpected is not None:
                    raise unexpected from errors
                if ours is not None:
                    self._fault = str(ours.exceptions[0])
                    log.error("this node is no longer a member of its cluster, it joins anew", error=ours.exceptions[0])
            await self._rejoin()

    async def leave(self, *, owes_nothing: bool) -> None:
        """End the membership at once. `owes_nothing`: whatever is in memory may be forgotten; then another node may use
        the folder."""
        self._fault = "it left"
        try:
            async with asyncio.timeout(LEAVE_S):
                await self._membership.leave()
        except (TiergateError, TimeoutError) as error:
            log.warning("the cluster could not be told that this node leaves", error=error)
            return
        if owes_nothing:
            self._path.unlink(missing_ok=True)
        log.info("left the cluster", owes_nothing=owes_nothing)

    def report(self) -> dict[str, object]:
        """The cluster as status shows it."""
        nodes = self._cluster.view.live().nodes
        return {
            "etcd": self._settings.cluster,
            "node": self._cluster.node,
            "zone": self._settings.zone,
            "epoch": self._membership.ticket.epoch,
            "member": not self.fault,
            "fault": self.fault,
            "housekeeper": self._cluster.housekeeper(),
            "nodes": [
                {
                    "node": node.name,
                    "zone": node.about.zone,
                    "epoch": node.epoch,
                    "address": node.about.address,
                    "free_bytes": node.about.free_bytes,
                }
                for node in sorted(nodes.values(), key=lambda node: node.name)
            ],
        }

    # -- inside
    async def _join(self) -> None:
        ticket = Ticket(self._belonging.lease_id, self._belonging.epoch)
        era = await self._find_era()
        self._era = era.number
        if self._belonging.era not in (0, era.number):
            log.error("etcd forgot this node: it is told what this node holds", etcd=self._settings.cluster)
            self._is_retelling = True
            if era.previous == self._belonging.era:
                self._cluster.ledger.doubt(era.previous)  # should it ever come back
            self._post(self._membership)
            await self._cluster.client.revoke(ticket.lease_id)
            ticket = Ticket(0, 0)
        try:
            epoch = await self._membership.join(ticket if ticket.lease_id else None)
        except NotKeptError:
            # Nothing rests on it, so nobody needs to wait for its lease to end.
            await self._cluster.client.revoke(self._membership.ticket.lease_id)
            raise
        if self._is_retelling:
            await self._tell(era)
        self._resumed = epoch.number == ticket.epoch
        self._fault = ""
        if self._resumed:
            log.info("went on with the membership", node=self._cluster.node, epoch=epoch.number)

    async def _find_era(self) -> Era:
        """The era of the directory that is there now. Where it is this node's in an earlier state, a new one begins."""
        client, keys, known = self._cluster.client, self._cluster.keys, self._belonging
        era = self._era or known.era
        is_same = await self._is_what_it_was(era)
        found = await find_era(client, keys)
        if found is None:
            return await begin_era(client, keys, None)
        if found.number == known.era:
            is_same = is_same and known.cluster_id in (0, client.cluster_id)
        if is_same or found.number not in (known.era, era):
            of_era = known_of(found.number, self._cluster.ledger, keys.witness(self._cluster.node))
            if found.number == known.era:
                of_era = replace(of_era, revision=max(of_era.revision, known.epoch))
            if await self._is_what_it_was(found.number, of_era):
                return found
        nobodys = ClusteredDirectory(client, keys)
        try:
            await nobodys.forget_clean()
        finally:
            await nobodys.close()
        return await begin_era(client, keys, found)

    async def _is_what_it_was(self, era: int, known: Known | None = None) -> bool:
        """Whether the directory, of this era, has all that this node knows it to have had. After that, whichever
        answers may be asked; what proves that it is not is kept until another era begins."""
        client, ledger = self._cluster.client, self._cluster.ledger
        try:
            await client.connect(known)
        except ForeignDirectoryError as error:
            log.error("another directory answers than before", etcd=self._settings.cluster, error=error)
            if client.is_doubted:
                ledger.doubt(era)
            client.begin_anew()
            return False
        return not ledger.is_doubted(era)

    async def _tell(self, era: Era) -> None:
        """Before anybody rests on this membership."""
        try:
            async with asyncio.TaskGroup() as group:
                keeping = group.create_task(self._membership.run())
                await self._retell(self._membership.epoch, era)
                keeping.cancel()
        except ExceptionGroup as errors:
            ours, unexpected = errors.split(TiergateError)
            raise (unexpected or ours or errors).exceptions[0] from errors
        self._is_retelling = False
        self._post(self._membership)
        log.warning("etcd was told what this node holds", etcd=self._settings.cluster)

    async def _watch_era(self) -> None:
        """Another node may be the first to see that the directory forgot."""
        client, key = self._cluster.client, self._cluster.keys.era
        while True:
            outcome = await client.read(Range(key))
            rows = outcome.found(0)
            if not rows or era_of(rows[0].value) != self._era:
                raise MembershipOverError("the directory began anew")
            async with Watch(client, key, b"", outcome.revision + 1) as watch:
                with suppress(CompactedError):
                    await watch.next()

    async def _watch_doubts(self) -> None:
        """Another process of this node may be the first to see that the directory went back."""
        while not self._cluster.ledger.is_doubted(self._era):
            await self._clock.sleep(DOUBTS_INTERVAL_S)
        raise MembershipOverError("the directory went back to an earlier state")

    async def _rejoin(self) -> None:
        while True:
            try:
                return await self._join()
            except TiergateError as error:
                self._fault = str(error)
                log.error("cannot join the cluster, tried again", error=error)
                await self._clock.sleep(REJOIN_PAUSE_S)

    async def _call(self, after_join: AfterJoin) -> None:
        while True:
            try:
                return await after_join(self._membership.ticket.epoch, self._resumed)
            except TiergateError as error:
                log.warning("what follows joining failed, tried again", error=error)
                await self._clock.sleep(REJOIN_PAUSE_S)

    async def _announce(self) -> None:
        step_bytes = self._settings.memory_limit_bytes // ANNOUNCE_SHARE
        while True:
            await self._clock.sleep(ANNOUNCE_INTERVAL_S)
            about = replace(self._membership.about, free_bytes=self._free_bytes())
            if abs(about.free_bytes - self._membership.about.free_bytes) >= step_bytes:
                try:
                    await self._membership.announce(about)
                except DirectoryUnavailableError as error:
                    log.warning("the free memory could not be announced, tried again later", error=error)

    def _post(self, membership: Membership) -> None:
        """What is needed to go on after a restart is kept before anything can rest on it."""
        ticket, cluster_id = membership.ticket, self._cluster.client.cluster_id
        belonging = replace(self._belonging, lease_id=ticket.lease_id, epoch=ticket.epoch)
        if not self._is_retelling:  # else a restart begins it again
            belonging = replace(belonging, cluster=self._settings.cluster, cluster_id=cluster_id, era=self._era)
        if belonging != self._belonging:
            self._write(belonging)
        if self._is_retelling:
            self._cluster.board.post(Posted(ticket.epoch, 0.0, membership.about, 0, NOBODYS_CLUSTER))
            return
        posted = Posted(ticket.epoch, membership.deadline_s(), membership.about, self._era, cluster_id)
        self._cluster.board.post(posted)

    def _read(self) -> Belonging:
        """What the memory folder says. The life of a memory ends with the machine's, wherever the folder lies."""
        kernel = _KERNEL_BOOT.read_text().strip()
        try:
            found = msgspec.json.decode(self._path.read_bytes(), type=Belonging)
        except FileNotFoundError:
            found = Belonging(self._settings.cluster, self._settings.node_name, "")
        if not found.boot.startswith(kernel):
            found = replace(found, boot=f"{kernel}/{secrets.token_hex(4)}")
        return found

    def _write(self, belonging: Belonging) -> None:
        draft = self._path.with_suffix(".new")
        try:
            draft.write_bytes(msgspec.json.encode(belonging))
            os.replace(draft, self._path)
        except OSError as error:
            raise NotKeptError(f"{self._path} cannot be written: {error.strerror}") from error
        self._belonging = belonging


def advertised(context: ChildContext) -> Address:
    """Where peers reach this node.

    Raises:
        ConfigError: the settings do not say it.
    """
    address, real = context.settings.advertise, context.peer_address
    if address is None or real is None:
        raise ConfigError("a member of a cluster needs an address to advertise")
    return Address(address.host, address.port or real.port)


def reachable(listen: Address, peers: Address) -> str:
    """Where clients on other machines reach this node, which listens at `listen` and whose peers reach it at `peers`;
    empty if they do not."""
    if listen.host in EVERY_HOST:
        return str(Address(peers.host, listen.port))
    return str(listen) if peers.is_loopback or not listen.is_loopback else ""
