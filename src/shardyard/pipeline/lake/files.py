"""The lake: a folder of Parquet files by topic and day, which any Parquet tool can read.

    <lake>/records/topic=orders/day=2026-01-31/*.parquet
    <lake>/_shardyard/                              ingest's own: version, checkpoint, unfinished files

A file is published complete, by a rename. All files of a batch are complete in the staging folder before the first one
is published, so an interrupted batch is finished and not started again: no row is published twice. While small files
are merged, a reader may briefly see the merged file together with those that it replaces; (topic, epoch, partition,
offset) identifies a row.
"""

import contextlib
import json
import shutil
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from shardyard.model import Damaged, NotOurs, WrongSchemaVersion
from shardyard.pipeline.atomic_files import exclusive_lock, fsync, write_json

SCHEMA_VERSION = 1
COLUMNS = ("partition", "offset", "epoch", "timestamp", "id", "key", "value", "headers")
"""The columns of the files. `topic` and `day` (of the timestamp, in UTC) are in the paths."""


@dataclass(frozen=True, slots=True)
class Merge:
    """Small files of one topic and day that are to be merged into one."""

    folder: Path
    files: tuple[Path, ...]


class Lake:
    """The files of a lake. This class does not use Spark."""

    def __init__(self, root: Path | str) -> None:
        self.root = Path(root).absolute()
        self.records = self.root / "records"
        self._own = self.root / "_shardyard"
        self.checkpoint = self._own / "checkpoint"

    # The lake as a whole

    def check(self) -> None:
        """Raise an error if the folder holds anything but a lake of this version. Changes nothing."""
        if not self._own.is_dir():
            if self.root.exists() and (not self.root.is_dir() or any(self.root.iterdir())):
                raise NotOurs(str(self.root), "a lake, nor an empty folder to create one in")
            return
        if not (self._own / "lake.json").exists() and not any(self.records.glob("*")):
            return  # interrupted while it was created
        stored = self._load("lake.json")
        version = stored.get("schema_version")
        if version != SCHEMA_VERSION:
            raise WrongSchemaVersion(str(self.root), version if isinstance(version, int) else 0, SCHEMA_VERSION)
        if "query" in stored and self._query_id() != stored["query"]:
            raise Damaged(
                str(self.checkpoint),
                "it is not the checkpoint that this lake was filled with, so it is unknown which records the lake has",
            )

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """Hold the lake's lock; `Busy` if another ingest does. Creates the lake, or finishes an interrupted merge."""
        self.check()
        self._own.mkdir(parents=True, exist_ok=True)
        with exclusive_lock(self._own / "lock", f"the lake {self.root} (another ingest is running)"):
            self.records.mkdir(exist_ok=True)
            if not (self._own / "lake.json").exists():
                write_json(self._own / "lake.json", {"schema_version": SCHEMA_VERSION, "topics": []})
            self._finish_merge()
            self._clear_staging()
            yield

    def topics(self) -> list[str]:
        """The topics that are ingested into the lake."""
        if not (self._own / "lake.json").exists():
            return []
        return [str(name) for name in self._load("lake.json")["topics"]]

    def set_topics(self, topics: Sequence[str]) -> None:
        """Record which topics are ingested into the lake from now on."""
        write_json(self._own / "lake.json", self._load("lake.json") | {"topics": sorted(topics)})

    def files(self, topic: str) -> list[Path]:
        """The files that have the topic's rows of all published batches, each once. Merging may remove some of them."""
        while True:
            batch = self._published_batch()
            files = self._files_up_to(topic, batch)
            # What is published or merged while a folder is listed may be missing from the list, but not from the next.
            if (self._published_batch(), self._files_up_to(topic, batch)) == (batch, files):
                return files

    def _files_up_to(self, topic: str, batch: int) -> list[Path]:
        files = sorted((self.records / f"topic={topic}").glob("day=*/*.parquet"))
        merge = self._load("merge.json", {})
        replaced = {Path(path) for path in merge["remove"]} if merge and Path(merge["target"]) in files else set()
        return [path for path in files if path not in replaced and _batch_number(path) <= batch]

    def _published_batch(self) -> int:
        return int(self._load("published.json", {"batch": -1})["batch"])

    # Batches

    def new_staging(self) -> Path:
        """A new folder to write files to. A killed run may still be writing to its own, so no two runs share one."""
        return self._own / "staging" / uuid.uuid4().hex

    def is_published(self, batch: int) -> bool:
        return self._published_batch() >= batch

    def is_complete(self, batch: int) -> bool:
        """Whether all files of the batch were written to the staging folder."""
        return bool(self._load("complete.json", {"batch": -1})["batch"] == batch)

    def complete(self, batch: int, staged: Path) -> int:
        """Record that all files of the batch are in `staged`, so that exactly these are published, even after a crash.

        Returns how many rows they have.
        """
        stored = self._load("lake.json")
        if "query" not in stored:
            write_json(self._own / "lake.json", stored | {"query": self._query_id()})
        files = list(staged.glob("topic=*/day=*/*.parquet"))
        for path in files:
            fsync(path)
        write_json(self._own / "complete.json", {"batch": batch, "staged": staged.name})
        return count_rows(files)

    def publish(self, batch: int) -> None:
        """Move the files of a complete batch to where readers find them."""
        staged = self._own / "staging" / self._load("complete.json")["staged"]
        for path in sorted(staged.glob("topic=*/day=*/*.parquet")):
            _publish_file(path, self.records / path.parent.relative_to(staged) / f"batch-{batch:08}-{path.name}")
        fsync(self.records)
        write_json(self._own / "published.json", {"batch": batch})
        shutil.rmtree(staged, ignore_errors=True)

    # Merging

    def plan_merges(self, target_bytes: int, min_files: int) -> list[Merge]:
        """Which files to merge, into files of up to `target_bytes`: those of a topic and day that are smaller than half
        of that, if there are at least `min_files` of them."""
        found = []
        for folder in sorted(self.records.glob("topic=*/day=*")):
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
        """Publish the merged file and remove those it replaces. If this is interrupted, `exclusive` finishes it."""
        (merged,) = staged.glob("*.parquet")
        fsync(merged)
        target = merge.folder / f"merged-{merged.name}"
        steps = {"staged": str(merged), "target": str(target), "remove": [str(path) for path in merge.files]}
        write_json(self._own / "merge.json", steps)
        self._finish_merge()

    def _finish_merge(self) -> None:
        steps = self._load("merge.json", {})
        if not steps:
            return
        if Path(steps["staged"]).exists():
            _publish_file(Path(steps["staged"]), Path(steps["target"]))
        for path in steps["remove"]:
            Path(path).unlink(missing_ok=True)
        (self._own / "merge.json").unlink()
        shutil.rmtree(Path(steps["staged"]).parent, ignore_errors=True)

    def _clear_staging(self) -> None:
        """Delete staged files that will never be published."""
        pending = self._load("complete.json", {"staged": None})["staged"]
        for path in (self._own / "staging").glob("*"):
            if path.name != pending:
                shutil.rmtree(path, ignore_errors=True)

    def _query_id(self) -> str | None:
        """The id of the streaming query, from its checkpoint."""
        try:
            return str(json.loads((self.checkpoint / "metadata").read_text())["id"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def _load(self, name: str, default: dict[str, Any] | None = None) -> dict[str, Any]:
        path = self._own / name
        try:
            stored = json.loads(path.read_text())
        except FileNotFoundError:
            if default is None:
                raise NotOurs(str(self.root), "a lake: its version is missing") from None
            return default
        except ValueError as error:
            raise Damaged(str(path), str(error)) from None
        if not isinstance(stored, dict):
            raise Damaged(str(path), "it is not a JSON object")
        return stored


def count_rows(files: Iterable[Path]) -> int:
    """How many rows Parquet files have, from their footers."""
    return sum(pq.read_metadata(path).num_rows for path in files)


def _batch_number(path: Path) -> int:
    """The batch of a file. Only files of published batches are merged."""
    return int(path.name.split("-")[1]) if path.name.startswith("batch-") else -1


def _publish_file(staged: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    staged.rename(target)
    fsync(target.parent)
