"""A backlog is distributed anew over the shards that there are now, in place: nothing lost or doubled, order kept."""

import asyncio
from collections import Counter

import pytest

from shardyard.model import (
    InvalidValue,
    RebalanceRunning,
    RebalanceUndone,
    UnknownExchange,
)
from shardyard.model.sharding import Binding, ExchangeType, OutgoingMessage, QueueState
from shardyard.registry import lease
from shardyard.sharding import rebalancing, stopping
from shardyard.sharding.backlog_copy import BacklogCopy
from shardyard.sharding.node import ShardingNode
from shardyard.sharding.routing import distribute
from tests.sharding.conftest import OpenYard
from tests.sharding.owner import Consumer
from tests.sharding.serving import KEYS, Acknowledging, nodes, publish, read_all, served
from tests.sharding.yard import WHO, until


def check(found: dict[str, list[tuple[str, int, int]]], node: ShardingNode, numbers: set[int]) -> None:
    """Each message is there once, where the routing leads, and in order per key."""
    assert Counter(n for some in found.values() for _, n, _ in some) == Counter(numbers)
    routed = distribute(node.topology, "images", [OutgoingMessage(b"", key) for key in KEYS]).by_queue
    for name, messages in found.items():
        assert {key for key, _, _ in messages} <= {KEYS[index] for index in routed[name]}
        for key in KEYS:
            of_key = [number for name, number, _ in messages if name == key]
            assert of_key == sorted(of_key)


@pytest.mark.parametrize("engine", ["memory", "sqlite", pytest.param("postgresql", marks=pytest.mark.server)])
@pytest.mark.parametrize("kind", [ExchangeType.MODULUS_HASH, ExchangeType.CONSISTENT_HASH])
async def test_a_backlog_goes_to_the_new_shards_in_order(opened: OpenYard, kind: ExchangeType) -> None:
    async with opened() as yard, nodes(yard, "a", "b") as both:
        await yard.declare("images", kind)
        await yard.set_policy(2)
        await both[0].topology_cache.refresh()
        await publish(both[0], range(200))
        await yard.set_policy(4)
        await publish(both[0], range(200, 300))
        await yard.set_policy(1)  # some shards drain
        await both[1].topology_cache.refresh()
        await publish(both[1], range(300, 400))
        result = await both[1].rebalancing.rebalance("images", WHO)
        assert result.total == 400
        assert len(result.messages) == 2
        topology = await both[0].topology_cache.refresh()
        assert {queue.state for queue in topology.shards("images")} == {QueueState.ACTIVE}
        assert not topology.rebalances
        await publish(both[0], range(400, 440))
        await both[1].topology_cache.refresh()
        check(await read_all(both), both[0], set(range(440)))


async def test_what_was_acknowledged_is_not_copied_and_what_failed_keeps_its_count(opened: OpenYard) -> None:
    async with opened() as yard, nodes(yard, "a") as [node]:
        await yard.declare("images")
        await yard.set_policy(1)
        await node.topology_cache.refresh()
        await publish(node, range(40))
        [queue] = node.topology.shards("images")
        await served([node], queue.name)
        consumer = Consumer()
        subscription = node.queue(queue.name).subscribe(consumer.receive, prefetch=10)
        await until(lambda: len(consumer.got) == 10)
        subscription.ack_tags([1, 3, 5])
        subscription.nack(2)
        subscription.cancel()
        await yard.set_policy(3)
        result = await node.rebalancing.rebalance("images", WHO)
        assert result.total == 37
        found = await read_all([node])
        check(found, node, set(range(40)) - {0, 2, 4})
        counts = {number: count for some in found.values() for _, number, count in some}
        assert counts[1] >= 1
        assert all(counts[number] == 0 for number in range(14, 40))


async def test_publishers_wait_and_nothing_is_lost_or_doubled(opened: OpenYard) -> None:
    async with opened() as yard, nodes(yard, "a", "b") as both:
        await yard.declare("images")
        await yard.set_policy(2)
        for node in both:
            await node.topology_cache.refresh()
        stop, published = asyncio.Event(), 0

        async def publish_on(node: ShardingNode) -> None:
            nonlocal published
            while not stop.is_set():
                first, published = published, published + 20
                await publish(node, range(first, first + 20))

        publishing = asyncio.create_task(publish_on(both[0]))
        await until(lambda: published >= 200)
        for shards in (3, 4):
            await yard.set_policy(shards)
            await both[1].rebalancing.rebalance("images", WHO)
        before = published
        await until(lambda: published >= before + 100)
        stop.set()
        await publishing
        await both[1].rebalancing.rebalance("images", WHO)
        check(await read_all(both), both[1], set(range(published)))


