"""Resetting a group's positions: the protocol by examples, on both registries, and while members run."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable
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
from tests.groups.test_protocol import GROUP, P0, Yard, yard
from tests.groups.test_reader import TOPIC, Story, take, tell
from tests.groups.test_reader import Yard as MemberYard
from tests.registry.blocks import transaction

__all__ = ["tell", "yard"]  # the fixtures

P1 = Partition(TOPIC, 1)


# The protocol


def test_an_owner_stays_under_a_new_epoch_and_its_late_commit_is_fenced(yard: Yard) -> None:
    yard.join("a")
    yard.settle("a")
    before = yard.heartbeat("a")
    yard.commit("a", P0, before[P0].epoch, 5)
    yard.commit("a", P1, before[P1].epoch, 5)
    with transaction(yard.registry) as tx:
        reset(tx, GROUP, {P0: Position(1, 2), P1: Position(1, 9)}, "ann")
    after = yard.heartbeat("a")
    assert {p for p in before if after[p] != before[p]} == {P0, P1}, "the others are as they were"
    assert (after[P0].committed, after[P1].committed) == (Position(1, 2), Position(1, 9))
    assert len({holding.epoch for holding in (*before.values(), after[P0], after[P1])}) == 8, "epochs of their own"
    with pytest.raises(Fenced, match="orders/0 no longer belongs to 'a'"):
        yard.commit("a", P0, before[P0].epoch, 6)
    yard.commit("a", P0, after[P0].epoch, 3)
    yard.join("b")
    yard.settle("a", "b")
    assert min(h.epoch for h in yard.heartbeat("b").values()) > max(h.epoch for h in after.values())


def test_a_partition_that_is_about_to_go_goes_with_its_new_position(yard: Yard) -> None:
    yard.join("a")
    yard.settle("a")
    yard.join("b")
    yard.rebalance()
    held = yard.heartbeat("a")
    leaving = next(p for p, holding in held.items() if holding.revoked)
    with transaction(yard.registry) as tx:
        reset(tx, GROUP, {leaving: Position(1, 4)}, "ann")
    assert yard.heartbeat("a")[leaving].revoked
    with pytest.raises(Fenced), yard.registry.transaction() as tx:
        protocol.release(tx, GROUP, "a", yard.epochs["a"], {leaving: held[leaving].epoch})
    yard.release_revoked("a")
    assert yard.heartbeat("b")[leaving].committed == Position(1, 4)


def test_a_partition_without_an_owner_or_a_row_gets_its_position(yard: Yard) -> None:
    with transaction(yard.registry) as tx:
        configure(tx, GROUP, GroupConfig(), who="ann")
        reset(tx, GROUP, {P0: Position(1, 7)}, "ann")
        reset(tx, GROUP, {P0: Position(1, 3), P1: Position(1, 0)}, "bob")
        assert [(row.who, row.action, row.subject, row.detail) for row in tx.audit_log(2)] == [
            ("bob", "positions reset", GROUP, {"orders/0": 3, "orders/1": 0}),
            ("ann", "positions reset", GROUP, {"orders/0": 7}),
        ]
    assert {p: (row.owner, row.committed) for p, row in yard.rows().items()} == {
        P0: (None, Position(1, 3)),
        P1: (None, Position(1, 0)),
    }
    yard.join("a")
    yard.rebalance()
    assert yard.heartbeat("a")[P0].committed == Position(1, 3)


def test_a_reset_is_progress_so_that_the_owner_is_not_put_out_for_what_came_before(yard: Yard) -> None:
    with transaction(yard.registry) as tx:
        configure(tx, GROUP, GroupConfig(release_after=5.0), who="ann")
    yard.join("a", session_timeout=60.0)
    yard.rebalance()
    yard.clock.time += 6
    positions = dict.fromkeys(yard.rows(), Position(1, 0))
    with transaction(yard.registry) as tx:
        reset(tx, GROUP, positions, "ann")
    yard.heartbeat("a")
    yard.rebalance()
    assert yard.sizes() == {"a": 6}


@pytest.mark.parametrize(
    ("positions", "said"),
    [
        ({}, "positions is {}: expected at least one"),
        ({P0: Position(1, 1), "orders/1": Position(1, 1)}, "a Position for each Partition"),
        ({P0: Position(1, 1), P1: 1}, "a Position for each Partition"),
        ({P0: Position(1, 1), P1: Position(1, -1)}, "offset of orders/1 is -1"),
    ],
)
def test_all_or_none(yard: Yard, positions: Any, said: str) -> None:
    yard.join("a")
    yard.settle("a")
    before = yard.rows()
    with transaction(yard.registry) as tx:
        group = tx.group(GROUP)
        with pytest.raises(InvalidValue) as refused:
            reset(tx, GROUP, positions, "ann")
        assert said in str(refused.value)
        with pytest.raises(UnknownGroup):
            reset(tx, "nobody", {P0: Position(1, 1)}, "ann")
        assert tx.group(GROUP) == group
        assert tx.audit_log() == []
    assert yard.rows() == before


# Members


async def go_to(yard: MemberYard, to: ResetTarget, *partitions: int) -> None:
    positions = await resolve_positions(yard.log, TOPIC, partitions or None, to)
    with transaction(yard.registry) as tx:
        reset(tx, "billing", positions, "ann")


async def consume(member: Reader, seen: Counter[str]) -> None:
    async for batch in member:
        with contextlib.suppress(Fenced):
            await batch.commit()
            seen.update(record.id for record in batch.records())


def test_back_to_the_earliest_everything_comes_again_while_the_member_runs(tell: Callable[[Story], None]) -> None:
    async def story(yard: MemberYard) -> None:
        seen: Counter[str] = Counter()
        sent = [f"{partition}-{i}" for partition in range(4) for i in range(5)]

        async def times(count: int) -> None:
            async def done() -> bool:
                return seen == Counter(dict.fromkeys(sent, count))

            await yard.until(done)

        for partition in range(4):
            await yard.send(partition, *(i for i in sent if i.startswith(str(partition))))
        async with yard.member("m1", max_records=2, session_timeout=600.0) as first:  # it does not wait for a heartbeat
            task = asyncio.create_task(consume(first, seen))
            await times(1)
            await go_to(yard, ResetTarget("earliest"))
            await times(2)
            await go_to(yard, ResetTarget("offset", yard.end_after(3)), 2)

            async def part_again() -> bool:
                return {i for i in sent if seen[i] == 3} == {"2-3", "2-4"}

            await yard.until(part_again)
            assert await yard.committed() == dict.fromkeys(range(4), yard.end_after(5))
            task.cancel()

    tell(story)


def test_forward_skips_and_what_is_in_hand_is_fenced(tell: Callable[[Story], None]) -> None:
    async def story(yard: MemberYard) -> None:
        await yard.send(0, "a", "b", "c")
        async with yard.member("m1", max_records=1, session_timeout=600.0) as member:
            (in_hand,) = await take(member, 1)
            assert in_hand.records()[0].id == "a"
            await go_to(yard, ResetTarget("latest"), 0)
            with pytest.raises(Fenced):
                await in_hand.commit()
            await yard.send(0, "new")
            (batch,) = await take(member, 1)
            assert batch.records()[0].id == "new"
            await batch.commit()
            assert in_hand.lost
            assert (await yard.committed())[0] == yard.end_after(4)

    tell(story)


def test_an_owner_that_has_not_heard_of_the_reset_cannot_undo_it(tell: Callable[[Story], None]) -> None:
    async def story(yard: MemberYard) -> None:
        await yard.send(0, "a", "b", "c")
        async with yard.member("m1") as member:
            (in_hand,) = await take(member, 1)
            assert member._membership._task is not None
            member._membership._task.cancel()  # it hears of nothing from here on
            await go_to(yard, ResetTarget("offset", yard.end_after(1)), 0)
            assert not in_hand.lost
            with pytest.raises(Fenced, match="orders/0 no longer belongs to 'm1'"):
                await in_hand.commit()
            with pytest.raises(Fenced):
                await member.commit({in_hand.partition: in_hand.end})
            assert (await yard.committed())[0] == yard.end_after(1)

    tell(story)


def test_other_partitions_do_not_pause(tell: Callable[[Story], None]) -> None:
    async def story(yard: MemberYard) -> None:
        async with yard.member("m1", max_records=1, session_timeout=600.0) as member:
            await yard.until_shared(4)
            await yard.send(1, "b0", "b1")
            (other,) = await take(member, 1)
            await yard.send(0, "a0")
            (in_hand,) = await take(member, 1)
            await go_to(yard, ResetTarget("earliest"), 0)
            (again,) = await take(member, 1)
            assert (again.partition, again.first) == (in_hand.partition, in_hand.first)
            assert again.epoch > in_hand.epoch
            assert in_hand.lost
            assert not other.lost
            await other.commit()
            (more,) = await take(member, 1)
            assert (more.records()[0].id, more.epoch) == ("b1", other.epoch)

    tell(story)


def test_a_group_whose_members_are_gone_goes_on_from_there(tell: Callable[[Story], None]) -> None:
    async def story(yard: MemberYard) -> None:
        await yard.send(0, "a", "b", "c")
        async with yard.member("m1") as member:
            (batch,) = await take(member, 1)
            await batch.commit()
        await go_to(yard, ResetTarget("offset", yard.end_after(1)), 0)
        rows = await status(yard.log, yard.registry, "billing")
        (row,) = (row for row in rows if row.partition.index == 0)
        assert (row.owner, row.committed) == (None, yard.end_after(1))
        assert row.lag == 2 if yard.log.capabilities.dense_offsets else row.lag >= 2
        async with yard.member("m2") as member:
            (batch,) = await take(member, 1)
            assert [record.id for record in batch.records()] == ["b", "c"]

    tell(story)


# Where to


def test_positions_are_found_by_offset_time_and_both_ends(tell: Callable[[Story], None]) -> None:
    async def story(yard: MemberYard) -> None:
        topic = await yard.log.topic(TOPIC)
        for partition, stamps in ((0, (10, 20, 30)), (1, (20, 40))):
            records = [Record(str(at), None, b"", timestamp=at) for at in stamps]
            await yard.log.append(Partition(TOPIC, partition), records)
        await yard.log.trim(Partition(TOPIC, 0), yard.end_after(1))

        async def found(to: ResetTarget, partitions: list[int] | None = None) -> dict[int, int]:
            positions = await resolve_positions(yard.log, TOPIC, partitions, to)
            assert {position.epoch for position in positions.values()} == {topic.epoch}
            return {partition.index: position.offset for partition, position in positions.items()}

        at, after = yard.offset_of, yard.end_after
        assert await found(ResetTarget("earliest")) == {0: after(1), 1: 0, 2: 0, 3: 0}
        assert await found(ResetTarget("latest")) == {0: after(3), 1: after(2), 2: 0, 3: 0}
        assert await found(ResetTarget("time", 0)) == {0: at(1), 1: at(0), 2: 0, 3: 0}
        assert await found(ResetTarget("time", 25)) == {0: at(2), 1: at(1), 2: 0, 3: 0}
        assert await found(ResetTarget("time", 41), [0, 1]) == {0: after(3), 1: after(2)}
        assert await found(ResetTarget("offset", after(2)), [1, 0]) == {0: after(2), 1: after(2)}
        trimmed = f"offset 0 of orders/0 was trimmed away: the first one there is {after(1)}"
        with pytest.raises(OffsetTrimmed, match=trimmed):
            await found(ResetTarget("offset", 0))
        with pytest.raises(OffsetBeyondEnd, match=f"offset {after(3)} of orders/1 is beyond its end, {after(2)}"):
            await found(ResetTarget("offset", after(3)), [0, 1])
        with pytest.raises(PartitionOutOfRange):
            await found(ResetTarget("earliest"), [0, 4])
        with pytest.raises(InvalidValue, match="partition is -1"):
            await found(ResetTarget("earliest"), [-1])
        with pytest.raises(InvalidValue, match="partitions is \\[\\]: expected at least one"):
            await found(ResetTarget("earliest"), [])
        with pytest.raises(InvalidValue, match="to is 'earliest': expected a ResetTarget"):
            await found("earliest")  # type: ignore[arg-type]
        with pytest.raises(UnknownTopic):
            await resolve_positions(yard.log, "nothing", None, ResetTarget("latest"))

    tell(story)


@pytest.mark.parametrize(
    ("kind", "value", "said"),
    [
        ("newest", None, "kind is 'newest': expected one of earliest, latest, offset, time"),
        ("offset", None, "offset is None: expected a whole number"),
        ("offset", -1, "offset is -1"),
        ("time", 1.5, "time is 1.5"),
        ("latest", 3, "value is 3: expected none"),
    ],
)
def test_a_place_that_makes_no_sense_is_refused(kind: Any, value: Any, said: str) -> None:
    with pytest.raises(InvalidValue, match=said):
        ResetTarget(kind, value)
