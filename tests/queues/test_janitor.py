"""Draining partitions are dropped when every group has read them, and departed members of broadcast groups are deleted
when they stay away for long; not before."""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from shardyard.groups import ResetTarget, assignment, protocol, reset, resolve_positions
from shardyard.log import Log
from shardyard.log.memory import MemoryLog
from shardyard.model import InvalidValue, Partition, Position, Record, Span, Topic
from shardyard.queues.alarms import SCOPE, Alarms
from shardyard.queues.draining import draining_partitions
from shardyard.queues.janitor import DEPARTED_EVERY_SECONDS, KEPT_SECONDS, LEASE_SECONDS, Janitor
from shardyard.queues.settings import change_group
from shardyard.queues.topic_readers import topic_readers
from shardyard.registry import GroupRow, OwnershipRow, PositionCommit, Registry, Transaction
from shardyard.registry.batcher import TransactionBatcher
from shardyard.registry.memory import MemoryRegistry
from shardyard.runtime.clock import ManualClock
from tests.log.samples import HOLDER, awaited, move
from tests.queues.engines import ENGINES, REGISTRIES

P0, P1, P2 = (Partition("orders", index) for index in range(3))
OpenJanitor = Callable[..., Janitor]


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def open_janitor(batcher: Callable[[Registry], TransactionBatcher], clock: ManualClock) -> OpenJanitor:
    def opened(log: Log, registry: Registry, holder: str = "b1") -> Janitor:
        return Janitor(log, batcher(registry), holder=holder, clock=clock)

    return opened


async def contracted(log: Log, *, records: int = 3) -> int:
    """Create a topic of which partitions 1 and 2 are draining, the latter with records. Returns its epoch."""
    await log.create_topic("orders", 3)
    if records:
        await log.append(P2, [Record.new(b"x") for _ in range(records)])
    return (await log.contract_topic("orders", 1)).epoch


class Contracting(MemoryLog):
    """Contracts the topic further just before its partitions are dropped."""

    async def drop_partitions(self, name: str, partitions: int) -> Topic:
        await self.contract_topic(name, 2)
        return await super().drop_partitions(name, partitions)


class Dropping(MemoryLog):
    """Drops the draining partitions while they are looked at."""

    async def count(self, partition: Partition, start: int, end: int) -> int:
        await super().drop_partitions(partition.topic, 1)
        return await super().count(partition, start, end)


def join(registry: Registry, group: str, member: str, topic: str = "orders") -> None:
    registry.run(lambda tx: protocol.join(tx, group, member, topics=[topic]))


async def found(log: Log, registry: Registry) -> list[tuple[int, int, dict[str, int], bool]]:
    """The draining partitions of `orders`: index, records, which groups are waited for, and whether it is drained."""
    draining = await draining_partitions(log, registry.read(topic_readers), await log.topic("orders"))
    return [(one.partition, one.records, one.waiting_for, one.drained) for one in draining]


def commit(registry: Registry, group: str, partition: Partition, position: Position | None) -> None:
    def work(tx: Transaction) -> None:
        tx.put_group(tx.group(group) or GroupRow(group))
        row = tx.ownership(group, partition) or OwnershipRow(group, partition)
        tx.put_ownerships([replace(row, committed=position)])

    registry.run(work)


@awaited
async def test_a_partition_stays_until_every_group_has_read_it_to_its_end(open_janitor: OpenJanitor) -> None:
    async with MemoryLog() as log:
        with MemoryRegistry() as registry:
            janitor = open_janitor(log, registry)
            epoch = await contracted(log)
            assert await janitor.drop_drained_partitions() == [], "no group has read it"
            commit(registry, "billing", P2, Position(epoch, 2))
            assert await janitor.drop_drained_partitions() == []
            commit(registry, "billing", P2, Position(epoch, 3))
            commit(registry, "shipping", P2, None)
            assert await janitor.drop_drained_partitions() == [], "only one of two groups has read it"
            commit(registry, "shipping", P2, Position(epoch - 1, 3))
            assert await janitor.drop_drained_partitions() == [], "that was in an earlier epoch of the topic"
            commit(registry, "shipping", P2, Position(epoch, 3))
            (topic,) = await janitor.drop_drained_partitions()
            assert (topic.partitions, topic.open_partitions) == (1, None)
            assert await janitor.drop_drained_partitions() == []


