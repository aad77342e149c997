"""What a child process of the node is given, and how it begins: the seam between `node` and `server`."""

import ctypes
import importlib
import json
import os
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import cast

from tiergate import config
from tiergate.config import Address, Settings, etcd_place
from tiergate.errors import TiergateError
from tiergate.observe import logs

_PR_SET_PDEATHSIG = 1
_UNIX_PATH_MAX_BYTES = 107
"""Longest path of a socket file (https://man7.org/linux/man-pages/man7/unix.7.html)."""

log = logs.get_logger(__name__)


class ChildRole(StrEnum):
    """What a child does: answer clients, or the node's background work and its admin address."""

    WORKER = "worker"
    BACKGROUND = "background"


@dataclass(frozen=True, slots=True)
class Folders:
    """The memory folder. `index` holds the LMDB environments, `slabs` the bytes, `processes` what belongs to
    single processes (pins), `sockets` Unix-domain sockets, `metrics` one file per process. The node makes
    them, each for its user only; `sockets` and `metrics` start empty with the node, the others survive
    it."""

    root: Path

    @property
    def index(self) -> Path:
        return self.root / "index"

    @property
    def slabs(self) -> Path:
        return self.root / "slabs"

    @property
    def processes(self) -> Path:
        return self.root / "processes"

    @property
    def sockets(self) -> Path:
        return self.root / "sockets"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics"

    @property
    def lock(self) -> Path:
        """Held by every process of the node as long as it lives."""
        return self.root / "lock"

    @property
    def board(self) -> Path:
        """Where a member of a cluster tells its processes of its membership (`tiergate.directory.board`)."""
        return self.root / "board"

    @property
    def ledger(self) -> Path:
        """What a member of a cluster would tell a directory that forgot it (`tiergate.directory.ledger`)."""
        return self.index / "ledger"

    @property
    def member_file(self) -> Path:
        """Which member of which cluster this memory belongs to, as JSON; absent for a node alone."""
        return self.root / "member.json"

    @property
    def node_file(self) -> Path:
        """The running node's addresses, as JSON."""
        return self.root / "node.json"


LEFT_BEHIND_STATUS = 5
"""Exit status of a node: something acknowledged is in its memory folder only, or may be."""


@dataclass(frozen=True, slots=True)
class Belonging:
    """Which member of which cluster (its URL, etcd's own id of it, the era of its directory) a memory folder belongs
    to. `boot` names the life of the memory; the lease and the epoch are those of the last membership, to go on with
    after a restart."""

    cluster: str
    node: str
    boot: str
    cluster_id: int = 0
    lease_id: int = 0
    epoch: int = 0
    era: int = 0

    def fits(self, settings: Settings) -> bool:
        """Whether the settings describe this member. Its etcd may have moved."""
        if not settings.cluster or settings.node_name != self.node:
            return False
        return etcd_place(settings.cluster).prefix == etcd_place(self.cluster).prefix


@dataclass(frozen=True, slots=True)
class ChildContext:
    """All that a child owns or shares. Descriptors are open for the whole life of the process and not
    inherited by what it starts.

    `listen_socket` (workers) and `admin_socket` (background) are bound and listening; the node keeps copies,
    so connections wait in their queues while a child is restarted. `wakeup_fd` is an eventfd that workers
    write and the background reads; `deaths_fd` one that counts the workers that died since it was last read,
    for the background to clean up after them (it does so at its own start anyhow). `listen_address`,
    `admin_address` and, where there are any, `peer_address` and `daemon_address` are the real ones; `peer_socket`
    (workers of a cluster) is like `listen_socket`, for peers, and `daemon_socket` for clients of the memory daemon."""

    settings: Settings
    role: ChildRole
    index: int
    listen_address: Address
    admin_address: Address
    peer_address: Address | None
    daemon_address: Address | None
    listen_socket: socket.socket | None
    admin_socket: socket.socket | None
    peer_socket: socket.socket | None
    daemon_socket: socket.socket | None
    wakeup_fd: int
    deaths_fd: int
    ready_fd: int
    sockets_fd: int
    folders: Folders

    @property
    def name(self) -> str:
        """`worker-0`, `background-0`: unique among the living processes of the node."""
        return child_name(self.role, self.index)

    @property
    def metrics_file(self) -> Path:
        """Where `tiergate.observe.metrics.Metrics.open` keeps this process's metrics."""
        return self.folders.metrics / self.name

    def report_ready(self) -> None:
        """Tell the node that this process does its work now. To be called once."""
        _report(self.ready_fd, {"ready": True})

    def report_left(self, status: int) -> None:
        """Tell the node with which status it should end, for what is left in its memory folder only."""
        _report(self.ready_fd, {"status": status})

    def report_counting(self) -> None:
        """Tell the node that what is left is counted now: what its workers acknowledge after this may be missing."""
        _report(self.ready_fd, {"counting": True})

    def report_drained(self) -> None:
        """Tell the node, which is stopping, that this worker of a cluster has answered its clients. It goes on for its
        peers until it gets a second SIGTERM."""
        _report(self.ready_fd, {"drained": True})

    def wake_background(self) -> None:
        """Make the background look for work. Never blocks."""
        os.eventfd_write(self.wakeup_fd, 1)

    def socket_path(self, name: str) -> str:
        """The path of a Unix-domain socket of the node, short enough to bind and connect in this process."""
        path = str(self.folders.sockets / name)
        if len(os.fsencode(path)) <= _UNIX_PATH_MAX_BYTES:
            return path
        return f"/proc/self/fd/{self.sockets_fd}/{name}"


