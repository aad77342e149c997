"""s3fs and pyarrow as file systems."""

import os
from typing import Any

import pyarrow.fs  # type: ignore[import-untyped]
import pytest
import s3fs  # type: ignore[import-untyped]
from tests.clients.conftest import BUCKET, Readers
from tests.conformance.gateway import CLIENT

from tiergate.testing.node import RunningNode

MIB = 1 << 20


def s3fs_of(node: RunningNode) -> Any:
    return s3fs.S3FileSystem(
        key=CLIENT.access_key,
        secret=CLIENT.secret_key,
        endpoint_url=node.endpoint,
        skip_instance_cache=True,
        use_listings_cache=False,
    )


@pytest.mark.client("s3fs")
def test_s3fs_puts_gets_lists_appends_and_removes(node: RunningNode, prefix: str, readers: Readers) -> None:
    root = f"{BUCKET}/{prefix}"
    fs = s3fs_of(node)
    big, tail = os.urandom(12 * MIB), os.urandom(1000)
    fs.makedirs(f"{root}/dir", exist_ok=True)
    with fs.open(f"{root}/dir/big", "wb", block_size=5 * MIB) as file:
        file.write(big)
    fs.pipe(f"{root}/dir/small (1)+", b"small")
    fs.touch(f"{root}/dir/empty")
    with fs.open(f"{root}/dir/big", "ab", block_size=5 * MIB) as file:
        file.write(tail)
    fs.mv(f"{root}/dir/empty", f"{root}/dir/moved")
    expected = {"big": big + tail, "small (1)+": b"small", "moved": b""}

    def check(reader: Any) -> None:
        assert sorted(reader.ls(f"{root}/dir", detail=False)) == sorted(f"{root}/dir/{name}" for name in expected)
        for name, body in expected.items():
            assert reader.cat(f"{root}/dir/{name}") == body
            assert reader.info(f"{root}/dir/{name}")["size"] == len(body)
        with reader.open(f"{root}/dir/big", "rb", block_size=MIB) as file:
            file.seek(5 * MIB - 10)
            assert file.read(100) == big[5 * MIB - 10 : 5 * MIB + 90]

    for reader in readers():
        check(s3fs_of(reader))
    fs = s3fs_of(node)
    fs.rm(f"{root}/dir", recursive=True)
    assert not fs.exists(f"{root}/dir")
    assert not fs.exists(root)


def arrow_of(node: RunningNode) -> pyarrow.fs.S3FileSystem:
    return pyarrow.fs.S3FileSystem(
        access_key=CLIENT.access_key,
        secret_key=CLIENT.secret_key,
        endpoint_override=node.endpoint.removeprefix("http://"),
        scheme="http",
        region="us-east-1",
        allow_bucket_creation=False,
    )


@pytest.mark.client("pyarrow")
def test_pyarrow_writes_reads_lists_and_deletes(node: RunningNode, prefix: str, readers: Readers) -> None:
    root = f"{BUCKET}/{prefix}"
    fs = arrow_of(node)
    bodies = {"big": os.urandom(23 * MIB), "small": b"small", "empty": b""}
    fs.create_dir(f"{root}/dir")
    assert fs.get_file_info(f"{root}/dir").type == pyarrow.fs.FileType.Directory
    for name, body in bodies.items():
        with fs.open_output_stream(f"{root}/dir/{name}", metadata={"Content-Type": "x/y"}) as stream:
            stream.write(body)

    def check(reader: pyarrow.fs.S3FileSystem) -> None:
        found = reader.get_file_info(pyarrow.fs.FileSelector(f"{root}/dir"))
        assert {info.base_name: info.size for info in found} == {name: len(body) for name, body in bodies.items()}
        for name, body in bodies.items():
            with reader.open_input_stream(f"{root}/dir/{name}") as stream:
                assert stream.read() == body
        with reader.open_input_file(f"{root}/dir/big") as file:
            file.seek(9 * MIB)
            assert file.read(1000) == bodies["big"][9 * MIB : 9 * MIB + 1000]
        assert reader.get_file_info(f"{root}/none").type == pyarrow.fs.FileType.NotFound

    fs.copy_file(f"{root}/dir/small", f"{root}/copied")
    for reader in readers():
        check(arrow_of(reader))
    fs = arrow_of(node)
    fs.move(f"{root}/copied", f"{root}/moved")
    fs.delete_dir(f"{root}/dir")
    names = [info.path for info in fs.get_file_info(pyarrow.fs.FileSelector(root, recursive=True))]
    assert names == [f"{root}/moved"]


@pytest.mark.client("pyarrow")
def test_pyarrow_object_is_invisible_until_it_is_closed(node: RunningNode, prefix: str) -> None:
    fs = arrow_of(node)
    stream = fs.open_output_stream(f"{BUCKET}/{prefix}/o", buffer_size=0)
    stream.write(bytes(11 * MIB))
    with pytest.raises(FileNotFoundError):
        arrow_of(node).open_input_stream(f"{BUCKET}/{prefix}/o")
    stream.close()
    assert fs.get_file_info(f"{BUCKET}/{prefix}/o").size == 11 * MIB
