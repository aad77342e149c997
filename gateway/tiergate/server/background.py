"""The background process: write-back, recovery, upkeep, the membership of a cluster, and the admin address."""

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from aiohttp import web

from tiergate.child import ChildContext
from tiergate.engine.checkpoints import Checkpoints
from tiergate.engine.mending import Mending
from tiergate.engine.newest import Chooser
from tiergate.engine.prefetch import Prefetch
from tiergate.engine.rooms import Rooms
from tiergate.engine.verify import Verify
from tiergate.engine.wholesets import WholeSets
from tiergate.errors import FencedError, OverloadedError, TiergateError, invariant
from tiergate.observe.logs import get_logger
from tiergate.policy.bandwidth import TokenBucket
from tiergate.replication.base import PROMISE, Promise
from tiergate.server.admin import Admin
from tiergate.server.checkpoints import CheckpointRoutes
from tiergate.server.newest import NewestVerb
from tiergate.server.verifying import VerifyRoutes
from tiergate.server.wiring import (
    copier_of,
    leave_embedded,
    open_cluster,
    open_retaining,
    open_rooms,
    open_uploader,
    standing_of,
    view_of,
)
from tiergate.writeback.drain import Drain, Peers, Report
from tiergate.writeback.keeper import Keeper
from tiergate.writeback.promotion import Promotion
from tiergate.writeback.recovery import Sweep, recover, recover_member
from tiergate.writeback.repair import Repair
from tiergate.writeback.survivors import RoundTimes, Survivors
from tiergate.writeback.takeover import Patience

if TYPE_CHECKING:
    from tiergate.server.cluster import Cluster
    from tiergate.server.member import Member

log = get_logger(__name__)

UPKEEP_INTERVAL_S = 30.0

REAP_INTERVAL_S = 2.0
"""Nobody tells of the death of a process that is not the node's own and had part of its memory."""

FORGET_INTERVAL_S = 1.0

FORGET_FOR_ALL_INTERVAL_S = 15.0
"""In a cluster, where nothing is short of room because of them."""

RECOVER_AGAIN_S = 1.0

HAND_OVER_S = 10.0
"""So long a node that stops may take, beside what `drain` allows, to read what it owes and hand it over."""

COUNT_S = 5.0
"""So long it may take to name what is left where that did not end in time."""

NICENESS = 5
"""Where processors are short, clients come before write-back."""


def run(context: ChildContext) -> None:
    """The entry point of the background process; returns after SIGTERM."""
    os.nice(NICENESS)
    asyncio.run(serve(context))


