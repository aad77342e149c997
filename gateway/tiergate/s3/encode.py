"""Answers: headers and XML body of an operation's output, as the model and S3's habits want them."""

from collections.abc import Mapping
from typing import Any

from botocore.model import ListShape, MapShape, Shape, StructureShape

from tiergate.errors import InvariantError, invariant
from tiergate.s3 import servicemodel, wire
from tiergate.s3.servicemodel import Field, Layout
from tiergate.s3.xml import S3_NAMESPACE, Node, render_xml

# The model does not say what an answer's root element is called when the output itself is the body; the API
# reference does:
# https://docs.aws.amazon.com/AmazonS3/latest/API/API_Operations_Amazon_Simple_Storage_Service.html
_ROOTS = {
    "CompleteMultipartUpload": "CompleteMultipartUploadResult",
    "CreateMultipartUpload": "InitiateMultipartUploadResult",
    "CreateSession": "CreateSessionResult",
    "DeleteObjects": "DeleteResult",
    "GetBucketAccelerateConfiguration": "AccelerateConfiguration",
    "GetBucketAcl": "AccessControlPolicy",
    "GetBucketCors": "CORSConfiguration",
    "GetBucketLifecycle": "LifecycleConfiguration",
    "GetBucketLifecycleConfiguration": "LifecycleConfiguration",
    "GetBucketLogging": "BucketLoggingStatus",
    "GetBucketNotification": "NotificationConfiguration",
    "GetBucketNotificationConfiguration": "NotificationConfiguration",
    "GetBucketRequestPayment": "RequestPaymentConfiguration",
    "GetBucketTagging": "Tagging",
    "GetBucketVersioning": "VersioningConfiguration",
    "GetBucketWebsite": "WebsiteConfiguration",
    "GetObjectAcl": "AccessControlPolicy",
    "GetObjectAttributes": "GetObjectAttributesResponse",
    "GetObjectTagging": "Tagging",
    "ListBucketAnalyticsConfigurations": "ListBucketAnalyticsConfigurationResult",
    "ListBucketInventoryConfigurations": "ListInventoryConfigurationsResult",
    "ListBucketMetricsConfigurations": "ListMetricsConfigurationsResult",
    "ListBuckets": "ListAllMyBucketsResult",
    "ListMultipartUploads": "ListMultipartUploadsResult",
    "ListObjectVersions": "ListVersionsResult",
    "ListObjects": "ListBucketResult",
    "ListObjectsV2": "ListBucketResult",
    "ListParts": "ListPartsResult",
}
# The one answer whose XML has a bare ETag: clients that compare it expect no quotes.
# https://docs.aws.amazon.com/AmazonS3/latest/API/API_GetObjectAttributes.html
_BARE_ETAG = frozenset({"GetObjectAttributes"})


def render(operation: str, output: Mapping[str, Any]) -> tuple[dict[str, str], bytes]:
    """The headers and the body of the answer to `operation`.

    `output` holds members by the model's names. Times are datetimes or Unix seconds; ETags get their quotes
    here; None means absent; metadata that is not printable ASCII becomes an RFC 2047 word. An answer with an
    XML body has its Content-Type. Streamed bodies are not rendered: their answer has the body b"", whatever
    `output` says.

    Raises:
        InvariantError: for a member that the output does not have, a value that would break a header, or an
            unknown operation.
    """
    plan = servicemodel.operation(operation)
    layout = plan.output
    if layout is None:
        invariant(not output, "this operation has no output", operation=operation)
        return {}, b""
    for member in output:
        invariant(member in layout.shape.members, "no such member", operation=operation, member=member)
    headers = _headers(layout, output)
    body = _body(operation, layout, output)
    if body:
        text = layout.payload is not None and layout.payload.shape.type_name == "string"
        headers.setdefault("Content-Type", "application/json" if text else "application/xml")
    return headers, body


