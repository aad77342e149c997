"""The XML answers of origins that differ in their habits."""

import pytest

from tiergate.errors import OriginCredentialsError, OriginRefusedError, OriginTemporaryError
from tiergate.origin.answers import OriginPage, object_of
from tiergate.origin.documents import Document, parse_fault, parse_page, parse_uploads, render_completion
from tiergate.origin.refusals import error_of, fault_of, is_redirect
from tiergate.origin.retry import OriginBusyError

PAGE = b"""<?xml version="1.0"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">
<IsTruncated>true</IsTruncated><NextContinuationToken>tok</NextContinuationToken>%s
<Contents><Key>a%%2Bb+c%%2F%%C3%%A9</Key><LastModified>2026-11-29T17:00:00.000Z</LastModified><ETag>"e-2"</ETag>
<Size>7</Size><StorageClass>GLACIER</StorageClass><Owner><ID>me</ID><DisplayName>Me</DisplayName></Owner>
<ChecksumAlgorithm>CRC32</ChecksumAlgorithm><ChecksumType>COMPOSITE</ChecksumType></Contents>
<CommonPrefixes><Prefix>z+z/</Prefix></CommonPrefixes></ListBucketResult>"""


def test_page_with_encoded_keys_is_decoded() -> None:
    page, token = parse_page(Document.parse(PAGE % b"<EncodingType>url</EncodingType>"))
    (entry,) = page.entries
    assert (entry.key, entry.size_bytes, entry.etag) == ("a+b c/é", 7, "e-2")
    assert (entry.storage_class, entry.owner) == ("GLACIER", ("me", "Me"))
    assert (entry.checksum_algorithms, entry.checksum_type) == (("CRC32",), "COMPOSITE")
    assert (page.common_prefixes, page.is_truncated, token) == (["z z/"], True, "tok")
    assert page.last_key == "z z/"


def test_page_of_an_origin_that_encodes_nothing_is_taken_as_it_is() -> None:
    page, _ = parse_page(Document.parse(PAGE % b""))
    assert page.entries[0].key == "a%2Bb+c%2F%C3%A9"
    assert page.common_prefixes == ["z+z/"]


def test_empty_page_has_no_last_key() -> None:
    assert OriginPage([], [], False).last_key == ""


@pytest.mark.parametrize("body", [b"", b"not xml", b"<html><p>proxy</html>"])
def test_answer_that_is_no_xml_is_temporary(body: bytes) -> None:
    with pytest.raises(OriginTemporaryError):
        Document.parse(body)
    assert parse_fault(body) is None


STRAY = [b"\x01", b"&#x1;", b"&#31;", b"&#x0B;", "\uffff".encode(), b"&#xFFFE;"]


@pytest.mark.parametrize("stray", STRAY)
def test_character_that_xml_cannot_hold_is_passed_over_where_keys_are_encoded(stray: bytes) -> None:
    said = b"<EncodingType>url</EncodingType><StartAfter>a" + stray + b"</StartAfter>"
    page, token = parse_page(Document.parse(PAGE % said))
    assert (page.entries[0].key, token) == ("a+b c/é", "tok")


@pytest.mark.parametrize("stray", STRAY)
def test_key_that_may_have_lost_a_character_is_not_believed(stray: bytes) -> None:
    with pytest.raises(OriginTemporaryError):
        parse_page(Document.parse(PAGE % (b"<StartAfter>a" + stray + b"</StartAfter>")))


def test_reference_to_a_character_that_xml_can_hold_stays() -> None:
    assert Document.parse(b"<R>&#x10;&#10;&#x1F600;&#x9;</R>").own_text() == "\n\U0001f600\t"


def test_listing_without_a_size_is_temporary() -> None:
    with pytest.raises(OriginTemporaryError):
        parse_page(Document.parse(PAGE.replace(b"<Size>7</Size>", b"<Size>x</Size>") % b""))


