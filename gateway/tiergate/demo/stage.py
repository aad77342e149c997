"""What every demo needs: the acts as the audience sees them, and what lies where."""

import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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
from tiergate.testing.origins import FaultyOrigin, MotoOrigin

BUCKET = "checkpoints"
WRITE_BACK_TIMEOUT_S = 120.0
_SHARED_MEMORY = Path("/dev/shm")


class NotShownError(Exception):
    """What the demo is to prove did not hold."""


def failures() -> tuple[type[BaseException], ...]:
    """The errors that end the demo and are not bugs of it."""
    return (CheckpointException, NotShownError, NodeEndedError, BotoCoreError, ClientError, OSError)


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
class Holding:
    """What some place holds of a checkpoint: size by file name."""

    files: dict[str, int]

    @property
    def has_marker(self) -> bool:
        return MARKER in self.files

    @property
    def size(self) -> str:
        return f"{sum(self.files.values()) / 1e6:.1f} MB"


class Stage:
    """Shows acts on the console while they go on, and closes with a table."""

    def __init__(self, console: Console, clock: Clock | None = None) -> None:
        self.console = console
        self.clock = clock or SystemClock()
        self.took_s = 0.0
        """How long the last act took."""
        self.wrong: list[str] = []
        """Tensors that did not compare equal."""
        self._rows: list[_Row] = []

    @contextmanager
    def act(self, title: str) -> Iterator[None]:
        """Something that takes a while."""
        started_s = self.clock.monotonic_s()
        with self.console.status(title):
            yield
        self.took_s = self.clock.monotonic_s() - started_s
        self.console.print(f"[green]✓[/] {title} [dim]({self.took_s:.1f} s)[/]", soft_wrap=True)

    @contextmanager
    def bar(self, title: str, total: float) -> Iterator[tuple[Progress, Any]]:
        """Something whose progress can be told; gives the bar and its task."""
        columns = (TextColumn("  {task.description}"), BarColumn(), TextColumn("{task.fields[note]}"))
        started_s = self.clock.monotonic_s()
        is_seen = self.console.is_terminal
        with Progress(
            *columns, TimeElapsedColumn(), console=self.console, transient=True, disable=not is_seen
        ) as progress:
            task = progress.add_task(title, total=total, note="")
            yield progress, task
            note = str(progress.tasks[0].fields["note"])
        self.took_s = self.clock.monotonic_s() - started_s
        told = ", ".join(filter(None, (note, f"{self.took_s:.1f} s")))
        self.console.print(f"[green]✓[/] {title} [dim]({told})[/]", soft_wrap=True)

    # -- acts that every demo has
    def train_and_save(
        self, trainer: Trainer, node: RunningNode, steps_count: int, step: int, where: str
    ) -> dict[str, object]:
        """Learn `steps_count` steps, up to `step`, and save through a node; the state that was saved."""
        with self.bar(f"train to step {step}", steps_count) as (progress, task):

            def on_step(loss: float) -> None:
                progress.update(task, advance=1, note=f"loss {loss:.3f}")

            trainer.train(steps_count, on_step)
        state = trainer.state()
        with self.act(f"save step {step} with torch.distributed.checkpoint through s3fs"):
            save(state, uri(step), store(node.endpoint))
        here = held(node.client(), step)
        if not here.has_marker:
            raise NotShownError(f"the node acknowledged step {step} and does not show it whole")
        self.row(f"step {step} saved", where, str(len(here.files)), here.size, "acknowledged")
        return frozen(state)

    def write_back(self, nodes: Sequence[RunningNode], origin: MotoOrigin, step: int) -> None:
        """Wait until the origin is owed nothing; it must then hold what the nodes show of the checkpoint."""
        pending_bytes = sum(node.status()["writeback"]["pending_bytes"] for node in nodes)
        with self.bar(f"write step {step} back to the origin", max(1, pending_bytes)) as (progress, task):

            def settled() -> bool:
                left = [node.status()["writeback"] for node in nodes]
                progress.update(task, completed=max(0, pending_bytes - sum(each["pending_bytes"] for each in left)))
                return all(each["pending"] == 0 and each["in_flight"] == 0 for each in left)

            nodes[0].wait_until("all written back", settled, WRITE_BACK_TIMEOUT_S)
            progress.update(task, completed=max(1, pending_bytes))
        there, here = held(origin.client(), step), held(nodes[0].client(), step)
        if there.files != here.files:
            raise NotShownError(f"the origin does not hold what the node shows of step {step}")
        self.row(f"step {step} written back", "origin", str(len(there.files)), there.size, "plain objects")

    def restore(self, source: Store, step: int, expected: dict[str, object], where: str) -> None:
        """Load a checkpoint into a new model and compare every tensor."""
        with self.act(f"restore step {step} from the {where} into a new model"):
            found = load(uri(step), source)
        wrong = differences(expected, frozen(found))
        self.wrong += [f"step {step} from the {where}: {line}" for line in wrong]
        outcome = f"{len(wrong)} DIFFERENCES" if wrong else f"{tensors_count(expected)} tensors equal"
        self.row(f"step {step} restored", where, "", "", outcome)

    # -- how it is told
    def aside(self, text: str) -> None:
        """A line in small print."""
        self.console.print(f"    {text}", style="dim", markup=False, highlight=False, soft_wrap=True)

    def show_log(self, node: RunningNode) -> None:
        """The end of what a node logged, when something failed."""
        self.console.print(node.log_tail(limit_bytes=2_000), style="dim", markup=False, highlight=False)

    def row(self, event: str, where: str, objects: str, size: str, outcome: str) -> None:
        """A line of the closing table, about the last act."""
        self._rows.append(_Row(event, where, objects, size, f"{self.took_s:.2f} s", outcome))

    def close(self) -> None:
        """The table, and what it comes to."""
        table = Table(title="What was stored where, and how long it took", title_justify="left")
        for name in ("event", "where", "objects", "size", "took", "outcome"):
            table.add_column(name, justify="right" if name in ("objects", "size", "took") else "left")
        for row in self._rows:
            table.add_row(row.event, row.where, row.objects, row.size, row.took, row.outcome)
        self.console.print(table)
        for line in self.wrong:
            self.console.print(f"[red]✗[/] {line}")
        if not self.wrong:
            self.console.print("[green]✓[/] every tensor came back as it was saved, also without the gateway")


