"""Consuming from the shards of an exchange of RabbitMQ, or from a single queue."""

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Self

from aio_pika.abc import AbstractChannel, AbstractConnection, AbstractIncomingMessage, AbstractQueue

from shardyard.client.rabbitmq.attachments import Attachments
from shardyard.client.rabbitmq.errors import loss_ignored, translated
from shardyard.client.rabbitmq.messages import headers_of, properties_of
from shardyard.client.rabbitmq.settling import Unsettled
from shardyard.client.sharding.api import Channel, Consumer, Message
from shardyard.model import Headers, InvalidCall, InvalidValue, RetryLater, UnknownDeliveryTag

if TYPE_CHECKING:
    from types import TracebackType

    from shardyard.client.rabbitmq.client import RabbitMQClient

_COMES_AGAIN = "the message is delivered again"


class RabbitMQMessage(Message):
    """A delivery of RabbitMQ."""

    __slots__ = ("_message", "_unsettled", "queue")

    def __init__(self, message: AbstractIncomingMessage, queue: str, unsettled: Unsettled | None) -> None:
        """`unsettled`: the deliveries of its channel, which it is added to; None if it needs no acknowledgement."""
        self._message = message
        self._unsettled = unsettled
        self.queue = queue
        if unsettled is not None:
            unsettled.add(self.delivery_tag)

    @property
    def body(self) -> bytes:  # type: ignore[override]
        return self._message.body

    @property
    def routing_key(self) -> str:  # type: ignore[override]
        return self._message.routing_key or ""

    @property
    def redelivered(self) -> bool:  # type: ignore[override]
        return bool(self._message.redelivered)

    @property
    def delivery_count(self) -> int:  # type: ignore[override]
        """RabbitMQ counts for quorum queues only; for others it is 0."""
        return int(str(self._message.headers.get("x-delivery-count", 0)))

    @property
    def delivery_tag(self) -> int:  # type: ignore[override]
        return self._message.delivery_tag or 0

    @property
    def timestamp(self) -> int:  # type: ignore[override]
        """As the publisher has set it, or 0: RabbitMQ does not set it."""
        at = self._message.timestamp
        return 0 if at is None else int(at.timestamp() * 1000)

    @property
    def headers(self) -> Headers:
        return headers_of(self._message)[0]

    @property
    def properties(self) -> Mapping[str, str]:
        return properties_of(self._message)

    async def ack(self, *, multiple: bool = False) -> None:
        self._settle(multiple=multiple)
        with translated(_COMES_AGAIN):
            await self._message.ack(multiple=multiple)

    async def nack(self, *, requeue: bool = True, multiple: bool = False) -> None:
        self._settle(multiple=multiple)
        with translated(_COMES_AGAIN):
            await self._message.nack(requeue=requeue, multiple=multiple)

    def _settle(self, *, multiple: bool) -> None:
        if self._unsettled is None:
            raise UnknownDeliveryTag(self.delivery_tag, "it was consumed with no_ack, and needs none")
        self._unsettled.settle(self.delivery_tag, multiple=multiple)


class RabbitMQChannel(Channel):
    """Has a channel of AMQP for each of its consumers, so that acknowledging several messages at once concerns those of
    the same consumer only."""

    def __init__(self, client: "RabbitMQClient", prefetch: int) -> None:
        if prefetch < 1:
            raise InvalidValue("prefetch", prefetch, "a whole number of at least 1")
        self._client = client
        self._prefetch = prefetch
        self._is_open = False
        self._consumers: list[RabbitMQConsumer] = []

    async def __aenter__(self) -> Self:
        self._is_open = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: "TracebackType | None"
    ) -> None:
        self._is_open = False
        for consumer in self._consumers:
            await consumer.end()

    def consume(self, name: str, *, local: bool = False, no_ack: bool = False) -> "RabbitMQConsumer":
        """`local`: shards of the node that the client is connected to."""
        if not self._is_open:
            raise InvalidCall("the channel is not open: enter it by `async with` first")
        consumer = RabbitMQConsumer(self._client, self._prefetch, name, local=local, no_ack=no_ack)
        self._consumers.append(consumer)
        return consumer