def test_uploads_go_on_after_both_markers() -> None:
    body = b"""<R><EncodingType>url</EncodingType><IsTruncated>true</IsTruncated><NextKeyMarker>a+b</NextKeyMarker>
    <NextUploadIdMarker>u</NextUploadIdMarker><Upload><Key>k%20k</Key><UploadId>u</UploadId>
    <Initiated>2026-11-29T17:00:00Z</Initiated></Upload></R>"""
    uploads, markers = parse_uploads(Document.parse(body))
    assert (uploads[0].key, uploads[0].upload_id, uploads[0].initiated_s) == ("k k", "u", 1795971600.0)
    assert markers == ("a b", "u")


def test_completion_lists_parts_with_quoted_etags() -> None:
    document = Document.parse(render_completion([(1, "a"), (2, "<&")]))
    assert [part.text("ETag") for part in document.children("Part")] == ['"a"', '"<&"']


def error_body(code: str, extra: str = "") -> bytes:
    return f"<Error><Code>{code}</Code><Message>why</Message>{extra}</Error>".encode()


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (503, "SlowDown", OriginBusyError),
        (500, "InternalError", OriginBusyError),
        (502, "", OriginBusyError),
        (429, "", OriginBusyError),
        (400, "RequestTimeout", OriginBusyError),
        (409, "OperationAborted", OriginBusyError),
        (403, "AccessDenied", OriginRefusedError),
        (403, "RequestTimeTooSkewed", OriginCredentialsError),
        (400, "ExpiredToken", OriginCredentialsError),
        (409, "ConditionalRequestConflict", OriginRefusedError),
        (412, "PreconditionFailed", OriginRefusedError),
        (501, "NotImplemented", OriginRefusedError),
    ],
)
def test_answers_are_sorted_by_status_and_code(status: int, code: str, kind: type[Exception]) -> None:
    body = error_body(code) if code else b"<html>bad gateway"
    assert type(error_of(status, (), body, fault_of(status, (), body))) is kind


def test_redirect_needs_a_region() -> None:
    with_region = error_body("AuthorizationHeaderMalformed", "<Region>eu-west-1</Region>")
    fault = fault_of(400, (), with_region)
    assert (is_redirect(400, fault), fault.region) == (True, "eu-west-1")
    assert not is_redirect(400, fault_of(400, (), error_body("AuthorizationHeaderMalformed")))
    headers = [("X-Amz-Bucket-Region", "eu-west-1")]
    assert is_redirect(301, fault_of(301, headers, b""))
    assert is_redirect(400, fault_of(400, headers, b""))
    assert not is_redirect(403, fault_of(403, headers, error_body("AccessDenied")))


def test_object_without_an_etag_is_temporary() -> None:
    with pytest.raises(OriginTemporaryError):
        object_of({"last-modified": "Sun, 29 Nov 2026 17:00:00 GMT"}, 1)
    with pytest.raises(OriginTemporaryError):
        object_of({"etag": '"e"'}, 1)


def test_object_s_headers_are_sorted_into_their_fields() -> None:
    found = object_of(
        {
            "etag": '"abc-12"',
            "last-modified": "Sun, 29 Nov 2026 17:00:00 GMT",
            "content-type": "x/y",
            "x-amz-storage-class": "STANDARD_IA",
            "x-amz-meta-a": "1",
            "x-amz-meta-tiergate": "1;uid;tag;5;0123456789ab",
            "x-amz-checksum-crc32": "AAAAAA==",
            "x-amz-checksum-type": "COMPOSITE",
            "x-amz-version-id": "v1",
            "x-amz-request-id": "r",
            "server": "s",
        },
        9,
    )
    assert found.headers == {"content-type": "x/y", "x-amz-storage-class": "STANDARD_IA"}
    assert (found.metadata, found.checksums, found.checksum_type) == ({"a": "1"}, {"crc32": "AAAAAA==-12"}, "COMPOSITE")
    assert (found.version_id, found.parts_count, found.storage_class) == ("v1", 12, "STANDARD_IA")
    assert found.stamp is not None
    assert (found.stamp.etag, found.modified_s) == ("tag", 1795971600)
