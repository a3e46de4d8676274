"""The contract of a registry, for every engine."""

import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from shardyard.model import Busy, Closed, InvalidValue, Partition, Position
from shardyard.model.url import parse_url
from shardyard.registry import (
    AuditRow,
    GroupRow,
    GroupTimes,
    Heartbeat,
    LeaseRow,
    MemberRow,
    OwnershipRow,
    PositionCommit,
    Registry,
    SettingRow,
    Snapshot,
    Transaction,
    open_registry,
)
from shardyard.registry.memory import MemoryRegistry
from shardyard.registry.postgresql import PostgresqlStore
from shardyard.registry.sql import SqlRegistry
from shardyard.registry.sqlite import SqliteStore
from shardyard.runtime.clock import ManualClock
from tests.registry.blocks import snapshot, transaction, wait_until_listening
from tests.sqlite_files import with_registry

TIMEOUT_SECONDS = 60.0
"""How long a test waits for what must happen soon."""

GROUP = GroupRow("billing", 7, 5, 4, 12, "even", max_active=3, release_after=2.5, broadcast=True)
MEMBER = MemberRow("billing", "a", 3, 2, ("orders", "bills"), True, None, 30.0, 1_700_000_030.5)
OWNED = OwnershipRow(
    "billing", Partition("orders", 1), "a", 6, "b", Position(2, 2**40), 1_700_000_000.25, handover_at=1_700_000_009.5
)

Open = Callable[[float], Registry]


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture(params=["memory", "sqlite", pytest.param("postgresql", marks=pytest.mark.server)])
def opened(request: pytest.FixtureRequest, tmp_path: Path, clock: ManualClock) -> Iterator[Open]:
    registries: list[Registry] = []
    url = request.getfixturevalue("postgresql_url") if request.param == "postgresql" else ""

    def opened(busy_wait: float) -> Registry:
        registry: Registry
        if request.param == "memory":
            registry = MemoryRegistry(clock, busy_wait=busy_wait)
        elif request.param == "sqlite":
            registry = SqlRegistry(SqliteStore(with_registry(tmp_path / "registry.db"), clock, busy_wait=busy_wait))
        else:
            registry = SqlRegistry(PostgresqlStore(parse_url("registry", url), clock, busy_wait=busy_wait))
            wait_until_listening(registry)
        registries.append(registry)
        return registry

    yield opened
    for registry in registries:
        registry.close()


@pytest.fixture
def registry(opened: Open) -> Registry:
    return opened(TIMEOUT_SECONDS)


class Failure(Exception):
    """Raised in the middle of a transaction."""


class Callback:
    """A callback whose calls are counted and can be waited for."""

    def __init__(self) -> None:
        self._called = threading.Semaphore(0)
        self.times = 0

    def __call__(self) -> None:
        self.times += 1
        self._called.release()

    def wait(self) -> None:
        assert self._called.acquire(timeout=TIMEOUT_SECONDS)


def touch(registry: Registry, name: str) -> None:
    with transaction(registry) as tx:
        tx.touch(name)


def put_group(registry: Registry, name: str) -> None:
    registry.run(lambda tx: tx.put_group(GroupRow(name)))


def audit(registry: Registry, subject: str) -> None:
    registry.run(lambda tx: tx.audit("ann", "change", subject))


def roll_back(registry: Registry, work: Callable[[Transaction], None]) -> None:
    """Run `work` in a transaction, which then fails."""

    def work_and_fail(tx: Transaction) -> None:
        work(tx)
        raise Failure

    with pytest.raises(Failure):
        registry.run(work_and_fail)


# Rows --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", [GROUP, GroupRow("billing")])
def test_a_group_comes_back_as_it_was_put(registry: Registry, row: GroupRow) -> None:
    with transaction(registry) as tx:
        tx.put_group(row)
    with transaction(registry) as tx:
        assert tx.group("billing") == row
        assert tx.group("other") is None


@pytest.mark.parametrize(
    "row",
    [
        MEMBER,
        replace(MEMBER, topics=(), static=False),
        replace(MEMBER, manual=()),
        replace(MEMBER, manual=(Partition("orders", 2), Partition("orders", 0))),
        replace(MEMBER, name="ünï/cødé 'quoted' \U0001f69a", topics=("ø",)),
        replace(
            MEMBER, address="http://10.0.0.7:7400", metadata={"zone": ["a", 1, None]}, prepare_seconds=2.5, instance="x"
        ),
        replace(MEMBER, metadata=0, address=""),
    ],
)
def test_a_member_comes_back_as_it_was_put(registry: Registry, row: MemberRow) -> None:
    with transaction(registry) as tx:
        tx.put_member(row)
    with transaction(registry) as tx:
        assert tx.member("billing", row.name) == row
        assert tx.members("billing") == [row]
        assert tx.member("billing", "nobody") is None
        assert tx.member("other", row.name) is None


