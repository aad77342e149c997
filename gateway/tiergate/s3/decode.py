"""Requests: every member of an operation's input, typed by the model.

Text in headers is expected as aiohttp gives it, UTF-8 with `surrogateescape`; bytes that are not UTF-8 are
taken as Latin-1, so that all text is valid Unicode. Metadata values are kept as the client sent them, RFC
2047 words included.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime
from itertools import pairwise
from typing import Any

from botocore.model import ListShape, Shape, StructureShape

from tiergate.errors import RequestError
from tiergate.s3 import servicemodel, wire
from tiergate.s3.servicemodel import Field, Layout
from tiergate.s3.target import Target
from tiergate.s3.xml import Node, malformed, parse_xml

MAX_PART_NUMBER = 10_000
MAX_DELETED_KEYS = 1_000

SIGNING_QUERY = frozenset(
    {
        "x-amz-algorithm",
        "x-amz-content-sha256",
        "x-amz-credential",
        "x-amz-date",
        "x-amz-expires",
        "x-amz-region-set",
        "x-amz-security-token",
        "x-amz-signature",
        "x-amz-signedheaders",
        "x-amz-user-agent",
    }
)
"""What SigV4 itself puts into a presigned URL, in lower case.

https://docs.aws.amazon.com/AmazonS3/latest/API/sigv4-query-string-auth.html
"""

# RFC 9110 13.1.3 and 13.1.4: a date that cannot be read is as good as absent.
_LENIENT_DATES = frozenset({"if-modified-since", "if-unmodified-since"})
# S3 keeps and answers whatever text was given for these.
_VERBATIM = frozenset({"Expires", "ResponseExpires"})
_PART_OPERATIONS = frozenset({"UploadPart", "UploadPartCopy", "GetObject", "HeadObject"})
_MAX_INT = (1 << 31) - 1


def fold_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Headers by lower-case name; repeated ones are joined by commas (RFC 9110 5.2)."""
    folded: dict[str, str] = {}
    for name, value in headers.items():
        lower = name.lower()
        folded[lower] = f"{folded[lower]},{value}" if lower in folded else value
    return folded


def hoisted_headers(target: Target) -> dict[str, str]:
    """The x-amz-* headers that a presigned URL carries in its query, by lower-case name.

    Some SDKs move every header they can there when they presign, and S3 takes them for headers.
    """
    names = {name.lower() for name, _ in target.query}
    if "x-amz-signature" not in names:
        return {}
    return {
        name.lower(): value or ""
        for name, value in target.query
        if name.lower().startswith("x-amz-") and name.lower() not in SIGNING_QUERY
    }


def parse(operation: str, target: Target, headers: Mapping[str, str], body: bytes) -> dict[str, Any]:
    """All members of the input of `operation` that the request gives, by the model's names.

    Times are aware datetimes in UTC, except Expires and ResponseExpires, which stay the text they were.
    Metadata names are lower case. ETags in an XML body come without quotes; conditions in headers are left as
    they are, for `tiergate.s3.conditions`. ContentLength is the length of the payload
    (x-amz-decoded-content-length if given), and ContentEncoding is without `aws-chunked`. A streamed body is
    not read: pass b"".

    Raises:
        RequestError: InvalidArgument, InvalidRequest, MalformedXML, MissingRequestBodyError,
            MaxMessageLengthExceeded or InvalidPartOrder.
    """
    layout = servicemodel.operation(operation).input
    folded = fold_headers(headers)
    params: dict[str, Any] = {}
    for field in layout.uri:
        params[field.member] = target.bucket if field.wire == "Bucket" else target.key
    _parse_headers(layout, {**hoisted_headers(target), **folded}, params)
    _parse_query(layout, target, params)
    _parse_body(layout, body, params)
    _require(layout, params)
    _check(operation, params)
    return params


