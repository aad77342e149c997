"""A training job as its checkpoints look to S3: each rank writes its shard through a node, all at once, large ones in
parts; when all are acknowledged one rank writes the marker through another node. What was is overwritten in place now
and then, and the oldest goes."""

import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError

from tiergate.testing.journal import Journal, is_refusal, value_of

KIB = 1 << 10
MIB = 1 << 20
PART_BYTES = 5 * MIB
MARKER = ".metadata"


class SaveFailedError(Exception):
    """A rank could not write its shard through any node, so that no marker was written."""


class Trainer:
    """One job. `clients` are of one node each, and try again as `journal` knows; a rank whose node does not serve it
    goes on to the next one if `may_move`, and so does one whose upload was forgotten if `may_forget`: the directory
    goes back to what it was before. All that it does follows from `seed`."""

    def __init__(
        self,
        clients: Sequence[Any],
        bucket: str,
        journal: Journal,
        seed: str,
        *,
        run: str = "run",
        ranks_count: int = 4,
        shard_bytes: Sequence[int] = (3 * KIB, 300 * KIB, 2 * MIB, 6 * MIB),
        kept_count: int = 2,
        may_move: bool = True,
        may_forget: bool = False,
    ) -> None:
        self._clients = clients
        self._bucket = bucket
        self._journal = journal
        self._random = random.Random(seed)
        self._run = run
        self._ranks_count = ranks_count
        self._shard_bytes = shard_bytes
        self._kept_count = kept_count
        self._may_move = may_move
        self._may_forget = may_forget
        self._next_step = 0
        self.saved: list[int] = []
        """The steps whose marker was acknowledged, and that were not dropped since."""

        self.saves_count = 0
        """How often a marker was acknowledged."""

    def train(self, saves_count: int, is_over: Callable[[], bool] = lambda: False) -> None:
        """Save so many times, or until `is_over`. A save that fails is in the journal's failures, and training goes
        on with the next one."""
        for _ in range(saves_count):
            if is_over():
                return
            again = bool(self.saved) and self._random.random() < 0.25
            step = self.saved[-1] if again else self._next_step
            try:
                self.save(step)
                while len(self.saved) > self._kept_count:
                    self.drop(self.saved[0])
            except SaveFailedError:
                continue

    def prefix(self, step: int) -> str:
        """The prefix of a step's objects."""
        return f"{self._run}/step-{step}/"

    def save(self, step: int) -> None:
        """Write all objects of a step, the marker last.

        Raises:
            SaveFailedError: not all could be written.
        """
        self._next_step = max(self._next_step, step + 1)
        if step in self.saved:
            self.saved.remove(step)
        shift = self._random.randrange(len(self._clients))
        bodies = [self._random.randbytes(self._random.choice(self._shard_bytes)) for _ in range(self._ranks_count)]
        keys = [f"{self.prefix(step)}__{rank}_0.distcp" for rank in range(self._ranks_count)]
        with ThreadPoolExecutor(self._ranks_count) as ranks:
            done = ranks.map(self.write, range(shift, shift + len(keys)), keys, bodies)
        if not all(done):
            raise SaveFailedError(f"step {step}")
        marker = self._random.randbytes(200)
        if not self.write(shift + self._random.randrange(len(self._clients)), f"{self.prefix(step)}{MARKER}", marker):
            raise SaveFailedError(f"the marker of step {step}")
        self.saved.append(step)
        self.saves_count += 1

    def drop(self, step: int) -> None:
        """Delete all objects of a step, in an order that says nothing.

        Raises:
            SaveFailedError: not all could be deleted.
        """
        keys = [f"{self.prefix(step)}__{rank}_0.distcp" for rank in range(self._ranks_count)]
        keys.append(f"{self.prefix(step)}{MARKER}")
        self._random.shuffle(keys)
        self.saved.remove(step)
        done = [self.delete(rank, key) for rank, key in enumerate(keys)]
        if not all(done):
            raise SaveFailedError(f"deletion of step {step}")

    def write(self, rank: int, key: str, body: bytes) -> bool:
        """Write one object; whether it was acknowledged."""
        value = value_of(body)

        def whole(client: Any) -> object:
            return self._journal.write(key, value, lambda: client.put_object(Bucket=self._bucket, Key=key, Body=body))

        def in_parts(client: Any) -> object:
            named = {"Bucket": self._bucket, "Key": key}
            named["UploadId"] = client.create_multipart_upload(**named)["UploadId"]
            parts = []
            for number, start in enumerate(range(0, len(body), PART_BYTES), 1):
                part = client.upload_part(**named, PartNumber=number, Body=body[start : start + PART_BYTES])
                parts.append({"PartNumber": number, "ETag": part["ETag"]})
            complete = {"MultipartUpload": {"Parts": parts}}
            return self._journal.write(key, value, lambda: client.complete_multipart_upload(**named, **complete))

        return self._at_any(rank, f"write of {key}", in_parts if len(body) > PART_BYTES else whole)

    def delete(self, rank: int, key: str) -> bool:
        """Delete one object; whether it was acknowledged."""

        def call(client: Any) -> object:
            return self._journal.write(key, None, lambda: client.delete_object(Bucket=self._bucket, Key=key))

        return self._at_any(rank, f"deletion of {key}", call)

    def _at_any(self, rank: int, what: str, call: Callable[[Any], object]) -> bool:
        """Have it done by the rank's own node, or by the first other one that does it."""
        count = len(self._clients) if self._may_move else 1
        for attempt in range(count):
            try:
                call(self._clients[(rank + attempt) % len(self._clients)])
            except (BotoCoreError, ClientError) as error:
                if is_refusal(error) and not (self._may_forget and is_forgotten(error)):
                    raise
                self._journal.failed(f"{what}: {error}")
            else:
                return True
        return False


def is_forgotten(error: BotoCoreError | ClientError) -> bool:
    """Whether a call was refused since its upload is not known."""
    return isinstance(error, ClientError) and error.response["Error"]["Code"] == "NoSuchUpload"
