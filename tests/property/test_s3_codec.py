"""The codec against botocore's own serializer and parser, over every operation of S3's model."""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote, urlencode

import pytest
from botocore.awsrequest import HeadersDict
from botocore.model import ListShape, MapShape, Shape, StructureShape
from botocore.parsers import ResponseParserFactory
from botocore.serialize import create_serializer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tiergate.s3 import servicemodel
from tiergate.s3.operations import parse, render, resolve, split_target, unknown_parts

# Deprecated operations look like their successors on the wire, which are what a request resolves to.
OPERATIONS = sorted(name for name, each in servicemodel.operations().items() if not each.deprecated)
XML_TEXT = st.text(
    st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"], exclude_characters="\ufffe\uffff"),
    min_size=1,
    max_size=12,
)
HEADER_TEXT = st.text(
    st.characters(min_codepoint=0x21, max_codepoint=0x24FF, exclude_categories=["Cc", "Zs", "Zl", "Zp"]),
    min_size=1,
    max_size=12,
)
TOKEN = st.text("abcdefghijklmnopqrstuvwxyz0123456789-", min_size=1, max_size=10)
ETAG = st.text("0123456789abcdef-", min_size=1, max_size=34)
MOMENT_S = st.datetimes(datetime(1970, 1, 2), datetime(2200, 1, 1)).map(
    lambda moment: moment.replace(microsecond=0, tzinfo=UTC)
)
MOMENT_MS = st.datetimes(datetime(1970, 1, 2), datetime(2200, 1, 1)).map(
    lambda moment: moment.replace(microsecond=moment.microsecond // 1000 * 1000, tzinfo=UTC)
)
KEY = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=40).filter(
    lambda key: len(key.encode()) <= 1024
)
MAX_DEPTH = 5
SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example]


def values(shape: Shape, member: str, text: st.SearchStrategy[str], depth: int = 0) -> st.SearchStrategy[Any]:
    if isinstance(shape, StructureShape):
        return structures(shape, text, depth + 1)
    if isinstance(shape, ListShape):
        return st.lists(values(shape.member, member, text, depth), min_size=1, max_size=3)
    if isinstance(shape, MapShape):
        return st.dictionaries(TOKEN, HEADER_TEXT, max_size=3)
    match shape.type_name:
        case "integer" | "long":
            return st.integers(1, 10_000)
        case "boolean":
            return st.booleans()
        case "timestamp":
            whole = text is HEADER_TEXT or shape.serialization.get("timestampFormat") == "rfc822"
            return MOMENT_S if whole else MOMENT_MS
        case _:
            if member == "ETag":
                return ETAG
            known = sorted(servicemodel.enum_values(shape))
            return st.sampled_from(known) if known else text


def structures(shape: StructureShape, text: st.SearchStrategy[str], depth: int) -> st.SearchStrategy[Any]:
    required = set(shape.required_members)
    members = {
        name: values(child, name, text, depth)
        for name, child in shape.members.items()
        if depth < MAX_DEPTH or name in required
    }
    return st.fixed_dictionaries(
        {name: each for name, each in members.items() if name in required},
        optional={name: each for name, each in members.items() if name not in required},
    )


def inputs(operation: servicemodel.Operation) -> st.SearchStrategy[dict[str, Any]]:
    shape = operation.input.shape
    required = set(shape.required_members)
    members: dict[str, st.SearchStrategy[Any]] = {}
    for name, child in shape.members.items():
        location = child.serialization.get("location")
        if operation.input.streams and operation.input.payload and name == operation.input.payload.member:
            continue
        if location == "uri":
            members[name] = KEY if name == "Key" else st.just("bucket-1")
        elif location in {"header", "headers"}:
            members[name] = values(child, name, HEADER_TEXT)
        else:
            members[name] = values(child, name, XML_TEXT)
    if operation.name == "CompleteMultipartUpload":
        members["MultipartUpload"] = st.lists(st.integers(1, 10_000), min_size=1, max_size=4, unique=True).map(
            lambda numbers: {"Parts": [{"PartNumber": each, "ETag": f"e{each}"} for each in sorted(numbers)]}
        )
        required.add("MultipartUpload")
    return st.fixed_dictionaries(
        {name: each for name, each in members.items() if name in required},
        optional={name: each for name, each in members.items() if name not in required},
    )


