"""Stores what was settled of each queue in `STATES_TOPIC`, under the ownership of its slot."""

import asyncio
import logging
from typing import Protocol

from shardyard.log import Log
from shardyard.model import Fence, NotOwner, Partition, Record, RetryLater, ShardyardError
from shardyard.model.sharding import Queue
from shardyard.runtime.clock import Clock
from shardyard.sharding.ack_state import AckState

_log = logging.getLogger(__name__)

TRIM_STATES = 200
"""After so many states of a queue, the older ones are dropped."""

COUNTED_HOLES = 16
"""Up to so many parts of a queue are counted exactly."""


class Stateful(Protocol):
    """A queue as the store sees it."""

    @property
    def name(self) -> str: ...
    @property
    def partition(self) -> Partition: ...
    @property
    def state_partition(self) -> Partition: ...
    @property
    def fence(self) -> Fence: ...
    @property
    def state(self) -> AckState: ...

    def trim_before(self) -> int | None:
        """Up to which offset the log may drop messages now; None if that is not worth it yet."""

    def failed(self, error: ShardyardError) -> None:
        """Its state can't be stored any more: most often because another node owns it."""


async def load_state(log: Log, states: Partition) -> AckState | None:
    """The last state that was stored; None if there is none."""
    span = await log.span(states)
    offset, last = span.first, None
    while offset < span.end:
        batch = await log.read(states, offset)
        if records := batch.records():
            last = records[-1]
        offset = batch.end
    return None if last is None else AckState.decode(last.value, str(states))


class StateStore:
    """Stores the states of all queues of a node that have changed, together, every few milliseconds."""

    def __init__(self, log: Log, clock: Clock, *, seconds: float) -> None:
        self._log = log
        self._clock = clock
        self._seconds = seconds
        self._changed: dict[Stateful, None] = {}
        self._storing: dict[Stateful, asyncio.Lock] = {}
        self._stored: dict[Stateful, int] = {}
        """How many states were stored since the older ones were dropped."""
        self._task: asyncio.Task[None] | None = None
        self._is_retrying = False

    def changed(self, queue: Stateful) -> None:
        """Something was settled: store it soon."""
        self._changed[queue] = None
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name="states of queues")

    async def store(self, queue: Stateful) -> None:
        """Store its state now; durable on return. `Fenced` if another node owns it, `NotOwner` if it was forgotten."""
        lock = self._storing.setdefault(queue, asyncio.Lock())
        async with lock:
            if self._storing.get(queue) is not lock:
                raise NotOwner(queue.name, None)
            self._changed.pop(queue, None)
            content = queue.state.encode()
            floor = queue.state.floor
            record = Record(f"{queue.partition.index}-{floor}", None, content)
            appended = await self._log.append(queue.state_partition, [record], fence=queue.fence)
            if self._storing.get(queue) is not lock:  # it was forgotten meanwhile
                return
            self._stored[queue] = self._stored.get(queue, 0) + 1
            if self._stored[queue] >= TRIM_STATES:
                self._stored[queue] = 0
                await self._log.trim(queue.state_partition, appended.first.offset)
            if (before := queue.trim_before()) is not None:
                await self._log.trim(queue.partition, min(before, floor))

    def forget(self, queue: Stateful) -> None:
        """It is not served any more."""
        self._changed.pop(queue, None)
        self._storing.pop(queue, None)
        self._stored.pop(queue, None)

    async def close(self) -> None:
        """Store nothing more."""
        self._changed.clear()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while self._changed:
            await self._clock.sleep(self._seconds)
            queues = list(self._changed)
            outcomes = await asyncio.gather(*map(self.store, queues), return_exceptions=True)
            is_retrying = False
            for queue, outcome in zip(queues, outcomes, strict=True):
                if queue not in self._storing:  # forgotten meanwhile
                    continue
                if isinstance(outcome, RetryLater):
                    if not self._is_retrying and not is_retrying:
                        _log.warning("the acknowledgements of %s will be stored later: %s", queue.name, outcome)
                    is_retrying = True
                    self._changed[queue] = None
                elif isinstance(outcome, ShardyardError):
                    queue.failed(outcome)
                elif isinstance(outcome, BaseException):
                    _log.error("the acknowledgements of %s can't be stored", queue.name, exc_info=outcome)
                    queue.failed(ShardyardError(f"the state of {queue.name!r} can't be stored: {outcome!r}"))
            self._is_retrying = is_retrying


async def count_unsettled(log: Log, queue: Queue) -> int:
    """At most how many messages of a queue are not settled, by what is stored; 0 only if all are."""
    state = await load_state(log, queue.state_partition)
    span = await log.span(queue.partition)
    start = max(span.first, queue.first, 0 if state is None else state.floor)
    holes = []
    for settled, stop in () if state is None else state.ranges():
        if settled > start:
            holes.append((start, settled))
        start = max(start, stop)
    holes.append((start, max(start, span.end)))
    if len(holes) > COUNTED_HOLES:
        return sum(stop - start for start, stop in holes)
    return sum([await log.count(queue.partition, start, stop) for start, stop in holes])
