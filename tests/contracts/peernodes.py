"""Nodes of a cluster as far as copies go: real memory folders, real listeners, in one process. And what may be between
them: a relay that stops, cuts or damages."""

import asyncio
import contextlib
import random
import ssl
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from aiohttp import web

from tiergate.clock import SystemClock
from tiergate.config import Secret
from tiergate.directory.embedded import EmbeddedDirectory
from tiergate.memory.audit import audit
from tiergate.memory.memory import Memory, MemoryLimits
from tiergate.model import About, Body, Holder, Live, Node, ObjectName
from tiergate.observe.metrics import Metrics
from tiergate.replication.base import Copying
from tiergate.replication.channel import ChannelSettings, PeerChannel
from tiergate.replication.replication import PeerReplication
from tiergate.replication.roster import Roster
from tiergate.server.peers import Peers

MIB = 1 << 20
NAME = ObjectName("bucket", "a key/with ünusual & letters?")
SECRET = Secret("the secret of this cluster")
MAX_BODY_BYTES = 1 << 30


def content(uid: str, size_bytes: int) -> bytes:
    """The bytes a body of that name has."""
    block = random.Random(uid).randbytes(MIB + 13)
    return (block * (size_bytes // len(block) + 1))[:size_bytes]


@dataclass
class PeerNode:
    """One node."""

    name: str
    zone: str
    cluster: "Cluster"
    memory: Memory
    directory: EmbeddedDirectory
    metrics: Metrics
    channel: PeerChannel
    roster: Roster
    replication: PeerReplication
    runner: web.AppRunner
    port: int = 0

    @property
    def node(self) -> Node:
        return self.cluster.nodes[self.name]

    def counted(self, name: str, *labels: str) -> float:
        """What a metric says now."""
        series = (each for each in self.metrics.store.read() if each.name == name)
        return sum(each.values[0] for each in series if not labels or each.labels == labels)

    def put(self, uid: str, data: bytes, holder: str) -> Body:
        """Bytes in this node's memory, held and confirmed."""
        receiving = self.memory.receive(uid, len(data), holder)
        receiving.write(data)
        body = receiving.seal()
        self.memory.confirm(holder, [uid])
        return body

    def bytes_of(self, body: Body) -> bytes | None:
        """A body in this node's memory; None if it is not whole."""
        pin = self.memory.pin(body.uid)
        if pin is None:
            return None
        with pin:
            blocks = [pin.block(index) for index in range(body.block_count)]
            if None in blocks:
                return None
            return b"".join(bytes(view) for views in blocks for view in views or ())

    def is_at_rest(self) -> bool:
        """Nothing is being received or read."""
        stats = self.memory.stats()
        return stats.receiving_bytes == stats.reserved_bytes == stats.pinned_bytes == 0

    async def take(self, uid: str, data: bytes, holder: str, copying: Copying, piece_bytes: int = 96 << 10) -> Body:
        """What an intake does with a body: each piece into memory and on to the peers, from one buffer used anew."""
        receiving = self.memory.receive(uid, len(data), holder)
        buffer = bytearray(piece_bytes)
        for start in range(0, len(data), piece_bytes):
            piece = data[start : start + piece_bytes]
            view = memoryview(buffer)[: len(piece)]
            view[:] = piece
            receiving.write(view)
            await copying.write(view)
            view[:] = bytes(len(piece))
        body = receiving.seal()
        self.memory.confirm(holder, [uid])
        return body


class Cluster:
    """Nodes that see each other. `nodes` is the view all of them share."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.nodes: dict[str, Node] = {}
        self.clock = SystemClock()
        self.members: list[PeerNode] = []
        self.relays = AsyncExitStack()

    def live(self) -> Live:
        return Live(1, self.nodes)

    async def add(
        self,
        name: str,
        zone: str = "",
        *,
        memory_bytes: int = 192 * MIB,
        secret: Secret | None = SECRET,
        idle_timeout_s: float = 20.0,
        server_tls: ssl.SSLContext | None = None,
        client_tls: ssl.SSLContext | None = None,
    ) -> PeerNode:
        """Start a node."""
        memory = Memory.open(self.folder / name, MemoryLimits(memory_bytes, 2 * MIB, 16 * MIB), self.clock)
        directory = EmbeddedDirectory.open(self.folder / f"{name}-directory", 4 * MIB)
        metrics = Metrics()
        roster = Roster(name, zone, self.live, lambda: self.nodes[name].holder, self.clock)
        settings = ChannelSettings(name, secret, client_tls, 5.0, idle_timeout_s)
        channel = PeerChannel(settings, self.clock, metrics)
        replication = PeerReplication(memory, channel, roster, self.clock, metrics)
        peers = Peers(
            memory, directory, replication.fetching, roster, self.clock, metrics, secret, MAX_BODY_BYTES, idle_timeout_s
        )
        runner = peers.runner(1.0)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=server_tls)
        await site.start()
        port = int(runner.addresses[0][1])
        found = PeerNode(name, zone, self, memory, directory, metrics, channel, roster, replication, runner, port)
        self.nodes[name] = Node(name, len(self.nodes) + 1, About(f"127.0.0.1:{port}", zone))
        self.members.append(found)
        return found

    async def between(self, node: PeerNode) -> "Relay":
        """Put a relay before a node."""
        relay = await self.relays.enter_async_context(relaying(node.port))
        about = About(f"127.0.0.1:{relay.port}", node.zone)
        self.nodes[node.name] = Node(node.name, self.nodes[node.name].epoch, about)
        return relay

    async def close(self) -> list[str]:
        """End all; what is wrong with their memories."""
        problems: list[str] = []
        for each in self.members:
            await each.replication.close()
            await each.channel.close()
        await self.relays.aclose()
        for each in self.members:
            await each.runner.cleanup()
        for each in self.members:
            problems += audit(each.memory.store)
            if not each.is_at_rest():
                problems.append(f"{each.name} is not at rest: {each.memory.stats()}")
            each.memory.close()
            each.directory.close()
            each.metrics.close()
        return problems


@dataclass
class Relay:
    """Passes bytes between a port and a server. `passes` may be cleared: then nothing moves any more."""

    target: int
    port: int = 0
    passes: asyncio.Event = field(default_factory=asyncio.Event)
    stop_after_bytes: int | None = None
    cut_after_bytes: int | None = None
    flip_at: int | None = None
    seen_bytes: int = 0
    seen: asyncio.Condition = field(default_factory=asyncio.Condition)
    connections_count: int = 0

    async def pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, to_server: bool) -> None:
        while data := await reader.read(64 << 10):
            await self.passes.wait()
            if to_server:
                data = await self._forward(data)
            writer.write(data)
            await writer.drain()
        writer.write_eof()

    async def _forward(self, data: bytes) -> bytes:
        before, self.seen_bytes = self.seen_bytes, self.seen_bytes + len(data)
        if self.stop_after_bytes is not None and self.seen_bytes >= self.stop_after_bytes:
            self.passes.clear()
        if self.cut_after_bytes is not None and self.seen_bytes >= self.cut_after_bytes:
            raise ConnectionError("cut")
        if self.flip_at is not None and before <= self.flip_at < self.seen_bytes:
            at = self.flip_at - before
            return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
        return data


@asynccontextmanager
async def relaying(target: int) -> AsyncIterator[Relay]:
    """A relay on a port of its own."""
    relay = Relay(target)
    relay.passes.set()
    tasks: set[asyncio.Task[None]] = set()

    async def connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        relay.connections_count += 1
        there_reader, there_writer = await asyncio.open_connection("127.0.0.1", target)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(relay.pump(reader, there_writer, to_server=True))
                group.create_task(relay.pump(there_reader, writer, to_server=False))
        except* OSError:
            pass
        finally:
            for each in (writer, there_writer):
                each.transport.abort()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(connection(reader, writer))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    relay.port = server.sockets[0].getsockname()[1]
    try:
        yield relay
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(server.wait_closed(), 5)


async def until(condition: Callable[[], bool], what: str) -> None:
    """Wait for something that is about to be so."""
    try:
        async with asyncio.timeout(30):
            while True:
                if condition():
                    return
                await asyncio.sleep(0.005)
    except TimeoutError:
        raise AssertionError(f"never: {what}") from None


def holders(nodes: Iterable[PeerNode]) -> tuple[Holder, ...]:
    """The nodes as holders."""
    return tuple(each.node.holder for each in nodes)
