"""What a value should be, in words, for who gave another one."""

import difflib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec
from msgspec import Struct, inspect, structs

from shardyard.model import InvalidValue

SECRETS = ("token", "token_hash", "webhook")
"""Addresses of webhooks are keys, too."""

_LONGEST = 200
"""Characters of a value that are told."""


def refused(kind: Any, told: object, part: str = "field", *, strict: bool = True) -> InvalidValue:
    """Why this is no `kind`: which part of it is wrong, what was given, and what was expected.

    `strict`: a number in a text is no number.
    """
    if not (isinstance(kind, type) and issubclass(kind, Struct) and isinstance(told, Mapping)):
        return InvalidValue("body", _short(told), in_words(kind))
    fields = {field.name: field for field in structs.fields(kind)}
    for name in told if kind.__struct_config__.forbid_unknown_fields else ():
        if name not in fields:
            return unknown(part, name, fields)
    for name, field in fields.items():
        if name in told or field.required:
            try:
                msgspec.convert(told[name], field.type, strict=strict)
            except (KeyError, msgspec.ValidationError):
                return InvalidValue(name, masked(name, _short(told.get(name))), in_words(field.type))
    return InvalidValue("body", _short(", ".join(told)), f"{in_words(kind)}, each once")


def unknown(part: str, name: str, known: Iterable[str]) -> InvalidValue:
    """There is nothing of this name; one that is much like it is proposed."""
    there = list(known)
    near = difflib.get_close_matches(name[:_LONGEST].lower(), there, 1)
    hint = f" (did you mean {near[0]}?)" if near else ""
    return InvalidValue(part, _short(name), f"one of {', '.join(there)}{hint}")


def masked(name: str, value: object) -> object:
    """What may be told of a value."""
    return "***" if name in SECRETS else value


def in_words(kind: Any, none: str = "null") -> str:
    """What a type takes; `none` is how nothing is written."""
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
    inspect.StrType: lambda _, __: "a text",
    inspect.IntType: lambda kind, _: f"a whole number{_range(kind)}",
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
"""For each kind of type that bodies and settings have."""


def _short(value: object) -> object:
    text = value if isinstance(value, str) else repr(value)
    return value if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
