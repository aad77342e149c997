"""Nodes of a cluster as far as their membership and what they remember go, over real etcd, in one process."""

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from tests.directoryrows import check_rows
from tests.etcds import context_of_member

from tiergate.clock import SystemClock
from tiergate.directory.board import Board
from tiergate.directory.clustered import ClusteredDirectory
from tiergate.memory.memory import Memory, MemoryLimits
from tiergate.model import (
    NO_BASE,
    UNKNOWN_BASE,
    Holder,
    ObjectName,
    Pending,
    Record,
    Role,
    Version,
    new_uid,
)
from tiergate.server.cluster import Cluster, open_cluster
from tiergate.server.member import Member
from tiergate.server.remembering import Remembering
from tiergate.testing.directory_contract import make_intent, make_version
from tiergate.testing.etcd import EtcdServer

__all__ = ["CLOCK", "Node", "Start", "seen", "start"]

LIMITS = MemoryLimits(16 << 20, 2 << 20, 1 << 20)
CLOCK = SystemClock()


class Node:
    """The background of a node as far as its membership goes, on a memory folder of its own."""

    def __init__(self, name: str, folder: Path, url: str) -> None:
        self.name = name
        self.folder = folder
        self._url = url
        self._stack = AsyncExitStack()
        self._joined: asyncio.Queue[int] = asyncio.Queue()

    async def start(self) -> None:
        """Join, and stay a member."""
        Board.make(self.folder / "board")
        patient = {"TIERGATE_LEASE": "30s", "TIERGATE_DIRECTORY_PATIENCE": "20s"}  # etcd starts again meanwhile
        context = context_of_member(self.folder, self._url, self.name, **patient)
        self.memory = Memory.open(self.folder / "slabs", LIMITS, CLOCK)
        self._stack.callback(self.memory.close)
        self.cluster: Cluster = await self._stack.enter_async_context(open_cluster(context, CLOCK))
        self.remembering = Remembering(self.cluster, self.memory, CLOCK, grace_s=3600.0)
        member = Member(self.cluster, context, CLOCK, lambda: 77, self.remembering.retell)
        await member.join()
        running = asyncio.create_task(member.run(self._after_join))
        self._stack.push_async_callback(ended, running)
        await self.joined()

    async def _after_join(self, epoch: int, resumed: bool) -> None:
        await self._joined.put(epoch)

    async def joined(self) -> None:
        """Wait for the next membership."""
        async with asyncio.timeout(60.0):
            await self._joined.get()

    async def stop(self) -> None:
        """As if it were killed: all that is left is in its folder."""
        stack, self._stack = self._stack, AsyncExitStack()
        await stack.aclose()
        self._joined = asyncio.Queue()

    @property
    def directory(self) -> ClusteredDirectory:
        return self.cluster.directory

    @property
    def me(self) -> Holder:
        return self.cluster.standing.me

    def keep(self, version: Version) -> None:
        """Hold the bytes of a version."""
        (part,) = version.parts
        receiving = self.memory.receive(part.body.uid, part.body.size_bytes, version.uid)
        receiving.write(bytes(part.body.size_bytes))
        receiving.seal()
        self.memory.confirm(version.uid, [part.body.uid])

    def finish(self, version: Version) -> None:
        """Let the bytes of a version be evicted, as is done with what the origin has, or is replaced."""
        self.memory.clean(version.uid, [part.body.uid for part in version.parts])

    async def put(
        self,
        name: ObjectName,
        *others: "Node",
        role: Role = Role.SMALL,
        parked: bool = False,
        made_s: float | None = None,
    ) -> Version:
        """Commit a version that this node and others hold."""
        version = make_version(new_uid(CLOCK.wall_s() if made_s is None else made_s))
        for node in (self, *others):
            node.keep(version)
        holders = tuple(node.me for node in (self, *others))
        base = NO_BASE if parked else UNKNOWN_BASE
        intent = make_intent(role, holders=holders, now_s=CLOCK.wall_s(), base=base, parked=parked)
        await self.directory.put(name, version, intent)
        return version

    async def persist(self, name: ObjectName, version: Version) -> None:
        """What is owed was brought to the origin."""
        await self.directory.persisted(name, version.uid, f"o-{version.uid}", 1.0)
        self.finish(version)


async def ended(task: "asyncio.Task[None]") -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


Start = Callable[[str], Awaitable[Node]]


@pytest.fixture
async def start(etcd: EtcdServer, tmp_path: Path) -> AsyncIterator[Start]:
    """Starts a node by name. In the end all rows must be true."""
    url = f"etcd://{etcd.endpoints[0]}/t-{uuid.uuid4().hex[:8]}"
    nodes: list[Node] = []

    async def start(name: str) -> Node:
        folder = tmp_path / name
        folder.mkdir()
        nodes.append(Node(name, folder, url))
        await nodes[-1].start()
        return nodes[-1]

    yield start
    await check_rows(nodes[0].cluster.client, nodes[0].cluster.keys)
    for node in nodes:
        await node.stop()


async def seen(node: Node, name: ObjectName) -> tuple[Record, Pending]:
    found = await node.directory.get(name)
    assert found.record is not None
    assert found.pending is not None
    return found.record, found.pending
