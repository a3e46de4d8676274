"""Publishing: routing to slots, refusals, retries, limits, and the records of messages."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardyard.log.requests import AppendRequest
from shardyard.model import (
    Appended,
    InvalidValue,
    QueueFull,
    ShardyardError,
    Stamp,
    TooLarge,
    UnknownExchange,
    Unroutable,
)
from shardyard.model.limits import Validated
from shardyard.model.sharding import (
    Binding,
    Exchange,
    ExchangeType,
    OutgoingMessage,
    Overflow,
    Policy,
    QueueLimits,
)
from shardyard.runtime.clock import now_ms
from shardyard.sharding.messages import check_message, to_message, to_record, version_header
from shardyard.sharding.publishing import Publisher
from shardyard.sharding.topology_cache import TopologyCache
from tests.queues.engines import POSTGRESQL
from tests.sharding.nodes import WHO, Nodes, bodies, nodes
from tests.sharding.owner import consume, got, names, until

on_engines = pytest.mark.parametrize("engine", ["memory", "sqlite", POSTGRESQL])
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=10)


async def stored(yard: Nodes) -> int:
    return sum(span.end for span in (await yard.log.ends("shardyard.shards")).values())


def message(body: str, **fields: Any) -> OutgoingMessage:
    return OutgoingMessage(body.encode(), body, **fields)


async def outdated(yard: Nodes) -> Publisher:
    """A publisher of a node that does not hear of changes until it asks."""
    cache = TopologyCache(yard.any.node)
    await cache.refresh()
    return Publisher(yard.log, cache, yard.any.node.clock)


async def test_a_message_that_no_queue_takes_is_an_error_unless_it_may_be_lost(folder: Path) -> None:
    async with nodes("memory", folder) as yard:
        node = await yard.start("a")
        await node.administration.declare_exchange(Exchange("direct", ExchangeType.DIRECT), WHO)
        await node.administration.declare_queue("q", WHO)
        await node.administration.bind(Binding("direct", "q", "known"), WHO)
        publish = node.publisher.publish
        with pytest.raises(Unroutable, match="'nobody' to no queue"):
            await publish("direct", [message("known"), message("nobody")])
        assert await stored(yard) == 0, "nothing of the batch is stored"
        assert await publish("direct", [message("known"), message("nobody")], mandatory=False) == [1, 0]
        assert await publish("direct", [message("nobody", cc=("known",))]) == [1]
        with pytest.raises(UnknownExchange):
            await publish("missing", [message("x")])
        assert await publish("direct", []) == []


async def test_a_message_has_its_time_before_it_is_stored(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The log keeps only such records at hand for readers that wait for them; it would have to read others again."""
    async with nodes("memory", folder) as yard:
        node = await yard.start("a")
        await yard.declare(2)
        requests: list[AppendRequest] = []
        append_many = yard.log.append_many

        async def note(given: Sequence[AppendRequest]) -> list[Appended | ShardyardError]:
            requests.extend(given)
            return await append_many(given)

        monkeypatch.setattr(yard.log, "append_many", note)
        before = now_ms()
        await node.publisher.publish("images", [message(name) for name in names(10)], stamp=Stamp("p", 1))
        times = [row.timestamp for request in requests for row in cast(Validated, request.records).rows]
        assert len(times) == 10
        assert before <= min(times) <= max(times) <= now_ms()


@on_engines
async def test_a_queue_that_was_removed_gets_nothing_from_an_outdated_node(engine: str, folder: Path) -> None:
    async with nodes(engine, folder) as yard:
        node = await yard.start("a")
        await yard.declare(3)
        publisher = await outdated(yard)
        await node.administration.set_policy(Policy("images", "^images$", 1), WHO)
        await until(lambda: len(node.topology.shards("images")) == 1)
        taken = await publisher.publish("images", [message(name) for name in names(30)])
        assert taken == [1] * 30
        await yard.served("images", 1)
        consumers = yard.consume()
        await until(lambda: len(bodies(consumers)) == 30)
        assert bodies(consumers) == names(30)


