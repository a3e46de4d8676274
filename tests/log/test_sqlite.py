"""What is the embedded engine's own: files, other processes, damage, disks."""

import asyncio
import contextlib
import fcntl
import functools
import json
import os
import random
import shutil
import sqlite3
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from shardyard.log import Log, database, open_log, rules
from shardyard.log.memory import MemoryLog
from shardyard.log.requests import AppendRequest, ReadRequest
from shardyard.log.sqlite import SqliteLog, files, maintenance, store, writer
from shardyard.log.sqlite.files import connect
from shardyard.log.sqlite.reading import RECENT_BATCHES
from shardyard.log.stored_batches import FEW_RECORDS, encode
from shardyard.model import (
    Appended,
    Busy,
    Damaged,
    Fence,
    Fenced,
    InvalidValue,
    Moved,
    NoRoom,
    NotOurs,
    NotWritable,
    Outdated,
    Partition,
    PartitionDraining,
    PartitionOutOfRange,
    Record,
    Retention,
    Sealed,
    ShardyardError,
    Span,
    Stamp,
    Topic,
    TopicKind,
    UnknownTopic,
    WrongSchemaVersion,
)
from shardyard.runtime.clock import ManualClock, now_ms
from tests.log import worker
from tests.log.samples import HOLDER, T0, T1, TIMEOUT_SECONDS, arrow, awaited, contents, move, state

Mount = Callable[[str], Path]
quiet = functools.partial(SqliteLog, durability="process", maintain_every=None)


def records(*numbers: int, size: int = 5) -> list[Record]:
    return [Record(f"r{i}", None, b"%0*d" % (size, i), timestamp=1 + i) for i in numbers]


def sql(folder: Path, statement: str, *parameters: Any) -> list[Any]:
    """Look into the file, or tamper with it."""
    with closing(sqlite3.connect(folder / "log.db", isolation_level=None)) as db:
        return db.execute(statement, parameters).fetchall()


def rows(folder: Path) -> int:
    return int(sql(folder, "SELECT count(*) FROM batches")[0][0])


def join_all(merger: maintenance.Merger) -> None:
    """Join what it has planned to merge."""
    for _ in merger.join():
        pass
    assert merger._next is not None
    assert merger._next.merged is not None


async def checkpoint(folder: Path) -> None:
    async with asyncio.timeout(TIMEOUT_SECONDS):
        while sql(folder, "PRAGMA wal_checkpoint(TRUNCATE)")[0][0]:  # noqa: ASYNC110 the log may be at one itself
            await asyncio.sleep(0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "log"


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Mount]:
    """Mounts a small disk of its own, or remounts it. Skips the test where that is not allowed."""
    disk = tmp_path / "disk"
    mounted: list[Path] = []

    def mount(options: str) -> Path:
        again = "remount," if mounted else ""
        disk.mkdir(exist_ok=True)
        command = ["mount", "-t", "tmpfs", "-o", again + options, "tmpfs", str(disk)]
        try:
            subprocess.run(command, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"mounting a tmpfs takes root and a kernel that allows it ({error})")
        mounted.append(disk)
        return disk

    yield mount
    if mounted:
        subprocess.run(["umount", str(disk)], check=True)


