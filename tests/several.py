"""Several nodes in the place of one, for tests that know one: what is written through one is read through another.

TIERGATE_TEST_NODES says how many; "3-1" are three, of which one died before the first request.
"""

import os
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, Self

import pytest

from tiergate.errors import ConfigError
from tiergate.testing.etcd import EtcdServer, etcd_path
from tiergate.testing.front import Front
from tiergate.testing.node import DEADLINE_S, RunningNode, Victim
from tiergate.testing.rules import Seen

VARIABLE = "TIERGATE_TEST_NODES"
SECRET = {"TIERGATE_CLUSTER_SECRET": "what the peers of these tests know each other by"}
LEASE_S = 5


def nodes_asked() -> tuple[int, int]:
    """How many nodes there are to be, and how many of them dead."""
    count, _, dead = os.environ.get(VARIABLE, "1").partition("-")
    return int(count), int(dead or 0)


def one_node(why: str) -> pytest.MarkDecorator:
    """The mark of a test that makes sense for a single node only."""
    return pytest.mark.skipif(nodes_asked() != (1, 0), reason=why)


def memory_ack() -> str:
    """What is said of a write that is in memory under the default rule: two copies, as far as there are nodes."""
    count, dead = nodes_asked()
    return f"memory:{min(count - dead, 2)}"


def make_node(origin: str, **options: Any) -> RunningNode:
    """A `RunningNode`, or what stands for as many of them as are asked for."""
    count, dead = nodes_asked()
    if count == 1:
        return RunningNode(origin, **options)
    try:
        etcd_path()
    except ConfigError as error:
        pytest.skip(str(error))
    return SeveralNodes(origin, count, dead, **options)


class SeveralNodes(RunningNode):
    """The first of several nodes; what is asked of it is done to all, and its endpoint leads to all: what changes
    something to the first one, parts of uploads to each in turn, all else to the second."""

    def __init__(self, origin: str, count: int, dead_count: int, **options: Any) -> None:
        self._count = count
        self._dead_count = dead_count
        self._origin_url = origin
        self._stack = ExitStack()
        self._etcd = EtcdServer()
        # Where clients shall find the node is where the front is.
        flags = list(options.pop("flags", ()))
        listen = "127.0.0.1:0"
        if "--listen" in flags:
            at = flags.index("--listen")
            listen = flags[at + 1]
            del flags[at : at + 2]
        host, _, port = listen.rpartition(":")
        options["flags"] = flags
        self._front = Front(self._route, host, int(port))
        self._options = options
        self._others: list[RunningNode] = []
        self._endpoints: list[str] = []
        # Its flags name etcd, which does not run yet.
        super().__init__(origin, **options)

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.enter_context(self._etcd)
            stack.enter_context(self._front)
            super().__init__(self._origin_url, **self._member(0))
            super().__enter__()
            stack.callback(super().__exit__)
            for number in range(1, self._count):
                other = RunningNode(self._origin_url, **self._member(number))
                self._others.append(stack.enter_context(other))
            for other in self._others[self._count - 1 - self._dead_count :]:
                other.kill9()
                self._others.remove(other)
            self._stack = stack.pop_all()
        self._lead()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        super().__exit__()

    def _member(self, number: int) -> dict[str, Any]:
        member = ["--cluster", f"etcd://{','.join(self._etcd.endpoints)}", "--node-name", f"n{number}"]
        member += ["--advertise", "127.0.0.1:0", "--lease", f"{LEASE_S}s"]
        environment = dict(self._options.get("environment") or {}) | SECRET
        return self._options | {"flags": (*self._options["flags"], *member), "environment": environment}

    # -- the way in
    def _lead(self) -> None:
        """Have the endpoint lead to the nodes as they run now."""
        if self.endpoint != self._front.endpoint:
            self._endpoints = [self.endpoint, *(other.endpoint for other in self._others)]
            self.endpoint = self._front.endpoint

    def _route(self, seen: Seen) -> str:
        if seen.operation in ("UploadPart", "UploadPartCopy"):
            number = seen.query.get("partNumber", "")
            return self._endpoints[int(number) % len(self._endpoints) if number.isdecimal() else 0]
        reads = seen.method in ("GET", "HEAD") or seen.operation == "CompleteMultipartUpload"
        return self._endpoints[1 if reads else 0]

    # -- all at once
    def start(self) -> None:
        super().start()
        for other in self._others:
            other.start()
        if self._endpoints:
            self._lead()

    def restart(self) -> None:
        self.kill9()
        self.start()

    def stop(self, deadline_s: float = DEADLINE_S) -> int:
        return max([super().stop(deadline_s), *(other.stop(deadline_s) for other in self._others)])

    def wipe(self) -> None:
        """All memory, and the directory, too."""
        super().wipe()
        for other in self._others:
            other.wipe()
        self._etcd.restore(None)

    def kill9(self, which: Victim = "all", index: int = 0) -> None:
        for other in self._others:
            if other.is_running:
                other.kill9(which, index)
        if self.is_running:
            super().kill9(which, index)

    def status(self) -> dict[str, Any]:
        """Numbers are sums, lists are joined; all else is the first node's."""
        merged = super().status()
        for other in self._others:
            merged = _merged(merged, other.status())
        return merged

    def metrics(self) -> str:
        """Each sample is the sum of those of the nodes."""
        return _summed([super().metrics(), *(other.metrics() for other in self._others)])

    def retry(self, bucket: str | None = None, key: str | None = None) -> int:
        return super().retry(bucket, key) + sum(other.retry(bucket, key) for other in self._others)

    def log_tail(self, from_bytes: int = 0, limit_bytes: int = 20_000) -> str:
        return "\n".join([super().log_tail(from_bytes, limit_bytes), *(other.log_tail() for other in self._others)])


def _summed(texts: Sequence[str]) -> str:
    samples: dict[str, float] = {}
    for line in (line for text in texts for line in text.splitlines() if not line.startswith("#")):
        series, _, value = line.rpartition(" ")
        samples[series] = samples.get(series, 0.0) + float(value)
    return "\n".join(f"{series} {value!r}" for series, value in samples.items())


def _merged(one: Any, other: Any) -> Any:
    if isinstance(one, dict) and isinstance(other, dict):
        return {name: _merged(value, other.get(name)) for name, value in one.items()}
    if isinstance(one, list) and isinstance(other, list):
        return [*one, *other]
    if isinstance(one, int | float) and isinstance(other, int | float) and not isinstance(one, bool):
        return one + other
    return one
