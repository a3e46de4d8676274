"""The Spark pipeline: reading and writing topics, ingest, resharding, micro-batches, placement in a column.

Run it with `make bench` or `python -m bench.pipeline`; `bench/README.md` explains how each figure is measured.
"""

import argparse
import asyncio
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from bench.fanout_snapshot import SAMPLE_SECONDS, Usage
from bench.figures import percentile
from bench.reshard_switch import bench_switch
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 the usual name

from shardyard.log import Sender, open_log
from shardyard.model import Partition
from shardyard.model.batch import SCHEMA
from shardyard.pipeline.delta_jars import has_delta
from shardyard.pipeline.lake.ingest import ingest
from shardyard.pipeline.partitioning import placement_column
from shardyard.pipeline.reshard.reshard import reshard
from shardyard.pipeline.session import session
from shardyard.placement import HASHES, generate_ids

PARTS = ["placement", "latency", "read", "ingest", "write", "reshard", "switch"]
ROUNDS = 3
PARTITIONS = 16
SEND_RECORDS = 50_000
VALUE_BYTES = 256
LATENCY_SECONDS = 20.0


def records(first: int, count: int, rng: np.random.Generator) -> pa.RecordBatch:
    """Records with the keys of 50 000 customers and values that do not compress."""
    numbers = pa.array(np.arange(first, first + count)).cast(pa.string())
    keys = pa.array(rng.integers(0, 50_000, count)).cast(pa.string())
    values = pa.FixedSizeBinaryArray.from_buffers(
        pa.binary(VALUE_BYTES), count, [None, pa.py_buffer(rng.bytes(count * VALUE_BYTES))]
    )
    return pa.RecordBatch.from_arrays(
        [
            pc.binary_join_element_wise("order-", numbers, ""),
            pc.binary_join_element_wise("customer-", keys, "").cast(pa.binary()),
            values.cast(pa.binary()),
            pa.nulls(count, SCHEMA.field("headers").type),
            pa.repeat(0, count),
        ],
        schema=SCHEMA,
    )


async def fill(log: str, count: int) -> None:
    rng = np.random.default_rng(1)
    async with open_log(log, durability="process") as opened:
        await opened.create_topic("orders", PARTITIONS)
        sender = Sender(opened, "orders")
        for first in range(0, count, SEND_RECORDS):
            await sender.send(records(first, SEND_RECORDS, rng))
        await opened.maintain()


def read_topic(spark: SparkSession, log: str, name: str = "orders") -> DataFrame:
    return spark.read.format("shardyard").options(log=log, topics=name).load()


def write_nowhere(frame: DataFrame) -> None:
    """Compute all rows and discard them."""
    frame.write.format("noop").mode("overwrite").save()


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def best(work: Callable[[], object], rounds: int = ROUNDS) -> float:
    """Seconds of the fastest of `rounds` rounds, after one round to warm up."""
    work()
    return min(seconds(work) for _ in range(rounds))


def format_rates(rates: Sequence[float]) -> str:
    return ", ".join(f"{rate:,.0f}" for rate in rates)


def bench_read(spark: SparkSession, log: str, folder: Path, count: int) -> None:
    rows = best(lambda: write_nowhere(read_topic(spark, log)))
    keys = best(
        lambda: write_nowhere(
            spark.read.format("shardyard").schema("partition int, key binary").options(log=log, topics="orders").load()
        )
    )
    path = str(folder / "copy.parquet")
    read_topic(spark, log).write.parquet(path)
    parquet = best(lambda: write_nowhere(spark.read.parquet(path)))
    print(f"batch read, all columns        {count / rows:12,.0f} records/s")
    print(f"batch read, partition and key  {count / keys:12,.0f} records/s")
    print(f"the same rows from Parquet     {count / parquet:12,.0f} records/s")


def bench_ingest(spark: SparkSession, log: str, folder: Path, count: int) -> None:
    """Both formats in turn, so that both meet the same load and the same warm JVM."""
    formats = ["parquet", "delta"] if has_delta(spark) else ["parquet"]
    rates: dict[str, list[float]] = {name: [] for name in formats}
    processor: dict[str, list[float]] = {name: [] for name in formats}
    with Usage() as usage:
        for _ in range(ROUNDS):
            for name in formats:
                shutil.rmtree(folder / "lake", ignore_errors=True)
                time.sleep(2 * SAMPLE_SECONDS)
                before = usage.processor_seconds
                took = seconds(partial(ingest, spark, log, ["orders"], folder / "lake", format=name))
                time.sleep(2 * SAMPLE_SECONDS)
                rates[name].append(count / took)
                processor[name].append((usage.processor_seconds - before) / count * 1e6)
    for name in formats:
        used = ", ".join(f"{one:.1f}" for one in processor[name])
        print(f"streaming ingest, {name:13}{format_rates(rates[name])} records/s, round by round")
        print(f"  processor time               {used} s per million records")


def bench_write(spark: SparkSession, log: str, count: int) -> None:
    async def create(name: str) -> None:
        async with open_log(log) as opened:
            await opened.create_topic(name, PARTITIONS)

    def copy(name: str) -> None:
        read_topic(spark, log).write.format("shardyard").options(log=log, topic=name).mode("append").save()

    rates = []
    for name in ("copy-1", "copy-2"):
        asyncio.run(create(name))
        rates.append(count / seconds(partial(copy, name)))
    print(f"batch write, including read    {format_rates(rates)} records/s, round by round")


