"""What a queue does with messages: delivery, acknowledgement, redelivery, limits. On every engine."""

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from shardyard.model import Appended, InvalidValue, NotOwner, UnknownDeliveryTag
from shardyard.model.sharding import NO_LIMITS, Overflow, Queue, QueueLimits
from shardyard.runtime.clock import ManualClock
from shardyard.sharding.config import ShardingConfig
from shardyard.sharding.dead_letters import Reason
from tests.queues.engines import POSTGRESQL
from tests.sharding.owner import Consumer, consume, got, names, owner, until

if TYPE_CHECKING:
    from collections.abc import Callable

ENGINES = ("memory", "sparse", "sqlite", POSTGRESQL)
on_engines = pytest.mark.parametrize("engine", ENGINES)


# Delivery


@on_engines
async def test_messages_are_delivered_in_order_and_gone_when_they_are_acknowledged(engine: str, folder: Path) -> None:
    async with owner(engine, folder) as yard:
        queue = await yard.open()
        consumer = consume(queue)
        await yard.publish(*names(5))
        await yard.publish(*names(5, start=5))
        await got(consumer, *names(10))
        assert [tag for tag, *_ in consumer.got] == list(range(1, 11))
        assert not any(again for _, _, again, _ in consumer.got)
        assert queue.unacked == 10
        consumer.settling.ack(10, multiple=True)
        status = await queue.status()
        assert (status.ready, status.unacked, status.consumers) == (0, 0, 1)


async def test_messages_that_were_there_before_are_delivered_too(folder: Path) -> None:
    async with owner("memory", folder) as yard:
        await yard.publish("a", "b")
        await got(consume(await yard.open()), "a", "b")


async def test_a_consumer_has_at_most_prefetch_unsettled_messages(folder: Path) -> None:
    async with owner("memory", folder) as yard:
        queue = await yard.open()
        consumer = consume(queue, prefetch=3)
        await yard.publish(*names(10))
        await got(consumer, *names(3))
        consumer.settling.ack(2)
        await got(consumer, *names(4))
        consumer.settling.ack(4, multiple=True)
        await got(consumer, *names(7))
        consumer.settling.set_prefetch(0)
        await got(consumer, *names(10))


async def test_for_each_version_of_the_topology_it_is_looked_up_once_whose_slot_it_is(folder: Path) -> None:
    async with owner("memory", folder) as yard:
        asked: list[int | None] = []

        async def is_current(_: Queue, version: int | None) -> bool:
            asked.append(version)
            return version is None or version < 3

        yard.is_current = is_current
        consumer = consume(await yard.open())
        for number, version in enumerate((1, 1, 2, 2)):
            await yard.publish(*names(1, start=number), version=version)
            await got(consumer, *names(number + 1))
        assert asked == [1, 2]
        await yard.publish("of the next queue in the slot", version=3)
        await until(lambda: yard.lost)
        assert asked == [1, 2, 3]
        assert consumer.bodies == [name.encode() for name in names(4)]


async def test_consumers_take_turns(folder: Path) -> None:
    async with owner("memory", folder) as yard:
        queue = await yard.open()
        consumers = [consume(queue) for _ in range(4)]
        await yard.publish(*names(12))
        await until(lambda: sum(len(each.got) for each in consumers) == 12)
        assert [len(each.got) for each in consumers] == [3, 3, 3, 3]
        for number in range(4):
            await yard.publish(f"single {number}")
            await until(lambda total=13 + number: sum(len(each.got) for each in consumers) == total)  # type: ignore[misc]
        assert [len(each.got) for each in consumers] == [4, 4, 4, 4]


async def test_a_slow_consumer_does_not_hold_up_the_others(folder: Path) -> None:
    async with owner("memory", folder) as yard:
        queue = await yard.open()
        slow, fast = consume(queue, prefetch=1), consume(queue)
        await yard.publish(*names(100))
        await until(lambda: len(slow.got) + len(fast.got) == 100)
        assert len(slow.got) == 1


async def test_a_paused_consumer_gets_nothing_until_it_resumes(folder: Path) -> None:
    async with owner("memory", folder) as yard:
        queue = await yard.open()
        paused, other = consume(queue, no_ack=True), consume(queue)
        paused.settling.pause()
        await yard.publish(*names(10))
        await got(other, *names(10))
        assert not paused.got
        other.settling.cancel()
        paused.settling.resume()
        await got(paused, *names(10))


