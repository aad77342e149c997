"""Promise P3: random requests of several clients at once, over a failing origin, dying processes and little memory, are
explained by one order of each key; and what the last of them saw is what the origin holds in the end."""

import hashlib
import os
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from math import inf
from typing import Any, Protocol

import pytest
from botocore.exceptions import BotoCoreError, ClientError

from tiergate.clock import SystemClock
from tiergate.testing.faults import FaultyOrigin
from tiergate.testing.histories import Did, Done, Value, unexplained
from tiergate.testing.node import RunningNode
from tiergate.testing.rules import Answer, Cut

pytestmark = pytest.mark.semantics("P3.1")

MIB = 1 << 20
KEYS = ("s/.metadata", "s/a", "s/b", "t/.metadata", "t/a")
SIZES_BYTES = (0, 10, 3000, 200_000, 24 * MIB)
CLIENTS_COUNT = 4
TURNS_COUNT = 60
SETTLE_S = 60.0
FAULTS = (Answer(503, "SlowDown"), Answer(500, "InternalError", after_origin=True), Cut(), Cut(after_origin=True))
FAILING = ("PutObject", "DeleteObject", "HeadObject", "GetObject", "UploadPart", "CompleteMultipartUpload")
WRITING = frozenset({"PutObject", "CreateMultipartUpload", "UploadPart", "CompleteMultipartUpload"})


class StartNode(Protocol):
    """The fixture of that name."""

    def __call__(self, *flags: str, origin: str = "", **options: Any) -> RunningNode: ...


def value_of(body: bytes) -> Value:
    return Value(hashlib.sha256(body).hexdigest(), len(body))


class Player:
    """A client that does something random at each turn and notes what came of it."""

    def __init__(self, client: Any, bucket: str, seed: str) -> None:
        self._client = client
        self._bucket = bucket
        self._random = random.Random(seed)
        self._clock = SystemClock()
        self.done: dict[str, list[Done]] = {key: [] for key in KEYS}
        self.surprises: list[str] = []

    def play(self) -> None:
        turns = (self.put, self.put_new, self.delete, self.get, self.get, self.head, self.list, self.upload)
        for _ in range(TURNS_COUNT):
            turn = self._random.choice(turns)
            try:
                turn(self._random.choice(KEYS))
            except ClientError as error:
                if error.response["ResponseMetadata"]["HTTPStatusCode"] < 500:
                    self.surprises.append(f"{turn.__name__}: {error}")
            except BotoCoreError:
                pass  # A connection that broke: what it did is noted as uncertain.

    @contextmanager
    def _writing(self, key: str, value: Value | None) -> Iterator[None]:
        from_s = self._clock.monotonic_s()
        until_s = inf
        try:
            yield
            until_s = self._clock.monotonic_s()
        except ClientError as error:
            if error.response["ResponseMetadata"]["HTTPStatusCode"] < 500:
                from_s = inf  # Refused: it did not happen.
            raise
        finally:
            if from_s < inf:
                self.done[key].append(Done(Did.WROTE, value, from_s, until_s))

    def _saw(self, key: str, did: Did, value: Value | None, from_s: float) -> None:
        self.done[key].append(Done(did, value, from_s, self._clock.monotonic_s()))

    def _body(self) -> bytes:
        return self._random.randbytes(16) + bytes(self._random.choices(SIZES_BYTES, (1, 4, 4, 3, 1))[0])

    def put(self, key: str, **conditions: str) -> None:
        body = self._body()
        with self._writing(key, value_of(body)):
            self._client.put_object(Bucket=self._bucket, Key=key, Body=body, **conditions)

    def put_new(self, key: str) -> None:
        from_s = self._clock.monotonic_s()
        try:
            self.put(key, IfNoneMatch="*")
        except ClientError as error:
            code = error.response["Error"]["Code"]
            if code == "PreconditionFailed":
                self._saw(key, Did.SAW_PRESENCE, Value("", 0), from_s)
            elif code != "ConditionalRequestConflict":
                raise

    def delete(self, key: str) -> None:
        with self._writing(key, None):
            self._client.delete_object(Bucket=self._bucket, Key=key)

    def get(self, key: str) -> None:
        from_s = self._clock.monotonic_s()
        try:
            body = self._client.get_object(Bucket=self._bucket, Key=key)["Body"].read()
        except self._client.exceptions.NoSuchKey:
            self._saw(key, Did.READ, None, from_s)
        else:
            self._saw(key, Did.READ, value_of(body), from_s)

    def head(self, key: str) -> None:
        from_s = self._clock.monotonic_s()
        try:
            head = self._client.head_object(Bucket=self._bucket, Key=key)
        except ClientError as error:
            if error.response["ResponseMetadata"]["HTTPStatusCode"] != 404:
                raise
            self._saw(key, Did.SAW_SIZE, None, from_s)
        else:
            self._saw(key, Did.SAW_SIZE, Value("", head["ContentLength"]), from_s)

    def list(self, key: str) -> None:
        from_s = self._clock.monotonic_s()
        prefix = key[:2]
        answer = self._client.list_objects_v2(Bucket=self._bucket, Prefix=prefix)
        found = {entry["Key"]: Value("", entry["Size"]) for entry in answer.get("Contents", [])}
        for each in KEYS:
            if each.startswith(prefix):
                self._saw(each, Did.SAW_SIZE, found.get(each), from_s)

    def upload(self, key: str) -> None:
        named = {"Bucket": self._bucket, "Key": key}
        named["UploadId"] = self._client.create_multipart_upload(**named)["UploadId"]
        bodies = (self._random.randbytes(16) + bytes(5 * MIB), self._random.randbytes(1000))
        parts = []
        for number, body in enumerate(bodies, 1):
            part = self._client.upload_part(**named, PartNumber=number, Body=body)
            parts.append({"PartNumber": number, "ETag": part["ETag"]})
        with self._writing(key, value_of(b"".join(bodies))):
            self._client.complete_multipart_upload(**named, MultipartUpload={"Parts": parts})


