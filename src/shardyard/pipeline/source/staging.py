"""Exactly-once writes to a topic: tasks stage records in files, the driver appends them.

A task writes its records to a file, with each Arrow batch sorted by partition. The driver lists the files of a batch in
a manifest, which is durable before anything is appended, and appends them with stamps, in the order of the tasks. A
batch that is replayed after a crash finds the manifest and continues with the files of the first attempt: the stamps
tell which records are already stored. A batch that was finished is recognised by its number.
"""

import asyncio
import contextlib
import fcntl
import hashlib
import json
import os
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from shardyard.log import Log, local_folder
from shardyard.log.router import PLACE_AGAIN, append_with_retry, current_topic
from shardyard.model import (
    InvalidValue,
    Moved,
    Partition,
    SequenceTooOld,
    Stamp,
    Topic,
)
from shardyard.model.arrow_limits import check_batch
from shardyard.model.batch import SCHEMA
from shardyard.model.limits import Limits
from shardyard.model.url import parse_url
from shardyard.pipeline.atomic_files import fsync, write_json
from shardyard.runtime.clock import SystemClock, now_ms

APPEND_RECORDS = 20_000
APPEND_BYTES = 4 * 1024 * 1024
CONCURRENT_PARTITIONS = 8
"""Partitions that are appended to at the same time."""
RETRY_TIMEOUT_SECONDS = 60.0
"""How long an append is retried while the log can't take records: a reshard seals a topic for some seconds."""
BATCH_SEQUENCES = 2**20
"""How many appends to one partition a batch may need."""
ORPHAN_SECONDS = 24 * 3600
"""A file that is older, and that no manifest lists, was left behind by a failed task."""
STAGING_VARIABLE = "SHARDYARD_STAGING"
"""The environment variable with the folder for logs that have none of their own."""
_FILE_SCHEMA = pa.schema([*SCHEMA, pa.field("partition", pa.int32(), nullable=False)])
_NO_LIMIT = Limits(batch_bytes=2**62, batch_records=2**62)
"""Batches are cut to size when they are appended; only the size of each record is checked when it is staged."""

PartitionIndexes = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Manifest:
    """The files of a batch, in the order in which they are appended."""

    producer: str
    batch: int
    topic: str
    epoch: int
    files: tuple[str, ...]
    detail: Mapping[str, Any]
    """Further data of the job that wrote the manifest."""


def staging_folder(url: str, shared: str | None = None) -> Path:
    """The folder where records for this log are staged: inside the log's own, or, for a log on a server, inside
    `shared` or the one that the environment names. The driver and all workers must reach it."""
    folder = local_folder(url)
    if folder is not None:
        return folder / "staging"
    shared = shared or os.environ.get(STAGING_VARIABLE)
    if not shared:
        expected = f"a folder that the driver and all workers can reach (or in {STAGING_VARIABLE}): the log has none"
        raise InvalidValue("option 'staging'", shared, expected)
    name = hashlib.sha256(str(parse_url("log", url)).encode()).hexdigest()[:16]
    return Path(shared).absolute() / name


