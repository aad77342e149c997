"""Clients' multipart uploads: what each call does to the rows. See `transitions`."""

from collections.abc import Sequence
from dataclasses import replace

from tiergate.directory import transitions
from tiergate.directory.base import Committed, Finished, Intent
from tiergate.directory.view import Rows
from tiergate.errors import NotFoundError, PartsChangedError
from tiergate.model import OriginUpload, Part, Upload, Version


def known(rows: Rows, upload_id: str) -> Upload:
    """The upload in progress.

    Raises:
        NotFoundError: NoSuchUpload.
    """
    upload = rows.upload(upload_id)
    if upload is None:
        raise NotFoundError(
            "NoSuchUpload",
            "The specified upload does not exist. The upload ID may be invalid, or the upload may have been "
            "aborted or completed.",
            upload_id=upload_id,
        )
    return upload


def put_part(rows: Rows, upload_id: str, part: Part) -> Part | None:
    """Add or replace a part."""
    known(rows, upload_id)
    replaced = rows.part(upload_id, part.number)
    rows.put_part(upload_id, part)
    return replaced


def move_part(rows: Rows, upload_id: str, part: Part, moved: Part) -> bool:
    """Replace a part if it still is that one."""
    current = rows.part(upload_id, part.number)
    if current is None or current.body.uid != part.body.uid:
        return False
    rows.put_part(upload_id, moved)
    return True


def note_spill(rows: Rows, upload_id: str, spill_id: str) -> str:
    """The first spill of an upload stays."""
    upload = known(rows, upload_id)
    if not upload.spill_id:
        rows.put_upload(replace(upload, spill_id=spill_id))
    return upload.spill_id or spill_id


def abort(rows: Rows, upload_id: str) -> list[Part] | None:
    """End an upload; its parts. What it has in the origin becomes an orphan."""
    upload = rows.upload(upload_id)
    if upload is None:
        return None
    _orphan_spill(rows, upload)
    parts = list(rows.parts(upload_id))
    rows.drop_upload(upload)
    return parts


def _orphan_spill(rows: Rows, upload: Upload) -> None:
    if upload.spill_id:
        rows.orphan(upload.name, OriginUpload(upload.spill_id, upload.started_s))


def finish(
    rows: Rows, upload_id: str, version: Version, part_list: Sequence[tuple[int, str]], intent: Intent
) -> Committed:
    """Commit the completed version and end the upload, if the parts of the version still are the upload's. None of them
    is in the origin, so what the upload has begun there becomes an orphan."""
    upload = known(rows, upload_id)
    stored = {part.number: _bytes_of(part) for part in rows.parts(upload_id)}
    if any(stored.get(part.number) != _bytes_of(part) for part in version.parts):
        raise PartsChangedError("a part changed since it was read", upload_id=upload_id)
    committed = transitions.put(rows, upload.name, version, intent)
    _orphan_spill(rows, upload)
    _end(rows, upload, version, part_list, intent.now_s, through=False)
    return committed


def _bytes_of(part: Part) -> tuple[str, str]:
    """Which bytes a part is, and where in the origin, if it is there."""
    return part.body.uid, part.spilled_etag


def end_spilled(
    rows: Rows, upload_id: str, version: Version, part_list: Sequence[tuple[int, str]], now_s: float
) -> None:
    """End an upload that was completed in the origin."""
    upload = rows.upload(upload_id)
    if upload is not None:
        _end(rows, upload, version, part_list, now_s, through=True)


def _end(
    rows: Rows, upload: Upload, version: Version, part_list: Sequence[tuple[int, str]], now_s: float, *, through: bool
) -> None:
    rows.drop_upload(upload)
    finished = Finished(upload.name, version.uid, version.etag, tuple(part_list), now_s, through)
    rows.put_finished(upload.upload_id, finished)