def uri(step: int) -> str:
    """Where a checkpoint is saved."""
    return f"s3://{BUCKET}/{prefix(step)}"


def prefix(step: int) -> str:
    """What the keys of a checkpoint begin with, without the last slash."""
    return f"demo/step_{step}"


def store(endpoint: str) -> Store:
    """An endpoint with the keys that all of the demo's take."""
    return Store(endpoint, MotoOrigin.access_key, MotoOrigin.secret_key)


def held(client: Any, step: int) -> Holding:
    """What an S3 endpoint shows of a checkpoint (fewer files than a page holds)."""
    start = f"{prefix(step)}/"
    page = client.list_objects_v2(Bucket=BUCKET, Prefix=start)
    return Holding({each["Key"].removeprefix(start): each["Size"] for each in page.get("Contents", [])})


def check_marker_came_last(proxy: FaultyOrigin, step: int) -> None:
    """The origin never had a marker without all of its shards."""
    start = f"{prefix(step)}/"
    writes = [each for each in proxy.requests if each.method == "PUT" and each.key.startswith(start) and each.status]
    markers = [each.started_s for each in writes if each.key == start + MARKER]
    shards: dict[str, float] = {}
    for each in writes:
        if each.key.endswith(".distcp") and each.status == 200 and each.finished_s is not None:
            shards[each.key] = min(each.finished_s, shards.get(each.key, each.finished_s))
    if not markers or not shards or min(markers) < max(shards.values()):
        raise NotShownError("the marker reached the origin before all of its shards")


@contextmanager
def memory_folder(limit_bytes: int) -> Iterator[Path]:
    """A folder for so much memory of nodes: on tmpfs if there is room, and else (a container's small /dev/shm) where
    temporary files go."""
    has_room = os.access(_SHARED_MEMORY, os.W_OK) and shutil.disk_usage(_SHARED_MEMORY).free > 2 * limit_bytes
    folder = Path(tempfile.mkdtemp(prefix="tiergate-demo-", dir=_SHARED_MEMORY if has_room else None))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


@contextmanager
def without_proxies() -> Iterator[None]:
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
