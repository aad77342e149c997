"""What the demo does, act by act."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch.distributed.checkpoint.api import CheckpointException

from tiergate.clock import Clock, SystemClock
from tiergate.demo.training import MARKER, Store, Trainer, differences, frozen, load, save, tensors_count
from tiergate.testing.node import NodeEndedError, RunningNode
from tiergate.testing.origins import FaultyOrigin, Gate, Hold, MotoOrigin

BUCKET = "checkpoints"
MEMORY_LIMIT_BYTES = 384 << 20
SHARDS_LET_THROUGH_COUNT = 2
"""How many shards of the second checkpoint reach the origin before the node dies."""

WRITE_BACK_TIMEOUT_S = 120.0
_SHARED_MEMORY = Path("/dev/shm")
_WRITES = ("PUT", "POST")


class _NotShownError(Exception):
    """What the demo is to prove did not hold."""


def failures() -> tuple[type[BaseException], ...]:
    """The errors that end the demo and are not bugs of it."""
    return (CheckpointException, _NotShownError, NodeEndedError, BotoCoreError, ClientError, OSError)


@dataclass(frozen=True, slots=True)
class _Row:
    """A line of the closing table."""

    event: str
    where: str
    objects: str
    size: str
    took: str
    outcome: str


@dataclass(frozen=True, slots=True)
class _Holding:
    """What some place holds of a checkpoint: size by file name."""

    files: dict[str, int]

    @property
    def has_marker(self) -> bool:
        return MARKER in self.files

    @property
    def size(self) -> str:
        return f"{sum(self.files.values()) / 1e6:.1f} MB"


class Play:
    """The demo. It shows progress on the console while it goes on, and ends with a table."""

    def __init__(self, console: Console, steps_count: int, clock: Clock | None = None) -> None:
        self._console = console
        self._steps_count = steps_count
        self._clock = clock or SystemClock()
        self._rows: list[_Row] = []
        self._wrong: list[str] = []
        self._took_s = 0.0

    def show(self) -> bool:
        """Play it; whether every tensor compared equal. Whatever happens, its processes and folders are gone after.

        Raises:
            One of `failures()`: a step failed.
        """
        with ExitStack() as stack:
            stack.enter_context(_without_proxies())
            with self._act("start an S3 server in the place of the origin, and a node in front of it"):
                origin = stack.enter_context(MotoOrigin())
                proxy = stack.enter_context(FaultyOrigin(origin.endpoint))
                memory = stack.enter_context(_memory_folder())
                node = stack.enter_context(
                    RunningNode(
                        proxy.endpoint,
                        memory_limit=str(MEMORY_LIMIT_BYTES),
                        memory_dir=memory / "node",
                    )
                )
                origin.client().create_bucket(Bucket=BUCKET)
            self._console.print(
                f"    origin {origin.endpoint}, node {node.endpoint}, memory {memory}", style="dim", soft_wrap=True
            )
            try:
                self._acts(origin, proxy, node)
            except failures():
                self._console.print(node.log_tail(limit_bytes=2_000), style="dim", markup=False, highlight=False)
                raise
        self._close()
        return not self._wrong

    # -- the acts
    def _acts(self, origin: MotoOrigin, proxy: FaultyOrigin, node: RunningNode) -> None:
        trainer = Trainer(seed=1)
        first, second = self._steps_count, 2 * self._steps_count
        before = self._train_and_save(trainer, node, first)
        self._write_back(node, origin, first)

        gate, gate_after_death = Gate(), Gate()
        _hold_after_some_shards(proxy, gate, second)
        after = self._train_and_save(trainer, node, second)
        whole = _held(node.client(), second)
        self._kill(node, origin, gate, second, whole)
        # What the dead node had on the wire stays at the first gate: its connections broke with it.
        proxy.heal()
        proxy.inject(Hold(gate_after_death), where=lambda seen: seen.method in _WRITES, times=None)
        with self._act("restart the node on the memory it left behind"):
            node.restart()
        here = _held(node.client(), second)
        if here.files != whole.files:
            raise _NotShownError("the restarted node does not show all that was acknowledged")
        self._row("node restarted", "node's RAM", str(len(here.files)), here.size, "all still there")

        self._restore(_store(node.endpoint), second, after, "node's RAM")
        if _held(origin.client(), second).has_marker:
            raise _NotShownError("the origin had the whole checkpoint before it was restored from the node")
        gate_after_death.release()
        self._write_back(node, origin, second)
        _check_marker_came_last(proxy, second)

        with self._act("stop the gateway"):
            node.stop()
        self._restore(_store(origin.endpoint), first, before, "origin alone")
        self._restore(_store(origin.endpoint), second, after, "origin alone")

    def _train_and_save(self, trainer: Trainer, node: RunningNode, step: int) -> dict[str, object]:
        with self._bar(f"train to step {step}", self._steps_count) as (progress, task):

            def on_step(loss: float) -> None:
                progress.update(task, advance=1, note=f"loss {loss:.3f}")

            trainer.train(self._steps_count, on_step)
        state = trainer.state()
        with self._act(f"save step {step} with torch.distributed.checkpoint through s3fs"):
            save(state, _uri(step), _store(node.endpoint))
        held = _held(node.client(), step)
        if not held.has_marker:
            raise _NotShownError(f"the node acknowledged step {step} and does not show it whole")
        self._row(f"step {step} saved", "node's RAM", str(len(held.files)), held.size, "acknowledged")
        return frozen(state)

    def _write_back(self, node: RunningNode, origin: MotoOrigin, step: int) -> None:
        pending_bytes = node.status()["writeback"]["pending_bytes"]
        with self._bar(f"write step {step} back to the origin", max(1, pending_bytes)) as (progress, task):

            def settled(status: dict[str, Any]) -> bool:
                left = status["writeback"]
                progress.update(task, completed=max(0, pending_bytes - left["pending_bytes"]))
                return bool(left["pending"] == 0 and left["in_flight"] == 0)

            node.wait_status("all written back", settled, WRITE_BACK_TIMEOUT_S)
            progress.update(task, completed=max(1, pending_bytes))
        there, here = _held(origin.client(), step), _held(node.client(), step)
        if there.files != here.files:
            raise _NotShownError(f"the origin does not hold what the node shows of step {step}")
        self._row(f"step {step} written back", "origin", str(len(there.files)), there.size, "plain objects")

    def _kill(self, node: RunningNode, origin: MotoOrigin, gate: Gate, step: int, whole: _Holding) -> None:
        with self._act("kill the node with SIGKILL in the middle of write-back"):
            gate.wait_reached()
            node.wait_until(
                "some shards in the origin",
                lambda: len(_held(origin.client(), step).files) >= SHARDS_LET_THROUGH_COUNT,
            )
            node.kill9("all")
        there = _held(origin.client(), step)
        if there.has_marker or len(there.files) >= len(whole.files):
            raise _NotShownError("the node was not killed in the middle of write-back")
        counts = f"{len(there.files)} of {len(whole.files)}"
        self._row("node killed", "origin", counts, there.size, f"no {MARKER} yet")

    def _restore(self, store: Store, step: int, expected: dict[str, object], where: str) -> None:
        with self._act(f"restore step {step} from the {where} into a new model"):
            found = load(_uri(step), store)
        wrong = differences(expected, frozen(found))
        self._wrong += [f"step {step} from the {where}: {line}" for line in wrong]
        outcome = f"{len(wrong)} DIFFERENCES" if wrong else f"{tensors_count(expected)} tensors equal"
        self._row(f"step {step} restored", where, "", "", outcome)

    # -- what the audience sees
    @contextmanager
    def _act(self, title: str) -> Iterator[None]:
        started_s = self._clock.monotonic_s()
        with self._console.status(title):
            yield
        self._took_s = self._clock.monotonic_s() - started_s
        self._console.print(f"[green]✓[/] {title} [dim]({self._took_s:.1f} s)[/]", soft_wrap=True)

    @contextmanager
    def _bar(self, title: str, total: float) -> Iterator[tuple[Progress, Any]]:
        columns = (TextColumn("  {task.description}"), BarColumn(), TextColumn("{task.fields[note]}"))
        started_s = self._clock.monotonic_s()
        is_seen = self._console.is_terminal
        with Progress(
            *columns, TimeElapsedColumn(), console=self._console, transient=True, disable=not is_seen
        ) as progress:
            task = progress.add_task(title, total=total, note="")
            yield progress, task
            note = str(progress.tasks[0].fields["note"])
        self._took_s = self._clock.monotonic_s() - started_s
        told = ", ".join(filter(None, (note, f"{self._took_s:.1f} s")))
        self._console.print(f"[green]✓[/] {title} [dim]({told})[/]", soft_wrap=True)

    def _row(self, event: str, where: str, objects: str, size: str, outcome: str) -> None:
        self._rows.append(_Row(event, where, objects, size, f"{self._took_s:.2f} s", outcome))

    def _close(self) -> None:
        table = Table(title="What was stored where, and how long it took", title_justify="left")
        for name in ("event", "where", "objects", "size", "took", "outcome"):
            table.add_column(name, justify="right" if name in ("objects", "size", "took") else "left")
        for row in self._rows:
            table.add_row(row.event, row.where, row.objects, row.size, row.took, row.outcome)
        self._console.print(table)
        for line in self._wrong:
            self._console.print(f"[red]✗[/] {line}")
        if not self._wrong:
            self._console.print("[green]✓[/] every tensor came back as it was saved, also without the gateway")


def _uri(step: int) -> str:
    return f"s3://{BUCKET}/{_prefix(step)}"


def _prefix(step: int) -> str:
    return f"demo/step_{step}"


def _store(endpoint: str) -> Store:
    return Store(endpoint, MotoOrigin.access_key, MotoOrigin.secret_key)


def _held(client: Any, step: int) -> _Holding:
    """What an S3 endpoint shows of a checkpoint (fewer files than a page holds)."""
    prefix = f"{_prefix(step)}/"
    page = client.list_objects_v2(Bucket=BUCKET, Prefix=prefix)
    return _Holding({each["Key"].removeprefix(prefix): each["Size"] for each in page.get("Contents", [])})


def _hold_after_some_shards(proxy: FaultyOrigin, gate: Gate, step: int) -> None:
    """From now on a few shards of a checkpoint pass to the origin; the others and the marker wait at the gate."""
    shard, marker = f"{_prefix(step)}/__", f"{_prefix(step)}/{MARKER}"
    proxy.inject(
        Hold(gate),
        where=lambda seen: seen.method in _WRITES and seen.key.startswith(shard),
        nth=SHARDS_LET_THROUGH_COUNT + 1,
        times=None,
    )
    proxy.inject(Hold(gate), where=lambda seen: seen.method in _WRITES and seen.key.startswith(marker), times=None)


def _check_marker_came_last(proxy: FaultyOrigin, step: int) -> None:
    """The origin never had a marker without all of its shards."""
    prefix = f"{_prefix(step)}/"
    writes = [each for each in proxy.requests if each.method == "PUT" and each.key.startswith(prefix) and each.status]
    markers = [each.started_s for each in writes if each.key == prefix + MARKER]
    shards: dict[str, float] = {}
    for each in writes:
        if each.key.endswith(".distcp") and each.status == 200 and each.finished_s is not None:
            shards[each.key] = min(each.finished_s, shards.get(each.key, each.finished_s))
    if not markers or not shards or min(markers) < max(shards.values()):
        raise _NotShownError("the marker reached the origin before all of its shards")


@contextmanager
def _memory_folder() -> Iterator[Path]:
    """A folder for the node: on tmpfs if there is room, and else (a container's small /dev/shm) where temporary files
    go."""
    has_room = os.access(_SHARED_MEMORY, os.W_OK) and shutil.disk_usage(_SHARED_MEMORY).free > 2 * MEMORY_LIMIT_BYTES
    folder = Path(tempfile.mkdtemp(prefix="tiergate-demo-", dir=_SHARED_MEMORY if has_room else None))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


@contextmanager
def _without_proxies() -> Iterator[None]:
    """Loopback addresses are not asked of a web proxy."""
    before = os.environ.get("NO_PROXY")
    os.environ["NO_PROXY"] = "127.0.0.1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["NO_PROXY"]
        else:
            os.environ["NO_PROXY"] = before
