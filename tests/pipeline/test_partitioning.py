"""Placement inside Spark gives the same partitions as `shardyard.placement`, bit for bit."""

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812 as everybody calls it
from pyspark.sql.types import BinaryType, LongType, StringType, StructField, StructType

from shardyard.model import InvalidValue
from shardyard.pipeline import partitioning
from shardyard.pipeline.jvm.functions import call, has_functions
from shardyard.pipeline.partitioning import placement_column
from shardyard.placement import HASHES, partitioner_named

TEXTS = ["", "a", "user-1", "ch_general", "ключ", "x" * 300, None]
KEYS = [*TEXTS, *("0123456789ab€defghijklmnopqrstuvwxyzABCDEFGHIJ"[:n] for n in range(40))]
SCHEMA = StructType([StructField("b", BinaryType()), StructField("s", StringType()), StructField("n", LongType())])
ROWS = [(k.encode() if k is not None else None, k, i - 3) for i, k in enumerate(KEYS)]
PARTITIONERS = [(h, "modulus") for h in HASHES] + [
    ("xxh64", "jump"),
    ("fnv1a64", "jump"),
    (None, "modulus"),
    (None, "jump"),
]


@pytest.mark.parametrize("hash_", list(HASHES))
def test_the_jvm_computes_the_same_hashes_of_binary_text_and_integer_keys(spark: SparkSession, hash_: str) -> None:
    assert has_functions(spark)
    frame = spark.createDataFrame(ROWS, SCHEMA)
    found = frame.select(*(call(hash_, F.col(name)).alias(name) for name in "bsn")).collect()
    for row, (_, text, number) in zip(found, ROWS, strict=True):
        assert [row["b"] % 2**64, row["s"] % 2**64] == [HASHES[hash_](text)] * 2
        assert row["n"] % 2**64 == HASHES[hash_](number)


@pytest.mark.parametrize("way", ["jvm", "arrow"])
@pytest.mark.parametrize("column", ["b", "s", "n", "i"])
def test_a_column_has_the_same_partitions_as_placement(
    spark: SparkSession, column: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if way == "arrow":
        monkeypatch.setattr(partitioning, "has_functions", lambda: False)
    frame = spark.createDataFrame(ROWS, SCHEMA).withColumn("i", F.nullif(F.col("n"), F.lit(1)).cast("short"))
    counts = [1, 12, 2**31 - 1]
    columns = [
        placement_column(column, hash_, partitioner, count).alias(f"{hash_} {partitioner} {count}")
        for hash_, partitioner in PARTITIONERS
        for count in counts
    ]
    found = frame.select(column, *columns).collect()
    keys = [bytes(row[column]) if isinstance(row[column], bytearray) else row[column] for row in found]
    for hash_, partitioner in PARTITIONERS:
        for count in counts:
            reference = partitioner_named(partitioner, count, hash_)
            places = [row[f"{hash_} {partitioner} {count}"] for row in found]
            assert places == [reference.place(key) for key in keys]
            assert places == reference.place_array(pa.array(keys)).to_pylist()


@pytest.mark.parametrize(
    ("hash_", "partitioner", "partitions", "message"),
    [
        ("fnv1a32", "modulus", 0, "partitions is 0: expected a whole number of at least 1"),
        ("md5", "modulus", 3, "hash is 'md5': expected one of"),
        ("fnv1a32", "jump", 3, "a 64-bit hash for jump"),
        (None, "round_robin", 3, "round_robin does not place by key"),
        (None, "ring", 3, "partitioner is 'ring'"),
    ],
)
def test_an_invalid_partitioner_is_refused_before_any_task_runs(
    hash_: str | None, partitioner: str, partitions: int, message: str
) -> None:
    with pytest.raises(InvalidValue, match=message):
        placement_column("key", hash_, partitioner, partitions)
