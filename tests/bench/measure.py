"""Measures a node beside the yardstick (and SeaweedFS) in one run, in turns, and prints ratios.

Usage: measure.py {cpu,dcp,memory,small} [options]      (see README.md beside this file)

Other work on the machine moves every figure, so each server gets its turn in every round, and the ratios are those
of the smallest figures seen. The last line of the output is all of it as JSON.
"""

import argparse
import base64
import http.client
import itertools
import json
import logging
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from awscrt import checksums  # type: ignore[import-untyped]

from tiergate.clock import SystemClock
from tiergate.testing.node import RunningNode
from tiergate.testing.origins import SeaweedOrigin

MIB = 1 << 20
GIB = 1 << 30
OBJECT_BYTES = 64 * MIB
BUCKET = "bench"
SETTLE_DEADLINE_S = 120.0
SAMPLE_PAUSE_S = 0.05
UNSIGNED = {"x-amz-content-sha256": "UNSIGNED-PAYLOAD"}

CLOCK = SystemClock()
Figures = dict[str, dict[str, list[float]]]
"""What was measured: step, then server, then one figure a round."""


# -- servers
@dataclass
class Server:
    """A server to be measured: where it is, and the processes whose CPU counts as its own."""

    name: str
    endpoint: str
    workers: list[int]
    others: list[int] = field(default_factory=list)

    def connect(self) -> http.client.HTTPConnection:
        parts = urlsplit(self.endpoint)
        assert parts.hostname is not None
        return http.client.HTTPConnection(parts.hostname, parts.port, blocksize=MIB)

    def worker_cpu_s(self) -> float:
        return sum(map(cpu_s, self.workers))

    def cpu_s(self) -> float:
        return sum(map(cpu_s, [*self.workers, *self.others]))


def cpu_s(pid: int) -> float:
    """CPU time of a process with all its threads: its CPU clock (clock_getcpuclockid(3))."""
    return time.clock_gettime((~pid << 3) | 2)


