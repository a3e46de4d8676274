"""Groups whose topic moves: the protocol by examples, on both registries, and members on the embedded log."""

import asyncio
import contextlib
import threading
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from shardyard.groups import GroupConfig, assignment, positions_on, protocol, status, transfer_positions
from shardyard.log import Sender
from shardyard.model import Partition, Position, Record, Topic, UnknownGroup
from tests.groups.test_protocol import GROUP, P0, SimpleGroup, billing
from tests.groups.test_reader import TIMEOUT_SECONDS, TOPIC, Environment, open_environment
from tests.log.samples import HOLDER, end
from tests.log.samples import move as move_topic
from tests.registry.blocks import snapshot, transaction

__all__ = ["billing"]  # the fixture

NEXT = "orders.2"
N0 = Partition(NEXT, 0)


def move(billing: SimpleGroup, partitions: int = 4) -> None:
    billing.topics[NEXT] = Topic(NEXT, partitions)
    billing.topics[TOPIC] = replace(billing.topics[TOPIC], sealed=True, successor=NEXT)


def owners(billing: SimpleGroup, topic: str) -> Counter[str | None]:
    return Counter(row.owner for p, row in billing.rows().items() if p.topic == topic)


def due(billing: SimpleGroup, known: Mapping[str, Topic] | None) -> list[str]:
    """The groups that a rebalancer who knows these topics finds to need a rebalance."""
    return [*billing.registry.read(lambda tx: assignment.look(tx, billing.topics, known).due)]


def test_members_of_a_moved_topic_release_it_and_share_its_successor(billing: SimpleGroup) -> None:
    for name in "ab":
        billing.join(name)
    billing.settle("a", "b")
    known = dict(billing.topics)
    assert due(billing, known) == due(billing, None) == []
    move(billing)
    assert due(billing, None) == [GROUP]
    assert due(billing, known) == [GROUP]
    billing.rebalance()
    assert all(holding.revoked for name in "ab" for holding in billing.heartbeat(name).values())
    billing.commit(
        "a", *next((p, h.epoch, 3) for p, h in billing.heartbeat("a").items())
    )  # what is in flight is finished
    billing.settle("a", "b")
    billing.rebalance()
    assert owners(billing, TOPIC) == {None: 6}
    assert owners(billing, NEXT) == {"a": 2, "b": 2}
    assert billing.rebalance() is None
    billing.join("c")
    billing.settle("a", "b", "c")
    assert sorted(owners(billing, NEXT).values()) == [1, 1, 2]


def test_a_successor_is_assigned_when_the_last_partition_is_released(billing: SimpleGroup) -> None:
    for name in "ab":
        billing.join(name)
    billing.settle("a", "b")
    move(billing)
    billing.settle("a")
    billing.rebalance()
    assert owners(billing, TOPIC) == {"b": 3, None: 3}
    assert owners(billing, NEXT) == {}
    billing.release_revoked("b")
    billing.rebalance()
    assert owners(billing, NEXT) == {"a": 2, "b": 2}


def test_a_successor_does_not_wait_for_members_that_are_gone(billing: SimpleGroup) -> None:
    billing.join("a", session_timeout=60.0)
    billing.join("b", static=True)
    billing.settle("a", "b")
    move(billing)
    billing.settle("a")
    billing.leave("b")
    billing.rebalance()
    assert owners(billing, NEXT) == {}, "a static member may come back and finish"
    billing.join("b", static=True)
    billing.rebalance()
    assert owners(billing, NEXT) == {"a": 2, "b": 2}, "but not with what was to go"
    billing.clock.time += 11
    billing.settle("a")
    assert owners(billing, NEXT) == {"a": 4}


