"""`SparseLog`: an engine that leaves gaps between offsets wherever the port allows it.

A partition has gaps before its first record, between the records of a batch, between batches and after the last record.
"""

import numpy as np

from shardyard.log.memory import MemoryLog, Offsets
from shardyard.log.port import Capabilities


def offset_of(number: int) -> int:
    """The offset of record number `number` of a partition, from 0 on: 1, 3, 5, 11, 13, 15, 21..."""
    return 10 * (number // 3) + 2 * (number % 3) + 1


class SparseLog(MemoryLog):
    """A log in memory whose offsets have gaps."""

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(contraction=True, stamps_across_processes=True, atomic_batches=True, dense_offsets=False)

    def _place(self, end: int, count: int) -> tuple[Offsets, int]:
        first = 3 * (end // 10) + end % 10 // 2
        offsets = np.array([offset_of(first + i) for i in range(count)], np.int64)
        return offsets, offset_of(first + count) - 1
