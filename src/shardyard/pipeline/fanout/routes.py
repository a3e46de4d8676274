"""The posts of events: one for each inbox partition with online members of the channel.

Tasks look channels up in the same table as fan-out workers: a snapshot, and what the topics hold since, up to positions
that are the same for all tasks.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame

from shardyard.fanout.routing import RoutingTable, Snapshot
from shardyard.log.scan import scan
from shardyard.model import InvalidCall, Partition, Position, Topic
from shardyard.pipeline.blocking import BlockingLog, blocking
from shardyard.pipeline.partitioning import placement_column
from shardyard.wire.channels import BULK, FANOUT_PARTITIONS, HASH, MEMBERS, PARTITIONER, PRESENCE
from shardyard.wire.inbox import POST_KEY

EVENTS = ("partition", "epoch", "offset", "key")
"""The columns of events that are read: where each is in `events`, and its channel."""
POSTS = "partition int, key binary, id string"
"""A post: the partition of `inbox`, the key and the id of its record."""
READ_RECORDS = 50_000
READ_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class RoutingSource:
    """What tasks build the routing table from."""

    log: str
    snapshot: str
    members: tuple[Position, ...]
    """Per partition: what is before it is taken into account."""
    presence: tuple[Position, ...]
    inbox: Topic


def posts(events: DataFrame, source: RoutingSource) -> DataFrame:
    """The posts of events with the columns `EVENTS`, as `POSTS`."""
    fanout = placement_column("key", HASH, PARTITIONER, FANOUT_PARTITIONS)
    placed = events.select(*EVENTS, fanout.alias("fanout")).repartition("fanout").sortWithinPartitions("fanout")
    return placed.mapInArrow(_router(source), POSTS)


def _router(source: RoutingSource) -> Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def route(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        routes = None
        with blocking(source.log) as log:
            for batch in batches:
                routes = routes or Routes(source, log)  # only where there are events
                fanout = batch["fanout"].to_numpy()
                edges = [0, *(np.flatnonzero(np.diff(fanout)) + 1).tolist(), len(fanout)]
                for start, end in pairwise(edges):
                    if end > start:
                        yield routes.posts(int(fanout[start]), batch.slice(start, end - start))

    return route


class Routes:
    """The routing table of a task. It holds one fan-out partition at a time, because events come by these."""

    def __init__(self, source: RoutingSource, log: BlockingLog) -> None:
        self._source = source
        self._log = log
        self._snapshot = Snapshot.open(Path(source.snapshot))
        inbox = source.inbox
        self._table = RoutingTable(
            inbox.receiving, self._snapshot, partitioner=inbox.partitioner, hash_=inbox.hash or "fnv1a32"
        )
        self._held: int | None = None
        for q, end in enumerate(source.presence):
            self._read_presence(q, end)
            span = log.wait(log.log.span(Partition(PRESENCE, q)))
            if span.epoch == end.epoch and span.first >= end.offset:  # compacted since: who is online follows there
                self._read_presence(q, Position(span.epoch, span.end))

    def _read_presence(self, q: int, end: Position) -> None:
        for batch in self._since(Partition(PRESENCE, q), self._table.presence_offsets[q], end):
            self._table.apply_presence(q, *batch)

    def posts(self, p: int, events: pa.RecordBatch) -> pa.RecordBatch:
        """The posts of events whose channels are in a fan-out partition, as `POSTS`."""
        self._hold(p)
        reached = self._table.members_offset(p)
        flags = self._table.route(p, events["key"])
        rows, inboxes = np.nonzero(flags)
        picked = events.take(pa.array(rows))
        numbers = (picked[name].cast(pa.string()) for name in ("partition", "epoch", "offset"))
        ids = pc.binary_join_element_wise(BULK, *numbers, str(reached.offset if reached is not None else 0), ".")
        keys = pc.binary_join_element_wise(pa.scalar(POST_KEY), picked["key"], pa.scalar(b""))
        return pa.RecordBatch.from_arrays([pa.array(inboxes.astype(np.int32)), keys, ids], ["partition", "key", "id"])

    def _hold(self, p: int) -> None:
        if self._held == p:
            return
        if self._held is not None:
            self._table.drop(self._held)
        self._table.add(p, self._snapshot.partition(p))
        self._held = p
        known, end = self._table.members_offset(p), self._source.members[p]
        for batch in self._since(Partition(MEMBERS, p), known, end):
            self._table.apply_members(p, *batch)

    def _since(
        self, partition: Partition, known: Position | None, end: Position
    ) -> Iterator[tuple[pa.ChunkedArray, pa.ChunkedArray, Position]]:
        """Keys and values of the records from a position on, and where each batch of them ends."""
        start = known.offset if known is not None and known.epoch == end.epoch else 0
        if start >= end.offset:
            return
        first = self._log.wait(self._log.log.span(partition)).first
        if partition.topic == MEMBERS and first > start:
            raise InvalidCall(f"the routing snapshot is too old: {partition} was trimmed since; take a new snapshot")
        batches = scan(
            self._log.log, partition, start, end.offset, epoch=end.epoch, max_records=READ_RECORDS, max_bytes=READ_BYTES
        )
        while (batch := self._log.wait(anext(batches, None))) is not None:
            yield batch.data["key"], batch.data["value"], Position(end.epoch, batch.end)
