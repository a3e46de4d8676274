"""What every registry keeps, whichever engine it is."""

import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from shardyard.model import Busy, Closed, InvalidValue, Partition, Position
from shardyard.registry import (
    AuditRow,
    GroupRow,
    LeaseRow,
    MemberRow,
    OwnershipRow,
    Registry,
    SettingRow,
    Transaction,
    open_registry,
)
from shardyard.registry.memory import MemoryRegistry
from shardyard.registry.sql import SqlRegistry
from shardyard.registry.sqlite import SqliteStore
from shardyard.runtime.clock import ManualClock

PATIENCE = 10.0
"""Seconds that a test waits for what must come soon."""

GROUP = GroupRow("billing", 7, 5, 4, 12, "even", max_active=3, release_after=2.5)
MEMBER = MemberRow("billing", "a", 3, 2, ("orders", "bills"), True, None, 30.0, 1_700_000_030.5)
OWNED = OwnershipRow("billing", Partition("orders", 1), "a", 6, "b", Position(2, 2**40), 1_700_000_000.25)

Open = Callable[[float], Registry]


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture(params=["memory", "sqlite"])
def opened(request: pytest.FixtureRequest, tmp_path: Path, clock: ManualClock) -> Iterator[Open]:
    registries: list[Registry] = []

    def opened(busy_wait: float) -> Registry:
        registry: Registry
        if request.param == "memory":
            registry = MemoryRegistry(clock, busy_wait=busy_wait)
        else:
            registry = SqlRegistry(SqliteStore(tmp_path / "registry.db", busy_wait=busy_wait), clock)
        registries.append(registry)
        return registry

    yield opened
    for registry in registries:
        registry.close()


@pytest.fixture
def registry(opened: Open) -> Registry:
    return opened(PATIENCE)


class Mishap(Exception):
    """What goes wrong in the middle of a transaction."""


class Bell:
    """A callback that can be waited for."""

    def __init__(self) -> None:
        self.rung = threading.Semaphore(0)
        self.times = 0

    def __call__(self) -> None:
        self.times += 1
        self.rung.release()

    def wait(self) -> None:
        assert self.rung.acquire(timeout=PATIENCE)


def touch(registry: Registry, name: str) -> None:
    with registry.transaction() as transaction:
        transaction.touch(name)


def undone(registry: Registry, work: Callable[[Transaction], None]) -> None:
    """A transaction that does `work`, and then fails."""

    def do_and_fail() -> None:
        with registry.transaction() as transaction:
            work(transaction)
            raise Mishap

    with pytest.raises(Mishap):
        do_and_fail()


# Rows --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", [GROUP, GroupRow("billing")])
def test_a_group_comes_back_as_it_was_put(registry: Registry, row: GroupRow) -> None:
    with registry.transaction() as transaction:
        transaction.put_group(row)
    with registry.transaction() as transaction:
        assert transaction.group("billing") == row
        assert transaction.group("other") is None


@pytest.mark.parametrize(
    "row",
    [
        MEMBER,
        replace(MEMBER, topics=(), static=False),
        replace(MEMBER, manual=()),
        replace(MEMBER, manual=(Partition("orders", 2), Partition("orders", 0))),
        replace(MEMBER, name="ünï/cødé 'quoted' \U0001f69a", topics=("ø",)),
    ],
)
def test_a_member_comes_back_as_it_was_put(registry: Registry, row: MemberRow) -> None:
    with registry.transaction() as transaction:
        transaction.put_member(row)
    with registry.transaction() as transaction:
        assert transaction.member("billing", row.name) == row
        assert transaction.member("billing", "nobody") is None
        assert transaction.member("other", row.name) is None


@pytest.mark.parametrize("row", [OWNED, OwnershipRow("billing", Partition("orders", 1))])
def test_an_ownership_comes_back_as_it_was_put(registry: Registry, row: OwnershipRow) -> None:
    with registry.transaction() as transaction:
        transaction.put_ownerships([row])
    with registry.transaction() as transaction:
        assert transaction.ownership("billing", Partition("orders", 1)) == row
        assert transaction.ownership("billing", Partition("orders", 2)) is None
        assert transaction.ownership("other", Partition("orders", 1)) is None


