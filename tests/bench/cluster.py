"""Measures a cluster of three nodes, each in a network namespace of its own (needs root).

Usage: python -m tests.bench.cluster {copies,small,death} [options]      (see README.md beside this file)

The last line of the output is all of it as JSON.
"""

import argparse
import itertools
import json
import os
import random
import signal
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError
from tests.cluster.clusters import Cluster, standing_in

from tiergate.clock import SystemClock
from tiergate.testing import netns
from tiergate.testing.endstate import LAYOUT
from tiergate.testing.netns import Network
from tiergate.testing.objects import ack_of
from tiergate.testing.rules import Gate, Hold

MIB = 1 << 20
WRITING = ("PutObject", "UploadPart", "CompleteMultipartUpload", "CreateMultipartUpload", "DeleteObject")
CLOCK = SystemClock()
DEADLINE_S = 60.0


@contextmanager
def held(cluster: Cluster) -> Iterator[None]:
    """Nothing is written back meanwhile; it would share the links."""
    gate = Gate()
    cluster.standing.proxy.inject(Hold(gate), where=lambda seen: seen.operation in WRITING, times=None)
    try:
        yield
    finally:
        gate.release()
        cluster.standing.proxy.heal()
        for node in cluster.nodes.values():
            if node.is_running:
                node.wait_settled(DEADLINE_S)


def seed() -> str:
    return str(random.SystemRandom().randrange(1 << 30))


def seconds(call: Callable[..., object], *arguments: Any) -> float:
    began_s = CLOCK.monotonic_s()
    call(*arguments)
    return CLOCK.monotonic_s() - began_s


def say(text: str) -> None:
    sys.stderr.write(f"{text}\n")


# -- copies
def measure_copies(options: argparse.Namespace) -> dict[str, Any]:
    """MiB/s of PutObject with one copy and with two, every node's link bounded in both directions."""
    body = os.urandom(options.object_mib * MIB)
    found: dict[str, list[float]] = {}
    with Network() as network, standing_in(network) as stands:
        memory = f"{options.object_mib * (options.count + 2) * 2}MiB"
        for _, count in itertools.product(range(options.rounds), (1, 2)):
            with Cluster(stands, seed(), copies_count=count, memory_limit=memory) as cluster:
                for place in cluster.places.values():
                    network.throttle(place, options.link_mib * MIB)
                client = cluster.client("n0")
                with held(cluster):
                    put(cluster, client, "warm", body, count)
                    for number in range(options.count):
                        took_s = seconds(put, cluster, client, f"k{number}", body, count)
                        found.setdefault(f"memory:{count}", []).append(round(took_s, 4))
                        say(f"memory:{count}: {took_s:.3f} s, {options.object_mib / took_s:.1f} MiB/s")
    one, two = (statistics.median(found[f"memory:{count}"]) for count in (1, 2))
    return {"unit": "s", "link MiB/s": options.link_mib, "figures": found, "ratio": round(two / one, 3), "goal": 1.15}


def put(cluster: Cluster, client: Any, key: str, body: bytes, copies_count: int) -> None:
    """One PutObject, acknowledged as it should be."""
    said = ack_of(client.put_object(Bucket=cluster.bucket, Key=key, Body=body))
    if said != f"memory:{copies_count}":
        raise RuntimeError(f"acknowledged at {said}")


