"""The client of RabbitMQ's sharded exchanges, on a real RabbitMQ."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path

import pytest

from shardyard.client.rabbitmq import RabbitMQClient, move_exchange
from shardyard.client.rabbitmq.consuming import RabbitMQConsumer
from shardyard.client.rabbitmq.shards import NoShards
from shardyard.client.sharding import OutgoingMessage, ShardingClient
from shardyard.log import open_log
from shardyard.model import InvalidValue, RetryLater, Unroutable
from shardyard.registry import open_registry
from shardyard.server import running
from tests.rabbitmq import RabbitMQ
from tests.servers import free_port

SHARDS = 8
SECONDS = 30.0
"""Within which consumers agree."""


@pytest.fixture(scope="module")
def sharded(rabbitmq: RabbitMQ) -> RabbitMQ:
    """Exchanges whose names begin with `sharded.` have shards."""
    rabbitmq.set_policy("sharded", r"^sharded\.", f'{{"shards-per-node": {SHARDS}}}')
    return rabbitmq


def run(rabbitmq: RabbitMQ, exchange: str, scenario: Callable[[RabbitMQClient], Awaitable[None]]) -> None:
    async def whole() -> None:
        async with RabbitMQClient(rabbitmq.url) as client:
            declared = await client.declare_exchange(exchange)
            try:
                await scenario(client)
            finally:
                await declared.delete()

    asyncio.run(whole())


@contextlib.asynccontextmanager
async def consumers(
    clients: Sequence[RabbitMQClient], exchange: str, count: int
) -> AsyncIterator[list[RabbitMQConsumer]]:
    """So many consumers, which come at the same time, through these clients in turn."""
    async with contextlib.AsyncExitStack() as stack:
        channels = [client.channel() for client in clients]
        for channel in channels:
            await stack.enter_async_context(channel)
        started = [channels[n % len(channels)].consume(exchange) for n in range(count)]
        await asyncio.gather(*(consumer.start() for consumer in started))
        yield started


async def settled(consumers: Sequence[RabbitMQConsumer], expected: list[int]) -> None:
    """Wait until the shards have so many readers each, in any order."""
    async with asyncio.timeout(SECONDS):
        while True:
            readers = Counter(queue for consumer in consumers for queue in consumer.queues)
            if sorted(readers.values()) == expected:
                return
            await asyncio.sleep(0.02)


def test_consumers_of_several_connections_at_once_are_attached_evenly(sharded: RabbitMQ) -> None:
    """The plugin gave 8, 7, 1, 7, 1, 8, 0 and 0 of 32 consumers to the shards."""

    async def scenario(client: RabbitMQClient) -> None:
        async with (
            RabbitMQClient(sharded.url) as second,
            consumers([client, second], "sharded.even", 32) as all_of_them,
        ):
            await settled(all_of_them, [4] * SHARDS)
            for consumer in all_of_them[::2]:
                await consumer.close()
            await settled(all_of_them[1::2], [2] * SHARDS)

    run(sharded, "sharded.even", scenario)


def test_no_shard_is_left_unread_by_fewer_consumers_than_shards(sharded: RabbitMQ) -> None:
    async def scenario(client: RabbitMQClient) -> None:
        async with consumers([client], "sharded.few", 3) as three:
            await settled(three, [1] * SHARDS)
            assert sorted(len(consumer.queues) for consumer in three) == [2, 3, 3]
            exchange = client.exchange("sharded.few")
            bodies = {b"%d" % n for n in range(100)}
            await exchange.publish_batch([OutgoingMessage(body, body.decode()) for body in bodies])
            found: set[bytes] = set()
            all_found = asyncio.Event()

            async def read(consumer: RabbitMQConsumer) -> None:
                async for message in consumer:
                    await message.ack()
                    found.add(message.body)
                    if found == bodies:
                        all_found.set()

            reading = [asyncio.create_task(read(consumer)) for consumer in three]
            async with asyncio.timeout(SECONDS):
                await all_found.wait()
            for task in reading:
                task.cancel()
            await asyncio.gather(*reading, return_exceptions=True)

    run(sharded, "sharded.few", scenario)


def test_the_consumers_of_a_process_that_died_are_replaced(sharded: RabbitMQ, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardyard.client.rabbitmq.attachments.CHECK_SECONDS", 0.2)

    async def scenario(client: RabbitMQClient) -> None:
        async with contextlib.AsyncExitStack() as dying:
            dead = RabbitMQClient(sharded.url)
            await dying.enter_async_context(dead)
            async with consumers([client], "sharded.dead", 1) as (survivor,):
                lost = await dying.enter_async_context(consumers([dead], "sharded.dead", 3))
                await settled([survivor, *lost], [1] * SHARDS)
                assert len(survivor.queues) < SHARDS
                await dead.connection.close()  # nothing was said to the others
                with pytest.raises(RetryLater, match="was lost"):
                    await anext(lost[0])
                await settled([survivor], [1] * SHARDS)
                dying.pop_all()  # it has no connection that it could say anything on

    run(sharded, "sharded.dead", scenario)


def test_messages_are_published_got_and_purged(sharded: RabbitMQ) -> None:
    async def scenario(client: RabbitMQClient) -> None:
        exchange = client.exchange("sharded.basics")
        sent = await exchange.publish(
            "hello",
            routing_key="a",
            headers={"color": "red"},
            properties={"content_type": "text/plain"},
            message_id="7",
        )
        assert sent == 1
        message = await client.get("sharded.basics")
        assert message is not None
        assert (message.body, message.routing_key, message.redelivered) == (b"hello", "a", False)
        assert message.headers == (("color", b"red"),)
        assert message.properties == {"content_type": "text/plain", "message_id": "7"}
        await message.nack()
        again = await client.get("sharded.basics")
        assert again is not None
        assert again.redelivered
        await again.ack()
        assert await client.get("sharded.basics") is None
        await exchange.publish_batch([OutgoingMessage(b"x", str(n)) for n in range(20)])
        assert await client.purge("sharded.basics") == 20

    run(sharded, "sharded.basics", scenario)


def test_what_a_consumer_did_not_take_goes_back_when_it_is_closed(sharded: RabbitMQ) -> None:
    async def scenario(client: RabbitMQClient) -> None:
        exchange = client.exchange("sharded.back")
        await exchange.publish_batch([OutgoingMessage(b"x", str(n)) for n in range(10)])
        async with client.channel() as channel:
            first, second = channel.consume("sharded.back"), channel.consume("sharded.back")
            taken = await anext(first)
            await first.close()
            await taken.ack(multiple=True)  # and nothing of the other consumer
            rest = [await anext(second) for _ in range(9)]
            assert len(rest) == 9
            await rest[-1].ack(multiple=True)
        assert await client.get("sharded.back") is None

    run(sharded, "sharded.back", scenario)


def test_an_exchange_without_shards(sharded: RabbitMQ) -> None:
    async def scenario(client: RabbitMQClient) -> None:
        with pytest.raises(NoShards, match="set a policy"):
            await client.shards("plain")
        with pytest.raises(Unroutable):
            await client.exchange("plain").publish("lost", routing_key="a")
        assert await client.exchange("plain").publish("dropped", routing_key="a", mandatory=False) == 0

    run(sharded, "plain", scenario)


def test_a_server_that_is_not_there_and_an_address_that_is_none() -> None:
    async def scenario() -> None:
        with pytest.raises(RetryLater, match="check the address"):
            async with RabbitMQClient(f"amqp://guest:secret@127.0.0.1:{free_port()}/"):
                pass

    asyncio.run(scenario())
    with pytest.raises(InvalidValue, match="amqp://user:password@host/"):
        RabbitMQClient("http://127.0.0.1:7400")


def test_all_shards_are_moved_to_a_node_of_shardyard(sharded: RabbitMQ, tmp_path: Path) -> None:
    messages = [OutgoingMessage(b"%d" % n, f"key{n % 50}", (("n", b"%d" % n),)) for n in range(600)]

    async def scenario(client: RabbitMQClient) -> None:
        await client.exchange("sharded.moved").publish_batch(messages)
        async with open_log(f"sqlite:///{tmp_path}/log") as log:
            with open_registry(f"sqlite:///{tmp_path}/registry.db") as registry:
                async with running(log, registry) as url, ShardingClient(url) as target:
                    await target.declare_exchange("moved")
                    await target.set_policy("all", ".*", shards_per_node=3)
                    moved = await move_exchange(client, target, "sharded.moved", to="moved", batch_messages=50)
                    assert sum(moved.values()) == len(messages)
                    assert len(moved) == SHARDS
                    found = [await target.get("moved", no_ack=True) for _ in messages]
                    assert await target.get("moved") is None
        by_key: dict[str, list[bytes]] = {}
        for message in found:
            assert message is not None
            assert message.headers == (("n", message.body),)
            by_key.setdefault(message.routing_key, []).append(message.body)
        assert by_key == {f"key{k}": [b"%d" % n for n in range(k, 600, 50)] for k in range(50)}

    run(sharded, "sharded.moved", scenario)
