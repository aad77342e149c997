"""A cluster in one event loop and in virtual time: real write-back, take-over and repair on every node, over a
directory in the heap and an origin in memory. Messages take a while and get lost; nodes freeze, lose their lease, die
and come back, with their memory or without.
"""

import asyncio
import random
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, cast

from tiergate.checkpoints.markers import Markers, scope_of
from tiergate.config import Machine, load
from tiergate.directory.base import Intent
from tiergate.directory.transitions import leftovers_of
from tiergate.engine.afterwards import Afterwards
from tiergate.engine.current import foreign_version
from tiergate.engine.rooms import Rooms
from tiergate.engine.turn import Turn
from tiergate.errors import (
    DirectoryUnavailableError,
    HolderLostError,
    MembershipOverError,
    OriginTemporaryError,
    OutcomeUnknownError,
    PeerError,
    TiergateError,
    TooFewCopiesError,
)
from tiergate.memory.memory import Memory, MemoryLimits
from tiergate.model import (
    LOST,
    NO_BASE,
    UNKNOWN_BASE,
    About,
    Body,
    Holder,
    Kind,
    Live,
    Node,
    ObjectName,
    Part,
    Pending,
    Role,
    Version,
)
from tiergate.observe.metrics import Metrics
from tiergate.origin.forward import Forwarder
from tiergate.policy.bandwidth import TokenBucket
from tiergate.policy.rendezvous import ranked
from tiergate.replication.base import Copies, Copying, Notice
from tiergate.testing.memorydirectory import MemoryDirectory, State
from tiergate.testing.modelorigin import Held, ModelOrigin
from tiergate.testing.virtualtime import VirtualClock
from tiergate.writeback.copier import Copier
from tiergate.writeback.drain import Drain, Peers, Report
from tiergate.writeback.fence import FenceMode, PendingView, blockers
from tiergate.writeback.gate import Gate
from tiergate.writeback.holds import HoldBounds
from tiergate.writeback.promotion import Promotion
from tiergate.writeback.recovery import Sweep, recover_member
from tiergate.writeback.repair import Repair
from tiergate.writeback.scopes import is_fenced
from tiergate.writeback.sender import Sender, SenderSettings
from tiergate.writeback.standing import Standing
from tiergate.writeback.survivors import RoundTimes, Survivors
from tiergate.writeback.takeover import Patience
from tiergate.writeback.uploader import Uploader, UploaderSettings
from tiergate.writeback.withdrawal import Withdrawals, bodies_of

BUCKET = "bucket"
LARGE_BYTES = 64
QUIET_S = 3.0

LEASE_S = 5.0
MARGIN_S = 1.0
RENEW_S = 1.25
REQUEST_S = 5.0
"""No request to the origin is under way for longer."""

DIRECTORY_S = 1.5
"""No message to the directory is under way for longer."""

SETTLE_S = 5.5
"""More than what may still come of a node after others see it gone."""

GRACE_S = 20.0
PROMISE_S = 20.0
DRAIN_S = 4.0
COPIES_COUNT = 2
FREEZE_SHARE = 0.005
"""Of the directory's answers, those after which the node that asked stands still for a while."""

FOUND_LIMIT_S = 90.0
"""After everybody came back, what is found again is found by then."""

END_LIMIT_S = 900.0

SETTINGS = load(
    config_file=None,
    environ={},
    flags={"origin": "http://127.0.0.1:9", "marker_quiet_s": f"{QUIET_S}s", "through_wait_s": "30s"},
    machine=Machine(ram_bytes=1 << 30, cores_count=1, user_id=1),
).settings
"""Of the requests of clients."""

T = TypeVar("T")


@dataclass(eq=False, slots=True)
class GoingIn:
    """A request that puts a marker."""

    name: ObjectName


