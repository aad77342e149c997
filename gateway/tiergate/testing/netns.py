"""A network to break: namespaces with addresses of their own around one that forwards between them, and can be told
not to.

A *place* is a namespace for the processes of one node. The machine's own namespace is joined as well: clients, the
origin and etcd stand there, at addresses of their own, so that a node can be cut from each of them. What is cut is
dropped in silence, in both directions, on connections that stand as well as on new ones.

Each namespace lives as long as an anchor process that ends with this one, however it ends: nothing has a name that
could be left behind, or collide with that of another run. Only the machine's end of the link to it has; its name is
what claims the addresses.
"""

import ctypes
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Self, TypeVar

T = TypeVar("T")

TIMEOUT_S = 20.0
PROGRAMS = ("ip", "tc", "nsenter", "unshare")

OUTSIDE_COUNT = 19
"""Addresses of the machine's own namespace."""

PLACES_COUNT = 200
_NETS_COUNT = 512  # of 198.18.0.0/15, which is for such tests (RFC 2544)
_LINK = "tgnet"
_CLONE_NEWNET = 0x40000000
_BURST_BYTES = 128 << 10


class NetworkError(Exception):
    """A namespace or a link could not be made; the message says what the system said."""


@dataclass(frozen=True, slots=True)
class Place:
    """A namespace with one address. `enter` comes before a command that is to run inside."""

    name: str
    address: str
    number: int
    pid: int

    @property
    def enter(self) -> tuple[str, ...]:
        return ("nsenter", f"--net=/proc/{self.pid}/ns/net", "--")

    def inside(self, call: Callable[[], T]) -> T:
        """What `call` gives in a thread that is in this namespace: a socket made there stays there.

        Raises:
            OSError: what `call` raised, or the namespace is gone.
        """
        given: list[T] = []
        raised: list[BaseException] = []

        def run() -> None:
            try:
                with open(f"/proc/{self.pid}/ns/net", "rb") as namespace:
                    libc = ctypes.CDLL(None, use_errno=True)
                    if libc.setns(namespace.fileno(), _CLONE_NEWNET):
                        raise OSError(ctypes.get_errno(), f"cannot enter the namespace of {self.name}")
                given.append(call())
            except BaseException as error:  # whatever it is, it is the caller's
                raised.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        if raised:
            raise raised[0]
        return given[0]


