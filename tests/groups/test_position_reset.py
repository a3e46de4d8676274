"""Resetting a group's positions: the protocol by examples, on both registries, and while members run."""

import asyncio
import contextlib
from collections import Counter
from typing import Any

import pytest

from shardyard.groups import GroupConfig, Reader, ResetTarget, configure, protocol, reset, resolve_positions, status
from shardyard.model import (
    Fenced,
    InvalidValue,
    OffsetBeyondEnd,
    OffsetTrimmed,
    Partition,
    PartitionOutOfRange,
    Position,
    Record,
    UnknownGroup,
    UnknownTopic,
)
from tests.groups.test_protocol import GROUP, P0, SimpleGroup, billing
from tests.groups.test_reader import TOPIC, Environment, Run, run, take
from tests.log.samples import at, end
from tests.registry.blocks import transaction

__all__ = ["billing", "run"]  # the fixtures

P1 = Partition(TOPIC, 1)


# The protocol


def test_an_owner_stays_under_a_new_epoch_and_its_late_commit_is_fenced(billing: SimpleGroup) -> None:
    billing.join("a")
    billing.settle("a")
    before = billing.heartbeat("a")
    billing.commit("a", P0, before[P0].epoch, 5)
    billing.commit("a", P1, before[P1].epoch, 5)
    with transaction(billing.registry) as tx:
        reset(tx, GROUP, {P0: Position(1, 2), P1: Position(1, 9)}, "ann")
    after = billing.heartbeat("a")
    assert {p for p in before if after[p] != before[p]} == {P0, P1}, "the others did not change"
    assert (after[P0].committed, after[P1].committed) == (Position(1, 2), Position(1, 9))
    assert len({holding.epoch for holding in (*before.values(), after[P0], after[P1])}) == 8, "epochs of their own"
    with pytest.raises(Fenced, match="orders/0 no longer belongs to 'a'"):
        billing.commit("a", P0, before[P0].epoch, 6)
    billing.commit("a", P0, after[P0].epoch, 3)
    billing.join("b")
    billing.settle("a", "b")
    assert min(h.epoch for h in billing.heartbeat("b").values()) > max(h.epoch for h in after.values())


def test_a_partition_that_is_about_to_move_keeps_its_new_position(billing: SimpleGroup) -> None:
    billing.join("a")
    billing.settle("a")
    billing.join("b")
    billing.rebalance()
    held = billing.heartbeat("a")
    leaving = next(p for p, holding in held.items() if holding.revoked)
    with transaction(billing.registry) as tx:
        reset(tx, GROUP, {leaving: Position(1, 4)}, "ann")
    assert billing.heartbeat("a")[leaving].revoked
    with pytest.raises(Fenced), billing.registry.transaction() as tx:
        protocol.release(tx, GROUP, "a", billing.epochs["a"], {leaving: held[leaving].epoch})
    billing.release_revoked("a")
    assert billing.heartbeat("b")[leaving].committed == Position(1, 4)


def test_a_partition_without_an_owner_or_a_row_gets_its_position(billing: SimpleGroup) -> None:
    with transaction(billing.registry) as tx:
        configure(tx, GROUP, GroupConfig(), who="ann")
        reset(tx, GROUP, {P0: Position(1, 7)}, "ann")
        reset(tx, GROUP, {P0: Position(1, 3), P1: Position(1, 0)}, "bob")
        assert [(row.who, row.action, row.subject, row.detail) for row in tx.audit_log(2)] == [
            ("bob", "positions reset", GROUP, {"orders/0": 3, "orders/1": 0}),
            ("ann", "positions reset", GROUP, {"orders/0": 7}),
        ]
    assert {p: (row.owner, row.committed) for p, row in billing.rows().items()} == {
        P0: (None, Position(1, 3)),
        P1: (None, Position(1, 0)),
    }
    billing.join("a")
    billing.rebalance()
    assert billing.heartbeat("a")[P0].committed == Position(1, 3)


def test_a_reset_is_progress_so_that_the_owner_is_not_evicted_for_what_came_before(billing: SimpleGroup) -> None:
    with transaction(billing.registry) as tx:
        configure(tx, GROUP, GroupConfig(release_after=5.0), who="ann")
    billing.join("a", session_timeout=60.0)
    billing.rebalance()
    billing.clock.time += 6
    positions = dict.fromkeys(billing.rows(), Position(1, 0))
    with transaction(billing.registry) as tx:
        reset(tx, GROUP, positions, "ann")
    billing.heartbeat("a")
    billing.rebalance()
    assert billing.sizes() == {"a": 6}


