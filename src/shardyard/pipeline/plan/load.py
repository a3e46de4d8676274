"""The load of a topic: measured with Spark, or assumed."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyspark.sql import DataFrame, Row
from pyspark.sql import functions as F  # noqa: N812 as everybody calls it

from shardyard.model import InvalidValue, whole_number
from shardyard.model.checks import settle_whole_number
from shardyard.pipeline.balance.figures import shortened
from shardyard.pipeline.balance.loads import LOADS
from shardyard.placement import partitioner_named

MAX_SAMPLED_KEYS = 1_000_000
MAX_PARTITIONS = 100_000

Bytes = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class KeySample:
    """Some of the keys, and the bytes that each of them represents: together, those of all records with a key."""

    keys: pa.Array
    bytes: Bytes
    is_complete: bool = False
    """All keys are in it, each with its own bytes."""

    def __post_init__(self) -> None:
        if not 1 <= len(self.keys) <= MAX_SAMPLED_KEYS:
            raise InvalidValue("keys in the sample", len(self.keys), f"from 1 to {MAX_SAMPLED_KEYS}")
        if len(self.bytes) != len(self.keys):
            raise InvalidValue("bytes in the sample", len(self.bytes), f"one for each of {len(self.keys)} keys")
        if not np.isfinite(self.bytes).all() or (self.bytes < 0).any():
            raise InvalidValue("bytes in the sample", float(self.bytes.min()), "numbers of at least 0")

    @classmethod
    def scaled(cls, keys: pa.Array, sizes: npt.ArrayLike, total: int, *, is_complete: bool = False) -> Self:
        """A sample of keys with their own sizes, scaled so that it represents `total` bytes."""
        own = np.asarray(sizes, np.float64)
        return cls(keys, own * (total / own.sum() if own.sum() else 0.0), is_complete)


@dataclass(frozen=True, slots=True, eq=False)
class Load:
    """Records and bytes of a topic: in total, and per partition if they were measured."""

    records: int
    bytes: int
    partition_records: tuple[int, ...] = ()
    partition_bytes: tuple[int, ...] = ()
    records_per_second: float | None = None
    keys: KeySample | None = None
    distinct_keys: int | None = None
    """How many different keys there are, about; None if that is not known, or if some records have none."""

    def __post_init__(self) -> None:
        for name in ("records", "bytes"):
            numbers = enumerate(getattr(self, f"partition_{name}"))
            per_partition = tuple(whole_number(f"{name} of partition {i}", number, at_least=0) for i, number in numbers)
            object.__setattr__(self, f"partition_{name}", per_partition)
            settle_whole_number(self, name, at_least=0)
            if per_partition and sum(per_partition) != getattr(self, name):
                expected = f"{sum(per_partition)}, the sum over the partitions"
                raise InvalidValue(name, getattr(self, name), expected)
        if len(self.partition_bytes) != len(self.partition_records):
            raise InvalidValue("partition_bytes", len(self.partition_bytes), f"{len(self.partition_records)} numbers")
        rate = self.records_per_second
        if rate is not None and not 0 <= rate < math.inf:
            raise InvalidValue("records_per_second", rate, "a number of at least 0")
        if self.keys is not None and self.keys.bytes.sum() > self.bytes * (1 + 1e-9):
            raise InvalidValue("bytes in the sample", float(self.keys.bytes.sum()), f"at most {self.bytes} together")

    @classmethod
    def measured(
        cls, records: Sequence[int], sizes: Sequence[int], rate: float | None = None, keys: KeySample | None = None
    ) -> Self:
        """The load of a topic whose partitions have these records and bytes."""
        if not len(records):
            raise InvalidValue("records", list(records), "a number for each of at least one partition")
        return cls(sum(records), sum(sizes), tuple(records), tuple(sizes), rate, keys)

    @property
    def largest_key(self) -> tuple[str, float] | None:
        """The key with the most bytes, and its share of all of them; None if not all keys are known."""
        if self.keys is None or not self.keys.is_complete or not self.bytes:
            return None
        at = int(self.keys.bytes.argmax())
        return shortened(self.keys.keys[at].as_py()), float(self.keys.bytes[at]) / self.bytes

    def bytes_on(self, partitions: int, partitioner: str, hash_: str) -> tuple[Bytes, str]:
        """The bytes of each of this many partitions, and where they come from: `measured`, `sample` or `even`."""
        if len(self.partition_bytes) == partitions:
            return np.array(self.partition_bytes, np.float64), "measured"
        if self.keys is None:
            return np.full(partitions, self.bytes / partitions), "even"
        placement = partitioner_named(partitioner, partitions, hash_).place_array(self.keys.keys).to_numpy()
        with_key = np.asarray(np.bincount(placement, self.keys.bytes, partitions), np.float64)
        without_key = max(self.bytes - float(self.keys.bytes.sum()), 0.0)
        return with_key + without_key / partitions, "sample"


def partition_totals(loads: DataFrame) -> DataFrame:
    """Records and bytes of each partition, and of all partitions in the row with `everything`."""
    return (
        loads.rollup("partition")
        .agg(
            (F.grouping("partition") == 1).alias("everything"),
            F.count("*").alias("records"),
            F.sum("bytes").alias("bytes"),
            F.coalesce(F.sum(F.when(F.col("key").isNotNull(), F.col("bytes"))), F.lit(0)).alias("keyed_bytes"),
            F.approx_count_distinct("key").alias("keys"),
            F.min("topic").alias("topic"),
            F.max("topic").alias("other_topic"),
            (F.max("timestamp").cast("double") - F.min("timestamp").cast("double")).alias("seconds"),
        )
        .select("everything", "partition", "records", "bytes", "keyed_bytes", "keys", "topic", "other_topic", "seconds")
    )


def sample_keys(loads: DataFrame, one_in: int) -> DataFrame:
    """About one key in `one_in`, with all of its bytes: `key`, `bytes`.

    The keys are selected by Spark's own hash, which no partitioner uses.
    """
    selected = F.pmod(F.xxhash64("key"), F.lit(one_in)) == 0
    keys = loads.where(F.col("key").isNotNull() & selected).groupBy("key")
    return keys.agg(F.sum("bytes").alias("bytes")).orderBy("key")


def load_of(loads: DataFrame, sample: int, *, partitions: int | None = None) -> Load:
    """The load of the single topic in `loads` (`LOADS`), with a sample of about `sample` keys. Reads the data twice.

    `partitions` is the number of partitions, which is needed if the last ones are empty. If the partitions are unknown,
    the load has none, like an assumed one. It has a rate if the timestamps span some time.
    """
    if missing := [name for name in LOADS.names if name not in loads.columns]:
        raise InvalidValue("columns", ", ".join(loads.columns), f"{missing[0]!r} among them")
    if whole_number("sample", sample, at_least=1) > MAX_SAMPLED_KEYS // 2:
        raise InvalidValue("sample", sample, f"at most {MAX_SAMPLED_KEYS // 2} keys")
    if partitions is not None and whole_number("partitions", partitions, at_least=1) > MAX_PARTITIONS:
        raise InvalidValue("partitions", partitions, f"at most {MAX_PARTITIONS}")
    total, parts = _one_topic(loads.transform(partition_totals).collect())
    count = max(parts, default=-1) + 1
    if partitions is not None and count > partitions:
        raise InvalidValue("partitions", partitions, f"at least {count}: there are records in partition {count - 1}")
    count = partitions or count if parts else 0
    per = {name: tuple(parts[i][name] if i in parts else 0 for i in range(count)) for name in ("records", "bytes")}
    keys = None
    distinct = total["keys"] or None
    if total["keys"]:
        one_in = -(-total["keys"] // sample)
        sampled = loads.transform(sample_keys, one_in).toArrow()
        distinct = len(sampled) if one_in == 1 else distinct  # all of them, whereas Spark's count is approximate
        if len(sampled):
            arrays = sampled.combine_chunks()
            sizes = arrays["bytes"].to_numpy()
            keys = KeySample.scaled(arrays["key"].chunk(0), sizes, total["keyed_bytes"], is_complete=one_in == 1)
    rate = total["records"] / total["seconds"] if total["seconds"] else None
    distinct = distinct if total["keyed_bytes"] == total["bytes"] else None
    return Load(total["records"], total["bytes"], per["records"], per["bytes"], rate, keys, distinct)


def _one_topic(rows: Sequence[Row]) -> tuple[Row, dict[int, Row]]:
    """The row of all partitions together, and the row of each partition if they are known."""
    by_partition: dict[int | None, Row] = {row["partition"]: row for row in rows if not row["everything"]}
    total = next((row for row in rows if row["everything"]), None)
    if total is None:
        raise InvalidValue("records", 0, "at least one, by which to plan")
    if total["topic"] != total["other_topic"]:
        raise InvalidValue("topics", f"{total['topic']}, {total['other_topic']}", "one: filter the loads")
    parts = {i: row for i, row in by_partition.items() if i is not None}
    if parts and None in by_partition:
        raise InvalidValue("partition", None, "known for all records, or for none")
    if invalid := [i for i in parts if not 0 <= i < MAX_PARTITIONS]:
        raise InvalidValue("partition", invalid[0], f"from 0 to {MAX_PARTITIONS - 1}")
    return total, parts