async def test_a_fanout_that_is_routed_again_stores_no_copy_twice(folder: Path) -> None:
    async with nodes("memory", folder) as yard:
        node = await yard.start("a")
        admin = node.administration
        await admin.declare_exchange(Exchange("news", ExchangeType.FANOUT), WHO)
        for name in ("one", "two", "gone"):
            await admin.declare_queue(name, WHO)
            await admin.bind(Binding("news", name), WHO)
        publisher = await outdated(yard)
        await admin.delete_queue("gone", WHO)
        assert await publisher.publish("news", [message("m")], stamp=Stamp("p", 1)) == [2]
        for name in ("one", "two"):
            served = await yard.queue(name)
            await got(consume(served), "m")
            assert (await served.status()).ready == 0


@on_engines
async def test_a_publish_that_is_repeated_through_another_node_is_stored_once(engine: str, folder: Path) -> None:
    async with nodes(engine, folder) as yard:
        await yard.start("a")
        await yard.start("b")
        await yard.declare(2)
        batch = [message(name) for name in names(20)]
        for name in ("a", "b", "a"):
            await yard.running[name].topology_cache.refresh()
            assert await yard.running[name].publisher.publish("images", batch, stamp=Stamp("p", 7)) == [1] * 20
        await yard.running["b"].publisher.publish("images", batch[:1], stamp=Stamp("p", 8))
        consumers = yard.consume()
        await until(lambda: len(bodies(consumers)) == 21)
        assert bodies(consumers) == sorted([*names(20), names(1)[0]])


