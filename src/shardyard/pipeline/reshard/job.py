"""The state of a reshard on disk, from its start to its end."""

import contextlib
import json
import re
import shutil
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self, TypeVar, overload

from shardyard.model import Damaged, InvalidCall, InvalidValue, Moved, Retention, Topic, TopicExists
from shardyard.model.limits import Limits, check_topic_name
from shardyard.pipeline.atomic_files import exclusive_lock, write_json
from shardyard.pipeline.blocking import BlockingLog, blocking
from shardyard.pipeline.partitioning import PartitionerSpec
from shardyard.pipeline.reshard.offset_translation import Chunk
from shardyard.pipeline.reshard.seal import SealTimes, end_left_seals
from shardyard.pipeline.source.options import absolute
from shardyard.pipeline.source.staging import Staging, staging_folder

T = TypeVar("T")


class AlreadyResharded(Moved):
    """Raised when a topic is to be resharded that was resharded before."""

    def __init__(self, topic: str, successor: str) -> None:
        super().__init__(topic, successor)
        self.args = (
            f"topic {topic!r} is resharded already, and continues as {successor!r}: to reshard again, name that one",
        )


@dataclass(frozen=True, slots=True)
class Job:
    """A reshard that was started and is not finished yet."""

    topic: str
    epoch: int
    target: str
    target_epoch: int
    """0 until the target is created."""
    spec: PartitionerSpec
    """How the target is partitioned."""
    retention: Retention
    """The topic's own. It is lifted during the reshard, so that no record is trimmed before it is compared."""

    @property
    def producer(self) -> str:
        return f"reshard-{self.target}-{self.target_epoch}"

    def to_json(self) -> dict[str, Any]:
        spec = self.spec
        return {
            "topic": self.topic,
            "epoch": self.epoch,
            "target": self.target,
            "target_epoch": self.target_epoch,
            "placing": [spec.partitioner, spec.hash, spec.partitions],
            "retention": [self.retention.age_ms, self.retention.bytes_per_partition],
        }

    @classmethod
    def from_json(cls, stored: dict[str, Any]) -> Self:
        return cls(
            stored["topic"],
            stored["epoch"],
            stored["target"],
            stored["target_epoch"],
            PartitionerSpec(*stored["placing"]),
            Retention(*stored["retention"]),
        )


@dataclass(frozen=True, slots=True)
class Round:
    """One round of copying: all records of the source partitions with offsets from `starts` up to `ends`."""

    starts: tuple[int, ...]
    ends: tuple[int, ...]
    chunks: tuple[Chunk, ...]
    target_ends: tuple[int, ...] | None = None
    """Where the target partitions ended after the round. None until the copy was compared with the source."""
    is_direct: bool = False
    """Copied without Spark, and so compared without it."""

    def to_json(self) -> dict[str, Any]:
        return {
            "starts": self.starts,
            "ends": self.ends,
            "chunks": [chunk.to_json() for chunk in self.chunks],
            "target_ends": self.target_ends,
            "is_direct": self.is_direct,
        }

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> Self:
        ends = stored["target_ends"]
        return cls(
            tuple(stored["starts"]),
            tuple(stored["ends"]),
            tuple(Chunk.from_json(chunk) for chunk in stored["chunks"]),
            None if ends is None else tuple(ends),
            stored.get("is_direct", False),  # reshards that an earlier version has started have only rounds by Spark
        )

    def counts(self, partitions: int) -> list[int]:
        """How many records the round brought to each target partition."""
        return [sum(chunk.counts[q] for chunk in self.chunks) for q in range(partitions)]


class Rounds(Sequence[Round]):
    """The rounds of a reshard in their order, each stored on disk. Only one process at a time uses them."""

    def __init__(self, home: Path, job: Job) -> None:
        self._folder = home / f"rounds-{job.target_epoch}"
        self._rounds = [_load(path, Round.from_json) for path in sorted(self._folder.glob("*.json"))]

    def store(self, number: int, done: Round) -> None:
        """Store a new round or replace one, durably."""
        write_json(self._folder / f"{number:08}.json", done.to_json())
        self._rounds[number : number + 1] = [done]

    def __len__(self) -> int:
        return len(self._rounds)

    @overload
    def __getitem__(self, index: int) -> Round: ...
    @overload
    def __getitem__(self, index: slice) -> list[Round]: ...
    def __getitem__(self, index: int | slice) -> Round | list[Round]:
        return self._rounds[index]


