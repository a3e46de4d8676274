"""Reading records: from memory if they were just appended by this process, else from the file, and waiting for them."""

import asyncio
import sqlite3
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import cast

from shardyard.log.appending import Changes, PartitionState
from shardyard.log.batch_cache import BatchCache
from shardyard.log.requests import Outcomes, ReadRequest
from shardyard.log.sqlite import store
from shardyard.log.sqlite.known_ends import KnownEnds
from shardyard.log.sqlite.read_many import ManyReader, Reads
from shardyard.log.sqlite.snapshots import Snapshots
from shardyard.log.sqlite.tail import Tail
from shardyard.log.waiting import Looked, look_until_news, wait_at_most
from shardyard.model import Fence, Partition
from shardyard.model.batch import Batch
from shardyard.runtime.clock import Clock

Found = tuple[PartitionState, Batch]
"""The state of the partition, and what was read of it."""

RECENT_BATCHES = 16
"""Of a partition for which readers wait, kept at hand as they were appended."""
INLINE_READ_BYTES = 1024 * 1024
"""If no more than this has just arrived, a waiting read fetches it in the event loop's own thread."""


class Reading:
    """What this process knows of the partitions that it reads, and the reads themselves."""

    def __init__(self, snapshots: Snapshots, tail: Tail, known: KnownEnds, clock: Clock) -> None:
        self.cache = BatchCache()
        self.known = known
        self.tail = tail
        self.snapshots = snapshots
        self.clock = clock
        self.ends: dict[Partition, tuple[int, int]] = {}
        """The id of each partition that was read to its end, and that end: what follows was just written."""
        self._many = ManyReader(self.cache)
        self._recent: dict[Partition, deque[int]] = {}
        """The first offsets of the batches that were kept at hand for readers that waited for them."""

    async def read_many(
        self,
        requests: Sequence[ReadRequest],
        max_records: int,
        max_bytes: int,
        total_bytes: int | None,
        wait: float,
    ) -> Outcomes:
        """See `Log.read_many`."""

        reads = Reads(requests)

        def look(db: sqlite3.Connection, most: int | None = None) -> Looked | None:
            return self._many.read(db, reads, max_records, max_bytes, total_bytes, most)

        async def look_inline_if_few() -> Looked:
            few = await self.snapshots.look_inline(partial(look, most=INLINE_READ_BYTES))
            return few if few is not None else cast(Looked, await self.snapshots.look(look))

        return await look_until_news(look_inline_if_few, self.tail, wait, self.clock)

    def committed(self, changes: Changes, *, only_appends: bool) -> None:
        """Keep what was appended at hand for readers that wait for it, and wake them."""
        for partition, epoch, batch in changes.loaded:
            partition_id = self._many.ids.find(partition) or self.ends.get(partition, (0, -1))[0]
            if self.tail.is_awaited(partition_id):
                self.cache.add(partition, epoch, batch)
                recent = self._recent.setdefault(partition, deque())
                recent.append(batch.first)
                if len(recent) > RECENT_BATCHES:  # readers that wait have it: kept longer, it would only take memory
                    self.cache.drop(partition, recent.popleft())
        if only_appends and not changes.fences:
            self.known.grew(changes.ends)
        else:
            self.known.clear()
        self.tail.committed(changes.ends, only_appends=only_appends)


class PartitionRead:
    """One call of `Log.read`."""

    __slots__ = ("_epoch", "_fence", "_offset", "_partition", "_reading", "_wanted")

    def __init__(
        self,
        reading: Reading,
        partition: Partition,
        offset: int,
        epoch: int | None,
        max_records: int,
        max_bytes: int,
        fence: Fence | None,
    ) -> None:
        self._reading = reading
        self._partition = partition
        self._offset = offset
        self._epoch = epoch
        self._fence = fence
        self._wanted = (reading.cache, partition, offset, epoch, max_records, max_bytes)

    async def run(self, wait: float) -> Batch:
        """What there is now; if there is nothing, what there is after something has arrived or `wait` seconds."""
        reading = self._reading
        news, version = reading.tail.news, reading.known.version
        found, batch = await self._fetch(known_suffices=wait > 0)
        self._note(found, batch, version)  # also if it is cancelled while it waits
        if len(batch) or wait <= 0:
            return batch
        arrived = reading.tail.wait_for({found.id: self._offset}, news)
        try:
            has_arrived = await wait_at_most(arrived, wait, reading.clock)
        finally:
            arrived.cancel()
        version = reading.known.version
        found, batch = await (self._fetch_arrived(found.id) if has_arrived else reading.snapshots.look(self._find))
        self._note(found, batch, version)
        return batch

    async def _fetch(self, *, known_suffices: bool) -> Found:
        """What there is now. `known_suffices`: if memory says that there is nothing, the file is not looked at."""
        reading, partition, offset = self._reading, self._partition, self._offset
        known = reading.known.find(partition, self._fence) if known_suffices else None
        partition_id, end = reading.ends.get(partition, (0, -1))
        if known is not None and known.end == offset and self._epoch in (None, known.epoch):
            return known, Batch(partition, known.epoch, offset, ())
        if reading.cache.covers(partition, offset, *self._wanted[4:]):
            await asyncio.sleep(0)  # a reader that takes many batches in a row must not keep other tasks from running
            return await reading.snapshots.look_inline(self._find)
        if 0 <= end <= offset:
            return await self._fetch_new(partition_id)
        return await reading.snapshots.look(self._find)

    async def _fetch_arrived(self, partition_id: int) -> Found:
        """Records that have arrived: if this process has written them, the writer has just looked whether anything else
        has changed."""
        known = self._reading.known.find(self._partition, self._fence)
        batch = None if known is None else store.newest(known, *self._wanted)
        return (known, batch) if known is not None and batch else await self._fetch_new(partition_id)

    async def _fetch_new(self, partition_id: int) -> Found:
        """Records that were just written: usually by this process, so that they are at hand. Others are fetched in this
        thread if they are few."""
        snapshots = self._reading.snapshots
        found, batch = await snapshots.look_inline(self._find_newest, in_transaction=False)
        if batch is not None:
            return found, batch
        few = await snapshots.look_inline(lambda db: self._find_few(db, partition_id))
        return few if few is not None else await snapshots.look(self._find)

    def _find(self, db: sqlite3.Connection) -> Found:
        return store.read(db, *self._wanted, self._fence)

    def _find_newest(self, db: sqlite3.Connection) -> tuple[PartitionState, Batch | None]:
        found = store.find(db, self._partition, self._fence)
        return found, store.newest(found, *self._wanted)

    def _find_few(self, db: sqlite3.Connection, partition_id: int) -> Found | None:
        return self._find(db) if store.bytes_from(db, partition_id, self._offset) <= INLINE_READ_BYTES else None

    def _note(self, found: PartitionState, batch: Batch, version: int) -> None:
        if batch.end == found.end:
            self._reading.ends[self._partition] = (found.id, batch.end)
            self._reading.known.add(self._partition, found, self._fence, version)