def test_a_lease_comes_back_as_it_was_put_and_is_replaced_by_the_next_holding(registry: Registry) -> None:
    first, second = LeaseRow("rebalancer", "a", 1, 12.5), LeaseRow("rebalancer", "b", 2, 22.5)
    with registry.transaction() as transaction:
        assert transaction.lease("rebalancer") is None
        transaction.put_lease(first)
        assert transaction.lease("rebalancer") == first
    with registry.transaction() as transaction:
        transaction.put_lease(second)
    with registry.transaction() as transaction:
        assert transaction.lease("rebalancer") == second


def test_put_replaces_the_row_of_the_same_identity(registry: Registry) -> None:
    with registry.transaction() as transaction:
        transaction.put_group(GROUP)
        transaction.put_member(MEMBER)
        transaction.put_ownerships([OWNED])
    changed = GroupRow("billing"), replace(MEMBER, epoch=9, manual=()), OwnershipRow("billing", OWNED.partition)
    with registry.transaction() as transaction:
        transaction.put_group(changed[0])
        transaction.put_member(changed[1])
        transaction.put_ownerships([changed[2]])
    with registry.transaction() as transaction:
        assert transaction.groups() == [changed[0]]
        assert transaction.members("billing") == [changed[1]]
        assert transaction.ownerships("billing") == [changed[2]]


def test_ownerships_old_and_new_of_several_groups_are_put_at_once_and_the_last_of_two_counts(
    registry: Registry,
) -> None:
    def rows(group: str, count: int, epoch: int) -> list[OwnershipRow]:
        return [OwnershipRow(group, Partition("orders", index), epoch=epoch) for index in range(count)]

    with registry.transaction() as transaction:
        transaction.put_ownerships([])
        transaction.put_ownerships(iter(rows("a", 500, 1)))
    with registry.transaction() as transaction:
        transaction.put_ownerships([*rows("a", 1000, 2), *rows("b", 10, 2), *rows("b", 5, 3)])
    with registry.transaction() as transaction:
        assert transaction.ownerships("a") == rows("a", 1000, 2)
        assert transaction.ownerships("b") == [*rows("b", 5, 3), *rows("b", 10, 2)[5:]]


def test_rows_come_in_order(registry: Registry) -> None:
    names = ["b", "B", "a", "ä", "a1", "Z", "\U0001f69a", "\uffff"]
    partitions = [Partition(topic, index) for topic in ("b", "a", "B") for index in (10, 9, 2, 0)]
    with registry.transaction() as transaction:
        for name in names:
            transaction.put_group(GroupRow(name))
            transaction.put_member(replace(MEMBER, name=name))
            transaction.put_setting("policy", name, 1)
        transaction.put_ownerships(OwnershipRow("billing", partition, owner="a") for partition in partitions)
        transaction.put_group(GroupRow("a", epoch=1))
    with registry.transaction() as transaction:
        assert [row.name for row in transaction.groups()] == sorted(names)
        assert [row.name for row in transaction.members("billing")] == sorted(names)
        assert [row.name for row in transaction.settings("policy")] == sorted(names)
        assert [row.partition for row in transaction.ownerships("billing")] == sorted(partitions)
        assert [row.partition for row in transaction.ownerships_of("billing", "a")] == sorted(partitions)


def test_a_members_ownerships_are_those_it_owns_and_those_it_is_to_own(registry: Registry) -> None:
    owned, coming, kept, other, nobodys = (
        OwnershipRow("billing", Partition("orders", index), owner=owner, target=target)
        for index, (owner, target) in enumerate([("a", "b"), ("b", "a"), ("a", "a"), ("b", "b"), (None, None)])
    )
    with registry.transaction() as transaction:
        transaction.put_ownerships([nobodys, other, kept, coming, owned, replace(kept, group="shipping")])
        assert transaction.ownerships_of("billing", "a") == [owned, coming, kept]
        assert transaction.ownerships_of("billing", "c") == []
        assert transaction.ownerships_of("nowhere", "a") == []


def test_a_deleted_row_is_gone_and_deleting_what_is_not_there_does_nothing(registry: Registry) -> None:
    rows = [OwnershipRow("billing", Partition("orders", index)) for index in range(3)]
    with registry.transaction() as transaction:
        transaction.put_member(MEMBER)
        transaction.put_member(replace(MEMBER, name="b"))
        transaction.put_ownerships(rows)
    with registry.transaction() as transaction:
        transaction.delete_member("billing", "a")
        transaction.delete_member("billing", "nobody")
        transaction.delete_ownerships("billing", iter([Partition("orders", 0), Partition("orders", 9)]))
        transaction.delete_ownerships("billing", [])
        transaction.delete_group("nothing")
    with registry.transaction() as transaction:
        assert [row.name for row in transaction.members("billing")] == ["b"]
        assert transaction.ownerships("billing") == rows[1:]