async def test_messages_without_acknowledgement_are_done_when_they_are_delivered(folder: Path) -> None:
    async with owner("memory", folder) as yard:
        queue = await yard.open()
        consumer = consume(queue, no_ack=True, prefetch=1)
        await yard.publish(*names(10))
        await got(consumer, *names(10))
        assert queue.unacked == 0
        with pytest.raises(UnknownDeliveryTag, match="need no acknowledgement"):
            consumer.settling.ack(1)
        consumer.settling.cancel()
        assert (await queue.status()).ready == 0


async def test_what_is_in_flight_is_bounded_also_without_prefetch(folder: Path) -> None:
    config = ShardingConfig(store_seconds=0.001, in_flight_records=5, read_ahead_records=7)
    async with owner("memory", folder, config=config) as yard:
        queue = await yard.open()
        consumer = consume(queue)
        await yard.publish(*names(50))
        await got(consumer, *names(5))
        status = await queue.status()
        assert (status.ready, status.unacked) == (45, 5)
        for last in range(5, 50, 5):
            consumer.settling.ack(last, multiple=True)
            await got(consumer, *names(last + 5))


async def test_bytes_in_flight_are_bounded_too(folder: Path) -> None:
    config = ShardingConfig(store_seconds=0.001, in_flight_bytes=10, batch_records=1)
    async with owner("memory", folder, config=config) as yard:
        queue = await yard.open()
        consumer = consume(queue)
        await yard.publish(*["sixsix"] * 5)
        await until(lambda: len(consumer.got) == 2)
        consumer.settling.ack(0, multiple=True)
        await until(lambda: len(consumer.got) == 4)


async def test_a_delivery_is_bounded_in_bytes_also_of_messages_that_came_back(folder: Path) -> None:
    config = ShardingConfig(store_seconds=0.001, batch_bytes=100)
    async with owner("memory", folder, config=config) as yard:
        await yard.publish(*["x" * 30] * 6, "y" * 200, "z" * 30)
        queue = await yard.open()
        for _ in range(2):
            consumer = consume(queue)
            await until(lambda consumer=consumer: len(consumer.got) == 8)  # type: ignore[misc]
            assert [len(batch) for batch in consumer.batches] == [2, 2, 2, 1, 1]
            consumer.settling.cancel()


@pytest.mark.parametrize("limits", [NO_LIMITS, QueueLimits(max_length=100, overflow=Overflow.REJECT_PUBLISH)])
async def test_a_queue_with_a_long_backlog_survives_a_time_out_of_touch(folder: Path, limits: QueueLimits) -> None:
    config = ShardingConfig(store_seconds=0.001, read_ahead_records=10)
    async with owner("memory", folder, config=config, limits=limits) as yard:
        queue = await yard.open()
        await yard.publish(*names(50))
        consumer = consume(queue, prefetch=1)
        await got(consumer, *names(1))
        looks = []

        def is_in_touch() -> bool:
            looks.append(False)
            assert len(looks) < 1_000, "it holds up the event loop"
            return False

        yard.is_in_touch = is_in_touch
        consumer.settling.ack(1)
        other = consume(queue)
        await until(lambda: len(looks) > 5)
        assert len(consumer.got) + len(other.got) == 1, "another node may serve it by now"
        yard.is_in_touch = lambda: True
        await until(lambda: len(consumer.got) + len(other.got) == 50)


# Settling


@on_engines
async def test_single_and_multiple_acks_settle_exactly_what_they_name(engine: str, folder: Path) -> None:
    async with owner(engine, folder) as yard:
        queue = await yard.open()
        consumer = consume(queue)
        await yard.publish(*names(10))
        await got(consumer, *names(10))
        consumer.settling.ack(9)
        consumer.settling.ack(3, multiple=True)
        consumer.settling.ack_tags([5, 7])
        assert queue.unacked == 4
        consumer.settling.cancel()
        again = consume(queue)
        await got(again, "m0003", "m0005", "m0007", "m0009")