@pytest.mark.parametrize("row", [OWNED, OwnershipRow("billing", Partition("orders", 1))])
def test_an_ownership_comes_back_as_it_was_put(registry: Registry, row: OwnershipRow) -> None:
    with transaction(registry) as tx:
        tx.put_ownerships([row])
    with transaction(registry) as tx:
        assert tx.ownership("billing", Partition("orders", 1)) == row
        assert tx.ownership("billing", Partition("orders", 2)) is None
        assert tx.ownership("other", Partition("orders", 1)) is None


def test_a_lease_comes_back_as_it_was_put_and_is_replaced_by_the_next_holding(registry: Registry) -> None:
    first, second = LeaseRow("rebalancer", "a", 1, 12.5), LeaseRow("rebalancer", "b", 2, 22.5)
    with transaction(registry) as tx:
        assert tx.lease("rebalancer") is None
        tx.put_lease(first)
        assert tx.lease("rebalancer") == first
    with transaction(registry) as tx:
        tx.put_lease(second)
    with transaction(registry) as tx:
        assert tx.lease("rebalancer") == second


def test_put_replaces_the_row_of_the_same_identity(registry: Registry) -> None:
    with transaction(registry) as tx:
        tx.put_group(GROUP)
        tx.put_member(MEMBER)
        tx.put_ownerships([OWNED])
    changed = GroupRow("billing"), replace(MEMBER, epoch=9, manual=()), OwnershipRow("billing", OWNED.partition)
    with transaction(registry) as tx:
        tx.put_group(changed[0])
        tx.put_member(changed[1])
        tx.put_ownerships([changed[2]])
    with transaction(registry) as tx:
        assert tx.groups() == [changed[0]]
        assert tx.members("billing") == [changed[1]]
        assert tx.ownerships("billing") == [changed[2]]


def test_ownerships_old_and_new_of_several_groups_are_put_at_once_and_the_last_of_two_counts(
    registry: Registry,
) -> None:
    def rows(group: str, count: int, epoch: int) -> list[OwnershipRow]:
        return [OwnershipRow(group, Partition("orders", index), epoch=epoch) for index in range(count)]

    with transaction(registry) as tx:
        tx.put_ownerships([])
        tx.put_ownerships(iter(rows("a", 500, 1)))
    with transaction(registry) as tx:
        tx.put_ownerships([*rows("a", 1000, 2), *rows("b", 10, 2), *rows("b", 5, 3)])
    with transaction(registry) as tx:
        assert tx.ownerships("a") == rows("a", 1000, 2)
        assert tx.ownerships("b") == [*rows("b", 5, 3), *rows("b", 10, 2)[5:]]


def test_rows_come_in_order(registry: Registry) -> None:
    names = ["b", "B", "a", "ä", "a1", "Z", "\U0001f69a", "\uffff"]
    partitions = [Partition(topic, index) for topic in ("b", "a", "B") for index in (10, 9, 2, 0)]
    with transaction(registry) as tx:
        for name in names:
            tx.put_group(GroupRow(name))
            tx.put_member(replace(MEMBER, name=name))
            tx.put_setting("policy", name, 1)
        tx.put_ownerships(OwnershipRow("billing", partition, owner="a") for partition in partitions)
        tx.put_group(GroupRow("a", epoch=1))
    with transaction(registry) as tx:
        assert [row.name for row in tx.groups()] == sorted(names)
        assert [row.name for row in tx.members("billing")] == sorted(names)
        assert [row.name for row in tx.settings("policy")] == sorted(names)
        assert [row.partition for row in tx.ownerships("billing")] == sorted(partitions)
        assert [row.partition for row in tx.ownerships_of("billing", "a")] == sorted(partitions)


def test_a_members_ownerships_are_those_it_owns_and_those_it_is_to_own(registry: Registry) -> None:
    owned, coming, kept, other, nobodys = (
        OwnershipRow("billing", Partition("orders", index), owner=owner, target=target)
        for index, (owner, target) in enumerate([("a", "b"), ("b", "a"), ("a", "a"), ("b", "b"), (None, None)])
    )
    with transaction(registry) as tx:
        tx.put_ownerships([nobodys, other, kept, coming, owned, replace(kept, group="shipping")])
        assert tx.ownerships_of("billing", "a") == [owned, coming, kept]
        assert tx.ownerships_of("billing", "c") == []
        assert tx.ownerships_of("nowhere", "a") == []


def test_a_deleted_row_is_gone_and_deleting_what_is_not_there_does_nothing(registry: Registry) -> None:
    rows = [OwnershipRow("billing", Partition("orders", index)) for index in range(3)]
    with transaction(registry) as tx:
        tx.put_member(MEMBER)
        tx.put_member(replace(MEMBER, name="b"))
        tx.put_ownerships(rows)
    with transaction(registry) as tx:
        tx.delete_member("billing", "a")
        tx.delete_member("billing", "nobody")
        tx.delete_ownerships("billing", iter([Partition("orders", 0), Partition("orders", 9)]))
        tx.delete_ownerships("billing", [])
        tx.delete_group("nothing")
    with transaction(registry) as tx:
        assert [row.name for row in tx.members("billing")] == ["b"]
        assert tx.ownerships("billing") == rows[1:]


