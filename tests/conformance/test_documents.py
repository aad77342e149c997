"""XML bodies and part lists that S3 refuses, each with its own word; nothing changes by them."""

import base64
import hashlib
from dataclasses import replace

import pytest
from tests.conformance.rows import Row, check
from tests.conformance.wire import Ask, Bucket, part_list
from tests.several import memory_ack

MIB = 1 << 20
MALFORMED = (400, "MalformedXML")


def delete(document: bytes, **headers: str) -> Ask:
    return Ask("POST", "/conformance", "delete=", headers=headers, body=document)


def listed(count: int) -> bytes:
    return b"<Delete>" + b"".join(b"<Object><Key>k%d</Key></Object>" % n for n in range(count)) + b"</Delete>"


ENTITIES = (
    b'<!DOCTYPE d [<!ENTITY a "aaaaaaaaaa"><!ENTITY b "&a;&a;&a;&a;&a;&a;&a;&a;">]>'
    b"<Delete><Object><Key>&b;</Key></Object></Delete>"
)
EXTERNAL = b'<!DOCTYPE d SYSTEM "file:///etc/passwd"><Delete><Object><Key>k</Key></Object></Delete>'

DELETES = [
    Row("empty", delete(b""), 400, "MissingRequestBodyError|MalformedXML"),
    Row("no_xml", delete(b"{}"), *MALFORMED),
    Row("cut_short", delete(listed(2)[:-3]), *MALFORMED),
    Row("other_root", delete(b"<Remove><Object><Key>k</Key></Object></Remove>"), *MALFORMED),
    Row("entities", delete(ENTITIES), *MALFORMED),
    Row("external_entity", delete(EXTERNAL), *MALFORMED),
    Row("deep", delete(b"<Delete>" + b"<a>" * 5000 + b"</a>" * 5000 + b"</Delete>"), *MALFORMED),
    Row("wide", delete(b"<Delete>" + b"<a/>" * 300_000 + b"</Delete>"), *MALFORMED),
    Row("huge", delete(b"<Delete>" + b" " * (5 * MIB) + b"</Delete>"), 400, "MaxMessageLengthExceeded"),
    Row("no_objects", delete(b"<Delete></Delete>"), *MALFORMED),
    Row("object_without_key", delete(b"<Delete><Object/></Delete>"), *MALFORMED),
    Row("1001_objects", delete(listed(1001)), *MALFORMED),
    Row("1000_objects", delete(listed(1000)), 200),
    Row("not_utf8", delete(b"<Delete><Object><Key>\xff</Key></Object></Delete>"), *MALFORMED),
    Row("bad_md5", delete(listed(1), **{"Content-MD5": base64.b64encode(bytes(16)).decode()}), 400, "BadDigest"),
    Row(
        "good_md5",
        delete(listed(1), **{"Content-MD5": base64.b64encode(hashlib.md5(listed(1)).digest()).decode()}),
        200,
    ),
    Row("bad_crc32", delete(listed(1), **{"x-amz-checksum-crc32": "AAAAAA=="}), 400, "BadDigest"),
    Row("empty_key", delete(b"<Delete><Object><Key></Key></Object></Delete>"), *MALFORMED),
]


@pytest.mark.parametrize("row", DELETES, ids=str)
def test_delete_document_is_judged(s3: Bucket, prefix: str, row: Row) -> None:
    s3.put(f"{prefix}stays", b"1")
    reply = check(s3, row)
    if row.status == 200:
        assert reply.texts("Error/Code") == []
    assert s3.get(f"{prefix}stays").status == 200


def test_delete_answers_for_each_key_and_quiet_for_none(s3: Bucket, prefix: str) -> None:
    keys = [f"{prefix}a&b", f"{prefix}absent", f"{prefix}sp ace"]
    items = "".join(f"<Object><Key>{key.replace('&', '&amp;')}</Key></Object>" for key in keys)
    for quiet, shown in (("true", []), ("false", keys)):
        s3.put(keys[0], b"1")
        s3.put(keys[2], b"1")
        document = f'<Delete xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><Quiet>{quiet}</Quiet>{items}</Delete>'
        reply = s3.ask(delete(document.encode()))
        assert reply.texts("Deleted/Key") == shown
        assert s3.keys(prefix) == []


