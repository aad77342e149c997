"""The checkpoints on the admin address: which sets there are and where each of them stands."""

import asyncio
from collections.abc import Sequence
from typing import Any

from aiohttp import web

from tiergate.checkpoints.documents import document_of
from tiergate.checkpoints.sets import SetState, Tier
from tiergate.engine.checkpoints import Checkpoints, FoundSet, Place
from tiergate.engine.rooms import Rooms
from tiergate.errors import TiergateError
from tiergate.model import Pending
from tiergate.policy.pace import Pace, arrival_s
from tiergate.s3.uri import parse_uri, uri_of
from tiergate.server.streaming import status_of
from tiergate.writeback.uploader import Uploader

PACE_INTERVAL_S = 5.0
"""How often the pace of write-back is looked at."""


class CheckpointRoutes:
    """Answers for checkpoints. `watch_pace` must run meanwhile."""

    def __init__(self, rooms: Rooms, uploader: Uploader, checkpoints: Checkpoints) -> None:
        self._rooms = rooms
        self._uploader = uploader
        self._checkpoints = checkpoints
        self._pace = Pace()
        self._one = asyncio.Lock()

    def routes(self) -> list[web.RouteDef]:
        """For the admin address."""
        return [web.get("/checkpoints", self._list)]

    async def watch_pace(self) -> None:
        """Look how fast write-back is, until cancelled."""
        was_busy = False
        while True:
            is_busy = self._uploader.in_flight_count > 0
            now_s = self._rooms.clock.monotonic_s()
            self._pace.look(now_s, self._persisted_bytes(), is_busy=is_busy or was_busy)
            was_busy = is_busy
            await self._rooms.clock.sleep(PACE_INTERVAL_S)

    def _persisted_bytes(self) -> int:
        metric = self._rooms.metrics.persisted_bytes.metric.name
        return sum(int(series.values[0]) for series in self._rooms.metrics.store.read() if series.name == metric)

    async def _list(self, request: web.Request) -> web.Response:
        """The sets under `uri`, or those of all buckets with records. One request at a time is worked on."""
        uri = request.query.get("uri", "")
        try:
            bucket, prefix = parse_uri(uri) if uri else ("", "")
            async with self._one:
                places = (
                    [await self._checkpoints.under(bucket, prefix)] if uri else await self._checkpoints.everywhere()
                )
                own = await self._rooms.directory.pending()
        except ValueError as error:
            return web.json_response({"error": str(error)}, status=400)
        except TiergateError as error:
            return web.json_response({"error": error.message}, status=status_of(error))
        return web.json_response(self._answer(places, own))

    def _answer(self, places: Sequence[Place], own: Sequence[Pending]) -> dict[str, Any]:
        now_s = self._rooms.clock.wall_s()
        return {
            "at_s": now_s,
            "upload_bytes_per_s": self._pace.bytes_per_s,
            "places": [shown(place) for place in places],
            "sets": [self._set(found, own, now_s) for place in places for found in place.sets],
        }

    def _set(self, found: FoundSet, own: Sequence[Pending], now_s: float) -> dict[str, Any]:
        status = found.status
        state = status.tiers[Tier.S3].state
        to_s3_s = None
        if state is SetState.COMPLETE:
            to_s3_s = 0.0
        elif state is SetState.UPLOADING:
            to_s3_s = arrival_s(found.owed, own, self._pace.bytes_per_s)
        return document_of(status) | {"age_s": max(0.0, now_s - status.committed_s), "to_s3_s": to_s3_s}


def shown(place: Place) -> dict[str, Any]:
    """A place as the answer shows it."""
    return {
        "uri": uri_of(place.bucket, place.prefix),
        "bucket": place.bucket,
        "prefix": place.prefix,
        "unseen": sorted(place.unseen),
        "origin_fault": place.origin_fault,
        "fault": place.fault,
    }
