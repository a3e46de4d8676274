"""The durable, partitioned log: the port, and one module per engine."""

from pathlib import Path

from shardyard.log.batch import SCHEMA, Batch, Limits, from_records
from shardyard.log.memory import MemoryLog
from shardyard.log.port import SEQUENCE_WINDOW, Appended, Fence, Log, Span, Stamp
from shardyard.log.sender import Sender
from shardyard.log.sqlite import Durability, SqliteLog
from shardyard.model import InvalidValue

__all__ = [
    "SCHEMA",
    "SEQUENCE_WINDOW",
    "Appended",
    "Batch",
    "Durability",
    "Fence",
    "Limits",
    "Log",
    "MemoryLog",
    "Sender",
    "Span",
    "SqliteLog",
    "Stamp",
    "from_records",
    "open_log",
]


def open_log(url: str, *, durability: Durability = "power", limits: Limits | None = None) -> Log:
    """Open a log by its URL: `sqlite:///data/log` (a folder; four slashes for an absolute path) or `memory://`."""
    if not isinstance(url, str):
        raise InvalidValue("log URL", url, "a text")
    if url.startswith("sqlite:///") and len(url) > len("sqlite:///"):
        return SqliteLog(Path(url.removeprefix("sqlite:///")), durability=durability, limits=limits)
    if url == "memory://":
        return MemoryLog(limits=limits)
    raise InvalidValue("log URL", url, "sqlite:///FOLDER or memory://")
