"""The positions of groups: where each group is in the source, and where it continues in the target."""

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np

from shardyard.groups import positions_on, transfer_positions
from shardyard.model import Damaged, Partition, Position
from shardyard.pipeline.blocking import BlockingLog
from shardyard.pipeline.reshard.job import Job, Round
from shardyard.pipeline.reshard.offset_translation import Progress, TargetRange, offset_behind, translate
from shardyard.pipeline.reshard.placing import ChunkPlacer
from shardyard.registry import Registry, Transaction

ACTOR = "reshard"
"""The name under which the registry's audit log records the new positions."""


class GroupPositions:
    """Translates the positions of groups.

    For a group that has processed a part of a chunk, that part is read and counted. It may be large, so it is counted
    before the topic is sealed (`prepare`), and what the group has processed since is all that is read later.
    """

    def __init__(self, opened: BlockingLog, job: Job, registry: Registry | None) -> None:
        self._opened, self._job, self._registry = opened, job, registry
        self._counts: dict[tuple[str, int, int], _PartialCount] = {}

    def committed(self) -> dict[str, dict[int, int]]:
        """The committed offsets of each group, by source partition."""
        if self._registry is None:
            return {}
        positions = self._registry.read(lambda tx: positions_on(tx, self._job.topic))
        return {
            group: {partition.index: at.offset for partition, at in committed.items() if at.epoch == self._job.epoch}
            for group, committed in positions.items()
        }

    def prepare(self, rounds: Sequence[Round]) -> None:
        """Count what each group has processed so far of the records of these rounds."""
        self._progress(rounds)

    def transfer(self, rounds: Sequence[Round], first: Sequence[int]) -> dict[str, int]:
        """Commit each group's position in the target, whose partitions begin at `first`. Returns how many records are
        delivered to each group again."""
        progress = self._progress(rounds)
        if self._registry is None or not progress:
            return {}
        ranges = _target_ranges(rounds, first)
        found = {
            group: {
                Partition(self._job.target, q): Position(self._job.target_epoch, self._offset(q, count, ranges[q]))
                for q, count in enumerate(reached.done)
            }
            for group, reached in progress.items()
        }
        self._registry.run(partial(_transfer, found=found))
        return {group: reached.repeated for group, reached in progress.items()}

    def _progress(self, rounds: Sequence[Round]) -> dict[str, Progress]:
        chunks = [chunk for done in rounds for chunk in done.chunks]
        partitions = self._job.spec.partitions
        return {
            group: translate(chunks, committed, partitions, partial(self._count_targets, group))
            for group, committed in self.committed().items()
        }

    def _count_targets(self, group: str, partition: int, start: int, end: int) -> list[int]:
        """How many records of a chunk that starts at `start`, up to the offset `end`, went to each target partition."""
        known = self._counts.get((group, partition, start))
        if known is None or known.at > end:
            known = self._counts[group, partition, start] = _PartialCount(self._opened, self._job, partition, start)
        return known.up_to(end)

    def _offset(self, q: int, count: int, ranges: Sequence[TargetRange]) -> int:
        return offset_behind(count, ranges, partial(skip, self._opened, Partition(self._job.target, q)))


class _PartialCount:
    """Counts the records of a chunk from its start on by target partition."""

    def __init__(self, opened: BlockingLog, job: Job, partition: int, start: int) -> None:
        self._opened = opened
        self._partition = Partition(job.topic, partition)
        self._placer = ChunkPlacer(job.spec, partition, start)
        self.at = start
        """Up to which offset they are counted."""

    def up_to(self, end: int) -> list[int]:
        """The numbers of records below `end`, which is not below `at`."""
        while self.at < end:
            read = self._opened.log.read(self._partition, self.at, max_records=end - self.at)
            batch = self._opened.wait(read)
            if batch.end <= self.at:
                break
            below = int(np.searchsorted(batch.offset_array(), end))
            self._placer.place(batch.data["key"].slice(0, below).combine_chunks())
            self.at = min(batch.end, end)
        counts: list[int] = self._placer.counts.tolist()
        return counts


def skip(opened: BlockingLog, partition: Partition, at: int, count: int) -> int:
    """The offset behind the first `count` records of a partition from the offset `at` on."""
    while True:
        batch = opened.wait(opened.log.read(partition, at, max_records=count))
        if len(batch) >= count:
            return int(batch.offsets()[count - 1]) + 1
        if batch.end <= at:
            raise Damaged(str(partition), f"it ends at {at}, {count} records too early: abort the reshard")
        count, at = count - len(batch), batch.end


def _target_ranges(rounds: Sequence[Round], first: Sequence[int]) -> list[list[TargetRange]]:
    """For each target partition, the offsets that each round filled."""
    edges = [first, *(done.target_ends or () for done in rounds)]
    counts = [done.counts(len(first)) for done in rounds]
    return [
        [
            TargetRange(first[q], first[q], 0),
            *(TargetRange(edges[n][q], edges[n + 1][q], counts[n][q]) for n in range(len(rounds))),
        ]
        for q in range(len(first))
    ]


def _transfer(tx: Transaction, found: Mapping[str, Mapping[Partition, Position]]) -> None:
    for group, positions in found.items():
        transfer_positions(tx, group, positions, ACTOR)