def test_delete_of_an_impossible_key_is_an_error_of_that_key_alone(s3: Bucket, prefix: str) -> None:
    s3.put(f"{prefix}o", b"1")
    long, good = "k" * 1025, f"{prefix}o"
    reply = s3.ask(
        delete(f"<Delete><Object><Key>{long}</Key></Object><Object><Key>{good}</Key></Object></Delete>".encode())
    )
    assert reply.status == 200
    assert (reply.texts("Error/Key"), reply.texts("Error/Code")) == ([long], ["KeyTooLongError"])
    assert reply.texts("Deleted/Key") == [good]


def test_delete_on_conditions_judges_each_key_by_its_own(s3: Bucket, prefix: str) -> None:
    keys = [prefix + name for name in ("right", "wrong", "star", "absent", "plain")]
    etags = {key: s3.put(key, key.encode()).etag for key in keys}
    s3.delete(keys[3])
    said = [etags[keys[0]], '"00000000000000000000000000000000"', "*", etags[keys[3]]]
    items = [f"<Object><Key>{key}</Key><ETag>{etag}</ETag></Object>" for key, etag in zip(keys, said, strict=False)]
    reply = s3.ask(delete(f"<Delete>{''.join(items)}<Object><Key>{keys[4]}</Key></Object></Delete>".encode()))
    assert (reply.status, reply.headers["x-tiergate-ack"]) == (200, memory_ack()), str(reply)
    assert reply.texts("Deleted/Key") == [keys[0], keys[2], keys[4]]
    assert reply.texts("Error/Key") == [keys[1], keys[3]]
    assert reply.texts("Error/Code") == ["PreconditionFailed", "NoSuchKey"]
    assert s3.keys(prefix) == [keys[1]]


PART_LISTS: list[tuple[str, list[tuple[int | str, str]], int, str]] = [
    ("none", [], *MALFORMED),
    ("descending", [(2, "two"), (1, "one")], 400, "InvalidPartOrder"),
    ("repeated", [(1, "one"), (1, "one")], 400, "InvalidPartOrder"),
    ("missing_part", [(1, "one"), (7, "one")], 400, "InvalidPart"),
    ("wrong_etag", [(1, "two"), (2, "two")], 400, "InvalidPart"),
    ("first_too_small", [(2, "two"), (3, "three")], 400, "EntityTooSmall"),
    ("number_zero", [(0, "one")], 400, "InvalidArgument|InvalidPart"),
    ("number_10001", [(10001, "one")], 400, "InvalidArgument|InvalidPart"),
    ("number_no_number", [("one", "one")], *MALFORMED),
    ("right", [(1, "one"), (3, "three")], 200, ""),
]


@pytest.mark.parametrize(("name", "chosen", "status", "code"), PART_LISTS, ids=[row[0] for row in PART_LISTS])
def test_part_list_is_judged(
    s3: Bucket, prefix: str, name: str, chosen: list[tuple[int | str, str]], status: int, code: str
) -> None:
    key, bodies = f"{prefix}o", {"one": b"1" * (5 * MIB), "two": b"two", "three": b"three"}
    s3.put(key, b"before")
    upload_id = s3.create_upload(key)
    etags = {word: s3.part(key, upload_id, number, body) for number, (word, body) in enumerate(bodies.items(), 1)}
    document = part_list([(number, etags[word]) for number, word in chosen])
    ask = Ask("POST", s3.path(key), f"uploadId={upload_id}", body=document)
    check(s3, Row(name, ask, status, code))
    assert s3.get(key).body == (bodies["one"] + b"three" if status == 200 else b"before")
    for junk in (b"", b"<x", b"<Other/>", ENTITIES):
        if status != 200:
            check(s3, Row(name, replace(ask, body=junk), *MALFORMED))
    assert s3.call("DELETE", key, uploadId=upload_id).status == (404 if status == 200 else 204)


