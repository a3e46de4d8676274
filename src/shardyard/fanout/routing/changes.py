"""Reads the changes that records of `members` and `presence` hold: many at a time by column, a few one by one, which is
faster for them."""

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from shardyard.wire.channels import ADDED, CLEARED, REMOVED

FEW = 64
"""Up to as many records are read one by one."""

Names: TypeAlias = "list[bytes] | pa.Array"
"""Names as bytes: a list of few, or an Arrow array of type binary."""
Column: TypeAlias = "pa.Array | pa.ChunkedArray"


@dataclass(frozen=True, slots=True)
class Changes:
    """Changes in order: of `members`, keys are channels and names users; of `presence`, users and devices."""

    keys: Names
    names: Names
    added: npt.NDArray[np.bool_] | list[bool]
    """Whether the name was added to the key, or else removed."""
    malformed: int
    """How many records were skipped because they hold no change."""
    cleared: bool = False
    """Everything before the first of these changes is void."""


def parse_changes(keys: Column, values: Column, *, clears: bool = False) -> Changes:
    """The changes in the keys and values of records, which are binary. `clears`: a record without a key may say that
    everything before it is void."""
    return (_few if len(values) <= FEW else _many)(keys, values, clears)


def _few(keys: Column, values: Column, clears: bool) -> Changes:
    found_keys: list[bytes] = []
    names: list[bytes] = []
    added: list[bool] = []
    malformed, cleared = 0, False
    for key, value in zip(keys.to_pylist(), values.to_pylist(), strict=True):
        if clears and key is None and value == CLEARED:
            cleared = True
            found_keys, names, added = [], [], []
        elif key and value and _is_change(value):
            found_keys.append(key)
            names.append(value[1:])
            added.append(value[:1] == ADDED)
        else:
            malformed += 1
    return Changes(found_keys, names, added, malformed, cleared)


def _is_change(value: bytes) -> bool:
    if len(value) < 2 or value[:1] not in (ADDED, REMOVED):
        return False
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True


def _many(keys: Column, values: Column, clears: bool) -> Changes:
    keys, values = _one_array(keys), _one_array(values)
    malformed, cleared = 0, False
    if clears:
        marks = np.flatnonzero(_true(pc.and_(pc.is_null(keys), pc.equal(values, CLEARED))))
        if len(marks):
            cleared, after = True, int(marks[-1]) + 1
            malformed = after - len(marks) - int(_changes(keys[:after], values[:after]).sum())
            keys, values = keys[after:], values[after:]
    good = _changes(keys, values)
    if not good.all():
        malformed += int(len(good) - good.sum())
        keys, values = keys.filter(pa.array(good)), values.filter(pa.array(good))
    return Changes(keys, _without_sign(values), _true(pc.starts_with(values, ADDED)), malformed, cleared)


def _changes(keys: pa.Array, values: pa.Array) -> npt.NDArray[np.bool_]:
    """Which records hold a change."""
    good = _true(
        pc.and_(
            pc.and_(pc.greater(pc.binary_length(keys), 0), pc.greater(pc.binary_length(values), 1)),
            pc.or_(pc.starts_with(values, ADDED), pc.starts_with(values, REMOVED)),
        )
    )
    try:
        values.cast(pa.string())  # checks that all of it is UTF-8
    except pa.ArrowInvalid:
        good &= np.array([value is not None and _is_change(value) for value in values.to_pylist()], bool)
    return good


def _without_sign(values: pa.Array) -> pa.Array:
    """The values without their first byte. None of them is null or empty."""
    # PyArrow's binary_slice fails on arrays of some sizes if it has no stop.
    if not len(values):
        return values
    _, offsets, data = values.buffers()
    starts = np.frombuffer(offsets, np.int32, len(values) + 1, 4 * values.offset)
    rest = np.delete(np.frombuffer(data, np.uint8)[starts[0] : starts[-1]], starts[:-1] - starts[0])
    shorter = starts - starts[0] - np.arange(len(starts), dtype=np.int32)
    return pa.Array.from_buffers(pa.binary(), len(values), [None, pa.py_buffer(shorter), pa.py_buffer(rest)])


def _true(flags: pa.Array) -> npt.NDArray[np.bool_]:
    known: npt.NDArray[np.bool_] = pc.fill_null(flags, False).to_numpy(zero_copy_only=False)
    return known


def _one_array(column: Column) -> pa.Array:
    """The column in one piece, of type binary."""
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
        if isinstance(column, pa.ChunkedArray):
            column = pa.concat_arrays(column.chunks)
    return column if column.type == pa.binary() else column.cast(pa.binary())