class World:
    """All of it, and what was acknowledged."""

    def __init__(self, seed: int, node_count: int) -> None:
        self.rng = random.Random(seed)
        self.clock = VirtualClock()
        self.state = State()
        self.markers = Markers(lambda bucket, key: (), LARGE_BYTES)
        self.metrics = Metrics()
        self.objects: dict[ObjectName, Held] = {}
        self.origin = ModelOrigin()
        self.history: dict[str, list[tuple[int, str]]] = {}
        self.bytes_of: dict[str, bytes] = {}
        self.deleted: dict[str, int] = {}
        self.kept: dict[str, dict[str, int]] = {}
        """For each version the nodes that said to hold it, with the life of their memory then."""
        self.stood: dict[ObjectName, str] = {}
        self.flying: dict[GoingIn, str] = {}
        """Puts of markers under way, each with a member of its set that was replaced meanwhile."""
        self.count = 0
        self.broken: list[str] = []
        self.is_origin_away = False
        self.slowness = self.rng.choice((0.1, 0.4, 0.7))
        self.hold_s = (0.0, 2.0, 20.0)[seed // 3 % 3]
        self.is_calm = False
        """Nothing is lost, slow or standing still but what the test says."""
        self.takes_s: Callable[[str, str, ObjectName], float | None] = lambda node, operation, name: None
        """How long a request of a node to the origin is under way; None: as it comes."""
        self.is_over = False
        self.graves: list[asyncio.Task[None]] = []
        self.folder = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
        self.state.on_commit = self._committed
        self.state.on_hold = self._held
        self.state.on_persisted = self._persisted
        self.nodes = {f"n{index}": SimNode(self, f"n{index}") for index in range(node_count)}

    async def close(self) -> None:
        for node in self.nodes.values():
            await node.kill(wipe=False)
        await asyncio.gather(*self.graves)
        for node in self.nodes.values():
            node.ground.close()
        self.metrics.close()
        shutil.rmtree(self.folder)

    def _committed(self, name: ObjectName, uid: str, revision: int) -> None:
        self.history.setdefault(name.key, []).append((revision, uid))

    def _held(self, uid: str, node: str) -> None:
        self.kept.setdefault(uid, {})[node] = self.nodes[node].life

    def _persisted(self, write: Pending) -> None:
        if write.kind is Kind.DELETE:
            self.deleted[write.name.key] = write.revision

    # -- membership
    async def keep_members(self) -> None:
        while True:
            await asyncio.sleep(RENEW_S / 2)
            now_s = self.clock.monotonic_s()
            for node in self.nodes.values():
                node.renew(now_s)
            gone = [name for name in self.state.nodes if now_s > self.nodes[name].renewed_s + LEASE_S]
            for name in gone:
                del self.state.nodes[name]
            if gone:
                self.tell()

    def tell(self) -> None:
        """Every node hears of who is a member, each at its own time."""
        live = self.state.live
        for node in self.nodes.values():
            asyncio.get_running_loop().call_later(self.rng.uniform(0.0, 0.3), node.see, live)

    # -- the promises
    def happened(self, operation: str, name: ObjectName, before: Held | None) -> None:
        """Something was changed in the origin."""
        after = self.objects.get(name)
        if operation in ("put", "complete") and after is not None:
            rank = self.rank(name.key, after.uid)
            if after.data != self.bytes_of[after.uid]:
                self.broken.append(f"{name.key}: other bytes than were acknowledged")
            if before is not None and self.rank(name.key, before.uid) > rank:
                self.broken.append(f"{name.key}: {after.uid} over the newer {before.uid}")
            if self.deleted.get(name.key, 0) > rank:
                self.broken.append(f"{name.key}: {after.uid} revived after its deletion")
        for each, held in self.objects.items():
            if self.role_of(each.key) is Role.MARKER:
                self._check_marker(each.key, held.uid)
        for each, etag in self.stood.items():
            now = self.objects.get(each)
            if now is not None and now.etag != etag:
                self._check_replaced(each)
        self.stood = {each: held.etag for each, held in self.objects.items()}

    def rank(self, key: str, uid: str) -> int:
        return next(revision for revision, known in self.history[key] if known == uid)

    def _check_replaced(self, name: ObjectName) -> None:
        for marker in self.objects:
            if self._speaks_for(marker, name):
                self.broken.append(f"{name.key} was replaced while {marker.key} stood")
        for flying in self.flying:
            if self._speaks_for(flying.name, name):
                self.flying[flying] = name.key

    def _speaks_for(self, marker: ObjectName, name: ObjectName) -> bool:
        role, scope = self.role_of(name.key), scope_of(marker.key)
        is_beside = role is Role.MARKER and scope == scope_of(name.key)
        is_over = self.role_of(marker.key) is Role.MARKER and name.key.startswith(scope) and not is_beside
        return is_over and role is not Role.POINTER

    def _check_marker(self, marker: str, uid: str) -> None:
        committed = self.rank(marker, uid)
        for key, commits in self.history.items():
            if not key.startswith(scope_of(marker)) or key == marker or self.role_of(key) is Role.POINTER:
                continue
            before = [known for revision, known in commits if revision < committed]
            since = [known for revision, known in commits if revision > committed]
            if not before or not before[-1] or "" in since or self._lost_a_member(key, committed):
                continue
            held = self.objects.get(ObjectName(BUCKET, key))
            if held is None or held.uid not in [before[-1], *since]:
                self.broken.append(f"{marker} ({uid}) stands over {held.uid if held else 'nothing'} at {key}")

    def _lost_a_member(self, marker: str, revision: int) -> bool:
        return self.role_of(marker) is Role.MARKER and any(
            key.startswith(scope_of(marker)) and any(not uid for at, uid in commits if at > revision)
            for key, commits in self.history.items()
        )

    def role_of(self, key: str) -> Role:
        return self.markers.role_of(ObjectName(BUCKET, key), LARGE_BYTES if key.endswith("large") else 1)

    # -- the end
    def is_settled(self) -> bool:
        tables = self.state.tables
        noted = {(write.name, each.upload_id) for write in tables.pending.values() for each in leftovers_of(write)}
        uploads = [(upload.name, upload_id) for upload_id, upload in self.origin.uploads.items()]
        # The answer that named one of them may have been lost.
        forgotten = [each for each in uploads if each not in noted and (each[0], "") not in noted]
        if tables.steps or tables.orphans or forgotten:
            return False
        return all(self._is_stuck(write) for write in tables.pending.values())

    def _is_stuck(self, write: Pending) -> bool:
        """Whether it rightly stays: it is lost with all who held it, or waits for what is."""
        if write.quarantined == LOST:
            return True
        view = PendingView(self.state.tables.pending.values())
        is_held = blockers(write, view, FenceMode.AUTO, self.clock.wall_s() + QUIET_S, QUIET_S) is not None
        return is_held and is_fenced(write) and any(each.quarantined == LOST for each in view)

    async def settle(self) -> None:
        """Everybody comes back and time goes by until nothing is left to do."""
        self.is_origin_away, self.is_over = False, True
        for node in self.nodes.values():
            node.heal()
        for second in range(int(END_LIMIT_S)):
            await asyncio.sleep(1.0)
            for node in self.nodes.values():
                node.start()  # One that was told to stop before may have come to its end now.
            if self.broken:
                return
            if self.is_settled() and self.state.tables.pending:
                if second > FOUND_LIMIT_S:
                    return  # What is lost stays.
            elif self.is_settled() and not any(node.dirty_bytes() for node in self.nodes.values()):
                return

    def check_end(self) -> None:
        tables = self.state.tables
        assert not self.broken, self.broken
        assert self.is_settled(), (tables.pending, tables.steps, tables.orphans, self.origin.uploads)
        for write in tables.pending.values():
            assert write.owner is not None, write
            assert self.state.live.still([write.owner]), f"nobody owns {write}"
            if write.quarantined:
                kept = self.kept[write.uid]
                alive = [name for name, life in kept.items() if self.nodes[name].life == life]
                assert not alive, f"{write.name.key} counts as lost, but {alive} had it"
        stuck = {name.key for name in tables.pending}
        expected = {key: commits[-1][1] for key, commits in self.history.items() if key not in stuck}
        found = {name.key: held.uid for name, held in self.objects.items() if name.key not in stuck}
        assert found == {key: uid for key, uid in expected.items() if uid}, self.history
        assert all(held.data == self.bytes_of[held.uid] for held in self.objects.values())
        if not tables.pending:
            assert not any(node.dirty_bytes() for node in self.nodes.values()), "bytes that nobody owes stay dirty"


class SimNode:
    """A node: its memory and membership, and the one process that it runs while it is up."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.life = 0
        self.ground = self._new_memory()
        self.holder: Holder | None = None
        self.renewed_s = self.deadline_s = -1e9
        self.is_cut = False
        self.thawed = asyncio.Event()
        self.thawed.set()
        self.live = Live(0, {})
        self.process: Process | None = None
        self.armed: tuple[int, Callable[[], None]] | None = None

    def _new_memory(self) -> Memory:
        limits = MemoryLimits((1 << 20) + (2 << 20), 1 << 20, 64 << 10)
        return Memory.open(self.world.folder / f"{self.name}.{self.life}", limits, self.world.clock)

    @property
    def is_up(self) -> bool:
        return self.process is not None and self.thawed.is_set()

    def dirty_bytes(self) -> int:
        return self.ground.stats().dirty_bytes

    # -- membership
    def renew(self, now_s: float) -> None:
        if not self.is_up or self.is_cut or now_s < self.renewed_s + RENEW_S:
            return
        if self.holder is None or not self.world.state.live.still([self.holder]):
            if self.name in self.world.state.nodes:
                return  # The one of its former life is not gone yet.
            self.join()
        self.renewed_s, self.deadline_s = now_s, now_s + LEASE_S - MARGIN_S

    def join(self) -> None:
        tables = self.world.state.tables
        tables.revision += 1
        node = Node(self.name, tables.revision, About(self.name))
        self.world.state.nodes[self.name] = node
        self.holder = node.holder
        self.renewed_s = self.world.clock.monotonic_s()
        self.deadline_s = self.renewed_s + LEASE_S - MARGIN_S
        self.world.tell()

    def stands(self) -> bool:
        return self.holder is not None and self.world.clock.monotonic_s() < self.deadline_s

    def me(self) -> Holder | None:
        if not self.stands():
            raise MembershipOverError("the lease is over")
        return self.holder

    def see(self, live: Live) -> None:
        if live.revision >= self.live.revision:
            self.live = live
            if self.process is not None:
                self.process.survivors.wake()

    # -- what befalls it
    def start(self) -> None:
        if self.process is None:
            self.process = Process(self)
            self.process.start()

    def arm(self, answers_count: int, befall: Callable[[], None]) -> None:
        """Something befalls it right after so many answers from now on."""
        self.armed = (answers_count, befall)

    def heard(self) -> None:
        """A process of this node got an answer."""
        if self.armed is None:
            return
        count, befall = self.armed
        self.armed = (count - 1, befall) if count > 1 else None
        if count == 1:
            befall()

    def die(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process = None

    def leave(self) -> None:
        """In good order: it ends its membership and its process, and keeps its memory."""
        if self.holder is not None and self.world.state.live.still([self.holder]):
            del self.world.state.nodes[self.name]
            self.world.tell()
        self.holder = None
        self.die()

    async def kill(self, *, wipe: bool) -> None:
        self.die()
        if wipe:
            await asyncio.gather(*self.world.graves)
            self.ground.close()
            shutil.rmtree(self.world.folder / f"{self.name}.{self.life}")
            self.life += 1
            self.ground = self._new_memory()
            # What it said under this membership is not so any more.
            if self.holder is not None:
                if self.world.state.live.still([self.holder]):
                    del self.world.state.nodes[self.name]
                    self.world.tell()
                self.holder = None

    def freeze(self, seconds: float) -> None:
        self.thawed.clear()
        asyncio.get_running_loop().call_later(seconds, self.thawed.set)

    def heal(self) -> None:
        self.is_cut, self.armed = False, None
        self.thawed.set()
        self.start()


class SimClock(VirtualClock):
    """Who sleeps on a frozen node wakes up when that does."""

    def __init__(self, process: "Process") -> None:
        super().__init__()
        self._process = process

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        await self._process.turn()


class Process:
    """What runs on a node between a start and its death."""

    def __init__(self, node: SimNode) -> None:
        self.node = node
        world = self.world = node.world
        self.memory = node.ground.share()
        self.is_dead = False
        self.sent: dict[asyncio.TimerHandle, Callable[[], None]] = {}
        self.tasks: set[asyncio.Task[None]] = set()
        self.uploading: asyncio.Task[None] | None = None
        self.is_draining = False
        clock = SimClock(self)
        self.directory = MemoryDirectory(world.state, node.me, self.carry_to_directory)
        origin = FarOrigin(self)
        standing = self.standing = Standing(self.memory.token, node.me, node.stands, is_shared=True)
        self.replication = SimReplication(self)
        copier = self.copier = Copier(self.directory, self.replication, clock, lambda name: COPIES_COUNT)
        withdrawals = Withdrawals(
            self.directory,
            self.memory,
            origin.client,
            world.markers,
            clock,
            world.metrics,
            foreign_version,
            1e9,
            standing,
            copier,
        )
        sender = Sender(
            self.directory,
            self.memory,
            origin.client,
            withdrawals,
            clock,
            world.metrics,
            SenderSettings(2, send_checksums=False),
            standing,
            self.replication,
        )
        slots = self.slots = asyncio.Semaphore(2)
        hold = HoldBounds(world.hold_s, lambda: True)
        gate = self.gate = Gate(self.directory, clock, lambda name: FenceMode.AUTO, QUIET_S, hold, standing, slots)
        bounds = UploaderSettings(begun_count=4, backoff_base_s=0.1, backoff_cap_s=2.0)
        self.uploader = Uploader(self.directory, sender, gate, clock, world.metrics, bounds, slots)
        self.uploader._random = random.Random(world.rng.random())
        self.survivors = Survivors(
            self.directory,
            self.memory,
            standing,
            lambda: node.live,
            clock,
            world.metrics,
            self.uploader.wake,
            Patience(SETTLE_S, GRACE_S),
            RoundTimes(round_s=10.0, again_s=1.0),
        )
        self.repair = Repair(
            self.directory,
            self.memory,
            copier,
            standing,
            lambda: node.live,
            clock,
            world.metrics,
            TokenBucket(1 << 20),
            GRACE_S,
            5.0,
        )
        self.sweep = Sweep(self.directory, self.memory, clock, PROMISE_S)
        rooms = Rooms(
            SETTINGS,
            clock,
            self.directory,
            self.memory,
            origin.client,
            cast(Forwarder, None),
            world.markers,
            withdrawals,
            world.metrics,
            self.replication,
            self.uploader.wake,
        )
        promotion = Promotion(rooms.directory, rooms.settings.prefix_for, clock, world.metrics, rooms.wake)
        self.turn_of_requests = Turn(rooms, Afterwards(clock), promotion)

    def start(self) -> None:
        self.run(self._serve())

    async def _serve(self) -> None:
        while True:
            try:
                await recover_member(self.directory, self.memory, self.node.name)
                break
            except TiergateError:
                await asyncio.sleep(1.0)
        self.uploading = self.run(self.uploader.run())
        for part in (self.survivors.run(), self.repair.run(), self.sweep.run()):
            self.run(part)

    def drain(self) -> None:
        """SIGTERM."""
        if self.uploading is not None and not self.is_draining:
            self.is_draining = True
            self.run(self._drain(self.uploading))

    async def _drain(self, uploading: asyncio.Task[None]) -> None:
        peers = Peers(self.directory, self.copier, lambda: self.node.live)
        drain = Drain(self.directory, self.uploader, SimClock(self), self.standing, peers)
        report = Report()
        with suppress(TiergateError, TimeoutError):
            async with asyncio.timeout(2 * DRAIN_S):
                await drain.to_origin(DRAIN_S, report)
                uploading.cancel()
                await asyncio.wait((uploading,))
                await drain.to_peers(report)
        await self.turn()
        self.node.leave()

    def run(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self.world.broken.append(f"{self.node.name}: {task.exception()!r}")

    def kill(self) -> None:
        """At whatever await it is. What was sent arrives now, or in its time, or never."""
        self.is_dead = True
        for handle, happen in list(self.sent.items()):
            fate = self.world.rng.random()
            if fate < 0.6:
                handle.cancel()
                del self.sent[handle]
            if fate < 0.3:
                happen()
        for task in self.tasks:
            task.cancel()
        self.world.graves.append(asyncio.create_task(self._end(list(self.tasks))))

    async def _end(self, tasks: Sequence[asyncio.Task[None]]) -> None:
        await asyncio.gather(*tasks, return_exceptions=True)
        self.memory.close()

    # -- messages
    async def turn(self) -> None:
        """Wait while the node stands still. The dead do nothing more."""
        if not self.is_dead:
            await self.node.thawed.wait()
        if self.is_dead:
            raise asyncio.CancelledError

    async def carry(
        self, call: Callable[[], T], delay_s: float, lost: Callable[[], Exception], loss: float, patience_s: float
    ) -> T:
        await self.turn()
        loop, rng = asyncio.get_running_loop(), self.world.rng
        answer: asyncio.Future[tuple[T | None, BaseException | None]] = loop.create_future()
        fate = 0.99 if self.world.is_calm else rng.random()

        def deliver(outcome: tuple[T | None, BaseException | None]) -> None:
            if not answer.done():
                answer.set_result(outcome)

        def happen() -> None:
            self.sent.pop(handle, None)
            try:
                outcome: tuple[T | None, BaseException | None] = (call(), None)
            except Exception as error:  # It is the answer.
                outcome = (None, error)
            if fate >= 2 * loss:
                loop.call_later(delay_s / 2, deliver, outcome)

        handle = loop.call_later(delay_s, happen)
        if fate < loss:
            handle.cancel()
        else:
            self.sent[handle] = happen
        if fate < 2 * loss:
            await asyncio.sleep(patience_s)
            await self.turn()
            raise lost()
        result, error = await answer
        self.node.heard()
        await self.turn()
        if error is not None:
            raise error
        return result  # type: ignore[return-value]

    async def carry_to_directory(self, call: Callable[[], T], *, changes: bool) -> T:
        if self.node.is_cut:
            await asyncio.sleep(1.0)
            await self.turn()
            raise DirectoryUnavailableError("no way to the directory")

        def lost() -> Exception:
            return OutcomeUnknownError("no answer") if changes else DirectoryUnavailableError("no answer")

        rng = self.world.rng
        delay_s = rng.uniform(
            0.001, DIRECTORY_S if not self.world.is_calm and rng.random() < self.world.slowness / 4 else 0.02
        )
        answer = await self.carry(call, delay_s, lost, 0.004, 2.0)
        if self.world.rng.random() < FREEZE_SHARE and not (self.world.is_over or self.world.is_calm):
            # The worst moment: what was decided on this answer is done much later.
            self.node.freeze(self.world.rng.uniform(0.1, 30.0))
            await self.turn()
        return answer

    # -- clients
    async def put(self, key: str, lag: int) -> None:
        world, name = self.world, ObjectName(BUCKET, key)
        try:
            seen = await self.directory.get(name)
            me = self.node.me()
        except TiergateError:
            return
        assert me is not None
        world.count += 1
        uid = f"{key.replace('/', '.')}-{world.count}"
        size = LARGE_BYTES if key.endswith("large") else 9
        pieces = [
            f"{world.count:04}{number:05}".encode().ljust(size, b"x") for number in ((1, 2) if size > 9 else (1,))
        ]
        peers = [self.world.nodes[each] for each in ranked(uid, self.node.live.nodes) if each != me.node]
        peers = [each for each in peers if each.is_up and each.holder is not None][: COPIES_COUNT - 1]
        if len(peers) < COPIES_COUNT - 1:
            return
        world.bytes_of[uid] = b"".join(pieces)
        holders = [me, *(each.holder for each in peers if each.holder is not None)]
        for node in (self.node, *peers):
            for number, data in enumerate(pieces, 1):
                receive(node.process, Body(f"{uid}.{number}", size), uid, data)
        parts = [Part(number, Body(f"{uid}.{number}", size), f"etag-{uid}") for number in range(1, len(pieces) + 1)]
        version = Version(uid, size * len(parts), f"etag-{uid}", 1, tuple(parts), multipart=len(parts) > 1)
        intent = await self._intent(seen.record is None, name, max(0, seen.revision - lag), lag)
        try:
            committed = await self.directory.put(name, version, replace(intent, holders=tuple(holders)))
        except OutcomeUnknownError:
            return
        except (HolderLostError, TiergateError):
            return
        self.uploader.wake()
        if committed.replaced is not None:
            notice = Notice(name, committed.replaced.uid, tuple(bodies_of(committed.replaced)))
            self.replication.notice([node.holder for node in world.nodes.values() if node.holder], [notice])

    async def delete(self, key: str, lag: int) -> None:
        name = ObjectName(BUCKET, key)
        try:
            seen = await self.directory.get(name)
            intent = await self._intent(seen.record is None, name, max(0, seen.revision - lag), lag)
            await self.directory.delete(name, intent)
        except TiergateError:
            return
        self.uploader.wake()

    async def _intent(self, is_new: bool, name: ObjectName, start_revision: int, lag: int) -> Intent:
        base = UNKNOWN_BASE
        if is_new and lag % 2:
            held = self.world.objects.get(name)
            base = held.etag if held else NO_BASE
        return Intent(self.world.role_of(name.key), start_revision, self.world.clock.wall_s(), base)


def receive(process: Process | None, body: Body, holder: str, data: bytes) -> None:
    """A peer takes a body, unless it holds it."""
    assert process is not None
    if not process.memory.holds_whole(body):
        receiving = process.memory.receive(body.uid, body.size_bytes, holder)
        receiving.write(data)
        receiving.seal()
    process.memory.hold(body.uid, holder, dirty=True)
    process.memory.confirm(holder, [body.uid])


class FarOrigin(ModelOrigin):
    """The world's origin as one process reaches it."""

    def __init__(self, process: Process) -> None:
        super().__init__()
        self._process = process
        shared = process.world.origin
        self.objects, self.uploads, self._numbers = process.world.objects, shared.uploads, shared._numbers

    async def _call(self, operation: str, name: ObjectName, happen: Callable[[], T]) -> T:
        process, rng = self._process, self._process.world.rng

        going_in = GoingIn(name)
        if process.world.role_of(name.key) is Role.MARKER and operation in ("put", "complete"):
            process.world.flying[going_in] = ""

        def arrive() -> T:
            before = self.objects.get(name)
            replaced = process.world.flying.pop(going_in, "")
            result = happen()
            if replaced:
                process.world.broken.append(f"{name.key} went in while {replaced} was replaced")
            if operation in ("put", "complete", "delete"):
                process.world.happened(operation, name, before)
            return result

        slow = rng.random() < process.world.slowness and not process.world.is_calm
        delay_s = rng.uniform(0.005, REQUEST_S if slow else 0.1)
        loss = 1.0 if process.world.is_origin_away else 0.01
        asked_s = process.world.takes_s(process.node.name, operation, name)
        if asked_s is not None:
            delay_s, loss = asked_s, 0.0
        return await process.carry(
            arrive, delay_s, lambda: OriginTemporaryError("the answer was lost"), loss, REQUEST_S
        )


class SimReplication:
    """Implements `Replication` between the nodes of a world."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._world = process.world

    @property
    def me(self) -> Holder | None:
        return self._process.node.me()

    def rule(self, asked_count: int | None) -> int:
        return asked_count or COPIES_COUNT

    def can_reach(self, copies_count: int) -> bool:
        return copies_count <= len(self._process.node.live.nodes)

    def is_ready(self, copies_count: int) -> bool:
        return self.can_reach(copies_count)

    def begin(self, name: ObjectName, holder: str, body_uid: str, size_bytes: int | None, copies_count: int) -> Copying:
        raise NotImplementedError

    async def spread(
        self,
        name: ObjectName,
        holder: str,
        bodies: Sequence[Body],
        copies_count: int,
        at: Mapping[str, Sequence[Holder]],
    ) -> Copies:
        clock = self._world.clock
        await asyncio.sleep(self._world.rng.uniform(0.01, 0.5))
        await self._process.turn()
        me = self._process.node.me()
        assert me is not None
        up = [node for node in self._world.nodes.values() if node.is_up and node.holder is not None]
        sources = [node for node in up if all(node.ground.holds_whole(body) for body in bodies)]
        have = [node for node in sources if node.name != me.node]
        by_name = {node.name: node for node in up if node not in have and node.name != me.node}
        order = [self._process.node, *have, *(by_name[each] for each in ranked(holder, by_name))]
        if not sources or len(order) < copies_count:
            raise TooFewCopiesError("too few nodes are up")
        chosen = order[:copies_count]
        for body in bodies:
            data = read(sources[0].ground, body)
            for node in chosen:
                receive(node.process, body, holder, data)
        holders = tuple(node.holder for node in chosen if node.holder is not None)
        return Copies((me, *(each for each in holders if each.node != me.node)), clock.monotonic_s() + 5.0)

    def sources(self, holders: Iterable[Holder]) -> list[Holder]:
        return []

    async def read(self, source: Holder, body: Body, index: int) -> AsyncIterator[bytes]:
        raise PeerError("not asked for here")
        yield b""

    async def held(self, source: Holder, bodies: Sequence[Body]) -> set[str]:
        return set()

    async def have_dropped(self, source: Holder, holder: str, body_uids: Sequence[str]) -> None:
        raise PeerError("nobody asks for this here")

    def notice(self, holders: Iterable[Holder], notices: Sequence[Notice]) -> None:
        loop, rng = asyncio.get_running_loop(), self._world.rng
        for holder in sorted(holders):
            if rng.random() < 0.8:
                loop.call_later(rng.uniform(0.0, 1.0), self._noticed, self._world.nodes[holder.node], notices)

    def _noticed(self, node: SimNode, notices: Sequence[Notice]) -> None:
        """It asks the directory what is true."""
        if not node.is_up or node.process is None:
            return
        for notice in notices:
            pending = self._world.state.tables.pending.get(notice.name)
            if pending is None or pending.uid != notice.uid:
                node.process.memory.clean(notice.uid, list(notice.body_uids))

    async def close(self) -> None:
        pass


def read(memory: Memory, body: Body) -> bytes:
    pin = memory.pin(body.uid)
    assert pin is not None
    with pin:
        views = pin.block(0)
        assert views is not None
        return b"".join(bytes(view) for view in views)
