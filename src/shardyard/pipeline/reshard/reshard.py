"""reshard: rewrite a topic to another number of partitions or another partitioner, while producers keep writing.

The records are copied to a target topic in rounds, each of them exactly once, and every round is compared with its
source. When few records are left, the topic is sealed for the last round. Then the positions of its groups are
translated, and the topic moves: producers and members continue with the target. Until then nothing changes for them,
and a reshard that was interrupted continues where it stopped when it is run again.
"""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from shardyard.groups import positions_on, transfer_positions
from shardyard.model import (
    Damaged,
    InvalidCall,
    InvalidValue,
    Partition,
    Position,
    Retention,
    Span,
    whole_number,
)
from shardyard.model.url import parse_url
from shardyard.pipeline.blocking import BlockingLog, blocking
from shardyard.pipeline.partitioning import PartitionerSpec
from shardyard.pipeline.reshard.checksum import checksum
from shardyard.pipeline.reshard.job import Job, Round, Rounds, job_folder, lock_job, remove_job, start_or_resume
from shardyard.pipeline.reshard.offset_translation import Chunk, TargetRange, offset_behind, round_ends, translate
from shardyard.pipeline.reshard.seal import sealed
from shardyard.pipeline.source import offset_lookup
from shardyard.pipeline.source.columns import from_spark, offsets_of
from shardyard.pipeline.source.options import absolute
from shardyard.pipeline.source.staging import Manifest, PartitionIndexes, Staging, commit, staging_folder
from shardyard.pipeline.spark_errors import translate_spark_errors
from shardyard.registry import open_registry, registry_exists

SWITCH_BELOW = 20_000
"""The topic is sealed when at most this many records are left. Producers wait while these are copied."""
RECORDS_PER_TASK = 500_000
ACTOR = "reshard"
"""The name under which the registry's audit log records the new positions."""


@dataclass(frozen=True, slots=True)
class Resharded:
    """The result of a reshard."""

    topic: str
    target: str
    partitions: int
    partitioner: str
    hash: str | None
    records: int
    rounds: int
    sealed_seconds: float
    """How long the topic took no records."""
    groups: dict[str, int]
    """The groups whose positions were translated, and how many records are delivered to each of them again."""


def reshard(
    spark: SparkSession,
    log: str,
    topic: str,
    *,
    partitions: int,
    partitioner: str | None = None,
    hash_: str | None = None,
    target: str | None = None,
    registry: str | None = None,
    on_step: Callable[[str], None] = lambda _: None,
) -> Resharded:
    """Rewrite `topic` to `target`, or continue a reshard that was interrupted.

    The target's default name is the topic's with the next free number. If a registry is given, the positions of groups
    are translated to the target. The old topic stays, sealed, until it is deleted.
    """
    whole_number("partitions", partitions, at_least=1)
    log = absolute(log)
    if registry is not None:
        check_registry(registry)
    with blocking(log) as opened:
        if opened.wait(opened.log.topic(topic)).open_partitions is not None:  # before anything is created
            raise InvalidCall(f"topic {topic!r} is being contracted: wait until its last partitions are dropped")
        folder = job_folder(staging_folder(log), topic)
        with lock_job(folder, topic), translate_spark_errors():
            job = start_or_resume(opened, folder, topic, partitions, partitioner, hash_, target)
            return _Reshard(spark, log, opened, job, registry, on_step).run()


def check_registry(url: str) -> None:
    """Raise `InvalidValue` if the registry does not exist: a new, empty one would have no groups to translate."""
    if not registry_exists(url):
        shown = str(parse_url("registry", url))
        raise InvalidValue("registry", shown, "one that exists, sqlite:///FILE; without groups, none (--no-groups)")


