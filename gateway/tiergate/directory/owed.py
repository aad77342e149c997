"""What write-back notes of a pending write: the same in every directory, whatever its transactions are."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from tiergate.directory import plans, transitions
from tiergate.directory.view import Rows
from tiergate.model import NO_BASE, ObjectName, OriginUpload, Pending, Plan

T = TypeVar("T")


class OwedChanges(ABC):
    """These methods of `tiergate.directory.base.Directory`; see there."""

    @abstractmethod
    async def _change_pending(self, name: ObjectName, transition: Callable[[Rows], T]) -> T:
        """Run a transition that begins with the pending write of a key."""

    @abstractmethod
    async def _change_plan(self, plan: Plan, transition: Callable[[Rows], T]) -> T:
        """Run a transition that begins with a plan."""

    async def begin(self, name: ObjectName, uid: str, base: str) -> Pending:
        return await self._owned(name, uid, lambda write: replace(write, begun=True, base=base))

    async def note_upload(self, name: ObjectName, uid: str, upload: OriginUpload | None) -> Pending:
        return await self._owned(name, uid, lambda write: replace(write, upload=upload))

    async def rebase(self, name: ObjectName, uid: str, base: str) -> Pending:
        return await self._owned(name, uid, lambda write: replace(write, base=base))

    async def withdrawn(self, name: ObjectName, uid: str) -> None:
        await self._if_pending(name, uid, lambda write: replace(write, base=NO_BASE, withdrawn=True))

    async def settled_set(self, name: ObjectName, uid: str) -> None:
        await self._if_pending(name, uid, lambda write: replace(write, disturbed_s=0.0))

    async def drop_leftovers(self, name: ObjectName, dropped: Sequence[OriginUpload]) -> None:
        await self._change_pending(name, lambda rows: transitions.drop_leftovers(rows, name, dropped))

    async def park(self, name: ObjectName, uid: str, plan: Plan) -> bool:
        return await self._change_pending(name, lambda rows: transitions.park(rows, name, uid, plan))

    async def change_plan(self, before: Plan, after: Plan | None) -> bool:
        return await self._change_plan(before, lambda rows: plans.change(rows, before, after))

    async def drop_plan(self, before: Plan) -> Plan | None:
        return await self._change_plan(before, lambda rows: plans.drop(rows, before))

    async def _owned(self, name: ObjectName, uid: str, change: Callable[[Pending], Pending]) -> Pending:
        return await self._change_pending(name, lambda rows: transitions.change_owned(rows, name, uid, change))

    async def _if_pending(self, name: ObjectName, uid: str, change: Callable[[Pending], Pending]) -> None:
        await self._change_pending(name, lambda rows: transitions.change_if_pending(rows, name, uid, change))
