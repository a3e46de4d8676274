"""Moves the messages of a RabbitMQ's shards into an exchange of Shardyard, each of them once.

A batch is stored durably in Shardyard before it is acknowledged in RabbitMQ, so nothing is lost. If the mover dies in
between, RabbitMQ delivers the batch again; it must then be recognised, because RabbitMQ's messages have no identity. So
each batch has a number, and these steps, with what is known of it in a queue of RabbitMQ:

1. Take messages, stop consuming, and note number, count and digest of the batch.
2. Publish it to Shardyard under a stamp with that number: a second time, it is stored once.
3. Acknowledge it as a whole, wait until RabbitMQ has done that, and note that it is done.

A mover that starts and finds a batch that is not done looks at the first messages of the queue. If they are those of
the batch, and RabbitMQ says that they were delivered before, it continues with step 2. Otherwise it was acknowledged.
"""

import asyncio
import contextlib
import hashlib
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

import msgspec
from aio_pika import DeliveryMode, Message
from aio_pika.abc import AbstractChannel, AbstractConnection, AbstractIncomingMessage
from aiormq.exceptions import ChannelAccessRefused

from shardyard.client.rabbitmq.messages import from_amqp
from shardyard.model import Conflict, Stamp
from shardyard.model.sharding import OutgoingMessage

BATCH_MESSAGES = 500
IDLE_SECONDS = 0.25
"""After this time without a message, the mover looks whether there are more."""

Publish = Callable[[Sequence[OutgoingMessage], Stamp], Awaitable[object]]
"""Stores messages in Shardyard, once for a stamp. Returns when they are durable."""


class QueueInUse(Conflict):
    """Raised when a queue has other consumers: they would take messages that the mover counts on."""

    def __init__(self, queue: str) -> None:
        super().__init__(f"queue {queue!r} has other consumers: stop them, then move its messages")
        self.queue = queue


class _Batch(msgspec.Struct, frozen=True):
    """What is known of the batch that was moved last."""

    mover: str
    """The name of the producer in Shardyard."""
    number: int = 0
    count: int = 0
    digest: str = ""
    done: bool = True
    """It was acknowledged in RabbitMQ."""


_decode = msgspec.json.Decoder(_Batch).decode


class QueueMover:
    """Moves the messages of one queue."""

    def __init__(
        self,
        connection: AbstractConnection,
        queue: str,
        publish: Publish,
        *,
        batch_messages: int = BATCH_MESSAGES,
        idle_seconds: float = IDLE_SECONDS,
    ) -> None:
        self._connection = connection
        self._queue = queue
        self._publish = publish
        self._batch_messages = batch_messages
        self._idle_seconds = idle_seconds

    async def run(self, moved: Callable[[int], None] = lambda _: None) -> int:
        """Move everything that is in the queue, and return how many messages that were. `moved` gets the number of
        messages of each batch."""
        total = 0
        async with self._notes() as notes, self._connection.channel() as channel:
            while messages := await self._take(channel, notes.begun_count or self._batch_messages):
                while messages:  # the first ones may be a batch that was begun before
                    batch, messages = notes.next_batch(messages)
                    await self._move(channel, notes, batch)
                    total += len(batch)
                    moved(len(batch))
            await notes.delete()
        return total

    async def _move(self, channel: AbstractChannel, notes: "_Notes", batch: list[AbstractIncomingMessage]) -> None:
        await notes.begin(batch)
        await self._publish([from_amqp(message) for message in batch], notes.stamp)
        await batch[-1].ack(multiple=True)
        await channel.declare_queue(self._queue, passive=True)  # answered after the acknowledgement is done
        await notes.end()

    async def _take(self, channel: AbstractChannel, count: int) -> list[AbstractIncomingMessage]:
        """The next messages, so many or all that there are. When this returns, RabbitMQ delivers no more."""
        messages: list[AbstractIncomingMessage] = []
        arrived = asyncio.Event()

        async def receive(message: AbstractIncomingMessage) -> None:
            messages.append(message)
            arrived.set()

        await channel.set_qos(prefetch_count=count)
        queue = await channel.get_queue(self._queue, ensure=False)
        try:
            tag = await queue.consume(receive, exclusive=True)
        except ChannelAccessRefused:
            raise QueueInUse(self._queue) from None
        while len(messages) < count:
            arrived.clear()
            try:
                async with asyncio.timeout(self._idle_seconds):
                    await arrived.wait()
            except TimeoutError:  # there may be more that are slow to come
                if not (await queue.declare()).message_count:
                    break
        await queue.cancel(tag)  # what RabbitMQ sent before its answer has arrived
        return messages

    @contextlib.asynccontextmanager
    async def _notes(self) -> AsyncIterator["_Notes"]:
        """What earlier movers of this queue have noted."""
        async with self._connection.channel(publisher_confirms=False) as channel:
            name = f"shardyard: moving {self._queue}"
            queue = await channel.declare_queue(name, durable=True)
            message = await queue.get(fail=False)
            batch = _Batch(uuid.uuid4().hex) if message is None else _decode(message.body)
            yield _Notes(channel, name, batch, message)


class _Notes:
    """The one message of the queue that says what is known of the last batch. It is held while a mover runs, and
    returns to its queue when the mover dies."""

    def __init__(
        self, channel: AbstractChannel, name: str, batch: _Batch, message: AbstractIncomingMessage | None
    ) -> None:
        self._channel = channel
        self._name = name
        self._batch = batch
        self._begun = None if batch.done else batch
        """The batch of a mover that died."""
        self._message = message

    @property
    def stamp(self) -> Stamp:
        return Stamp(f"rabbitmq/{self._batch.mover}", self._batch.number)

    @property
    def begun_count(self) -> int | None:
        """How many messages the batch has that a mover before had begun; None if it was done."""
        return None if self._begun is None else self._begun.count

    def next_batch(
        self, messages: list[AbstractIncomingMessage]
    ) -> tuple[list[AbstractIncomingMessage], list[AbstractIncomingMessage]]:
        """The messages that make the next batch, and the others. A batch that was begun is the same again."""
        begun, self._begun = self._begun, None
        if begun is not None:
            first = messages[: begun.count]
            if all(message.redelivered for message in first) and _digest(first) == begun.digest:
                return first, messages[begun.count :]
        self._batch = msgspec.structs.replace(self._batch, done=True)
        return messages, []

    async def begin(self, batch: list[AbstractIncomingMessage]) -> None:
        """Note what the batch is, unless that is known."""
        if self._batch.done:
            await self._note(_Batch(self._batch.mover, self._batch.number + 1, len(batch), _digest(batch), done=False))

    async def end(self) -> None:
        await self._note(msgspec.structs.replace(self._batch, done=True))

    async def delete(self) -> None:
        """Everything is done: nothing needs to be known."""
        await self._channel.queue_delete(self._name)

    async def _note(self, batch: _Batch) -> None:
        """Replace the message, in a transaction: there is always one."""
        async with self._channel.transaction():
            body = Message(msgspec.json.encode(batch), delivery_mode=DeliveryMode.PERSISTENT)
            await self._channel.default_exchange.publish(body, self._name)
            if self._message is not None:
                await self._message.ack()
        queue = await self._channel.get_queue(self._name, ensure=False)
        self._message = await queue.get(fail=False)
        self._batch = batch


def _digest(batch: Sequence[AbstractIncomingMessage]) -> str:
    """Of everything that is moved, in order."""
    digest = hashlib.sha256()
    for message in batch:
        digest.update(msgspec.msgpack.encode(from_amqp(message)))
    return digest.hexdigest()