def test_a_group_is_deleted_with_its_members_and_ownerships_and_no_others(registry: Registry) -> None:
    other = replace(MEMBER, group="shipping"), replace(OWNED, group="shipping")
    with transaction(registry) as tx:
        tx.put_group(GROUP)
        tx.put_group(replace(GROUP, name="shipping"))
        for member in (MEMBER, other[0]):
            tx.put_member(member)
        tx.put_ownerships([OWNED, other[1]])
    with transaction(registry) as tx:
        tx.delete_group("billing")
    with transaction(registry) as tx:
        assert [row.name for row in tx.groups()] == ["shipping"]
        assert (tx.members("billing"), tx.ownerships("billing")) == ([], [])
        assert (tx.members("shipping"), tx.ownerships("shipping")) == ([other[0]], [other[1]])


# Settings and audit ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [None, 0, True, 1.5, "", "ü", [], [1, [None]], {"a": {"b": [1]}}])
def test_a_setting_holds_what_json_holds(registry: Registry, value: object) -> None:
    with transaction(registry) as tx:
        assert tx.put_setting("topic/orders", "limit", value) == SettingRow("topic/orders", "limit", value, 1)
    with transaction(registry) as tx:
        assert tx.setting("topic/orders", "limit") == SettingRow("topic/orders", "limit", value, 1)
        assert tx.setting("topic/orders", "other") is None
        assert tx.setting("topic/bills", "limit") is None


@pytest.mark.parametrize("value", [b"bytes", {1, 2}, float("nan"), object()])
def test_what_json_cannot_hold_is_refused_and_changes_nothing(registry: Registry, value: object) -> None:
    with transaction(registry) as tx:
        with pytest.raises(InvalidValue, match="JSON"):
            tx.put_setting("policy", "x", value)
        with pytest.raises(InvalidValue, match="JSON"):
            tx.audit("ann", "set", "x", value)
        with pytest.raises(InvalidValue, match=r"metadata is .*JSON"):
            tx.put_member(replace(MEMBER, metadata=value))
    with transaction(registry) as tx:
        assert tx.settings("policy") == []
        assert tx.audit_log() == []
        assert tx.members("billing") == []


def test_a_value_that_is_changed_after_it_was_put_or_read_leaves_the_setting_alone(registry: Registry) -> None:
    value = [1]
    with transaction(registry) as tx:
        returned = tx.put_setting("policy", "x", value).value
        value.append(2)
        assert isinstance(returned, list)
        returned.append(3)
        assert tx.setting("policy", "x") == SettingRow("policy", "x", [1], 1)


def test_metadata_that_is_changed_after_it_was_put_or_read_leaves_the_member_alone(registry: Registry) -> None:
    metadata = [1]
    with transaction(registry) as tx:
        tx.put_member(replace(MEMBER, metadata=metadata))
        metadata.append(2)
        (row,) = tx.members("billing")
        assert isinstance(row.metadata, list)
        row.metadata.append(3)
        assert tx.member("billing", "a") == replace(MEMBER, metadata=[1])


def test_a_settings_version_counts_its_changes_also_across_a_deletion(registry: Registry) -> None:
    with transaction(registry) as tx:
        versions = [tx.put_setting("policy", "x", value).version for value in ("a", "b", "b")]
        assert versions == [1, 2, 3]
    with transaction(registry) as tx:
        tx.delete_setting("policy", "x")
        tx.delete_setting("policy", "never set")
        assert tx.setting("policy", "x") is None
        assert tx.settings("policy") == []
    with transaction(registry) as tx:
        assert tx.put_setting("policy", "x", "c") == SettingRow("policy", "x", "c", 4)
        assert tx.put_setting("policy", "never set", "d").version == 1
        assert [row.name for row in tx.settings("policy")] == ["never set", "x"]


def test_the_audit_log_has_ascending_numbers_and_lists_the_newest_first(registry: Registry, clock: ManualClock) -> None:
    with transaction(registry) as tx:
        tx.audit("ann", "create", "topic/orders", {"partitions": 12})
        tx.audit("bob", "delete", "topic/bills")
    clock.jump(5.5)
    roll_back(registry, lambda tx: tx.audit("eve", "fail", "topic/orders"))
    with transaction(registry) as tx:
        tx.audit("ann", "expand", "topic/orders", [12, 24])
    with transaction(registry) as tx:
        rows = tx.audit_log()
    third, second, first = (row.number for row in rows)
    assert 0 < first < second < third
    assert rows == [
        AuditRow(third, 1_700_000_005.5, "ann", "expand", "topic/orders", [12, 24]),
        AuditRow(second, 1_700_000_000.0, "bob", "delete", "topic/bills", None),
        AuditRow(first, 1_700_000_000.0, "ann", "create", "topic/orders", {"partitions": 12}),
    ]


def test_a_change_of_a_setting_is_not_audited_by_itself(registry: Registry) -> None:
    with transaction(registry) as tx:
        tx.put_setting("topic/orders", "publish token", "s3cret")
        tx.delete_setting("topic/orders", "publish token")
    with transaction(registry) as tx:
        assert tx.audit_log() == []