@pytest.mark.parametrize("tag", [1, 2, 0, -1, 6, 10**30])
async def test_an_unknown_or_settled_tag_is_an_error_that_changes_nothing(folder: Path, tag: int) -> None:
    async with owner("memory", folder) as yard:
        queue = await yard.open()
        consumer = consume(queue)
        await yard.publish(*names(5))
        await got(consumer, *names(5))
        consumer.settling.ack(2, multiple=True)
        settling = consumer.settling
        calls: list[Callable[[], None]] = [
            lambda: settling.ack(tag),
            lambda: settling.nack(tag),
            lambda: settling.nack(tag, requeue=False),
            lambda: settling.ack_tags([3, tag]),
            lambda: settling.ack_tags([3, 3]),
        ]
        for settle in calls:
            with pytest.raises(UnknownDeliveryTag, match="Nothing was changed"):
                settle()
        if tag:  # as in RabbitMQ, 0 stands for all
            with pytest.raises(UnknownDeliveryTag):
                settling.ack(tag, multiple=True)
            with pytest.raises(UnknownDeliveryTag):
                settling.nack(tag, multiple=True)
        assert queue.unacked == 3
        settling.ack(0, multiple=True)
        assert queue.unacked == 0
        assert not yard.letters.stored


async def test_tags_of_one_consumer_mean_nothing_to_another(folder: Path) -> None:
    async with owner("memory", folder) as yard:
        queue = await yard.open()
        first = consume(queue)
        await yard.publish("a")
        await got(first, "a")
        second = consume(queue)
        with pytest.raises(UnknownDeliveryTag, match="the last one that was delivered is 0"):
            second.settling.ack(1)


@on_engines
async def test_what_is_requeued_comes_again_before_later_messages(engine: str, folder: Path) -> None:
    async with owner(engine, folder) as yard:
        queue = await yard.open()
        consumer = consume(queue, prefetch=4)
        await yard.publish(*names(6))
        await got(consumer, *names(4))
        consumer.settling.nack(3)
        consumer.settling.nack(1)
        await got(consumer, *names(4), "m0000", "m0002")
        assert consumer.got[4:] == [(5, b"m0000", True, 1), (6, b"m0002", True, 1)]
        consumer.settling.nack(5)
        await until(lambda: len(consumer.got) == 7)
        assert consumer.got[6] == (7, b"m0000", True, 2)
        consumer.settling.ack(0, multiple=True)
        await got(consumer, *names(4), "m0000", "m0002", "m0000", "m0004", "m0005")
        assert consumer.got[-1][2:] == (False, 0)


async def test_a_message_that_was_not_tried_comes_again_as_redelivered_and_without_a_failure(folder: Path) -> None:
    async with owner("memory", folder, limits=QueueLimits(delivery_limit=0)) as yard:
        queue = await yard.open()
        consumer = consume(queue)
        await yard.publish("a")
        await got(consumer, "a")
        consumer.settling.nack_tags([1], failed=False)
        await got(consumer, "a", "a")
        assert consumer.got[1] == (2, b"a", True, 0)
        await queue.close()
        again = consume(await yard.open())
        await got(again, "a")
        assert again.got == [(1, b"a", True, 0)]


async def test_the_unsettled_messages_of_a_consumer_that_is_gone_come_again_in_order(folder: Path) -> None:
    async with owner("memory", folder) as yard:
        queue = await yard.open()
        dying = consume(queue, prefetch=5)
        await yard.publish(*names(8))
        await got(dying, *names(5))
        dying.settling.ack(2)
        dying.settling.cancel()
        dying.settling.cancel()
        other = consume(queue)
        await got(other, "m0000", "m0002", "m0003", "m0004", "m0005", "m0006", "m0007")
        assert [count for *_, count in other.got] == [1, 1, 1, 1, 0, 0, 0]


async def test_a_consumer_that_takes_no_more_can_settle_what_it_has(folder: Path) -> None:
    async with owner("memory", folder) as yard:
        queue = await yard.open()
        consumer = consume(queue)
        await yard.publish("a", "b")
        await got(consumer, "a", "b")
        consumer.settling.stop_taking()
        await yard.publish("c")
        consumer.settling.ack(1)
        consumer.settling.cancel()
        await got(consume(queue), "b", "c")
        assert consumer.bodies == [b"a", b"b"]