@awaited
async def test_a_group_that_never_committed_on_the_partition_is_waited_for_until_it_is_reset_or_deleted(
    open_janitor: OpenJanitor,
) -> None:
    async with MemoryLog() as log:
        with MemoryRegistry() as registry:
            janitor = open_janitor(log, registry)
            epoch = await contracted(log)
            commit(registry, "on", P2, Position(epoch, 3))
            for group in ("off", "older"):
                commit(registry, group, P0, Position(epoch, 0))
            commit(registry, "elsewhere", Partition("mails", 2), Position(epoch, 0))
            assert await janitor.drop_drained_partitions() == []
            assert await found(log, registry) == [(1, 0, {}, True), (2, 3, {"off": 3, "older": 3}, False)]
            positions = await resolve_positions(log, "orders", None, ResetTarget("latest"))
            registry.run(lambda tx: reset(tx, "off", positions, "ann"))
            assert await janitor.drop_drained_partitions() == []
            assert await found(log, registry) == [(1, 0, {}, True), (2, 3, {"older": 3}, False)]
            registry.run(lambda tx: tx.delete_group("older"))
            assert [topic.partitions for topic in await janitor.drop_drained_partitions()] == [1]


@awaited
async def test_a_group_is_waited_for_once_its_members_subscribe_also_under_the_name_of_a_topic_that_moved(
    open_janitor: OpenJanitor,
) -> None:
    async with MemoryLog() as log:
        with MemoryRegistry() as registry:
            epoch = await contracted(log)
            await log.create_topic("old", 1)
            await move(log, "old", "orders")
            commit(registry, "on", P2, Position(epoch, 3))
            join(registry, "billing", "m1")
            join(registry, "shipping", "m1", "old")
            join(registry, "mailing", "m1", "mails")
            assert await open_janitor(log, registry).drop_drained_partitions() == []
            assert (await found(log, registry))[1] == (2, 3, {"billing": 3, "shipping": 3}, False)


@awaited
async def test_a_drop_is_audited(open_janitor: OpenJanitor) -> None:
    async with MemoryLog() as log:
        with MemoryRegistry() as registry:
            janitor = open_janitor(log, registry)
            epoch = await contracted(log)
            await janitor.drop_drained_partitions()
            commit(registry, "billing", P2, Position(epoch, 3))
            await janitor.drop_drained_partitions()
            await janitor.drop_drained_partitions()
            rows = registry.read(lambda tx: tx.audit_log())
            assert [(row.who, row.action, row.subject, row.detail) for row in rows] == [
                ("broker", "partitions dropped", "orders", {"partitions": [1, 2], "records": 3})
            ]


@awaited
async def test_a_topic_that_is_deleted_meanwhile_blocks_no_other(open_janitor: OpenJanitor) -> None:
    class Deleting(MemoryLog):
        """Deletes the first topic just before its spans are read."""

        async def span(self, partition: Partition) -> Span:
            if partition.topic == "first":
                await self.delete_topic("first")
            return await super().span(partition)

    async with Deleting() as log:
        with MemoryRegistry() as registry:
            for name in ("first", "second"):
                await log.create_topic(name, 2)
                await log.contract_topic(name, 1)
            assert [topic.name for topic in await open_janitor(log, registry).drop_drained_partitions()] == ["second"]


