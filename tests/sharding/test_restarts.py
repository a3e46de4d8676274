"""What the next owner of a queue knows: after a clean stop everything, after a kill what was stored."""

import asyncio
from pathlib import Path

import pytest

from shardyard.model import Fenced, NotOwner
from shardyard.model.sharding import QueueLimits
from shardyard.runtime.clock import ManualClock
from shardyard.sharding.config import ShardingConfig
from shardyard.sharding.state_store import TRIM_STATES
from tests.queues.engines import POSTGRESQL
from tests.sharding.owner import consume, got, names, owner, until

on_engines = pytest.mark.parametrize("engine", ["memory", "sparse", "sqlite", POSTGRESQL])
SLOW = ShardingConfig(store_seconds=3600.0)
"""Nothing is stored by itself."""


@on_engines
async def test_acks_out_of_order_survive_a_clean_restart_exactly(engine: str, folder: Path) -> None:
    async with owner(engine, folder, config=SLOW) as yard:
        queue = await yard.open()
        consumer = consume(queue, prefetch=40)
        await yard.publish(*names(60))
        await got(consumer, *names(40))
        acked = [1, 2, 3, 7, 20, 33, 34, 40]
        consumer.settling.ack_tags(acked)
        consumer.settling.nack(9)
        await until(lambda: len(consumer.got) >= 49)
        await queue.close()
        again = consume(await yard.open())
        left = [name for number, name in enumerate(names(60), 1) if number not in acked]
        await got(again, *left)
        delivered = set(consumer.bodies)
        assert [redelivered for _, _, redelivered, _ in again.got] == [name.encode() in delivered for name in left]
        assert {body: count for _, body, _, count in again.got if count} == {b"m0008": 1}


@on_engines
async def test_after_a_kill_only_what_was_acked_since_the_last_store_comes_again(engine: str, folder: Path) -> None:
    async with owner(engine, folder, config=SLOW) as yard:
        queue = await yard.open()
        consumer = consume(queue)
        await yard.publish(*names(10))
        await got(consumer, *names(10))
        consumer.settling.ack_tags([2, 5])
        await yard.stores[-1].store(queue)
        consumer.settling.ack_tags([1, 7])
        await queue.close(clean=False)
        await yard.publish("later")
        again = consume(await yard.open())
        await got(again, *(name for number, name in enumerate(names(10), 1) if number not in (2, 5)), "later")
        assert all(redelivered for _, _, redelivered, _ in again.got), "each may have been delivered"


async def test_acks_are_stored_by_themselves(folder: Path) -> None:
    clock = ManualClock()
    async with owner("memory", folder, clock=clock, config=ShardingConfig(store_seconds=0.05)) as yard:
        queue = await yard.open()
        consumer = consume(queue)
        await yard.publish(*names(4))
        await got(consumer, *names(4))
        stored = (await yard.log.span(queue.state_partition)).end
        consumer.settling.ack(2)
        await asyncio.sleep(0)
        await clock.advance(0.04)
        assert (await yard.log.span(queue.state_partition)).end == stored
        await clock.advance(0.02)
        assert (await yard.log.span(queue.state_partition)).end == stored + 1
        await queue.close(clean=False)
        await got(consume(await yard.open()), "m0000", "m0002", "m0003")


async def test_what_nobody_has_consumed_is_not_redelivered_after_a_kill(folder: Path) -> None:
    async with owner("sqlite", folder) as yard:
        await yard.publish("a", "b")
        queue = await yard.open()
        await queue.close(clean=False)
        consumer = consume(await yard.open())
        await got(consumer, "a", "b")
        assert not any(again for _, _, again, _ in consumer.got)


@on_engines
async def test_another_node_takes_over_with_unread_and_unsettled_messages(engine: str, folder: Path) -> None:
    async with owner(engine, folder) as yard:
        old = await yard.open()
        consumer = consume(old, prefetch=5)
        await yard.publish(*names(10))
        await got(consumer, *names(5))
        consumer.settling.ack(2)
        await yard.stores[-1].store(old)
        new = await yard.open()
        other = consume(new)
        await got(other, "m0000", *names(8, start=2))


@on_engines
async def test_a_zombie_can_store_nothing_and_finds_out(engine: str, folder: Path) -> None:
    async with owner(engine, folder) as yard:
        zombie = await yard.open()
        consumer = consume(zombie, prefetch=2)
        await yard.publish(*names(4))
        await got(consumer, *names(2))
        new = await yard.open()
        consumer.settling.ack(2, multiple=True)
        await until(lambda: yard.lost)
        assert isinstance(yard.lost[0], Fenced)
        with pytest.raises(Fenced):
            await zombie.purge()
        await got(consume(new), *names(4))


async def test_a_zombie_that_only_waits_for_messages_finds_out_when_one_comes(folder: Path) -> None:
    async with owner("memory", folder) as yard:
        consumer = consume(await yard.open())
        new = await yard.open()
        await yard.publish("a")
        await got(consume(new), "a")
        await yard.publish("b")
        await until(lambda: yard.lost or consumer.got)
        assert isinstance(yard.lost[0], Fenced)
        assert not consumer.got


async def test_a_node_that_is_out_of_touch_delivers_nothing(folder: Path) -> None:
    async with owner("memory", folder) as yard:
        queue = await yard.open()
        is_in_touch = False
        yard.is_in_touch = lambda: is_in_touch
        consumer = consume(queue)
        await yard.publish("a")
        await until(lambda: len(queue._ahead.ready) == 1)
        await asyncio.sleep(0)
        assert not consumer.got
        is_in_touch = True
        await got(consumer, "a")


async def test_a_queue_in_a_used_slot_begins_where_the_one_before_ended(folder: Path) -> None:
    async with owner("memory", folder) as yard:
        old = await yard.open()
        await yard.publish("of another queue")
        await old.close()
        end = (await yard.log.span(old.partition)).end
        queue = await yard.open(first=end)
        await yard.publish("mine")
        await got(consume(queue), "mine")


async def test_settled_messages_and_old_states_are_trimmed(folder: Path) -> None:
    config = ShardingConfig(store_seconds=3600.0, trim_records=5)
    async with owner("memory", folder, config=config) as yard:
        queue = await yard.open()
        consumer = consume(queue)
        await yard.publish(*names(12))
        await got(consumer, *names(12))
        consumer.settling.ack(4, multiple=True)
        await yard.stores[-1].store(queue)
        assert (await yard.log.span(queue.partition)).first == 0
        consumer.settling.ack(7, multiple=True)
        await yard.stores[-1].store(queue)
        assert (await yard.log.span(queue.partition)).first == 7
        for _ in range(TRIM_STATES):
            await yard.stores[-1].store(queue)
        states = await yard.log.span(queue.state_partition)
        assert states.end - states.first < TRIM_STATES
        await queue.close()
        await got(consume(await yard.open()), *names(5, start=7))


async def test_dead_letters_that_could_not_be_stored_stay_in_the_queue(folder: Path) -> None:
    async with owner("memory", folder, limits=QueueLimits(delivery_limit=5)) as yard:
        yard.letters.errors += [NotOwner("x", None)] * 10_000
        queue = await yard.open()
        consumer = consume(queue)
        await yard.publish("a", "b")
        await got(consumer, "a", "b")
        consumer.settling.ack(2)
        consumer.settling.nack(1, requeue=False)
        await queue.close(clean=False)
        yard.letters.errors.clear()
        await got(consume(await yard.open()), "a", "b")
