from typing import Any

import pytest
from multidict import CIMultiDict

from tiergate.errors import InvariantError, RequestError
from tiergate.s3.operations import parse, render, resolve, split_target, unknown_parts


def target(raw: str) -> Any:
    return split_target(raw, "localhost", [])


@pytest.mark.parametrize(
    ("method", "raw", "headers", "operation"),
    [
        ("GET", "/", {}, "ListBuckets"),
        ("GET", "/bkt", {}, "ListObjects"),
        ("GET", "/bkt?prefix=a&marker=b", {}, "ListObjects"),
        ("GET", "/bkt?list-type=2&prefix=uploads", {}, "ListObjectsV2"),
        ("GET", "/bkt?location", {}, "GetBucketLocation"),
        ("GET", "/bkt?location=", {}, "GetBucketLocation"),
        ("GET", "/bkt?uploads", {}, "ListMultipartUploads"),
        ("GET", "/bkt?versions", {}, "ListObjectVersions"),
        ("GET", "/bkt?analytics&id=1", {}, "GetBucketAnalyticsConfiguration"),
        ("GET", "/bkt?analytics", {}, "ListBucketAnalyticsConfigurations"),
        ("HEAD", "/bkt", {}, "HeadBucket"),
        ("PUT", "/bkt", {}, "CreateBucket"),
        ("DELETE", "/bkt", {}, "DeleteBucket"),
        ("POST", "/bkt?delete", {}, "DeleteObjects"),
        ("POST", "/bkt", {"Content-Type": "multipart/form-data; boundary=x"}, None),
        ("OPTIONS", "/bkt/k", {}, None),
        ("HEAD", "/", {}, None),
        ("GET", "/bkt/k", {}, "GetObject"),
        ("get", "/bkt/k?partNumber=1", {}, "GetObject"),
        ("GET", "/bkt/k?uploadId=u", {}, "ListParts"),
        ("GET", "/bkt/k?attributes", {}, "GetObjectAttributes"),
        ("HEAD", "/bkt/k", {}, "HeadObject"),
        ("PUT", "/bkt/k", {}, "PutObject"),
        ("PUT", "/bkt/k", {"X-Amz-Copy-Source": "/b/k"}, "CopyObject"),
        ("PUT", "/bkt/k?partNumber=1&uploadId=u", {}, "UploadPart"),
        ("PUT", "/bkt/k?partNumber=1&uploadId=u", {"x-amz-copy-source": "/b/k"}, "UploadPartCopy"),
        ("PUT", "/bkt/k?tagging", {}, "PutObjectTagging"),
        ("POST", "/bkt/k?uploads", {}, "CreateMultipartUpload"),
        ("POST", "/bkt/k?uploads=", {}, "CreateMultipartUpload"),
        ("POST", "/bkt/k?uploadId=u", {}, "CompleteMultipartUpload"),
        ("POST", "/bkt/k?select&select-type=2", {}, "SelectObjectContent"),
        ("POST", "/bkt/k", {}, None),
        ("DELETE", "/bkt/k", {}, "DeleteObject"),
        ("DELETE", "/bkt/k?uploadId=u", {}, "AbortMultipartUpload"),
        ("DELETE", "/bkt/k?x-id=DeleteObject", {}, "DeleteObject"),
    ],
)
def test_resolve_picks_the_most_specific_operation(
    method: str, raw: str, headers: dict[str, str], operation: str | None
) -> None:
    assert resolve(method, target(raw), headers) == operation


def test_unknown_parts_of_signed_and_presigned_requests_is_empty() -> None:
    headers = {
        "Authorization": "AWS4-HMAC-SHA256 ...",
        "X-Amz-Date": "20260101T000000Z",
        "x-amz-content-sha256": "STREAMING-UNSIGNED-PAYLOAD-TRAILER",
        "x-amz-security-token": "t",
        "x-amz-decoded-content-length": "3",
        "x-amz-trailer": "x-amz-checksum-crc32",
        "x-amz-sdk-checksum-algorithm": "CRC32",
        "x-amz-checksum-crc64nvme": "AAAAAAAAAAA=",
        "x-amz-user-agent": "aws-sdk-js",
        "amz-sdk-request": "attempt=1",
        "amz-sdk-invocation-id": "1",
        "x-amz-meta-colour": "red",
        "x-amz-storage-class": "STANDARD_IA",
    }
    assert unknown_parts("PutObject", target("/bkt/k?x-id=PutObject"), headers) == []
    presigned = target(
        "/bkt/k?X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Credential=c&X-Amz-Date=d&X-Amz-Expires=60"
        "&X-Amz-SignedHeaders=host&X-Amz-Signature=s&X-Amz-Security-Token=t&response-content-type=text%2Fplain"
        "&x-amz-checksum-mode=ENABLED&versionId=v"
    )
    assert unknown_parts("GetObject", presigned, {}) == []
    assert parse("GetObject", presigned, {}, b"")["ChecksumMode"] == "ENABLED"
    old = target("/bkt/k?AWSAccessKeyId=a&Signature=s&Expires=1")
    assert unknown_parts("GetObject", old, {}) == []


