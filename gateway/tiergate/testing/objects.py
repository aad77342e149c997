"""What tests ask a boto3 client about objects, in a word each."""

from collections.abc import Callable
from contextlib import closing
from typing import Any

from botocore.exceptions import ClientError

ACK_HEADER = "x-tiergate-ack"


def body_of(client: Any, bucket: str, key: str, **options: Any) -> bytes:
    """GetObject's bytes; `options` are its further arguments."""
    # Entered itself, it gives the stream beneath, whose errors and lengths botocore does not see.
    with closing(client.get_object(Bucket=bucket, Key=key, **options)["Body"]) as stream:
        data: bytes = stream.read()
    return data


def listed(client: Any, bucket: str, prefix: str = "") -> list[tuple[str, int, str]]:
    """Key, size and ETag of every object under a prefix."""
    pages = client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
    return [(each["Key"], each["Size"], each["ETag"]) for page in pages for each in page.get("Contents", [])]


def keys_of(client: Any, bucket: str, prefix: str = "") -> list[str]:
    """Every key under a prefix, in order."""
    return [key for key, _, _ in listed(client, bucket, prefix)]


def is_missing(client: Any, bucket: str, key: str) -> bool:
    """Whether HeadObject answers 404."""
    found = refusal(lambda: client.head_object(Bucket=bucket, Key=key))
    if found is not None and found[0] != 404:
        raise AssertionError(f"HeadObject of {key} answered {found[0]}")
    return found is not None


def refusal(call: Callable[[], object]) -> tuple[int, str] | None:
    """Status and code of the error a call ends with; None if it succeeds."""
    try:
        call()
    except ClientError as error:
        return error.response["ResponseMetadata"]["HTTPStatusCode"], error.response["Error"]["Code"]
    return None


def ack_of(answer: dict[str, Any]) -> str:
    """The acknowledgement rule that an answer names."""
    rule: str = answer["ResponseMetadata"]["HTTPHeaders"][ACK_HEADER]
    return rule


def uploads_of(client: Any, bucket: str) -> list[tuple[str, str]]:
    """Key and id of each multipart upload in progress."""
    uploads = client.list_multipart_uploads(Bucket=bucket).get("Uploads", [])
    return [(each["Key"], each["UploadId"]) for each in uploads]
