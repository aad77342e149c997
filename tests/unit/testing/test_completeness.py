"""The judge of promise P4."""

from dataclasses import replace

from tiergate.origin.stamp import stamp_header
from tiergate.testing.completeness import Write, changes_of, untrue_markers
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


MARKER = "s/.metadata"
WRITES = [
    Write(NAME.key, "etag-v1", 0.0, 0.1),
    Write(NAME.key, "etag-v2", 0.2, 0.3),
    Write(MARKER, "etag-m", 0.4, 0.5),
]


def untrue(*requests: Seen) -> list[str]:
    put_marker = replace(seen(9, "PutObject", "", "m"), key=MARKER)
    return untrue_markers([*requests, put_marker], NAME.bucket, WRITES, lambda key: key == MARKER)


def test_marker_over_an_older_member_is_untrue() -> None:
    put = seen(1, "PutObject", "", "v2")
    assert untrue(put) == []
    assert "while s/a was etag-v1" in untrue(put, seen(2, "PutObject", "", "v1"))[0]
    assert "while s/a was absent" in untrue()[0]


def test_torn_request_changed_nothing() -> None:
    torn = replace(seen(2, "PutObject", "", "v1"), origin_status=None)
    assert untrue(seen(1, "PutObject", "", "v2"), torn) == []
    assert untrue(torn) != []


def test_request_whose_answer_was_lost_may_have_changed_it() -> None:
    unsure = replace(seen(2, "PutObject", "", "v1"), origin_status=None, is_whole=True)
    assert untrue(seen(1, "PutObject", "", "v2"), unsure) == []
    assert "etag-v1 or etag-v1" in untrue(seen(1, "PutObject", "", "v1"), unsure)[0]
