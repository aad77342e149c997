"""The demo as a command: what it needs, how it ends, and that nothing of it is left behind."""

import argparse
import importlib.util
import shutil
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from rich.console import Console

from tiergate.errors import ConfigError, TiergateError, install_hint

EXIT_DIFFERENT = 1
EXIT_INTERRUPTED = 130
_NEEDED = ("torch", "s3fs", "moto", "flask", "flask_cors")
_NEEDED_BY_CLUSTER = ("grpc", "aetcd")
_NODES_COUNTS = range(3, 10)
"""How many nodes a demo of several has: one dies, and each write is still on two."""

_DESCRIPTION = """Starts an S3 server in the place of the origin and a node in front of it, trains a small model, saves
it with torch.distributed.checkpoint through s3fs, kills the node in the middle of write-back, restarts it, restores,
compares every tensor, then stops the gateway and restores from the origin alone. With --nodes 3 it starts etcd and
three nodes, switches the origin off, kills the node that took the newest checkpoint, restores it from the memory of the
others, switches the origin on again and compares what arrives there. Everything runs on loopback and is removed at the
end. Exit status 0 only if all tensors compared equal."""


class DemoError(TiergateError):
    """The demo could not be shown to its end; the message says why in one line."""


def run(args: Sequence[str]) -> int:
    """Show the demo; returns the exit status: 0 all compared equal, 1 something differed, 130 interrupted.

    Raises:
        DemoError: an extra is missing, or a step failed.
        ConfigError: several nodes are asked for, and there is no etcd.
        SystemExit: wrong arguments, or --help.
    """
    parser = argparse.ArgumentParser(prog="tiergate demo", description=_DESCRIPTION, allow_abbrev=False)
    parser.add_argument("--steps", type=_steps, default=20, metavar="N", help="training steps per checkpoint (20)")
    parser.add_argument(
        "--nodes",
        type=_nodes,
        default=1,
        metavar="N",
        help="nodes: 1, or 3 to 9 that meet in etcd, which must be on PATH (1)",
    )
    options = parser.parse_args(list(args))
    nodes_count: int = options.nodes
    needed = _NEEDED if nodes_count == 1 else _NEEDED + _NEEDED_BY_CLUSTER
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        raise DemoError(f"the demo needs {', '.join(missing)}: {install_hint('demo')}")
    if nodes_count > 1 and shutil.which("etcd") is None:
        raise ConfigError(
            f"the demo of {nodes_count} nodes needs the etcd program on PATH: apt-get install etcd-server, or "
            "https://github.com/etcd-io/etcd/releases"
        )
    # Only now, since this needs the extra.
    from tiergate.demo.stage import failures

    with _interrupts() as interrupted:
        try:
            return 0 if _show(nodes_count, options.steps) else EXIT_DIFFERENT
        except KeyboardInterrupt:
            return EXIT_INTERRUPTED
        except failures() as error:
            # torch.distributed.checkpoint wraps whatever is raised within it, KeyboardInterrupt too.
            if interrupted:
                return EXIT_INTERRUPTED
            raise DemoError(f"the demo failed: {_one_line(error)}") from error


def _show(nodes_count: int, steps_count: int) -> bool:
    if nodes_count == 1:
        from tiergate.demo.play import Play

        return Play(Console(), steps_count).show()
    from tiergate.demo.clusterplay import ClusterPlay

    return ClusterPlay(Console(), steps_count, nodes_count).show()


def _nodes(word: str) -> int:
    if word != "1" and not (word.isdecimal() and int(word) in _NODES_COUNTS):
        raise argparse.ArgumentTypeError(f"{word} is neither 1 nor from {_NODES_COUNTS[0]} to {_NODES_COUNTS[-1]}")
    return int(word)


def _steps(word: str) -> int:
    if not word.isdecimal() or not 1 <= int(word) <= 10_000:
        raise argparse.ArgumentTypeError(f"{word} is not a number from 1 to 10000")
    return int(word)


def _one_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0].rstrip(": {") if lines else type(error).__name__


@contextmanager
def _interrupts() -> Iterator[list[int]]:
    """Makes SIGINT and SIGTERM a KeyboardInterrupt, but only once: cleaning up is not cut short by another. Gives
    the list of those that came."""
    came: list[int] = []

    def handle(number: int, _: FrameType | None) -> None:
        came.append(number)
        if len(came) == 1:
            raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield came
        return
    before: dict[int, Any] = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