class Staging:
    """The staged files, and for each producer the pending batch and the number of the last finished one."""

    def __init__(self, folder: Path) -> None:
        self._files = folder / "files"
        self._producers = folder / "producers"

    def write(self, batches: Iterable[tuple[pa.RecordBatch, PartitionIndexes]]) -> str | None:
        """Stage records with their partitions, durably. Returns the file's name, or None if there were no records."""
        name = f"{uuid.uuid4().hex}.arrow"
        path = self._files / name
        sink = writer = None
        for data, partitions in batches:
            if not len(data):
                continue
            if sink is None or writer is None:
                self._files.mkdir(parents=True, exist_ok=True)
                sink = path.open("wb")
                writer = pa.ipc.new_file(sink, _FILE_SCHEMA)
            order = np.argsort(partitions, kind="stable")
            sorted_ = check_batch(data, _NO_LIMIT, now_ms())[0].take(pa.array(order))
            columns = [*sorted_.columns, pa.array(partitions[order])]
            writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=_FILE_SCHEMA))
        if sink is None or writer is None:
            return None
        writer.close()
        sink.close()
        fsync(path)
        fsync(self._files)
        return name

    def discard(self, names: Iterable[str]) -> None:
        for name in names:
            (self._files / name).unlink(missing_ok=True)

    def abort(self, names: Iterable[str]) -> None:
        """Delete the files of a batch that failed, unless a manifest lists them: then the batch may be stored in part,
        and the next attempt finishes it with these files."""
        self.discard(set(names) - self._listed())

    def pending(self, producer: str) -> Manifest | None:
        stored = _load(self._producers / producer / "pending.json")
        return None if stored is None else Manifest(**{**stored, "files": tuple(stored["files"])})

    def done(self, producer: str) -> int:
        """The number of the last finished batch; -1 if there is none."""
        stored = _load(self._producers / producer / "done.json")
        return -1 if stored is None else int(stored["batch"])

    def start(self, manifest: Manifest) -> None:
        """Record, durably, which files the batch consists of."""
        fields = ("producer", "batch", "topic", "epoch", "detail")
        content = {name: getattr(manifest, name) for name in fields} | {"files": list(manifest.files)}
        write_json(self._producers / manifest.producer / "pending.json", content)

    def finish(self, manifest: Manifest) -> None:
        """Record, durably, that the batch was appended, and delete its files."""
        home = self._producers / manifest.producer
        write_json(home / "done.json", {"batch": manifest.batch})
        (home / "pending.json").unlink(missing_ok=True)
        self.discard(manifest.files)

    def forget(self, producer: str) -> None:
        """Delete the state of a producer that will not write again."""
        home = self._producers / producer
        for name in ("pending.json", "done.json"):
            (home / name).unlink(missing_ok=True)
        with contextlib.suppress(FileNotFoundError):
            home.rmdir()
        self._lock(producer).unlink(missing_ok=True)

    @contextlib.contextmanager
    def exclusive(self, producer: str) -> Iterator[None]:
        """Hold the producer's lock. A killed driver's Python workers live on for a moment: this waits for them."""
        self._producers.mkdir(parents=True, exist_ok=True)
        with self._lock(producer).open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _lock(self, producer: str) -> Path:
        return self._producers / f"{producer}.lock"

    def clear_orphans(self) -> None:
        """Delete the files of tasks that failed long ago."""
        if not self._files.is_dir():
            return
        listed = self._listed()
        for path in self._files.iterdir():
            with contextlib.suppress(FileNotFoundError):
                if path.name not in listed and path.stat().st_mtime < time.time() - ORPHAN_SECONDS:
                    path.unlink()

    def _listed(self) -> set[str]:
        """The files of all pending batches."""
        pending = (self.pending(home.name) for home in self._producers.glob("*/"))
        return {file for manifest in pending if manifest is not None for file in manifest.files}

    def read(self, name: str) -> list[pa.RecordBatch]:
        """The batches of a file, memory-mapped."""
        reader = pa.ipc.open_file(pa.memory_map(str(self._files / name)))
        return [reader.get_batch(i) for i in range(reader.num_record_batches)]


def _load(path: Path) -> dict[str, Any] | None:
    try:
        stored: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    return stored


async def commit(log: Log, staging: Staging, manifest: Manifest) -> int:
    """Append a staged batch, unless it was finished before. Returns how many records the batch has, or 0 if it was.

    If an earlier attempt at the same batch was interrupted, its files are used and the given ones are discarded.
    """
    with staging.exclusive(manifest.producer):
        return await _commit(log, staging, manifest)


async def _commit(log: Log, staging: Staging, manifest: Manifest) -> int:
    if staging.done(manifest.producer) >= manifest.batch:
        staging.discard(manifest.files)
        return 0
    pending = staging.pending(manifest.producer)
    if pending is not None and pending.batch < manifest.batch:
        await _append(log, staging, pending)
        staging.finish(pending)
        pending = None
    if pending is None:
        staging.start(manifest)
    else:
        staging.discard(set(manifest.files) - set(pending.files))
        manifest = pending
    count = await _append(log, staging, manifest)
    staging.finish(manifest)
    return count


