"""Requests of our own on the S3 address: `?x-tiergate-<verb>`, signed like any other.

The one table of them is in `OwnRequests`, which the pipeline asks once it knows who asks. Their answers are JSON, their
errors S3's documents.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from tiergate.engine.calls import Answer, Call, told
from tiergate.errors import RequestError
from tiergate.s3.operations import Target
from tiergate.s3.servicemodel import Level

__all__ = ["PREFIX", "OwnRequests", "Verb", "level_of", "told", "verb_of"]

PREFIX = "x-tiergate-"


@dataclass(frozen=True, slots=True)
class Verb:
    """One request: by which method, on what, and who answers it."""

    method: str
    level: Level
    answer: Callable[[Call], Awaitable[Answer]]


@dataclass(frozen=True, slots=True)
class OwnRequests:
    """The table. Names of verbs come without what all begin with."""

    verbs: Mapping[str, Verb] = field(default_factory=dict)

    async def answer(self, verb: str, call: Call) -> Answer:
        """Do what a request of our own asks for.

        Raises:
            RequestError: NotImplemented, MethodNotAllowed, or as the verb says.
            TiergateError: as the verb says.
        """
        known = self.verbs.get(verb)
        if known is None:
            raise RequestError("NotImplemented", "This gateway does not know such a request.")
        if call.method != known.method or level_of(call.target) is not known.level:
            raise RequestError("MethodNotAllowed", method=call.method, resource_type=known.level.name)
        return await known.answer(call)


def verb_of(target: Target) -> str | None:
    """The verb of a request of our own; None for one of S3's."""
    names = (name for name, _ in target.query if name.startswith(PREFIX))
    return next((name.removeprefix(PREFIX) for name in names), None)


def level_of(target: Target) -> Level:
    """What a request's path names."""
    if target.key:
        return Level.KEY
    return Level.BUCKET if target.bucket else Level.SERVICE
