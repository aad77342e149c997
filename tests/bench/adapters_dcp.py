"""Measures DCP through the adapter beside what else there is, in one run, in turns, and prints ratios.

Usage: python -m tests.bench.adapters_dcp [--ranks N] [--rounds N] [--gib G]      (see README.md beside this file)

All ranks together save and load so many GiB in tensors of 16 MiB; a figure is that of the slowest rank. Beside the
adapter: stock s3fs through the same node, FileSystemWriter on tmpfs, the package amzn-sagemaker-checkpointing before a
memory daemon that only keeps what it gets, and one plain copy into warm shared memory and back. Nothing is written back
while something is measured.
"""

import argparse
import asyncio
import ctypes
import json
import logging
import mmap
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol
from urllib.request import urlopen

import numpy as np
import torch
import torch.distributed as dist
from aiohttp import web
from tests.adapters.conftest import aws_environment, sources_path
from tests.bench.measure import BUCKET, CLOCK, GIB, MIB, Figures, cpu_s, keep, yardstick
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save

from tiergate.testing.node import RunningNode
from tiergate_adapters.dcp import TieredStorageReader, TieredStorageWriter
from tiergate_adapters.place import Place
from tiergate_adapters.store import Store

TENSOR_BYTES = 16 * MIB
SAMPLE_PAUSE_S = 0.005
SETTLE_PAUSE_S = 0.1
SETTLE_TIMEOUT_S = 600.0
State = dict[str, torch.Tensor]


# -- what is measured
class Way(Protocol):
    """One way to save and load the tensors of this rank."""

    def save(self, state: State, number: int) -> None: ...

    def load(self, state: State, number: int) -> None: ...

    def remove(self, number: int) -> None:
        """Called by one rank."""


class Plain:
    """A copy into shared memory whose pages are warm, and back."""

    def __init__(self, state: State) -> None:
        whole = sum(each.nbytes for each in state.values())
        self._memory = np.frombuffer(mmap.mmap(-1, whole), np.uint8)
        self._memory[:] = 1

    def save(self, state: State, number: int) -> None:
        at = 0
        for each in state.values():
            np.copyto(self._memory[at : at + each.nbytes], each.numpy().view(np.uint8))
            at += each.nbytes

    def load(self, state: State, number: int) -> None:
        at = 0
        for each in state.values():
            np.copyto(each.numpy().view(np.uint8), self._memory[at : at + each.nbytes])
            at += each.nbytes

    def remove(self, number: int) -> None:
        pass


class Adapter:
    def save(self, state: State, number: int) -> None:
        save(state, storage_writer=TieredStorageWriter(self.uri(number)))

    def load(self, state: State, number: int) -> None:
        load(state, storage_reader=TieredStorageReader(self.uri(number)))

    def remove(self, number: int) -> None:
        store = Store(Place.of(self.uri(number)))
        store.delete(store.names())

    def uri(self, number: int) -> str:
        return f"s3://{BUCKET}/adapter/step_{number}"


class S3fs:
    def save(self, state: State, number: int) -> None:
        save(state, storage_writer=FsspecWriter(self._uri(number)))

    def load(self, state: State, number: int) -> None:
        load(state, storage_reader=FsspecReader(self._uri(number)))

    def remove(self, number: int) -> None:
        store = Store(Place.of(self._uri(number)))
        store.delete(store.names())

    def _uri(self, number: int) -> str:
        return f"s3://{BUCKET}/s3fs/step_{number}"


class Tmpfs:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def save(self, state: State, number: int) -> None:
        save(state, storage_writer=FileSystemWriter(self._folder / str(number)))

    def load(self, state: State, number: int) -> None:
        load(state, storage_reader=FileSystemReader(self._folder / str(number)))

    def remove(self, number: int) -> None:
        shutil.rmtree(self._folder / str(number))


class SageMaker:
    """The package, before the daemon below."""

    def __init__(self, daemon: str) -> None:
        from amzn_sagemaker_checkpointing.config.in_memory_client import InMemoryClientConfig
        from amzn_sagemaker_checkpointing.config.sagemaker_checkpoint_config import SageMakerCheckpointConfig
        from amzn_sagemaker_checkpointing.storage.clients.inmemory import inmemory_client

        there: Any = partial(InMemoryClientConfig, base_url=daemon)
        inmemory_client.InMemoryClientConfig = there  # type: ignore[attr-defined]
        quiet = logging.getLogger("quiet")
        self._config = SageMakerCheckpointConfig(namespace="bench", world_size=dist.get_world_size(), logger=quiet)

    def save(self, state: State, number: int) -> None:
        from amzn_sagemaker_checkpointing.checkpointing.filesystem import writer

        save(state, storage_writer=writer.SageMakerTieredStorageWriter(self._config, step=number))

    def load(self, state: State, number: int) -> None:
        from amzn_sagemaker_checkpointing.checkpointing.filesystem import reader

        load(state, storage_reader=reader.SageMakerTieredStorageReader(self._config, step=number))

    def remove(self, number: int) -> None:
        """The daemon retains one step."""


