"""ListObjects, ListObjectsV2 and ListMultipartUploads: the origin's pages merged with what it does not hold yet.

The directory is read before the origin: whatever finished its write-back in between is then in the origin's answer.
"""

from collections.abc import Awaitable, Iterable, Iterator, Sequence
from typing import Any

from tiergate.engine.buckets import Buckets
from tiergate.engine.calls import Answer, Call
from tiergate.engine.outage import AWAY, Outage
from tiergate.engine.rooms import Rooms
from tiergate.model import Record, State, Upload, Version
from tiergate.origin.client import OriginEntry, OriginPage
from tiergate.s3.listing import (
    MAX_KEYS,
    Change,
    CommonPrefix,
    Doubt,
    Entry,
    ListingPage,
    Merge,
    Position,
    decode_token,
    encode_name,
    list_objects_output,
    list_objects_v2_output,
    order,
    start_position,
)
from tiergate.s3.operations import render
from tiergate.writeback.sender import INTENT_SLACK_S

CHUNK_COUNT = 1000

MANY = 1 << 30
"""More than can be pending."""


class Listings:
    """The listing operations."""

    def __init__(self, rooms: Rooms, buckets: Buckets, outage: Outage) -> None:
        self._rooms = rooms
        self._outage = outage
        self._buckets = buckets

    async def list_v1(self, call: Call) -> Answer:
        """ListObjects."""
        params = call.params
        marker = params.get("Marker", "")
        prefix, delimiter = params.get("Prefix", ""), params.get("Delimiter", "")
        page = await self._page(call, start_position(marker, prefix, delimiter))
        owner = await self._buckets.owner(call.target.bucket) if page.entries else None
        output = list_objects_output(page, call.target.bucket, marker, params.get("EncodingType"), owner)
        headers, body = render(call.operation, output)
        return Answer(200, headers, body)

    async def list_v2(self, call: Call) -> Answer:
        """ListObjectsV2."""
        params = call.params
        token = params.get("ContinuationToken")
        start_after = params.get("StartAfter")
        prefix, delimiter = params.get("Prefix", ""), params.get("Delimiter", "")
        position = decode_token(token) if token else start_position(start_after or "", prefix, delimiter)
        page = await self._page(call, position)
        fetch_owner = bool(params.get("FetchOwner"))
        output = list_objects_v2_output(
            page,
            call.target.bucket,
            start_after,
            token,
            fetch_owner,
            params.get("EncodingType"),
            await self._buckets.owner(call.target.bucket) if fetch_owner and page.entries else None,
        )
        headers, body = render(call.operation, output)
        return Answer(200, headers, body)

    async def _page(self, call: Call, position: Position | None) -> ListingPage:
        bucket, params = call.target.bucket, call.params
        await self._buckets.known(bucket)
        prefix, delimiter = params.get("Prefix", ""), params.get("Delimiter", "")
        page = ListingPage(prefix, delimiter, params.get("MaxKeys", MAX_KEYS), position)
        if page.max_keys == 0:
            return page
        after = position.after if position else ""
        is_prefix = position is not None and position.is_prefix
        while True:
            before = await self._unpersisted(bucket, prefix, after)
            try:
                there = await self._origin_page(bucket, prefix, delimiter, after)
            except AWAY:
                # Only gateways write here, so what the directory knows is all there is.
                self._rooms.metrics.origin_outage_answers.inc()
                return await self._from_directory(call, position)
            items = await self._own(bucket, there)
            # A marker may have been withdrawn between the two: the origin does not hold it, and the first look did not
            # see it as un-persisted. So there is a second look; for what both saw, the later one counts.
            seen = {record.name.key: record for record in before}
            seen |= {record.name.key: record for record in await self._unpersisted(bucket, prefix, after)}
            records = within_page(seen.values(), after if is_prefix else "", there)
            for item in Merge(changes_of(records)).feed(items, last=True):
                found = item
                if isinstance(item, Doubt):
                    if not await self._stands(bucket, item):
                        continue
                    found = CommonPrefix(item.prefix)
                if not isinstance(found, Doubt) and not page.offer(found):
                    return page
            if not there.is_truncated:
                return page
            after = there.last_key
            is_prefix = after in there.common_prefixes

    async def _origin_page(self, bucket: str, prefix: str, delimiter: str, after: str) -> OriginPage:
        def question() -> Awaitable[OriginPage]:
            return self._rooms.origin.list_objects(bucket, prefix, delimiter, after, MAX_KEYS)

        if self._rooms.settings.prefix_for(bucket, prefix).exclusive:
            return await self._outage.ask(bucket, question)
        async with self._outage.bounded(bucket):
            return await question()

    async def _from_directory(self, call: Call, position: Position | None) -> ListingPage:
        params = call.params
        prefix = params.get("Prefix", "")
        page = ListingPage(prefix, params.get("Delimiter", ""), params.get("MaxKeys", MAX_KEYS), position)
        after = position.after if position else ""
        while True:
            chunk = await self._rooms.directory.scan(call.target.bucket, prefix, after, CHUNK_COUNT)
            for record in chunk:
                if record.version and not page.offer(entry_of(record.name.key, record.version)):
                    return page
            if len(chunk) < CHUNK_COUNT:
                return page
            after = chunk[-1].name.key

    async def _unpersisted(self, bucket: str, prefix: str, after: str) -> list[Record]:
        """The versions and deletions under the prefix that the origin does not hold yet."""
        found: list[Record] = []
        while True:
            chunk = await self._rooms.directory.scan_unpersisted(bucket, prefix, after, CHUNK_COUNT)
            found += chunk
            if len(chunk) < CHUNK_COUNT:
                return found
            after = chunk[-1].name.key

    async def _own(self, bucket: str, there: OriginPage) -> list[Entry | CommonPrefix]:
        """The origin's items; those that are our clean versions with the identity they always had (P6)."""
        records = await self._rooms.directory.records(bucket, [entry.key for entry in there.entries])
        clean = {record.name.key: record for record in records if record.state is State.CLEAN}

        def own(item: Entry | CommonPrefix) -> Entry | CommonPrefix:
            record = clean.get(item.key) if isinstance(item, Entry) else None
            if isinstance(item, Entry) and record and record.version and record.origin_etag == item.etag:
                return entry_of(item.key, record.version, item.owner_id)
            return item

        return [own(item) for item in origin_items(there)]

    async def _stands(self, bucket: str, doubt: Doubt) -> bool:
        """Whether the origin holds a key under the prefix that was not deleted."""
        after = ""
        while True:
            page = await self._rooms.origin.list_objects(bucket, doubt.prefix, "", after, MAX_KEYS)
            if any(entry.key not in doubt.deleted for entry in page.entries):
                return True
            if not page.is_truncated:
                return False
            after = page.entries[-1].key

    async def list_uploads(self, call: Call) -> Answer:
        """ListMultipartUploads: the gateway's own and the origin's, minus those that carry write-backs."""
        bucket, params = call.target.bucket, call.params
        await self._buckets.known(bucket)
        prefix, delimiter = params.get("Prefix", ""), params.get("Delimiter", "")
        limit = min(params.get("MaxUploads", MAX_KEYS), MAX_KEYS)
        ours = await self._rooms.directory.list_uploads(bucket, prefix)
        rows = [(upload.name.key, upload.upload_id, upload_item(upload)) for upload in ours]
        for key, upload_id, initiated_s in await self._origins_uploads(bucket, prefix):
            item = {"Key": key, "UploadId": upload_id, "Initiated": initiated_s, "StorageClass": "STANDARD"}
            rows.append((key, upload_id, item))
        rows.sort(key=lambda row: (order(row[0]), row[2]["Initiated"], row[1]))
        output = uploads_output(rows, params, prefix, delimiter, limit)
        owner = await self._buckets.owner(bucket) if output["Uploads"] else None
        for item in output["Uploads"]:
            item.update(owned_by(owner))
        headers, body = render(call.operation, output | {"Bucket": bucket})
        return Answer(200, headers, body)

    async def _origins_uploads(self, bucket: str, prefix: str) -> list[tuple[str, str, float]]:
        """The origin's uploads, but those that carry write-backs. While the origin answers, one of these may begin or
        end; its key then has a pending write before or after."""
        directory = self._rooms.directory
        hidden: set[str] = set()
        since_s: dict[str, float] = {}

        async def look() -> None:
            hidden.update(await directory.origin_upload_ids(bucket))
            for write in await directory.pending_under(bucket, prefix, MANY):
                # An upload is noted before it is asked for, and named when the answer has come.
                unnamed = any(not upload.upload_id for upload in (write.upload, *write.leftovers) if upload is not None)
                key, begun_s = write.name.key, 0.0 if unnamed else write.committed_s - INTENT_SLACK_S
                since_s[key] = min(since_s.get(key, begun_s), begun_s)

        await look()
        found = await self._rooms.origin.list_uploads(bucket, prefix)
        await look()
        return [
            (key, upload_id, initiated_s)
            for key, upload_id, initiated_s in found
            if upload_id not in hidden and (key not in since_s or initiated_s < since_s[key])
        ]


