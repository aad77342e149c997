"""What an object is told of in headers, listings and reads: S3's rules, and the same answer from every tier."""

from collections.abc import Sequence
from typing import Any

import pytest
from tests.conformance.rows import Row, aimed
from tests.conformance.wire import Ask, Bucket, Reply

from tiergate.testing.node import RunningNode
from tiergate.testing.origins import ProcessOrigin

BODY = b"0123456789"


def put(name: str, headers: dict[str, str], status: int, code: str = "") -> Row:
    return Row(name, Ask("PUT", "/conformance/{}k", headers=headers, body=BODY), status, code)


WRITES = [
    put("tags", {"x-amz-tagging": "a=b&c+d=%2F"}, 200),
    put("tags_ten", {"x-amz-tagging": "&".join(f"k{n}=v" for n in range(10))}, 200),
    put("tags_eleven", {"x-amz-tagging": "&".join(f"k{n}=v" for n in range(11))}, 400, "BadRequest"),
    put("tag_twice", {"x-amz-tagging": "a=b&a=c"}, 400, "InvalidArgument"),
    put("tag_bad_percent", {"x-amz-tagging": "a=%zz"}, 400, "InvalidArgument"),
    put("tag_bad_sign", {"x-amz-tagging": "a=<"}, 400, "InvalidTag"),
    put("tag_long_key", {"x-amz-tagging": "k" * 129 + "=v"}, 400, "InvalidTag"),
    put("tag_long_value", {"x-amz-tagging": "k=" + "v" * 257}, 400, "InvalidTag"),
    put("tag_reserved", {"x-amz-tagging": "aws:a=b"}, 400, "InvalidTag"),
    put("storage_class", {"x-amz-storage-class": "STANDARD_IA"}, 200),
    put("storage_class_small", {"x-amz-storage-class": "standard_ia"}, 400, "InvalidStorageClass"),
    put("storage_class_empty", {"x-amz-storage-class": ""}, 400, "InvalidStorageClass"),
    put("kms_key_alone", {"x-amz-server-side-encryption-aws-kms-key-id": "k"}, 400, "InvalidArgument"),
    put(
        "kms_key_aes",
        {"x-amz-server-side-encryption": "AES256", "x-amz-server-side-encryption-aws-kms-key-id": "k"},
        400,
        "InvalidArgument",
    ),
    put("redirect", {"x-amz-website-redirect-location": "/elsewhere"}, 200),
    put("redirect_nowhere", {"x-amz-website-redirect-location": "elsewhere"}, 400, "InvalidRedirectLocation"),
]


BOTH = [(how, row) for how in ("put", "multipart") for row in WRITES]
# The origin at hand takes any storage class for an upload.
JUDGED_HERE = [(how, row) for how, row in BOTH if how == "put" or row.code != "InvalidStorageClass"]


@pytest.mark.parametrize(("how", "row"), JUDGED_HERE, ids=[f"{how}-{row}" for how, row in JUDGED_HERE])
def test_description_of_an_object_is_judged_before_it_is_acknowledged(
    s3: Bucket, prefix: str, how: str, row: Row
) -> None:
    row = aimed(row, prefix)
    if how == "multipart":
        row = Row(row.name, Ask("POST", row.ask.path, "uploads=", row.ask.headers), row.status, row.code)
    # The form of a refusal may be the origin's.
    reply = s3.ask(row.ask)
    assert (reply.status, reply.code if reply.status >= 400 else "") == (row.status, row.code), f"{row}: {reply}"
    assert s3.get(f"{prefix}k").status == (200 if row.status == 200 and how == "put" else 404)


