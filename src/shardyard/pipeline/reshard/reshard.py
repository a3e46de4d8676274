"""reshard: a topic rewritten to another number of partitions or another partitioner, while its producers go on.

The records are copied in rounds, each of them exactly once and checked; the last round, when little is left, with the
topic sealed. Then the positions of its groups are carried over, and the topic moves: producers and members go on with
the new one. Up to that moment nothing has changed for anyone, and a reshard that was cut off goes on where it stopped
when it is run again.
"""

import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
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
from shardyard.pipeline.failures import told_plainly
from shardyard.pipeline.placing import Placing
from shardyard.pipeline.reshard.carrying import Chunk, carry, levels
from shardyard.pipeline.reshard.checksum import checksum
from shardyard.pipeline.reshard.job import Job, Round, Rounds, alone_at, begin, forget, home_of
from shardyard.pipeline.reshard.seal import sealed
from shardyard.pipeline.source import lookup
from shardyard.pipeline.source.columns import from_spark
from shardyard.pipeline.source.options import absolute
from shardyard.pipeline.source.staging import Manifest, Places, Staging, commit, folder_of
from shardyard.registry import open_registry

SWITCH_BELOW = 20_000
"""Records that may be left when the topic is sealed: they are what its producers wait for."""
RECORDS_PER_TASK = 500_000
WHO = "reshard"


@dataclass(frozen=True, slots=True)
class Resharded:
    """What a reshard did."""

    topic: str
    target: str
    partitions: int
    partitioner: str
    hash: str | None
    records: int
    rounds: int
    sealed_seconds: float
    """How long producers had to wait."""
    groups: dict[str, int]
    """The groups whose positions were carried over, and how many records come again to each."""


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
    """Rewrite `topic` to `target` (by default its name with the next free number), or go on with what was cut off.

    Positions of groups are carried over if a registry is named. The old topic stays, sealed, until it is deleted.
    """
    whole_number("partitions", partitions, at_least=1)
    log = absolute(log)
    if registry is not None:
        check_registry(registry)
    with blocking(log) as opened:
        if opened.wait(opened.log.topic(topic)).open_partitions is not None:  # complains before anything is made
            raise InvalidCall(f"topic {topic!r} is being contracted: wait until its last partitions are gone")
        home = home_of(folder_of(log), topic)
        with alone_at(home, topic), told_plainly():
            job = begin(opened, home, topic, partitions, partitioner, hash_, target)
            return _Work(spark, log, opened, job, registry, on_step).run()


def check_registry(url: str) -> None:
    """Refuse a registry that is not there: a new one would have no group to carry over."""
    engine = parse_url("registry", url)
    if engine.engine != "sqlite" or not Path(engine.path).is_file():
        raise InvalidValue("registry", url, "one that exists, sqlite:///FILE; without groups, none (--no-groups)")


