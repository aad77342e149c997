"""What a forwarded operation changes, every later read shows; what it needs, it finds in the origin."""

from hashlib import sha256

import pytest
from tests.conformance.gateway import CLIENT
from tests.conformance.sides import Sides
from tests.conformance.wire import Ask, Bucket, Reply, Wire, crc32_of, md5_of, part_list

from tiergate.testing.origins import Gate, Hold

BUCKET = "changes"
BOUNDARY = "xYzZY"


@pytest.fixture(scope="module")
def s3(sides: Sides) -> Bucket:
    assert sides.direct(Ask("PUT", f"/{BUCKET}")).status == 200
    return Bucket(sides.node, CLIENT, BUCKET)


def form(fields: dict[str, str], body: bytes, filename: str = "a/name.txt") -> tuple[bytes, dict[str, str]]:
    """The body and headers of a browser's upload form."""
    pieces = [
        f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'.encode()
        for name, value in fields.items()
    ]
    pieces.append(
        f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="file"; filename="{filename}"\r\n'
        "Content-Type: text/plain\r\n\r\n".encode()
    )
    return b"".join(pieces) + body + f"\r\n--{BOUNDARY}--\r\n".encode(), {
        "Content-Type": f"multipart/form-data; boundary={BOUNDARY}"
    }


def post_form(sides: Sides, fields: dict[str, str], body: bytes) -> Reply:
    sent, headers = form(fields, body)
    return sides.through(Ask("POST", f"/{BUCKET}", headers=headers, body=sent))


def test_object_posted_by_a_form_replaces_what_the_node_holds(sides: Sides, s3: Bucket) -> None:
    s3.put("form/clean", b"old")
    sides.node.wait_settled()
    assert s3.get("form/clean").body == b"old"
    posted = post_form(sides, {"key": "form/clean", "Content-Type": "text/plain"}, b"posted")
    assert posted.status in (200, 204), str(posted)
    assert s3.get("form/clean").body == b"posted"
    assert s3.head("form/clean").headers["content-length"] == "6"


def test_object_posted_by_a_form_comes_after_what_is_dirty(sides: Sides, s3: Bucket) -> None:
    gate = Gate()
    sides.proxy.inject(Hold(gate), "PutObject", "form/dirty")
    s3.put("form/dirty", b"old")
    gate.wait_reached()
    sent, headers = form({"key": "form/dirty"}, b"posted")
    with Wire(sides.node.endpoint, CLIENT) as wire:
        wire.send(Ask("POST", f"/{BUCKET}", headers=headers, body=sent))
        gate.release()
        assert wire.reply("POST").status in (200, 204)
    assert s3.get("form/dirty").body == b"posted"
    sides.node.wait_settled()
    assert sides.direct(Ask("GET", f"/{BUCKET}/form/dirty")).body == b"posted"


def test_renamed_object_is_where_it_went_and_nowhere_else(sides: Sides, s3: Bucket) -> None:
    """The origin here does not know RenameObject: what it would do is done beside it."""
    put, renamed = Gate(), Gate()
    s3.put("rename/new", b"there before")
    sides.node.wait_settled()
    assert s3.get("rename/new").body == b"there before"
    sides.proxy.forget()
    sides.proxy.inject(Hold(put), "PutObject", "rename/old")
    sides.proxy.inject(Hold(renamed, after_origin=True), where=lambda seen: "renameObject" in seen.query)
    s3.put("rename/old", b"moved")
    put.wait_reached()
    with Wire(sides.node.endpoint, CLIENT) as wire:
        wire.send(Ask("PUT", s3.path("rename/new"), "renameObject=", {"x-amz-rename-source": f"/{BUCKET}/rename/old"}))
        put.release()
        renamed.wait_reached()
        assert sides.direct(Ask("GET", f"/{BUCKET}/rename/old")).body == b"moved", "written back first"
        assert sides.direct(Ask("PUT", f"/{BUCKET}/rename/new", body=b"moved")).status == 200
        assert sides.direct(Ask("DELETE", f"/{BUCKET}/rename/old")).status == 204
        renamed.release()
        wire.reply("PUT")
    assert s3.get("rename/old").status == 404
    assert s3.get("rename/new").body == b"moved"


def test_object_is_the_same_after_its_tags_were_changed(s3: Bucket) -> None:
    """Its ETag is opaque, so the origin has another one."""
    body = bytes(6 << 20)
    put = s3.put("tagged", body, {"x-amz-checksum-crc32": crc32_of(body), "x-amz-meta-m": "1"})
    tagging = b"<Tagging><TagSet><Tag><Key>a</Key><Value>b</Value></Tag></TagSet></Tagging>"

    def shown() -> list[str]:
        head, page = s3.head("tagged", {"x-amz-checksum-mode": "ENABLED"}), s3.page("tagged")
        named = ("etag", "last-modified", "x-amz-checksum-crc32", "x-amz-meta-m", "content-length")
        return (
            [head.headers[name] for name in named] + page.texts("Contents/ETag") + page.texts("Contents/LastModified")
        )

    before = shown()
    assert before[0] == put.etag == before[-2]
    changed = s3.call("PUT", "tagged", tagging, {"Content-MD5": md5_of(tagging)}, tagging="")
    assert changed.status == 200
    assert s3.page("tagged").texts("Contents/ETag") == [put.etag], "before anybody asked for the object"
    assert shown() == before
    assert s3.head("tagged").headers["x-amz-tagging-count"] == "1"
    assert s3.get("tagged").body == body


