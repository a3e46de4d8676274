"""A reshard that is under way: what is remembered of it on disk, from its beginning to its end."""

import contextlib
import json
import re
import shutil
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from shardyard.model import Damaged, InvalidCall, InvalidValue, Moved, Retention, Topic, TopicExists
from shardyard.model.limits import Limits, check_topic_name
from shardyard.pipeline.blocking import BlockingLog, blocking
from shardyard.pipeline.durable import alone, store_json
from shardyard.pipeline.placing import Placing
from shardyard.pipeline.reshard.carrying import Chunk
from shardyard.pipeline.source.options import absolute
from shardyard.pipeline.source.staging import Staging, folder_of


@dataclass(frozen=True, slots=True)
class Job:
    """A reshard that is under way, as it is remembered on disk."""

    topic: str
    epoch: int
    target: str
    target_epoch: int
    """0 before the target is made."""
    placing: Placing
    retention: Retention
    """The topic's own. It is lifted meanwhile, so that nothing is trimmed that is yet to be compared."""

    @property
    def producer(self) -> str:
        return f"reshard-{self.target}-{self.target_epoch}"

    def to_json(self) -> dict[str, Any]:
        placing = self.placing
        return {
            "topic": self.topic,
            "epoch": self.epoch,
            "target": self.target,
            "target_epoch": self.target_epoch,
            "placing": [placing.partitioner, placing.hash, placing.partitions],
            "retention": [self.retention.age_ms, self.retention.bytes_per_partition],
        }

    @classmethod
    def from_json(cls, stored: dict[str, Any]) -> Self:
        placing, retention = Placing(*stored["placing"]), Retention(*stored["retention"])
        return cls(**{**stored, "placing": placing, "retention": retention})


@dataclass(frozen=True, slots=True)
class Round:
    """What one round copied: everything from `starts` to `ends` of the old partitions."""

    starts: tuple[int, ...]
    ends: tuple[int, ...]
    chunks: tuple[Chunk, ...]
    checked: bool = False

    def to_json(self) -> dict[str, Any]:
        chunks = [chunk.to_json() for chunk in self.chunks]
        return {"starts": list(self.starts), "ends": list(self.ends), "chunks": chunks, "checked": self.checked}

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> Self:
        chunks = tuple(Chunk.from_json(chunk) for chunk in stored["chunks"])
        return cls(tuple(stored["starts"]), tuple(stored["ends"]), chunks, stored["checked"])


class Rounds:
    """The rounds of a reshard, remembered on disk."""

    def __init__(self, home: Path, job: Job) -> None:
        self._folder = home / f"rounds-{job.target_epoch}"

    def all(self) -> list[Round]:
        return [Round.from_json(json.loads(path.read_text())) for path in sorted(self._folder.glob("*.json"))]

    def put(self, number: int, done: Round) -> None:
        store_json(self._folder / f"{number:08}.json", done.to_json())


def abort(log: str, topic: str) -> str:
    """Give a reshard up: the topic takes records again, and what was copied is deleted. Returns the target's name."""
    log = absolute(log)
    home = home_of(folder_of(log), topic)
    with alone_at(home, topic), blocking(log) as opened:
        job = _load(home)
        if job is None:
            raise InvalidCall(f"there is no reshard of {topic!r} under way")
        if (successor := opened.wait(opened.log.topic(topic)).successor) is not None:
            raise Moved(topic, successor)
        opened.wait(opened.log.set_retention(topic, job.retention))
        for there in opened.wait(opened.log.topics()):
            if there.name == job.target and there.epoch == job.target_epoch:
                opened.wait(opened.log.delete_topic(job.target))
        forget(Staging(folder_of(log)), job, home)
    return job.target


@contextlib.contextmanager
def alone_at(home: Path, topic: str) -> Iterator[None]:
    """One at a time, whether it goes on with a reshard or gives it up."""
    with alone(home.with_name(f"{home.name}.lock"), f"the reshard of {topic!r}, where another process is at work,"):
        yield


def begin(
    opened: BlockingLog,
    home: Path,
    topic: str,
    partitions: int,
    partitioner: str | None,
    hash_: str | None,
    target: str | None,
) -> Job:
    """The reshard that is under way, if it is the one asked for; else a new one, remembered before it begins."""
    source = opened.wait(opened.log.topic(topic))
    wanted = Placing.of(source, partitioner, hash_).over(partitions)
    job = _load(home)
    if job is None or job.epoch != source.epoch or source.successor not in (None, job.target):
        job = _new(opened, source, wanted, target)
        shutil.rmtree(home, ignore_errors=True)
        store_json(home / "job.json", job.to_json())
    elif job.placing != wanted or target not in (None, job.target):
        raise InvalidCall(
            f"{topic!r} is being resharded to {job.target!r} with {job.placing}: run that again, or abort it first"
        )
    if not job.target_epoch:
        job = replace(job, target_epoch=_made(opened, job, source).epoch)
        store_json(home / "job.json", job.to_json())
    return job


def _new(opened: BlockingLog, source: Topic, wanted: Placing, target: str | None) -> Job:
    if source.successor is not None:
        raise Moved(source.name, source.successor)
    if wanted == Placing.of(source):
        different = f"another number or partitioner than {source.name!r} has: {wanted}"
        raise InvalidValue("partitions", wanted.partitions, different)
    names = {there.name: there for there in opened.wait(opened.log.topics())}
    name = check_topic_name(target or next_name(source.name, names), Limits())
    if name in names:
        raise TopicExists(name, names[name].partitions)
    return Job(source.name, source.epoch, name, 0, wanted, source.retention)


def _made(opened: BlockingLog, job: Job, source: Topic) -> Topic:
    """The target; one that is there already was made by us, just before we were cut off."""
    placing = job.placing
    try:
        return opened.wait(
            opened.log.create_topic(
                job.target,
                placing.partitions,
                kind=source.kind,
                partitioner=placing.partitioner,
                hash_=placing.hash,
            )
        )
    except TopicExists:
        there = opened.wait(opened.log.topic(job.target))
        spans = [opened.wait(opened.log.span(partition)) for partition in there]
        if Placing.of(there) != placing or any(span.end for span in spans):
            raise
        return there


def next_name(topic: str, taken: Container[str]) -> str:
    """orders -> orders.2 -> orders.3"""
    base = re.sub(r"\.\d+$", "", topic)
    number = int(topic.removeprefix(f"{base}.")) + 1 if base != topic else 2
    while f"{base}.{number}" in taken:
        number += 1
    return f"{base}.{number}"


def home_of(folder: Path, topic: str) -> Path:
    return folder / "reshards" / f"topic-{topic}"


def _load(home: Path) -> Job | None:
    path = home / "job.json"
    try:
        return Job.from_json(json.loads(path.read_text()))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError) as error:
        raise Damaged(str(path), str(error)) from None


def forget(staging: Staging, job: Job, home: Path) -> None:
    if (pending := staging.pending(job.producer)) is not None:
        staging.discard(pending.files)
    staging.forget(job.producer)
    shutil.rmtree(home, ignore_errors=True)
