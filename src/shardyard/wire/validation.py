"""Error messages for values that do not fit their type: what was given, and what was expected, in plain words."""

import difflib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec
from msgspec import Struct, inspect, structs

from shardyard.model import InvalidValue

SECRETS = ("token", "token_hash", "webhook")
"""Fields whose values are never shown. The address of a webhook often contains a key."""

_LONGEST = 200
"""Characters of a value that are shown."""


def validation_error(kind: Any, value: object, part: str = "field", *, strict: bool = True) -> InvalidValue:
    """Why `value` is not a `kind`: which part of it is wrong, what was given, and what was expected.

    `part`: what a field is called in the message. `strict`: a string such as "4" is not a number.
    """
    if not (isinstance(kind, type) and issubclass(kind, Struct) and isinstance(value, Mapping)):
        return InvalidValue("body", _short(value), in_words(kind))
    fields = {field.name: field for field in structs.fields(kind)}
    for name in value if kind.__struct_config__.forbid_unknown_fields else ():
        if name not in fields:
            return unknown(part, name, fields)
    for name, field in fields.items():
        if name in value or field.required:
            try:
                msgspec.convert(value[name], field.type, strict=strict)
            except (KeyError, msgspec.ValidationError):
                if (item := _wrong_item(name, field.type, value.get(name), part)) is not None:
                    return item
                return InvalidValue(name, masked(name, _short(value.get(name))), in_words(field.type))
    return InvalidValue("body", _short(", ".join(value)), f"{in_words(kind)}, each once")


def _wrong_item(name: str, kind: Any, value: object, part: str) -> InvalidValue | None:
    """What is wrong with the first wrong object of a list of them; None if it is something else that is wrong."""
    info = inspect.type_info(kind)
    if not (isinstance(info, inspect.ListType) and isinstance(info.item_type, inspect.StructType)):
        return None
    item_kind = info.item_type.cls
    for place, item in enumerate(value) if isinstance(value, list) else ():
        try:
            msgspec.convert(item, item_kind)
        except msgspec.ValidationError:
            if not isinstance(item, Mapping):
                return None
            error = validation_error(item_kind, item, part)
            return InvalidValue(f"{name}[{place}].{error.name}", error.value, error.expected)
    return None


def unknown(part: str, name: str, known: Iterable[str]) -> InvalidValue:
    """The error for a name that does not exist, with the closest one that does as a hint."""
    names = list(known)
    near = difflib.get_close_matches(name[:_LONGEST].lower(), names, 1)
    hint = f" (did you mean {near[0]}?)" if near else ""
    return InvalidValue(part, _short(name), f"one of {', '.join(names)}{hint}")


def masked(name: str, value: object) -> object:
    """The value as it may be shown."""
    return "***" if name in SECRETS else value


def in_words(kind: Any, none: str = "null") -> str:
    """What a type accepts. `none`: how the absence of a value is written."""
    return _words(inspect.type_info(kind), none)


def _words(kind: inspect.Type, none: str) -> str:
    return _WORDS[type(kind)](kind, none)


def _one_of(kind: inspect.UnionType, none: str) -> str:
    return ", or ".join(_words(each, none) for each in kind.types)


def _list(kind: inspect.ListType | inspect.VarTupleType, none: str) -> str:
    least = f" of at least {kind.min_length}" if kind.min_length else ""
    return f"a list{least}, each item {_words(kind.item_type, none)}"


def _range(kind: inspect.IntType | inspect.FloatType) -> str:
    if kind.gt is not None:
        return f" of more than {kind.gt}"
    if kind.ge is None:
        return ""
    return f" of at least {kind.ge}" if kind.le is None else f" from {kind.ge} to {kind.le}"


_WORDS: dict[type[inspect.Type], Callable[[Any, str], str]] = {
    inspect.AnyType: lambda _, __: "any value",
    inspect.NoneType: lambda _, none: none,
    inspect.BoolType: lambda _, __: "true or false",
    inspect.StrType: lambda _, __: "a string",
    inspect.IntType: lambda kind, _: f"an integer{_range(kind)}",
    inspect.FloatType: lambda kind, _: f"a number{_range(kind)}",
    inspect.LiteralType: lambda kind, _: f"one of {', '.join(kind.values)}",
    inspect.Metadata: lambda kind, _: str(kind.extra_json_schema["description"]),
    inspect.UnionType: _one_of,
    inspect.ListType: _list,
    inspect.VarTupleType: _list,
    inspect.TupleType: lambda kind, none: f"a list of {', '.join(_words(item, none) for item in kind.item_types)}",
    inspect.DictType: lambda kind, none: f"an object of names, each with {_words(kind.value_type, none)}",
    inspect.StructType: lambda kind, _: f"an object with {', '.join(field.name for field in kind.fields)}",
}
"""One for each kind of type that bodies and settings use."""


def _short(value: object) -> object:
    text = value if isinstance(value, str) else repr(value)
    return value if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
