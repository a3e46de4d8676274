"""`ShardingClient`: publish to exchanges and consume from their shards, through any node."""

import asyncio
import random
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Self

from shardyard.client.brokers import Brokers
from shardyard.client.sharding.administration import Administration
from shardyard.client.sharding.api import DEFAULT_PREFETCH, Client, Exchange
from shardyard.client.sharding.channel import ShardingChannel
from shardyard.client.sharding.feed import Feed
from shardyard.client.sharding.message import DeliveredMessage
from shardyard.client.sharding.nodes import Nodes
from shardyard.client.sharding.publishing import Lane, checked, new_message
from shardyard.model import Closed, InvalidValue, RetryLater, ShardyardError, Stamp, UnknownExchange, Unroutable
from shardyard.model.checks import check_text
from shardyard.model.given import GivenHeaders, GivenValue
from shardyard.model.sharding import OutgoingMessage, Overflow, Policy
from shardyard.model.sharding_errors import refusal
from shardyard.runtime.clock import Clock, SystemClock
from shardyard.runtime.retry import retry
from shardyard.wire import sharding as wire
from shardyard.wire import sharding_frames as frames


class ShardingExchange(Exchange):
    """An exchange, to publish to. Publishes of one turn of the event loop travel together, in the order of the calls;
    one that has to be sent again, perhaps through another node, is stored once."""

    def __init__(self, client: "ShardingClient", name: str) -> None:
        self.name = name
        self._client = client

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
        message = new_message(body, routing_key, headers, cc, bcc, expiration_ms, properties, message_id)
        (outcome,) = await self._client.lane(self.name).publish([message])
        if isinstance(outcome, ShardyardError):
            raise outcome
        if mandatory and not outcome:
            raise Unroutable(self.name, routing_key)
        return outcome

    async def publish_batch(
        self, messages: Iterable[OutgoingMessage], *, mandatory: bool = True, stamp: Stamp | None = None
    ) -> list[int]:
        """If messages were refused, or are unroutable although `mandatory`, the first one raises its error, whose
        `refused` has the places of them all; the others are stored nevertheless.

        `stamp`: of a producer that numbers its batches itself. The same batch under the same stamp is stored once, also
        when another process sends it again, unless shards were added or removed in between.
        """
        batch = [checked(message) for message in messages]
        if not batch:
            return []
        lane = self._client.lane(self.name)
        outcomes = await (lane.publish(batch) if stamp is None else lane.publish_stamped(batch, stamp))
        error = refusal(self.name, batch, outcomes, mandatory=mandatory)
        if error is not None:
            raise error
        return [outcome for outcome in outcomes if not isinstance(outcome, ShardyardError)]

    async def delete(self) -> wire.Removed:
        """Delete the exchange. Returns which of its shards are left because they have unread messages: these can be
        consumed by their names, and go when they are empty."""
        return await self._client.administration.delete_exchange(self.name)


