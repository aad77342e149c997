"""Which object of a checkpoint says that it is whole, and which objects that concerns. Pure.

A *marker* is the object whose presence says that the set under its prefix is whole; its *scope* is its parent prefix
and everything below (and what `layouts.home_of` says lives there). A *pointer* names a set (or the state of a whole
run) and is rewritten all the time; the fence orders it like a marker, but it is never withdrawn because something
below its prefix changed.
"""

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase

from tiergate.checkpoints import layouts
from tiergate.model import ObjectName, Role, Step

STAGING_SUFFIX = ".tmp"
"""A marker in the making: torch.distributed.checkpoint writes `.metadata.tmp` and renames it, which in S3 is a copy
and a deletion. It is ordered like a marker, but it is no member of the set: its going takes nothing from it."""


def scope_of(key: str) -> str:
    """The prefix a key's fence looks at: its parent prefix with the slash, empty at the root of the bucket."""
    return key[: key.rfind("/") + 1]


def ancestor_scopes(key: str) -> list[str]:
    """The scopes that hold the key, innermost first, down to the whole bucket (""). That of rank 0 holds the shards
    that a tiered checkpoint has in the folders of the other ranks: second after their own."""
    scopes = [scope_of(key)]
    home = layouts.home_of(key)
    while scopes[-1]:
        scopes.append(scope_of(scopes[-1][:-1]))
    if home != scopes[0]:
        scopes.insert(1, home)
    return scopes


def reach_of(scope: str) -> str:
    """A prefix that begins all keys that a marker right in the scope speaks for, and maybe others."""
    return layouts.ranks_of(scope) or scope


def is_within(key: str, scope: str) -> bool:
    """Whether a marker right in the scope speaks for the key."""
    return key.startswith(scope) or layouts.home_of(key) == scope


def collide(one: Step, other: Step) -> bool:
    """Whether two steps are of one key, or a marker's and one that changes a member of its set."""
    return one.name == other.name or _speaks_for(one, other) or _speaks_for(other, one)


def _speaks_for(marker: Step, member: Step) -> bool:
    """What is new takes nothing from a set. A marker is no member of the set it speaks for, a pointer of none."""
    if marker.role is not Role.MARKER or member.role is Role.POINTER or not member.replaces:
        return False
    scope = scope_of(marker.name.key)
    if marker.name.bucket != member.name.bucket or not is_within(member.name.key, scope):
        return False
    return member.role is not Role.MARKER or scope_of(member.name.key) != scope


class Markers:
    """Tells markers from other objects. `patterns_of` gives the user's own patterns for a bucket and key: shell
    patterns for the file name, or for the whole key where they have a slash. From `large_bytes` on an object is
    large."""

    def __init__(self, patterns_of: Callable[[str, str], Sequence[str]], large_bytes: int) -> None:
        self._patterns_of = patterns_of
        self._large_bytes = large_bytes

    def role_of(self, name: ObjectName, size_bytes: int) -> Role:
        """How the fence treats an object."""
        if name.key.endswith(STAGING_SUFFIX):
            staged = ObjectName(name.bucket, name.key.removesuffix(STAGING_SUFFIX))
            if staged.key and self.role_of(staged, size_bytes) is Role.MARKER:
                return Role.POINTER
        if (role := layouts.role_of(name.key)) is not None:
            return role
        if self.is_users(name):
            return Role.MARKER
        return Role.LARGE if size_bytes >= self._large_bytes else Role.SMALL

    def is_users(self, name: ObjectName) -> bool:
        """Whether the user's own patterns make an object a marker."""
        key = name.key
        file_name = key[key.rfind("/") + 1 :]
        return any(
            fnmatchcase(key if "/" in pattern else file_name, pattern)
            for pattern in self._patterns_of(name.bucket, key)
        )