class _Reshard:
    """The steps of a reshard. The result of each step is on disk before the next one starts."""

    def __init__(
        self,
        spark: SparkSession,
        url: str,
        opened: BlockingLog,
        job: Job,
        registry: str | None,
        on_step: Callable[[str], None],
    ) -> None:
        self._spark = spark
        self._url = url
        self._opened = opened
        self._wait = opened.wait
        self._log = opened.log
        self._job = job
        self._registry = registry
        self._on_step = on_step
        self._staging = Staging(staging_folder(url))
        self._folder = job_folder(staging_folder(url), job.topic)
        self._rounds = Rounds(self._folder, job)

    def run(self) -> Resharded:
        job = self._job
        groups: dict[str, int] = {}
        seconds = 0.0
        if self._wait(self._log.topic(job.topic)).successor is None:
            self._wait(self._log.set_retention(job.topic, Retention()))
            self._finish_rounds()
            self._catch_up()
            started = time.monotonic()
            groups = self._switch()
            seconds = time.monotonic() - started
        for topic in (job.topic, job.target):
            self._wait(self._log.set_retention(topic, job.retention))
        rounds = self._rounds.all()
        copied = sum(sum(chunk.counts) for done in rounds for chunk in done.chunks)
        remove_job(self._staging, job, self._folder)
        return Resharded(
            job.topic,
            job.target,
            job.spec.partitions,
            job.spec.partitioner,
            job.spec.hash,
            copied,
            len(rounds),
            round(seconds, 3),
            groups,
        )

    def _switch(self) -> dict[str, int]:
        """Seal the topic, copy the rest, translate positions, and move it. Unseals the topic if a step fails."""
        job = self._job
        with sealed(self._opened, job.topic) as seal:
            self._copy(self._ends())
            self._check_complete()
            groups = self._translate_positions()
            move = self._log.move_topic(job.topic, job.target, holder=seal.holder, generation=seal.generation)
            self._wait(move)
        return groups

    def _check_complete(self) -> None:
        """Raise `Damaged` if a record of the source is missing, or if the target has records that no round compared."""
        source, target = self._job.topic, self._job.target
        ends = [span.end for span in self._spans(target)]
        if extra := self._count(target, self._target_ends(self._rounds.all()), ends):
            raise Damaged(target, f"it has {extra} records that were not copied: abort the reshard")
        if missing := self._count(source, self._copied(), self._ends()):
            raise Damaged(target, f"it lacks {missing} records of {source!r}: abort the reshard")

    def _count(self, topic: str, starts: Sequence[int], ends: Sequence[int]) -> int:
        """How many records lie between these offsets, which may be none where they have gaps."""
        return 0 if starts == ends else self._read(topic, starts, ends).count()

    def _catch_up(self) -> None:
        """Copy what the topic holds: first what groups have processed, then the rest, then what arrived meanwhile.

        How much is left is estimated by offsets, which is too high where these have gaps. The last round copies
        whatever is left, so the estimate decides only how long the topic is sealed.
        """
        for ends in round_ends(self._copied(), self._ends(), self._positions().values()):
            self._copy(ends)
        before = None
        while (left := sum(self._ends()) - sum(self._copied())) > SWITCH_BELOW:
            if before is not None and left > before / 2:
                return  # another round would not help: producers append about as much while it runs
            before = left
            self._copy(self._ends())

    def _copied(self) -> list[int]:
        """Up to which offset each source partition is copied. Records that were trimmed before count as copied."""
        rounds = self._rounds.all()
        reached = rounds[-1].ends if rounds else ()
        spans = self._spans(self._job.topic)
        return [max(span.first, reached[p] if p < len(reached) else 0) for p, span in enumerate(spans)]

    def _ends(self) -> list[int]:
        return [span.end for span in self._spans(self._job.topic)]

    def _target_ends(self, rounds: Sequence[Round]) -> list[int]:
        """Where each target partition ended after the last of these rounds."""
        if rounds and (ends := rounds[-1].target_ends) is not None:
            return list(ends)
        return [span.first for span in self._spans(self._job.target)]

    def _spans(self, topic: str) -> tuple[Span, ...]:
        return self._wait(offset_lookup.topic_spans(self._log, [topic]))[topic].spans

    # One round

    def _copy(self, ends: Sequence[int]) -> None:
        """Copy all records below `ends` that are not copied yet: they are staged by tasks, appended, and compared."""
        starts = self._copied()
        # Partitions that were added since `ends` was computed are left to the next round.
        ends = [max(start, ends[p]) if p < len(ends) else start for p, start in enumerate(starts)]
        if ends == starts:
            return
        job, number = self._job, len(self._rounds.all())
        self._on_step(f"round {number + 1}: up to {sum(ends) - sum(starts):,} records")
        rows = self._read(job.topic, starts, ends).mapInArrow(_stage(self._staging, job.spec), _STAGED)
        staged = sorted(rows.collect(), key=lambda row: (row["partition"], row["start"]))
        chunks = tuple(Chunk(row["partition"], row["start"], row["end"], tuple(row["counts"])) for row in staged)
        detail = Round(tuple(starts), tuple(ends), chunks).to_json()
        files = tuple(row["file"] for row in staged)
        self._staging.start(Manifest(job.producer, number, job.target, job.target_epoch, files, detail))
        self._finish_rounds()

    def _finish_rounds(self) -> None:
        """Append the round that is staged but not yet appended, and compare the one that is not yet compared."""
        pending = self._staging.pending(self._job.producer)
        if pending is not None:
            self._rounds.store(pending.batch, Round.from_json(pending.detail))
            self._wait(commit(self._log, self._staging, pending))
        rounds = self._rounds.all()
        for number, done in enumerate(rounds):
            if done.target_ends is None:  # only ever the last one: a round is compared before the next one is staged
                before = self._target_ends(rounds[:number])
                after = [span.end for span in self._spans(self._job.target)]
                self._compare(done, before, after)
                self._rounds.store(number, replace(done, target_ends=tuple(after)))

    def _compare(self, done: Round, before: Sequence[int], after: Sequence[int]) -> None:
        """Raise `Damaged` unless the target holds exactly the records of the round, from `before` up to `after`."""
        ordered = self._job.spec.partitioner != "round_robin"  # which does not keep the order of a key
        old = checksum(self._read(self._job.topic, done.starts, done.ends), ordered=ordered)
        new = checksum(self._read(self._job.target, before, after), ordered=ordered)
        if old != new:
            raise Damaged(self._job.target, f"it has {new} where {self._job.topic!r} has {old}: abort the reshard")
        expected = done.counts(self._job.spec.partitions)
        found = [new.by_partition.get(q, 0) for q in range(len(expected))]
        if found != expected:
            raise Damaged(self._job.target, f"a round has {found} records instead of {expected}: abort the reshard")

    def _read(self, topic: str, starts: Sequence[int], ends: Sequence[int]) -> DataFrame:
        count = self._wait(self._log.topic(topic)).partitions
        named = {}
        for option, offsets in (("startingOffsets", starts), ("endingOffsets", ends)):
            others = ["earliest"] * (count - len(offsets))  # nothing of partitions that were added since
            named[option] = json.dumps({topic: dict(enumerate([*offsets, *others]))})
        reader = self._spark.read.format("shardyard").options(log=self._url, topics=topic, **named)
        return reader.option("recordsPerTask", RECORDS_PER_TASK).load()

    # The switch

    def _positions(self) -> dict[str, dict[int, int]]:
        """The committed offsets of each group, by source partition."""
        if self._registry is None:
            return {}
        with open_registry(self._registry) as registry:
            positions = registry.read(lambda tx: positions_on(tx, self._job.topic))
        return {
            group: {partition.index: at.offset for partition, at in committed.items() if at.epoch == self._job.epoch}
            for group, committed in positions.items()
        }

    def _translate_positions(self) -> dict[str, int]:
        """Commit each group's position in the target. Returns how many records are delivered to each group again."""
        rounds = self._rounds.all()
        chunks = [chunk for done in rounds for chunk in done.chunks]
        ranges = self._target_ranges(rounds)
        target, epoch = self._job.target, self._job.target_epoch
        repeated = {}
        for group, committed in self._positions().items():
            progress = translate(chunks, committed, self._job.spec.partitions, self._count_targets)
            repeated[group] = progress.repeated
            positions = {}
            for q, count in enumerate(progress.done):
                partition = Partition(target, q)
                offset = offset_behind(count, ranges[q], partial(self._skip, partition))
                positions[partition] = Position(epoch, offset)
            with open_registry(str(self._registry)) as registry:
                registry.run(partial(transfer_positions, group=group, positions=positions, who=ACTOR))
        return repeated

    def _target_ranges(self, rounds: Sequence[Round]) -> list[list[TargetRange]]:
        """For each target partition, the offsets that each round filled."""
        edges = [self._target_ends(rounds[:n]) for n in range(len(rounds) + 1)]
        counts = [done.counts(self._job.spec.partitions) for done in rounds]
        return [
            [
                TargetRange(edges[0][q], edges[0][q], 0),
                *(TargetRange(edges[n][q], edges[n + 1][q], counts[n][q]) for n in range(len(rounds))),
            ]
            for q in range(self._job.spec.partitions)
        ]

    def _skip(self, partition: Partition, at: int, count: int) -> int:
        """The offset behind the first `count` records of a partition from the offset `at` on."""
        while True:
            batch = self._wait(self._log.read(partition, at, max_records=count))
            if len(batch) >= count:
                return batch.offsets()[count - 1] + 1
            if batch.end <= at:
                raise Damaged(str(partition), f"it ends at {at}, {count} records too early: abort the reshard")
            count, at = count - len(batch), batch.end

    def _count_targets(self, partition: int, start: int, end: int) -> list[int]:
        """How many records of a chunk that starts at `start`, up to the offset `end`, went to each target partition."""
        counts = np.zeros(self._job.spec.partitions, np.int64)
        at, seen = start, 0
        while at < end:
            batch = self._wait(self._log.read(Partition(self._job.topic, partition), at, max_records=end - at))
            if batch.end <= at:
                break
            below = int(np.searchsorted(offsets_of(batch), end))
            keys = batch.data["key"].slice(0, below).combine_chunks()
            counts += _histogram(self._job.spec.place(keys, _sequence(partition, start, seen, below)), len(counts))
            at, seen = batch.end, seen + below
        found: list[int] = counts.tolist()
        return found


