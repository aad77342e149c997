"""Sets as JSON documents: what the admin address answers, and how whoever asked reads it. Pure.

The shape is stable: members are added, none is renamed or goes.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from tiergate.checkpoints.sets import SetName, SetState, SetStatus, Tier, TierStatus
from tiergate.s3.uri import uri_of


def document_of(status: SetStatus) -> dict[str, Any]:
    """A set as a document. Times are Unix seconds, keys are whole keys of the bucket."""
    name = status.name
    return {
        "uri": uri_of(name.bucket, name.prefix),
        "bucket": name.bucket,
        "prefix": name.prefix,
        "layout": name.layout,
        "marker": name.marker,
        "step": status.step,
        "objects_count": status.objects_count,
        "size_bytes": status.size_bytes,
        "committed_s": status.committed_s,
        "is_whole": status.is_whole,
        "is_parked": status.is_parked,
        "is_pinned": status.is_pinned,
        "fault": status.fault,
        "quarantined": status.quarantined,
        "tiers": {str(tier): _tier_document(each) for tier, each in status.tiers.items()},
    }


def _tier_document(status: TierStatus) -> dict[str, Any]:
    return {
        "state": str(status.state),
        "objects_count": status.objects_count,
        "size_bytes": status.size_bytes,
        "copies_count": status.copies_count,
        "missing": list(status.missing),
    }


def status_from(document: Mapping[str, Any]) -> SetStatus:
    """The set of a document of `document_of`.

    Raises:
        KeyError, ValueError: it is none.
    """
    step = document["step"]
    return SetStatus(
        name=SetName(document["bucket"], document["prefix"], document["layout"], document["marker"], step),
        step=step,
        objects_count=document["objects_count"],
        size_bytes=document["size_bytes"],
        committed_s=document["committed_s"],
        is_parked=document["is_parked"],
        is_pinned=document["is_pinned"],
        tiers={Tier(tier): _tier_from(each) for tier, each in document["tiers"].items()},
        is_whole=document["is_whole"],
        fault=document["fault"],
        quarantined=document["quarantined"],
    )


def _tier_from(document: Mapping[str, Any]) -> TierStatus:
    missing: Sequence[str] = document["missing"]
    return TierStatus(
        state=SetState(document["state"]),
        objects_count=document["objects_count"],
        size_bytes=document["size_bytes"],
        copies_count=document["copies_count"],
        missing=tuple(missing),
    )