async def test_a_prefetch_that_is_no_whole_number_is_refused(folder: Path) -> None:
    async with owner("memory", folder) as yard:
        queue = await yard.open()
        for wrong in (-1, 2.5, "3", True):
            with pytest.raises(InvalidValue, match="prefetch"):
                queue.subscribe(Consumer().receive, prefetch=wrong)  # type: ignore[arg-type]
        assert (await queue.status()).consumers == 0


# Get and purge


@on_engines
async def test_get_takes_one_message(engine: str, folder: Path) -> None:
    async with owner(engine, folder) as yard:
        queue = await yard.open()
        assert await queue.get() is None
        await yard.publish("a", "b", "c")
        first = await queue.get()
        assert first is not None
        assert first.records[0].value == b"a"
        holder = queue.getter()
        second = await queue.get(holder)
        assert second is not None
        assert second.records[0].value == b"b"
        assert queue.unacked == 1
        holder.nack(second.first_tag)
        again = await queue.get(holder)
        assert again is not None
        assert (again.records[0].value, again.redelivered, again.counts) == (b"b", [True], [1])
        holder.ack(again.first_tag)
        assert (await queue.status()).ready == 1


async def test_a_node_that_is_out_of_touch_hands_out_nothing(folder: Path) -> None:
    async with owner("memory", folder) as yard:
        queue = await yard.open()
        await yard.publish("a", "b")
        assert await queue.get() is not None
        yard.is_in_touch = lambda: False
        with pytest.raises(NotOwner):
            await queue.get()
        yard.is_in_touch = lambda: True
        assert await queue.get() is not None


async def test_get_hands_out_nothing_of_a_queue_that_is_frozen_meanwhile(folder: Path) -> None:
    async with owner("memory", folder, limits=QueueLimits(dead_letter_exchange="x")) as yard:
        queue = await yard.open()
        await yard.publish("a")
        await until(lambda: len(queue._ahead.ready))
        holder = queue.getter()
        async with yard.stores[-1]._storing.setdefault(queue, asyncio.Lock()):  # a slow log
            getting = asyncio.create_task(queue.get(holder))
            await until(queue._mark_lock.locked)
            freezing = asyncio.create_task(queue.freeze(0.0))
            await until(lambda: queue.is_frozen)
        with pytest.raises(NotOwner):
            await getting
        assert await freezing == 0


@on_engines
async def test_purge_drops_what_waits_and_leaves_what_is_unsettled(engine: str, folder: Path) -> None:
    async with owner(engine, folder) as yard:
        queue = await yard.open()
        consumer = consume(queue, prefetch=2)
        await yard.publish(*names(20))
        await got(consumer, *names(2))
        assert await queue.purge() >= 18
        await yard.publish("new")
        consumer.settling.ack(1)
        await got(consumer, *names(2), "new")
        consumer.settling.cancel()
        await queue.close()
        await got(consume(await yard.open()), "m0001", "new")


@pytest.mark.parametrize("clean", [True, False])
async def test_what_was_purged_does_not_come_back_with_the_next_owner(folder: Path, clean: bool) -> None:
    config = ShardingConfig(store_seconds=0.001, read_ahead_records=10)
    async with owner("memory", folder, config=config) as yard:
        queue = await yard.open()
        await yard.publish(*names(50))
        await got(consume(queue, prefetch=1), "m0000")
        assert await queue.purge() >= 49
        await queue.close(clean=clean)
        await yard.publish("new")
        again = consume(await yard.open())
        await got(again, "m0000", "new")
        assert [redelivered for *_, redelivered, _ in again.got] == [True, not clean]


# Dead letters and limits


async def test_a_rejected_message_becomes_a_dead_letter_before_it_is_settled(folder: Path) -> None:
    async with owner("memory", folder) as yard:
        yard.letters.errors.append(UnknownDeliveryTag(1, "any error"))
        queue = await yard.open()
        consumer = consume(queue)
        await yard.publish("a", "b", "c")
        await got(consumer, "a", "b", "c")
        consumer.settling.nack(2, multiple=True, requeue=False)
        assert queue.unacked == 3
        await until(lambda: len(yard.letters.stored) == 2)
        assert yard.letters.bodies() == [b"a", b"b"]
        assert {letter.reason for _, letter in yard.letters.stored} == {Reason.REJECTED}
        await until(lambda: queue.unacked == 1)


