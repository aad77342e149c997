"""What it costs an adapter to hand an object to its node, beside one plain copy of the same bytes.

    python tests/bench/adapters_store.py [--gib 1] [--rounds 7] [--piece-mib 16]

In each round, in turns: a copy of the pieces into warm shared memory (`copy`); the same pieces through
`tiergate_adapters.store.ObjectWriter` into a warm node (`slabs`), through the same writer over HTTP (`http`), and with
boto3 (`boto3`: one upload in parts of 64 MiB); then the object read back whole: mapped (`map`), and with boto3 (`get`).
The sets stay in memory by policy, so no write-back runs beside. Figures are seconds; the ratios are of the smallest
over all rounds, also of this process's CPU time, which moves less on a busy machine. A table goes to stderr, one line
of JSON to stdout.
"""

import argparse
import json
import mmap
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import boto3
import numpy
from boto3.s3.transfer import TransferConfig

from tiergate.testing.node import RunningNode
from tiergate.testing.origins import MotoOrigin
from tiergate_adapters import slabs
from tiergate_adapters.place import Place
from tiergate_adapters.store import Store

MIB = 1 << 20
BUCKET = "bench"
POPULATE_WRITE = 23


class Target:
    """Warm shared memory, to copy into."""

    def __init__(self, size_bytes: int) -> None:
        with tempfile.TemporaryFile(dir="/dev/shm") as file:
            os.posix_fallocate(file.fileno(), 0, size_bytes)
            self._map = mmap.mmap(file.fileno(), size_bytes)
        self._map.madvise(POPULATE_WRITE)
        self.array = numpy.frombuffer(self._map, numpy.uint8)


def main() -> None:
    """Run the rounds."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--piece-mib", type=int, default=16)
    parser.add_argument("--only", default="", help="names of what is measured beside copy, by commas; all by default")
    words = parser.parse_args()
    size_bytes, piece_bytes = int(words.gib * 1024) * MIB, words.piece_mib * MIB
    source = memoryview(os.urandom(piece_bytes) * (size_bytes // piece_bytes))
    pieces = [source[start : start + piece_bytes] for start in range(0, size_bytes, piece_bytes)]
    rows: list[dict[str, tuple[float, float]]] = []
    flags = ("--prefix", f"{{uri = 's3://{BUCKET}/run/', persist = 'none', keep = 1}}")
    with MotoOrigin() as origin:
        origin.client().create_bucket(Bucket=BUCKET)
        limit = f"{4 * size_bytes // MIB + 512}MiB"
        with RunningNode(origin.endpoint, memory_limit=limit, flags=flags) as node:
            environ = {"AWS_ENDPOINT_URL": node.endpoint, "AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x"}
            os.environ.update(environ | {"AWS_DEFAULT_REGION": "us-east-1"})
            steps = steps_of(pieces, Target(size_bytes), size_bytes)
            wanted = {"copy", *words.only.split(",")} if words.only else steps.keys()
            steps = {name: step for name, step in steps.items() if name in wanted}
            for index in range(words.rounds + 1):
                row = {name: timed(step) for name, step in steps.items()}
                sys.stderr.write(f"round {index}: {' '.join(f'{name} {took[0]:.3f}' for name, took in row.items())}\n")
                rows += [row] if index else []  # The first one meets cold pages.
    best = [{name: min(row[name][kind] for row in rows) for name in rows[0]} for kind in (0, 1)]
    ratios = [{name: round(took / each["copy"], 2) for name, took in each.items()} for each in best]
    sys.stderr.write(f"ratios to copy, time: {ratios[0]}\nratios to copy, CPU here: {ratios[1]}\n")
    sys.stdout.write(json.dumps({"best_s": best[0], "ratios": ratios[0], "cpu_ratios": ratios[1]}) + "\n")


def steps_of(pieces: list[memoryview], target: Target, size_bytes: int) -> dict[str, Callable[[], None]]:
    """What is measured, by name."""
    store, client = Store(Place(BUCKET, "run/step1/")), boto3.client("s3")
    remote = Store(Place(BUCKET, "run/step1/"))
    remote.route.share = lambda: None  # type: ignore[method-assign]
    config: Any = TransferConfig(multipart_chunksize=64 * MIB)

    def copy() -> None:
        at = 0
        for piece in pieces:
            numpy.copyto(target.array[at : at + len(piece)], numpy.frombuffer(piece, numpy.uint8))
            at += len(piece)

    def write(into: Store) -> None:
        with into.create("x") as writer:
            for piece in pieces:
                writer.write(piece)

    def stock() -> None:
        client.upload_fileobj(Chain(pieces), BUCKET, "run/step1/x", Config=config)

    def read() -> None:
        with store.open("x") as reader:
            assert sum(map(len, reader.views(0, size_bytes))) == size_bytes

    def get() -> None:
        assert len(client.get_object(Bucket=BUCKET, Key="run/step1/x")["Body"].read()) == size_bytes

    return {
        "copy": copy,
        "slabs": lambda: write(store),
        "map": read,
        "http": lambda: write(remote),
        "boto3": stock,
        "get": get,
    }


class Chain:
    """The pieces as a file."""

    def __init__(self, pieces: list[memoryview]) -> None:
        self._pieces = list(pieces)

    def read(self, size_bytes: int = -1) -> bytes:
        found = bytearray()
        while self._pieces and (size_bytes < 0 or len(found) < size_bytes):
            piece = self._pieces.pop(0)
            room = len(piece) if size_bytes < 0 else size_bytes - len(found)
            found += piece[:room]
            if room < len(piece):
                self._pieces.insert(0, piece[room:])
        return bytes(found)


def timed(step: Callable[[], None]) -> tuple[float, float]:
    """How long it takes, and how much CPU time of this process, in seconds."""
    started_s, cpu_s = time.perf_counter(), time.process_time()
    step()
    return time.perf_counter() - started_s, time.process_time() - cpu_s


if __name__ == "__main__":
    assert Path("/dev/shm").is_dir()
    main()
    slabs._release_all()
