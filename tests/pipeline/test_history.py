"""history: its tables give the same pages as the database of messaging servers."""

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from shardyard.messaging.history import Page, PlacedEntry, open_history
from shardyard.messaging.history.manifest import Manifest, MessagesFile, load_manifest
from shardyard.messaging.history.tables import HistoryTables
from shardyard.model import Busy, Damaged, InvalidValue, NotOurs, Partition, WrongSchemaVersion
from shardyard.pipeline.atomic_files import write_json
from shardyard.pipeline.history import files as files_module
from shardyard.pipeline.history import history as history_module
from shardyard.pipeline.history.files import HistoryFiles, NewRows, to_compare, to_merge
from shardyard.pipeline.history.history import HistoryRun, MalformedRecord, history
from shardyard.pipeline.lake.lake import Lake
from shardyard.pipeline.lake.parquet import ParquetRecords
from shardyard.wire.inbox import InboxEntry, Mark, encode_entry
from shardyard.wire.messaging import Message

USERS = ("alice", "bob", "carol", "Zoë", "日本", "a", "ab")
PARTITIONS = 3


class Inbox:
    """A lake that is filled with batches of entries, as ingest fills it. Values that are bytes are in a partition of
    their own."""

    def __init__(self, folder: Path) -> None:
        self.lake = Lake(folder / "lake")
        self.records = ParquetRecords(self.lake, 1)
        self.tables = folder / "tables"
        self._ends = [0] * (PARTITIONS + 1)
        self._batches = 0

    def add(self, *values: InboxEntry | bytes) -> None:
        """Publish a batch."""
        rows = [self._row(value) for value in values]
        with self.lake.exclusive("parquet"):
            self.lake.set_topics(["inbox"])
            staged = self.records.new_staging()
            folder = staged / "topic=inbox" / "day=2026-01-31"
            folder.mkdir(parents=True)
            pq.write_table(pa.Table.from_pylist(rows), folder / "part.parquet")
            self.records.complete(self._batches, staged)
            self.records.publish(self._batches)
        self._batches += 1

    def _row(self, value: InboxEntry | bytes) -> dict[str, object]:
        partition = PARTITIONS
        if isinstance(value, InboxEntry):
            partition = sum((value.sender if value.copy else value.recipient).encode()) % PARTITIONS
            value = encode_entry(value)
        offset = self._ends[partition]
        self._ends[partition] += 1
        return {"epoch": 1, "partition": pa.scalar(partition, pa.int32()), "offset": offset, "value": value}

    def run(self, spark: SparkSession, buckets: int | None = None) -> HistoryRun:
        return history(spark, self.lake.root, self.tables, buckets=buckets)

    def page(self, user: str, peer: str, before: int | None = None, limit: int = 50) -> Page:
        return asyncio.run(HistoryTables(self.tables).page(user, peer, before=before, limit=limit))

    def files(self) -> list[Path]:
        return sorted(path for path in self.tables.rglob("*.parquet"))


@pytest.fixture
def inbox(tmp_path: Path) -> Inbox:
    return Inbox(tmp_path)


def message(number: int, sender: str = "alice", recipient: str = "bob", *, copy: bool = False) -> InboxEntry:
    return InboxEntry(number, sender, recipient, "phone", number, 1000 + number, f"text {number}", copy)


def mark(number: int, reader: str, peer: str, kind: str, upto: int, *, copy: bool = False) -> InboxEntry:
    content = Mark("seen" if kind == "seen" else "delivered", upto)
    return InboxEntry(number, reader, peer, "phone", number, 1000 + number, content, copy)


def texts(page: Page) -> list[str]:
    return [one.text for one in page.messages]


def random_entries(rng: random.Random, first: int, count: int) -> list[InboxEntry]:
    """Messages and some marks, with the copies of both, some of them twice, in any order."""
    found: list[InboxEntry] = []
    for number in range(first, first + count):
        sender, recipient = rng.choices(USERS, k=2)
        is_mark = rng.random() < 0.2
        for copy in (False, True):
            entry = mark(number, sender, recipient, "seen", number - 1, copy=copy) if is_mark else None
            found += [entry or message(number, sender, recipient, copy=copy)] * rng.choice((1, 1, 1, 2))
    rng.shuffle(found)
    return found


