import pytest

from tiergate.errors import RequestError
from tiergate.s3 import xml
from tiergate.s3.xml import Node, parse_xml, render_xml

BOMB = b'<!DOCTYPE a [<!ENTITY b "x"><!ENTITY c "&b;&b;">]><a>&c;</a>'


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"  ",
        b"not xml",
        b"<a>",
        b"<a/><b/>",
        b"<!DOCTYPE a><a/>",
        b'<!DOCTYPE a SYSTEM "file:///etc/passwd"><a/>',
        BOMB,
        b"<a>&undefined;</a>",
        b"<a>\x00</a>",
        b"<a>\xff</a>",
        b"<a>" * (xml.MAX_DEPTH + 1) + b"</a>" * (xml.MAX_DEPTH + 1),
        b"<a>" + b"<b/>" * xml.MAX_ELEMENTS + b"</a>",
    ],
)
def test_parse_bad_or_dangerous_document_is_malformed(body: bytes) -> None:
    with pytest.raises(RequestError) as caught:
        parse_xml(body)
    assert caught.value.code == "MalformedXML"


def test_parse_larger_than_the_bound_is_refused_unread() -> None:
    with pytest.raises(RequestError) as caught:
        parse_xml(b" " * (xml.MAX_XML_BYTES + 1))
    assert caught.value.code == "MaxMessageLengthExceeded"


def test_parse_deepest_allowed_document_is_read() -> None:
    node = parse_xml(b"<a>" * xml.MAX_DEPTH + b"</a>" * xml.MAX_DEPTH)
    assert node.children[0].name == "a"


def test_parse_strips_namespaces_and_joins_text() -> None:
    root = parse_xml(b'<x:a xmlns:x="urn:1" x:k="v">1<![CDATA[<2>]]>&amp;3<b/>4</x:a>')
    assert root == Node("a", "1<2>&34", {"k": "v"}, [Node("b")])


def test_render_then_parse_gives_the_node_back() -> None:
    root = Node("a", "", {"k": '<"&\n>'}, [Node("b", " <&>\"'\r\n\t \u20ac"), Node("c")])
    assert parse_xml(render_xml(root)) == root


def test_render_control_characters_become_references() -> None:
    assert render_xml(Node("a", "\x01\x1f\ufffe\x7f")).endswith(b"<a>&#x1;&#x1f;&#xfffe;&#x7f;</a>")
