"""The node's parent process with real children: deaths, restarts, stops, the lock and the ports."""

import errno
import json
import mmap
import os
import re
import selectors
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TypeVar

import pytest

import tiergate
from tiergate import config
from tiergate.child import LEFT_BEHIND_STATUS, ChildRole, Handoff
from tiergate.config import Address
from tiergate.observe.exposition import sum_files

T = TypeVar("T")
HERE = Path(__file__).parent
SOURCE = Path(tiergate.__file__).parent.parent
DEADLINE_S = 30.0


def eventually(what: str, probe: Callable[[], T], deadline_s: float = DEADLINE_S) -> T:
    """The first true value of `probe`."""
    end_s = time.monotonic() + deadline_s
    while not (value := probe()):
        assert time.monotonic() < end_s, f"never: {what}"
        time.sleep(0.01)
    return value


def children_of(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_refused(address: tuple[str, int]) -> bool:
    with socket.socket() as connection:
        return connection.connect_ex(address) == errno.ECONNREFUSED


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


@dataclass
class Node:
    """A node started by a test. `log` holds its stderr."""

    process: subprocess.Popen[str]
    log: Path
    ready: str = ""
    listen: tuple[str, int] = ("", 0)
    admin: tuple[str, int] = ("", 0)
    peers: tuple[str, int] | None = None
    children: list[int] = field(default_factory=list)

    @property
    def stdout(self) -> IO[str]:
        assert self.process.stdout is not None
        return self.process.stdout

    def wait_ready(self) -> "Node":
        with selectors.DefaultSelector() as selector:
            selector.register(self.stdout, selectors.EVENT_READ)
            assert selector.select(DEADLINE_S), self.log.read_text()
        self.ready = self.stdout.readline().rstrip("\n")
        found = re.fullmatch(
            r"tiergate ready listen=http://(\S+):(\d+) admin=http://(\S+):(\d+)"
            r"(?: peers=(\S+):(\d+))? memory=\S+ pid=(\d+)",
            self.ready,
        )
        assert found, (self.ready, self.log.read_text())
        assert int(found[7]) == self.process.pid
        self.peers = (found[5], int(found[6])) if found[5] else None
        self.listen, self.admin = (found[1].strip("[]"), int(found[2])), (found[3].strip("[]"), int(found[4]))
        self.children = children_of(self.process.pid)
        return self

    def ask(self, address: tuple[str, int] | None = None) -> tuple[str, int]:
        """Name and pid of the child that answers."""
        with socket.create_connection(address or self.listen, timeout=DEADLINE_S) as connection:
            name, pid = connection.recv(100).decode().split()
        return name, int(pid)

    def ask_until(self, name: str) -> int:
        """The pid of a child, found by asking until it is the one that answers."""
        return eventually(f"{name} answers", lambda: dict([self.ask()]).get(name, 0))

    def wait_background_told(self) -> None:
        """Until the node, which is stopping, tells its background."""
        words = "told to stop .*child=background-0"
        eventually("the background is told", lambda: re.search(words, self.log.read_text()))

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(DEADLINE_S)


@dataclass
class Starter:
    """Starts nodes on one memory folder."""

    folder: Path
    nodes: list[Node] = field(default_factory=list)

    @property
    def memory(self) -> Path:
        return self.folder / "memory"

    def start(self, wait_s: float = 10.0, /, **settings: str) -> Node:
        values = {
            "memory_dir": str(self.memory),
            "memory_limit_bytes": "16MiB",
            "listen": "127.0.0.1:0",
            "admin_listen": "127.0.0.1:0",
            "workers_count": "2",
            "log_level": "debug",
        } | settings
        log = self.folder / f"log-{len(self.nodes)}"
        words = [f"{name}={value}" for name, value in values.items()]
        with log.open("w") as stderr:
            process = subprocess.Popen(
                [sys.executable, str(HERE / "drive_node.py"), str(wait_s), *words],
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                env=os.environ | {"PYTHONPATH": str(SOURCE), "TIERGATE_REVALIDATE": "7s"},
            )
        node = Node(process, log)
        self.nodes.append(node)
        return node

    def ready(self, **settings: str) -> Node:
        return self.start(**settings).wait_ready()


@pytest.fixture
def starter(tmp_path: Path) -> Iterator[Starter]:
    starter = Starter(tmp_path)
    yield starter
    for node in starter.nodes:
        node.process.kill()
        node.process.wait()
        node.stdout.close()
    for node in starter.nodes:
        for pid in node.children:
            try:
                eventually(f"child {pid} is gone", lambda pid=pid: not is_alive(pid), 10.0)  # type: ignore[misc]
            except AssertionError:
                os.kill(pid, signal.SIGKILL)  # a failing test leaves nothing behind either
                raise


def test_serve_on_port_0_says_ready_once_with_real_addresses(starter: Starter) -> None:
    node = starter.ready()
    assert node.listen[1] > 0
    assert node.admin[1] > 0
    assert len(node.children) == 3
    assert node.ask(node.admin)[0] == "background-0"
    assert {node.ask()[0] for _ in range(50)} == {"worker-0", "worker-1"}
    facts = json.loads((starter.memory / "node.json").read_text())
    assert facts["listen"] == f"http://127.0.0.1:{node.listen[1]}"
    assert node.stop() == 0
    assert node.stdout.read() == ""


def test_sigterm_leaves_no_orphan_and_exits_0(starter: Starter) -> None:
    node = starter.ready()
    assert node.stop() == 0
    assert not any(map(is_alive, node.children))
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(node.listen, timeout=5)


def test_sigint_stops_like_sigterm(starter: Starter) -> None:
    node = starter.ready()
    assert node.stop(signal.SIGINT) == 0
    assert not any(map(is_alive, node.children))


def test_sigterm_during_start_exits_0_without_orphan(starter: Starter) -> None:
    node = starter.start()
    node.children = eventually("children", lambda: children_of(node.process.pid))
    assert node.stop() == 0
    assert not any(map(is_alive, node.children))


def test_sigterm_during_start_on_memory_that_was_used_counts_as_leaving_something(starter: Starter) -> None:
    (starter.memory / "index").mkdir(parents=True)
    (starter.memory / "index" / "data.mdb").touch()
    node = starter.start()
    node.children = eventually("children", lambda: children_of(node.process.pid))
    assert node.stop() == LEFT_BEHIND_STATUS


def test_background_that_counted_before_the_workers_were_done_is_not_believed(starter: Starter) -> None:
    (starter.folder / "stubborn-worker-1").touch()
    node = starter.ready(shutdown_grace_s="1h")
    worker, (_, background) = node.ask_until("worker-1"), node.ask(node.admin)
    node.process.send_signal(signal.SIGTERM)
    eventually("stopping", lambda: "stopping" in node.log.read_text())
    os.kill(background, signal.SIGTERM)
    eventually("the background is gone", lambda: not is_alive(background))
    os.kill(worker, signal.SIGKILL)
    assert node.process.wait(DEADLINE_S) == LEFT_BEHIND_STATUS
    assert "nobody could count what is left" in node.log.read_text()


def test_stubborn_worker_is_killed_after_the_grace(starter: Starter) -> None:
    node = starter.ready(shutdown_grace_s="200ms")
    (starter.folder / "stubborn-worker-1").touch()
    assert node.stop() == 0
    assert not any(map(is_alive, node.children))
    assert "did not stop in time" in node.log.read_text()


def test_worker_killed_while_the_node_stops_is_told_to_the_background(starter: Starter) -> None:
    for name in ("worker-1", "background-0"):
        (starter.folder / f"stubborn-{name}").touch()
    node = starter.ready(shutdown_grace_s="1h")
    worker = node.ask_until("worker-1")
    node.process.send_signal(signal.SIGTERM)
    eventually("stopping", lambda: "stopping" in node.log.read_text())
    os.kill(worker, signal.SIGKILL)
    deaths = starter.folder / "deaths"
    eventually("the background knows", lambda: deaths.exists() and deaths.read_text() == "1")
    assert node.stop() == LEFT_BEHIND_STATUS


def test_port_is_closed_as_soon_as_the_workers_have_stopped(starter: Starter) -> None:
    node = starter.ready(shutdown_grace_s="1h")
    (starter.folder / "stubborn-background-0").touch()
    node.process.send_signal(signal.SIGTERM)
    eventually("connections are refused", lambda: is_refused(node.listen))
    assert node.process.poll() is None
    assert node.stop() == LEFT_BEHIND_STATUS


def test_second_signal_ends_a_stop_at_once(starter: Starter) -> None:
    node = starter.ready(shutdown_grace_s="1h")
    (starter.folder / "stubborn-worker-1").touch()
    node.process.send_signal(signal.SIGTERM)
    eventually("stopping", lambda: "stopping" in node.log.read_text())
    assert node.stop() == LEFT_BEHIND_STATUS


def test_parent_killed_takes_all_children_along_and_a_new_node_starts(starter: Starter) -> None:
    node = starter.ready()
    node.stop(signal.SIGKILL)
    for pid in node.children:
        eventually(f"child {pid} is gone", lambda pid=pid: not is_alive(pid))  # type: ignore[misc]
    again = starter.ready()
    assert again.ask()[1] in again.children


def test_new_node_waits_for_the_children_of_a_killed_one(starter: Starter) -> None:
    node = starter.ready()
    stopped = node.children[0]
    os.kill(stopped, signal.SIGSTOP)
    node.stop(signal.SIGKILL)  # SIGKILL also ends a stopped process
    starter.ready()
    assert not is_alive(stopped)


def test_parent_killed_while_children_start_leaves_none(starter: Starter) -> None:
    node = starter.start()
    node.children = eventually("children", lambda: children_of(node.process.pid))
    node.stop(signal.SIGKILL)
    for pid in node.children:
        eventually(f"child {pid} is gone", lambda pid=pid: not is_alive(pid))  # type: ignore[misc]
    starter.ready()


MEMBER = {"cluster": "etcd://127.0.0.1:1", "node_name": "a", "advertise": "127.0.0.1:0", "drain_s": "60s"}


def test_workers_of_a_member_start_after_its_background(starter: Starter) -> None:
    node = starter.ready(**MEMBER)
    assert node.peers is not None
    ready = re.findall(r"process ready .*child=(\S+)", node.log.read_text())
    assert ready[0] == "background-0"
    assert sorted(ready[1:]) == ["worker-0", "worker-1"]
    started = re.findall(r"process started .*child=(\S+)", node.log.read_text())
    assert started[0] == "background-0"
    assert node.log.read_text().index("process ready") < node.log.read_text().index("child=worker-0")
    assert json.loads((starter.memory / "node.json").read_text())["peers"] == f"127.0.0.1:{node.peers[1]}"
    assert (starter.memory / "board").stat().st_size == mmap.PAGESIZE
    assert {node.ask(node.peers)[0] for _ in range(50)} == {"worker-0", "worker-1"}
    assert node.stop() == 0


def test_peers_are_answered_until_the_background_of_a_stopping_member_is_done(starter: Starter) -> None:
    (starter.folder / "stubborn-background-0").touch()
    node = starter.ready(**MEMBER)
    _, background = node.ask(node.admin)
    node.process.send_signal(signal.SIGTERM)
    eventually("clients are refused", lambda: is_refused(node.listen))
    node.wait_background_told()
    assert node.peers is not None
    assert {node.ask(node.peers)[0] for _ in range(50)} == {"worker-0", "worker-1"}
    (starter.folder / "stubborn-background-0").unlink()
    with suppress(ProcessLookupError):  # It may have heard of it only now.
        os.kill(background, signal.SIGTERM)
    assert node.process.wait(DEADLINE_S) == 0
    assert is_refused(node.peers)
    assert "did not stop in time" not in node.log.read_text()


def test_worker_of_a_stopping_member_that_dies_holds_nothing_up(starter: Starter) -> None:
    (starter.folder / "stubborn-background-0").touch()
    node = starter.ready(**MEMBER)
    _, background = node.ask(node.admin)
    node.process.send_signal(signal.SIGTERM)
    eventually("clients are refused", lambda: is_refused(node.listen))
    node.wait_background_told()
    for pid in set(node.children) - {background}:
        os.kill(pid, signal.SIGKILL)
    (starter.folder / "stubborn-background-0").unlink()
    with suppress(ProcessLookupError):  # It may have heard of it only now.
        os.kill(background, signal.SIGTERM)
    assert node.process.wait(DEADLINE_S) == 0


@pytest.mark.parametrize("settings", [{}, MEMBER], ids=["alone", "member"])
def test_node_whose_background_cannot_say_what_is_left_counts_as_leaving_something(
    starter: Starter, settings: dict[str, str]
) -> None:
    (starter.folder / "stubborn-background-0").touch()
    node = starter.ready(**settings)
    _, background = node.ask(node.admin)
    node.process.send_signal(signal.SIGTERM)
    eventually("clients are refused", lambda: is_refused(node.listen))
    os.kill(background, signal.SIGKILL)
    assert node.process.wait(DEADLINE_S) == LEFT_BEHIND_STATUS


def test_child_whose_parent_died_before_it_looked_does_nothing(tmp_path: Path) -> None:
    read_end, write_end = os.pipe()
    address = Address("127.0.0.1", 1)
    handoff = Handoff(
        settings=config.load(environ={}).settings,
        role=ChildRole.WORKER,
        index=0,
        entry="child_entries",
        parent_pid=1 << 30,
        listen_address=address,
        admin_address=address,
        peer_address=None,
        daemon_address=None,
        socket_fd=write_end,
        peer_fd=-1,
        daemon_fd=-1,
        lock_fd=write_end,
        wakeup_fd=write_end,
        deaths_fd=write_end,
        ready_fd=write_end,
        root=tmp_path,
    )
    with os.fdopen(os.memfd_create("handoff"), "w+b", buffering=0) as file:
        file.write(config.dump(handoff))
        file.seek(0)
        done = subprocess.run(
            [sys.executable, "-m", "tiergate", "_child", "worker-0", str(file.fileno())],
            pass_fds=(file.fileno(), write_end),
            env=os.environ | {"PYTHONPATH": os.pathsep.join((str(SOURCE), str(HERE)))},
            capture_output=True,
            timeout=DEADLINE_S,
            check=False,
        )
    os.close(write_end)
    with os.fdopen(read_end, "rb") as said:
        assert said.read() == b""
    assert (done.returncode, done.stdout, done.stderr) == (1, b"", b"")


def test_worker_killed_is_replaced_on_the_same_socket(starter: Starter) -> None:
    node = starter.ready(workers_count="1")
    (old,) = (pid for pid in node.children if pid == node.ask()[1])
    os.kill(old, signal.SIGSTOP)
    # These connections lie in the queue of the dying worker's socket; its successor answers them.
    waiting = [socket.create_connection(node.listen, timeout=DEADLINE_S) for _ in range(5)]
    os.kill(old, signal.SIGKILL)
    answers = {connection.recv(100).decode() for connection in waiting}
    for connection in waiting:
        connection.close()
    assert len(answers) == 1
    name, pid = answers.pop().split()
    assert name == "worker-0"
    assert int(pid) != old
    assert int(pid) in children_of(node.process.pid)
    assert set(node.children) - {old} < set(children_of(node.process.pid))
    node.children.append(int(pid))
    assert node.stop() == 0


def test_worker_killed_is_told_to_the_background(starter: Starter) -> None:
    node = starter.ready()
    os.kill(node.ask_until("worker-1"), signal.SIGKILL)
    deaths = starter.folder / "deaths"
    eventually("the background knows", lambda: deaths.exists() and deaths.read_text() == "1")


def test_worker_wakes_the_background(starter: Starter) -> None:
    node = starter.ready()
    node.ask()
    eventually("the background was woken", lambda: (starter.folder / "wakeups").exists())


def test_background_killed_is_replaced_while_workers_go_on(starter: Starter) -> None:
    node = starter.ready()
    name, old = node.ask(node.admin)
    workers = set(node.children) - {old}
    os.kill(old, signal.SIGKILL)
    assert name == "background-0"
    assert node.ask()[1] in workers
    new = node.ask(node.admin)[1]
    assert new != old
    node.children.append(new)
    assert workers < set(children_of(node.process.pid))


def test_counters_of_a_killed_worker_go_on(starter: Starter) -> None:
    node = starter.ready(workers_count="1")
    os.kill(node.ask()[1], signal.SIGKILL)
    node.ask()  # the successor answers, so it has counted
    sums = {(one.name, one.labels): one.values[0] for one in sum_files(starter.memory / "metrics")}
    assert sums["tiergate_read_fills_total", ()] == 3
    assert sums["tiergate_node_restarts_total", ("worker",)] == 1


def test_crash_loop_ends_the_node_with_one_clear_line(starter: Starter) -> None:
    node = starter.ready(workers_count="1")
    (starter.folder / "fault-worker-0").write_text("kill")
    os.kill(node.ask()[1], signal.SIGKILL)
    assert node.process.wait(DEADLINE_S) == 1
    assert node.log.read_text().splitlines()[-1] == (
        "tiergate: worker-0 died 4 times within 60 s, last: signal SIGKILL"
    )
    assert not any(map(is_alive, node.children))


@pytest.mark.parametrize(
    ("fault", "reason"),
    [("refused", "the origin does not know this key"), ("bug", "ZeroDivisionError: a bug")],
)
def test_child_that_cannot_start_ends_the_node_with_its_reason(starter: Starter, fault: str, reason: str) -> None:
    (starter.folder / "fault-worker-1").write_text(fault)
    node = starter.start()
    assert node.process.wait(DEADLINE_S) == 1
    assert node.log.read_text().splitlines()[-1] == f"tiergate: worker-1 could not start: {reason}"
    assert node.stdout.read() == ""


def test_second_serve_on_the_same_folder_refuses_at_once(starter: Starter) -> None:
    first = starter.ready()
    second = starter.start(3600)
    assert second.process.wait(DEADLINE_S) == 1
    assert f"another tiergate serves from {starter.memory}" in second.log.read_text()
    assert first.ask()[0].startswith("worker")


def test_serve_while_the_first_one_stops_takes_over(starter: Starter) -> None:
    first = starter.ready(shutdown_grace_s="1h")
    (starter.folder / "stubborn-worker-1").touch()
    first.process.send_signal(signal.SIGTERM)
    eventually("stopping", lambda: "stopping" in first.log.read_text())
    second = starter.start(DEADLINE_S)
    os.kill(second.process.pid, 0)
    assert first.stop() == LEFT_BEHIND_STATUS
    (starter.folder / "stubborn-worker-1").unlink()
    second.wait_ready()


def test_serve_beside_a_node_that_does_not_end_gives_up(starter: Starter) -> None:
    first = starter.ready(shutdown_grace_s="1h")
    (starter.folder / "stubborn-worker-1").touch()
    first.process.send_signal(signal.SIGTERM)
    eventually("stopping", lambda: "stopping" in first.log.read_text())
    second = starter.start(0.1)
    assert second.process.wait(DEADLINE_S) == 1
    assert f"processes of an earlier tiergate in {starter.memory} do not end" in second.log.read_text()


def test_restart_on_the_same_port_works_at_once(starter: Starter) -> None:
    first = starter.ready()
    for _ in range(20):
        first.ask()
    first.stop(signal.SIGKILL)
    second = starter.ready(listen=f"127.0.0.1:{first.listen[1]}")
    assert second.listen == first.listen


@pytest.mark.parametrize("reuse_port", [False, True])
def test_port_of_another_program_is_refused_even_if_it_would_share(starter: Starter, reuse_port: bool) -> None:
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, reuse_port)
        other.bind(("127.0.0.1", 0))
        other.listen()
        node = starter.start(listen=f"127.0.0.1:{other.getsockname()[1]}")
        assert node.process.wait(DEADLINE_S) == 1
    assert "Address already in use" in node.log.read_text().splitlines()[-1]


