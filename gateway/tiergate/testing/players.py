"""Clients that do something random at each turn, at several nodes, and note what came of it."""

import random
from collections.abc import Sequence
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError

from tiergate.testing.histories import Did, Value
from tiergate.testing.journal import Journal, is_refusal, status_of, value_of
from tiergate.testing.objects import body_of

MIB = 1 << 20
KEYS = ("s/.metadata", "s/a", "s/b", "t/.metadata", "t/a")
SIZES_BYTES = (0, 10, 3000, 200_000, 24 * MIB)
_WEIGHTS = (1, 4, 4, 3, 1)
_PART_BYTES = 5 * MIB


class Player:
    """One of them. Each turn goes to one of `clients`, which try once: a second try would be noted as the first."""

    def __init__(
        self,
        clients: Sequence[Any],
        bucket: str,
        journal: Journal,
        seed: str,
        *,
        keys: Sequence[str] = KEYS,
        sizes_bytes: Sequence[int] = SIZES_BYTES,
    ) -> None:
        self._clients = clients
        self._bucket = bucket
        self._journal = journal
        self._random = random.Random(seed)
        self._keys = keys
        self._sizes_bytes = sizes_bytes
        self.surprises: list[str] = []
        """Refusals that no request here can deserve."""

    def play(self, turns_count: int) -> None:
        """Take so many turns."""
        turns = (self.put, self.put_new, self.delete, self.get, self.get, self.head, self.list, self.upload)
        for _ in range(turns_count):
            turn = self._random.choice(turns)
            try:
                turn(self._random.choice(self._clients), self._random.choice(self._keys))
            except ClientError as error:
                if is_refusal(error):
                    self.surprises.append(f"{turn.__name__}: {error}")
            except BotoCoreError:
                pass  # A connection that broke: what it did is noted as uncertain.

    def _body(self) -> bytes:
        head = self._random.randbytes(16)
        return head + bytes(self._random.choices(self._sizes_bytes, _WEIGHTS[: len(self._sizes_bytes)])[0])

    def put(self, client: Any, key: str, **conditions: str) -> None:
        """PutObject."""
        body = self._body()
        self._journal.write(
            key,
            value_of(body),
            lambda: client.put_object(Bucket=self._bucket, Key=key, Body=body, **conditions),
        )

    def put_new(self, client: Any, key: str) -> None:
        """PutObject of a key that must not be there."""
        from_s = self._journal.now_s()
        try:
            self.put(client, key, IfNoneMatch="*")
        except ClientError as error:
            code = error.response["Error"]["Code"]
            if code == "PreconditionFailed":
                self._journal.saw(key, Did.SAW_PRESENCE, Value("", 0), from_s)
            elif code != "ConditionalRequestConflict":
                raise

    def delete(self, client: Any, key: str) -> None:
        """DeleteObject."""
        self._journal.write(key, None, lambda: client.delete_object(Bucket=self._bucket, Key=key))

    def get(self, client: Any, key: str) -> None:
        """GetObject, all of it."""
        from_s = self._journal.now_s()
        try:
            body = body_of(client, self._bucket, key)
        except client.exceptions.NoSuchKey:
            self._journal.saw(key, Did.READ, None, from_s)
        else:
            self._journal.saw(key, Did.READ, value_of(body), from_s)

    def head(self, client: Any, key: str) -> None:
        """HeadObject."""
        from_s = self._journal.now_s()
        try:
            head = client.head_object(Bucket=self._bucket, Key=key)
        except ClientError as error:
            if status_of(error) != 404:
                raise
            self._journal.saw(key, Did.SAW_SIZE, None, from_s)
        else:
            self._journal.saw(key, Did.SAW_SIZE, Value("", head["ContentLength"]), from_s)

    def list(self, client: Any, key: str) -> None:
        """ListObjectsV2 of the key's folder."""
        from_s = self._journal.now_s()
        prefix = key[: key.rindex("/") + 1]
        answer = client.list_objects_v2(Bucket=self._bucket, Prefix=prefix)
        found = {entry["Key"]: Value("", entry["Size"]) for entry in answer.get("Contents", [])}
        for each in self._keys:
            if each.startswith(prefix):
                self._journal.saw(each, Did.SAW_SIZE, found.get(each), from_s)

    def upload(self, client: Any, key: str) -> None:
        """A multipart upload, each request of it at a node of its own choice."""
        named = {"Bucket": self._bucket, "Key": key}
        named["UploadId"] = client.create_multipart_upload(**named)["UploadId"]
        bodies = (self._random.randbytes(16) + bytes(_PART_BYTES), self._random.randbytes(1000))
        parts = []
        for number, body in enumerate(bodies, 1):
            part = self._random.choice(self._clients).upload_part(**named, PartNumber=number, Body=body)
            parts.append({"PartNumber": number, "ETag": part["ETag"]})
        last = self._random.choice(self._clients)
        self._journal.write(
            key,
            value_of(b"".join(bodies)),
            lambda: last.complete_multipart_upload(**named, MultipartUpload={"Parts": parts}),
        )
