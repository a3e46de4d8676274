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
from tests.groups.test_protocol import GROUP, P0, Yard, yard
from tests.groups.test_reader import PATIENCE_SECONDS, TOPIC, a_yard
from tests.groups.test_reader import Yard as MemberYard
from tests.log.samples import HOLDER
from tests.log.samples import move as move_topic
from tests.registry.blocks import snapshot, transaction

__all__ = ["yard"]  # the fixture

NEXT = "orders.2"
N0 = Partition(NEXT, 0)


def move(yard: Yard, partitions: int = 4) -> None:
    yard.topics[NEXT] = Topic(NEXT, partitions)
    yard.topics[TOPIC] = replace(yard.topics[TOPIC], sealed=True, successor=NEXT)


def owners(yard: Yard, topic: str) -> Counter[str | None]:
    return Counter(row.owner for p, row in yard.rows().items() if p.topic == topic)


def due(yard: Yard, known: Mapping[str, Topic] | None) -> list[str]:
    """The groups that a rebalancer who knows these topics finds to need a rebalance."""
    return [*yard.registry.read(lambda tx: assignment.look(tx, yard.topics, known).due)]


def test_members_of_a_moved_topic_release_it_and_share_its_successor(yard: Yard) -> None:
    for name in "ab":
        yard.join(name)
    yard.settle("a", "b")
    known = dict(yard.topics)
    assert due(yard, known) == due(yard, None) == []
    move(yard)
    assert due(yard, None) == [GROUP]
    assert due(yard, known) == [GROUP]
    yard.rebalance()
    assert all(holding.revoked for name in "ab" for holding in yard.heartbeat(name).values())
    yard.commit("a", *next((p, h.epoch, 3) for p, h in yard.heartbeat("a").items()))  # what is in hand is finished
    yard.settle("a", "b")
    yard.rebalance()
    assert owners(yard, TOPIC) == {None: 6}
    assert owners(yard, NEXT) == {"a": 2, "b": 2}
    assert yard.rebalance() is None
    yard.join("c")
    yard.settle("a", "b", "c")
    assert sorted(owners(yard, NEXT).values()) == [1, 1, 2]


def test_a_successor_is_given_out_when_the_last_partition_is_released(yard: Yard) -> None:
    for name in "ab":
        yard.join(name)
    yard.settle("a", "b")
    move(yard)
    yard.settle("a")
    yard.rebalance()
    assert owners(yard, TOPIC) == {"b": 3, None: 3}
    assert owners(yard, NEXT) == {}
    yard.release_revoked("b")
    yard.rebalance()
    assert owners(yard, NEXT) == {"a": 2, "b": 2}


def test_a_successor_does_not_wait_for_who_is_gone(yard: Yard) -> None:
    yard.join("a", session_timeout=60.0)
    yard.join("b", static=True)
    yard.settle("a", "b")
    move(yard)
    yard.settle("a")
    yard.leave("b")
    yard.rebalance()
    assert owners(yard, NEXT) == {}, "a static member may come back and finish"
    yard.join("b", static=True)
    yard.rebalance()
    assert owners(yard, NEXT) == {"a": 2, "b": 2}, "but not with what was to go"
    yard.clock.time += 11
    yard.settle("a")
    assert owners(yard, NEXT) == {"a": 4}


def test_a_chain_is_followed_to_its_end_as_far_as_it_exists(yard: Yard) -> None:
    yard.join("a")
    yard.topics[TOPIC] = Topic(TOPIC, 6, successor="gone")
    yard.settle("a")
    assert yard.sizes() == {"a": 6}
    move(yard)
    yard.topics[NEXT] = replace(yard.topics[NEXT], successor="orders.3")
    yard.topics["orders.3"] = Topic("orders.3", 2, successor="not there")
    yard.settle("a")
    yard.rebalance()
    assert (owners(yard, TOPIC), owners(yard, NEXT), owners(yard, "orders.3")) == ({None: 6}, {}, {"a": 2})
    del yard.topics[TOPIC]
    assert yard.rebalance() is not None
    assert {p.topic for p in yard.rows()} == {"orders.3"}, "a deleted topic's rows go"