def test_a_chain_is_followed_to_its_end_as_far_as_it_exists(billing: SimpleGroup) -> None:
    billing.join("a")
    billing.topics[TOPIC] = Topic(TOPIC, 6, successor="gone")
    billing.settle("a")
    assert billing.sizes() == {"a": 6}
    move(billing)
    billing.topics[NEXT] = replace(billing.topics[NEXT], successor="orders.3")
    billing.topics["orders.3"] = Topic("orders.3", 2, successor="not there")
    billing.settle("a")
    billing.rebalance()
    assert (owners(billing, TOPIC), owners(billing, NEXT), owners(billing, "orders.3")) == ({None: 6}, {}, {"a": 2})
    del billing.topics[TOPIC]
    assert billing.rebalance() is not None
    assert {p.topic for p in billing.rows()} == {"orders.3"}, "a deleted topic's rows go"


def test_a_move_is_noticed_also_when_the_successor_was_wanted_before(billing: SimpleGroup) -> None:
    billing.topics[NEXT] = Topic(NEXT, 4)
    billing.join("a")
    billing.join("b", topics=(NEXT,))
    billing.settle("a", "b")
    assert owners(billing, NEXT) == {"b": 4}
    move(billing)
    billing.settle("a", "b")
    billing.rebalance()
    billing.settle("a", "b")
    assert owners(billing, NEXT) == {"a": 2, "b": 2}


def test_members_that_named_their_partitions_keep_them(billing: SimpleGroup) -> None:
    billing.join("a", manual=(P0,))
    billing.join("b")
    billing.join("c", topics=("mail",), manual=(Partition(TOPIC, 1),))
    billing.settle("a", "b", "c")
    kept = {p: row.epoch for p, row in billing.rows().items() if row.owner in ("a", "c")}
    assert len(kept) == 2
    move(billing)
    billing.settle("a", "b", "c")
    billing.rebalance()
    assert {p: row.epoch for p, row in billing.rows().items() if row.owner in ("a", "c")} == kept
    assert owners(billing, NEXT) == {"b": 4}


def test_the_positions_of_all_groups_on_a_topic_are_found(billing: SimpleGroup) -> None:
    billing.topics["mail"] = Topic("mail", 1)
    billing.join("a", topics=(TOPIC, "mail"))
    billing.settle("a")
    held = billing.heartbeat("a")
    with transaction(billing.registry) as tx:
        assert positions_on(tx, TOPIC) == {}
    for partition, offset in ((P0, 5), (Partition(TOPIC, 2), 0), (Partition("mail", 0), 7)):
        billing.commit("a", partition, held[partition].epoch, offset)
    billing.leave("a")
    with transaction(billing.registry) as tx:
        protocol.configure(tx, "another group", GroupConfig(), who="ann")
        assert positions_on(tx, TOPIC) == {GROUP: {P0: Position(1, 5), Partition(TOPIC, 2): Position(1, 0)}}
        assert positions_on(tx, "mail") == {GROUP: {Partition("mail", 0): Position(1, 7)}}


def test_a_group_starts_on_the_successor_where_its_positions_were_transferred_to(billing: SimpleGroup) -> None:
    billing.join("a")
    billing.settle("a")
    begin = {N0: Position(9, 4), Partition(NEXT, 3): Position(9, 0)}
    for _ in range(2):  # once more changes nothing
        with transaction(billing.registry) as tx:
            transfer_positions(tx, GROUP, begin, "ann")
            assert [(row.who, row.action, row.subject, row.detail) for row in tx.audit_log()] == [
                ("ann", "positions transferred", GROUP, {"orders.2/0": 4, "orders.2/3": 0})
            ]
    assert billing.rebalance() is None, "they wait for the move"
    move(billing)
    billing.settle("a")
    billing.rebalance()
    held = billing.heartbeat("a")
    assert {p: h.committed for p, h in held.items()} == {p: begin.get(p) for p in billing.topics[NEXT]}


def test_positions_are_transferred_neither_to_an_owner_nor_back(billing: SimpleGroup) -> None:
    move(billing)
    billing.join("a")
    billing.rebalance()
    with transaction(billing.registry) as tx:
        transfer_positions(tx, GROUP, {N0: Position(1, 50)}, "ann")
    assert billing.rows()[N0].committed is None
    billing.commit("a", N0, billing.heartbeat("a")[N0].epoch, 10)
    billing.leave("a")
    with transaction(billing.registry) as tx:
        transfer_positions(tx, GROUP, {N0: Position(1, 9)}, "ann")
        assert tx.audit_log() == []
        with pytest.raises(UnknownGroup):
            transfer_positions(tx, "nobody", {N0: Position(1, 9)}, "ann")
    assert billing.rows()[N0].committed == Position(1, 10)


