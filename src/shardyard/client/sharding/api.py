"""What clients of sharded queues can do, whichever broker is behind them: a Shardyard or a RabbitMQ."""

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Self

from shardyard.client.sharding.publishing import new_message
from shardyard.model.given import GivenHeaders, GivenValue, Headers
from shardyard.model.sharding import OutgoingMessage

DEFAULT_PREFETCH = 100


class Message(ABC):
    """A message that was delivered to a consumer, until it is acknowledged. Acknowledging returns as soon as that is on
    its way: if the connection is lost first, the message comes again, and is `redelivered`."""

    __slots__ = ()

    body: bytes
    routing_key: str
    queue: str
    """That it was stored in."""
    redelivered: bool
    """Whether it may have been delivered before."""
    delivery_count: int
    """How many earlier deliveries have failed."""
    delivery_tag: int
    """Its number among the deliveries of the channel."""
    timestamp: int
    """When it was stored; milliseconds since 1970."""

    @property
    @abstractmethod
    def headers(self) -> Headers:
        """The headers that the publisher gave. A dead letter has also `x-death`: a list in JSON, the last time first,
        with the `queue`, the `reason` and how often."""

    @property
    @abstractmethod
    def properties(self) -> Mapping[str, str]:
        """Such as `message_id`, `correlation_id` and `content_type`."""

    @abstractmethod
    async def ack(self, *, multiple: bool = False) -> None:
        """It is done, and does not come again. `multiple`: with all that the channel delivered before it."""

    @abstractmethod
    async def nack(self, *, requeue: bool = True, multiple: bool = False) -> None:
        """It failed: deliver it again (`requeue`), or make it a dead letter."""

    async def reject(self, *, requeue: bool = False) -> None:
        """`nack` for a single message, which makes it a dead letter by default."""
        await self.nack(requeue=requeue)


class Exchange(ABC):
    """Takes messages, and routes them to queues."""

    name: str

    async def publish(
        self,
        body: GivenValue,
        *,
        routing_key: str = "",
        headers: GivenHeaders = (),
        cc: Sequence[str] = (),
        bcc: Sequence[str] = (),
        expiration_ms: int | None = None,
        properties: Mapping[str, str] | None = None,
        message_id: str | None = None,
        mandatory: bool = True,
    ) -> int:
        """Publish a message. Returns how many queues took it, once it is durable in all of them. `Unroutable` if none
        did, unless it is not `mandatory`."""
        message = new_message(body, routing_key, headers, cc, bcc, expiration_ms, properties, message_id)
        return (await self.publish_batch([message], mandatory=mandatory))[0]

    @abstractmethod
    async def publish_batch(self, messages: Iterable[OutgoingMessage], *, mandatory: bool = True) -> list[int]:
        """Publish several at once. Returns how many queues took each of them. If this raises because some were not
        stored, the others are, and the error's `refused` has the places of those that are not."""

    @abstractmethod
    async def delete(self) -> object:
        """Delete the exchange."""


class Consumer(AsyncIterator[Message], ABC):
    """The messages of an exchange or a queue, from the first `anext` until it is closed."""

    @abstractmethod
    async def __anext__(self) -> Message: ...

    @abstractmethod
    async def close(self) -> None:
        """End it. Messages that were delivered can still be acknowledged."""


class Channel(ABC):
    """Consumes messages, within an `async with` block. At its end, what is not acknowledged goes back to its queue."""

    @abstractmethod
    async def __aenter__(self) -> Self: ...

    @abstractmethod
    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    @abstractmethod
    def consume(self, name: str, *, local: bool = False, no_ack: bool = False) -> Consumer:
        """The messages of an exchange, or of a single queue. `local`: only of shards on the node that the client is
        connected to. `no_ack`: they count as acknowledged when they are delivered."""


class Client(ABC):
    """A connection to brokers, within an `async with` block."""

    @abstractmethod
    async def __aenter__(self) -> Self: ...

    @abstractmethod
    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    @abstractmethod
    async def declare_exchange(
        self,
        name: str,
        type: str = "x-modulus-hash",  # noqa: A002 as RabbitMQ calls it
        *,
        hash_header: str | None = None,
        hash_property: str | None = None,
    ) -> Exchange:
        """Create an exchange, or check that it exists and is the same."""

    @abstractmethod
    def exchange(self, name: str) -> Exchange:
        """An exchange that exists."""

    @abstractmethod
    def channel(self, prefetch: int = DEFAULT_PREFETCH) -> Channel:
        """A channel. `prefetch`: how many messages of each queue are delivered and not acknowledged at most."""

    @abstractmethod
    async def get(self, name: str, *, no_ack: bool = False) -> Message | None:
        """One message of a queue, or of any shard of an exchange that has one; None if there is none. It has to be
        acknowledged, unless `no_ack`: then it counts as acknowledged when it is delivered."""

    @abstractmethod
    async def purge(self, name: str) -> int:
        """Remove the messages of a queue, or of all shards of an exchange, that are not being delivered. Returns how
        many they were. `PartlyPurged` if some shards could not be purged."""

    @abstractmethod
    async def declare_queue(self, name: str) -> object:
        """Create a queue, unless it exists."""

    @abstractmethod
    async def delete_queue(self, name: str) -> object:
        """Delete a queue with its messages."""

    @abstractmethod
    async def bind(self, exchange: str, queue: str, routing_key: str = "") -> None:
        """Let an exchange route messages to a queue. Exchanges of type x-consistent-hash take a weight as the key."""

    @abstractmethod
    async def unbind(self, exchange: str, queue: str, routing_key: str = "") -> None:
        """Undo a binding."""
