"""botocore's own model of S3, indexed the way a server reads it: from the wire to the operation.

The model is the package's built-in one; files in a user's home that override it for clients are not read.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache

from botocore.loaders import Loader
from botocore.model import ListShape, OperationModel, ServiceModel, Shape, StructureShape

from tiergate.errors import InvariantError


class Level(Enum):
    """What a request's path names."""

    SERVICE = 0
    BUCKET = 1
    KEY = 2


@dataclass(frozen=True, slots=True)
class Field:
    """A member of an input or output, and its name on the wire (lower case for headers of inputs)."""

    member: str
    wire: str
    shape: Shape


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the members of a structure travel.

    `headers` and `query` are keyed by wire name; `prefixes` are the header maps (x-amz-meta-). `payload` is
    the one member that is the body; without one, the members in `body` are its children.
    """

    shape: StructureShape
    uri: tuple[Field, ...]
    headers: Mapping[str, Field]
    query: Mapping[str, Field]
    prefixes: tuple[Field, ...]
    payload: Field | None
    body: tuple[Field, ...]

    @property
    def streams(self) -> bool:
        """Whether the body is raw bytes (or an event stream) that the codec does not touch."""
        if self.payload is None:
            return False
        shape = self.payload.shape
        return shape.type_name == "blob" or bool(shape.serialization.get("eventstream"))


@dataclass(frozen=True, slots=True)
class Operation:
    """An S3 operation as it looks to a server.

    `markers` are the fixed query parameters of its URI (value None: any); `required_query` those that the
    input demands. `checksummed` says that SDKs may send a checksum of the request's body along.
    """

    name: str
    method: str
    level: Level
    markers: tuple[tuple[str, str | None], ...]
    required_query: frozenset[str]
    copies: bool
    deprecated: bool
    checksummed: bool
    input: Layout
    output: Layout | None

    @property
    def specificity(self) -> tuple[int, int, bool, bool]:
        """Sorts the candidates for a request: the largest is the best match."""
        return len(self.markers), len(self.required_query), self.copies, not self.deprecated


@cache
def service_model() -> ServiceModel:
    """The model of S3, loaded once a process."""
    loader = Loader(extra_search_paths=[Loader.BUILTIN_DATA_PATH], include_default_search_paths=False)
    return ServiceModel(loader.load_service_model("s3", "service-2"), "s3")


@cache
def operations() -> Mapping[str, Operation]:
    """All operations an S3 endpoint can be asked for, by name.

    Two are left out because they belong to other endpoints and would shadow ours: WriteGetObjectResponse
    (Object Lambda) and ListDirectoryBuckets (S3 Express control), which looks just like ListBuckets.
    """
    model = service_model()
    names = sorted(set(model.operation_names) - {"WriteGetObjectResponse", "ListDirectoryBuckets"})
    return {name: _index(model.operation_model(name)) for name in names}


def operation(name: str) -> Operation:
    """The operation called `name`.

    Raises:
        InvariantError: when the model has none of that name.
    """
    found = operations().get(name)
    if found is None:
        raise InvariantError("no such S3 operation", operation=name)
    return found


@cache
def candidates() -> Mapping[tuple[str, Level], tuple[Operation, ...]]:
    """The operations by method and level, most specific first."""
    groups: dict[tuple[str, Level], list[Operation]] = {}
    for found in operations().values():
        groups.setdefault((found.method, found.level), []).append(found)
    return {
        place: tuple(sorted(group, key=lambda each: each.specificity, reverse=True)) for place, group in groups.items()
    }


@cache
def children(shape: StructureShape) -> Mapping[str, Field]:
    """The members of an XML structure by element name (attributes are found by `xsi:type` and the like)."""
    found: dict[str, Field] = {}
    for member, child in shape.members.items():
        if "location" not in child.serialization:
            found[element_name(member, child)] = Field(member, element_name(member, child), child)
    return found


def element_name(member: str, shape: Shape) -> str:
    """The XML element (or attribute) that carries `member`."""
    name: str = shape.serialization.get("name", member)
    return name


def item_name(shape: ListShape) -> str:
    """The XML element of one item of a list that is not flattened."""
    name: str = shape.member.serialization.get("name", "member")
    return name


def enum_values(shape: Shape) -> frozenset[str]:
    """The values the model knows for a string; empty when it is free text."""
    return frozenset(shape.metadata.get("enum", ()))


def _index(model: OperationModel) -> Operation:
    path, _, query = model.http["requestUri"].partition("?")
    level = Level.KEY if "{Key+}" in path else Level.BUCKET if "{Bucket}" in path else Level.SERVICE
    markers: list[tuple[str, str | None]] = []
    for piece in filter(None, query.split("&")):
        name, equals, value = piece.partition("=")
        markers.append((name, value if equals else None))
    layout = _layout(model.input_shape)
    if layout is None:
        raise InvariantError("an S3 operation without input", operation=model.name)
    required = frozenset(layout.shape.required_members)
    return Operation(
        name=model.name,
        method=model.http["method"],
        level=level,
        markers=tuple(markers),
        required_query=frozenset(wire for wire, each in layout.query.items() if each.member in required),
        copies="CopySource" in required,
        deprecated=bool(model.deprecated),
        checksummed=bool(model.http_checksum.get("requestAlgorithmMember")),
        input=layout,
        output=_layout(model.output_shape, keep_case=True),
    )


def _layout(shape: Shape | None, keep_case: bool = False) -> Layout | None:
    if not isinstance(shape, StructureShape):
        return None
    by_location: dict[str | None, list[Field]] = {}
    for member, child in shape.members.items():
        location = child.serialization.get("location")
        wire = element_name(member, child)
        if location in {"header", "headers"} and not keep_case:
            wire = wire.lower()
        by_location.setdefault(location, []).append(Field(member, wire, child))
    body = by_location.get(None, [])
    payload = shape.serialization.get("payload")
    return Layout(
        shape=shape,
        uri=tuple(by_location.get("uri", ())),
        headers={each.wire: each for each in by_location.get("header", ())},
        query={each.wire: each for each in by_location.get("querystring", ())},
        prefixes=tuple(by_location.get("headers", ())),
        payload=next((each for each in body if each.member == payload), None),
        body=() if payload else tuple(body),
    )
