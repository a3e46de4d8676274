"""Messages that were delivered to a channel."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from shardyard.client.sharding.api import Message
from shardyard.model import Headers
from shardyard.wire.sharding import properties_of, user_headers
from shardyard.wire.sharding_frames import Deliveries

if TYPE_CHECKING:
    from shardyard.client.sharding.feed import Feed

Settle = Callable[["DeliveredMessage", bool | None, bool], None]
"""Acknowledge (None), or requeue or not; with all earlier ones or alone."""


class DeliveredMessage(Message):
    """A message of a feed."""

    __slots__ = (
        "_headers",
        "_settle",
        "body",
        "delivery_count",
        "delivery_tag",
        "feed",
        "feed_tag",
        "queue",
        "redelivered",
        "routing_key",
        "timestamp",
    )

    def __init__(self, feed: "Feed", deliveries: Deliveries, at: int, delivery_tag: int, settle: Settle) -> None:
        self.feed = feed
        self.feed_tag = deliveries.first_tag + at
        self.body = deliveries.bodies[at]
        self.routing_key = deliveries.routing_keys[at]
        self.queue = feed.queue
        self.timestamp = deliveries.timestamps[at]
        self.redelivered = False if deliveries.redelivered is None else deliveries.redelivered[at]
        self.delivery_count = 0 if deliveries.counts is None else deliveries.counts[at]
        self.delivery_tag = delivery_tag
        self._headers: Headers = () if deliveries.headers is None else deliveries.headers[at]
        self._settle = settle

    def __repr__(self) -> str:
        return f"<message {self.delivery_tag} of {self.queue!r} with routing key {self.routing_key!r}>"

    @property
    def headers(self) -> Headers:
        return user_headers(self._headers)

    @property
    def properties(self) -> Mapping[str, str]:
        return properties_of(self._headers)

    async def ack(self, *, multiple: bool = False) -> None:
        self._settle(self, None, multiple)

    async def nack(self, *, requeue: bool = True, multiple: bool = False) -> None:
        self._settle(self, requeue, multiple)
