"""A node's membership as its background keeps it, and the members as each process sees them, over real etcd."""

import asyncio
import socket
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
from tests.etcds import context_of_member

from tiergate.child import Belonging
from tiergate.clock import Clock, SystemClock
from tiergate.directory.board import Board
from tiergate.directory.committer import Standing
from tiergate.directory.era import Era
from tiergate.directory.ledger import Ledger
from tiergate.directory.live import LiveView
from tiergate.directory.membership import Nodes
from tiergate.errors import (
    ConfigError,
    DirectoryUnavailableError,
    MembershipOverError,
    PeerError,
)
from tiergate.etcd.values import Agreed
from tiergate.model import Live
from tiergate.server.cluster import Cluster, open_cluster
from tiergate.server.member import FIRST_JOIN_S, REJOIN_PAUSE_S, Member, Retell, nothing_to_tell
from tiergate.testing.etcd import EtcdServer, needs_etcd

pytestmark = needs_etcd


class HastyClock(SystemClock):
    """A clock on which who waits waits no longer than a moment, and time goes by meanwhile."""

    ahead_s = 0.0

    def monotonic_s(self) -> float:
        return super().monotonic_s() + self.ahead_s

    async def sleep(self, seconds: float) -> None:
        self.ahead_s += seconds
        await asyncio.sleep(0)


class PausedClock(SystemClock):
    """Tells when a member waits before it tries to join again."""

    def __init__(self) -> None:
        super().__init__()
        self.rejoining = asyncio.Event()

    async def sleep(self, seconds: float) -> None:
        if seconds == REJOIN_PAUSE_S:
            self.rejoining.set()
        await super().sleep(seconds)


class Calls:
    """Remembers what it was called with after each join; the first `failures` calls fail."""

    def __init__(self, failures: int = 0) -> None:
        self.made: asyncio.Queue[tuple[int, bool]] = asyncio.Queue()
        self.failures = failures

    async def __call__(self, epoch: int, resumed: bool) -> None:
        await self.made.put((epoch, resumed))
        if self.failures:
            self.failures -= 1
            raise PeerError("not yet")


@dataclass
class Opener:
    """Opens the cluster as a process of node `a` does, on one memory folder."""

    folder: Path
    url: str
    stack: AsyncExitStack
    ledger: Ledger | None = None

    async def __call__(
        self, clock: Clock | None = None, url: str = "", retell: Retell = nothing_to_tell
    ) -> tuple[Cluster, Member]:
        brief = {"TIERGATE_ZONE": "east", "TIERGATE_LEASE": "30s", "TIERGATE_DIRECTORY_PATIENCE": "1s"}
        context = context_of_member(self.folder, url or self.url, "a", **brief)
        clock = clock or SystemClock()
        if self.ledger is not None:
            self.ledger.close()  # No process has it twice.
        cluster = await self.stack.enter_async_context(open_cluster(context, clock))
        self.ledger = cluster.ledger
        return cluster, Member(cluster, context, clock, lambda: 77, retell)

    def belonging(self) -> Belonging:
        return msgspec.json.decode((self.folder / "member.json").read_bytes(), type=Belonging)


@pytest.fixture
async def start(etcd: EtcdServer, tmp_path: Path) -> AsyncIterator[Opener]:
    Board.make(tmp_path / "board")
    async with AsyncExitStack() as stack:
        yield Opener(tmp_path, f"etcd://{etcd.endpoints[0]}/t-{uuid.uuid4().hex[:8]}", stack)


async def within(member: Member, after_join: Calls, work: Callable[[], Awaitable[None]]) -> None:
    """Do something while the membership is kept."""
    running = asyncio.create_task(member.run(after_join))
    doing = asyncio.ensure_future(work())
    try:
        await asyncio.wait((running, doing), return_when=asyncio.FIRST_COMPLETED)
        assert doing.done(), running
        await doing
    finally:
        for task in (running, doing):
            task.cancel()
        await asyncio.gather(running, doing, return_exceptions=True)


async def test_join_is_posted_announced_and_kept_for_a_restart(start: Opener) -> None:
    cluster, member = await start()
    assert not cluster.standing.stands()
    assert member.fault
    with pytest.raises(MembershipOverError):
        cluster.standing.guard()
    await member.join()
    me = cluster.standing.me
    (node,) = (await Nodes(cluster.client, cluster.keys).live()).nodes.values()
    assert node.holder == me
    assert (node.about.address, node.about.zone, node.about.free_bytes) == ("127.0.0.1:7001", "east", 77)
    kept = start.belonging()
    assert (kept.node, kept.epoch, kept.boot) == ("a", me.epoch, node.about.boot)
    assert kept.cluster_id
    assert member.fault == ""
    assert member.report()["epoch"] == me.epoch


