"""The AWS command line: `s3` and `s3api`."""

import json
import os
from base64 import b64encode
from hashlib import md5
from pathlib import Path
from typing import Any, Protocol
from urllib.request import urlopen

import pytest
from tests.clients.conftest import BUCKET, Readers, Run

pytestmark = [pytest.mark.client("AWS CLI"), pytest.mark.timeout(300)]  # many processes

MIB = 1 << 20


class Aws(Protocol):
    def __call__(self, *words: str, status: int = 0) -> str: ...


@pytest.fixture
def aws(run: Run) -> Aws:
    """Runs `aws` with the words given."""
    return lambda *words, status=0: run("aws", *words, status=status).decode()


def test_aws_s3_copies_syncs_lists_moves_and_removes(aws: Aws, prefix: str, readers: Readers, tmp_path: Path) -> None:
    root = f"s3://{BUCKET}/{prefix}"
    source = tmp_path / "source"
    files = {"a b+c.bin": os.urandom(9 * MIB), "empty": b"", "deep/er/файл.txt": b"text", "x%20y": b"percent"}
    for name, body in files.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes(body)
        os.utime(source / name, (10**9, 10**9))  # what is older than its copy need not be synced again

    def same(folder: Path) -> bool:
        found = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        return found == files

    aws("s3", "sync", str(source), f"{root}/tree")
    aws("s3", "cp", str(source / "a b+c.bin"), f"{root}/one.bin")
    aws("s3", "mv", f"{root}/one.bin", f"{root}/two.bin")
    assert [line.split()[-1] for line in aws("s3", "ls", f"{root}/").splitlines()] == ["tree/", "two.bin"]
    for place, _ in enumerate(readers()):
        aws("s3", "sync", f"{root}/tree", str(tmp_path / str(place)))
        assert same(tmp_path / str(place))
        assert aws("s3", "sync", str(source), f"{root}/tree") == ""
    aws("s3", "rm", "--recursive", f"{root}/tree")
    assert [line.split()[-1] for line in aws("s3", "ls", "--recursive", f"{root}/").splitlines()] == [
        f"{prefix}/two.bin"
    ]


@pytest.fixture
def api(aws: Aws) -> Any:
    """Runs `aws s3api` on the bucket; the answer's fields."""

    def run(operation: str, *words: str, **options: str) -> dict[str, Any]:
        flags = [part for name, value in options.items() for part in (f"--{name.replace('_', '-')}", value)]
        found: dict[str, Any] = json.loads(aws("s3api", operation, "--bucket", BUCKET, *flags, *words) or "{}")
        return found

    return run


def test_aws_s3api_puts_gets_heads_and_copies(
    api: Any, aws: Aws, prefix: str, readers: Readers, tmp_path: Path
) -> None:
    key, body = f"{prefix}/a b+ü", os.urandom(300_000)
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(body)
    put = api(
        "put-object",
        key=key,
        body=str(source),
        content_type="x/y",
        metadata="step=10",
        content_md5=b64encode(md5(body, usedforsecurity=False).digest()).decode(),
    )
    assert put["ETag"].strip('"') == md5(body, usedforsecurity=False).hexdigest()
    copied = api("copy-object", key=f"{prefix}/copy", copy_source=f"{BUCKET}/{key}")
    assert copied["CopyObjectResult"]["ETag"] == put["ETag"]
    for _ in readers():
        head = api("head-object", key=key)
        assert (head["ContentLength"], head["ContentType"], head["ETag"]) == (len(body), "x/y", put["ETag"])
        assert head["Metadata"] == {"step": "10"}
        assert api("get-object", str(target), key=f"{prefix}/copy")["ETag"] == put["ETag"]
        assert target.read_bytes() == body
        got = api("get-object", str(target), key=key, range="bytes=1000-1999")
        assert got["ContentRange"] == f"bytes 1000-1999/{len(body)}"
        assert target.read_bytes() == body[1000:2000]
    url = aws("s3", "presign", f"s3://{BUCKET}/{key}", "--expires-in", "60").strip()
    with urlopen(url, timeout=10) as answer:
        assert answer.read() == body


def test_aws_s3api_uploads_parts_by_hand(api: Any, prefix: str, readers: Readers, tmp_path: Path) -> None:
    key, target = f"{prefix}/parts", tmp_path / "target"
    bodies = [os.urandom(5 * MIB), os.urandom(5 * MIB), os.urandom(77)]
    named = {"key": key, "upload_id": api("create-multipart-upload", key=key)["UploadId"]}
    listed = []
    for number, body in enumerate(bodies, 1):
        (tmp_path / str(number)).write_bytes(body)
        part = api("upload-part", **named, part_number=str(number), body=str(tmp_path / str(number)))
        listed.append({"ETag": part["ETag"], "PartNumber": number})
    parts = api("list-parts", **named)["Parts"]
    assert [(part["PartNumber"], part["Size"]) for part in parts] == [(n, len(b)) for n, b in enumerate(bodies, 1)]
    assert [each["Key"] for each in api("list-multipart-uploads", prefix=prefix)["Uploads"]] == [key]
    etag = api("complete-multipart-upload", **named, multipart_upload=json.dumps({"Parts": listed}))["ETag"]
    assert etag.endswith('-3"')
    lost = {"key": key, "upload_id": api("create-multipart-upload", key=key)["UploadId"]}
    api("abort-multipart-upload", **lost)
    assert api("list-multipart-uploads", prefix=prefix).get("Uploads", []) == []
    for _ in readers():
        assert api("get-object", str(target), key=key)["ETag"] == etag
        assert target.read_bytes() == b"".join(bodies)


def test_aws_s3api_lists_pages_and_deletes_many(
    api: Any, aws: Aws, prefix: str, readers: Readers, tmp_path: Path
) -> None:
    names = sorted(f"{prefix}/{folder}/{n}" for folder in ("a", "b") for n in range(4))
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    aws("s3", "cp", "--recursive", str(tmp_path / prefix), f"s3://{BUCKET}/{prefix}")
    for _ in readers():
        pages = api("list-objects-v2", prefix=f"{prefix}/", page_size="3")
        assert [(each["Key"], each["Size"]) for each in pages["Contents"]] == [(name, 1) for name in names]
    grouped = api("list-objects-v2", prefix=f"{prefix}/", delimiter="/")
    assert [each["Prefix"] for each in grouped["CommonPrefixes"]] == [f"{prefix}/a/", f"{prefix}/b/"]
    first = api("list-objects-v2", "--no-paginate", prefix=f"{prefix}/", max_keys="5")
    assert (first["KeyCount"], first["IsTruncated"]) == (5, True)
    going_on = {"prefix": f"{prefix}/", "continuation_token": first["NextContinuationToken"]}
    rest = api("list-objects-v2", "--no-paginate", **going_on)
    assert [each["Key"] for each in (*first["Contents"], *rest["Contents"])] == names
    doomed = {"Objects": [{"Key": name} for name in names[:5]], "Quiet": False}
    deleted = api("delete-objects", delete=json.dumps(doomed))["Deleted"]
    assert [each["Key"] for each in deleted] == names[:5]
    assert [each["Key"] for each in api("list-objects-v2", prefix=f"{prefix}/")["Contents"]] == names[5:]
    assert "404" in aws("s3api", "head-object", "--bucket", BUCKET, "--key", names[0], status=255)