@pytest.mark.timeout(300)  # on a busy machine, Spark's start and its first jobs take long
def test_pages_are_those_of_the_database_after_one_run_and_after_the_next_and_a_repeated_run_changes_nothing(
    spark: SparkSession, inbox: Inbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history_module, "ROW_GROUP_BYTES", 1024)
    monkeypatch.setattr(files_module, "MERGE_BELOW_ROWS", 0)
    rng = random.Random(13)
    first = random_entries(rng, 1, 3000)
    second = random_entries(rng, 3001, 800) + rng.sample(first, 100)
    stored: list[InboxEntry] = []
    for entries in (first, second):
        inbox.add(*entries)
        done = inbox.run(spark, 2)
        before = {one.id for one in stored if isinstance(one.content, str)}
        stored += entries
        after = {one.id for one in stored if isinstance(one.content, str)}
        originals = [one for one in entries if not one.copy]
        assert (done.records, done.copies) == (len(entries), len(entries) - len(originals))
        assert (done.messages, done.total) == (len(after - before), len(after))
        assert done.messages + done.duplicates + done.marks == len(originals)
        assert (done.malformed, done.examples) == (0, ())
        check_pages(inbox, stored, rng)
    assert any(pq.read_metadata(path).num_row_groups > 1 for path in inbox.files())

    files, manifest = inbox.files(), load_manifest(inbox.tables)
    again = inbox.run(spark)
    assert (again.version, again.records, again.messages, again.total) == (2, 0, 0, done.total)
    assert (inbox.files(), load_manifest(inbox.tables)) == (files, manifest)


def check_pages(inbox: Inbox, stored: Sequence[InboxEntry], rng: random.Random) -> None:
    """Compare the tables with a database that has stored the same entries."""
    tables = HistoryTables(inbox.tables)

    async def check() -> None:
        async with open_history("memory://") as database:
            await database.store([PlacedEntry(Partition("inbox", 0), 1, n, one) for n, one in enumerate(stored)])
            for user in USERS:
                for peer in USERS:
                    limit, before = rng.choice((1, 7, 50, 200)), rng.choice((None, rng.randrange(3500), 10**19))
                    expected = await database.page(user, peer, before=before, limit=limit)
                    assert await tables.page(user, peer, before=before, limit=limit) == expected
            everything = await database.page("alice", "bob", limit=10_000)
        page, walked = await tables.page("alice", "bob", limit=7), list[Message]()
        while page.more:
            walked += page.messages
            page = await tables.page("bob", "alice", before=int(page.messages[-1].id), limit=7)
        assert [*walked, *page.messages] == everything.messages
        assert len(walked) > 50

    asyncio.run(check())


def test_the_highest_mark_of_each_reader_peer_and_kind_is_kept_and_malformed_records_are_reported(
    spark: SparkSession, inbox: Inbox
) -> None:
    nul, huge = message(5, "al\0ice"), message(2**63)
    inbox.add(
        *(message(1), b"no entry", mark(2, "bob", "alice", "seen", 1), mark(3, "bob", "alice", "delivered", 4)),
        *(encode_entry(nul), encode_entry(huge), b"", encode_entry(message(6))[:-3]),
        *(mark(7, "alice", "bob", "seen", 1), mark(8, "bob", "alice", "seen", 99, copy=True)),
    )
    done = inbox.run(spark, 2)
    assert (done.messages, done.marks, done.copies, done.malformed) == (1, 3, 1, 5)
    assert done.examples[0] == MalformedRecord(PARTITIONS, 0, done.examples[0].problem)
    assert [one.offset for one in done.examples] == [0, 1, 2, 3, 4]
    assert "expected a string without NUL characters" in done.examples[1].problem
    assert "expected at most 2**63 - 1" in done.examples[2].problem

    inbox.add(mark(9, "bob", "alice", "seen", 3), mark(10, "bob", "alice", "delivered", 2), message(11))
    assert inbox.run(spark).malformed == 0
    assert texts(inbox.page("alice", "bob")) == ["text 11", "text 1"]
    (path,) = load_manifest(inbox.tables).marks
    assert pq.read_table(inbox.tables / path).to_pylist() == [
        {"reader": "alice", "peer": "bob", "kind": "seen", "upto": 1},
        {"reader": "bob", "peer": "alice", "kind": "delivered", "upto": 4},
        {"reader": "bob", "peer": "alice", "kind": "seen", "upto": 3},
    ]


