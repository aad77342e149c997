"""A node that checks signatures, as these tests need it."""

from typing import Any

from tests.conformance.wire import Identity
from tests.several import make_node

from tiergate.testing.node import RunningNode
from tiergate.testing.origins import ProcessOrigin

CLIENT = Identity("AKIDCONFORMANCE", "the/secret+of=clients")


def checking_node(origin: ProcessOrigin, *flags: str, memory_limit: str = "512MiB", **more: Any) -> RunningNode:
    """A node before `origin`, or several (see `tests.several`), that knows the keys of `CLIENT` and no others."""
    keys = {"TIERGATE_ACCESS_KEY_ID": CLIENT.access_key, "TIERGATE_SECRET_ACCESS_KEY": CLIENT.secret_key}
    return make_node(
        origin.endpoint,
        flags=flags,
        environment=keys,
        memory_limit=memory_limit,
        access_key=origin.access_key,
        secret_key=origin.secret_key,
        **more,
    )
