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
from tests.sqlite_files import with_registry

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


class SimpleGroup:
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
def billing(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SimpleGroup]:
    clock = VirtualClock()
    registry: Registry = (
        MemoryRegistry(clock)
        if request.param == "memory"
        else SqlRegistry(SqliteStore(with_registry(tmp_path / "r.db"), clock))
    )
    with registry:
        yield SimpleGroup(registry, clock)


P0 = Partition("orders", 0)


def test_two_consumers_share_six_partitions_and_a_third_takes_two(billing: SimpleGroup) -> None:
    billing.join("a")
    billing.join("b")
    billing.settle("a", "b")
    assert billing.sizes() == {"a": 3, "b": 3}
    before = billing.rows()
    billing.join("c")
    billing.settle("a", "b")
    assert billing.sizes() == {"a": 2, "b": 2, "c": 2}
    stayed = [p for p, row in billing.rows().items() if row.owner == before[p].owner]
    assert all(billing.rows()[p].epoch == before[p].epoch for p in stayed), (
        "what stays keeps its epoch: it never pauses"
    )


def test_a_partition_stays_with_its_owner_until_that_one_releases_it(billing: SimpleGroup) -> None:
    billing.join("a")
    billing.settle("a")
    billing.join("b")
    billing.rebalance()
    assert billing.sizes() == {"a": 6}
    revoked = {p: h for p, h in billing.heartbeat("a").items() if h.revoked}
    assert len(revoked) == 3
    assert billing.heartbeat("b") == {}
    partition, holding = next(iter(revoked.items()))
    billing.commit("a", partition, holding.epoch, 17)  # finished work is committed before the release
    billing.release_revoked("a")
    assert billing.heartbeat("b")[partition].committed == Position(1, 17)
    assert billing.heartbeat("b")[partition].epoch > holding.epoch


def test_a_stale_owner_can_neither_commit_nor_release(billing: SimpleGroup) -> None:
    billing.join("a")
    billing.settle("a")
    old = billing.heartbeat("a")[P0].epoch
    billing.join("b", session_timeout=60.0)
    billing.clock.time += 11  # past a's session; nobody has noticed yet
    billing.rebalance()
    assert billing.sizes() == {"b": 6}
    with pytest.raises(Fenced, match="'a'"):
        billing.commit("a", P0, old, 1)
    billing.join("a")
    with pytest.raises(Fenced, match="orders/0 no longer belongs to 'a'"):
        billing.commit("a", P0, old, 1)
    with transaction(billing.registry) as tx, pytest.raises(Fenced):
        protocol.release(tx, GROUP, "a", billing.epochs["a"], {P0: old})
    assert billing.rows()[P0].committed is None


def test_a_member_that_was_late_but_not_evicted_continues(billing: SimpleGroup) -> None:
    billing.join("a")
    billing.settle("a")
    billing.clock.time += 11
    assert len(billing.heartbeat("a")) == 6
    assert billing.rebalance() is None


def test_commits_go_forwards_only_and_all_or_none(billing: SimpleGroup) -> None:
    billing.join("a")
    billing.settle("a")
    held = billing.heartbeat("a")
    billing.commit("a", P0, held[P0].epoch, 10)
    billing.commit("a", P0, held[P0].epoch, 10)
    with pytest.raises(CommitBehind, match="offset 9 of orders/0 lies behind what is committed, 10"):
        billing.commit("a", P0, held[P0].epoch, 9)
    other = Partition("orders", 1)
    positions = {other: (held[other].epoch, Position(1, 5)), P0: (held[P0].epoch, Position(1, 9))}
    with pytest.raises(CommitBehind), billing.registry.transaction() as tx:
        commit(tx, GROUP, "a", positions)
    assert billing.rows()[other].committed is None


def test_a_static_members_restart_moves_nothing_and_fences_its_earlier_membership(billing: SimpleGroup) -> None:
    billing.join("a", static=True)
    billing.join("b")
    billing.settle("a", "b")
    before = billing.rows()
    old = {p: h.epoch for p, h in billing.heartbeat("a").items()}
    billing.leave("a")
    billing.join("a", static=True)
    assert billing.rebalance() is None
    assert {p: row.owner for p, row in billing.rows().items()} == {p: row.owner for p, row in before.items()}
    partition = next(iter(old))
    with transaction(billing.registry) as tx, pytest.raises(Fenced):
        commit(tx, GROUP, "a", {partition: (old[partition], Position(1, 1))})
    with pytest.raises(Fenced):
        billing.commit("a", partition, old[partition], 1)


