"""Bringing what lies under a prefix into this node's memory before somebody asks for it, newest checkpoints first.

What is brought may be evicted later like anything that the origin has; but never by the same prefetch, which ends when
there is no room for more.
"""

import asyncio
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from tiergate.checkpoints.markers import scope_of
from tiergate.directory.base import ClusterDirectory
from tiergate.engine.buckets import Buckets
from tiergate.engine.current import Current, Resolver
from tiergate.engine.fills import Fills, ForeignVersionError, Source, VanishedError
from tiergate.engine.outage import AWAY, Outage
from tiergate.engine.reads import route_of
from tiergate.engine.rooms import Rooms, bodies_of, log_name
from tiergate.errors import NotFoundError, OverloadedError, RequestError, TiergateError, invariant
from tiergate.memory.rows import aligned
from tiergate.model import ObjectName, Record, Role, State
from tiergate.observe.logs import get_logger
from tiergate.origin.answers import OriginPage

log = get_logger(__name__)

PAGE_COUNT = 1000
"""Records and keys read at once."""

WANTED_LIMIT_COUNT = 250_000
"""Objects that are planned at a time."""

OBJECTS_COUNT = 8
"""Objects that are brought at a time; how much of each at once: `fill_ahead`."""

ATTEMPTS_COUNT = 4
"""How often an object is begun anew because it was replaced meanwhile, or who had it went."""

