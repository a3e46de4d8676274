"""Partitions that were contracted away go when every group is done with them, members of broadcast groups when they
stay away for long, and not before."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from shardyard.groups import To, protocol, reset, resolve
from shardyard.log import Log
from shardyard.log.memory import MemoryLog
from shardyard.model import InvalidValue, Partition, Position, Record, Span, Topic
from shardyard.queues.alarms import SCOPE, Alarms
from shardyard.queues.draining import closing
from shardyard.queues.janitor import EVERY_SECONDS, KEPT_SECONDS, LOOK_SECONDS, Janitor
from shardyard.queues.settings import change_group
from shardyard.queues.topic_readers import known
from shardyard.registry import GroupRow, OwnershipRow, Registry, open_registry
from shardyard.registry.memory import MemoryRegistry
from shardyard.runtime.clock import ManualClock
from tests.log.samples import HOLDER, awaited, move

P0, P1, P2 = (Partition("orders", index) for index in range(3))


async def contracted(log: Log, *, records: int = 3) -> int:
    """A topic of which partitions 1 and 2 are closing, the latter with records; its epoch."""
    await log.create_topic("orders", 3)
    if records:
        await log.append(P2, [Record.new(b"x") for _ in range(records)])
    return (await log.contract_topic("orders", 1)).epoch


class Contracting(MemoryLog):
    """Somebody contracts the topic further just before its partitions are dropped."""

    async def drop_partitions(self, name: str, partitions: int) -> Topic:
        await self.contract_topic(name, 2)
        return await super().drop_partitions(name, partitions)


def join(registry: Registry, group: str, member: str, topic: str = "orders") -> None:
    with registry.transaction() as tx:
        protocol.join(tx, group, member, topics=[topic])


async def found(log: Log, registry: Registry) -> list[tuple[int, int, dict[str, int], bool]]:
    """The closing partitions of `orders`: index, records, who is waited for, and whether it is drained."""
    with registry.snapshot() as tx:
        readers = known(tx)
    closed = await closing(log, readers, await log.topic("orders"))
    return [(one.partition, one.records, one.waiting_for, one.drained) for one in closed]


def commit(registry: Registry, group: str, partition: Partition, position: Position | None) -> None:
    with registry.transaction() as tx:
        tx.put_group(tx.group(group) or GroupRow(group))
        row = tx.ownership(group, partition) or OwnershipRow(group, partition)
        tx.put_ownerships([replace(row, committed=position)])


@awaited
async def test_what_some_group_has_not_read_to_its_end_stays() -> None:
    async with MemoryLog() as log:
        with MemoryRegistry() as registry:
            retiring = Janitor(log, registry, holder="b1")
            epoch = await contracted(log)
            assert await retiring.check_once() == [], "nobody has read it"
            commit(registry, "billing", P2, Position(epoch, 2))
            assert await retiring.check_once() == []
            commit(registry, "billing", P2, Position(epoch, 3))
            commit(registry, "shipping", P2, None)
            assert await retiring.check_once() == [], "one of two groups is done"
            commit(registry, "shipping", P2, Position(epoch - 1, 3))
            assert await retiring.check_once() == [], "that was an earlier life of the topic"
            commit(registry, "shipping", P2, Position(epoch, 3))
            (topic,) = await retiring.check_once()
            assert (topic.partitions, topic.open_partitions) == (1, None)
            assert await retiring.check_once() == []


@awaited
async def test_a_group_that_reads_the_topic_is_waited_for_where_it_never_was_until_it_is_reset_or_deleted() -> None:
    async with MemoryLog() as log:
        with MemoryRegistry() as registry:
            retiring = Janitor(log, registry, holder="b1")
            epoch = await contracted(log)
            commit(registry, "on", P2, Position(epoch, 3))
            for group in ("off", "older"):
                commit(registry, group, P0, Position(epoch, 0))
            commit(registry, "elsewhere", Partition("mails", 2), Position(epoch, 0))
            assert await retiring.check_once() == []
            assert await found(log, registry) == [(1, 0, {}, True), (2, 3, {"off": 3, "older": 3}, False)]
            positions = await resolve(log, "orders", None, To("latest"))
            with registry.transaction() as tx:
                reset(tx, "off", positions, "ann")
            assert await retiring.check_once() == []
            assert await found(log, registry) == [(1, 0, {}, True), (2, 3, {"older": 3}, False)]
            with registry.transaction() as tx:
                tx.delete_group("older")
            assert [topic.partitions for topic in await retiring.check_once()] == [1]


@awaited
async def test_a_group_is_waited_for_from_when_its_members_subscribe_also_to_a_topic_that_moved_there() -> None:
    async with MemoryLog() as log:
        with MemoryRegistry() as registry:
            epoch = await contracted(log)
            await log.create_topic("old", 1)
            await move(log, "old", "orders")
            commit(registry, "on", P2, Position(epoch, 3))
            join(registry, "billing", "m1")
            join(registry, "shipping", "m1", "old")
            join(registry, "mailing", "m1", "mails")
            assert await Janitor(log, registry, holder="b1").check_once() == []
            assert (await found(log, registry))[1] == (2, 3, {"billing": 3, "shipping": 3}, False)


@awaited
async def test_what_is_dropped_is_audited() -> None:
    async with MemoryLog() as log:
        with MemoryRegistry() as registry:
            retiring = Janitor(log, registry, holder="b1")
            epoch = await contracted(log)
            await retiring.check_once()
            commit(registry, "billing", P2, Position(epoch, 3))
            await retiring.check_once()
            await retiring.check_once()
            with registry.snapshot() as tx:
                assert [(row.who, row.action, row.subject, row.detail) for row in tx.audit_log()] == [
                    ("broker", "partitions dropped", "orders", {"partitions": [1, 2], "records": 3})
                ]


@awaited
async def test_a_topic_that_is_deleted_meanwhile_holds_up_no_other() -> None:
    class Deleting(MemoryLog):
        """Somebody deletes the first topic just before its partitions are looked at."""

        async def span(self, partition: Partition) -> Span:
            if partition.topic == "first":
                await self.delete_topic("first")
            return await super().span(partition)

    async with Deleting() as log:
        with MemoryRegistry() as registry:
            for name in ("first", "second"):
                await log.create_topic(name, 2)
                await log.contract_topic(name, 1)
            assert [topic.name for topic in await Janitor(log, registry, holder="b1").check_once()] == ["second"]


@awaited
async def test_what_another_broker_dropped_meanwhile_is_not_audited_twice() -> None:
    class Dropping(MemoryLog):
        """Another one drops the partitions between the look at the topics and that at their partitions."""

        async def span(self, partition: Partition) -> Span:
            await self.drop_partitions("orders", 1)
            return await super().span(partition)

    async with Dropping() as log:
        with MemoryRegistry() as registry:
            await contracted(log, records=0)
            assert await Janitor(log, registry, holder="b1").check_once() == []
            with registry.snapshot() as tx:
                assert tx.audit_log() == []


@awaited
async def test_what_is_empty_or_trimmed_away_goes_at_once() -> None:
    async with MemoryLog() as log:
        with MemoryRegistry() as registry:
            await contracted(log, records=3)
            await log.trim(P2, 3)
            commit(registry, "billing", P1, None)
            assert [topic.name for topic in await Janitor(log, registry, holder="b1").check_once()] == ["orders"]


@awaited
async def test_one_broker_does_it() -> None:
    async with MemoryLog() as log:
        with MemoryRegistry() as registry:
            first, second = Janitor(log, registry, holder="b1"), Janitor(log, registry, holder="b2")
            epoch = await contracted(log)
            assert await first.check_once() == []
            commit(registry, "billing", P2, Position(epoch, 3))
            assert await second.check_once() == [], "the first one has the lease"
            assert len(await first.check_once()) == 1


@awaited
async def test_an_expansion_keeps_what_was_about_to_go() -> None:
    async with MemoryLog() as log:
        with MemoryRegistry() as registry:
            await contracted(log)
            await log.expand_topic("orders", 3)
            assert await Janitor(log, registry, holder="b1").check_once() == []
            assert (await log.span(P2)).end == 3


@awaited
async def test_what_began_to_close_after_the_look_stays() -> None:
    async with Contracting() as log:
        with MemoryRegistry() as registry:
            await log.create_topic("orders", 4)
            await log.append(P2, [Record.new(b"unread")])
            await log.contract_topic("orders", 3)
            retiring = Janitor(log, registry, holder="b1")
            with pytest.raises(InvalidValue, match="expected the 2 that 'orders' has open"):
                await retiring.check_once()
            assert await retiring.check_once() == [], "nobody has read it"
            span = await log.span(P2)
            assert (span.first, span.end) == (0, 1)


@awaited
async def test_members_of_a_broadcast_group_who_are_gone_are_not_waited_for() -> None:
    async with MemoryLog() as log:
        with MemoryRegistry() as registry:
            retiring = Janitor(log, registry, holder="b1")
            epoch = await contracted(log)
            commit(registry, "news~gone", P2, Position(epoch, 1))
            commit(registry, "news~long gone", P0, Position(epoch, 0))
            assert await retiring.check_once() == [], "nobody has read all of it"
            join(registry, "news~here", "here")
            join(registry, "news~too", "too")
            commit(registry, "news~here", P2, Position(epoch, 2))
            assert await retiring.check_once() == [], "those who are there have not"
            assert (await found(log, registry))[1] == (2, 3, {"news": 4}, False)
            commit(registry, "news~too", P2, Position(epoch, 3))
            assert await retiring.check_once() == [], "one who is there has not"
            commit(registry, "news~here", P2, Position(epoch, 3))
            assert [topic.name for topic in await retiring.check_once()] == ["orders"]


@awaited
async def test_what_a_member_of_a_broadcast_group_read_before_it_went_is_read() -> None:
    async with MemoryLog() as log:
        with MemoryRegistry() as registry:
            epoch = await contracted(log)
            commit(registry, "news~gone", P2, Position(epoch, 3))
            assert [topic.name for topic in await Janitor(log, registry, holder="b1").check_once()] == ["orders"]


@awaited
async def test_a_member_of_a_broadcast_group_who_is_gone_raises_no_alarm() -> None:
    async with MemoryLog() as log:
        with MemoryRegistry() as registry:
            await contracted(log)
            with registry.transaction() as tx:
                change_group(tx, "news", "ann", {"broadcast": True, "lag_alarm": 1})
            for name in ("here", "gone"):
                join(registry, f"news~{name}", name)
                commit(registry, f"news~{name}", P2, None)
            alarms = Alarms(log, registry, holder="b1")

            async def raised() -> list[str]:
                await alarms.check_once()
                with registry.snapshot() as tx:
                    return [row.name for row in tx.settings(SCOPE)]

            assert await raised() == ["news~gone/orders", "news~here/orders"]
            with registry.transaction() as tx:
                member = tx.member("news~gone", "gone")
                assert member is not None
                protocol.leave(tx, "news~gone", "gone", member.epoch)
            assert await raised() == ["news~here/orders"]


@awaited
async def test_a_topic_that_is_sealed_meanwhile_holds_up_no_other() -> None:
    async with MemoryLog() as log:
        with MemoryRegistry() as registry:
            await contracted(log, records=0)
            await log.seal_topic("orders", HOLDER)
            await log.create_topic("returns", 2)
            await log.contract_topic("returns", 1)
            retiring = Janitor(log, registry, holder="b1")
            assert [topic.name for topic in await retiring.check_once()] == ["returns"]
            await log.unseal_topic("orders", HOLDER)
            assert [topic.name for topic in await retiring.check_once()] == ["orders"]


# Members who never come back


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture(params=["memory", "sqlite"])
def registry(request: pytest.FixtureRequest, tmp_path: Path, clock: ManualClock) -> Iterator[Registry]:
    url = "memory://" if request.param == "memory" else f"sqlite:///{tmp_path / 'registry.db'}"
    with open_registry(url, clock=clock) as opened:
        yield opened


TOPICS = {"orders": Topic("orders", 3)}


def come(registry: Registry, group: str, member: str) -> None:
    """Join, and own all there is."""
    join(registry, group, member)
    with registry.transaction() as tx:
        protocol.rebalance(tx, group, TOPICS)


def go(registry: Registry, group: str, member: str, *, at: Position | None = None) -> None:
    """Commit, and leave."""
    with registry.transaction() as tx:
        row = tx.member(group, member)
        assert row is not None
        if at is not None:
            (held,) = [o for o in tx.ownerships_of(group, member) if o.partition == P1]
            protocol.commit(tx, group, member, row.epoch, {P1: (held.epoch, at)})
        protocol.leave(tx, group, member, row.epoch)


def groups(registry: Registry) -> list[str]:
    with registry.snapshot() as tx:
        return [group.name for group in tx.groups()]


def committed(registry: Registry, group: str) -> Position | None:
    with registry.snapshot() as tx:
        row = tx.ownership(group, P1)
        return None if row is None else row.committed


@awaited
async def test_a_member_of_a_broadcast_group_is_forgotten_after_a_time_and_nobody_else_is(
    registry: Registry, clock: ManualClock
) -> None:
    retiring = Janitor(MemoryLog(), registry, holder="b1", clock=clock)
    for group, member in (("news~gone", "gone"), ("news~here", "here"), ("news", "m"), ("billing", "m")):
        come(registry, group, member)
    await clock.advance(5.0)
    for group in ("news", "billing"):
        go(registry, group, "m", at=Position(1, 2))
    go(registry, "news~gone", "gone", at=Position(1, 2))
    await clock.advance(KEPT_SECONDS - 1)
    assert await retiring.forget_once() == []
    assert committed(registry, "news~gone") == Position(1, 2)
    await clock.advance(1)
    assert await retiring.forget_once() == ["news~gone"]
    assert groups(registry) == ["billing", "news", "news~here"]
    with registry.snapshot() as tx:
        row = tx.audit_log(1)[0]
    assert (row.who, row.action, row.subject) == ("broker", "group deleted", "news~gone")
    assert await retiring.forget_once() == []


@awaited
async def test_one_that_comes_back_in_time_goes_on_where_it_was_and_the_time_begins_anew(
    registry: Registry, clock: ManualClock
) -> None:
    retiring = Janitor(MemoryLog(), registry, holder="b1", clock=clock)
    come(registry, "news~m", "m")
    go(registry, "news~m", "m", at=Position(1, 2))
    await clock.advance(KEPT_SECONDS - 1)
    come(registry, "news~m", "m")
    assert committed(registry, "news~m") == Position(1, 2)
    await clock.advance(1)
    assert await retiring.forget_once() == []
    go(registry, "news~m", "m")
    assert await retiring.forget_once() == [], "it has been here a second ago"
    await clock.advance(KEPT_SECONDS)
    assert await retiring.forget_once() == ["news~m"]
    come(registry, "news~m", "m")
    assert committed(registry, "news~m") is None


@awaited
async def test_a_reset_keeps_the_positions_of_who_is_gone_for_as_long_again(
    registry: Registry, clock: ManualClock
) -> None:
    retiring = Janitor(MemoryLog(), registry, holder="b1", clock=clock)
    come(registry, "news~m", "m")
    go(registry, "news~m", "m")
    await clock.advance(KEPT_SECONDS - 1)
    with registry.transaction() as tx:
        reset(tx, "news~m", {P1: Position(1, 0)}, "ann")
    await clock.advance(1)
    assert await retiring.forget_once() == []


@awaited
async def test_one_that_left_before_it_had_a_position_is_forgotten_at_once(registry: Registry) -> None:
    retiring = Janitor(MemoryLog(), registry, holder="b1")
    join(registry, "news~m", "m")
    assert await retiring.forget_once() == []
    go(registry, "news~m", "m")
    assert await retiring.forget_once() == ["news~m"]


@awaited
async def test_one_broker_forgets(registry: Registry, clock: ManualClock) -> None:
    first, second = (Janitor(MemoryLog(), registry, holder=name, clock=clock) for name in ("b1", "b2"))
    for name in ("a", "b"):
        join(registry, f"news~{name}", name)
    go(registry, "news~a", "a")
    assert await first.forget_once() == ["news~a"]
    go(registry, "news~b", "b")
    assert await second.forget_once() == [], "the first one has the lease"
    await clock.advance(3 * EVERY_SECONDS)
    assert await second.forget_once() == ["news~b"]


@awaited
async def test_it_looks_for_them_now_and_then(clock: ManualClock) -> None:
    async with MemoryLog() as log:
        with MemoryRegistry(clock) as registry:
            running = asyncio.create_task(Janitor(log, registry, holder="b1", clock=clock).run())
            for name in ("a", "b"):
                join(registry, f"news~{name}", name)
                go(registry, f"news~{name}", name)
                async with asyncio.timeout(20):
                    while groups(registry):
                        await clock.advance(LOOK_SECONDS / 10)
                        await asyncio.sleep(0.005)
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