@dataclass(frozen=True, slots=True)
class Handoff:
    """What the node writes into a memory file for one child; the numbers are those of inherited
    descriptors (-1: there is none)."""

    settings: Settings
    role: ChildRole
    index: int
    entry: str
    parent_pid: int
    listen_address: Address
    admin_address: Address
    peer_address: Address | None
    daemon_address: Address | None
    socket_fd: int
    peer_fd: int
    daemon_fd: int
    lock_fd: int
    wakeup_fd: int
    deaths_fd: int
    ready_fd: int
    root: Path

    @property
    def descriptors(self) -> tuple[int, ...]:
        """All that are inherited."""
        every = (
            self.socket_fd,
            self.peer_fd,
            self.daemon_fd,
            self.lock_fd,
            self.wakeup_fd,
            self.deaths_fd,
            self.ready_fd,
        )
        return tuple(each for each in every if each >= 0)


def child_name(role: ChildRole, index: int) -> str:
    """The name of a child within the node."""
    return f"{role}-{index}"


def run_child(handoff_fd: int) -> int:
    """Be a child of the node: die with it, take over what it handed down, run the entry point.

    Returns the exit status: 0, or 1 when the entry point failed (the node is told why).
    """
    _die_with_parent()
    with os.fdopen(handoff_fd, "rb") as file:
        handoff = config.restore(file.read(), Handoff)
    if os.getppid() != handoff.parent_pid:
        return 1  # the node died before its death could reach us
    _keep_from_children(handoff)
    settings = handoff.settings
    logs.configure(settings.log_level, settings.log_format, process=child_name(handoff.role, handoff.index))
    for secret in settings.secrets:
        logs.mask(secret)
    context = _context_of(handoff)
    try:
        run = cast(Callable[[ChildContext], object], importlib.import_module(handoff.entry).run)
        run(context)
    except (TiergateError, OSError) as error:
        log.error("process failed", error=error)
        _report_failure(context, str(error) or type(error).__name__)
        return 1
    except Exception as error:
        log.exception("process failed unexpectedly", error=error)
        _report_failure(context, f"{type(error).__name__}: {error}")
        return 1
    return 0


def _die_with_parent() -> None:
    """https://man7.org/linux/man-pages/man2/PR_SET_PDEATHSIG.2const.html"""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def _keep_from_children(handoff: Handoff) -> None:
    """What this process starts must not hold the lock or the port after its death."""
    for descriptor in handoff.descriptors:
        os.set_inheritable(descriptor, False)


def _context_of(handoff: Handoff) -> ChildContext:
    folders = Folders(handoff.root)
    sock = _socket(handoff.socket_fd)
    is_worker = handoff.role is ChildRole.WORKER
    return ChildContext(
        settings=handoff.settings,
        role=handoff.role,
        index=handoff.index,
        listen_address=handoff.listen_address,
        admin_address=handoff.admin_address,
        peer_address=handoff.peer_address,
        daemon_address=handoff.daemon_address,
        listen_socket=sock if is_worker else None,
        admin_socket=None if is_worker else sock,
        peer_socket=_socket(handoff.peer_fd) if handoff.peer_fd >= 0 else None,
        daemon_socket=_socket(handoff.daemon_fd) if handoff.daemon_fd >= 0 else None,
        wakeup_fd=handoff.wakeup_fd,
        deaths_fd=handoff.deaths_fd,
        ready_fd=handoff.ready_fd,
        sockets_fd=os.open(folders.sockets, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC),
        folders=folders,
    )


def _socket(descriptor: int) -> socket.socket:
    sock = socket.socket(fileno=descriptor)
    sock.setblocking(False)
    return sock


def _report_failure(context: ChildContext, message: str) -> None:
    _report(context.ready_fd, {"error": logs.masked_text(message)[:500]})


def _report(ready_fd: int, message: dict[str, object]) -> None:
    # Below PIPE_BUF, so one write is one line; the node keeps its end open as long as we live.
    os.write(ready_fd, json.dumps(message, ensure_ascii=True).encode() + b"\n")
