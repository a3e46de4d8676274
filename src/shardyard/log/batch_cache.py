"""Stored batches that are kept decoded, for readers that take a few records at a time out of large batches."""

import threading
from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict
from dataclasses import dataclass, field

import pyarrow as pa

from shardyard.log.stored_batches import LoadedBatch
from shardyard.model import Partition

CACHE_BYTES = 32 * 1024 * 1024
"""The most that the cache of one log holds. The batches that were not used for longest are dropped first."""
_BATCH_BYTES = 2048
"""What a batch takes in memory on top of its stored bytes, about."""
_RECORD_BYTES = 300
"""What a record takes in memory on top of that, if it is a Python object."""


@dataclass(slots=True)
class _Cached:
    """The batches of one partition. They do not overlap."""

    epoch: int
    firsts: list[int] = field(default_factory=list)
    """Their first offsets, in order."""


class BatchCache:
    """Batches by the position of their records: partition, epoch and offset. Safe to use from several threads.

    What is stored at a position never changes, so a cached batch stays right when the stored one is merged, trimmed or
    deleted meanwhile. Whether a position still exists is not known here: the caller checks that first, on each read.
    """

    def __init__(self, most_bytes: int = CACHE_BYTES) -> None:
        self._most_bytes = most_bytes
        self._partitions: dict[Partition, _Cached] = {}
        self._batches: OrderedDict[tuple[Partition, int], LoadedBatch] = OrderedDict()
        """By partition and first offset, the one that was not used for longest at the beginning."""
        self._lock = threading.Lock()
        self.bytes = 0
        """What the cached batches take in memory."""

    def find(self, partition: Partition, epoch: int, offset: int) -> LoadedBatch | None:
        """The batch that has this position, if it is cached."""
        with self._lock:
            cached = self._partitions.get(partition)
            return self._find(partition, offset) if cached is not None and cached.epoch == epoch else None

    def covers(self, partition: Partition, offset: int, max_records: int, max_bytes: int) -> bool:
        """Whether a read with these limits needs no other batch than one that is cached, if it is of the epoch that was
        cached last."""
        with self._lock:
            batch = self._find(partition, offset)
        if batch is None:
            return False
        left = batch.end - offset
        return max_records <= left or max_bytes * len(batch) // batch.size < left

    def add(self, partition: Partition, epoch: int, batch: LoadedBatch) -> None:
        """Keep a batch, in place of those that were merged into it."""
        size = _memory(batch)
        if size > self._most_bytes:
            return
        with self._lock:
            if self._batches.get((partition, batch.first)) is batch:
                return
            cached = self._partitions.get(partition)
            if cached is not None and cached.epoch > epoch:
                return  # the topic was deleted and created again since this batch was read
            for first in self._replaced(partition, epoch, batch):
                self._drop(partition, first)
            while self.bytes + size > self._most_bytes:
                self._drop(*next(iter(self._batches)))
            self._batches[partition, batch.first] = batch
            self.bytes += size
            insort(self._partitions.setdefault(partition, _Cached(epoch)).firsts, batch.first)

    def drop(self, partition: Partition, first: int) -> None:
        """Keep the batch that begins at this offset no longer."""
        with self._lock:
            if (partition, first) in self._batches:
                self._drop(partition, first)

    def clear(self) -> None:
        """Drop everything: the database may have lost what was read from it, and store something else there."""
        with self._lock:
            self._partitions.clear()
            self._batches.clear()
            self.bytes = 0

    def _replaced(self, partition: Partition, epoch: int, batch: LoadedBatch) -> list[int]:
        """The first offsets of the batches that `batch` overlaps, or of all if they are of an older epoch."""
        cached = self._partitions.get(partition)
        if cached is None:
            return []
        if cached.epoch < epoch:
            return cached.firsts.copy()
        overlapped = cached.firsts[bisect_left(cached.firsts, batch.first) : bisect_left(cached.firsts, batch.end)]
        before = self._find(partition, batch.first)
        return overlapped if before is None or before.first in overlapped else [before.first, *overlapped]

    def _find(self, partition: Partition, offset: int) -> LoadedBatch | None:
        cached = self._partitions.get(partition)
        at = bisect_right(cached.firsts, offset) if cached is not None else 0
        if cached is None or not at:
            return None
        key = (partition, cached.firsts[at - 1])
        batch = self._batches[key]
        if batch.end <= offset:
            return None
        self._batches.move_to_end(key)
        return batch

    def _drop(self, partition: Partition, first: int) -> None:
        self.bytes -= _memory(self._batches.pop((partition, first)))
        firsts = self._partitions[partition].firsts
        del firsts[bisect_left(firsts, first)]
        if not firsts:
            del self._partitions[partition]


def _memory(batch: LoadedBatch) -> int:
    """What a batch takes in memory, about."""
    objects = 0 if isinstance(batch.content, pa.RecordBatch) else len(batch)
    return batch.size + _BATCH_BYTES + objects * _RECORD_BYTES
