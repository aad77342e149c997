"""The operations this gateway owns, each by its S3 name; everything else is the origin's."""

from collections.abc import Awaitable, Callable

from tiergate.engine.afterwards import Afterwards
from tiergate.engine.buckets import Buckets
from tiergate.engine.calls import Answer, Call
from tiergate.engine.copies import Copies
from tiergate.engine.current import Resolver
from tiergate.engine.fills import Fills
from tiergate.engine.forwarding import Forwarding
from tiergate.engine.grants import BODY_HEADER, Grants
from tiergate.engine.intake import Intake
from tiergate.engine.listing import Listings
from tiergate.engine.multipart import Multipart
from tiergate.engine.outage import Outage
from tiergate.engine.owned import OWNED_MEMBERS, is_owned
from tiergate.engine.partcopies import PartCopies
from tiergate.engine.persisting import Persisting
from tiergate.engine.reads import Openings, Reads
from tiergate.engine.rooms import Rooms
from tiergate.engine.spill import Spill
from tiergate.engine.through import Through
from tiergate.engine.turn import Turn
from tiergate.engine.writes import Writes
from tiergate.errors import (
    FencedError,
    MembershipOverError,
    RequestError,
)
from tiergate.s3.operations import render
from tiergate.writeback.promotion import Promotion

FORWARD = "Forward"
"""Stands for a request that is the origin's: unknown, or with parts that its operation does not know."""

DOCUMENT_OPERATIONS = frozenset({"DeleteObjects", "CompleteMultipartUpload"})
"""Owned operations whose request has an XML document; it is read before they begin."""

VOUCHED_MEMBERS = frozenset({"ExpectedBucketOwner", "RequestPayer"})
VOUCHED_HEADERS = ("x-amz-expected-bucket-owner", "x-amz-request-payer")

Operation = Callable[[Call], Awaitable[Answer]]


class Service:
    """One node's engine in one process. Owns the fills, and what requests left open; `close` ends them."""

    def __init__(self, rooms: Rooms) -> None:
        self._rooms = rooms
        self._outage = Outage(rooms.origin, rooms.clock)
        self._buckets = Buckets(rooms, self._outage)
        self._fills = Fills(rooms)
        resolver = Resolver(rooms, self._outage)
        self._afterwards = afterwards = Afterwards(rooms.clock)
        intake = Intake(rooms, afterwards, self._outage)
        promotion = Promotion(rooms.directory, rooms.settings.prefix_for, rooms.clock, rooms.metrics, rooms.wake)
        persisting = Persisting(rooms, self._outage, promotion)
        turn = Turn(rooms, afterwards, promotion)
        through = Through(rooms, self._outage, turn)
        self._forwarding = Forwarding(rooms, self._outage, resolver, turn)
        writes = Writes(rooms, self._buckets, resolver, intake, through, self._forwarding, persisting)
        spill = Spill(rooms, through, afterwards)
        self._multipart = multipart = Multipart(
            rooms, self._buckets, intake, self._forwarding, writes, spill, afterwards, persisting
        )
        openings = Openings(rooms, resolver, self._fills, self._outage)
        self.grants = grants = Grants(rooms, self._buckets, intake)
        reads = Reads(rooms, self._buckets, resolver, self._forwarding, openings, grants)
        copies = Copies(rooms, self._buckets, resolver, intake, self._forwarding, writes, afterwards)
        part_copies = PartCopies(rooms, self._buckets, intake, self._forwarding, openings, multipart, spill)
        listings = Listings(rooms, self._buckets, self._outage)
        self._operations: dict[str, Operation] = {
            "GetObject": reads.get,
            "HeadObject": reads.head,
            "PutObject": writes.put,
            "CopyObject": copies.copy,
            "DeleteObject": writes.delete,
            "DeleteObjects": writes.delete_many,
            "CreateMultipartUpload": multipart.create,
            "UploadPart": multipart.upload_part,
            "UploadPartCopy": part_copies.part,
            "CompleteMultipartUpload": multipart.complete,
            "AbortMultipartUpload": multipart.abort,
            "ListParts": multipart.list_parts,
            "ListMultipartUploads": listings.list_uploads,
            "ListObjects": listings.list_v1,
            "ListObjectsV2": listings.list_v2,
            "HeadBucket": self._head_bucket,
            "GetBucketLocation": self._bucket_location,
        }

    def owns(self, operation: str) -> bool:
        """Whether the operation is served here."""
        return operation in self._operations

    async def answer(self, call: Call) -> Answer:
        """Do what the call asks for.

        Raises:
            TiergateError: as the operation says; the edge renders it.
        """
        try:
            if BODY_HEADER not in call.headers:
                return await self._answer(call)
            async with self.grants.used(call) as used:
                return await self._answer(used)
        except FencedError as error:
            # Whoever asks again finds this node a member anew, or another node.
            raise MembershipOverError("this node's membership of the cluster is over") from error

    async def _answer(self, call: Call) -> Answer:
        operation = self._operations.get(call.operation)
        if operation is None or call.forwards or not is_owned(call.operation, call.params):
            if operation is None or not await self._multipart.concerns_own(call):
                return await self._forwarding.any(call)
            await self._vouched(call)
        return await operation(call)

    async def _vouched(self, call: Call) -> None:
        """An upload of the gateway's own means nothing to the origin, whose answer would be false. What a request on it
        says beyond what is done here must be what the origin can be asked by itself: whose the bucket is, who pays.

        Raises:
            RequestError: NotImplemented for anything else.
            OriginRefusedError: as the origin judges it.
        """
        beyond = call.params.keys() - OWNED_MEMBERS[call.operation]
        if call.forwards or not beyond <= VOUCHED_MEMBERS:
            raise RequestError("NotImplemented")
        headers = {name: call.headers[name] for name in VOUCHED_HEADERS if name in call.headers}
        await self._rooms.origin.check_bucket(call.target.bucket, headers)

    async def settled(self) -> None:
        """Wait until all that requests left open is brought to its end."""
        await self._afterwards.settled()

    async def close(self) -> None:
        """End what runs in the background of this process."""
        await self._afterwards.close()
        await self._fills.close()
        await self._outage.close()

    async def _head_bucket(self, call: Call) -> Answer:
        bucket = await self._buckets.known(call.target.bucket)
        headers, _ = render(call.operation, {"BucketRegion": bucket.region})
        return Answer(200, headers)

    async def _bucket_location(self, call: Call) -> Answer:
        bucket = await self._buckets.known(call.target.bucket)
        region = "" if bucket.region == "us-east-1" else bucket.region
        headers, body = render(call.operation, {"LocationConstraint": region})
        return Answer(200, headers, body)
