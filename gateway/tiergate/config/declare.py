"""How a setting is declared: everything the outside sees derives from one field of a dataclass."""

from dataclasses import MISSING, dataclass, field, fields
from typing import Any

from tiergate.config import values as v
from tiergate.config.values import Parser

UNIT_SUFFIXES = ("_bytes", "_s", "_count")


@dataclass(frozen=True, slots=True)
class Declaration:
    """One setting as the outside sees it. `minimum` and `maximum` bound its value, both included."""

    field: str
    name: str
    section: str
    help: str
    parse: Parser
    default: Any
    default_text: str
    repeatable: bool
    minimum: float | None
    maximum: float | None

    @property
    def env(self) -> str:
        """The environment variable."""
        return f"TIERGATE_{self.name.upper()}"

    @property
    def flag(self) -> str:
        """The command line flag."""
        return f"--{self.name.replace('_', '-')}"

    @property
    def is_secret(self) -> bool:
        """Whether the value must not be shown."""
        return self.parse in (v.parse_secret, v.parse_long_secret)


def setting(
    section: str,
    default: Any,
    parse: Parser,
    text: str,
    *,
    computed: str = "",
    name: str = "",
    repeatable: bool = False,
    low: float | None = None,
    high: float | None = None,
) -> Any:
    """A field with its declaration. A callable default takes a `Machine`; `computed` describes it."""
    metadata = {
        "section": section,
        "default": default,
        "parse": parse,
        "help": text,
        "computed": computed,
        "name": name,
        "repeatable": repeatable,
        "low": low,
        "high": high,
    }
    if callable(default):
        return field(metadata=metadata)
    return field(default=default, metadata=metadata)


def declarations_of(settings: type[Any]) -> dict[str, Declaration]:
    """The declarations of a dataclass whose fields were made by `setting`, in their order."""
    found: dict[str, Declaration] = {}
    for item in fields(settings):
        meta = item.metadata
        name = meta["name"] or _without_unit(item.name)
        default = meta["default"] if item.default is MISSING else item.default
        found[item.name] = Declaration(
            field=item.name,
            name=name,
            section=meta["section"],
            help=meta["help"],
            parse=meta["parse"],
            default=default,
            default_text=meta["computed"] or _default_text(item.name, default),
            repeatable=meta["repeatable"],
            minimum=meta["low"],
            maximum=meta["high"],
        )
    return found


def _without_unit(field_name: str) -> str:
    for suffix in UNIT_SUFFIXES:
        field_name = field_name.removesuffix(suffix)
    return field_name


def _default_text(field_name: str, default: Any) -> str:
    if default in ("", None, ()):
        return "none"
    return show_value(field_name, default)


def show_value(field_name: str, value: Any) -> str:
    """A value with its unit, as the documentation and faults show it."""
    if value is not None and field_name.endswith(("_bytes", "_bytes_per_s")):
        return v.format_size(value)
    if value is not None and field_name.endswith("_s"):
        return v.format_duration(value)
    return str(value)