@contextmanager
def yardstick(buffer_mib: int) -> Iterator[Server]:
    """A yardstick in a process of its own."""
    script = Path(__file__).with_name("yardstick.py")
    with subprocess.Popen(
        [sys.executable, str(script), "0", str(buffer_mib)], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            port = int(process.stdout.readline())
            yield Server("yardstick", f"http://127.0.0.1:{port}", [process.pid])
        finally:
            process.kill()


@contextmanager
def node(memory_limit: str, buffer_mib: int = 512) -> Iterator[tuple[Server, RunningNode, "Held"]]:
    """A node before a yardstick of its own as the origin."""
    with yardstick(buffer_mib) as origin, RunningNode(origin.endpoint, memory_limit=memory_limit) as running:
        children = running.children
        workers = [pid for name, pid in children.items() if name.startswith("worker")]
        rest = [pid for pid in children.values() if pid not in workers]
        yield (
            Server("node", running.endpoint, workers, [*rest, parent_of(workers[0])]),
            running,
            Held(origin.workers[0]),
        )


class Held:
    """The write-back of a node: held by its origin, and let go."""

    def __init__(self, origin_pid: int) -> None:
        self._pid = origin_pid

    @contextmanager
    def __call__(self, held: bool = True) -> Iterator[None]:
        if held:
            os.kill(self._pid, signal.SIGUSR1)
        try:
            yield
        finally:
            os.kill(self._pid, signal.SIGUSR2)


def parent_of(pid: int) -> int:
    found = re.search(r"^PPid:\t(\d+)$", Path(f"/proc/{pid}/status").read_text(), re.M)
    assert found is not None
    return int(found[1])


# -- requests
def put(connection: http.client.HTTPConnection, key: str, body: bytes, headers: dict[str, str]) -> None:
    """One PutObject."""
    connection.request("PUT", f"/{BUCKET}/{key}", body=body, headers=UNSIGNED | headers)
    answer = connection.getresponse()
    text = answer.read()
    if answer.status != 200:
        raise RuntimeError(f"PUT {key}: {answer.status} {text!r}")


def get(connection: http.client.HTTPConnection, key: str, buffer: bytearray) -> int:
    """One GetObject; how many bytes came."""
    connection.request("GET", f"/{BUCKET}/{key}", headers=UNSIGNED)
    answer = connection.getresponse()
    if answer.status != 200:
        raise RuntimeError(f"GET {key}: {answer.status} {answer.read()!r}")
    got = 0
    while read := answer.readinto(buffer):
        got += read
    return got


def crc32_header(body: bytes) -> dict[str, str]:
    value: int = checksums.crc32(body)
    return {"x-amz-checksum-crc32": base64.b64encode(value.to_bytes(4, "big")).decode()}


# -- cpu
def measure_cpu(options: argparse.Namespace) -> dict[str, Any]:
    """Server CPU seconds per GiB, of 64 MiB PutObjects with a CRC32 header, and of GetObjects of the same."""
    figures: Figures = {}
    count, body = round(options.gib * GIB / OBJECT_BYTES), os.urandom(OBJECT_BYTES)
    headers, buffer = crc32_header(body), bytearray(MIB)
    with ExitStack() as stack:
        plain = stack.enter_context(yardstick(int(options.gib * 1024)))
        gateway, running, held = stack.enter_context(node(f"{int(options.gib * 3072)}MiB"))
        servers = [(server, stack.enter_context(closing(server.connect()))) for server in (plain, gateway)]
        for _, (server, connection) in itertools.product(range(options.rounds), servers):
            whole = server.cpu_s()
            with (
                held(server is gateway),
                timed(figures, "put worker", server.name, server.worker_cpu_s, options.gib),
            ):
                for number in range(count):
                    put(connection, f"cpu/{number}", body, headers)
            if server is gateway:
                running.wait_settled(SETTLE_DEADLINE_S)
            keep(figures, "put whole, write-back included", server.name, (server.cpu_s() - whole) / options.gib)
            with timed(figures, "get", server.name, server.worker_cpu_s, options.gib):
                for number in range(count):
                    got = get(connection, f"cpu/{number}", buffer)
                    if got != OBJECT_BYTES:
                        raise RuntimeError(f"GET gave {got} bytes")
    return {
        "unit": "CPU seconds per GiB",
        "figures": figures,
        "goals": {"put worker": 1.5, "get": 1.25},
    }


# -- small
def measure_small(options: argparse.Namespace) -> dict[str, Any]:
    """Latency of 1 KiB requests, one at a time over one connection."""
    latencies: Figures = {}
    with ExitStack() as stack:
        plain = stack.enter_context(yardstick(64))
        gateway, running, held = stack.enter_context(node("256MiB"))
        servers = [(server, stack.enter_context(closing(server.connect()))) for server in (plain, gateway)]
        for _, (server, connection) in itertools.product(range(options.rounds), servers):
            with held(server is gateway):
                for method in ("PUT", "GET", "HEAD"):
                    found = [small_s(connection, method, number) for number in range(options.count)]
                    cuts = statistics.quantiles(found, n=100)
                    keep(latencies, f"{method} p50", server.name, cuts[49] * 1e3)
                    keep(latencies, f"{method} p99", server.name, cuts[98] * 1e3)
            if server is gateway:
                running.wait_settled(SETTLE_DEADLINE_S)
    return {"unit": "milliseconds", "figures": latencies, "goals": {}}


def small_s(connection: http.client.HTTPConnection, method: str, number: int) -> float:
    """How long one small request takes."""
    began_s = CLOCK.monotonic_s()
    body = bytes(1024) if method == "PUT" else None
    connection.request(method, f"/{BUCKET}/small/{number}", body=body, headers=UNSIGNED)
    answer = connection.getresponse()
    answer.read()
    if answer.status != 200:
        raise RuntimeError(f"{method}: {answer.status}")
    return CLOCK.monotonic_s() - began_s


# -- dcp
def measure_dcp(options: argparse.Namespace) -> dict[str, Any]:
    """Time of a stock DCP save and load through s3fs."""
    figures: Figures = {}
    with ExitStack() as stack:
        checkpoint = Checkpoint(options.gib)
        plain = stack.enter_context(yardstick(int(options.gib * 1280)))
        gateway, running, held = stack.enter_context(node(f"{int(options.gib * 3072)}MiB"))
        runs = [("yardstick", plain, False), ("node, held", gateway, True), ("node, write-back", gateway, False)]
        if not options.without_seaweed:
            with temporary_files_on_tmpfs():
                seaweed = stack.enter_context(SeaweedOrigin())
            seaweed.client().create_bucket(Bucket=BUCKET)
            runs.append(("SeaweedFS", Server("SeaweedFS", seaweed.endpoint, []), False))
        turns = itertools.product(range(options.rounds), runs)
        # A prefix is never written twice: replacing a checkpoint in place is another, slower thing.
        for number, (_, (name, server, is_held)) in enumerate(turns):
            with held(is_held):
                for step, act in (("save", checkpoint.save), ("load", checkpoint.load)):
                    began_s, began_cpu_s = CLOCK.monotonic_s(), time.process_time() + server.worker_cpu_s()
                    act(server.endpoint, number)
                    keep(figures, step, name, CLOCK.monotonic_s() - began_s)
                    if server.workers:
                        spent_s = time.process_time() + server.worker_cpu_s() - began_cpu_s
                        keep(figures, f"{step}, CPU of client and server", name, spent_s)
            checkpoint.check()
            running.wait_settled(SETTLE_DEADLINE_S)
            checkpoint.remove(server.endpoint, number)
            running.wait_settled(SETTLE_DEADLINE_S)
    return {"unit": "seconds", "figures": figures, "goals": {"save": 1.15, "load": 1.15}}


class Checkpoint:
    """A state dict of 16 MiB tensors, saved and loaded with the stock classes; keys are `test`/`test`."""

    def __init__(self, gib: float) -> None:
        import torch

        warnings.filterwarnings("ignore")
        logging.disable(logging.CRITICAL)
        self._torch = torch
        self._saved = {f"w{number}": torch.randn(4 << 20) for number in range(round(64 * gib))}
        self._loaded = {name: torch.zeros_like(value) for name, value in self._saved.items()}

    def save(self, endpoint: str, number: int) -> None:
        from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter
        from torch.distributed.checkpoint.state_dict_saver import save

        save(self._saved, storage_writer=FsspecWriter(self._path(number), **self._access(endpoint)))

    def load(self, endpoint: str, number: int) -> None:
        from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader
        from torch.distributed.checkpoint.state_dict_loader import load

        for value in self._loaded.values():
            value.zero_()
        load(self._loaded, storage_reader=FsspecReader(self._path(number), **self._access(endpoint)))

    def check(self) -> None:
        """Raises AssertionError: what was loaded is not what was saved."""
        assert all(self._torch.equal(self._loaded[name], value) for name, value in self._saved.items())

    def remove(self, endpoint: str, number: int) -> None:
        import s3fs  # type: ignore[import-untyped]

        s3fs.S3FileSystem(**self._access(endpoint)).rm(self._path(number), recursive=True)

    def _path(self, number: int) -> str:
        return f"s3://{BUCKET}/dcp/step_{number}"

    def _access(self, endpoint: str) -> dict[str, Any]:
        return {"endpoint_url": endpoint, "key": "test", "secret": "test"}


@contextmanager
def temporary_files_on_tmpfs() -> Iterator[None]:
    """What makes temporary folders inside puts them on tmpfs."""
    before, tempfile.tempdir = tempfile.tempdir, "/dev/shm"
    try:
        yield
    finally:
        tempfile.tempdir = before


# -- memory
def measure_memory(options: argparse.Namespace) -> dict[str, Any]:
    """Peak memory of a node while many times its budget pass through it, each page counted once.

    `tmpfs` is what the memory folder has allocated; `private` is the proportional set size of everything else: the
    part of each process that is not on tmpfs.
    """
    body = os.urandom(OBJECT_BYTES)
    headers = crc32_header(body)
    with (
        node(f"{int(options.budget_gib * 1024)}MiB") as (gateway, running, _),
        closing(gateway.connect()) as connection,
    ):
        pids = [*gateway.workers, *gateway.others]
        watch = Watch(pids, running.memory_dir)
        idle = watch.sample()
        with watch:
            for number in range(round(options.gib * GIB / OBJECT_BYTES)):
                put(connection, f"memory/{number}", body, headers)
            running.wait_settled(SETTLE_DEADLINE_S)
    peak = watch.peak
    budget_mib = options.budget_gib * 1024
    return {
        "unit": "MiB",
        "budget": budget_mib,
        "passed through": options.gib * 1024,
        "idle": idle,
        "peak": peak,
        "beyond the budget": round(peak["all"] - budget_mib, 1),
        "samples": watch.count,
    }


class Watch:
    """Samples the memory of some processes and a tmpfs folder in a thread."""

    def __init__(self, pids: list[int], folder: Path) -> None:
        self._pids, self._folder = pids, folder
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._failure: Exception | None = None
        self.peak: dict[str, float] = {"all": 0.0}
        self.count = 0

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        try:
            while not self._stop.wait(SAMPLE_PAUSE_S):
                found = self.sample()
                self.count += 1
                self.peak = max(self.peak, found, key=lambda each: each["all"])
        except OSError as error:
            self._failure = error

    def sample(self) -> dict[str, float]:
        """MiB now."""
        private = shared = 0
        for pid in self._pids:
            text = Path(f"/proc/{pid}/smaps_rollup").read_text()
            rows = {name: int(kib) for name, kib in re.findall(r"^(\w+): +(\d+) kB$", text, re.M)}
            shared += rows["Pss_Shmem"]
            private += rows["Pss"] - rows["Pss_Shmem"]
        files = [path for path in self._folder.rglob("*") if path.is_file()]
        tmpfs = sum(path.stat().st_blocks * 512 for path in files) / MIB
        return {
            "all": round(private / 1024 + tmpfs, 1),
            "private": round(private / 1024, 1),
            "tmpfs": round(tmpfs, 1),
            "sum of PSS": round((private + shared) / 1024, 1),
        }


# -- figures
@contextmanager
def closing(connection: http.client.HTTPConnection) -> Iterator[http.client.HTTPConnection]:
    try:
        yield connection
    finally:
        connection.close()


@contextmanager
def timed(figures: Figures, step: str, server: str, clock: Callable[[], float], units: float) -> Iterator[None]:
    """Keep what passes on `clock` for each of `units`."""
    began = clock()
    yield
    keep(figures, step, server, (clock() - began) / units)


def keep(figures: Figures, step: str, server: str, figure: float) -> None:
    figures.setdefault(step, {}).setdefault(server, []).append(round(figure, 4))
    sys.stderr.write(f"{step}: {server}: {figure:.3f}\n")


def table(result: dict[str, Any]) -> Iterator[str]:
    """The smallest figures, and their ratios to the yardstick's."""
    width = 46
    yield f"{'smallest, ' + result['unit']:<{width}}{'figure':>10}{'ratio':>8}{'goal':>8}   all rounds"
    for step, servers in result["figures"].items():
        base = min(servers["yardstick"])
        for server, found in servers.items():
            goal = result["goals"].get(step) if server.startswith("node") else None
            rounds = " ".join(f"{figure:.3f}" for figure in found)
            ratio = f"{min(found) / base:.2f}"
            label = f"{step}: {server}"
            yield f"{label:<{width}}{min(found):>10.3f}{ratio:>8}{goal or '':>8}   {rounds}"


def parser() -> argparse.ArgumentParser:
    """The command line."""
    main = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = main.add_subparsers(required=True)
    rounds = argparse.ArgumentParser(add_help=False)
    rounds.add_argument("--rounds", type=int, default=4)
    for name, run, gib, parents in (
        ("cpu", measure_cpu, 1.0, [rounds]),
        ("dcp", measure_dcp, 1.0, [rounds]),
        ("memory", measure_memory, 4.0, []),
        ("small", measure_small, 0.0, [rounds]),
    ):
        command = commands.add_parser(name, help=(run.__doc__ or "").splitlines()[0], parents=parents)
        command.set_defaults(run=run)
        if gib:
            command.add_argument("--gib", type=float, default=gib, help="how much is moved (each round)")
        if name == "memory":
            command.add_argument("--budget-gib", type=float, default=1.0)
        if name == "small":
            command.add_argument("--count", type=int, default=500, help="requests of a kind and round")
        if name == "dcp":
            command.add_argument("--without-seaweed", action="store_true")
    return main


def main() -> None:
    """Measure and report."""
    # So that `timeout` leaves no process and no tmpfs folder behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    options = parser().parse_args()
    result = options.run(options)
    if "figures" in result:
        for line in table(result):
            sys.stdout.write(f"{line}\n")
    sys.stdout.write(f"{json.dumps(result)}\n")


if __name__ == "__main__":
    main()
