"""Real etcd to test against: one process for each member, on free loopback ports, with its data in a folder of its own.

The binary is Debian's `etcd-server`. Nothing is synced to disk: what a test kills is a process, never the machine.
"""

import shutil
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from tiergate.clock import SystemClock
from tiergate.errors import ConfigError
from tiergate.etcd.channel import Tls
from tiergate.etcd.values import prefix_end
from tiergate.etcd.wire import grpc, rpc
from tiergate.testing.origins import free_ports
from tiergate.testing.processes import freeze_process

READY_TIMEOUT_S = 60.0
START_ATTEMPTS_COUNT = 3
_PROBE_TIMEOUT_S = 1.0
_PROBE_PAUSE_S = 0.05

NO_PROXY = [("grpc.enable_http_proxy", 0)]
"""Members are here, whatever the environment says of proxies."""

HEARTBEAT_MS = 50
ELECTION_MS = 500


def etcd_path() -> str:
    """Where the binary is.

    Raises:
        ConfigError: it is not installed.
    """
    path = shutil.which("etcd")
    if path is None:
        raise ConfigError("there is no etcd binary on PATH; Debian's package is etcd-server")
    return path


class EtcdMember:
    """One process. It keeps its ports and its data over `kill` and `start`."""

    def __init__(self, name: str, folder: Path, ports: Sequence[int], scheme: str, host: str) -> None:
        self.name = name
        self.endpoint = f"{host}:{ports[0]}"
        self.peer_url = f"http://127.0.0.1:{ports[1]}"
        self._folder = folder
        self._scheme = scheme
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, cluster: str, extra: Sequence[str] = ()) -> None:
        """Start the process; `cluster` names all members."""
        client_url = f"{self._scheme}://{self.endpoint}"
        command = [
            etcd_path(),
            f"--name={self.name}",
            f"--data-dir={self._folder / self.name}",
            f"--listen-client-urls={client_url}",
            f"--advertise-client-urls={client_url}",
            f"--listen-peer-urls={self.peer_url}",
            f"--initial-advertise-peer-urls={self.peer_url}",
            f"--initial-cluster={cluster}",
            f"--heartbeat-interval={HEARTBEAT_MS}",
            f"--election-timeout={ELECTION_MS}",
            "--unsafe-no-fsync",
            "--logger=zap",
            "--log-level=warn",
            *extra,
        ]
        with (self._folder / f"{self.name}.log").open("ab") as log:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)

    def kill(self) -> None:
        """End the process as a crash would."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()

    def freeze(self) -> None:
        """Stop it; its connections stay open, and silent from when this returns."""
        freeze_process(self._running())

    def thaw(self) -> None:
        """Let it go on."""
        self._running().send_signal(signal.SIGCONT)

    def _running(self) -> "subprocess.Popen[bytes]":
        if self._process is None:
            raise ProcessLookupError(f"etcd {self.name} does not run")
        return self._process

    def pause(self) -> None:
        """Give it a moment to start.

        Raises:
            ChildProcessError: it ended instead.
        """
        if self._process is not None:
            try:
                self._process.wait(_PROBE_PAUSE_S)
            except subprocess.TimeoutExpired:
                return
            raise ChildProcessError(f"etcd {self.name} ended: {self.log_tail()}")

    def log_tail(self) -> str:
        """The last of what it logged."""
        path = self._folder / f"{self.name}.log"
        return path.read_text("utf-8", "replace")[-2000:] if path.exists() else ""


class EtcdServer:
    """A cluster of `members_count` processes. A context manager: entering waits until it has a leader, leaving kills
    all and removes their files. `extra`: more arguments for etcd, with the certificates that `tls` answers to. `host`:
    the address at which all answer their clients."""

    def __init__(
        self, members_count: int = 1, extra: Sequence[str] = (), tls: Tls | None = None, host: str = "127.0.0.1"
    ) -> None:
        self.members: list[EtcdMember] = []
        self._count = members_count
        self._host = host
        self._generation = 0
        self._extra = extra
        self._tls = tls
        self._folder: Path | None = None

    def __enter__(self) -> Self:
        # A port that was free a moment ago may be taken by now.
        for attempt in range(START_ATTEMPTS_COUNT):
            try:
                self._start_all()
            except ChildProcessError:
                self.__exit__()
                if attempt == START_ATTEMPTS_COUNT - 1:
                    raise
            except BaseException:  # `with` does not end what failed to begin, an interrupted test included.
                self.__exit__()
                raise
            else:
                break
        return self

    def _start_all(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="tiergate-etcd-"))
        ports = free_ports(2 * self._count)
        scheme = "https" if self._tls else "http"
        self.members = [
            EtcdMember(f"m{index}", self._folder, ports[2 * index : 2 * index + 2], scheme, self._host)
            for index in range(self._count)
        ]
        for member in self.members:
            self.start(member)
        self.wait_ready()

    def __exit__(self, *_: object) -> None:
        for member in self.members:
            member.kill()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def endpoints(self) -> list[str]:
        """host:port of each member."""
        return [member.endpoint for member in self.members]

    @property
    def scheme(self) -> str:
        """How a node's `--cluster` names it."""
        return "etcds" if self._tls else "etcd"

    def start(self, member: EtcdMember) -> None:
        """Start a member, again if it was killed."""
        cluster = ",".join(f"{each.name}={each.peer_url}" for each in self.members)
        member.start(cluster, (*self._extra, f"--initial-cluster-token=tiergate-{self._generation}"))

    def restart(self) -> None:
        """Kill all members, and start them on their data."""
        for member in self.members:
            member.kill()
        for member in self.members:
            self.start(member)
        self.wait_ready()

    def save(self) -> Path:
        """A copy of all that is stored, for `restore`. The members are down meanwhile."""
        for member in self.members:
            member.kill()
        assert self._folder is not None
        copy = Path(tempfile.mkdtemp(prefix="saved-", dir=self._folder))
        for member in self.members:
            shutil.copytree(self._folder / member.name, copy / member.name)
        self.restart()
        return copy

    def restore(self, copy: Path | None) -> None:
        """Go back to a copy, as an operator does who lost the rest; without one, to nothing, as another cluster."""
        for member in self.members:
            member.kill()
        assert self._folder is not None
        for member in self.members:
            shutil.rmtree(self._folder / member.name)
            if copy is not None:
                shutil.copytree(copy / member.name, self._folder / member.name)
        if copy is None:
            self._generation += 1
        self.restart()

    def rows(self, prefix: bytes) -> list[Any]:
        """All that is stored under a prefix, as etcd's own KeyValues, in the order of their keys."""
        request = rpc.RangeRequest(key=prefix, range_end=prefix_end(prefix))
        found: list[Any] = list(self._call(self.members[0], lambda channel: rpc.KVStub(channel).Range, request).kvs)
        return found

    def wait_ready(self) -> None:
        """Wait until each member that runs answers a linearizable read."""
        clock = SystemClock()
        deadline_s = clock.monotonic_s() + READY_TIMEOUT_S
        for member in self.members:
            while not self._answers(member):
                if clock.monotonic_s() > deadline_s:
                    raise TimeoutError(f"etcd {member.name} is not ready: {member.log_tail()}")
                member.pause()

    def _answers(self, member: EtcdMember) -> bool:
        try:
            self._call(member, lambda channel: rpc.KVStub(channel).Range, rpc.RangeRequest(key=b"\0"))
        except grpc.RpcError:
            return False
        return True

    def leader(self) -> EtcdMember:
        """The member that leads now; waits until one does. All must run."""
        clock = SystemClock()
        deadline_s = clock.monotonic_s() + READY_TIMEOUT_S
        while clock.monotonic_s() < deadline_s:
            for member in self.members:
                try:
                    status = self.status(member)
                except grpc.RpcError:
                    member.pause()
                    continue
                if status.leader == status.header.member_id:
                    return member
            self.members[0].pause()
        raise TimeoutError("etcd elects no leader")

    def status(self, member: EtcdMember) -> Any:
        """etcd's own StatusResponse of a member."""
        return self._call(member, lambda channel: rpc.MaintenanceStub(channel).Status, rpc.StatusRequest())

    def compact(self, revision: int) -> None:
        """Forget the history before `revision`."""
        request = rpc.CompactionRequest(revision=revision, physical=True)
        self._call(self.members[0], lambda channel: rpc.KVStub(channel).Compact, request)

    def require_password(self, password: str) -> None:
        """From now on only user `root` with this password may do anything."""
        user = rpc.AuthUserAddRequest(name="root", password=password)
        role = rpc.AuthUserGrantRoleRequest(user="root", role="root")
        first = self.members[0]
        self._call(first, lambda channel: rpc.AuthStub(channel).UserAdd, user)
        self._call(first, lambda channel: rpc.AuthStub(channel).RoleAdd, rpc.AuthRoleAddRequest(name="root"))
        self._call(first, lambda channel: rpc.AuthStub(channel).UserGrantRole, role)
        self._call(first, lambda channel: rpc.AuthStub(channel).AuthEnable, rpc.AuthEnableRequest())

    def _call(self, member: EtcdMember, method: Any, request: Any) -> Any:
        with self._channel(member) as channel:
            return method(channel)(request, timeout=_PROBE_TIMEOUT_S)

    def _channel(self, member: EtcdMember) -> Any:
        if self._tls is None:
            return grpc.insecure_channel(member.endpoint, NO_PROXY)
        credentials = grpc.ssl_channel_credentials(self._tls.authority, self._tls.key, self._tls.certificate)
        return grpc.secure_channel(member.endpoint, credentials, NO_PROXY)