async def test_more_failures_than_the_delivery_limit_make_a_dead_letter(folder: Path) -> None:
    async with owner("memory", folder, limits=QueueLimits(delivery_limit=2)) as yard:
        queue = await yard.open()
        consumer = consume(queue)
        await yard.publish("poison", "fine")
        for tag in (1, 3, 4):
            await until(lambda tag=tag: len(consumer.got) >= tag)  # type: ignore[misc]
            consumer.settling.nack(tag)
        await until(lambda: yard.letters.bodies() == [b"poison"])
        assert [count for _, body, _, count in consumer.got if body == b"poison"] == [0, 1, 2]
        assert yard.letters.stored[0][1][1:] == (Reason.DELIVERY_LIMIT, 3)


async def test_consumers_that_die_count_as_failed_deliveries(folder: Path) -> None:
    async with owner("memory", folder, limits=QueueLimits(delivery_limit=0)) as yard:
        queue = await yard.open()
        consumer = consume(queue)
        await yard.publish("kills its consumer")
        await until(lambda: consumer.got)
        consumer.settling.cancel()
        await until(lambda: yard.letters.bodies() == [b"kills its consumer"])


async def test_messages_expire_by_the_ttl_of_the_policy(folder: Path) -> None:
    async with owner("memory", folder, limits=QueueLimits(message_ttl_ms=1, dead_letter_exchange="x")) as yard:
        await yard.publish(*names(3))
        await asyncio.to_thread(lambda: None)
        queue = await yard.open()
        await until(lambda: yard.letters.bodies() == [b"m0000", b"m0001", b"m0002"])
        assert yard.letters.stored[0][1].reason is Reason.EXPIRED
        assert (await queue.status()).ready == 0


async def test_messages_expire_by_their_own_time_and_others_do_not(folder: Path) -> None:
    clock = ManualClock(now=2_000_000_000_000.0)  # far later than any timestamp
    async with owner("memory", folder, clock=clock) as yard:
        await yard.publish("stays")
        await yard.publish("goes", expiration_ms=60_000)
        await yard.publish("stays, too")
        consumer = consume(await yard.open())
        await got(consumer, "stays", "stays, too")
        assert not yard.letters.stored


async def test_a_message_that_has_not_expired_is_delivered(folder: Path) -> None:
    async with owner("memory", folder, limits=QueueLimits(message_ttl_ms=3_600_000)) as yard:
        await yard.publish("a", expiration_ms=3_000_000)
        await got(consume(await yard.open()), "a")


async def test_a_requeued_message_expires_too(folder: Path) -> None:
    clock = ManualClock()
    async with owner("memory", folder, clock=clock) as yard:
        await yard.publish("a", expiration_ms=1_000)
        queue = await yard.open()
        consumer = consume(queue)
        await got(consumer, "a")
        clock.jump(10**9)
        consumer.settling.nack(1)
        await until(lambda: queue.unacked == 0)
        assert await queue.get() is None
        assert consumer.bodies == [b"a"]


@on_engines
async def test_the_oldest_messages_make_room_beyond_the_maximum_length(engine: str, folder: Path) -> None:
    async with owner(engine, folder, limits=QueueLimits(max_length=3, dead_letter_exchange="x")) as yard:
        await yard.publish(*names(10))
        queue = await yard.open()
        dropped = [body.encode() for body in names(7)]
        await until(lambda: yard.letters.bodies() == dropped)
        await got(consume(queue), "m0007", "m0008", "m0009")
        assert all(letter.reason is Reason.MAX_LENGTH for _, letter in yard.letters.stored)


async def test_what_is_unsettled_does_not_count_for_the_maximum_length(folder: Path) -> None:
    async with owner("memory", folder, limits=QueueLimits(max_length=2)) as yard:
        queue = await yard.open()
        consumer = consume(queue, prefetch=3)
        await yard.publish(*names(3))
        await got(consumer, *names(3))
        await yard.publish(*names(4, start=3))
        await until(lambda: queue.state.end == 5)
        consumer.settling.ack(3, multiple=True)
        await got(consumer, *names(3), "m0005", "m0006")