def test_members_and_rebalancer_are_notified_of_positions_that_were_transferred(billing: SimpleGroup) -> None:
    billing.join("a")
    heard = {name: threading.Event() for name in (protocol.watch_name(GROUP), protocol.ANY_GROUP)}
    for name, event in heard.items():
        billing.registry.watch(name, event.set)
    for event in heard.values():
        event.clear()
    with transaction(billing.registry) as tx:
        transfer_positions(tx, GROUP, {N0: Position(1, 1)}, "ann")
    assert all(event.wait(TIMEOUT_SECONDS) for event in heard.values())


# Members -----------------------------------------------------------------------------------------------------------

RECORDS = [Record(str(i), b"k%d" % (i % 23), b"", timestamp=1) for i in range(300)]
BATCH = 7
CONSUMED = 2 * BATCH
"""Records of each partition that are consumed before the move."""


class Consumers:
    """Members that record what they get, and consume only a part of the old topic."""

    def __init__(self, env: Environment) -> None:
        self.by_key: defaultdict[bytes | None, list[str]] = defaultdict(list)
        self.count: Counter[str] = Counter()
        self._env = env

    async def work(self, name: str) -> None:
        options = {"session_timeout": 2.0, "drain": 0.1, "max_records": BATCH}
        async with self._env.member(name, **options) as member:
            async for batch in member:
                if batch.partition.topic == TOPIC and batch.end > end(self._env.log, CONSUMED):
                    continue  # it is neither done nor committed
                for record in batch.records():
                    self.by_key[record.key].append(record.id)
                    self.count[record.id] += 1
                await batch.commit()


async def transfer_rest(env: Environment, group: str) -> None:
    """Append to each partition of the successor a record that was consumed already, and then the rest; transfer the
    positions to the boundary."""
    with snapshot(env.registry) as tx:
        positions = positions_on(tx, TOPIC)[group]
    successor = await env.log.create_topic(NEXT, 7, partitioner="jump")
    for partition in successor:
        await env.log.append(partition, [Record("had before", None, b"")])
    for partition, position in positions.items():
        rest = await env.log.read(partition, position.offset, epoch=position.epoch)
        await Sender(env.log, NEXT).send(rest.records())
    with transaction(env.registry) as tx:
        transfer_positions(tx, group, {p: Position(successor.epoch, end(env.log, 1)) for p in successor}, "ann")


@pytest.mark.parametrize("kind", ["memory", "sparse", "sqlite"])
def test_members_continue_with_the_successor_and_every_record_is_delivered(kind: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with open_environment(kind, tmp_path) as env:
            sender, consumers = Sender(env.log, TOPIC), Consumers(env)
            await sender.send(RECORDS[:200])
            tasks = [asyncio.create_task(consumers.work(f"m{i}")) for i in range(3)]

            async def part_consumed() -> bool:
                with contextlib.suppress(UnknownGroup):
                    return set((await env.committed()).values()) == {end(env.log, CONSUMED)}
                return False

            await env.until(part_consumed)
            await env.log.seal_topic(TOPIC, HOLDER)
            sending = asyncio.create_task(sender.send(RECORDS[200:]))  # it waits at the seal
            await transfer_rest(env, "billing")
            await move_topic(env.log, TOPIC, NEXT)

            async def all_consumed() -> bool:
                rows = await status(env.log, env.registry, "billing")
                return len(consumers.count) == 300 and {(r.partition.topic, r.lag) for r in rows} == {(NEXT, 0)}

            await env.until(all_consumed)
            await sending
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            assert consumers.count == Counter(record.id for record in RECORDS), "each once"
            for key, ids in consumers.by_key.items():
                assert ids == [record.id for record in RECORDS if record.key == key], "and each key in order"

    asyncio.run(scenario())
