"""The protocol by examples, on both registries."""

from collections import Counter
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from shardyard.groups import GroupConfig, assignment, protocol
from shardyard.groups.rebalancer import LEASE, rebalance_as_leader
from shardyard.model import (
    CommitBehind,
    Fenced,
    InvalidValue,
    MemberExists,
    Partition,
    PartitionTaken,
    Position,
    Topic,
    TopicKind,
    UnknownGroup,
)
from shardyard.registry import Heartbeat, MemberRow, OwnershipRow, PositionCommit, Registry, Transaction, lease
from shardyard.registry.memory import MemoryRegistry
from shardyard.registry.sql import SqlRegistry
from shardyard.registry.sqlite import SqliteStore
from tests.groups.simulation import VirtualClock
from tests.registry.blocks import transaction

GROUP = "billing"


def heartbeat(tx: Transaction, group: str, name: str, epoch: int, progress: tuple[Partition, ...] = ()) -> None:
    """A single heartbeat, whose error is raised."""
    for error in protocol.heartbeat(tx, [Heartbeat(group, name, epoch, progress)]):
        if error is not None:
            raise error


def commit(tx: Transaction, group: str, name: str, positions: Mapping[Partition, tuple[int, Position]]) -> None:
    """A single commit, whose error is raised."""
    for error in protocol.commit(tx, [PositionCommit(group, name, positions)]):
        if error is not None:
            raise error


class Yard:
    """A group of simple members under a clock that a test moves."""

    def __init__(self, registry: Registry, clock: VirtualClock) -> None:
        self.registry = registry
        self.clock = clock
        self.topics = {"orders": Topic("orders", 6)}
        self.epochs: dict[str, int] = {}

    def join(self, name: str, *, topics: tuple[str, ...] = ("orders",), **options: Any) -> MemberRow:
        with transaction(self.registry) as tx:
            row = protocol.join(tx, GROUP, name, topics=topics, **options)
        self.epochs[name] = row.epoch
        return row

    def heartbeat(self, name: str, progress: tuple[Partition, ...] = ()) -> dict[Partition, protocol.Grant]:
        return dict(self.assignment_after_heartbeat(name, progress).owned)

    def assignment_after_heartbeat(self, name: str, progress: tuple[Partition, ...] = ()) -> protocol.MemberAssignment:
        with transaction(self.registry) as tx:
            heartbeat(tx, GROUP, name, self.epochs[name], progress)
            return protocol.assignment(tx, GROUP, name, self.epochs[name])

    def commit(self, name: str, partition: Partition, epoch: int, offset: int) -> None:
        with transaction(self.registry) as tx:
            commit(tx, GROUP, name, {partition: (epoch, Position(1, offset))})

    def release_revoked(self, name: str) -> set[Partition]:
        revoked = {p: h.epoch for p, h in self.heartbeat(name).items() if h.revoked}
        with transaction(self.registry) as tx:
            protocol.release(tx, GROUP, name, self.epochs[name], revoked)
        return set(revoked)

    def leave(self, name: str) -> None:
        with transaction(self.registry) as tx:
            protocol.leave(tx, GROUP, name, self.epochs[name])

    def rebalance(self) -> assignment.Decision | None:
        with transaction(self.registry) as tx:
            return assignment.rebalance(tx, GROUP, self.topics)

    def settle(self, *names: str) -> None:
        self.rebalance()
        for name in names:
            self.release_revoked(name)

    def rows(self) -> dict[Partition, OwnershipRow]:
        with transaction(self.registry) as tx:
            return {row.partition: row for row in tx.ownerships(GROUP)}

    def sizes(self) -> Counter[str | None]:
        return Counter(row.owner for row in self.rows().values())


@pytest.fixture(params=["memory", "sqlite"])
def yard(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Yard]:
    clock = VirtualClock()
    registry: Registry = (
        MemoryRegistry(clock) if request.param == "memory" else SqlRegistry(SqliteStore(str(tmp_path / "r.db"), clock))
    )
    with registry:
        yield Yard(registry, clock)


P0 = Partition("orders", 0)


def test_two_consumers_share_six_partitions_and_a_third_takes_two(yard: Yard) -> None:
    yard.join("a")
    yard.join("b")
    yard.settle("a", "b")
    assert yard.sizes() == {"a": 3, "b": 3}
    before = yard.rows()
    yard.join("c")
    yard.settle("a", "b")
    assert yard.sizes() == {"a": 2, "b": 2, "c": 2}
    stayed = [p for p, row in yard.rows().items() if row.owner == before[p].owner]
    assert all(yard.rows()[p].epoch == before[p].epoch for p in stayed), "what stays keeps its epoch: it never pauses"