def _headers(layout: Layout, output: Mapping[str, Any]) -> dict[str, str]:
    headers: dict[str, str] = {}
    for field in layout.headers.values():
        value = output.get(field.member)
        if value is not None and field.wire not in headers:
            headers[field.wire] = _header_value(field, value)
    for prefix in layout.prefixes:
        for name, value in (output.get(prefix.member) or {}).items():
            headers[prefix.wire + name] = wire.encode_metadata(value)
    for name, value in headers.items():
        invariant(not wire.has_control(name + value), "a header with control characters", header=name)
    return headers


def _header_value(field: Field, value: Any) -> str:
    if field.member == "ETag":
        return wire.quote_etag(value)
    shape = field.shape
    if isinstance(shape, ListShape):
        return ",".join(str(item) for item in value)
    return _text(shape, value, shape.serialization.get("timestampFormat", "rfc822"))


def _text(shape: Shape, value: Any, time_format: str) -> str:
    if shape.type_name == "boolean":
        return "true" if value else "false"
    if shape.type_name == "timestamp" and not isinstance(value, str):
        return wire.iso_date(value) if time_format == "iso8601" else wire.http_date(value)
    return str(value)


def _body(operation: str, layout: Layout, output: Mapping[str, Any]) -> bytes:
    if operation == "GetBucketLocation":
        # The constraint is the root itself, and empty for us-east-1, whatever the model says.
        # https://docs.aws.amazon.com/AmazonS3/latest/API/API_GetBucketLocation.html
        region = output.get("LocationConstraint") or ""
        return render_xml(_root("LocationConstraint", "" if region == "us-east-1" else region))
    if layout.streams:
        return b""
    if layout.payload is not None:
        value = output.get(layout.payload.member)
        if value is None:
            return b""
        shape = layout.payload.shape
        if not isinstance(shape, StructureShape):
            return str(value).encode()
        root = _root(layout.payload.wire)
        _fill(root, shape, value, quoted=True)
        return render_xml(root)
    if not layout.body:
        return b""
    root = _root(_ROOTS.get(operation, layout.shape.name.removesuffix("Output") + "Result"))
    members = {field.member: output[field.member] for field in layout.body if field.member in output}
    _fill(root, layout.shape, members, quoted=operation not in _BARE_ETAG)
    return render_xml(root)


def _root(name: str, text: str = "") -> Node:
    return Node(name, text, {"xmlns": S3_NAMESPACE})


def _fill(node: Node, shape: StructureShape, value: Mapping[str, Any], quoted: bool) -> None:
    for member, item in value.items():
        child = shape.members.get(member)
        if child is None:
            raise InvariantError("no such member", structure=shape.name, member=member)
        if item is None:
            continue
        name = servicemodel.element_name(member, child)
        if child.serialization.get("xmlAttribute"):
            node.attributes[name] = str(item)
        elif member == "ETag" and quoted:
            node.children.append(Node(name, wire.quote_etag(item)))
        else:
            node.children.extend(_elements(name, child, item, quoted))


def _elements(name: str, shape: Shape, value: Any, quoted: bool) -> list[Node]:
    if isinstance(shape, ListShape):
        flattened = shape.serialization.get("flattened")
        item_name = name if flattened else servicemodel.item_name(shape)
        items = [node for item in value for node in _elements(item_name, shape.member, item, quoted)]
        return items if flattened else [Node(name, children=items)]
    if isinstance(shape, MapShape):
        raise InvariantError("S3 has no maps in XML", structure=shape.name)
    node = Node(name)
    namespace = shape.serialization.get("xmlNamespace")
    if isinstance(namespace, Mapping) and namespace.get("prefix"):
        node.attributes[f"xmlns:{namespace['prefix']}"] = str(namespace["uri"])
    if isinstance(shape, StructureShape):
        _fill(node, shape, value, quoted)
    else:
        node.text = _text(shape, value, shape.serialization.get("timestampFormat", "iso8601"))
    return [node]
