"""A consumer: it follows the queues that it is attached to, and their owners."""

import asyncio
import contextlib
import logging
from collections import deque
from types import TracebackType
from typing import TYPE_CHECKING, Self

from shardyard.client.brokers import BACKOFF
from shardyard.client.sharding.api import Consumer
from shardyard.client.sharding.feed import Feed
from shardyard.client.sharding.message import DeliveredMessage
from shardyard.model import NotOwner, RetryLater, UnknownQueue
from shardyard.wire import sharding_frames as frames
from shardyard.wire.errors import error_of

if TYPE_CHECKING:
    from shardyard.client.sharding.channel import ShardingChannel

_log = logging.getLogger(__name__)

TURN_MESSAGES = 100
"""About so many messages are handed to the program before other tasks of the event loop run. The acknowledgements of
small deliveries, which came together, travel together then."""


class ShardingConsumer(Consumer):
    """Messages of the queues that a node attaches it to. It reconnects and subscribes again by itself: what was not
    acknowledged comes again then. Errors that retrying does not help against end the iteration."""

    def __init__(self, channel: "ShardingChannel", name: str, *, local: bool, no_ack: bool) -> None:
        self.name = name
        self._channel = channel
        self._nodes = channel.nodes
        self._call = frames.Consume(name, local)
        self._no_ack = no_ack
        self._attached: dict[str, str | None] = {}
        """The queues to read, with the addresses of their owners."""
        self._is_attached = False
        """Since it was last connected to a home node."""
        self._changed = asyncio.Event()
        """Set, and replaced, whenever they change."""
        self._readers: dict[str, asyncio.Task[None]] = {}
        self._feeds: set[Feed] = set()
        """Those that are not done, and perhaps some that are."""
        self._batches: deque[tuple[Feed, frames.Deliveries]] = deque()
        """Deliveries that the program has not taken yet, and where in the first of them it is."""
        self._at = 0
        self._taken = 0
        """How many messages the program has taken without a pause."""
        self._wake = asyncio.Event()
        self._following: asyncio.Task[None] | None = None
        self._error: Exception | None = None
        self._is_closed = False

    # What the program uses

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> DeliveredMessage:
        if self._following is None and not self._is_closed:
            self._following = asyncio.create_task(self._follow(), name=f"consumer of {self.name}")
        while True:
            while self._batches:
                feed, deliveries = self._batches[0]
                if (feed.is_lost and not feed.no_ack) or self._at == len(deliveries):
                    self._batches.popleft()
                    self._at = 0
                    self._taken += len(deliveries)
                    if self._taken >= TURN_MESSAGES:
                        self._taken = 0
                        await asyncio.sleep(0)  # let acknowledgements be sent, and other tasks run
                    continue
                self._at += 1
                return self._channel.hand_over(feed, deliveries, self._at - 1)
            if self._error is not None:
                raise self._error
            if self._is_closed:
                raise StopAsyncIteration
            self._taken = 0
            self._wake.clear()
            await self._wake.wait()

    async def close(self) -> None:
        """End it. What the program has not taken goes back to its queue; the rest can still be acknowledged."""
        if self._is_closed:
            return
        self._is_closed = True
        tasks = [*self._readers.values(), *(() if self._following is None else (self._following,))]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for feed in self._feeds:
            feed.cancel()
        with contextlib.suppress(TimeoutError):  # then the node has gone, or hangs
            async with asyncio.timeout(self._nodes.response_seconds):
                for feed in self._feeds:
                    await feed.ended.wait()
        self._return_untaken()
        self._wake.set()

    def _return_untaken(self) -> None:
        for feed, deliveries in self._batches:
            untaken, self._at = deliveries.tags[self._at :], 0
            feed.settle(untaken, "return")
        self._batches.clear()

    # The attachment

    async def _follow(self) -> None:
        """Stay a consumer at the home node, and at the next one when that is gone."""
        attempt = 0
        while True:
            try:
                ended = await self._attach()
            except Exception as error:  # noqa: BLE001 the iteration ends with it, unless it may pass
                ended = error
            if isinstance(ended, ConnectionError | RetryLater):
                attempt = 1 if self._is_attached else attempt + 1
                _log.debug("consumer of %s will attach again: %s", self.name, ended)
                await self._nodes.clock.sleep(BACKOFF.delay(attempt))
                continue
            self._end(ended)
            return

    async def _attach(self) -> Exception:
        """Be attached by the home node, until that ends. Returns why."""
        self._is_attached = False
        connection = await self._nodes.home()
        ended: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()

        def receive(answer: frames.Answer) -> None:
            if isinstance(answer, frames.Attached):
                self._is_attached = True
                self._apply(dict(answer.queues))
            elif isinstance(answer, frames.Failed) and not ended.done():
                ended.set_result(error_of(answer.error))

        def lose(error: Exception) -> None:
            if not ended.done():
                ended.set_result(error)

        number = connection.open(self._call, receive, lose)
        try:
            return await ended
        finally:
            connection.send(number, frames.Cancel())
            connection.forget(number)

    def _apply(self, queues: dict[str, str | None]) -> None:
        self._attached = queues
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
        for queue in queues:
            if queue not in self._readers or self._readers[queue].done():
                self._readers[queue] = asyncio.create_task(self._read(queue), name=f"reader of {queue}")

    # The queues

    async def _read(self, queue: str) -> None:
        """Be subscribed to a queue at its owner, as long as the consumer is attached to it."""
        attempt = 0
        redirect: str | None = None
        try:
            while queue in self._attached:
                changed = self._changed
                address = redirect or self._attached[queue]
                redirect = None
                if address is None:
                    await changed.wait()
                    continue
                began = self._nodes.clock.monotonic()
                error = await self._subscribe(queue, address)
                if error is None:  # it is no longer attached to it
                    continue
                if not isinstance(error, ConnectionError | RetryLater | UnknownQueue):  # a shard that was removed
                    raise error
                has_lasted = self._nodes.clock.monotonic() - began >= BACKOFF.longest
                attempt = 1 if has_lasted else attempt + 1
                if isinstance(error, NotOwner) and error.address not in (None, address) and attempt < 3:
                    redirect = error.address
                    continue
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(BACKOFF.delay(attempt)):
                        await changed.wait()
                        attempt = 0
        except Exception as error:  # noqa: BLE001 the iteration ends with it
            self._end(error)
        finally:
            if self._readers.get(queue) is asyncio.current_task():
                del self._readers[queue]

    async def _subscribe(self, queue: str, address: str) -> Exception | None:
        """Get the deliveries of a queue until the subscription is lost (returns why), or the consumer is no longer
        attached to the queue: what was delivered can still be settled then, and the queue be subscribed to again."""
        try:
            connection = await self._nodes.get(address)
            call = frames.Subscribe(queue, self._channel.prefetch, self._no_ack)
            feed = Feed(queue, connection, call, self._deliver)
        except ConnectionError as error:
            return error
        self._feeds = {each for each in self._feeds if not each.is_done} | {feed}
        while not feed.ended.is_set():
            if queue not in self._attached:
                feed.cancel()
                return None
            await _first_of(feed.ended, self._changed)
        return feed.error

    def _deliver(self, feed: Feed, deliveries: frames.Deliveries) -> None:
        if not len(deliveries):
            return
        if self._is_closed:
            feed.settle(deliveries.tags, "return")
            return
        self._batches.append((feed, deliveries))
        self._wake.set()

    def _end(self, error: Exception) -> None:
        """End the iteration with an error, unless it is closed."""
        if self._error is None:
            self._error = error
        self._wake.set()


async def _first_of(*events: asyncio.Event) -> None:
    """Return when one of the events is set."""
    waits = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
