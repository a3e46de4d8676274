"""The embedded log while it grows to 10 million records, and small reads out of the large batches that merging makes.

Run it with `make bench` or `python -m bench.log_growth`; `--records 1000000` is quicker. `bench/README.md` explains how
each figure is measured.
"""

import argparse
import asyncio
import tempfile
import time
from pathlib import Path

import pyarrow as pa
from bench.figures import filesystem, milliseconds, pin_to_cores, rate, sync_seconds, table
from bench.systems import ARROW, BATCH_RECORDS, PARTITIONS, READ_RECORDS, RECORD_BYTES, RECORDS, TOPIC

from shardyard.log.sqlite import SqliteLog
from shardyard.model import Partition

RECORDS_AT_THE_END = 10_000_000
STEPS = 5
BATCHES_IN_FLIGHT = 32
SINGLES = 200
"""Single appends, one after another, after each step."""
READ_AT_ONCE = 100_000
"""Records read from the beginning, and as many from the end, after each step."""
STORED_RECORDS = (1_000, 4_000)
"""The sizes of stored batches out of which a few records at a time are read. Merging makes the smaller one."""
SMALL_READ_RECORDS = (10, 100)
SMALL_READS = 4_000
"""Reads in a round."""
ROUNDS = 3


async def append(log: SqliteLog, partitions: list[Partition], count: int) -> float:
    """Append batches of 500 to all partitions in turn, 32 in flight: records per second."""
    left = count // BATCH_RECORDS
    start = time.perf_counter()

    async def produce() -> None:
        nonlocal left
        while left > 0:
            left -= 1
            await log.append(partitions[left % len(partitions)], ARROW)

    await asyncio.gather(*(produce() for _ in range(BATCHES_IN_FLIGHT)))
    return count / (time.perf_counter() - start)


async def append_singles(log: SqliteLog, partition: Partition) -> list[float]:
    """The seconds that each append of a single record takes, one after another."""
    seconds = []
    for i in range(SINGLES):
        start = time.perf_counter()
        await log.append(partition, [RECORDS[i % len(RECORDS)]])
        seconds.append(time.perf_counter() - start)
    return seconds


async def read(log: SqliteLog, partition: Partition, offset: int, end: int, max_records: int) -> float:
    """Read from `offset` to `end`: records per second."""
    at = offset
    start = time.perf_counter()
    while at < end:
        at = (await log.read(partition, at, max_records=min(max_records, end - at))).end
    return (end - offset) / (time.perf_counter() - start)


def gigabytes(folder: Path) -> float:
    return sum(path.stat().st_size for path in folder.iterdir() if path.is_file()) / 1e9


async def grow(folder: Path, records: int) -> None:
    rows = []
    async with SqliteLog(folder) as log:
        partitions = list(await log.create_topic(TOPIC, PARTITIONS))
        for step in range(1, STEPS + 1):
            appended = await append(log, partitions, records // STEPS)
            singles = await append_singles(log, partitions[0])
            span = await log.span(partitions[0])
            most = min(READ_AT_ONCE, span.end)
            oldest = await read(log, partitions[0], 0, most, READ_RECORDS)
            newest = await read(log, partitions[0], span.end - most, span.end, READ_RECORDS)
            total = f"{step * (records // STEPS) / 1e6:.1f} M"
            speeds = [rate(appended), milliseconds(singles, 50, 99), rate(oldest), rate(newest)]
            rows.append([total, f"{gigabytes(folder):.2f} GB", *speeds])
    head = ["records", "on disk", "appended/s", "single append, p50 / p99 ms", "oldest read/s", "newest read/s"]
    table(head, rows)


async def small_reads(folder: Path) -> None:
    rows = []
    async with SqliteLog(folder, maintain_every=None) as log:
        for stored in STORED_RECORDS:
            partition, *_ = await log.create_topic(f"of-{stored}", 1)
            chunks = [ARROW] * (stored // BATCH_RECORDS)
            batch = pa.Table.from_batches(chunks).combine_chunks().to_batches()[0]
            end = SMALL_READS * max(SMALL_READ_RECORDS)
            for _ in range(end // stored):
                await log.append(partition, batch)
            best = [
                max([await read(log, partition, 0, SMALL_READS * few, few) for _ in range(ROUNDS)])
                for few in SMALL_READ_RECORDS
            ]
            rows.append([f"out of stored batches of {stored}", *map(rate, best)])
    table(["small reads, records/s", *(f"{few} at a time" for few in SMALL_READ_RECORDS)], rows)


async def main(records: int) -> None:
    print(f"log_growth: {pin_to_cores()}, {PARTITIONS} partitions, records of {RECORD_BYTES} random bytes")
    with tempfile.TemporaryDirectory(prefix="shardyard-bench-") as temporary:
        root = Path(temporary)
        print(f"in {root}: {filesystem(root)}, a sync of 4 KiB takes {sync_seconds(root) * 1e3:.2f} ms")
        await small_reads(root / "small-reads")
        print()
        await grow(root / "growth", records)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, default=RECORDS_AT_THE_END, help="how far the log grows")
    asyncio.run(main(parser.parse_args().records))
