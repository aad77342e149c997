"""The source of a copy, as x-amz-copy-source names it.

https://docs.aws.amazon.com/AmazonS3/latest/API/API_CopyObject.html
"""

from tiergate.errors import RequestError
from tiergate.s3.target import check_bucket_name, check_key, percent_decode

_VERSION_MARK = "?versionId="
_ARN = "arn:"


def parse_copy_source(header: str) -> tuple[str, str, str | None] | None:
    """Bucket, key and version of a copy's source; None for an ARN (an access point), which only the origin
    knows.

    Takes `bucket/key`, `/bucket/key`, and either with every byte encoded, slashes included. The value is
    decoded exactly once, so `%2541` is the key `%41`; `+` is a plus. The version's mark must not be encoded:
    an encoded one belongs to the key.

    Raises:
        RequestError: InvalidArgument, InvalidBucketName or KeyTooLongError.
    """
    raw, mark, raw_version = header.strip(" \t").rpartition(_VERSION_MARK)
    if not mark:
        raw, raw_version = raw_version, ""
    try:
        path = percent_decode(raw).removeprefix("/")
        version = percent_decode(raw_version) if mark else None
    except RequestError as error:
        raise _invalid("Invalid copy source encoding.", header) from error
    if path.startswith(_ARN):
        return None
    bucket, _, key = path.partition("/")
    if not bucket or not key:
        raise _invalid("Invalid copy source object key", header)
    if version == "":
        raise _invalid("Version id cannot be the empty string", header)
    check_bucket_name(bucket)
    check_key(key)
    return bucket, key, version


def _invalid(message: str, header: str) -> RequestError:
    return RequestError("InvalidArgument", message, argument_name="x-amz-copy-source", argument_value=header)
