"""Writes the files of a snapshot in Spark's tasks."""

from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from pathlib import Path

import pyarrow as pa
from pyspark.sql import DataFrame

from shardyard.fanout.routing import SnapshotFile, read_users, write_partition
from shardyard.fanout.routing.names import NameIndex
from shardyard.fanout.routing.writing import numbers_of
from shardyard.pipeline.routing.pairs import Pairs

FILES = "partition int, path string, size long, checksum string, channels long, memberships long, malformed long"
"""A file of the snapshot: that of a fan-out partition."""


def write_partitions(pairs: DataFrame, folder: Path, version: str, users: SnapshotFile) -> DataFrame:
    """Write the file of each fan-out partition from its memberships (`pairs.PAIRS`). Returns `FILES`.

    A task that is repeated writes the same files again."""
    return pairs.mapInArrow(_writer(str(folder), version, users), FILES)


def _writer(
    folder: str, version: str, users: SnapshotFile
) -> Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def write(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        names = _names(folder, users)
        for batch in batches:
            for p, malformed, stored in zip(*(batch[name] for name in _PAIRS), strict=True):
                found = Pairs.from_bytes(stored)
                numbers = numbers_of(found.names.dictionary, names)[found.names.indices.to_numpy()]
                channels = found.keys.dictionary.take(found.keys.indices)
                file = write_partition(Path(folder), version, channels, numbers, names, p.as_py())
                counts = len(found.keys.dictionary), len(found.keys), malformed.as_py()
                row = (p.as_py(), file.path, file.size, file.checksum, *counts)
                yield pa.RecordBatch.from_arrays([pa.array([v], t) for v, t in zip(row, _TYPES, strict=True)], _NAMES)

    return write


_PAIRS = ("partition", "malformed", "pairs")
_NAMES = [column.split()[0] for column in FILES.split(", ")]
_TYPES = [{"int": pa.int32(), "long": pa.int64(), "string": pa.string()}[c.split()[1]] for c in FILES.split(", ")]


@lru_cache(maxsize=1)
def _names(folder: str, users: SnapshotFile) -> NameIndex:
    """The names of the users. Tasks of the same process share them."""
    return read_users(Path(folder), users).names
