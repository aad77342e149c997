"""What of the origin's answers a reader is shown again."""

from email.utils import formatdate

import pytest

from tiergate.origin.answers import object_of
from tiergate.origin.documents import Document, parse_tagging
from tiergate.s3.servicemodel import operation

OWN_FIELDS = {"accept-ranges", "content-length", "etag", "last-modified", "x-amz-version-id", "x-amz-mp-parts-count"}
OF_THE_REQUEST = {
    "content-range",
    "x-amz-delete-marker",
    "x-amz-request-charged",
    "x-amz-server-side-encryption-customer-algorithm",
    "x-amz-server-side-encryption-customer-key-md5",
}


@pytest.mark.parametrize("name", ["GetObject", "HeadObject"])
def test_every_header_of_an_object_that_s3_knows_survives(name: str) -> None:
    output = operation(name).output
    assert output is not None
    known = {header.lower() for header in output.headers} - OWN_FIELDS - OF_THE_REQUEST
    described = {header: "1" for header in known if not header.startswith("x-amz-checksum-")}
    assert "x-amz-tagging-count" in described
    answer = described | {"etag": '"e"', "last-modified": formatdate(0, usegmt=True)}
    assert object_of(answer, 1).headers == described


def test_tags_are_read_as_their_header_carries_them() -> None:
    tags = "<Tag><Key>a b</Key><Value>&amp;=\u00fc</Value></Tag><Tag><Key>c</Key><Value/></Tag>"
    document = Document.parse(f"<Tagging><TagSet>{tags}</TagSet></Tagging>".encode())
    assert parse_tagging(document) == "a%20b=%26%3D%C3%BC&c="