def test_a_move_is_noticed_also_when_the_successor_was_wanted_before(yard: Yard) -> None:
    yard.topics[NEXT] = Topic(NEXT, 4)
    yard.join("a")
    yard.join("b", topics=(NEXT,))
    yard.settle("a", "b")
    assert owners(yard, NEXT) == {"b": 4}
    move(yard)
    yard.settle("a", "b")
    yard.rebalance()
    yard.settle("a", "b")
    assert owners(yard, NEXT) == {"a": 2, "b": 2}


def test_members_that_named_their_partitions_keep_them(yard: Yard) -> None:
    yard.join("a", manual=(P0,))
    yard.join("b")
    yard.join("c", topics=("mail",), manual=(Partition(TOPIC, 1),))
    yard.settle("a", "b", "c")
    kept = {p: row.epoch for p, row in yard.rows().items() if row.owner in ("a", "c")}
    assert len(kept) == 2
    move(yard)
    yard.settle("a", "b", "c")
    yard.rebalance()
    assert {p: row.epoch for p, row in yard.rows().items() if row.owner in ("a", "c")} == kept
    assert owners(yard, NEXT) == {"b": 4}


def test_the_positions_of_all_groups_on_a_topic_are_found(yard: Yard) -> None:
    yard.topics["mail"] = Topic("mail", 1)
    yard.join("a", topics=(TOPIC, "mail"))
    yard.settle("a")
    held = yard.heartbeat("a")
    with transaction(yard.registry) as tx:
        assert positions_on(tx, TOPIC) == {}
    for partition, offset in ((P0, 5), (Partition(TOPIC, 2), 0), (Partition("mail", 0), 7)):
        yard.commit("a", partition, held[partition].epoch, offset)
    yard.leave("a")
    with transaction(yard.registry) as tx:
        protocol.configure(tx, "another group", GroupConfig(), who="ann")
        assert positions_on(tx, TOPIC) == {GROUP: {P0: Position(1, 5), Partition(TOPIC, 2): Position(1, 0)}}
        assert positions_on(tx, "mail") == {GROUP: {Partition("mail", 0): Position(1, 7)}}


def test_a_group_begins_on_the_successor_where_its_positions_were_carried_over_to(yard: Yard) -> None:
    yard.join("a")
    yard.settle("a")
    begin = {N0: Position(9, 4), Partition(NEXT, 3): Position(9, 0)}
    for _ in range(2):  # once more changes nothing
        with transaction(yard.registry) as tx:
            transfer_positions(tx, GROUP, begin, "ann")
            assert [(row.who, row.action, row.subject, row.detail) for row in tx.audit_log()] == [
                ("ann", "positions transferred", GROUP, {"orders.2/0": 4, "orders.2/3": 0})
            ]
    assert yard.rebalance() is None, "they wait for the move"
    move(yard)
    yard.settle("a")
    yard.rebalance()
    held = yard.heartbeat("a")
    assert {p: h.committed for p, h in held.items()} == {p: begin.get(p) for p in yard.topics[NEXT]}


def test_positions_are_carried_over_neither_to_an_owner_nor_back(yard: Yard) -> None:
    move(yard)
    yard.join("a")
    yard.rebalance()
    with transaction(yard.registry) as tx:
        transfer_positions(tx, GROUP, {N0: Position(1, 50)}, "ann")
    assert yard.rows()[N0].committed is None
    yard.commit("a", N0, yard.heartbeat("a")[N0].epoch, 10)
    yard.leave("a")
    with transaction(yard.registry) as tx:
        transfer_positions(tx, GROUP, {N0: Position(1, 9)}, "ann")
        assert tx.audit_log() == []
        with pytest.raises(UnknownGroup):
            transfer_positions(tx, "nobody", {N0: Position(1, 9)}, "ann")
    assert yard.rows()[N0].committed == Position(1, 10)