# -- the daemon
def serve_daemon() -> None:
    """Keeps shards in memory and gives them back; the first line of the output is its port."""
    shards: dict[tuple[str, str], tuple[bytes, str]] = {}

    async def put(request: web.Request) -> web.Response:
        rank, step = request.match_info["rank"], request.match_info["step"]
        for known in [known for known in shards if known[0] == rank]:
            del shards[known]
        shards[(rank, step)] = (await request.read(), request.headers["Shard-Meta"])
        return web.Response()

    async def get(request: web.Request) -> web.Response:
        body, meta = shards[(request.match_info["rank"], request.match_info["step"])]
        return web.Response(body=body, headers={"Shard-Meta": meta})

    async def latest(request: web.Request) -> web.Response:
        return web.json_response(sorted({int(step) for _, step in shards}, reverse=True))

    async def namespace(request: web.Request) -> web.Response:
        return web.json_response({"num_ranks": 99, "steps_to_retain_per_rank": 1})

    async def main() -> None:
        app = web.Application(client_max_size=1 << 40)
        app.router.add_get("/v1/cp/checkpoints/{ns}/latest", latest)
        app.router.add_post("/v1/cp/checkpoints/{ns}/{rank}/{step}", put)
        app.router.add_get("/v1/cp/checkpoints/{ns}/{rank}/{step}", get)
        app.router.add_route("*", "/v1/cp/namespaces/{ns}", namespace)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        sys.stdout.write(f"{runner.addresses[0][1]}\n")
        sys.stdout.flush()
        await asyncio.Event().wait()

    asyncio.run(main())


