"""The origin client: the S3 operations the gateway itself needs, with their faults sorted and retried."""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from typing import Self, TypeVar

from tiergate.clock import Clock
from tiergate.config.values import ConditionalWrites
from tiergate.errors import OriginCredentialsError, OriginRefusedError, OriginTemporaryError
from tiergate.model import Bucket, ObjectName
from tiergate.observe.logs import get_logger
from tiergate.observe.metrics import Metrics
from tiergate.origin.answers import (
    ANSWER_ONLY,
    TAGGING_COUNT,
    Condition,
    OriginEntry,
    OriginObject,
    OriginPage,
    PutAnswer,
)
from tiergate.origin.channel import Channel, OriginRequest, discard
from tiergate.origin.copying import CopySource, copy_headers
from tiergate.origin.credentials import CredentialChain
from tiergate.origin.documents import (
    Document,
    ListedPart,
    ListedUpload,
    parse_page,
    parse_parts,
    parse_tagging,
    parse_uploads,
    render_completion,
)
from tiergate.origin.endpoint import OriginSettings, encode_query
from tiergate.origin.reading import (
    exactly,
    hand_on,
    ranged_object,
    read_completion,
    read_copy,
    read_head,
    read_put,
    read_region,
)
from tiergate.origin.retry import Tries
from tiergate.origin.wire import OriginAnswer, Stream
from tiergate.s3.wire import quote_etag

__all__ = [
    "Chunks",
    "Condition",
    "OriginClient",
    "OriginEntry",
    "OriginObject",
    "OriginPage",
    "OriginSettings",
    "PutAnswer",
]

Chunks = Callable[[], AsyncIterator[bytes | memoryview]]
"""Begins a body anew. A piece must stay as it is until the next one is asked for; it is not copied."""

MAX_DOCUMENT_BYTES = 32 << 20
PAGES_LIMIT_COUNT = 10_000
"""Bound of every loop over pages."""

# What an origin says that does not know conditional writes.
_UNKNOWN_CONDITION = frozenset({(501, "NotImplemented"), (400, "InvalidArgument"), (400, "InvalidRequest")})
_UNKNOWN_CONDITION_STATUS = 501

T = TypeVar("T")
log = get_logger(__name__)


