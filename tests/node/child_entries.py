"""Entry points of children for the tests of supervision: an echo server, and faults that a test asks for."""

import os
import selectors
import signal
import socket
from pathlib import Path

from tiergate.child import ChildContext, ChildRole
from tiergate.errors import OriginRefusedError
from tiergate.observe.metrics import Metrics


def run(context: ChildContext) -> None:
    """Answer each connection with this process's name and pid, until SIGTERM."""
    fault = context.folders.root.parent / f"fault-{context.name}"
    if fault.exists():
        _fail(fault.read_text())
    metrics = Metrics.open(context.metrics_file)
    metrics.fills.inc()
    sock = context.listen_socket or context.admin_socket
    assert sock is not None
    stop_read, stop_write = socket.socketpair()
    stop_write.setblocking(False)
    signal.set_wakeup_fd(stop_write.fileno())
    signal.signal(signal.SIGTERM, lambda *_: None)
    with selectors.DefaultSelector() as selector:
        selector.register(sock, selectors.EVENT_READ)
        if context.peer_socket is not None:
            selector.register(context.peer_socket, selectors.EVENT_READ)
        selector.register(stop_read, selectors.EVENT_READ)
        if context.role is ChildRole.BACKGROUND:
            selector.register(context.wakeup_fd, selectors.EVENT_READ)
            selector.register(context.deaths_fd, selectors.EVENT_READ)
        context.report_ready()
        while True:
            for key, _ in selector.select():
                if key.fileobj is stop_read:
                    if (context.folders.root.parent / f"stubborn-{context.name}").exists():
                        stop_read.recv(1)
                        continue
                    if context.peer_socket is None or sock.fileno() < 0:
                        if context.role is ChildRole.BACKGROUND:
                            context.report_left(0)
                        return
                    # A member's worker goes on for its peers until the second signal.
                    stop_read.recv(1)
                    selector.unregister(sock)
                    sock.close()
                    context.report_drained()
                elif isinstance(key.fileobj, socket.socket):
                    _answer(context, key.fileobj)
                else:
                    word = "wakeups" if key.fd == context.wakeup_fd else "deaths"
                    _note(context.folders.root.parent / word, os.eventfd_read(key.fd))


def _answer(context: ChildContext, sock: socket.socket) -> None:
    try:
        connection, _ = sock.accept()
    except BlockingIOError:
        return
    with connection:
        context.wake_background()
        connection.sendall(f"{context.name} {os.getpid()}".encode())


def _note(path: Path, count: int) -> None:
    before = int(path.read_text()) if path.exists() else 0
    draft = path.with_suffix(".new")
    draft.write_text(str(before + count))
    draft.replace(path)


def _fail(how: str) -> None:
    if how == "refused":
        raise OriginRefusedError(403, "InvalidAccessKeyId", "the origin does not know this key")
    if how == "bug":
        raise ZeroDivisionError("a bug")
    os.kill(os.getpid(), signal.SIGKILL)
