"""The parent's loop: children are started, watched, restarted and stopped.

Single-threaded on purpose: a child is told of its parent's death when the *thread* that started it ends.
"""

import json
import os
import selectors
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from tiergate import config
from tiergate.child import LEFT_BEHIND_STATUS, ChildRole, Folders, Handoff, child_name
from tiergate.clock import Clock
from tiergate.config import Settings
from tiergate.errors import InvariantError, TiergateError
from tiergate.node.folder import FolderLock
from tiergate.node.listeners import Listeners
from tiergate.observe.logs import get_logger
from tiergate.observe.metrics import Metrics

WORKER_GRACE_S = 5.0
"""So long workers may take, beside `shutdown_grace`, to end what is still in flight then."""

BACKGROUND_GRACE_S = 20.0
"""So long the background may take, beside what `drain` allows, to hand over what is left and to end."""

KILL_AGAIN_S = 5.0

START_TIMEOUT_S = 60.0
_SIGNALS = (signal.SIGTERM, signal.SIGINT)

log = get_logger(__name__)


class NodeFailedError(TiergateError):
    """The node had to end because its processes do not run."""


@dataclass(frozen=True, slots=True)
class Entries:
    """The modules whose `run(context: ChildContext)` is what a child does."""

    worker: str = "tiergate.server.worker"
    background: str = "tiergate.server.background"


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """The first death within `window_s` is followed by a restart at once, each further one by a wait that
    doubles from `first_s` to `longest_s`; more than `limit_count` deaths of one child within `window_s` end
    the node."""

    limit_count: int = 15
    window_s: float = 60.0
    first_s: float = 0.1
    longest_s: float = 2.0


@dataclass(slots=True)
class _Child:
    role: ChildRole
    index: int
    listener: socket.socket
    peer_listener: socket.socket | None = None
    daemon_listener: socket.socket | None = None
    process: subprocess.Popen[bytes] | None = None
    pid_fd: int = -1
    ready_fd: int = -1
    said: bytes = b""
    is_ready: bool = False
    is_drained: bool = False
    start_by_s: float = 0.0
    restart_at_s: float | None = None
    deaths: deque[float] = field(default_factory=deque)

    @property
    def name(self) -> str:
        return child_name(self.role, self.index)

    @property
    def pid(self) -> int:
        return self.process.pid if self.process else 0


