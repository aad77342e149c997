"""S3_SUPPORT.md says what the run saw."""

import os

import pytest
from tests.clients.support import CLIENTS, DOCUMENT, FORWARDED, REWRITE, Record, differences, marks_of, render

HINT = f"run all of tests/clients with {REWRITE}=1 to write {DOCUMENT.name} anew"


def test_document_says_what_this_run_served(record: Record) -> None:
    versions = {name: client.version() for name, client in CLIENTS.items()}
    if os.environ.get(REWRITE) == "1":
        missing = [name for name in CLIENTS if not record.is_whole(name)]
        assert missing == [], "not all tests of these clients were run, or some failed"
        DOCUMENT.write_text(render(record.operations, versions))
    document = DOCUMENT.read_text()
    assert list(differences(record, document)) == [], HINT
    assert document == render(marks_of(document), versions), HINT


def recorded(**operations: set[str]) -> Record:
    record = Record()
    for name, seen in operations.items():
        record.add(name, {"HeadBucket": 1.0}, {"HeadBucket": 1.0} | dict.fromkeys(seen, 1.0))
        record.planned[name].add(name)
        record.passed.add(name)
    return record


def test_document_reads_as_it_was_written() -> None:
    record = recorded(boto3={"GetObject", "CreateBucket"}, s5cmd={FORWARDED})
    assert record.operations["boto3"] == {"GetObject", "CreateBucket"}
    document = render(record.operations, dict.fromkeys(CLIENTS, "1.0"))
    assert marks_of(document) == record.operations
    assert list(differences(record, document)) == []


@pytest.mark.parametrize(
    ("boto3", "difference"),
    [
        ({"GetObject", "PutObject"}, "boto3 used PutObject, which is not shown"),
        (set(), "boto3 did not use GetObject"),
    ],
)
def test_document_that_differs_is_found(boto3: set[str], difference: str) -> None:
    document = render(recorded(boto3={"GetObject"}).operations, dict.fromkeys(CLIENTS, "1.0"))
    assert list(differences(recorded(boto3=boto3), document)) == [difference]


def test_client_that_was_not_driven_whole_is_only_asked_for_what_is_new() -> None:
    document = render(recorded(boto3={"GetObject", "PutObject"}).operations, dict.fromkeys(CLIENTS, "1.0"))
    record = recorded(boto3={"GetObject"})
    record.planned["boto3"].add("another")
    assert list(differences(record, document)) == []
