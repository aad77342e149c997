"""What a checkpoint of a whole cluster costs its directory: many simulated nodes commit some objects each, all at once,
to three real members of etcd; then each reads what another committed, and marks its own as written back.

    python tests/bench/directory_burst.py --nodes 1000 --objects 16
"""

import argparse
import asyncio
import json
import os
import random
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tiergate.clock import SystemClock
from tiergate.directory.base import Intent
from tiergate.directory.clustered import ClusteredDirectory
from tiergate.directory.codec import pack
from tiergate.directory.keys import Keys
from tiergate.etcd.client import Access, EtcdClient
from tiergate.etcd.values import Found, Put, Range, Txn
from tiergate.model import About, Body, Holder, ObjectName, Part, Role, Version, new_uid
from tiergate.testing.etcd import EtcdServer

CLIENTS_COUNT = 12
"""Connections that the simulated nodes share."""

AT_ONCE_COUNT = 64
"""Nodes at work at the same time: all share the processor of this one process."""

JOIN_COUNT = 100
"""Nodes registered in one transaction."""


@dataclass(frozen=True)
class Standing:
    """The membership of a simulated node."""

    me: Holder


@dataclass
class Figures:
    """What was measured, by phase."""

    by_phase: dict[str, dict[str, float]] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str, server: EtcdServer, count: int) -> Iterator[None]:
        """Measure what happens inside, which is `count` of something."""
        began_s, servers_s, own_s = time.monotonic(), server_cpu_s(server), time.process_time()
        size_bytes = server.status(server.members[0]).dbSize
        yield
        seconds = time.monotonic() - began_s
        self.by_phase[name] = {
            "count": count,
            "seconds": round(seconds, 2),
            "per_second": round(count / seconds),
            "servers_cpu_s": round(server_cpu_s(server) - servers_s, 2),
            "client_cpu_s": round(time.process_time() - own_s, 2),
            "db_grew_mib": round((server.status(server.members[0]).dbSize - size_bytes) / (1 << 20), 1),
        }


def server_cpu_s(server: EtcdServer) -> float:
    """CPU seconds of all members so far."""
    total = 0.0
    for member in server.members:
        process = member._process
        if process is not None:
            fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
            total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return total


def version_of(rng: random.Random) -> Version:
    """A shard of 64 MiB, uploaded in parts of 16 MiB."""
    parts = tuple(
        Part(number, Body(new_uid(1.7e9), 16 << 20, rng.randbytes(32)), rng.randbytes(16).hex(), 1_700_000_000)
        for number in range(1, 5)
    )
    headers = {"content-type": "binary/octet-stream"}
    return Version(new_uid(1.7e9), 64 << 20, rng.randbytes(16).hex() + "-4", 1_700_000_000, parts, headers)


async def join_all(client: EtcdClient, keys: Keys, count: int) -> list[Holder]:
    """Register the nodes, without leases."""
    names = [f"node-{index:05}" for index in range(count)]
    for start in range(0, count, JOIN_COUNT):
        some = names[start : start + JOIN_COUNT]
        await client.txn(Txn((), tuple(Put(keys.node(name), pack(About("10.0.0.1:9000", "z"))) for name in some)))
    rows = (await client.read(keys.all("n"))).found(0)
    return [Holder(row.key[len(keys.table("n")) :].decode(), row.create_revision) for row in rows]


async def one_put(client: EtcdClient, directory: ClusteredDirectory, keys: Keys, holders: list[Holder]) -> None:
    """What a single commit writes, row by row."""
    name, rng = ObjectName("bucket", "run-0/step_000100/__999_0.distcp"), random.Random(1)
    before = await directory.revision()
    intent = Intent(Role.LARGE, before, 1.7e9, "", holders=tuple(holders[:2]))
    committed = await directory.put(name, version_of(rng), intent)
    root = keys.table("")[:-1]
    outcome = await client.read(Range(root, root + b"\xff"))
    rows = [row for answer in outcome.answers if isinstance(answer, Found) for row in answer.rows]
    written = [(row.key, len(row.key) + len(row.value)) for row in rows if row.mod_revision == committed.revision]
    after = await directory.revision()
    total_bytes = sum(size for _, size in written)
    sys.stderr.write(f"a put, 2 holders: {after - before} revision, {total_bytes} bytes, {len(written)} rows\n")
    for key, size in written:
        sys.stderr.write(f"  {size:5} bytes  {key.decode()!r}\n")


