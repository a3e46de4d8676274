"""Memberships in Parquet and CSV files: a row for each, with the columns `channel`, `user` and, if there is one,
`action` (`join` or `leave`)."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from shardyard.fanout.channels import BATCH_ROWS
from shardyard.fanout.names import LENGTHS, valid
from shardyard.model import InvalidCall, InvalidValue, Malformed

COLUMNS = ("channel", "user")
ACTION = "action"
ACTIONS = ("join", "leave")
CSV_BLOCK_BYTES = 4 * 1024 * 1024
MAX_HEADER_BYTES = 64 * 1024


class MalformedRow(InvalidCall):
    """Raised for a row of a file that is not a membership."""

    def __init__(self, path: Path, row: int, why: str) -> None:
        super().__init__(f"row {row} of {path} is malformed: {why}; correct it, or skip such rows by --skip-malformed")
        self.path = path
        self.row = row
        """From 1 on, without the header."""


@dataclass(frozen=True, slots=True)
class Changes:
    """Some rows of a file that are well-formed."""

    channels: pa.Array
    users: pa.Array
    joins: pa.Array
    malformed: int
    """Rows between and after these that were skipped."""

    def __len__(self) -> int:
        return len(self.channels)


def read_changes(path: Path, *, skip_malformed: bool = False) -> Iterator[Changes]:
    """The rows of a file in order. `MalformedRow` for the first one that is no membership, unless such rows are to be
    skipped. `InvalidCall` if it is no Parquet or CSV file, or lacks a column."""
    reader = _parquet(path) if _is_parquet(path) else _csv(path, skip_malformed=skip_malformed)
    first = 1
    for batch, skipped in reader:
        yield _changes(path, batch, first, skipped, skip_malformed=skip_malformed)
        first += batch.num_rows


def _is_parquet(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            is_parquet = file.read(4) == b"PAR1"
    except OSError as error:
        raise InvalidValue("file", str(path), f"a file that can be read ({error.strerror})") from None
    if path.suffix == ".parquet" and not is_parquet:
        raise InvalidCall(f"{path} is not a Parquet file: give it another name if it is CSV")
    return is_parquet


def _check_columns(path: Path, names: list[str]) -> list[str]:
    """The columns to read."""
    missing = [name for name in COLUMNS if names.count(name) != 1]
    if missing or names.count(ACTION) > 1:
        expected = f"the columns {', '.join(COLUMNS)} and, if need be, {ACTION}, each once"
        raise InvalidValue(f"columns of {path}", ", ".join(names), expected)
    return [*COLUMNS, *([ACTION] if ACTION in names else [])]


def _parquet(path: Path) -> Iterator[tuple[pa.RecordBatch, int]]:
    import pyarrow.parquet as pq  # noqa: PLC0415 only for such files

    try:
        with pq.ParquetFile(path) as file:
            columns = _check_columns(path, file.schema_arrow.names)
            for name in columns:
                kind = file.schema_arrow.field(name).type
                if not _is_text(kind):
                    raise InvalidValue(f"column {name} of {path}", str(kind), "strings")
            for batch in file.iter_batches(BATCH_ROWS, columns=columns):
                yield batch, 0
    except pa.ArrowException as error:
        raise Malformed(f"file {path}", str(error)) from None


def _is_text(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return any(
        test(kind)
        for test in (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)
    )


def _csv(path: Path, *, skip_malformed: bool) -> Iterator[tuple[pa.RecordBatch, int]]:
    from pyarrow import csv  # noqa: PLC0415 only for such files

    _check_header(path)
    skipped = 0

    def on_invalid_row(row: Any) -> str:
        nonlocal skipped
        skipped += 1
        if not skip_malformed:
            wrong.append((row.number, f"it has {row.actual_columns} columns instead of {row.expected_columns}"))
            return "error"
        return "skip"

    wrong: list[tuple[int | None, str]] = []
    binary = pa.binary()
    try:
        with csv.open_csv(
            path,
            csv.ReadOptions(use_threads=False, block_size=CSV_BLOCK_BYTES),
            csv.ParseOptions(invalid_row_handler=on_invalid_row),
            csv.ConvertOptions(
                check_utf8=False, column_types=dict.fromkeys([*COLUMNS, ACTION], binary), strings_can_be_null=False
            ),
        ) as reader:
            columns = _check_columns(path, reader.schema.names)
            before = 0
            for batch in reader:
                yield batch.select(columns), skipped - before
                before = skipped
            if skipped > before:  # after the last batch, or there was none
                yield _no_rows(columns), skipped - before
    except pa.ArrowException as error:
        if wrong:
            number, why = wrong[0]
            raise MalformedRow(path, (number or 2) - 1, why) from None
        raise Malformed(f"file {path}", str(error)) from None


def _no_rows(columns: list[str]) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array([], pa.binary()) for _ in columns], columns)


def _check_header(path: Path) -> None:
    """Refuse a file of another kind, whose bytes the parser would complain about."""
    with path.open("rb") as file:
        header = file.readline(MAX_HEADER_BYTES)
    if _decoded(header) is None or b"\0" in header:
        raise InvalidValue("file", str(path), "a Parquet file, or a CSV file whose text is in UTF-8")


def _changes(path: Path, batch: pa.RecordBatch, first: int, skipped: int, *, skip_malformed: bool) -> Changes:
    """`first`: the number of its first row."""
    good = np.ones(batch.num_rows, np.bool_)
    texts = {}
    for name in batch.schema.names:
        texts[name], is_text = _texts(batch.column(name))
        good &= is_text
    for name in COLUMNS:
        good &= valid(name, texts[name])
    joins: Any = pa.array(np.ones(batch.num_rows, np.bool_))
    if ACTION in texts:
        joins = pc.fill_null(pc.equal(texts[ACTION], ACTIONS[0]), False)
        good &= np.asarray(pc.fill_null(pc.is_in(texts[ACTION], pa.array(ACTIONS)), False))
    malformed = int(len(good) - good.sum())
    if malformed and not skip_malformed:
        index = int(good.argmin())
        raise MalformedRow(path, first + index, _reason(batch, index))
    if malformed:
        keep = pa.array(good)
        return Changes(
            texts["channel"].filter(keep), texts["user"].filter(keep), joins.filter(keep), malformed + skipped
        )
    return Changes(texts["channel"], texts["user"], joins, skipped)


def _texts(values: Any) -> tuple[pa.Array, np.ndarray[Any, np.dtype[np.bool_]]]:
    """A column as strings, and which of its values are UTF-8; the others become null."""
    if pa.types.is_dictionary(values.type):
        values = values.dictionary_decode()
    values = values.cast(pa.binary())
    everything = np.ones(len(values), np.bool_)
    try:
        return values.cast(pa.string()), everything
    except pa.ArrowInvalid:
        decoded = [_decoded(value) for value in values.to_pylist()]
        return pa.array(decoded, pa.string()), np.array([value is not None for value in decoded], np.bool_)


def _decoded(value: bytes | None) -> str | None:
    try:
        return None if value is None else value.decode()
    except UnicodeDecodeError:
        return None


def _reason(batch: pa.RecordBatch, index: int) -> str:
    """What is wrong with a row."""
    for name in batch.schema.names:
        value = batch.column(name)[index].as_py()
        text = _decoded(value) if isinstance(value, bytes) else value
        if value is None:
            return f"{name} is missing"
        if text is None:
            return f"{name} is '{value.decode(errors='backslashreplace')}', expected text in UTF-8"
        if name == ACTION and text not in ACTIONS:
            return f"{name} is {text!r}, expected {' or '.join(ACTIONS)}"
        if name != ACTION and (not 1 <= len(text) <= LENGTHS[name] or "\0" in text):
            return f"{name} is {text!r}, expected 1 to {LENGTHS[name]} characters without NUL"
    return "it is not a membership"
