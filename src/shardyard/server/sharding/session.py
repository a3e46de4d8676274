"""The calls of one client of sharded queues on its WebSocket connection."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import get_args

from shardyard.model import InvalidCall, Malformed, NotOwner, Overloaded, ShardyardError, Stamp, UnknownDeliveryTag
from shardyard.runtime.metrics import ERRORS
from shardyard.server.answers import Answers
from shardyard.server.bodies import HeldBytes
from shardyard.server.limits import ServerLimits
from shardyard.server.measuring import call_metrics
from shardyard.server.sharding.consumers import Consumers
from shardyard.server.sharding.service import Service
from shardyard.server.websocket import WebSocketConnection
from shardyard.sharding.delivery import Deliveries, Subscription
from shardyard.wire import sharding_frames as frames
from shardyard.wire.close_codes import CloseCode
from shardyard.wire.errors import ErrorBody, error_body

_log = logging.getLogger(__name__)

Lasting = frames.Publish | frames.Get | frames.Subscribe
"""Calls that take time."""
CALL_METRICS = {kind: call_metrics(f"sharding_{kind.__name__.lower()}") for kind in get_args(Lasting)}
"""The others are counted by what they do to messages."""


class ShardingSession:
    """Carries out calls, and sends answers and deliveries: all of one turn of the event loop travel in one message."""

    def __init__(
        self,
        connection: WebSocketConnection,
        service: Callable[[], Awaitable[Service]],
        limits: ServerLimits,
        *,
        host: str,
    ) -> None:
        """`service`: waits until the node has joined the others. `host`: of the client."""
        self._connection = connection
        self._service = service
        self._limits = limits
        self._host = host
        self._loop = asyncio.get_running_loop()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        """Calls in progress, by number."""
        self._consumers = Consumers(self._answer)
        self._subscribing: set[int] = set()
        """The numbers of those that have just begun."""
        self._subscriptions: dict[int, Subscription] = {}
        """As long as they get messages, or have some that are not settled."""
        self._retired: set[int] = set()
        """Those that get no more: they were cancelled, or are those of a get."""
        self._paused: list[Subscription] = []
        """They wait until the client has read what was sent."""
        self._resuming: asyncio.Task[None] | None = None
        self._bytes = 0
        """Of messages in progress."""
        self._answers = Answers(connection)
        self._draining = False

    # Messages

    def receive(self, message: bytes, held: HeldBytes) -> None:
        try:
            received = frames.decode_calls(message)
        except Malformed as error:
            held.release()
            ERRORS.series(error_body(error).code).add()
            _log.warning("a connection from %s was closed: %s", self._host, error)
            self._connection.close(CloseCode.MALFORMED, str(error))
            return
        size = len(message)
        self._bytes += size
        left = 1

        def finish(_: object) -> None:
            nonlocal left
            left -= 1
            if not left:
                self._release(size, held)

        for number, call in received:
            task = self._take(number, call)
            if task is not None:
                left += 1
                task.add_done_callback(finish)
        if self._bytes > self._limits.call_bytes:
            self._connection.set_busy(True)
        finish(None)

    def _release(self, size: int, held: HeldBytes) -> None:
        held.release()
        was_busy = self._bytes > self._limits.call_bytes
        self._bytes -= size
        if was_busy and self._bytes <= self._limits.call_bytes and not self._draining:
            self._connection.set_busy(False)

    def _take(self, number: int, call: frames.Call | Malformed) -> "asyncio.Task[None] | None":
        """Carry out a call, in a task if that takes time."""
        try:
            if isinstance(call, Malformed):
                raise call
            if isinstance(call, frames.Ack | frames.Nack | frames.Cancel):
                self._answer(number, self._cancel(number) if isinstance(call, frames.Cancel) else self._settle(call))
                return None
            self._check_number(number)
        except ShardyardError as error:
            self._answer(number, _failed(error))
            return None
        if isinstance(call, frames.Consume):
            self._consumers.open(number, self._attach(number, call))
            return None
        return self._start(number, call)

    def _check_number(self, number: int) -> None:
        if number in self._tasks or number in self._subscriptions or number in self._consumers:
            raise InvalidCall(f"call {number} is in progress: each call needs a number of its own")
        if len(self._tasks) + len(self._subscriptions) + len(self._consumers) >= self._limits.calls:
            raise Overloaded("calls of this connection", self._limits.calls)

    def _start(self, number: int, call: Lasting) -> "asyncio.Task[None]":
        if isinstance(call, frames.Subscribe):
            self._subscribing.add(number)
        task = self._tasks[number] = self._loop.create_task(self._run(number, call, time.perf_counter()))
        task.add_done_callback(lambda _: self._end(number))
        return task

    def _end(self, number: int) -> None:
        del self._tasks[number]
        self._subscribing.discard(number)
        if self._draining and not self._tasks:
            self._close()

    async def _run(self, number: int, call: Lasting, started: float) -> None:
        try:
            match call:
                case frames.Publish():
                    await self._publish(number, call)
                case frames.Get():
                    await self._get(number, call)
                case frames.Subscribe():
                    await self._subscribe(number, call)
        except ShardyardError as error:
            self._answer(number, _failed(error))
        except Exception:  # noqa: BLE001 the client gets an answer, whatever it is
            _log.exception("a call on a WebSocket connection failed")
            self._answer(number, frames.Failed(ErrorBody("internal_error", "the node failed: its log says why")))
        measured = CALL_METRICS[type(call)]
        measured.count.add()
        measured.seconds.observe(time.perf_counter() - started)

    def _answer(self, number: int, answer: frames.Answer) -> None:
        self._answers.add(frames.encode_frame(number, answer))

    def drain(self) -> None:
        """Take no more calls, answer those in progress, and close the connection."""
        self._draining = True
        self._connection.set_busy(True)
        if not self._tasks:
            self._close()

    def _close(self) -> None:
        self._release_all()
        self._answers.flush()
        self._connection.close(CloseCode.DRAINING, "this node is about to stop")

    def lost(self) -> None:
        """Give back what was not acknowledged, and end the consumers. A publish in progress is finished."""
        self._release_all()

    def _release_all(self) -> None:
        subscriptions, self._subscriptions = self._subscriptions, {}
        for subscription in subscriptions.values():
            subscription.cancel()
        self._consumers.close_all()
        if self._resuming is not None:
            self._resuming.cancel()
        self._draining = True  # a subscribe in progress takes no messages any more

    # Publishing and getting

    async def _publish(self, number: int, call: frames.Publish) -> None:
        service = await self._service()
        if (call.producer is None) != (call.sequence is None):
            raise InvalidCall("a publish has a producer and a sequence, or neither of them")
        stamp = None if call.producer is None or call.sequence is None else Stamp(call.producer, call.sequence)
        counts, refused = await service.publish(call.exchange, call.messages.messages(), stamp)
        self._answer(number, frames.Routed(counts, {at: error_body(error) for at, error in refused.items()}))

    async def _get(self, number: int, call: frames.Get) -> None:
        queue = (await self._service()).sharding.queue(call.queue)
        holder = None if call.no_ack else queue.getter(lambda error: self._ended(number, error))
        deliveries = await queue.get(holder)
        if deliveries is not None and holder is not None:
            if self._draining:
                holder.cancel()
                return
            self._subscriptions[number] = holder
            self._retired.add(number)
        self._answer(number, frames.Deliveries(1, [], [], []) if deliveries is None else _delivered(deliveries))

    # Consuming

    async def _attach(self, number: int, call: frames.Consume) -> None:
        """Be attached until this is cancelled."""
        try:
            service = await self._service()
            await self._consumers.follow(number, call, service.sharding)
        except ShardyardError as error:
            self._answer(number, _failed(error))

    async def _subscribe(self, number: int, call: frames.Subscribe) -> None:
        queue = (await self._service()).sharding.queue(call.queue)
        if self._draining:
            raise NotOwner(call.queue, None)
        subscription: Subscription | None = None

        def receive(deliveries: Deliveries) -> None:
            self._answer(number, _delivered(deliveries))
            if not self._connection.is_writable and subscription is not None:
                self._pause(subscription)

        subscription = queue.subscribe(
            receive, prefetch=call.prefetch, no_ack=call.no_ack, ended=lambda error: self._ended(number, error)
        )
        self._subscriptions[number] = subscription

    def _ended(self, number: int, error: ShardyardError) -> None:
        """The queue is no longer served here."""
        self._retired.discard(number)
        if self._subscriptions.pop(number, None) is not None:
            self._answer(number, _failed(error))

    def _forget_if_done(self, number: int) -> None:
        """Forget a subscription that gets no more messages, when all of them are settled."""
        if number in self._retired and not self._subscriptions[number].unacked:
            del self._subscriptions[number]
            self._retired.discard(number)

    def _pause(self, subscription: Subscription) -> None:
        """A client that does not read gets no more messages until it does."""
        subscription.pause()
        self._paused.append(subscription)
        if self._resuming is None or self._resuming.done():
            self._resuming = self._loop.create_task(self._resume(), name="a client that reads slowly")

    async def _resume(self) -> None:
        await self._connection.writable()
        paused, self._paused = self._paused, []
        for subscription in paused:
            subscription.resume()

    def _settle(self, call: frames.Ack | frames.Nack) -> frames.Answer:
        subscription = self._subscriptions.get(call.subscription)
        if subscription is None:
            tag = call.tags[0] if call.tags else 0
            raise UnknownDeliveryTag(tag, f"there is no subscription {call.subscription} any more")
        if not call.tags:
            return frames.DONE
        if isinstance(call, frames.Ack):
            if call.multiple:
                subscription.ack(max(call.tags), multiple=True)
            else:
                subscription.ack_tags(call.tags)
        elif call.multiple and call.failed:
            subscription.nack(max(call.tags), multiple=True, requeue=call.requeue)
        else:
            subscription.nack_tags(call.tags, requeue=call.requeue, failed=call.failed)
        self._forget_if_done(call.subscription)
        return frames.DONE

    def _cancel(self, number: int) -> frames.Answer:
        """End a consume or a subscribe. Deliveries can still be acknowledged."""
        if number in self._consumers:
            self._consumers.close(number)
        elif (subscription := self._subscriptions.get(number)) is not None:
            subscription.stop_taking()
            self._retired.add(number)
            self._forget_if_done(number)
        elif number in self._subscribing:
            self._tasks[number].cancel()
        return frames.ENDED


def _delivered(deliveries: Deliveries) -> frames.Deliveries:
    records = deliveries.records
    return frames.Deliveries(
        deliveries.first_tag,
        [record.value for record in records],
        [(record.key or b"").decode() for record in records],
        [record.timestamp for record in records],
        [record.headers for record in records],
        deliveries.redelivered if any(deliveries.redelivered) else None,
        deliveries.counts if any(deliveries.counts) else None,
    )


def _failed(error: ShardyardError) -> frames.Failed:
    body = error_body(error)
    ERRORS.series(body.code).add()
    return frames.Failed(body)