def test_a_group_is_deleted_with_its_members_and_ownerships_and_no_others(registry: Registry) -> None:
    other = replace(MEMBER, group="shipping"), replace(OWNED, group="shipping")
    with registry.transaction() as transaction:
        transaction.put_group(GROUP)
        transaction.put_group(replace(GROUP, name="shipping"))
        for member in (MEMBER, other[0]):
            transaction.put_member(member)
        transaction.put_ownerships([OWNED, other[1]])
    with registry.transaction() as transaction:
        transaction.delete_group("billing")
    with registry.transaction() as transaction:
        assert [row.name for row in transaction.groups()] == ["shipping"]
        assert (transaction.members("billing"), transaction.ownerships("billing")) == ([], [])
        assert (transaction.members("shipping"), transaction.ownerships("shipping")) == ([other[0]], [other[1]])


# Settings and audit ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [None, 0, True, 1.5, "", "ü", [], [1, [None]], {"a": {"b": [1]}}])
def test_a_setting_holds_what_json_holds(registry: Registry, value: object) -> None:
    with registry.transaction() as transaction:
        assert transaction.put_setting("topic/orders", "limit", value) == SettingRow("topic/orders", "limit", value, 1)
    with registry.transaction() as transaction:
        assert transaction.setting("topic/orders", "limit") == SettingRow("topic/orders", "limit", value, 1)
        assert transaction.setting("topic/orders", "other") is None
        assert transaction.setting("topic/bills", "limit") is None


@pytest.mark.parametrize("value", [b"bytes", {1, 2}, float("nan"), object()])
def test_what_json_cannot_hold_is_refused_and_changes_nothing(registry: Registry, value: object) -> None:
    with registry.transaction() as transaction:
        with pytest.raises(InvalidValue, match="JSON"):
            transaction.put_setting("policy", "x", value)
        with pytest.raises(InvalidValue, match="JSON"):
            transaction.audit("ann", "set", "x", value)
    with registry.transaction() as transaction:
        assert transaction.settings("policy") == []
        assert transaction.audit_log() == []


def test_a_value_that_is_changed_after_it_was_put_or_read_leaves_the_setting_alone(registry: Registry) -> None:
    value = [1]
    with registry.transaction() as transaction:
        returned = transaction.put_setting("policy", "x", value).value
        value.append(2)
        assert isinstance(returned, list)
        returned.append(3)
        assert transaction.setting("policy", "x") == SettingRow("policy", "x", [1], 1)


def test_a_settings_version_counts_its_changes_also_across_a_deletion(registry: Registry) -> None:
    with registry.transaction() as transaction:
        versions = [transaction.put_setting("policy", "x", value).version for value in ("a", "b", "b")]
        assert versions == [1, 2, 3]
    with registry.transaction() as transaction:
        transaction.delete_setting("policy", "x")
        transaction.delete_setting("policy", "never set")
        assert transaction.setting("policy", "x") is None
        assert transaction.settings("policy") == []
    with registry.transaction() as transaction:
        assert transaction.put_setting("policy", "x", "c") == SettingRow("policy", "x", "c", 4)
        assert transaction.put_setting("policy", "never set", "d").version == 1
        assert [row.name for row in transaction.settings("policy")] == ["never set", "x"]


def test_the_audit_log_counts_without_gaps_and_tells_the_newest_first(registry: Registry, clock: ManualClock) -> None:
    with registry.transaction() as transaction:
        transaction.audit("ann", "create", "topic/orders", {"partitions": 12})
        transaction.audit("bob", "delete", "topic/bills")
    clock.jump(5.5)
    undone(registry, lambda transaction: transaction.audit("eve", "fail", "topic/orders"))
    with registry.transaction() as transaction:
        transaction.audit("ann", "expand", "topic/orders", [12, 24])
    with registry.transaction() as transaction:
        assert transaction.audit_log() == [
            AuditRow(3, 1_700_000_005.5, "ann", "expand", "topic/orders", [12, 24]),
            AuditRow(2, 1_700_000_000.0, "bob", "delete", "topic/bills", None),
            AuditRow(1, 1_700_000_000.0, "ann", "create", "topic/orders", {"partitions": 12}),
        ]


