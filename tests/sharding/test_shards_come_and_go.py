"""Shards are created, drained and removed while messages are published through nodes that learn of it late."""

import asyncio

import pytest

from shardyard.model.sharding import ExchangeType, QueueState
from shardyard.sharding import node as node_module
from shardyard.sharding.node import ShardingNode
from tests.sharding.conftest import OpenYard
from tests.sharding.serving import Acknowledging, nodes, publish
from tests.sharding.yard import until

BATCH = 10


@pytest.mark.parametrize("engine", ["memory", "sqlite"])
@pytest.mark.parametrize("kind", [ExchangeType.MODULUS_HASH, ExchangeType.CONSISTENT_HASH])
async def test_every_message_that_was_taken_is_delivered(
    opened: OpenYard, kind: ExchangeType, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("DRAIN_SECONDS", "LOOK_SECONDS"):  # empty shards go at once
        monkeypatch.setattr(node_module, name, 0.002)
    async with opened() as yard, nodes(yard, "a", "b") as both:
        await yard.declare("images", kind)
        await yard.set_policy(1)
        for node in both:
            await node.topology_cache.refresh()
        consumer = Acknowledging(both)
        consuming = asyncio.create_task(consumer.run())
        stop, published = asyncio.Event(), 0

        async def publish_on(node: ShardingNode) -> None:
            nonlocal published
            while not stop.is_set():
                first, published = published, published + BATCH
                await publish(node, range(first, first + BATCH))

        publishing = [asyncio.create_task(publish_on(node)) for node in both]
        for shards in (4, 1, 3, 2, 5, 1, 4, 1):
            await yard.set_policy(shards)
            seen = published
            await until(lambda: published >= seen + 5 * BATCH)  # noqa: B023 used at once
        while len((await yard.topology()).queues) > 2:  # noqa: ASYNC110 there is no event for it
            await asyncio.sleep(0.001)  # shards are removed while messages are published
        stop.set()
        await asyncio.gather(*publishing)
        await until(lambda: consumer.count() == published)
        consuming.cancel()
        await until(lambda: all(q.state is QueueState.ACTIVE for q in both[0].topology.queues.values()))
        assert len((await yard.topology()).queues) == 2