async def test_what_is_published_in_one_turn_is_one_append_for_each_slot(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with nodes("memory", folder) as yard:
        node = await yard.start("a")
        await yard.declare(2)
        appends: Counter[int] = Counter()
        append = yard.log.append

        async def counted(partition: Any, records: Any, **options: Any) -> Any:
            if partition.topic == "shardyard.shards":
                appends[partition.index] += 1
            return await append(partition, records, **options)

        monkeypatch.setattr(yard.log, "append", counted)
        taken = await asyncio.gather(*(node.publisher.publish("images", [message(name)]) for name in names(100)))
        assert taken == [[1]] * 100
        assert sorted(appends.values()) == [1, 1]
        assert await stored(yard) == 100


async def test_a_full_queue_refuses_messages_until_some_are_acknowledged(folder: Path) -> None:
    async with nodes("memory", folder) as yard:
        await yard.start("a")
        await yard.declare(1, limits=QueueLimits(max_length=3, overflow=Overflow.REJECT_PUBLISH))
        await yard.publish(names(2))
        with pytest.raises(QueueFull, match="maximum length of 3"):
            await yard.publish(names(2, start=2))
        await yard.publish(names(1, start=2))
        with pytest.raises(QueueFull):
            await yard.publish(["more"])
        (consumer,) = yard.consume()
        await got(consumer, *names(3))
        consumer.settling.ack(2, multiple=True)
        await publish_when_it_fits(yard, "fits")
        await got(consumer, *names(3), "fits")


async def test_a_maximum_length_that_is_set_later_counts_nothing_that_was_acknowledged_before(folder: Path) -> None:
    async with nodes("memory", folder) as yard:
        node = await yard.start("a")
        await yard.declare(1)
        (queue,), (consumer,) = yard.queues(), yard.consume()
        await yard.publish(names(3))
        await got(consumer, *names(3))
        consumer.settling.ack(0, multiple=True)
        states = node._ownership._states
        await until(lambda: queue.state.floor == 3 and states._task is not None and states._task.done())
        assert (await yard.log.span(queue.partition)).first == 0, "the log still has them"
        for limit, fitting in ((3, "a"), (4, "bcd")):  # nobody acknowledges these
            await set_limits(yard, QueueLimits(max_length=limit, overflow=Overflow.REJECT_PUBLISH))
            for body in fitting:
                await publish_when_it_fits(yard, body)
            with pytest.raises(QueueFull, match=f"maximum length of {limit}"):
                await yard.publish(names(3))
        await set_limits(yard, QueueLimits())
        await yard.publish(names(3))


async def set_limits(yard: Nodes, limits: QueueLimits) -> None:
    """Set the policy of `images`, and wait until the owners of its shards know it."""
    await yard.any.administration.set_policy(Policy("images", "^images$", 1, limits=limits), WHO)
    await until(lambda: all(served.limits == limits for served in yard.queues()))


async def publish_when_it_fits(yard: Nodes, body: str) -> None:
    async def fits() -> bool:
        try:
            return await yard.publish([body]) == [1]
        except QueueFull:
            return False

    async with asyncio.timeout(20):
        while not await fits():  # noqa: ASYNC110 there is no event for it
            await asyncio.sleep(0.001)


@on_engines
async def test_a_publish_that_filled_a_queue_is_not_refused_when_it_is_repeated(engine: str, folder: Path) -> None:
    async with nodes(engine, folder) as yard:
        node = await yard.start("a")
        await yard.declare(1, limits=QueueLimits(max_length=3, overflow=Overflow.REJECT_PUBLISH))
        other = await outdated(yard)
        messages = [message(name) for name in names(3)]
        for publisher in (node.publisher, other, node.publisher):
            assert await publisher.publish("images", messages, stamp=Stamp("p", 7)) == [1, 1, 1]
            with pytest.raises(QueueFull, match="no room for 3 more"):
                await publisher.publish("images", messages, stamp=Stamp("p", 8))
        assert await stored(yard) == 3


async def test_more_messages_at_once_than_the_maximum_length_are_refused_with_advice(folder: Path) -> None:
    async with nodes("memory", folder) as yard:
        await yard.start("a")
        await yard.declare(1, limits=QueueLimits(max_length=3, overflow=Overflow.REJECT_PUBLISH))
        with pytest.raises(QueueFull, match="never takes 4 at once: publish at most 3 at a time"):
            await yard.publish(names(4))
        assert await stored(yard) == 0


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        (OutgoingMessage(b"", headers=(("shardyard.version", b"1"),)), InvalidValue),
        (OutgoingMessage(b"", headers=(("property.x", b"1"),)), InvalidValue),
        (OutgoingMessage(b"", expiration_ms=-1), InvalidValue),
        (OutgoingMessage(b"", expiration_ms=1.5), InvalidValue),  # type: ignore[arg-type]
        (OutgoingMessage(b"", routing_key="\ud800"), InvalidValue),
        (OutgoingMessage("text"), InvalidValue),  # type: ignore[arg-type]
        (OutgoingMessage(bytes(2_000_000)), TooLarge),
    ],
)
async def test_a_batch_with_a_wrong_message_is_refused_as_a_whole(
    folder: Path, wrong: OutgoingMessage, error: type[ShardyardError]
) -> None:
    async with nodes("memory", folder) as yard:
        node = await yard.start("a")
        await yard.declare(2)
        with pytest.raises(error):
            await node.publisher.publish("images", [*(message(name) for name in names(20)), wrong])
        assert await stored(yard) == 0


@given(
    st.builds(
        OutgoingMessage,
        body=st.binary(max_size=20),
        routing_key=TEXT,
        headers=st.lists(st.tuples(TEXT.map("x".__add__), st.binary(max_size=5)), max_size=3).map(tuple),
        cc=st.lists(TEXT, max_size=3).map(tuple),
        bcc=st.lists(TEXT, max_size=2).map(tuple),
        properties=st.lists(st.tuples(TEXT, TEXT), max_size=3).map(tuple),
        expiration_ms=st.none() | st.integers(0, 10**12),
    )
)
def test_a_message_is_the_same_after_it_was_stored_except_for_bcc(given: OutgoingMessage) -> None:
    check_message(given)
    record = to_record(given, "id", version_header(5))
    found = to_message(record)
    assert found == OutgoingMessage(
        *(given.body, given.routing_key, given.headers, given.cc, ()), given.properties, given.expiration_ms
    )
