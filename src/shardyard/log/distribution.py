"""Which partition each record of a batch goes to, and splitting the batch by partition."""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from msgspec import Struct

from shardyard.model import Record, Topic
from shardyard.model.limits import Validated

FEW_RECORDS = 64
"""Up to this many, placing records one by one is quicker than all of them by NumPy."""


class Turns(Struct, frozen=True, gc=False):
    """Numbers of a round-robin. Modulo the partitions they are indexes."""

    first: int
    step: int = 1
    """0: all of them are the same."""

    def array(self, count: int) -> npt.NDArray[np.int64]:
        return self.first + np.arange(count) * self.step


RoundRobin: TypeAlias = Callable[[int], Turns]
"""Gives the next numbers of a round-robin, as many as it is asked for."""


def distribute(topic: Topic, records: Validated, round_robin: RoundRobin) -> list[tuple[int, Validated]]:
    """The records of each partition, in their order. A record goes to the partition of its key; round-robin if it has
    none, or if the topic ignores keys."""
    rows = records.rows
    if isinstance(rows, tuple) and len(rows) <= FEW_RECORDS:
        return _group(records, rows, _place_each(topic, rows, round_robin))
    keys = rows.column("key") if isinstance(rows, pa.RecordBatch) else pa.array([r.key for r in rows], pa.binary())
    if topic.hash is None or keys.null_count == len(keys):
        turns = round_robin(len(keys))
        if not turns.step:
            return [(turns.first % topic.receiving, records)]
        return _split(records, turns.array(len(keys)) % topic.receiving)
    from shardyard.placement import partitioner_named  # noqa: PLC0415 its compiler takes half a second

    places = np.array(partitioner_named(topic.partitioner, topic.receiving, topic.hash).place_array(keys))
    if keys.null_count:
        turns = round_robin(keys.null_count)
        places[keys.is_null().to_numpy(zero_copy_only=False)] = turns.array(keys.null_count) % topic.receiving
    return _split(records, places)


def _place_each(topic: Topic, rows: Sequence[Record], round_robin: RoundRobin) -> list[int]:
    receiving = topic.receiving
    without_key = len(rows) if topic.hash is None else sum(record.key is None for record in rows)
    turns = round_robin(without_key) if without_key else Turns(0)
    if topic.hash is None or without_key == len(rows):
        return [(turns.first + i * turns.step) % receiving for i in range(without_key)]
    from shardyard.placement import partitioner_named  # noqa: PLC0415 its compiler takes half a second

    partitioner = partitioner_named(topic.partitioner, receiving, topic.hash)
    places, turn = [], turns.first
    for record in rows:
        if record.key is None:
            places.append(turn % receiving)
            turn += turns.step
        else:
            places.append(partitioner.place(record.key))
    return places


def _group(records: Validated, rows: Sequence[Record], places: Sequence[int]) -> list[tuple[int, Validated]]:
    by_place: dict[int, list[Record]] = {}
    for record, place in zip(rows, places, strict=True):
        by_place.setdefault(place, []).append(record)
    if len(by_place) == 1:
        return [(places[0], records)]
    return [(place, records.part(tuple(by_place[place]))) for place in sorted(by_place)]


def assign_partition(topic: Topic, record: Record, round_robin: RoundRobin) -> int:
    """The partition of a single record, as `distribute` gives it."""
    return _place_each(topic, (record,), round_robin)[0]


def _split(records: Validated, places: npt.NDArray[Any]) -> list[tuple[int, Validated]]:
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