@pytest.mark.parametrize(
    ("positions", "message"),
    [
        ({}, "positions is {}: expected at least one"),
        ({P0: Position(1, 1), "orders/1": Position(1, 1)}, "a Position for each Partition"),
        ({P0: Position(1, 1), P1: 1}, "a Position for each Partition"),
        ({P0: Position(1, 1), P1: Position(1, -1)}, "offset of orders/1 is -1"),
    ],
)
def test_all_or_none(billing: SimpleGroup, positions: Any, message: str) -> None:
    billing.join("a")
    billing.settle("a")
    before = billing.rows()
    with transaction(billing.registry) as tx:
        group = tx.group(GROUP)
        with pytest.raises(InvalidValue) as refused:
            reset(tx, GROUP, positions, "ann")
        assert message in str(refused.value)
        with pytest.raises(UnknownGroup):
            reset(tx, "nobody", {P0: Position(1, 1)}, "ann")
        assert tx.group(GROUP) == group
        assert tx.audit_log() == []
    assert billing.rows() == before


# Members


async def go_to(env: Environment, to: ResetTarget, *partitions: int) -> None:
    positions = await resolve_positions(env.log, TOPIC, partitions or None, to)
    with transaction(env.registry) as tx:
        reset(tx, "billing", positions, "ann")


async def consume(member: Reader, seen: Counter[str]) -> None:
    async for batch in member:
        with contextlib.suppress(Fenced):
            await batch.commit()
            seen.update(record.id for record in batch.records())


def test_back_to_the_earliest_everything_is_redelivered_while_the_member_runs(run: Run) -> None:
    async def scenario(env: Environment) -> None:
        seen: Counter[str] = Counter()
        sent = [f"{partition}-{i}" for partition in range(4) for i in range(5)]

        async def times(count: int) -> None:
            async def done() -> bool:
                return seen == Counter(dict.fromkeys(sent, count))

            await env.until(done)

        for partition in range(4):
            await env.send(partition, *(i for i in sent if i.startswith(str(partition))))
        async with env.member("m1", max_records=2, session_timeout=600.0) as first:  # it does not wait for a heartbeat
            task = asyncio.create_task(consume(first, seen))
            await times(1)
            await go_to(env, ResetTarget("earliest"))
            await times(2)
            await go_to(env, ResetTarget("offset", at(env.log, 3)), 2)

            async def part_again() -> bool:
                return {i for i in sent if seen[i] == 3} == {"2-3", "2-4"}

            await env.until(part_again)
            assert await env.committed() == dict.fromkeys(range(4), end(env.log, 5))
            task.cancel()

    run(scenario)


def test_forward_skips_and_what_is_in_flight_is_fenced(run: Run) -> None:
    async def scenario(env: Environment) -> None:
        await env.send(0, "a", "b", "c")
        async with env.member("m1", max_records=1, session_timeout=600.0) as member:
            (in_flight,) = await take(member, 1)
            assert in_flight.records()[0].id == "a"
            await go_to(env, ResetTarget("latest"), 0)
            with pytest.raises(Fenced):
                await in_flight.commit()
            await env.send(0, "new")
            (batch,) = await take(member, 1)
            assert batch.records()[0].id == "new"
            await batch.commit()
            assert in_flight.lost
            assert (await env.committed())[0] == end(env.log, 4)

    run(scenario)


def test_an_owner_that_does_not_know_of_the_reset_cannot_undo_it(run: Run) -> None:
    async def scenario(env: Environment) -> None:
        await env.send(0, "a", "b", "c")
        async with env.member("m1") as member:
            (in_flight,) = await take(member, 1)
            assert member._membership._task is not None
            member._membership._task.cancel()  # it learns of nothing from here on
            await go_to(env, ResetTarget("offset", at(env.log, 1)), 0)
            assert not in_flight.lost
            with pytest.raises(Fenced, match="orders/0 no longer belongs to 'm1'"):
                await in_flight.commit()
            with pytest.raises(Fenced):
                await member.commit({in_flight.partition: in_flight.end})
            assert (await env.committed())[0] == at(env.log, 1)

    run(scenario)