def test_unknown_parts_names_parameters_headers_and_values_the_model_lacks() -> None:
    headers = {
        "x-amz-new-feature": "1",
        "x-amz-storage-class": "SUPER_COLD",
        "x-amz-object-lock-mode": "GOVERNANCE",
        "x-amz-website-redirect-location": "/x",
        "x-amz-sdk-checksum-algorithm": "sha256",
    }
    found = unknown_parts("PutObject", target("/bkt/k?newthing&uploadId=u&x-amz-acl=private"), headers)
    assert found == ["newthing", "uploadId", "x-amz-acl", "x-amz-new-feature", "x-amz-storage-class"]
    assert unknown_parts("ListObjects", target("/bkt?list-type=3"), {}) == ["list-type"]
    assert unknown_parts("CopyObject", target("/bkt/k"), {"x-amz-checksum-crc32": "AAAAAA=="}) == [
        "x-amz-checksum-crc32"
    ]


def test_parse_put_object_types_members_and_drops_framing() -> None:
    headers = {
        "Content-Length": "90",
        "Content-Encoding": "aws-chunked, gzip",
        "Content-Type": "text/plain",
        "Expires": "whenever",
        "X-Amz-Decoded-Content-Length": "7",
        "X-Amz-Meta-Colour": "caf\u00e9",
        "x-amz-meta-raw": "caf\udce9",
        "x-amz-meta-word": "=?UTF-8?B?w6k=?=",
        "x-amz-server-side-encryption-bucket-key-enabled": "TRUE",
        "If-None-Match": "*",
    }
    assert parse("PutObject", target("/bkt/k"), headers, b"") == {
        "Bucket": "bkt",
        "Key": "k",
        "ContentLength": 7,
        "ContentEncoding": "gzip",
        "ContentType": "text/plain",
        "Expires": "whenever",
        "Metadata": {"colour": "café", "raw": "café", "word": "=?UTF-8?B?w6k=?="},
        "BucketKeyEnabled": True,
        "IfNoneMatch": "*",
    }
    untouched = parse("PutObject", target("/bkt/k"), {"Content-Encoding": "gzip , br"}, b"")
    assert untouched["ContentEncoding"] == "gzip , br"
    alone = parse("PutObject", target("/bkt/k"), {"Content-Encoding": "aws-chunked"}, b"")
    assert "ContentEncoding" not in alone


def test_parse_repeated_headers_of_a_multidict_are_joined() -> None:
    headers = CIMultiDict([("x-amz-meta-a", "1"), ("X-Amz-Meta-A", "2"), ("If-Match", '"x"'), ("If-Match", "y")])
    parsed = parse("GetObject", target("/bkt/k"), headers, b"")
    assert parsed["IfMatch"] == '"x",y'
    assert parse("PutObject", target("/bkt/k"), headers, b"")["Metadata"] == {"a": "1,2"}


def test_parse_unreadable_if_modified_since_is_ignored_but_copy_conditions_are_not() -> None:
    assert "IfModifiedSince" not in parse("GetObject", target("/bkt/k"), {"If-Modified-Since": "soon"}, b"")
    headers = {"x-amz-copy-source": "b/k", "x-amz-copy-source-if-modified-since": "soon"}
    with pytest.raises(RequestError) as caught:
        parse("CopyObject", target("/bkt/k"), headers, b"")
    assert caught.value.code == "InvalidArgument"


