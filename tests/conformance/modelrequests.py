"""A valid request of any operation, made from botocore's model of S3 alone and serialized by botocore's own code."""

import base64
import hashlib
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, cast
from urllib.parse import quote

from botocore.model import ListShape, OperationModel, Shape, StructureShape
from botocore.serialize import create_serializer
from tests.conformance.wire import Ask

from tiergate.s3.servicemodel import service_model

MOMENT = datetime(2039, 1, 2, 3, 4, 5, tzinfo=UTC)
POLICY = '{"Version":"2012-10-17","Statement":[]}'

LEFT_OUT = frozenset(
    {
        "BypassPolicyLockoutSafetyCheck",
        "ContentMD5",
        "ExpectedSourceBucketOwner",
        "MFA",
        "SSECustomerKey",
        "SSECustomerKeyMD5",
    }
)
VALUES: dict[str, Any] = {
    "AccountId": "123456789012",
    "AnnotationName": "note",
    "AnnotationPayload": b'{"a":1}',
    "CreationDate": MOMENT,
    "Days": 3,
    "Expression": "SELECT * FROM S3Object",
    "ExpectedBucketOwner": "123456789012",
    "Id": "one",
    "ID": "one",
    "KMSMasterKeyID": "arn:aws:kms:us-east-1:123456789012:key/one",
    "LocationConstraint": "eu-west-1",
    "ObjectAttributes": ["ETag", "ObjectSize", "StorageClass"],
    "OutputSerialization": {"JSON": {"RecordDelimiter": ","}},
    "InputSerialization": {"CSV": {"FileHeaderInfo": "USE"}},
    "Policy": POLICY,
    "Prefix": "never/",
    "RetainUntilDate": MOMENT,
    "VersionId": "null",
    "XMLNS": "http://www.w3.org/2001/XMLSchema-instance",
}
"""Values that mean something to S3, by member."""

PREFERRED: dict[str, dict[str, Any]] = {
    "PutBucketAcl": {"ACL": "private"},
    "PutObjectAcl": {"ACL": "public-read"},
    "PutObjectLegalHold": {"LegalHold": {"Status": "ON"}},
    "PutObjectLockConfiguration": {"ObjectLockConfiguration": {"ObjectLockEnabled": "Enabled"}},
    "PutObjectRetention": {"Retention": {"Mode": "GOVERNANCE", "RetainUntilDate": MOMENT}},
    "PutBucketAccelerateConfiguration": {"AccelerateConfiguration": {"Status": "Enabled"}},
    "PutBucketNotificationConfiguration": {"NotificationConfiguration": {"EventBridgeConfiguration": {}}},
    "PutBucketOwnershipControls": {"OwnershipControls": {"Rules": [{"ObjectOwnership": "BucketOwnerPreferred"}]}},
    "PutBucketVersioning": {"VersioningConfiguration": {"Status": "Suspended"}},
    "PutBucketLifecycleConfiguration": {
        "LifecycleConfiguration": {
            "Rules": [{"ID": "r", "Status": "Enabled", "Filter": {"Prefix": "never/"}, "Expiration": {"Days": 9}}]
        }
    },
    "PutBucketEncryption": {
        "ServerSideEncryptionConfiguration": {
            "Rules": [{"ApplyServerSideEncryptionByDefault": {"SSEAlgorithm": "AES256"}}]
        }
    },
    "PutPublicAccessBlock": {"PublicAccessBlockConfiguration": {"BlockPublicAcls": True}},
    "PutBucketWebsite": {"WebsiteConfiguration": {"IndexDocument": {"Suffix": "index.html"}}},
    "RestoreObject": {"RestoreRequest": {"Days": 3}},
}
"""What makes these operations do something where the origin knows them."""


def operation_names() -> list[str]:
    """All operations of S3, but the one of another endpoint that looks like ListBuckets."""
    return [name for name in service_model().operation_names if name != "ListDirectoryBuckets"]


def model_of(operation: str) -> OperationModel:
    return service_model().operation_model(operation)


def members_of(operation: str) -> Mapping[str, Shape]:
    """The members of an operation's input."""
    return cast("StructureShape", model_of(operation).input_shape).members


def is_left_out(member: str) -> bool:
    """Whether an optional member is not sent: it needs more than a value of its type."""
    return member in LEFT_OUT or member.startswith("Checksum")


def is_of_object(operation: str) -> bool:
    """Whether the operation is about one object."""
    return "{Key+}" in model_of(operation).http["requestUri"]


def request_of(operation: str, bucket: str, key: str, *, full: bool = False, **more: Any) -> Ask:
    """A request with what the operation requires; `full` adds every optional member. `more` are members too."""
    model = model_of(operation)
    named = {"Bucket": bucket, "Key": key, "RenameSource": f"/{bucket}/{key}"}
    params = _members(cast("StructureShape", model.input_shape), full, named)
    params |= PREFERRED.get(operation, {}) | more
    found: Mapping[str, Any] = create_serializer("rest-xml", False).serialize_to_request(params, model)
    body = found["body"] if isinstance(found["body"], bytes) else str(found["body"]).encode()
    headers = {str(name): str(value) for name, value in found["headers"].items()}
    if model.http_checksum.get("requestChecksumRequired") and body:
        headers["Content-MD5"] = base64.b64encode(hashlib.md5(body).digest()).decode()
    path, _, fixed = str(found["url_path"]).partition("?")
    pairs = [(name, value) for name, _, value in (piece.partition("=") for piece in fixed.split("&") if piece)]
    pairs += [(name, str(value)) for name, value in found["query_string"].items()]
    query = "&".join(sorted({f"{quote(name, safe='-_.~')}={quote(value, safe='-_.~')}" for name, value in pairs}))
    return Ask(model.http["method"], quote(path, safe="-_.~/%"), query, headers, body)


def _members(shape: StructureShape, full: bool, named: Mapping[str, str]) -> dict[str, Any]:
    """The required members, or of a structure that requires none the first."""
    found: dict[str, Any] = {}
    for member, child in shape.members.items():
        wanted = member in shape.required_members or full or (not found and "location" not in child.serialization)
        if not wanted or (is_left_out(member) and member not in shape.required_members):
            continue
        found[member] = named[member] if member in named else VALUES.get(member) or _value(child, named)
    return found


def _value(shape: Shape, named: Mapping[str, str]) -> Any:
    if isinstance(shape, StructureShape):
        return _members(shape, False, named)
    if isinstance(shape, ListShape):
        return [_value(shape.member, named)]
    if shape.type_name == "map":
        return {"made": "up"}
    if shape.type_name in {"integer", "long"}:
        return 1
    if shape.type_name == "boolean":
        return True
    if shape.type_name == "timestamp":
        return MOMENT
    if shape.type_name == "blob":
        return b"x"
    return next(iter(shape.metadata.get("enum", ())), "text")