def disturb(node: RunningNode, proxy: FaultyOrigin, choice: random.Random, playing: list[threading.Thread]) -> None:
    """Let the origin and the node's processes fail for as long as the clients play."""
    clock = SystemClock()
    while any(thread.is_alive() for thread in playing):
        if choice.random() < 0.15:
            down = Answer(503, "SlowDown")
            proxy.inject(down, where=lambda seen: seen.operation in WRITING, times=None)
            playing[0].join(choice.uniform(0.2, 1.0))
            proxy.heal()
        elif choice.random() < 0.1:
            node.kill9(choice.choice(("worker", "background")))
        else:
            proxy.inject(choice.choice(FAULTS), operation=choice.choice(FAILING))
        until_s = clock.monotonic_s() + choice.uniform(0.05, 0.3)
        while clock.monotonic_s() < until_s and any(thread.is_alive() for thread in playing):
            playing[-1].join(0.02)
    proxy.heal()


def test_random_requests_are_explained_by_one_order_of_each_key(
    start_node: StartNode, proxy: FaultyOrigin, direct: Any, bucket: str
) -> None:
    seed = os.environ.get("TIERGATE_TEST_SEED", "") or str(random.SystemRandom().randrange(1 << 30))
    choice = random.Random(seed)
    told = f"TIERGATE_TEST_SEED={seed}"
    flags = ("--marker-quiet", "100ms", "--through-wait", "3s", "--revalidate", choice.choice(("0s", "1h")))
    node = start_node(*flags, workers=2, memory_limit=choice.choice(("64MiB", "256MiB")))
    client = node.client(retries={"max_attempts": 1})
    players = [Player(client, bucket, f"{seed} {number}") for number in range(CLIENTS_COUNT)]
    threads = [threading.Thread(target=player.play) for player in players]
    for thread in threads:
        thread.start()
    disturb(node, proxy, choice, threads)
    node.wait_settled(SETTLE_S)
    assert [surprise for player in players for surprise in player.surprises] == [], told

    last = Player(node.client(), bucket, seed)
    origin = Player(direct, bucket, seed)
    for key in KEYS:
        last.get(key)
        origin.get(key)
        history = [done for player in (*players, last) for done in player.done[key]]
        assert unexplained(history) == [], f"{key}, {told}"
        assert origin.done[key][0].value == last.done[key][0].value, f"{key}, {told}"
    assert node.metric("tiergate_http_broken_invariants_total") == 0, node.log_tail()