def bench_reshard(spark: SparkSession, log: str, count: int) -> None:
    took = seconds(lambda: print(reshard(spark, log, "orders", partitions=24)))
    print(f"reshard 16 -> 24, with check   {count / took:12,.0f} records/s")


def bench_latency(spark: SparkSession, log: str, folder: Path) -> None:
    """Append a few records every 50 ms: how long a micro-batch takes, and how soon it sees a record."""

    async def trickle(stop: threading.Event) -> None:
        rng = np.random.default_rng(2)
        async with open_log(log) as opened:
            await opened.create_topic("trickle", 4)
            ready.set()
            first = 0
            while not stop.is_set():
                await opened.append(Partition("trickle", first % 4), records(first, 10, rng))
                first += 10
                await asyncio.sleep(0.05)

    delays: list[float] = []

    def measure_delay(frame: DataFrame, _batch: int) -> None:
        row = frame.select(F.unix_millis(F.max("timestamp")).alias("at")).first()
        if row is not None and row["at"] is not None:
            delays.append(time.time() * 1000 - row["at"])

    stop, ready = threading.Event(), threading.Event()
    producer = threading.Thread(target=lambda: asyncio.run(trickle(stop)))
    producer.start()
    ready.wait()
    stream = spark.readStream.format("shardyard").options(log=log, topics="trickle").load()
    query = stream.writeStream.foreachBatch(measure_delay).option("checkpointLocation", str(folder / "trickle")).start()
    time.sleep(LATENCY_SECONDS)
    batches = [p.durationMs["triggerExecution"] for p in query.recentProgress if p.numInputRows]
    query.stop()
    stop.set()
    producer.join()
    for what, times in (("micro-batch under light load  ", batches), ("appended -> seen in a batch   ", delays)):
        warm = times[len(times) // 4 :]
        print(f"{what} p50 {percentile(warm, 50):.0f} ms, p99 {percentile(warm, 99):.0f} ms, {len(warm)} batches")


def bench_placement(spark: SparkSession, folder: Path, count: int) -> None:
    path = folder / "keys.parquet"
    with pq.ParquetWriter(path, pa.schema([("text", pa.string()), ("binary", pa.binary())])) as writer:
        for chunk in generate_ids("text", count):
            writer.write_table(pa.table({"text": chunk, "binary": chunk.cast(pa.binary())}))
    keys = spark.read.parquet(str(path))
    compare_placement(keys, "text", count, [("fnv1a32", "modulus")])
    compare_placement(keys, "binary", count, [(hash_, "modulus") for hash_ in HASHES] + [("xxh64", "jump")])


def compare_placement(keys: DataFrame, kind: str, count: int, schemes: Sequence[tuple[str, str]]) -> None:
    """Spark's own hash and each scheme in turn; the best of each."""
    frames = {"pmod(hash(key), 256)": keys.select(F.pmod(F.hash(kind), F.lit(256)).alias("p"))}
    for hash_, partitioner in schemes:
        placed = keys.select(placement_column(kind, hash_, partitioner, 256).alias("p"))
        frames[f"{hash_} {partitioner}"] = placed
    times: dict[str, list[float]] = {name: [] for name in frames}
    for _ in range(1 + ROUNDS):
        for name, frame in frames.items():
            times[name].append(seconds(frame.agg(F.sum("p")).collect))
    spark_hash, *_ = bests = {name: min(taken[1:]) for name, taken in times.items()}
    for name, taken in bests.items():
        ratio = taken / bests[spark_hash]
        print(f"{name:20} {kind:6}    {count / taken:12,.0f} keys/s, {ratio:.2f} times as long")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, default=4_000_000, help="records in the topic")
    parser.add_argument("--keys", type=int, default=20_000_000, help="keys to place")
    parser.add_argument(
        "--only",
        choices=PARTS,
        help="run one part alone",
    )
    parser.add_argument("--rate", type=int, default=3_000, help="records per second that producers send in `switch`")
    parser.add_argument("--switches", type=int, default=100, help="how often a topic is resharded in `switch`")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="shardyard-bench-") as name:
        folder = Path(name)
        log = f"sqlite:///{folder / 'log'}"
        if options.only not in ("latency", "placement"):
            asyncio.run(fill(log, options.records))
        spark = session("bench", master="local[2]", memory="4g")
        parts = [options.only] if options.only else PARTS
        for part in parts:
            match part:
                case "read":
                    bench_read(spark, log, folder, options.records)
                case "ingest":
                    bench_ingest(spark, log, folder, options.records)
                case "write":
                    bench_write(spark, log, options.records)
                case "reshard":
                    bench_reshard(spark, log, options.records)
                case "switch":
                    bench_switch(spark, log, f"sqlite:///{folder / 'registry.db'}", options.rate, options.switches)
                case "latency":
                    bench_latency(spark, log, folder)
                case "placement":
                    bench_placement(spark, folder, options.keys)
        spark.stop()


if __name__ == "__main__":
    main()