def _parse_headers(layout: Layout, folded: Mapping[str, str], params: dict[str, Any]) -> None:
    maps: dict[str, dict[str, str]] = {}
    for name, raw in folded.items():
        field = layout.headers.get(name)
        if field is not None:
            value = _header_value(field, raw)
            if value is not None:
                params[field.member] = value
            continue
        for prefix in layout.prefixes:
            if name.startswith(prefix.wire) and name != prefix.wire:
                value = wire.decode_header_text(raw.strip(" \t"))
                maps.setdefault(prefix.member, {})[name.removeprefix(prefix.wire)] = value
    params.update(maps)
    if "ContentLength" in params and "x-amz-decoded-content-length" in folded:
        decoded = Field("ContentLength", "x-amz-decoded-content-length", layout.headers["content-length"].shape)
        params["ContentLength"] = _header_value(decoded, folded[decoded.wire])
    encodings = _comma_list(params.get("ContentEncoding", ""))
    kept = [each for each in encodings if each.lower() != "aws-chunked"]
    if len(kept) < len(encodings):
        params["ContentEncoding"] = ",".join(kept)
        if not kept:
            del params["ContentEncoding"]


def _header_value(field: Field, raw: str) -> Any:
    text = wire.decode_header_text(raw.strip(" \t"))
    shape = field.shape
    if field.member in _VERBATIM:
        return text
    if isinstance(shape, ListShape):
        return [_scalar(shape.member, field.wire, each) for each in _comma_list(text)] or None
    if shape.type_name != "string" and not text:
        return None
    try:
        return _scalar(shape, field.wire, text)
    except RequestError:
        if field.wire in _LENIENT_DATES:
            return None
        raise


def _parse_query(layout: Layout, target: Target, params: dict[str, Any]) -> None:
    for name, raw in target.query:
        field = layout.query.get(name)
        if field is None or field.member in params:
            continue
        text = raw or ""
        if field.shape.type_name != "string" and not text:
            continue
        if name.startswith("response-") and wire.has_control(text):
            # The value becomes a header of the answer; nobody may add lines to that.
            raise _invalid_argument(name, text, "Header values cannot contain control characters")
        params[field.member] = text if field.member in _VERBATIM else _scalar(field.shape, name, text)
    if params.get("EncodingType") == "":
        del params["EncodingType"]
    if params.get("EncodingType", "url") != "url":
        raise _invalid_argument("encoding-type", params["EncodingType"], "Invalid Encoding Method specified in Request")


def _scalar(shape: Shape, name: str, text: str) -> Any:
    try:
        return _typed(shape, text)
    except ValueError as error:
        if shape.type_name in {"integer", "long"}:
            message = f"Provided {name} not an integer or within integer range"
        else:
            message = f"The value of {name} is not valid"
        raise _invalid_argument(name, text, message) from error


def _typed(shape: Shape, text: str) -> str | int | bool | datetime:
    match shape.type_name:
        case "integer" | "long":
            return wire.parse_integer(text)
        case "boolean":
            return wire.parse_boolean(text)
        case "timestamp":
            return wire.parse_time(text)
        case _:
            return text


def _parse_body(layout: Layout, body: bytes, params: dict[str, Any]) -> None:
    if layout.streams or not body.strip():
        return
    if layout.payload is None:
        if layout.body:
            root = parse_xml(body)
            params.update(_structure(layout.shape, root))
        return
    shape = layout.payload.shape
    if not isinstance(shape, StructureShape):
        try:
            params[layout.payload.member] = body.decode()
        except UnicodeDecodeError as error:
            raise RequestError("InvalidRequest", "The body is not valid UTF-8") from error
        return
    root = parse_xml(body)
    if root.name != layout.payload.wire:
        raise malformed()
    params[layout.payload.member] = _structure(shape, root)