class Worker:
    """`worker.py` in a process of its own."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def read(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the other process has failed"
        return json.loads(line)

    def go(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()


@contextmanager
def working(*words: object) -> Iterator[Worker]:
    command = [sys.executable, str(Path(worker.__file__)), *map(str, words)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            other = Worker(process)
            assert other.read() == "ready"
            yield other
            assert process.wait(TIMEOUT_SECONDS) == 0
        finally:
            process.kill()


# Opening -----------------------------------------------------------------------------------------------------------


@awaited
async def test_a_log_that_is_opened_again_has_everything(folder: Path) -> None:
    async with quiet(folder) as log:
        topic = await log.create_topic("t", 2, kind=TopicKind.RETRY, retention=Retention(10**12, 10**12))
        gone = await log.create_topic("gone", 1)
        await log.delete_topic("gone")
        later = await log.create_topic("u", 1, partitioner="jump")
        for name in ("v", "w"):
            await log.create_topic(name, 1, partitioner="round_robin")
        sealed = [await move(log, "v", "u"), await log.seal_topic("w", HOLDER)]
        await log.append(T0, records(0, 1, 2), stamp=Stamp("p", 1), fence=Fence("g", 3))
        await log.trim(T0, 1)
    async with quiet(folder) as log:
        assert await log.topics() == [topic, later, *sealed]
        assert await log.span(T0) == Span(topic.epoch, 1, 3)
        assert await contents(log, T0) == records(1, 2)
        assert (await log.append(T0, records(0, 1, 2), stamp=Stamp("p", 1))).duplicate
        with pytest.raises(Fenced):
            await log.append(T0, records(3), fence=Fence("g", 2))
        assert (await log.create_topic("gone", 1)).epoch > gone.epoch


@awaited
async def test_a_url_opens_a_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for url, path in (("sqlite:///data/log", "data/log"), (f"sqlite:///{tmp_path}/absolute", "absolute")):
        async with open_log(url) as log:
            assert isinstance(log, SqliteLog)
            await log.create_topic("t", 1)
        assert (tmp_path / path / "log.db").is_file()
    async with open_log("memory://") as log:
        assert isinstance(log, MemoryLog)


@pytest.mark.parametrize("url", ["", "sqlite://", "sqlite:///", "data/log", "kafka:/x", "memory://x", "SQLITE:///x"])
def test_a_url_that_names_no_engine_is_refused(url: str) -> None:
    with pytest.raises(InvalidValue, match=r"log URL is .*: expected sqlite:///a/path"):
        open_log(url)


@pytest.mark.parametrize(("durability", "synchronous"), [("power", 2), ("process", 1)])
@awaited
async def test_only_the_power_setting_waits_for_the_disk(folder: Path, durability: Any, synchronous: int) -> None:
    async with quiet(folder):
        with closing(connect(folder / "log.db", durability)) as db:
            assert db.execute("PRAGMA synchronous").fetchone() == (synchronous,)


def test_a_durability_that_does_not_exist_is_refused(folder: Path) -> None:
    with pytest.raises(InvalidValue, match="durability is 'none': expected 'power' or 'process'"):
        SqliteLog(folder, durability="none")  # type: ignore[arg-type]
    assert not folder.exists()


def test_a_log_whose_creation_was_cut_off_is_created(folder: Path) -> None:
    folder.mkdir()
    with closing(sqlite3.connect(folder / "log.db", isolation_level=None)) as db:
        for begun in ("page_size = 16384", "auto_vacuum = INCREMENTAL", "journal_mode = WAL"):
            db.execute(f"PRAGMA {begun}").fetchall()
    assert (folder / "log.db").stat().st_size

    async def use() -> None:
        async with quiet(folder) as log:
            await log.create_topic("t", 1)
            await log.append(T0, records(0))
            assert await contents(log, T0) == records(0)

    asyncio.run(use())
    assert [sql(folder, f"PRAGMA {kept}") for kept in ("page_size", "auto_vacuum")] == [[(16384,)], [(2,)]]


def test_a_file_that_is_no_database_is_not_ours_and_stays_as_it_is(folder: Path) -> None:
    folder.mkdir()
    (folder / "log.db").write_bytes(b"My diary, kept since 1987. Not a database, and dear to me. " * 100)
    before = (folder / "log.db").read_bytes()
    with pytest.raises(NotOurs) as refused:
        quiet(folder)
    assert refused.value.path == str(folder / "log.db")
    assert (folder / "log.db").read_bytes() == before


def test_a_database_of_someone_else_is_not_ours_and_stays_as_it_is(folder: Path) -> None:
    folder.mkdir()
    sql(folder, "CREATE TABLE topics (mine)")
    before = (folder / "log.db").read_bytes()
    with pytest.raises(NotOurs):
        quiet(folder)
    assert (folder / "log.db").read_bytes() == before


def test_a_folder_in_the_place_of_the_file_or_a_file_in_that_of_the_folder_is_refused(folder: Path) -> None:
    (folder / "log.db").mkdir(parents=True)
    with pytest.raises(NotWritable):
        quiet(folder)
    (folder / "file").write_text("")
    with pytest.raises(NotOurs, match="is not a folder, as a log needs"):
        quiet(folder / "file")


@awaited
async def test_another_schema_version_is_refused_with_both_numbers(folder: Path) -> None:
    await quiet(folder).close()
    sql(folder, "PRAGMA user_version = 99")
    with pytest.raises(WrongSchemaVersion) as refused:
        quiet(folder)
    assert (refused.value.path, refused.value.found, refused.value.expected) == (str(folder / "log.db"), 99, 5)


VERSION_1 = """
CREATE TABLE epochs (last INTEGER NOT NULL);
INSERT INTO epochs VALUES (0);
CREATE TABLE topics (
    name TEXT PRIMARY KEY, partitions INTEGER NOT NULL, kind TEXT NOT NULL, age_ms INTEGER,
    bytes_per_partition INTEGER, epoch INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE partitions (
    id INTEGER PRIMARY KEY AUTOINCREMENT, topic TEXT, number INTEGER NOT NULL, first INTEGER NOT NULL DEFAULT 0,
    "end" INTEGER NOT NULL DEFAULT 0, merged INTEGER NOT NULL DEFAULT 0, UNIQUE (topic, number)
);
CREATE TABLE batches (
    id INTEGER PRIMARY KEY, partition INTEGER NOT NULL, first INTEGER NOT NULL, count INTEGER NOT NULL,
    latest INTEGER NOT NULL, bytes INTEGER NOT NULL, checksum INTEGER NOT NULL, data BLOB NOT NULL
);
CREATE INDEX batches_by_offset ON batches (partition, first, count, latest, bytes);
CREATE TABLE stamps (
    partition INTEGER NOT NULL, producer TEXT NOT NULL, sequence INTEGER NOT NULL, first INTEGER NOT NULL,
    count INTEGER NOT NULL, at INTEGER NOT NULL, PRIMARY KEY (partition, producer, sequence)
) WITHOUT ROWID;
CREATE TABLE fences (name TEXT PRIMARY KEY, epoch INTEGER NOT NULL) WITHOUT ROWID;
INSERT INTO topics VALUES ('t', 2, 'retry', 7, NULL, 5);
INSERT INTO partitions (topic, number) VALUES ('t', 0), ('t', 1);
"""
VERSION_2 = f"""
{VERSION_1}
ALTER TABLE topics ADD COLUMN partitioner TEXT NOT NULL DEFAULT 'modulus';
ALTER TABLE topics ADD COLUMN hash TEXT DEFAULT 'fnv1a32';
ALTER TABLE topics ADD COLUMN sealed INTEGER NOT NULL DEFAULT 0;
ALTER TABLE topics ADD COLUMN successor TEXT;
INSERT INTO topics VALUES ('u', 1, 'normal', NULL, NULL, 6, 'jump', 'xxh64', 1, 't');
"""
VERSION_3 = f"""
{VERSION_2}
ALTER TABLE topics ADD COLUMN open_partitions INTEGER;
INSERT INTO topics VALUES ('v', 3, 'normal', NULL, NULL, 7, 'modulus', 'fnv1a32', 1, NULL, 2);
INSERT INTO partitions (topic, number) VALUES ('v', 0), ('v', 1), ('v', 2);
UPDATE epochs SET last = 7;
"""


VERSION_4 = f"""
{VERSION_3}
ALTER TABLE topics ADD COLUMN generation INTEGER NOT NULL DEFAULT 0;
ALTER TABLE topics ADD COLUMN sealed_by TEXT;
ALTER TABLE topics ADD COLUMN sealed_since INTEGER NOT NULL DEFAULT 0;
ALTER TABLE topics ADD COLUMN sealed_until INTEGER NOT NULL DEFAULT 0;
"""


@contextmanager
def of_version(version: int, folder: Path) -> Iterator[sqlite3.Connection]:
    """A log as an older version made it, as long as a process of that version has it open."""
    folder.mkdir()
    with closing(sqlite3.connect(folder / "log.db", isolation_level=None)) as db:
        for setting in ("page_size = 16384", "auto_vacuum = INCREMENTAL", "journal_mode = WAL"):
            db.execute(f"PRAGMA {setting}").fetchall()
        tables = {1: VERSION_1, 2: VERSION_2, 3: VERSION_3, 4: VERSION_4}[version]
        marks = f"PRAGMA application_id = {0x53594C47}; PRAGMA user_version = {version};"
        db.executescript(f"BEGIN; {tables} {marks} COMMIT;")
        with db:
            db.execute("BEGIN")
            store.put_batches(db, [(1, encode(1, 0, arrow(records(0, 1))))])
            db.execute("INSERT INTO stamps VALUES (1, 'p', 3, 0, 2, 1)")
            db.execute('UPDATE partitions SET "end" = 2 WHERE id = 1')
        yield db


@awaited
async def test_a_log_of_the_fourth_version_is_upgraded_and_few_records_join_its_arrow_batches(folder: Path) -> None:
    with of_version(4, folder):
        pass
    added = [Record("3", None, b"v", (("a", b"b"),), 2**60), Record("4", b"k", b"", (), 2**60 + 1)]
    async with quiet(folder) as log:
        await log.append(T0, added)
        assert await contents(log, T0) == [*records(0, 1), *added]
        kinds = sql(folder, "SELECT hex(substr(data, 1, 1)) FROM batches ORDER BY first")
        assert kinds == [("FF",), ("95",)]
        await log.append(T0, records(*range(5, 5 + FEW_RECORDS + 1)))
        assert sql(folder, "SELECT hex(substr(data, 1, 1)) FROM batches ORDER BY first")[2:] == [("FF",)]
        assert (await log.read(T0, 0)).data.column("id").to_pylist()[2:4] == ["3", "4"]
        assert [await log.offset_at(T0, 2**60 + i) for i in range(2)] == [2, 3]
    assert sql(folder, "PRAGMA user_version") == [(5,)]


@awaited
async def test_a_log_of_the_third_version_is_upgraded_and_its_topics_get_generations(
    folder: Path, tmp_path: Path
) -> None:
    with of_version(3, folder):
        pass
    v0 = Partition("v", 0)
    async with quiet(folder) as log:
        t, u, v = await log.topics()
        assert t == Topic("t", 2, TopicKind.RETRY, Retention(age_ms=7), 5, generation=5)
        assert (u.generation, u.sealed, u.successor) == (6, True, "t")
        assert v == Topic("v", 3, epoch=7, open_partitions=2, generation=7), "a seal that nobody can renew has ended"
        assert (await log.append(T0, records(0, 1), stamp=Stamp("p", 3), generation=4)).duplicate
        await log.append(v0, records(0), generation=7)
        dropped = await log.drop_partitions("v", 2)
        assert dropped.generation > 7
        with pytest.raises(Outdated):
            await log.append(v0, records(0), generation=7)
        sealed = await log.seal_topic("v", HOLDER)
    async with quiet(folder) as log:
        assert await log.topics() == [t, u, sealed]
    await quiet(tmp_path / "new").close()
    for pragma in ("table_info(topics)", "table_info(partitions)", "user_version"):
        assert sql(folder, f"PRAGMA {pragma}") == sql(tmp_path / "new", f"PRAGMA {pragma}")


@awaited
async def test_a_log_of_the_second_version_is_upgraded_with_all_that_it_holds(folder: Path, tmp_path: Path) -> None:
    with of_version(2, folder):
        pass
    first = Topic("t", 2, TopicKind.RETRY, Retention(age_ms=7), 5, generation=5)
    second = Topic("u", 1, epoch=6, partitioner="jump", hash="xxh64", sealed=True, successor="t", generation=6)
    async with quiet(folder) as log:
        assert await log.topics() == [first, second]
        assert await contents(log, T0) == records(0, 1)
        assert (await log.append(T0, records(0, 1), stamp=Stamp("p", 3))).duplicate
        await log.append(T1, records(2))
        contracted = await log.contract_topic("t", 1)
        assert (contracted.partitions, contracted.receiving) == (2, 1)
    async with quiet(folder) as log:
        assert await log.topics() == [contracted, second]
        await log.drop_partitions("t", 1)
        assert state(await log.expand_topic("t", 2)) == state(first)
        assert await log.span(T1) == Span(5, 1, 1)
    await quiet(tmp_path / "new").close()
    for pragma in ("table_info(topics)", "table_info(partitions)", "user_version"):
        assert sql(folder, f"PRAGMA {pragma}") == sql(tmp_path / "new", f"PRAGMA {pragma}")


@awaited
async def test_a_log_of_the_first_version_is_upgraded_with_all_that_it_holds(folder: Path, tmp_path: Path) -> None:
    with of_version(1, folder):
        pass
    async with quiet(folder) as log:
        assert await log.topics() == [Topic("t", 2, TopicKind.RETRY, Retention(age_ms=7), 5, generation=5)]
        assert await contents(log, T0) == records(0, 1)
        assert (await log.append(T0, records(0, 1), stamp=Stamp("p", 3))).duplicate
        await log.append(T1, records(2))
        distributed = await log.create_topic("u", 1, partitioner="round_robin")
        moved = await move(log, "t", "u")
    async with quiet(folder) as log:
        assert await log.topics() == [moved, distributed]
    await quiet(tmp_path / "new").close()
    for pragma in ("table_info(topics)", "user_version"):
        assert sql(folder, f"PRAGMA {pragma}") == sql(tmp_path / "new", f"PRAGMA {pragma}")


@awaited
async def test_a_log_is_not_upgraded_while_an_older_process_has_it_open(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "UPGRADE_SECONDS", 0.05)
    with of_version(1, folder) as older:
        with pytest.raises(Busy, match=r"log\.db was busy for 0\.05 s"):
            quiet(folder)
        older.execute("INSERT INTO topics VALUES ('u', 1, 'normal', NULL, NULL, 6)")
    async with quiet(folder) as log:
        assert [topic.name for topic in await log.topics()] == ["t", "u"]


@awaited
async def test_an_upgrade_that_fails_halfway_leaves_the_log_as_it_was(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with of_version(1, folder):
        pass
    with monkeypatch.context() as broken:
        last = files._UPGRADES[2] + "ALTER TABLE nothing ADD COLUMN x;"
        broken.setattr(files, "_UPGRADES", {**files._UPGRADES, 2: last})
        with pytest.raises(Damaged):
            quiet(folder)
    assert sql(folder, "PRAGMA user_version") == [(1,)]
    async with quiet(folder) as log:
        assert [topic.name for topic in await log.topics()] == ["t"]


@awaited
async def test_a_topic_that_is_sealed_by_one_process_takes_no_records_from_another(folder: Path) -> None:
    async with quiet(folder) as log, quiet(folder) as other:
        await log.create_topic("t", 1)
        await other.append(T0, records(0))
        await log.seal_topic("t", HOLDER)
        with pytest.raises(Sealed):
            await other.append(T0, records(1))
        await other.unseal_topic("t", HOLDER)
        await log.append(T0, records(1))
        await other.create_topic("u", 1)
        await move(other, "t", "u")
        with pytest.raises(Moved):
            await log.append(T0, records(2))
        assert await contents(log, T0) == records(0, 1)


@awaited
async def test_a_topic_that_is_contracted_by_one_process_is_so_for_another(folder: Path) -> None:
    async with quiet(folder) as log, quiet(folder) as other:
        topic = await log.create_topic("t", 2)
        await other.append(T1, records(0), stamp=Stamp("p", 1))
        waiting = [asyncio.ensure_future(each.read(T1, 1, wait=100 * TIMEOUT_SECONDS)) for each in (log, other)]
        await log.contract_topic("t", 1)
        assert (await other.topic("t")).receiving == 1
        with pytest.raises(PartitionDraining):
            await other.append(T1, records(1))
        assert (await other.append(T1, records(0), stamp=Stamp("p", 1))).duplicate
        await other.append(T0, records(1))
        assert await contents(other, T1) == records(0)
        await other.expand_topic("t", 2)
        await log.append(T1, records(1))
        assert [len(batch) for batch in await asyncio.gather(*waiting)] == [1, 1]

        waiting = [asyncio.ensure_future(each.read(T1, 2, wait=100 * TIMEOUT_SECONDS)) for each in (log, other)]
        await other.contract_topic("t", 1)
        await other.span(T0)
        await other.drop_partitions("t", 1)
        for reader in waiting:
            with pytest.raises(PartitionOutOfRange):
                await asyncio.wait_for(reader, TIMEOUT_SECONDS)
        with pytest.raises(PartitionOutOfRange):
            await log.append(T1, records(2))
        await log.maintain()
        assert state(await log.expand_topic("t", 2)) == state(topic)
        assert await other.span(T1) == Span(topic.epoch, 2, 2)
        await other.append(T1, records(2))
        assert await contents(log, T1) == records(2)


@awaited
async def test_a_reader_learns_that_its_partition_was_dropped_although_another_process_has_deleted_its_batches(
    folder: Path,
) -> None:
    async with quiet(folder) as log, quiet(folder) as other:
        await log.create_topic("t", 2)
        await log.create_topic("u", 1)
        readers = [
            asyncio.ensure_future(log.read(p, 0, wait=100 * TIMEOUT_SECONDS)) for p in (T1, Partition("u", 0), T0)
        ]
        for _ in range(5):
            await log.span(T0)
        await other.contract_topic("t", 1)
        await asyncio.gather(other.drop_partitions("t", 1), other.delete_topic("u"), other.maintain())
        for reader, refusal in zip(readers, (PartitionOutOfRange, UnknownTopic), strict=False):
            with pytest.raises(refusal):
                await asyncio.wait_for(reader, TIMEOUT_SECONDS)
        await other.append(T0, records(0))
        assert len(await readers[2]) == 1


@awaited
async def test_the_batches_of_dropped_partitions_are_cleared_away_by_maintenance(folder: Path) -> None:
    async with quiet(folder) as log:
        topic = await log.create_topic("t", 3)
        for partition in topic:
            for n in range(300):
                await log.append(partition, arrow(records(n)))
        await log.contract_topic("t", 1)
        await log.maintain()
        before = rows(folder)
        await log.drop_partitions("t", 1)
        assert rows(folder) == before
        await log.maintain()
        assert rows(folder) == before // 3
        assert await contents(log, T0) == records(*range(300))


@awaited
async def test_retention_is_not_blocked_by_partitions_that_are_dropped_meanwhile(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(maintenance, "PARTITIONS_A_STEP", 1)
    async with quiet(folder) as log:
        await log.create_topic("t", 3, retention=Retention(age_ms=1))
        await log.append(T0, records(0))
        await log.contract_topic("t", 1)
        step = maintenance.retention()
        with closing(connect(folder / "log.db", "process")) as db:
            assert step(db, now_ms()), "there is more: it begins with the last partition"
            await log.drop_partitions("t", 1)
            while step(db, now_ms()):
                pass
        assert (await log.span(T0)).first == 1


@awaited
async def test_a_number_of_open_partitions_that_can_not_be_is_damage(folder: Path) -> None:
    async with quiet(folder) as log:
        await log.create_topic("t", 2)
        for number in (0, 2, "x"):
            sql(folder, "UPDATE topics SET open_partitions = ?", number)
            with pytest.raises(Damaged, match="open_partitions"):
                await log.topics()


@awaited
async def test_a_read_only_folder_is_not_writable(mount: Mount) -> None:
    disk = mount("size=4m")
    async with quiet(disk / "log") as log:
        await log.create_topic("t", 1)
    mount("size=4m,ro")
    for folder in (disk / "log", disk / "another"):
        with pytest.raises(NotWritable, match="Read-only file system"):
            quiet(folder)
    mount("size=4m,rw")
    async with quiet(disk / "log") as log:
        assert [topic.name for topic in await log.topics()] == ["t"]


# Other processes ---------------------------------------------------------------------------------------------------


@pytest.mark.processes
@awaited
async def test_a_reader_in_another_process_sees_a_record_soon_and_without_spinning(
    folder: Path, record_property: Callable[[str, object], None]
) -> None:
    delays = []
    async with quiet(folder) as log:
        await log.create_topic("t", 1)
        with working("follow", folder, 100) as reader:
            reader.go()
            for i in range(100):
                assert reader.read() == "waiting"
                began = time.monotonic()
                await log.append(T0, records(i))
                seen, found = await asyncio.to_thread(reader.read)
                assert found == [f"r{i}"]
                delays.append(seen - began)
            idle = await asyncio.to_thread(reader.read)
    record_property("median_ms", statistics.median(delays) * 1000)
    record_property("worst_ms", max(delays) * 1000)
    record_property("idle_share_of_a_core", idle)
    assert statistics.median(delays) < 0.05  # less than 1 ms on a quiet machine
    assert idle < 0.25  # some 0.1 %


@pytest.mark.processes
@awaited
async def test_processes_that_append_at_once_lose_nothing_and_keep_their_order(folder: Path) -> None:
    async with quiet(folder) as log:
        await log.create_topic("t", 1)
        with working("produce", folder, "a", 60) as a, working("produce", folder, "b", 60) as b:
            for other in (a, b):
                other.go()
            here = [await log.append(T0, [Record(f"here:{n}:0", None, b"")]) for n in range(60)]
            placed = await asyncio.to_thread(lambda: {**a.read(), **b.read()})
        placed["here"] = [appended.first.offset for appended in here]
        found = [record.id for record in await contents(log, T0)]
    assert len(found) == 6 * 120 + 60
    assert len(set(found)) == len(found)
    for producer, offsets in placed.items():
        assert offsets == sorted(offsets)
        for n, offset in enumerate(offsets):
            count = 1 if producer == "here" else 1 + n % 3
            assert found[offset : offset + count] == [f"{producer}:{n}:{i}" for i in range(count)]


@pytest.mark.processes
@awaited
async def test_processes_that_open_and_close_at_once_do_not_disturb_each_other(folder: Path) -> None:
    async with quiet(folder) as log:
        await log.create_topic("t", 1)
    with working("reopen", folder, "a", 25) as a, working("reopen", folder, "b", 25) as b:
        for other in (a, b):
            other.go()
        assert await asyncio.to_thread(lambda: [a.read(), b.read()]) == ["done", "done"]
    async with quiet(folder) as log:
        found = [record.id for record in await contents(log, T0)]
    assert [[name for name in found if name[0] == who] for who in "ab"] == [
        [f"{w}:{n}" for n in range(25)] for w in "ab"
    ]


@awaited
async def test_a_writer_that_waits_too_long_for_another_raises_busy_and_works_again_later(folder: Path) -> None:
    async with quiet(folder, busy_wait=0.1) as log:
        await log.create_topic("t", 1)
        with closing(sqlite3.connect(folder / "log.db", isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            with pytest.raises(Busy, match=r"busy for 0\.1 s") as refused:
                await log.append(T0, records(0), stamp=Stamp("p", 0))
            assert refused.value.seconds == 0.1
            assert (await log.span(T0)).end == 0, "and readers are not in the way of writers, nor behind them"
            other.execute("ROLLBACK")
        assert not (await log.append(T0, records(0), stamp=Stamp("p", 0))).duplicate
        assert await contents(log, T0) == records(0)


@awaited
async def test_a_log_can_be_closed_while_another_process_maintains_it(folder: Path) -> None:
    async with quiet(folder) as log:
        await log.create_topic("t", 1)
        with (folder / "maintain.lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            waiting = asyncio.ensure_future(log.maintain())
            await log.span(T0)
            assert not waiting.done()
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            await log.close()


# Maintenance -------------------------------------------------------------------------------------------------------


@awaited
async def test_small_batches_are_merged_and_keep_their_content(folder: Path) -> None:
    async with quiet(folder) as log:
        await log.create_topic("t", 2)
        for i in range(500):
            await log.append(T0, records(i))
        await log.append(T1, records(0))
        before = rows(folder)
        await log.maintain()
        assert (before, await contents(log, T0)) == (501, records(*range(500)))
        assert rows(folder) < 70
        assert await contents(log, T1) == records(0)
        assert [await log.offset_at(T0, 1 + i) for i in (0, 77, 499, 500)] == [0, 77, 499, 500]


@awaited
async def test_merging_continues_after_a_small_batch_between_large_ones(folder: Path) -> None:
    sizes = [5, 300_000, 5, 300_000] + [5] * 100
    wanted = [record for i, size in enumerate(sizes) for record in records(i, size=size)]
    async with quiet(folder) as log:
        await log.create_topic("t", 1)
        for record in wanted:
            await log.append(T0, [record])
        await log.maintain()
        assert rows(folder) < 50, "most of the hundred were merged; the last few wait for more to come"
        assert await contents(log, T0) == wanted


@awaited
async def test_what_changed_after_it_was_read_is_not_merged(folder: Path) -> None:
    async with quiet(folder) as log:
        await log.create_topic("t", 1)
        for i in range(100):
            await log.append(T0, records(i))
        merger = maintenance.Merger()
        with closing(connect(folder / "log.db", "process")) as db:
            merger.plan(db)
            join_all(merger)
            db.execute("DELETE FROM batches WHERE first = 10")
            assert merger(db, 0), "it has to look again"
            assert db.execute("SELECT count(*) FROM batches").fetchone() == (99,)


@awaited
async def test_new_batches_with_the_ids_of_deleted_ones_are_not_replaced_by_what_was_merged_of_those(
    folder: Path,
) -> None:
    async with quiet(folder) as log:
        await log.create_topic("t", 1)
        for i in range(70):
            await log.append(T0, records(i))
        merger = maintenance.Merger()
        with closing(connect(folder / "log.db", "process")) as db:
            assert merger.plan(db)
            join_all(merger)
            await log.trim(T0, 70)
            await log.maintain()  # deletes them
            for i in range(70, 140):
                await log.append(T0, records(i))
            assert db.execute("SELECT min(id), min(first) FROM batches").fetchone() == (1, 70), "the ids are the same"
            assert merger(db, 0), "it has to look again"
        assert await contents(log, T0) == records(*range(70, 140))


@awaited
async def test_maintenance_rests_while_records_are_appended_and_not_otherwise(folder: Path) -> None:
    clock = ManualClock()
    async with SqliteLog(folder, maintain_every=None, clock=clock) as log:
        await log.create_topic("t", 1)
        steps = 0

        async def step() -> bool:
            nonlocal steps
            steps += 1
            if steps == 3:
                await clock.advance(0.01)
                await log.append(T0, records(0))
            return steps < 5

        taking = asyncio.create_task(log._take_all(step, in_background=True))
        while steps < 3:  # noqa: ASYNC110 there is no event for it
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.05)
        assert steps == 3, "it rests"
        await clock.advance(0.01 * database.STEP_REST)
        await taking
        assert steps == 5


@awaited
async def test_what_is_known_of_a_partition_stays_known_when_its_batches_are_merged(folder: Path) -> None:
    async with quiet(folder) as log:
        await log.create_topic("t", 1)
        for i in range(100):
            await log.append(T0, records(i))
        assert not len(await log.read(T0, 100))
        await log._merge_run(maintenance.Merger())
        assert rows(folder) < 50
        known = log._known.find(T0, None)
        assert known is not None
        assert known.end == 100
        await log.append(T0, records(100))
        assert await contents(log, T0) == records(*range(101))


@awaited
async def test_a_reader_that_waits_gets_the_records_that_are_stored(folder: Path) -> None:
    """They are served from memory when they were appended in the same process."""
    async with quiet(folder) as log:
        await log.create_topic("t", 2)
        given = [
            [Record("a", b"k", b"1", (("h", b"x"),), 7), Record("b", None, b"2", (), 8)],
            [Record("c", None, b"3")],
        ]
        for at, appended in enumerate(given):
            waiting = [asyncio.create_task(log.read(T0, 2 * at, wait=60)) for _ in range(2)]
            while not log._tail.is_awaited(1):  # noqa: ASYNC110 there is no event for it
                await asyncio.sleep(0)
            await log.append(T0, appended)
            first, second = await asyncio.gather(*waiting)
            stored = await log.read(T0, 2 * at)
            assert first.records() == second.records() == stored.records()
            assert [record.value for record in stored.records()] == [record.value for record in appended]
        for at in range(3, 100):  # more than are kept at hand
            waiting = [asyncio.create_task(log.read(T0, at, wait=60))]
            while not log._tail.is_awaited(1):  # noqa: ASYNC110 there is no event for it
                await asyncio.sleep(0)
            await log.append(T0, records(at))
            assert (await waiting[0]).records() == records(at)
        assert len(log._reading.cache._batches) <= RECENT_BATCHES
        async with quiet(folder) as other:  # has nothing in memory
            assert (await other.read(T0, 0)).records() == (await log.read(T0, 0)).records()


@awaited
async def test_maintenance_ends_although_producers_keep_appending(folder: Path) -> None:
    async with quiet(folder) as log:
        topic = await log.create_topic("t", 8)
        stop = asyncio.Event()

        async def produce(partition: Partition) -> int:
            sent = 0
            while not stop.is_set():
                await asyncio.gather(*(log.append(partition, records(sent + i)) for i in range(3)))
                sent += 3
            return sent

        producers = [asyncio.ensure_future(produce(partition)) for partition in topic]
        for _ in range(3):
            await asyncio.wait_for(log.maintain(), TIMEOUT_SECONDS)
        stop.set()
        for partition, sent in zip(topic, await asyncio.gather(*producers), strict=True):
            assert (await contents(log, partition)) == records(*range(sent))


@awaited
async def test_an_open_log_maintains_itself(folder: Path) -> None:
    async with SqliteLog(folder, durability="process", maintain_every=0.01) as log:
        await log.create_topic("t", 1)
        for i in range(100):
            await log.append(T0, records(i))
        await log.trim(T0, 100)
        async with asyncio.timeout(TIMEOUT_SECONDS):
            while rows(folder):  # noqa: ASYNC110 what the file holds is nobody's event
                await asyncio.sleep(0.005)
    async with quiet(folder) as log:
        assert (await log.span(T0)).first == 100


@awaited
async def test_trimmed_space_is_returned_to_the_disk(folder: Path) -> None:
    async with quiet(folder) as log:
        await log.create_topic("t", 2)
        for at in range(0, 200, 10):
            await log.append(T0, records(*range(at, at + 10), size=100_000))
        await log.append(T1, records(1, 2))
        await checkpoint(folder)
        large = (folder / "log.db").stat().st_size
        assert large > 20_000_000
        await log.trim(T0, 195)
        await log.maintain()
        await checkpoint(folder)
        assert (folder / "log.db").stat().st_size < large / 2
        assert await contents(log, T0) == records(*range(195, 200), size=100_000)
        assert await contents(log, T1) == records(1, 2)
        await log.delete_topic("t")
        await log.maintain()
        assert sql(folder, "SELECT count(*) FROM batches UNION ALL SELECT count(*) FROM partitions") == [(0,), (0,)]


@awaited
async def test_stamps_are_kept_only_as_far_back_as_the_window(folder: Path) -> None:
    async with quiet(folder) as log:
        await log.create_topic("t", 1)
        for i in range(150):
            await log.append(T0, records(i), stamp=Stamp("p", i))
        assert sql(folder, "SELECT min(sequence), max(sequence), count(*) FROM stamps") == [(86, 149, 64)]


@awaited
async def test_old_producers_are_forgotten_in_small_steps_and_the_others_remembered(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(maintenance, "FORGET_FROM", 1)
    monkeypatch.setattr(maintenance, "STAMPS_A_STEP", 4)
    clock = ManualClock()
    async with quiet(folder, clock=clock) as log:
        await log.create_topic("t", 2)
        for producer, partition in product("abcd", (T0, T1)):
            for i in range(2):
                await log.append(partition, records(i), stamp=Stamp(producer, i))
        await clock.advance(database.STAMP_MS / 1000 + 1)
        for partition in (T0, T1):
            await log.append(partition, records(2), stamp=Stamp("b", 2))
        deleted = []
        forgetter = maintenance.Forgetter()
        with closing(connect(folder / "log.db", "process")) as db:
            more = True
            while more:
                before = db.total_changes
                more = forgetter(db, rules.milliseconds(clock))
                deleted.append(db.total_changes - before)
        assert sum(deleted) == 12
        assert max(deleted) <= 4
        found = sql(folder, "SELECT producer, sequence FROM stamps")
        assert sorted(found) == sorted([("b", i) for i in range(3)] * 2)


@awaited
async def test_old_producers_are_looked_for_seldom(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(maintenance, "FORGET_FROM", 1)
    monkeypatch.setattr(maintenance, "FORGET_EVERY", 3)
    clock = ManualClock()
    left = []
    async with quiet(folder, clock=clock) as log:
        await log.create_topic("t", 1)
        for number in range(10):
            await log.append(T0, records(number), stamp=Stamp(f"p{number}", 0))
            await clock.advance(database.STAMP_MS / 1000 + 1)
            await log.maintain()
            left.append(sql(folder, "SELECT count(*) FROM stamps")[0][0])
    assert left == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1]


@awaited
async def test_looking_for_trimmed_batches_costs_no_more_if_there_are_many_others(folder: Path) -> None:
    async with quiet(folder) as log:
        await log.create_topic("t", 1)
        await log.append(T0, records(*range(1000)))
        await log.trim(T0, 1000)
        await log.maintain()
    with closing(connect(folder / "log.db", "process")) as db:
        costs = []
        for end in (1010, 3000):
            db.execute(
                "WITH RECURSIVE n(i) AS (SELECT 1000 UNION ALL SELECT i + 1 FROM n WHERE i < ?)"
                " INSERT INTO batches (partition, first, count, latest, bytes, checksum, data)"
                " SELECT 1, i, 1, 0, 0, 0, x'' FROM n WHERE i NOT IN (SELECT first FROM batches)",
                (end,),
            )
            costs.append(0)

            def count_instruction() -> None:
                costs[-1] += 1

            db.set_progress_handler(count_instruction, 1)
            assert not maintenance.clearing()(db, 0)
            db.set_progress_handler(None, 1)
    assert costs[0] == costs[1]


@awaited
async def test_the_stamps_of_a_deleted_topic_are_deleted_in_small_steps(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(maintenance, "STAMPS_A_STEP", 4)
    async with quiet(folder) as log:
        await log.create_topic("t", 1)
        for i in range(10):
            await log.append(T0, records(i), stamp=Stamp("p", i))
        await log.delete_topic("t")
    left = []
    step = maintenance.clearing()
    with closing(connect(folder / "log.db", "process")) as db:
        while step(db, 0):
            left.append(db.execute("SELECT count(*) FROM stamps").fetchone()[0])
    assert left == [10, 6, 2, 0]
    assert sql(folder, "SELECT count(*) FROM partitions") == [(0,)]


def test_a_log_can_be_used_in_one_event_loop_after_another_and_is_maintained_in_each(folder: Path) -> None:
    log = SqliteLog(folder, durability="process", maintain_every=0.01)

    async def trimmed_to(offset: int) -> None:
        await log.append(T0, records(*range(5)))
        async with asyncio.timeout(TIMEOUT_SECONDS):
            while (await log.span(T0)).first < offset:  # noqa: ASYNC110 nobody announces it
                await asyncio.sleep(0.01)

    async def first() -> None:
        await log.create_topic("t", 1, retention=Retention(bytes_per_partition=1))
        await log.append(T0, records(0))
        await trimmed_to(1)

    asyncio.run(first())
    asyncio.run(trimmed_to(6))
    asyncio.run(log.close())


# Damage ------------------------------------------------------------------------------------------------------------


@awaited
async def test_a_flipped_bit_in_a_batch_is_reported_and_not_served(folder: Path) -> None:
    async with quiet(folder) as log:
        await log.create_topic("t", 1)
        for at in (0, 10, 20):
            await log.append(T0, records(*range(at, at + 10)))
        ((good,),) = sql(folder, "SELECT data FROM batches WHERE first = 10")
        for place in range(0, len(good), 41):
            bad = bytearray(good)
            bad[place] ^= 1
            sql(folder, "UPDATE batches SET data = ? WHERE first = 10", bytes(bad))
            for offset in (0, 10, 15):
                with pytest.raises(Damaged, match="t/0 is damaged: the batch at offset 10 fails its checksum"):
                    await log.read(T0, offset)
        assert (await log.read(T0, 0, max_records=10)).records() == records(*range(10)), "what comes before is good"
        assert (await log.read(T0, 20)).records() == records(*range(20, 30)), "and what comes after"
        assert (await log.append(T0, records(30))).first.offset == 30
        sql(folder, "UPDATE batches SET data = ? WHERE first = 10", good)
        assert await contents(log, T0) == records(*range(31))


@pytest.mark.parametrize(
    "tamper",
    [
        "DELETE FROM batches WHERE first = 50",
        "UPDATE batches SET partition = 1 WHERE partition = 2 AND first = 50",
        "UPDATE batches SET first = 1000 WHERE first = 50",
        "UPDATE batches SET count = 2 WHERE first = 50",
        "UPDATE batches SET data = (SELECT data FROM batches WHERE first = 49) WHERE first = 50",
        "UPDATE batches SET data = x'' WHERE first = 50",
    ],
)
@awaited
async def test_a_batch_that_is_lost_or_in_the_wrong_place_is_reported_and_not_merged_away(
    folder: Path, tamper: str
) -> None:
    async with quiet(folder) as log:
        await log.create_topic("t", 2)
        for i in range(100):
            await log.append(T0 if i < 50 else T1, records(i))
            await log.append(T1 if i < 50 else T0, records(i + 100))
        sql(folder, tamper)
        wanted = {
            T0: records(*range(50), *range(150, 200)),
            T1: records(*range(100, 150), *range(50, 100)),
        }
        for _ in range(2):
            damaged = 0
            for partition in (T0, T1):
                for offset in range(100):
                    try:
                        batch = await log.read(partition, offset, max_records=1)
                    except Damaged:
                        damaged += 1
                    else:
                        assert batch.records() == wanted[partition][offset : offset + 1]
            assert damaged
            await log.maintain()  # goes around it


@awaited
async def test_whichever_byte_of_the_file_is_flipped_no_wrong_record_is_served(folder: Path, tmp_path: Path) -> None:
    async with quiet(folder) as log:
        await log.create_topic("t", 2)
        for at in range(0, 400, 40):
            await log.append(T0, records(*range(at, at + 40), size=30))
            await log.append(T1, records(*range(at + 1000, at + 1040), size=30))
    wanted = {T0: records(*range(400), size=30), T1: records(*range(1000, 1400), size=30)}
    good = (folder / "log.db").read_bytes()
    dice = random.Random(7)
    refused = 0
    places = (*range(16), *range(files.PAGE_BYTES - 60, files.PAGE_BYTES, 7))
    headers = [page + at for page in range(0, len(good), files.PAGE_BYTES) for at in places]
    for place in dice.sample(headers, 60) + [dice.randrange(len(good)) for _ in range(60)]:
        copy = tmp_path / "copy"
        copy.mkdir()
        bad = bytearray(good)
        bad[place] ^= 1 << dice.randrange(8)
        (copy / "log.db").write_bytes(bad)
        try:
            async with quiet(copy) as log:
                for partition, rows in wanted.items():
                    has = await log.span(partition)
                    at = has.first
                    while at < has.end:
                        batch = await log.read(partition, at, max_records=100)
                        assert batch.records() == rows[at : batch.end], f"wrong data after a flip at {place}"
                        at = batch.end
        except ShardyardError:
            refused += 1
        shutil.rmtree(copy)
    assert refused > 10


@pytest.mark.parametrize("share", [0.001, 0.01, 0.3, 0.5, 0.9, 0.98])
@awaited
async def test_a_file_that_was_cut_off_is_reported(folder: Path, share: float) -> None:
    async with quiet(folder) as log:
        await log.create_topic("t", 1)
        for at in range(0, 100, 10):
            await log.append(T0, records(*range(at, at + 10), size=5_000))
    size = (folder / "log.db").stat().st_size
    os.truncate(folder / "log.db", int(size * share))

    async def look() -> list[Record]:
        async with quiet(folder) as log:
            return await contents(log, T0)

    with pytest.raises((Damaged, NotOurs)):
        await look()


# Disks -------------------------------------------------------------------------------------------------------------


async def fill(log: Log, stored: int = 0) -> int:
    """Append until there is no room, and return how many records were stored."""
    with contextlib.suppress(NoRoom):
        while True:
            await log.append(T0, records(*range(stored, stored + 4), size=20_000), stamp=Stamp("p", stored // 4))
            stored += 4
    return stored


@awaited
async def test_a_full_disk_refuses_appends_and_the_log_works_again_when_there_is_space(mount: Mount) -> None:
    disk = mount("size=4m")
    ballast = disk / "ballast"
    ballast.write_bytes(bytes(2 * 2**20))
    async with quiet(disk / "log") as log:
        await log.create_topic("t", 1)
        stored = await fill(log)
        assert stored
        assert (await log.span(T0)).end == stored
        assert await contents(log, T0) == records(*range(stored), size=20_000), "nothing by halves"
        with pytest.raises(NoRoom, match=r"no space left on the disk for .*log\.db: free some"):
            await log.append(T0, records(*range(stored, stored + 4), size=20_000), stamp=Stamp("p", stored // 4))
        ballast.unlink()
        again = await log.append(T0, records(*range(stored, stored + 4), size=20_000), stamp=Stamp("p", stored // 4))
        assert (again.first.offset, again.duplicate) == (stored, False)
        assert await contents(log, T0) == records(*range(stored + 4), size=20_000)
    async with quiet(disk / "log") as log:
        assert await contents(log, T0) == records(*range(stored + 4), size=20_000)


@awaited
async def test_a_log_on_a_full_disk_still_serves_readers_and_can_be_opened_again(mount: Mount) -> None:
    disk = mount("size=6m")
    stored = 0
    for _ in range(3):
        async with quiet(disk / "log") as log:
            if not stored:
                await log.create_topic("t", 1)
            stored = await fill(log, stored)
            assert await contents(log, T0) == records(*range(stored), size=20_000)


@awaited
async def test_a_log_that_found_no_space_to_be_created_is_created_when_there_is_some(mount: Mount) -> None:
    disk = mount("size=1m")
    ballast = disk / "ballast"
    with pytest.raises(OSError, match="No space left"):
        ballast.write_bytes(bytes(2**21))
    with pytest.raises(NoRoom):
        quiet(disk / "log")
    ballast.unlink()
    async with quiet(disk / "log") as log:
        await log.create_topic("t", 1)
        assert await contents(log, T0) == []


def test_what_fails_after_a_commit_does_not_store_the_records_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_ends: dict[int, int], *, only_appends: bool) -> None:
        assert only_appends
        raise RuntimeError("Event loop is closed")

    async def story() -> None:
        async with SqliteLog(tmp_path / "log", maintain_every=None) as log:
            await log.create_topic("orders", 1)
            monkeypatch.setattr(log._writer, "_on_commit", fail)
            partition = Partition("orders", 0)
            appended = await asyncio.gather(*(log.append(partition, [Record.new(b"a")]) for _ in range(3)))
            assert sorted(each.first.offset for each in appended) == [0, 1, 2]
            assert (await log.span(partition)).end == 3

    asyncio.run(story())
    assert "the commit itself is durable" in caplog.text


@awaited
async def test_what_one_call_appends_is_one_commit_however_many_it_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If it were two, the first could fail, and what is tried again would be stored after the second."""
    monkeypatch.setattr(writer, "GROUP_REQUESTS", 4)
    async with SqliteLog(tmp_path / "log", maintain_every=None) as log:
        await log.create_topic("t", 1)
        commit, commits = log._writer._commit, 0

        def fail_once() -> None:
            nonlocal commits
            commits += 1
            if commits == 1:
                log._writer._roll_back()
                raise NoRoom("the log")
            commit()

        monkeypatch.setattr(log._writer, "_commit", fail_once)
        before = [asyncio.create_task(log.append(T0, [Record.new(b"before")])) for _ in range(3)]
        await asyncio.sleep(0)
        outcomes = await log.append_many([AppendRequest(T0, [Record.new(b"%d" % n)]) for n in range(10)])
        assert [type(outcome) for outcome in outcomes] == [NoRoom] * 10
        assert [type(error) for error in await asyncio.gather(*before, return_exceptions=True)] == [NoRoom] * 3
        assert all(
            isinstance(outcome, Appended)
            for outcome in await log.append_many([AppendRequest(T0, [Record.new(b"%d" % n)]) for n in range(10)])
        )
        assert commits == 2
        assert [record.value for record in await contents(log, T0)] == [b"%d" % n for n in range(10)]


# Reading many ------------------------------------------------------------------------------------------------------


@awaited
async def test_a_partition_with_a_number_beyond_those_of_sqlite_is_out_of_range(folder: Path) -> None:
    async with quiet(folder) as log:
        await log.create_topic("t", 1)
        await log.create_topic("u", 1)
        await log.append(Partition("u", 0), records(0))
        for number in (2**63 - 1, 2**63, 2**70):
            beyond = Partition("t", number)
            found = await log.read_many([ReadRequest(beyond, 0), ReadRequest(Partition("u", 0), 0)])
            assert type(found[beyond]) is PartitionOutOfRange
            assert len(found) == 2
