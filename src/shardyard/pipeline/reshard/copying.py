"""Copying a topic in rounds, each of them exactly once and compared with its source."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from pyspark.sql import SparkSession

from shardyard.model import Damaged, SealLost
from shardyard.pipeline.blocking import BlockingLog
from shardyard.pipeline.reshard.direct_rounds import DirectRounds, count_records
from shardyard.pipeline.reshard.job import Job, Round, Rounds
from shardyard.pipeline.reshard.seal import HeldSeal
from shardyard.pipeline.reshard.spark_rounds import SparkRounds
from shardyard.pipeline.source.staging import Manifest, Staging, commit

SPARK_ABOVE = 100_000
"""Spark copies a round with more records than this. Fewer are copied in less time than Spark takes to plan it."""


class Copying:
    """The rounds that were copied, and the copying of further ones.

    A round is staged in files, appended with stamps, and compared. Each of these is durable before the next begins, so
    that a round that was interrupted is finished from where it stopped.
    """

    def __init__(
        self,
        spark: Callable[[], SparkSession],
        url: str,
        opened: BlockingLog,
        staging: Staging,
        folder: Path,
        job: Job,
        on_step: Callable[[str], None],
    ) -> None:
        self._opened, self._staging, self._job, self._on_step = opened, staging, job, on_step
        self._direct = DirectRounds(opened, staging, job)
        self._spark = SparkRounds(spark, url, opened, staging, job)
        self.rounds = Rounds(folder, job)

    def copied(self) -> list[int]:
        """Up to which offset each source partition is copied. Records that were trimmed before count as copied."""
        reached = self.rounds[-1].ends if self.rounds else ()
        spans = self._opened.wait(self._opened.log.ends(self._job.topic))
        return [max(span.first, reached[p] if p < len(reached) else 0) for p, span in sorted(spans.items())]

    def ends(self) -> list[int]:
        """Where each source partition ends."""
        return self._ends(self._job.topic)

    def first_target_offsets(self) -> list[int]:
        spans = self._opened.wait(self._opened.log.ends(self._job.target))
        return [spans[q].first for q in sorted(spans)]

    def copy(self, ends: Sequence[int], *, without_spark: bool = False) -> None:
        """Copy all records below `ends` that are not copied yet.

        How many that are is estimated by offsets, which is too high where these have gaps.
        """
        while True:
            starts = self.copied()
            # Partitions that were added since `ends` was computed are left to the next call.
            upto = [max(start, ends[p]) if p < len(ends) else start for p, start in enumerate(starts)]
            if upto == starts:
                return
            left = sum(upto) - sum(starts)
            by_spark = left > SPARK_ABOVE and not without_spark
            self._on_step(f"round {len(self.rounds) + 1}: up to {left:,} records{' by Spark' if by_spark else ''}")
            done, files = (self._spark if by_spark else self._direct).stage(starts, upto)
            job, detail = self._job, done.to_json()
            self._staging.start(Manifest(job.producer, len(self.rounds), job.target, job.target_epoch, files, detail))
            self.finish()

    def finish(self) -> None:
        """Append the round that is staged but not yet appended, and compare the one that is not yet compared."""
        pending = self._staging.pending(self._job.producer)
        if pending is not None:
            self.rounds.store(pending.batch, Round.from_json(pending.detail))
            self._opened.wait(commit(self._opened.log, self._staging, pending))
        if not self.rounds or self.rounds[-1].target_ends is not None:
            return
        # Only the last round can be without: a round is compared before the next one is staged.
        last = len(self.rounds) - 1
        done = self.rounds[last]
        before, after = self._target_ends(last), self._ends(self._job.target)
        (self._direct if done.is_direct else self._spark).compare(done, before, after)
        self.rounds.store(last, replace(done, target_ends=tuple(after)))

    def check_complete(self, seal: HeldSeal) -> None:
        """Raise `Damaged` if a record of the source is missing, or if the target has records that no round compared.

        `SealLost` if one is missing because the seal, under which the last round was copied, has ended since.
        """
        source, target = self._job.topic, self._job.target
        if extra := self._count(target, self._target_ends(len(self.rounds)), self._ends(target)):
            raise Damaged(target, f"it has {extra} records that were not copied: abort the reshard")
        if missing := self._count(source, self.copied(), self.ends()):
            now = self._opened.wait(self._opened.log.topic(source))
            if not now.sealed or now.generation != seal.generation:
                raise SealLost(source, seal.holder)
            raise Damaged(target, f"it lacks {missing} records of {source!r}: abort the reshard")

    def _count(self, topic: str, starts: Sequence[int], ends: Sequence[int]) -> int:
        return self._opened.wait(count_records(self._opened.log, topic, starts, ends))

    def _target_ends(self, rounds: int) -> list[int]:
        """Where each target partition ended after the first so many rounds."""
        if rounds and (ends := self.rounds[rounds - 1].target_ends) is not None:
            return list(ends)
        return self.first_target_offsets()

    def _ends(self, topic: str) -> list[int]:
        spans = self._opened.wait(self._opened.log.ends(topic))
        return [spans[p].end for p in sorted(spans)]
