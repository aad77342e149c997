"""Runs `serve` with the entry points of the tests: `python drive_node.py LOCK_WAIT_S FIELD=VALUE ...`."""

import os
import sys
from pathlib import Path

from tiergate import config
from tiergate.errors import TiergateError
from tiergate.node import Entries, RestartPolicy, serve
from tiergate.observe import logs


def main() -> int:
    here = str(Path(__file__).parent)
    os.environ["PYTHONPATH"] = os.pathsep.join((here, os.environ["PYTHONPATH"]))
    flags = dict(word.split("=", 1) for word in sys.argv[2:])
    loaded = config.load(flags=flags)
    logs.configure(loaded.settings.log_level, loaded.settings.log_format, process="node")
    entries = Entries(worker="child_entries", background="child_entries")
    try:
        return serve(
            loaded,
            lambda running: print(running.line, flush=True),  # noqa: T201 - the node's ready line
            entries=entries,
            policy=RestartPolicy(limit_count=3, first_s=0.01, longest_s=0.01),
            lock_wait_s=float(sys.argv[1]),
        )
    except TiergateError as error:
        print(f"tiergate: {error}", file=sys.stderr)  # noqa: T201
        return 1


sys.exit(main())
