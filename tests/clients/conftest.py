"""Stock clients against one node. Each test writes through a client and reads from each place that `readers` gives."""

import os
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol

import pytest
from tests.clients.support import Record, served
from tests.conformance.gateway import CLIENT, checking_node

from tiergate.testing.node import RunningNode
from tiergate.testing.origins import MotoOrigin

BUCKET = "clients"

Environment = Callable[[], dict[str, str]]
Readers = Callable[[], Iterator[RunningNode]]
Aside = Callable[[], AbstractContextManager[Any]]

COMMAND_TIMEOUT_S = 90


class Run(Protocol):
    """Runs a program, found beside this Python if its name has no folder; what it wrote to stdout, or to stderr if it
    is meant to fail."""

    def __call__(
        self,
        program: str | Path,
        *words: str,
        status: int = 0,
        stdin: bytes = b"",
        timeout_s: float = COMMAND_TIMEOUT_S,
    ) -> bytes: ...


HERE = Path(__file__).parent
RECORD = pytest.StashKey[Record]()
LAST = "test_support.py"
"""Its tests look at what all others did."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    record = config.stash.setdefault(RECORD, Record())
    for item in items:
        mark = item.get_closest_marker("client")
        if mark is not None and item.path.parent == HERE:
            record.planned[mark.args[0]].add(item.nodeid)
    if not set(HERE.glob("test_*.py")) <= {item.path for item in items}:
        # A client's other tests may be in a file that is not run now.
        for planned in record.planned.values():
            planned.clear()
    items.sort(key=lambda item: item.path == HERE / LAST)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.when == "call" and report.passed and RECORD in item.config.stash:
        item.config.stash[RECORD].passed.add(item.nodeid)
    return report


@pytest.fixture(scope="session")
def record(pytestconfig: pytest.Config) -> Record:
    return pytestconfig.stash[RECORD]


@pytest.fixture(scope="module")
def flags() -> tuple[str, ...]:
    """Further flags of the node; a module may have its own."""
    return ()


@pytest.fixture(scope="module")
def node(flags: tuple[str, ...]) -> Iterator[RunningNode]:
    with MotoOrigin() as origin:
        client = origin.client()
        client.create_bucket(Bucket=BUCKET)
        client.close()
        with checking_node(origin, "--marker-quiet", "1s", "--marker-hold", "1s", *flags) as running:
            yield running
            assert running.metric("tiergate_http_broken_invariants_total") == 0, running.log_tail()


@pytest.fixture
def prefix(request: pytest.FixtureRequest) -> str:
    return f"t{sha256(request.node.nodeid.encode()).hexdigest()[:10]}"


@pytest.fixture
def environment(node: RunningNode, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Environment:
    """Sets what clients read from the environment; call it again after the node was started anew."""

    def apply() -> dict[str, str]:
        values = {
            "AWS_ENDPOINT_URL": node.endpoint,
            "AWS_ACCESS_KEY_ID": CLIENT.access_key,
            "AWS_SECRET_ACCESS_KEY": CLIENT.secret_key,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_REGION": "us-east-1",
            "AWS_CONFIG_FILE": str(tmp_path / "no-config"),
            "AWS_EC2_METADATA_DISABLED": "true",
        }
        for name, value in values.items():
            monkeypatch.setenv(name, value)
        return dict(os.environ) | values

    apply()
    return apply


class Watch:
    """Notes in the record what the node serves for a client from `begin` to `end`."""

    def __init__(self, record: Record, client: str, node: RunningNode) -> None:
        self._record, self._client, self._node = record, client, node
        self.begin()

    def begin(self) -> None:
        self._before = served(self._node)

    def end(self) -> None:
        self._record.add(self._client, self._before, served(self._node))


@pytest.fixture(autouse=True)
def watch(request: pytest.FixtureRequest, record: Record) -> Iterator[Watch | None]:
    """Looks at the node while a test drives a client: the one that its mark names."""
    mark = request.node.get_closest_marker("client")
    if mark is None:
        yield None
        return
    found = Watch(record, mark.args[0], request.getfixturevalue("node"))
    yield found
    found.end()


@pytest.fixture
def aside(node: RunningNode, watch: Watch) -> Aside:
    """A boto3 client whose requests are not those of the client under test."""

    @contextmanager
    def client() -> Iterator[Any]:
        watch.end()
        yield node.client()
        watch.begin()

    return client


@pytest.fixture
def readers(node: RunningNode, environment: Environment, watch: Watch) -> Readers:
    """The places where all that a test wrote must read the same, each in turn: where it was written; the same node
    after all its processes were killed; a node whose memory is empty, which has everything from the origin. The
    environment names the place at hand."""

    def places() -> Iterator[RunningNode]:
        yield node
        watch.end()
        node.kill9()
        node.start()
        watch.begin()
        environment()
        yield node
        watch.end()
        node.restart_cold()
        watch.begin()
        environment()
        yield node

    return places


@pytest.fixture
def run(environment: Environment) -> Run:
    """Runs a program in the environment that names the place at hand."""

    def call(
        program: str | Path, *words: str, status: int = 0, stdin: bytes = b"", timeout_s: float = COMMAND_TIMEOUT_S
    ) -> bytes:
        command = [str(Path(sys.executable).parent / program), *words]
        done = subprocess.run(
            command, env=environment(), input=stdin, capture_output=True, timeout=timeout_s, check=False
        )
        assert done.returncode == status, done.stderr.decode("utf-8", "replace")[-4000:]
        return done.stderr if status else done.stdout

    return call
