"""Where the records of a chunk go: what every way of copying, and the translation of positions, must agree on."""

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from shardyard.pipeline.partitioning import PartitionerSpec
from shardyard.pipeline.source.staging import PartitionIndexes


class ChunkPlacer:
    """Places the records of one chunk, in their order, and counts them by target partition.

    Records without a key go round-robin. Their numbers depend on where the chunk starts and not on their own offsets:
    if every second offset were a gap, these would use every second partition only.
    """

    def __init__(self, spec: PartitionerSpec, partition: int, start: int) -> None:
        """`start`: the offset of the chunk's first record in the source partition `partition`."""
        self._spec = spec
        self._next = partition + start
        self.counts = np.zeros(spec.partitions, np.int64)
        """How many records were placed on each target partition so far."""

    def place(self, keys: pa.Array) -> PartitionIndexes:
        """The target partitions of the records that follow in the chunk."""
        sequence: npt.NDArray[np.int64] = np.arange(self._next, self._next + len(keys), dtype=np.int64)
        self._next += len(keys)
        targets = self._spec.place(keys, sequence)
        self.counts += np.bincount(targets, minlength=len(self.counts))
        return targets