def test_a_run_that_dies_before_it_publishes_leaves_the_tables_as_they_were_and_the_next_one_does_its_work(
    spark: SparkSession, inbox: Inbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    inbox.add(message(1), mark(2, "bob", "alice", "seen", 1))
    inbox.run(spark, 1)
    before = inbox.files()
    inbox.add(message(3), mark(4, "bob", "alice", "seen", 3))
    with monkeypatch.context() as patched:
        patched.setattr(HistoryFiles, "_write", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            inbox.run(spark)
    assert texts(inbox.page("alice", "bob")) == ["text 1"]
    left = set(inbox.files()) - set(before)
    assert left

    reader = HistoryTables(inbox.tables)
    assert inbox.run(spark).messages == 1
    assert texts(asyncio.run(reader.page("alice", "bob"))) == ["text 3", "text 1"]  # it sees the new version
    assert not left & set(inbox.files())
    assert set(before) < set(inbox.files())  # for those who are reading the version before


def test_records_are_read_once_when_the_lake_merges_its_files_also_while_they_are_read(
    spark: SparkSession, inbox: Inbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    inbox.add(message(1))
    inbox.run(spark, 1)
    inbox.add(message(2), b"no entry")

    def merge() -> None:
        (plan,) = inbox.records.plan_merges(2**20, 2)
        staged = inbox.records.new_staging()
        staged.mkdir(parents=True)
        pq.write_table(pa.concat_tables(map(pq.read_table, plan.files)), staged / "part.parquet")
        inbox.records.apply_merge(plan, staged)

    reads: list[list[Path]] = []

    def files(records: ParquetRecords, session: SparkSession, topic: str) -> list[Path]:
        found = original(records, session, topic)
        reads.append(found)
        if len(reads) == 1:
            merge()
        return found

    original = ParquetRecords.files
    monkeypatch.setattr(ParquetRecords, "files", files)
    done = inbox.run(spark)
    assert [len(found) for found in reads] == [2, 1]
    assert (done.records, done.messages, done.malformed) == (2, 1, 1)
    assert texts(inbox.page("alice", "bob")) == ["text 2", "text 1"]


# Without Spark


def test_rows_are_rewritten_a_few_times_only_and_a_bucket_has_few_files() -> None:
    files: list[MessagesFile] = []
    rewritten = 0
    for run in range(2000):
        merged = to_merge(files, 1000)
        rows = sum(file.rows for file in merged)
        rewritten += rows
        files = [file for file in files if file not in merged]
        files.append(MessagesFile(f"{run}", 0, 1000 + rows, 0, 0))
        assert len(files) <= 9
    assert sum(file.rows for file in files) == 2_000_000
    assert rewritten < 12 * 2_000_000


def test_new_messages_are_compared_with_files_that_may_have_them_already() -> None:
    files = [MessagesFile("a", 0, 10, 1, 10), MessagesFile("b", 0, 10, 8, 20), MessagesFile("c", 0, 10, 21, 30)]
    assert [file.path for file in to_compare(files, NewRows(5, 10, 20))] == ["a", "b"]
    assert to_compare(files, NewRows(5, 31, 40)) == []


def test_a_folder_that_is_not_of_the_job_is_refused_and_not_changed(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(NotOurs):
        HistoryTables(tmp_path)
    with pytest.raises(NotOurs), HistoryFiles(tmp_path).exclusive():
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_tables_keep_their_number_of_buckets_and_are_written_by_one_run_at_a_time(tmp_path: Path) -> None:
    files = HistoryFiles(tmp_path / "tables")
    with files.exclusive(5) as manifest, pytest.raises(Busy), HistoryFiles(tmp_path / "tables").exclusive():
        pass
    assert manifest == Manifest(buckets=5)
    with pytest.raises(InvalidValue, match="expected 5"):
        files.check(6)
    assert asyncio.run(HistoryTables(tmp_path / "tables").page("alice", "bob")) == Page([], more=False)
    with pytest.raises(InvalidValue, match="NUL"):
        asyncio.run(HistoryTables(tmp_path / "tables").page("alice", "b\0b"))


@pytest.mark.parametrize("content", ["{", "[]", '{"schema_version": 1}'])
def test_a_damaged_manifest_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(Damaged):
        HistoryTables(tmp_path)


def test_tables_of_another_version_are_refused(tmp_path: Path) -> None:
    write_json(tmp_path / "manifest.json", {"schema_version": 2})
    with pytest.raises(WrongSchemaVersion):
        HistoryTables(tmp_path)


def test_a_damaged_file_is_reported(tmp_path: Path) -> None:
    files = HistoryFiles(tmp_path)
    with files.exclusive(1) as manifest:
        path = files.new_folder("messages") / "bucket=0" / "part.parquet"
        path.parent.mkdir(parents=True)
        path.write_bytes(b"PAR1 and nothing else")
        file = MessagesFile(str(path.relative_to(tmp_path)), 0, 1, 1, 1)
        files.publish(manifest, Manifest(buckets=1, messages=(file,)))
    with pytest.raises(Damaged):
        asyncio.run(HistoryTables(tmp_path).page("alice", "bob"))


def test_a_missing_file_is_reported_and_not_taken_for_an_end(tmp_path: Path) -> None:
    files = HistoryFiles(tmp_path)
    with files.exclusive(1) as manifest:
        lost = MessagesFile("messages/1/bucket=0/part.parquet", 0, 1, 1, 1)
        files.publish(manifest, Manifest(buckets=1, messages=(lost,)))
    with pytest.raises(Damaged, match="missing"):
        asyncio.run(HistoryTables(tmp_path).page("alice", "bob"))
