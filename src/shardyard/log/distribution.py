"""Which partition each of several records goes to, and the parts that makes of them."""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from shardyard.model import Record, Topic

Rows: TypeAlias = Sequence[Record] | pa.RecordBatch
Turns: TypeAlias = Callable[[int], npt.NDArray[np.int64]]
"""Gives the next so many turns."""


def assign_partitions(topic: Topic, rows: Rows, turns: Turns) -> npt.NDArray[Any]:
    """The partition of each row: that of its key; without one, or where keys have no say, whose turn it is."""
    keys = rows.column("key") if isinstance(rows, pa.RecordBatch) else pa.array([r.key for r in rows], pa.binary())
    if topic.hash is None or keys.null_count == len(keys):
        return turns(len(keys)) % topic.receiving
    from shardyard.placement import partitioner_named  # noqa: PLC0415 its compiler takes half a second

    places = np.array(partitioner_named(topic.partitioner, topic.receiving, topic.hash).place_array(keys))
    if keys.null_count:
        places[keys.is_null().to_numpy(zero_copy_only=False)] = turns(keys.null_count) % topic.receiving
    return places


def split(rows: Rows, places: npt.NDArray[Any]) -> list[tuple[int, Rows]]:
    """The rows of each partition, in their order."""
    order = np.argsort(places, kind="stable")
    places = places[order]
    starts = np.flatnonzero(np.diff(places, prepend=-1)).tolist()
    ends = [*starts[1:], len(places)]
    if isinstance(rows, pa.RecordBatch):
        taken = rows.take(pa.array(order)) if len(starts) > 1 else rows
        return [(int(places[a]), taken.slice(a, b - a)) for a, b in zip(starts, ends, strict=True)]
    sorted_rows = [rows[i] for i in order.tolist()]
    return [(int(places[a]), sorted_rows[a:b]) for a, b in zip(starts, ends, strict=True)]


def join(parts: list[Rows]) -> Rows:
    """Parts as one again; none are no rows."""
    if parts and isinstance(parts[0], pa.RecordBatch):
        return pa.concat_batches(parts)
    return [record for part in parts for record in part]
