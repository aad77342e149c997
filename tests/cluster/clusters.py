"""Nodes, etcd and an origin, each at an address of its own in a network that can be broken."""

import itertools
import random
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from tiergate.testing.endstate import LAYOUT, End
from tiergate.testing.etcd import EtcdServer
from tiergate.testing.faults import FaultyOrigin
from tiergate.testing.journal import Journal
from tiergate.testing.netns import Network, Place
from tiergate.testing.node import PROGRAM, RunningNode
from tiergate.testing.origins import ProcessOrigin, SeaweedOrigin
from tiergate.testing.players import Player
from tiergate.testing.tcprelay import TcpRelay
from tiergate.testing.training import Trainer

BUCKET = "cluster"
NUMBERS = itertools.count()
"""Of buckets: a seed may be given for several tests of a session, which have one origin."""

BRIEF_NODE = Path(__file__).parent / "brief_node.py"
PORTS = (9000, 9001)
PEER_PORT = 9002
LEASE_S = 3
"""The shortest: most tests wait for one to end."""

LONG_LEASE_S = 20
"""Of tests in which none must end, on however slow a machine."""

MEMORY = "96MiB"
CLIENT = {"TIERGATE_ACCESS_KEY_ID": "AKIDCLUSTER", "TIERGATE_SECRET_ACCESS_KEY": "the-secret-of-clients"}
SECRET = {"TIERGATE_CLUSTER_SECRET": "what the peers of these tests know each other by"}
FLAGS = (
    *("--origin-attempts", "2", "--origin-backoff", "20ms", "--origin-backoff-max", "200ms"),
    *("--marker-quiet", "1s", "--marker-hold", "1s"),
)
PATIENT_S = 90.0
LONG_COUNT = 10_000
"""Saves of a job that goes on until it is told to end."""

TRIES_COUNT = 8
"""Of clients that try again as boto3's standard mode does; three, its default, last for two seconds only."""


@dataclass
class Standing:
    """What all clusters of a session have in common: `origin` is the real one, `proxy` what nodes see of it, at the
    address `proxy_host` of `network`; etcd is at `etcd_host`."""

    network: Network
    origin: ProcessOrigin
    proxy: FaultyOrigin
    proxy_host: str
    etcd_host: str


@contextmanager
def standing_in(network: Network) -> Iterator[Standing]:
    """An origin in a network, and what stands before it.

    moto would not do: it says of all uploads that they began in 2010, so none of those whose id was lost can be told.
    """
    network.outside()  # the clients'
    proxy_host, etcd_host = network.outside(), network.outside()
    with SeaweedOrigin() as origin, FaultyOrigin(origin.endpoint, proxy_host) as proxy:
        yield Standing(network, origin, proxy, proxy_host, etcd_host)


