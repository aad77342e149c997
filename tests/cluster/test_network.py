"""The network that cluster tests break: what is cut is silent, what is healed goes on, what is throttled is slow, and
nothing stays behind."""

import json
import os
import selectors
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

import tiergate
from tiergate.clock import SystemClock
from tiergate.testing.netns import Network, Place
from tiergate.testing.tcprelay import TcpRelay

PORT = 7000
SILENT_S = 0.3
"""So long a silence is taken for one. What passes takes a thousandth of that."""

PATIENT_S = 20.0


@contextmanager
def echo(listener: socket.socket) -> Iterator[None]:
    """Answer each connection with what it says."""

    def answer(connection: socket.socket) -> None:
        with connection:
            while data := connection.recv(1 << 16):
                connection.sendall(data)

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=answer, args=(connection,), daemon=True).start()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
        listener.close()


Echoes = Callable[[Place | None, str], None]


@pytest.fixture
def serve() -> Iterator[Echoes]:
    """Starts an echo server in a place, or outside of all, at an address."""
    with ExitStack() as stack:

        def start(place: Place | None, address: str) -> None:
            def listen() -> socket.socket:
                return socket.create_server((address, PORT))

            stack.enter_context(echo(place.inside(listen) if place else listen()))

        yield start


def connect(place: Place | None, address: str, timeout_s: float = PATIENT_S) -> socket.socket:
    """A connection from a place, or from outside."""

    def call() -> socket.socket:
        return socket.create_connection((address, PORT), timeout_s)

    return place.inside(call) if place else call()


def answers(connection: socket.socket, timeout_s: float = PATIENT_S) -> bool:
    """Whether what is said comes back. What was said before, and did not, comes with it."""
    connection.settimeout(timeout_s)
    word = os.urandom(8)
    got = b""
    try:
        connection.sendall(word)
        while not got.endswith(word):
            piece = connection.recv(1 << 16)
            assert piece, "the connection ended"
            got += piece
    except TimeoutError:
        return False
    return True


def test_cut_silences_what_stands_and_what_is_new_and_heal_heals(network: Network, serve: Echoes) -> None:
    one, two, third = (network.place(name) for name in ("one", "two", "three"))
    serve(two, two.address)
    with connect(one, two.address) as standing, connect(third, two.address) as other:
        assert answers(standing)
        network.cut(one, two)
        assert not answers(standing, SILENT_S)
        with pytest.raises(TimeoutError):
            connect(one, two.address, SILENT_S)
        assert answers(other)
        network.heal(one, two)
        assert answers(standing)
        with connect(one, two.address) as new:
            assert answers(new)


def test_cut_from_one_address_outside_leaves_the_others(network: Network, serve: Echoes) -> None:
    network.outside()
    origin, etcd = network.outside(), network.outside()
    place = network.place("node")
    for address in (origin, etcd):
        serve(None, address)
    serve(place, place.address)
    with connect(place, origin) as to_origin, connect(place, etcd) as to_etcd, connect(None, place.address) as inward:
        network.cut(place, etcd)
        assert not answers(to_etcd, SILENT_S)
        assert answers(to_origin)
        assert answers(inward)
        network.heal()
        assert answers(to_etcd)


def test_cut_in_one_direction(network: Network, serve: Echoes) -> None:
    one, two = network.place("one"), network.place("two")
    serve(two, two.address)
    heard = two.inside(lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
    said = one.inside(lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
    with heard, said, connect(one, two.address) as both:
        heard.bind((two.address, PORT))
        heard.settimeout(PATIENT_S)
        network.cut(two, one, both_ways=False)
        said.sendto(b"there", (two.address, PORT))
        assert heard.recv(100) == b"there"
        assert not answers(both, SILENT_S)


def test_throttle_bounds_each_way(network: Network, serve: Echoes) -> None:
    place = network.place("node")
    serve(place, place.address)
    clock = SystemClock()
    data = bytes(4 << 20)

    def seconds() -> float:
        with connect(None, place.address) as connection:
            started_s = clock.monotonic_s()
            threading.Thread(target=connection.sendall, args=(data,), daemon=True).start()
            left = len(data)
            while left:
                left -= len(connection.recv(1 << 20))
            return clock.monotonic_s() - started_s

    network.throttle(place, 8 << 20)
    bound_s = seconds()
    assert bound_s > 0.4
    network.throttle(place, None)
    assert seconds() < bound_s / 2


def test_relay_makes_the_way_longer_each_way(network: Network, serve: Echoes) -> None:
    place = network.place("node")
    serve(place, place.address)
    clock = SystemClock()
    with TcpRelay((place.address, PORT)) as relay:
        host, _, port = relay.address.partition(":")
        with socket.create_connection((host, int(port)), PATIENT_S) as connection:
            assert answers(connection)
            relay.delay_s = 0.1
            from_s = clock.monotonic_s()
            assert answers(connection)
            assert clock.monotonic_s() - from_s >= 0.2
            connection.shutdown(socket.SHUT_WR)
            assert connection.recv(1) == b""


def test_networks_side_by_side_and_nothing_left(network: Network) -> None:
    with Network() as other:
        client = other.client
        assert client != network.client
        place = other.place("node")
        assert {client, network.client} <= set(addresses())
    assert client not in addresses()
    assert network.client in addresses()
    assert not Path(f"/proc/{place.pid}").exists()


def addresses() -> list[str]:
    """Those of the machine's own namespace."""
    command = ["ip", "-j", "-4", "addr"]
    said = subprocess.run(command, capture_output=True, timeout=PATIENT_S, check=True).stdout
    return [each["local"] for link in json.loads(said) for each in link["addr_info"]]


HELD = """
import sys
from tiergate.testing.netns import Network
with Network() as network:
    place = network.place("node")
    print(network.client, place.pid, flush=True)
    sys.stdin.read()
"""


@pytest.mark.usefixtures("network")
def test_killed_run_leaves_nothing() -> None:
    environment = dict(os.environ) | {"PYTHONPATH": str(Path(tiergate.__file__).parent.parent)}
    with subprocess.Popen(
        [sys.executable, "-c", HELD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as run:
        assert run.stdout is not None
        client, pid = run.stdout.readline().split()
        anchor = os.pidfd_open(int(pid))
        run.kill()
    with selectors.DefaultSelector() as selector:
        selector.register(anchor, selectors.EVENT_READ)
        assert selector.select(PATIENT_S)
    os.close(anchor)
    clock = SystemClock()
    end_s = clock.monotonic_s() + PATIENT_S
    while client in addresses():
        assert clock.monotonic_s() < end_s
