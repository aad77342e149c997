"""How the source of a copy is named."""

import pytest

from tiergate.model import ObjectName
from tiergate.origin.copying import CopySource, copy_headers
from tiergate.s3.copysource import parse_copy_source


@pytest.mark.parametrize("key", ["a", "run/ü+~ %41/&=?versionId=1", "/a//b/", "\N{SNOWMAN}" * 300])
def test_source_is_named_as_s3_reads_it(key: str) -> None:
    headers = dict(copy_headers(CopySource(ObjectName("bucket", key), "abc-2")))
    assert parse_copy_source(headers["x-amz-copy-source"]) == ("bucket", key, None)
    assert headers["x-amz-copy-source"].isascii()
    assert headers["x-amz-copy-source-if-match"] == '"abc-2"'
