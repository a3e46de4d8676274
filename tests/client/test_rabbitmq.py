"""The client of RabbitMQ's sharded exchanges, on a real RabbitMQ."""

import asyncio
import contextlib
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path

import pytest

from shardyard.client.rabbitmq import RabbitMQClient, move_exchange
from shardyard.client.rabbitmq.consuming import RabbitMQConsumer
from shardyard.client.rabbitmq.errors import translated
from shardyard.client.rabbitmq.shards import NoShards
from shardyard.client.sharding import OutgoingMessage, ShardingClient
from shardyard.log import open_log
from shardyard.model import (
    Closed,
    Denied,
    ExchangeExists,
    InvalidCall,
    InvalidValue,
    PseudoQueue,
    RetryLater,
    UnknownDeliveryTag,
    UnknownExchange,
    UnknownQueue,
    Unroutable,
)
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
                await (await dead.connection()).close()  # nothing was said to the others
                with pytest.raises(RetryLater, match="was lost"):
                    await anext(lost[0])
                await settled([survivor], [1] * SHARDS)
                dying.pop_all()  # it has no connection that it could say anything on

    run(sharded, "sharded.dead", scenario)


def test_a_consumer_whose_connection_was_closed_attaches_no_more(
    sharded: RabbitMQ, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not iterate, and so does not know that it is lost."""
    monkeypatch.setattr("shardyard.client.rabbitmq.attachments.CHECK_SECONDS", 0.2)

    async def scenario(client: RabbitMQClient) -> None:
        def is_following() -> bool:
            return any(task.get_name() == "attachment to sharded.closed" for task in asyncio.all_tasks())

        async with consumers([client], "sharded.closed", 1) as lost:
            await settled(lost, [1] * SHARDS)
            assert is_following()
            await asyncio.to_thread(sharded.control, "close_all_connections", "a test")
            async with asyncio.timeout(SECONDS):
                while is_following():  # noqa: ASYNC110 it has no event for it
                    await asyncio.sleep(0.02)
            async with RabbitMQClient(sharded.url) as other, consumers([other], "sharded.closed", 1) as successor:
                await settled(successor, [1] * SHARDS)

    run(sharded, "sharded.closed", scenario)


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


def test_names_that_do_not_exist_are_refused_and_change_nothing_for_others(sharded: RabbitMQ) -> None:
    async def scenario(client: RabbitMQClient) -> None:
        exchange = client.exchange("sharded.calm")
        await exchange.publish("first")
        got = await client.get("sharded.calm")
        assert got is not None
        for _ in range(3):
            with pytest.raises(UnknownExchange, match="'nope' does not exist: RabbitMQ has none"):
                await client.exchange("nope").publish("x")
            for call in (client.get, client.purge):
                with pytest.raises(UnknownQueue, match="'nope' does not exist"):
                    await call("nope")
            async with client.channel() as channel:
                with pytest.raises(UnknownQueue):
                    await anext(channel.consume("nope"))
            with pytest.raises(UnknownExchange):
                await client.shards("nope")
        await got.ack()
        assert await exchange.publish("second") == 1
        assert await client.purge("sharded.calm") == 1

    run(sharded, "sharded.calm", scenario)


def test_an_exchange_that_was_deleted_is_unknown_until_it_is_declared_again(sharded: RabbitMQ) -> None:
    async def scenario(client: RabbitMQClient) -> None:
        exchange = client.exchange("sharded.again")
        await exchange.publish("x")
        async with RabbitMQClient(sharded.url) as other:
            await other.exchange("sharded.again").delete()
        for _ in range(2):
            with pytest.raises(UnknownExchange):
                await exchange.publish("x")
        await client.declare_exchange("sharded.again")
        assert await exchange.publish("x") == 1
        await client.purge("sharded.again")

    run(sharded, "sharded.again", scenario)


def test_an_exchange_that_was_deleted_is_not_taken_for_another_one(sharded: RabbitMQ) -> None:
    """RabbitMQ closes the channel that all publishes go through."""

    async def scenario(client: RabbitMQClient) -> None:
        good, gone = client.exchange("sharded.good"), await client.declare_exchange("sharded.gone")
        for exchange in (good, gone):
            await exchange.publish("x")  # both are known to exist
        async with RabbitMQClient(sharded.url) as other:
            await other.exchange("sharded.gone").delete()
        publishes = [good.publish("x", routing_key=str(n)) for n in range(100)]
        publishes.insert(50, gone.publish("x"))
        outcomes = await asyncio.gather(*publishes, return_exceptions=True)
        assert isinstance(outcomes.pop(50), UnknownExchange)
        refused = [outcome for outcome in outcomes if outcome != 1]
        assert refused  # otherwise this shows nothing
        for outcome in refused:
            assert isinstance(outcome, RetryLater)
            assert "publish again; what was published may be stored" in str(outcome)
        assert await good.publish("y") == 1
        await client.purge("sharded.good")

    run(sharded, "sharded.good", scenario)


def test_a_rabbitmq_that_stops_answering_does_not_cancel_its_callers(
    sharded: RabbitMQ, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardyard.client.rabbitmq.questions.HEARTBEAT_SECONDS", 1)
    monkeypatch.setattr("aiormq.connection.Connection.HEARTBEAT_GRACE_MULTIPLIER", 1)  # it waits 2 s
    process = int(sharded.control("eval", "list_to_integer(os:getpid())."))

    async def scenario(client: RabbitMQClient) -> None:
        exchange = client.exchange("sharded.hangs")
        await exchange.publish("x")
        assert await client.get("sharded.hangs", no_ack=True)
        shard, *_ = await client.shards("sharded.hangs")
        async with consumers([client], shard, 1) as (consumer,):
            os.kill(process, signal.SIGSTOP)
            try:
                async with asyncio.timeout(SECONDS):
                    calls = exchange.publish("y"), client.get("sharded.hangs"), consumer.close()
                    published, got, closed = await asyncio.gather(*calls, return_exceptions=True)
            finally:
                os.kill(process, signal.SIGCONT)
        assert isinstance(published, RetryLater)
        assert "publish again; what was published may be stored" in str(published)
        assert isinstance(got, RetryLater)
        assert closed is None
        assert await exchange.publish("z") == 1
        await client.purge("sharded.hangs")

    run(sharded, "sharded.hangs", scenario)


def test_a_caller_that_is_cancelled_stays_cancelled() -> None:
    async def call(begun: asyncio.Event) -> None:
        with translated():
            begun.set()
            await asyncio.Event().wait()

    async def scenario() -> None:
        with pytest.raises(RetryLater, match="it is not known what it has done: try again"), translated():
            raise asyncio.CancelledError  # as RabbitMQ's library does
        begun = asyncio.Event()
        task = asyncio.create_task(call(begun))
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await call(begun)

    asyncio.run(scenario())


def test_lost_connections_are_opened_again(sharded: RabbitMQ) -> None:
    async def scenario(client: RabbitMQClient) -> None:
        exchange = client.exchange("sharded.lost")
        async with client.channel() as channel:
            consumer = channel.consume("sharded.lost")
            await exchange.publish("x")
            taken = await anext(consumer)
            await asyncio.to_thread(sharded.control, "close_all_connections", "a test")
            with pytest.raises(RetryLater, match="iterate again"):
                await anext(consumer)
            with pytest.raises(UnknownDeliveryTag, match="went back to its queue"):
                await taken.ack()
            again = await anext(consumer)
            assert (again.body, again.redelivered) == (b"x", True)
            await again.ack()
        assert await exchange.publish("y") == 1
        message = await client.get("sharded.lost")
        assert message is not None
        await message.ack()

    run(sharded, "sharded.lost", scenario)


def test_the_name_of_a_sharded_exchange_is_no_queue(sharded: RabbitMQ) -> None:
    async def scenario(client: RabbitMQClient) -> None:
        name = "sharded.pseudo"
        for refused in (
            client.declare_queue(name),
            client.delete_queue(name),
            client.bind(name, name),
            client.unbind(name, name),
        ):
            with pytest.raises(PseudoQueue, match="stands for all of its shards"):
                await refused
        assert len(await client.shards(name)) == SHARDS
        assert await client.exchange(name).publish_batch([OutgoingMessage(b"x", str(n)) for n in range(50)]) == [1] * 50
        await client.purge(name)

    run(sharded, "sharded.pseudo", scenario)


def test_a_queue_of_its_own_is_bound_read_and_deleted(sharded: RabbitMQ) -> None:
    async def scenario(client: RabbitMQClient) -> None:
        await client.declare_queue("own")
        with pytest.raises(UnknownExchange):
            await client.bind("nope", "own")
        with pytest.raises(UnknownQueue):
            await client.bind("plain.own", "nope")
        await client.bind("plain.own", "own")
        await client.exchange("plain.own").publish_batch([OutgoingMessage(b"x")] * 2)
        for _ in range(2):
            message = await client.get("own", no_ack=True)
            assert message is not None
        await client.delete_queue("own")
        with pytest.raises(UnknownQueue):
            await client.get("own")

    run(sharded, "plain.own", scenario)


def test_a_delivery_is_settled_once(sharded: RabbitMQ) -> None:
    async def scenario(client: RabbitMQClient) -> None:
        await client.exchange("sharded.once").publish_batch([OutgoingMessage(b"x")] * 4)
        async with client.channel() as channel:
            first = await anext(channel.consume("sharded.once"))
            await first.ack()
            with pytest.raises(UnknownDeliveryTag, match="settled already"):
                await first.ack()
        got = [await client.get("sharded.once") for _ in range(3)]
        one, two, three = (message for message in got if message is not None)
        await two.ack(multiple=True)
        for settled in (one, two):
            with pytest.raises(UnknownDeliveryTag, match="settled already"):
                await settled.nack()
        await three.ack()
        assert await client.get("sharded.once") is None
        await client.exchange("sharded.once").publish("x")
        free = await client.get("sharded.once", no_ack=True)
        assert free is not None
        with pytest.raises(UnknownDeliveryTag, match="no_ack"):
            await free.ack()

    run(sharded, "sharded.once", scenario)


def test_what_rabbitmq_refuses_is_explained(sharded: RabbitMQ) -> None:
    async def scenario(client: RabbitMQClient) -> None:
        with pytest.raises(ExchangeExists, match="declared with type 'x-modulus-hash': declare it so"):
            await client.declare_exchange("plain.refused", "fanout")
        with pytest.raises(InvalidValue, match="type is 'foo': expected a type that this RabbitMQ has"):
            await client.declare_exchange("other", "foo")
        with pytest.raises(Denied, match="reserved prefix"):
            await client.declare_exchange("amq.mine", "fanout")
        for wrong in (sharded.url.replace("guest:guest", "guest:wrong"), f"{sharded.url}nope"):
            with pytest.raises(Denied, match="refused the"):
                async with RabbitMQClient(wrong):
                    pass
        assert await client.exchange("plain.refused").publish("x", mandatory=False) == 0

    run(sharded, "plain.refused", scenario)


def test_a_client_that_is_not_open(sharded: RabbitMQ) -> None:
    async def scenario(_: RabbitMQClient) -> None:
        client = RabbitMQClient(sharded.url)
        exchange = client.exchange("plain.closed")
        with pytest.raises(InvalidCall, match="async with"):
            await exchange.publish("x")
        async with client:
            assert await exchange.publish("x", mandatory=False) == 0
        with pytest.raises(Closed):
            await exchange.publish("x")

    run(sharded, "plain.closed", scenario)


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
