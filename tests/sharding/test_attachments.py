"""Consumers are attached to shards: evenly, atomically, across nodes, and spread again when something changes."""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable
from typing import cast

import pytest

from shardyard.groups import protocol
from shardyard.model import RetryLater, TooLarge, UnknownQueue
from shardyard.model.sharding import NODES_GROUP, SHARDS_TOPIC, shard_name
from shardyard.registry import OwnershipRow, SettingRow, Snapshot, Transaction
from shardyard.sharding import attachment_rows
from shardyard.sharding.attachments import AttachedQueues, Attachment
from shardyard.sharding.rows import QUEUES
from tests.queues.engines import REGISTRIES
from tests.sharding.conftest import OpenYard
from tests.sharding.yard import WHO, AttachingNode, ShardingYard

ALL_ENGINES = pytest.mark.parametrize("engine", REGISTRIES)


async def sharded(yard: ShardingYard, shards: int, *nodes: str) -> None:
    """The exchange `images` with so many shards on each node."""
    for name in nodes or ("a",):
        await yard.administration.register_node(name)
    await yard.declare("images")
    await yard.set_policy(shards)


def counts(consumers: Iterable[Attachment], shards: int) -> list[int]:
    found = Counter(consumer.attached.own for consumer in consumers)
    return [found[shard_name("images", "a", index)] for index in range(shards)]


def read(consumers: Iterable[Attachment]) -> set[str]:
    return {queue for consumer in consumers for queue in consumer.attached.queues}


async def until(condition: Callable[[], bool], consumers: Iterable[Attachment]) -> None:
    """Wait until the condition is true, which it becomes by a change of one of these consumers."""

    async def follow(consumer: Attachment) -> None:
        async for _ in consumer:
            changed.set()

    changed = asyncio.Event()
    tasks = [asyncio.create_task(follow(consumer)) for consumer in consumers]
    try:
        async with asyncio.timeout(20):
            while not condition():
                changed.clear()
                await changed.wait()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@ALL_ENGINES
async def test_the_consume_interceptor_counts_1_0_0_then_1_1_0_then_1_1_1_then_2_1_1(opened: OpenYard) -> None:
    async with opened() as yard, AttachingNode(yard, "a") as node:
        await sharded(yard, 3)
        consumers, found = [], []
        for _ in range(4):
            consumers.append(await node.attachments.attach("images"))
            found.append(counts(consumers, 3))
        assert found == [[1, 0, 0], [1, 1, 0], [1, 1, 1], [2, 1, 1]]


async def test_32_consumers_at_once_on_8_shards_are_4_each_100_times_of_100(opened: OpenYard) -> None:
    async with opened() as yard, AttachingNode(yard, "a") as node:
        await sharded(yard, 8)
        for _ in range(100):
            consumers = await asyncio.gather(*(node.attachments.attach("images") for _ in range(32)))
            assert counts(consumers, 8) == [4] * 8
            await asyncio.gather(*(consumer.detach() for consumer in consumers))


@ALL_ENGINES
async def test_consumers_at_several_nodes_at_once_are_spread_evenly(opened: OpenYard) -> None:
    async with (
        opened() as yard,
        AttachingNode(yard, "a") as first,
        AttachingNode(yard, "b") as second,
        AttachingNode(yard, "c") as third,
    ):
        await sharded(yard, 8)
        for _ in range(5):
            nodes = [first, second, third] * 10 + [first, second]
            consumers = await asyncio.gather(*(node.attachments.attach("images") for node in nodes))
            await until(lambda: counts(consumers, 8) == [4] * 8, consumers)  # noqa: B023 used at once
            await asyncio.gather(*(consumer.detach() for consumer in consumers))


@ALL_ENGINES
async def test_when_consumers_leave_the_others_are_spread_again_and_no_shard_is_left_unread(opened: OpenYard) -> None:
    async with opened() as yard, AttachingNode(yard, "a") as first, AttachingNode(yard, "b") as second:
        await sharded(yard, 4)
        here = await asyncio.gather(*(first.attachments.attach("images") for _ in range(4)))
        there = await asyncio.gather(*(second.attachments.attach("images") for _ in range(4)))
        await until(lambda: counts([*here, *there], 4) == [2] * 4, [*here, *there])
        await asyncio.gather(*(consumer.detach() for consumer in here))
        await until(lambda: counts(there, 4) == [1] * 4, there)
        await asyncio.gather(*(consumer.detach() for consumer in there[:3]))
        await until(lambda: len(there[3].attached.queues) == 4, there[3:])


