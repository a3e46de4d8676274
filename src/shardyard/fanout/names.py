"""Checks of the names of channels, users and clients, and of texts: one by one, and by column."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from shardyard.model import InvalidValue, TooLarge
from shardyard.model.checks import check_int64, check_text, encoded_size
from shardyard.wire.channels import MAX_CHANNEL_LENGTH
from shardyard.wire.inbox import MAX_TEXT_BYTES, MAX_USER_LENGTH

MAX_DEVICE_LENGTH = 64
LENGTHS = {
    "channel": MAX_CHANNEL_LENGTH,
    "user": MAX_USER_LENGTH,
    "sender": MAX_USER_LENGTH,
    "device": MAX_DEVICE_LENGTH,
}

Names: TypeAlias = Sequence[str] | pa.Array | pa.ChunkedArray
"""Names as a sequence of strings, or as an Arrow column of strings."""


def check_name(what: str, name: object) -> str:
    """The name, if it may be one of a `channel`, `user`, `sender` or `device`. `InvalidValue` otherwise."""
    check_text(what, name)
    if not isinstance(name, str) or len(name) > LENGTHS[what]:
        raise InvalidValue(what, name, f"a name of 1 to {LENGTHS[what]} characters")
    return name


def check_event_text(text: object) -> str:
    """The text of an event. It may be empty."""
    if not isinstance(text, str):
        raise InvalidValue("text", text, "a string")
    if (size := encoded_size("text", text)) > MAX_TEXT_BYTES:
        raise TooLarge("text in bytes", size, MAX_TEXT_BYTES)
    return text


def check_event_id(id_: object) -> int:
    """The id of an event."""
    return check_int64("id", id_, at_least=0)


def column(what: str, names: Names) -> pa.Array:
    """The names as one Arrow column of strings. `InvalidValue` if they are none."""
    if isinstance(names, str):
        raise InvalidValue(what, names, "several names, not one string")
    try:
        made: Any = names if isinstance(names, pa.Array | pa.ChunkedArray) else pa.array(list(names), pa.string())
        if isinstance(made, pa.ChunkedArray):
            made = made.combine_chunks()
        if not (pa.types.is_string(made.type) or pa.types.is_large_string(made.type)):
            if not pa.types.is_dictionary(made.type) and not pa.types.is_binary(made.type) and len(made):
                raise InvalidValue(what, str(made.type), "a column of strings")
            made = made.cast(pa.string())
        made.validate(full=True)
    except (pa.ArrowException, UnicodeEncodeError, TypeError) as error:
        raise InvalidValue(what, _first_wrong(names), f"names as strings ({error})") from None
    return made


def _first_wrong(names: Names) -> object:
    """What to show of names that are no strings in UTF-8."""
    if isinstance(names, pa.Array | pa.ChunkedArray):
        return f"a column of {names.type}"
    return next((name for name in names if not _is_text(name)), "a sequence")


def _is_text(name: object) -> bool:
    try:
        return isinstance(name, str) and encoded_size("name", name) >= 0
    except InvalidValue:
        return False


def valid(what: str, names: pa.Array) -> npt.NDArray[np.bool_]:
    """Which of the names in a column of strings may be names of a `channel` or `user`. Null is none."""
    lengths = pc.utf8_length(names)
    fits = pc.and_(pc.greater_equal(lengths, 1), pc.less_equal(lengths, LENGTHS[what]))
    good = pc.and_(fits, pc.invert(pc.match_substring(names, "\0")))
    return np.asarray(pc.fill_null(good, False))


def check_column(what: str, names: Names) -> pa.Array:
    """The names as a column; `InvalidValue` gives the index of the first that is wrong."""
    made = column(what, names)
    if len(made) and not (good := valid(what, made)).all():
        index = int(good.argmin())
        expected = f"a name of 1 to {LENGTHS[what]} characters, without NUL"
        raise InvalidValue(f"{what} at index {index}", made[index].as_py(), expected)
    return made