def _sequence(partition: int, start: int, seen: int, count: int) -> npt.NDArray[np.int64]:
    """The round-robin numbers of records of a chunk, after `seen` others.

    They depend on where the chunk starts and not on the records' own offsets: if every second offset were a gap, these
    would use every second partition only.
    """
    first = partition + start + seen
    return np.arange(first, first + count, dtype=np.int64)


def _histogram(partitions: PartitionIndexes, cells: int) -> npt.NDArray[np.int64]:
    return np.bincount(partitions, minlength=cells).astype(np.int64)


_STAGED = "partition int, start long, end long, file string, counts array<long>"


def _stage(staging: Staging, spec: PartitionerSpec) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """The work of a task: stage the records of one range with their target partitions, and return what was staged."""

    def task(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        counts = np.zeros(spec.partitions, np.int64)
        partition = start = end = seen = 0

        def with_partitions() -> Iterator[tuple[pa.RecordBatch, PartitionIndexes]]:
            nonlocal partition, start, end, seen
            for data in batches:
                if not len(data):
                    continue
                if not seen:
                    partition, start = data["partition"][0].as_py(), data["offset"][0].as_py()
                end = data["offset"][-1].as_py() + 1
                targets = spec.place(data["key"], _sequence(partition, start, seen, len(data)))
                np.add(counts, _histogram(targets, len(counts)), out=counts)
                seen += len(data)
                yield from_spark(data, data["id"]), targets

        file = staging.write(with_partitions())
        if file is not None:
            columns = [[partition], [start], [end], [file], [counts.tolist()]]
            arrays = [pa.array(column, kind) for column, kind in zip(columns, _STAGED_TYPES, strict=True)]
            yield pa.RecordBatch.from_arrays(arrays, _STAGED_NAMES)

    return task


_STAGED_NAMES = ["partition", "start", "end", "file", "counts"]
_STAGED_TYPES = [pa.int32(), pa.int64(), pa.int64(), pa.string(), pa.list_(pa.int64())]
