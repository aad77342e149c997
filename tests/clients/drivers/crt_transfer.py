"""Uploads, downloads and deletes with the CRT's transfer manager: `crt_transfer.py write|read BUCKET PREFIX FOLDER`.

boto3 itself never gives its CRT client anything but TLS; this is the same manager, made for plain HTTP.
"""

import random
import sys
from pathlib import Path
from typing import Any

from botocore.session import Session
from s3transfer.crt import (
    BotocoreCRTCredentialsWrapper,
    BotocoreCRTRequestSerializer,
    CRTTransferManager,
    create_s3_crt_client,
)

MIB = 1 << 20
SIZES_BYTES = (0, 1, 8 * MIB, 21 * MIB + 3)
REGION = "us-east-1"


def manager() -> Any:
    session = Session()
    keys: Any = session.get_credentials()
    credentials = BotocoreCRTCredentialsWrapper(keys).to_crt_credentials_provider()
    client = create_s3_crt_client(region=REGION, crt_credentials_provider=credentials, use_ssl=False)
    return CRTTransferManager(
        client, BotocoreCRTRequestSerializer(session, {"region_name": REGION, "endpoint_url": None})
    )


def bodies(prefix: str) -> dict[str, bytes]:
    keys = {f"{prefix}/{size}": size for size in SIZES_BYTES}
    return {key: random.Random(key).randbytes(size) for key, size in keys.items()}


def write(bucket: str, prefix: str, folder: str) -> None:
    source = Path(folder) / "source"
    with manager() as transfers:
        for key, body in bodies(prefix).items():
            source.write_bytes(body)
            transfers.upload(str(source), bucket, key).result()
        source.write_bytes(b"doomed")
        transfers.upload(str(source), bucket, f"{prefix}/doomed").result()
        transfers.delete(bucket, f"{prefix}/doomed").result()


def read(bucket: str, prefix: str, folder: str) -> None:
    targets = {key: Path(folder) / f"target-{key.rpartition('/')[2]}" for key in bodies(prefix)}
    with manager() as transfers:
        for key, target in targets.items():
            target.unlink(missing_ok=True)
            transfers.download(bucket, key, str(target))
    # A download has its name once the manager has ended, not when its future has.
    for key, body in bodies(prefix).items():
        assert targets[key].read_bytes() == body, key


if __name__ == "__main__":
    {"write": write, "read": read}[sys.argv[1]](*sys.argv[2:])
