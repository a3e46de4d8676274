"""What callers may give as value, key and headers of a record, and how it is stored as bytes."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from shardyard.model.checks import encoded_size
from shardyard.model.errors import InvalidValue

Headers = tuple[tuple[str, bytes], ...]
GivenValue = bytes | str | dict[str, Any] | list[Any]
"""What a caller may give as a value: bytes, a string (stored as UTF-8), or a dict or list (stored as JSON)."""
GivenHeaders = Mapping[str, bytes | str] | Iterable[tuple[str, bytes | str]]
"""What a caller may give as headers: a mapping, or pairs; strings are stored as UTF-8."""


def encoded_text(name: str, value: object, expected: str = "bytes, or a string") -> bytes:
    """Bytes as they are, a string in UTF-8. `InvalidValue` for anything else."""
    if isinstance(value, bytes):
        return value
    if not isinstance(value, str):
        raise InvalidValue(name, value, expected)
    encoded_size(name, value)
    return value.encode()


def encoded_value(value: object) -> bytes:
    """The value of a record: bytes as they are, a string in UTF-8, a dict or a list as JSON without spaces."""
    if isinstance(value, dict | list):
        try:
            return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidValue("value", f"a {type(value).__name__}", f"what JSON can express ({error})") from None
    return encoded_text("value", value, "bytes, a string, or a dict or list, which is stored as JSON")


def encoded_headers(headers: object) -> Headers:
    """Headers from a mapping or from pairs, with strings in UTF-8. `InvalidValue` for anything else."""
    expected = "a mapping, or pairs, of names (strings) and values (bytes or strings)"
    pairs = headers.items() if isinstance(headers, Mapping) else headers
    if isinstance(pairs, str | bytes) or not isinstance(pairs, Iterable):
        raise InvalidValue("headers", headers, expected)
    found = []
    for pair in pairs:
        if not isinstance(pair, tuple | list) or len(pair) != 2 or not isinstance(pair[0], str):
            raise InvalidValue("header", pair, expected)
        found.append((pair[0], encoded_text(f"header {pair[0]!r}", pair[1])))
    return tuple(found)
