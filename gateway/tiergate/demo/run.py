"""The demo as a command: what it needs, how it ends, and that nothing of it is left behind."""

import argparse
import importlib.util
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from rich.console import Console

from tiergate.errors import TiergateError

EXIT_DIFFERENT = 1
EXIT_INTERRUPTED = 130
_NEEDED = ("torch", "s3fs", "moto", "flask", "flask_cors")
_DESCRIPTION = """Starts an S3 server in the place of the origin and a node in front of it, trains a small model, saves
it with torch.distributed.checkpoint through s3fs, kills the node in the middle of write-back, restarts it, restores,
compares every tensor, then stops the gateway and restores from the origin alone. Everything runs on loopback and is
removed at the end. Exit status 0 only if all tensors compared equal."""


class DemoError(TiergateError):
    """The demo could not be shown to its end; the message says why in one line."""


def run(args: Sequence[str]) -> int:
    """Show the demo; returns the exit status: 0 all compared equal, 1 something differed, 130 interrupted.

    Raises:
        DemoError: an extra is missing, or a step failed.
        SystemExit: wrong arguments, or --help.
    """
    parser = argparse.ArgumentParser(prog="tiergate demo", description=_DESCRIPTION, allow_abbrev=False)
    parser.add_argument("--steps", type=_steps, default=20, metavar="N", help="training steps per checkpoint (20)")
    steps_count: int = parser.parse_args(list(args)).steps
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise DemoError(f"the demo needs {', '.join(missing)}: pip install tiergate[demo]")
    # Only now, since these need the extra.
    from tiergate.demo.play import Play, failures

    with _interrupts() as interrupted:
        try:
            return 0 if Play(Console(), steps_count).show() else EXIT_DIFFERENT
        except KeyboardInterrupt:
            return EXIT_INTERRUPTED
        except failures() as error:
            # torch.distributed.checkpoint wraps whatever is raised within it, KeyboardInterrupt too.
            if interrupted:
                return EXIT_INTERRUPTED
            raise DemoError(f"the demo failed: {_one_line(error)}") from error


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
