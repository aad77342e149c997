"""The demo of one node, act by act."""

from contextlib import ExitStack

from rich.console import Console

from tiergate.clock import Clock
from tiergate.demo.stage import (
    BUCKET,
    Holding,
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
from tiergate.demo.training import MARKER, Trainer
from tiergate.testing.node import RunningNode
from tiergate.testing.origins import FaultyOrigin, Gate, Hold, MotoOrigin

MEMORY_LIMIT_BYTES = 384 << 20
SHARDS_LET_THROUGH_COUNT = 2
"""How many shards of the second checkpoint reach the origin before the node dies."""

_WRITES = ("PUT", "POST")
_RAM = "node's RAM"


class Play:
    """The demo. It shows progress on the console while it goes on, and ends with a table."""

    def __init__(self, console: Console, steps_count: int, clock: Clock | None = None) -> None:
        self._stage = Stage(console, clock)
        self._steps_count = steps_count

    def show(self) -> bool:
        """Play it; whether every tensor compared equal. Whatever happens, its processes and folders are gone after.

        Raises:
            One of `failures()`: a step failed.
        """
        stage = self._stage
        with ExitStack() as stack:
            stack.enter_context(without_proxies())
            with stage.act("start an S3 server in the place of the origin, and a node in front of it"):
                origin = stack.enter_context(MotoOrigin())
                proxy = stack.enter_context(FaultyOrigin(origin.endpoint))
                memory = stack.enter_context(memory_folder(MEMORY_LIMIT_BYTES))
                node = stack.enter_context(
                    RunningNode(
                        proxy.endpoint,
                        memory_limit=str(MEMORY_LIMIT_BYTES),
                        memory_dir=memory / "node",
                    )
                )
                origin.client().create_bucket(Bucket=BUCKET)
            stage.aside(f"origin {origin.endpoint}, node {node.endpoint}, memory {memory}")
            try:
                self._acts(origin, proxy, node)
            except failures():
                stage.show_log(node)
                raise
        stage.close()
        return not stage.wrong

    def _acts(self, origin: MotoOrigin, proxy: FaultyOrigin, node: RunningNode) -> None:
        stage, trainer = self._stage, Trainer(seed=1)
        first, second = self._steps_count, 2 * self._steps_count
        before = stage.train_and_save(trainer, node, self._steps_count, first, _RAM)
        stage.write_back([node], origin, first)

        gate, gate_after_death = Gate(), Gate()
        _hold_after_some_shards(proxy, gate, second)
        after = stage.train_and_save(trainer, node, self._steps_count, second, _RAM)
        whole = held(node.client(), second)
        self._kill(node, origin, gate, second, whole)
        # What the dead node had on the wire stays at the first gate: its connections broke with it.
        proxy.heal()
        proxy.inject(Hold(gate_after_death), where=lambda seen: seen.method in _WRITES, times=None)
        with stage.act("restart the node on the memory it left behind"):
            node.restart()
        here = held(node.client(), second)
        if here.files != whole.files:
            raise NotShownError("the restarted node does not show all that was acknowledged")
        stage.row("node restarted", _RAM, str(len(here.files)), here.size, "all still there")

        stage.restore(store(node.endpoint), second, after, _RAM)
        if held(origin.client(), second).has_marker:
            raise NotShownError("the origin had the whole checkpoint before it was restored from the node")
        gate_after_death.release()
        stage.write_back([node], origin, second)
        check_marker_came_last(proxy, second)

        with stage.act("stop the gateway"):
            node.stop()
        stage.restore(store(origin.endpoint), first, before, "origin alone")
        stage.restore(store(origin.endpoint), second, after, "origin alone")

    def _kill(self, node: RunningNode, origin: MotoOrigin, gate: Gate, step: int, whole: Holding) -> None:
        with self._stage.act("kill the node with SIGKILL in the middle of write-back"):
            gate.wait_reached()
            node.wait_until(
                "some shards in the origin",
                lambda: len(held(origin.client(), step).files) >= SHARDS_LET_THROUGH_COUNT,
            )
            node.kill9("all")
        there = held(origin.client(), step)
        if there.has_marker or len(there.files) >= len(whole.files):
            raise NotShownError("the node was not killed in the middle of write-back")
        counts = f"{len(there.files)} of {len(whole.files)}"
        self._stage.row("node killed", "origin", counts, there.size, f"no {MARKER} yet")


def _hold_after_some_shards(proxy: FaultyOrigin, gate: Gate, step: int) -> None:
    """From now on a few shards of a checkpoint pass to the origin; the others and the marker wait at the gate."""
    shard, marker = f"{prefix(step)}/__", f"{prefix(step)}/{MARKER}"
    proxy.inject(
        Hold(gate),
        where=lambda seen: seen.method in _WRITES and seen.key.startswith(shard),
        nth=SHARDS_LET_THROUGH_COUNT + 1,
        times=None,
    )
    proxy.inject(Hold(gate), where=lambda seen: seen.method in _WRITES and seen.key.startswith(marker), times=None)
