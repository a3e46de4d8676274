"""Partitioners for Spark: as a value that can be sent to tasks, and as a column of a frame."""

from dataclasses import dataclass, replace
from typing import Self, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Column
from pyspark.sql import functions as F  # noqa: N812 as everybody calls it
from pyspark.sql.functions import arrow_udf  # type: ignore[attr-defined]  # its stubs are behind
from pyspark.sql.types import IntegerType

from shardyard.model import InvalidValue, Topic
from shardyard.pipeline.jvm.functions import call, has_functions
from shardyard.placement import DEFAULT_HASH, Hash, Partitioner, hash_named, partitioner_named


@dataclass(frozen=True, slots=True)
class PartitionerSpec:
    """A partitioner by its names, so that it can be sent to a task and stored. Records without a key go round-robin."""

    partitioner: str
    hash: str | None
    partitions: int

    @classmethod
    def of(cls, topic: Topic, partitioner: str | None = None, hash_: str | None = None) -> Self:
        """The topic's own partitioner and hash, unless the caller names others."""
        if partitioner is None and hash_ is None:
            return cls(topic.partitioner, topic.hash, topic.receiving)
        name = partitioner or topic.partitioner
        partitioner_named(name, topic.receiving, hash_)  # raises for unknown names
        return cls(name, hash_ or DEFAULT_HASH[name], topic.receiving)

    def with_partitions(self, partitions: int) -> "PartitionerSpec":
        """The same partitioner over another number of partitions."""
        return replace(self, partitions=partitions)

    def __str__(self) -> str:
        return f"{self.partitions} partitions by {self.partitioner}" + (f" of {self.hash}" if self.hash else "")

    def build(self) -> Partitioner:
        return partitioner_named(self.partitioner, self.partitions, self.hash)

    def place(self, keys: pa.Array, sequence: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
        """The partition of each record: by its key, or round-robin by its number in `sequence` if it has none."""
        round_robin = (sequence % self.partitions).astype(np.int32)
        if self.partitioner == "round_robin" or keys.null_count == len(keys):
            return round_robin
        by_key: npt.NDArray[np.int32] = self.build().place_array(keys).to_numpy()
        if not keys.null_count:
            return by_key
        return np.where(pc.is_null(keys).to_numpy(zero_copy_only=False), round_robin, by_key)


def placement_column(key: Column | str, hash: str | None, partitioner: str, partitions: int) -> Column:  # noqa: A002
    """The partition of each key as an int column, bit for bit what `shardyard.placement` computes.

    The key column is binary, string or integer; a null key is placed like an empty one. The partitioner is one that
    places by key: `modulus` or `jump`. It is computed inside Spark's JVM, or over Spark Connect by an Arrow function.
    """
    if partitioner == "round_robin":
        raise InvalidValue("partitioner", partitioner, "modulus or jump: round_robin does not place by key")
    partitioner_named(partitioner, partitions, hash)  # raises here and not in a task
    column = F.col(key) if isinstance(key, str) else key
    if has_functions():
        return _in_jvm(column, hash_named(hash or DEFAULT_HASH[partitioner] or ""), partitioner, partitions)
    return _by_arrow(column, hash, partitioner, partitions)


def _in_jvm(key: Column, hash_: Hash, partitioner: str, partitions: int) -> Column:
    hashed = F.coalesce(call(hash_.name, key), F.lit(_signed(hash_(None))))  # an integer that is null has no hash
    if partitioner == "modulus" and hash_.modulus_mask != 2**hash_.bits - 1:
        hashed = hashed.bitwiseAND(F.lit(hash_.modulus_mask))
    return call(partitioner, hashed, F.lit(partitions))


def _signed(number: int) -> int:
    """An unsigned number of 64 bits as the long with the same bits."""
    return number - 2**64 if number >= 2**63 else number


def _by_arrow(key: Column, hash_: str | None, partitioner: str, partitions: int) -> Column:
    @arrow_udf(IntegerType())  # type: ignore[untyped-decorator]  # a name would be parsed by Connect's server
    def place(keys: pa.Array) -> pa.Array:
        return partitioner_named(partitioner, partitions, hash_).place_array(keys)

    return cast(Column, place(key))
