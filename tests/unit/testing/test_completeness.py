"""The judge of promise P4."""

from tiergate.origin.stamp import stamp_header
from tiergate.testing.completeness import changes_of
from tiergate.testing.directory_contract.values import make_version, object_name
from tiergate.testing.rules import Seen

NAME = object_name("s/a")


def seen(number: int, operation: str, upload_id: str, uid: str = "") -> Seen:
    headers = stamp_header(make_version(uid), NAME) if uid else {}
    return Seen(
        number,
        "POST",
        "/",
        NAME.bucket,
        NAME.key,
        {},
        operation,
        headers,
        float(number),
        finished_s=number + 0.5,
        origin_status=200,
        upload_id=upload_id,
    )


def test_uploads_of_one_key_beside_each_other_complete_as_what_they_began_as() -> None:
    requests = [
        seen(1, "CreateMultipartUpload", "u1", "v1"),
        seen(2, "CreateMultipartUpload", "u2", "v2"),
        seen(3, "CompleteMultipartUpload", "u1"),
    ]
    assert [each.etag for each in changes_of(requests, NAME.bucket)] == ["etag-v1"]
