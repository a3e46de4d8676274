"""Which partition each record of a batch goes to, and splitting the batch by partition."""

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from shardyard.model import Record, Topic
from shardyard.model.limits import Validated

RoundRobin: TypeAlias = Callable[[int], npt.NDArray[np.int64]]
"""Gives the next numbers of a round-robin, as many as it is asked for. Modulo the partitions they are indexes."""


def assign_partitions(topic: Topic, records: Validated, round_robin: RoundRobin) -> npt.NDArray[Any]:
    """The partition of each record: that of its key; round-robin without one, or if the topic ignores keys."""
    rows = records.rows
    keys = rows.column("key") if isinstance(rows, pa.RecordBatch) else pa.array([r.key for r in rows], pa.binary())
    if topic.hash is None or keys.null_count == len(keys):
        return round_robin(len(keys)) % topic.receiving
    from shardyard.placement import partitioner_named  # noqa: PLC0415 its compiler takes half a second

    places = np.array(partitioner_named(topic.partitioner, topic.receiving, topic.hash).place_array(keys))
    if keys.null_count:
        places[keys.is_null().to_numpy(zero_copy_only=False)] = round_robin(keys.null_count) % topic.receiving
    return places


def assign_partition(topic: Topic, record: Record, round_robin: Callable[[], int]) -> int:
    """The partition of a single record, as `assign_partitions` gives it."""
    if record.key is None or topic.hash is None:
        return round_robin() % topic.receiving
    from shardyard.placement import partitioner_named  # noqa: PLC0415 its compiler takes half a second

    return partitioner_named(topic.partitioner, topic.receiving, topic.hash).place(record.key)


def split(records: Validated, places: npt.NDArray[Any]) -> list[tuple[int, Validated]]:
    """The records of each partition, in their order."""
    order = np.argsort(places, kind="stable")
    places = places[order]
    starts = np.flatnonzero(np.diff(places, prepend=-1)).tolist()
    if len(starts) == 1:
        return [(int(places[0]), records)]
    ends = [*starts[1:], len(places)]
    rows = records.rows
    if isinstance(rows, pa.RecordBatch):
        taken = rows.take(pa.array(order))
        return [(int(places[a]), records.part(taken.slice(a, b - a))) for a, b in zip(starts, ends, strict=True)]
    ordered = tuple(rows[i] for i in order.tolist())
    return [(int(places[a]), records.part(ordered[a:b])) for a, b in zip(starts, ends, strict=True)]


def join(records: Validated, parts: list[Validated]) -> Validated:
    """Some of the parts of `records` as one batch again; it may be empty."""
    if len(parts) == 1:
        return parts[0]
    if isinstance(records.rows, pa.RecordBatch):
        return records.part(pa.concat_batches([part.rows for part in parts]) if parts else records.rows.slice(0, 0))
    return records.part(tuple(record for part in parts for record in part.rows))
