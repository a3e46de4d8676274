"""What the URL of a log says about it without opening it."""

from dataclasses import replace
from pathlib import Path

from shardyard.model.url import parse_url

FILE = "log.db"
"""The file in the folder of an embedded log."""


def local_folder(url: str) -> Path | None:
    """The folder of an embedded log; None for an engine that has none."""
    engine = parse_url("log", url)
    return Path(engine.path) if engine.engine == "sqlite" else None


def log_exists(url: str) -> bool:
    """Whether there may be a log that opening this URL would open. False: it would create one. A database on a server
    is not asked."""
    engine = parse_url("log", url)
    if engine.engine == "sqlite":
        return (Path(engine.path) / FILE).is_file()
    return engine.engine == "postgresql"


def is_shared(url: str) -> bool:
    """Whether other processes can open the same log by this URL."""
    return parse_url("log", url).engine != "memory"


def absolute_url(url: str) -> str:
    """The same log as seen from any working directory, such as that of a Spark worker."""
    engine = parse_url("log", url)
    if engine.engine != "sqlite":
        return url
    return str(replace(engine, path=str(Path(engine.path).absolute())))
