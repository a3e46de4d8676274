"""Which stored batches of a partition to merge, so that small appends do not make for slow reads. No I/O."""

from collections.abc import Sequence
from typing import NamedTuple

from shardyard.model.limits import Limits

MERGE_BYTES = 256 * 1024
"""Batches smaller than half of this are merged, up to about this size."""
MERGE_BATCHES = 64
"""How many small batches at the end of a partition it takes to merge them; fewer wait for more."""


class StoredSize(NamedTuple):
    """What merging has to know about a stored batch."""

    id: int
    first: int
    records: int
    bytes: int


class Run(NamedTuple):
    """Small batches that follow each other."""

    ids: list[int]
    done: int
    """The offset below which nothing is left to merge."""
    complete: bool
    """No later batch can join it."""

    @property
    def is_due(self) -> bool:
        return len(self.ids) > 1 and (self.complete or len(self.ids) >= MERGE_BATCHES)


def next_run(batches: Sequence[StoredSize]) -> Run:
    """The first run of small batches. `batches`: in the order of their offsets."""
    ids: list[int] = []
    size = records = done = 0
    limits = Limits()
    for batch, first, count, stored in batches:
        small = stored < MERGE_BYTES // 2
        fits = size + stored <= MERGE_BYTES and records + count <= limits.batch_records
        if ids and not (small and fits):
            if len(ids) > 1:
                return Run(ids, done, complete=True)
            ids, size, records, done = [], 0, 0, first  # a single small one between large ones stays as it is
        if small:
            ids.append(batch)
            size, records = size + stored, records + count
        else:
            done = first + count
    return Run(ids, done, complete=False)