# -- a rank
class Peak:
    """How far the memory of this process, shared pages apart, rises above where it was."""

    def __init__(self) -> None:
        ctypes.CDLL(None).malloc_trim(0)  # What was freed before counts for nothing.
        self.mib = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> "Peak":
        self._began = self._now()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(SAMPLE_PAUSE_S):
            self.mib = max(self.mib, (self._now() - self._began) / 1024)

    def _now(self) -> int:
        (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
        return int(line.split()[1])


class Rank:
    """Measures in step with the other ranks."""

    def __init__(self, options: argparse.Namespace) -> None:
        warnings.filterwarnings("ignore")
        logging.disable(logging.CRITICAL)
        dist.init_process_group(
            "gloo", init_method=f"file://{options.folder}/ranks", rank=options.rank, world_size=options.ranks
        )
        self._options = options
        self.figures: Figures = {}
        count = round(options.gib * GIB / TENSOR_BYTES / options.ranks)
        names = [f"rank{options.rank}.w{number}" for number in range(count)]
        self._saved = {name: torch.randn(TENSOR_BYTES // 4) for name in names}
        self._loaded = {name: torch.zeros_like(value) for name, value in self._saved.items()}
        self._number = 0

    def run(self) -> None:
        options = self._options
        ways: dict[str, Way] = {
            "plain copy": Plain(self._saved),
            "adapter": Adapter(),
            "s3fs": S3fs(),
            "FileSystemWriter, tmpfs": Tmpfs(options.folder / "files"),
            "SageMaker": SageMaker(options.daemon),
        }
        for _ in range(options.rounds):
            for name, way in ways.items():
                self._turn(name, way)
            for name, stager in (
                ("async_save, default", None),
                ("async_save, kept stager", DefaultStager(StagingOptions(False, False, False, False))),
            ):
                self._aside(name, stager)

    def _turn(self, name: str, way: Way) -> None:
        self._number += 1
        with self._held():
            self._timed("save", name, lambda: way.save(self._saved, self._number))
            for value in self._loaded.values():
                value.zero_()
            self._timed("load", name, lambda: way.load(self._loaded, self._number))
        assert all(torch.equal(self._loaded[each], value) for each, value in self._saved.items()), name
        self._clean(way)

    def _aside(self, name: str, stager: DefaultStager | None) -> None:
        """How long the training thread waits: the second time, when what is kept is warm."""
        way = Adapter()
        for is_warm in (False, True):
            self._number += 1
            with self._held(), Peak() as peak:
                dist.barrier()
                began_s = CLOCK.monotonic_s()
                writer = TieredStorageWriter(way.uri(self._number))
                future = async_save(self._saved, storage_writer=writer, async_stager=stager)
                stalled_s = CLOCK.monotonic_s() - began_s
                assert isinstance(future, Future)
                future.result()
                whole_s = CLOCK.monotonic_s() - began_s
            if is_warm:
                self._keep("stall", name, stalled_s)
                self._keep("whole", name, whole_s)
                self._keep("peak MiB beyond the state", name, peak.mib)
            self._clean(way)
        if stager is not None:
            stager.close()

    def _timed(self, step: str, name: str, act: Callable[[], None]) -> None:
        dist.barrier()
        served_s = sum(map(cpu_s, self._options.servers))
        with Peak() as peak:
            began_s, began_cpu_s = CLOCK.monotonic_s(), time.process_time()
            act()
            took_s, spent_s = CLOCK.monotonic_s() - began_s, time.process_time() - began_cpu_s
        dist.barrier()
        served_s = sum(map(cpu_s, self._options.servers)) - served_s
        self._keep(step, name, took_s)
        self._keep(f"{step}, CPU of a rank", name, spent_s)
        self._keep(f"{step}, CPU of servers", name, served_s)
        self._keep(f"{step}, peak MiB beyond the state", name, peak.mib)

    def _keep(self, step: str, name: str, figure: float) -> None:
        """That of the slowest rank."""
        worst = torch.tensor([figure], dtype=torch.float64)
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        if dist.get_rank() == 0:
            keep(self.figures, step, name, float(worst))

    @contextmanager
    def _held(self) -> Iterator[None]:
        """Nothing is written back meanwhile."""
        dist.barrier()
        if dist.get_rank() == 0:
            os.kill(self._options.origin_pid, signal.SIGUSR1)
        dist.barrier()
        yield
        dist.barrier()
        if dist.get_rank() == 0:
            os.kill(self._options.origin_pid, signal.SIGUSR2)

    def _clean(self, way: Way) -> None:
        if dist.get_rank() == 0:
            self._settle()
            way.remove(self._number)
            self._settle()
        dist.barrier()

    def _settle(self) -> None:
        end_s = time.monotonic() + SETTLE_TIMEOUT_S
        while time.monotonic() < end_s:
            with urlopen(f"{self._options.admin}/status", timeout=10) as answer:
                writeback = json.load(answer)["writeback"]
            if not writeback["pending"] and not writeback["in_flight"]:
                return
            time.sleep(SETTLE_PAUSE_S)
        raise TimeoutError("the node does not come to rest")


# -- the whole
@contextmanager
def daemon() -> Iterator[tuple[str, int]]:
    with subprocess.Popen(
        [sys.executable, "-m", __spec__.name, "--serve"], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            yield f"http://127.0.0.1:{int(process.stdout.readline())}", process.pid
        finally:
            process.kill()


@contextmanager
def folder_on_tmpfs() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="tiergate-bench-", dir="/dev/shm") as name:
        yield Path(name)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Start the servers and the ranks; what the first of these tells."""
    with ExitStack() as stack:
        folder = stack.enter_context(folder_on_tmpfs())
        origin = stack.enter_context(yardstick(512))
        running = stack.enter_context(RunningNode(origin.endpoint, memory_limit=f"{int(options.gib * 4096)}MiB"))
        words = ["--ranks", str(options.ranks), "--rounds", str(options.rounds), "--gib", str(options.gib)]
        words += ["--folder", str(folder), "--admin", running.admin, "--origin-pid", str(origin.workers[0])]
        url, daemon_pid = stack.enter_context(daemon())
        workers = [pid for name, pid in running.children.items() if name.startswith("worker")]
        words += ["--daemon", url, "--servers", *map(str, [daemon_pid, *workers])]
        environment = dict(os.environ) | aws_environment(running.endpoint, "test", "test")
        environment |= {"PYTHONPATH": sources_path(), "GLOO_SOCKET_IFNAME": "lo"}
        ranks = [
            subprocess.Popen(
                [sys.executable, "-m", __spec__.name, *words, "--rank", str(rank)],
                env=environment,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(options.ranks)
        ]
        try:
            told = [rank.communicate()[0] for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
    figures: Figures = json.loads(told[0])
    return {"unit": "seconds", "ranks": options.ranks, "gib": options.gib, "figures": figures}


def table(figures: Figures) -> Iterator[str]:
    """The smallest figures, and how many times the adapter's and the plain copy's they are."""
    yield f"{'smallest':<58}{'figure':>9}{'adapter':>9}{'copy':>7}   all rounds"
    for step, ways in figures.items():
        for way, found in ways.items():
            ratios = [
                f"{min(found) / max(min(ways[other]), 1e-9):.2f}" if other in ways else ""
                for other in ("adapter", "plain copy")
            ]
            rounds = " ".join(f"{figure:.3f}" for figure in found)
            yield f"{f'{step}: {way}':<58}{min(found):>9.3f}{ratios[0]:>9}{ratios[1]:>7}   {rounds}"


def main() -> None:
    """Measure and report; or be one of the processes for it."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--gib", type=float, default=1.0, help="what all ranks together save")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    for name, kind in (("rank", int), ("folder", Path), ("admin", str), ("origin-pid", int), ("daemon", str)):
        parser.add_argument(f"--{name}", type=kind, help=argparse.SUPPRESS)
    parser.add_argument("--servers", type=int, nargs="*", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve_daemon()
    elif options.rank is not None:
        rank = Rank(options)
        rank.run()
        sys.stdout.write(f"{json.dumps(rank.figures)}\n")
        dist.destroy_process_group()
    else:
        result = measure(options)
        for line in table(result["figures"]):
            sys.stdout.write(f"{line}\n")
        sys.stdout.write(f"{json.dumps(result)}\n")


if __name__ == "__main__":
    main()