async def serve(context: ChildContext, promise: Promise = PROMISE) -> None:
    """Work until SIGTERM. The node then brings away what it owes, as far as `drain` lets it, and a member of a cluster
    leaves. What is left goes on at the next start: all state is in the memory folder."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    if context.settings.cluster:
        await leave_embedded(context)
    async with open_cluster(context, promise) as cluster, view_of(cluster), open_rooms(context, cluster) as rooms:
        background = Background(context, rooms, cluster)
        if cluster is None:
            await background.alone(stop)
        else:
            await background.belong(cluster, stop)


class Background:
    """The work of this process, until it is told to stop."""

    def __init__(self, context: ChildContext, rooms: Rooms, cluster: "Cluster | None") -> None:
        self._context = context
        self._rooms = rooms
        self._cluster = cluster
        self._standing = standing_of(rooms.memory, cluster)
        self._uploader = open_uploader(rooms, self._standing)
        self._survivors = self._open_survivors(cluster) if cluster else None
        self._promotion = Promotion(
            rooms.directory, rooms.settings.prefix_for, rooms.clock, rooms.metrics, self._uploader.wake
        )
        self._checkpoints = Checkpoints(rooms)
        self._keeper = self._open_keeper(cluster)
        self._report = Report()
        self._retaining = open_retaining(rooms, cluster)

    async def alone(self, stop: asyncio.Event) -> None:
        """Work as a node that is no member of a cluster."""
        await self.work(stop)
        self._context.report_left(self._report.status)

    async def belong(self, cluster: "Cluster", stop: asyncio.Event) -> None:
        """Work as a member of a cluster. Who does not end in order stays one for as long as its lease lasts."""
        # Here and not above, since a node alone needs no gRPC, and may not have it.
        from tiergate.server.member import Member
        from tiergate.server.remembering import Remembering

        rooms = self._rooms
        remembering = Remembering(cluster, rooms.memory, rooms.clock, self._uploader.retry_now)
        member = Member(
            cluster,
            self._context,
            rooms.clock,
            lambda: rooms.memory.stats().available_bytes,
            remembering.retell,
        )
        if not await until(stop, member.join()):
            return
        async with asyncio.TaskGroup() as group:
            keeping = group.create_task(member.run(self._after_join))
            remembering_on = group.create_task(remembering.run())
            await self.work(stop, member)
            remembering_on.cancel()
            keeping.cancel()
        await member.leave(owes_nothing=not self._report.left.count)
        self._context.report_left(self._report.status)

    async def work(self, stop: asyncio.Event, member: "Member | None" = None) -> None:
        """All that is done in any case."""
        context, rooms, uploader = self._context, self._rooms, self._uploader
        loop = asyncio.get_running_loop()
        invariant(context.admin_socket is not None, "the background process needs the admin socket")
        deaths = asyncio.Event()
        if not await self._recover():
            deaths.set()
        prefetch = Prefetch(rooms, self._cluster.directory if self._cluster else None)
        sets = CheckpointRoutes(rooms, uploader, self._checkpoints)
        mending = Mending(rooms, self._cluster.directory if self._cluster else None)
        verify = Verify(rooms, self._checkpoints, mending)
        verifying = VerifyRoutes(verify)
        chooser = Chooser(rooms)
        runner = Admin(
            context,
            rooms,
            uploader,
            prefetch,
            self._promotion,
            self._retaining,
            member,
            self._cluster,
            (*sets.routes(), *verifying.routes(), *NewestVerb(rooms, chooser).routes()),
            [verifying.stream],
        ).runner()
        await runner.setup()
        await web.SockSite(runner, context.admin_socket).start()  # type: ignore[arg-type]
        loop.add_reader(context.wakeup_fd, lambda: drain(context.wakeup_fd, uploader.wake))
        loop.add_reader(context.deaths_fd, lambda: drain(context.deaths_fd, deaths.set))
        context.report_ready()
        try:
            async with asyncio.TaskGroup() as group:
                uploading = group.create_task(uploader.run())
                tasks = [
                    group.create_task(self._clean_up_after_deaths(deaths)),
                    group.create_task(forget_oldest(rooms, self._cluster)),
                    group.create_task(keep_up(rooms, self._cluster)),
                    group.create_task(give_back(rooms)),
                    group.create_task(self._retaining.run()),
                    group.create_task(sets.watch_pace()),
                    group.create_task(self._keeper.run()),
                    group.create_task(rooms.origin.channel.look_for_credentials()),
                    *(group.create_task(work) for work in self._work_of_members()),
                ]
                await stop.wait()
                await self._wind_up(uploading)
                for task in (uploading, *tasks):
                    task.cancel()
        finally:
            loop.remove_reader(context.wakeup_fd)
            loop.remove_reader(context.deaths_fd)
            await runner.cleanup()
            await prefetch.close()
            await chooser.close()
            await verify.close()
            await mending.close()
            await self._checkpoints.close()

    async def _after_join(self, epoch: int, resumed: bool) -> None:
        """What follows each join. It is cancelled when the membership of this epoch ends, and called again if it fails
        with one of our errors."""
        # What was refused while this node was no member goes on now.
        self._uploader.retry_now()
        if self._survivors is not None:
            self._survivors.wake()

    def _open_keeper(self, cluster: "Cluster | None") -> Keeper:
        rooms = self._rooms
        return Keeper(
            rooms.directory,
            rooms.origin,
            self._promotion,
            rooms.settings.prefixes,
            rooms.clock,
            rooms.metrics,
            WholeSets(self._checkpoints, rooms.clock).judge,
            rooms.settings.marker_quiet_s,
            cluster.keeps_house if cluster is not None else lambda: True,
            rooms.replaced,
        )

    # -- what only members of a cluster do
    def _open_survivors(self, cluster: "Cluster") -> Survivors:
        rooms, settings = self._rooms, self._rooms.settings
        return Survivors(
            cluster.directory,
            rooms.memory,
            self._standing,
            cluster.view.live,
            rooms.clock,
            rooms.metrics,
            self._uploader.wake,
            Patience(grace_s=settings.restart_grace_s),
            RoundTimes(),
        )

    def _work_of_members(self) -> list[Coroutine[Any, Any, None]]:
        cluster, survivors, rooms = self._cluster, self._survivors, self._rooms
        if cluster is None or survivors is None:
            return []
        settings = rooms.settings
        repair = Repair(
            cluster.directory,
            rooms.memory,
            copier_of(settings, cluster, rooms.replication, rooms.clock),
            self._standing,
            cluster.view.live,
            rooms.clock,
            rooms.metrics,
            TokenBucket(settings.repair_bytes_per_s),
            settings.restart_grace_s,
        )
        sweep = Sweep(cluster.directory, rooms.memory, rooms.clock, cluster.promise.keep_s)
        return [survivors.run(), wake_at_changes(cluster, survivors), repair.run(), sweep.run()]

    async def _wind_up(self, uploading: "asyncio.Task[None]") -> None:
        """Before this node ends: what it owes goes to the origin, for at most `drain`, then to peers if it has any."""
        rooms, report = self._rooms, self._report
        drain_s = rooms.settings.drain_s
        drain = Drain(rooms.directory, self._uploader, rooms.clock, self._standing, self._peers())
        promoting = asyncio.create_task(self._keeper.promote_newest() if drain_s else asyncio.sleep(0))
        try:
            async with asyncio.timeout(drain_s + HAND_OVER_S):
                await drain.to_origin(drain_s, report, promoting)
                for task in (uploading, promoting):
                    task.cancel()
                await asyncio.wait((uploading, promoting))
                self._context.report_counting()
                await drain.to_peers(report)
        except (TiergateError, TimeoutError) as error:
            log.error("what is owed cannot be read or handed over in time, and stays where it is", error=error)
            self._context.report_counting()
            await count_left(drain, report)
        finally:
            promoting.cancel()
        report.tell()

    def _peers(self) -> Peers | None:
        cluster, rooms = self._cluster, self._rooms
        if cluster is None:
            return None
        copier = copier_of(rooms.settings, cluster, rooms.replication, rooms.clock)
        return Peers(cluster.directory, copier, cluster.view.live)

    # -- the dead
    async def _recover(self) -> bool:
        """Clean up after the dead; False where it must be done again, since the directory cannot do its part now."""
        rooms = self._rooms
        try:
            if self._cluster is None:
                pins_count = await recover(rooms.directory, rooms.memory)
            else:
                pins_count = await recover_member(rooms.directory, rooms.memory, self._cluster.node)
        except (OverloadedError, FencedError) as error:
            log.warning("cleaning up after the dead failed, tried again", error=error)
            return False
        rooms.metrics.reaped_pins.inc(pins_count)
        return True

    async def _clean_up_after_deaths(self, deaths: asyncio.Event) -> None:
        """Give back what a dead worker was receiving, reading or about to commit."""
        while True:
            await deaths.wait()
            deaths.clear()
            log.info("cleaning up after a dead process")
            while not await self._recover():
                await self._rooms.clock.sleep(RECOVER_AGAIN_S)
            self._rooms.wake()  # What it was doing may have held writes back.


async def count_left(drain: Drain, report: Report) -> None:
    """Name what is left where the drain did not come to its end; it counts as something where that fails too."""
    try:
        async with asyncio.timeout(COUNT_S):
            await drain.count_left(report)
    except (TiergateError, TimeoutError) as error:
        log.error("what is left cannot be read", error=error)
        report.left.count += 1


async def wake_at_changes(cluster: "Cluster", survivors: Survivors) -> None:
    """Let the survivors look as soon as a node comes or goes, and say so in the log."""
    live = cluster.view.live()
    while True:
        survivors.wake()
        before, live = live, await cluster.view.changed(live)
        for node in sorted(before.nodes.keys() ^ live.nodes.keys()):
            log.info("a node is here" if node in live.nodes else "a node is gone", node=node, nodes=len(live.nodes))


async def until(stop: asyncio.Event, work: Coroutine[Any, Any, None]) -> bool:
    """Do something, unless `stop` comes first; whether it was done."""
    stopping = asyncio.create_task(stop.wait())
    doing = asyncio.create_task(work)
    try:
        await asyncio.wait((stopping, doing), return_when=asyncio.FIRST_COMPLETED)
        if doing.done():
            await doing
            return True
        return False
    finally:
        for task in (stopping, doing):
            task.cancel()
        await asyncio.gather(stopping, doing, return_exceptions=True)


def drain(eventfd: int, then: Callable[[], None]) -> None:
    """Take what an eventfd counted, then act once for all of it."""
    try:
        os.eventfd_read(eventfd)
    except BlockingIOError:
        return
    then()


async def forget_oldest(rooms: Rooms, cluster: "Cluster | None") -> None:
    """Forget identities of evicted objects beyond their bound, and while the directory is short of room. Often: first
    reads of many objects fill it fast. In a cluster the housekeeper does it for all, and counts for all."""
    while True:
        await rooms.clock.sleep(FORGET_FOR_ALL_INTERVAL_S if cluster else FORGET_INTERVAL_S)
        if cluster is not None and not cluster.keeps_house():
            continue
        try:
            while dropped := await rooms.directory.trim_clean(rooms.settings.identities_kept_count):
                for version in dropped:
                    rooms.let_go(version)
                await asyncio.sleep(0)
            if cluster is not None:  # After that, which a directory without room needs first.
                await cluster.directory.count_for_all()
        except TiergateError as error:
            log.warning("identities could not be forgotten, tried again later", error=error)


async def keep_up(rooms: Rooms, cluster: "Cluster | None") -> None:
    """Regular upkeep: answers of old uploads (in a cluster: by the housekeeper)."""
    settings = rooms.settings
    while True:
        await rooms.clock.sleep(UPKEEP_INTERVAL_S)
        try:
            if cluster is None or cluster.keeps_house():
                before_s = rooms.clock.wall_s() - settings.finished_upload_keep_s
                await rooms.directory.expire_finished(before_s)
        except TiergateError as error:
            log.warning("upkeep failed, tried again later", error=error)


async def give_back(rooms: Rooms) -> None:
    """Give back what processes held that died unnoticed."""
    while True:
        await rooms.clock.sleep(REAP_INTERVAL_S)
        try:
            rooms.metrics.reaped_pins.inc(rooms.memory.reap())
        except TiergateError as error:
            log.warning("what dead processes held could not be given back, tried again later", error=error)