class Supervisor:
    """Owns the children. `run` returns after a clean stop; whatever way it ends, no child is left."""

    def __init__(
        self,
        settings: Settings,
        folders: Folders,
        lock: FolderLock,
        listeners: Listeners,
        admin: Listeners,
        peers: Listeners | None = None,
        daemon: Listeners | None = None,
        *,
        clock: Clock,
        metrics: Metrics,
        on_ready: Callable[[], None],
        entries: Entries,
        policy: RestartPolicy,
    ) -> None:
        self._settings, self._folders, self._lock = settings, folders, lock
        self._listeners, self._admin, self._peers, self._daemon = listeners, admin, peers, daemon
        self._clock, self._metrics, self._on_ready = clock, metrics, on_ready
        self._entries, self._policy = entries, policy
        self._selector = selectors.DefaultSelector()
        self._wakeup_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._deaths_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._children = [_Child(ChildRole.BACKGROUND, 0, admin.sockets[0])]
        none = (None,) * len(listeners.sockets)
        sockets = zip(
            listeners.sockets, peers.sockets if peers else none, daemon.sockets if daemon else none, strict=True
        )
        self._children += [_Child(ChildRole.WORKER, i, *own) for i, own in enumerate(sockets)]
        self._was_ready = False
        self._stop_by_s: float | None = None
        # A folder without an index owes nothing until a worker was ready in it.
        self._may_owe = any(folders.index.iterdir())
        self._status: int | None = None
        self._counts_last: bool | None = None
        # A member may have to wait for an earlier one of its name to go.
        self._start_timeout_s = START_TIMEOUT_S + (4 * settings.lease_s if settings.cluster else 0.0)

    def run(self) -> int:
        """Start the children and keep them running until SIGTERM or SIGINT. The exit status that says what is left
        behind.

        Raises:
            NodeFailedError: a child fails at its start, or dies again and again.
        """
        with _Signals(self._selector):
            try:
                # No worker of a cluster answers before the background made the node a member of it.
                for child in self._children[: 1 if self._peers else None]:
                    self._start(child)
                while any(child.process or child.restart_at_s is not None for child in self._children):
                    self._turn()
            finally:
                self._kill_all()
                self._selector.close()
                os.close(self._wakeup_fd)
                os.close(self._deaths_fd)
        if self._status is not None:
            return self._status
        if not self._may_owe:
            return 0
        log.error("nobody could count what is left: something may be in the memory folder only")
        return LEFT_BEHIND_STATUS

    def _turn(self) -> None:
        """Wait for the next event or due time and deal with it."""
        for key, _ in self._selector.select(self._wait_s()):
            if key.data is None:
                for number in key.fileobj.recv(64):  # type: ignore[union-attr]
                    self._on_signal(number)
            elif key.fd == key.data.ready_fd:
                self._on_message(key.data)
            elif key.fd == key.data.pid_fd:
                self._on_death(key.data)
        self._do_due()

    def _wait_s(self) -> float | None:
        dues = [child.restart_at_s for child in self._children if child.restart_at_s is not None]
        dues += [child.start_by_s for child in self._children if child.process and not child.is_ready]
        if self._stop_by_s is not None:
            dues.append(self._stop_by_s)
        return max(0.0, min(dues) - self._clock.monotonic_s()) if dues else None

    def _do_due(self) -> None:
        now_s = self._clock.monotonic_s()
        if self._stop_by_s is not None:
            if now_s >= self._stop_by_s:
                self._stop_by_s = now_s + KILL_AGAIN_S
                self._kill_late()
            return
        for child in self._children:
            if child.restart_at_s is not None and now_s >= child.restart_at_s:
                self._start(child)
            elif child.process and not child.is_ready and now_s >= child.start_by_s:
                log.error("process does not get ready", child=child.name, pid=child.pid)
                child.said = json.dumps({"error": f"not ready within {START_TIMEOUT_S:g} s"}).encode()
                child.start_by_s = float("inf")
                child.process.kill()

    # -- starting
    def _start(self, child: _Child) -> None:
        ready_read, ready_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        handoff = Handoff(
            settings=self._settings,
            role=child.role,
            index=child.index,
            entry=self._entries.worker if child.role is ChildRole.WORKER else self._entries.background,
            parent_pid=os.getpid(),
            listen_address=self._listeners.address,
            admin_address=self._admin.address,
            peer_address=self._peers.address if self._peers else None,
            daemon_address=self._daemon.address if self._daemon else None,
            socket_fd=child.listener.fileno(),
            peer_fd=child.peer_listener.fileno() if child.peer_listener else -1,
            daemon_fd=child.daemon_listener.fileno() if child.daemon_listener else -1,
            lock_fd=self._lock.descriptor,
            wakeup_fd=self._wakeup_fd,
            deaths_fd=self._deaths_fd,
            ready_fd=ready_write,
            root=self._folders.root,
        )
        try:
            # Not an argument and not the environment: both can be read by others, and hold secrets here.
            with os.fdopen(os.memfd_create("tiergate-handoff"), "w+b", buffering=0) as file:
                file.write(config.dump(handoff))
                file.seek(0)
                child.process = _spawn(child.name, file.fileno(), handoff.descriptors)
        finally:
            os.close(ready_write)
        child.pid_fd = os.pidfd_open(child.process.pid)
        child.ready_fd, child.said, child.is_ready, child.restart_at_s = ready_read, b"", False, None
        child.is_drained = False
        child.start_by_s = self._clock.monotonic_s() + self._start_timeout_s
        self._selector.register(child.pid_fd, selectors.EVENT_READ, child)
        self._selector.register(child.ready_fd, selectors.EVENT_READ, child)
        log.debug("process started", child=child.name, pid=child.pid)

    def _on_message(self, child: _Child) -> None:
        data = os.read(child.ready_fd, 65536)
        child.said += data
        if not data:
            self._forget_ready_fd(child)
        said = _said(child.said)
        if not child.is_ready and said.get("ready"):
            child.is_ready = True
            log.info("process ready", child=child.name, pid=child.pid)
            self._on_child_ready()
        if not child.is_drained and said.get("drained"):
            child.is_drained = True
            if self._stop_by_s is not None:
                self._go_on_stopping()

    def _on_child_ready(self) -> None:
        if self._was_ready or self._stop_by_s is not None:
            return
        if all(one.is_ready for one in self._children):
            self._was_ready = True
            self._on_ready()
        for one in self._children:
            if one.process is None and one.restart_at_s is None:
                self._start(one)

    def _forget_ready_fd(self, child: _Child) -> None:
        if child.ready_fd >= 0:
            self._selector.unregister(child.ready_fd)
            os.close(child.ready_fd)
            child.ready_fd = -1

    # -- dying
    def _on_death(self, child: _Child) -> None:
        status = self._bury(child)
        if self._stop_by_s is not None:
            if child.role is ChildRole.WORKER and status != 0:
                if status != -signal.SIGTERM:
                    log.warning("process died", child=child.name, status=_how(status))
                os.eventfd_write(self._deaths_fd, 1)
            self._go_on_stopping()
            return
        how = _how(status)
        reason = str(_said(child.said).get("error", ""))
        log.warning("process died", child=child.name, status=how, reason=reason, was_ready=child.is_ready)
        if not self._was_ready and (status >= 0 or reason):
            raise NodeFailedError(f"{child.name} could not start: {reason or how}")
        self._metrics.restarts.inc(1, child.role)
        if child.role is ChildRole.WORKER:
            os.eventfd_write(self._deaths_fd, 1)
        now_s = self._clock.monotonic_s()
        child.deaths.append(now_s)
        while child.deaths[0] < now_s - self._policy.window_s:
            child.deaths.popleft()
        count = len(child.deaths)
        if count > self._policy.limit_count:
            raise NodeFailedError(
                f"{child.name} died {count} times within {self._policy.window_s:g} s, last: {reason or how}"
            )
        wait_s = self._policy.first_s * 2 ** (count - 2) if count > 1 else 0.0
        child.restart_at_s = now_s + min(wait_s, self._policy.longest_s)

    def _bury(self, child: _Child) -> int:
        """Collect a dead child's exit status (negative: the signal) and its last words."""
        if child.process is None:
            raise InvariantError("death of a child that does not run", child=child.name)
        status = child.process.wait()
        self._selector.unregister(child.pid_fd)
        os.close(child.pid_fd)
        _hear(child)
        self._forget_ready_fd(child)
        child.process, child.pid_fd = None, -1
        if child.role is ChildRole.BACKGROUND:
            self._status = _said(child.said).get("status") if self._counts_last else None
        elif b'"ready"' in child.said:
            self._may_owe = True
        return status

    # -- stopping
    def _on_signal(self, number: int) -> None:
        if number not in _SIGNALS:
            return
        if self._stop_by_s is not None:
            log.warning("second signal, ending at once", signal=signal.Signals(number).name)
            self._kill_all()
            return
        log.info("stopping", signal=signal.Signals(number).name, grace_s=self._settings.shutdown_grace_s)
        self._lock.announce_end()
        self._stop_by_s = self._clock.monotonic_s() + self._settings.shutdown_grace_s + WORKER_GRACE_S
        # Our copies go first: once a worker closes its own, new connections are refused and not left waiting.
        self._listeners.close()
        for child in self._children:
            child.restart_at_s = None
            if child.process and child.role is ChildRole.WORKER:
                child.process.terminate()
        self._go_on_stopping()

    def _go_on_stopping(self) -> None:
        """Requests in flight may need the background, so it goes after them. Peers may read from this node as long as
        the background brings away what is owed, so workers of a cluster that have drained go after it."""
        now = self._next_to_stop()
        if not now or any(one.role is ChildRole.WORKER and not one.is_drained for one in now):
            return
        grace_s = BACKGROUND_GRACE_S
        if now[0].role is ChildRole.BACKGROUND:
            self._admin.close()
            grace_s += self._settings.drain_s
            if self._counts_last is None:
                # If it was told by others, it may have counted before the last requests were answered.
                _hear(now[0])
                self._counts_last = not any(word in now[0].said for word in (b'"counting"', b'"status"'))
        elif self._peers:
            self._peers.close()
        now_s = self._clock.monotonic_s()
        self._stop_by_s = max(self._stop_by_s or now_s, now_s + grace_s)
        for child in now:
            if child.process:
                log.debug("process told to stop", child=child.name, pid=child.pid)
                child.process.terminate()

    def _next_to_stop(self) -> list[_Child]:
        """Who must end before the others: workers with requests in flight, then the background, then workers."""
        running = [one for one in self._children if one.process]
        workers = [one for one in running if one.role is ChildRole.WORKER]
        background = [one for one in running if one.role is ChildRole.BACKGROUND]
        return [one for one in workers if not one.is_drained] or background or workers

    def _kill_late(self) -> None:
        for child in self._next_to_stop():
            if child.process:
                log.warning("process did not stop in time, killed", child=child.name, pid=child.pid)
                child.process.kill()

    def _kill_all(self) -> None:
        for child in self._children:
            child.restart_at_s = None
            if child.process:
                child.process.kill()
        for child in self._children:
            if child.process:
                self._bury(child)


