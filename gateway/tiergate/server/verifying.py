"""Verification on the admin address."""

from typing import Any

from aiohttp import web

from tiergate.checkpoints.sets import Tier
from tiergate.checkpoints.verification import Damage
from tiergate.engine.looks import Wish
from tiergate.engine.verify import Judged, Verification, Verify
from tiergate.s3.uri import parse_uri, uri_of
from tiergate.server.streaming import Stream

TIERS = {"memory": frozenset({Tier.MEMORY}), "s3": frozenset({Tier.S3}), "all": frozenset(Tier)}


class VerifyRoutes:
    """Answers for verification."""

    def __init__(self, verify: Verify) -> None:
        self._verify = verify
        self.stream = Stream("verification")

    def routes(self) -> list[web.RouteDef]:
        """For the admin address."""
        return [web.post("/verify", self._verify_under)]

    async def _verify_under(self, request: web.Request) -> web.StreamResponse:
        """Look at the sets under `uri` (`tier`: memory, s3 or all; `deep`, `repair`: 1), one verification at a time; it
        ends with the request. The answer has a line of JSON now and then: how far it is, and what was found since the
        line before."""
        query = request.query
        tiers = TIERS.get(query.get("tier", "all"))
        try:
            bucket, prefix = parse_uri(query.get("uri", ""))
        except ValueError as error:
            return web.json_response({"error": str(error)}, status=400)
        if tiers is None:
            return web.json_response({"error": f"the tier is one of {', '.join(TIERS)}"}, status=400)
        progress = Verification()
        wish, repair = Wish(tiers, deep=query.get("deep") == "1"), query.get("repair") == "1"
        work = self._verify.run(bucket, prefix, wish, progress, repair=repair)
        return await self.stream.answer(request, work, _Lines(bucket, progress).next)


class _Lines:
    """What is new since the line before."""

    def __init__(self, bucket: str, progress: Verification) -> None:
        self._bucket = bucket
        self._progress = progress
        self._counts = (0, 0, 0, 0)

    def next(self, is_over: bool, fault: str) -> dict[str, Any]:
        """The next line."""
        progress = self._progress
        sets, damages, unrepaired, unasked = self._counts
        line = {
            "total_count": progress.total_count,
            "total_bytes": progress.total_bytes,
            "done_count": progress.done_count,
            "done_bytes": progress.done_bytes,
            "sets": [shown_set(each) for each in progress.sets[sets:]],
            "damages": [self._damage(each) for each in progress.damages[damages:]],
            "unrepaired": [self._damage(each) | {"why": why} for each, why in progress.unrepaired[unrepaired:]],
            "unasked": progress.unasked[unasked:],
            "is_over": is_over,
            "fault": progress.fault or fault,
        }
        self._counts = len(progress.sets), len(progress.damages), len(progress.unrepaired), len(progress.unasked)
        return line

    def _damage(self, damage: Damage) -> dict[str, Any]:
        return {
            "uri": uri_of(self._bucket, damage.key),
            "tier": str(damage.tier),
            "node": damage.node,
            "fault": str(damage.fault),
            "detail": damage.detail,
        }


def shown_set(judged: Judged) -> dict[str, Any]:
    """A set as the answer shows it."""
    return {
        "uri": uri_of(judged.name.bucket, judged.name.prefix),
        "layout": judged.name.layout,
        "step": judged.step,
        "verdict": str(judged.verdict),
        "is_listed": judged.is_listed,
        "objects_count": judged.objects_count,
        "size_bytes": judged.size_bytes,
    }
