"""What is known of buckets: learnt from the origin before the first acknowledgement, then cached."""

import asyncio
from contextlib import suppress

from tiergate.engine.outage import AWAY, PATIENCE_S, Outage
from tiergate.engine.rooms import Rooms
from tiergate.errors import MemoryFullError, NotFoundError, OriginRefusedError
from tiergate.model import Bucket

KEPT_S = 60.0
"""How long what was learnt of a bucket is believed: the stated limit for changes behind the gateway."""


OWNERS_LIMIT_COUNT = 10_000
"""Buckets whose owners a process remembers."""


class Buckets:
    """The bucket cache of this node, kept in the directory."""

    def __init__(self, rooms: Rooms, outage: Outage) -> None:
        self._rooms = rooms
        self._outage = outage
        self._owners: dict[str, tuple[str, float]] = {}

    async def owner(self, name: str) -> str | None:
        """The id of who owns the bucket, and so what the gateway writes there; None while nobody says. It never
        changes, so it is asked for once; what was not answered is asked for again after `KEPT_S`. Too little hangs on
        it to call the origin away for its silence."""
        now_s = self._rooms.clock.monotonic_s()
        owner, until_s = self._owners.get(name, ("", 0.0))
        if not owner and now_s >= until_s and not self._outage.is_on:
            try:
                async with asyncio.timeout(PATIENCE_S):
                    owner = await self._rooms.origin.get_bucket_owner(name)
            except (*AWAY, OriginRefusedError):
                owner = ""  # Who may write need not be allowed to read ACLs.
            if len(self._owners) >= OWNERS_LIMIT_COUNT:
                self._owners.clear()
            self._owners[name] = (owner, now_s + KEPT_S)
        return owner or None

    async def known(self, name: str, seen: Bucket | None = None) -> Bucket:
        """What the origin says of the bucket, at most `KEPT_S` old; older when the origin does not answer. `seen`: what
        a look at the directory told of it, if it did.

        Raises:
            NotFoundError: NoSuchBucket.
            OverloadedError: nothing is known and the origin does not answer.
        """
        directory, now_s = self._rooms.directory, self._rooms.clock.wall_s()
        cached = seen or await directory.get_bucket(name)
        if cached is not None and now_s - cached.learnt_s < KEPT_S:
            return cached
        try:
            if cached is None:
                async with self._outage.bounded(name):
                    bucket = await self._rooms.origin.get_bucket(name, now_s)
            else:
                bucket = await self._outage.ask(name, lambda: self._rooms.origin.get_bucket(name, now_s))
        except AWAY:
            if cached is None:
                raise
            self._rooms.metrics.origin_outage_answers.inc()
            return cached
        if bucket is None:
            await directory.forget_bucket(name)
            raise NotFoundError("NoSuchBucket", "The specified bucket does not exist", bucket=name)
        with suppress(MemoryFullError):  # Asked again then; what needs no room of its own goes on.
            await directory.put_bucket(bucket)
        return bucket
