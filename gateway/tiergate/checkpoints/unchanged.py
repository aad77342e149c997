"""Which object of an earlier set has the place of one that is to be sent, and whether it holds the same bytes. Pure."""

from tiergate.model import Version

STRONG = frozenset({"sha1", "sha256", "sha512"})
"""Checksums that a client sends where a CRC is not enough for it."""


def folder_of(run_prefix: str) -> str:
    """The prefix of all objects of a run."""
    return run_prefix if run_prefix.endswith("/") or not run_prefix else run_prefix + "/"


def place_of(key: str, run_prefix: str) -> tuple[str, str]:
    """The set that an object of a run belongs to, as its prefix, and the object's path in it; both empty for an object
    right in the run, or elsewhere."""
    run = folder_of(run_prefix)
    if not key.startswith(run):
        return "", ""
    end = key.find("/", len(run)) + 1
    return (key[:end], key[end:]) if end and end < len(key) else ("", "")


def past(set_prefix: str) -> str:
    """A text after all keys of a set and before those of the next, in the order of their UTF-8 bytes; only an object
    right in the run may have that key."""
    return set_prefix.removesuffix("/") + chr(ord("/") + 1)


def is_unchanged(version: Version, earlier: Version) -> bool:
    """Whether both surely hold the same bytes in the same parts: each block has the same CRC-64 that was kept since
    ingest. Where a client gave either of them a stronger checksum, the other must have the same."""
    if earlier.foreign or version.size_bytes != earlier.size_bytes or _blocks(version) != _blocks(earlier):
        return False
    return all(part.body.blocks for part in version.parts if part.body.size_bytes) and _agree(version, earlier)


def _blocks(version: Version) -> list[tuple[int, bytes]]:
    return [(part.body.size_bytes, part.body.blocks) for part in version.parts if part.body.size_bytes]


def _agree(version: Version, earlier: Version) -> bool:
    pairs = [(version.checksums, earlier.checksums)]
    pairs += [(one.checksums, other.checksums) for one, other in zip(version.parts, earlier.parts, strict=False)]
    for ours, theirs in pairs:
        strong = STRONG & (ours.keys() | theirs.keys())
        shared = ours.keys() & theirs.keys()
        if any(ours.get(name) != theirs.get(name) for name in strong | shared):
            return False
    return True