async def test_fewer_consumers_than_shards_read_all_of_them(opened: OpenYard) -> None:
    async with opened() as yard, AttachingNode(yard, "a") as node:
        await sharded(yard, 8)
        consumers = [await node.attachments.attach("images") for _ in range(3)]
        assert sorted(len(consumer.attached.queues) for consumer in consumers) == [2, 3, 3]
        assert read(consumers) == set(await yard.shards())


async def test_new_shards_are_read_and_draining_ones_until_they_are_gone(opened: OpenYard) -> None:
    async with opened() as yard, AttachingNode(yard, "a") as node:
        await sharded(yard, 2)
        consumers = [await node.attachments.attach("images") for _ in range(2)]
        await yard.set_policy(4)
        await until(lambda: len(read(consumers)) == 4, consumers)
        last = (await yard.topology()).shards("images")[3]
        await yard.store(last, b"1")
        await yard.set_policy(1)
        await until(lambda: read(consumers) == {shard_name("images", "a", 0), last.name}, consumers)
        assert [consumer.attached.own for consumer in consumers] == [shard_name("images", "a", 0)] * 2
        draining = (await yard.topology()).queues[last.name]
        assert await yard.administration.remove_if_drained(draining, 1)
        await until(lambda: read(consumers) == {shard_name("images", "a", 0)}, consumers)


async def test_consumers_end_when_the_last_shard_of_a_deleted_exchange_is_gone(opened: OpenYard) -> None:
    async with opened() as yard, AttachingNode(yard, "a") as node:
        await sharded(yard, 2)
        consumer = await node.attachments.attach("images")
        queue = (await yard.topology()).shards("images")[1]
        await yard.store(queue, b"1")
        await yard.administration.delete_exchange("images", WHO)
        await until(lambda: consumer.attached == AttachedQueues(None, (queue.name,)), [consumer])
        await yard.administration.remove_if_drained((await yard.topology()).queue(queue.name), 1)
        with pytest.raises(UnknownQueue):
            async with asyncio.timeout(20):
                async for _ in consumer:
                    pass
        with pytest.raises(UnknownQueue):
            await node.attachments.attach("images")


@ALL_ENGINES
async def test_consumers_of_a_dead_node_are_dropped(opened: OpenYard) -> None:
    async with opened() as yard, AttachingNode(yard, "a") as first, AttachingNode(yard, "b") as second:
        await sharded(yard, 2)
        lost = [await second.attachments.attach("images") for _ in range(2)]
        consumer = await first.attachments.attach("images")
        await second.evict()
        await until(lambda: len(consumer.attached.queues) == 2, [consumer])

        with pytest.raises(RetryLater):
            await second.attachments.attach("images")
        await second.join()  # it was only stalled
        await until(lambda: counts([consumer, *lost], 2) in ([1, 2], [2, 1]), [consumer, *lost])


async def test_a_node_that_stops_detaches_its_consumers(opened: OpenYard) -> None:
    async with opened() as yard, AttachingNode(yard, "a") as first:
        await sharded(yard, 2)
        consumer = await first.attachments.attach("images")
        async with AttachingNode(yard, "b") as second:
            other = await second.attachments.attach("images")
            await until(lambda: len(consumer.attached.queues) == 1, [consumer])
        assert other.error is not None
        await until(lambda: len(consumer.attached.queues) == 2, [consumer])
        await consumer.detach()
        assert await yard.node.transactions.read(lambda tx: tx.settings(attachment_rows.SCOPE)) == []


