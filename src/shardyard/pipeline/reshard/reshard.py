"""reshard: rewrite a topic to another number of partitions or another partitioner, while producers keep writing.

The records are copied to a target topic in rounds, each of them exactly once, and every round is compared with its
source. Spark copies many records; few are copied faster without it. When a round takes a moment only, the topic is
sealed, and what has arrived in that moment is copied. Then the positions of its groups are translated, and the topic
moves: producers and members continue with the target. Until then nothing changes for them, and a reshard that was
interrupted continues where it stopped when it is run again.
"""

import contextlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from pyspark.sql import SparkSession

from shardyard.model import InvalidCall, InvalidValue, Retention, SealLost, whole_number
from shardyard.model.url import parse_url
from shardyard.pipeline.blocking import BlockingLog, blocking
from shardyard.pipeline.reshard.copying import Copying
from shardyard.pipeline.reshard.job import Job, job_folder, lock_job, remove_job, start_or_resume
from shardyard.pipeline.reshard.offset_translation import round_ends
from shardyard.pipeline.reshard.positions import GroupPositions
from shardyard.pipeline.reshard.seal import SealTimes, end_left_seals, sealed
from shardyard.pipeline.source.options import absolute
from shardyard.pipeline.source.staging import Staging, staging_folder
from shardyard.pipeline.spark_errors import translate_spark_errors
from shardyard.queues.settings import WATCH_NAME
from shardyard.registry import Registry, open_registry, registry_exists

QUICK_SECONDS = 0.2
"""The topic is sealed after a round that took less. What is left then has arrived during that round."""
ENOUGH_SECONDS = 1.0
"""It is also sealed after a round that took less than this, if the one before it was not much slower."""
CATCH_UP_ROUNDS = 20
"""After so many rounds it is sealed in any case: producers append about as fast as records are copied."""
SWITCHES = 3
"""How often the switch is tried. One that was stalled until its seal had ended has to be repeated."""


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
    """For how long producers may have been refused, over all attempts. The seal of an attempt that was killed counts
    until it ended by itself, or until the next attempt ended it."""
    groups: dict[str, int]
    """The groups whose positions were translated, and how many records are delivered to each of them again."""


def reshard(
    spark: SparkSession | Callable[[], SparkSession],
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

    `spark`: a session, or a function that is called for one only if there is so much to copy that Spark is needed. The
    target's default name is the topic's with the next free number. If a registry is given, the positions of groups
    are translated to the target. The old topic stays, sealed, until it is deleted.
    """
    whole_number("partitions", partitions, at_least=1)
    log = absolute(log)
    if registry is not None:
        check_registry(registry)
    with contextlib.ExitStack() as stack:
        opened = stack.enter_context(blocking(log))
        if opened.wait(opened.log.topic(topic)).open_partitions is not None:  # before anything is created
            raise InvalidCall(f"topic {topic!r} is being contracted: wait until its last partitions are dropped")
        folder = job_folder(staging_folder(log), topic)
        stack.enter_context(lock_job(folder, topic))
        stack.enter_context(translate_spark_errors())
        job = start_or_resume(opened, folder, topic, partitions, partitioner, hash_, target)
        groups = None if registry is None else stack.enter_context(open_registry(registry))
        start_spark = spark if callable(spark) else lambda: spark
        return _Reshard(start_spark, log, opened, job, groups, on_step).run()


def check_registry(url: str) -> None:
    """Raise `InvalidValue` if the registry does not exist: a new, empty one would have no groups to translate."""
    if not registry_exists(url):
        shown = str(parse_url("registry", url))
        raise InvalidValue("registry", shown, "one that exists, sqlite:///FILE; without groups, none (--no-groups)")


class _Reshard:
    """The steps of a reshard. The result of each step is on disk before the next one starts."""

    def __init__(
        self,
        spark: Callable[[], SparkSession],
        url: str,
        opened: BlockingLog,
        job: Job,
        registry: Registry | None,
        on_step: Callable[[str], None],
    ) -> None:
        self._opened = opened
        self._job = job
        self._on_step = on_step
        self._staging = Staging(staging_folder(url))
        self._folder = job_folder(staging_folder(url), job.topic)
        self._copying = Copying(spark, url, opened, self._staging, self._folder, job, on_step)
        self._registry = registry
        self._positions = GroupPositions(opened, job, registry)
        self._seals = SealTimes(self._folder)

    def run(self) -> Resharded:
        job, log, wait = self._job, self._opened.log, self._opened.wait
        end_left_seals(self._opened, job.topic, self._seals)
        self._staging.clear_orphans()
        groups: dict[str, int] = {}
        if wait(log.topic(job.topic)).successor is None:
            wait(log.set_retention(job.topic, Retention()))
            self._copying.finish()
            for ends in round_ends(self._copying.copied(), self._copying.ends(), self._positions.committed().values()):
                self._copying.copy(ends)
            groups = self._switch()
        if self._registry is not None:
            self._registry.run(lambda tx: tx.touch(WATCH_NAME))  # brokers keep in memory which topics have moved
        for topic in (job.topic, job.target):
            wait(log.set_retention(topic, job.retention))
        rounds, seconds = self._copying.rounds, self._seals.seconds()
        copied = sum(sum(chunk.counts) for done in rounds for chunk in done.chunks)
        remove_job(self._staging, job, self._folder)
        spec = job.spec
        return Resharded(
            job.topic,
            job.target,
            spec.partitions,
            spec.partitioner,
            spec.hash,
            copied,
            len(rounds),
            round(seconds, 3),
            groups,
        )

    def _switch(self) -> dict[str, int]:
        """Catch up with the producers and move the topic. Returns how many records each group gets again."""
        for attempt in range(1, SWITCHES + 1):
            self._catch_up()
            try:
                return self._move()
            except SealLost as error:
                if attempt == SWITCHES:
                    raise
                self._on_step(f"{error}: it is copied and sealed again")
        raise AssertionError("the last attempt returns or raises")

    def _catch_up(self) -> None:
        """Copy rounds until one is quick: what is left then is what producers have appended while it ran."""
        before = math.inf
        for _ in range(CATCH_UP_ROUNDS):
            started = time.monotonic()
            self._copying.copy(self._copying.ends())
            self._positions.prepare(self._copying.rounds)
            took = time.monotonic() - started
            if took < QUICK_SECONDS or before / 2 < took < ENOUGH_SECONDS:
                return
            before = took
        self._on_step(f"producers append about as fast as records are copied: they will wait for about {before:.1f} s")

    def _move(self) -> dict[str, int]:
        """Copy what is left while the topic takes no records, let groups continue in the target, and move the topic."""
        job, log = self._job, self._opened.log
        self._on_step(f"sealing {job.topic!r} to copy what is left")
        with sealed(self._opened, job.topic, self._seals) as seal:
            self._copying.copy(self._copying.ends(), without_spark=True)
            self._copying.check_complete(seal)
            groups = self._positions.transfer(self._copying.rounds, self._copying.first_target_offsets())
            move = log.move_topic(job.topic, job.target, holder=seal.holder, generation=seal.generation)
            self._opened.wait(move)
        return groups
