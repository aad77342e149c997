"""What the command line shows as tables. It returns them; who asked prints."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from rich.table import Table

    from tiergate.selftest import Result

_AGES = ((86_400.0, "d"), (3_600.0, "h"), (60.0, "min"))


def status_tables(status: Mapping[str, object]) -> Iterator["Table"]:
    """The status of a node for people: what lists rows is a table of its own, and what never happened is left out."""
    from rich.table import Table
    from rich.text import Text

    for title, section in _sections(status):
        if not section:
            continue
        table = Table(title=title, title_justify="left", show_header=isinstance(section, list))
        if isinstance(section, list):
            rows = [row if isinstance(row, dict) else {"": row} for row in section]
            columns = list(dict.fromkeys(str(name) for row in rows for name in row))
            for column in columns:
                table.add_column(column)
            for row in rows:
                table.add_row(*(Text(_shown(column, row.get(column, ""))) for column in columns))
        else:
            for name, value in section.items():
                table.add_row(name, Text(_shown(name, value)))
        yield table


def _sections(status: Mapping[str, object]) -> Iterator[tuple[str, list[object] | dict[str, object]]]:
    yield "node", {name: value for name, value in status.items() if not isinstance(value, dict | list)}
    for title, section in status.items():
        if isinstance(section, list):
            yield title, section
        elif isinstance(section, dict):
            values = cast("dict[str, object]", section)
            lists = {name: cast("list[object]", value) for name, value in values.items() if isinstance(value, list)}
            others = {name: value for name, value in values.items() if name not in lists and value != ""}
            yield title, {name: value for name, value in others.items() if title != "totals" or value}
            for name, rows in lists.items():
                yield f"{title}: {name}", rows


def _shown(name: str, value: object) -> str:
    from rich.filesize import decimal

    if isinstance(value, int) and name.endswith("bytes"):
        return decimal(value)
    if isinstance(value, int | float) and name.endswith("_s"):
        return duration(value)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def results_table(endpoint: str, results: "Sequence[Result]") -> "Table":
    """What a test of an endpoint found."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title=f"S3 as spoken by {endpoint}", title_justify="left")
    table.add_column("check")
    table.add_column("result")
    table.add_column("seconds", justify="right")
    for result in results:
        outcome = Text(result.fault, style="red") if result.fault else Text("ok", style="green")
        table.add_row(result.name, outcome, f"{result.took_s:.2f}")
    return table


def checkpoints_table(sets: Sequence[Mapping[str, Any]]) -> "Table":
    """Sets as the admin address tells of them, one a row."""
    from rich.filesize import decimal
    from rich.table import Table
    from rich.text import Text

    table = Table(title="checkpoints", title_justify="left")
    table.add_column("set", overflow="fold")
    for column in ("layout", "step", "size", "objects", "memory", "S3", "age", "to S3"):
        table.add_column(column, justify="right" if column in ("step", "size", "objects", "age", "to S3") else "left")
    for each in sets:
        row = (
            each["uri"],
            each["layout"],
            "" if each["step"] is None else str(each["step"]),
            decimal(each["size_bytes"]),
            str(each["objects_count"]),
            _tier(each, "memory"),
            _tier(each, "s3"),
            duration(each["age_s"]),
            _to_s3(each),
        )
        table.add_row(*map(Text, row))
    return table


def _tier(each: Mapping[str, Any], tier: str) -> str:
    """The state of a set in a tier: how far it is where it is not all there, on how many nodes where it is."""
    status = each["tiers"][tier]
    state: str = status["state"]
    if state == "complete":
        return f"complete x{status['copies_count']}" if tier == "memory" else state
    if state == "absent":
        return "kept in memory" if tier == "s3" and each["is_parked"] else "-"
    return f"{state} {status['objects_count']} of {each['objects_count']}"


def _to_s3(each: Mapping[str, Any]) -> str:
    """About how long it takes until S3 has the set."""
    state, to_s3_s = each["tiers"]["s3"]["state"], each["to_s3_s"]
    if state == "complete":
        return "there"
    if state != "uploading":
        return "-"
    return "?" if to_s3_s is None else f"about {duration(to_s3_s)}"


def duration(seconds: float) -> str:
    """A length of time, in the largest unit that it has one of."""
    for unit_s, unit in _AGES:
        if seconds >= unit_s:
            return f"{seconds / unit_s:.1f} {unit}"
    return f"{seconds:.0f} s"


def verified_table(sets: Sequence[Mapping[str, Any]]) -> "Table":
    """What a verification found of each set."""
    from rich.filesize import decimal
    from rich.table import Table
    from rich.text import Text

    table = Table(title="checkpoints", title_justify="left")
    for column in ("set", "layout", "step", "objects", "size", "by", "verdict"):
        table.add_column(column, justify="right" if column in ("step", "objects", "size") else "left")
    for each in sets:
        style = {"damaged": "red", "sound": "green", "repaired": "green"}.get(each["verdict"], "yellow")
        step = "" if each["step"] is None else str(each["step"])
        by = "its own list" if each["is_listed"] else "what is there"
        amount = (str(each["objects_count"]), decimal(each["size_bytes"]))
        table.add_row(Text(each["uri"]), each["layout"], step, *amount, by, Text(each["verdict"], style=style))
    return table


def damage_line(damage: Mapping[str, Any]) -> str:
    """What is wrong with an object, as a line."""
    place = f"{damage['tier']} of {damage['node']}" if damage["node"] else damage["tier"]
    return f"{damage['uri']} is damaged in {place}: {damage['fault']}: {damage['detail']}"