def test_settings_are_left_to_be_audited_by_who_changes_them(registry: Registry) -> None:
    with registry.transaction() as transaction:
        transaction.put_setting("topic/orders", "publish token", "s3cret")
        transaction.delete_setting("topic/orders", "publish token")
    with registry.transaction() as transaction:
        assert transaction.audit_log() == []


def test_the_audit_log_is_read_in_pages(registry: Registry) -> None:
    with registry.transaction() as transaction:
        for number in range(1, 8):
            transaction.audit("ann", "count", str(number))

    def page(limit: int, before: int | None = None) -> list[int]:
        with registry.transaction() as transaction:
            return [row.number for row in transaction.audit_log(limit, before)]

    assert page(3) == [7, 6, 5]
    assert page(3, before=5) == [4, 3, 2]
    assert page(3, before=2) == [1]
    assert [page(3, before=before) for before in (1, 0, -5)] == [[], [], []]
    assert page(100, before=100) == [7, 6, 5, 4, 3, 2, 1]
    assert page(0) == []
    with pytest.raises(InvalidValue, match="limit"):
        page(-1)


# Transactions ------------------------------------------------------------------------------------------------


def test_now_is_the_clocks_and_stands_still_in_a_transaction(registry: Registry, clock: ManualClock) -> None:
    with registry.transaction() as transaction:
        assert transaction.now == 1_700_000_000.0
        clock.jump(-3.5)
        assert transaction.now == 1_700_000_000.0
    with registry.transaction() as transaction:
        assert transaction.now == 1_699_999_996.5


def test_a_transaction_that_raises_leaves_nothing_behind(registry: Registry) -> None:
    kept = OwnershipRow("billing", Partition("orders", 0), owner="a")
    with registry.transaction() as transaction:
        transaction.put_group(GROUP)
        transaction.put_member(MEMBER)
        transaction.put_ownerships([OWNED, kept])
        transaction.put_lease(LeaseRow("rebalancer", "a", 1, 1.0))
        transaction.put_setting("policy", "x", "old")
        transaction.audit("ann", "start", "x")

    def change_everything(transaction: Transaction) -> None:
        transaction.put_group(replace(GROUP, epoch=99))
        transaction.put_group(GroupRow("new"))
        transaction.put_member(replace(MEMBER, epoch=99))
        transaction.put_member(replace(MEMBER, group="new"))
        transaction.put_ownerships([replace(OWNED, epoch=99), replace(OWNED, partition=Partition("a", 0))])
        transaction.delete_ownerships("billing", [kept.partition])
        transaction.put_lease(LeaseRow("rebalancer", "b", 2, 2.0))
        transaction.put_lease(LeaseRow("new", "b", 1, 2.0))
        transaction.put_setting("policy", "x", "new")
        transaction.delete_setting("policy", "x")
        transaction.put_setting("policy", "y", "new")
        transaction.audit("ann", "fail", "x")
        transaction.delete_group("billing")

    undone(registry, change_everything)
    with registry.transaction() as transaction:
        assert transaction.groups() == [GROUP]
        assert transaction.members("billing") == [MEMBER]
        assert transaction.members("new") == []
        assert transaction.ownerships("billing") == [kept, OWNED]
        assert transaction.lease("rebalancer") == LeaseRow("rebalancer", "a", 1, 1.0)
        assert transaction.lease("new") is None
        assert transaction.settings("policy") == [SettingRow("policy", "x", "old", 1)]
        assert [row.action for row in transaction.audit_log()] == ["start"]
        assert transaction.put_setting("policy", "y", "new").version == 1


