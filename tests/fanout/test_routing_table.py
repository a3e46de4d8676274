"""What the routing table promises, case by case; `test_routing_model` has generated histories."""

import random

import pyarrow as pa
import pytest

from shardyard.fanout.routing import RoutingTable, partition, table
from shardyard.fanout.routing.counts import OnlineCounts
from shardyard.fanout.routing.names import UNKNOWN, NameIndex
from shardyard.model import InvalidValue, Position
from tests.fanout.routing_model import Members, Presence, Record, column, columns, expected, inbox_partition

P = 5


class Topics:
    """A table with fan-out partition 5, and the positions after what it was given."""

    def __init__(self, inboxes: int = 4) -> None:
        self.table = RoutingTable(inboxes)
        self.table.add(P)
        self.offset = 0

    def members(self, *records: Record) -> None:
        self.offset += len(records)
        self.table.apply_members(P, *columns(records), Position(1, self.offset))

    def presence(self, *records: Record) -> None:
        inboxes = self.table.inbox_partitions
        for record in records:
            self.offset += 1
            q = inbox_partition(record[0] or b"", inboxes)
            self.table.apply_presence(q, *columns([record]), Position(1, self.offset))

    def inboxes(self, channel: bytes) -> list[int]:
        flags = self.table.route(P, column([channel]))
        assert flags.shape == (1, self.table.inbox_partitions)
        found: list[int] = flags[0].nonzero()[0].tolist()
        return found


def test_online_members_are_routed_to() -> None:
    topics = Topics()
    topics.members((b"general", b"+ann"), (b"general", b"+bob"))
    topics.presence((b"ann", b"+phone"))
    assert topics.inboxes(b"general") == [inbox_partition(b"ann", 4)]
    assert topics.table.online(P, b"general") == 1


def test_an_unknown_channel_is_routed_nowhere() -> None:
    topics = Topics()
    topics.presence((b"ann", b"+phone"))
    assert topics.inboxes(b"nowhere") == []
    assert topics.table.online(P, b"nowhere") == 0
    assert topics.table.route(P, column([])).shape == (0, 4)


def test_joining_twice_counts_once() -> None:
    topics = Topics()
    topics.presence((b"ann", b"+phone"))
    topics.members((b"general", b"+ann"), (b"general", b"+ann"))
    assert topics.table.online(P, b"general") == 1
    topics.members((b"general", b"-ann"))
    assert topics.inboxes(b"general") == []


def test_leaving_without_having_joined_changes_nothing() -> None:
    topics = Topics()
    topics.presence((b"ann", b"+phone"))
    topics.members((b"general", b"-ann"), (b"general", b"-nobody"))
    topics.members((b"general", b"+ann"))
    assert topics.table.online(P, b"general") == 1


def test_a_user_is_online_until_the_last_device_is_gone() -> None:
    topics = Topics()
    topics.members((b"general", b"+ann"))
    devices = [b"phone", b"laptop", b"tablet", b"watch"]
    for device in [*devices, b"phone"]:
        topics.presence((b"ann", b"+" + device))
    for device in [b"never seen", b"laptop", b"phone", b"watch"]:
        topics.presence((b"ann", b"-" + device))
        assert topics.table.online(P, b"general") == 1
    topics.presence((b"ann", b"-tablet"))
    assert topics.table.online(P, b"general") == 0


def test_who_was_online_before_joining_is_counted() -> None:
    topics = Topics()
    topics.presence((b"ann", b"+phone"))
    topics.members((b"general", b"+ann"))
    assert topics.table.online(P, b"general") == 1


@pytest.mark.parametrize("repeats", [1, 100])
def test_malformed_records_are_skipped_and_counted(repeats: int) -> None:
    topics = Topics()
    bad: list[Record] = [
        (b"general", b""),
        (b"general", b"+"),
        (b"general", b"ann"),
        (b"general", b"=ann"),
        (b"general", b"+\xff\xfe"),
        (b"general", None),
        (None, b"+ann"),
        (b"", b"+ann"),
    ]
    topics.members(*bad * repeats, (b"general", b"+bob"), (None, b"="))
    assert topics.table.malformed == len(bad) * repeats + 1
    topics.table.apply_presence(0, *columns([*bad * repeats, (None, b"=")] * 2), Position(1, 10))
    assert topics.table.malformed == 3 * len(bad) * repeats + 1
    assert topics.table.size().memberships == 1


@pytest.mark.parametrize("others", [0, 200])
def test_a_clear_makes_the_users_of_its_partition_offline(others: int) -> None:
    topics = Topics(inboxes=2)
    users = [b"user-%d" % i for i in range(20 + others)]
    topics.members(*[(b"general", b"+" + user) for user in users])
    topics.presence(*[(user, b"+phone") for user in users])
    after: list[Record] = [(None, b"="), (users[0], b"+laptop")]
    q = inbox_partition(users[0], 2)
    topics.table.apply_presence(q, *columns(after), Position(1, 10**6))
    rest = [user for user in users if inbox_partition(user, 2) != q]
    assert topics.table.online(P, b"general") == len(rest) + 1


def test_records_that_were_applied_are_skipped() -> None:
    topics = Topics()
    topics.presence((b"ann", b"+phone"))
    log: list[Record] = [(b"general", b"+ann"), (b"general", b"-ann")]
    topics.table.apply_members(P, *columns(log), Position(2, 2))
    topics.table.apply_members(P, *columns(log[:1]), Position(2, 1))
    topics.table.apply_members(P, *columns(log[:1]), Position(1, 100))
    assert topics.table.online(P, b"general") == 0
    assert topics.table.members_offset(P) == Position(2, 2)


