"""The background process: write-back, recovery, upkeep, and the admin address."""

import asyncio
import os
import signal
from collections.abc import Callable

from aiohttp import web

from tiergate.child import ChildContext
from tiergate.engine.rooms import Rooms
from tiergate.errors import TiergateError, invariant
from tiergate.observe.logs import get_logger
from tiergate.server.admin import Admin
from tiergate.server.wiring import open_rooms, open_uploader
from tiergate.writeback.recovery import recover

log = get_logger(__name__)

UPKEEP_INTERVAL_S = 30.0
FORGET_INTERVAL_S = 1.0

NICENESS = 5
"""Where processors are short, clients come before write-back."""


def run(context: ChildContext) -> None:
    """The entry point of the background process; returns after SIGTERM."""
    os.nice(NICENESS)
    asyncio.run(serve(context))


async def serve(context: ChildContext) -> None:
    """Work until SIGTERM. What is in flight then goes on at the next start: all state is in the memory folder."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    invariant(context.admin_socket is not None, "the background process needs the admin socket")
    async with open_rooms(context) as rooms:
        rooms.metrics.reaped_pins.inc(await recover(rooms.directory, rooms.memory))
        uploader = open_uploader(rooms)
        admin = Admin(context, rooms, uploader)
        runner = web.AppRunner(admin.app(), access_log=None)
        await runner.setup()
        await web.SockSite(runner, context.admin_socket).start()  # type: ignore[arg-type]
        deaths = asyncio.Event()
        loop.add_reader(context.wakeup_fd, lambda: drain(context.wakeup_fd, uploader.wake))
        loop.add_reader(context.deaths_fd, lambda: drain(context.deaths_fd, deaths.set))
        context.report_ready()
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(uploader.run()),
                    group.create_task(clean_up_after_deaths(rooms, deaths)),
                    group.create_task(forget_oldest(rooms)),
                    group.create_task(keep_up(rooms)),
                ]
                await stop.wait()
                for task in tasks:
                    task.cancel()
        finally:
            loop.remove_reader(context.wakeup_fd)
            loop.remove_reader(context.deaths_fd)
            await runner.cleanup()


def drain(eventfd: int, then: Callable[[], None]) -> None:
    """Take what an eventfd counted, then act once for all of it."""
    try:
        os.eventfd_read(eventfd)
    except BlockingIOError:
        return
    then()


async def clean_up_after_deaths(rooms: Rooms, deaths: asyncio.Event) -> None:
    """Give back what a dead worker was receiving, reading or about to commit."""
    while True:
        await deaths.wait()
        deaths.clear()
        log.info("cleaning up after a dead process")
        rooms.metrics.reaped_pins.inc(await recover(rooms.directory, rooms.memory))
        rooms.wake()  # What it was doing may have held writes back.


async def forget_oldest(rooms: Rooms) -> None:
    """Forget identities of evicted objects beyond their bound, and while the directory is short of room. Often: first
    reads of many objects fill it fast."""
    while True:
        await rooms.clock.sleep(FORGET_INTERVAL_S)
        try:
            while dropped := await rooms.directory.trim_clean(rooms.settings.identities_kept_count):
                for version in dropped:
                    rooms.let_go(version)
                await asyncio.sleep(0)
        except TiergateError as error:
            log.warning("identities could not be forgotten, tried again later", error=error)


async def keep_up(rooms: Rooms) -> None:
    """Regular upkeep: answers of old uploads, what died unnoticed."""
    settings = rooms.settings
    while True:
        await rooms.clock.sleep(UPKEEP_INTERVAL_S)
        try:
            before_s = rooms.clock.wall_s() - settings.finished_upload_keep_s
            await rooms.directory.expire_finished(before_s)
            rooms.metrics.reaped_pins.inc(rooms.memory.reap())
        except TiergateError as error:
            log.warning("upkeep failed, tried again later", error=error)
