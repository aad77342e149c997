"""A whole node under test: `tiergate serve` as a process tree of its own, on free loopback ports.

It can be killed in every way a machine knows and started again on the memory it left behind. Whatever happens, leaving
the context ends all of its processes and removes its memory.
"""

import json
import os
import re
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, Self, TypeVar
from urllib.parse import urlencode
from urllib.request import Request, urlopen

import boto3
from botocore.config import Config

import tiergate
from tiergate.clock import SystemClock
from tiergate.testing.processes import freeze_process

T = TypeVar("T")
Victim = Literal["all", "parent", "worker", "background"]
Part = Literal["all", "worker", "background"]

PROGRAM = ("-m", "tiergate")
READY_TIMEOUT_S = 60.0
DEADLINE_S = 30.0
"""How long a test waits at most for something that must happen."""

ADMIN_TIMEOUT_S = 10.0
_POLL_S = 0.02
_READY = re.compile(r"tiergate ready listen=(\S+) admin=(\S+) (?:peers=(\S+) )?(?:daemon=(\S+) )?memory=.+ pid=(\d+)")
_CHILD = re.compile(rb"\0_child\0(worker|background)-(\d+)\0")
_SHM = Path("/dev/shm")


class NodeEndedError(Exception):
    """The node is not running, and nobody asked for that. The message ends with its log."""