def request_of(operation: str, params: dict[str, Any]) -> tuple[str, str, dict[str, str], bytes]:
    """What botocore puts on the wire: method, raw target, headers, body."""
    model = servicemodel.service_model().operation_model(operation)
    serialized = create_serializer("rest-xml", include_validation=False).serialize_to_request(params, model)
    target = serialized["url_path"]
    if serialized["query_string"]:
        target += ("&" if "?" in target else "?") + urlencode(serialized["query_string"], quote_via=quote)
    headers = {name: str(value) for name, value in serialized["headers"].items()}
    body = serialized["body"]
    return serialized["method"], target, headers, body if isinstance(body, bytes) else bytes(body)


def as_sent(params: Mapping[str, Any]) -> dict[str, Any]:
    """What a server must make of `params`: the differences are the documented ones."""
    expected = {name: value for name, value in params.items() if value != {} or name not in {"Metadata"}}
    for name in {"Expires", "ResponseExpires"} & expected.keys():
        expected[name] = expected[name].strftime("%a, %d %b %Y %H:%M:%S GMT")
    return expected


@pytest.mark.parametrize("name", OPERATIONS)
@settings(max_examples=12, deadline=None, suppress_health_check=SLOW)
@given(data=st.data())
def test_parse_of_what_botocore_serialized_gives_the_input_back(name: str, data: st.DataObject) -> None:
    operation = servicemodel.operation(name)
    params = data.draw(inputs(operation))
    method, raw_target, headers, body = request_of(name, params)
    target = split_target(raw_target, "127.0.0.1:9000", ["s3.example.com"])

    assert resolve(method, target, headers) == name
    assert unknown_parts(name, target, headers) == []
    parsed = parse(name, target, headers, body)
    assert parsed == as_sent(params)


def outputs(layout: servicemodel.Layout) -> st.SearchStrategy[dict[str, Any]]:
    members: dict[str, st.SearchStrategy[Any]] = {}
    for name, child in layout.shape.members.items():
        if layout.streams and layout.payload and name == layout.payload.member:
            continue
        header = child.serialization.get("location") in {"header", "headers"}
        members[name] = values(child, name, HEADER_TEXT if header else XML_TEXT)
        if isinstance(child, MapShape):
            members[name] = st.dictionaries(TOKEN, st.text("abcXYZ =?_09", min_size=1).map(str.strip), max_size=3)
    return st.fixed_dictionaries({}, optional=members)


def quoted(value: Any, name: str = "") -> Any:
    if isinstance(value, Mapping):
        return {key: quoted(each, key) for key, each in value.items()}
    if isinstance(value, list):
        return [quoted(each) for each in value]
    return f'"{value}"' if name == "ETag" else value


def without_empty(value: Any) -> Any:
    """botocore cannot tell an empty answer from an absent one."""
    return {name: each for name, each in value.items() if each not in ({}, [], "")}


@pytest.mark.parametrize("name", [each for each in OPERATIONS if servicemodel.operation(each).output])
@settings(max_examples=12, deadline=None, suppress_health_check=SLOW)
@given(data=st.data())
def test_render_parsed_by_botocore_gives_the_output_back(name: str, data: st.DataObject) -> None:
    layout = servicemodel.operation(name).output
    assert layout is not None
    output = data.draw(outputs(layout))
    headers, body = render(name, output)
    if layout.streams or name == "GetBucketLocation":
        assert layout.streams == (body == b"")
        return
    answer = {"status_code": 200, "headers": HeadersDict(headers), "body": body}
    parsed = ResponseParserFactory().create_parser("rest-xml").parse(answer, layout.shape)
    del parsed["ResponseMetadata"]
    if not any(field.member in output for field in layout.headers.values() if field.wire == "Content-Type"):
        parsed.pop("ContentType", None)
    expected = output if name == "GetObjectAttributes" else quoted(output)
    assert without_empty(parsed) == without_empty(expected)
