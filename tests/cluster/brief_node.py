"""`tiergate serve` of a node whose promises to others are brief, and its doubts, so that a test can wait for their end:
the command, and the entry point of its children."""

import asyncio
import os
import sys
from pathlib import Path

from tiergate import config
from tiergate.child import ChildContext, ChildRole
from tiergate.config import DECLARATIONS
from tiergate.engine import holding
from tiergate.node import Entries, serve
from tiergate.observe import logs
from tiergate.replication.base import Promise

BRIEF = Promise(commit_s=4.0, keep_s=8.0)
HERE = Path(__file__)


def run(context: ChildContext) -> None:
    """What a child of either role does."""
    holding.DOUBT_S = BRIEF.commit_s
    if context.role is ChildRole.WORKER:
        from tiergate.server.worker import serve as work
    else:
        from tiergate.server.background import serve as work
    asyncio.run(work(context, BRIEF))


def main() -> int:
    """Takes what `tiergate serve` takes, each flag followed by its value."""
    os.environ["PYTHONPATH"] = os.pathsep.join((str(HERE.parent), os.environ["PYTHONPATH"]))
    declared = {each.flag: each for each in DECLARATIONS.values()}
    flags: dict[str, str | list[str]] = {}
    for flag, value in zip(sys.argv[2::2], sys.argv[3::2], strict=True):
        each = declared[flag]
        flags[each.field] = [*flags.get(each.field, ()), value] if each.repeatable else value
    loaded = config.load(flags=flags)
    logs.configure(loaded.settings.log_level, loaded.settings.log_format, process="node")
    entries = Entries(worker=HERE.stem, background=HERE.stem)
    return serve(loaded, lambda running: print(running.line, flush=True), entries=entries)  # noqa: T201 - ready


if __name__ == "__main__":
    sys.exit(main())
