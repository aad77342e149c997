"""Places as training code names them: s3://BUCKET/PREFIX."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

_SCHEME = "s3://"


@dataclass(frozen=True, slots=True)
class Place:
    """What lies below a prefix of a bucket, which is empty or ends with a slash."""

    bucket: str
    prefix: str

    @classmethod
    def of(cls, uri: str) -> Self:
        """The place a text names; a slash at its end makes no difference.

        Raises:
            ValueError: it is not of the form s3://BUCKET/PREFIX.
        """
        bucket, _, prefix = uri.removeprefix(_SCHEME).partition("/")
        if not uri.startswith(_SCHEME) or not bucket:
            raise ValueError(f"{uri} is not of the form s3://BUCKET/PREFIX")
        prefix = prefix.rstrip("/")
        return cls(bucket, f"{prefix}/" if prefix else "")

    def key(self, name: str) -> str:
        """The key of an object below it."""
        return self.prefix + name

    def below(self, name: str) -> Place:
        """The place of that name below it."""
        return Place(self.bucket, f"{self.prefix}{name.strip('/')}/")

    def __str__(self) -> str:
        return f"{_SCHEME}{self.bucket}/{self.prefix}".rstrip("/")
