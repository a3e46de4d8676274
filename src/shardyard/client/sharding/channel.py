"""A channel: its consumers, and the deliveries that are not acknowledged yet."""

import asyncio
import contextlib
import itertools
from collections import defaultdict
from types import TracebackType
from typing import Self

from shardyard.client.sharding.api import Channel
from shardyard.client.sharding.consumer import ShardingConsumer
from shardyard.client.sharding.feed import Feed, Outcome
from shardyard.client.sharding.message import DeliveredMessage
from shardyard.client.sharding.nodes import Nodes
from shardyard.model import Closed, InvalidCall, InvalidValue, UnknownDeliveryTag
from shardyard.model.checks import check_text, whole_number
from shardyard.wire.sharding_frames import MAX_PREFETCH, Deliveries


class ShardingChannel(Channel):
    """Consumes from nodes. Delivery tags count the messages that it handed to the program."""

    def __init__(self, nodes: Nodes, prefetch: int) -> None:
        if whole_number("prefetch", prefetch, at_least=1) > MAX_PREFETCH:
            raise InvalidValue("prefetch", prefetch, f"1 to {MAX_PREFETCH}")
        self.nodes = nodes
        self.prefetch = prefetch
        self._tags = itertools.count(1)
        self._unsettled: dict[int, DeliveredMessage] = {}
        """By delivery tag, in the order in which they were handed over."""
        self._consumers: list[ShardingConsumer] = []
        self._is_entered = False
        self._is_closed = False

    async def __aenter__(self) -> Self:
        self._is_entered = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    async def close(self) -> None:
        """End its consumers. What is not acknowledged goes back to its queue."""
        self._is_closed = True
        await asyncio.gather(*(consumer.close() for consumer in self._consumers))
        self._settle_all(list(self._unsettled), "requeue", flush=True)

    def consume(self, name: str, *, local: bool = False, no_ack: bool = False) -> ShardingConsumer:
        check_text("name", name)
        if self._is_closed:
            raise Closed("the channel")
        if not self._is_entered:
            raise InvalidCall("the channel is not open: enter it by `async with` first")
        consumer = ShardingConsumer(self, name, local=local, no_ack=no_ack)
        self._consumers.append(consumer)
        return consumer

    def hand_over(self, feed: Feed, deliveries: Deliveries, at: int) -> DeliveredMessage:
        """The message at this place of what was delivered, now that the program takes it."""
        message = DeliveredMessage(feed, deliveries, at, next(self._tags), self._settle)
        if not feed.no_ack:
            self._unsettled[message.delivery_tag] = message
        return message

    def _settle(self, message: DeliveredMessage, requeue: bool | None, multiple: bool) -> None:
        """Settle a delivery of this channel; see `message.Settle`."""
        if message.feed.no_ack:
            raise UnknownDeliveryTag(message.delivery_tag, "it was consumed with no_ack, and needs none")
        if message.delivery_tag not in self._unsettled:
            why = (
                "it went back to its queue with the end of its channel" if self._is_closed else "it is settled already"
            )
            raise UnknownDeliveryTag(message.delivery_tag, why)
        last = message.delivery_tag
        tags = list(itertools.takewhile(lambda tag: tag <= last, self._unsettled)) if multiple else [last]
        self._settle_all(tags, "ack" if requeue is None else "requeue" if requeue else "discard")

    def _settle_all(self, tags: list[int], outcome: Outcome, *, flush: bool = False) -> None:
        by_feed: defaultdict[Feed, list[int]] = defaultdict(list)
        for tag in tags:
            message = self._unsettled.pop(tag)
            by_feed[message.feed].append(message.feed_tag)
        for feed, feed_tags in by_feed.items():
            feed.settle(feed_tags, outcome)
            if flush:
                with contextlib.suppress(ConnectionError):
                    feed.flush()