async def _append(log: Log, staging: Staging, manifest: Manifest) -> int:
    topic = await log.topic(manifest.topic)
    if topic.epoch != manifest.epoch:
        raise InvalidValue("topic", manifest.topic, "the one the records were staged for: it was recreated since")
    parts = [batch for name in manifest.files for batch in staging.read(name)]
    first = manifest.batch * BATCH_SEQUENCES
    refused = await _append_parts(log, topic, parts, manifest.producer, first)
    while refused:
        # The rest of the batch can't be stored there any more, so it goes where its keys live now.
        topic = await current_topic(log, topic.name)
        placing = manifest.detail.get("placing")
        if placing is None:
            raise Moved(manifest.topic, topic.name)
        parts = [_repartition(data, placing, topic) for data in refused]
        refused = await _append_parts(log, topic, parts, f"{manifest.producer}@{topic.name}", first)
    return sum(len(batch) for name in manifest.files for batch in staging.read(name))


def _repartition(data: pa.RecordBatch, placing: Sequence[str | None], topic: Topic) -> pa.RecordBatch:
    """The records with their partitions of another topic, sorted by partition."""
    from shardyard.pipeline.partitioning import PartitionerSpec  # noqa: PLC0415 slow to import, and seldom needed

    partitions = PartitionerSpec.of(topic, *placing).place(data["key"], np.arange(len(data)))
    order = np.argsort(partitions, kind="stable")
    columns = [*data.take(pa.array(order)).columns, pa.array(partitions[order])]
    return pa.RecordBatch.from_arrays(columns, schema=_FILE_SCHEMA)


async def _append_parts(
    log: Log, topic: Topic, parts: Sequence[pa.RecordBatch], producer: str, first: int
) -> list[pa.RecordBatch]:
    """Append batches that are sorted by partition. Returns the records that were refused because the topic has moved or
    has fewer partitions now."""
    count = max((int(part["partition"][-1].as_py()) + 1 for part in parts if len(part)), default=0)
    edges = [np.searchsorted(part["partition"].to_numpy(), np.arange(count + 1)) for part in parts]
    slots = asyncio.Semaphore(CONCURRENT_PARTITIONS)
    clock = SystemClock()
    refused: dict[int, list[pa.RecordBatch]] = {}

    async def append_to(partition: Partition) -> None:
        i = partition.index
        slices = (p.slice(e[i], e[i + 1] - e[i]) for p, e in zip(parts, edges, strict=True) if e[i + 1] > e[i])
        async with slots:
            for n, data in enumerate(_append_batches(slices)):
                stamp, deadline = Stamp(producer, first + n), clock.monotonic() + RETRY_TIMEOUT_SECONDS
                try:
                    await append_with_retry(log, partition, data, clock=clock, deadline=deadline, stamp=stamp)
                except SequenceTooOld:
                    pass  # later appends of this producer were stored, and they are made in order, so this one was too
                except PLACE_AGAIN:
                    refused.setdefault(i, []).append(data)

    await asyncio.gather(*(append_to(Partition(topic.name, index)) for index in range(count)))
    return [data for i in sorted(refused) for data in refused[i]]


def _append_batches(slices: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Batches of a good size to append. The same slices always give the same batches, so that stamps can be reused."""
    pending: list[pa.RecordBatch] = []
    count = size = 0
    for sorted_part in slices:
        data = sorted_part.select(SCHEMA.names)
        step = max(1, min(APPEND_RECORDS, len(data) * APPEND_BYTES // max(data.nbytes, 1)))
        for at in range(0, len(data), step):
            part = data.slice(at, step)
            if pending and (count + len(part) > APPEND_RECORDS or size + part.nbytes > APPEND_BYTES):
                yield pa.concat_batches(pending)
                pending, count, size = [], 0, 0
            pending.append(part)
            count, size = count + len(part), size + part.nbytes
    if pending:
        yield pa.concat_batches(pending)
