"""An origin, a node before it, and a proxy between them that sees and holds the node's requests."""

from dataclasses import dataclass

from tests.conformance.gateway import CLIENT
from tests.conformance.wire import Ask, Identity, Reply, Wire

from tiergate.testing.node import RunningNode
from tiergate.testing.origins import FaultyOrigin, ProcessOrigin


@dataclass(frozen=True)
class Sides:
    """The same request can be sent through the node or to the origin directly."""

    node: RunningNode
    origin: ProcessOrigin
    proxy: FaultyOrigin

    def through(self, ask: Ask) -> Reply:
        with Wire(self.node.endpoint, CLIENT) as wire:
            return wire.ask(ask)

    def direct(self, ask: Ask) -> Reply:
        with Wire(self.origin.endpoint, Identity(self.origin.access_key, self.origin.secret_key), strict=False) as wire:
            return wire.ask(ask)
