"""fanout: announcements reach every inbox partition that they have to reach, once."""

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession

from shardyard.fanout.routing import write_snapshot
from shardyard.model import InvalidCall, InvalidValue, NotOurs, Partition, Position, TooLarge
from shardyard.pipeline.blocking import blocking
from shardyard.pipeline.fanout import fanout as fanout_module
from shardyard.pipeline.fanout.audience import all_names, check_names, names_in_file
from shardyard.pipeline.fanout.fanout import FanoutRun, fanout
from shardyard.pipeline.fanout.routes import Routes, RoutingSource
from shardyard.pipeline.fanout.runs import IDS_PER_MS, Announcement, default_run, id_of
from shardyard.pipeline.routing.routing import current_ends, routing
from shardyard.placement import partitioner_named
from shardyard.registry import open_registry
from shardyard.wire.channels import (
    BULK,
    DELIVERED,
    EVENTS,
    FANOUT_PARTITIONS,
    HASH,
    MEMBERS,
    PARTITIONER,
    PRESENCE,
    decode_event,
    parse_source,
)
from shardyard.wire.inbox import POST_KEY, TOPIC, decode_entry
from tests.cli.invocation import Shell
from tests.pipeline.channels import INBOXES, Channels
from tests.pipeline.logs import contents


@pytest.fixture
def channels(tmp_path: Path) -> Iterator[Channels]:
    found = Channels(tmp_path)
    yield found
    found.close()


@pytest.fixture
def registry(tmp_path: Path) -> str:
    url = f"sqlite:///{tmp_path / 'registry.db'}"
    open_registry(url).close()
    return url


def posts(channels: Channels) -> list[tuple[str, int]]:
    """Channel and inbox partition of each post, in order."""
    return sorted(
        (record.key[1:].decode(), q)
        for q, records in enumerate(contents(channels.log, TOPIC))
        for record in records
        if record.key is not None and record.key.startswith(POST_KEY)
    )


def expected_posts(channels: Channels, names: set[str]) -> list[tuple[str, int]]:
    return sorted((channel, q) for channel, found in channels.routes().items() if channel in names for q in found)


