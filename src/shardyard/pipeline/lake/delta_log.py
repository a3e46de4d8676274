"""The log of a Delta table: creating it, and committing files that are written already. This module does not use Spark.

Delta Lake in Spark would read the log by Spark jobs for each batch, to see whether the batch is in it: settings make
them fewer, but none prevents them.
"""

import contextlib
import datetime
import json
import logging
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import CommitProperties, DeltaTable, Transaction
from deltalake.exceptions import CommitFailedError, DeltaError
from deltalake.transaction import AddAction, RemoveAction

from shardyard.model import InvalidValue

SCHEMA = pa.schema(
    [
        ("topic", pa.string()),
        ("day", pa.date32()),
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("epoch", pa.int64()),
        ("timestamp", pa.timestamp("us", "UTC")),
        ("id", pa.string()),
        ("key", pa.binary()),
        ("value", pa.binary()),
        ("headers", pa.list_(pa.struct([("name", pa.string()), ("value", pa.binary())]))),
    ]
)
PARTITIONED_BY = ["topic", "day"]
STATISTICS = ("partition", "offset", "timestamp")
"""The columns that the log keeps the smallest and largest value of in each file: those of the others would tell readers
nothing, because they lie anywhere between those of all records."""
PROPERTIES = {
    "delta.dataSkippingStatsColumns": ",".join(STATISTICS),  # also when Delta Lake in Spark merges files
    "delta.writePartitionColumnsToParquet": "false",  # readers take topic and day from the log
    "delta.checkpointInterval": "10",  # commits; Spark's default, that of `deltalake` is 100
}
WRITER_VERSION = 2
"""The version of Delta's protocol for writers that a new table has. What a table with a higher one asks of writers, for
example to check constraints, is left to Delta Lake in Spark."""
_log = logging.getLogger(__name__)
_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)


def create_table(folder: Path) -> None:
    """Create an empty table. `InvalidValue` for a folder that `deltalake` would look for elsewhere."""
    if _is_misread(folder):
        raise InvalidValue("lake", str(folder), "a path without % and \\, or --format parquet")
    DeltaTable.create(
        folder,
        SCHEMA,
        partition_by=PARTITIONED_BY,
        configuration=PROPERTIES,
        raise_if_key_not_exists=False,  # one of them is only Spark's
    )


def _is_misread(folder: Path) -> bool:
    """Whether `deltalake` would look for the folder elsewhere: it decodes paths like those of URLs, twice."""
    return "%" in str(folder) or "\\" in str(folder)


def open_table(folder: Path) -> DeltaTable | None:
    """The table as of now; None if only Delta Lake in Spark can write to it."""
    if _is_misread(folder):
        return None
    try:
        table = DeltaTable(folder)
    except DeltaError as error:  # it has a day that cannot be committed, for example
        _log.info("Delta Lake in Spark writes to %s, because deltalake cannot read it: %s", folder, error)
        return None
    is_checked = any(not field.nullable or field.metadata for field in table.schema().fields)  # NOT NULL and the like
    return None if is_checked or table.protocol().min_writer_version > WRITER_VERSION else table


def has_batch(table: DeltaTable, query: str, batch: int) -> bool:
    """Whether the table has this batch of the query, as of when it was opened."""
    last = table.transaction_version(query)
    return last is not None and last >= batch


def can_be_committed(files: Iterable[Path]) -> bool:
    """Whether all of their days are in the years 1 to 9999. `deltalake` cannot read a table with some other days, which
    records with a wrong timestamp have."""
    try:
        for path in files:
            datetime.date.fromisoformat(path.parent.name.removeprefix("day="))
    except ValueError:
        return False
    return True


def commit_batch(table: DeltaTable, folder: Path, files: Iterable[Path], query: str, batch: int) -> None:
    """Add files in the table's folder to the table, which did not have the batch when it was opened."""
    now = int(time.time() * 1000)
    transaction = Transaction(query, batch, now)
    actions: list[AddAction | RemoveAction] = [_add(folder, path, now) for path in files]
    try:
        table.create_write_transaction(
            actions,
            "append",
            table.schema(),
            PARTITIONED_BY,
            commit_properties=CommitProperties(app_transactions=[transaction]),
        )
    except CommitFailedError:  # another writer was faster: perhaps a driver that was killed, with the same batch
        if not has_batch(DeltaTable(folder), query, batch):
            raise


def _add(folder: Path, path: Path, now: int) -> AddAction:
    """`now`: in milliseconds."""
    relative = path.relative_to(folder)
    values = dict(part.split("=", 1) for part in relative.parts[:-1])
    return AddAction(str(relative), path.stat().st_size, values, now, True, json.dumps(statistics(path)))


def statistics(path: Path) -> dict[str, Any]:
    """What the log says about the rows of a Parquet file, from its footer."""
    footer = pq.read_metadata(path)
    groups = [footer.row_group(number) for number in range(footer.num_row_groups)]
    found: dict[str, Any] = {"numRecords": footer.num_rows, "minValues": {}, "maxValues": {}, "nullCount": {}}
    for name in STATISTICS:
        index = footer.schema.names.index(name)
        columns = [group.column(index).statistics for group in groups]
        if not columns or not all(column is not None and column.has_min_max for column in columns):
            continue
        least, most = min(column.min_raw for column in columns), max(column.max_raw for column in columns)
        if name != "timestamp":
            found["minValues"][name], found["maxValues"][name] = least, most
        else:
            with contextlib.suppress(OverflowError):  # after the year 9999, for which there is no common format
                found["minValues"][name], found["maxValues"][name] = _time(least), _time(most)
        found["nullCount"][name] = sum(column.null_count for column in columns)
    return found


def _time(microseconds: int) -> str:
    """Delta has milliseconds, which is what records have."""
    return f"{(_EPOCH + datetime.timedelta(microseconds=microseconds)).isoformat(timespec='milliseconds')[:-6]}Z"
