"""Reading one partition that a member owns, batch after batch, until it is revoked."""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from shardyard.groups.coordinator import OwnerLog
from shardyard.groups.protocol import Grant
from shardyard.model import (
    Appended,
    CommitBehind,
    CommitBeyond,
    Fence,
    Fenced,
    OffsetTrimmed,
    Partition,
    Position,
    Record,
    RetryLater,
    ShardyardError,
    Stamp,
    WrongEpoch,
    whole_number,
)
from shardyard.model.plain_batch import ReadBatch
from shardyard.runtime.clock import Clock, wait_until_set
from shardyard.runtime.interruptible import Interruptible
from shardyard.runtime.retry import Backoff, first_only, retry

if TYPE_CHECKING:
    import pyarrow as pa

_log = logging.getLogger(__name__)
T = TypeVar("T")

AHEAD_SECONDS = 0.5
"""How long a batch that was read ahead may be delivered: settings of the group take effect when it is read."""
READ_WAIT_SECONDS = 300.0
"""How long one read waits for records; longer waits take several."""
READ_BACKOFF = Backoff(first=0.05, longest=1.0)
"""While the log or the registry is out of reach."""

Start = Literal["earliest", "latest"]
"""Where a group starts on a partition that it never committed."""


class OwnedBatch:
    """Records of a partition that the member owns.

    The next batch of the partition comes when this one is committed as a whole: records of a key stay in order.
    """

    def __init__(self, reader: "PartitionReader", batch: ReadBatch) -> None:
        self._reader = reader
        self._batch = batch
        self.delivered_at: float | None = None
        """When it was delivered or resumed, on the member's monotonic clock; None while it is not in flight."""
        self.finished = asyncio.Event()
        """It was committed as a whole or abandoned, or its partition is lost."""

    @property
    def partition(self) -> Partition:
        return self._batch.partition

    @property
    def first(self) -> int:
        """The offset where the batch starts."""
        return self._batch.first

    @property
    def end(self) -> int:
        """The offset to read from next; committing it commits the whole batch."""
        return self._batch.end

    @property
    def data(self) -> "pa.Table":
        """The records as Arrow has them."""
        return self._batch.data

    @property
    def epoch(self) -> int:
        """The epoch of the ownership under which the batch was read; each owner of the partition has another one."""
        return self._reader.epoch

    @property
    def fence(self) -> Fence:
        """For what only the owner of the partition may do."""
        return self._reader.fence

    @property
    def lost(self) -> bool:
        """The partition went to another member, which processes this batch, too."""
        return self._reader.lost

    @property
    def stale(self) -> bool:
        """Not worth starting: the partition is revoked or lost."""
        return self._reader.stopping

    def __len__(self) -> int:
        return len(self._batch)

    def __repr__(self) -> str:
        return f"<OwnedBatch {self.partition}, offsets {self.first} to {self.end - 1}{', lost' * self.lost}>"

    def records(self) -> list[Record]:
        return self._batch.records()

    def offsets(self) -> Sequence[int]:
        """The offset of each record. They ascend, and may have gaps."""
        return self._batch.offsets()

    def position(self, offset: int) -> Position:
        """The position of an offset from `first` to `end`; `CommitBehind` or `CommitBeyond` for another one."""
        offset = whole_number("offset", offset, at_least=0)
        if offset < self.first:
            raise CommitBehind(self.partition, offset, self.first)
        if offset > self.end:
            raise CommitBeyond(self.partition, offset, self.end)
        return Position(self._batch.epoch, offset)

    async def commit(self, upto: int | None = None) -> None:
        """Commit that everything before `upto` (by default: the whole batch) is done. Durable when it returns.

        `Fenced` if the partition is not ours any more; then another member processes it again.
        """
        await self._reader.commit(self, self.end if upto is None else upto)

    async def append(
        self, partition: Partition, records: "Sequence[Record] | pa.RecordBatch", *, stamp: Stamp | None = None
    ) -> Appended:
        """Append to any partition of the log as the owner of this one; `Fenced` if it went to another member."""
        return await self._reader.append(partition, records, stamp)

    def defer(self) -> None:
        """Stop working on the batch for now. Until `resume` it is not in flight: its partition can be released at
        once, and it does not count as work that hangs."""
        self.delivered_at = None

    def resume(self) -> None:
        """Work on a deferred batch again."""
        self.delivered_at = self._reader.clock.monotonic()

    def abandon(self) -> None:
        """Do no more of it: the partition is released without waiting for it, and its next owner continues from what
        is committed. While the partition stays, its next batch is delivered."""
        self.finished.set()