@pytest.mark.parametrize("static", [True, False])
def test_a_join_may_be_repeated_by_the_same_process_and_not_by_another(billing: SimpleGroup, static: bool) -> None:
    first = billing.join("a", static=static, instance="x")
    again = billing.join("a", static=static, instance="x", since=first.epoch - 1)
    assert again.epoch > first.epoch
    assert again.instance == "x"
    with pytest.raises(Fenced if static else MemberExists):
        billing.join("a", static=static, instance="y", since=first.epoch)
    with pytest.raises(Fenced if static else MemberExists):
        billing.join("a", static=static, since=first.epoch)


def test_a_static_member_that_does_not_return_is_evicted(billing: SimpleGroup) -> None:
    billing.join("a", static=True)
    billing.join("b", session_timeout=60.0)
    billing.settle("a", "b")
    billing.leave("a")
    billing.clock.time += 11
    billing.settle("b")
    assert billing.sizes() == {"b": 6}


def test_the_name_of_a_live_member_is_refused(billing: SimpleGroup) -> None:
    billing.join("a")
    with pytest.raises(MemberExists, match="has a member 'a' already"):
        billing.join("a", static=True)
    billing.clock.time += 11
    billing.join("a")


def test_members_beyond_the_maximum_stand_by_and_take_over(billing: SimpleGroup) -> None:
    with transaction(billing.registry) as tx:
        protocol.configure(tx, GROUP, GroupConfig(max_active=2), who="ann")
    for name in "abc":
        billing.join(name)
    billing.settle(*"abc")
    assert billing.sizes() == {"a": 3, "b": 3}
    billing.leave("a")
    billing.settle("b", "c")
    assert billing.sizes() == {"b": 3, "c": 3}


def test_topics_are_balanced_by_kind_and_given_to_their_subscribers(billing: SimpleGroup) -> None:
    billing.topics |= {"orders.retry": Topic("orders.retry", 2, TopicKind.RETRY), "mail": Topic("mail", 2)}
    billing.join("a", topics=("orders", "orders.retry"))
    billing.join("b", topics=("orders", "orders.retry"))
    billing.join("c", topics=("mail",))
    billing.settle("a", "b", "c")
    by_topic = Counter((row.partition.topic, row.owner) for row in billing.rows().values())
    assert by_topic[("orders", "a")] == by_topic[("orders", "b")] == 3
    assert by_topic[("orders.retry", "a")] == by_topic[("orders.retry", "b")] == 1
    assert by_topic[("mail", "c")] == 2


def test_new_partitions_of_a_topic_are_shared_out_without_moving_the_old_ones(billing: SimpleGroup) -> None:
    billing.join("a")
    billing.join("b")
    billing.settle("a", "b")
    before = billing.rows()
    billing.topics["orders"] = Topic("orders", 8)
    billing.settle("a", "b")
    assert billing.sizes() == {"a": 4, "b": 4}
    assert all(billing.rows()[p].epoch == row.epoch for p, row in before.items())


def test_a_deleted_topics_rows_go_but_those_of_a_group_without_members_stay(billing: SimpleGroup) -> None:
    billing.topics["mail"] = Topic("mail", 1)
    billing.join("a", topics=("orders", "mail"))
    billing.settle("a")
    billing.commit("a", P0, billing.heartbeat("a")[P0].epoch, 5)
    del billing.topics["mail"]
    billing.settle("a")
    assert {p.topic for p in billing.rows()} == {"orders"}
    billing.leave("a")
    billing.rebalance()
    assert billing.sizes() == {None: 6}
    assert billing.rows()[P0].committed == Position(1, 5)


def test_members_may_name_their_partitions_and_the_others_share_the_rest(billing: SimpleGroup) -> None:
    mine = (P0, Partition("orders", 3))
    billing.join("a", manual=mine)
    billing.join("b")
    billing.settle("a", "b")
    assert {p for p, row in billing.rows().items() if row.owner == "a"} == set(mine)
    assert billing.sizes() == {"a": 2, "b": 4}
    with pytest.raises(PartitionTaken, match="orders/0 is named by member 'a' already"):
        billing.join("c", manual=(P0,))


def test_a_member_that_hangs_is_evicted_if_the_group_is_configured_so(billing: SimpleGroup) -> None:
    for name in "ab":
        billing.join(name)
    billing.settle("a", "b")
    mine = {name: tuple(billing.heartbeat(name)) for name in "ab"}
    for _ in range(10):  # both heartbeat, but only b gets ahead
        billing.clock.time += 2
        billing.heartbeat("a")
        billing.heartbeat("b", mine["b"])
    assert billing.rebalance() is None
    stuck = {row.owner: billing.clock.time - row.progress_at for row in billing.rows().values()}
    assert stuck["a"] == 20
    assert stuck["b"] == 0
    with transaction(billing.registry) as tx:
        protocol.configure(tx, GROUP, GroupConfig(release_after=15.0), who="ann")
    billing.settle("b")
    assert billing.sizes() == {"b": 6}
    with pytest.raises(Fenced):
        billing.heartbeat("a")
    with transaction(billing.registry) as tx:
        assert [row.action for row in tx.audit_log()] == ["member evicted", "group configured"]