def test_a_partition_stays_with_its_owner_until_that_one_releases_it(yard: Yard) -> None:
    yard.join("a")
    yard.settle("a")
    yard.join("b")
    yard.rebalance()
    assert yard.sizes() == {"a": 6}
    revoked = {p: h for p, h in yard.heartbeat("a").items() if h.revoked}
    assert len(revoked) == 3
    assert yard.heartbeat("b") == {}
    partition, holding = next(iter(revoked.items()))
    yard.commit("a", partition, holding.epoch, 17)  # finished work is committed before the release
    yard.release_revoked("a")
    assert yard.heartbeat("b")[partition].committed == Position(1, 17)
    assert yard.heartbeat("b")[partition].epoch > holding.epoch


def test_a_stale_owner_can_neither_commit_nor_release(yard: Yard) -> None:
    yard.join("a")
    yard.settle("a")
    old = yard.heartbeat("a")[P0].epoch
    yard.join("b", session_timeout=60.0)
    yard.clock.time += 11  # past a's session; nobody has noticed yet
    yard.rebalance()
    assert yard.sizes() == {"b": 6}
    with pytest.raises(Fenced, match="'a'"):
        yard.commit("a", P0, old, 1)
    yard.join("a")
    with pytest.raises(Fenced, match="orders/0 no longer belongs to 'a'"):
        yard.commit("a", P0, old, 1)
    with transaction(yard.registry) as tx, pytest.raises(Fenced):
        protocol.release(tx, GROUP, "a", yard.epochs["a"], {P0: old})
    assert yard.rows()[P0].committed is None


def test_a_member_that_was_late_but_not_put_out_goes_on(yard: Yard) -> None:
    yard.join("a")
    yard.settle("a")
    yard.clock.time += 11
    assert len(yard.heartbeat("a")) == 6
    assert yard.rebalance() is None


def test_commits_go_forwards_only_and_all_or_none(yard: Yard) -> None:
    yard.join("a")
    yard.settle("a")
    held = yard.heartbeat("a")
    yard.commit("a", P0, held[P0].epoch, 10)
    yard.commit("a", P0, held[P0].epoch, 10)
    with pytest.raises(CommitBehind, match="offset 9 of orders/0 lies behind what is committed, 10"):
        yard.commit("a", P0, held[P0].epoch, 9)
    other = Partition("orders", 1)
    positions = {other: (held[other].epoch, Position(1, 5)), P0: (held[P0].epoch, Position(1, 9))}
    with pytest.raises(CommitBehind), yard.registry.transaction() as tx:
        commit(tx, GROUP, "a", positions)
    assert yard.rows()[other].committed is None


def test_a_static_members_restart_moves_nothing_and_fences_its_earlier_life(yard: Yard) -> None:
    yard.join("a", static=True)
    yard.join("b")
    yard.settle("a", "b")
    before = yard.rows()
    old = {p: h.epoch for p, h in yard.heartbeat("a").items()}
    yard.leave("a")
    yard.join("a", static=True)
    assert yard.rebalance() is None
    assert {p: row.owner for p, row in yard.rows().items()} == {p: row.owner for p, row in before.items()}
    partition = next(iter(old))
    with transaction(yard.registry) as tx, pytest.raises(Fenced):
        commit(tx, GROUP, "a", {partition: (old[partition], Position(1, 1))})
    with pytest.raises(Fenced):
        yard.commit("a", partition, old[partition], 1)


def test_a_static_member_that_stays_away_is_put_out(yard: Yard) -> None:
    yard.join("a", static=True)
    yard.join("b", session_timeout=60.0)
    yard.settle("a", "b")
    yard.leave("a")
    yard.clock.time += 11
    yard.settle("b")
    assert yard.sizes() == {"b": 6}


def test_a_name_that_is_alive_is_refused(yard: Yard) -> None:
    yard.join("a")
    with pytest.raises(MemberExists, match="has a member 'a' already"):
        yard.join("a", static=True)
    yard.clock.time += 11
    yard.join("a")