@awaited
async def test_partitions_that_another_broker_dropped_meanwhile_are_not_audited_twice(
    open_janitor: OpenJanitor,
) -> None:
    class Dropping(MemoryLog):
        """Drops the partitions after the topics were listed, as another broker might."""

        async def span(self, partition: Partition) -> Span:
            await self.drop_partitions("orders", 1)
            return await super().span(partition)

    async with Dropping() as log:
        with MemoryRegistry() as registry:
            await contracted(log, records=0)
            assert await open_janitor(log, registry).drop_drained_partitions() == []
            assert registry.read(lambda tx: tx.audit_log()) == []


@awaited
async def test_empty_and_trimmed_partitions_are_dropped_at_once(open_janitor: OpenJanitor) -> None:
    async with MemoryLog() as log:
        with MemoryRegistry() as registry:
            await contracted(log, records=3)
            await log.trim(P2, 3)
            commit(registry, "billing", P1, None)
            assert [topic.name for topic in await open_janitor(log, registry).drop_drained_partitions()] == ["orders"]


@awaited
async def test_one_broker_at_a_time_drops_partitions(open_janitor: OpenJanitor) -> None:
    async with MemoryLog() as log:
        with MemoryRegistry() as registry:
            first, second = open_janitor(log, registry, "b1"), open_janitor(log, registry, "b2")
            epoch = await contracted(log)
            assert await first.run_once()
            commit(registry, "billing", P2, Position(epoch, 3))
            assert not await second.run_once(), "the first one has the lease"
            assert (await log.topic("orders")).partitions == 3
            assert await first.run_once()
            assert (await log.topic("orders")).partitions == 1


@awaited
async def test_partitions_that_are_dropped_while_they_are_looked_at_are_left_out() -> None:
    async with Dropping() as log:
        with MemoryRegistry() as registry:
            epoch = await contracted(log)
            commit(registry, "billing", P2, Position(epoch, 3))
            assert await found(log, registry) == []


@awaited
async def test_an_expansion_keeps_draining_partitions(open_janitor: OpenJanitor) -> None:
    async with MemoryLog() as log:
        with MemoryRegistry() as registry:
            await contracted(log)
            await log.expand_topic("orders", 3)
            assert await open_janitor(log, registry).drop_drained_partitions() == []
            assert (await log.span(P2)).end == 3


@awaited
async def test_partitions_that_started_to_drain_after_the_check_stay(open_janitor: OpenJanitor) -> None:
    async with Contracting() as log:
        with MemoryRegistry() as registry:
            await log.create_topic("orders", 4)
            await log.append(P2, [Record.new(b"unread")])
            await log.contract_topic("orders", 3)
            janitor = open_janitor(log, registry)
            with pytest.raises(InvalidValue, match="expected the 2 that 'orders' has open"):
                await janitor.drop_drained_partitions()
            assert await janitor.drop_drained_partitions() == [], "no group has read it"
            span = await log.span(P2)
            assert (span.first, span.end) == (0, 1)


@awaited
async def test_departed_members_of_a_broadcast_group_are_not_waited_for(open_janitor: OpenJanitor) -> None:
    async with MemoryLog() as log:
        with MemoryRegistry() as registry:
            janitor = open_janitor(log, registry)
            epoch = await contracted(log)
            commit(registry, "news~gone", P2, Position(epoch, 1))
            commit(registry, "news~long-gone", P0, Position(epoch, 0))
            assert await janitor.drop_drained_partitions() == [], "no member has read all of it"
            join(registry, "news~here", "here")
            join(registry, "news~too", "too")
            commit(registry, "news~here", P2, Position(epoch, 2))
            assert await janitor.drop_drained_partitions() == [], "the present members have not read it"
            assert (await found(log, registry))[1] == (2, 3, {"news": 4}, False)
            commit(registry, "news~too", P2, Position(epoch, 3))
            assert await janitor.drop_drained_partitions() == [], "one of the present members has not read it"
            commit(registry, "news~here", P2, Position(epoch, 3))
            assert [topic.name for topic in await janitor.drop_drained_partitions()] == ["orders"]