def test_a_leader_that_was_replaced_can_no_longer_write(billing: SimpleGroup) -> None:
    billing.join("a")
    with transaction(billing.registry) as tx:
        first = lease.acquire(tx, LEASE, "node1", 1.0)
        assert lease.acquire(tx, LEASE, "node2", 1.0) is None
    assert first is not None
    billing.clock.time += 2
    with transaction(billing.registry) as tx:
        second = lease.acquire(tx, LEASE, "node2", 1.0)
    assert second is not None
    assert second > first
    with pytest.raises(Fenced, match="node2 has it now"):
        billing.registry.run(lambda tx: rebalance_as_leader(tx, group=GROUP, topics=billing.topics, token=first))
    assert billing.rows() == {}
    decided = billing.registry.run(lambda tx: rebalance_as_leader(tx, group=GROUP, topics=billing.topics, token=second))
    assert decided is not None
    assert billing.sizes() == {"a": 6}


def test_a_lease_is_kept_given_up_and_not_prolonged_by_a_clock_that_goes_back(billing: SimpleGroup) -> None:
    with transaction(billing.registry) as tx:
        token = lease.acquire(tx, "x", "node1", 1.0)
        assert token == lease.acquire(tx, "x", "node1", 1.0)
        assert token is not None
        lease.release(tx, "x", token)
        assert lease.acquire(tx, "x", "node2", 1.0) == token + 1
    billing.clock.time -= 3600
    with transaction(billing.registry) as tx:
        assert lease.acquire(tx, "x", "node1", 1.0) is None
    billing.clock.time += 2
    with transaction(billing.registry) as tx:
        assert lease.acquire(tx, "x", "node1", 1.0) == token + 2


