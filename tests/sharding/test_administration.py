"""Declaring exchanges, queues, bindings and policies, and what becomes of shards, on every engine of the registry."""

import asyncio
from collections.abc import Mapping

import pytest

from shardyard.groups import protocol
from shardyard.model import (
    ExchangeExists,
    Fenced,
    InvalidValue,
    NodeRunning,
    PseudoQueue,
    QueueExists,
    ShardManaged,
    ShardyardError,
    Span,
    TooLarge,
    UnknownExchange,
    UnknownNode,
    UnknownPolicy,
    UnknownQueue,
)
from shardyard.model.sharding import (
    NODES_GROUP,
    SHARDS_TOPIC,
    STATES_TOPIC,
    Binding,
    Exchange,
    ExchangeType,
    Overflow,
    Policy,
    Queue,
    QueueLimits,
    QueueState,
    RemainingQueue,
    shard_name,
)
from shardyard.sharding.administration import Administration
from shardyard.sharding.removal import Removal
from shardyard.sharding.topology import Topology
from tests.queues.engines import REGISTRIES
from tests.sharding.conftest import OpenYard
from tests.sharding.yard import WHO, ShardingYard

ALL_ENGINES = pytest.mark.parametrize("engine", REGISTRIES)


def named(exchange: str, *places: tuple[str, int]) -> list[str]:
    return [shard_name(exchange, node, index) for node, index in places]


# RabbitMQ's suite of the plugin


@ALL_ENGINES
async def test_queue_creation_with_the_policy_before_the_exchange(opened: OpenYard) -> None:
    async with opened() as yard:
        await yard.administration.register_node("a")
        await yard.set_policy(3)
        assert await yard.shards() == []
        await yard.declare("images")
        assert await yard.shards() == named("images", ("a", 0), ("a", 1), ("a", 2))


@ALL_ENGINES
async def test_queue_creation_with_the_policy_after_the_exchange(opened: OpenYard) -> None:
    async with opened() as yard:
        await yard.administration.register_node("a")
        await yard.declare("images")
        await yard.declare("videos")
        assert await yard.shards() == []
        await yard.set_policy(3)
        assert await yard.shards() == named("images", ("a", 0), ("a", 1), ("a", 2))
        assert await yard.shards("videos") == []


async def test_an_update_of_shards_per_node_creates_the_missing_shards(opened: OpenYard) -> None:
    async with opened() as yard:
        await yard.administration.register_node("a")
        await yard.declare("images")
        await yard.set_policy(3)
        before = (await yard.topology()).queues
        await yard.set_policy(5)
        after = (await yard.topology()).queues
        assert len(after) == 5
        assert {name: after[name] for name in before} == before


@ALL_ENGINES
async def test_after_a_decrease_of_shards_per_node_surplus_shards_drain_and_keep_their_messages(
    opened: OpenYard,
) -> None:
    async with opened() as yard:
        await yard.administration.register_node("a")
        await yard.declare("images")
        await yard.set_policy(5)
        queues = (await yard.topology()).queues
        [third, fourth] = [queues[shard_name("images", "a", index)] for index in (3, 4)]
        await yard.store(third, b"1", b"2")
        await yard.set_policy(3)
        after = await yard.topology()
        assert fourth.name not in after.queues, "an empty one is removed at once"
        assert after.queues[third.name].state is QueueState.DRAINING
        assert [binding.queue for binding in after.bindings("images")] == [
            shard_name("images", "a", index) for index in range(3)
        ]
        for surplus in (third, fourth):
            with pytest.raises(Fenced):
                await yard.store(surplus, b"by an earlier topology")
        assert (await yard.log.span(third.partition)).end == 2


async def test_a_change_of_the_routing_key_changes_the_bindings_of_the_shards(opened: OpenYard) -> None:
    async with opened() as yard:
        await yard.administration.register_node("a")
        await yard.declare("images", ExchangeType.DIRECT)
        await yard.set_policy(2, routing_key="1234")
        assert {binding.routing_key for binding in (await yard.topology()).bindings("images")} == {"1234"}
        before = (await yard.topology()).queues
        await yard.set_policy(2, routing_key="5678")
        after = await yard.topology()
        assert {binding.routing_key for binding in after.bindings("images")} == {"5678"}
        assert after.queues == before