class OriginClient:
    """One process's access to the origin. Everything may be called concurrently; `close` ends it.

    Unless said otherwise, methods raise OriginExhaustedError after the last try of a temporary fault,
    OriginRefusedError when the origin says no (OriginCredentialsError when our keys are why) and pass on
    unchanged what a body's own source raises. A cancelled call has stopped touching its body when it
    returns."""

    def __init__(
        self,
        settings: OriginSettings,
        node_id: str,
        clock: Clock,
        chain: CredentialChain | None = None,
        metrics: Metrics | None = None,
    ) -> None:
        """Opens nothing yet. `node_id` marks each request, so that a loop back to us is seen.

        Raises:
            ConfigError: the endpoint is no URL.
        """
        self.channel = Channel(settings, node_id, clock, chain, metrics)
        self._clock = clock
        self._conditional_writes = settings.conditional_writes
        self._knows: dict[str, bool] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections."""
        await self.channel.close()

    @property
    def conditional_writes(self) -> bool:
        """Whether conditions are sent, as far as known now."""
        return self._conditional_writes is not ConditionalWrites.OFF and all(self._knows.values())

    # -- objects
    async def head_object(self, name: ObjectName, *, tags: bool = False) -> OriginObject | None:
        """What the origin holds under a key; None if nothing. With `tags` those are asked for too, if there are any.

        Raises:
            OriginRefusedError: NoSuchBucket, AccessDenied, ...
        """
        request = OriginRequest(
            "HEAD", name.bucket, name.key, headers=(("x-amz-checksum-mode", "ENABLED"),), operation="HeadObject"
        )
        try:
            found = await self.channel.call(request, read_head)
        except OriginRefusedError as refused:
            if refused.status == 404 and refused.code != "NoSuchBucket":
                return None
            raise
        if found.stamp is not None and not found.stamp.is_of(name):
            found = replace(found, stamp=None)
        if tags and found.headers.get(TAGGING_COUNT, "0") != "0":
            return await self._with_tags(name, found)
        return found

    async def _with_tags(self, name: ObjectName, found: OriginObject) -> OriginObject:
        """Where the tags may not be read, their number is all that is known."""
        request = OriginRequest("GET", name.bucket, name.key, "tagging=", operation="GetObjectTagging")
        try:
            document = await self._document(request)
        except OriginCredentialsError:
            raise
        except OriginRefusedError:
            return found
        headers = {header: value for header, value in found.headers.items() if header != TAGGING_COUNT}
        return replace(found, headers=headers, tagging=parse_tagging(document))

    def get_object(
        self, name: ObjectName, start: int, end: int, if_match: str | None = None
    ) -> AbstractAsyncContextManager[tuple[OriginObject, AsyncIterator[bytes]]]:
        """The bytes [start, end) of an object, and what it is. Getting the answer's head is retried, its
        body is not.

        Raises:
            OriginRefusedError: NoSuchKey, NoSuchBucket, PreconditionFailed (412), InvalidRange (416), ...
            OriginTemporaryError: from the iterator, when the body ends early or the origin falls silent; on
            entry,
                when the answer is for another range than asked.
        """
        return self._get_object(name, start, end, if_match)

    @asynccontextmanager
    async def _get_object(
        self, name: ObjectName, start: int, end: int, if_match: str | None
    ) -> AsyncIterator[tuple[OriginObject, AsyncIterator[bytes]]]:
        headers = [("x-amz-checksum-mode", "ENABLED")]
        if end > start:
            headers.append(("range", f"bytes={start}-{end - 1}"))
        if if_match is not None:
            headers.append(("if-match", quote_etag(if_match)))
        request = OriginRequest("GET", name.bucket, name.key, headers=tuple(headers), operation="GetObject")
        answer = await self.channel.call(request, hand_on)
        try:
            found = ranged_object(answer, start, end)
            yield found, exactly(answer, end - start)
        finally:
            await answer.close()

    async def put_object(
        self,
        name: ObjectName,
        size_bytes: int,
        chunks: Chunks,
        headers: Mapping[str, str],
        condition: Condition | None = None,
    ) -> PutAnswer:
        """Write an object of exactly `size_bytes`. `headers` are PutObject's; those that only answers carry
        are left out. A try whose answer was lost may have landed, so a condition can fail on what this very
        call wrote.

        Raises:
            OriginRefusedError: PreconditionFailed (412), ConditionalRequestConflict (409), NoSuchKey (404,
            If-Match on
                a key that is gone), ...
        """
        body = Stream(size_bytes, chunks) if size_bytes else b""
        sent = _sendable(headers)

        async def send(conditions: tuple[tuple[str, str], ...]) -> PutAnswer:
            request = OriginRequest("PUT", name.bucket, name.key, "", sent + conditions, body, "PutObject")
            return await self.channel.call(request, read_put)

        return await self._conditionally(condition or Condition.none(), send)

    async def copy_object(
        self, name: ObjectName, source: CopySource, headers: Mapping[str, str], condition: Condition | None = None
    ) -> PutAnswer:
        """Have the origin make an object of the bytes of another, if that is still `source`. `headers` are
        PutObject's: nothing else is taken over from the source. Nothing is found out here of whether the origin
        heeds conditions, nor is one left out but where none are sent. See `put_object` for lost answers.

        Raises:
            OriginRefusedError: PreconditionFailed (412: the source's condition, or the key's), NoSuchKey (404),
                NotImplemented (501), InvalidRequest (more than 5 GiB), ...
        """
        sent = (*_sendable(headers), *copy_headers(source))
        sent += (("x-amz-metadata-directive", "REPLACE"), ("x-amz-tagging-directive", "REPLACE"))
        if condition is not None and condition.header and self.conditional_writes:
            sent += ((condition.header, condition.value),)
        request = OriginRequest("PUT", name.bucket, name.key, "", sent, operation="CopyObject")
        return await self.channel.call(request, read_copy)

    async def delete_object(self, name: ObjectName, version_id: str | None = None) -> None:
        """Delete a key, or one version of it; a key that does not exist is fine."""
        query = encode_query([("versionId", version_id)]) if version_id else ""
        try:
            request = OriginRequest("DELETE", name.bucket, name.key, query, operation="DeleteObject")
            await self.channel.call(request, discard)
        except OriginRefusedError as refused:
            if refused.status != 404 or refused.code == "NoSuchBucket":
                raise

    # -- multipart uploads
    async def create_multipart_upload(
        self, name: ObjectName, headers: Mapping[str, str], tries: Tries | None = None
    ) -> str:
        """Begin an upload; its id. A try whose answer was lost leaves an upload that only `list_uploads`
        finds: `tries` tells the caller whether there was one."""
        request = OriginRequest(
            "POST", name.bucket, name.key, "uploads=", _sendable(headers), operation="CreateMultipartUpload"
        )
        document = await self._document(request, tries)
        upload_id = document.text("UploadId")
        if not upload_id:
            raise OriginTemporaryError("the origin's answer has no UploadId", key=name.key)
        return upload_id

    async def upload_part(
        self,
        name: ObjectName,
        upload_id: str,
        number: int,
        size_bytes: int,
        chunks: Chunks,
        headers: Mapping[str, str],
    ) -> str:
        """Send a part of exactly `size_bytes`; its ETag.

        Raises:
            OriginRefusedError: NoSuchUpload, ...
        """
        query = encode_query([("partNumber", str(number)), ("uploadId", upload_id)])
        body = Stream(size_bytes, chunks) if size_bytes else b""
        request = OriginRequest("PUT", name.bucket, name.key, query, tuple(headers.items()), body, "UploadPart")
        answer = await self.channel.call(request, read_put)
        return answer.etag

    async def upload_part_copy(
        self, name: ObjectName, upload_id: str, number: int, source: CopySource, start: int, end: int
    ) -> PutAnswer:
        """Have the origin make a part of the bytes [start, end) of an object of more than 5 MB, if that is still
        `source`.

        Raises:
            OriginRefusedError: PreconditionFailed (412), NoSuchKey (404, the source), NoSuchUpload, ...
        """
        query = encode_query([("partNumber", str(number)), ("uploadId", upload_id)])
        sent = (*copy_headers(source), ("x-amz-copy-source-range", f"bytes={start}-{end - 1}"))
        request = OriginRequest("PUT", name.bucket, name.key, query, sent, operation="UploadPartCopy")
        return await self.channel.call(request, read_copy)

    async def complete_multipart_upload(
        self,
        name: ObjectName,
        upload_id: str,
        parts: Sequence[tuple[int, str]],
        headers: Mapping[str, str],
        condition: Condition | None = None,
        checksums: tuple[str, Sequence[str]] = ("", ()),
    ) -> PutAnswer:
        """Make an object of the parts (number, ETag). `checksums` are the algorithm that the upload was begun for and
        the value of each part.

        Raises:
            OriginRefusedError: NoSuchUpload, InvalidPart, PreconditionFailed, ... OriginTemporaryError: an
            earlier try's answer was lost and the upload is gone now: it may have landed. Look
                at the object before trying again.
        """
        query = encode_query([("uploadId", upload_id)])
        given = (("content-type", "application/xml"), *headers.items())
        body = render_completion(parts, *checksums)
        tries = Tries()

        async def send(conditions: tuple[tuple[str, str], ...]) -> PutAnswer:
            sent = given + conditions
            request = OriginRequest("POST", name.bucket, name.key, query, sent, body, "CompleteMultipartUpload")
            return await self.channel.call(request, read_completion, tries)

        try:
            return await self._conditionally(condition or Condition.none(), send)
        except OriginRefusedError as refused:
            if refused.code == "NoSuchUpload" and tries.count > 1:
                raise OriginTemporaryError("the outcome of an earlier try is unknown", key=name.key) from refused
            raise

    async def abort_multipart_upload(self, name: ObjectName, upload_id: str) -> None:
        """Throw an upload and its parts away; one that is gone already is fine."""
        query = encode_query([("uploadId", upload_id)])
        try:
            request = OriginRequest("DELETE", name.bucket, name.key, query, operation="AbortMultipartUpload")
            await self.channel.call(request, discard)
        except OriginRefusedError as refused:
            if refused.status != 404:
                raise

    async def list_parts(self, name: ObjectName, upload_id: str) -> list[tuple[int, str, int]] | None:
        """The parts (number, ETag, size) the origin holds of an upload, in order; None if it knows no such
        upload."""
        found: list[ListedPart] = []
        marker = ""
        for _ in range(PAGES_LIMIT_COUNT):
            query = [("max-parts", "1000"), ("uploadId", upload_id)]
            if marker:
                query.insert(1, ("part-number-marker", marker))
            request = OriginRequest("GET", name.bucket, name.key, encode_query(query), operation="ListParts")
            try:
                document = await self._document(request)
            except OriginRefusedError as refused:
                if refused.status == 404 and refused.code != "NoSuchBucket":
                    return None
                raise
            parts, marker = parse_parts(document)
            found += parts
            if not marker:
                return [(part.number, part.etag, part.size_bytes) for part in found]
        raise OriginTemporaryError("the origin's listing does not end", key=name.key)

    async def list_uploads(self, bucket: str, prefix: str) -> list[tuple[str, str, float]]:
        """The unfinished uploads (key, upload id, start in Unix seconds) of keys that start with `prefix`."""
        found: list[ListedUpload] = []
        markers: tuple[str, str] | None = None
        for _ in range(PAGES_LIMIT_COUNT):
            query = [("encoding-type", "url")]
            if markers:
                query.append(("key-marker", markers[0]))
            query += [("max-uploads", "1000"), ("prefix", prefix)]
            if markers:
                query.append(("upload-id-marker", markers[1]))
            query.append(("uploads", ""))
            request = OriginRequest("GET", bucket, "", encode_query(query), operation="ListMultipartUploads")
            document = await self._document(request)
            uploads, markers = parse_uploads(document)
            found += uploads
            if markers is None:
                return [(upload.key, upload.upload_id, upload.initiated_s) for upload in found]
        raise OriginTemporaryError("the origin's listing does not end", bucket=bucket)

    # -- buckets
    async def list_objects(
        self, bucket: str, prefix: str, delimiter: str = "", start_after: str = "", max_keys: int = 1000
    ) -> OriginPage:
        """Up to `max_keys` keys and common prefixes after `start_after`, which may be a common prefix that
        was listed before (`OriginPage.last_key`): it does not come again. A page that is truncated is never
        empty.

        Raises:
            OriginRefusedError: NoSuchBucket, AccessDenied, ...
        """
        token = ""
        for _ in range(PAGES_LIMIT_COUNT):
            query = {"encoding-type": "url", "fetch-owner": "true", "list-type": "2"}
            query |= {"max-keys": str(max_keys), "prefix": prefix}
            query |= {"delimiter": delimiter} if delimiter else {}
            query |= {"start-after": start_after} if start_after else {}
            query |= {"continuation-token": token} if token else {}
            request = OriginRequest("GET", bucket, "", encode_query(sorted(query.items())), operation="ListObjectsV2")
            page, token = parse_page(await self._document(request))
            # An origin that rolls up whatever comes after the prefix lists the prefix itself once more.
            prefixes = [name for name in page.common_prefixes if name != start_after]
            page = OriginPage(page.entries, prefixes, page.is_truncated)
            if page.entries or prefixes or not page.is_truncated:
                return page
            if not token:
                break
        raise OriginTemporaryError("the origin's listing does not go on", bucket=bucket)

    async def get_bucket(self, name: str, now_s: float) -> Bucket | None:
        """What the origin says of a bucket; None if it does not exist. `now_s` becomes its `learnt_s`."""
        try:
            region = await self.channel.call(OriginRequest("HEAD", name, operation="HeadBucket"), read_region)
        except OriginRefusedError as refused:
            if refused.status == 404:
                return None
            raise
        if not region:
            region = await self._location(name)
        return Bucket(name, region, await self._is_versioned(name), now_s)

    async def check_bucket(self, name: str, headers: Mapping[str, str]) -> None:
        """Ask for a bucket under what `headers` say.

        Raises:
            OriginRefusedError: AccessDenied, where the bucket is another's or payment is refused, ...
        """
        await self.channel.call(OriginRequest("HEAD", name, headers=tuple(headers.items())), discard)

    async def get_bucket_owner(self, name: str) -> str:
        """The id of a bucket's owner, "" where the origin names none.

        Raises:
            OriginRefusedError: NoSuchBucket, AccessDenied, NotImplemented, ...
        """
        document = await self._document(OriginRequest("GET", name, "", "acl="))
        return next((owner.text("ID") for owner in document.children("Owner")), "")

    async def _location(self, bucket: str) -> str:
        document = await self._document(OriginRequest("GET", bucket, "", "location=", operation="GetBucketLocation"))
        # https://docs.aws.amazon.com/AmazonS3/latest/API/API_GetBucketLocation.html
        region = document.own_text().strip() or document.text("LocationConstraint").strip()
        return {"": "us-east-1", "EU": "eu-west-1"}.get(region, region)

    async def _is_versioned(self, bucket: str) -> bool:
        try:
            request = OriginRequest("GET", bucket, "", "versioning=", operation="GetBucketVersioning")
            document = await self._document(request)
        except OriginRefusedError as refused:
            if refused.status in (404, 405, 501) and refused.code != "NoSuchBucket":
                return False  # An origin that has no such thing.
            if refused.status == 403 and refused.code == "AccessDenied":
                log.warning("versioning may not be read, assumed", bucket=bucket)
                return True  # The safer of the two: writes then go through.
            raise
        return document.text("Status") in ("Enabled", "Suspended")

    # -- shared
    async def _document(self, request: OriginRequest, tries: Tries | None = None) -> Document:
        async def read(answer: OriginAnswer) -> Document:
            return Document.parse(await answer.read(MAX_DOCUMENT_BYTES))

        return await self.channel.call(request, read, tries)

    async def _conditionally(
        self, condition: Condition, send: Callable[[tuple[tuple[str, str], ...]], Awaitable[T]]
    ) -> T:
        """Send with the condition, unless the origin is known not to understand it; finds that out in mode
        `auto`."""
        header = condition.header
        is_off = self._conditional_writes is ConditionalWrites.OFF
        if not header or is_off or not self._knows.get(header, True):
            return await send(())
        try:
            answer = await send(((header, condition.value),))
        except OriginRefusedError as refused:
            may_be_unknown = (refused.status, refused.code) in _UNKNOWN_CONDITION or (
                refused.status == _UNKNOWN_CONDITION_STATUS
            )
            is_auto = self._conditional_writes is ConditionalWrites.AUTO
            if not is_auto or header in self._knows or not may_be_unknown:
                raise
            answer = await send(())
            self._knows[header] = False
            log.warning("the origin has no conditional writes", header=header)
            return answer
        self._knows[header] = True
        return answer


def _sendable(headers: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple((name, value) for name, value in headers.items() if name.lower() not in ANSWER_ONLY)
