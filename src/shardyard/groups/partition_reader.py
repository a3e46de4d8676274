"""One partition in a member's hands: reading it on, batch after batch, until it has to be given up."""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from typing import Any, Literal, TypeVar

import pyarrow as pa

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
    ShardyardError,
    Stamp,
    WrongEpoch,
    whole_number,
)
from shardyard.model.batch import Batch
from shardyard.runtime.clock import Clock, SystemClock

_log = logging.getLogger(__name__)
T = TypeVar("T")

_SYSTEM_CLOCK = SystemClock()
AHEAD_SECONDS = 0.5
"""How long a batch that was read while the one before was in hand is good for: what is set on a group has its effect on
reading."""
READ_WAIT_SECONDS = 30.0
"""How long one read waits for records; longer waits are made of several."""

Start = Literal["earliest", "latest"]
"""Where a group begins on a partition that it never committed."""


class OwnedBatch:
    """Records of a partition that the member owns.

    The partition's next batch comes when this one is committed as a whole: records of a key stay in order.
    """

    def __init__(self, claim: "PartitionReader", batch: Batch) -> None:
        self._claim = claim
        self._batch = batch
        self.delivered_at: float | None = None
        """When the member handed it out, on its own clock."""
        self.finished = asyncio.Event()

    def defer(self) -> None:
        """Stop working on the batch for now. Until `resume` it is not in flight: its partition can be released at
        once, and it does not count as work that hangs."""
        self.delivered_at = None

    def resume(self) -> None:
        """Work on a deferred batch again."""
        self.delivered_at = self._claim.clock.monotonic()

    def abandon(self) -> None:
        """Do no more of it: the partition is released without waiting for it, and its next owner continues from what
        is committed. While the partition stays, its next batch is delivered."""
        self.finished.set()

    @property
    def partition(self) -> Partition:
        return self._batch.partition

    @property
    def first(self) -> int:
        """The offset of the first record."""
        return self._batch.first

    @property
    def end(self) -> int:
        """The offset behind the last record."""
        return self._batch.end

    @property
    def data(self) -> pa.Table:
        """The records as Arrow has them."""
        return self._batch.data

    @property
    def epoch(self) -> int:
        """The epoch of the ownership under which the batch was read; each owner of the partition has another one."""
        return self._claim.epoch

    @property
    def fence(self) -> Fence:
        """For what is to be done as the owner, and only as the owner."""
        return self._claim.fence

    @property
    def lost(self) -> bool:
        """The partition has gone to another member: what is done now, the other one does too."""
        return self._claim.lost

    @property
    def stale(self) -> bool:
        """Not worth beginning: the partition is about to go, or gone."""
        return self._claim.stopping

    def __len__(self) -> int:
        return len(self._batch)

    def __repr__(self) -> str:
        return f"<OwnedBatch {self.partition}, offsets {self.first} to {self.end - 1}{', lost' * self.lost}>"

    def records(self) -> list[Record]:
        return self._batch.records()

    def offsets(self) -> Sequence[int]:
        """The offset of each record; some may be left out."""
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
        """Note that everything before `upto` (by default: the whole batch) is done. Durable when it returns.

        `Fenced` if the partition is no longer ours; then another member has it, or will do it again.
        """
        await self._claim.commit(self, self.end if upto is None else upto)

    async def append(
        self, partition: Partition, records: Sequence[Record] | pa.RecordBatch, *, stamp: Stamp | None = None
    ) -> Appended:
        """Append to any partition of the log as the owner of this one; `Fenced` if it has gone to another member."""
        return await self._claim.append(partition, records, stamp)