@awaited
async def test_what_a_departed_member_of_a_broadcast_group_has_read_counts_as_read(open_janitor: OpenJanitor) -> None:
    async with MemoryLog() as log:
        with MemoryRegistry() as registry:
            epoch = await contracted(log)
            commit(registry, "news~gone", P2, Position(epoch, 3))
            assert [topic.name for topic in await open_janitor(log, registry).drop_drained_partitions()] == ["orders"]


@awaited
async def test_a_departed_member_of_a_broadcast_group_raises_no_alarm(
    batcher: Callable[[Registry], TransactionBatcher],
) -> None:
    async with MemoryLog() as log:
        with MemoryRegistry() as registry:
            await contracted(log)
            registry.run(lambda tx: change_group(tx, "news", "ann", {"broadcast": True, "lag_alarm": 1}))
            for name in ("here", "gone"):
                join(registry, f"news~{name}", name)
                commit(registry, f"news~{name}", P2, None)
            alarms = Alarms(log, registry, batcher(registry), holder="b1")

            async def raised() -> list[str]:
                await alarms.check_once()
                return registry.read(lambda tx: [row.name for row in tx.settings(SCOPE)])

            assert await raised() == ["news~gone/orders", "news~here/orders"]
            leave(registry, "news~gone", "gone")
            assert await raised() == ["news~here/orders"]


@awaited
async def test_a_sealed_topic_blocks_no_other(open_janitor: OpenJanitor) -> None:
    async with MemoryLog() as log:
        with MemoryRegistry() as registry:
            await contracted(log, records=0)
            await log.seal_topic("orders", HOLDER)
            await log.create_topic("returns", 2)
            await log.contract_topic("returns", 1)
            janitor = open_janitor(log, registry)
            assert [topic.name for topic in await janitor.drop_drained_partitions()] == ["returns"]
            await log.unseal_topic("orders", HOLDER)
            assert [topic.name for topic in await janitor.drop_drained_partitions()] == ["orders"]


# Members that do not come back


@pytest.fixture(params=REGISTRIES)
def registry(request: pytest.FixtureRequest, tmp_path: Path, clock: ManualClock) -> Iterator[Registry]:
    with ENGINES[request.param].open_registry(tmp_path, clock) as opened:
        yield opened


TOPICS = {"orders": Topic("orders", 3)}


def join_and_own(registry: Registry, group: str, member: str) -> None:
    """Join, and own all partitions."""
    join(registry, group, member)
    registry.run(lambda tx: assignment.rebalance(tx, group, TOPICS))


def leave(registry: Registry, group: str, member: str, *, at: Position | None = None) -> None:
    """Commit, and leave."""

    def work(tx: Transaction) -> None:
        row = tx.member(group, member)
        assert row is not None
        if at is not None:
            (owned,) = [o for o in tx.ownerships_of(group, member) if o.partition == P1]
            assert protocol.commit(tx, [PositionCommit(group, member, {P1: (owned.epoch, at)})]) == [None]
        protocol.leave(tx, group, member, row.epoch)

    registry.run(work)


def groups(registry: Registry) -> list[str]:
    return registry.read(lambda tx: [group.name for group in tx.groups()])


def committed(registry: Registry, group: str) -> Position | None:
    row = registry.read(lambda tx: tx.ownership(group, P1))
    return None if row is None else row.committed