@pytest.mark.timeout(400)  # on a busy machine, Spark's start and its first jobs take long
def test_channels_get_one_post_in_each_inbox_partition_with_online_members_even_after_a_failure_and_a_second_run(
    spark: SparkSession, channels: Channels, registry: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    people = [f"user-{n}" for n in range(12)]
    channels.change_members([("ch_a", user, True) for user in people] + [("ä b", "user-1", True), ("gone", "x", True)])
    channels.change_presence([(user, "phone", True) for user in people[:6]])
    snapshot = tmp_path / "routing"
    routing(spark, channels.log, snapshot)
    channels.change_members([("ä b", "user-7", True)])  # since the snapshot
    channels.change_presence([("user-0", "phone", False), ("user-7", "web", True)])
    (tmp_path / "channels.txt").write_text("ch_a\nä b\n\ngone\nunknown\nch_a\n")
    names = names_in_file(spark, tmp_path / "channels.txt", "channels")
    announcement = Announcement("news", "Hello", "channels")
    write = fanout_module._Fanout._write

    def fail_at_inbox(self: object, records: DataFrame, topic: str, *args: object, **options: str) -> int:
        if topic == TOPIC:
            raise InvalidCall("killed")
        return write(self, records, topic, *args, **options)  # type: ignore[arg-type]

    with monkeypatch.context() as broken, pytest.raises(InvalidCall, match="killed"):
        broken.setattr(fanout_module._Fanout, "_write", fail_at_inbox)
        fanout(spark, channels.log, registry, announcement, names, routing=snapshot)
    assert posts(channels) == []
    found = [fanout(spark, channels.log, registry, announcement, names, routing=snapshot) for _ in range(2)]
    wanted = expected_posts(channels, {"ch_a", "ä b", "gone", "unknown"})
    assert posts(channels) == wanted
    assert found[0] == FanoutRun("news", "channels", recipients=4, records=len(wanted), repeated=False)
    assert found[1] == FanoutRun("news", "channels", recipients=4, records=len(wanted), repeated=True)
    events = {
        (k, offset): record
        for k, records in enumerate(contents(channels.log, EVENTS))
        for offset, record in enumerate(records)
    }
    assert sorted(str(record.key, "utf-8") for record in events.values() if record.key) == [
        "ch_a", "gone", "unknown", "ä b"
    ]  # fmt: skip
    for records in contents(channels.log, TOPIC):
        for record in records:
            source = parse_source(record.id)
            event = events[source.index, source.offset]
            assert source.topic == BULK
            assert record.key == POST_KEY + (event.key or b"")
            assert record.value == event.value
            assert dict(event.headers) == {DELIVERED: b"news"}
            assert (decode_event(record.value).sender, decode_event(record.value).text) == ("system", "Hello")
    with pytest.raises(InvalidValue, match="as the run 'news' was started with"):
        fanout(spark, channels.log, registry, Announcement("news", "Bye", "channels"), names, routing=snapshot)
    assert sorted(row["name"] for row in all_names(spark, snapshot, "channels").collect()) == ["ch_a", "gone", "ä b"]


@pytest.mark.usefixtures("spark")
@pytest.mark.timeout(400)
def test_users_get_a_message_each_once_with_ids_of_their_own(
    channels: Channels,
    registry: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(fanout_module, "TASKS", 2)
    people = [f"user-{n}" for n in range(50)] + ["日本"]
    (tmp_path / "users.txt").write_text("\n".join(people))
    shell = Shell(monkeypatch, capsys)
    options = ("--users", str(tmp_path / "users.txt"), "--text", "Hi")
    command = ("pipeline", "fanout", "--log", channels.log, "--registry", registry, *options)
    assert (shell.json(*command)["records"], shell.json(*command)["repeated"]) == (51, True)
    found = [decode_entry(record.value) for records in contents(channels.log, TOPIC) for record in records]
    assert sorted(entry.recipient for entry in found) == sorted(people)
    assert {(entry.sender, entry.content, entry.device) for entry in found} == {("system", "Hi", "")}
    assert len({entry.id for entry in found}) == 51
    placed = channels.partition_of("日本")
    assert "日本".encode() in [record.key for record in contents(channels.log, TOPIC)[placed]]


def test_who_is_online_is_known_if_presence_was_compacted_since_the_run_began(
    channels: Channels, tmp_path: Path
) -> None:
    empty = pa.array([], pa.binary())
    zeros = [Position(1, 0)]
    write_snapshot(
        tmp_path / "routing",
        *[empty] * 4,
        members_positions=zeros * FANOUT_PARTITIONS,
        presence_positions=zeros * INBOXES,
    )
    channels.change_members([("tea", "ann", True)])
    channels.change_presence([("ann", "phone", True)])
    with blocking(channels.log) as log:
        ends = log.wait(current_ends(log.log))
        inbox = log.wait(log.log.topic(TOPIC))
        source = RoutingSource(
            channels.log, str(tmp_path / "routing"), tuple(ends[MEMBERS]), tuple(ends[PRESENCE]), inbox
        )
        q = channels.partition_of("ann")
        channels.clear_presence(q)
        channels.change_presence([("ann", "phone", True)])
        log.wait(log.log.trim(Partition(PRESENCE, q), ends[PRESENCE][q].offset))
        place = partitioner_named(PARTITIONER, FANOUT_PARTITIONS, HASH).place(b"tea")
        event = pa.record_batch({"partition": [0], "epoch": [1], "offset": [0], "key": [b"tea"]})
        assert Routes(source, log).posts(place, event)["partition"].to_pylist() == [q]


def test_ids_ascend_within_one_generator() -> None:
    first = (1000 << 22) | (5 << 14) | (IDS_PER_MS - 2)
    made = [id_of(first, number) for number in range(IDS_PER_MS + 3)]
    assert made[:3] == [first, first + 1, (1001 << 22) | (5 << 14)]
    assert len(set(made)) == len(made) == IDS_PER_MS + 3
    assert made == sorted(made)
    assert {(id_ >> 14) & 255 for id_ in made} == {5}


def test_announcements_that_no_client_could_get_are_refused() -> None:
    for text, error in (("", InvalidValue), ("\0", InvalidValue), ("x" * 20_000, TooLarge)):
        with pytest.raises(error):
            Announcement("run", text, "users")
    with pytest.raises(TooLarge):
        Announcement("run", "text", "users", sender="x" * 129)
    assert default_run("a", "b", "users", "c") != default_run("a", "b", "channels", "c")


@pytest.mark.timeout(300)
def test_wrong_names_and_folders_are_refused_before_anything_is_stored(
    spark: SparkSession, channels: Channels, registry: str, tmp_path: Path
) -> None:
    names = spark.createDataFrame([("x" * 129,)], "name string")
    with pytest.raises(InvalidValue, match="1 to 128 characters"):
        check_names(names, "users")
    with pytest.raises(InvalidValue, match="a file that exists"):
        names_in_file(spark, tmp_path / "none.txt", "users")
    announcement = Announcement("run", "text", "channels")
    with pytest.raises(NotOurs):
        fanout(spark, channels.log, registry, announcement, names, routing=tmp_path / "none")
    with pytest.raises(InvalidValue, match="routing snapshot"):
        fanout(spark, channels.log, registry, announcement, names)
    with pytest.raises(InvalidValue, match="registry"):
        fanout(spark, channels.log, "sqlite:///none.db", announcement, names)
    assert not any(contents(channels.log, EVENTS))
