"""One endpoint before several nodes, which sends each request on to the node that a rule says, byte for byte."""

from collections.abc import Callable
from typing import Self

from tiergate.testing.faults import FaultyOrigin, address_of
from tiergate.testing.rules import Seen


class Front(FaultyOrigin):
    """A context manager. `route` gives the endpoint that a request goes to; it may give another one at any time, since
    each request has a connection of its own on that side. All that can be asked of a `FaultyOrigin` can be asked of
    it: requests are recorded, and may be broken."""

    TAKES_ALL = True

    def __init__(self, route: Callable[[Seen], str], host: str = "127.0.0.1", port: int = 0) -> None:
        super().__init__("http://127.0.0.1:1", host, port)
        self._route = route

    def __enter__(self) -> Self:
        super().__enter__()
        return self

    def _target(self, seen: Seen) -> tuple[str, int]:
        return address_of(self._route(seen))