FAILURES_IN_ROW_COUNT = 20
"""After so many failures without a success in between nothing more is tried."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """An object as it was found: what order and amount are judged by. What is brought is what is current then."""

    name: ObjectName
    size_bytes: int
    modified_s: float
    role: Role


def wanted_of(record: Record) -> Wanted | None:
    """What the directory says of a key; None if it does not exist."""
    version = record.version
    return Wanted(record.name, version.size_bytes, version.modified_s, record.role) if version else None


def newest_sets_first(wanted: Sequence[Wanted]) -> list[Wanted]:
    """Those of the newest set first: the marker that was written last, after it the members of its set; objects of no
    set last, newest first. Pure."""
    by_key = sorted(wanted, key=lambda each: each.name.key)
    keys = [each.name.key for each in by_key]
    found: dict[str, Wanted] = {}
    scopes: set[str] = set()
    for marker in _newest_first(each for each in by_key if each.role is Role.MARKER):
        found.setdefault(marker.name.key, marker)
        scope = scope_of(marker.name.key)
        if scope in scopes:
            continue
        scopes.add(scope)
        end = bisect_left(keys, f"{scope[:-1]}0") if scope else len(keys)  # "0" comes right after "/"
        for member in _newest_first(by_key[bisect_left(keys, scope) : end]):
            found.setdefault(member.name.key, member)
    return [*found.values(), *_newest_first(each for each in by_key if each.name.key not in found)]


def _newest_first(wanted: Iterable[Wanted]) -> list[Wanted]:
    return sorted(wanted, key=lambda each: -each.modified_s)


@dataclass(slots=True)
class Progress:
    """Objects and bytes: how many are to be brought, how many are here. `failures`: what could not be had, and why;
    `fault`: why not all was tried, empty if it was."""

    total_count: int = 0
    total_bytes: int = 0
    done_count: int = 0
    done_bytes: int = 0
    failures: list[tuple[ObjectName, str]] = field(default_factory=list)
    fault: str = ""


class NoRoomError(TiergateError):
    """Memory has no room for more."""


class Room:
    """What of memory a prefetch may still take, so that it evicts others' bytes only, never what it brought. Whoever
    asks for room while others are at it waits for them where it is not clear yet."""

    def __init__(self, available_bytes: Callable[[], int]) -> None:
        self._available_bytes = available_bytes
        self._kept_bytes = 0
        self._taken_bytes = 0
        self._changed = asyncio.Condition()

    async def take(self, size_bytes: int) -> None:
        """Take room for an object that is about to be brought; `put` ends it.

        Raises:
            NoRoomError: there is none.
        """
        async with self._changed:
            # What is under way may count twice: as far as it has come, it is not available any more.
            while self._kept_bytes + self._taken_bytes + size_bytes > self._available_bytes():
                if not self._taken_bytes:
                    raise NoRoomError("memory has no room for more")
                await self._changed.wait()
            self._taken_bytes += size_bytes

    async def put(self, size_bytes: int, kept_bytes: int) -> None:
        """What room was taken for is over; so much of it is here, and could be evicted."""
        async with self._changed:
            self._taken_bytes -= size_bytes
            self._kept_bytes += kept_bytes
            self._changed.notify_all()


class Prefetch:
    """Of one process; `close`d by whoever made it. `cluster` is the directory where there are others that read from
    here."""

    def __init__(self, rooms: Rooms, cluster: ClusterDirectory | None = None) -> None:
        self._rooms = rooms
        self._cluster = cluster
        self._outage = Outage(rooms.origin, rooms.clock)
        self._buckets = Buckets(rooms, self._outage)
        self._resolver = Resolver(rooms, self._outage)
        self._fills = Fills(rooms)

    async def close(self) -> None:
        """End what runs in the background."""
        await self._fills.close()
        await self._outage.close()

    async def run(self, bucket: str, prefix: str, progress: Progress) -> None:
        """Bring what is under a prefix here, and say in `progress` how far it is. What cannot be had is left.

        Raises:
            NotFoundError: NoSuchBucket.
            RequestError: too many objects are under the prefix.
            OverloadedError: the directory does not answer, or the origin of keys that only it knows.
            OriginError: it refuses to list the prefix.
        """
        await self._buckets.known(bucket)
        wanted = newest_sets_first(await self._wanted(bucket, prefix))
        progress.total_count, progress.total_bytes = len(wanted), sum(each.size_bytes for each in wanted)
        room = Room(lambda: self._rooms.memory.stats().available_bytes)
        work, failed_in_row = iter(wanted), 0

        async def bring_some() -> None:
            nonlocal failed_in_row
            for each in work:
                if progress.fault:
                    return
                try:
                    await self._bring(each, room, progress)
                    failed_in_row = 0
                except NoRoomError as error:
                    progress.fault = error.message
                except TiergateError as error:
                    log.warning("an object could not be prefetched", error=error, **log_name(each.name))
                    progress.failures.append((each.name, error.message))
                    failed_in_row += 1
                    if failed_in_row >= FAILURES_IN_ROW_COUNT:
                        progress.fault = f"{failed_in_row} objects in a row could not be had"

        async with asyncio.TaskGroup() as group:
            for _ in range(OBJECTS_COUNT):
                group.create_task(bring_some())

    # -- what there is
    async def _wanted(self, bucket: str, prefix: str) -> list[Wanted]:
        """The current objects under a prefix: those of the directory, and those that only the origin knows."""
        found: dict[str, Wanted | None] = {}
        after = ""
        while page := await self._rooms.directory.scan(bucket, prefix, after, PAGE_COUNT):
            for record in page:
                found[record.name.key] = wanted_of(record)
            after = page[-1].name.key
            check_count(found)
        after, is_truncated = "", True
        while is_truncated:
            there = await self._origin_page(bucket, prefix, after)
            for entry in there.entries:
                if entry.key not in found:
                    name = ObjectName(bucket, entry.key)
                    role = self._rooms.role_of(name, entry.size_bytes)
                    found[entry.key] = Wanted(name, entry.size_bytes, entry.modified_s, role)
            after, is_truncated = there.last_key, there.is_truncated
            check_count(found)
        return [each for each in found.values() if each is not None]

    async def _origin_page(self, bucket: str, prefix: str, after: str) -> OriginPage:
        def question() -> Awaitable[OriginPage]:
            return self._rooms.origin.list_objects(bucket, prefix, "", after, PAGE_COUNT)

        if not self._rooms.settings.prefix_for(bucket, prefix).exclusive:
            async with self._outage.bounded(bucket):
                return await question()
        try:
            return await self._outage.ask(bucket, question)
        except AWAY:
            # Only gateways write here, so what the directory knows is all there is.
            self._rooms.metrics.origin_outage_answers.inc()
            return OriginPage((), (), is_truncated=False)

    # -- one object
    async def _bring(self, wanted: Wanted, room: Room, progress: Progress) -> None:
        """Bring what is current of a key.

        Raises:
            NoRoomError: there is none; nothing was evicted for it.
            TiergateError: as reading it does.
        """
        name, expected_bytes, came_bytes = wanted.name, wanted.size_bytes, 0

        def came(size_bytes: int) -> None:
            nonlocal came_bytes
            came_bytes += size_bytes
            progress.done_bytes += size_bytes

        for _ in range(ATTEMPTS_COUNT):
            try:
                current = await self._resolver.current(name)
            except NotFoundError:
                progress.total_count -= 1
                progress.total_bytes -= expected_bytes
                return
            progress.total_bytes += current.version.size_bytes - expected_bytes
            expected_bytes = current.version.size_bytes
            is_here = False
            try:
                is_here = await self._bring_version(current, room, came)
            except ForeignVersionError:
                await self._resolver.forget(name, current.version.uid)
            except VanishedError:
                continue  # Somebody else may have it by now, or the origin.
            finally:
                if not is_here:
                    came(-came_bytes)
            if is_here:
                progress.done_count += 1
                return
        raise OverloadedError("nobody gives the object, or it keeps changing", **log_name(name))

    async def _bring_version(self, current: Current, room: Room, came: Callable[[int], None]) -> bool:
        """Have all bytes of a version here, and tell others of it; False if it was replaced meanwhile. `came` is told
        of bytes as they come."""
        version, is_clean = current.version, current.record.state is State.CLEAN
        if not is_clean and self._rooms.holds_whole(version):
            came(version.size_bytes)
            return True
        size_bytes, kept_bytes = sum(aligned(part.body.size_bytes) for part in version.parts), 0
        await room.take(size_bytes)
        try:
            with ExitStack() as pins:
                await self._fill(current, came, pins)
                is_current = await self._tell(current)
            kept_bytes = size_bytes if is_clean else 0
            return is_current
        finally:
            await room.put(size_bytes, kept_bytes)

    async def _fill(self, current: Current, came: Callable[[int], None], pins: ExitStack) -> None:
        """Have all bytes of a version in memory, pinned.

        Raises:
            NoRoomError: memory is full all the same: others were faster.
            ForeignVersionError, VanishedError, TiergateError: as `Fills.block`.
        """
        route, name, uid = route_of(self._rooms, current), current.record.name, current.version.uid
        for offset_bytes, body in bodies_of(current.version):
            source = Source(name, route, uid, body, offset_bytes)
            for index in range(body.block_count):
                self._fills.prefetch(source, index, self._rooms.settings.fill_ahead_count)
                filled = await self._fills.block(source, index)
                if isinstance(filled, bytes):
                    raise NoRoomError("memory has no room for more")
                if index == 0:
                    pins.enter_context(filled)  # One keeps all of the body.
                else:
                    filled.release()
                came(body.block_size_bytes(index))

    async def _tell(self, current: Current) -> bool:
        """In a cluster: have others read the version from here. What the origin does not have yet may not be evicted
        then, since others count it as a copy. False if the version was replaced meanwhile.

        Raises:
            MembershipOverError, HolderLostError: this node is no member now.
            OverloadedError: the directory does not answer.
        """
        me, name, version = self._rooms.replication.me, current.record.name, current.version
        if self._cluster is None or me is None:
            return True
        uids = [part.body.uid for part in version.parts if part.body.size_bytes]
        is_clean = current.record.state is State.CLEAN
        if not is_clean:
            invariant(self._rooms.memory.hold_all(uids, version.uid, dirty=True), "what was pinned is gone", uids=uids)
            self._rooms.memory.confirm(version.uid, uids)
        if me in current.holders:
            return True
        # Where the answer does not come, the sweep finds out what the directory knows.
        is_told = await self._cluster.hold(name, version.uid, [me])
        if not is_told and not is_clean:
            self._rooms.memory.clean(version.uid, uids)
        return is_told


def check_count(found: Collection[object]) -> None:
    """Refuse what is too much to be planned.

    Raises:
        RequestError: InvalidArgument.
    """
    if len(found) > WANTED_LIMIT_COUNT:
        message = f"more than {WANTED_LIMIT_COUNT} objects are under the prefix: name one with fewer"
        raise RequestError("InvalidArgument", message)
