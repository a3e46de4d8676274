"""The files of the history's tables, as the job writes them. This does not use Spark."""

import contextlib
import shutil
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pyarrow.parquet as pq

from shardyard.messaging.history.manifest import FILE_NAME, Manifest, MessagesFile, load_manifest
from shardyard.model import InvalidValue, NotOurs, whole_number
from shardyard.pipeline.atomic_files import exclusive_lock, fsync, write_json

BUCKETS = 64
MERGE_RATIO = 2
"""A file is merged with what is newer in its bucket, unless it has this many times the rows. So a file's rows are
rewritten a few times only, and a bucket has few files: each is at least as large as all newer ones together."""
MERGE_BELOW_ROWS = 10_000
"""Files smaller than this are always merged."""

_LOCK = "lock"
_FIRST = {_LOCK, "manifest.tmp"}
"""What a run that was killed while it created the tables may have left."""


@dataclass(frozen=True, slots=True)
class NewRows:
    """What a run has for a bucket: how many rows, and the smallest and the largest id."""

    rows: int
    first_id: int
    last_id: int


class HistoryFiles:
    """The folder of the tables."""

    def __init__(self, root: Path | str) -> None:
        self.root = Path(root).absolute()

    def check(self, buckets: int | None = None) -> None:
        """Raise an error if the folder holds anything but tables with so many buckets. Changes nothing."""
        if buckets is not None:
            whole_number("buckets", buckets, at_least=1)
        if (self.root / FILE_NAME).exists():
            stored = load_manifest(self.root).buckets
            if buckets is not None and buckets != stored:
                raise InvalidValue("buckets", buckets, f"{stored}, as the tables in {self.root} have")
        elif self.root.exists() and (not self.root.is_dir() or {path.name for path in self.root.iterdir()} - _FIRST):
            raise NotOurs(str(self.root), "a folder of the job `history`, nor an empty one")

    @contextlib.contextmanager
    def exclusive(self, buckets: int | None = None) -> Iterator[Manifest]:
        """Hold the lock of the tables; `Busy` if another run does. Creates the tables, or deletes what a killed run
        left. Yields the manifest."""
        self.check(buckets)
        with exclusive_lock(self.root / _LOCK, f"the history in {self.root} (another run is in progress)"):
            if not (self.root / FILE_NAME).exists():
                self._write(Manifest(buckets=buckets or BUCKETS))
            manifest = load_manifest(self.root)
            self._delete_all_but(manifest)
            yield manifest

    def new_folder(self, table: str) -> Path:
        """A folder for new files of `messages` or `marks`. A killed run may still be writing to its own, so no two runs
        share one."""
        return self.root / table / uuid.uuid4().hex

    def written(self, folder: Path) -> list[str]:
        """Make the files in a new folder durable. Returns their paths, relative to the folder of the tables."""
        files = sorted(folder.rglob("*.parquet"))
        for path in {*files, *(path.parent for path in files), folder, folder.parent}:
            fsync(path)
        return [str(path.relative_to(self.root)) for path in files]

    def publish(self, old: Manifest, new: Manifest) -> Manifest:
        """Replace a version of the tables by the next one."""
        replaced = _paths(old) - _paths(new)
        published = msgspec.structs.replace(new, version=old.version + 1, replaced=tuple(sorted(replaced)))
        self._write(published)
        self._delete_all_but(published)
        return published

    def _write(self, manifest: Manifest) -> None:
        write_json(self.root / FILE_NAME, msgspec.to_builtins(manifest))

    def _delete_all_but(self, manifest: Manifest) -> None:
        """Delete the files that neither this version nor the one before has."""
        kept = {self.root / path for path in (*_paths(manifest), *manifest.replaced)}
        for run in [*self.root.glob("messages/*"), *self.root.glob("marks/*")]:
            files = set(run.rglob("*.parquet"))
            if not files & kept:
                shutil.rmtree(run, ignore_errors=True)
            for path in files - kept:
                path.unlink(missing_ok=True)


def describe(root: Path, paths: Iterable[str]) -> Iterator[MessagesFile]:
    """New files of messages, as the manifest has them."""
    for path in paths:
        bucket = int(Path(path).parent.name.removeprefix("bucket="))
        footer = pq.read_metadata(root / path)
        column = footer.schema.names.index("id")
        ids = [footer.row_group(number).column(column).statistics for number in range(footer.num_row_groups)]
        first, last = min(group.min for group in ids), max(group.max for group in ids)
        yield MessagesFile(path, bucket, footer.num_rows, first, last)


def to_merge(files: Sequence[MessagesFile], new_rows: int) -> list[MessagesFile]:
    """Which files of a bucket are merged with new rows, the newest first."""
    merged: list[MessagesFile] = []
    rows = new_rows
    for file in reversed(files):
        if file.rows >= max(MERGE_RATIO * rows, MERGE_BELOW_ROWS):
            break
        merged.append(file)
        rows += file.rows
    return merged


def to_compare(files: Iterable[MessagesFile], new: NewRows) -> list[MessagesFile]:
    """Which files of a bucket may have a message already that is among the new ones."""
    return [file for file in files if file.first_id <= new.last_id and new.first_id <= file.last_id]


def _paths(manifest: Manifest) -> set[str]:
    return {*(file.path for file in manifest.messages), *manifest.marks}