@pytest.mark.parametrize(
    ("operation", "raw", "code"),
    [
        ("ListObjectsV2", "/bkt?list-type=2&max-keys=blah", "InvalidArgument"),
        ("ListObjectsV2", "/bkt?list-type=2&max-keys=-1", "InvalidArgument"),
        ("ListObjectsV2", "/bkt?list-type=2&max-keys=1_0", "InvalidArgument"),
        ("ListObjects", "/bkt?max-keys=3000000000", "InvalidArgument"),
        ("ListObjects", "/bkt?encoding-type=base64", "InvalidArgument"),
        ("ListObjectsV2", "/bkt?list-type=2&fetch-owner=perhaps", "InvalidArgument"),
        ("UploadPart", "/bkt/k?partNumber=0&uploadId=u", "InvalidArgument"),
        ("UploadPart", "/bkt/k?partNumber=10001&uploadId=u", "InvalidArgument"),
        ("UploadPart", "/bkt/k?partNumber=x&uploadId=u", "InvalidArgument"),
        ("GetObject", "/bkt/k?partNumber=0", "InvalidArgument"),
        ("ListParts", "/bkt/k?uploadId=u&max-parts=-2", "InvalidArgument"),
        ("ListParts", "/bkt/k?uploadId=u&part-number-marker=-2", "InvalidArgument"),
        ("GetObject", "/bkt/k?response-content-type=a%0d%0aSet-Cookie:%20x", "InvalidArgument"),
        ("GetObjectAttributes", "/bkt/k?attributes", "InvalidRequest"),
    ],
)
def test_parse_bad_parameter_is_refused_with_the_code(operation: str, raw: str, code: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse(operation, target(raw), {}, b"")
    assert caught.value.code == code


def test_parse_empty_numbers_and_encoding_type_count_as_absent() -> None:
    parsed = parse("ListObjects", target("/bkt?max-keys=&encoding-type=&delimiter=&prefix"), {}, b"")
    assert parsed == {"Bucket": "bkt", "Delimiter": "", "Prefix": ""}


COMPLETE = "<CompleteMultipartUpload>{}</CompleteMultipartUpload>"
PART = "<Part><PartNumber>{}</PartNumber><ETag>{}</ETag></Part>"


def test_parse_complete_multipart_upload_unquotes_etags_with_or_without_namespace() -> None:
    inner = PART.format(1, "&quot;abc&quot;") + PART.format(7, "def")
    plain = COMPLETE.format(inner)
    spaced = plain.replace(
        "<CompleteMultipartUpload>",
        '\n<CompleteMultipartUpload xmlns="http://s3.amazonaws.com/doc/2006-03-01/">\n  ',
        1,
    )
    for body in (plain, spaced):
        parsed = parse("CompleteMultipartUpload", target("/bkt/k?uploadId=u"), {}, body.encode())
        assert parsed["UploadId"] == "u"
        assert parsed["MultipartUpload"] == {
            "Parts": [{"PartNumber": 1, "ETag": "abc"}, {"PartNumber": 7, "ETag": "def"}]
        }


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("", "MalformedXML"),
        ("<CompleteMultipartUpload/>", "MalformedXML"),
        ("<Other/>", "MalformedXML"),
        ("<CompleteMultipartUpload>", "MalformedXML"),
        (COMPLETE.format("<Part><PartNumber>1</PartNumber></Part>"), "MalformedXML"),
        (COMPLETE.format("<Part><ETag>a</ETag></Part>"), "MalformedXML"),
        (COMPLETE.format(PART.format("one", "a")), "MalformedXML"),
        (COMPLETE.format(PART.format(1, "a").replace("</Part>", "<New>x</New></Part>")), "MalformedXML"),
        (COMPLETE.format("text" + PART.format(1, "a")), "MalformedXML"),
        (COMPLETE.format(PART.format("1</PartNumber><PartNumber>2", "a")), "MalformedXML"),
        (COMPLETE.format(PART.format(0, "a")), "InvalidArgument"),
        (COMPLETE.format(PART.format(2, "a") + PART.format(1, "b")), "InvalidPartOrder"),
        (COMPLETE.format(PART.format(2, "a") + PART.format(2, "b")), "InvalidPartOrder"),
    ],
)
def test_parse_bad_completion_is_refused_with_the_code(body: str, code: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse("CompleteMultipartUpload", target("/bkt/k?uploadId=u"), {}, body.encode())
    assert caught.value.code == code


def test_parse_delete_objects_keeps_every_character_of_keys() -> None:
    body = "<Delete><Object><Key> a&#13;&#10;&amp;\tb </Key></Object><Quiet>true</Quiet></Delete>"
    parsed = parse("DeleteObjects", target("/bkt?delete"), {}, body.encode())
    assert parsed["Delete"] == {"Objects": [{"Key": " a\r\n&\tb "}], "Quiet": True}


def test_parse_delete_objects_bounds_and_emptiness_are_checked() -> None:
    def code(body: str) -> str:
        with pytest.raises(RequestError) as caught:
            parse("DeleteObjects", target("/bkt?delete"), {}, body.encode())
        return caught.value.code

    def keys(count: int) -> str:
        return "<Delete>" + "<Object><Key>k</Key></Object>" * count + "</Delete>"

    assert code("") == "MissingRequestBodyError"
    assert code("<Delete/>") == "MalformedXML"
    assert code("<Delete><Object><Key/></Object></Delete>") == "MalformedXML"
    assert code(keys(1001)) == "MalformedXML"
    assert len(parse("DeleteObjects", target("/bkt?delete"), {}, keys(1000).encode())["Delete"]["Objects"]) == 1000


def test_render_head_object_quotes_formats_and_encodes_headers() -> None:
    headers, body = render(
        "HeadObject",
        {
            "ETag": "abc-2",
            "LastModified": 784111777,
            "ContentLength": 0,
            "DeleteMarker": False,
            "Expires": "whenever",
            "ObjectLockRetainUntilDate": 0,
            "Metadata": {"plain": "a b", "café": "x", "euro": "€uro", "lines": "a\r\nb"},
            "VersionId": None,
        },
    )
    assert body == b""
    assert headers["ETag"] == '"abc-2"'
    assert headers["Last-Modified"] == "Sun, 06 Nov 1994 08:49:37 GMT"
    assert headers["Content-Length"] == "0"
    assert headers["x-amz-delete-marker"] == "false"
    assert headers["Expires"] == "whenever"
    assert headers["x-amz-object-lock-retain-until-date"] == "1970-01-01T00:00:00.000Z"
    assert headers["x-amz-meta-plain"] == "a b"
    assert headers["x-amz-meta-euro"].startswith("=?utf-8?")
    assert "\n" not in headers["x-amz-meta-lines"]
    assert "x-amz-version-id" not in headers


@pytest.mark.parametrize("value", ["€uro", "日本語" * 60, "a\r\nb", "\x01", "naïve =?x?="])
def test_render_metadata_is_one_encoded_word_that_email_decodes(value: str) -> None:
    from email.header import decode_header, make_header

    headers, _ = render("HeadObject", {"Metadata": {"m": value}})
    encoded = headers["x-amz-meta-m"]
    assert encoded.isascii()
    assert encoded.isprintable()
    assert str(make_header(decode_header(encoded))) == value


def test_render_bucket_location_is_the_root_and_empty_for_us_east_1() -> None:
    prolog = b'<?xml version="1.0" encoding="UTF-8"?>\n'
    empty = prolog + b'<LocationConstraint xmlns="http://s3.amazonaws.com/doc/2006-03-01/"/>'
    assert render("GetBucketLocation", {"LocationConstraint": "us-east-1"})[1] == empty
    assert render("GetBucketLocation", {})[1] == empty
    assert b">eu-west-1</LocationConstraint>" in render("GetBucketLocation", {"LocationConstraint": "eu-west-1"})[1]


def test_render_list_uses_the_names_and_formats_of_aws() -> None:
    output = {
        "Name": "bkt",
        "IsTruncated": False,
        "Contents": [{"Key": "a<&>\r\x01", "LastModified": 0, "ETag": "e", "Size": 1}],
    }
    headers, body = render("ListObjectsV2", output)
    assert headers == {"Content-Type": "application/xml"}
    text = body.decode()
    assert '<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">' in text
    assert "<Contents><Key>a&lt;&amp;&gt;&#xd;&#x1;</Key>" in text
    assert "<LastModified>1970-01-01T00:00:00.000Z</LastModified><ETag>&quot;e&quot;</ETag>" in text
    assert "<IsTruncated>false</IsTruncated>" in text


def test_render_object_attributes_leaves_the_etag_bare() -> None:
    assert b"<ETag>abc</ETag>" in render("GetObjectAttributes", {"ETag": "abc"})[1]
    assert b"<ETag>&quot;abc&quot;</ETag>" in render("CopyObject", {"CopyObjectResult": {"ETag": "abc"}})[1]


def test_render_streaming_answer_has_headers_only() -> None:
    headers, body = render("GetObject", {"ContentType": "text/plain", "ContentRange": "bytes 0-0/1", "Body": b"x"})
    assert body == b""
    assert headers == {"Content-Type": "text/plain", "Content-Range": "bytes 0-0/1"}


def test_render_unknown_member_or_header_break_is_a_bug() -> None:
    with pytest.raises(InvariantError):
        render("HeadObject", {"Nonsense": 1})
    with pytest.raises(InvariantError):
        render("HeadObject", {"ContentType": "a\r\nSet-Cookie: b"})
    with pytest.raises(InvariantError):
        render("NoSuchOperation", {})
    with pytest.raises(InvariantError):
        render("ListObjectsV2", {"Contents": [{"Nonsense": 1}]})
