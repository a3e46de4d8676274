"""The `balance` job over many keys: time, and memory of all processes, compared with DuckDB and Polars.

Run it with `make bench` or `python -m bench.balance`. Keys are strings (`user-1`, ...) in Parquet files of 5 M rows,
each with a size in bytes. `distinct` has every key once; `zipf` has a tenth as many distinct keys, of which the n-th
occurs about 1/n as often as the first.

Shardyard computes the whole report: six schemes (fnv1a32 and xxh64 modulus, xxh64 jump, at 12 and 256 partitions), hot
keys by records and by bytes, the number of keys, the key check, 16 members. DuckDB and Polars have neither fnv1a nor
jump. `duckdb` and `polars` do less: records and bytes per partition, at 12 and 256 partitions, with their own hash, and
the 10 keys with the most records. `duckdb-all` answers as many questions as Shardyard, except for the key check: six
schemes of its own hash in one query, and in another the 10 keys with the most records, the 10 with the most bytes, and
the number of keys. DuckDB is limited to 6 GB and spills to disk beyond that. A system that uses more than 10 GB is
stopped.

Start-up is measured apart: imports, the JVM, the session, and the schema of the files. The run after it is a cold one,
in which the JVM still compiles. Before all runs, a command over a few keys makes what a user's first command makes: the
archive of classes, and Shardyard's compiled functions for Spark.
"""

import argparse
import multiprocessing
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from bench.figures import filesystem, pin_to_cores, rate, table

from shardyard.placement import generate_ids

SIZES = (20_000_000, 100_000_000)
FILE_ROWS = 5_000_000
CHUNK_ROWS = 1_000_000
ZIPF_KEYS_PER_RECORD = 0.1
"""Distinct keys in the `zipf` data, per record."""
PARTITIONS = (12, 256)
TARGET = "without start-up within twice the time of DuckDB"
MAX_BYTES = 10 * 1024**3
"""A system that uses more memory is stopped, because the machine is shared."""
SAMPLE_SECONDS = 0.5

_TICKS = os.sysconf("SC_CLK_TCK")


# Data