def test_a_recreated_topic_begins_empty() -> None:
    topics = Topics()
    topics.members((b"general", b"+ann"), (b"random", b"+ann"))
    topics.presence((b"ann", b"+phone"))
    topics.table.apply_members(P, *columns([(b"random", b"+ann")]), Position(2, 1))
    assert topics.inboxes(b"general") == []
    assert topics.table.online(P, b"random") == 1
    q = inbox_partition(b"ann", 4)
    topics.table.apply_presence(q, *columns([]), Position(2, 0))
    assert topics.inboxes(b"random") == []


def test_columns_may_be_in_chunks_and_of_other_types() -> None:
    table = RoutingTable(4)
    table.add(P)
    rows = 300
    keys = pa.chunked_array([column([b"general"] * rows), column([b"random"] * rows)])
    values = pa.chunked_array(
        [pa.array([f"+u{i}" for i in range(2 * rows)], pa.large_string()).cast(pa.large_binary())]
    )
    table.apply_members(P, keys, values, Position(1, 2 * rows))
    assert table.size().memberships == 2 * rows
    assert not table.route(P, pa.chunked_array([pa.array(["general", "random", None] * 50)])).any()


def test_only_partitions_that_are_held_can_be_used() -> None:
    table = RoutingTable(4)
    for call in (table.members_offset, table.drop, lambda p: table.online(p, b"general")):
        with pytest.raises(InvalidValue, match="add it first"):
            call(P)
    table.add(P)
    assert table.partitions == [P]
    with pytest.raises(InvalidValue, match="does not hold yet"):
        table.add(P)


def test_a_large_history_is_exact() -> None:
    """Large enough for changes by column, merging into flat arrays, and users counted together."""
    rng, inboxes = random.Random(1), 300
    table, members, presence = RoutingTable(inboxes), Members(), Presence()
    table.add(P)
    channels = [b"ch%d" % i for i in range(400)]
    users = [b"u%d" % i for i in range(3000)]
    joined = presence_offset = 0
    for size in (70_000, 500, 3, 60_000, 1, 20_000, 90):
        batch: list[Record] = [
            (channels[int(400 * rng.random() ** 2)], rng.choice((b"+", b"+", b"-")) + rng.choice(users))
            for _ in range(size)
        ]
        joined += size
        table.apply_members(P, *columns(batch), Position(1, joined))
        members.apply(batch)
        for _ in range(3):
            q, presence_offset = rng.randrange(3), presence_offset + 1
            mine = [user for user in users if inbox_partition(user, inboxes) % 3 == q]
            records: list[Record] = [(rng.choice(mine), rng.choice((b"+d", b"-d", b"+e", b"-e"))) for _ in range(size)]
            table.apply_presence(q, *columns(records), Position(1, presence_offset))
            presence.apply(q, inboxes, records)
            rows, counts = expected(members, presence, channels, inboxes)
            assert (table.route(P, column(channels)) == rows).all()
            assert [table.online(P, channel) for channel in channels] == counts


def test_counts_grow_beyond_their_bits() -> None:
    topics = Topics(inboxes=1)
    topics.members(*[(b"general", b"+user-%d" % i) for i in range(70_000)])
    assert topics.inboxes(b"general") == []
    devices: list[Record] = [(b"user-%d" % i, b"+phone") for i in range(70_000)]
    for end in (255, 256, 65_535, 65_536, 70_000):
        topics.table.apply_presence(0, *columns(devices[:end]), Position(1, end))
        assert topics.table.online(P, b"general") == end


def test_counts_of_many_cells_are_found_by_sorting() -> None:
    rng = random.Random(1)
    pairs = [(rng.randrange(1000), rng.randrange(100_000), rng.random() < 0.5) for _ in range(500)]
    channels, inboxes, online = (pa.array(values).to_numpy(zero_copy_only=False) for values in zip(*pairs, strict=True))
    counts = OnlineCounts(channels, inboxes, online, (1000, 100_000))
    for channel in range(1000):
        assert counts.total(channel) == sum(is_online for c, _, is_online in pairs if c == channel)


def test_names_are_found_one_by_one_and_together() -> None:
    names = column([b"name-%d" % i for i in range(1000)])
    index, ranks = NameIndex.build(names)
    asked = column([b"name-5", b"missing", None, b"name-999", b""])
    assert index.find_all(asked).tolist() == [ranks[5], UNKNOWN, UNKNOWN, ranks[999], UNKNOWN]
    assert [index.find(name) for name in (b"name-5", b"missing", b"")] == [ranks[5], UNKNOWN, UNKNOWN]


@pytest.mark.parametrize("many_users", [0, 1000])
@pytest.mark.parametrize("merge_rows", [0, 1, 1000])
def test_those_who_left_are_not_counted_out_again(
    monkeypatch: pytest.MonkeyPatch, many_users: int, merge_rows: int
) -> None:
    monkeypatch.setattr(table, "MANY_USERS", many_users)
    monkeypatch.setattr(partition, "MERGE_ROWS", merge_rows)
    topics = Topics(inboxes=1)
    topics.presence((b"ann", b"+phone"), (b"bob", b"+phone"))
    topics.members((b"general", b"+ann"), (b"general", b"+bob"))
    assert topics.table.online(P, b"general") == 2
    topics.members((b"general", b"-ann"))
    assert topics.table.online(P, b"general") == 1
    topics.presence((b"bob", b"-phone"), (b"ann", b"-phone"))
    assert topics.table.online(P, b"general") == 0
    assert topics.inboxes(b"general") == []
