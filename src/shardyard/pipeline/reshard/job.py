"""A reshard that is under way: what is remembered of it on disk, from its beginning to its end."""

import json
import re
import shutil
from collections.abc import Container, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from shardyard.model import Damaged, InvalidCall, InvalidValue, Moved, TopicExists
from shardyard.pipeline.blocking import BlockingLog, blocking
from shardyard.pipeline.placing import Placing
from shardyard.pipeline.reshard.carrying import Chunk
from shardyard.pipeline.source.options import absolute
from shardyard.pipeline.source.staging import Staging, folder_of, store_json


@dataclass(frozen=True, slots=True)
class Job:
    """A reshard that is under way, as it is remembered on disk."""

    topic: str
    epoch: int
    target: str
    target_epoch: int
    placing: Placing

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
        }

    @classmethod
    def from_json(cls, stored: dict[str, Any]) -> Self:
        return cls(**{**stored, "placing": Placing(*stored["placing"])})


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

    def __init__(self, home: Path) -> None:
        self._folder = home / "rounds"

    def all(self) -> list[Round]:
        return [Round.from_json(json.loads(path.read_text())) for path in sorted(self._folder.glob("*.json"))]

    def put(self, number: int, done: Round) -> None:
        store_json(self._folder / f"{number:08}.json", done.to_json())


def abort(log: str, topic: str) -> str:
    """Give a reshard up: the topic takes records again, and what was copied is deleted. Returns the target's name."""
    log = absolute(log)
    home = home_of(folder_of(log), topic)
    job = _load(home)
    with blocking(log) as opened:
        if job is None:
            raise InvalidCall(f"there is no reshard of {topic!r} under way")
        opened.wait(opened.log.unseal_topic(topic))  # refuses when the topic has moved
        for there in opened.wait(opened.log.topics()):
            if there.name == job.target and there.epoch == job.target_epoch:
                opened.wait(opened.log.delete_topic(job.target))
    forget(Staging(folder_of(log)), job, home)
    return job.target


def begin(
    opened: BlockingLog,
    folder: Path,
    topic: str,
    partitions: int,
    partitioner: str | None,
    hash_: str | None,
    target: str | None,
) -> Job:
    """The reshard that is under way, if it is the one asked for; else a new one, remembered before it begins."""
    source = opened.wait(opened.log.topic(topic))
    wanted = Placing.of(source, partitioner, hash_).over(partitions)
    home = home_of(folder, topic)
    if (job := _load(home)) is not None and job.epoch == source.epoch and source.successor in (None, job.target):
        if job.placing != wanted or target not in (None, job.target):
            raise InvalidCall(
                f"{topic!r} is being resharded to {job.target!r} with {job.placing}: run that again, or abort it first"
            )
        return job
    if source.successor is not None:
        raise Moved(topic, source.successor)
    if wanted == Placing.of(source):
        raise InvalidValue("partitions", partitions, f"another number or partitioner than {topic!r} has: {wanted}")
    names = {there.name: there for there in opened.wait(opened.log.topics())}
    name = target or next_name(topic, names)
    if name in names:
        raise TopicExists(name, names[name].partitions)
    made = opened.wait(
        opened.log.create_topic(name, partitions, kind=source.kind, partitioner=wanted.partitioner, hash_=wanted.hash)
    )
    job = Job(topic, source.epoch, name, made.epoch, wanted)
    store_json(home / "job.json", job.to_json())
    return job


def next_name(topic: str, taken: Container[str]) -> str:
    """orders -> orders.2 -> orders.3"""
    base = re.sub(r"\.\d+$", "", topic)
    number = int(topic.removeprefix(f"{base}.")) + 1 if base != topic else 2
    while f"{base}.{number}" in taken:
        number += 1
    return f"{base}.{number}"


def home_of(folder: Path, topic: str) -> Path:
    return folder / "reshards" / topic


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
