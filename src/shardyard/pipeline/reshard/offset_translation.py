"""What a reshard means for those who read: plain functions on offsets, without Spark and without a log."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

Counts = Sequence[int]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Records of one old partition that were copied together: `counts[q]` of them went to the new partition q.

    Chunks are appended in their order, so the place of every record in the new topic follows from them.
    """

    partition: int
    start: int
    end: int
    counts: tuple[int, ...]

    def to_json(self) -> dict[str, Any]:
        return {"partition": self.partition, "start": self.start, "end": self.end, "counts": list(self.counts)}

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> Self:
        return cls(stored["partition"], stored["start"], stored["end"], tuple(stored["counts"]))


@dataclass(frozen=True, slots=True)
class Carried:
    """Where a group goes on in the new topic."""

    offsets: tuple[int, ...]
    again: int
    """Records it had done that lie behind one it had not: they come again, as after a crash."""


def levels(starts: Counts, ends: Counts, committed: Iterable[Mapping[int, int]]) -> list[tuple[int, ...]]:
    """Where to cut the copying, so that what a group has done is copied before what it has not.

    Between old partitions there is no order to keep; copied in one go, what a group has done of the second would come
    behind what it has not done of the first, and would come again. One cut for each group: the n-th holds the n-th
    smallest position of each partition, so cuts never cross. The last one is `ends`.
    """
    groups = list(committed)
    ranked = [
        sorted(min(max(group.get(p, start), start), end) for group in groups)
        for p, (start, end) in enumerate(zip(starts, ends, strict=True))
    ]
    cuts = [tuple(positions[n] for positions in ranked) for n in range(len(groups))]
    edges = [tuple(starts)]
    for cut in [*cuts, tuple(ends)]:
        if cut != edges[-1]:
            edges.append(cut)
    return edges[1:]


def carry(
    chunks: Iterable[Chunk], committed: Mapping[int, int], partitions: int, placed: Callable[[int, int, int], Counts]
) -> Carried:
    """The new position of a group that had done everything below `committed` (by old partition).

    It is where the first record lies that the group has not done: nothing is skipped. `placed(partition, start, end)`
    says how many records of that old range went to each new partition.
    """
    before = [0] * partitions
    reached = [0] * partitions
    open_ = [True] * partitions
    done = 0
    for chunk in chunks:
        at = min(max(committed.get(chunk.partition, 0), chunk.start), chunk.end)
        if at == chunk.end:
            finished: Counts = chunk.counts
        elif at == chunk.start:
            finished = [0] * partitions
        else:
            finished = placed(chunk.partition, chunk.start, at)
        done += at - chunk.start
        for q in range(partitions):
            if open_[q]:
                reached[q] = before[q] + finished[q]
                open_[q] = finished[q] == chunk.counts[q]
            before[q] += chunk.counts[q]
    return Carried(tuple(reached), done - sum(reached))
