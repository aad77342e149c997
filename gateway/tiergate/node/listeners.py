"""The node's listening sockets, bound by the parent and inherited by the children."""

import ipaddress
import socket
from dataclasses import dataclass

from tiergate.config import Address
from tiergate.node.folder import StartError

BACKLOG_COUNT = 1024


@dataclass(frozen=True, slots=True)
class Listeners:
    """Sockets that share one address, one for each process; `address` is the real one (its port is never
    0)."""

    address: Address
    sockets: tuple[socket.socket, ...]

    def close(self) -> None:
        """Close the parent's copies; the port is free once the children have closed theirs."""
        for one in self.sockets:
            one.close()


def listen(address: Address, count: int, *, loopback_only: bool, who: str = "clients") -> Listeners:
    """Bind `count` sockets to one address. The kernel spreads connections over them. `who`: connects to it.

    Raises:
        StartError: the address cannot be bound, is in use, or does not lie on this machine alone though it
        must.
    """
    sockets: list[socket.socket] = []
    try:
        family, target = _resolve(address)
        # The first one is bound without SO_REUSEPORT: that fails if anybody else has the port, a program
        # of this user too. It is allowed to share only afterwards, so nobody can slip in between.
        sockets.append(_bind(family, target, shared=False))
        real = sockets[0].getsockname()
        if loopback_only and not ipaddress.ip_address(real[0].partition("%")[0]).is_loopback:
            raise StartError(f"{address} is {real[0]}, which is not a loopback address, and {who} need no credentials")
        sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sockets.extend(_bind(family, real, shared=True) for _ in range(count - 1))
        for one in sockets:
            one.listen(BACKLOG_COUNT)
    except (OSError, StartError) as error:
        for one in sockets:
            one.close()
        if isinstance(error, StartError):
            raise
        raise StartError(f"cannot listen on {address}: {error.strerror or error}") from error
    host = address.host if family == socket.AF_INET or ":" in address.host else str(real[0])
    return Listeners(Address(host, int(real[1])), tuple(sockets))


def _resolve(address: Address) -> tuple[socket.AddressFamily, tuple[object, ...]]:
    found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    found.sort(key=lambda entry: entry[0] != socket.AF_INET)  # `localhost` means 127.0.0.1 where it is both
    family, _, _, _, target = found[0]
    return family, target


def _bind(family: socket.AddressFamily, target: tuple[object, ...], *, shared: bool) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        # Connections of an earlier run may linger in TIME_WAIT. A port that is listened on is refused anyhow.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, target[0] != "::")
        sock.bind(target)
    except OSError:
        sock.close()
        raise
    return sock
