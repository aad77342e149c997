"""Requests of processes on this machine that write into this node's memory themselves, or read from it.

A grant is room that such a process fills; a PutObject or UploadPart that names it takes its bytes from there, and is
else what it always is. A read may be answered with where the bytes lie. Either hangs on the process's lease
(`tiergate.memory.sharing`).
"""

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from tiergate.engine.buckets import Buckets
from tiergate.engine.calls import Answer, Call, read_whole, told
from tiergate.engine.granted import GrantedBody
from tiergate.engine.intake import Intake
from tiergate.engine.rooms import Rooms
from tiergate.errors import MemoryFullError, RequestError
from tiergate.memory.sharing import GRANT_TAG
from tiergate.model import BLOCK_BYTES, Body, ObjectName, Version, new_uid

LEASE_HEADER = "x-tiergate-lease"
BODY_HEADER = "x-tiergate-body"
SIZE_HEADER = "x-tiergate-size"
MAP_HEADER = "x-tiergate-map"
MAPPED_HEADER = "x-tiergate-mapped"

GRANT_LIMIT_BYTES = 1 << 30
"""The most that one grant is of: its extents are told in one answer."""

GRANTS_COUNT = 64
"""Open grants that one process may have."""

PINS_COUNT = 4096
"""Pins that one process may have; beyond them its reads are answered with the bytes."""

RELEASE_LIMIT_BYTES = 1 << 20

USES = frozenset({"PutObject", "UploadPart"})
_ABOUT_WIRE = frozenset({BODY_HEADER, SIZE_HEADER, LEASE_HEADER, "content-md5", "transfer-encoding"})


class Grants:
    """Gives room in memory to processes, uses what they wrote, tells them where to read."""

    def __init__(self, rooms: Rooms, buckets: Buckets, intake: Intake) -> None:
        self._rooms = rooms
        self._buckets = buckets
        self._intake = intake

    async def grant(self, call: Call) -> Answer:
        """`POST /bucket/key?x-tiergate-grant&size=N`: room for a body of N bytes of this key, as a PutObject gets it.
        The process may give a name by which it lets go of it (`x-tiergate-grant=NAME`).

        Raises:
            RequestError: InvalidLease, InvalidArgument, EntityTooLarge, NoSuchBucket.
            OverloadedError: no room, too many grants, or a bound of loss is reached.
        """
        token = self._lease(call)
        size_bytes = _number(call.query("size") or "", 1, GRANT_LIMIT_BYTES)
        await self._buckets.known(call.target.bucket)
        await self._intake.admit()
        self._intake.check_size(call.name, size_bytes)
        begin = partial(
            self._rooms.memory.sharing.begin_grant,
            new_uid(self._rooms.clock.wall_s()),
            size_bytes,
            token,
            purpose_of(call.name),
            self._intake.group_of(call.name),
            GRANTS_COUNT,
            call.query("x-tiergate-grant") or GRANT_TAG,
        )
        try:
            granting = begin()
        except MemoryFullError:
            # What is in the way may be a dead process's.
            self._rooms.metrics.reaped_pins.inc(self._rooms.memory.reap())
            granting = begin()
        try:
            for _ in granting.steps():
                await asyncio.sleep(0)
        except BaseException:  # Whatever it was, nobody learns of the grant.
            granting.abort()
            raise
        self._rooms.metrics.grants.inc()
        self._rooms.metrics.granted_bytes.inc(size_bytes)
        return told({"grant": granting.uid, "block_bytes": BLOCK_BYTES, "extents": granting.blocks})

    @asynccontextmanager
    async def used(self, call: Call) -> AsyncIterator[Call]:
        """The request with the body that it names, for as long as it is carried out.

        Raises:
            RequestError: InvalidRequest; InvalidLease; NoSuchGrant, InvalidGrant.
        """
        if call.operation not in USES or await read_whole(call.body, RELEASE_LIMIT_BYTES):
            raise RequestError("InvalidRequest", f"{BODY_HEADER} is for uploads that bring no body themselves.")
        token, size = self._lease(call), call.headers.get(SIZE_HEADER)
        size_bytes = _number(size, 0, GRANT_LIMIT_BYTES) if size is not None else None
        purpose = purpose_of(call.name)
        granted = self._rooms.memory.sharing.granted(call.headers[BODY_HEADER], token, purpose, size_bytes)
        try:
            headers = {name: value for name, value in call.headers.items() if name not in _ABOUT_WIRE}
            headers["content-length"] = str(granted.size_bytes)
            yield replace(call, headers=headers, body=GrantedBody(granted, call.headers))
        finally:
            granted.close()

    async def release(self, call: Call) -> Answer:
        """`POST /?x-tiergate-release` with {"pins": [[body, name], ...]}: the process needs them no more; grants that
        were not used are given back. An empty body stands for all of that name.

        Raises:
            RequestError: InvalidLease, InvalidArgument.
        """
        token = self._lease(call)
        pins = _pins_of(await read_whole(call.body, RELEASE_LIMIT_BYTES))
        return told({"released": self._rooms.memory.sharing.release(token, pins)})

    def mapped(
        self, token: str, version: Version, etag: str, start: int, spans: Sequence[tuple[Body, int, int]]
    ) -> Answer | None:
        """Where the bytes of a read lie, pinned for the process; None where they must be sent.

        Raises:
            RequestError: InvalidLease.
        """
        sharing = self._rooms.memory.sharing
        sharing.check(token)
        tag = secrets.token_hex(8)
        extents = sharing.map(token, tag, spans, PINS_COUNT) if spans else None
        if extents is None:
            return None
        size_bytes = sum(length for _, length in extents)
        self._rooms.metrics.mapped_reads.inc()
        self._rooms.metrics.mapped_bytes.inc(size_bytes)
        document = {
            "pins": [[body_uid, tag] for body_uid in sorted({body.uid for body, _, _ in spans})],
            "extents": extents,
            "size": version.size_bytes,
            "start": start,
        }
        return told(document, {MAPPED_HEADER: tag, "ETag": etag, "x-tiergate-tier": "memory"})

    def _lease(self, call: Call) -> str:
        token = call.headers.get(LEASE_HEADER, "")
        self._rooms.memory.sharing.check(token)
        return token


def purpose_of(name: ObjectName) -> str:
    """What a grant is for, as the inventory keeps it. No bucket has a slash."""
    return f"{name.bucket}/{name.key}"


def _number(text: str, low: int, high: int) -> int:
    if not (text.isascii() and text.isdigit() and low <= int(text[:20]) <= high):
        raise RequestError("InvalidArgument", f"A size is a number from {low} to {high}.", argument_value=text)
    return int(text)


def _pins_of(document: bytes) -> list[tuple[str, str]]:
    try:
        found: Any = json.loads(document)["pins"]
        pins = [(body_uid, tag) for body_uid, tag in found]
    except (ValueError, TypeError, KeyError) as error:
        raise RequestError("InvalidArgument", "The request does not list pins.") from error
    if not all(isinstance(text, str) for pin in pins for text in pin):
        raise RequestError("InvalidArgument", "The request does not list pins.")
    return pins
