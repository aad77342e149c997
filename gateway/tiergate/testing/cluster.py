"""A whole cluster under test: etcd and several nodes, each a process tree of its own on loopback."""

import secrets
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from string import ascii_lowercase
from types import TracebackType
from typing import Any, Self

from tiergate.testing.etcdserver import EtcdServer
from tiergate.testing.node import DEADLINE_S, RunningNode


class RunningCluster:
    """Nodes `a`, `b`, `c`, ... in front of `origin`. A context manager: entering waits until they see each other.

    `nodes` holds them in this order, each to be stopped, killed, frozen and started as a node alone is; they keep their
    ports, so a client stays right.

    Args:
        origin: Endpoint URL of the origin.
        nodes: How many.
        etcd: Where they meet, under a name of their own; None: an etcd of their own.
        flags: Further flags of `serve` for each node.
        zones: The zone of each node; none by default.
        options: Further arguments of `RunningNode` for each node.
    """

    def __init__(
        self,
        origin: str,
        nodes: int = 3,
        *,
        etcd: EtcdServer | None = None,
        flags: Sequence[str] = (),
        zones: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        **options: Any,
    ) -> None:
        self.origin = origin
        self.etcd = etcd or EtcdServer()
        self._owns_etcd = etcd is None
        self._flags = tuple(flags)
        self._zones = tuple(zones)
        self._options = options
        self._environment = {"TIERGATE_CLUSTER_SECRET": secrets.token_hex(16)} | dict(environment or {})
        self._prefix = f"test-{uuid.uuid4().hex[:12]}"
        self._stack = ExitStack()
        self.names = ascii_lowercase[:nodes]
        self.nodes: list[RunningNode] = []

    def __enter__(self) -> Self:
        try:
            if self._owns_etcd:
                self._stack.enter_context(self.etcd)
            self.nodes = [self.make(name, self._zones[i] if self._zones else "") for i, name in enumerate(self.names)]
            self._enter_all()
            self.wait_members()
        except BaseException:  # `with` does not end what failed to begin, an interrupted test included.
            self._stack.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    @property
    def url(self) -> str:
        """What `--cluster` says."""
        return f"{self.etcd.scheme}://{','.join(self.etcd.endpoints)}/{self._prefix}"

    def make(self, name: str, zone: str = "", *, more: Sequence[str] = (), **options: Any) -> RunningNode:
        """One more member, to be entered by the caller. `more` flags than those of all; they come last."""
        flags = ["--cluster", self.url, "--node-name", name, "--advertise", "127.0.0.1:0", *self._flags, *more]
        if zone:
            flags += ["--zone", zone]
        settings: dict[str, Any] = {"flags": flags, "environment": self._environment, "keep_ports": True}
        return RunningNode(self.origin, **(settings | self._options | options))

    def client(self, index: int, **config: Any) -> Any:
        """A boto3 client of a node; see `RunningNode.client`."""
        return self.nodes[index].client(**config)

    def wait_members(self, names: str | None = None, deadline_s: float = DEADLINE_S) -> None:
        """Wait until each of these nodes is a member and sees just these as members; None: all."""
        names = self.names if names is None else names

        def together(status: dict[str, Any]) -> bool:
            cluster = status["cluster"]
            return bool(cluster["member"] and [each["node"] for each in cluster["nodes"]] == sorted(names))

        for name, node in zip(self.names, self.nodes, strict=True):
            if name in names:
                node.wait_status(f"{name} sees {names}", together, deadline_s)

    def wait_settled(self) -> None:
        """Wait until no node owes the origin anything: none of them did at two looks in a row, since what is owed may
        change its owner between the looks at one and at the next."""
        calm = 0
        while calm < 2:
            before = [node.status().get("writeback", {}).get("pending") for node in self.nodes]
            calm = calm + 1 if not any(before) and None not in before else 0
            for node in self.nodes:
                node.wait_settled()

    def _enter_all(self) -> None:
        with ThreadPoolExecutor(len(self.nodes)) as pool:
            starts = [pool.submit(node.__enter__) for node in self.nodes]
        for node, start in zip(self.nodes, starts, strict=True):
            if start.exception() is None:  # else it has cleaned up after itself
                self._stack.push(node)
        for start in starts:
            start.result()
