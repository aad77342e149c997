"""Brings a folder what S3 has, before anybody uses it."""

from __future__ import annotations

import queue
import shutil
import threading
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from botocore.exceptions import ClientError

from tiergate.errors import TiergateError
from tiergate_adapters.sagemaker.folder import STAGE, Folder, Look, name_fault
from tiergate_adapters.sagemaker.objects import S3_FAILURES, Fate, bring, is_away, why

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from tiergate_adapters.sagemaker.plan import Sight
    from tiergate_adapters.store import Store

T = TypeVar("T")

_BACKOFF_S = (0.5, 30.0)
_TELL_S = 0.5
"""How often is told how far it is."""
_CHANGED = 412


class NotRestoredError(TiergateError):
    """The folder does not hold what S3 has."""


@dataclass(slots=True)
class Restored:
    """What came of it. `known`: the files that are as S3 has them."""

    known: dict[str, Sight] = field(default_factory=dict)
    brought_count: int = 0
    brought_bytes: int = 0
    kept_count: int = 0
    """Files that were newer here."""


class Restoring:
    """Once. `rank_of`: objects of a higher rank come after all of a lower one. `stop` calls it off; `complain` is told
    what is wrong."""

    def __init__(
        self,
        store: Store,
        folder: Folder,
        parallel: int,
        rank_of: Callable[[str], int],
        stop: threading.Event,
        complain: Callable[[str], None],
    ) -> None:
        self.restored = Restored()
        self._store = store
        self._folder = folder
        self._parallel = parallel
        self._rank_of = rank_of
        self._stop = stop
        self._complain = complain
        self._is_over = False
        self._tasks: queue.SimpleQueue[tuple[str, int]] = queue.SimpleQueue()
        self._ended: queue.SimpleQueue[tuple[str, int, Any]] = queue.SimpleQueue()

    def run(self) -> Iterator[Mapping[str, Any]]:
        """Bring everything; tells meanwhile how far it is.

        Raises:
            NotRestoredError: S3 refuses, the folder cannot be written, or it was called off.
        """
        stage = self._folder.at(STAGE)
        try:
            shutil.rmtree(stage, ignore_errors=True)
            stage.mkdir()
            look = self._folder.look()
            for name, fault in look.odd.items():
                self._complain(f"{name!r} is passed over: {fault}")
            objects = self._persistently("list", lambda: list(self._listed()))
            yield from self._bring_all(objects, look)
        except (*S3_FAILURES, OSError, TiergateError) as error:
            raise NotRestoredError(
                f"{self._folder.path} is not restored from {self._store.place}: {why(error)}"
            ) from error
        finally:
            self._is_over = True
            shutil.rmtree(stage, ignore_errors=True)

    def _listed(self) -> Iterator[tuple[str, int]]:
        place = self._store.place
        pages = self._store.client.get_paginator("list_objects_v2").paginate(Bucket=place.bucket, Prefix=place.prefix)
        for page in pages:
            for each in page.get("Contents", ()):
                name = each["Key"].removeprefix(place.prefix)
                if name == "" or name.startswith(f"{STAGE}/"):
                    continue
                if name.endswith("/") and not each["Size"]:
                    continue  # a console's way to show an empty folder
                if fault := name_fault(name):
                    self._complain(f"{name!r} stays in S3 only: {fault}")
                    continue
                yield name, each["Size"]

    def _bring_all(self, objects: list[tuple[str, int]], look: Look) -> Iterator[Mapping[str, Any]]:
        total_bytes = sum(size_bytes for _, size_bytes in objects)
        done = {"done_count": 0, "done_bytes": 0, "total_count": len(objects), "total_bytes": total_bytes}
        # Markers and pointers last: who looks at what a restore left that did not end is not told more than is there.
        by_rank: dict[int, list[tuple[str, int]]] = {}
        for each in objects:
            by_rank.setdefault(self._rank_of(each[0]), []).append(each)
        for _, group in sorted(by_rank.items()):
            for name, size_bytes, outcome in self._bring_group(group, look):
                if name is not None:
                    self._note(name, size_bytes, outcome)
                    done["done_count"] += 1
                    done["done_bytes"] += size_bytes
                yield done | {"is_over": done["done_count"] == len(objects)}

    def _bring_group(self, group: list[tuple[str, int]], look: Look) -> Iterator[tuple[str | None, int, Any]]:
        """What came of each, in any order; None now and then while nothing comes."""
        for each in group:
            self._tasks.put(each)
        for _ in range(min(self._parallel, len(group))):
            threading.Thread(target=self._work, args=(look,), name="tiergate-restore", daemon=True).start()
        left_count = len(group)
        while left_count:
            try:
                yield self._ended.get(timeout=_TELL_S)
                left_count -= 1
            except queue.Empty:
                if self._stop.is_set():
                    raise NotRestoredError("it was called off") from None
                yield None, 0, None

    def _note(self, name: str, size_bytes: int, outcome: Any) -> None:
        if isinstance(outcome, ValueError):
            self._complain(f"{name!r} stays in S3 only: {outcome}")
            return
        if isinstance(outcome, Exception):
            raise outcome
        fate, sight = outcome
        if sight is not None:
            self.restored.known[name] = sight
        if fate is Fate.BROUGHT:
            self.restored.brought_count += 1
            self.restored.brought_bytes += size_bytes
        elif fate is Fate.NEWER_HERE:
            self.restored.kept_count += 1

    def _work(self, look: Look) -> None:
        while not self._is_called_off():
            try:
                name, size_bytes = self._tasks.get_nowait()
            except queue.Empty:
                return
            outcome: Any
            try:
                outcome = self._persistently(name, partial(self._bring, name, look.sights.get(name)))
            except Exception as error:  # the driver's to judge
                outcome = error
            self._ended.put((name, size_bytes, outcome))

    def _bring(self, name: str, here: Sight | None) -> tuple[Fate, Sight | None]:
        return bring(self._store, self._folder, name, here, self._is_called_off)

    def _is_called_off(self) -> bool:
        return self._is_over or self._stop.is_set()

    def _persistently(self, what: str, call: Callable[[], T]) -> T:
        """What the call returns, once S3 answers."""
        pause_s, most_s = _BACKOFF_S
        while not self._is_called_off():
            try:
                return call()
            except S3_FAILURES as error:
                is_changed = (
                    isinstance(error, ClientError)
                    and error.response["ResponseMetadata"].get("HTTPStatusCode") == _CHANGED
                )
                if not is_away(error) and not is_changed:
                    raise
                self._complain(f"S3 does not answer ({what}: {why(error)}); next try in {pause_s:.1f} s")
            self._stop.wait(pause_s)
            pause_s = min(2 * pause_s, most_s)
        raise NotRestoredError("it was called off")