@ALL_ENGINES
async def test_auto_scale_when_a_node_joins(opened: OpenYard) -> None:
    async with opened() as yard:
        await yard.administration.register_node("a")
        await yard.declare("images")
        await yard.set_policy(2)
        await yard.administration.register_node("b")
        assert await yard.shards() == named("images", ("a", 0), ("a", 1), ("b", 0), ("b", 1))
        before = await yard.topology()
        await yard.administration.register_node("b")
        assert await yard.topology() == before, "one that comes back finds its shards"


@pytest.mark.parametrize("operation", ["declare", "bind", "unbind", "delete"])
async def test_the_pseudo_queue_can_not_be_used_as_a_queue(opened: OpenYard, operation: str) -> None:
    async with opened() as yard:
        await yard.administration.register_node("a")
        await yard.declare("images")
        await yard.declare("other")
        await yard.set_policy(1)
        before = await yard.topology()
        with pytest.raises(PseudoQueue, match="sharded exchange"):
            await use_as_queue(yard, operation, "images")
        for name in (shard_name("images", "a", 0), shard_name("x", "y", 3)):
            with pytest.raises((ShardManaged, UnknownQueue)):
                await use_as_queue(yard, operation, name)
        assert await yard.topology() == before


async def use_as_queue(yard: ShardingYard, operation: str, name: str) -> None:
    match operation:
        case "declare":
            await yard.administration.declare_queue(name, WHO)
        case "bind":
            await yard.administration.bind(Binding("other", name), WHO)
        case "unbind":
            await yard.administration.unbind(Binding("other", name), WHO)
        case _:
            await yard.administration.delete_queue(name, WHO)


async def test_a_queue_in_the_way_of_a_pseudo_queue_is_named(opened: OpenYard) -> None:
    async with opened() as yard:
        await yard.declare("images")
        await yard.administration.declare_queue("images", WHO)
        with pytest.raises(QueueExists, match="delete the queue"):
            await yard.set_policy(1)
        assert not (await yard.topology()).policies


# Policies


async def test_of_several_policies_the_one_with_the_highest_priority_applies_then_the_first_by_name(
    opened: OpenYard,
) -> None:
    async with opened() as yard:
        await yard.administration.register_node("a")
        await yard.declare("images")
        for policy in (
            Policy("z", "images", 1, priority=1),
            Policy("b", "im", 2, priority=2),
            Policy("a", "ag", 3, priority=2),
        ):
            await yard.administration.set_policy(policy, WHO)
        topology = await yard.topology()
        effective = topology.effective_policy("images")
        assert effective is not None
        assert effective.name == "a"
        assert len(topology.shards("images")) == 3
        await yard.administration.clear_policy("a", WHO)
        assert len(await yard.shards()) == 2


async def test_the_limits_of_a_policy_are_those_of_its_shards(opened: OpenYard) -> None:
    limits = QueueLimits(60_000, 1000, Overflow.REJECT_PUBLISH, 5, "failed")
    async with opened() as yard:
        await yard.administration.register_node("a")
        await yard.declare("images")
        await yard.set_policy(2)
        await yard.administration.set_policy(Policy("sharded", "^images$", 2, limits=limits), WHO)
        assert {queue.limits for queue in (await yard.topology()).shards("images")} == {limits}


@pytest.mark.parametrize("shards", [0, -1, 2.5, "3", True, None, 10**6])
async def test_shards_per_node_is_a_whole_number(opened: OpenYard, shards: int) -> None:
    async with opened() as yard:
        with pytest.raises((InvalidValue, TooLarge), match="shards-per-node"):
            await yard.set_policy(shards)
        assert await yard.topology() == Topology()


@pytest.mark.parametrize(
    "pattern", ["(", "[z-a]", "a{2000}", r"(a)\1", "(?=a)", "x" * 1001, "", 3, "((a{99}){99}){99}"]
)
async def test_a_pattern_is_a_regular_expression_that_can_not_explode(opened: OpenYard, pattern: str) -> None:
    async with opened() as yard:
        with pytest.raises(InvalidValue, match="pattern"):
            await yard.set_policy(2, pattern=pattern)
        assert await yard.topology() == Topology()


async def test_a_pattern_that_makes_others_explode_is_matched_at_once(opened: OpenYard) -> None:
    async with opened() as yard:
        await yard.declare("a" * 200)
        await yard.set_policy(1, pattern="^(a+)+$|^(a|aa)+b$")
        assert (await yard.topology()).is_sharded("a" * 200)