def test_part_with_what_only_the_origin_knows_is_never_taken_for_one_of_no_upload(s3: Bucket) -> None:
    """The upload is the gateway's own: the origin cannot answer for it."""
    headers = {"x-amz-invented": "1"}
    upload = s3.create_upload("own/upload")
    for method, query, body in (
        ("PUT", {"partNumber": "1", "uploadId": upload}, b"part"),
        ("GET", {"uploadId": upload}, b""),
        ("POST", {"uploadId": upload}, part_list([(1, s3.part("own/upload", upload, 1, b"part"))])),
        ("DELETE", {"uploadId": upload}, b""),
    ):
        reply = s3.call(method, "own/upload", body, headers, **query)
        assert (reply.status, reply.code) == (501, "NotImplemented"), str(reply)
    assert s3.call("GET", "", b"", headers, uploads="", prefix="own/").code == "NotImplemented"
    assert s3.call("GET", "", b"", headers, uploads="", prefix="other/").status == 200
    assert s3.call("DELETE", "own/upload", uploadId=upload).status == 204


def test_bucket_made_anew_holds_nothing_of_the_one_before(sides: Sides) -> None:
    bucket = Bucket(sides.node, CLIENT, "made-anew")
    assert bucket.call("PUT").status == 200
    bucket.put("o", b"first")
    upload = bucket.create_upload("u")
    sides.node.wait_settled()
    bucket.delete("o")
    sides.node.wait_settled()
    assert bucket.call("DELETE").status == 204
    assert bucket.get("o").code == "NoSuchBucket"
    assert bucket.call("PUT").status == 200
    assert bucket.get("o").code == "NoSuchKey"
    assert bucket.keys() == []
    assert bucket.call("GET", uploads="").texts("Upload/UploadId") == []
    assert bucket.call("PUT", "u", b"x", partNumber="1", uploadId=upload).code == "NoSuchUpload"


OWNER = {"x-amz-expected-bucket-owner": "123456789012"}
SHARDS = ("ck/__0_0.distcp", "ck/__1_0.distcp")
MARKER = "ck/.metadata"
ENABLED = b"<VersioningConfiguration><Status>Enabled</Status></VersioningConfiguration>"


@pytest.fixture
def versioned(sides: Sides, request: pytest.FixtureRequest) -> Bucket:
    """A versioned bucket: all writes of it are the origin's, inside their requests."""
    bucket = Bucket(sides.node, CLIENT, f"versioned-{sha256(request.node.name.encode()).hexdigest()[:8]}")
    assert bucket.call("PUT").status == 200
    assert bucket.call("PUT", "", ENABLED, versioning="").status == 200
    return bucket


def there(sides: Sides, bucket: Bucket) -> set[str]:
    """The keys that a reader of the origin alone sees."""
    return set(sides.direct(Ask("GET", f"/{bucket.name}")).texts("Contents/Key"))


def save(sides: Sides, bucket: Bucket, body: bytes) -> list[set[str]]:
    """A set, its marker last; what was in the origin after each write."""
    seen = []
    for key in (*SHARDS, MARKER):
        bucket.put(key, body)
        seen.append(there(sides, bucket))
    return seen


def test_set_is_overwritten_in_place_where_all_writes_go_through(sides: Sides, versioned: Bucket) -> None:
    """The marker that was withdrawn is not waited for longer than its set: the next one says that it is whole."""
    whole = {*SHARDS, MARKER}
    assert save(sides, versioned, b"first")[-1] == whole
    assert save(sides, versioned, b"second") == [set(SHARDS), set(SHARDS), whole]
    assert sides.direct(Ask("GET", versioned.path(MARKER))).body == b"second"
    assert versioned.get(MARKER).body == b"second"


@pytest.mark.parametrize("overwritten", [False, True])
def test_set_is_deleted_marker_first_where_all_deletes_go_through(
    sides: Sides, versioned: Bucket, overwritten: bool
) -> None:
    save(sides, versioned, b"first")
    if overwritten:
        versioned.put(SHARDS[0], b"second")
    for key in (*SHARDS, MARKER):
        versioned.delete(key)
        assert MARKER not in there(sides, versioned)
    assert there(sides, versioned) == set()
    assert sides.node.wait_settled()["writeback"]["pending"] == 0
    assert there(sides, versioned) == set()


def test_set_is_deleted_marker_first_by_a_delete_with_a_header_of_its_own(sides: Sides, s3: Bucket) -> None:
    for key in (*SHARDS, MARKER):
        s3.put(key, b"1")
    sides.node.wait_settled()
    for key in (*SHARDS, MARKER):
        assert s3.call("DELETE", key, b"", OWNER).status == 204
        assert MARKER not in there(sides, s3)
    assert not there(sides, s3) & {*SHARDS, MARKER}


def test_set_is_deleted_marker_first_by_deletes_that_name_versions(sides: Sides, s3: Bucket) -> None:
    """In a bucket without versions the version "null" is the current one; one deletion of many may name some."""
    null = {key: f"<Object><Key>{key}</Key><VersionId>null</VersionId></Object>" for key in (*SHARDS, "other")}
    plain = f"<Object><Key>{SHARDS[0]}</Key></Object>"
    for document in ("".join(null.values()), plain + null["other"], None):
        for key in (*SHARDS, MARKER, "other"):
            s3.put(key, b"1")
        sides.node.wait_settled()
        if document is None:
            assert s3.call("DELETE", SHARDS[0], versionId="null").status == 204
        else:
            body = f"<Delete>{document}</Delete>".encode()
            assert s3.call("POST", "", body, {"Content-MD5": md5_of(body)}, delete="").status == 200
        assert not there(sides, s3) & {SHARDS[0], MARKER}
