"""XML as S3 speaks it: a bounded parser that knows no DTD, and a writer that escapes every character.

Names are kept without their namespace: S3's clients disagree on whether they send one, and S3 accepts both.
"""

import re
from dataclasses import dataclass, field
from typing import NoReturn
from xml.parsers import expat

from tiergate.errors import RequestError

S3_NAMESPACE = "http://s3.amazonaws.com/doc/2006-03-01/"
MAX_XML_BYTES = 8 << 20
"""Largest body that is parsed: 10,000 completed parts with their checksums, or 1,000 keys, fit well."""
MAX_DEPTH = 32
MAX_ELEMENTS = 200_000

_SEPARATOR = " "
_SPECIAL = re.compile('[&<>"\x00-\x08\x0b-\x1f\x7f\ufffe\uffff]')
_ATTRIBUTE_SPECIAL = re.compile('[&<>"\x00-\x1f\x7f\ufffe\uffff]')
_NAMED = {"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;"}


@dataclass(slots=True)
class Node:
    """An element: local name, its own text (all text children joined), attributes and child elements."""

    name: str
    text: str = ""
    attributes: dict[str, str] = field(default_factory=dict)
    children: list["Node"] = field(default_factory=list)


def malformed() -> RequestError:
    """S3's answer to XML that it cannot read, or that says something it does not know."""
    return RequestError(
        "MalformedXML",
        "The XML you provided was not well-formed or did not validate against our published schema",
    )


class _Builder:
    def __init__(self) -> None:
        self.root: Node | None = None
        self._open: list[Node] = []
        self._texts: list[list[str]] = []
        self._count = 0

    def start(self, name: str, attributes: dict[str, str]) -> None:
        self._count += 1
        if len(self._open) >= MAX_DEPTH or self._count > MAX_ELEMENTS:
            raise malformed()
        node = Node(_local(name), attributes={_local(key): value for key, value in attributes.items()})
        if self._open:
            self._open[-1].children.append(node)
        else:
            self.root = node
        self._open.append(node)
        self._texts.append([])

    def end(self, _name: str) -> None:
        self._open.pop().text = "".join(self._texts.pop())

    def characters(self, data: str) -> None:
        self._texts[-1].append(data)

    def doctype(self, *_args: object) -> NoReturn:
        raise malformed()


def parse_xml(body: bytes) -> Node:
    """Parse a request's body into its root element.

    A document type is refused as it begins, so no entity is ever declared or expanded.

    Raises:
        RequestError: MalformedXML, or MaxMessageLengthExceeded above `MAX_XML_BYTES`.
    """
    if len(body) > MAX_XML_BYTES:
        raise RequestError("MaxMessageLengthExceeded", max_message_length_bytes=MAX_XML_BYTES)
    builder = _Builder()
    parser = expat.ParserCreate(namespace_separator=_SEPARATOR)
    parser.buffer_text = True
    parser.StartElementHandler = builder.start
    parser.EndElementHandler = builder.end
    parser.CharacterDataHandler = builder.characters
    parser.StartDoctypeDeclHandler = builder.doctype
    parser.EntityDeclHandler = builder.doctype
    try:
        parser.Parse(body, True)
    except expat.ExpatError as error:
        raise malformed() from error
    if builder.root is None:
        raise malformed()
    return builder.root


def render_xml(root: Node) -> bytes:
    """The document of `root` in UTF-8, with its declaration.

    Characters that XML 1.0 does not allow are written as numeric references, as S3 does: a key may hold them,
    and a client that cannot read them asks for `encoding-type=url`.
    """
    pieces = ['<?xml version="1.0" encoding="UTF-8"?>\n']
    _write(root, pieces)
    return "".join(pieces).encode()


def _write(node: Node, pieces: list[str]) -> None:
    pieces.append(f"<{node.name}")
    for name, value in node.attributes.items():
        pieces.append(f' {name}="{_ATTRIBUTE_SPECIAL.sub(_reference, value)}"')
    if not node.text and not node.children:
        pieces.append("/>")
        return
    pieces.append(">")
    if node.text:
        pieces.append(_SPECIAL.sub(_reference, node.text))
    for child in node.children:
        _write(child, pieces)
    pieces.append(f"</{node.name}>")


def _reference(match: re.Match[str]) -> str:
    character = match.group()
    return _NAMED.get(character) or f"&#x{ord(character):x};"


def _local(name: str) -> str:
    return name.rpartition(_SEPARATOR)[2]
