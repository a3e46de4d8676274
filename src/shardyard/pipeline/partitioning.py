"""Where the rows of a frame live: the partitioners, as tasks and as columns use them."""

from dataclasses import dataclass, replace
from typing import Self, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Column
from pyspark.sql import functions as F  # noqa: N812 as everybody calls it
from pyspark.sql.functions import arrow_udf  # type: ignore[attr-defined]  # its stubs are behind

from shardyard.model import InvalidValue, Topic
from shardyard.pipeline.jvm import FNV1A32, has_fnv1a32
from shardyard.placement import DEFAULT_HASH, Partitioner, partitioner_named


@dataclass(frozen=True, slots=True)
class Placing:
    """A partitioner by its names, to be sent to a task. Records without a key are dealt in turn."""

    partitioner: str
    hash: str | None
    partitions: int

    @classmethod
    def of(cls, topic: Topic, partitioner: str | None = None, hash_: str | None = None) -> Self:
        """As the topic says; as the caller says, where it does."""
        if partitioner is None and hash_ is None:
            return cls(topic.partitioner, topic.hash, topic.receiving)
        name = partitioner or topic.partitioner
        partitioner_named(name, topic.receiving, hash_)  # complains of names that there are not
        return cls(name, hash_ or DEFAULT_HASH[name], topic.receiving)

    def over(self, partitions: int) -> "Placing":
        """The same over another number of partitions."""
        return replace(self, partitions=partitions)

    def __str__(self) -> str:
        return f"{self.partitions} partitions by {self.partitioner}" + (f" of {self.hash}" if self.hash else "")

    def rule(self) -> Partitioner:
        return partitioner_named(self.partitioner, self.partitions, self.hash)

    def places(self, keys: pa.Array, turns: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
        """The partition of each record: by its key, or by its turn if it has none."""
        dealt = (turns % self.partitions).astype(np.int32)
        if self.partitioner == "round_robin" or keys.null_count == len(keys):
            return dealt
        placed: npt.NDArray[np.int32] = self.rule().place_array(keys).to_numpy()
        return np.where(pc.is_null(keys).to_numpy(zero_copy_only=False), dealt, placed) if keys.null_count else placed


def placement_column(key: Column | str, hash: str | None, partitioner: str, partitions: int) -> Column:  # noqa: A002
    """The partition of a key column (binary, string or integer), as an int: what `shardyard.placement` gives, bit for
    bit. A null key is placed like the empty one. Partitioners that go by the key have one: `modulus` and `jump`.

    FNV-1a of 32 bits, modulus, is computed by the JVM; all others by an Arrow function.
    """
    if partitioner == "round_robin":
        raise InvalidValue("partitioner", partitioner, "modulus or jump: round_robin does not go by the key")
    partitioner_named(partitioner, partitions, hash)  # complains here, not in a task
    if (partitioner, hash or DEFAULT_HASH[partitioner]) == ("modulus", "fnv1a32") and has_fnv1a32():
        column = F.col(key) if isinstance(key, str) else key
        return F.pmod(F.call_function(FNV1A32, column), F.lit(partitions)).cast("int")

    @arrow_udf("int")  # type: ignore[untyped-decorator]
    def place(keys: pa.Array) -> pa.Array:
        return partitioner_named(partitioner, partitions, hash).place_array(keys)

    return cast(Column, place(key))