def test_the_audit_log_is_read_in_pages(registry: Registry) -> None:
    for subject in ("1", "2", "3", "4", "5", "6", "7"):
        audit(registry, subject)
        roll_back(registry, lambda tx: tx.audit("ann", "fail", "x"))
    number = {row.subject: row.number for row in registry.read(lambda tx: tx.audit_log())}

    def page(limit: int, before: int | None = None) -> list[str]:
        return [row.subject for row in registry.read(lambda tx: tx.audit_log(limit, before))]

    assert page(3) == ["7", "6", "5"]
    assert page(3, before=number["5"]) == ["4", "3", "2"]
    assert page(3, before=number["1"] + 1) == ["1"]
    assert [page(3, before=before) for before in (number["1"], 0, -5)] == [[], [], []]
    assert page(100, before=number["7"] + 100) == ["7", "6", "5", "4", "3", "2", "1"]
    assert page(0) == []
    with pytest.raises(InvalidValue, match="limit"):
        page(-1)


# Transactions ------------------------------------------------------------------------------------------------


def test_now_is_the_clocks_and_stands_still_in_a_transaction(registry: Registry, clock: ManualClock) -> None:
    with transaction(registry) as tx:
        assert tx.now == 1_700_000_000.0
        clock.jump(-3.5)
        assert tx.now == 1_700_000_000.0
    with transaction(registry) as tx:
        assert tx.now == 1_699_999_996.5


def test_a_transaction_that_raises_leaves_nothing_behind(registry: Registry) -> None:
    kept = OwnershipRow("billing", Partition("orders", 0), owner="a")
    with transaction(registry) as tx:
        tx.put_group(GROUP)
        tx.put_member(MEMBER)
        tx.put_ownerships([OWNED, kept])
        tx.put_lease(LeaseRow("rebalancer", "a", 1, 1.0))
        tx.put_setting("policy", "x", "old")
        tx.audit("ann", "start", "x")

    def change_everything(tx: Transaction) -> None:
        tx.put_group(replace(GROUP, epoch=99))
        tx.put_group(GroupRow("new"))
        tx.put_member(replace(MEMBER, epoch=99))
        tx.put_member(replace(MEMBER, group="new"))
        tx.put_ownerships([replace(OWNED, epoch=99), replace(OWNED, partition=Partition("a", 0))])
        tx.delete_ownerships("billing", [kept.partition])
        tx.put_lease(LeaseRow("rebalancer", "b", 2, 2.0))
        tx.put_lease(LeaseRow("new", "b", 1, 2.0))
        tx.put_setting("policy", "x", "new")
        tx.delete_setting("policy", "x")
        tx.put_setting("policy", "y", "new")
        tx.audit("ann", "fail", "x")
        tx.delete_group("billing")

    roll_back(registry, change_everything)
    with transaction(registry) as tx:
        assert tx.groups() == [GROUP]
        assert tx.members("billing") == [MEMBER]
        assert tx.members("new") == []
        assert tx.ownerships("billing") == [kept, OWNED]
        assert tx.lease("rebalancer") == LeaseRow("rebalancer", "a", 1, 1.0)
        assert tx.lease("new") is None
        assert tx.settings("policy") == [SettingRow("policy", "x", "old", 1)]
        assert [row.action for row in tx.audit_log()] == ["start"]
        assert tx.put_setting("policy", "y", "new").version == 1