def owned_by(owner: str | None) -> dict[str, Any]:
    """The members of an upload that name its owner, who also began it."""
    return {"Owner": {"ID": owner}, "Initiator": {"ID": owner}} if owner else {}


def within_page(records: Iterable[Record], listed_prefix: str, page: OriginPage) -> list[Record]:
    """Those that belong between the origin's page before and the end of `page`, sorted; keys under `listed_prefix` were
    rolled up on the page before."""
    found = sorted(records, key=lambda record: order(record.name.key))
    if listed_prefix:
        found = [record for record in found if not record.name.key.startswith(listed_prefix)]
    if not page.is_truncated:
        return found
    last = page.last_key
    under = last if last in page.common_prefixes else None
    return [
        record
        for record in found
        if order(record.name.key) <= order(last) or (under is not None and record.name.key.startswith(under))
    ]


def changes_of(records: Sequence[Record]) -> Iterator[Change]:
    """Un-persisted versions and deletions as changes to the origin's listing."""
    for record in records:
        version = record.version
        yield Change(record.name.key, entry_of(record.name.key, version) if version else None)


def entry_of(key: str, version: Version, owner_id: str | None = None) -> Entry:
    """A version as a listing shows it."""
    extras: dict[str, Any] = {}
    if version.checksums:
        extras["ChecksumAlgorithm"] = [name.upper() for name in version.checksums]
        extras["ChecksumType"] = version.checksum_type
    storage_class = version.headers.get("x-amz-storage-class", "STANDARD")
    return Entry(key, version.size_bytes, version.etag, version.modified_s, storage_class, owner_id, extras)