def abort(log: str, topic: str) -> str:
    """Abort a reshard: the topic takes records again, and the copy is deleted. Returns the target's name."""
    log = absolute(log)
    folder = job_folder(staging_folder(log), topic)
    with lock_job(folder, topic), blocking(log) as opened:
        job = _load_job(folder)
        if job is None:
            raise InvalidCall(f"there is no reshard of {topic!r} under way")
        if (successor := opened.wait(opened.log.topic(topic)).successor) is not None:
            raise Moved(topic, successor)
        end_left_seals(opened, topic, SealTimes(folder))
        opened.wait(opened.log.set_retention(topic, job.retention))
        for existing in opened.wait(opened.log.topics()):
            if existing.name == job.target and existing.epoch == job.target_epoch:
                opened.wait(opened.log.delete_topic(job.target))
        remove_job(Staging(staging_folder(log)), job, folder)
    return job.target


@contextlib.contextmanager
def lock_job(folder: Path, topic: str) -> Iterator[None]:
    """Let one process at a time run or abort the reshard of a topic; `Busy` for any other."""
    lock = folder.with_name(f"{folder.name}.lock")
    with exclusive_lock(lock, f"the reshard of {topic!r} (another process is running or aborting it)"):
        yield


def start_or_resume(
    opened: BlockingLog,
    folder: Path,
    topic: str,
    partitions: int,
    partitioner: str | None,
    hash_: str | None,
    target: str | None,
) -> Job:
    """The unfinished reshard of the topic if there is one with the same parameters, otherwise a new one."""
    source = opened.wait(opened.log.topic(topic))
    spec = PartitionerSpec.of(source, partitioner, hash_).with_partitions(partitions)
    job = _load_job(folder)
    if job is None or job.epoch != source.epoch or source.successor not in (None, job.target):
        job = _new_job(opened, source, spec, target)
        shutil.rmtree(folder, ignore_errors=True)
        write_json(folder / "job.json", job.to_json())
    elif job.spec != spec or target not in (None, job.target):
        raise InvalidCall(
            f"{topic!r} is being resharded to {job.target!r} with {job.spec}: run that again, or abort it first"
        )
    if not job.target_epoch:
        job = replace(job, target_epoch=_create_target(opened, job, source).epoch)
        write_json(folder / "job.json", job.to_json())
    return job


def _new_job(opened: BlockingLog, source: Topic, spec: PartitionerSpec, target: str | None) -> Job:
    if source.successor is not None:
        raise AlreadyResharded(source.name, source.successor)
    if spec == PartitionerSpec.of(source):
        expected = f"another number or another partitioner than {source.name!r} has: {spec}"
        raise InvalidValue("partitions", spec.partitions, expected)
    names = {existing.name: existing for existing in opened.wait(opened.log.topics())}
    name = check_topic_name(target or next_name(source.name, names), Limits())
    if name in names:
        raise TopicExists(name, names[name].partitions)
    return Job(source.name, source.epoch, name, 0, spec, source.retention)


def _create_target(opened: BlockingLog, job: Job, source: Topic) -> Topic:
    """Create the target. One that exists and was never written to is taken over: an interrupted run created it."""
    spec = job.spec
    try:
        return opened.wait(
            opened.log.create_topic(
                job.target,
                spec.partitions,
                kind=source.kind,
                partitioner=spec.partitioner,
                hash_=spec.hash,
            )
        )
    except TopicExists:
        existing = opened.wait(opened.log.topic(job.target))
        spans = [opened.wait(opened.log.span(partition)) for partition in existing]
        if PartitionerSpec.of(existing) != spec or any(span.end for span in spans):
            raise
        return existing


def next_name(topic: str, taken: Container[str]) -> str:
    """The default name of the target: orders -> orders.2 -> orders.3."""
    base = re.sub(r"\.\d+$", "", topic)
    number = int(topic.removeprefix(f"{base}.")) + 1 if base != topic else 2
    while f"{base}.{number}" in taken:
        number += 1
    return f"{base}.{number}"


def job_folder(staging: Path, topic: str) -> Path:
    return staging / "reshards" / f"topic-{topic}"


def _load_job(folder: Path) -> Job | None:
    path = folder / "job.json"
    return _load(path, Job.from_json) if path.exists() else None


def _load(path: Path, from_json: Callable[[dict[str, Any]], T]) -> T:
    try:
        return from_json(json.loads(path.read_text()))
    except (ValueError, TypeError, KeyError) as error:
        raise Damaged(str(path), f"{type(error).__name__}: {error}") from None


def remove_job(staging: Staging, job: Job, folder: Path) -> None:
    """Delete everything that is stored about a reshard."""
    if (pending := staging.pending(job.producer)) is not None:
        staging.discard(pending.files)
    staging.forget(job.producer)
    shutil.rmtree(folder, ignore_errors=True)
