"""Where consumer groups continue after a reshard: pure functions on offsets, without Spark and without a log.

Offsets have gaps, in the source and in the target. So a group's position is translated in two steps: first into the
number of target records that the group has processed, then into the offset behind that many records.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

Counts = Sequence[int]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Records of one source partition that were copied together: `counts[q]` of them went to target partition q.

    The chunks of a round are appended in their order, so they determine the order of the records in the target.
    """

    partition: int
    start: int
    """The offset of the first record."""
    end: int
    """The offset behind the last record."""
    counts: tuple[int, ...]

    def to_json(self) -> dict[str, Any]:
        return {"partition": self.partition, "start": self.start, "end": self.end, "counts": list(self.counts)}

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> Self:
        return cls(stored["partition"], stored["start"], stored["end"], tuple(stored["counts"]))


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a group is in the target."""

    done: tuple[int, ...]
    """For each target partition: how many of its records, from the first one on, the group has processed."""
    repeated: int
    """Records that the group has processed but that lie behind one it has not processed: they are delivered again."""


@dataclass(frozen=True, slots=True)
class TargetRange:
    """Offsets of one target partition, from `start` up to, but not including, `end`, that hold `count` records."""

    start: int
    end: int
    count: int


def round_ends(starts: Counts, ends: Counts, committed: Iterable[Mapping[int, int]]) -> list[tuple[int, ...]]:
    """Up to which offsets each round copies, so that what a group has processed is copied before what it has not.

    The order between source partitions is free. If they were copied in a single round, records of the second partition
    that a group has processed would come behind records of the first that it has not, and would be delivered again.
    There is one round for each group: the n-th ends at the n-th smallest committed offset of each partition, so the
    rounds never overlap. The last one ends at `ends`.
    """
    groups = list(committed)
    ranked = [
        sorted(min(max(group.get(p, start), start), end) for group in groups)
        for p, (start, end) in enumerate(zip(starts, ends, strict=True))
    ]
    cuts = [tuple(offsets[n] for offsets in ranked) for n in range(len(groups))]
    edges = [tuple(starts)]
    for cut in [*cuts, tuple(ends)]:
        if cut != edges[-1]:
            edges.append(cut)
    return edges[1:]


def translate(
    chunks: Iterable[Chunk],
    committed: Mapping[int, int],
    partitions: int,
    count_targets: Callable[[int, int, int], Counts],
) -> Progress:
    """The progress in the target of a group that committed these offsets in the source partitions.

    A target partition is done up to the first record that the group has not processed, so none is skipped.
    `count_targets(partition, start, end)` says how many source records of that range went to each target partition; it
    is called for a chunk that the group has processed in part.
    """
    before = [0] * partitions
    reached = [0] * partitions
    unbroken = [True] * partitions
    total = 0
    for chunk in chunks:
        at = min(max(committed.get(chunk.partition, 0), chunk.start), chunk.end)
        if at == chunk.end:
            done: Counts = chunk.counts
        elif at == chunk.start:
            done = [0] * partitions
        else:
            done = count_targets(chunk.partition, chunk.start, at)
        total += sum(done)
        for q in range(partitions):
            if unbroken[q]:
                reached[q] = before[q] + done[q]
                unbroken[q] = done[q] == chunk.counts[q]
            before[q] += chunk.counts[q]
    return Progress(tuple(reached), total - sum(reached))


def offset_behind(count: int, ranges: Iterable[TargetRange], skip: Callable[[int, int], int]) -> int:
    """The offset behind the first `count` records of a target partition.

    `ranges` are the partition's offsets, one range after the other. `skip(start, count)` returns the offset behind the
    first `count` records from `start` on. It has to read them, so it is called only inside a range with gaps.
    """
    end = 0
    for r in ranges:
        if count < r.count:
            if count == 0:
                return r.start
            return r.start + count if r.count == r.end - r.start else skip(r.start, count)
        count -= r.count
        end = r.end
    return end
