"""Measures what copies inside the origin save: a second checkpoint, half of whose bytes are those of the first, is
saved through a node with `reuse` and through one without, before the same SeaweedFS, in turns.

Usage: reuse.py [--rounds 3] [--mib 256] [--object-mib 64] [--put] [--link-mib 0]      (see README.md beside this file)

Time is from the first byte saved until the origin holds all of it; CPU is of the node and of SeaweedFS together; what
was sent is what the node counts. With `--link-mib` so many MiB/s pass between node and SeaweedFS. Smallest
figures of all rounds; the last line of the output is all as JSON.
"""

import argparse
import asyncio
import io
import json
import os
import signal
import sys
from contextlib import ExitStack
from typing import Any

from boto3.s3.transfer import TransferConfig
from tests.bench.measure import BUCKET, CLOCK, MIB, SETTLE_DEADLINE_S, Figures, cpu_s, keep, temporary_files_on_tmpfs

from tiergate.testing.faults import address_of
from tiergate.testing.node import RunningNode
from tiergate.testing.origins import SeaweedOrigin
from tiergate.testing.tcprelay import PIECE_BYTES, TcpRelay

PARTS = TransferConfig(multipart_threshold=8 * MIB, multipart_chunksize=8 * MIB, max_concurrency=4)


class Link(TcpRelay):
    """So many bytes a second pass, over all connections together."""

    def __init__(self, target: tuple[str, int], bytes_per_s: float) -> None:
        super().__init__(target)
        self._bytes_per_s = bytes_per_s
        self._free_s = 0.0

    async def _way(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while piece := await reader.read(PIECE_BYTES):
                now_s = CLOCK.monotonic_s()
                self._free_s = max(now_s, self._free_s) + len(piece) / self._bytes_per_s
                await asyncio.sleep(self._free_s - now_s)
                writer.write(piece)
                await writer.drain()
        except ConnectionError:
            pass  # The other end sees it by the end of its connection.
        finally:
            writer.close()


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Figures by step and node."""
    figures: Figures = {}
    count = options.mib // options.object_mib
    with ExitStack() as stack:
        with temporary_files_on_tmpfs():
            seaweed = stack.enter_context(SeaweedOrigin())
        seaweed.client().create_bucket(Bucket=BUCKET)
        endpoint = seaweed.endpoint
        if options.link_mib:
            link = stack.enter_context(Link(address_of(seaweed.endpoint), options.link_mib * MIB))
            endpoint = f"http://{link.address}"
        nodes = {}
        for name in ("sent", "reused"):
            flags = ("--prefix", f"{{uri = 's3://{BUCKET}/{name}/', reuse = {str(name == 'reused').lower()}}}")
            limit = f"{4 * options.mib + 256}MiB"
            nodes[name] = stack.enter_context(RunningNode(endpoint, memory_limit=limit, flags=flags))
        for number in range(options.rounds):
            frozen = [os.urandom(options.object_mib * MIB) for _ in range(count // 2)]
            for name, node in nodes.items():
                one_round(figures, options, seaweed, node, f"{name}/{number}", name, frozen)
    return {
        "objects": count,
        "object_mib": options.object_mib,
        "at_once": options.put,
        "link": options.link_mib,
        "figures": figures,
    }


def one_round(
    figures: Figures,
    options: argparse.Namespace,
    seaweed: SeaweedOrigin,
    node: RunningNode,
    prefix: str,
    name: str,
    frozen: list[bytes],
) -> None:
    client = node.client()
    pids = [*node.children.values(), seaweed.pid]

    def save(step: str) -> None:
        trained = [os.urandom(len(data)) for data in frozen]
        for index, data in enumerate([*frozen, *trained]):
            upload(client, options.put, f"{prefix}-{step}/{index}", data)
        node.wait_settled(SETTLE_DEADLINE_S)

    save("a")
    before = node.status()["totals"]
    began_s, began_cpu_s = CLOCK.monotonic_s(), sum(map(cpu_s, pids))
    save("b")
    keep(figures, "seconds", name, CLOCK.monotonic_s() - began_s)
    keep(figures, "CPU seconds, node and SeaweedFS", name, sum(map(cpu_s, pids)) - began_cpu_s)
    grown = {each: value - before[each] for each, value in node.status()["totals"].items()}
    keep(figures, "MiB sent", name, (grown["persisted_bytes"] - grown["reused_bytes"]) / MIB)
    keep(figures, "requests to SeaweedFS", name, grown["origin_requests"])
    remove(client, prefix)
    node.wait_settled(SETTLE_DEADLINE_S)


def upload(client: Any, at_once: bool, key: str, data: bytes) -> None:
    if at_once:
        client.put_object(Bucket=BUCKET, Key=key, Body=data)
    else:
        client.upload_fileobj(io.BytesIO(data), BUCKET, key, Config=PARTS)


def remove(client: Any, prefix: str) -> None:
    """Delete what a round left."""
    for found in client.list_objects_v2(Bucket=BUCKET, Prefix=prefix).get("Contents", ()):
        client.delete_object(Bucket=BUCKET, Key=found["Key"])


def main() -> None:
    """Measure and report."""
    # So that `timeout` leaves no process and no tmpfs folder behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--mib", type=int, default=256, help="size of a checkpoint")
    parser.add_argument("--object-mib", type=int, default=64)
    parser.add_argument("--put", action="store_true", help="objects at once instead of in parts of 8 MiB")
    parser.add_argument("--link-mib", type=int, default=0, help="MiB/s of the link to SeaweedFS (0: unbounded)")
    result = measure(parser.parse_args())
    for step, servers in result["figures"].items():
        sent, reused = min(servers["sent"]), min(servers["reused"])
        rounds = " | ".join(" ".join(f"{figure:.2f}" for figure in found) for found in servers.values())
        sys.stdout.write(f"{step:<34}{sent:>10.2f}{reused:>10.2f}{reused / sent:>8.2f}   {rounds}\n")
    sys.stdout.write(f"{json.dumps(result)}\n")


if __name__ == "__main__":
    main()