async def test_consumers_that_acknowledge_get_everything_once_and_in_order_while_it_is_rebalanced(
    opened: OpenYard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Messages are published while the shards are stopped. (Before that, keys that go to new shards are unordered: the
    earlier ones of a key are in another shard.)"""
    is_fenced = asyncio.Event()
    until_stopped = rebalancing.Rebalancing._until_stopped

    async def note_fenced(self: rebalancing.Rebalancing, exchange: str) -> None:
        is_fenced.set()
        await until_stopped(self, exchange)

    monkeypatch.setattr(rebalancing.Rebalancing, "_until_stopped", note_fenced)
    async with opened() as yard, nodes(yard, "a", "b") as both:
        await yard.declare("images", ExchangeType.CONSISTENT_HASH)
        await yard.set_policy(1)
        for node in both:
            await node.topology_cache.refresh()
        await publish(both[0], range(500))
        consumer = Acknowledging(both)
        task = asyncio.create_task(consumer.run())
        published = 500
        for shards in (3, 2, 4):
            await yard.set_policy(shards)
            is_fenced.clear()
            moving = asyncio.create_task(both[0].rebalancing.rebalance("images", WHO))
            await is_fenced.wait()
            for _ in range(5):
                await publish(both[1], range(published, published + 40))
                published += 40
            await moving
        await until(lambda: consumer.count() == published)
        task.cancel()
        assert consumer.got == {key: sorted(set(numbers)) for key, numbers in consumer.got.items()}
        assert consumer.again == 0, "all were acknowledged before the shards were moved"


async def test_a_rebalance_that_fails_is_undone(opened: OpenYard, monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened() as yard, nodes(yard, "a") as [node]:
        await yard.declare("images")
        await yard.set_policy(2)
        await node.topology_cache.refresh()
        await publish(node, range(100))
        before = (await yard.topology()).queues

        async def fail(_: BacklogCopy) -> None:
            raise RuntimeError("the copy failed")

        with monkeypatch.context() as patch:
            patch.setattr(BacklogCopy, "store_failures", fail)
            with pytest.raises(RuntimeError, match="the copy failed"):
                await node.rebalancing.rebalance("images", WHO)
        after = await node.topology_cache.refresh()
        assert not after.rebalances
        assert {q.name: q.slot for q in after.queues.values()} == {q.name: q.slot for q in before.values()}
        assert set(after.free_slots) == {2, 3}
        await publish(node, range(100, 120))
        assert (await node.rebalancing.rebalance("images", WHO)).total == 120
        check(await read_all([node]), node, set(range(120)))


async def test_a_rebalance_whose_process_died_is_undone_by_another_node(
    opened: OpenYard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rebalancing, "LEASE_SECONDS", 0.5)
    async with opened() as yard, nodes(yard, "a", "b") as both:
        await yard.declare("images")
        await yard.set_policy(2)
        await both[0].topology_cache.refresh()
        await publish(both[0], range(100))
        dead = rebalancing.Rebalancing(yard.node, yard.administration, both[0].topology_cache)
        copied = asyncio.Event()

        async def die(_: BacklogCopy) -> None:
            copied.set()
            await asyncio.Event().wait()

        async def nothing(*_: object) -> None:
            """A process that died undoes nothing."""

        with monkeypatch.context() as patch:
            patch.setattr(BacklogCopy, "store_failures", die)
            patch.setattr(dead, "_undo", nothing)
            patch.setattr(lease, "release", lambda *_: None)
            task = asyncio.create_task(dead.rebalance("images", WHO))
            await copied.wait()
            with pytest.raises(RebalanceRunning):
                await both[1].rebalancing.rebalance("images", WHO)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await until(lambda: not both[1].topology.rebalances)
        await publish(both[1], range(100, 120))
        await both[0].topology_cache.refresh()
        check(await read_all(both), both[0], set(range(120)))


async def test_a_change_of_the_shards_meanwhile_undoes_it(opened: OpenYard, monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened() as yard, nodes(yard, "a") as [node]:
        await yard.declare("images")
        await yard.set_policy(2)
        await node.topology_cache.refresh()
        await publish(node, range(100))
        original = BacklogCopy.store_failures

        async def change(copy: BacklogCopy) -> None:
            await original(copy)
            await yard.set_policy(3)

        with monkeypatch.context() as patch:
            patch.setattr(BacklogCopy, "store_failures", change)
            with pytest.raises(RebalanceUndone, match="its shards have changed"):
                await node.rebalancing.rebalance("images", WHO)
        assert (await node.rebalancing.rebalance("images", WHO)).total == 100
        check(await read_all([node]), node, set(range(100)))


async def test_a_change_of_the_shards_before_they_stop_undoes_it(
    opened: OpenYard, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened() as yard, nodes(yard, "a") as [node]:
        await yard.declare("images")
        await yard.set_policy(2)
        await node.topology_cache.refresh()
        await publish(node, range(100))
        until_stopped = rebalancing.Rebalancing._until_stopped

        async def change(self: rebalancing.Rebalancing, exchange: str) -> None:
            await yard.set_policy(1)
            await until_stopped(self, exchange)

        with monkeypatch.context() as patch:
            patch.setattr(rebalancing.Rebalancing, "_until_stopped", change)
            with pytest.raises(RebalanceUndone, match="its shards have changed"):
                await node.rebalancing.rebalance("images", WHO)
        assert (await node.rebalancing.rebalance("images", WHO)).total == 100
        check(await read_all([node]), node, set(range(100)))


@pytest.mark.parametrize("is_copied", [False, True])
async def test_shards_that_drain_and_take_messages_again_meanwhile_undo_it(
    opened: OpenYard, monkeypatch: pytest.MonkeyPatch, is_copied: bool
) -> None:
    """Before they stop, or when they were copied: messages that are published then get into their old slots."""
    async with opened() as yard, nodes(yard, "a") as [node]:
        await yard.declare("images")
        await yard.set_policy(2)
        await node.topology_cache.refresh()
        await publish(node, range(100))
        published = 100
        until_stopped, store_failures = rebalancing.Rebalancing._until_stopped, BacklogCopy.store_failures

        async def clear_and_set() -> None:
            await yard.administration.clear_policy("sharded", WHO)
            await yard.set_policy(2)
            await node.topology_cache.refresh()

        async def stop(self: rebalancing.Rebalancing, exchange: str) -> None:
            if not is_copied:
                await clear_and_set()
            await until_stopped(self, exchange)

        async def publish_late(copy: BacklogCopy) -> None:
            nonlocal published
            await store_failures(copy)
            if is_copied:
                await clear_and_set()
            await publish(node, range(100, 150))
            published = 150

        with monkeypatch.context() as patch:
            patch.setattr(rebalancing.Rebalancing, "_until_stopped", stop)
            patch.setattr(BacklogCopy, "store_failures", publish_late)
            with pytest.raises(RebalanceUndone, match="its shards have changed"):
                await node.rebalancing.rebalance("images", WHO)
        assert (await node.rebalancing.rebalance("images", WHO)).total == published
        check(await read_all([node]), node, set(range(published)))


async def test_owners_that_do_not_stop_in_time_undo_it(opened: OpenYard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rebalancing, "STOP_SECONDS", 0.1)
    async with opened() as yard, nodes(yard, "a") as [node]:
        await yard.declare("images")
        await yard.set_policy(1)

        async def never(_: stopping.Stopping) -> None:
            """Stop nothing."""

        with monkeypatch.context() as patch:
            patch.setattr(stopping.Stopping, "_stop", never)
            with pytest.raises(RebalanceUndone, match="not stopped"):
                await node.rebalancing.rebalance("images", WHO)
        assert not (await yard.topology()).rebalances


async def test_what_can_not_be_rebalanced_is_named(opened: OpenYard) -> None:
    async with opened() as yard, nodes(yard, "a") as [node]:
        await yard.declare("fan", ExchangeType.FANOUT)
        await yard.declare("plain")
        await yard.declare("mixed")
        await yard.set_policy(1, pattern="^(fan|mixed)$")
        await yard.administration.declare_queue("q", WHO)
        await yard.administration.bind(Binding("mixed", "q"), WHO)
        for exchange in ("fan", "plain", "mixed"):
            with pytest.raises(InvalidValue, match=exchange):
                await node.rebalancing.rebalance(exchange, WHO)
        with pytest.raises(UnknownExchange):
            await node.rebalancing.rebalance("none", WHO)
