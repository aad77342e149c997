"""Requests of our own about what S3 does not have yet: `x-tiergate-owed` tells, `x-tiergate-promote` sends for it."""

from typing import Any

from tiergate.checkpoints.markers import is_within, reach_of
from tiergate.engine.calls import Answer, Call
from tiergate.engine.rooms import Rooms
from tiergate.model import Kind, Pending
from tiergate.server.own import told
from tiergate.writeback.promotion import MANY, Promotion

SHOWN_COUNT = 1000
"""So many objects are named; all are counted."""


class Owing:
    """The answers of both, about a prefix (`prefix` in the query, "" for the bucket). That of a tiered checkpoint,
    which is the folder of rank 0, stands for the folders of all its ranks."""

    def __init__(self, rooms: Rooms) -> None:
        self._directory = rooms.directory
        self._promotion = Promotion(rooms.directory, rooms.settings.prefix_for, rooms.clock, rooms.metrics, rooms.wake)

    async def owed(self, call: Call) -> Answer:
        """What was acknowledged, on whatever node, and is not in S3 yet: `count`, `bytes`, and the `objects`, the
        longest owed first, each with its `key`, `size_bytes`, whether it `stays_in_memory` by policy, and the `fault`
        for which it does not go on.

        Raises:
            OverloadedError: the directory does not answer.
        """
        prefix = _prefix_of(call)
        writes = await self._directory.pending_under(call.target.bucket, reach_of(prefix), MANY)
        found = [write for write in writes if write.kind is Kind.PUT and is_within(write.name.key, prefix)]
        found.sort(key=lambda write: write.place)
        return told(
            {
                "count": len(found),
                "bytes": sum(write.size_bytes for write in found),
                "objects": [_shown(write) for write in found[:SHOWN_COUNT]],
            }
        )

    async def promote(self, call: Call) -> Answer:
        """Let what stays in memory by policy go to S3; how many objects that were, as `promoted`.

        Raises:
            OverloadedError: the directory does not answer.
        """
        return told({"promoted": await self._promotion.under(call.target.bucket, _prefix_of(call))})


def _prefix_of(call: Call) -> str:
    return dict(call.target.query).get("prefix") or ""


def _shown(write: Pending) -> dict[str, Any]:
    return {
        "key": write.name.key,
        "size_bytes": write.size_bytes,
        "stays_in_memory": write.parked,
        "fault": write.quarantined,
    }
