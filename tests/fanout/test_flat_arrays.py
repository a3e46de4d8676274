"""The compiled loops over the flat arrays of all partitions give the same as the partitions one by one."""

import random
from collections.abc import Sequence
from typing import Any

import pytest

from shardyard.fanout.routing import RoutingTable, flat, partition
from shardyard.model import Position
from tests.fanout.routing_model import Record, columns, inbox_partition

compiled = pytest.mark.skipif(not flat.IS_COMPILED, reason="numba is not installed")


class Pair:
    """Two tables that get the same records; the second one counts without the compiled loop."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, inboxes: int, partitions: Sequence[int]) -> None:
        self.tables = [RoutingTable(inboxes), RoutingTable(inboxes)]
        self.partitions = partitions
        self.offset = 0
        self._monkeypatch = monkeypatch
        for table in self.tables:
            for p in partitions:
                table.add(p)

    def members(self, p: int, records: Sequence[Record]) -> None:
        self.offset += len(records)
        for table in self.tables:
            table.apply_members(p, *columns(records), Position(1, self.offset))
            table.online(p, b"")  # applies them

    def presence(self, user: bytes, value: bytes) -> None:
        self.offset += 1
        q = inbox_partition(user, self.tables[0].inbox_partitions)
        self.tables[0].apply_presence(q, *columns([(user, value)]), Position(1, self.offset))
        with self._monkeypatch.context() as patch:
            patch.setattr(flat, "_count_user", None)
            self.tables[1].apply_presence(q, *columns([(user, value)]), Position(1, self.offset))

    def check(self) -> None:
        for p in self.partitions:
            first, second = (_counts(table, p) for table in self.tables)
            assert first == second
        groups: list[tuple[int, Any]] = [(p, [b"ch-%d" % i for i in range(-1, 40, p + 1)]) for p in self.partitions]
        flags = self.tables[0].route_all(groups)
        with self._monkeypatch.context() as patch:
            patch.setattr(flat, "_mark_inboxes", None)
            assert (self.tables[1].route_all(groups) == flags).all()
        assert flags.any() == any(self.tables[0].online(p, name) for p, names in groups for name in names)


def _counts(table: RoutingTable, p: int) -> Any:
    counts = table._partitions[p]._counts
    return counts.counts.tolist(), counts.inboxes.tolist(), counts.later


@compiled
@pytest.mark.parametrize("inboxes", [3, 300])
@pytest.mark.parametrize("merge_rows", [0, 40, 10_000])
def test_counts_are_those_of_the_partitions(monkeypatch: pytest.MonkeyPatch, inboxes: int, merge_rows: int) -> None:
    monkeypatch.setattr(partition, "MERGE_ROWS", merge_rows)
    rng = random.Random(merge_rows + inboxes)
    pair = Pair(monkeypatch, inboxes, (0, 3, 255))
    users = [b"user-%d" % i for i in range(600)]
    for _ in range(12):
        for p in pair.partitions:
            signs = rng.choices((b"+", b"-"), (3, 1), k=100)
            pair.members(p, [(b"ch-%d" % rng.randrange(30), sign + rng.choice(users)) for sign in signs])
        for user in rng.sample(users, 60):
            pair.presence(user, rng.choice((b"+", b"+", b"-")) + b"phone")
        pair.check()


@compiled
def test_counts_move_to_wider_arrays_one_user_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partition, "MERGE_ROWS", 0)
    pair = Pair(monkeypatch, 1, (1, 2))
    for p in pair.partitions:
        pair.members(p, [(b"general", b"+user-%d" % i) for i in range(300)])
    for sign in (b"+", b"-"):
        for i in range(300):
            pair.presence(b"user-%d" % i, sign + b"phone")
            online = i + 1 if sign == b"+" else 299 - i
            assert [pair.tables[0].online(p, b"general") for p in pair.partitions] == [online, online]
        pair.check()


@compiled
def test_a_user_may_have_more_channels_than_there_is_room_for_at_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partition, "MERGE_ROWS", 0)
    monkeypatch.setattr(flat, "_ROWS", 16)
    pair = Pair(monkeypatch, 2, (1, 2))
    for p in pair.partitions:
        pair.members(p, [(b"ch-%d" % i, b"+ann") for i in range(70_000)])
    for value in (b"+phone", b"-phone", b"+phone"):
        pair.presence(b"ann", value)
        pair.check()
    assert [pair.tables[0].online(p, b"ch-69999") for p in pair.partitions] == [1, 1]


@compiled
def test_a_partition_that_is_dropped_is_counted_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partition, "MERGE_ROWS", 0)
    pair = Pair(monkeypatch, 2, (1, 2))
    for p in pair.partitions:
        pair.members(p, [(b"general", b"+ann"), (b"general", b"+bob")])
    pair.presence(b"ann", b"+phone")
    for table in pair.tables:
        table.drop(1)
        table.add(1)
    pair.presence(b"bob", b"+phone")
    pair.check()
    assert [pair.tables[0].online(p, b"general") for p in pair.partitions] == [0, 2]
    pair.members(1, [(b"general", b"+ann")])
    pair.presence(b"ann", b"-phone")
    pair.check()
    assert [pair.tables[0].online(p, b"general") for p in pair.partitions] == [0, 1]
