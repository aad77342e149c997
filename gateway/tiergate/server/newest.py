"""Which checkpoint a restart takes, asked on the S3 address: `POST /BUCKET?x-tiergate-newest&prefix=RUN/`; and on the
admin address."""

import json
from collections.abc import Mapping
from typing import Any

from aiohttp import web

from tiergate.checkpoints.documents import document_of
from tiergate.checkpoints.sets import Tier
from tiergate.engine.calls import Answer, Call
from tiergate.engine.newest import Chooser, Newest, Question
from tiergate.engine.rooms import Rooms
from tiergate.errors import OverloadedError, RequestError, TiergateError
from tiergate.model import Agreement
from tiergate.observe.logs import get_logger
from tiergate.s3.uri import parse_uri, uri_of
from tiergate.server.own import told
from tiergate.server.streaming import status_of

DECISION_LIMIT_COUNT = 256
"""Characters of a decision's name."""

PASSED_COUNT = 20
"""So many sets that were passed over are named."""

log = get_logger(__name__)


class NewestVerb:
    """Answers `x-tiergate-newest`. `chooser` is the caller's."""

    def __init__(self, rooms: Rooms, chooser: Chooser) -> None:
        self._rooms = rooms
        self._chooser = chooser

    async def answer(self, call: Call) -> Answer:
        """The newest whole set under `prefix` as `checkpoint` (null: there is none), and what was `passed_over`.
        `deep=1`: its bytes are proved, too; `trust`: tiers, with commas between; `decision`: who asks under the same
        name is told the same, for as long as the answers of uploads are kept.

        Raises:
            NotFoundError: NoSuchBucket.
            RequestError: ServiceUnavailable: nobody can say now; InvalidArgument.
        """
        query = {name: value or "" for name, value in call.target.query}
        question = question_of(call.target.bucket, query)
        name = query.get("decision", "")
        if len(name) > DECISION_LIMIT_COUNT or "\0" in name:
            raise RequestError("InvalidArgument", f"a decision's name has at most {DECISION_LIMIT_COUNT} characters")
        try:
            return told(await self._decided(question, name))
        except OverloadedError as error:
            # Who asks reads why: it is all that can be told.
            raise RequestError("ServiceUnavailable", error.message, retry_after_s=error.retry_after_s) from error

    def routes(self) -> list[web.RouteDef]:
        """For the admin address."""
        return [web.post("/newest", self._newest)]

    async def _newest(self, request: web.Request) -> web.Response:
        """The same, of `uri`."""
        try:
            bucket, prefix = parse_uri(request.query.get("uri", ""))
            question = question_of(bucket, {**request.query, "prefix": prefix})
            return web.json_response(await self._decided(question, ""))
        except ValueError as error:
            return web.json_response({"error": str(error)}, status=400)
        except TiergateError as error:
            return web.json_response({"error": error.message}, status=status_of(error))

    async def _decided(self, question: Question, name: str) -> dict[str, Any]:
        directory, place = self._rooms.directory, (question.bucket, question.prefix)
        known = await directory.agreed(*place, name) if name else None
        if known is None:
            document = shown(await self._chooser.choose(question))
            for each in document["passed_over"]:
                log.warning("a newer checkpoint is passed over", **each)
            if not name:
                return document
            proposed = Agreement(*place, name, json.dumps(document), self._rooms.clock.wall_s())
            known = await directory.agree(proposed)
        answer: dict[str, Any] = json.loads(known.answer)
        return answer


def question_of(bucket: str, query: Mapping[str, str]) -> Question:
    """What is asked for. `prefix` is a folder, whether or not it ends like one: a neighbour `run2/` is not under `run`.

    Raises:
        RequestError: InvalidArgument.
    """
    tiers = {str(tier) for tier in Tier}
    trusted = {each for each in query.get("trust", "").split(",") if each}
    if not trusted <= tiers:
        raise RequestError("InvalidArgument", f"the tiers are {', '.join(sorted(tiers))}")
    prefix = query.get("prefix", "")
    folder = prefix if not prefix or prefix.endswith("/") else f"{prefix}/"
    return Question(bucket, folder, frozenset(map(Tier, trusted)), query.get("deep") == "1")


def shown(found: Newest) -> dict[str, Any]:
    """What was found, as the answer shows it."""
    passed = [
        {
            "uri": uri_of(each.status.name.bucket, each.status.name.prefix),
            "step": each.status.step,
            "reason": each.reason,
        }
        for each in found.passed_over[:PASSED_COUNT]
    ]
    return {"checkpoint": document_of(found.status) if found.status else None, "passed_over": passed}
