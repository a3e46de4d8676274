"""Nodes that serve queues: they come, stop, die, and take over from each other."""

import asyncio
from collections.abc import Mapping
from pathlib import Path

import pytest

from shardyard.groups import Membership
from shardyard.model import NodeNameTaken, NotOwner, Span, UnknownQueue
from shardyard.model.sharding import Binding, Exchange, ExchangeType, OutgoingMessage, Policy, Queue, QueueLimits
from shardyard.sharding.administration import Administration
from shardyard.sharding.backlog_copy import BacklogCopy
from shardyard.sharding.config import ShardingConfig
from shardyard.sharding.dead_letters import Reason
from shardyard.sharding.messages import deaths_of, to_record, version_header, version_of
from shardyard.sharding.node import ShardingNode
from shardyard.sharding.queue import ShardQueue
from shardyard.sharding.removal import Removal
from tests.queues.engines import POSTGRESQL
from tests.sharding.nodes import WHO, bodies, nodes
from tests.sharding.owner import consume, got, names, until

on_engines = pytest.mark.parametrize("engine", ["memory", "sqlite", POSTGRESQL])


@on_engines
async def test_messages_reach_the_consumers_of_all_shards(engine: str, folder: Path) -> None:
    async with nodes(engine, folder) as yard:
        await yard.start("a")
        await yard.declare(2)
        await yard.publish(names(50))
        consumers = yard.consume()
        await until(lambda: len(bodies(consumers)) == 50)
        assert bodies(consumers) == names(50)
        assert all(consumer.got for consumer in consumers)


@on_engines
async def test_a_node_that_joins_gets_shards_and_messages(engine: str, folder: Path) -> None:
    async with nodes(engine, folder) as yard:
        first = await yard.start("a")
        await yard.declare(2)
        await yard.publish(names(20))
        second = await yard.start("b")
        queues = await yard.served("images", 4)
        assert [queue.name for queue in queues] == [f"sharding: images - {n} - {i}" for n in "ab" for i in range(2)]
        await until(lambda: len(first.queues) == len(second.queues) == 2)
        await yard.publish(names(40, start=20), by="b")
        consumers = yard.consume()
        await until(lambda: len(bodies(consumers)) == 60)
        assert bodies(consumers) == names(60)
        assert all(len(consumer.got) > 0 for consumer in consumers), "new messages reach the new shards"


@on_engines
async def test_a_node_that_stops_leaves_nothing_behind(engine: str, folder: Path) -> None:
    async with nodes(engine, folder) as yard:
        await yard.start("a")
        await yard.start("b")
        await yard.declare(1)
        await yard.publish(names(40))
        consumers = yard.consume(prefetch=8)
        await until(lambda: all(len(consumer.got) == 8 for consumer in consumers))
        for consumer in consumers:
            consumer.settling.ack_tags([2, 5])
        acked = {consumer.bodies[tag - 1].decode() for consumer in consumers for tag in (2, 5)}
        await yard.stop("b")
        moved = [consumer for consumer in consumers if consumer.ends]
        assert len(moved) == 1
        other = next(consumer for consumer in consumers if not consumer.ends)
        other.settling.cancel()
        unsettled = set(bodies(consumers)) - acked
        await yard.served("images", 2)
        again = yard.consume()
        await until(lambda: len(bodies(again)) == 36)
        assert set(bodies(again)) == set(names(40)) - acked
        redelivered = {body.decode() for each in again for _, body, flag, _ in each.got if flag}
        assert redelivered == unsettled


@on_engines
async def test_the_queues_of_a_node_that_dies_are_taken_over(engine: str, folder: Path) -> None:
    async with nodes(engine, folder) as yard:
        await yard.start("a")
        await yard.start("b")
        await yard.declare(2)
        await yard.publish(names(60))
        consumers = yard.consume(prefetch=5)
        await until(lambda: all(len(consumer.got) == 5 for consumer in consumers))
        await yard.kill("b")
        for consumer in consumers:
            if not consumer.ends:
                consumer.settling.cancel()
        mapping = await yard.publish(names(20, start=60))
        assert mapping == [1] * 20
        queues = await yard.served("images", 4)
        assert {queue.queue.node for queue in queues} == {"a", "b"}, "shards keep their names"
        again = yard.consume()
        await until(lambda: len(bodies(again)) == 80)
        assert bodies(again) == names(80)


