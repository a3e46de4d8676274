"""`RabbitMQClient`: publishing to and consuming from the sharded exchanges of a RabbitMQ, with the API that
`ShardingClient` has for those of Shardyard."""

import asyncio
from collections.abc import Iterable, Sequence
from math import inf
from types import TracebackType
from typing import Self

from aio_pika.abc import AbstractConnection, AbstractExchange, AbstractIncomingMessage
from aio_pika.exceptions import DeliveryError
from pamqp.commands import Basic

from shardyard.client.rabbitmq.consuming import RabbitMQChannel, RabbitMQMessage
from shardyard.client.rabbitmq.messages import to_amqp
from shardyard.client.rabbitmq.questions import asking, connect
from shardyard.client.rabbitmq.shards import NoShards, shards_of
from shardyard.client.sharding.api import DEFAULT_PREFETCH, Client, Exchange
from shardyard.client.sharding.publishing import checked
from shardyard.model import InvalidCall, InvalidValue, RetryLater, Unroutable
from shardyard.model.sharding import OutgoingMessage
from shardyard.model.url import without_password

SHARDS_SECONDS = 2.0
"""For how long the shards of an exchange are remembered."""


class RabbitMQClient(Client):
    """A connection to a RabbitMQ, or to each node of a cluster.

    Messages are persistent and confirmed. Consumers of an exchange share its shards evenly, also with those of other
    processes that use this client, and no shard is left unread.
    """

    def __init__(self, urls: str | Sequence[str]) -> None:
        """`urls`: such as `amqp://user:password@host/`. Give one of each node of a cluster that has shards: messages
        go through the first, and the shards of all are read."""
        self._urls = [urls] if isinstance(urls, str) else list(urls)
        if not self._urls or not all(url.startswith(("amqp://", "amqps://")) for url in self._urls):
            given = ", ".join(map(without_password, self._urls))
            raise InvalidValue("urls", given, "addresses such as amqp://user:password@host/")
        self._connection: AbstractConnection | None = None
        self._shards: dict[tuple[str, bool], tuple[float, list[str]]] = {}
        """Those that were found last for an exchange, and when."""
        self._finding = asyncio.Lock()

    async def __aenter__(self) -> Self:
        self._connection = await connect(self.url)
        self._channel = await self.connection.channel(publisher_confirms=True, on_return_raises=False)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.connection.close()

    @property
    def url(self) -> str:
        """Of the node that messages go through."""
        return self._urls[0]

    @property
    def connection(self) -> AbstractConnection:
        """The connection that messages go through."""
        if self._connection is None:
            raise InvalidCall("the client is not open: enter it by `async with` first")
        return self._connection

    async def shards(self, exchange: str, *, local: bool = False) -> list[str]:
        """The names of an exchange's shards, as of some seconds ago at most. `NoShards` if it has none. `local`: those
        of the first node."""
        now = asyncio.get_running_loop().time()
        async with self._finding:
            at, found = self._shards.get((exchange, local), (-inf, []))
            if now - at > SHARDS_SECONDS:
                found = await shards_of(self._urls[:1] if local else self._urls, exchange)
                self._shards[exchange, local] = (now, found)
            return found

    async def declare_exchange(
        self,
        name: str,
        type: str = "x-modulus-hash",  # noqa: A002 as RabbitMQ calls it
        *,
        hash_header: str | None = None,
        hash_property: str | None = None,
    ) -> "RabbitMQExchange":
        """It is durable. Shards come with a policy of RabbitMQ (`rabbitmqctl set_policy`)."""
        arguments = {"hash-header": hash_header, "hash-property": hash_property}
        given = {key: value for key, value in arguments.items() if value is not None}
        async with asking(self.url) as channel:
            await channel.declare_exchange(name, type, durable=True, arguments=given)  # type: ignore[arg-type]
        return self.exchange(name)

    def exchange(self, name: str) -> "RabbitMQExchange":
        return RabbitMQExchange(self, name)

    def channel(self, prefetch: int = DEFAULT_PREFETCH) -> RabbitMQChannel:
        return RabbitMQChannel(self, prefetch)

    async def amqp_exchange(self, name: str) -> AbstractExchange:
        """For publishing."""
        return await self._channel.get_exchange(name, ensure=False)

    async def get(self, name: str, *, no_ack: bool = False) -> RabbitMQMessage | None:
        for queue in await self._queues(name):
            message: AbstractIncomingMessage | None = await (await self._channel.get_queue(queue, ensure=False)).get(
                no_ack=no_ack, fail=False
            )
            if message is not None:
                return RabbitMQMessage(message, queue)
        return None

    async def purge(self, name: str) -> int:
        count = 0
        for queue in await self._queues(name):
            purged = await (await self._channel.get_queue(queue, ensure=False)).purge()
            count += purged.message_count or 0
        return count

    async def declare_queue(self, name: str) -> object:
        async with asking(self.url) as channel:
            return await channel.declare_queue(name, durable=True)

    async def delete_queue(self, name: str) -> object:
        async with asking(self.url) as channel:
            return await channel.queue_delete(name)

    async def bind(self, exchange: str, queue: str, routing_key: str = "") -> None:
        async with asking(self.url) as channel:
            await (await channel.get_queue(queue)).bind(exchange, routing_key)

    async def unbind(self, exchange: str, queue: str, routing_key: str = "") -> None:
        async with asking(self.url) as channel:
            await (await channel.get_queue(queue)).unbind(exchange, routing_key)

    async def _queues(self, name: str) -> list[str]:
        """The shards of an exchange, or the queue itself."""
        try:
            return await self.shards(name)
        except NoShards:
            return [name]


class RabbitMQExchange(Exchange):
    """An exchange of RabbitMQ, which does not say how many queues took a message: that is 1 if it has stored it, and 0
    if no queue took it."""

    def __init__(self, client: RabbitMQClient, name: str) -> None:
        self._client = client
        self.name = name

    async def publish_batch(self, messages: Iterable[OutgoingMessage], *, mandatory: bool = True) -> list[int]:
        exchange = await self._client.amqp_exchange(self.name)
        batch = [checked(message) for message in messages]
        routed = await asyncio.gather(*(self._publish(exchange, message) for message in batch))
        if mandatory and not all(routed):
            places = [place for place, count in enumerate(routed) if not count]
            raise Unroutable(self.name, batch[places[0]].routing_key, len(places)).in_batch(places, len(batch))
        return routed

    async def delete(self) -> object:
        """RabbitMQ leaves its shards as they are."""
        async with asking(self._client.url) as channel:
            return await channel.exchange_delete(self.name)

    async def _publish(self, exchange: AbstractExchange, message: OutgoingMessage) -> int:
        try:
            confirmed = await exchange.publish(to_amqp(message), message.routing_key, mandatory=True)
        except DeliveryError as error:
            raise RetryLater(f"RabbitMQ has refused a message for {self.name}: {error}") from error
        return int(isinstance(confirmed, Basic.Ack))
