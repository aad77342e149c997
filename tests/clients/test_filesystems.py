"""s3fs and pyarrow as file systems."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pyarrow.fs  # type: ignore[import-untyped]  # it has no types
import pytest
import s3fs  # type: ignore[import-untyped]  # it has no types
from tests.clients.conftest import BUCKET, Aside, Environment, Readers
from tests.conformance.gateway import CLIENT

from tiergate.testing.node import RunningNode

MIB = 1 << 20


def s3fs_of(node: RunningNode, **more: Any) -> Any:
    return s3fs.S3FileSystem(
        key=CLIENT.access_key,
        secret=CLIENT.secret_key,
        endpoint_url=node.endpoint,
        skip_instance_cache=True,
        use_listings_cache=False,
        **more,
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


@pytest.mark.client("s3fs")
async def test_s3fs_of_an_event_loop_puts_gets_copies_and_removes(
    node: RunningNode, prefix: str, readers: Readers, tmp_path: Path
) -> None:
    root = f"{BUCKET}/{prefix}"
    big = os.urandom(12 * MIB)
    (tmp_path / "big").write_bytes(big)
    async with at_work(node) as fs:
        await fs._put_file(str(tmp_path / "big"), f"{root}/big", chunksize=5 * MIB)
        bodies = {f"{root}/{n}": os.urandom(10_000 + n) for n in range(20)}
        await asyncio.gather(*(fs._pipe_file(path, body) for path, body in bodies.items()))
        await fs._cp_file(f"{root}/big", f"{root}/copied")
    bodies |= {f"{root}/big": big, f"{root}/copied": big}
    for reader in readers():
        async with at_work(reader) as fs:
            assert sorted(await fs._ls(root, detail=False)) == sorted(bodies)
            assert dict(zip(bodies, await asyncio.gather(*map(fs._cat_file, bodies)), strict=True)) == bodies
            assert (
                await fs._cat_file(f"{root}/big", start=5 * MIB - 10, end=5 * MIB + 10)
                == (big[5 * MIB - 10 : 5 * MIB + 10])
            )
            await fs._get_file(f"{root}/copied", str(tmp_path / "got"))
            assert (tmp_path / "got").read_bytes() == big
            assert (await fs._info(f"{root}/big"))["size"] == len(big)
    async with at_work(node) as fs:
        await fs._rm(root, recursive=True)
        assert not await fs._exists(root)


@asynccontextmanager
async def at_work(node: RunningNode) -> AsyncIterator[Any]:
    """s3fs within this event loop; its session ends with the block."""
    fs = s3fs_of(node, asynchronous=True)
    session = await fs.set_session()
    try:
        yield fs
    finally:
        await session.close()


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


WAYS: dict[str, Callable[[str, str], tuple[pyarrow.fs.FileSystem, str]]] = {
    "explicit": lambda path, address: (
        pyarrow.fs.S3FileSystem(endpoint_override=address, scheme="http", region="us-east-1"),
        path,
    ),
    "in the URI": lambda path, address: pyarrow.fs.FileSystem.from_uri(
        f"s3://{path}?endpoint_override={address}&scheme=http"
    ),
    "AWS_ENDPOINT_URL": lambda path, address: pyarrow.fs.FileSystem.from_uri(f"s3://{path}"),
}
"""How pyarrow can be told where the gateway is, as CLIENTS.md says it: each gives a file system and a path in it."""


@pytest.mark.client("pyarrow")
@pytest.mark.parametrize("way", WAYS)
def test_pyarrow_finds_its_endpoint(
    way: str,
    node: RunningNode,
    prefix: str,
    environment: Environment,
    aside: Aside,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    environment()
    if way != "AWS_ENDPOINT_URL":
        monkeypatch.delenv("AWS_ENDPOINT_URL")
    fs, path = WAYS[way](f"{BUCKET}/{prefix}/o", node.endpoint.removeprefix("http://"))
    assert path == f"{BUCKET}/{prefix}/o"
    with fs.open_output_stream(path) as stream:
        stream.write(b"weights")
    with aside() as s3:
        assert s3.get_object(Bucket=BUCKET, Key=f"{prefix}/o")["Body"].read() == b"weights"
    with fs.open_input_stream(path) as stream:
        assert stream.read() == b"weights"
