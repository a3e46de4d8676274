"""routing: its snapshot gives the same routes as a dictionary, and as a table that was built from the topics."""

import random
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession

from shardyard.fanout.routing import Manifest, RoutingTable, Snapshot
from shardyard.fanout.routing.changes import parse_changes
from shardyard.model import Busy, Damaged, InvalidValue, NotOurs, Record, UnknownTopic
from shardyard.pipeline.atomic_files import exclusive_lock
from shardyard.pipeline.routing import packing
from shardyard.pipeline.routing import routing as routing_module
from shardyard.pipeline.routing.packing import unpack
from shardyard.pipeline.routing.pairs import Pairs, current_pairs
from shardyard.pipeline.routing.routing import routing
from shardyard.wire.channels import FANOUT_PARTITIONS, MEMBERS, PRESENCE
from tests.cli.invocation import Shell
from tests.pipeline.channels import INBOXES, Channels, routes_of
from tests.pipeline.logs import create, url


@pytest.fixture
def channels(tmp_path: Path) -> Iterator[Channels]:
    found = Channels(tmp_path)
    yield found
    found.close()


def table_of(folder: Path) -> RoutingTable:
    snapshot = Snapshot.open(folder)
    table = RoutingTable(INBOXES, snapshot)
    for p in range(FANOUT_PARTITIONS):
        table.add(p, snapshot.partition(p))
    return table


@pytest.mark.timeout(300)  # on a busy machine, Spark's start and its first jobs take long
def test_a_snapshot_has_the_routes_of_the_topics_at_its_positions_while_records_are_appended(
    spark: SparkSession, channels: Channels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    channels.fill(random.Random(14))
    channels.append(MEMBERS, 7, [Record.new(b"nothing", b"ch"), Record.new(b"+", b"ch"), Record.new(b"+user", None)])
    expected, from_topics = channels.routes(), routes_of(channels.table_of_topics(), channels.members)
    assert from_topics == expected
    memberships = sum(map(len, channels.members.values()))
    read_upto = routing_module.read_upto

    def append_meanwhile(*args: object) -> DataFrame:
        """More records, after the positions were taken and before anything is read."""
        channels.change_members([("ch_1", "late", True), ("ch_late", "late", True)])
        channels.change_presence([("late", "phone", True)])
        return read_upto(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(routing_module, "read_upto", append_meanwhile)
    done = routing(spark, channels.log, tmp_path / "routing")
    table = table_of(tmp_path / "routing")
    assert routes_of(table, expected) == expected
    assert (done.memberships, done.malformed) == (memberships, 3)
    assert done.channels == sum(1 for users in channels.members.values() if users - {"late"})
    assert done.memberships == table.size().memberships
    assert routes_of(table, ["ch_late"]) == {"ch_late": set()}
    later = channels.table_of_topics()
    for p in (0, 200):  # from its positions on, the snapshot becomes what the topics say now
        assert table.members_offset(p) is not None
    assert later.size().memberships == memberships + 2


def test_the_last_change_of_a_pair_counts_in_any_order_of_packed_records() -> None:
    keys, values = [b"a", b"a", b"b", b"a", b"b"], [b"+x", b"+y", b"+x", b"-x", b"-z"]
    table = pa.table(
        {"partition": pa.array([3] * 5, pa.int32()), "offset": range(10, 15), "key": keys, "value": values}
    )
    packed = pa.concat_arrays([packing._pack(table.take(rows))["records"] for rows in ([4, 0], [3, 1], [2])])
    records = unpack(packed)
    assert records["offset"].to_pylist() == [10, 11, 12, 13, 14]
    found = Pairs.from_bytes(pa.scalar(current_pairs(parse_changes(records["key"], records["value"])).to_bytes()))
    assert set(zip(found.keys.to_pylist(), found.names.to_pylist(), strict=True)) == {(b"a", b"y"), (b"b", b"x")}
    assert found.names.dictionary.to_pylist() == [b"y", b"x"]  # only those that are left


@pytest.mark.timeout(300)
def test_a_run_that_fails_leaves_the_snapshot_as_it_was_and_the_next_replaces_it_or_a_damaged_one(
    spark: SparkSession, channels: Channels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "routing"
    channels.change_members([("ch", "ann", True), ("ch", "bob", True)])
    channels.change_presence([("ann", "phone", True)])

    def fail(*_: object) -> None:
        raise InvalidValue("disk", "full", "space")

    with monkeypatch.context() as broken, pytest.raises(InvalidValue, match="disk"):
        broken.setattr(routing_module, "finish_snapshot", fail)
        routing(spark, channels.log, folder)
    with pytest.raises(NotOurs):
        Snapshot.open(folder)
    first = routing(spark, channels.log, folder)
    before = routes_of(table_of(folder), ["ch"])
    channels.change_presence([("bob", "phone", True)])
    with monkeypatch.context() as broken, pytest.raises(InvalidValue, match="disk"):
        broken.setattr(routing_module, "finish_snapshot", fail)
        routing(spark, channels.log, folder)
    assert Snapshot.open(folder).manifest.users.path.startswith(first.version)
    assert routes_of(table_of(folder), ["ch"]) == before
    manifest: Manifest = Snapshot.open(folder).manifest
    (folder / manifest.users.path).write_bytes(b"torn")
    with pytest.raises(Damaged):
        table_of(folder)
    routing(spark, channels.log, folder)
    assert routes_of(table_of(folder), ["ch"]) == channels.routes()


def test_folders_and_topics_that_will_not_do_are_refused(
    spark: SparkSession, channels: Channels, tmp_path: Path
) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "letter.txt").write_text("dear")
    with pytest.raises(NotOurs, match="other"):
        routing(spark, channels.log, tmp_path / "other")
    with exclusive_lock(tmp_path / "busy" / "lock", "it"), pytest.raises(Busy, match="another run"):
        routing(spark, channels.log, tmp_path / "busy")
    wrong = url(tmp_path / "wrong")
    create(wrong, PRESENCE, 2)
    with pytest.raises(UnknownTopic):
        routing(spark, wrong, tmp_path / "new")
    create(wrong, MEMBERS, 2)
    with pytest.raises(InvalidValue, match="256 partitions by jump of xxh64"):
        routing(spark, wrong, tmp_path / "new")


@pytest.mark.usefixtures("spark")
@pytest.mark.timeout(300)
def test_the_command_prints_what_the_snapshot_has(
    channels: Channels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    channels.change_members([("ch", "ann", True)])
    folder = tmp_path / "routing"
    shell = Shell(monkeypatch, capsys)
    done = shell.json("pipeline", "routing", "--log", channels.log, "--into", str(folder))
    assert (done["memberships"], done["channels"], done["users"], done["devices"]) == (1, 1, 1, 0)
    assert Snapshot.open(folder).manifest.inbox_partitions == INBOXES
