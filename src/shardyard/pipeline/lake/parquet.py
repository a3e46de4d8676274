"""The rows of a lake as plain Parquet files, which any Parquet tool can read.

A file is published complete, by a rename. All files of a batch are complete in the staging folder before the first one
is published, so an interrupted batch is finished and not started again: no row is published twice. While small files
are merged, a reader may briefly see the merged file together with those that it replaces; (topic, epoch, partition,
offset) identifies a row.
"""

import contextlib
import shutil
import time
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession

from shardyard.model import Damaged
from shardyard.pipeline.atomic_files import fsync, write_json
from shardyard.pipeline.lake import lake as layout
from shardyard.pipeline.lake.lake import Lake


@dataclass(frozen=True, slots=True)
class Merge:
    """Small files of one topic and day that are to be merged into one."""

    folder: Path
    files: tuple[Path, ...]


class ParquetRecords:
    """The files. All but `write` and `maintain` work without Spark."""

    def __init__(self, lake: Lake, tasks: int) -> None:
        """`tasks`: how many write a batch; each writes a file for each topic and day."""
        self._lake = lake
        self._tasks = tasks

    def files(self, spark: SparkSession, topic: str) -> list[Path]:  # noqa: ARG002 a Delta table needs it
        """See `Records`."""
        while True:
            batch = self._published_batch()
            files = self._files_up_to(topic, batch)
            # What is published or merged while a folder is listed may be missing from the list, but not from the next.
            if (self._published_batch(), self._files_up_to(topic, batch)) == (batch, files):
                return files

    def _files_up_to(self, topic: str, batch: int) -> list[Path]:
        files = sorted((self._lake.records / f"topic={topic}").glob("day=*/*.parquet"))
        merge = self._lake.load("merge.json", {})
        replaced = {Path(path) for path in merge["remove"]} if merge and Path(merge["target"]) in files else set()
        return [path for path in files if path not in replaced and _batch_number(path) <= batch]

    def _published_batch(self) -> int:
        return int(self._lake.load("published.json", {"batch": -1})["batch"])

    # Batches

    def prepare(self, spark: SparkSession | None = None) -> None:  # noqa: ARG002 a Delta table needs it
        """See `Records`."""
        self._finish_merge()
        self.clear_staging()

    def write(self, records: DataFrame, batch: int) -> None:
        """See `Records`."""
        if self.is_published(batch):
            return
        if not self.is_complete(batch):
            self.complete(batch, self.stage(records))
        self.publish(batch)

    def stage(self, records: DataFrame) -> Path:
        """Write files to a new folder, by topic and day. Returns the folder."""
        staged = self.new_staging()
        records.coalesce(self._tasks).write.partitionBy("topic", "day").parquet(str(staged))
        return staged

    def new_staging(self) -> Path:
        """A new folder to write files to. A killed run may still be writing to its own, so no two runs share one."""
        return self._lake.own / "staging" / uuid.uuid4().hex

    def is_published(self, batch: int) -> bool:
        return self._published_batch() >= batch

    def is_complete(self, batch: int) -> bool:
        """Whether all files of the batch were written to the staging folder."""
        return self._complete_batch() == batch

    def complete(self, batch: int, staged: Path) -> None:
        """Record that all files of the batch are in `staged`, so that exactly these are published, even after a
        crash."""
        self._lake.bind_checkpoint()
        for path in staged.glob("topic=*/day=*/*.parquet"):
            fsync(path)
        write_json(self._lake.own / "complete.json", {"batch": batch, "staged": staged.name})

    def publish(self, batch: int) -> None:
        """Move the files of a complete batch to where readers find them."""
        staged = self._lake.own / "staging" / self._lake.load("complete.json")["staged"]
        for path in sorted(staged.glob("topic=*/day=*/*.parquet")):
            publish_file(path, self._lake.records / path.parent.relative_to(staged) / f"batch-{batch:08}-{path.name}")
        fsync(self._lake.records)
        write_json(self._lake.own / "published.json", {"batch": batch})
        shutil.rmtree(staged, ignore_errors=True)

    def finish_batch(self) -> None:
        """Publish a batch that is complete and was interrupted before it was published."""
        if self._complete_batch() > self._published_batch():
            self.publish(self._complete_batch())

    def _complete_batch(self) -> int:
        return int(self._lake.load("complete.json", {"batch": -1})["batch"])

    # Merging

    def maintain(self, spark: SparkSession) -> None:
        """See `Records`."""
        self.prepare()  # what an earlier attempt left when it failed
        for merge in self.plan_merges(layout.FILE_BYTES, layout.MIN_MERGE_FILES):
            staged = self.new_staging()
            files = spark.read.parquet(*map(str, merge.files))
            ordered = files.coalesce(1).sortWithinPartitions("partition", "offset")
            ordered.write.parquet(str(staged))
            check_rows(merge, staged)
            self.apply_merge(merge, staged)

    def plan_merges(self, target_bytes: int, min_files: int) -> list[Merge]:
        """Which files to merge, into files of up to `target_bytes`: those of a topic and day that are smaller than half
        of that, if there are at least `min_files` of them."""
        found = []
        for folder in sorted(self._lake.records.glob("topic=*/day=*")):
            sizes = {path: path.stat().st_size for path in sorted(folder.glob("*.parquet"))}
            small = [path for path, size in sizes.items() if size < target_bytes // 2]
            if len(small) < min_files:
                continue
            part: list[Path] = []
            for path in small:
                if len(part) > 1 and sum(sizes[p] for p in part) + sizes[path] > target_bytes:
                    found.append(Merge(folder, tuple(part)))
                    part = []
                part.append(path)
            if len(part) > 1:
                found.append(Merge(folder, tuple(part)))
        return found

    def apply_merge(self, merge: Merge, staged: Path) -> None:
        """Publish the merged file and remove those it replaces. If it is interrupted, `prepare` finishes it."""
        (merged,) = staged.glob("*.parquet")
        fsync(merged)
        target = merge.folder / f"merged-{merged.name}"
        steps = {"staged": str(merged), "target": str(target), "remove": [str(path) for path in merge.files]}
        write_json(self._lake.own / "merge.json", steps)
        self._finish_merge()

    def _finish_merge(self) -> None:
        steps = self._lake.load("merge.json", {})
        if not steps:
            return
        if Path(steps["staged"]).exists():
            publish_file(Path(steps["staged"]), Path(steps["target"]))
        for path in steps["remove"]:
            Path(path).unlink(missing_ok=True)
        (self._lake.own / "merge.json").unlink()
        shutil.rmtree(Path(steps["staged"]).parent, ignore_errors=True)

    def clear_staging(self, min_age: float = 0.0) -> None:
        """Delete staged files that will never be published. `min_age`: of their folder, in seconds."""
        pending = self._lake.load("complete.json", {"staged": None})["staged"]
        for path in (self._lake.own / "staging").glob("*"):
            with contextlib.suppress(FileNotFoundError):  # another run has deleted it
                if path.name != pending and time.time() - path.stat().st_mtime >= min_age:
                    shutil.rmtree(path, ignore_errors=True)


def check_rows(merge: Merge, staged: Path) -> None:
    """Raise `Damaged` if the merged file has another number of rows than the files it is to replace."""
    before, after = _count_rows(merge.files), _count_rows(staged.glob("*.parquet"))
    if before != after:
        raise Damaged(str(merge.folder), f"{len(merge.files)} files with {before} rows became one with {after}")


def _count_rows(files: Iterable[Path]) -> int:
    """How many rows Parquet files have, from their footers."""
    return sum(pq.read_metadata(path).num_rows for path in files)


def _batch_number(path: Path) -> int:
    """The batch of a file. Only files of published batches are merged."""
    return int(path.name.split("-")[1]) if path.name.startswith("batch-") else -1


def publish_file(staged: Path, target: Path) -> None:
    """Move a file to where readers find it. When this returns, its new name is durable."""
    target.parent.mkdir(parents=True, exist_ok=True)
    staged.rename(target)
    fsync(target.parent)
