"""The demo of several nodes, act by act: one dies, and the others hold and finish what it had acknowledged."""

import re
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console

from tiergate.clock import Clock
from tiergate.demo.stage import (
    BUCKET,
    NotShownError,
    Stage,
    check_marker_came_last,
    failures,
    held,
    memory_folder,
    prefix,
    store,
    without_proxies,
)
from tiergate.demo.training import Trainer
from tiergate.testing.cluster import RunningCluster
from tiergate.testing.node import RunningNode
from tiergate.testing.origins import Cut, FaultyOrigin, MotoOrigin

MEMORY_LIMIT_BYTES = 256 << 20
TAKE_OVER_TIMEOUT_S = 60.0
NEWEST = "demo/latest"
"""The object that names the newest checkpoint, as training jobs keep one."""

_FLAGS = (
    # Only gateways write there, so the directory alone can answer while the origin is off.
    *("--prefix", f"{{uri = 's3://{BUCKET}/demo/', exclusive = true}}"),
    # An audience does not wait long for an origin to be asked again.
    *("--origin-backoff-max", "2s"),
)
_TIER_BYTES = re.compile(r'^tiergate_read_bytes_total\{tier="(\w+)"\} (\S+)$', re.MULTILINE)


class _Cluster(RunningCluster):
    """Nodes whose memory lies in one folder."""

    def __init__(self, origin: str, nodes_count: int, memory: Path) -> None:
        super().__init__(origin, nodes_count, flags=_FLAGS, memory_limit=str(MEMORY_LIMIT_BYTES))
        self._memory = memory

    def make(self, name: str, zone: str = "", **options: Any) -> RunningNode:
        return super().make(name, zone, memory_dir=self._memory / name, **options)