async def test_a_node_that_was_killed_comes_back_under_its_name(folder: Path) -> None:
    async with nodes("memory", folder) as yard:
        await yard.start("a")
        await yard.declare(2)
        await yard.publish(names(10))
        await yard.kill("a")
        node = await yard.start("a")
        await yard.served("images", 2)
        assert len(node.topology.shards("images")) == 2
        consumers = yard.consume()
        await until(lambda: bodies(consumers) == names(10))


async def test_two_nodes_of_one_name_are_refused(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with nodes("memory", folder) as yard, nodes("memory", folder) as other:
        await yard.start("a")
        other.log, other.registry = yard.log, yard.registry
        with pytest.raises(NodeNameTaken, match=r"node name 'a' is running.* with another --node-name"):
            await other.start("a", ShardingConfig(session_timeout=1.0))
    (warning,) = [record for record in caplog.records if "joining will be retried" in record.message]
    assert warning.levelname == "WARNING"
    assert "--node-name" in warning.message


async def test_a_node_without_exchanges_serves_nothing(folder: Path) -> None:
    async with nodes("memory", folder) as yard:
        node = await yard.start("a")
        assert node.queues == []
        with pytest.raises(UnknownQueue):
            node.queue("images")


async def test_a_queue_of_another_node_is_an_error_that_names_it(folder: Path) -> None:
    async with nodes("memory", folder) as yard:
        first, second = await yard.start("a"), await yard.start("b")
        await yard.declare(1)
        await until(lambda: len(first.queues) == len(second.queues) == 1)
        name = second.queues[0].name
        await until(lambda: first.owner_of(name) is not None)  # it learns of the other one a moment later
        with pytest.raises(NotOwner, match="at http://b: call that node") as raised:
            first.queue(name)
        assert raised.value.address == "http://b"
        owner = first.owner_of(name)
        assert owner is not None
        assert owner.address == "http://b"
        assert second.queue(name) is second.queues[0]


@on_engines
async def test_surplus_shards_drain_and_go(engine: str, folder: Path) -> None:
    async with nodes(engine, folder) as yard:
        node = await yard.start("a")
        await yard.declare(3)
        await yard.publish(names(30))
        await node.administration.set_policy(Policy("images", "^images$", 1), WHO)
        await until(lambda: len(node.topology.bindings("images")) == 1)
        await yard.publish(names(10, start=30))
        assert len(yard.queues()) == 3, "they hold messages"
        consumers = yard.consume()
        await until(lambda: len(bodies(consumers)) == 40)
        assert bodies(consumers) == names(40)
        for consumer in consumers:
            consumer.settling.ack(0, multiple=True)
        await yard.served("images", 1)
        await until(lambda: len(node.topology.shards("images")) == 1)
        assert await yard.publish(["more"]) == [1]


async def test_a_slot_that_is_used_again_has_nothing_of_the_queue_before(folder: Path) -> None:
    async with nodes("memory", folder) as yard:
        node = await yard.start("a")
        admin = node.administration
        await admin.declare_exchange(Exchange("logs", ExchangeType.FANOUT), WHO)
        slots = set()
        for round_ in range(3):
            name = f"queue {round_}"
            await admin.declare_queue(name, WHO)
            await admin.bind(Binding("logs", name), WHO)
            await node.topology_cache.refresh()
            served = await yard.queue(name)
            slots.add(served.queue.slot)
            await yard.publish([f"{round_} a", f"{round_} b"], "logs")
            consumer = consume(served)
            await got(consumer, f"{round_} a", f"{round_} b")
            consumer.settling.ack(2)
            await admin.delete_queue(name, WHO)
            await until(lambda served=served: not served.is_open)  # type: ignore[misc]
        assert len(slots) == 1


async def test_a_node_with_an_outdated_topology_delivers_nothing_of_the_queue_that_has_the_slot_now(
    folder: Path,
) -> None:
    async with nodes("memory", folder) as yard:
        owner = await yard.start("a")
        await owner.administration.declare_queue("before", WHO)
        before = await yard.queue("before")
        consumer = consume(before)
        await _stop_following(owner)
        admin = Administration(owner.node)
        await admin.delete_queue("before", WHO)
        after = await admin.declare_queue("after", WHO)
        assert after.partition == before.partition
        version = version_header((await admin.topology()).version)
        records = [to_record(OutgoingMessage(body.encode(), "k"), body, version) for body in names(3)]
        await yard.log.append(after.partition, records, fence=after.routing_fence)
        served = await yard.queue("after")
        assert consumer.bodies == []
        assert isinstance(consumer.ends[0], NotOwner)
        await got(consume(served), *names(3))


async def test_a_node_with_an_outdated_topology_does_not_purge_the_queue_that_has_the_slot_now(folder: Path) -> None:
    async with nodes("memory", folder) as yard:
        owner = await yard.start("a")
        await owner.administration.declare_queue("before", WHO)
        before = await yard.queue("before")
        await _stop_following(owner)
        admin = Administration(owner.node)
        await admin.delete_queue("before", WHO)
        after = await admin.declare_queue("after", WHO)
        records = [to_record(OutgoingMessage(b"kept", "k"), "1", version_header(after.incarnation))]
        await yard.log.append(after.partition, records, fence=after.routing_fence)
        with pytest.raises(NotOwner):
            await before.purge()
        await got(consume(await yard.queue("after")), "kept")


async def test_a_shard_that_is_taken_over_during_a_rebalance_delivers_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with nodes("memory", folder) as yard:
        first, second = await yard.start("a"), await yard.start("b")
        await yard.declare(1)
        await until(lambda: len(first.queues) == len(second.queues) == 1)
        await yard.publish(names(40))
        version, [moved] = first.topology.version, [served.name for served in second.queues]
        frozen = []
        store_failures = BacklogCopy.store_failures

        async def take_over(copy: BacklogCopy) -> None:
            """Everything was copied: what is acknowledged from now on would come again."""
            await _stop_following(first)
            await yard.stop("b")
            frozen.append((await yard.queue(moved)).is_frozen)
            await store_failures(copy)

        monkeypatch.setattr(BacklogCopy, "store_failures", take_over)
        assert (await first.rebalancing.rebalance("images", WHO)).total == 40
        assert frozen == [True]
        await first.topology_cache.refresh()
        await until(lambda: [served.is_frozen for served in yard.queues()] == [False, False])
        consumers = yard.consume()
        await until(lambda: len(bodies(consumers)) == 40)
        assert bodies(consumers) == names(40)
        records = [record for consumer in consumers for batch in consumer.batches for record in batch.records]
        assert all(version_of(record) > version for record in records), "the slots were given to them later"


async def test_a_slot_is_served_even_if_the_queue_before_could_not_be_closed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with nodes("memory", folder) as yard:
        node = await yard.start("a")
        await node.administration.declare_queue("before", WHO)
        await yard.queue("before")
        await _stop_following(node)
        await node.administration.delete_queue("before", WHO)
        await node.administration.declare_queue("after", WHO)
        close = ShardQueue.close

        async def failing_close(queue: ShardQueue, *, clean: bool = True) -> None:
            await close(queue, clean=clean)
            raise RuntimeError("any error")

        monkeypatch.setattr(ShardQueue, "close", failing_close)
        await node.topology_cache.refresh()
        await yard.queue("after")
        monkeypatch.undo()


async def test_a_queue_that_is_opened_while_its_node_stops_is_closed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with nodes("memory", folder) as yard:
        node = await yard.start("a")
        open_, go_on = ShardQueue.open, asyncio.Event()
        opening: list[ShardQueue] = []

        async def slow_open(queue: ShardQueue) -> None:
            opening.append(queue)
            await go_on.wait()
            await open_(queue)

        monkeypatch.setattr(ShardQueue, "open", slow_open)
        await node.administration.declare_queue("jobs", WHO)
        await until(lambda: opening)
        leave = Membership.__aexit__
        open_when_it_left: list[bool] = []

        async def late_leave(membership: Membership, *_: None) -> None:
            go_on.set()
            await until(lambda: not node._ownership._tasks)
            open_when_it_left.extend(queue.is_open for queue in opening)
            await leave(membership, None, None, None)

        monkeypatch.setattr(Membership, "__aexit__", late_leave)
        await yard.stop("a")
        assert open_when_it_left == [False]


async def _stop_following(node: ShardingNode) -> None:
    """From now on, changes of the topology do not reach this node by themselves."""
    following = node.topology_cache._task
    assert following is not None
    following.cancel()
    await asyncio.wait([following])


# Dead letters


async def test_rejected_messages_go_to_the_queue_for_dead_letters(folder: Path) -> None:
    async with nodes("memory", folder) as yard:
        await yard.start("a")
        await yard.declare(1)
        message = OutgoingMessage(
            *(b"body", "key", (("h", b"1"),), ("cc",)), properties=(("message_id", "7"),), expiration_ms=10**9
        )
        await yard.any.publisher.publish("images", [message])
        (consumer,) = yard.consume()
        await got(consumer, "body")
        consumer.settling.nack(1, requeue=False)
        letters = consume(await yard.queue("dead letters: images"))
        await got(letters, "body")
        record = letters.batches[0].records[0]
        assert record.key == b"key"
        assert record.header("h") == b"1"
        assert record.header("property.message_id") == b"7"
        assert record.header("shardyard.expiration") is None
        (death,) = deaths_of(record)
        assert (death["queue"], death["reason"], death["count"]) == (yard.queues()[0].name, "rejected", 1)
        letters.settling.nack(1, requeue=False)
        served = await yard.queue("dead letters: images")
        await until(lambda: served.unacked == 0)
        assert await served.get() is None


async def test_dead_letters_that_come_while_their_queue_is_removed_stay(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with nodes("memory", folder) as yard:
        node = await yard.start("a")
        await yard.declare(1)
        await yard.publish(["one", "two"])
        (consumer,) = yard.consume()
        await got(consumer, "one", "two")
        consumer.settling.nack(1, requeue=False)
        await got(consume(await yard.queue("dead letters: images")), "one")
        (shard,) = yard.queues()
        remove = Removal._remove

        async def reject_first(removal: Removal, spans: Mapping[Queue, Span], who: str) -> set[Queue]:
            await node.topology_cache.refresh()
            consumer.settling.nack(2, requeue=False)
            await until(lambda: shard.unacked == 0)
            return await remove(removal, spans, who)

        with monkeypatch.context() as patch:
            patch.setattr(Removal, "_remove", reject_first)
            await node.administration.delete_queue("dead letters: images", WHO)
        letters = (await node.topology_cache.refresh()).queue("dead letters: images")
        assert (await yard.log.span(letters.partition)).end == 2


async def test_dead_letters_go_to_the_exchange_of_the_policy(folder: Path) -> None:
    async with nodes("memory", folder) as yard:
        node = await yard.start("a")
        admin = node.administration
        await admin.declare_exchange(Exchange("morgue", ExchangeType.DIRECT), WHO)
        await admin.declare_queue("bodies", WHO)
        await admin.bind(Binding("morgue", "bodies", "known"), WHO)
        await yard.declare(1, limits=QueueLimits(delivery_limit=0, dead_letter_exchange="morgue"))
        await yard.publish(["known", "unknown"])
        (consumer,) = yard.consume()
        await got(consumer, "known", "unknown")
        consumer.settling.nack(2, multiple=True)
        found = consume(await yard.queue("bodies"))
        await got(found, "known")
        assert deaths_of(found.batches[0].records[0])[0]["reason"] == Reason.DELIVERY_LIMIT
        rest = consume(await yard.queue("dead letters: images"))
        await got(rest, "unknown")


async def test_a_message_that_expires_in_circles_is_dropped(folder: Path) -> None:
    async with nodes("memory", folder) as yard:
        await yard.start("a")
        await yard.declare(1, limits=QueueLimits(message_ttl_ms=5, dead_letter_exchange="images"))
        await yard.publish(["round and round"])
        (queue,) = yard.queues()
        await until(lambda: queue.state.end == 2 and not queue.unacked)
        assert (await queue.status()).ready == 0


async def test_messages_that_expire_go_to_the_dead_letter_exchange_without_a_consumer(folder: Path) -> None:
    async with nodes("sqlite", folder) as yard:
        node = await yard.start("a")
        await node.administration.declare_exchange(Exchange("late", ExchangeType.FANOUT), WHO)
        await node.administration.declare_queue("later", WHO)
        await node.administration.bind(Binding("late", "later"), WHO)
        await yard.declare(1, limits=QueueLimits(message_ttl_ms=20, dead_letter_exchange="late"))
        await yard.publish(names(5))
        await got(consume(await yard.queue("later")), *names(5))
