"""Random S3 requests as data: the same can be sent to several servers, whatever ids and ETags these give."""

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

MIB = 1 << 20
KEYS = (
    "a",
    "a/",
    "a/b",
    "a//b",
    "a/b/c",
    "a/ü é",
    "b+c d%41&e=f?g#h",
    "日本/🎈",
    "dir/x~y",
    "dir/x/é",
    "q'\"<&>",
    "%",
    "z",
)
BIG = ("big/1", "big 2")
"""Keys of objects of more than one part."""

EMPTY = "z"
"""The one key whose objects may have no bytes."""

MANAGING = frozenset({"settle", "pause", "resume", "cold", "kill"})
"""Steps that are no requests: they change what the node holds, and no answer.

What is not written back is held from `pause` to `resume`; `kill` ends all processes of the node, `cold` its memory too
(uploads in progress are lost then).
"""


@dataclass(frozen=True, slots=True)
class Etag:
    """The ETag of an object as it is, or of an earlier version with other bytes (`before`)."""

    key: str
    before: bool = False


@dataclass(frozen=True, slots=True)
class Moment:
    """When an object was last modified, and some seconds."""

    key: str
    plus_s: int = 0


@dataclass(frozen=True, slots=True)
class Upload:
    """The id of the upload that was begun as the `number`-th; uploads have one key each."""

    number: int


@dataclass(frozen=True, slots=True)
class PartEtag:
    """The ETag of a part that was sent last under its number."""

    upload: int
    number: int


@dataclass(frozen=True, slots=True)
class Source:
    """A copy's source in the bucket at hand."""

    key: str


@dataclass(frozen=True, slots=True)
class Step:
    """A method of boto3's client and its arguments, apart from the bucket. `pages`: go on to the listing's end."""

    method: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    pages: bool = False

    def __str__(self) -> str:
        shown = {
            name: f"<{len(value)} bytes>" if isinstance(value, bytes) else value
            for name, value in self.arguments.items()
        }
        return f"{self.method} {shown}"