def origin_items(page: OriginPage) -> Iterator[Entry | CommonPrefix]:
    """A page of the origin in key order, keys and prefixes together."""
    items: list[Entry | CommonPrefix] = [origin_entry(entry) for entry in page.entries]
    items += [CommonPrefix(prefix) for prefix in page.common_prefixes]
    items.sort(key=lambda item: order(item.prefix if isinstance(item, CommonPrefix) else item.key))
    return iter(items)


def origin_entry(entry: OriginEntry) -> Entry:
    """A key as the origin lists it."""
    owner_id = entry.owner[0] if entry.owner else None
    extras: dict[str, Any] = {}
    if entry.checksum_algorithms:
        extras["ChecksumAlgorithm"] = list(entry.checksum_algorithms)
    if entry.checksum_type:
        extras["ChecksumType"] = entry.checksum_type
    return Entry(
        entry.key,
        entry.size_bytes,
        entry.etag,
        entry.modified_s,
        entry.storage_class or "STANDARD",
        owner_id,
        extras,
    )


def upload_item(upload: Upload) -> dict[str, Any]:
    """An upload in progress as ListMultipartUploads shows it."""
    item: dict[str, Any] = {
        "Key": upload.name.key,
        "UploadId": upload.upload_id,
        "Initiated": int(upload.started_s),
        "StorageClass": upload.version.headers.get("x-amz-storage-class", "STANDARD"),
    }
    if upload.algorithm:
        item |= {"ChecksumAlgorithm": upload.algorithm.upper(), "ChecksumType": upload.checksum_type}
    return item


def uploads_output(
    rows: Sequence[tuple[str, str, dict[str, Any]]],
    params: dict[str, Any],
    prefix: str,
    delimiter: str,
    limit: int,
) -> dict[str, Any]:
    """One page of uploads, rolled up at the delimiter.

    https://docs.aws.amazon.com/AmazonS3/latest/API/API_ListMultipartUploads.html
    """
    url = params.get("EncodingType") == "url"
    show = encode_name if url else str
    key_marker, id_marker = params.get("KeyMarker", ""), params.get("UploadIdMarker", "")
    uploads: list[dict[str, Any]] = []
    prefixes: list[str] = []
    last: tuple[str, str] = ("", "")
    truncated = False
    # An upload that ended meanwhile still has its place among those of its key.
    stands = any(key == key_marker and upload_id == id_marker for key, upload_id, _ in rows)
    passed = not stands
    for key, upload_id, item in rows:
        if key_marker and order(key) <= order(key_marker):
            if key != key_marker or not id_marker:
                continue
            if not passed:
                passed = upload_id == id_marker
                continue
            if not stands and upload_id <= id_marker:
                continue
        cut = key.find(delimiter, len(prefix)) if delimiter else -1
        rolled = key[: cut + len(delimiter)] if cut >= 0 else None
        if rolled is not None and (rolled in prefixes or rolled == key_marker):
            continue
        if limit == 0:
            break
        if len(uploads) + len(prefixes) >= limit:
            truncated = True
            break
        if rolled is not None:
            prefixes.append(rolled)
            last = (rolled, "")
        else:
            uploads.append(item | {"Key": show(key)})
            last = (key, upload_id)
    output: dict[str, Any] = {
        "KeyMarker": show(key_marker),
        "UploadIdMarker": id_marker,
        "Prefix": show(prefix),
        "MaxUploads": limit,
        "IsTruncated": truncated,
        "Uploads": uploads,
        "CommonPrefixes": [{"Prefix": show(item)} for item in prefixes],
    }
    if delimiter:
        output["Delimiter"] = show(delimiter)
    if url:
        output["EncodingType"] = "url"
    if truncated:
        output |= {"NextKeyMarker": show(last[0]), "NextUploadIdMarker": last[1]}
    return output