class _Work:
    """The steps of one reshard. What is done is on disk before the next step begins."""

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
        self._say = on_step
        self._staging = Staging(folder_of(url))
        self._rounds = Rounds(home_of(folder_of(url), job.topic), job)

    def run(self) -> Resharded:
        job = self._job
        groups: dict[str, int] = {}
        seconds = 0.0
        if self._wait(self._log.topic(job.topic)).successor is None:
            self._wait(self._log.set_retention(job.topic, Retention()))
            self._finish_rounds()
            self._catch_up()
            began = time.monotonic()
            groups = self._switch()
            seconds = time.monotonic() - began
        for topic in (job.topic, job.target):
            self._wait(self._log.set_retention(topic, job.retention))
        rounds = self._rounds.all()
        copied = sum(c.end - c.start for r in rounds for c in r.chunks)
        forget(self._staging, job, home_of(folder_of(self._url), job.topic))
        placing = job.placing
        return Resharded(
            job.topic,
            job.target,
            placing.partitions,
            placing.partitioner,
            placing.hash,
            copied,
            len(rounds),
            round(seconds, 3),
            groups,
        )

    def _switch(self) -> dict[str, int]:
        """Seal the topic, copy the rest, carry positions over, and move it. If that fails, it takes records again."""
        job = self._job
        with sealed(self._opened, job.topic) as seal:
            self._copy(self._ends())
            self._check_complete()
            groups = self._carry_over()
            move = self._log.move_topic(job.topic, job.target, holder=seal.holder, generation=seal.generation)
            self._wait(move)
        return groups

    def _check_complete(self) -> None:
        """Nothing may be missing, and nothing else may be there, whatever is remembered of the rounds."""
        spans = self._wait(lookup.extents(self._log, [self._job.target]))[self._job.target].spans
        there = [span.end for span in spans]
        expected = _sums(self._rounds.all(), self._job.placing.partitions)
        if there != expected or self._copied() != self._ends():
            raise Damaged(self._job.target, f"it has {there} records where {expected} were copied: abort the reshard")

    def _catch_up(self) -> None:
        """Copy what is there: first what groups have done, then the rest, then what has come meanwhile."""
        for cut in levels(self._copied(), self._ends(), self._positions().values()):
            self._copy(cut)
        before = None
        while (left := sum(self._ends()) - sum(self._copied())) > SWITCH_BELOW:
            if before is not None and left > before / 2:
                return  # another round would not bring it much closer: what comes during one is what is left
            before = left
            self._copy(self._ends())

    def _copied(self) -> list[int]:
        """What is copied of each old partition; what was trimmed away meanwhile counts as copied."""
        rounds = self._rounds.all()
        reached = rounds[-1].ends if rounds else ()
        return [max(span.first, reached[p] if p < len(reached) else 0) for p, span in enumerate(self._spans())]

    def _ends(self) -> list[int]:
        return [span.end for span in self._spans()]

    def _spans(self) -> tuple[Span, ...]:
        return self._wait(lookup.extents(self._log, [self._job.topic]))[self._job.topic].spans

    # One round

    def _copy(self, ends: Sequence[int]) -> None:
        """Copy everything below `ends` that is not copied yet: put it aside in tasks, then append and check it."""
        starts = self._copied()
        ends = [max(start, ends[p]) if p < len(ends) else start for p, start in enumerate(starts)]  # some may be new
        if ends == starts:
            return
        job, number = self._job, len(self._rounds.all())
        self._say(f"round {number + 1}: {sum(ends) - sum(starts):,} records")
        put = self._read(job.topic, starts, ends).mapInArrow(_stage(self._staging, job.placing), _STAGED)
        staged = sorted(put.collect(), key=lambda row: (row["partition"], row["start"]))
        chunks = tuple(Chunk(row["partition"], row["start"], row["end"], tuple(row["counts"])) for row in staged)
        detail = Round(tuple(starts), tuple(ends), chunks).to_json()
        files = tuple(row["file"] for row in staged)
        self._staging.begin(Manifest(job.producer, number, job.target, job.target_epoch, files, detail))
        self._finish_rounds()

    def _finish_rounds(self) -> None:
        """Append what was put aside but not yet appended, and check what was not yet checked."""
        begun = self._staging.pending(self._job.producer)
        if begun is not None:
            self._rounds.put(begun.batch, Round.from_json(begun.detail))
            self._wait(commit(self._log, self._staging, begun))
        rounds = self._rounds.all()
        for number, done in enumerate(rounds):
            if not done.checked:
                before = _sums(rounds[:number], self._job.placing.partitions)
                self._check(done, before, _sums(rounds[: number + 1], self._job.placing.partitions))
                self._rounds.put(number, replace(done, checked=True))

    def _check(self, done: Round, before: Sequence[int], after: Sequence[int]) -> None:
        ordered = self._job.placing.partitioner != "round_robin"  # which keeps no order
        old = checksum(self._read(self._job.topic, done.starts, done.ends), ordered=ordered)
        new = checksum(self._read(self._job.target, before, after), ordered=ordered)
        if old != new:
            raise Damaged(self._job.target, f"it has {new} where {self._job.topic!r} has {old}: abort the reshard")

    def _read(self, topic: str, starts: Sequence[int], ends: Sequence[int]) -> DataFrame:
        count = self._wait(self._log.topic(topic)).partitions
        named = {}
        for option, offsets in (("startingOffsets", starts), ("endingOffsets", ends)):
            others = ["earliest"] * (count - len(offsets))  # partitions that were added since: nothing of them
            named[option] = json.dumps({topic: dict(enumerate([*offsets, *others]))})
        reader = self._spark.read.format("shardyard").options(log=self._url, topics=topic, **named)
        return reader.option("recordsPerTask", RECORDS_PER_TASK).load()

    # The switch

    def _positions(self) -> dict[str, dict[int, int]]:
        """What each group has done, by old partition."""
        if self._registry is None:
            return {}
        with open_registry(self._registry) as registry, registry.snapshot() as tx:
            found = positions_on(tx, self._job.topic)
        return {
            group: {partition.index: at.offset for partition, at in held.items() if at.epoch == self._job.epoch}
            for group, held in found.items()
        }

    def _carry_over(self) -> dict[str, int]:
        """Write where each group goes on; returns how many records come again to each."""
        chunks = [chunk for done in self._rounds.all() for chunk in done.chunks]
        target, epoch = self._job.target, self._job.target_epoch
        again = {}
        for group, committed in self._positions().items():
            carried = carry(chunks, committed, self._job.placing.partitions, self._placed)
            again[group] = carried.again
            positions = {Partition(target, q): Position(epoch, offset) for q, offset in enumerate(carried.offsets)}
            with open_registry(str(self._registry)) as registry, registry.transaction() as tx:
                transfer_positions(tx, group, positions, WHO)
        return again

    def _placed(self, partition: int, start: int, end: int) -> list[int]:
        """How many records of an old range went to each new partition."""
        counts = np.zeros(self._job.placing.partitions, np.int64)
        at = start
        while at < end:
            batch = self._wait(self._log.read(Partition(self._job.topic, partition), at, max_records=end - at))
            offsets = np.arange(at, batch.end, dtype=np.int64)
            keys = batch.data["key"].combine_chunks()
            counts += np.bincount(self._job.placing.places(keys, offsets + partition), minlength=len(counts))
            at = batch.end
        found: list[int] = counts.tolist()
        return found


