"""The tables of conversations: the job `history`, and pages read from its tables without Spark.

Run it with `python -m bench.history_tables`. It publishes messages to a lake without a log, adds them to the tables,
and then twice a hundredth as many; Spark starts cold. Pages are read one after the other; most conversations exist.
"""

import argparse
import asyncio
import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from bench.figures import milliseconds
from pyspark.sql import SparkSession

from shardyard.messaging.history.tables import HistoryTables
from shardyard.pipeline.history.history import history
from shardyard.pipeline.lake.lake import Lake
from shardyard.pipeline.lake.parquet import ParquetRecords
from shardyard.pipeline.session import session
from shardyard.wire.inbox import InboxEntry, encode_entry

PARTITIONS = 12
FILE_RECORDS = 250_000
PAGES = 2_000


def pair(rng: random.Random, users: int) -> tuple[str, str]:
    """Two of the users. Everybody writes to 20 others, to some of them much more often."""
    sender = rng.randrange(users)
    return f"user-{sender}", f"user-{(sender + 1 + int(20 * rng.random() ** 3)) % users}"


def entries(first: int, count: int, users: int) -> Iterator[InboxEntry]:
    rng = random.Random(first)
    for number in range(first, first + count):
        sender, recipient = rng.sample(pair(rng, users), 2)
        text = f"message {number} " + " ".join(rng.choices(("where", "are", "you", "today", "tomorrow", "?"), k=8))
        at = 1_760_000_000_000 + number
        yield InboxEntry(at << 22, sender, recipient, "phone", number, at, text)


def fill(lake: Lake, batch: int, first: int, count: int, users: int) -> None:
    """Publish a batch of messages, as ingest does. The partitions do not matter to the job."""
    records = ParquetRecords(lake, 1)
    with lake.exclusive("parquet"):
        lake.set_topics(["inbox"])
        staged = records.new_staging()
        folder = staged / "topic=inbox" / "day=2025-10-09"
        folder.mkdir(parents=True)
        for start in range(first, first + count, FILE_RECORDS):
            size = min(FILE_RECORDS, first + count - start)
            columns = {
                "epoch": pa.repeat(pa.scalar(1, pa.int64()), size),
                "partition": pa.array([n % PARTITIONS for n in range(start, start + size)], pa.int32()),
                "offset": pa.array([n // PARTITIONS for n in range(start, start + size)], pa.int64()),
                "value": pa.array(map(encode_entry, entries(start, size, users)), pa.binary()),
            }
            pq.write_table(pa.table(columns), folder / f"part-{start}.parquet")
        records.complete(batch, staged)
        records.publish(batch)


def bench_runs(spark: SparkSession, lake: Lake, tables: Path, messages: int, users: int, buckets: int) -> None:
    more = messages // 100
    for batch, (first, count) in enumerate([(0, messages), (messages, more), (messages + more, more)]):
        fill(lake, batch, first, count, users)
        start = time.perf_counter()
        done = history(spark, lake.root, tables, buckets=buckets)
        took = time.perf_counter() - start
        print(f"{done.messages:9,} messages added in      {took:8.1f} s; {done.total:,} in {done.files} files")


async def bench_pages(tables: Path, users: int) -> None:
    reader = HistoryTables(tables)
    for name in ("footers not read yet", "footers in memory"):
        rng = random.Random(1)
        first, next_ = [], []
        for _ in range(PAGES):
            user, peer = pair(rng, users)
            start = time.perf_counter()
            page = await reader.page(user, peer)
            first.append(time.perf_counter() - start)
            if page.messages:
                start = time.perf_counter()
                await reader.page(user, peer, before=int(page.messages[len(page.messages) // 2].id))
                next_.append(time.perf_counter() - start)
        for kind, times in {"first": first, "next": next_}.items():
            print(f"{kind:5} page of 50, {name:20}  {milliseconds(times, 50, 99)} ms p50 / p99")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=1_000_000)
    parser.add_argument("--users", type=int, default=20_000)
    parser.add_argument("--buckets", type=int, default=64)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="shardyard-bench-") as name:
        lake, tables = Lake(Path(name) / "lake"), Path(name) / "tables"
        spark = session("bench", master="local[2]", memory="4g")
        bench_runs(spark, lake, tables, options.messages, options.users, options.buckets)
        spark.stop()
        size = sum(path.stat().st_size for path in tables.rglob("*.parquet"))
        print(f"bytes on disk                     {size:12,}")
        asyncio.run(bench_pages(tables, options.users))


if __name__ == "__main__":
    main()
