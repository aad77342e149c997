"""A node that checks signatures, as these tests need it."""

import shutil
from typing import Any

from tests.conformance.wire import Identity

from tiergate.testing.node import RunningNode
from tiergate.testing.origins import ProcessOrigin

CLIENT = Identity("AKIDCONFORMANCE", "the/secret+of=clients")


def checking_node(origin: ProcessOrigin, *flags: str, memory_limit: str = "512MiB", **more: Any) -> RunningNode:
    """A node before `origin` that knows the keys of `CLIENT` and no others."""
    keys = {"TIERGATE_ACCESS_KEY_ID": CLIENT.access_key, "TIERGATE_SECRET_ACCESS_KEY": CLIENT.secret_key}
    return RunningNode(
        origin.endpoint,
        flags=flags,
        environment=keys,
        memory_limit=memory_limit,
        access_key=origin.access_key,
        secret_key=origin.secret_key,
        **more,
    )


def restart_cold(node: RunningNode) -> None:
    """Write everything back, then go on with fresh memory: all that was held is the origin's alone."""
    node.wait_settled()
    node.stop()
    for entry in node.memory_dir.iterdir():
        if entry.is_dir():
            shutil.rmtree(entry)
        else:
            entry.unlink()
    node.start()