class ShardingClient(Client):
    """A client of the nodes of one system. Calls go to the node that answered last, and fail over to the others."""

    def __init__(
        self,
        brokers: str | Sequence[str],
        *,
        token: str | None = None,
        retry_seconds: float = 30.0,
        clock: Clock | None = None,
    ) -> None:
        """`brokers`: such as http://127.0.0.1:7400; several for fail-over. `token`: that of the brokers.
        `retry_seconds`: how long a call is retried before its last error is raised."""
        clock = clock or SystemClock()
        self._brokers = Brokers(brokers, token=token, retry_seconds=retry_seconds, carrier="http", clock=clock)
        self._nodes = Nodes(self._brokers.urls, token, retry_seconds, clock)
        self.administration = Administration(self._brokers)
        self._lanes: dict[str, Lane] = {}
        self._channels: list[ShardingChannel] = []
        self._got: ShardingChannel | None = None
        """Of the messages that `get` returned."""
        self._is_closed = False

    async def __aenter__(self) -> Self:
        await self._brokers.__aenter__()
        await self._nodes.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Publish what is waiting, unless the block ends with an error, and give back what is not acknowledged."""
        self._is_closed = True
        for lane in self._lanes.values():
            await lane.close(at_once=kind is not None)
        await asyncio.gather(*(channel.close() for channel in self._channels))
        await self._nodes.__aexit__(kind, error, trace)
        await self._brokers.__aexit__(kind, error, trace)

    # Messages

    def exchange(self, name: str) -> ShardingExchange:
        check_text("exchange", name)
        return ShardingExchange(self, name)

    def lane(self, exchange: str) -> Lane:
        if self._is_closed:
            raise Closed("the client")
        if exchange not in self._lanes:
            self._lanes[exchange] = Lane(self._nodes, exchange)
        return self._lanes[exchange]

    def channel(self, prefetch: int = DEFAULT_PREFETCH) -> ShardingChannel:
        if self._is_closed:
            raise Closed("the client")
        channel = ShardingChannel(self._nodes, prefetch)
        self._channels = [each for each in self._channels if not each.is_closed]
        self._channels.append(channel)
        return channel

    async def get(self, name: str, *, no_ack: bool = False) -> DeliveredMessage | None:
        check_text("name", name)
        if self._got is None:
            self._got = self.channel(1)
        channel = self._got

        async def get_once() -> DeliveredMessage | None:
            queues = await self._queues_of(name)
            random.shuffle(queues)
            for queue in queues:
                if queue.ready and queue.address is not None:
                    message = await self._get(channel, queue.name, queue.address, no_ack)
                    if message is not None:
                        return message
            unknown = [queue.name for queue in queues if queue.ready is None]
            if unknown:
                raise RetryLater(f"queue {unknown[0]!r} has no owner at the moment: try again")
            return None

        deadline = self._nodes.clock.monotonic() + self._nodes.retry_seconds
        return await retry(get_once, clock=self._nodes.clock, deadline=deadline)

    async def _get(self, channel: ShardingChannel, queue: str, address: str, no_ack: bool) -> DeliveredMessage | None:
        delivered: asyncio.Future[frames.Deliveries] = asyncio.get_running_loop().create_future()

        def deliver(feed: Feed, deliveries: frames.Deliveries) -> None:
            if not delivered.done():
                delivered.set_result(deliveries)
            else:  # nobody waits for it any more
                feed.settle(deliveries.tags, "return")
                feed.complete()

        try:
            feed = Feed(queue, await self._nodes.get(address), frames.Get(queue, no_ack), deliver)
            ended = asyncio.ensure_future(feed.ended.wait())
            try:
                async with asyncio.timeout(self._nodes.response_seconds):
                    await asyncio.wait((delivered, ended), return_when=asyncio.FIRST_COMPLETED)
            except BaseException:
                if not delivered.cancel():  # it has just come
                    deliver(feed, delivered.result())
                raise
            finally:
                ended.cancel()
        except (ConnectionError, TimeoutError) as error:
            raise RetryLater(f"the owner of queue {queue!r} does not answer ({error}): try again") from None
        if feed.error is not None:
            if isinstance(feed.error, ConnectionError):
                raise RetryLater(f"the owner of queue {queue!r} was lost ({feed.error}): try again")
            raise feed.error
        deliveries = delivered.result()
        feed.complete()
        return channel.hand_over(feed, deliveries, 0) if len(deliveries) else None

    async def _queues_of(self, name: str) -> list[wire.QueueInfo]:
        """The shards of an exchange, or the queue of that name."""
        try:
            return (await self.administration.describe(name)).shards
        except UnknownExchange:
            return [await self.administration.queue(name)]

    async def purge(self, name: str) -> int:
        try:
            return (await self.administration.purge_exchange(name)).messages
        except UnknownExchange:
            return (await self.administration.purge_queue(name)).messages

    # Administration

    async def declare_exchange(
        self,
        name: str,
        type: str = "x-modulus-hash",  # noqa: A002 as RabbitMQ calls it
        *,
        hash_header: str | None = None,
        hash_property: str | None = None,
    ) -> ShardingExchange:
        check_text("exchange", name)
        body = wire.NewExchange(name, type, hash_header, hash_property)  # type: ignore[arg-type]  # the node checks it
        return ShardingExchange(self, (await self.administration.declare_exchange(body)).name)

    async def exchanges(self) -> list[wire.ExchangeInfo]:
        """All exchanges."""
        return await self.administration.exchanges()

    async def declare_queue(self, name: str) -> wire.QueueInfo:
        return await self.administration.declare_queue(name)

    async def delete_queue(self, name: str) -> wire.Purged:
        return await self.administration.delete_queue(name)

    async def bind(self, exchange: str, queue: str, routing_key: str = "") -> None:
        await self.administration.bind(exchange, queue, routing_key)

    async def unbind(self, exchange: str, queue: str, routing_key: str = "") -> None:
        await self.administration.unbind(exchange, queue, routing_key)

    async def queues(self, exchange: str | None = None) -> list[wire.QueueInfo]:
        """All queues, or the shards of an exchange, with what is in them."""
        return await self.administration.queues(exchange)

    async def set_policy(
        self,
        name: str,
        pattern: str,
        shards_per_node: int,
        *,
        routing_key: str = "",
        priority: int = 0,
        message_ttl_ms: int | None = None,
        max_length: int | None = None,
        overflow: str = Overflow.DROP_HEAD,
        delivery_limit: int | None = None,
        dead_letter_exchange: str | None = None,
    ) -> Policy:
        """Set a policy: exchanges whose names match the pattern get as many shards on every node, at once and when they
        are declared later. With fewer shards than before, the surplus ones are `draining` in what `queues(exchange)`
        returns, until they are read."""
        check_text("policy", name)
        if isinstance(shards_per_node, bool) or not isinstance(shards_per_node, int) or shards_per_node < 1:
            raise InvalidValue("shards_per_node", shards_per_node, "a whole number of at least 1")
        body = wire.NewPolicy(
            pattern,
            shards_per_node,
            routing_key,
            priority,
            message_ttl_ms,
            max_length,
            str(overflow),  # type: ignore[arg-type]  # the node checks it
            delivery_limit,
            dead_letter_exchange,
        )
        return await self.administration.set_policy(name, body)

    async def policies(self) -> list[Policy]:
        """All policies."""
        return await self.administration.policies()

    async def clear_policy(self, name: str) -> wire.Removed:
        """Clear a policy. Returns which shards are left because they have unread messages."""
        return await self.administration.clear_policy(name)

    async def effective_policy(self, exchange: str) -> Policy | None:
        """The policy that applies to an exchange."""
        return await self.administration.effective_policy(exchange)

    async def rebalance(self, exchange: str) -> wire.RebalanceResult:
        """Move the messages that wait in the shards to where they would be routed now, in order per routing key."""
        return await self.administration.rebalance(exchange)

    async def nodes(self) -> list[wire.NodeInfo]:
        """All nodes that ever joined and were not forgotten."""
        return await self.administration.nodes()

    async def forget_node(self, name: str) -> wire.Removed:
        """Remove a node that does not run. Returns which of its shards are left because they have unread messages."""
        return await self.administration.forget_node(name)
