"""Which deliveries of a channel of AMQP can be settled."""

import itertools

from aio_pika.abc import AbstractChannel

from shardyard.model import UnknownDeliveryTag


class Unsettled:
    """The deliveries of one channel that are not settled. RabbitMQ closes a channel on which one is settled twice, and
    delivers all others of it again; so that is refused here."""

    def __init__(self, channel: AbstractChannel) -> None:
        self.channel = channel
        self._tags: dict[int, None] = {}
        """In the order of their delivery."""

    def add(self, tag: int) -> None:
        """It was delivered."""
        self._tags[tag] = None

    def settle(self, tag: int, *, multiple: bool) -> None:
        """`UnknownDeliveryTag` if it can't be settled. `multiple`: with those before it."""
        if self.channel.is_closed:
            raise UnknownDeliveryTag(tag, "it went back to its queue with the end of its channel or connection")
        if tag not in self._tags:
            raise UnknownDeliveryTag(tag, "it is settled already")
        for settled in list(itertools.takewhile(lambda each: each <= tag, self._tags)) if multiple else [tag]:
            del self._tags[settled]