def test_members_beyond_the_maximum_stand_by_and_take_over(yard: Yard) -> None:
    with transaction(yard.registry) as tx:
        protocol.configure(tx, GROUP, GroupConfig(max_active=2), who="ann")
    for name in "abc":
        yard.join(name)
    yard.settle(*"abc")
    assert yard.sizes() == {"a": 3, "b": 3}
    yard.leave("a")
    yard.settle("b", "c")
    assert yard.sizes() == {"b": 3, "c": 3}


def test_topics_are_balanced_by_kind_and_given_to_those_who_want_them(yard: Yard) -> None:
    yard.topics |= {"orders.retry": Topic("orders.retry", 2, TopicKind.RETRY), "mail": Topic("mail", 2)}
    yard.join("a", topics=("orders", "orders.retry"))
    yard.join("b", topics=("orders", "orders.retry"))
    yard.join("c", topics=("mail",))
    yard.settle("a", "b", "c")
    by_topic = Counter((row.partition.topic, row.owner) for row in yard.rows().values())
    assert by_topic[("orders", "a")] == by_topic[("orders", "b")] == 3
    assert by_topic[("orders.retry", "a")] == by_topic[("orders.retry", "b")] == 1
    assert by_topic[("mail", "c")] == 2


def test_new_partitions_of_a_topic_are_shared_out_without_moving_the_old_ones(yard: Yard) -> None:
    yard.join("a")
    yard.join("b")
    yard.settle("a", "b")
    before = yard.rows()
    yard.topics["orders"] = Topic("orders", 8)
    yard.settle("a", "b")
    assert yard.sizes() == {"a": 4, "b": 4}
    assert all(yard.rows()[p].epoch == row.epoch for p, row in before.items())


def test_a_deleted_topics_rows_go_but_those_of_a_group_without_members_stay(yard: Yard) -> None:
    yard.topics["mail"] = Topic("mail", 1)
    yard.join("a", topics=("orders", "mail"))
    yard.settle("a")
    yard.commit("a", P0, yard.heartbeat("a")[P0].epoch, 5)
    del yard.topics["mail"]
    yard.settle("a")
    assert {p.topic for p in yard.rows()} == {"orders"}
    yard.leave("a")
    yard.rebalance()
    assert yard.sizes() == {None: 6}
    assert yard.rows()[P0].committed == Position(1, 5)


def test_members_may_name_their_partitions_and_the_others_share_the_rest(yard: Yard) -> None:
    mine = (P0, Partition("orders", 3))
    yard.join("a", manual=mine)
    yard.join("b")
    yard.settle("a", "b")
    assert {p for p, row in yard.rows().items() if row.owner == "a"} == set(mine)
    assert yard.sizes() == {"a": 2, "b": 4}
    with pytest.raises(PartitionTaken, match="orders/0 is named by member 'a' already"):
        yard.join("c", manual=(P0,))


def test_a_member_that_hangs_is_put_out_when_the_group_says_so(yard: Yard) -> None:
    for name in "ab":
        yard.join(name)
    yard.settle("a", "b")
    mine = {name: tuple(yard.heartbeat(name)) for name in "ab"}
    for _ in range(10):  # both heartbeat, but only b gets ahead
        yard.clock.time += 2
        yard.heartbeat("a")
        yard.heartbeat("b", mine["b"])
    assert yard.rebalance() is None
    stuck = {row.owner: yard.clock.time - row.progress_at for row in yard.rows().values()}
    assert stuck["a"] == 20
    assert stuck["b"] == 0
    with transaction(yard.registry) as tx:
        protocol.configure(tx, GROUP, GroupConfig(release_after=15.0), who="ann")
    yard.settle("b")
    assert yard.sizes() == {"b": 6}
    with pytest.raises(Fenced):
        yard.heartbeat("a")
    with transaction(yard.registry) as tx:
        assert [row.action for row in tx.audit_log()] == ["member evicted", "group configured"]


def test_a_leader_that_was_followed_can_no_longer_write(yard: Yard) -> None:
    yard.join("a")
    with transaction(yard.registry) as tx:
        first = lease.acquire(tx, LEASE, "node1", 1.0)
        assert lease.acquire(tx, LEASE, "node2", 1.0) is None
    assert first is not None
    yard.clock.time += 2
    with transaction(yard.registry) as tx:
        second = lease.acquire(tx, LEASE, "node2", 1.0)
    assert second is not None
    assert second > first
    with pytest.raises(Fenced, match="node2 has it now"):
        yard.registry.run(lambda tx: rebalance_as_leader(tx, group=GROUP, topics=yard.topics, token=first))
    assert yard.rows() == {}
    decided = yard.registry.run(lambda tx: rebalance_as_leader(tx, group=GROUP, topics=yard.topics, token=second))
    assert decided is not None
    assert yard.sizes() == {"a": 6}