def _structure(shape: StructureShape, node: Node) -> dict[str, Any]:
    if node.text.strip():
        raise malformed()
    known = servicemodel.children(shape)
    found: dict[str, Any] = {}
    for child in node.children:
        field = known.get(child.name)
        if field is None:
            raise malformed()
        if isinstance(field.shape, ListShape) and field.shape.serialization.get("flattened"):
            found.setdefault(field.member, []).append(_element(field.shape.member, child))
        elif field.member in found:
            raise malformed()
        else:
            found[field.member] = _element(field.shape, child)
    for name, value in node.attributes.items():
        for field in known.values():
            if field.shape.serialization.get("xmlAttribute") and field.wire.rpartition(":")[2] == name:
                found[field.member] = value
    if any(name not in found for name in shape.required_members if "location" not in shape.members[name].serialization):
        raise malformed()
    if isinstance(found.get("ETag"), str):
        found["ETag"] = wire.unquote_etag(found["ETag"])
    return found


def _element(shape: Shape, node: Node) -> Any:
    if isinstance(shape, StructureShape):
        return _structure(shape, node)
    if isinstance(shape, ListShape):
        item = servicemodel.item_name(shape)
        if node.text.strip() or any(child.name != item for child in node.children):
            raise malformed()
        return [_element(shape.member, child) for child in node.children]
    if node.children:
        raise malformed()
    try:
        return _typed(shape, node.text)
    except ValueError as error:
        raise malformed() from error


def _require(layout: Layout, params: Mapping[str, Any]) -> None:
    missing = [member for member in layout.shape.required_members if member not in params]
    for field in (*layout.headers.values(), *layout.query.values()):
        if field.member in missing:
            raise RequestError("InvalidRequest", f"Missing required parameter for this request: {field.wire}")
    body = [field.member for field in (*layout.body, *([layout.payload] if layout.payload else []))]
    if not layout.streams and any(member in missing for member in body):
        raise RequestError("MissingRequestBodyError")


def _check(operation: str, params: Mapping[str, Any]) -> None:
    for name, argument in (("MaxKeys", "max-keys"), ("MaxUploads", "max-uploads"), ("MaxParts", "max-parts")):
        if name in params and not 0 <= params[name] <= _MAX_INT:
            raise _invalid_argument(
                argument, params[name], f"Argument {argument} must be an integer between 0 and {_MAX_INT}"
            )
    if operation in _PART_OPERATIONS and not 1 <= params.get("PartNumber", 1) <= MAX_PART_NUMBER:
        raise _invalid_argument(
            "partNumber",
            params["PartNumber"],
            f"Part number must be an integer between 1 and {MAX_PART_NUMBER}, inclusive",
        )
    if not 0 <= params.get("PartNumberMarker", 0) <= _MAX_INT:
        raise _invalid_argument(
            "part-number-marker",
            params["PartNumberMarker"],
            f"Argument part-number-marker must be an integer between 0 and {_MAX_INT}",
        )
    if operation == "CompleteMultipartUpload":
        _check_parts(params.get("MultipartUpload", {}).get("Parts", ()))
    if operation == "DeleteObjects":
        objects = params["Delete"]["Objects"]
        if len(objects) > MAX_DELETED_KEYS or any(not each["Key"] for each in objects):
            raise malformed()


def _check_parts(parts: Sequence[Mapping[str, Any]]) -> None:
    """https://docs.aws.amazon.com/AmazonS3/latest/API/API_CompleteMultipartUpload.html"""
    if not parts or any("PartNumber" not in part or "ETag" not in part for part in parts):
        raise malformed()
    numbers = [part["PartNumber"] for part in parts]
    if any(not 1 <= number <= MAX_PART_NUMBER for number in numbers):
        raise _invalid_argument(
            "PartNumber",
            next(number for number in numbers if not 1 <= number <= MAX_PART_NUMBER),
            f"Part number must be an integer between 1 and {MAX_PART_NUMBER}, inclusive",
        )
    if any(second <= first for first, second in pairwise(numbers)):
        raise RequestError("InvalidPartOrder")


def _comma_list(text: str) -> list[str]:
    return [item for each in text.split(",") if (item := each.strip())]


def _invalid_argument(name: str, value: object, message: str) -> RequestError:
    return RequestError("InvalidArgument", message, argument_name=name, argument_value=str(value))