class RunningNode:
    """A node in front of `origin`. A context manager: entering waits until it is ready.

    Args:
        origin: Endpoint URL of the origin, whose keys are `access_key` and `secret_key`.
        memory_limit: As `--memory-limit`.
        workers: Worker processes.
        flags: Further flags of `serve`.
        environment: Further variables, TIERGATE_ACCESS_KEY_ID and TIERGATE_SECRET_ACCESS_KEY among them: clients
            that `client` makes sign with those.
        memory_dir: A folder that is the caller's to remove; by default one of its own, on tmpfs where there is one.
        keep_ports: Start anew on the ports that it got first.
        address: The IP address it listens at, both for S3 and the admin.
        ports: The ports for S3 and the admin; 0: the kernel gives another one at each start.
        enter: What comes before its command, to run it elsewhere (`tiergate.testing.netns.Place.enter`). It must
            become the command, not start it.
        program: What the interpreter runs as `tiergate`.
    """

    def __init__(
        self,
        origin: str,
        *,
        memory_limit: str = "256MiB",
        workers: int = 1,
        flags: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        memory_dir: Path | None = None,
        keep_ports: bool = False,
        access_key: str = "test",
        secret_key: str = "test",
        address: str = "127.0.0.1",
        ports: tuple[int, int] = (0, 0),
        enter: Sequence[str] = (),
        program: Sequence[str] = PROGRAM,
    ) -> None:
        self.origin = origin
        self._enter = tuple(enter)
        self._program = tuple(program)
        self.flags = tuple(flags)
        self._memory_limit = memory_limit
        self._workers_count = workers
        self._environment = dict(environment or {})
        self._origin_keys = (access_key, secret_key)
        self._given_memory = memory_dir
        self._clock = SystemClock()
        self._process: subprocess.Popen[str] | None = None
        self._clients: list[Any] = []
        self._folder = Path()
        self.memory_dir = Path()
        self.endpoint = ""
        """The URL that speaks S3. Another one after each start, unless it keeps its ports or they were given."""
        self.admin = ""
        """The URL of the admin address."""
        self.peers = ""
        """host:port that speaks to peers; empty for a node alone."""
        self.daemon = ""
        """The URL that speaks the memory daemon's protocol; empty where none does."""
        self._keep_ports = keep_ports
        self._addresses: tuple[str, ...] = (
            "--listen",
            f"{address}:{ports[0]}",
            "--admin-listen",
            f"{address}:{ports[1]}",
        )
        self._kept: tuple[str, ...] = ()

    # -- life
    def __enter__(self) -> Self:
        self._folder = Path(tempfile.mkdtemp(prefix="tiergate-node-"))
        place = _SHM if os.access(_SHM, os.W_OK) else None
        self.memory_dir = self._given_memory or Path(tempfile.mkdtemp(prefix="tiergate-node-", dir=place))
        try:
            self.start()
        except BaseException:  # `with` does not end what failed to begin, an interrupted test included.
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._end()
        finally:
            if self._given_memory is None:
                shutil.rmtree(self.memory_dir, ignore_errors=True)
            shutil.rmtree(self._folder, ignore_errors=True)

    def start(self) -> None:
        """Start it on its memory folder and wait until it is ready.

        Raises:
            NodeEndedError: it does not start.
            TimeoutError: it does not get ready.
        """
        if self._process is not None:
            raise RuntimeError("the node runs already")
        command = [*self._enter, sys.executable, *self._program, "serve"]
        command += ["--origin", self.origin]
        command += ["--memory-dir", str(self.memory_dir), "--memory-limit", self._memory_limit]
        command += ["--workers", str(self._workers_count), *self._addresses, *self.flags, *self._kept]
        with self._log_path.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=self._folder,
                env=self._full_environment(),
                text=True,
            )
        self._wait_ready(self._process)

    def restart(self) -> None:
        """Start it again on the same memory, after it was killed or stopped."""
        self._end()
        self.start()

    def restart_cold(self) -> None:
        """Have everything written back, then go on with fresh memory: all that was held is the origin's alone."""
        self.wait_settled()
        self.stop()
        self.wipe()
        self.start()

    def wipe(self) -> None:
        """Empty the memory folder of a node that was ended, as the loss of its machine does."""
        if self._process is not None:
            raise RuntimeError("the node runs")
        for entry in self.memory_dir.iterdir():
            if entry.is_dir():
                shutil.rmtree(entry)
            else:
                entry.unlink()

    def stop(self, deadline_s: float = DEADLINE_S) -> int:
        """SIGTERM, and its exit status (negative: the signal that ended it).

        Raises:
            TimeoutError: it does not end; it is killed then.
        """
        process = self._running()
        process.terminate()
        try:
            status = process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            tail = self.log_tail()
            self._end()
            raise TimeoutError(f"the node does not stop: {tail}") from None
        self._end()
        return status

    def kill9(self, which: Victim = "all", index: int = 0) -> None:
        """SIGKILL. `all` and `parent` return once no process of the node is left (children die with their parent);
        `worker` and `background` once another one is in the place of the one killed.

        Raises:
            TimeoutError: a child outlives its parent, or is not started again.
        """
        process = self._running()
        if which in ("worker", "background"):
            name = f"{which}-{index}"
            old = self.children[name]
            os.kill(old, signal.SIGKILL)
            self.wait_until(f"another {name}", lambda: self.children.get(name, old) != old)
            return
        self._kill_tree(process, children_first=which == "all")
        self._end()

    def freeze(self, which: Part = "all", index: int = 0) -> None:
        """SIGSTOP: its connections stay open, and silent. Until `thaw`."""
        self._signal(which, index, signal.SIGSTOP)

    def thaw(self, which: Part = "all", index: int = 0) -> None:
        """SIGCONT."""
        self._signal(which, index, signal.SIGCONT)

    def _signal(self, which: Part, index: int, number: signal.Signals) -> None:
        parent, children = self._running().pid, self.children
        for pid in [parent, *children.values()] if which == "all" else [children[f"{which}-{index}"]]:
            os.kill(pid, number)

    @property
    def is_running(self) -> bool:
        """Whether it was started, and neither ended nor died."""
        return self._process is not None and self._process.poll() is None

    # -- what it says
    def client(self, **config: Any) -> Any:
        """A boto3 client in path style that tries once; `config` are further arguments of botocore's Config. It is
        closed with the node."""
        settings: dict[str, Any] = {
            "s3": {"addressing_style": "path"},
            "retries": {"total_max_attempts": 1},
            "connect_timeout": 5,
            "read_timeout": 60,
        }
        client = boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            aws_access_key_id=self._environment.get("TIERGATE_ACCESS_KEY_ID", "client"),
            aws_secret_access_key=self._environment.get("TIERGATE_SECRET_ACCESS_KEY", "client-secret"),
            region_name="us-east-1",
            config=Config(**(settings | config)),
        )
        self._clients.append(client)
        return client

    def status(self) -> dict[str, Any]:
        """What /status says."""
        return self._ask("GET", "/status")

    def checkpoints(self, uri: str = "") -> dict[str, Any]:
        """What GET /checkpoints answers, for a place or for all."""
        return self._ask("GET", f"/checkpoints?{urlencode({'uri': uri} if uri else {})}")

    def retry(self, bucket: str | None = None, key: str | None = None) -> int:
        """Release quarantined writes, all or those of a bucket or key; how many there were."""
        named = {name: value for name, value in (("bucket", bucket), ("key", key)) if value is not None}
        released: int = self._ask("POST", f"/retry?{urlencode(named)}")["released"]
        return released

    def promote(self, bucket: str, prefix: str = "") -> int:
        """Let what stays in memory by policy go to the origin; how many writes that are."""
        query = urlencode({"bucket": bucket, "prefix": prefix})
        promoted: int = self._ask("POST", f"/promote?{query}")["promoted"]
        return promoted

    def pin(self, bucket: str, prefix: str) -> int:
        """Keep what is under a prefix in memory; how many bytes that is now."""
        size_bytes: int = self._ask("POST", f"/pin?{urlencode({'bucket': bucket, 'prefix': prefix})}")["bytes"]
        return size_bytes

    def unpin(self, bucket: str, prefix: str) -> None:
        """Let a pinned prefix be evicted again."""
        self._ask("POST", f"/unpin?{urlencode({'bucket': bucket, 'prefix': prefix})}")

    def metrics(self) -> str:
        """What /metrics says."""
        with urlopen(f"{self.admin}/metrics", timeout=ADMIN_TIMEOUT_S) as answer:
            text: str = answer.read().decode()
            return text

    def metric(self, name: str) -> float:
        """The sum of a metric over its labels; 0 if it has no sample."""
        lines = (line for line in self.metrics().splitlines() if not line.startswith("#"))
        return sum(float(line.rpartition(" ")[2]) for line in lines if re.split(r"[{ ]", line, maxsplit=1)[0] == name)

    def wait_until(self, what: str, probe: Callable[[], T], deadline_s: float = DEADLINE_S) -> T:
        """The first true value of `probe`.

        Raises:
            TimeoutError: there is none in time.
            NodeEndedError: the node died meanwhile.
        """
        end_s = self._clock.monotonic_s() + deadline_s
        while not (value := probe()):
            if self._clock.monotonic_s() > end_s:
                raise TimeoutError(f"never: {what}; the last value was {value!r}\n{self.log_tail()}")
            self._pause()
        return value

    def wait_status(
        self, what: str, holds: Callable[[dict[str, Any]], object], deadline_s: float = DEADLINE_S
    ) -> dict[str, Any]:
        """The first status that `holds` of.

        Raises:
            TimeoutError: there is none in time; the message shows the last one.
        """
        last: dict[str, Any] = {}

        def probe() -> bool:
            last.clear()
            last.update(self.status())
            return bool(holds(last))

        try:
            self.wait_until(what, probe, deadline_s)
        except TimeoutError as error:
            raise TimeoutError(f"{what}: {json.dumps(last, indent=1)}") from error
        return last

    def wait_settled(self, deadline_s: float = DEADLINE_S) -> dict[str, Any]:
        """Wait until the origin is owed nothing and nothing is on its way; the status then."""

        def settled(status: dict[str, Any]) -> bool:
            writeback = status.get("writeback", {})
            return bool(writeback.get("pending") == 0 and writeback["in_flight"] == 0)

        return self.wait_status("settled", settled, deadline_s)

    @property
    def log(self) -> str:
        """All it has logged since it was entered."""
        return self._log_path.read_text("utf-8", "replace")

    def log_tail(self, from_bytes: int = 0, limit_bytes: int = 20_000) -> str:
        """The end of its log, of what came after `from_bytes`."""
        if not self._log_path.exists():
            return ""
        return self._log_path.read_bytes()[from_bytes:][-limit_bytes:].decode("utf-8", "replace")

    @property
    def log_bytes(self) -> int:
        """How long the log is now."""
        return self._log_path.stat().st_size

    # -- inside
    @property
    def _log_path(self) -> Path:
        return self._folder / "log"

    def _full_environment(self) -> dict[str, str]:
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("AWS_", "TIERGATE_", "PYTHONPATH"))
        }
        source = str(Path(tiergate.__file__).parent.parent)
        keys = {
            "AWS_ACCESS_KEY_ID": self._origin_keys[0],
            "AWS_SECRET_ACCESS_KEY": self._origin_keys[1],
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_EC2_METADATA_DISABLED": "true",
            "PYTHONPATH": source,
        }
        return kept | keys | self._environment

    def _wait_ready(self, process: "subprocess.Popen[str]") -> None:
        assert process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            if not selector.select(READY_TIMEOUT_S):
                raise TimeoutError(f"the node is not ready: {self.log_tail()}")
        found = _READY.fullmatch(process.stdout.readline().rstrip("\n"))
        if found is None:
            raise NodeEndedError(f"the node did not start (status {process.wait()}): {self.log_tail()}")
        self.endpoint, self.admin, self.peers, self.daemon = found[1], found[2], found[3] or "", found[4] or ""
        if self._keep_ports:
            listen, admin = (url.removeprefix("http://") for url in (self.endpoint, self.admin))
            self._kept = ("--listen", listen, "--admin-listen", admin)
            if self.peers:
                self._kept += ("--advertise", self.peers)
            if self.daemon:
                self._kept += ("--daemon-listen", self.daemon.removeprefix("http://"))

    def _running(self) -> "subprocess.Popen[str]":
        if self._process is None:
            raise NodeEndedError("the node was ended")
        status = self._process.poll()
        if status is not None:
            raise NodeEndedError(f"the node ended with {status}: {self.log_tail()}")
        return self._process

    def _pause(self) -> None:
        try:
            self._running().wait(_POLL_S)
        except subprocess.TimeoutExpired:
            return
        self._running()

    @property
    def children(self) -> dict[str, int]:
        """Process ids of its children by name (`worker-0`, `background-0`), of those that run."""
        return _children(self._running().pid)

    def _ask(self, method: str, path: str) -> dict[str, Any]:
        with urlopen(Request(f"{self.admin}{path}", method=method), timeout=ADMIN_TIMEOUT_S) as answer:
            document: dict[str, Any] = json.load(answer)
            return document

    def _end(self) -> None:
        """Kill what still runs. Children are told of their parent's death by the kernel."""
        for client in self._clients:
            client.close()
        self._clients.clear()
        process, self._process = self._process, None
        if process is None:
            return
        try:
            if process.poll() is None:
                self._kill_tree(process, children_first=True)
        finally:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()

    def _kill_tree(self, process: "subprocess.Popen[str]", children_first: bool) -> None:
        """SIGKILL to the parent, to its children before it or not at all; returns when all of them are gone.

        The parent is stopped first: one that still ran would start another child for each that dies.
        """
        freeze_process(process)
        pidfds: list[int] = []
        try:
            for pid in _child_pids(process.pid):
                pidfds.append(os.pidfd_open(pid))
            if children_first:
                for pidfd in pidfds:
                    with suppress(ProcessLookupError):
                        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            process.kill()
            process.wait()
            for pidfd in pidfds:
                _wait_gone(pidfd)
        finally:
            for pidfd in pidfds:
                os.close(pidfd)


def _child_pids(parent: int) -> list[int]:
    """All children of a node, those that have not got their name yet as well."""
    return [int(word) for word in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]


def _children(parent: int) -> dict[str, int]:
    """A node's children by name, those only that run."""
    found: dict[str, int] = {}
    for pid in _child_pids(parent):
        try:
            named = _CHILD.search(Path(f"/proc/{pid}/cmdline").read_bytes())
        except (FileNotFoundError, ProcessLookupError):
            continue
        if named:
            found[f"{named[1].decode()}-{named[2].decode()}"] = pid
    return found


def allocated_bytes(folder: Path) -> int:
    """What all files of a folder take up together; one that goes meanwhile counts for nothing."""
    total = 0
    for place, _, files in os.walk(folder):
        for name in files:
            with suppress(FileNotFoundError):
                total += os.lstat(os.path.join(place, name)).st_blocks * 512
    return total


def _wait_gone(pidfd: int) -> None:
    with selectors.DefaultSelector() as selector:
        selector.register(pidfd, selectors.EVENT_READ)
        if not selector.select(DEADLINE_S):
            raise TimeoutError("a child outlives its parent")