@pytest.mark.parametrize("more", [{}, {"x-amz-acl": "private"}], ids=["own", "forwarded"])
@pytest.mark.parametrize(
    "raw", [b'attachment; filename="\xe9"', 'attachment; filename="é"'.encode()], ids=["latin", "utf8"]
)
def test_header_in_any_encoding_is_kept(s3: Bucket, prefix: str, raw: bytes, more: dict[str, str]) -> None:
    key = f"{prefix}k"
    ask = Ask("PUT", s3.path(key), headers=more, body=BODY, late=[("Content-Disposition", raw)])
    assert s3.ask(ask).status == 200
    for reply in (s3.get(key), s3.head(key)):
        assert reply.status == 200
        assert reply.headers["content-disposition"].startswith("attachment; filename=")


# -- reads
@pytest.mark.parametrize(
    ("if_range", "status"),
    [
        ("{etag}", 206),
        ('"another"', 200),
        ("W/{etag}", 200),
        ("{modified}", 206),
        ("Sat, 01 Jan 2000 00:00:00 GMT", 200),
        ("Fri, 01 Jan 2100 00:00:00 GMT", 200),
        ("rubbish", 200),
    ],
)
def test_if_range_gives_the_part_of_what_it_names_else_the_whole(
    s3: Bucket, prefix: str, if_range: str, status: int
) -> None:
    key = f"{prefix}k"
    s3.put(key, BODY)
    head = s3.head(key)
    value = if_range.format(etag=head.etag, modified=head.headers["last-modified"])
    for ask in (s3.get, s3.head):
        reply = ask(key, {"Range": "bytes=2-3", "If-Range": value})
        assert (reply.status, reply.headers["content-length"]) == (status, "2" if status == 206 else "10")


def test_answer_s_headers_are_chosen_by_who_signs_only(s3: Bucket, node: RunningNode, prefix: str) -> None:
    key = f"{prefix}k"
    s3.put(key, BODY)
    query = "response-content-type=a%2Fb"
    assert s3.ask(Ask("GET", s3.path(key), query)).headers["content-type"] == "a/b"
    assert s3.ask(Ask("GET", s3.path(key), query, presign_s=60)).headers["content-type"] == "a/b"
    assert s3.ask(Ask("GET", s3.path(key), query, signed=False)).status == 403
    with RunningNode(node.origin, flags=("--client-auth", "none")) as anybody:
        nobody = Bucket(anybody, s3.identity, s3.name)
        node.wait_settled()
        assert nobody.ask(Ask("GET", s3.path(key), signed=False)).body == BODY
        refused = nobody.ask(Ask("GET", s3.path(key), query, signed=False))
        assert (refused.status, refused.code) == (400, "InvalidRequest")
        assert nobody.ask(Ask("GET", s3.path(key), query)).headers["content-type"] == "a/b"


def test_deleted_key_of_a_versioned_bucket_names_its_marker(origin: ProcessOrigin, s3: Bucket, prefix: str) -> None:
    direct: Any = origin.client()
    direct.create_bucket(Bucket="conformance-markers")
    direct.put_bucket_versioning(Bucket="conformance-markers", VersioningConfiguration={"Status": "Enabled"})
    bucket, key = s3.named("conformance-markers"), f"{prefix}k"
    first = bucket.put(key, BODY).headers["x-amz-version-id"]
    gone = bucket.delete(key)
    assert gone.headers["x-amz-delete-marker"] == "true"
    head = bucket.head(key)
    assert head.status == 404
    assert head.headers["x-amz-delete-marker"] == "true"
    assert head.headers["x-amz-version-id"] == gone.headers["x-amz-version-id"]
    assert (bucket.get(key).status, bucket.get(key).code) == (404, "NoSuchKey")
    assert bucket.get(key, versionId=first).body == BODY
    direct.close()


# -- listings
def owners(page: Reply) -> Sequence[str]:
    return page.texts("Contents/Owner/ID")