# -- small
def measure_small(options: argparse.Namespace) -> dict[str, Any]:
    """Latency of acknowledged 1 KiB PutObjects and of GetObjects: alone, and with two copies on etcd of three."""
    found: dict[str, dict[str, float]] = {}
    body = os.urandom(1024)
    with Network() as network, standing_in(network) as stands:
        for name, cluster in (
            ("alone", Cluster(stands, seed(), nodes_count=1, copies_count=1, alone=True)),
            ("two copies, 3 members", Cluster(stands, seed(), members_count=3)),
        ):
            with cluster:
                client = cluster.client("n0")
                with held(cluster):
                    for number in range(50):
                        put(cluster, client, f"warm{number}", body, cluster.copies_count)
                    keys = [f"k{number}" for number in range(options.count)]
                    puts = [seconds(put, cluster, client, key, body, cluster.copies_count) for key in keys]
                    gets = [seconds(read, cluster, client, key) for key in keys]
                for method, taken in (("PUT", puts), ("GET", gets)):
                    cuts = statistics.quantiles(taken, n=100)
                    found[f"{method}, {name}"] = {
                        "p50": round(cuts[49] * 1e3, 2),
                        "p99": round(cuts[98] * 1e3, 2),
                    }
                    say(f"{method}, {name}: {found[f'{method}, {name}']}")
    return {"unit": "ms, client's boto3 included", "figures": found}


def read(cluster: Cluster, client: Any, key: str) -> bytes:
    """One GetObject."""
    data: bytes = client.get_object(Bucket=cluster.bucket, Key=key)["Body"].read()
    return data


# -- death
def measure_death(options: argparse.Namespace) -> dict[str, Any]:
    """From kill -9 of a node with un-persisted objects: until others see it gone, until all it owed has a new owner,
    and until each survivor has served a byte of each of its objects."""
    found: dict[str, list[float]] = {}
    with Network() as network, standing_in(network) as stands:
        for _, lease_s in itertools.product(range(options.rounds), (3, 5)):
            with Cluster(stands, seed(), lease_s=lease_s) as cluster, held(cluster):
                clients = {name: cluster.client(name) for name in ("n1", "n2")}
                keys = [f"k{number}" for number in range(options.count)]
                for key in keys:
                    put(cluster, cluster.client("n0"), key, os.urandom(100_000), 2)
                cluster.node("n0").kill9()
                died_s = CLOCK.monotonic_s()
                for name, client in clients.items():
                    for key in keys:
                        until(answers, cluster, client, key)
                    note(found, f"lease {lease_s} s: all served by {name}", died_s)
                until(lambda cluster=cluster: not cluster.is_member("n0"))
                note(found, f"lease {lease_s} s: gone", died_s)
                until(lambda cluster=cluster: not cluster.etcd.rows(LAYOUT + b"w/n0\0"))
                note(found, f"lease {lease_s} s: taken over", died_s)
    return {"unit": "s", "figures": found}


def answers(cluster: Cluster, client: Any, key: str) -> bool:
    try:
        client.get_object(Bucket=cluster.bucket, Key=key)["Body"].read(1)
    except (BotoCoreError, ClientError):
        return False
    return True


def until(probe: Callable[..., bool], *arguments: Any) -> None:
    end_s = CLOCK.monotonic_s() + DEADLINE_S
    while not probe(*arguments):
        if CLOCK.monotonic_s() > end_s:
            raise TimeoutError("it does not happen")


def note(found: dict[str, list[float]], what: str, since_s: float) -> None:
    took_s = CLOCK.monotonic_s() - since_s
    found.setdefault(what, []).append(round(took_s, 2))
    say(f"{what}: {took_s:.2f} s")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    main = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = main.add_subparsers(required=True)
    for name, run, rounds, count in (
        ("copies", measure_copies, 2, 4),
        ("small", measure_small, 1, 500),
        ("death", measure_death, 3, 8),
    ):
        command = commands.add_parser(name, help=(run.__doc__ or "").splitlines()[0])
        command.set_defaults(run=run)
        command.add_argument("--rounds", type=int, default=rounds)
        command.add_argument("--count", type=int, default=count, help="objects in a round")
        if name == "copies":
            command.add_argument("--link-mib", type=int, default=64, help="MiB/s of each node's link, each way")
            command.add_argument("--object-mib", type=int, default=64)
    return main


def main() -> None:
    """Measure and report."""
    # So that `timeout` leaves no process and no tmpfs folder behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    options = parser().parse_args()
    if why := netns.missing():
        sys.exit(why)
    sys.stdout.write(f"{json.dumps(options.run(options))}\n")


if __name__ == "__main__":
    main()