def test_a_lease_is_kept_given_up_and_not_prolonged_by_a_clock_that_goes_back(yard: Yard) -> None:
    with transaction(yard.registry) as tx:
        token = lease.acquire(tx, "x", "node1", 1.0)
        assert token == lease.acquire(tx, "x", "node1", 1.0)
        assert token is not None
        lease.release(tx, "x", token)
        assert lease.acquire(tx, "x", "node2", 1.0) == token + 1
    yard.clock.time -= 3600
    with transaction(yard.registry) as tx:
        assert lease.acquire(tx, "x", "node1", 1.0) is None
    yard.clock.time += 2
    with transaction(yard.registry) as tx:
        assert lease.acquire(tx, "x", "node1", 1.0) == token + 2


def test_epochs_of_a_new_group_lie_above_those_of_a_lost_one(yard: Yard) -> None:
    yard.join("a")
    yard.settle("a")
    old = max(row.epoch for row in yard.rows().values())
    with transaction(yard.registry) as tx:
        tx.delete_group(GROUP)
    yard.clock.time += 1
    yard.join("a")
    yard.settle("a")
    assert min(row.epoch for row in yard.rows().values()) > old


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"session_timeout": 0.5}, "session_timeout is 0.5: expected a number of seconds, 1 to 3600"),
        ({"session_timeout": 1e300}, "session_timeout is 1e.300: expected a number of seconds, 1 to 3600"),
        ({"session_timeout": float("nan")}, "session_timeout is nan"),
        ({"weight": 0}, "weight of member 'a' is 0"),
        ({"weight": 1.5}, "weight of member 'a' is 1.5"),
    ],
)
def test_a_join_that_makes_no_sense_changes_nothing(yard: Yard, options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(InvalidValue, match=complaint):
        yard.join("a", **options)
    with transaction(yard.registry) as tx:
        assert tx.groups() == []


def test_a_configuration_that_makes_no_sense_changes_nothing(yard: Yard) -> None:
    senseless: list[dict[str, Any]] = [{"assignor": "random"}, {"max_active": 0}, {"release_after": 0.0}]
    for options in senseless:
        with transaction(yard.registry) as tx, pytest.raises(InvalidValue):
            protocol.configure(tx, GROUP, GroupConfig(**options), who="ann")
    with transaction(yard.registry) as tx:
        assert tx.groups() == []
        with pytest.raises(UnknownGroup, match="'nobody' does not exist"):
            assignment.rebalance(tx, "nobody", {})


# Preparation


def preparing(yard: Yard, seconds: float = 5.0) -> tuple[Partition, ...]:
    """`a` owns everything, and `b`, which prepares, is to get half of it."""
    yard.join("a")
    yard.settle("a")
    yard.join("b", prepare_seconds=seconds)
    yard.rebalance()
    return tuple(p for p, row in yard.rows().items() if row.target == "b")


def incoming(yard: Yard, name: str) -> set[Partition]:
    return set(yard.assignment_after_heartbeat(name).incoming)


def revoked(yard: Yard, name: str) -> set[Partition]:
    return {p for p, grant in yard.heartbeat(name).items() if grant.revoked}


def test_an_owner_keeps_a_partition_until_the_next_one_is_ready(yard: Yard) -> None:
    coming = preparing(yard)
    assert incoming(yard, "b") == set(coming)
    assert revoked(yard, "a") == set()
    yard.registry.run(lambda tx: protocol.ready(tx, GROUP, "b", yard.epochs["b"], coming[:1]))
    assert revoked(yard, "a") == set(coming[:1])
    assert incoming(yard, "b") == set(coming[1:])
    yard.release_revoked("a")
    assert set(yard.heartbeat("b")) == set(coming[:1])


def test_a_member_that_takes_too_long_to_prepare_gets_the_partition_all_the_same(yard: Yard) -> None:
    coming = preparing(yard, seconds=5.0)
    yard.clock.time += 4.9
    assert revoked(yard, "a") == set()
    yard.clock.time += 0.2
    assert revoked(yard, "a") == set(coming)
    assert incoming(yard, "b") == set()
    yard.release_revoked("a")
    assert set(yard.heartbeat("b")) == set(coming)


def test_what_a_dead_member_was_preparing_stays_with_its_owner(yard: Yard) -> None:
    preparing(yard)
    yard.leave("b")
    assert revoked(yard, "a") == set()
    yard.rebalance()
    assert revoked(yard, "a") == set()
    assert yard.sizes() == {"a": 6}


def test_the_partitions_of_an_owner_that_dies_go_to_the_member_that_prepares_them_at_once(yard: Yard) -> None:
    coming = preparing(yard)
    yard.leave("a")
    assert set(yard.heartbeat("b")) == set(coming)
    yard.rebalance()
    assert yard.sizes() == {"b": 6}


def test_a_clock_that_goes_back_does_not_prolong_a_preparation(yard: Yard) -> None:
    coming = preparing(yard)
    yard.clock.time -= 60.0
    assert revoked(yard, "a") == set(coming)


def test_readiness_for_what_is_not_coming_changes_nothing(yard: Yard) -> None:
    preparing(yard)
    before = yard.rows()
    mine = next(p for p, row in before.items() if row.target == "a")
    yard.registry.run(lambda tx: protocol.ready(tx, GROUP, "b", yard.epochs["b"], [mine, Partition("nothing", 0)]))
    assert yard.rows() == before
    with pytest.raises(Fenced):
        yard.registry.run(lambda tx: protocol.ready(tx, GROUP, "b", yard.epochs["b"] - 1, [mine]))
    with pytest.raises(InvalidValue, match="prepare_seconds is 0"):
        yard.join("c", prepare_seconds=0.0)


# Presence and broadcast


def test_a_member_without_topics_is_present_and_owns_nothing(yard: Yard) -> None:
    yard.join("a")
    yard.join("node", topics=(), address="10.0.0.7:7400", metadata={"zone": "b"})
    yard.settle("a")
    assert yard.sizes() == {"a": 6}
    row = yard.registry.read(lambda tx: tx.member(GROUP, "node"))
    assert row is not None
    assert (row.address, row.metadata, row.topics) == ("10.0.0.7:7400", {"zone": "b"}, ())


def test_each_member_of_a_broadcast_group_owns_everything_and_has_positions_of_its_own(yard: Yard) -> None:
    yard.registry.run(lambda tx: protocol.configure(tx, GROUP, GroupConfig(broadcast=True), who="ann"))

    def join_and_commit(tx: Transaction, name: str, offset: int) -> OwnershipRow | None:
        row = protocol.join(tx, GROUP, name, topics=["orders"])
        assignment.rebalance(tx, row.group, yard.topics)
        owned = protocol.assignment(tx, row.group, name, row.epoch).owned
        assert len(owned) == 6
        positions = {P0: (owned[P0].epoch, Position(1, offset))}
        commit(tx, row.group, name, positions)
        return tx.ownership(row.group, P0)

    kept = [yard.registry.run(partial(join_and_commit, name=name, offset=i)) for i, name in enumerate("ab", 1)]
    assert [row and row.committed for row in kept] == [Position(1, 1), Position(1, 2)]
    with pytest.raises(InvalidValue, match="no change while the group has members"):
        yard.registry.run(lambda tx: protocol.configure(tx, GROUP, GroupConfig(), who="ann"))


def test_a_hung_member_of_a_broadcast_group_is_evicted_by_the_setting_of_the_group(yard: Yard) -> None:
    config = GroupConfig(broadcast=True, release_after=5.0)
    yard.registry.run(lambda tx: protocol.configure(tx, GROUP, config, who="ann"))
    row = yard.registry.run(lambda tx: protocol.join(tx, GROUP, "a", topics=["orders"]))
    yard.registry.run(lambda tx: assignment.rebalance(tx, row.group, yard.topics))
    for _ in range(4):
        yard.clock.time += 2.0
        yard.registry.run(lambda tx: heartbeat(tx, row.group, "a", row.epoch))
    yard.registry.run(lambda tx: assignment.rebalance(tx, row.group, yard.topics))
    assert yard.registry.read(lambda tx: tx.members(row.group)) == []


def test_the_first_join_configures_a_new_group_and_later_ones_do_not(yard: Yard) -> None:
    yard.join("a", config=GroupConfig(release_after=60.0))
    yard.join("b", config=GroupConfig(release_after=5.0))
    row = yard.registry.read(lambda tx: tx.group(GROUP))
    assert row is not None
    assert row.release_after == 60.0
    assert yard.rebalance() is not None
    assert yard.rebalance() is None, "one rebalance is enough for both"
