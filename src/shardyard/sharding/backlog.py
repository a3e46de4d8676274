"""The backlog of an exchange: the messages of several queues that were not settled, in an order that keeps that of each
routing key."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from shardyard.log import Log
from shardyard.model import Record
from shardyard.model.sharding import Queue
from shardyard.sharding.ack_state import AckState
from shardyard.sharding.messages import version_of
from shardyard.sharding.state_store import load_state

READ_BYTES = 1024 * 1024
"""Of each queue, as much is in memory at a time."""


@dataclass(frozen=True, slots=True)
class Unsettled:
    """A message of the backlog."""

    record: Record
    version: int
    """Of the topology by which it, or one before it in the same queue, was routed."""
    failures: int
    """How many deliveries of it have failed."""


async def backlog(log: Log, ends: dict[Queue, int]) -> AsyncIterator[list[Unsettled]]:
    """The unsettled messages of these queues before the given offsets, a run of them at a time.

    They come in the order of (version of the topology, slot, offset). Under one version the messages of a key went to
    one queue, so those of a key come in the order in which they were published.
    """
    sources = [_Source(log, queue, end) for queue, end in ends.items()]
    for source in sources:
        await source.read()
    while heads := [source for source in sources if source.waiting]:
        first = min(heads, key=lambda source: (source.waiting[0].version, source.slot))
        yield first.take(first.waiting[0].version)
        if not first.waiting:
            await first.read()


class _Source:
    """The unsettled messages of one queue."""

    def __init__(self, log: Log, queue: Queue, end: int) -> None:
        self.slot = queue.slot
        self.waiting: list[Unsettled] = []
        self._log = log
        self._queue = queue
        self._end = end
        self._offset = 0
        self._version = 0
        self._state: AckState | None = None

    def take(self, version: int) -> list[Unsettled]:
        """The messages that come first and have this version."""
        count = next((i for i, each in enumerate(self.waiting) if each.version != version), len(self.waiting))
        taken, self.waiting = self.waiting[:count], self.waiting[count:]
        return taken

    async def read(self) -> None:
        """Read on, until there are messages or it is at the end."""
        if self._state is None:
            self._state = await self._load()
            self._offset = self._state.floor
        while not self.waiting and self._offset < self._end:
            batch = await self._log.read(self._queue.partition, self._offset, max_bytes=READ_BYTES)
            self._add(list(batch.offsets()), batch.records())
            self._offset = batch.end

    async def _load(self) -> AckState:
        state = await load_state(self._log, self._queue.state_partition)
        span = await self._log.span(self._queue.partition)
        state = state or AckState(span.first, span.first)
        state.trimmed(max(span.first, min(self._queue.first, span.end)))
        return state

    def _add(self, offsets: Sequence[int], records: Sequence[Record]) -> None:
        assert self._state is not None  # noqa: S101 it was loaded
        state = self._state
        for offset, record in zip(offsets, records, strict=True):
            if offset < self._end and not state.is_settled(offset):
                self._version = max(self._version, version_of(record))
                was_delivered = offset < state.end  # and neither settled nor given back, so its delivery has failed
                failures = state.counts.get(offset, int(was_delivered))
                self.waiting.append(Unsettled(record, self._version, failures))
