from xml.etree import ElementTree

import pytest
from botocore.parsers import ResponseParserFactory

from tiergate.errors import (
    ConflictError,
    FencedError,
    IntegrityError,
    InvariantError,
    MemoryFullError,
    NotFoundError,
    OriginCredentialsError,
    OriginExhaustedError,
    OriginRefusedError,
    OriginTemporaryError,
    OverloadedError,
    PreconditionError,
    RequestError,
)
from tiergate.s3 import servicemodel
from tiergate.s3.errorcodes import ERROR_CODES
from tiergate.s3.errors import ErrorAnswer, error_code, error_message, error_status, render_error


def answer(error: BaseException) -> ErrorAnswer:
    return render_error(error, "/bkt/a key", "REQ1", "HOST1")


def fields(error: BaseException) -> dict[str, str | None]:
    root = ElementTree.fromstring(answer(error).body)
    assert root.tag == "Error"
    return {child.tag: child.text for child in root}


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("AccessDenied", 403),
        ("BadDigest", 400),
        ("BucketNotEmpty", 409),
        ("ConditionalRequestConflict", 409),
        ("EntityTooLarge", 400),
        ("EntityTooSmall", 400),
        ("IncompleteBody", 400),
        ("InternalError", 500),
        ("InvalidAccessKeyId", 403),
        ("InvalidDigest", 400),
        ("InvalidPart", 400),
        ("InvalidPartOrder", 400),
        ("InvalidRange", 416),
        ("InvalidURI", 400),
        ("KeyTooLongError", 400),
        ("MalformedXML", 400),
        ("MetadataTooLarge", 400),
        ("MethodNotAllowed", 405),
        ("MissingContentLength", 411),
        ("NoSuchBucket", 404),
        ("NoSuchKey", 404),
        ("NoSuchUpload", 404),
        ("NotImplemented", 501),
        ("NotModified", 304),
        ("PreconditionFailed", 412),
        ("RequestHeaderSectionTooLarge", 400),
        ("RequestTimeTooSkewed", 403),
        ("SignatureDoesNotMatch", 403),
        ("SlowDown", 503),
        ("XAmzContentSHA256Mismatch", 400),
        ("NeverHeardOfIt", 400),
    ],
)
def test_status_follows_the_code(code: str, status: int) -> None:
    assert error_status(code) == status
    assert answer(RequestError(code)).status == status


def test_table_has_messages_and_error_statuses_only() -> None:
    assert len(ERROR_CODES) >= 90
    assert all(300 <= status < 600 and message for status, message in ERROR_CODES.values())


def test_request_error_says_code_message_place_and_facts() -> None:
    error = NotFoundError("NoSuchKey", bucket="bkt", key="a<b>", secret="hidden", attempt=3)
    assert fields(error) == {
        "Code": "NoSuchKey",
        "Message": "The specified key does not exist.",
        "Key": "a<b>",
        "Resource": "/bkt/a key",
        "RequestId": "REQ1",
        "HostId": "HOST1",
    }
    assert answer(error).headers == {"Content-Type": "application/xml"}


def test_own_message_and_extra_fields_are_kept() -> None:
    error = RequestError("InvalidArgument", "No such thing", argument_name="max-keys", argument_value="x")
    assert fields(error)["Message"] == "No such thing"
    assert fields(error)["ArgumentName"] == "max-keys"
    assert fields(error)["ArgumentValue"] == "x"
    assert fields(NotFoundError("NoSuchUpload", upload_id="u"))["UploadId"] == "u"
    assert fields(NotFoundError("NoSuchBucket", bucket="b"))["BucketName"] == "b"
    assert fields(PreconditionError("PreconditionFailed", condition="If-Match"))["Condition"] == "If-Match"


def test_invalid_range_tells_the_size() -> None:
    error = RequestError("InvalidRange", range_requested="bytes=9-", actual_object_size=4)
    assert fields(error)["RangeRequested"] == "bytes=9-"
    assert fields(error)["ActualObjectSize"] == "4"
    assert answer(error).headers["Content-Range"] == "bytes */4"


def test_not_modified_has_no_body_and_keeps_the_validators() -> None:
    assert answer(PreconditionError("NotModified", etag="abc", modified_s=784111777)) == ErrorAnswer(
        304, {"ETag": '"abc"', "Last-Modified": "Sun, 06 Nov 1994 08:49:37 GMT"}, b""
    )
    assert answer(PreconditionError("NotModified")) == ErrorAnswer(304, {}, b"")


@pytest.mark.parametrize(
    ("error", "status", "code", "retry_after"),
    [
        (OverloadedError("full", retry_after_s=7), 503, "SlowDown", "7"),
        (MemoryFullError("full"), 503, "SlowDown", "1"),
        (OriginTemporaryError("reset"), 503, "ServiceUnavailable", "1"),
        (OriginExhaustedError("gave up"), 503, "ServiceUnavailable", "1"),
        (OriginCredentialsError(403, "InvalidAccessKeyId", body=b"AKIA"), 503, "ServiceUnavailable", "1"),
        (IntegrityError("crc"), 500, "InternalError", None),
        (InvariantError("bug"), 500, "InternalError", None),
        (ConflictError("guard"), 500, "InternalError", None),
        (FencedError("lost"), 500, "InternalError", None),
        (KeyError("foreign"), 500, "InternalError", None),
    ],
)
def test_errors_of_ours_have_their_row_and_no_details_but_what_is_short(
    error: BaseException, status: int, code: str, retry_after: str | None
) -> None:
    found = answer(error)
    assert found.status == status
    assert error_code(error) == code
    assert fields(error)["Code"] == code
    why = f" ({error.message})" if isinstance(error, OverloadedError) else ""
    assert fields(error)["Message"] == ERROR_CODES[code][1] + why == error_message(error)
    assert found.headers.get("Retry-After") == retry_after


def test_refusal_of_the_origin_passes_as_it_is() -> None:
    headers = {
        "Content-Type": "application/xml",
        "Connection": "close",
        "Content-Length": "9",
        "x-amz-foo": "1",
    }
    error = OriginRefusedError(418, "Teapot", body=b"<Error/>x", headers=headers)
    assert answer(error) == ErrorAnswer(418, {"Content-Type": "application/xml", "x-amz-foo": "1"}, b"<Error/>x")
    assert error_code(error) == "Teapot"


def test_refusal_without_a_body_is_given_one() -> None:
    error = OriginRefusedError(404, "NoSuchKey", headers={"content-type": "text/html", "x-amz-foo": "1"}, key="k")
    found = answer(error)
    assert found.status == 404
    assert found.headers == {"x-amz-foo": "1", "Content-Type": "application/xml"}
    assert fields(error)["Code"] == "NoSuchKey"
    assert answer(OriginRefusedError(304, "NotModified", headers={"ETag": '"e"'})) == ErrorAnswer(
        304, {"ETag": '"e"'}, b""
    )


def test_bytes_that_are_not_utf8_do_not_break_the_answer() -> None:
    found = render_error(RequestError("InvalidURI", argument_value="\udcff"), "/b/\udcff", "r", "h")
    assert ElementTree.fromstring(found.body).findtext("Resource") == "/b/\ufffd"


def test_botocore_reads_the_error() -> None:
    found = answer(NotFoundError("NoSuchKey", key="k"))
    raw = {"status_code": found.status, "headers": found.headers, "body": found.body}
    shape = servicemodel.operation("HeadObject").input.shape
    parsed = ResponseParserFactory().create_parser("rest-xml").parse(raw, shape)
    assert parsed["Error"]["Code"] == "NoSuchKey"
    assert parsed["Error"]["Key"] == "k"