def test_ipv6_address_is_served(starter: Starter) -> None:
    node = starter.ready(listen="[::1]:0")
    assert node.ready.startswith("tiergate ready listen=http://[::1]:")
    assert node.ask()[0].startswith("worker")


def test_memory_folder_is_private_and_old_state_stays(starter: Starter) -> None:
    node = starter.ready()
    assert stat.S_IMODE(starter.memory.stat().st_mode) == 0o700
    kept, cleared = starter.memory / "slabs" / "s", starter.memory / "sockets" / "s"
    for path in (kept, cleared):
        path.touch()
    node.stop(signal.SIGKILL)
    starter.ready()
    assert kept.exists()
    assert not cleared.exists()


def test_secrets_are_neither_in_arguments_nor_in_the_environment_of_children(starter: Starter) -> None:
    secret = "verysecretverysecret"
    (starter.folder / "key").write_text(secret)
    node = starter.ready(access_key_id="me", secret_access_key=f"@{starter.folder / 'key'}")
    for pid in node.children:
        seen = Path(f"/proc/{pid}/cmdline").read_bytes() + Path(f"/proc/{pid}/environ").read_bytes()
        assert b"_child" in seen
        assert secret.encode() not in seen
        assert b"TIERGATE_" not in seen
    assert secret not in node.log.read_text()


@pytest.mark.parametrize(
    ("memory", "limit", "message"),
    [
        ("/proc/tiergate/memory", "16MiB", "cannot use /proc/tiergate"),
        ("{folder}/file/memory", "16MiB", "Not a directory"),
        ("{folder}/memory", "900TiB", "free for a memory_limit of 900TiB"),
    ],
)
def test_unusable_memory_folder_is_refused_in_one_line(starter: Starter, memory: str, limit: str, message: str) -> None:
    (starter.folder / "file").touch()
    node = starter.start(memory_dir=memory.format(folder=starter.folder), memory_limit_bytes=limit)
    assert node.process.wait(DEADLINE_S) == 1
    (line,) = (line for line in node.log.read_text().splitlines() if line.startswith("tiergate: "))
    assert message in line
    assert "Traceback" not in node.log.read_text()