class _Signals:
    """Turns SIGTERM and SIGINT into bytes of a socket in the selector, for as long as the block lasts."""

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self._selector = selector
        self._read, self._write = socket.socketpair()
        self._old: dict[signal.Signals, Any] = {}

    def __enter__(self) -> None:
        for end in (self._read, self._write):
            end.setblocking(False)
        self._old_fd = signal.set_wakeup_fd(self._write.fileno())
        self._old = {number: signal.signal(number, _noted) for number in _SIGNALS}
        self._selector.register(self._read, selectors.EVENT_READ, None)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._old_fd)
        self._read.close()
        self._write.close()


def _noted(_number: int, _frame: FrameType | None) -> None:
    """The number has gone into the wakeup descriptor already."""


def _spawn(name: str, handoff_fd: int, inherited: tuple[int, ...]) -> subprocess.Popen[bytes]:
    """Start a child in a process group of its own: Ctrl-C is for the parent, which stops it in order."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("TIERGATE_")}
    return subprocess.Popen(
        # -P: the folder the node was started in is no place to import from.
        [sys.executable, "-P", "-m", "tiergate", "_child", name, str(handoff_fd)],
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr.fileno(),
        pass_fds=(handoff_fd, *inherited),
        env=environment,
        process_group=0,
    )


def _hear(child: _Child) -> None:
    """Read what a child has written by now."""
    try:
        while child.ready_fd >= 0 and (data := os.read(child.ready_fd, 65536)):
            child.said += data
    except BlockingIOError:
        pass


def _said(data: bytes) -> dict[str, Any]:
    """The last whole line a child wrote, if any."""
    lines = [line for line in data.splitlines() if line.endswith(b"}")]
    return json.loads(lines[-1]) if lines else {}


def _how(status: int) -> str:
    return f"exit status {status}" if status >= 0 else f"signal {signal.Signals(-status).name}"
