"""Uploads in the origin that carry write-backs are nobody's to see, whatever happens while they are listed."""

import pytest
from tests.conformance.gateway import CLIENT
from tests.conformance.sides import Sides
from tests.conformance.wire import Ask, Bucket, Wire

from tiergate.testing.origins import Gate, Hold

BUCKET = "hidden-uploads"
LIST = Ask("GET", f"/{BUCKET}", "uploads=")


@pytest.fixture(scope="module")
def s3(sides: Sides) -> Bucket:
    assert sides.direct(Ask("PUT", f"/{BUCKET}")).status == 200
    return Bucket(sides.node, CLIENT, BUCKET)


def test_upload_that_has_begun_and_is_not_known_by_name_yet(sides: Sides, s3: Bucket) -> None:
    gate = Gate()
    sides.proxy.inject(Hold(gate, after_origin=True), "CreateMultipartUpload", "begun")
    s3.multipart("begun", [b"one part"])
    gate.wait_reached()
    try:
        assert len(sides.direct(LIST).texts("Upload/UploadId")) == 1
        assert sides.through(LIST).texts("Upload/UploadId") == []
    finally:
        gate.release()
    sides.node.wait_settled()


def test_upload_that_ends_while_the_origin_lists_it(sides: Sides, s3: Bucket) -> None:
    complete, listed = Gate(), Gate()
    sides.proxy.inject(Hold(complete), "CompleteMultipartUpload", "ends")
    s3.multipart("ends", [b"one part"])
    complete.wait_reached()
    sides.proxy.inject(Hold(listed, after_origin=True), "ListMultipartUploads")
    with Wire(sides.node.endpoint, CLIENT) as wire:
        wire.send(LIST)
        listed.wait_reached()
        complete.release()
        sides.node.wait_settled()
        listed.release()
        assert wire.reply().texts("Upload/UploadId") == []


def test_upload_whose_version_was_superseded_before_it_had_a_name_is_aborted(sides: Sides, s3: Bucket) -> None:
    """moto does not say when an upload began, so it can only be found by its name."""
    gate = Gate()
    sides.proxy.inject(Hold(gate), "CreateMultipartUpload", "superseded")
    s3.multipart("superseded", [b"one part"])
    gate.wait_reached()
    s3.put("superseded", b"newer")
    gate.release()
    sides.node.wait_settled()
    assert sides.direct(LIST).texts("Upload/UploadId") == []
    assert sides.direct(Ask("GET", s3.path("superseded"))).body == b"newer"


def test_upload_of_somebody_else_is_listed_beside_a_pending_write(sides: Sides, s3: Bucket) -> None:
    gate = Gate()
    began = sides.direct(Ask("POST", f"/{BUCKET}/other", "uploads="))
    sides.proxy.inject(Hold(gate), "PutObject", "mine")
    s3.put("mine", b"pending")
    gate.wait_reached()
    try:
        assert sides.through(LIST).texts("Upload/UploadId") == [began.text("UploadId")]
    finally:
        gate.release()
