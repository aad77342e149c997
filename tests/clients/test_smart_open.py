"""smart_open: streams that are written in parts, read, and searched through."""

import os
from typing import Any

import pytest
from smart_open import open as smart_open
from tests.clients.conftest import BUCKET, Aside, Readers

from tiergate.testing.node import RunningNode

pytestmark = pytest.mark.client("smart_open")

MIB = 1 << 20


def opened(node: RunningNode, url: str, mode: str, **more: Any) -> Any:
    return smart_open(url, mode, transport_params={"client": node.client(), **more})


def test_smart_open_writes_reads_and_seeks(node: RunningNode, prefix: str, readers: Readers) -> None:
    root, big = f"s3://{BUCKET}/{prefix}", os.urandom(12 * MIB + 3)
    lines = [f"строка {n}\n" for n in range(1000)]
    with opened(node, f"{root}/big", "wb", min_part_size=5 * MIB) as file:
        for start in range(0, len(big), MIB):
            file.write(big[start : start + MIB])
    with opened(node, f"{root}/whole", "wb", multipart_upload=False) as file:
        file.write(big[:1000])
    with opened(node, f"{root}/empty", "wb"):
        pass
    with opened(node, f"{root}/text.gz", "w") as file:  # compressed by its name
        file.writelines(lines)
    for reader in readers():
        with opened(reader, f"{root}/big", "rb") as file:
            assert file.read() == big
            assert file.seek(5 * MIB - 10) == 5 * MIB - 10
            assert file.read(20) == big[5 * MIB - 10 : 5 * MIB + 10]
            file.seek(-7, 2)
            assert file.read() == big[-7:]
        with opened(reader, f"{root}/whole", "rb", defer_seek=True) as file:
            file.seek(500)
            assert file.read() == big[500:1000]
        with opened(reader, f"{root}/empty", "rb") as file:
            assert file.read() == b""
        with opened(reader, f"{root}/text.gz", "r") as file:
            assert file.readlines() == lines
        with pytest.raises(OSError, match=r"NoSuchKey|unable to access"):
            opened(reader, f"{root}/none", "rb").read()


def test_smart_open_that_fails_leaves_nothing(node: RunningNode, prefix: str, aside: Aside) -> None:
    def breaks() -> None:
        with opened(node, f"s3://{BUCKET}/{prefix}/o", "wb", min_part_size=5 * MIB) as file:
            file.write(bytes(6 * MIB))
            raise RuntimeError

    with pytest.raises(RuntimeError):
        breaks()
    with aside() as s3:
        assert "Contents" not in s3.list_objects_v2(Bucket=BUCKET, Prefix=prefix)
        assert "Uploads" not in s3.list_multipart_uploads(Bucket=BUCKET, Prefix=prefix)