class ClusterPlay:
    """The demo. It shows progress on the console while it goes on, and ends with a table."""

    def __init__(self, console: Console, steps_count: int, nodes_count: int, clock: Clock | None = None) -> None:
        self._stage = Stage(console, clock)
        self._steps_count = steps_count
        self._nodes_count = nodes_count

    def show(self) -> bool:
        """Play it; whether every tensor compared equal. Whatever happens, its processes and folders are gone after.

        Raises:
            One of `failures()`: a step failed.
        """
        stage, count = self._stage, self._nodes_count
        with ExitStack() as stack:
            stack.enter_context(without_proxies())
            with stage.act(
                f"start an S3 server in the place of the origin, etcd, and {count} nodes that share a secret"
            ):
                origin = stack.enter_context(MotoOrigin())
                proxy = stack.enter_context(FaultyOrigin(origin.endpoint))
                memory = stack.enter_context(memory_folder(count * MEMORY_LIMIT_BYTES))
                cluster = stack.enter_context(_Cluster(proxy.endpoint, count, memory))
                origin.client().create_bucket(Bucket=BUCKET)
            nodes = ", ".join(
                f"{name} {node.endpoint}" for name, node in zip(cluster.names, cluster.nodes, strict=True)
            )
            stage.aside(f"origin {origin.endpoint}, etcd {', '.join(cluster.etcd.endpoints)}, nodes {nodes}")
            try:
                self._acts(origin, proxy, cluster)
            except failures():
                for node in cluster.nodes:
                    stage.show_log(node)
                raise
        stage.close()
        return not stage.wrong

    def _acts(self, origin: MotoOrigin, proxy: FaultyOrigin, cluster: RunningCluster) -> None:
        stage, trainer = self._stage, Trainer(seed=1)
        first, second = self._steps_count, 2 * self._steps_count
        victim, *survivors = cluster.nodes
        here = f"RAM of {cluster.names[0]} and a peer"
        before = stage.train_and_save(trainer, victim, self._steps_count, first, here)
        self._name_newest(victim, first)
        stage.write_back(cluster.nodes, origin, first)

        with stage.act("switch the origin off"):
            proxy.forget()
            proxy.inject(Cut(), times=None)
        after = stage.train_and_save(trainer, victim, self._steps_count, second, here)
        self._name_newest(victim, second)
        self._kill(victim, survivors, cluster.names)

        reader = min(survivors, key=lambda node: node.status()["memory"]["dirty_bytes"])
        self._restore_from_peers(reader, cluster.names[cluster.nodes.index(reader)], second, after)
        if any(seen.origin_status is not None for seen in proxy.requests) or held(origin.client(), second).files:
            raise NotShownError("the origin was reached while it was off")

        with stage.act("switch the origin on again"):
            proxy.heal()
        stage.write_back(survivors, origin, second)
        check_marker_came_last(proxy, second)
        self._compare_objects(reader, origin, second)
        with stage.act("stop the gateway"):
            for node in survivors:
                node.stop()
        stage.restore(store(origin.endpoint), first, before, "origin alone")
        stage.restore(store(origin.endpoint), second, after, "origin alone")

    def _name_newest(self, node: RunningNode, step: int) -> None:
        """Write which checkpoint is the newest; the acknowledgement must say that a peer has it too."""
        answer = node.client().put_object(Bucket=BUCKET, Key=NEWEST, Body=prefix(step).encode())
        ack = answer["ResponseMetadata"]["HTTPHeaders"].get("x-tiergate-ack")
        if ack != "memory:2":
            raise NotShownError(f"a write was acknowledged under {ack}, not under memory:2")

    def _kill(self, victim: RunningNode, survivors: Sequence[RunningNode], names: str) -> None:
        """Kill the node that took the checkpoint, and wait until the others own what it owed."""
        stage, owed = self._stage, victim.status()["writeback"]
        with stage.act(
            f"kill -9 of node {names[0]}, all of its processes, which owes the origin {owed['pending']} objects"
        ):
            victim.kill9("all")

        def taken_over() -> bool:
            return bool(sum(node.status()["writeback"]["pending"] for node in survivors) >= owed["pending"])

        with stage.act("its lease ends, and the survivors take over what it owed"):
            survivors[0].wait_until("everything taken over", taken_over, TAKE_OVER_TIMEOUT_S)
        size = f"{owed['pending_bytes'] / 1e6:.1f} MB"
        others = " and ".join(names[1:])
        stage.row(f"node {names[0]} killed", f"RAM of {others}", str(owed["pending"]), size, "taken over")

    def _restore_from_peers(self, node: RunningNode, name: str, step: int, expected: dict[str, object]) -> None:
        """Restore the newest checkpoint through a node that was not written to, and of which others hold a part."""
        newest = node.client().get_object(Bucket=BUCKET, Key=NEWEST)["Body"].read().decode()
        if newest != prefix(step):
            raise NotShownError(f"node {name} takes {newest} for the newest checkpoint")
        before = _read_bytes(node)
        self._stage.restore(store(node.endpoint), step, expected, f"RAM of {name} and peers")
        read = {tier: count - before.get(tier, 0.0) for tier, count in _read_bytes(node).items()}
        self._stage.aside(", ".join(f"{count / 1e6:.1f} MB from {tier}" for tier, count in read.items() if count))
        if read.get("origin") or not read.get("peer"):
            raise NotShownError(f"the checkpoint did not come from peers: {read}")

    def _compare_objects(self, node: RunningNode, origin: MotoOrigin, step: int) -> None:
        """Each object of the checkpoint is in the origin byte for byte as the node shows it."""
        names = sorted(held(node.client(), step).files)
        with self._stage.act(f"compare {len(names)} objects byte for byte, and their order"):
            for name in names:
                key = f"{prefix(step)}/{name}"
                one, other = (
                    client.get_object(Bucket=BUCKET, Key=key)["Body"].read()
                    for client in (node.client(), origin.client())
                )
                if one != other:
                    raise NotShownError(f"{key} is not in the origin what the node shows")
        self._stage.row(f"step {step} compared", "origin", str(len(names)), "", "marker after its shards")


def _read_bytes(node: RunningNode) -> dict[str, float]:
    """Bytes that a node served, by the tier that had them."""
    return {tier: float(count) for tier, count in _TIER_BYTES.findall(node.metrics())}