async def test_restart_goes_on_with_the_epoch_and_leaving_ends_it(start: Opener) -> None:
    _, first = await start()
    await first.join()
    epoch = start.belonging().epoch
    Board.make(start.folder / "board")
    cluster, second = await start()
    await second.join()
    calls = Calls()

    async def look() -> None:
        assert await calls.made.get() == (epoch, True)

    await within(second, calls, look)
    await second.leave(owes_nothing=False)
    assert not cluster.standing.stands()
    assert second.fault == "it left"
    assert (await Nodes(cluster.client, cluster.keys).live()).nodes == {}
    assert start.belonging().epoch == epoch
    _, third = await start()
    await third.join()
    assert start.belonging().epoch > epoch
    assert start.belonging().boot == (await Nodes(cluster.client, cluster.keys).live()).nodes["a"].about.boot
    await third.leave(owes_nothing=True)
    assert not (start.folder / "member.json").exists()


async def test_lost_membership_is_followed_by_another(start: Opener) -> None:
    cluster, member = await start()
    await member.join()
    epoch = cluster.standing.me.epoch
    calls = Calls(failures=1)

    async def lose() -> None:
        assert await calls.made.get() == (epoch, False)
        assert await calls.made.get() == (epoch, False)
        await cluster.client.revoke(start.belonging().lease_id)
        later, resumed = await calls.made.get()
        assert later > epoch
        assert not resumed
        assert cluster.standing.me.epoch == later
        assert start.belonging().epoch == later

    await within(member, calls, lose)


async def test_membership_that_cannot_be_kept_for_a_restart_is_none(start: Opener) -> None:
    cluster, member = await start()
    draft = start.folder / "member.new"
    draft.mkdir()
    with pytest.raises(ConfigError, match=r"member\.json cannot be written: Is a directory"):
        await member.join()
    assert not cluster.standing.stands()
    draft.rmdir()

    # One that is lost while there is no room for it is joined anew when there is.
    clock = PausedClock()
    cluster, again = await start(clock)
    await again.join()
    calls = Calls()

    async def lose() -> None:
        epoch, _ = await calls.made.get()
        draft.mkdir()
        await cluster.client.revoke(start.belonging().lease_id)
        await clock.rejoining.wait()
        assert "cannot be written" in again.fault
        assert not cluster.standing.stands()
        draft.rmdir()
        later, _ = await calls.made.get()
        assert later > epoch
        assert cluster.standing.stands()

    await within(again, calls, lose)


async def test_another_etcd_is_told_before_anybody_rests_on_it(start: Opener) -> None:
    cluster, member = await start()
    await member.join()
    era = start.belonging().era
    assert cluster.standing.agreed() == Agreed(era, cluster.client.cluster_id)
    told: list[Era] = []

    async def retell(standing: Standing, era: Era) -> None:
        with pytest.raises(MembershipOverError):
            moved.standing.guard()
        assert standing.me.node == "a"
        assert start.belonging().era != era.number
        told.append(era)
        if len(told) == 1:
            raise PeerError("not yet")

    with EtcdServer() as other:
        url = f"etcd://{other.endpoints[0]}/{start.url.rpartition('/')[2]}"
        moved, refused = await start(url=url, retell=retell)
        with pytest.raises(PeerError):
            await refused.join()
        assert not moved.standing.stands()
        moved, again = await start(url=url, retell=retell)
        await again.join()
        assert moved.standing.stands()
        (first, second) = told
        assert first == second
        assert (first.previous, first.number) == (0, start.belonging().era)
        assert first.number != era


async def test_node_that_starts_gives_up_in_the_end(start: Opener) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        clock = HastyClock()
        url = f"etcd://127.0.0.1:{nobody.getsockname()[1]}"
        _, member = await start(clock, url)
        began_s = clock.monotonic_s()
        with pytest.raises(DirectoryUnavailableError, match=f"{url} does not answer"):
            await member.join()
        assert clock.monotonic_s() - began_s >= FIRST_JOIN_S


async def test_view_follows_the_members(start: Opener) -> None:
    cluster, member = await start()
    view = LiveView(Nodes(cluster.client, cluster.keys), SystemClock())
    assert view.live() == Live(0, {})
    async with view.watching():
        before = view.live()
        assert before.revision > 0
        assert before.nodes == {}
        changing = asyncio.ensure_future(view.changed(before))
        await member.join()
        live = await changing
        assert live is view.live()
        assert live.nodes["a"].epoch == cluster.standing.me.epoch
        await member.leave(owes_nothing=True)
        assert (await view.changed(live)).nodes == {}


async def test_view_outlives_what_goes_wrong(start: Opener, etcd: EtcdServer) -> None:
    cluster, member = await start()

    faults = [DirectoryUnavailableError("nobody leads"), ValueError("a row that nobody understands")]

    class Failing(Nodes):
        async def live(self) -> Live:
            if faults:
                raise faults.pop()
            return await super().live()

    view = LiveView(Failing(cluster.client, cluster.keys), HastyClock())
    await member.join()
    async with view.watching():
        assert set(view.live().nodes) == {"a"}


async def test_one_member_keeps_house(start: Opener) -> None:
    cluster, member = await start()
    async with cluster.view.watching():
        assert not cluster.keeps_house()
        await member.join()
        live = cluster.view.live()
        while not live.nodes:
            live = await cluster.view.changed(live)
        assert cluster.housekeeper() == "a"
        assert cluster.keeps_house()
        await member.leave(owes_nothing=True)
        assert not cluster.keeps_house()
