"""What a process on this machine needs of its node to share its memory, and where to go when it is gone."""

from collections.abc import Callable

from tiergate.config import Settings
from tiergate.engine.calls import Answer, Call
from tiergate.engine.rooms import Rooms
from tiergate.model import Live
from tiergate.server.own import told


class Handshake:
    """The answer to `x-tiergate-node`."""

    def __init__(self, rooms: Rooms, node_id: str, live: Callable[[], Live] | None) -> None:
        """`live`: the members of the cluster; None for a node alone."""
        self._rooms = rooms
        self._node_id = node_id
        self._live = live

    async def answer(self, call: Call) -> Answer:
        """The places of the memory and of the leases; a token that the process which answers has locked there (who does
        not see it locked is on another machine, or may not look); the node's name; the S3 addresses of the other
        members; the origin. No secrets."""
        settings, store = self._rooms.settings, self._rooms.memory.store
        return told(
            {
                "node": settings.node_name or self._node_id,
                "memory": {
                    "folder": str(store.folder),
                    "slabs": str(store.slabs_path),
                    "slab_bytes": store.slab_budget,
                    "leases": str(store.leases_folder),
                    "token": self._rooms.memory.token,
                },
                "peers": self._peers(settings),
                "origin": {"endpoint": settings.origin, "region": settings.region},
            }
        )

    def _peers(self, settings: Settings) -> list[str]:
        nodes = self._live().nodes.values() if self._live is not None else ()
        others = sorted((node.name, node.about.s3) for node in nodes if node.name != settings.node_name)
        return [f"http://{address}" for _, address in others if address]
