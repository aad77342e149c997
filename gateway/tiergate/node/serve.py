"""`serve`: everything from checked settings to a running node, and back."""

import importlib.util
import json
import os
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from tiergate.child import Folders
from tiergate.clock import Clock, SystemClock
from tiergate.config import Address, ClientAuth, Loaded, Settings, format_size
from tiergate.errors import install_hint
from tiergate.node.folder import (
    LOCK_WAIT_S,
    FolderLock,
    StartError,
    check_belonging,
    clear_folder,
    is_on_tmpfs,
    lock_folder,
    make_board,
    prepare_folder,
    settle_limit,
)
from tiergate.node.listeners import Listeners, listen
from tiergate.node.supervisor import Entries, RestartPolicy, Supervisor
from tiergate.observe.logs import get_logger
from tiergate.observe.metrics import Metrics
from tiergate.server.budget import split

log = get_logger(__name__)


class Running(NamedTuple):
    """What is known once the node is ready."""

    listen: Address
    admin: Address
    folders: Folders
    pid: int
    peers: Address | None = None
    """Where peers are answered; None for a node alone."""
    daemon: Address | None = None
    """Where the memory daemon's protocol is spoken, if it is."""

    @property
    def line(self) -> str:
        """The one line that says so."""
        others = f"peers={self.peers} " if self.peers else ""
        others += f"daemon=http://{self.daemon} " if self.daemon else ""
        return (
            f"tiergate ready listen=http://{self.listen} admin=http://{self.admin} {others}"
            f"memory={self.folders.root} pid={self.pid}"
        )


def serve(
    loaded: Loaded,
    on_ready: Callable[[Running], None],
    *,
    entries: Entries | None = None,
    policy: RestartPolicy | None = None,
    clock: Clock | None = None,
    lock_wait_s: float = LOCK_WAIT_S,
) -> int:
    """Run a node until SIGTERM or SIGINT. To be called in the main thread. The exit status: 0, or
    `tiergate.child.LEFT_BEHIND_STATUS`.

    Args:
        loaded: The settings and their sources (a default memory limit may be lowered, a given one not).
        on_ready: Called once, when all processes do their work.

    Raises:
        StartError: the memory folder or an address cannot be used (`FolderBusyError`: another node has the
        folder), or a package is missing. NodeFailedError: the processes do not run.
    """
    clock = clock or SystemClock()
    if faults := package_faults(loaded.settings):
        raise StartError(faults[0])
    root = loaded.settings.memory_dir
    folders = prepare_folder(root)
    lock = lock_folder(folders, clock, lock_wait_s)
    try:
        is_default = loaded.sources["memory_limit_bytes"] == "default"
        limit_bytes = settle_limit(root, root, loaded.settings.memory_limit_bytes, is_default)
        settings = replace(loaded.settings, memory_limit_bytes=limit_bytes)
        clear_folder(folders)
        check_belonging(folders, settings)
        if settings.cluster:
            make_board(folders)
        if not is_on_tmpfs(root):
            log.warning("memory_dir is not on a tmpfs, bytes may go to a disk", folder=root)
        log.info("starting", folder=root, memory_limit=format_size(limit_bytes), workers=settings.workers_count)
        return _serve_locked(settings, folders, lock, on_ready, entries or Entries(), policy or RestartPolicy(), clock)
    finally:
        lock.close()


def package_faults(settings: Settings) -> list[str]:
    """What only a member of a cluster needs and is not there, with how to install it; one line a fault."""
    if settings.cluster and any(importlib.util.find_spec(name) is None for name in ("grpc", "aetcd")):
        return [f"a cluster needs packages that are not installed: {install_hint('cluster')}"]
    return []


def _serve_locked(
    settings: Settings,
    folders: Folders,
    lock: FolderLock,
    on_ready: Callable[[Running], None],
    entries: Entries,
    policy: RestartPolicy,
    clock: Clock,
) -> int:
    loopback_only = settings.client_auth is ClientAuth.NONE
    opened: list[Listeners] = []
    try:
        opened.append(listen(settings.listen, settings.workers_count, loopback_only=loopback_only))
        opened.append(listen(settings.admin_listen, 1, loopback_only=loopback_only))
        if settings.cluster and settings.peer_listen:
            known = settings.cluster_secret is not None or settings.peer_tls_ca is not None
            opened.append(listen(settings.peer_listen, settings.workers_count, loopback_only=not known, who="peers"))
        listeners, admin, *rest = opened
        peers = rest[0] if rest else None
        daemon = None
        if settings.daemon_listen:
            only = not settings.daemon_allow
            who = "clients of the memory daemon"
            daemon = listen(settings.daemon_listen, settings.workers_count, loopback_only=only, who=who)
            opened.append(daemon)
        try:
            metrics = Metrics.open(folders.metrics / "node", split(settings).metrics_file_bytes)
        except OSError as error:
            raise StartError(f"cannot use {folders.metrics}: {error.strerror}") from error
        running = Running(
            listeners.address,
            admin.address,
            folders,
            os.getpid(),
            peers.address if peers else None,
            daemon.address if daemon else None,
        )

        def ready() -> None:
            _write_node_file(running)
            on_ready(running)

        supervisor = Supervisor(
            settings,
            folders,
            lock,
            listeners,
            admin,
            peers,
            daemon,
            clock=clock,
            metrics=metrics,
            on_ready=ready,
            entries=entries,
            policy=policy,
        )
        try:
            return supervisor.run()
        finally:
            metrics.close()
    finally:
        for one in opened:
            one.close()


def _write_node_file(running: Running) -> None:
    facts = {
        "pid": running.pid,
        "listen": f"http://{running.listen}",
        "admin": f"http://{running.admin}",
    }
    if running.peers:
        facts["peers"] = str(running.peers)
    if running.daemon:
        facts["daemon"] = f"http://{running.daemon}"
    draft = running.folders.node_file.with_suffix(".new")
    draft.write_text(json.dumps(facts))
    draft.replace(running.folders.node_file)