def test_transactions_of_two_threads_lose_no_update(registry: Registry) -> None:
    with transaction(registry) as tx:
        tx.put_group(GroupRow("billing"))
    start = threading.Barrier(2)

    def count() -> None:
        start.wait(TIMEOUT_SECONDS)
        for _ in range(200):
            with transaction(registry) as tx:
                row = tx.group("billing")
                assert row is not None
                tx.put_group(replace(row, epoch=row.epoch + 1))

    threads = [threading.Thread(target=count) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with transaction(registry) as tx:
        assert tx.group("billing") == GroupRow("billing", epoch=400)


def test_a_transaction_that_waits_too_long_for_another_raises_busy(opened: Open) -> None:
    registry = opened(0.02)
    with transaction(registry) as tx:
        tx.put_group(GROUP)
        with pytest.raises(Busy, match="registry") as busy:
            registry.run(lambda other: other.put_group(GroupRow("other")))
        assert busy.value.seconds == 0.02
    with transaction(registry) as tx:
        assert tx.groups() == [GROUP]


def test_run_returns_the_result_of_its_work(registry: Registry) -> None:
    assert registry.run(lambda tx: tx.put_setting("policy", "x", 1).version) == 1
    assert registry.read(lambda tx: tx.settings("policy")) == [SettingRow("policy", "x", 1, 1)]


def test_a_transaction_that_has_ended_raises_closed_and_changes_nothing(registry: Registry) -> None:
    with transaction(registry) as ended:
        ended.put_group(GROUP)
    with snapshot(registry) as ended_snapshot:
        pass
    for late in (
        lambda: ended.put_group(GroupRow("late")),
        lambda: ended.audit("ann", "late", "x"),
        lambda: ended.members("billing"),
        lambda: ended.commit_positions([PositionCommit("billing", "a", {OWNED.partition: (6, Position(3, 0))})]),
        lambda: ended.renew_sessions([Heartbeat("billing", "a", 3)]),
        ended_snapshot.groups,
    ):
        with pytest.raises(Closed, match="transaction"):
            late()
    assert registry.read(lambda tx: (tx.groups(), tx.audit_log())) == ([GROUP], [])


# Commits and heartbeats --------------------------------------------------------------------------------------


P0, P1, P2 = (Partition("orders", index) for index in range(3))


def put_owned(registry: Registry, *rows: OwnershipRow) -> None:
    registry.run(lambda tx: tx.put_ownerships(rows))


def committed(registry: Registry, group: str = "billing") -> dict[Partition, Position | None]:
    return {row.partition: row.committed for row in registry.read(lambda tx: tx.ownerships(group))}


def test_positions_are_committed_by_their_owner_only_and_never_back(registry: Registry, clock: ManualClock) -> None:
    at = Position(2, 10)
    rows = [
        OwnershipRow("billing", P0, "a", 6, "b", None, 1.0, handover_at=7.5),
        OwnershipRow("billing", P1, "a", 7, "a", at, 1.0),
        OwnershipRow("billing", P2, None, 8, None, at, 1.0),
        OwnershipRow("other", P1, "a", 7, "a", at, 1.0),
    ]
    put_owned(registry, *rows)
    tries: list[tuple[Partition, str, int, Position, bool]] = [
        (P0, "a", 6, Position(2, 0), True),
        (P1, "b", 7, Position(2, 11), False),
        (P1, "a", 6, Position(2, 11), False),
        (P1, "a", 8, Position(2, 11), False),
        (P1, "a", 2**80, Position(2, 11), False),
        (P1, "a", 7, Position(2, 9), False),
        (P1, "a", 7, Position(1, 99), False),
        (P2, "a", 8, Position(2, 11), False),
        (Partition("orders", 3), "a", 7, Position(2, 11), False),
    ]
    for partition, owner, epoch, position, stored in tries:
        commit = PositionCommit("billing", owner, {partition: (epoch, position)})
        with transaction(registry) as tx:
            assert tx.commit_positions([commit]) == [stored]
    assert registry.read(lambda tx: tx.ownerships("billing")) == [
        replace(rows[0], committed=Position(2, 0), progress_at=clock.now()),
        *rows[1:3],
    ]
    for position in (at, Position(2, 11), Position(3, 0)):
        commit = PositionCommit("billing", "a", {P1: (7, position)})
        with transaction(registry) as tx:
            assert tx.commit_positions([commit]) == [True]
        assert committed(registry)[P1] == position
    assert registry.read(lambda tx: tx.ownerships("other")) == rows[3:]


def test_of_many_commits_each_is_stored_as_a_whole_or_not_at_all_in_their_order(registry: Registry) -> None:
    put_owned(
        registry,
        OwnershipRow("billing", P0, "a", 6, "a"),
        OwnershipRow("billing", P1, "a", 7, "a"),
        OwnershipRow("billing", P2, "b", 8, "b", Position(1, 5)),
        OwnershipRow("other", P0, "a", 2, "a"),
    )

    def commit(group: str, owner: str, **positions: tuple[int, int]) -> PositionCommit:
        partitions = {"p0": P0, "p1": P1, "p2": P2}
        return PositionCommit(
            group, owner, {partitions[name]: (epoch, Position(1, at)) for name, (epoch, at) in positions.items()}
        )

    commits = [
        commit("billing", "a", p0=(6, 1)),
        commit("billing", "a", p0=(6, 2), p1=(7, 1)),
        commit("billing", "a", p0=(6, 3), p2=(8, 9)),  # p2 is not its own
        commit("billing", "a", p0=(6, 1)),  # behind
        commit("billing", "b", p2=(8, 6)),
        commit("other", "a", p0=(2, 4)),
        commit("billing", "a", p1=(7, 5), p0=(6, 1)),  # behind on p0
        commit("billing", "a", p0=(6, 4)),
    ]
    stored = registry.run(lambda tx: tx.commit_positions(commits))
    assert stored == [True, True, False, False, True, True, False, True]
    assert committed(registry) == {P0: Position(1, 4), P1: Position(1, 1), P2: Position(1, 6)}
    assert committed(registry, "other") == {P0: Position(1, 4)}
    assert registry.run(lambda tx: tx.commit_positions([])) == []


def test_a_transaction_sees_its_own_commits_and_rolls_them_back(registry: Registry) -> None:
    put_owned(registry, OwnershipRow("billing", P0, "a", 6, "a"), OwnershipRow("billing", P1, "a", 7, "a"))

    def work(tx: Transaction) -> None:
        both = {P0: (6, Position(1, 3)), P1: (7, Position(1, 4))}
        assert tx.commit_positions([PositionCommit("billing", "a", both)]) == [True]
        assert [row.committed for row in tx.ownerships("billing")] == [Position(1, 3), Position(1, 4)]

    roll_back(registry, work)
    assert committed(registry) == {P0: None, P1: None}


def test_heartbeats_renew_the_sessions_of_those_who_are_members(registry: Registry, clock: ManualClock) -> None:
    others = [replace(MEMBER, name="b", session_timeout=5.5), replace(MEMBER, group="other")]
    with transaction(registry) as tx:
        for row in (MEMBER, *others):
            tx.put_member(row)
    heartbeats = [
        Heartbeat("billing", "a", MEMBER.epoch),
        Heartbeat("billing", "b", MEMBER.epoch - 1),
        Heartbeat("billing", "nobody", MEMBER.epoch),
        Heartbeat("other", "a", MEMBER.epoch + 1),
        Heartbeat("other", "a", 2**80),
    ]
    assert registry.run(lambda tx: tx.renew_sessions(heartbeats)) == [True, False, False, False, False]
    renewed = replace(MEMBER, expires_at=clock.now() + MEMBER.session_timeout)
    assert registry.read(lambda tx: tx.members("billing")) == [renewed, others[0]]
    assert registry.read(lambda tx: tx.members("other")) == [others[1]]
    assert registry.run(lambda tx: tx.renew_sessions([])) == []


def test_a_heartbeat_notes_progress_where_it_was_made_and_where_the_member_could_not_know(
    registry: Registry, clock: ManualClock
) -> None:
    now = clock.now()
    last_heartbeat = now - 2.0
    member = replace(MEMBER, session_timeout=10.0, expires_at=last_heartbeat + 10.0)
    partitions = [Partition("orders", index) for index in range(6)]
    rows = [
        OwnershipRow("billing", partitions[0], "a", 6, "a", None, last_heartbeat),
        OwnershipRow("billing", partitions[1], "a", 6, "b", Position(1, 1), now - 9.0),
        OwnershipRow("billing", partitions[2], "a", 6, "a", None, last_heartbeat + 0.5),
        OwnershipRow("billing", partitions[3], "b", 6, "a", None, last_heartbeat + 0.5),
        OwnershipRow("billing", partitions[4], None, 6, None, None, last_heartbeat + 0.5),
    ]
    with transaction(registry) as tx:
        tx.put_member(member)
        tx.put_ownerships(rows)
    put_owned(registry, OwnershipRow("other", partitions[2], "a", 6, "a", None, last_heartbeat + 0.5))
    stale = Heartbeat("billing", "a", member.epoch - 1, [partitions[0], partitions[1]])
    assert registry.run(lambda tx: tx.renew_sessions([stale])) == [False]
    assert registry.read(lambda tx: tx.ownerships("billing")) == rows
    heartbeat = Heartbeat("billing", "a", member.epoch, [partitions[1], partitions[3], partitions[5]])
    assert registry.run(lambda tx: tx.renew_sessions([heartbeat])) == [True]
    after = [row.progress_at for row in registry.read(lambda tx: tx.ownerships("billing"))]
    assert after == [last_heartbeat, now, now, last_heartbeat + 0.5, last_heartbeat + 0.5]
    assert registry.read(lambda tx: tx.last_progress()) == {"billing": last_heartbeat, "other": last_heartbeat + 0.5}


def test_the_times_and_topics_of_all_groups_are_found_at_once(registry: Registry) -> None:
    assert registry.read(lambda tx: (tx.group_times(), tx.last_progress(), tx.subscriptions())) == ([], {}, {})
    with transaction(registry) as tx:
        for group, name, timeout, expiry in (("b", "m1", 10.0, 100.0), ("b", "m2", 2.0, 99.0), ("a", "m1", 5.5, 7.5)):
            tx.put_member(replace(MEMBER, group=group, name=name, session_timeout=timeout, expires_at=expiry))
        tx.put_member(replace(MEMBER, group="c", topics=(), session_timeout=1.0, expires_at=3.0))
        tx.put_member(
            replace(MEMBER, group="b", name="m2", topics=("ü", "bills"), session_timeout=2.0, expires_at=99.0)
        )
    assert registry.read(lambda tx: tx.group_times()) == [
        GroupTimes("a", 7.5, 2.0),
        GroupTimes("b", 99.0, 97.0),
        GroupTimes("c", 3.0, 2.0),
    ]
    assert registry.read(lambda tx: tx.subscriptions()) == {
        "a": {"orders", "bills"},
        "b": {"orders", "bills", "ü"},
        "c": set(),
    }
    put_owned(
        registry,
        OwnershipRow("a", P0, None, 1, None, None, 1.0),
        OwnershipRow("b", P0, "m1", 1, "m1", None, 5.0),
        OwnershipRow("b", P1, "m2", 1, "m1", None, 4.0),
        OwnershipRow("b", P2, None, 1, None, None, 1.0),
    )
    assert registry.read(lambda tx: tx.last_progress()) == {"b": 4.0}
    with transaction(registry) as tx:
        tx.delete_member("b", "m1")
        tx.delete_member("b", "m2")
    assert [times.group for times in registry.read(lambda tx: tx.group_times())] == ["a", "c"]
    assert registry.read(lambda tx: set(tx.subscriptions())) == {"a", "c"}


# Snapshots ---------------------------------------------------------------------------------------------------


WRITES = [
    "put_group",
    "delete_group",
    "put_member",
    "delete_member",
    "put_ownerships",
    "delete_ownerships",
    "commit_positions",
    "renew_sessions",
    "put_lease",
    "put_setting",
    "delete_setting",
    "audit",
    "touch",
]


def test_a_snapshot_has_no_methods_that_write(registry: Registry) -> None:
    public = {name for name in vars(Transaction) if not name.startswith("_")}
    assert public - {name for name in vars(Snapshot) if not name.startswith("_")} == set(WRITES)
    with snapshot(registry) as state:
        assert [name for name in WRITES if hasattr(state, name)] == []
    with transaction(registry) as tx:
        assert [name for name in WRITES if not hasattr(tx, name)] == []


def change_every_table(tx: Transaction) -> None:
    tx.put_group(GROUP)
    tx.put_member(MEMBER)
    tx.put_ownerships([OWNED])
    tx.put_lease(LeaseRow("rebalancer", "a", 1, 1.0))
    tx.put_setting("policy", "x", "new")
    tx.audit("ann", "start", "x")


def everything(state: Snapshot) -> list[object]:
    return [
        state.groups(),
        state.group("billing"),
        state.members("billing"),
        state.member("billing", "a"),
        state.ownerships("billing"),
        state.ownership("billing", OWNED.partition),
        state.ownerships_of("billing", "a"),
        state.subscriptions(),
        state.group_times(),
        state.last_progress(),
        state.lease("rebalancer"),
        state.settings("policy"),
        state.setting("policy", "x"),
        state.audit_log(),
    ]


def test_a_snapshot_of_another_thread_does_not_wait_for_an_open_transaction_and_sees_the_state_before_it(
    registry: Registry,
) -> None:
    before = registry.read(everything)
    seen: list[list[object]] = []
    with transaction(registry) as tx:
        change_every_table(tx)
        reader = threading.Thread(target=lambda: seen.append(registry.read(everything)))
        reader.start()
        reader.join(TIMEOUT_SECONDS)
        assert seen == [before]
        assert all(everything(tx))
    assert all(registry.read(everything))


def test_an_open_snapshot_blocks_no_writer_and_keeps_its_state(registry: Registry, clock: ManualClock) -> None:
    with snapshot(registry) as state:
        clock.jump(5)
        writer = threading.Thread(target=lambda: registry.run(change_every_table))
        writer.start()
        writer.join(TIMEOUT_SECONDS)
        assert not writer.is_alive()
        assert not any(everything(state))
        assert state.now == 1_700_000_000.0
    assert all(registry.read(everything))
    with snapshot(registry) as state:
        registry.run(lambda tx: tx.delete_group("billing"))
        registry.run(lambda tx: tx.delete_setting("policy", "x"))
        assert all(everything(state))


def test_a_snapshot_is_ordered_while_a_transaction_inserts(registry: Registry) -> None:
    names = [f"{number:03}" for number in range(100)]
    done = threading.Event()
    wrong: list[list[str]] = []

    def read() -> None:
        while not done.is_set():
            seen = registry.read(lambda state: [row.name for row in state.groups()])
            if seen != sorted(seen):
                wrong.append(seen)

    reader = threading.Thread(target=read)
    reader.start()
    for name in reversed(names):
        put_group(registry, name)
    done.set()
    reader.join(TIMEOUT_SECONDS)
    assert wrong == []
    assert registry.read(lambda state: [row.name for row in state.groups()]) == names


# Watches -----------------------------------------------------------------------------------------------------


def test_a_watch_is_called_after_the_commit_with_the_rows_in_place(registry: Registry) -> None:
    called = Callback()
    registry.watch("group/billing", called)
    for epoch in range(3):
        with transaction(registry) as tx:
            tx.put_group(GroupRow("billing", epoch))
            tx.touch("group/billing")
            tx.touch("group/billing")
            assert called.times == epoch
        called.wait()
    assert called.times == 3


def test_a_watch_is_not_called_for_a_rollback_or_another_name(registry: Registry) -> None:
    earlier, silent, other = Callback(), Callback(), Callback()
    end = registry.watch("group/billing", earlier)
    touch(registry, "group/billing")
    earlier.wait()
    end()
    registry.watch("group/billing", silent)
    registry.watch("group/shipping", other)
    roll_back(registry, lambda tx: tx.touch("group/billing"))
    touch(registry, "group/bill")
    touch(registry, "group/shipping")
    other.wait()
    assert (silent.times, other.times) == (0, 1)


def test_a_name_that_ends_with_a_slash_watches_every_name_below_it(registry: Registry) -> None:
    groups, sub_groups, policy = Callback(), Callback(), Callback()
    registry.watch("group/", groups)
    registry.watch("group/billing/", sub_groups)
    registry.watch("setting/policy", policy)
    touch(registry, "group/billing")
    groups.wait()
    touch(registry, "group/shipping")
    groups.wait()
    touch(registry, "group/billing/eu")
    groups.wait()
    sub_groups.wait()
    for name in ("groups", "group", "other/group/billing", "setting/policy"):
        touch(registry, name)
    policy.wait()
    assert (groups.times, sub_groups.times, policy.times) == (3, 1, 1)


def test_a_watch_of_many_names_is_called_once_for_a_transaction_that_touched_several_and_until_it_ends(
    registry: Registry,
) -> None:
    groups, one = Callback(), Callback()
    end = registry.watch("group/", groups)
    registry.watch("group/billing", one)

    def touch_several(tx: Transaction) -> None:
        for name in ("group/billing", "group/shipping"):
            tx.touch(name)

    registry.run(touch_several)
    groups.wait()
    one.wait()
    end()
    registry.run(touch_several)
    one.wait()
    assert (groups.times, one.times) == (1, 2)


def test_settings_touch_their_scope(registry: Registry) -> None:
    called, other = Callback(), Callback()
    registry.watch("setting/policy", called)
    registry.watch("setting/topic/orders", other)
    with transaction(registry) as tx:
        tx.put_setting("policy", "x", 1)
    called.wait()
    with transaction(registry) as tx:
        tx.delete_setting("policy", "x")
    called.wait()
    assert other.times == 0


def test_all_watches_of_a_name_are_called_until_they_end(registry: Registry) -> None:
    ended, going_on = Callback(), Callback()
    end = registry.watch("group/billing", ended)
    registry.watch("group/billing", going_on)
    touch(registry, "group/billing")
    ended.wait()
    going_on.wait()
    end()
    end()
    touch(registry, "group/billing")
    going_on.wait()
    assert (ended.times, going_on.times) == (1, 2)


def test_a_new_watch_is_not_called_for_earlier_touches(registry: Registry) -> None:
    ended, earlier, later = Callback(), Callback(), Callback()
    registry.watch("group/billing", ended)()
    registry.watch("group/billing", earlier)
    touch(registry, "group/billing")
    earlier.wait()
    end = registry.watch("group/billing", later)
    touch(registry, "group/billing")
    later.wait()
    end()
    assert (ended.times, later.times) == (0, 1)


def test_a_callback_that_raises_is_logged_and_the_others_are_called(
    registry: Registry, caplog: pytest.LogCaptureFixture
) -> None:
    called = Callback()

    def fail() -> None:
        raise Failure

    registry.watch("group/billing", fail)
    registry.watch("group/billing", called)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            touch(registry, "group/billing")
            called.wait()
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]


