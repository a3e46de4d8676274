"""The durable, partitioned log: the port, and one module or folder per engine.

Importing this package loads no engine: `open_log` loads the one that the URL names.
"""

from typing import TYPE_CHECKING

from shardyard.log.port import Capabilities, Catalog, Data, Log
from shardyard.log.sequences import SequenceWindow
from shardyard.log.urls import absolute_url, is_shared, local_folder, log_exists
from shardyard.model.extras import lazy_exports, require
from shardyard.model.url import parse_url

if TYPE_CHECKING:
    from shardyard.log.sender import Sender
    from shardyard.log.sqlite import Durability
    from shardyard.model.limits import Limits
    from shardyard.runtime.clock import Clock

__all__ = [
    "Capabilities",
    "Catalog",
    "Data",
    "Log",
    "Sender",
    "SequenceWindow",
    "absolute_url",
    "is_shared",
    "local_folder",
    "log_exists",
    "open_log",
]

__getattr__ = lazy_exports(__name__, {"Sender": "shardyard.log.sender"}, "numpy", "pyarrow")


def open_log(
    url: str,
    *,
    durability: "Durability" = "power",
    limits: "Limits | None" = None,
    clock: "Clock | None" = None,
    maintains: bool = True,
) -> Log:
    """Open a log by its URL: `sqlite:///data/log` (a folder; four slashes for an absolute path),
    `postgresql://user:password@host:port/database` or `memory://`.

    `durability` is the embedded log's: on PostgreSQL every commit is durable. `maintains`: whether this process takes
    part in retention, merging and freeing space in the background. One that only reads may leave that to the others.
    """
    engine = parse_url("log", url)
    require("server", "open_log", "numpy", "pyarrow", "xxhash")
    if engine.engine == "postgresql":
        require("postgresql", "a log at postgresql://")
    if engine.engine == "memory":
        from shardyard.log.memory import MemoryLog  # noqa: PLC0415 only the engine that is used is loaded

        return MemoryLog(limits=limits, clock=clock)
    if engine.engine == "postgresql":
        from shardyard.log.postgresql import engine as postgresql  # noqa: PLC0415 only the engine that is used is loaded

        every = postgresql.MAINTAIN_SECONDS if maintains else None
        return postgresql.PostgresqlLog(url, limits=limits, clock=clock, maintain_every=every)
    from shardyard.log.sqlite import engine as sqlite  # noqa: PLC0415 only the engine that is used is loaded

    every = sqlite.MAINTAIN_SECONDS if maintains else None
    return sqlite.SqliteLog(engine.path, durability=durability, limits=limits, clock=clock, maintain_every=every)