class RabbitMQConsumer(Consumer):
    """Reads the shards that it is attached to. RabbitMQ delivers no more than the prefetch, which bounds what waits
    here."""

    def __init__(self, client: "RabbitMQClient", prefetch: int, name: str, *, local: bool, no_ack: bool) -> None:
        self._client = client
        self._prefetch = prefetch
        self._channel: AbstractChannel | None = None
        self._unsettled: Unsettled | None = None
        self._name = name
        self._local = local
        self._no_ack = no_ack
        self._delivered: asyncio.Queue[RabbitMQMessage | None] = asyncio.Queue()
        self._subscribed: dict[str, tuple[AbstractQueue, str]] = {}
        """By the name of a shard: its queue, and the consumer tag."""
        self._stack: contextlib.AsyncExitStack | None = None
        """None before it is attached to shards, and after the connection was lost."""
        self._is_closed = False

    @property
    def queues(self) -> Sequence[str]:
        """Those that it reads now."""
        return sorted(self._subscribed)

    async def start(self) -> None:
        """Attach to shards. Iterating does this, too."""
        if self._stack is not None or self._is_closed:
            return
        self._stack = contextlib.AsyncExitStack()
        self._delivered = asyncio.Queue()  # one that the end of an earlier channel does not reach
        try:
            with translated():
                await self._attach(self._stack, await self._client.connection())
        except BaseException:
            await self._detach()
            raise

    async def _attach(self, stack: contextlib.AsyncExitStack, connection: AbstractConnection) -> None:
        find = partial(self._client.queues, self._name, local=self._local)
        queues = await find()
        self._channel = await connection.channel()
        self._unsettled = None if self._no_ack else Unsettled(self._channel)
        await self._channel.set_qos(prefetch_count=self._prefetch)
        delivered = self._delivered
        self._channel.close_callbacks.add(lambda *_: delivered.put_nowait(None))
        if queues == [self._name]:
            await self._subscribe(queues)
            return
        attachments = Attachments(self._client.url, connection, self._name, find, self._subscribe)
        await stack.enter_async_context(attachments)

    async def __anext__(self) -> RabbitMQMessage:
        await self.start()
        message = await self._delivered.get()
        if message is not None:
            return message
        if self._is_closed:
            self._end()
            raise StopAsyncIteration
        await self._detach()
        raise RetryLater(
            "the connection to RabbitMQ was lost: iterate again; what was not acknowledged is delivered again"
        )

    async def close(self) -> None:
        self._is_closed = True
        await self._detach(give_back=True)
        self._end()

    async def _detach(self, *, give_back: bool = False) -> None:
        """Read no more shards. What was not taken by the program goes back to its queue: by itself if the channel is
        lost, or else if it is to be given back."""
        stack, self._stack = self._stack, None
        if stack is None:
            return
        with loss_ignored():
            await stack.aclose()
        if self._channel is not None and not self._channel.is_closed:
            with loss_ignored():
                await self._subscribe([])
                await (self._give_back() if give_back else self._channel.close())
        self._subscribed = {}

    async def end(self) -> None:
        """Close it with its channel of AMQP: what was delivered and not acknowledged goes back."""
        await self.close()
        if self._channel is not None and not self._channel.is_closed:
            with loss_ignored():
                await self._channel.close()

    async def _give_back(self) -> None:
        """What was delivered and not taken by the program goes back to its queue."""
        while not self._delivered.empty():
            message = self._delivered.get_nowait()
            if message is not None and not self._no_ack:
                await message.nack()

    def _end(self) -> None:
        """There will be no more messages."""
        self._delivered.put_nowait(None)

    async def _subscribe(self, shards: Sequence[str]) -> None:
        """Read these shards and no others. What was delivered from others can still be acknowledged."""
        if self._channel is None:
            return
        for name in self._subscribed.keys() - set(shards):
            queue, tag = self._subscribed.pop(name)
            await queue.cancel(tag)
        for name in shards:
            if name not in self._subscribed:
                queue = await self._channel.get_queue(name, ensure=False)
                tag = await queue.consume(partial(self._receive, name), no_ack=self._no_ack)
                self._subscribed[name] = (queue, tag)

    async def _receive(self, queue: str, message: AbstractIncomingMessage) -> None:
        self._delivered.put_nowait(RabbitMQMessage(message, queue, self._unsettled))
