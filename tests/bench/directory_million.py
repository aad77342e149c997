"""What a directory of very many records costs a node: memory, start, and how long a LIST page and a HEAD take.

Usage: python -m tests.bench.directory_million {cluster,embedded} [--records N]      (see README.md beside this file)

The records are written as the product writes them, but many in one transaction. The last line of the output is all of
it as JSON.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import statistics
import sys
import tempfile
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tests.bench.directory_burst import server_cpu_s

from tiergate.child import Folders
from tiergate.clock import SystemClock
from tiergate.directory import transitions
from tiergate.directory.clusterrows import ClusterRows, Snapshot
from tiergate.directory.embedded import EmbeddedDirectory
from tiergate.directory.keys import Keys
from tiergate.directory.rows import LmdbRows
from tiergate.etcd.client import Access, EtcdClient
from tiergate.etcd.values import Delete, KeyValue, Put, Range, Txn
from tiergate.model import Body, Holder, ObjectName, Part, Role, Version, new_uid
from tiergate.server.budget import DIRECTORY_SHARE
from tiergate.testing.etcd import EtcdServer
from tiergate.testing.node import RunningNode

CLOCK = SystemClock()
MIB = 1 << 20
BUCKET = "bucket"
SHARD_BYTES = 64 * MIB
IN_A_STEP_COUNT = 1000
"""Objects of one checkpoint: what one page lists."""

FORMER_COUNT = 100
"""Nodes that wrote them, each object held by two."""

RETURNING = "node-007"
"""One of those comes back, with empty memory."""

BATCH_COUNT = 50
"""Records in one transaction."""

AT_ONCE_COUNT = 2
FILLERS_COUNT = 4
"""Transactions of a process on their way at a time, and processes."""

PATIENCE_S = 300.0

ETCD_FLAGS = (
    f"--quota-backend-bytes={16 << 30}",
    "--max-txn-ops=8192",  # for filling it
    "--snapshot-count=1000",  # else it keeps the last 100,000 transactions in memory, which here are large
)
RECORD_BYTES, PART_BYTES = 700, 600
"""Of room for a record in the embedded directory, and for each of its parts: so much that it forgets none."""


def say(text: str) -> None:
    sys.stderr.write(f"{CLOCK.monotonic_s():10.1f} {text}\n")


def key_of(number: int) -> str:
    """In the order of the numbers."""
    step, shard = divmod(number, IN_A_STEP_COUNT)
    return f"run-{step // 100:02}/step_{step % 100:06}/__{shard:03}_0.distcp"


def etag_of(number: int) -> str:
    return f"{number:032x}-4"


def uid_of(number: int) -> str:
    return f"018bcfe56800{number:016x}"


def version_of(number: int, rng: random.Random, parts_count: int) -> Version:
    """A shard that was uploaded in so many parts."""
    parts = tuple(
        Part(
            each,
            Body(new_uid(1.7e9), SHARD_BYTES // parts_count, rng.randbytes(32)),
            rng.randbytes(16).hex(),
            1_700_000_000,
        )
        for each in range(1, parts_count + 1)
    )
    headers = {"content-type": "binary/octet-stream"}
    return Version(uid_of(number), SHARD_BYTES, etag_of(number), 1_700_000_000, parts, headers)


# -- the origin, which has all of it
class Origin(BaseHTTPRequestHandler):
    """Answers what a node asks for a listing and a HEAD."""

    protocol_version = "HTTP/1.1"
    records_count = 0

    def do_HEAD(self) -> None:
        if urlsplit(self.path).path.strip("/") == BUCKET:
            self._answer({"x-amz-bucket-region": "us-east-1"})
            return
        number = self._first(urlsplit(self.path).path.removeprefix(f"/{BUCKET}/"), bisect_left)
        headers = {"ETag": f'"{etag_of(number)}"', "Last-Modified": "Tue, 14 Nov 2023 22:13:20 GMT"}
        self._answer(headers | {"Content-Length": str(SHARD_BYTES)})

    def do_GET(self) -> None:
        query = {name: values[0] for name, values in parse_qs(urlsplit(self.path).query).items()}
        if "list-type" not in query:
            self._answer({}, "<VersioningConfiguration/>" if "versioning" in self.path else "<LocationConstraint/>")
            return
        prefix, count = query.get("prefix", ""), int(query.get("max-keys", "1000"))
        start = self._first(max(prefix, query.get("start-after", "")), bisect_right)
        end = self._first(prefix + "\U0010ffff", bisect_left)
        rows = "".join(
            f"<Contents><Key>{key_of(number)}</Key><LastModified>2023-11-14T22:13:20.000Z</LastModified>"
            f"<ETag>&quot;{etag_of(number)}&quot;</ETag><Size>{SHARD_BYTES}</Size></Contents>"
            for number in range(start, min(end, start + count))
        )
        more = str(start + count < end).lower()
        self._answer({}, f"<ListBucketResult><IsTruncated>{more}</IsTruncated>{rows}</ListBucketResult>")

    def _first(self, key: str, bisect: Callable[..., int]) -> int:
        return bisect(range(self.records_count), key, key=key_of)

    def _answer(self, headers: dict[str, str], text: str = "") -> None:
        self.send_response(200)
        for name, value in ({"Content-Length": str(len(text))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def origin_of(records_count: int) -> Iterator[str]:
    """Its endpoint URL."""
    Origin.records_count = records_count
    with ThreadingHTTPServer(("127.0.0.1", 0), Origin) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


# -- what is measured of processes
def memory_of(pid: int) -> dict[str, float]:
    """MiB: resident, of it what no file backs, and the most that ever was resident."""
    rows = dict(re.findall(r"^(\w+):\s+(\d+) kB$", Path(f"/proc/{pid}/status").read_text(), re.M))
    return {what: round(int(rows[row]) / 1024, 1) for what, row in FIELDS.items()}


FIELDS = {"rss": "VmRSS", "anonymous": "RssAnon", "peak": "VmHWM"}


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def seconds(call: Callable[..., object], *arguments: Any, **named: Any) -> float:
    began_s = CLOCK.monotonic_s()
    call(*arguments, **named)
    return CLOCK.monotonic_s() - began_s


def milliseconds(figures: list[float]) -> dict[str, float]:
    return {
        "p50": round(statistics.median(figures) * 1e3, 1),
        "most": round(max(figures) * 1e3, 1),
    }


def watched(
    node: RunningNode,
    records_count: int,
    server: EtcdServer | None,
    idle_s: float,
    hold_share: Callable[[], None] | None = None,
) -> dict[str, Any]:
    """Start the node, ask it something, leave it alone for a while; once more after it holds its share."""
    found: dict[str, Any] = {}
    began_s = CLOCK.monotonic_s()
    with node:
        found["ready after s"] = round(CLOCK.monotonic_s() - began_s, 2)
        node.wait_status("its directory answers", lambda status: "pending" in status.get("writeback", {}))
        found["status shows the directory after s"] = round(CLOCK.monotonic_s() - began_s, 2)
        found["CPU s so far"] = {name: cpu_s(pid) for name, pid in node.children.items()}
        found["memory at first"] = {name: memory_of(pid) for name, pid in node.children.items()}
        if records_count:
            found |= asked(node, records_count)
        found["idle"] = idle(node, server, idle_s)
        if hold_share is not None:
            hold_share()
            found["idle, holding its share"] = idle(node, server, idle_s)
        found["status ms"] = milliseconds([seconds(node.status) for _ in range(5)])
        log = node.log_tail(limit_bytes=1500)
    say(f"{json.dumps(found, indent=1)}\n{log}")
    return found


def idle(node: RunningNode, server: EtcdServer | None, idle_s: float) -> dict[str, Any]:
    """What the processes take while nobody asks them for anything: CPU seconds in a minute, and memory then."""
    before = {name: cpu_s(pid) for name, pid in node.children.items()}
    servers_s = server_cpu_s(server) if server else 0.0
    CLOCK_PAUSE.wait(idle_s)
    taken = {name: round((cpu_s(pid) - before[name]) * 60 / idle_s, 2) for name, pid in node.children.items()}
    if server:
        taken["etcd"] = round((server_cpu_s(server) - servers_s) * 60 / idle_s, 2)
    return {"CPU s/min": taken, "memory": {name: memory_of(pid) for name, pid in node.children.items()}}


CLOCK_PAUSE = threading.Event()
"""Nobody sets it."""


def asked(node: RunningNode, records_count: int) -> dict[str, Any]:
    """HEADs of objects all over the directory, and pages of listings."""
    client, rng = node.client(), random.Random(2)
    client.head_object(Bucket=BUCKET, Key=key_of(0))
    heads = [seconds(client.head_object, Bucket=BUCKET, Key=key_of(rng.randrange(records_count))) for _ in range(300)]
    steps = [key_of(rng.randrange(records_count)).rpartition("/")[0] + "/" for _ in range(12)]
    assert len(client.list_objects_v2(Bucket=BUCKET, Prefix=steps[0])["Contents"]) == IN_A_STEP_COUNT
    pages = [seconds(client.list_objects_v2, Bucket=BUCKET, Prefix=step) for step in steps]
    whole = [seconds(client.list_objects_v2, Bucket=BUCKET) for _ in range(5)]
    return {
        "HEAD ms": milliseconds(heads),
        "LIST of a checkpoint (1000 keys) ms": milliseconds(pages),
        "LIST first page ms": milliseconds(whole),
    }


# -- a cluster
def rows_of(keys: Keys, numbers: range, rng: random.Random, parts_count: int) -> tuple[Put | Delete, ...]:
    """What the product writes for clean records, each held by two nodes of former times."""
    names = [ObjectName(BUCKET, key_of(number)) for number in numbers]
    snapshot = Snapshot(10**9)
    snapshot.rows = {key: None for name in names for key in (keys.record(name), keys.slot(name))}
    holders = [Holder(f"node-{index:03}", index + 2) for index in range(FORMER_COUNT)]
    snapshot.rows |= {keys.node(each.node): KeyValue(b"", b"", each.epoch, each.epoch, 1, 0) for each in holders}
    rows = ClusterRows(keys, snapshot, None)
    for number, name in zip(numbers, names, strict=True):
        version = version_of(number, rng, parts_count)
        transitions.adopt(rows, name, version, etag_of(number), Role.LARGE, CLOCK.wall_s(), None)
        rows.hold(name, version.uid, [holders[number % FORMER_COUNT], holders[(number + 1) % FORMER_COUNT]])
    change = rows.change()
    assert change is not None
    return change.writes


def hold_rows(keys: Keys, numbers: range, holder: Holder) -> tuple[Put | Delete, ...]:
    """What the product writes for a node that holds these."""
    snapshot = Snapshot(10**9)
    snapshot.rows = {keys.node(holder.node): KeyValue(b"", b"", holder.epoch, holder.epoch, 1, 0)}
    rows = ClusterRows(keys, snapshot, None)
    for number in numbers:
        rows.hold(ObjectName(BUCKET, key_of(number)), uid_of(number), [holder])
    change = rows.change()
    assert change is not None
    return change.writes


async def write(endpoints: list[str], numbers: range, rows: Callable[[range], tuple[Put | Delete, ...]]) -> None:
    """Write what belongs to these records."""
    client = EtcdClient(Access(endpoints), CLOCK, random.Random(0), patience_s=PATIENCE_S)
    turns = asyncio.Semaphore(AT_ONCE_COUNT)

    async def one(start: int) -> None:
        async with turns:
            txn = Txn((), rows(numbers[start : start + BATCH_COUNT]))
            await client.repeat(lambda: client.txn(txn))  # that it may happen twice is no harm
            if start % (500 * BATCH_COUNT) == 0:
                say(f"{start} of {len(numbers)} records")

    await asyncio.gather(*(one(start) for start in range(0, len(numbers), BATCH_COUNT)))
    await client.close()


def fill(endpoints: list[str], keys: Keys, numbers: range, parts_count: int) -> None:
    """The part of one process."""
    rng = random.Random(numbers.start)
    asyncio.run(write(endpoints, numbers, lambda some: rows_of(keys, some, rng, parts_count)))


def fill_all(endpoints: list[str], keys: Keys, records_count: int, parts_count: int) -> None:
    """Several processes at once: most of it is making up the rows."""
    share = -(-records_count // FILLERS_COUNT)
    parts = [range(start, min(start + share, records_count)) for start in range(0, records_count, share)]
    with ProcessPoolExecutor(FILLERS_COUNT, mp_context=multiprocessing.get_context("spawn")) as pool:
        for filled in [pool.submit(fill, endpoints, keys, part, parts_count) for part in parts]:
            filled.result()


async def holder_of(server: EtcdServer, keys: Keys, node: str) -> Holder:
    """The node in its present membership."""
    client = EtcdClient(Access(server.endpoints), CLOCK, random.Random(0))
    (row,) = (await client.read(Range(keys.node(node)))).found(0)
    await client.close()
    return Holder(node, row.create_revision)


async def count_of(server: EtcdServer, wanted: Range) -> int:
    client = EtcdClient(Access(server.endpoints), CLOCK, random.Random(0))
    outcome = await client.read(Range(wanted.key, wanted.end, keys_only=True, limit=1))
    await client.close()
    return len(outcome.found(0))


def sizes_of(server: EtcdServer) -> dict[str, Any]:
    return {
        "db MiB": [round(server.status(each).dbSize / MIB) for each in server.members],
        "memory": [memory_of(each._process.pid) for each in server.members if each._process],
    }


def measure_cluster(options: argparse.Namespace) -> dict[str, Any]:
    """Nodes that join a cluster whose etcd holds the records."""
    found: dict[str, Any] = {"records": options.records, "parts": options.parts, "members": options.members}
    with origin_of(options.records) as origin, EtcdServer(options.members, ETCD_FLAGS) as server:

        def node(name: str, prefix: str) -> RunningNode:
            url = f"{server.scheme}://{','.join(server.endpoints)}/{prefix}"
            flags = ("--cluster", url, "--node-name", name, "--advertise", "127.0.0.1:0", "--replicas", "1")
            secret = {"TIERGATE_CLUSTER_SECRET": "0123456789abcdef0123456789abcdef"}
            return RunningNode(origin, flags=flags, environment=secret)

        found["node, nothing in etcd"] = watched(node("first", "empty"), 0, server, options.idle_s)
        keys = Keys("/full")
        share_count = options.share or 2 * options.records // FORMER_COUNT

        found["filled in s"] = round(seconds(fill_all, server.endpoints, keys, options.records, options.parts))
        found["etcd"] = sizes_of(server)
        say(json.dumps(found["etcd"]))

        def hold_share() -> None:
            holder = asyncio.run(holder_of(server, keys, "newcomer"))
            asyncio.run(write(server.endpoints, range(share_count), lambda numbers: hold_rows(keys, numbers, holder)))

        newcomer = node("newcomer", "full")
        found["newcomer"] = watched(newcomer, options.records, server, options.idle_s, hold_share)
        found["its share, versions"] = share_count
        found["node that comes back"] = watched(node(RETURNING, "full"), options.records, server, options.idle_s)
        found["it has said that it lost what it held"] = not asyncio.run(count_of(server, keys.held_by(RETURNING)))
        found["etcd then"] = sizes_of(server)
    return found


# -- a node alone
def measure_embedded(options: argparse.Namespace) -> dict[str, Any]:
    """A node alone whose directory holds the records. The folder is on disk: the budget is far more than is used."""
    found: dict[str, Any] = {"records": options.records, "parts": options.parts}
    record_bytes = RECORD_BYTES + PART_BYTES * options.parts
    limit_mib = max(256, options.records * record_bytes * DIRECTORY_SHARE // MIB)
    folder = Path(tempfile.mkdtemp(prefix="tiergate-million-"))
    try:
        with origin_of(options.records) as origin:

            def node() -> RunningNode:
                return RunningNode(origin, memory_dir=folder, memory_limit=f"{limit_mib}MiB")

            found["node, nothing in its directory"] = watched(node(), 0, None, options.idle_s)
            path = Folders(folder).index / "directory"
            found["filled in s"] = round(seconds(fill_embedded, path, options.records, options.parts))
            file = (path / "data.mdb").stat()
            found["file MiB"] = round(file.st_size / MIB)
            found["node"] = watched(node(), options.records, None, options.idle_s)
            directory = EmbeddedDirectory.open(path, file.st_size)
            found["counts"] = asyncio.run(directory.counts())
            found["live_holders s"] = round(seconds(lambda: asyncio.run(directory.live_holders())), 2)
            directory.close()
    finally:
        shutil.rmtree(folder)
    return found


def fill_embedded(path: Path, records_count: int, parts_count: int) -> None:
    directory, rng = EmbeddedDirectory.open(path, (path / "data.mdb").stat().st_size), random.Random(1)
    for start in range(0, records_count, BATCH_COUNT):
        numbers = range(start, min(start + BATCH_COUNT, records_count))

        def adopt(rows: LmdbRows, numbers: range = numbers) -> None:
            for number in numbers:
                name, version = ObjectName(BUCKET, key_of(number)), version_of(number, rng, parts_count)
                transitions.adopt(rows, name, version, etag_of(number), Role.LARGE, CLOCK.wall_s(), None)

        directory._transact(adopt)
        if start % (250 * BATCH_COUNT) == 0:
            say(f"{start} records")
    directory.close()


def main() -> None:
    """Measure and report."""
    # So that `timeout` leaves no process and no folder behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(required=True)
    for name, run in (("cluster", measure_cluster), ("embedded", measure_embedded)):
        command = commands.add_parser(name, help=(run.__doc__ or "").splitlines()[0])
        command.set_defaults(run=run)
        command.add_argument("--records", type=int, default=1_000_000)
        parts_count = 4 if run is measure_cluster else 1
        command.add_argument("--parts", type=int, default=parts_count, help="of each object")
        command.add_argument("--idle-s", type=float, default=45.0, help="so long a node is watched that nobody asks")
        if run is measure_cluster:
            command.add_argument("--members", type=int, default=1, help="of etcd")
            command.add_argument("--share", type=int, default=0, help="how many a node holds; 0: its part of all")
    options = parser.parse_args()
    sys.stdout.write(f"{json.dumps(options.run(options))}\n")


if __name__ == "__main__":
    main()
