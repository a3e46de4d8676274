"""Exactly once into a topic: tasks put records aside, the driver appends them.

A task writes its records to a file, each Arrow batch sorted by partition. The driver names the files of a batch in a
manifest, durable before anything is appended, and appends them in the order of the tasks, with stamps. A batch that is
replayed after a crash finds the manifest, and goes on with the files of the first time: what is stored already is known
by its stamp. A batch that is done is known by its number.
"""

import asyncio
import contextlib
import fcntl
import json
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
from shardyard.model import InvalidValue, Moved, Partition, SequenceTooOld, Stamp, Topic
from shardyard.model.batch import SCHEMA, now_ms
from shardyard.model.limits import Limits, check_batch
from shardyard.pipeline.durable import store_json, sync
from shardyard.runtime.clock import SystemClock

APPEND_RECORDS = 20_000
APPEND_BYTES = 4 * 1024 * 1024
AT_ONCE = 8
"""Partitions appended to at the same time."""
RETRY_SECONDS = 60.0
"""How long an append is retried while the log refuses it for now: a topic that is being moved is sealed for seconds."""
BATCH_SEQUENCES = 2**20
"""How many appends to one partition a batch may take."""
ORPHAN_SECONDS = 24 * 3600
"""After this a file that no manifest names was left by a task that failed."""
_FILE_SCHEMA = pa.schema([*SCHEMA, pa.field("partition", pa.int32(), nullable=False)])
_NO_LIMIT = Limits(batch_bytes=2**62, batch_records=2**62)
"""Batches are cut to size when they are appended; a record that is too large is refused at once."""

Places = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Manifest:
    """The files of a batch, in order."""

    producer: str
    batch: int
    topic: str
    epoch: int
    files: tuple[str, ...]
    detail: Mapping[str, Any]
    """What else the job that made it wants to remember."""


def folder_of(url: str) -> Path:
    """Where records for this log are put aside: on its own disk, which every worker of an embedded log can reach."""
    folder = local_folder(url)
    if folder is None:
        raise InvalidValue("log", url, "an embedded log, sqlite:///FOLDER: others have a connector of their own")
    return folder / "staging"


class Staging:
    """The folder with the files, and for each producer what is pending and what is done."""

    def __init__(self, folder: Path) -> None:
        self._files = folder / "files"
        self._producers = folder / "producers"

    def put(self, batches: Iterable[tuple[pa.RecordBatch, Places]]) -> str | None:
        """Put records with their partitions aside, durably. Returns the file's name; None if there were none."""
        name = f"{uuid.uuid4().hex}.arrow"
        path = self._files / name
        sink = writer = None
        for data, places in batches:
            if not len(data):
                continue
            if sink is None or writer is None:
                self._files.mkdir(parents=True, exist_ok=True)
                sink = path.open("wb")
                writer = pa.ipc.new_file(sink, _FILE_SCHEMA)
            order = np.argsort(places, kind="stable")
            sorted_ = check_batch(data, _NO_LIMIT, now_ms()).take(pa.array(order))
            columns = [*sorted_.columns, pa.array(places[order])]
            writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=_FILE_SCHEMA))
        if sink is None or writer is None:
            return None
        writer.close()
        sink.close()
        sync(path)
        sync(self._files)
        return name

    def discard(self, names: Iterable[str]) -> None:
        for name in names:
            (self._files / name).unlink(missing_ok=True)

    def pending(self, producer: str) -> Manifest | None:
        found = _load(self._producers / producer / "pending.json")
        return None if found is None else Manifest(**{**found, "files": tuple(found["files"])})

    def done(self, producer: str) -> int:
        """The last batch that is done; -1 if none is."""
        found = _load(self._producers / producer / "done.json")
        return -1 if found is None else int(found["batch"])

    def begin(self, manifest: Manifest) -> None:
        """From now on this is what the batch consists of."""
        fields = ("producer", "batch", "topic", "epoch", "detail")
        content = {name: getattr(manifest, name) for name in fields} | {"files": list(manifest.files)}
        store_json(self._producers / manifest.producer / "pending.json", content)

    def finish(self, manifest: Manifest) -> None:
        """Everything is appended: remember that, and clear away."""
        home = self._producers / manifest.producer
        store_json(home / "done.json", {"batch": manifest.batch})
        (home / "pending.json").unlink(missing_ok=True)
        self.discard(manifest.files)

    def forget(self, producer: str) -> None:
        """The producer will not come again."""
        home = self._producers / producer
        for name in ("pending.json", "done.json"):
            (home / name).unlink(missing_ok=True)
        with contextlib.suppress(FileNotFoundError):
            home.rmdir()
        self._lock(producer).unlink(missing_ok=True)

    @contextlib.contextmanager
    def alone(self, producer: str) -> Iterator[None]:
        """Wait for one who was cut off but is not quite dead yet: Spark's workers outlive their driver by a moment."""
        self._producers.mkdir(parents=True, exist_ok=True)
        with self._lock(producer).open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _lock(self, producer: str) -> Path:
        return self._producers / f"{producer}.lock"

    def clear_orphans(self) -> None:
        """Remove the files of tasks that failed long ago."""
        if not self._files.is_dir():
            return
        named = {
            file for home in self._producers.glob("*/") for m in [self.pending(home.name)] if m for file in m.files
        }
        for path in self._files.iterdir():
            with contextlib.suppress(FileNotFoundError):
                if path.name not in named and path.stat().st_mtime < time.time() - ORPHAN_SECONDS:
                    path.unlink()

    def read(self, name: str) -> list[pa.RecordBatch]:
        """The batches of a file, mapped into memory."""
        reader = pa.ipc.open_file(pa.memory_map(str(self._files / name)))
        return [reader.get_batch(i) for i in range(reader.num_record_batches)]


