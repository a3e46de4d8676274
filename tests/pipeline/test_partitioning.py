"""Placement inside Spark gives the same partitions as `shardyard.placement`, bit for bit."""

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession
from pyspark.sql.types import BinaryType, LongType, StringType, StructField, StructType

from shardyard.model import InvalidValue
from shardyard.pipeline.partitioning import placement_column
from shardyard.placement import HASHES, partitioner_named

KEYS = ["", "a", "user-1", "ch_general", "ключ", "x" * 300, None]
SCHEMA = StructType([StructField("b", BinaryType()), StructField("s", StringType()), StructField("n", LongType())])
ROWS = [(k.encode() if k is not None else None, k, i - 3) for i, k in enumerate(KEYS)]
PARTITIONERS = [(h, "modulus") for h in HASHES] + [
    ("xxh64", "jump"),
    ("fnv1a64", "jump"),
    (None, "modulus"),
    (None, "jump"),
]


@pytest.mark.parametrize(("hash_", "partitioner"), PARTITIONERS)
@pytest.mark.parametrize("column", ["b", "s", "n"])
def test_a_column_has_the_same_partitions_as_placement(
    spark: SparkSession, hash_: str | None, partitioner: str, column: str
) -> None:
    frame = spark.createDataFrame(ROWS, SCHEMA)
    found = frame.select(placement_column(column, hash_, partitioner, 17).alias("p"), column).collect()
    reference = partitioner_named(partitioner, 17, hash_)
    keys = [bytes(row[column]) if isinstance(row[column], bytearray) else row[column] for row in found]
    assert [row["p"] for row in found] == [reference.place(key) for key in keys]
    assert [row["p"] for row in found] == reference.place_array(pa.array(keys)).to_pylist()


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