def write_keys(folder: Path, variant: str, count: int) -> None:
    random = np.random.default_rng(1)
    schema = pa.schema([("key", pa.string()), ("size", pa.int32())])
    chunks = generate_ids("text", count, CHUNK_ROWS)
    if variant == "zipf":
        pool = pa.concat_arrays(generate_ids("text", int(count * ZIPF_KEYS_PER_RECORD), CHUNK_ROWS))
        chunks = (_zipf(random, pool, min(CHUNK_ROWS, count - start)) for start in range(0, count, CHUNK_ROWS))
    folder.mkdir()
    for number in range(-(-count // FILE_ROWS)):
        with pq.ParquetWriter(folder / f"{number:05}.parquet", schema) as writer:
            for _, keys in zip(range(FILE_ROWS // CHUNK_ROWS), chunks, strict=False):
                sizes = pa.array(random.integers(100, 1000, len(keys), np.int32))
                writer.write_table(pa.table([keys, sizes], schema=schema))


def _zipf(random: np.random.Generator, pool: pa.Array, count: int) -> pa.Array:
    ranks = np.exp(random.random(count) * np.log(len(pool))).astype(np.int64)
    return pool.take(pa.array(np.minimum(ranks, len(pool)) - 1))


# The systems. Each returns its start-up time, its run time, and the records of the hottest key as a cross-check


def shardyard(folder: Path, temporary: Path) -> tuple[float, float, str]:
    start = time.perf_counter()
    from shardyard.pipeline.balance.report import Scheme, balance_report, loads_of_table  # noqa: PLC0415 part of the start-up time
    from shardyard.pipeline.session import session  # noqa: PLC0415 likewise

    rules = (("modulus", "fnv1a32"), ("modulus", "xxh64"), ("jump", "xxh64"))
    schemes = [Scheme(partitioner, hash_, count) for partitioner, hash_ in rules for count in PARTITIONS]
    spark = session("bench", master="local[2]", settings={"spark.local.dir": str(temporary)})
    loads = loads_of_table(spark.read.parquet(str(folder)), key="key", bytes="size")
    ready = time.perf_counter()
    report = balance_report(loads, schemes, assignors=["sticky"], members=[16])
    seconds = time.perf_counter() - ready
    (topic,) = report.topics
    spark.stop()
    hot = topic.hot_keys
    most = f"{hot.keys[0].records:,} records" if hot.keys else f"at most {hot.others_records:,} records"
    keys = f"{'' if topic.key_check.exact else 'about '}{topic.key_check.distinct:,} keys"
    return ready - start, seconds, f"{most}; {keys}; {topic.sentence}"


def duckdb(folder: Path, temporary: Path) -> tuple[float, float, str]:
    start = time.perf_counter()
    import duckdb as engine  # noqa: PLC0415 installed only for the benchmarks

    settings: dict[str, str | bool | int | float | list[str]] = {
        "memory_limit": "6GB",
        "threads": 2,
        "temp_directory": str(temporary),
        "preserve_insertion_order": False,
    }
    with engine.connect(config=settings) as database:
        ready = time.perf_counter()
        rows = f"read_parquet('{folder}/*.parquet')"
        for count in PARTITIONS:
            per_partition = f"SELECT hash(key) % {count}, count(*), sum(size) FROM {rows} GROUP BY 1"
            assert len(database.execute(per_partition).fetchall()) == count
        hot = f"SELECT key, count(*) AS n FROM {rows} GROUP BY key ORDER BY n DESC LIMIT 10"
        (_, most), *_ = database.execute(hot).fetchall()
        return ready - start, time.perf_counter() - ready, f"{most:,} records"


def duckdb_all(folder: Path, temporary: Path) -> tuple[float, float, str]:
    start = time.perf_counter()
    import duckdb as engine  # noqa: PLC0415 installed only for the benchmarks

    settings: dict[str, str | bool | int | float | list[str]] = {
        "memory_limit": "6GB",
        "threads": 2,
        "temp_directory": str(temporary),
        "preserve_insertion_order": False,
    }
    with engine.connect(config=settings) as database:
        ready = time.perf_counter()
        rows = f"read_parquet('{folder}/*.parquet')"
        schemes = [f"hash(key, {seed}) % {count}" for seed in range(3) for count in PARTITIONS]
        names = [f"p{i}" for i in range(len(schemes))]
        placed = ", ".join(f"{scheme} AS {name}" for scheme, name in zip(schemes, names, strict=True))
        per_partition = (
            f"SELECT {', '.join(names)}, count(*), sum(size) FROM (SELECT size, {placed} FROM {rows}) "
            f"GROUP BY GROUPING SETS ({', '.join(f'({name})' for name in names)})"
        )
        assert len(database.execute(per_partition).fetchall()) == 3 * sum(PARTITIONS)
        keys = f"WITH keys AS MATERIALIZED (SELECT key, count(*) AS n, sum(size) AS b FROM {rows} GROUP BY key) "
        top = ", ".join(f"(SELECT list(n) FROM (SELECT n, b FROM keys ORDER BY {unit} DESC LIMIT 10))" for unit in "nb")
        found = database.execute(f"{keys} SELECT {top}, (SELECT count(*) FROM keys)").fetchone()
        assert found is not None
        return ready - start, time.perf_counter() - ready, f"{max(found[0]):,} records; {found[2]:,} keys"


def polars(folder: Path, temporary: Path) -> tuple[float, float, str]:
    start = time.perf_counter()
    os.environ |= {"POLARS_MAX_THREADS": "2", "POLARS_TEMP_DIR": str(temporary)}
    import polars as pl  # noqa: PLC0415 installed only for the benchmarks

    ready = time.perf_counter()
    rows = pl.scan_parquet(folder / "*.parquet")
    for count in PARTITIONS:
        by_partition = rows.group_by(pl.col("key").hash() % count)
        assert by_partition.agg(pl.len(), pl.col("size").sum()).collect(engine="streaming").height == count
    hot = (
        rows.group_by("key")
        .agg(pl.len().alias("n"))
        .top_k(10, by="n")
        .sort("n", descending=True)
        .collect(engine="streaming")
    )
    return ready - start, time.perf_counter() - ready, f"{int(hot['n'].to_list()[0]):,} records"


SYSTEMS = {"shardyard": shardyard, "duckdb": duckdb, "duckdb-all": duckdb_all, "polars": polars}
System = Callable[[Path, Path], tuple[float, float, str]]


# Measuring a process and all of its descendants


@dataclass(slots=True)
class Figures:
    start_seconds: float = float("nan")
    seconds: float = float("nan")
    cpu: float = 0.0
    """CPU seconds of all processes, including start-up."""
    peak: int = 0
    """Bytes of all processes together; memory that they share counts once."""
    result: str = "stopped"
    _cpu: dict[int, float] = field(default_factory=dict)

    def sample(self, root: int) -> None:
        """Update CPU and memory with the current use of the process `root` and its descendants."""
        used = 0
        for process in process_tree(root):
            try:
                used += _pss(process)
                self._cpu[process] = _cpu_seconds(process)
            except (FileNotFoundError, ProcessLookupError):  # it ended in the meantime
                continue
        self.peak = max(self.peak, used)
        self.cpu = sum(self._cpu.values())


def process_tree(root: int) -> list[int]:
    """A process and all its descendants."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (FileNotFoundError, ProcessLookupError):
                continue
            children.setdefault(parent, []).append(int(entry.name))
    tree = [root]
    for process in tree:
        tree += children.get(process, [])
    return tree


def _pss(process: int) -> int:
    for line in Path(f"/proc/{process}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    return 0


def _cpu_seconds(process: int) -> float:
    parts = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(parts[11]) + int(parts[12])) / _TICKS


def _child(connection: Connection, system: System, folder: Path, temporary: Path) -> None:
    connection.send(system(folder, temporary))


def measure(system: System, folder: Path, temporary: Path) -> Figures:
    spawn = multiprocessing.get_context("spawn")
    connection, child_connection = spawn.Pipe(duplex=False)
    process = spawn.Process(target=_child, args=(child_connection, system, folder, temporary))
    process.start()
    child_connection.close()
    figures, finished = Figures(), threading.Event()
    while not finished.wait(SAMPLE_SECONDS):
        if connection.poll():
            figures.start_seconds, figures.seconds, figures.result = connection.recv()
            finished.set()
        elif not process.is_alive():
            figures.result = f"ended with exit code {process.exitcode}"
            finished.set()
        elif process.pid is not None:
            figures.sample(process.pid)
            if figures.peak > MAX_BYTES:
                process.kill()
                figures.result = f"stopped at more than {MAX_BYTES / 1e9:.1f} GB"
                finished.set()
    process.join()
    return figures


def prepare(folder: Path) -> None:
    """Make what later commands find in the cache, by a command over a few keys."""
    write_keys(folder, "distinct", 1000)
    command = [sys.executable, "-m", "shardyard", "pipeline", "balance", "--parquet", str(folder), "--bytes", "size"]
    subprocess.run(command, check=True, capture_output=True)


def main(sizes: list[int], variants: list[str], systems: list[str]) -> None:
    print(f"balance: {pin_to_cores()}; target for Shardyard: {TARGET}")
    rows = []
    with tempfile.TemporaryDirectory(prefix="shardyard-bench-") as temporary:
        root = Path(temporary)
        print(f"in {root}: {filesystem(root)}")
        spill = root / "spill"
        spill.mkdir()
        if "shardyard" in systems:
            prepare(root / "few")
        for variant in variants:
            for count in sizes:
                folder = root / f"{variant}-{count}"
                write_keys(folder, variant, count)
                for name in systems:
                    load = os.getloadavg()[0]
                    f = measure(SYSTEMS[name], folder, spill)
                    print(f"{variant} {count:,} {name}: {f.seconds:.1f} s, CPU {f.cpu:.0f} s", flush=True)
                    print(f"    the hottest key has {f.result}", flush=True)
                    row = [
                        f"{variant} {rate(count)}",
                        name,
                        f"{f.start_seconds:.1f}",
                        f"{f.seconds:.1f}",
                        f"{f.cpu:.0f}",
                    ]
                    rows.append([*row, f"{f.peak / 1e9:.2f}", rate(count / f.seconds), f"{load:.1f}"])
                for path in folder.iterdir():
                    path.unlink()
    table(["keys", "system", "start s", "seconds", "CPU s", "peak GB", "keys/s", "load before"], rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), help="numbers of records")
    parser.add_argument("--variants", nargs="+", choices=["distinct", "zipf"], default=["distinct", "zipf"])
    parser.add_argument("--systems", nargs="+", choices=list(SYSTEMS), default=list(SYSTEMS))
    options = parser.parse_args()
    main(options.sizes, options.variants, options.systems)