async def test_new_limits_apply_to_what_is_there(folder: Path) -> None:
    async with owner("memory", folder) as yard:
        queue = await yard.open()
        await yard.publish(*names(5))
        queue.update(Queue("jobs", 0, 1, limits=QueueLimits(max_length=1, overflow=Overflow.DROP_HEAD)))
        await until(lambda: queue.state.end == 4)
        await got(consume(queue), "m0004")


# Ends


async def test_a_queue_that_is_closed_tells_its_consumers_and_refuses_calls(folder: Path) -> None:
    async with owner("memory", folder) as yard:
        queue = await yard.open()
        consumer = consume(queue)
        await yard.publish("a")
        await got(consumer, "a")
        await queue.close()
        assert isinstance(consumer.ends[0], NotOwner)
        for call in (lambda: consumer.settling.ack(1), lambda: queue.subscribe(consumer.receive), queue.getter):
            with pytest.raises(NotOwner):
                call()
        for work in (queue.get(), queue.purge(), queue.status()):
            with pytest.raises(NotOwner):
                await work


async def test_nothing_is_kept_of_a_queue_that_ends_while_its_state_is_stored(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with owner("memory", folder) as yard:
        queue = await yard.open()
        consumer = consume(queue)
        await yard.publish("a")
        await got(consumer, "a")
        append, appending, go_on = yard.log.append, asyncio.Event(), asyncio.Event()

        async def slow_append(*args: Any, **options: Any) -> Appended:
            appending.set()
            await go_on.wait()
            return await append(*args, **options)

        monkeypatch.setattr(yard.log, "append", slow_append)
        consumer.settling.ack(1)
        await appending.wait()
        [states] = yard.stores
        waiting = asyncio.create_task(states.store(queue))
        await asyncio.sleep(0)  # it waits for its turn now
        await queue.close(clean=False)
        go_on.set()
        with pytest.raises(NotOwner):
            await waiting
        await until(lambda: states._task is None or states._task.done())
        assert [len(kept) for kept in (states._changed, states._storing, states._stored)] == [0, 0, 0]


async def test_a_frozen_queue_delivers_nothing_and_waits_for_acks(folder: Path) -> None:
    async with owner("memory", folder) as yard:
        queue = await yard.open()
        consumer = consume(queue, prefetch=2)
        await yard.publish(*names(5))
        await got(consumer, *names(2))
        freezing = asyncio.create_task(queue.freeze(20.0))
        await asyncio.sleep(0)
        consumer.settling.ack(2, multiple=True)
        assert await freezing == 0
        assert len(consumer.got) == 2
        with pytest.raises(NotOwner):
            await queue.get()
        assert queue.state.floor == queue.state.end


@pytest.mark.parametrize("overflow", Overflow)
async def test_a_frozen_queue_leaves_its_messages_as_they_are(folder: Path, overflow: Overflow) -> None:
    clock = ManualClock()
    limits = QueueLimits(message_ttl_ms=1_000, max_length=3, overflow=overflow, dead_letter_exchange="x")
    async with owner("memory", folder, clock=clock, limits=limits) as yard:
        queue = await yard.open()
        await yard.publish(*names(3))
        await until(lambda: len(queue._ahead.ready) == 3)
        assert await queue.freeze(0.0) == 0
        clock.jump(10**9)
        await yard.publish(*names(3, start=3))
        queue.update(queue.queue)
        queue.dispatch_soon()
        assert queue._reading is not None
        await until(queue._reading.cancelled)
        assert queue._dispatcher._scheduled is None
        assert yard.letters.stored == []
        assert (queue.unacked, queue.state.floor) == (0, 0)


async def test_the_consumers_of_a_frozen_queue_can_settle_nothing_more(folder: Path) -> None:
    async with owner("memory", folder) as yard:
        queue = await yard.open()
        consumer = consume(queue, prefetch=2)
        await yard.publish(*names(5))
        await got(consumer, *names(2))
        assert await queue.freeze(0.0) == 2
        assert [type(end) for end in consumer.ends] == [NotOwner]
        with pytest.raises(NotOwner):
            consumer.settling.ack(1)
        with pytest.raises(NotOwner):
            consumer.settling.nack(2, requeue=False)
        consumer.settling.cancel()
        assert await queue.freeze(60.0) == 2, "nobody can settle them, so it does not wait"
        await queue.close()
        assert len(consumer.ends) == 1
        assert yard.letters.stored == []
        await got(consume(await yard.open()), *names(5))