@pytest.mark.parametrize(
    "limits",
    [
        QueueLimits(message_ttl_ms=-1),
        QueueLimits(max_length=0),
        QueueLimits(delivery_limit=-1),
        QueueLimits(overflow="drop-tail"),  # type: ignore[arg-type]
        QueueLimits(dead_letter_exchange=""),
    ],
)
async def test_limits_are_checked(opened: OpenYard, limits: QueueLimits) -> None:
    async with opened() as yard:
        with pytest.raises(InvalidValue):
            await yard.administration.set_policy(Policy("limited", "x", 1, limits=limits), WHO)


async def test_what_does_not_exist_is_named(opened: OpenYard) -> None:
    async with opened() as yard:
        administration = yard.administration
        await yard.declare("images")
        for call, error in (
            (administration.clear_policy("none", WHO), UnknownPolicy),
            (administration.delete_exchange("none", WHO), UnknownExchange),
            (administration.delete_queue("none", WHO), UnknownQueue),
            (administration.bind(Binding("none", "none"), WHO), UnknownExchange),
            (administration.bind(Binding("images", "none"), WHO), UnknownQueue),
            (administration.forget_node("none", WHO), UnknownNode),
        ):
            with pytest.raises(error, match="none"):
                await call


# Exchanges


async def test_an_exchange_can_be_declared_again_likewise_and_not_otherwise(opened: OpenYard) -> None:
    async with opened() as yard:
        first = await yard.declare("images")
        version = (await yard.topology()).version
        assert await yard.declare("images") == first
        with pytest.raises(ExchangeExists, match="x-modulus-hash"):
            await yard.declare("images", ExchangeType.FANOUT)
        assert (await yard.topology()).version == version


@pytest.mark.parametrize(
    "exchange",
    [
        Exchange("x", "x-random"),  # type: ignore[arg-type]
        Exchange("", ExchangeType.DIRECT),
        Exchange("a\0", ExchangeType.DIRECT),
        Exchange("x", ExchangeType.DIRECT, hash_header="h"),
        Exchange("x", ExchangeType.MODULUS_HASH, hash_property="body"),
        Exchange("x", ExchangeType.MODULUS_HASH, "h", "message_id"),
    ],
)
async def test_an_exchange_that_can_not_be_is_refused(opened: OpenYard, exchange: Exchange) -> None:
    async with opened() as yard:
        with pytest.raises(InvalidValue):
            await yard.administration.declare_exchange(exchange, WHO)
        assert await yard.topology() == Topology()


@ALL_ENGINES
async def test_deleting_an_exchange_says_what_remains_and_loses_nothing(opened: OpenYard) -> None:
    async with opened() as yard:
        await yard.administration.register_node("a")
        await yard.declare("images")
        await yard.set_policy(3)
        queue = (await yard.topology()).shards("images")[1]
        await yard.store(queue, b"1", b"2", b"3")
        remaining = await yard.administration.delete_exchange("images", WHO)
        assert remaining.queues == (RemainingQueue(queue.name, 3, "a"),)
        assert remaining.messages == 3
        [left] = (await yard.topology()).shards("images")
        assert (left.name, left.state) == (queue.name, QueueState.DRAINING)

        await yard.declare("images")
        [_, again, _] = (await yard.topology()).shards("images")
        assert (again.state, again.slot) == (QueueState.ACTIVE, queue.slot)
        await yard.store(again, b"4")
        assert (await yard.log.span(queue.partition)).end == 4


async def test_an_exchange_can_be_deleted_with_everything_in_it(opened: OpenYard) -> None:
    async with opened() as yard:
        await yard.administration.register_node("a")
        await yard.declare("images")
        await yard.set_policy(2)
        queue = (await yard.topology()).shards("images")[0]
        await yard.store(queue, b"1")
        assert not (await yard.administration.delete_exchange("images", WHO, discard=True)).queues
        assert not (await yard.topology()).queues
        span = await yard.log.span(queue.partition)
        assert span.first == span.end == 1


