"""Reads pages of conversations from the tables that the pipeline job `history` writes.

A page of a short conversation, or of its last messages, is in one row group of one file of its bucket. Footers of files
are kept in memory, so that a page costs little more than reading that row group.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from shardyard.messaging.history.manifest import (
    FILE_NAME,
    MessagesFile,
    bucket_of,
    conversation,
    load_manifest,
)
from shardyard.messaging.history.port import Page
from shardyard.model import Damaged, whole_number
from shardyard.model.checks import check_text
from shardyard.wire.messaging import Message

FOOTER_BYTES = 64 * 1024 * 1024
"""Footers of files, as stored, that are kept in memory. They take a few times that."""
_MAX_ID = 2**63 - 1
_COLUMNS = ["user_a", "user_b", "id", "sender", "recipient", "text", "at"]


class HistoryTables:
    """The conversations up to the last run of the job. It follows the versions of the tables by itself."""

    def __init__(self, root: Path | str) -> None:
        """Raises `NotOurs` if there are no tables in the folder."""
        self._root = Path(root).absolute()
        self._version = _Version.load(self._root)
        self._footers = _Footers()

    async def page(self, user: str, peer: str, *, before: int | None = None, limit: int = 50) -> Page:
        """The newest messages between two users, with ids below `before`: the same as `History.page`."""
        check_text("user", user)
        check_text("peer", peer)
        whole_number("limit", limit, at_least=1)
        if before is not None and before > _MAX_ID:
            before = None
        return await asyncio.to_thread(self._page, user, peer, before, limit)

    def _page(self, user: str, peer: str, before: int | None, limit: int) -> Page:
        while True:
            version = self._current()
            try:
                rows = self._newest(version, user, peer, before, limit + 1)  # one more tells whether there are more
            except FileNotFoundError as error:
                if self._current() is version:
                    raise Damaged(str(self._root), f"{error.filename or error} is missing") from None
                continue  # the version was replaced twice meanwhile
            except pa.ArrowException as error:
                raise Damaged(str(self._root), str(error)) from None
            return Page([_message(row) for row in rows[:limit]], more=len(rows) > limit)

    def _current(self) -> "_Version":
        if self._version.stamp != _stamp(self._root):
            self._version = _Version.load(self._root)
        return self._version

    def _newest(
        self, version: "_Version", user: str, peer: str, before: int | None, count: int
    ) -> list[dict[str, Any]]:
        """Rows of the conversation, newest first."""
        rows: list[dict[str, Any]] = []
        for file in version.files.get(bucket_of(user, peer, version.buckets), ()):
            if before is not None and file.first_id >= before:
                continue
            if len(rows) == count and rows[-1]["id"] > file.last_id:
                break
            rows += self._newest_of_file(file, *conversation(user, peer), before, count)
            rows = sorted(rows, key=lambda row: int(row["id"]), reverse=True)[:count]
        return rows

    def _newest_of_file(
        self, file: MessagesFile, user_a: str, user_b: str, before: int | None, count: int
    ) -> list[dict[str, Any]]:
        path = str(self._root / file.path)
        footer = self._footers.get(path)
        wanted = footer.row_groups(user_a, user_b, before)
        rows: list[dict[str, Any]] = []
        if wanted:
            with pq.ParquetFile(path, metadata=footer.metadata) as opened:
                for number in reversed(wanted):
                    group = opened.read_row_group(number, columns=_COLUMNS, use_threads=False)
                    mask = pc.and_(pc.equal(group["user_a"], user_a), pc.equal(group["user_b"], user_b))
                    if before is not None:
                        mask = pc.and_(mask, pc.less(group["id"], before))
                    found = group.filter(mask)
                    rows += reversed(found.slice(max(0, found.num_rows - count + len(rows))).to_pylist())
                    if len(rows) == count:
                        break
        return rows


@dataclass(frozen=True, slots=True)
class _Version:
    """A version of the tables, and the stamp of its manifest."""

    stamp: tuple[int, int] | None
    buckets: int
    files: Mapping[int, Sequence[MessagesFile]]
    """By bucket, the one with the newest message first."""

    @classmethod
    def load(cls, root: Path) -> "_Version":
        stamp = _stamp(root)  # first: if the manifest is replaced now, the next page sees that
        manifest = load_manifest(root)
        files: dict[int, list[MessagesFile]] = {}
        for file in sorted(manifest.messages, key=lambda file: file.last_id, reverse=True):
            files.setdefault(file.bucket, []).append(file)
        return cls(stamp, manifest.buckets, files)


def _stamp(root: Path) -> tuple[int, int] | None:
    """Another one for each manifest."""
    try:
        status = (root / FILE_NAME).stat()
    except OSError:
        return None  # `load_manifest` says what is wrong
    return status.st_ino, status.st_mtime_ns


@dataclass(frozen=True, slots=True)
class _Footer:
    """The footer of a file with messages, and the bounds of its row groups. None: a bound is not known."""

    metadata: pq.FileMetaData
    bounds: Sequence[Mapping[str, "_Bounds"]]
    """Of each row group, by column."""

    @classmethod
    def read(cls, path: str) -> "_Footer":
        metadata = pq.read_metadata(path)
        places = {metadata.schema.column(i).name: i for i in range(len(metadata.schema))}
        groups = (metadata.row_group(number) for number in range(metadata.num_row_groups))
        columns = {name: places[name] for name in ("user_a", "user_b", "id")}
        return cls(metadata, [{name: _bounds(group.column(i)) for name, i in columns.items()} for group in groups])

    def row_groups(self, user_a: str, user_b: str, before: int | None) -> list[int]:
        """The row groups that may have messages of the conversation with ids below `before`."""
        found = []
        for number, bounds in enumerate(self.bounds):
            a, b, ids = bounds["user_a"], bounds["user_b"], bounds["id"]
            of_conversation = (a is None or a[0] <= user_a <= a[1]) and (b is None or b[0] <= user_b <= b[1])
            if of_conversation and (before is None or ids is None or ids[0] < before):
                found.append(number)
        return found


class _Footers:
    """The footers that were used last. Files do not change, so a footer stays true. Threads share it."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._kept: OrderedDict[str, _Footer] = OrderedDict()
        self._bytes = 0

    def get(self, path: str) -> _Footer:
        with self._lock:
            if path in self._kept:
                self._kept.move_to_end(path)
                return self._kept[path]
        footer = _Footer.read(path)
        with self._lock:
            if path not in self._kept:
                self._kept[path] = footer
                self._bytes += footer.metadata.serialized_size
            while self._bytes > FOOTER_BYTES:
                _, oldest = self._kept.popitem(last=False)
                self._bytes -= oldest.metadata.serialized_size
        return footer


def _bounds(column: pq.ColumnChunkMetaData) -> "_Bounds":
    """The smallest and the largest value; None if the file does not say."""
    statistics = column.statistics
    return (statistics.min, statistics.max) if statistics is not None and statistics.has_min_max else None


_Bounds = tuple[Any, Any] | None


def _message(row: Mapping[str, Any]) -> Message:
    return Message(str(row["id"]), row["sender"], row["recipient"], row["text"], row["at"])
