"""Settings of topics and groups as the command line writes them: NAME=VALUE, lists as 1,5,30. `none`, and no value at
all, take a setting away."""

from collections.abc import Sequence
from json import dumps
from typing import Any

import msgspec

from shardyard.cli.help import Rows
from shardyard.model import InvalidValue
from shardyard.wire.settings import without_null_lists
from shardyard.wire.validation import in_words, masked, unknown

_NONE = "none"


def parse_settings(kind: type[msgspec.Struct], pairs: Sequence[str]) -> dict[str, Any]:
    """The settings in `pairs`, written as NAME=VALUE, with the types that they have in `kind`."""
    fields = {field.name: field for field in msgspec.structs.fields(kind)}
    settings = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals:
            raise InvalidValue("setting", pair, f"NAME=VALUE, with a name of {', '.join(fields)}")
        if name not in fields:
            raise unknown("setting", name, fields)
        value: object = None if text in ("", _NONE) else text
        if value is not None and isinstance(fields[name].default, tuple):
            value = [part for part in text.split(",") if part]
        value = without_null_lists(kind, {name: value})[name]
        try:
            settings[name] = msgspec.to_builtins(msgspec.convert(value, fields[name].type, strict=False))
            dumps(settings[name], allow_nan=False)  # JSON has neither inf nor nan
        except ValueError:  # also that of msgspec
            raise InvalidValue(name, masked(name, text), in_words(fields[name].type, "none")) from None
    return settings


def format_setting(value: object) -> str:
    """A setting as `parse_settings` takes it."""
    if isinstance(value, list | tuple):
        return ",".join(map(format_setting, value)) or _NONE
    if isinstance(value, float):
        return f"{value:g}"
    return _NONE if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def settings_help(kind: type[msgspec.Struct]) -> Rows:
    """The settings of `kind`, with the values they take and their defaults."""
    return [
        (field.name, f"{in_words(field.type, 'none')}{_default(field.default)}")
        for field in msgspec.structs.fields(kind)
    ]


def _default(value: object) -> str:
    if value is msgspec.UNSET:
        return ""
    return f" [default: {format_setting(value)}]"