UPLOAD_ROWS = [
    Row("part_zero", Ask("PUT", "/conformance/{}", "partNumber=0&uploadId={id}", body=b"x"), 400, "InvalidArgument"),
    Row(
        "part_10001", Ask("PUT", "/conformance/{}", "partNumber=10001&uploadId={id}", body=b"x"), 400, "InvalidArgument"
    ),
    Row("part_word", Ask("PUT", "/conformance/{}", "partNumber=one&uploadId={id}", body=b"x"), 400, "InvalidArgument"),
    Row("part_10000", Ask("PUT", "/conformance/{}", "partNumber=10000&uploadId={id}", body=b"x"), 200),
    Row("other_key", Ask("PUT", "/conformance/{}-other", "partNumber=1&uploadId={id}", body=b"x"), 404, "NoSuchUpload"),
    Row(
        "other_key_complete",
        Ask("POST", "/conformance/{}-other", "uploadId={id}", body=part_list([(1, "x")])),
        404,
        "NoSuchUpload",
    ),
    Row("max_parts_word", Ask("GET", "/conformance/{}", "max-parts=ten&uploadId={id}"), 400, "InvalidArgument"),
    Row("max_parts_negative", Ask("GET", "/conformance/{}", "max-parts=-1&uploadId={id}"), 400, "InvalidArgument"),
    Row("marker_word", Ask("GET", "/conformance/{}", "part-number-marker=x&uploadId={id}"), 400, "InvalidArgument"),
    Row("max_parts_zero", Ask("GET", "/conformance/{}", "max-parts=0&uploadId={id}"), 200),
]


@pytest.mark.parametrize("row", UPLOAD_ROWS, ids=str)
def test_request_on_an_upload_is_judged(s3: Bucket, prefix: str, row: Row) -> None:
    upload_id = s3.create_upload(f"{prefix}o")
    path, query = row.ask.path.replace("{}", f"{prefix}o"), row.ask.query.replace("{id}", upload_id)
    check(s3, replace(row, ask=replace(row.ask, path=path, query=query)))
    assert s3.call("DELETE", f"{prefix}o", uploadId=upload_id).status == 204


@pytest.mark.parametrize("upload_id", ["nonsense", "tiergate.nonsense", "%2e%2e%2f", "x" * 900])
def test_upload_that_never_was_is_not_found(s3: Bucket, prefix: str, upload_id: str) -> None:
    path = s3.path(f"{prefix}o")
    for ask in (
        Ask("PUT", path, f"partNumber=1&uploadId={upload_id}", body=b"x"),
        Ask("POST", path, f"uploadId={upload_id}", body=part_list([(1, "x")])),
        Ask("DELETE", path, f"uploadId={upload_id}"),
        Ask("GET", path, f"uploadId={upload_id}"),
    ):
        if upload_id.startswith("tiergate."):
            check(s3, Row("never", ask, 404, "NoSuchUpload"))
        else:
            assert s3.ask(ask).status >= 400  # the origin's own word


def test_copy_sources_that_are_wrong_are_refused(s3: Bucket, prefix: str) -> None:
    s3.put(f"{prefix}o", b"1")
    rows = [
        ("no_key", "/conformance", 400, "InvalidArgument"),
        ("nothing", "/", 400, "InvalidArgument"),
        ("absent", f"/conformance/{prefix}absent", 404, "NoSuchKey"),
        ("absent_bucket", "/no-such-bucket-conformance/k", 404, "NoSuchBucket"),
        ("onto_itself", f"/conformance/{prefix}o", 400, "InvalidRequest"),
        ("bad_percent", "/conformance/a%zz", 400, "InvalidArgument"),
    ]
    for name, source, status, code in rows:
        check(s3, Row(name, Ask("PUT", s3.path(f"{prefix}o"), headers={"x-amz-copy-source": source}), status, code))
    assert s3.get(f"{prefix}o").body == b"1"