class PartitionReader:
    """A partition from the moment it was given to the member until it is released or lost."""

    def __init__(
        self,
        partition: Partition,
        holding: Grant,
        log: OwnerLog,
        fence: Fence,
        note: Callable[["PartitionReader", Position], Awaitable[None]],
        clock: Clock = _SYSTEM_CLOCK,
    ) -> None:
        """`note` commits a position in the registry."""
        self.clock = clock
        self.partition = partition
        self.epoch = holding.epoch
        self.lost = False
        self.current: OwnedBatch | None = None
        self._committed = holding.committed
        self._committed_lately = False
        self._log = log
        self.fence = fence
        self._note = note
        self._stop = asyncio.Event()
        self._ahead: asyncio.Task[tuple[float, Batch]] | None = None

    @property
    def stopping(self) -> bool:
        """No new batch is begun."""
        return self._stop.is_set()

    @property
    def in_hand(self) -> bool:
        """Somebody has a batch of it, and has not committed all of it."""
        current = self.current
        return current is not None and current.delivered_at is not None and not current.finished.is_set()

    def got_ahead(self, *, others_did: bool) -> bool:
        """Whether something was committed since this was last asked, or there was nothing to do; also while a batch
        waits for its turn, as long as the member gets ahead with others."""
        lately, self._committed_lately = self._committed_lately, False
        idle = self.current is None or self.current.finished.is_set()
        return lately or idle or (others_did and not self.in_hand)

    def stop(self, *, lost: bool = False) -> None:
        """Begin no new batch; `lost`: it is not ours any more, and there is nothing to finish."""
        self.lost = self.lost or lost
        self._stop.set()
        if self.lost and self.current is not None:
            self.current.finished.set()

    async def commit(self, batch: OwnedBatch, upto: int) -> None:
        position = batch.position(upto)
        self.check()
        await self._note(self, position)
        self.committed(batch, upto)

    def committed(self, batch: OwnedBatch, upto: int) -> None:
        """Take note of a commit."""
        self._committed_lately = True
        if upto == batch.end:
            batch.finished.set()

    def check(self) -> None:
        if self.lost:
            raise Fenced(f"{self.partition} (epoch {self.epoch}) is no longer ours: another member has it, or will")

    async def append(
        self, partition: Partition, records: Sequence[Record] | pa.RecordBatch, stamp: Stamp | None
    ) -> Appended:
        self.check()
        return await self._log.append(partition, records, stamp=stamp, fence=self.fence)

    async def serve(
        self, deliver: Callable[[OwnedBatch], None], start: Start, max_records: int, max_bytes: int, drain: float
    ) -> None:
        """Read and deliver until stopped; then wait, up to `drain` seconds, for the batch that is in hand."""
        await self._log.set_fence(self.fence)  # from here on no earlier owner can read or append
        position = self._committed or await self._begin(start)
        read = partial(self._read, max_records=max_records, max_bytes=max_bytes)
        try:
            await self._deliver_on(deliver, position, read)
        finally:
            if self._ahead is not None:
                await _end(self._ahead)
        if self.in_hand and self.current is not None and not self.lost:
            try:
                async with asyncio.timeout(drain):
                    await self.current.finished.wait()
            except TimeoutError:
                _log.warning("%s is given up with a batch unfinished after %g s", self.partition, drain)

    async def _deliver_on(
        self,
        deliver: Callable[[OwnedBatch], None],
        position: Position,
        read: Callable[[Position], Coroutine[Any, Any, tuple[float, Batch]]],
    ) -> None:
        """Deliver batch after batch, the next one when the last one was committed. It is read meanwhile, unless the
        last one took so long that it would be read in vain."""
        loop = asyncio.get_running_loop()
        quick = True
        while not self.stopping:
            try:
                batch = await self._unless_stopped(self._next(position, read))
            except (OffsetTrimmed, WrongEpoch) as error:
                span = await self._log.span(self.partition)
                position = Position(span.epoch, span.first)
                _log.warning("going on from offset %d: %s", position.offset, error)
                continue
            if batch is None or self.stopping:
                break
            if not len(batch):
                position = await self._pass_over(batch, position)
                continue
            position = Position(batch.epoch, batch.end)
            if quick:
                self._ahead = asyncio.create_task(read(position), name=f"reading {self.partition} ahead")
            current = self.current = OwnedBatch(self, batch)
            began = loop.time()
            deliver(current)
            await self._unless_stopped(current.finished.wait())
            quick = loop.time() - began < AHEAD_SECONDS

    async def _next(
        self, position: Position, read: Callable[[Position], Coroutine[Any, Any, tuple[float, Batch]]]
    ) -> Batch:
        """What was read ahead, if it is fresh."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            with contextlib.suppress(ShardyardError):  # what went wrong then may go well now
                read_at, batch = await ahead
                if asyncio.get_running_loop().time() - read_at < AHEAD_SECONDS:
                    return batch
        return (await read(position))[1]

    async def _pass_over(self, batch: Batch, position: Position) -> Position:
        """Go on behind records of which none was meant for this group."""
        if batch.end > position.offset:
            position = Position(batch.epoch, batch.end)
            await self._note(self, position)
        return position

    async def _begin(self, start: Start) -> Position:
        """Where a group begins that never committed. The end of today is noted: else the next owner would begin at the
        end of tomorrow, and skip what lies between."""
        span = await self._log.span(self.partition)
        if start == "earliest":
            return Position(span.epoch, span.first)
        position = Position(span.epoch, span.end)
        await self._note(self, position)
        return position

    async def _read(self, position: Position, max_records: int, max_bytes: int) -> tuple[float, Batch]:
        """When, and what."""
        batch = await self._log.read(
            self.partition,
            position.offset,
            epoch=position.epoch,
            max_records=max_records,
            max_bytes=max_bytes,
            wait=READ_WAIT_SECONDS,
            fence=self.fence,
        )
        return asyncio.get_running_loop().time(), batch

    async def _unless_stopped(self, work: Awaitable[T]) -> T | None:
        """The result of `work`; None if the claim was stopped before, and then it is over."""
        task = asyncio.ensure_future(work)
        stop = asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait([task, stop], return_when=asyncio.FIRST_COMPLETED)
            return task.result() if task.done() else None
        finally:
            await _end(stop, task)


async def _end(*works: asyncio.Future[Any]) -> None:
    """Cancel what still runs and wait for its end; what became of it nobody wants to know."""
    for work in works:
        work.cancel()
    await asyncio.gather(*works, return_exceptions=True)