def _sums(rounds: Iterable[Round], partitions: int) -> list[int]:
    """How many records the rounds brought to each new partition."""
    sums = np.zeros(partitions, np.int64)
    for done in rounds:
        for chunk in done.chunks:
            sums += chunk.counts
    found: list[int] = sums.tolist()
    return found


_STAGED = "partition int, start long, end long, file string, counts array<long>"


def _stage(staging: Staging, placing: Placing) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """A task: put the records of one range aside, with the partitions they go to, and say what was put."""

    def task(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        counts = np.zeros(placing.partitions, np.int64)
        seen: list[tuple[int, int, int]] = []

        def placed() -> Iterator[tuple[pa.RecordBatch, Places]]:
            for data in batches:
                if not len(data):
                    continue
                offsets = data["offset"].to_numpy()
                partition = data["partition"][0].as_py()
                seen.append((partition, int(offsets[0]), int(offsets[-1]) + 1))
                places = placing.places(data["key"], offsets + partition)
                np.add(counts, np.bincount(places, minlength=len(counts)), out=counts)
                yield from_spark(data, data["id"]), places

        file = staging.put(placed())
        if file is not None:
            columns = [[seen[0][0]], [seen[0][1]], [seen[-1][2]], [file], [counts.tolist()]]
            yield pa.RecordBatch.from_arrays(
                [pa.array(c, t) for c, t in zip(columns, _STAGED_TYPES, strict=True)], _NAMES
            )

    return task


_NAMES = ["partition", "start", "end", "file", "counts"]
_STAGED_TYPES = [pa.int32(), pa.int64(), pa.int64(), pa.string(), pa.list_(pa.int64())]