def test_epochs_of_a_new_group_lie_above_those_of_a_lost_one(billing: SimpleGroup) -> None:
    billing.join("a")
    billing.settle("a")
    old = max(row.epoch for row in billing.rows().values())
    with transaction(billing.registry) as tx:
        tx.delete_group(GROUP)
    billing.clock.time += 1
    billing.join("a")
    billing.settle("a")
    assert min(row.epoch for row in billing.rows().values()) > old


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
def test_a_join_that_is_invalid_changes_nothing(billing: SimpleGroup, options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(InvalidValue, match=complaint):
        billing.join("a", **options)
    with transaction(billing.registry) as tx:
        assert tx.groups() == []


def test_a_configuration_that_is_invalid_changes_nothing(billing: SimpleGroup) -> None:
    senseless: list[dict[str, Any]] = [{"assignor": "random"}, {"max_active": 0}, {"release_after": 0.0}]
    for options in senseless:
        with transaction(billing.registry) as tx, pytest.raises(InvalidValue):
            protocol.configure(tx, GROUP, GroupConfig(**options), who="ann")
    with transaction(billing.registry) as tx:
        assert tx.groups() == []
        with pytest.raises(UnknownGroup, match="'nobody' does not exist"):
            assignment.rebalance(tx, "nobody", {})


# Preparation


def preparing(billing: SimpleGroup, seconds: float = 5.0) -> tuple[Partition, ...]:
    """`a` owns everything, and `b`, which prepares, is to get half of it."""
    billing.join("a")
    billing.settle("a")
    billing.join("b", prepare_seconds=seconds)
    billing.rebalance()
    return tuple(p for p, row in billing.rows().items() if row.target == "b")


def incoming(billing: SimpleGroup, name: str) -> set[Partition]:
    return set(billing.assignment_after_heartbeat(name).incoming)


def revoked(billing: SimpleGroup, name: str) -> set[Partition]:
    return {p for p, grant in billing.heartbeat(name).items() if grant.revoked}


def test_an_owner_keeps_a_partition_until_the_next_one_is_ready(billing: SimpleGroup) -> None:
    coming = preparing(billing)
    assert incoming(billing, "b") == set(coming)
    assert revoked(billing, "a") == set()
    billing.registry.run(lambda tx: protocol.ready(tx, GROUP, "b", billing.epochs["b"], coming[:1]))
    assert revoked(billing, "a") == set(coming[:1])
    assert incoming(billing, "b") == set(coming[1:])
    billing.release_revoked("a")
    assert set(billing.heartbeat("b")) == set(coming[:1])


def test_a_member_that_takes_too_long_to_prepare_gets_the_partition_all_the_same(billing: SimpleGroup) -> None:
    coming = preparing(billing, seconds=5.0)
    billing.clock.time += 4.9
    assert revoked(billing, "a") == set()
    billing.clock.time += 0.2
    assert revoked(billing, "a") == set(coming)
    assert incoming(billing, "b") == set()
    billing.release_revoked("a")
    assert set(billing.heartbeat("b")) == set(coming)


def test_what_a_dead_member_was_preparing_stays_with_its_owner(billing: SimpleGroup) -> None:
    preparing(billing)
    billing.leave("b")
    assert revoked(billing, "a") == set()
    billing.rebalance()
    assert revoked(billing, "a") == set()
    assert billing.sizes() == {"a": 6}


def test_the_partitions_of_an_owner_that_dies_go_to_the_member_that_prepares_them_at_once(billing: SimpleGroup) -> None:
    coming = preparing(billing)
    billing.leave("a")
    assert set(billing.heartbeat("b")) == set(coming)
    billing.rebalance()
    assert billing.sizes() == {"b": 6}


def test_a_clock_that_goes_back_does_not_prolong_a_preparation(billing: SimpleGroup) -> None:
    coming = preparing(billing)
    billing.clock.time -= 60.0
    assert revoked(billing, "a") == set(coming)


def test_readiness_for_what_is_not_coming_changes_nothing(billing: SimpleGroup) -> None:
    preparing(billing)
    before = billing.rows()
    mine = next(p for p, row in before.items() if row.target == "a")
    billing.registry.run(
        lambda tx: protocol.ready(tx, GROUP, "b", billing.epochs["b"], [mine, Partition("nothing", 0)])
    )
    assert billing.rows() == before
    with pytest.raises(Fenced):
        billing.registry.run(lambda tx: protocol.ready(tx, GROUP, "b", billing.epochs["b"] - 1, [mine]))
    with pytest.raises(InvalidValue, match="prepare_seconds is 0"):
        billing.join("c", prepare_seconds=0.0)


# Presence and broadcast


def test_a_member_without_topics_is_present_and_owns_nothing(billing: SimpleGroup) -> None:
    billing.join("a")
    billing.join("node", topics=(), address="10.0.0.7:7400", metadata={"zone": "b"})
    billing.settle("a")
    assert billing.sizes() == {"a": 6}
    row = billing.registry.read(lambda tx: tx.member(GROUP, "node"))
    assert row is not None
    assert (row.address, row.metadata, row.topics) == ("10.0.0.7:7400", {"zone": "b"}, ())


def test_each_member_of_a_broadcast_group_owns_everything_and_has_positions_of_its_own(billing: SimpleGroup) -> None:
    billing.registry.run(lambda tx: protocol.configure(tx, GROUP, GroupConfig(broadcast=True), who="ann"))

    def join_and_commit(tx: Transaction, name: str, offset: int) -> OwnershipRow | None:
        row = protocol.join(tx, GROUP, name, topics=["orders"])
        assignment.rebalance(tx, row.group, billing.topics)
        owned = protocol.assignment(tx, row.group, name, row.epoch).owned
        assert len(owned) == 6
        positions = {P0: (owned[P0].epoch, Position(1, offset))}
        commit(tx, row.group, name, positions)
        return tx.ownership(row.group, P0)

    kept = [billing.registry.run(partial(join_and_commit, name=name, offset=i)) for i, name in enumerate("ab", 1)]
    assert [row and row.committed for row in kept] == [Position(1, 1), Position(1, 2)]
    with pytest.raises(InvalidValue, match="no change while the group has members"):
        billing.registry.run(lambda tx: protocol.configure(tx, GROUP, GroupConfig(), who="ann"))


def test_a_hung_member_of_a_broadcast_group_is_evicted_by_the_setting_of_the_group(billing: SimpleGroup) -> None:
    config = GroupConfig(broadcast=True, release_after=5.0)
    billing.registry.run(lambda tx: protocol.configure(tx, GROUP, config, who="ann"))
    row = billing.registry.run(lambda tx: protocol.join(tx, GROUP, "a", topics=["orders"]))
    billing.registry.run(lambda tx: assignment.rebalance(tx, row.group, billing.topics))
    for _ in range(4):
        billing.clock.time += 2.0
        billing.registry.run(lambda tx: heartbeat(tx, row.group, "a", row.epoch))
    billing.registry.run(lambda tx: assignment.rebalance(tx, row.group, billing.topics))
    assert billing.registry.read(lambda tx: tx.members(row.group)) == []


def test_the_first_join_configures_a_new_group_and_later_ones_do_not(billing: SimpleGroup) -> None:
    billing.join("a", config=GroupConfig(release_after=60.0))
    billing.join("b", config=GroupConfig(release_after=5.0))
    row = billing.registry.read(lambda tx: tx.group(GROUP))
    assert row is not None
    assert row.release_after == 60.0
    assert billing.rebalance() is not None
    assert billing.rebalance() is None, "one rebalance is enough for both"