# Opening and closing -----------------------------------------------------------------------------------------


def test_after_close_everything_raises_closed_and_close_may_be_called_twice(registry: Registry) -> None:
    called = Callback()
    end = registry.watch("group/billing", called)
    begun, begun_snapshot = transaction(registry), snapshot(registry)
    registry.close()
    registry.close()
    with pytest.raises(Closed, match="registry"), transaction(registry):
        pass
    with pytest.raises(Closed), begun:
        pass
    with pytest.raises(Closed), begun_snapshot:
        pass
    with pytest.raises(Closed):
        registry.watch("group/billing", called)
    end()
    assert called.times == 0


def test_a_registry_closes_at_the_end_of_its_block(registry: Registry) -> None:
    with registry as same:
        assert same is registry
    with pytest.raises(Closed), transaction(registry):
        pass


def test_a_transaction_in_progress_outlives_close(registry: Registry) -> None:
    with transaction(registry) as tx:
        registry.close()
        tx.put_group(GROUP)
        assert tx.group("billing") == GROUP


def test_a_url_chooses_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: ManualClock) -> None:
    monkeypatch.chdir(tmp_path)
    with open_registry("memory://", clock=clock) as registry:
        assert isinstance(registry, MemoryRegistry)
    with open_registry("sqlite:///new/folder/registry.db", clock=clock) as registry, transaction(registry) as begun:
        assert isinstance(registry, SqlRegistry)
        assert begun.now == clock.now()
        begun.put_group(GROUP)
    absolute = tmp_path / "new" / "folder" / "registry.db"
    with open_registry(f"sqlite:///{absolute}") as registry, transaction(registry) as begun:
        assert begun.groups() == [GROUP]


@pytest.mark.parametrize(
    "url", ["", "registry.db", "sqlite://", "sqlite:///", "sqlite:///:memory:", "sqlite:///a\0b", "mysql://host/x"]
)
def test_a_url_that_names_no_registry_is_refused(url: str) -> None:
    with pytest.raises(InvalidValue, match=r"registry URL is .*expected sqlite:///"):
        open_registry(url)


def test_a_refused_url_does_not_show_its_password() -> None:
    with pytest.raises(InvalidValue) as refused:
        open_registry("oracle://ann:s3/cr@t@host/registry")
    assert "cr" not in str(refused.value)
    assert "oracle://***@host/registry" in str(refused.value)


def test_scopes_are_those_that_have_settings(registry: Registry) -> None:
    with transaction(registry) as tx:
        assert tx.scopes() == []
        for scope in ("topic/b", "topic/a", "group/x"):
            tx.put_setting(scope, "one", 1)
            tx.put_setting(scope, "two", 2)
        tx.delete_setting("group/x", "one")
        tx.delete_setting("group/x", "two")
    with snapshot(registry) as read:
        assert read.scopes() == ["topic/a", "topic/b"]