@awaited
async def test_only_departed_members_of_broadcast_groups_are_deleted_and_only_after_a_time(
    registry: Registry, clock: ManualClock, open_janitor: OpenJanitor
) -> None:
    janitor = open_janitor(MemoryLog(), registry)
    for group, member in (("news~gone", "gone"), ("news~here", "here"), ("news", "m"), ("billing", "m")):
        join_and_own(registry, group, member)
    await clock.advance(5.0)
    for group in ("news", "billing"):
        leave(registry, group, "m", at=Position(1, 2))
    leave(registry, "news~gone", "gone", at=Position(1, 2))
    await clock.advance(KEPT_SECONDS - 1)
    assert await janitor.delete_departed_members() == []
    assert committed(registry, "news~gone") == Position(1, 2)
    await clock.advance(1)
    assert await janitor.delete_departed_members() == ["news~gone"]
    assert groups(registry) == ["billing", "news", "news~here"]
    (row,) = registry.read(lambda tx: tx.audit_log(1))
    assert (row.who, row.action, row.subject) == ("broker", "group deleted", "news~gone")
    assert await janitor.delete_departed_members() == []


@awaited
async def test_a_member_that_comes_back_in_time_continues_where_it_was_and_the_time_starts_again(
    registry: Registry, clock: ManualClock, open_janitor: OpenJanitor
) -> None:
    janitor = open_janitor(MemoryLog(), registry)
    join_and_own(registry, "news~m", "m")
    leave(registry, "news~m", "m", at=Position(1, 2))
    await clock.advance(KEPT_SECONDS - 1)
    join_and_own(registry, "news~m", "m")
    assert committed(registry, "news~m") == Position(1, 2)
    await clock.advance(1)
    assert await janitor.delete_departed_members() == []
    leave(registry, "news~m", "m")
    assert await janitor.delete_departed_members() == [], "it was here a second ago"
    await clock.advance(KEPT_SECONDS)
    assert await janitor.delete_departed_members() == ["news~m"]
    join_and_own(registry, "news~m", "m")
    assert committed(registry, "news~m") is None


@awaited
async def test_a_reset_keeps_the_positions_of_a_departed_member_for_as_long_again(
    registry: Registry, clock: ManualClock, open_janitor: OpenJanitor
) -> None:
    janitor = open_janitor(MemoryLog(), registry)
    join_and_own(registry, "news~m", "m")
    leave(registry, "news~m", "m")
    await clock.advance(KEPT_SECONDS - 1)
    registry.run(lambda tx: reset(tx, "news~m", {P1: Position(1, 0)}, "ann"))
    await clock.advance(1)
    assert await janitor.delete_departed_members() == []


@awaited
async def test_a_member_that_left_without_a_position_is_deleted_at_once(
    registry: Registry, open_janitor: OpenJanitor
) -> None:
    janitor = open_janitor(MemoryLog(), registry)
    join(registry, "news~m", "m")
    assert await janitor.delete_departed_members() == []
    leave(registry, "news~m", "m")
    assert await janitor.delete_departed_members() == ["news~m"]


@awaited
async def test_one_broker_at_a_time_deletes_departed_members(
    registry: Registry, clock: ManualClock, open_janitor: OpenJanitor
) -> None:
    first, second = (open_janitor(MemoryLog(), registry, name) for name in ("b1", "b2"))
    for name in ("a", "b"):
        join(registry, f"news~{name}", name)
    leave(registry, "news~a", "a")
    assert await first.run_once()
    assert groups(registry) == ["news~b"]
    leave(registry, "news~b", "b")
    assert not await second.run_once(), "the first one has the lease"
    assert groups(registry) == ["news~b"]
    await clock.advance(LEASE_SECONDS)
    assert await second.run_once()
    assert groups(registry) == []


@awaited
async def test_departed_members_are_looked_for_from_time_to_time(clock: ManualClock, open_janitor: OpenJanitor) -> None:
    async with MemoryLog() as log:
        with MemoryRegistry(clock) as registry:
            running = asyncio.create_task(open_janitor(log, registry).run())
            for name in ("a", "b"):
                join(registry, f"news~{name}", name)
                leave(registry, f"news~{name}", name)
                assert groups(registry) == [f"news~{name}"]
                async with asyncio.timeout(20):
                    while groups(registry):
                        await clock.advance(DEPARTED_EVERY_SECONDS / 10)
                        await asyncio.sleep(0.005)
            assert not running.done()
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