class Network:
    """See the module. A context manager; needs root."""

    def __init__(self) -> None:
        self._anchors: dict[int, subprocess.Popen[bytes]] = {}
        self._numbers: set[int] = set()
        self._hub: tuple[str, ...] = ()
        self._net = ""
        self._link = ""
        self._outside_count = 0
        self._cuts: set[tuple[str, str]] = set()

    # -- life
    def __enter__(self) -> Self:
        try:
            hub = self._anchor()
            self._hub = ("nsenter", f"--net=/proc/{hub}/ns/net", "--")
            self._claim(hub)
            _run([*self._hub, "sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward"])
            router, outside = f"{self._net}.254", [f"{self._net}.{n}" for n in range(1, OUTSIDE_COUNT + 1)]
            _ip((), [f"addr add {each}/32 dev {self._link}" for each in outside])
            _ip((), [f"link set {self._link} up"])
            _ip(
                self._hub,
                [
                    "link set lo up",
                    f"addr add {router}/32 dev lo",
                    "link set out up",
                    *(f"route add {each}/32 dev out src {router}" for each in outside),
                ],
            )
            _ip((), [f"route add {self._net}.0/24 via {router} dev {self._link} src {outside[0]} onlink"])
        except BaseException:  # `with` does not end what failed to begin, an interrupted test included.
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._link:
            # The kernel would do it too, a moment later.
            subprocess.run(["ip", "link", "del", self._link], check=False, capture_output=True, timeout=TIMEOUT_S)
        for pid in list(self._anchors):
            self._raise(pid)

    def _anchor(self) -> int:
        """Start a process in a new namespace; it ends when its input does."""
        anchor = subprocess.Popen(["unshare", "--net", "cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._anchors[anchor.pid] = anchor
        assert anchor.stdin is not None
        assert anchor.stdout is not None
        try:
            anchor.stdin.write(b"\n")
            anchor.stdin.flush()
            is_up = anchor.stdout.read(1) == b"\n"
        except BrokenPipeError:
            is_up = False
        if not is_up:
            raise NetworkError("no new network namespace can be made")
        return anchor.pid

    def _raise(self, pid: int) -> None:
        """End an anchor, and so its namespace once nothing else runs in it."""
        anchor = self._anchors.pop(pid)
        anchor.kill()
        anchor.wait()
        for stream in (anchor.stdin, anchor.stdout):
            if stream is not None:
                stream.close()

    def _claim(self, hub: int) -> None:
        """Take addresses that no other run has."""
        for attempt in range(_NETS_COUNT):
            number = (os.getpid() + attempt) % _NETS_COUNT
            link = f"{_LINK}{number}"
            command = ["ip", "link", "add", link, "type", "veth", "peer", "name", "out", "netns", str(hub)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
            if done.returncode == 0:
                self._link, self._net = link, f"198.{18 + number // 256}.{number % 256}"
                return
            if "File exists" not in done.stderr:
                raise NetworkError(f"{' '.join(command)}: {done.stderr.strip()}")
        raise NetworkError("all addresses are taken")

    # -- addresses
    def outside(self) -> str:
        """One more address of the machine's own namespace."""
        self._outside_count += 1
        if self._outside_count > OUTSIDE_COUNT:
            raise NetworkError("no address is left")
        return f"{self._net}.{self._outside_count}"

    @property
    def client(self) -> str:
        """The address that what runs outside has as long as it binds to no other; `outside` gives it first."""
        return f"{self._net}.1"

    def place(self, name: str) -> Place:
        """One more namespace."""
        number = next((each for each in range(PLACES_COUNT) if each not in self._numbers), None)
        if number is None:
            raise NetworkError("no address is left")
        self._numbers.add(number)
        place = Place(name, f"{self._net}.{OUTSIDE_COUNT + 1 + number}", number, self._anchor())
        router = f"{self._net}.254"
        _ip(
            self._hub,
            [
                f"link add in{number} type veth peer name uplink netns {place.pid}",
                f"link set in{number} up",
                f"route add {place.address}/32 dev in{number} src {router}",
            ],
        )
        _ip(
            place.enter,
            [
                "link set lo up",
                "link set uplink up",
                f"addr add {place.address}/32 dev uplink",
                f"route add default via {router} dev uplink onlink src {place.address}",
            ],
        )
        return place

    def leave(self, place: Place) -> None:
        """Give a namespace up, whose processes are over. Its address may be another's then."""
        self.heal(place)
        _ip(self._hub, [f"link del in{place.number}"])
        self._raise(place.pid)
        self._numbers.discard(place.number)

    # -- faults
    def cut(self, one: Place | str, *others: Place | str, both_ways: bool = True) -> None:
        """Nothing passes any more from `one` to the others, nor back unless `both_ways` is false. Places or
        addresses."""
        pairs = {(_address(one), _address(other)) for other in others}
        if both_ways:
            pairs |= {(to, source) for source, to in pairs}
        new = pairs - self._cuts
        self._rules("add", new)
        self._cuts |= new

    def heal(self, one: Place | str | None = None, *others: Place | str) -> None:
        """Undo cuts: all, those of `one`, or those between it and the others."""
        found = set(self._cuts)
        if one is not None:
            found = {pair for pair in found if _address(one) in pair}
        if others:
            found = {pair for pair in found if any(_address(other) in pair for other in others)}
        self._rules("del", found)
        self._cuts -= found

    def _rules(self, verb: str, pairs: Iterable[tuple[str, str]]) -> None:
        _ip(self._hub, [f"rule {verb} pref 10 from {source} to {to} blackhole" for source, to in sorted(pairs)])

    def throttle(self, place: Place, bytes_per_s: int | None) -> None:
        """Bound what goes into and out of a place, each way for itself; None: no more."""
        ends: tuple[tuple[Sequence[str], str], ...] = ((place.enter, "uplink"), (self._hub, f"in{place.number}"))
        for enter, device in ends:
            if bytes_per_s is None:
                _run([*enter, "tc", "qdisc", "del", "dev", device, "root"])
                continue
            bound = ["rate", f"{bytes_per_s * 8}bit", "burst", str(_BURST_BYTES), "latency", "50ms"]
            _run([*enter, "tc", "qdisc", "replace", "dev", device, "root", "tbf", *bound])


def missing() -> str:
    """Why there can be no `Network` here; empty if there can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need root on Linux"
    absent = [program for program in PROGRAMS if shutil.which(program) is None]
    if absent:
        return f"not on PATH: {', '.join(absent)} (packages iproute2, util-linux)"
    try:
        with Network() as network:
            probe = network.place("probe")
            network.cut(probe, network.outside())
            network.throttle(probe, 1 << 20)
    except (NetworkError, OSError) as error:
        return f"no network namespaces here: {error}"
    return ""


def _address(of: Place | str) -> str:
    return of if isinstance(of, str) else of.address


def _ip(enter: Sequence[str], lines: Sequence[str]) -> None:
    if lines:
        _run([*enter, "ip", "-batch", "-"], "\n".join(lines) + "\n")


def _run(command: Sequence[str], text: str = "") -> None:
    done: Any = None
    with suppress(subprocess.TimeoutExpired):
        done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if done is None or done.returncode:
        said = "no answer" if done is None else done.stderr.strip()
        raise NetworkError(f"{' '.join(command)}: {said}\n{text}")
