"""The URLs that choose an engine. They are parsed here, and nowhere else."""

import re
from dataclasses import dataclass

from shardyard.model.errors import InvalidValue

_SQLITE = "sqlite:///"
_CREDENTIALS = re.compile(r"//.*@")


@dataclass(frozen=True, slots=True)
class EngineUrl:
    """A parsed URL: the engine, and where its data is."""

    engine: str
    """`sqlite` or `memory`."""
    path: str = ""
    """Of the file or folder of `sqlite`: relative to the working directory unless it starts with a slash."""

    def __str__(self) -> str:
        """The URL."""
        return f"{_SQLITE}{self.path}" if self.engine == "sqlite" else f"{self.engine}://"


def parse_url(what: str, url: object) -> EngineUrl:
    """The engine that `url` names; `what` (`log`, `registry`) is what an error calls it.

    `sqlite:///data/log` is relative to the working directory, `sqlite:////data/log` is absolute, `memory://` lasts as
    long as the object. `InvalidValue` for anything else; it does not show a password that the URL may contain.
    """
    expected = "sqlite:///a/path, sqlite:////an/absolute/path or memory://"
    if not isinstance(url, str):
        raise InvalidValue(f"{what} URL", url, f"a string: {expected}")
    if url == "memory://":
        return EngineUrl("memory")
    path = url.removeprefix(_SQLITE)
    if path == url or path in {"", ":memory:"} or "\0" in path:
        raise InvalidValue(f"{what} URL", _CREDENTIALS.sub("//***@", url), expected)
    return EngineUrl("sqlite", path)
