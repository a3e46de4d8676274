"""The lake: a folder with the records of topics, by topic and day.

    <lake>/records/topic=orders/day=2026-01-31/*.parquet
    <lake>/records/_delta_log/                      if the format is delta: which of these files are the table
    <lake>/_shardyard/                              ingest's own: version, checkpoint, unfinished files

A lake has one of two formats. With `delta`, the folder `records` is a Delta table; with `parquet`, it has plain files.
`records_of` returns what reads and writes them.
"""

import contextlib
import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from pyspark.sql import DataFrame, SparkSession

from shardyard.model import Damaged, NotOurs, NotWritable, WrongSchemaVersion
from shardyard.pipeline.atomic_files import exclusive_lock, write_json

SCHEMA_VERSIONS = {"parquet": 1, "delta": 2}
"""The schema version of a lake by its format: a Shardyard that does not know Delta must not write to such a lake."""
FORMATS = tuple(SCHEMA_VERSIONS)
COLUMNS = ("partition", "offset", "epoch", "timestamp", "id", "key", "value", "headers")
"""The columns of the files. `topic` and `day` (of the timestamp, in UTC) are in the paths."""
FILE_BYTES = 128 * 1024 * 1024
"""The size that small files are merged up to."""
MIN_MERGE_FILES = 8
"""Small files of a topic and day are merged when there are this many."""


class Lake:
    """The folder of a lake, and what ingest remembers about it. This class does not use Spark."""

    def __init__(self, root: Path | str) -> None:
        self.root = Path(root).absolute()
        self.records = self.root / "records"
        self.own = self.root / "_shardyard"
        self.checkpoint = self.own / "checkpoint"

    def check(self) -> None:
        """Raise an error if the folder holds anything but a lake of a known version. Changes nothing."""
        if not self.own.is_dir():
            if self.root.exists() and (not self.root.is_dir() or any(self.root.iterdir())):
                raise NotOurs(str(self.root), "a lake, nor an empty folder to create one in")
            return
        if not self._exists() and not any(self.records.glob("*")):
            return  # interrupted while it was created
        stored = self.load("lake.json")
        version = stored.get("schema_version")
        if version not in SCHEMA_VERSIONS.values():
            expected = max(SCHEMA_VERSIONS.values())
            raise WrongSchemaVersion(str(self.root), version if isinstance(version, int) else 0, expected)
        if "query" in stored and self.query_id() != stored["query"]:
            raise Damaged(
                str(self.checkpoint),
                "it is not the checkpoint that this lake was filled with, so it is unknown which records the lake has",
            )

    def check_writable(self) -> None:
        """`NotWritable` if it can't be created, or nothing can be written to it. Changes nothing."""
        folder = next(path for path in (self.root, *self.root.parents) if path.exists())
        try:
            tempfile.TemporaryDirectory(prefix=".shardyard-", dir=folder).cleanup()
        except OSError as error:
            raise NotWritable(str(self.root), error.strerror or str(error)) from None

    @contextlib.contextmanager
    def exclusive(self, format_: str) -> Iterator[None]:
        """Hold the lake's lock; `Busy` if another ingest does. Creates the lake; an existing one has `format_` then."""
        self.check()
        self.own.mkdir(parents=True, exist_ok=True)
        with exclusive_lock(self.own / "lock", f"the lake {self.root} (another ingest is running)"):
            self.records.mkdir(exist_ok=True)
            stored = self.load("lake.json", {"topics": []})
            write_json(self.own / "lake.json", stored | {"schema_version": SCHEMA_VERSIONS[format_]})
            yield

    @property
    def format(self) -> str | None:
        """delta or parquet; None if the lake does not exist yet."""
        if not self._exists():
            return None
        version = self.load("lake.json")["schema_version"]
        return next(name for name, number in SCHEMA_VERSIONS.items() if number == version)

    def topics(self) -> list[str]:
        """The topics that are ingested into the lake."""
        return [str(name) for name in self.load("lake.json", {"topics": []})["topics"]]

    def set_topics(self, topics: Sequence[str]) -> None:
        """Record which topics are ingested into the lake from now on."""
        write_json(self.own / "lake.json", self.load("lake.json") | {"topics": sorted(topics)})

    def query_id(self) -> str | None:
        """The id of the streaming query, from its checkpoint."""
        try:
            return str(json.loads((self.checkpoint / "metadata").read_text())["id"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def bind_checkpoint(self) -> None:
        """Record that the lake is filled with this checkpoint, before the first row is: `check` refuses others."""
        stored = self.load("lake.json")
        if "query" not in stored:
            write_json(self.own / "lake.json", stored | {"query": self.query_id()})

    def load(self, name: str, default: dict[str, Any] | None = None) -> dict[str, Any]:
        """The content of one of the files that ingest keeps in `own`."""
        path = self.own / name
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

    def _exists(self) -> bool:
        return (self.own / "lake.json").exists()


class Records(Protocol):
    """The rows of a lake. Only `files` may be called without holding the lake's lock."""

    def files(self, spark: SparkSession, topic: str) -> list[Path]:
        """The files that have the topic's rows of all finished batches, each row once. Merging may remove some of them
        later."""
        ...

    def prepare(self, spark: SparkSession) -> None:
        """Get ready for the first batch: create what is missing, and finish what was interrupted."""
        ...

    def write(self, records: DataFrame, batch: int) -> None:
        """Write a batch, exactly once: one that was written is not written again."""
        ...

    def maintain(self, spark: SparkSession) -> None:
        """Merge small files into large ones, and delete those that nobody needs any more."""
        ...