def test_members_and_rebalancer_hear_of_positions_that_were_carried_over(yard: Yard) -> None:
    yard.join("a")
    heard = {name: threading.Event() for name in (protocol.watch_name(GROUP), protocol.ANY_GROUP)}
    for name, event in heard.items():
        yard.registry.watch(name, event.set)
    for event in heard.values():
        event.clear()
    with transaction(yard.registry) as tx:
        transfer_positions(tx, GROUP, {N0: Position(1, 1)}, "ann")
    assert all(event.wait(PATIENCE_SECONDS) for event in heard.values())


# Members -----------------------------------------------------------------------------------------------------------

RECORDS = [Record(str(i), b"k%d" % (i % 23), b"", timestamp=1) for i in range(300)]
BATCH = 7
CONSUMED = 2 * BATCH
"""Records of each partition that are consumed before the move."""


class Consumers:
    """Members that note what they are given, and of the old topic consume only so much."""

    def __init__(self, yard: MemberYard) -> None:
        self.by_key: defaultdict[bytes | None, list[str]] = defaultdict(list)
        self.count: Counter[str] = Counter()
        self._yard = yard

    async def work(self, name: str) -> None:
        options = {"session_timeout": 2.0, "drain": 0.1, "max_records": BATCH}
        async with self._yard.member(name, **options) as member:
            async for batch in member:
                if batch.partition.topic == TOPIC and batch.end > CONSUMED:
                    continue  # it is neither done nor committed
                for record in batch.records():
                    self.by_key[record.key].append(record.id)
                    self.count[record.id] += 1
                await batch.commit()


async def carry_rest_over(yard: MemberYard, group: str) -> None:
    """Fill the successor with a record that all have had, and what the group has left; let it begin in between."""
    with snapshot(yard.registry) as tx:
        positions = positions_on(tx, TOPIC)[group]
    successor = await yard.log.create_topic(NEXT, 7, partitioner="jump")
    for partition in successor:
        await yard.log.append(partition, [Record("had before", None, b"")])
    for partition, position in positions.items():
        rest = await yard.log.read(partition, position.offset, epoch=position.epoch)
        await Sender(yard.log, NEXT).send(rest.records())
    with transaction(yard.registry) as tx:
        transfer_positions(tx, group, {p: Position(successor.epoch, 1) for p in successor}, "ann")


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
def test_members_go_on_with_the_successor_and_every_record_is_delivered(kind: str, tmp_path: Path) -> None:
    async def story() -> None:
        async with a_yard(kind, tmp_path) as yard:
            sender, consumers = Sender(yard.log, TOPIC), Consumers(yard)
            await sender.send(RECORDS[:200])
            tasks = [asyncio.create_task(consumers.work(f"m{i}")) for i in range(3)]

            async def part_consumed() -> bool:
                with contextlib.suppress(UnknownGroup):
                    return set((await yard.committed()).values()) == {CONSUMED}
                return False

            await yard.until(part_consumed)
            await yard.log.seal_topic(TOPIC, HOLDER)
            sending = asyncio.create_task(sender.send(RECORDS[200:]))  # it waits at the seal
            await carry_rest_over(yard, "billing")
            await move_topic(yard.log, TOPIC, NEXT)

            async def all_consumed() -> bool:
                rows = await status(yard.log, yard.registry, "billing")
                return len(consumers.count) == 300 and {(r.partition.topic, r.lag) for r in rows} == {(NEXT, 0)}

            await yard.until(all_consumed)
            await sending
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            assert consumers.count == Counter(record.id for record in RECORDS), "each once"
            for key, ids in consumers.by_key.items():
                assert ids == [record.id for record in RECORDS if record.key == key], "and each key in order"

    asyncio.run(story())