def _load(path: Path) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    return found


async def commit(log: Log, staging: Staging, manifest: Manifest) -> int:
    """Append what was put aside, unless the batch is done already. Returns how many records this call was about.

    If the same batch was begun before, it is that one's files that count, and the ones given now are discarded.
    """
    with staging.alone(manifest.producer):
        return await _commit(log, staging, manifest)


async def _commit(log: Log, staging: Staging, manifest: Manifest) -> int:
    if staging.done(manifest.producer) >= manifest.batch:
        staging.discard(manifest.files)
        return 0
    begun = staging.pending(manifest.producer)
    if begun is not None and begun.batch < manifest.batch:
        await _append(log, staging, begun)
        staging.finish(begun)
        begun = None
    if begun is None:
        staging.begin(manifest)
    else:
        staging.discard(set(manifest.files) - set(begun.files))
        manifest = begun
    count = await _append(log, staging, manifest)
    staging.finish(manifest)
    return count


async def _append(log: Log, staging: Staging, manifest: Manifest) -> int:
    topic = await log.topic(manifest.topic)
    if topic.epoch != manifest.epoch:
        raise InvalidValue("topic", manifest.topic, "the one the records were put aside for: it was made anew since")
    parts = [batch for name in manifest.files for batch in staging.read(name)]
    first = manifest.batch * BATCH_SEQUENCES
    refused = await _fill(log, topic, parts, manifest.producer, first)
    while refused:
        # What the topic, or the partition, has of this batch is settled: the rest goes where it would go now.
        topic = await current_topic(log, topic.name)
        placing = manifest.detail.get("placing")
        if placing is None:
            raise Moved(manifest.topic, topic.name)
        parts = [_placed(data, placing, topic) for data in refused]
        refused = await _fill(log, topic, parts, f"{manifest.producer}@{topic.name}", first)
    return sum(len(batch) for name in manifest.files for batch in staging.read(name))


def _placed(data: pa.RecordBatch, placing: Sequence[str | None], topic: Topic) -> pa.RecordBatch:
    """Records with the partitions of another topic, sorted by them."""
    from shardyard.pipeline.placing import Placing  # noqa: PLC0415 placement takes time, and is seldom needed here

    places = Placing.of(topic, *placing).places(data["key"], np.arange(len(data)))
    order = np.argsort(places, kind="stable")
    columns = [*data.take(pa.array(order)).columns, pa.array(places[order])]
    return pa.RecordBatch.from_arrays(columns, schema=_FILE_SCHEMA)


async def _fill(
    log: Log, topic: Topic, parts: Sequence[pa.RecordBatch], producer: str, first: int
) -> list[pa.RecordBatch]:
    """Append batches that are sorted by partition; returns what was refused because the topic has moved, or has fewer
    partitions now."""
    count = max((int(part["partition"][-1].as_py()) + 1 for part in parts if len(part)), default=0)
    edges = [np.searchsorted(part["partition"].to_numpy(), np.arange(count + 1)) for part in parts]
    turn = asyncio.Semaphore(AT_ONCE)
    clock = SystemClock()
    refused: dict[int, list[pa.RecordBatch]] = {}

    async def fill(partition: Partition) -> None:
        i = partition.index
        slices = (p.slice(e[i], e[i + 1] - e[i]) for p, e in zip(parts, edges, strict=True) if e[i + 1] > e[i])
        async with turn:
            for n, data in enumerate(_cut(slices)):
                deadline = clock.monotonic() + RETRY_SECONDS
                stamp = Stamp(producer, first + n)
                try:
                    await append_with_retry(log, partition, data, clock=clock, deadline=deadline, stamp=stamp)
                except SequenceTooOld:
                    pass  # appended in this order, by this producer alone: what is too old to be known was stored
                except PLACE_AGAIN:
                    refused.setdefault(i, []).append(data)

    await asyncio.gather(*(fill(Partition(topic.name, index)) for index in range(count)))
    return [data for i in sorted(refused) for data in refused[i]]


def _cut(slices: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Batches of a good size to append, always the same for the same slices."""
    held: list[pa.RecordBatch] = []
    count = size = 0
    for whole in slices:
        data = whole.select(SCHEMA.names)
        step = max(1, min(APPEND_RECORDS, len(data) * APPEND_BYTES // max(data.nbytes, 1)))
        for at in range(0, len(data), step):
            part = data.slice(at, step)
            if held and (count + len(part) > APPEND_RECORDS or size + part.nbytes > APPEND_BYTES):
                yield _joined(held)
                held, count, size = [], 0, 0
            held.append(part)
            count, size = count + len(part), size + part.nbytes
    if held:
        yield _joined(held)


def _joined(parts: list[pa.RecordBatch]) -> pa.RecordBatch:
    return pa.concat_batches(parts)