def test_transactions_of_two_threads_lose_no_update(registry: Registry) -> None:
    with registry.transaction() as transaction:
        transaction.put_group(GroupRow("billing"))
    start = threading.Barrier(2)

    def count() -> None:
        start.wait(PATIENCE)
        for _ in range(200):
            with registry.transaction() as transaction:
                row = transaction.group("billing")
                assert row is not None
                transaction.put_group(replace(row, epoch=row.epoch + 1))

    threads = [threading.Thread(target=count) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with registry.transaction() as transaction:
        assert transaction.group("billing") == GroupRow("billing", epoch=400)


def test_a_transaction_that_waits_too_long_for_another_is_told_busy(opened: Open) -> None:
    registry = opened(0.02)
    with registry.transaction() as transaction:
        transaction.put_group(GROUP)
        with pytest.raises(Busy, match="registry") as busy, registry.transaction():
            pass
        assert busy.value.seconds == 0.02
    with registry.transaction() as transaction:
        assert transaction.groups() == [GROUP]


# Watches -----------------------------------------------------------------------------------------------------


def test_a_watch_is_called_after_the_commit_with_the_rows_in_place(registry: Registry) -> None:
    bell = Bell()
    registry.watch("group/billing", bell)
    for epoch in range(3):
        with registry.transaction() as transaction:
            transaction.put_group(GroupRow("billing", epoch))
            transaction.touch("group/billing")
            transaction.touch("group/billing")
            assert bell.times == epoch
        bell.wait()
    assert bell.times == 3


def test_a_watch_is_not_called_for_a_rollback_or_another_name(registry: Registry) -> None:
    silent, other = Bell(), Bell()
    touch(registry, "group/billing")
    registry.watch("group/billing", silent)
    registry.watch("group/shipping", other)
    undone(registry, lambda transaction: transaction.touch("group/billing"))
    touch(registry, "group/bill")
    touch(registry, "group/shipping")
    other.wait()
    assert (silent.times, other.times) == (0, 1)


def test_settings_touch_their_scope(registry: Registry) -> None:
    bell, other = Bell(), Bell()
    registry.watch("setting/policy", bell)
    registry.watch("setting/topic/orders", other)
    with registry.transaction() as transaction:
        transaction.put_setting("policy", "x", 1)
    bell.wait()
    with registry.transaction() as transaction:
        transaction.delete_setting("policy", "x")
    bell.wait()
    assert other.times == 0


def test_all_who_watch_a_name_are_called_until_their_own_watch_ends(registry: Registry) -> None:
    ended, going_on = Bell(), Bell()
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


def test_a_watch_that_is_begun_anew_hears_of_nothing_that_came_before(registry: Registry) -> None:
    first, second = Bell(), Bell()
    registry.watch("group/billing", first)()
    touch(registry, "group/billing")
    end = registry.watch("group/billing", second)
    touch(registry, "group/billing")
    second.wait()
    end()
    assert (first.times, second.times) == (0, 1)


def test_a_callback_that_fails_is_logged_and_harms_no_other(
    registry: Registry, caplog: pytest.LogCaptureFixture
) -> None:
    bell = Bell()

    def fail() -> None:
        raise Mishap

    registry.watch("group/billing", fail)
    registry.watch("group/billing", bell)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            touch(registry, "group/billing")
            bell.wait()
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]


# Opening and closing -----------------------------------------------------------------------------------------


def test_after_close_everything_raises_closed_and_close_may_be_called_twice(registry: Registry) -> None:
    bell = Bell()
    end = registry.watch("group/billing", bell)
    begun = registry.transaction()
    registry.close()
    registry.close()
    with pytest.raises(Closed, match="registry"), registry.transaction():
        pass
    with pytest.raises(Closed), begun:
        pass
    with pytest.raises(Closed):
        registry.watch("group/billing", bell)
    end()
    assert bell.times == 0


def test_a_registry_closes_at_the_end_of_its_block(registry: Registry) -> None:
    with registry as same:
        assert same is registry
    with pytest.raises(Closed), registry.transaction():
        pass


def test_a_transaction_under_way_outlives_close(registry: Registry) -> None:
    with registry.transaction() as transaction:
        registry.close()
        transaction.put_group(GROUP)
        assert transaction.group("billing") == GROUP


def test_a_url_chooses_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: ManualClock) -> None:
    monkeypatch.chdir(tmp_path)
    with open_registry("memory://", clock=clock) as registry:
        assert isinstance(registry, MemoryRegistry)
    with open_registry("sqlite:///new/folder/registry.db", clock=clock) as registry, registry.transaction() as begun:
        assert isinstance(registry, SqlRegistry)
        assert begun.now == clock.now()
        begun.put_group(GROUP)
    absolute = tmp_path / "new" / "folder" / "registry.db"
    with open_registry(f"sqlite:///{absolute}") as registry, registry.transaction() as begun:
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