async def test_local_consumers_read_only_shards_that_their_home_owns(opened: OpenYard) -> None:
    async with opened() as yard, AttachingNode(yard, "a") as first, AttachingNode(yard, "b") as second:
        await sharded(yard, 4)
        shards = (await yard.topology()).shards("images")

        async def own(*owners: str) -> None:
            rows = [
                OwnershipRow(NODES_GROUP, shard.partition, owner, epoch=1, target=owner)
                for shard, owner in zip(shards, owners, strict=True)
            ]
            assert all(row.partition.topic == SHARDS_TOPIC for row in rows)

            def work(tx: Transaction) -> None:
                tx.put_ownerships(rows)
                protocol.touch(tx, NODES_GROUP)

            await yard.node.transactions.run(work)

        await own("a", "a", "b", "b")
        here = await first.attachments.attach("images", local=True)
        assert set(here.attached.queues) == {shards[0].name, shards[1].name}
        there = await second.attachments.attach("images")
        await until(lambda: len(read([here, there])) == 4, [here, there])
        await own("b", "b", "b", "a")
        await until(lambda: here.attached.queues == (shards[3].name,), [here, there])
        await until(lambda: len(read([here, there])) == 4, [here, there])


async def test_a_consumer_of_a_queue_reads_that_queue_until_it_is_deleted(opened: OpenYard) -> None:
    async with opened() as yard, AttachingNode(yard, "a") as node:
        await yard.administration.declare_queue("q", WHO)
        consumers = [await node.attachments.attach("q") for _ in range(2)]
        assert [consumer.attached for consumer in consumers] == [AttachedQueues("q")] * 2
        assert node.attachments.count("q") == 2
        await consumers[0].detach()
        assert node.attachments.count("q") == 1
        await yard.administration.delete_queue("q", WHO)
        with pytest.raises(UnknownQueue):
            async with asyncio.timeout(20):
                async for _ in consumers[1]:
                    pass
        async for _ in consumers[0]:
            pytest.fail("it is detached")


async def test_what_can_not_be_consumed_is_named(opened: OpenYard) -> None:
    async with opened() as yard, AttachingNode(yard, "a") as node:
        await yard.declare("plain")
        for name in ("plain", "none"):
            with pytest.raises(UnknownQueue, match=name):
                await node.attachments.attach(name)


async def test_beyond_the_limit_consumers_are_refused_and_the_others_stay(
    opened: OpenYard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attachment_rows, "MAX_CONSUMERS", 3)
    async with opened() as yard, AttachingNode(yard, "a") as node:
        await sharded(yard, 2)
        found = await asyncio.gather(*(node.attachments.attach("images") for _ in range(5)), return_exceptions=True)
        assert [isinstance(one, TooLarge) for one in found].count(True) == 2
        assert node.attachments.count("images") == 3


async def test_a_caller_that_gives_up_leaves_no_consumer_behind(opened: OpenYard) -> None:
    async with opened() as yard, AttachingNode(yard, "a") as node:
        await sharded(yard, 2)
        consumer = await node.attachments.attach("images")
        task = asyncio.create_task(node.attachments.attach("images"))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: len(consumer.attached.queues) == 2, [consumer])
        assert node.attachments.count("images") == 1


async def test_the_queues_are_read_once_for_all_exchanges(opened: OpenYard) -> None:
    class Counting:
        """A transaction that notes which scopes are read."""

        def __init__(self, tx: Snapshot) -> None:
            self._tx = tx

        def __getattr__(self, name: str) -> object:
            return getattr(self._tx, name)

        def settings(self, scope: str) -> list[SettingRow]:
            scopes.append(scope)
            return self._tx.settings(scope)

    exchanges = ["images", "texts", "videos"]
    scopes: list[str] = []
    async with opened() as yard, AttachingNode(yard, "a") as node:
        await yard.administration.register_node("a")
        for exchange in exchanges:
            await yard.declare(exchange)
        await yard.set_policy(1, pattern=".")
        wanted = {exchange: [attachment_rows.Wanted(f"consumer of {exchange}", False)] for exchange in exchanges}
        plans = await yard.node.transactions.read(
            lambda tx: attachment_rows.plan(cast(Snapshot, Counting(tx)), node.identity, wanted)
        )
    own = {exchange: [consumer.own for consumer in after.consumers] for exchange, (_, after) in plans.items()}
    assert own == {exchange: [shard_name(exchange, "a", 0)] for exchange in exchanges}
    assert scopes.count(QUEUES) == 1
