"""`ShardQueue`: a queue as its owner serves it."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from shardyard.log import Log
from shardyard.model import Fence, NotOwner, Partition, ShardyardError
from shardyard.model.sharding import Overflow, Queue, QueueLimits
from shardyard.runtime.clock import Clock, SystemClock, wait_until_set
from shardyard.runtime.retry import Backoff, first_only, retry
from shardyard.sharding.ack_state import AckState
from shardyard.sharding.config import DEFAULT_CONFIG, ShardingConfig
from shardyard.sharding.dead_letters import DeadLetterSink
from shardyard.sharding.delivery import Deliveries, Ended, Receiver, Subscription
from shardyard.sharding.dispatcher import Dispatcher
from shardyard.sharding.in_flight import InFlight
from shardyard.sharding.limits import LimitKeeper
from shardyard.sharding.messages import version_of
from shardyard.sharding.read_ahead import ReadAhead
from shardyard.sharding.settling import Settling
from shardyard.sharding.state_store import StateStore, load_state

_log = logging.getLogger(__name__)
T = TypeVar("T")

BACKOFF = Backoff(first=0.02, longest=0.5)
IsCurrent = Callable[[Queue, int | None], Awaitable[bool]]
"""Whether a queue is in its slot, by a topology of at least this version; None for what the registry says now."""


@dataclass(frozen=True, slots=True)
class QueueStatus:
    """What a queue holds, and who consumes it."""

    ready: int
    """Messages that wait for delivery; never fewer than there are."""
    unacked: int
    """Messages that were delivered and are not settled."""
    consumers: int


class ShardQueue:
    """Delivers the messages of one queue to its subscriptions, under one ownership.

    Everything happens in one event loop. Messages are handled in batches: one task reads the log, and deliveries and
    acknowledgements are plain calls. A node that has lost its ownership finds out when it reads, or stores what was
    settled: then `lost` is called. What was acknowledged since the last store is delivered again by the next owner.
    """

    def __init__(
        self,
        queue: Queue,
        fence: Fence,
        log: Log,
        states: StateStore,
        dead_letters: DeadLetterSink,
        *,
        clock: Clock | None = None,
        config: ShardingConfig = DEFAULT_CONFIG,
        is_in_touch: Callable[[], bool] = lambda: True,
        is_current: IsCurrent | None = None,
        is_frozen: bool = False,
        lost: Callable[["ShardQueue", BaseException], None] | None = None,
    ) -> None:
        """`fence`: of the ownership. `is_in_touch`: whether nobody else can own the queue yet. `is_current`: by
        default, the slot is never given to another queue. `is_frozen`: it is frozen from the beginning."""
        self.queue = queue
        self.fence = fence
        self._log = log
        self._states = states
        self._dead_letters = dead_letters
        self._clock = clock or SystemClock()
        self._config = config
        self._is_in_touch = is_in_touch
        self._is_current = is_current
        self._lost = lost
        self._continue_from(AckState(), doubtful=0)
        self._mark_lock = asyncio.Lock()
        self._marking: asyncio.Task[None] | None = None
        self._is_open = False
        self._is_frozen = is_frozen
        self._is_closing = False
        self._trimmed = 0
        self._current_at = -1
        """The queue was in its slot by a topology of at least this version."""
        self._reading: asyncio.Task[None] | None = None

    def _continue_from(self, state: AckState, *, doubtful: int) -> None:
        """`doubtful`: what lies before this offset may have been delivered by an earlier owner."""
        self.state = state
        self._ahead = ReadAhead(self._log, self.partition, self.fence, state, self._config)
        self._in_flight = InFlight(self._config)
        self._settling = Settling(
            *(self.queue, state, self._ahead.ready, self._in_flight, self._dead_letters, self._clock),
            changed=self._changed,
            failed=self.failed,
        )
        self._limits = LimitKeeper(self.queue, self._ahead, self._clock, self._settling.drop)
        self._dispatcher = Dispatcher(
            *(state, self._ahead, self._in_flight, self._limits, self._settling, self._config),
            is_in_touch=self._is_in_touch,
            doubtful=doubtful,
        )

    # What it is

    @property
    def name(self) -> str:
        return self.queue.name

    @property
    def partition(self) -> Partition:
        return self.queue.partition

    @property
    def state_partition(self) -> Partition:
        return self.queue.state_partition

    @property
    def limits(self) -> QueueLimits:
        return self.queue.limits

    @property
    def is_open(self) -> bool:
        """Whether it is served here."""
        return self._is_open and not self._is_closing

    @property
    def unacked(self) -> int:
        """How many messages were delivered and are not settled."""
        return len(self._in_flight)

    async def status(self) -> QueueStatus:
        """Its numbers now."""
        self._check_open()
        return QueueStatus(await self._ahead.count(), len(self._in_flight), len(self._dispatcher.subscriptions))

    async def drained_before(self) -> int | None:
        """The end of the queue, if everything before it is settled; None otherwise."""
        self._check_open()
        end = await self._retry(self._ahead.look)
        is_empty = not len(self._in_flight) and not len(self._ahead.ready) and self._ahead.position >= end
        return end if is_empty else None

    def update(self, queue: Queue) -> None:
        """Its row in the topology has changed: it has other limits, or is draining."""
        if queue.limits != self.limits:
            self._states.changed(self)  # publishers may count what is stored from now on: drop what was settled
        self.queue = self._limits.queue = self._settling.queue = queue
        self._dispatcher.wanted.set()
        self.dispatch_soon()

    # Serving it

    async def open(self) -> None:
        """Take it over: earlier owners can't store anything any more, and delivery continues where they stopped."""
        await self._retry(lambda: self._log.set_fence(self.fence))
        state = await self._retry(lambda: load_state(self._log, self.state_partition))
        span = await self._retry(lambda: self._log.span(self.partition))
        state = state or AckState(span.first, span.first)
        state.trimmed(max(span.first, min(self.queue.first, span.end)))
        self._continue_from(state, doubtful=state.end if state.is_clean else span.end)
        self._dispatcher.may_deliver = not state.is_clean
        self._trimmed = span.first
        self._is_open = True
        if self._is_frozen:
            return
        self._dispatcher.start()
        self._reading = asyncio.create_task(self._until_lost(self._read), name=f"queue {self.name}")

    async def close(self, *, clean: bool = True) -> None:
        """Serve it no more. `clean`: store the state first, so that its next owner continues exactly here; deliveries
        that are not settled come again. Otherwise it ends as if the process had died."""
        if self._is_closing:
            return
        self._is_closing = True
        self._dispatcher.stop()
        self._end_subscriptions()
        for task in (self._reading, self._marking):
            if task is not None and task is not asyncio.current_task():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        try:
            await self._settling.close(self._config.close_seconds if clean else 0.0)
            if clean and self._is_open:
                self.state.is_clean = True
                deadline = self._clock.monotonic() + self._config.close_seconds
                await retry(lambda: self._states.store(self), clock=self._clock, deadline=deadline, backoff=BACKOFF)
        finally:
            self._is_open = False
            self._states.forget(self)
            self._ahead.ready.clear()
            self._in_flight.clear()

    @property
    def is_frozen(self) -> bool:
        """Whether it was frozen: it delivers nothing more, and leaves its messages as they are."""
        return self._is_frozen

    async def freeze(self, seconds: float) -> int:
        """Deliver nothing more, wait for up to `seconds` until all deliveries are settled, then end all subscriptions
        and store the state, which is final. Returns how many are not settled. Only `close`, or the same again, can
        follow."""
        if not self.is_open:
            raise NotOwner(self.name, None)
        if not self._is_frozen:
            self._is_frozen = True
            self._dispatcher.stop()
            if self._reading is not None:
                self._reading.cancel()
            await self._in_flight.wait_until_empty(seconds, self._clock)
        self._end_subscriptions()
        await self._settling.close(0.0)  # what could not be stored in time stays in the queue
        await self._retry(lambda: self._states.store(self))
        return len(self._in_flight)

    # Consuming

    def subscribe(
        self, receiver: Receiver, *, prefetch: int = 0, no_ack: bool = False, ended: Ended | None = None
    ) -> Subscription:
        """Deliver messages to `receiver` from now on. `prefetch`: how many may be unsettled; 0 for as many as the queue
        allows. `no_ack`: messages are done as soon as they are delivered. `ended` is called when this node does not
        serve the queue any more."""
        self._check_open()
        subscription = Subscription(self, prefetch=prefetch, no_ack=no_ack, ended=ended)
        self._dispatcher.subscribe(subscription, receiver)
        if not self._dispatcher.may_deliver and self._marking is None:
            self._marking = asyncio.create_task(self._until_lost(self._mark_delivering), name=f"start of {self.name}")
        return subscription

    def getter(self, ended: Ended | None = None) -> Subscription:
        """A holder for messages that are fetched by `get` and settled later."""
        self._check_open()
        holder = Subscription(self, prefetch=0, no_ack=False, ended=ended)
        self._dispatcher.hold(holder)
        return holder

    async def get(self, holder: Subscription | None = None) -> Deliveries | None:
        """The next message; None if there is none. `holder` settles it; without one it is done."""
        self._check_open()
        await self._mark_delivering()
        self._check_may_deliver()
        ready = self._ahead.ready
        self._limits.drop_expired()
        while not len(ready):
            has_read = await self._read_on(0.0)
            self._check_may_deliver()
            if not has_read and not len(ready):
                return None
            self._limits.drop_expired()
        if holder is None:
            holder = Subscription(self, prefetch=0, no_ack=True, ended=None)
        return self._dispatcher.hand_over(holder, *ready.take(1))

    async def purge(self) -> int:
        """Drop all messages that wait for delivery; durable on return. Returns how many, and never fewer."""
        self._check_open()
        dropped = await self._retry(self._ahead.count)
        end = self._ahead.end
        await self._check_current(None)  # what was counted is of this queue
        self._check_open()
        self._ahead.drop_all(end)
        await self._retry(lambda: self._states.store(self))
        return dropped

    # For subscriptions

    def settle(self, offsets: Sequence[int]) -> None:
        self._settling.acknowledge(offsets)

    def give_back(self, offsets: Sequence[int], *, failed: bool = True) -> None:
        self._settling.give_back(offsets, failed=failed)

    def reject(self, offsets: Sequence[int]) -> None:
        self._settling.reject(offsets)
        self.dispatch_soon()

    def dispatch_soon(self) -> None:
        self._dispatcher.dispatch_soon()

    def remove(self, subscription: Subscription) -> None:
        self._dispatcher.subscriptions.pop(subscription, None)

    # For the store of states

    def trim_before(self) -> int | None:
        floor, limits = self.state.floor, self.limits
        is_counted = limits.max_length is not None and limits.overflow is Overflow.REJECT_PUBLISH
        enough = 1 if is_counted or self._is_closing else self._config.trim_records
        if floor - self._trimmed < enough:
            return None
        self._trimmed = floor
        return floor

    def failed(self, error: BaseException) -> None:
        """It can't be served any more."""
        if self.is_open and self._lost is not None:
            self._lost(self, error)

    # Reading

    async def _until_lost(self, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
        except ShardyardError as error:
            _log.info("queue %s is not served here any more: %s", self.name, error)
            self.failed(error)
        except Exception as error:  # noqa: BLE001 nobody awaits this
            _log.exception("queue %s can't be read", self.name)
            self.failed(error)

    async def _read(self) -> None:
        """Read the log as long as there is room, and somebody takes messages or limits have to be kept."""
        ahead, dispatcher = self._ahead, self._dispatcher
        while True:
            pause = self._limits.pause(is_holding=len(self._in_flight) > 0)
            await wait_until_set(dispatcher.wanted, pause, self._clock)
            if ahead.has_room and dispatcher.wanted.is_set():
                await self._read_on(pause)
            if dispatcher.subscriptions and not dispatcher.may_deliver:
                await self._mark_delivering()
            dispatcher.dispatch()
            if self._limits.counts_all and self._is_in_touch():
                await self._retry(ahead.look)
                self._limits.drop_head()
                dispatcher.note_wanted()

    async def _read_on(self, wait: float) -> bool:
        """Read what comes next in the log. Returns whether there was something.

        The messages of different queues in a slot follow each other, and each was routed by a topology that has its
        queue: so the last one tells whether all are of this queue.
        """
        batch = await self._retry(lambda: self._ahead.read(wait))
        records = batch.records()
        if records and (version := version_of(records[-1])) > self._current_at:
            await self._check_current(version)
            self._current_at = version
        return self._ahead.take_in(batch, records)

    async def _check_current(self, version: int | None) -> None:
        """`NotOwner` if the slot was given to another queue, which a node may learn late."""
        is_current = self._is_current
        if is_current is not None and not await self._retry(lambda: is_current(self.queue, version)):
            raise NotOwner(self.name, None)

    # Small things

    def _end_subscriptions(self) -> None:
        self._dispatcher.end_subscriptions(NotOwner(self.name, None))

    def _changed(self) -> None:
        """Something was settled, or is delivered again."""
        self._states.changed(self)
        self._dispatcher.dispatch_soon()

    async def _mark_delivering(self) -> None:
        """Store that messages are delivered from now on, before the first one is."""
        if self._dispatcher.may_deliver:
            return
        async with self._mark_lock:
            if not self._dispatcher.may_deliver:
                self.state.is_clean = False
                await self._retry(lambda: self._states.store(self))
                self._dispatcher.may_deliver = True
        self.dispatch_soon()

    def _check_open(self) -> None:
        if not self.is_open or self._is_frozen:
            raise NotOwner(self.name, None)

    def _check_may_deliver(self) -> None:
        self._check_open()
        if not self._is_in_touch():  # another node may serve it by now
            raise NotOwner(self.name, None)

    async def _retry(self, call: Callable[[], Awaitable[T]]) -> T:
        warn = first_only(lambda error: _log.warning("queue %s waits for the log: %s", self.name, error))
        return await retry(call, clock=self._clock, backoff=BACKOFF, on_retry=warn)
