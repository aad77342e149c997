"""How much would be lost if memory vanished now, as status shows it."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tiergate.checkpoints.markers import ancestor_scopes
from tiergate.directory.base import Directory
from tiergate.model import Kind
from tiergate.policy.loss import Loss, Losses, Unpersisted, losses

if TYPE_CHECKING:
    from tiergate.server.cluster import Cluster

WRITES_COUNT = 5000
"""How many writes are looked at. Each costs a cluster's directory a reading."""

PLACES_COUNT = 100
"""How many nodes, and how many zones, a report names, those with most to lose first."""

ALONE = "this node"


async def loss_report(directory: Directory, cluster: "Cluster | None", now_s: float) -> dict[str, Any]:
    """`places`: what would be lost with all memory, with this node's, and with that of each other node and zone that
    has something to lose; `gone` is what no living node has. In a cluster of all owners, and without deletions: those
    are safe in its directory. `checked` writes were looked at, all unless `is_all` is false.

    Raises:
        OverloadedError: the directory does not answer.
    """
    if cluster is None:
        pending = [*await directory.pending(), *await directory.parked()]
        found = [Unpersisted(write, frozenset({ALONE})) for write in pending]
        # Alone all that is owed goes together, so nothing more is read for more of it.
        return _report(losses(found, {}, ancestor_scopes), ALONE, now_s) | {"checked": len(found), "is_all": True}
    live = cluster.view.live()
    rows = await cluster.directory.unpersisted(WRITES_COUNT)
    held = [
        Unpersisted(write, frozenset(holder.node for holder in live.still(holders)))
        for write, holders in rows
        if write.kind is Kind.PUT
    ]
    zone_of = {name: node.about.zone for name, node in live.nodes.items()}
    report = _report(losses(held, zone_of, ancestor_scopes), cluster.node, now_s)
    return report | {"checked": len(rows), "is_all": len(rows) < WRITES_COUNT}


def _report(found: Losses, me: str, now_s: float) -> dict[str, Any]:
    places = [_shown("memory", "", found.memory, now_s), _shown("node", me, found.nodes.get(me, Loss()), now_s)]
    others = {name: loss for name, loss in found.nodes.items() if name != me}
    places += _most("node", others, now_s) + _most("zone", found.zones, now_s)
    if not found.gone.is_nothing:
        places.append(_shown("gone", "", found.gone, now_s))
    return {"places": places}


def _most(place: str, found: Mapping[str, Loss], now_s: float) -> list[dict[str, Any]]:
    order = sorted(found, key=lambda name: (-found[name].size_bytes, name))
    return [_shown(place, name, found[name], now_s) for name in order[:PLACES_COUNT]]


def _shown(place: str, name: str, loss: Loss, now_s: float) -> dict[str, Any]:
    return {
        "place": place,
        "name": name,
        "bytes": loss.size_bytes,
        "objects": loss.objects_count,
        "deletions": loss.deletions_count,
        "sets": loss.sets_count,
        "oldest_age_s": round(max(0.0, now_s - loss.oldest_s), 3) if loss.oldest_s is not None else 0.0,
        "parked_bytes": loss.parked_bytes,
        "parked_objects": loss.parked_count,
    }