class PartitionReader:
    """A partition from the moment it was assigned to the member until it is released or lost."""

    def __init__(
        self,
        partition: Partition,
        grant: Grant,
        log: OwnerLog,
        fence: Fence,
        commit: Callable[[Mapping[Partition, tuple[int, Position]]], Awaitable[None]],
        clock: Clock,
    ) -> None:
        """`commit` commits positions of the group, each with the epoch of its ownership."""
        self.partition = partition
        self.epoch = grant.epoch
        self.fence = fence
        self.clock = clock
        self.lost = False
        self.current: OwnedBatch | None = None
        """The batch that was delivered last."""
        self._committed = grant.committed
        self._committed_lately = False
        self._log = log
        self._commit = commit
        self._stopping = False
        self._waits = Interruptible()
        self._ahead: asyncio.Task[tuple[float, ReadBatch]] | None = None

    @property
    def stopping(self) -> bool:
        """No new batch is delivered."""
        return self._stopping

    @property
    def is_in_flight(self) -> bool:
        """Its last batch was delivered, and is neither committed as a whole nor deferred or abandoned."""
        current = self.current
        return current is not None and current.delivered_at is not None and not current.finished.is_set()

    def made_progress(self, *, others_did: bool) -> bool:
        """Whether something was committed since the last call, or there was nothing to do. A batch that was not taken
        from the queue yet counts as progress, while the member makes progress with other partitions."""
        lately, self._committed_lately = self._committed_lately, False
        idle = self.current is None or self.current.finished.is_set()
        return lately or idle or (others_did and not self.is_in_flight)

    def stop(self, *, lost: bool = False) -> None:
        """Deliver no new batch. `lost`: the partition is not ours any more, and there is nothing to finish."""
        self.lost = self.lost or lost
        self._stopping = True
        self._waits.interrupt()
        if self.lost and self.current is not None:
            self.current.finished.set()

    async def commit(self, batch: OwnedBatch, upto: int) -> None:
        position = batch.position(upto)
        self.check()
        await self._commit_position(position)
        self.committed(batch, upto)

    def committed(self, batch: OwnedBatch, upto: int) -> None:
        """Take account of a commit."""
        self._committed_lately = True
        if upto == batch.end:
            batch.finished.set()

    def check(self) -> None:
        if self.lost:
            raise Fenced(f"{self.partition} (epoch {self.epoch}) is no longer ours: it went to another member")

    async def append(
        self, partition: Partition, records: "Sequence[Record] | pa.RecordBatch", stamp: Stamp | None
    ) -> Appended:
        self.check()
        return await self._log.append(partition, records, stamp=stamp, fence=self.fence)

    async def run(
        self, deliver: Callable[[OwnedBatch], None], start: Start, max_records: int, max_bytes: int, drain: float
    ) -> None:
        """Read and deliver until stopped; then wait, up to `drain` seconds, for the batch in flight.

        While the log or the registry is out of reach, calls are retried: giving the partition up and taking it again
        under the same epoch could deliver records twice under it.
        """
        read = partial(self._read, max_records=max_records, max_bytes=max_bytes)
        try:
            if (position := await self._unless_stopped(self._retry(partial(self._open, start)))) is not None:
                await self._deliver_batches(deliver, position, read)
        finally:
            if self._ahead is not None:
                await _cancel(self._ahead)
        if self.is_in_flight and self.current is not None and not self.lost:
            finished = await wait_until_set(self.current.finished, drain, self.clock)
            if not finished:
                _log.warning("%s is released with a batch unfinished after %g s", self.partition, drain)

    async def _deliver_batches(
        self,
        deliver: Callable[[OwnedBatch], None],
        position: Position,
        read: Callable[[Position], Coroutine[Any, Any, tuple[float, ReadBatch]]],
    ) -> None:
        """Deliver batch after batch, each one when the last one was committed. The next one is read meanwhile, unless
        the last one took so long that what was read would be outdated."""
        read_ahead = True
        while not self.stopping:
            try:
                batch = await self._unless_stopped(self._next(position, read))
            except (OffsetTrimmed, WrongEpoch) as error:
                span = await self._retry(lambda: self._log.span(self.partition))
                position = Position(span.epoch, span.first)
                _log.warning("continuing from offset %d: %s", position.offset, error)
                continue
            if batch is None or self.stopping:
                break
            if not len(batch):
                position = await self._skip(batch, position)
                continue
            position = Position(batch.epoch, batch.end)
            if read_ahead:
                self._ahead = asyncio.create_task(read(position), name=f"reading {self.partition} ahead")
            current = self.current = OwnedBatch(self, batch)
            started = self.clock.monotonic()
            deliver(current)
            await self._unless_stopped(current.finished.wait())
            read_ahead = self.clock.monotonic() - started < AHEAD_SECONDS

    async def _next(
        self, position: Position, read: Callable[[Position], Coroutine[Any, Any, tuple[float, ReadBatch]]]
    ) -> ReadBatch:
        """The batch that was read ahead, if it is fresh; else it is read now."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            with contextlib.suppress(ShardyardError):  # what failed then may succeed now
                read_at, batch = await ahead
                if self.clock.monotonic() - read_at < AHEAD_SECONDS:
                    return batch
        return (await read(position))[1]

    async def _open(self, start: Start) -> Position:
        """Set the fence, so that from here on no earlier owner can read or append. Returns where to begin."""
        await self._log.set_fence(self.fence)
        return self._committed or await self._start_position(start)

    async def _skip(self, batch: ReadBatch, position: Position) -> Position:
        """Continue behind a batch without records: none was for this group, or the offsets have a gap."""
        if batch.end > position.offset:
            position = Position(batch.epoch, batch.end)
            await self._retry(partial(self._commit_position, position))
        return position

    async def _start_position(self, start: Start) -> Position:
        """Where a group starts that never committed. The end is committed at once: else the next owner would start at
        a later end, and skip what lies between."""
        span = await self._log.span(self.partition)
        if start == "earliest":
            return Position(span.epoch, span.first)
        position = Position(span.epoch, span.end)
        await self._commit_position(position)
        return position

    async def _commit_position(self, position: Position) -> None:
        await self._commit({self.partition: (self.epoch, position)})

    async def _read(self, position: Position, max_records: int, max_bytes: int) -> tuple[float, ReadBatch]:
        """When it was read, and what."""
        read = partial(
            self._log.read,
            self.partition,
            position.offset,
            epoch=position.epoch,
            max_records=max_records,
            max_bytes=max_bytes,
            wait=READ_WAIT_SECONDS,
            fence=self.fence,
        )
        batch = await self._retry(read)
        return self.clock.monotonic(), batch

    async def _retry(self, call: Callable[[], Awaitable[T]]) -> T:
        def warn(error: RetryLater) -> None:
            _log.warning("reading %s will be retried: %s", self.partition, error)

        return await retry(call, clock=self.clock, backoff=READ_BACKOFF, on_retry=first_only(warn))

    async def _unless_stopped(self, work: Awaitable[T]) -> T | None:
        """The result of `work`; None if the reader was stopped before, and then `work` is cancelled."""
        return await self._waits.run(work, at_once=self.stopping)


async def _cancel(*works: asyncio.Future[Any]) -> None:
    """Cancel what still runs and wait for its end, ignoring how it ended."""
    for work in works:
        work.cancel()
    await asyncio.gather(*works, return_exceptions=True)