def test_other_partitions_do_not_pause(run: Run) -> None:
    async def scenario(env: Environment) -> None:
        async with env.member("m1", max_records=1, session_timeout=600.0) as member:
            await env.until_shared(4)
            await env.send(1, "b0", "b1")
            (other,) = await take(member, 1)
            await env.send(0, "a0")
            (in_flight,) = await take(member, 1)
            await go_to(env, ResetTarget("earliest"), 0)
            (again,) = await take(member, 1)
            assert (again.partition, again.first) == (in_flight.partition, in_flight.first)
            assert again.epoch > in_flight.epoch
            assert in_flight.lost
            assert not other.lost
            await other.commit()
            (more,) = await take(member, 1)
            assert (more.records()[0].id, more.epoch) == ("b1", other.epoch)

    run(scenario)


def test_a_group_whose_members_are_gone_continues_from_there(run: Run) -> None:
    async def scenario(env: Environment) -> None:
        await env.send(0, "a", "b", "c")
        async with env.member("m1") as member:
            (batch,) = await take(member, 1)
            await batch.commit()
        await go_to(env, ResetTarget("offset", at(env.log, 1)), 0)
        rows = await status(env.log, env.registry, "billing")
        (row,) = (row for row in rows if row.partition.index == 0)
        assert (row.owner, row.committed, row.lag) == (None, at(env.log, 1), 2)
        async with env.member("m2") as member:
            (batch,) = await take(member, 1)
            assert [record.id for record in batch.records()] == ["b", "c"]

    run(scenario)


# Where to


def test_positions_are_found_by_offset_time_and_both_ends(run: Run) -> None:
    async def scenario(env: Environment) -> None:
        topic = await env.log.topic(TOPIC)
        for partition, stamps in ((0, (10, 20, 30)), (1, (20, 40))):
            records = [Record(str(at), None, b"", timestamp=at) for at in stamps]
            await env.log.append(Partition(TOPIC, partition), records)
        second = at(env.log, 1)
        await env.log.trim(Partition(TOPIC, 0), second)
        ends = {0: end(env.log, 3), 1: end(env.log, 2)}

        async def found(to: ResetTarget, partitions: list[int] | None = None) -> dict[int, int]:
            positions = await resolve_positions(env.log, TOPIC, partitions, to)
            assert {position.epoch for position in positions.values()} == {topic.epoch}
            return {partition.index: position.offset for partition, position in positions.items()}

        assert await found(ResetTarget("earliest")) == {0: second, 1: 0, 2: 0, 3: 0}
        assert await found(ResetTarget("latest")) == {**ends, 2: 0, 3: 0}
        assert await found(ResetTarget("time", 0)) == {0: second, 1: at(env.log, 0), 2: 0, 3: 0}
        assert await found(ResetTarget("time", 25)) == {0: at(env.log, 2), 1: second, 2: 0, 3: 0}
        assert await found(ResetTarget("time", 41), [0, 1]) == ends
        assert await found(ResetTarget("offset", ends[1]), [1, 0]) == {0: ends[1], 1: ends[1]}
        with pytest.raises(OffsetTrimmed, match=f"offset 0 of orders/0 was trimmed away: .* is {second}"):
            await found(ResetTarget("offset", 0))
        with pytest.raises(OffsetBeyondEnd, match=f"offset {ends[1] + 1} of orders/1 is beyond its end, {ends[1]}"):
            await found(ResetTarget("offset", ends[1] + 1), [0, 1])
        with pytest.raises(PartitionOutOfRange):
            await found(ResetTarget("earliest"), [0, 4])
        with pytest.raises(InvalidValue, match="partition is -1"):
            await found(ResetTarget("earliest"), [-1])
        with pytest.raises(InvalidValue, match="partitions is \\[\\]: expected at least one"):
            await found(ResetTarget("earliest"), [])
        with pytest.raises(InvalidValue, match="to is 'earliest': expected a ResetTarget"):
            await found("earliest")  # type: ignore[arg-type]
        with pytest.raises(UnknownTopic):
            await resolve_positions(env.log, "nothing", None, ResetTarget("latest"))

    run(scenario)


@pytest.mark.parametrize(
    ("kind", "value", "message"),
    [
        ("newest", None, "kind is 'newest': expected one of earliest, latest, offset, time"),
        ("offset", None, "offset is missing: expected a whole number"),
        ("offset", -1, "offset is -1"),
        ("time", 1.5, "time is 1.5"),
        ("latest", 3, "value is 3: expected none"),
    ],
)
def test_an_invalid_target_is_refused(kind: Any, value: Any, message: str) -> None:
    with pytest.raises(InvalidValue, match=message):
        ResetTarget(kind, value)
