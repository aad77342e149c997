"""Shows how far long work on a node is, while its answer comes."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tiergate.clock import SystemClock

LINE_S = 5.0
"""How often is said how far it is where nobody sees a bar."""


def shown(
    title: str, lines: Iterator[Mapping[str, Any]], say: Callable[[str], None], *, is_quiet: bool = False
) -> Iterator[Mapping[str, Any]]:
    """Hand on the lines of an answer; meanwhile a bar shows how far it is, or on no terminal a line now and then."""
    from rich.console import Console
    from rich.filesize import decimal
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    console = Console(quiet=is_quiet)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(title, total=None)
        said_s, clock = float("-inf"), SystemClock()
        for line in lines:
            bar.update(task, description=amount(line), completed=line["done_bytes"], total=line["total_bytes"])
            yield line
            is_time = line["is_over"] or clock.monotonic_s() - said_s >= LINE_S
            if is_time and not console.is_terminal and not is_quiet:
                said_s = clock.monotonic_s()
                say(f"{amount(line)}, {decimal(line['done_bytes'])} of {decimal(line['total_bytes'])}")


def amount(line: Mapping[str, Any]) -> str:
    """How many objects are done."""
    return f"{line['done_count']} of {line['total_count']} objects"
