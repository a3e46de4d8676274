"""Clients with nodes whose shards and owners change, in one process."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator

import pytest

from shardyard.client.sharding import Message, ShardingClient
from shardyard.client.sharding.api import Consumer
from shardyard.model import UnknownQueue
from tests.server.sharding import Nodes, RunningNode, run, run_two, until


@contextlib.asynccontextmanager
async def consuming(client: ShardingClient, name: str = "images", **options: bool) -> AsyncIterator[list[Message]]:
    """What a consumer has got and acknowledged."""
    found: list[Message] = []

    async def work(consumer: Consumer) -> None:
        async for message in consumer:
            found.append(message)
            await message.ack()

    async with client.channel(prefetch=5) as channel:
        task = asyncio.create_task(work(channel.consume(name, **options)))
        try:
            yield found
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def until_got(count: int, *consumers: list[Message]) -> None:
    async def got() -> bool:
        return len({message.body for found in consumers for message in found}) >= count

    await until(got)


async def publish(client: ShardingClient, count: int, first: int = 0) -> None:
    images = client.exchange("images")
    bodies = [f"m{number}" for number in range(first, first + count)]
    await asyncio.gather(*(images.publish(body, routing_key=body) for body in bodies))


async def counts(client: ShardingClient) -> list[int]:
    """The consumers of each shard, in ascending order."""
    return sorted(shard.consumers or 0 for shard in await client.queues("images"))


def test_consumers_are_spread_evenly_and_again_when_one_leaves() -> None:
    async def scenario(nodes: Nodes, node: RunningNode) -> None:
        async with nodes.client(node) as client, contextlib.AsyncExitStack() as stack:
            await client.declare_exchange("images")
            await client.set_policy("p", "^images$", 3)
            leaving = await stack.enter_async_context(contextlib.AsyncExitStack())
            consumers = [await leaving.enter_async_context(consuming(client))]

            async def has(expected: list[int]) -> bool:
                return await counts(client) == expected

            await until(lambda: has([1, 1, 1]))  # one reads all three
            for expected in ([1, 1, 1], [1, 1, 1], [1, 1, 2], [1, 2, 2], [2, 2, 2]):
                consumers.append(await stack.enter_async_context(consuming(client)))
                await until(lambda expected=expected: has(expected))  # type: ignore[misc]
            await publish(client, 60)
            await until_got(60, *consumers)
            await leaving.aclose()
            await until(lambda: has([1, 2, 2]))

    run(scenario)


def test_thirty_two_consumers_at_once_on_eight_shards_are_four_each() -> None:
    async def scenario(nodes: Nodes, one: RunningNode, other: RunningNode) -> None:
        async with nodes.client(one) as here, nodes.client(other) as there, contextlib.AsyncExitStack() as stack:
            await here.declare_exchange("images")
            await here.set_policy("p", "^images$", 4)
            await there.nodes()
            for _ in range(16):
                for client in (here, there):
                    await stack.enter_async_context(consuming(client))

            async def even() -> bool:
                return await counts(here) == [4] * 8

            await until(even)

    run_two(scenario)


def test_a_consumer_goes_on_while_shards_come_drain_and_go() -> None:
    async def scenario(nodes: Nodes, node: RunningNode) -> None:
        async with nodes.client(node) as client:
            await client.declare_exchange("images")
            await client.set_policy("p", "^images$", 4)
            await publish(client, 50)
            async with consuming(client) as found:
                await until_got(50, found)
                await client.set_policy("p", "^images$", 1)
                await publish(client, 50, first=50)
                await until_got(100, found)

                async def one_left() -> bool:
                    return len(await client.queues("images")) == 1

                await until(one_left)
                await client.set_policy("p", "^images$", 3)
                await publish(client, 50, first=100)
                await until_got(150, found)
                assert len(found) == 150

    run(scenario)


def test_a_consumer_goes_on_during_a_rebalance_and_order_per_key_is_kept() -> None:
    async def scenario(nodes: Nodes, node: RunningNode) -> None:
        async with nodes.client(node) as client:
            images = await client.declare_exchange("images")
            await client.set_policy("p", "^images$", 1)
            for number in range(30):
                await asyncio.gather(*(images.publish(f"{key} {number}", routing_key=f"key{key}") for key in range(4)))
            await client.set_policy("p", "^images$", 3)
            done = await client.rebalance("images")
            assert done.total == 120
            assert len([count for count in done.messages.values() if count]) > 1
            async with consuming(client) as found:
                await until_got(120, found)
                publishing = asyncio.create_task(publish(client, 20))
                await client.rebalance("images")  # with a consumer and a publisher
                await publishing
                await until_got(140, found)
            first_seen = dict.fromkeys(message.body.decode() for message in found)
            for key in range(4):
                mine = [int(body.split()[1]) for body in first_seen if body.startswith(f"{key} ")]
                assert mine == list(range(30))

    run(scenario)


def test_consuming_by_the_name_of_a_queue_ends_when_it_is_deleted() -> None:
    async def scenario(nodes: Nodes, node: RunningNode) -> None:
        async with nodes.client(node) as client, client.channel() as channel:
            await client.declare_exchange("events", "fanout")
            await client.declare_queue("audit")
            await client.bind("events", "audit")
            await client.exchange("events").publish("a")
            consumer = channel.consume("audit")
            message = await anext(consumer)
            await message.ack()
            assert (message.body, message.queue) == (b"a", "audit")
            await client.delete_queue("audit")
            with pytest.raises(UnknownQueue):
                await anext(consumer)

    run(scenario)


def test_a_local_consumer_reads_only_the_shards_of_its_node() -> None:
    async def scenario(nodes: Nodes, one: RunningNode, other: RunningNode) -> None:
        async with nodes.client(one) as client, nodes.client(other) as there:
            await there.nodes()
            await client.declare_exchange("images")
            await client.set_policy("p", "^images$", 2)

            async def settled() -> bool:
                shards = await client.queues("images")
                return len(shards) == 4 and Counter(shard.owner for shard in shards) == {"a": 2, "b": 2}

            await until(settled)
            async with consuming(client, local=True) as here, consuming(there, local=True) as away:
                await publish(client, 80)
                await until_got(80, here, away)
                owners = {shard.name: shard.owner for shard in await client.queues("images")}
                assert {owners[message.queue] for message in here} == {"a"}
                assert {owners[message.queue] for message in away} == {"b"}

    run_two(scenario)


def test_dead_letters_are_consumed_by_the_name_of_their_queue() -> None:
    async def scenario(nodes: Nodes, node: RunningNode) -> None:
        async with nodes.client(node) as client, client.channel() as channel:
            images = await client.declare_exchange("images")
            await client.set_policy("p", "^images$", 1, delivery_limit=2)
            await images.publish("rejected", routing_key="k", properties={"message_id": "7"})
            await images.publish("failing", routing_key="k")
            consumer = channel.consume("images")
            await (await anext(consumer)).reject()
            seen = []
            for _ in range(3):
                message = await anext(consumer)
                seen.append((message.redelivered, message.delivery_count))
                await message.nack()
            assert seen == [(False, 0), (True, 1), (True, 2)]

            async def created() -> bool:
                return "dead letters: images" in [queue.name for queue in await client.queues()]

            await until(created)
            letters = channel.consume("dead letters: images")
            found = {}
            for _ in range(2):
                letter = await anext(letters)
                found[letter.body] = letter
                await letter.ack()
            assert set(found) == {b"rejected", b"failing"}
            assert found[b"rejected"].properties["message_id"] == "7"

    run(scenario)


def test_messages_are_got_acknowledged_and_given_back() -> None:
    async def scenario(nodes: Nodes, one: RunningNode, other: RunningNode) -> None:
        async with nodes.client(one) as client, nodes.client(other) as there:
            await there.nodes()
            await client.declare_exchange("images")
            await client.set_policy("p", "^images$", 1)
            await publish(client, 10)
            got = [await client.get("images") for _ in range(10)]
            assert len({message.body for message in got if message is not None}) == 10  # from both nodes
            assert await client.get("images") is None
            assert got[0] is not None
            await got[0].nack()
            again = await there.get("images")
            while again is None:  # the nack is on its way
                again = await there.get("images")
            assert (again.body, again.redelivered) == (got[0].body, True)
            await again.ack()
            unread = await client.get("images", no_ack=True)
            assert unread is None

    run_two(scenario)
