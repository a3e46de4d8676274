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
from shardyard.client.rabbitmq.errors import translated, unknown_queue
from shardyard.client.rabbitmq.link import Link
from shardyard.client.rabbitmq.messages import to_amqp
from shardyard.client.rabbitmq.questions import asking
from shardyard.client.rabbitmq.settling import Unsettled
from shardyard.client.rabbitmq.shards import NoShards, is_pseudo_queue, queues_of
from shardyard.client.sharding.api import DEFAULT_PREFETCH, Client, Exchange
from shardyard.client.sharding.publishing import checked
from shardyard.model import InvalidValue, PseudoQueue, RetryLater, UnknownExchange, UnknownQueue, Unroutable
from shardyard.model.sharding import OutgoingMessage
from shardyard.model.url import without_password

SHARDS_SECONDS = 2.0
"""For how long the shards of an exchange are remembered."""
_MAY_BE_STORED = "publish again; what was published may be stored"


class RabbitMQClient(Client):
    """A client of a RabbitMQ, or of all nodes of a cluster. A connection that was lost is opened again by the next
    call, which raises `RetryLater` while RabbitMQ can't be reached.

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
        self._publishing, self._getting, self._consuming = (Link(self.url) for _ in range(3))
        """Each has its own connection, so that what goes wrong with one does not concern the others."""
        self._exchanges: set[str] = set()
        """Those that are known to exist."""
        self._found: dict[tuple[str, bool], tuple[float, list[str]]] = {}
        """The queues that were found last for a name, and when."""
        self._finding = asyncio.Lock()
        self._got: Unsettled | None = None
        """Of the messages that `get` returned."""

    async def __aenter__(self) -> Self:
        for link in self._links:
            link.open()
        await self._publishing.channel()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for link in self._links:
            await link.close()

    @property
    def url(self) -> str:
        """Of the node that messages go through."""
        return self._urls[0]

    @property
    def _links(self) -> tuple[Link, ...]:
        return self._publishing, self._getting, self._consuming

    async def connection(self) -> AbstractConnection:
        """The connection of consumers. `RetryLater` while RabbitMQ can't be reached."""
        return await self._consuming.connection()

    async def queues(self, name: str, *, local: bool = False) -> list[str]:
        """The shards of an exchange, or the queue of that name, as of some seconds ago at most. `UnknownQueue` if there
        is neither. `local`: those of the first node."""
        now = asyncio.get_running_loop().time()
        async with self._finding:
            at, found = self._found.get((name, local), (-inf, []))
            if now - at > SHARDS_SECONDS:
                found = await queues_of(self._urls[:1] if local else self._urls, name)
                if not found:
                    raise unknown_queue(name)
                self._found[name, local] = (now, found)
            return found

    async def shards(self, exchange: str) -> list[str]:
        """The names of an exchange's shards. `NoShards` if it has none, `UnknownExchange` if it does not exist."""
        try:
            found = await self.queues(exchange)
        except UnknownQueue:
            await self._check_exchange(exchange)
            raise NoShards(exchange) from None
        if found == [exchange]:
            raise NoShards(exchange)
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
        """For publishing. `UnknownExchange` if it does not exist."""
        if name and name not in self._exchanges:
            await self._check_exchange(name)
            self._exchanges.add(name)
        return await (await self._publishing.channel()).get_exchange(name, ensure=False)

    def forget_exchange(self, name: str) -> None:
        """Look again whether it exists, before the next publish to it."""
        self._exchanges.discard(name)

    async def get(self, name: str, *, no_ack: bool = False) -> RabbitMQMessage | None:
        queues = await self.queues(name)
        channel = await self._getting.channel()
        if self._got is None or self._got.channel is not channel:
            self._got = Unsettled(channel)
        with translated():
            for queue in queues:
                message: AbstractIncomingMessage | None = await (await channel.get_queue(queue, ensure=False)).get(
                    no_ack=no_ack, fail=False
                )
                if message is not None:
                    return RabbitMQMessage(message, queue, None if no_ack else self._got)
        return None

    async def purge(self, name: str) -> int:
        queues = await self.queues(name)
        async with asking(self.url) as channel:
            purged = [await (await channel.get_queue(queue, ensure=False)).purge() for queue in queues]
        return sum(answer.message_count or 0 for answer in purged)

    async def declare_queue(self, name: str) -> object:
        await self._check_queue(name, "declared")
        async with asking(self.url) as channel:
            return await channel.declare_queue(name, durable=True)

    async def delete_queue(self, name: str) -> object:
        await self._check_queue(name, "deleted")
        for local in (True, False):
            self._found.pop((name, local), None)
        async with asking(self.url) as channel:
            return await channel.queue_delete(name)

    async def bind(self, exchange: str, queue: str, routing_key: str = "") -> None:
        await self._check_queue(queue, "bound")
        async with asking(self.url) as channel:
            await (await channel.get_queue(queue)).bind(exchange, routing_key)

    async def unbind(self, exchange: str, queue: str, routing_key: str = "") -> None:
        await self._check_queue(queue, "unbound")
        async with asking(self.url) as channel:
            await (await channel.get_queue(queue)).unbind(exchange, routing_key)

    async def _check_exchange(self, name: str) -> None:
        """`UnknownExchange` if it does not exist."""
        async with asking(self.url) as channel:
            await channel.get_exchange(name)

    async def _check_queue(self, name: str, operation: str) -> None:
        """`PseudoQueue` if it is the name of a sharded exchange: RabbitMQ would take its first shard for it."""
        if await is_pseudo_queue(self.url, name):
            raise PseudoQueue(name, operation)


class RabbitMQExchange(Exchange):
    """An exchange of RabbitMQ, which does not say how many queues took a message: that is 1 if it has stored it, and 0
    if no queue took it."""

    def __init__(self, client: RabbitMQClient, name: str) -> None:
        self._client = client
        self.name = name

    async def publish_batch(self, messages: Iterable[OutgoingMessage], *, mandatory: bool = True) -> list[int]:
        batch = [checked(message) for message in messages]
        exchange = await self._client.amqp_exchange(self.name)
        try:
            with translated(_MAY_BE_STORED):
                routed = await asyncio.gather(*(self._publish(exchange, message) for message in batch))
        except UnknownExchange as error:
            self._client.forget_exchange(error.exchange)
            if error.exchange == self.name:
                raise
            raise RetryLater(  # RabbitMQ has closed the channel, which is that of all exchanges
                f"a publish to {error.exchange!r}, which does not exist, ended that to {self.name!r}: {_MAY_BE_STORED}"
            ) from error
        if mandatory and not all(routed):
            places = [place for place, count in enumerate(routed) if not count]
            raise Unroutable(self.name, batch[places[0]].routing_key, len(places)).in_batch(places, len(batch))
        return routed

    async def delete(self) -> object:
        """RabbitMQ leaves its shards as they are."""
        self._client.forget_exchange(self.name)
        async with asking(self._client.url) as channel:
            return await channel.exchange_delete(self.name)

    async def _publish(self, exchange: AbstractExchange, message: OutgoingMessage) -> int:
        try:
            confirmed = await exchange.publish(to_amqp(message), message.routing_key, mandatory=True)
        except DeliveryError as error:
            raise RetryLater(f"RabbitMQ has refused a message for {self.name}: {error}") from error
        return int(isinstance(confirmed, Basic.Ack))