async def test_what_takes_messages_again_while_it_is_deleted_is_returned(
    opened: OpenYard, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened() as yard:
        await yard.administration.register_node("a")
        await yard.declare("images")
        await yard.set_policy(2)
        queue = (await yard.topology()).shards("images")[0]
        await yard.store(queue, b"1", b"2")
        remove = Removal._remove

        async def declare_first(removal: Removal, spans: Mapping[Queue, Span], who: str) -> set[Queue]:
            await yard.declare("images")
            return await remove(removal, spans, who)

        monkeypatch.setattr(Removal, "_remove", declare_first)
        remaining = await yard.administration.delete_exchange("images", WHO, discard=True)
        assert remaining.queues == (RemainingQueue(queue.name, 2, "a"),)
        assert (await yard.topology()).queues[queue.name].state is QueueState.ACTIVE
        assert await yard.log.count(queue.partition, 0, 2) == 2


async def test_clearing_a_policy_drains_the_shards(opened: OpenYard) -> None:
    async with opened() as yard:
        await yard.administration.register_node("a")
        await yard.declare("images")
        await yard.set_policy(2)
        queue = (await yard.topology()).shards("images")[0]
        await yard.store(queue, b"1")
        remaining = await yard.administration.clear_policy("sharded", WHO)
        assert [left.queue for left in remaining.queues] == [queue.name]
        assert not (await yard.topology()).is_sharded("images")


# Slots


@ALL_ENGINES
async def test_a_drained_queue_is_removed_and_its_slot_used_again(opened: OpenYard) -> None:
    async with opened() as yard:
        administration = yard.administration
        first = await administration.declare_queue("first", WHO)
        second = await administration.declare_queue("second", WHO)
        assert (first.slot, second.slot) == (0, 1)
        await yard.store(first, b"1", b"2")
        assert await administration.delete_queue("first", WHO) == 2
        with pytest.raises(Fenced):
            await yard.store(first, b"for a queue that is gone")
        third = await administration.declare_queue("third", WHO)
        assert (third.slot, third.first) == (0, 2)
        assert third.incarnation > first.incarnation
        await yard.store(third, b"3")
        with pytest.raises(Fenced):
            await yard.store(first, b"for a queue that is gone")
        span = await yard.log.span(third.partition)
        assert (span.first, span.end) == (2, 3)
        for topic in (SHARDS_TOPIC, STATES_TOPIC):
            assert (await yard.log.topic(topic)).partitions == 2


async def test_the_owner_removes_a_draining_queue_only_when_it_is_read_to_its_end(opened: OpenYard) -> None:
    async with opened() as yard:
        await yard.administration.register_node("a")
        await yard.declare("images")
        await yard.set_policy(1)
        [queue] = (await yard.topology()).shards("images")
        await yard.store(queue, b"1", b"2")
        assert not await yard.administration.remove_if_drained(queue, 2), "it is active"
        await yard.administration.clear_policy("sharded", WHO)
        [draining] = (await yard.topology()).shards("images")
        assert not await yard.administration.remove_if_drained(draining, 1), "there is one more message"
        await yard.set_policy(1)
        assert not await yard.administration.remove_if_drained(draining, 2), "it is active again"
        await yard.administration.clear_policy("sharded", WHO)
        [draining] = (await yard.topology()).shards("images")
        assert await yard.administration.remove_if_drained(draining, 2)
        assert not await yard.administration.remove_if_drained(draining, 2), "it is gone"
        assert (await yard.topology()).free_slots == {queue.slot: 2}


async def test_a_drain_that_was_interrupted_before_the_fence_loses_nothing(opened: OpenYard) -> None:
    async with opened() as yard:
        await yard.administration.register_node("a")
        await yard.declare("images")
        await yard.set_policy(1)
        [queue] = (await yard.topology()).shards("images")

        async def fail(_: object) -> None:
            raise asyncio.CancelledError

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(yard.log, "set_fence", fail)
            with pytest.raises(asyncio.CancelledError):
                await yard.administration.clear_policy("sharded", WHO)
        [draining] = (await yard.topology()).shards("images")
        await yard.store(queue, b"by a node that has not seen the change")
        assert not await yard.administration.remove_if_drained(draining, 0)
        with pytest.raises(Fenced):
            await yard.store(queue, b"too late")
        assert await yard.administration.remove_if_drained(draining, 1)


@ALL_ENGINES
async def test_many_nodes_at_once_give_each_queue_a_slot_of_its_own(opened: OpenYard) -> None:
    async with opened() as yard:
        await yard.declare("images")
        await yard.set_policy(2)
        others = [Administration(yard.node) for _ in range(4)]
        await asyncio.gather(
            *(others[n % 4].register_node(f"node-{n}") for n in range(8)),
            *(others[n % 4].declare_queue(f"queue-{n}", WHO) for n in range(8)),
        )
        topology = await yard.topology()
        assert len(topology.shards("images")) == 16
        assert sorted(queue.slot for queue in topology.queues.values()) == list(range(24))
        assert (await yard.log.topic(SHARDS_TOPIC)).partitions >= 24


# Bindings


async def test_the_binding_key_of_a_consistent_hash_exchange_is_a_weight(opened: OpenYard) -> None:
    async with opened() as yard:
        await yard.declare("x", ExchangeType.CONSISTENT_HASH)
        await yard.administration.declare_queue("q", WHO)
        for weight in ("0", "-1", "1.5", "", "heavy", "1001", "²", " 1"):
            with pytest.raises(InvalidValue, match="weight"):
                await yard.administration.bind(Binding("x", "q", weight), WHO)
        assert not (await yard.topology()).declared_bindings
        await yard.administration.bind(Binding("x", "q", "3"), WHO)
        assert (await yard.topology()).bindings("x") == (Binding("x", "q", "3"),)


async def test_bindings_go_with_their_exchange_or_queue(opened: OpenYard) -> None:
    async with opened() as yard:
        administration = yard.administration
        await yard.declare("x", ExchangeType.DIRECT)
        await yard.declare("y", ExchangeType.DIRECT)
        for queue in ("q", "r"):
            await administration.declare_queue(queue, WHO)
            for exchange in ("x", "y"):
                await administration.bind(Binding(exchange, queue, "k"), WHO)
        await administration.unbind(Binding("x", "q", "other"), WHO)
        await administration.unbind(Binding("x", "q", "k"), WHO)
        await administration.delete_exchange("y", WHO)
        assert (await yard.topology()).declared_bindings == {Binding("x", "r", "k")}
        await administration.delete_queue("r", WHO)
        assert not (await yard.topology()).declared_bindings


async def test_a_queue_for_dead_letters_is_created_once(opened: OpenYard) -> None:
    async with opened() as yard:
        first, second = await asyncio.gather(
            *(yard.administration.declare_dead_letter_queue("images", WHO) for _ in range(2))
        )
        assert first == second
        assert first.name == "dead letters: images"
        with pytest.raises(ShardManaged):
            await yard.administration.declare_queue(first.name, WHO)


async def test_a_queue_is_declared_again_with_the_same_limits_only(opened: OpenYard) -> None:
    limits = QueueLimits(max_length=5)
    async with opened() as yard:
        queue = await yard.administration.declare_queue("q", WHO, limits)
        assert await yard.administration.declare_queue("q", WHO, limits) == queue
        with pytest.raises(QueueExists):
            await yard.administration.declare_queue("q", WHO)


# Nodes


@ALL_ENGINES
async def test_a_forgotten_nodes_shards_drain(opened: OpenYard) -> None:
    async with opened() as yard:
        await yard.declare("images")
        await yard.set_policy(1)
        for name in ("a", "b"):
            await yard.administration.register_node(name)
        queue = (await yard.topology()).shards("images")[1]
        await yard.store(queue, b"1")
        await yard.node.transactions.run(lambda tx: protocol.join(tx, NODES_GROUP, "b"))
        with pytest.raises(NodeRunning):
            await yard.administration.forget_node("b", WHO)
        member = await yard.node.transactions.read(lambda tx: tx.member(NODES_GROUP, "b"))
        assert member is not None
        await yard.node.transactions.run(lambda tx: protocol.leave(tx, NODES_GROUP, "b", member.epoch))
        remaining = await yard.administration.forget_node("b", WHO)
        assert [left.queue for left in remaining.queues] == [queue.name]
        assert [binding.queue for binding in (await yard.topology()).bindings("images")] == named("images", ("a", 0))


@pytest.mark.parametrize("name", ["", "with space", "a\tb", "a/b", 7, "x" * 256])
async def test_the_name_of_a_node_is_checked(opened: OpenYard, name: str) -> None:
    async with opened() as yard:
        with pytest.raises(ShardyardError, match="node name"):
            await yard.administration.register_node(name)


async def test_every_change_is_audited_once(opened: OpenYard) -> None:
    async with opened() as yard:
        await yard.administration.register_node("a")
        await yard.declare("images")
        await yard.declare("images")
        await yard.set_policy(2)
        entries = await yard.node.transactions.read(lambda tx: tx.audit_log())
        assert [(row.who, row.action, row.subject) for row in reversed(entries)] == [
            ("a", "node registered", "a"),
            (WHO, "exchange declared", "images"),
            (WHO, "policy set", "sharded"),
        ]


async def test_a_lost_registry_starts_above_the_fences_that_the_log_knows(opened: OpenYard) -> None:
    async with opened() as yard:
        queue = await yard.administration.declare_queue("q", WHO)
        assert queue.incarnation >= yard.node.clock.now() * 1000 - 60_000
