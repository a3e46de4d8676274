"""Checks of plain values: integers that can be stored, strings that can be encoded."""

import operator
from typing import SupportsIndex, cast

from shardyard.model.errors import InvalidValue

_INT64 = 2**63


def whole_number(name: str, value: object, *, at_least: int) -> int:
    """`value` as an int, if it is an integer of at least `at_least`; `InvalidValue` otherwise."""
    try:
        number = operator.index(cast(SupportsIndex, value))
    except TypeError:
        number = at_least - 1
    if number < at_least or isinstance(value, bool):
        raise InvalidValue(name, value, f"a whole number of at least {at_least}")
    return number


def settle_whole_number(of: object, name: str, *, at_least: int) -> None:
    """Replace a field of a frozen dataclass by a plain int, whatever kind of integer was given."""
    object.__setattr__(of, name, whole_number(name, getattr(of, name), at_least=at_least))


def check_int64(name: str, value: object, *, at_least: int = -_INT64) -> int:
    """`value` as an int, if it is an integer that fits in 64 bits."""
    number = whole_number(name, value, at_least=at_least)
    if number >= _INT64:
        raise InvalidValue(name, value, "at most 2**63 - 1")
    return number


def check_text(name: str, value: object) -> None:
    """Refuse what is not a string, is empty or can't be stored: databases take no lone surrogates and no NUL."""
    if not isinstance(value, str) or not value:
        raise InvalidValue(name, value, "a string that is not empty")
    if "\0" in value:
        raise InvalidValue(name, value, "a string without NUL characters")
    encoded_size(name, value)


def encoded_size(name: str, text: str) -> int:
    """The bytes of a string in UTF-8, which can't encode half a surrogate pair."""
    try:
        return len(text.encode())
    except UnicodeEncodeError:
        raise InvalidValue(name, text, "a string without lone surrogates") from None
