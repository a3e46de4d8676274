"""The durable, partitioned log: the port, and one module or folder per engine.

Importing this package loads no engine: `open_log` loads the one that the URL names.
"""

from typing import TYPE_CHECKING

from shardyard.log.port import Log
from shardyard.log.sender import Sender
from shardyard.model import InvalidValue

if TYPE_CHECKING:
    from shardyard.log.sqlite import Durability
    from shardyard.model.limits import Limits

__all__ = ["Log", "Sender", "open_log"]


def open_log(url: str, *, durability: "Durability" = "power", limits: "Limits | None" = None) -> Log:
    """Open a log by its URL: `sqlite:///data/log` (a folder; four slashes for an absolute path) or `memory://`."""
    if not isinstance(url, str):
        raise InvalidValue("log URL", url, "a string")
    if url.startswith("sqlite:///") and len(url) > len("sqlite:///"):
        from shardyard.log.sqlite import SqliteLog  # noqa: PLC0415 only the engine that is used is loaded

        return SqliteLog(url.removeprefix("sqlite:///"), durability=durability, limits=limits)
    if url == "memory://":
        from shardyard.log.memory import MemoryLog  # noqa: PLC0415 only the engine that is used is loaded

        return MemoryLog(limits=limits)
    raise InvalidValue("log URL", url, "sqlite:///FOLDER or memory://")
