"""The lake: a folder of Parquet files by topic and day, which any Parquet tool can read.

    <lake>/records/topic=orders/day=2026-01-31/*.parquet
    <lake>/_shardyard/                              what ingest needs: version, checkpoint, files under way

A file appears as a whole, by a rename. A batch's files are complete in the staging folder before the first one appears,
so a batch that was cut off in between is finished, not begun anew: no row is there twice. When small files are merged,
a reader may for a moment see the merged file beside those it replaces; (topic, epoch, partition, offset) tells a row
from all others.
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
from shardyard.pipeline.atomic_files import alone, store_json, sync

SCHEMA_VERSION = 1
COLUMNS = ("partition", "offset", "epoch", "timestamp", "id", "key", "value", "headers")
"""Of the files; `topic` and `day` (UTC, of the timestamp) are in their paths."""


@dataclass(frozen=True, slots=True)
class Merge:
    """Small files of one topic and day, to become one."""

    folder: Path
    files: tuple[Path, ...]


class Lake:
    """The files of a lake. Nothing here knows about Spark."""

    def __init__(self, root: Path | str) -> None:
        self.root = Path(root).absolute()
        self.records = self.root / "records"
        self._own = self.root / "_shardyard"
        self.checkpoint = self._own / "checkpoint"

    # The lake as a whole

    def check(self) -> None:
        """Complain of what is there but not a lake of this version; do nothing."""
        if not self._own.is_dir():
            if self.root.exists() and (not self.root.is_dir() or any(self.root.iterdir())):
                raise NotOurs(str(self.root), "a lake, nor an empty folder to make one in")
            return
        if not (self._own / "lake.json").exists() and not any(self.records.glob("*")):
            return  # cut off while it was being made
        known = self._load("lake.json")
        version = known.get("schema_version")
        if version != SCHEMA_VERSION:
            raise WrongSchemaVersion(str(self.root), version if isinstance(version, int) else 0, SCHEMA_VERSION)
        if "query" in known and self._query() != known["query"]:
            raise Damaged(
                str(self.checkpoint),
                "it is not the checkpoint that this lake was filled with, so what the lake has is unknown",
            )

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Alone at work on the lake, which is made if it is not there; what was cut off is finished first."""
        self.check()
        self._own.mkdir(parents=True, exist_ok=True)
        with alone(self._own / "lock", f"the lake {self.root}, where another ingest is at work,"):
            self.records.mkdir(exist_ok=True)
            if not (self._own / "lake.json").exists():
                store_json(self._own / "lake.json", {"schema_version": SCHEMA_VERSION, "topics": []})
            self._finish_merge()
            self._clear_staging()
            yield

    def topics(self) -> list[str]:
        """The topics that are kept in the lake."""
        if not (self._own / "lake.json").exists():
            return []
        return [str(name) for name in self._load("lake.json")["topics"]]

    def keep(self, topics: Sequence[str]) -> None:
        """From now on the lake keeps these topics."""
        store_json(self._own / "lake.json", self._load("lake.json") | {"topics": sorted(topics)})

    # Batches

    def new_staging(self) -> Path:
        """Where files are put together; never the same, since who was cut off may still be writing to his."""
        return self._own / "staging" / uuid.uuid4().hex

    def is_published(self, batch: int) -> bool:
        return bool(self._load("published.json", {"batch": -1})["batch"] >= batch)

    def is_complete(self, batch: int) -> bool:
        """Whether all files of the batch were put together."""
        return bool(self._load("complete.json", {"batch": -1})["batch"] == batch)

    def complete(self, batch: int, staged: Path) -> int:
        """All files of the batch are in `staged`: these will appear, whatever happens. Returns how many rows it has."""
        known = self._load("lake.json")
        if "query" not in known:
            store_json(self._own / "lake.json", known | {"query": self._query()})
        files = list(staged.glob("topic=*/day=*/*.parquet"))
        for path in files:
            sync(path)
        store_json(self._own / "complete.json", {"batch": batch, "staged": staged.name})
        return rows_in(files)

    def publish(self, batch: int) -> None:
        """Let the files of a batch that is complete appear."""
        staged = self._own / "staging" / self._load("complete.json")["staged"]
        for path in sorted(staged.glob("topic=*/day=*/*.parquet")):
            _appear(path, self.records / path.parent.relative_to(staged) / f"batch-{batch:08}-{path.name}")
        sync(self.records)
        store_json(self._own / "published.json", {"batch": batch})
        shutil.rmtree(staged, ignore_errors=True)

    # Merging

    def merges(self, target_bytes: int, least_files: int) -> list[Merge]:
        """Which small files to merge: those of a topic and day below half of `target_bytes`, up to it, if there are
        `least_files` of them."""
        found = []
        for folder in sorted(self.records.glob("topic=*/day=*")):
            sizes = {path: path.stat().st_size for path in sorted(folder.glob("*.parquet"))}
            small = [path for path, size in sizes.items() if size < target_bytes // 2]
            if len(small) < least_files:
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

    def replace(self, merge: Merge, staged: Path) -> None:
        """Let the merged file appear in place of the others. Cut off in between, it is finished by `opened`."""
        (made,) = staged.glob("*.parquet")
        sync(made)
        target = merge.folder / f"merged-{made.name}"
        moves = {"staged": str(made), "target": str(target), "remove": [str(path) for path in merge.files]}
        store_json(self._own / "merge.json", moves)
        self._finish_merge()

    def _finish_merge(self) -> None:
        moves = self._load("merge.json", {})
        if not moves:
            return
        if Path(moves["staged"]).exists():
            _appear(Path(moves["staged"]), Path(moves["target"]))
        for path in moves["remove"]:
            Path(path).unlink(missing_ok=True)
        (self._own / "merge.json").unlink()
        shutil.rmtree(Path(moves["staged"]).parent, ignore_errors=True)

    def _clear_staging(self) -> None:
        """Remove what was put together in vain."""
        pending = self._load("complete.json", {"staged": None})["staged"]
        for path in (self._own / "staging").glob("*"):
            if path.name != pending:
                shutil.rmtree(path, ignore_errors=True)

    def _query(self) -> str | None:
        """The id of the streaming query, as its checkpoint has it."""
        try:
            return str(json.loads((self.checkpoint / "metadata").read_text())["id"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def _load(self, name: str, otherwise: dict[str, Any] | None = None) -> dict[str, Any]:
        path = self._own / name
        try:
            found = json.loads(path.read_text())
        except FileNotFoundError:
            if otherwise is None:
                raise NotOurs(str(self.root), "a lake: its version is missing") from None
            return otherwise
        except ValueError as error:
            raise Damaged(str(path), str(error)) from None
        if not isinstance(found, dict):
            raise Damaged(str(path), "it is not what was written")
        return found


def rows_in(files: Iterable[Path]) -> int:
    """How many rows Parquet files have, by what their ends say."""
    return sum(pq.read_metadata(path).num_rows for path in files)


def _appear(staged: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    staged.rename(target)
    sync(target.parent)
