"""obstore: reads of ranges, conditional writes, copies, renames and listings, sync and async."""

import asyncio
import os

import obstore
import pytest
from obstore.exceptions import AlreadyExistsError, PreconditionError
from obstore.store import S3Store
from tests.clients.conftest import BUCKET, Readers
from tests.conformance.gateway import CLIENT

from tiergate.testing.node import RunningNode

pytestmark = pytest.mark.client("obstore")

MIB = 1 << 20


def store_of(node: RunningNode, prefix: str) -> S3Store:
    return S3Store(
        BUCKET,
        prefix=prefix,
        config={
            "endpoint": node.endpoint,
            "access_key_id": CLIENT.access_key,
            "secret_access_key": CLIENT.secret_key,
            "region": "us-east-1",
            "copy_if_not_exists": "multipart",
        },
        client_options={"allow_http": True},
    )


def test_obstore_puts_gets_ranges_copies_and_lists(node: RunningNode, prefix: str, readers: Readers) -> None:
    store = store_of(node, prefix)
    big = os.urandom(17 * MIB + 3)
    bodies = {"dir/big": big, "dir/small b+c": b"small", "empty": b"", "copied": big, "renamed": b"renamed"}
    obstore.put(store, "dir/big", big, use_multipart=True, chunk_size=5 * MIB, attributes={"Content-Type": "x/y"})
    obstore.put(store, "dir/small b+c", b"small")
    obstore.put(store, "empty", b"")
    obstore.put(store, "old", b"renamed", use_multipart=False)
    obstore.copy(store, "dir/big", "copied")
    obstore.rename(store, "old", "renamed")
    for reader in readers():
        store = store_of(reader, prefix)
        listed = {each["path"]: each["size"] for each in obstore.list(store).collect()}
        assert listed == {name: len(body) for name, body in bodies.items()}
        grouped = obstore.list_with_delimiter(store)
        assert list(grouped["common_prefixes"]) == ["dir"]
        assert sorted(each["path"] for each in grouped["objects"]) == ["copied", "empty", "renamed"]
        for name, body in bodies.items():
            assert bytes(obstore.get(store, name).bytes()) == body
            assert obstore.head(store, name)["size"] == len(body)
        assert obstore.get(store, "dir/big").attributes["Content-Type"] == "x/y"
        assert bytes(obstore.get_range(store, "dir/big", start=5 * MIB - 10, length=20)) == big[5 * MIB - 10 :][:20]
        starts = (0, 9 * MIB, len(big) - 7)
        ranges = obstore.get_ranges(store, "copied", starts=starts, lengths=[7] * 3)
        assert [bytes(each) for each in ranges] == [big[start : start + 7] for start in starts]
    obstore.delete(store, sorted(bodies))
    assert obstore.list(store).collect() == []
    with pytest.raises(FileNotFoundError):
        obstore.get(store, "copied")


def test_obstore_creates_and_updates_on_conditions(node: RunningNode, prefix: str, readers: Readers) -> None:
    obstore.put(store_of(node, prefix), "pointer", b"1", mode="create")
    for reader in readers():
        store = store_of(reader, prefix)
        with pytest.raises(AlreadyExistsError):
            obstore.put(store, "pointer", b"2", mode="create")
        etag = obstore.head(store, "pointer")["e_tag"]
        assert etag is not None
        before = bytes(obstore.get(store, "pointer").bytes())
        newer = obstore.put(store, "pointer", before + b"+", mode={"e_tag": etag})
        assert newer["e_tag"] not in (None, etag)
        with pytest.raises(PreconditionError):
            obstore.put(store, "pointer", b"late", mode={"e_tag": etag})
        assert bytes(obstore.get(store, "pointer").bytes()) == before + b"+"
        with pytest.raises(AlreadyExistsError):
            obstore.copy(store, "pointer", "pointer", overwrite=False)
    store = store_of(node, prefix)
    obstore.copy(store, "pointer", "copied", overwrite=False)
    assert bytes(obstore.get(store, "copied").bytes()) == b"1+++"


async def test_obstore_writes_and_reads_at_once(node: RunningNode, prefix: str) -> None:
    store = store_of(node, prefix)
    bodies = {f"{n:02}": os.urandom(MIB + n) for n in range(20)}
    await asyncio.gather(*(obstore.put_async(store, name, body) for name, body in bodies.items()))

    async def read(name: str) -> bytes:
        return bytes(await (await obstore.get_async(store, name)).bytes_async())

    assert dict(zip(bodies, await asyncio.gather(*map(read, bodies)), strict=True)) == bodies
    writers = [obstore.put_async(store, "one", name.encode(), mode="create") for name in bodies]
    outcomes = await asyncio.gather(*writers, return_exceptions=True)
    lost = [each for each in outcomes if isinstance(each, AlreadyExistsError)]
    assert len(lost) == len(bodies) - 1
    (won,) = (name for name, each in zip(bodies, outcomes, strict=True) if not isinstance(each, BaseException))
    assert await read("one") == won.encode()
