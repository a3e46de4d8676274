"""`ForwardingMember`: forwards what the partitions of an `OwningMember` hold, in steps over all of them."""

import asyncio
import logging
from abc import abstractmethod
from collections.abc import Awaitable, Sequence
from typing import TYPE_CHECKING

from shardyard.fanout.config import FanoutConfig
from shardyard.fanout.owning_member import RETRY_SECONDS, OwningMember
from shardyard.fanout.source import InFlight, Source
from shardyard.groups import Node
from shardyard.model import (
    Fenced,
    OffsetTrimmed,
    Partition,
    PartitionOutOfRange,
    Position,
    RetryLater,
    ShardyardError,
    UnknownTopic,
    WrongEpoch,
)
from shardyard.model.batch import Batch
from shardyard.runtime.retry import first_only

if TYPE_CHECKING:
    from shardyard.log.requests import Outcomes

_log = logging.getLogger(__name__)

READ_SECONDS = 300.0
"""How long one read waits for records."""


class ForwardingMember(OwningMember):
    """A member that takes one step after the other: a step reads the next batch of each partition that has one, and
    forwards them all together. One batch of a partition is in flight at a time, in one step or several. It is committed
    when all of it is durable. If a step fails, its batches are retried.
    """

    def __init__(
        self,
        node: Node,
        group: str,
        source: str,
        config: FanoutConfig,
        *,
        name: str | None,
        address: str | None,
        metadata: object,
        max_records: int,
        max_bytes: int,
        prepares: bool,
    ) -> None:
        """`max_records`, `max_bytes`: of a batch."""
        super().__init__(node, group, source, config, name=name, address=address, metadata=metadata, prepares=prepares)
        self._max_records, self._max_bytes = max_records, max_bytes
        self._ready: dict[Partition, InFlight] = {}
        """The batches for the next step: what it reads, the rest of earlier batches, and those that are retried."""
        self._changed = asyncio.Event()
        """There may be more to read, or ready, than when the last read began."""
        self._reading: asyncio.Task[Outcomes] | None = None

    # What a subclass does

    @abstractmethod
    async def _forward(self, step: Sequence[InFlight]) -> None:
        """Forward the rows of each batch from `start` on, or fewer; returns when they are durable, with `stop` set."""

    async def _may_step(self) -> None:
        """Returns when the next step may be taken."""

    def _continue(self, in_flight: InFlight) -> Awaitable[None] | None:  # noqa: ARG002 for subclasses
        """What a batch waits for before its next rows are forwarded."""
        return None

    # Steps

    async def _take_steps(self) -> None:
        warn = first_only(lambda error: _log.warning("reading %s will be retried: %s", self.source, error))
        while True:
            await self._may_step()
            self._changed.clear()
            try:
                await self._read()
            except RetryLater as error:
                warn(error)
                await self._clock.sleep(RETRY_SECONDS)
                continue
            if self._ready and not self.is_in_touch():  # either the partitions are lost, or it soon is again
                await self._clock.sleep(RETRY_SECONDS)
                continue
            step, self._ready = list(self._ready.values()), {}
            if step:
                await self._take_step(step)

    async def _read(self) -> None:
        """Read the next batch of each source that has one, and wait for one if no batch is ready. Ends at once when
        other sources can be read, or another batch is ready."""
        sources = {partition: source for partition, source in self._sources.items() if source.is_readable}
        if not sources:
            if not self._ready:
                await self._changed.wait()
            return
        requests = [source.next_read() for source in sources.values()]
        reading = self._reading = asyncio.create_task(
            self.node.log.read_many(
                requests,
                max_records=self._max_records,
                max_bytes=self._max_bytes,
                total_bytes=self.config.step_bytes,
                wait=0.0 if self._ready else READ_SECONDS,
            ),
            name=f"reading {self.source}",
        )
        try:
            outcomes = await reading
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            return  # interrupted
        finally:
            self._reading = None
            reading.cancel()
        for partition, outcome in outcomes.items():
            source = sources[partition]  # the partition may have been lost and assigned again meanwhile
            if source.is_readable:
                await self._receive(source, outcome)

    def _continue_with(self, source: Source) -> None:
        if source.in_flight is not None:
            source.in_flight.forwarded = source.forwarded
            self._make_ready(source.in_flight)
        self._wake()

    def _discard(self, source: Source) -> None:
        if (waiting := self._ready.get(source.partition)) is not None and waiting.source is source:
            del self._ready[source.partition]

    def _wake(self) -> None:
        """Something else can be read, or is ready for the next step."""
        self._changed.set()
        if self._reading is not None:
            self._reading.cancel()

    async def _receive(self, source: Source, outcome: Batch | ShardyardError) -> None:
        match outcome:
            case Batch() if len(outcome):
                self._sources[source.partition] = self._sources.pop(source.partition)  # the others are read first now
                self._make_ready(source.take(outcome))
            case Batch():
                if source.position is not None and outcome.end > source.position.offset:  # the offsets have a gap
                    source.position = Position(outcome.epoch, outcome.end)
                    self._commits.note(source.partition, source.epoch, source.position)
            case OffsetTrimmed() | WrongEpoch():
                _log.warning("what comes next in %s is gone: %s", source.partition, outcome)
                source.position, source.is_open = None, False
                self._spawn(self._open_source(source), f"opening {source.partition}")
            case Fenced() | UnknownTopic() | PartitionOutOfRange():
                self._give_up(source, outcome)
            case RetryLater():
                await self._clock.sleep(RETRY_SECONDS)
            case _:
                raise outcome

    def _make_ready(self, in_flight: InFlight) -> None:
        """Make a batch ready for the next step, unless it has to wait for something."""
        if in_flight.source.stopping:
            return
        if (waits_for := self._continue(in_flight)) is not None:
            self._spawn(self._make_ready_after(in_flight, waits_for), f"waiting for others with {in_flight.partition}")
            return
        self._ready[in_flight.partition] = in_flight

    async def _make_ready_after(self, in_flight: InFlight, waits_for: Awaitable[None]) -> None:
        await waits_for
        self._make_ready(in_flight)
        self._wake()

    async def _take_step(self, step: list[InFlight]) -> None:
        for in_flight in step:
            in_flight.source.idle.clear()
        try:
            await self._forward(step)
        except ShardyardError as error:
            await self._retry(step, error)
        else:
            for in_flight in step:
                self._finish(in_flight)
        finally:
            for in_flight in step:
                in_flight.source.idle.set()

    def _finish(self, in_flight: InFlight) -> None:
        """The rows up to `stop` are durable."""
        source, batch = in_flight.source, in_flight.batch
        if source.lost:
            return
        is_whole = in_flight.stop >= len(batch)
        position = Position(batch.epoch, batch.end if is_whole else batch.offsets()[in_flight.stop])
        self._commits.note(in_flight.partition, source.epoch, position)
        self._done[in_flight.partition] = position
        if is_whole:
            source.in_flight = None
        else:
            in_flight.start = in_flight.stop
            self._make_ready(in_flight)

    async def _retry(self, step: list[InFlight], error: ShardyardError) -> None:
        """A step has failed, and some of it may be stored: find out what, and retry its batches."""
        owned = [in_flight for in_flight in step if not in_flight.source.lost]
        _log.log(
            logging.INFO if isinstance(error, Fenced) else logging.WARNING,
            "a step over %d partitions failed, of which %d are retried: %s",
            len(step),
            len(owned),
            error,
        )
        await self._clock.sleep(RETRY_SECONDS)
        for in_flight in owned:
            in_flight.source.is_open = False
            self._spawn(self._open_source(in_flight.source), f"recovering {in_flight.partition}")