@dataclass
class Cluster:
    """One cluster of nodes `n0`, `n1`, …, all in zones of their own. A context manager.

    Args:
        copies_count: On how many nodes a write is before it is acknowledged.
        alone: Nodes without a cluster, for tests of this harness.
        memory_limits: Of nodes that have another one than `memory_limit`.
        environments: Further variables of single nodes.
        tries_count: How often clients try a request at most.
        etcd_delay_s: By how much longer the way to etcd is, in each direction.
        brief: Whether what nodes promise to each other is over within a test (`brief_node.BRIEF`).
        prefix: What the prefix `once/` of the bucket is declared as, in the form of `--prefix`.
    """

    standing: Standing
    seed: str
    nodes_count: int = 3
    members_count: int = 1
    copies_count: int = 2
    lease_s: int = LEASE_S
    flags: Sequence[str] = ()
    memory_limit: str = MEMORY
    alone: bool = False
    memory_limits: Mapping[str, str] = field(default_factory=dict[str, str])
    environments: Mapping[str, Mapping[str, str]] = field(default_factory=dict[str, Mapping[str, str]])
    tries_count: int = TRIES_COUNT
    etcd_delay_s: float = 0.0
    brief: bool = False
    prefix: str = ""
    nodes: dict[str, RunningNode] = field(default_factory=dict)
    places: dict[str, Place] = field(default_factory=dict)
    bucket: str = ""

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.journal = Journal(tries_count=self.tries_count)
        self._stack = ExitStack()
        self._etcd: EtcdServer | None = None
        self._endpoints: list[str] = []

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            network = self.standing.network
            stack.callback(network.heal)
            self.bucket = f"{BUCKET}-{self.random.getrandbits(40):010x}-{next(NUMBERS)}"
            self.direct = self.standing.origin.client()
            stack.callback(self.direct.close)
            self.direct.create_bucket(Bucket=self.bucket)
            if not self.alone:
                self._etcd = stack.enter_context(EtcdServer(self.members_count, host=self.standing.etcd_host))
                self._endpoints = self._ways_to_etcd(stack)
            network.heal()
            names = [f"n{index}" for index in range(self.nodes_count)]
            self.nodes = {name: self._make(stack, name) for name in names}
            with ThreadPoolExecutor(len(names)) as pool:
                starts = {name: pool.submit(node.__enter__) for name, node in self.nodes.items()}
            for name, start in starts.items():
                if start.exception() is None:  # else it has cleaned up after itself
                    stack.push(self.nodes[name])
            for start in starts.values():
                start.result()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _ways_to_etcd(self, stack: ExitStack) -> list[str]:
        if not self.etcd_delay_s:
            return self.etcd.endpoints
        host = self.standing.etcd_host
        members = [endpoint.rpartition(":") for endpoint in self.etcd.endpoints]
        relays = [TcpRelay((to, int(port)), self.etcd_delay_s, host) for to, _, port in members]
        return [stack.enter_context(relay).address for relay in relays]

    def _make(self, stack: ExitStack, name: str) -> RunningNode:
        network = self.standing.network
        place = self.places[name] = network.place(name)
        stack.callback(network.leave, place)
        return RunningNode(
            self.standing.proxy.endpoint,
            flags=(*FLAGS, *self._member_flags(name, place), *self._prefix_flags(), *self.flags),
            memory_limit=self.memory_limits.get(name, self.memory_limit),
            environment=CLIENT | ({} if self.alone else SECRET) | dict(self.environments.get(name, {})),
            access_key=self.standing.origin.access_key,
            secret_key=self.standing.origin.secret_key,
            address=place.address,
            ports=PORTS,
            enter=place.enter,
            program=(str(BRIEF_NODE),) if self.brief else PROGRAM,
        )

    def _member_flags(self, name: str, place: Place) -> list[str]:
        if self.alone:
            return []
        flags = ["--cluster", f"etcd://{','.join(self._endpoints)}", "--node-name", name, "--zone", f"z{name}"]
        flags += ["--advertise", f"{place.address}:{PEER_PORT}", "--lease", f"{self.lease_s}s"]
        return [*flags, "--replicas", str(self.copies_count)]

    def _prefix_flags(self) -> list[str]:
        return ["--prefix", f"{{uri = 's3://{self.bucket}/once/', {self.prefix}}}"] if self.prefix else []

    # -- parts
    @property
    def etcd(self) -> EtcdServer:
        """Its etcd."""
        assert self._etcd is not None
        return self._etcd

    def node(self, name: str) -> RunningNode:
        """A node by name."""
        return self.nodes[name]

    def client(self, name: str, **config: Any) -> Any:
        """A client of a node that tries once."""
        return self.nodes[name].client(read_timeout=20, **config)

    def patient(self, name: str) -> Any:
        """A client of a node that tries again as boto3's standard mode does."""
        return self.client(name, retries={"mode": "standard", "total_max_attempts": self.tries_count})

    def trainer(self, *names: str, **options: Any) -> Trainer:
        """A job whose ranks use these nodes, or all."""
        clients = [self.patient(name) for name in names or self.nodes]
        return Trainer(clients, self.bucket, self.journal, f"{self.seed} {len(self.journal.keys)}", **options)

    @contextmanager
    def training(self, *names: str, **options: Any) -> Iterator[Trainer]:
        """A job that saves again and again meanwhile."""
        over = threading.Event()
        trainer = self.trainer(*names, **options)
        with ThreadPoolExecutor(1) as pool:
            training = pool.submit(trainer.train, LONG_COUNT, over.is_set)
            try:
                yield trainer
            finally:
                over.set()
            training.result()

    def wait_saved(self, trainer: Trainer, more_count: int = 1) -> None:
        """Wait until a job has saved so many more checkpoints."""
        before = trainer.saves_count
        one = next(iter(self.nodes.values()))
        one.wait_until("training goes on", lambda: trainer.saves_count >= before + more_count, PATIENT_S)

    def is_member(self, name: str) -> bool:
        """Whether a node is a member for all others."""
        return name in self.epochs

    @property
    def epochs(self) -> dict[str, int]:
        """The epoch of each node that is a member now."""
        start = LAYOUT + b"n/"
        return {each.key[len(start) :].decode(): each.create_revision for each in self.etcd.rows(start)}

    def wait_gone(self, name: str) -> None:
        """Wait until a node's membership is over for all others."""
        other = next(node for each, node in self.nodes.items() if each != name and node.is_running)
        other.wait_until(f"{name} is gone", lambda: not self.is_member(name), PATIENT_S)

    def player(self, number: int, **options: Any) -> Player:
        """A random client of all nodes that tries once."""
        clients = [self.client(name) for name in self.nodes]
        return Player(clients, self.bucket, self.journal, f"{self.seed} {number}", **options)

    # -- faults
    def cut_from_etcd(self, *names: str) -> None:
        """Nodes and etcd hear nothing of each other any more."""
        for name in names:
            self.standing.network.cut(self.places[name], self.standing.etcd_host)

    def cut_from_origin(self, *names: str) -> None:
        """Nodes and the origin hear nothing of each other any more."""
        for name in names:
            self.standing.network.cut(self.places[name], self.standing.proxy_host)

    def cut_apart(self, one: str, *others: str) -> None:
        """A node and these others hear nothing of each other any more."""
        self.standing.network.cut(self.places[one], *(self.places[other] for other in others))

    # -- judging
    def end(self, *, but: Sequence[str] = (), **options: Any) -> None:
        """What must hold in the end (`tiergate.testing.endstate`) holds, of all nodes `but` these, which are dead.

        Raises:
            AssertionError: it does not; a line for each thing that is wrong.
        """
        alive = {name: node for name, node in self.nodes.items() if name not in but}
        end = End(
            self.journal,
            self.bucket,
            alive,
            self.direct,
            self._etcd,
            lambda: self.standing.proxy.requests,
            swept=self.alone or self.brief,
            **options,
        )
        problems = end.problems()
        least = {f"memory:{count}" for count in range(1, 1 if self.alone else self.copies_count)}
        problems += [f"acknowledged at {rule}" for rule in sorted(least & set(self.journal.rules))]
        if problems:
            raise AssertionError("\n".join([*problems, f"TIERGATE_TEST_SEED={self.seed}"]))