class Steps:
    """An endless run of steps, the same for the same seed. What earlier steps may have made is kept in mind, so that
    most requests are about something."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._uploads: list[str] = []
        """Keys of the uploads begun."""
        self._open: list[int] = []
        self._parts: dict[int, dict[int, int]] = {}
        """Sizes of the parts of each upload, by number."""
        self._count = 0

    def __iter__(self) -> Iterator[Step]:
        makers: list[tuple[int, Callable[[], Step]]] = [
            (16, self._put),
            (12, self._read),
            (6, self._head),
            (8, self._copy),
            (5, self._delete),
            (2, self._delete_many),
            (9, self._list),
            (4, self._tagging),
            (5, self._create),
            (9, self._part),
            (3, self._part_copy),
            (6, self._complete),
            (1, self._abort),
            (3, self._list_parts),
            (2, self._list_uploads),
            (3, self._manage),
        ]
        weights, choices = zip(*makers, strict=True)
        while True:
            self._count += 1
            yield self._random.choices(choices, weights)[0]()

    # -- chance
    def _one(self, *choices: Any) -> Any:
        return self._random.choice(choices)

    def _chance(self, of_one: float) -> bool:
        return self._random.random() < of_one

    def _key(self) -> str:
        return self._random.choice(BIG if self._chance(0.12) else KEYS)

    def _body(self, key: str) -> bytes:
        """Never the same twice, so that an ETag names one version."""
        text = b"%d." % self._count
        return b"" if key == EMPTY and self._chance(0.5) else text * self._one(1, 3, 100, 30_000)

    # -- whole objects
    def _put(self) -> Step:
        key = self._key()
        arguments: dict[str, Any] = {"Key": key, "Body": self._body(key)} | self._description()
        if self._chance(0.2):
            arguments |= self._write_condition(key)
        if self._chance(0.3):
            arguments["ChecksumAlgorithm"] = self._one("CRC32", "CRC32C", "SHA1", "SHA256", "CRC64NVME")
        return Step("put_object", arguments)

    def _description(self) -> dict[str, Any]:
        # The same tag always: moto adds a new version's tags to those of the old one.
        found: dict[str, Any] = {"Tagging": f"t={self._count}%20%2B"}
        options: dict[str, tuple[Any, ...]] = {
            "ContentType": ("text/plain; charset=utf-8", "application/x-tar"),
            "CacheControl": ("no-cache", "max-age=1, public"),
            "ContentEncoding": ("gzip", "identity"),
            "ContentDisposition": ('attachment; filename="a b.txt"',),
            "ContentLanguage": ("de, en",),
            "Metadata": ({"a": "1"}, {"x-y": "two words", "Upper": "C"}, {}),
        }
        for name, values in options.items():
            if self._chance(0.2):
                found[name] = self._one(*values)
        return found

    def _write_condition(self, key: str) -> dict[str, Any]:
        options: list[dict[str, Any]] = [
            {"IfNoneMatch": "*"},
            {"IfMatch": Etag(key)},
            {"IfMatch": Etag(key, before=True)},
        ]
        return self._random.choice(options)

    def _read(self) -> Step:
        key = self._key()
        arguments: dict[str, Any] = {"Key": key} | self._read_options(key)
        if self._chance(0.1):
            arguments["ResponseContentType"] = "text/overridden"
        if self._chance(0.1):
            arguments["ResponseCacheControl"] = "no-store"
        return Step("get_object", arguments)

    def _head(self) -> Step:
        key = self._key()
        return Step("head_object", {"Key": key} | self._read_options(key))

    def _read_options(self, key: str) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if self._chance(0.35) and key != EMPTY:
            ranges = ("bytes=0-0", "bytes=1-5", "bytes=2-", "bytes=-3", "bytes=0-99999999", "bytes=5242879-5242881")
            odd = ("bytes=99999999-", "bytes=-0", "bytes=3-1", "items=0-1", "bytes=0-1,3-4")
            found["Range"] = self._one(*ranges) if self._chance(0.8) else self._one(*odd)
        elif self._chance(0.1) and key != EMPTY:
            found["PartNumber"] = self._one(1, 1, 2, 3)
        if self._chance(0.3):
            found |= self._conditions(key, "")
        if self._chance(0.3):
            found["ChecksumMode"] = "ENABLED"
        return found

    def _conditions(self, key: str, prefix: str) -> dict[str, Any]:
        options: dict[str, tuple[Any, ...]] = {
            "IfMatch": (Etag(key), Etag(key), Etag(key, before=True)),
            "IfNoneMatch": (Etag(key), Etag(key, before=True)),
            "IfModifiedSince": (Moment(key), Moment(key, -5)),
            "IfUnmodifiedSince": (Moment(key), Moment(key, -5)),
        }
        names = self._random.sample(sorted(options), self._one(1, 1, 2))
        return {f"{prefix}{name}": self._one(*options[name]) for name in names}

    def _copy(self) -> Step:
        source, key = self._key(), self._one(*KEYS[:-1])
        arguments: dict[str, Any] = {"Key": key, "CopySource": Source(source)}
        if self._chance(0.4):
            arguments |= {"MetadataDirective": "REPLACE"} | self._description()
            arguments.pop("Tagging", None)
        if self._chance(0.2):
            arguments |= {"TaggingDirective": "REPLACE", "Tagging": f"t={self._count}"}
        if self._chance(0.2):
            arguments["CopySourceIfNoneMatch"] = self._one(Etag(source), Etag(source, before=True))
        return Step("copy_object", arguments)

    def _delete(self) -> Step:
        key = self._key()
        condition = {"IfMatch": self._one(Etag(key), Etag(key, before=True))} if self._chance(0.1) else {}
        return Step("delete_object", {"Key": key} | condition)

    def _delete_many(self) -> Step:
        keys = self._random.sample(KEYS, self._one(1, 2, 4))
        quiet = {"Quiet": True} if self._chance(0.3) else {}
        return Step("delete_objects", {"Delete": {"Objects": [{"Key": key} for key in keys]} | quiet})

    def _tagging(self) -> Step:
        arguments: dict[str, Any] = {"Key": self._key()}
        method = self._one("put_object_tagging", "get_object_tagging")
        if method == "put_object_tagging":
            arguments["Tagging"] = {"TagSet": [{"Key": "t", "Value": str(self._count)}]}
        return Step(method, arguments)

    # -- listings
    def _list(self) -> Step:
        arguments = self._listed()
        if self._chance(0.5):
            if self._chance(0.2):
                arguments["Marker"] = self._key()
            return Step("list_objects", arguments, pages=True)
        if self._chance(0.2):
            arguments["StartAfter"] = self._one(self._key(), "a", "dir/")
        if self._chance(0.2):
            arguments["FetchOwner"] = True
        return Step("list_objects_v2", arguments, pages=True)

    def _listed(self) -> dict[str, Any]:
        options: dict[str, tuple[Any, ...]] = {
            "Prefix": ("a", "a/", "dir/", "日", "none", "b+", "big"),
            "Delimiter": ("/", "/", "b", "//"),
            "MaxKeys": (1, 2, 3, 1000),
            "EncodingType": ("url",),
        }
        return {name: self._one(*values) for name, values in options.items() if self._chance(0.4)}

    # -- uploads
    def _create(self) -> Step:
        key = self._one(*BIG, *KEYS[:3])
        self._uploads.append(key)
        self._open.append(len(self._uploads) - 1)
        self._parts[len(self._uploads) - 1] = {}
        return Step("create_multipart_upload", {"Key": key} | self._description())

    def _upload(self) -> dict[str, Any] | None:
        if not self._uploads:
            return None
        number = self._one(*self._open) if self._open and self._chance(0.95) else self._one(*range(len(self._uploads)))
        return {"Key": self._uploads[number], "UploadId": Upload(number)}

    def _part(self) -> Step:
        named = self._upload()
        if named is None:
            return self._create()
        number = self._one(1, 1, 2, 2, 3)
        size = 5 * MIB + self._one(0, 1) if number == 1 and self._chance(0.25) else self._one(6, 1000)
        text = b"%05d;" % self._count
        body = (text * (size // len(text) + 1))[:size]
        self._parts[named["UploadId"].number][number] = size
        return Step("upload_part", named | {"PartNumber": number, "Body": body})

    def _part_copy(self) -> Step:
        named = self._upload()
        if named is None:
            return self._create()
        source, number = self._key(), self._one(1, 2, 3)
        self._parts[named["UploadId"].number][number] = 0
        arguments = named | {"PartNumber": number, "CopySource": Source(source)}
        if self._chance(0.4) and source != EMPTY:
            arguments["CopySourceRange"] = self._one("bytes=0-0", "bytes=0-1", "bytes=1-1")
        return Step("upload_part_copy", arguments)

    def _complete(self) -> Step:
        named = self._upload()
        if named is None:
            return self._create()
        number = named["UploadId"].number
        listed = [{"PartNumber": part, "ETag": PartEtag(number, part)} for part in sorted(self._parts[number])]
        if self._chance(0.1):
            listed = self._one(listed[::-1], listed[:1], [{"PartNumber": 9, "ETag": PartEtag(number, 1)}])
        if number in self._open and self._chance(0.7):
            self._open.remove(number)
        return Step("complete_multipart_upload", named | {"MultipartUpload": {"Parts": listed}})

    def _abort(self) -> Step:
        named = self._upload()
        if named is None:
            return self._create()
        if named["UploadId"].number in self._open:
            self._open.remove(named["UploadId"].number)
        return Step("abort_multipart_upload", named)

    def _list_parts(self) -> Step:
        named = self._upload()
        if named is None:
            return self._create()
        if self._chance(0.4):
            named["MaxParts"] = self._one(1, 2)
        if self._chance(0.3):
            named["PartNumberMarker"] = self._one(1, 2)
        return Step("list_parts", named)

    def _list_uploads(self) -> Step:
        arguments = {"Prefix": self._one("a", "big", "none")} if self._chance(0.4) else {}
        return Step("list_multipart_uploads", arguments)

    def _manage(self) -> Step:
        if self._chance(0.05):
            self._open.clear()
            return Step(self._one("cold", "kill"))
        return Step(self._one("settle", "pause", "pause", "resume"))