async def all_nodes(count: int, work: Callable[[int], Awaitable[object]]) -> None:
    """Let each node do its work."""
    turn = asyncio.Semaphore(AT_ONCE_COUNT)

    async def one(node: int) -> None:
        async with turn:
            await work(node)

    await asyncio.gather(*(one(node) for node in range(count)))


async def run(nodes_count: int, objects_count: int) -> Figures:
    """All phases."""
    figures, rng, clock = Figures(), random.Random(0), SystemClock()
    with EtcdServer(3) as server:
        clients = [EtcdClient(Access(server.endpoints), clock, random.Random(seed)) for seed in range(CLIENTS_COUNT)]
        keys = Keys("/burst")
        holders = await join_all(clients[0], keys, nodes_count)
        directories = [
            ClusteredDirectory(clients[index % CLIENTS_COUNT], keys, Standing(holder))
            for index, holder in enumerate(holders)
        ]
        await one_put(clients[0], directories[0], keys, holders)
        names = [
            [ObjectName("bucket", f"run/step_000100/__{node}_{index}.distcp") for index in range(objects_count)]
            for node in range(nodes_count)
        ]
        versions = [[version_of(rng) for _ in range(objects_count)] for _ in range(nodes_count)]
        start = await directories[0].revision()
        count = nodes_count * objects_count

        async def commit(node: int) -> None:
            both = (holders[node], holders[(node + 1) % nodes_count])
            intent = Intent(Role.LARGE, start, clock.wall_s(), "", holders=both)
            pairs = zip(names[node], versions[node], strict=True)
            await asyncio.gather(*(directories[node].put(name, version, intent) for name, version in pairs))

        async def read(node: int) -> None:
            others = names[(node + 1) % nodes_count]
            found = await asyncio.gather(*(directories[node].get(name) for name in others))
            assert all(len(seen.holders) == 1 for seen in found)

        async def look(node: int) -> None:
            owed = await directories[node].pending()
            assert len(owed) >= objects_count
            await directories[node].beside(owed)

        async def finish(node: int) -> None:
            async def one(name: ObjectName, uid: str) -> None:
                await directories[node].begin(name, uid, "")
                await directories[node].persisted(name, uid, "etag", 1.0)

            pairs = zip(names[node], versions[node], strict=True)
            await asyncio.gather(*(one(name, version.uid) for name, version in pairs))

        before = await directories[0].revision()
        with figures.phase("put", server, count):
            await all_nodes(nodes_count, commit)
        figures.by_phase["put"]["revisions"] = await directories[0].revision() - before
        with figures.phase("get", server, count):
            await all_nodes(nodes_count, read)
        with figures.phase("look", server, nodes_count):
            await all_nodes(nodes_count, look)
        with figures.phase("begin and persisted", server, 2 * count):
            await all_nodes(nodes_count, finish)
        for directory in directories:
            await directory.close()
        for client in clients:
            await client.close()
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--objects", type=int, default=16, help="of each node")
    arguments = parser.parse_args()
    figures = asyncio.run(run(arguments.nodes, arguments.objects))
    for name, found in figures.by_phase.items():
        sys.stdout.write(f"{name:20} " + "  ".join(f"{what} {value}" for what, value in found.items()) + "\n")
    sys.stdout.write(f"{json.dumps(figures.by_phase)}\n")


if __name__ == "__main__":
    main()