def test_owner_is_listed_of_what_the_origin_does_not_hold_yet_too(
    s3: Bucket, node: RunningNode, origin: ProcessOrigin, prefix: str
) -> None:
    direct = origin.client()
    owner = direct.get_bucket_acl(Bucket="conformance")["Owner"]["ID"]
    direct.close()
    s3.put(f"{prefix}k", BODY)
    upload_id = s3.create_upload(f"{prefix}u")
    for _ in ("in memory", "written back"):
        assert owners(s3.call("GET", prefix=prefix)) == [owner]
        assert owners(s3.page(prefix, **{"fetch-owner": "true"})) == [owner]
        assert owners(s3.page(prefix)) == []
        node.wait_settled()
    assert s3.call("GET", uploads="", prefix=prefix).texts("Upload/Owner/ID") == [owner]
    assert s3.call("GET", f"{prefix}u", uploadId=upload_id).texts("Owner/ID") == [owner]


def test_next_marker_comes_with_a_delimiter_only(s3: Bucket, prefix: str) -> None:
    for name in ("a", "b/1", "c"):
        s3.put(prefix + name, BODY)
    plain = s3.call("GET", **{"prefix": prefix, "max-keys": "2"})
    assert (plain.text("IsTruncated"), plain.texts("NextMarker")) == ("true", [])
    divided = s3.call("GET", **{"prefix": prefix, "max-keys": "2", "delimiter": "/"})
    assert (divided.text("IsTruncated"), divided.texts("NextMarker")) == ("true", [f"{prefix}b/"])


UNUSUAL = ["a\x01b", "a\x1fb", "tab\tb", "\uffffb", "\U0001f600", "line\rb"]


@pytest.mark.parametrize("max_keys", ["1", "2", "1000"])
def test_keys_that_xml_cannot_hold_are_listed_encoded_from_every_tier(
    s3: Bucket, node: RunningNode, prefix: str, max_keys: str
) -> None:
    keys = sorted((prefix + name for name in UNUSUAL), key=str.encode)
    for key in keys:
        s3.put(key, key.encode())
    for _ in ("in memory", "written back"):
        found: list[str] = []
        more: dict[str, str] = {}
        while True:
            page = s3.page(prefix, **{"encoding-type": "url", "max-keys": max_keys}, **more)
            found += page.texts("Contents/Key")
            if page.text("IsTruncated") == "false":
                break
            more = {"continuation-token": page.text("NextContinuationToken")}
        assert len(found) == len(keys)
        assert [s3.get(key).body for key in keys] == [key.encode() for key in keys]
        node.wait_settled()


# -- copies onto themselves
@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 400),
        ({"x-amz-metadata-directive": "COPY"}, 400),
        ({"cache-control": "no-store"}, 400),
        ({"x-amz-meta-a": "b"}, 400),
        ({"x-amz-tagging-directive": "REPLACE", "x-amz-tagging": "a=b"}, 400),
        ({"x-amz-metadata-directive": "REPLACE"}, 200),
        ({"x-amz-storage-class": "STANDARD"}, 200),
        ({"x-amz-storage-class": "STANDARD_IA"}, 200),
        ({"x-amz-website-redirect-location": "/x"}, 200),
        ({"x-amz-server-side-encryption": "AES256"}, 200),
    ],
)
@pytest.mark.parametrize("is_written_back", [False, True], ids=["in_memory", "written_back"])
def test_copy_onto_itself_must_change_something(
    s3: Bucket, node: RunningNode, prefix: str, headers: dict[str, str], status: int, is_written_back: bool
) -> None:
    key = f"{prefix}k"
    s3.put(key, BODY, {"x-amz-meta-old": "1", "content-language": "de"})
    if is_written_back:
        node.wait_settled()
    reply = s3.call("PUT", key, b"", {"x-amz-copy-source": f"conformance/{key}"} | headers)
    assert reply.status == status, str(reply)
    assert status == 200 or reply.code == "InvalidRequest"
    got = s3.get(key)
    kept = headers.get("x-amz-metadata-directive") != "REPLACE"
    assert got.body == BODY
    assert (got.headers.get("x-amz-meta-old"), got.headers.get("content-language")) == (
        ("1", "de") if kept else (None,) * 2
    )
