"""The URLs that choose an engine. They are parsed here, and nowhere else."""

import re
from dataclasses import dataclass, field

from shardyard.model.errors import InvalidValue

_SQLITE = "sqlite:///"
_POSTGRESQL = ("postgresql://", "postgres://")
_CREDENTIALS = re.compile(r"//.*@")
_PASSWORD_WITHOUT_HOST = re.compile(r"//([^/@:]*):(?!\d*(?:[/,]|$)).*")
"""A user and a password where a host and a port should be."""
_PASSWORD_OPTION = re.compile(r"((?:ssl)?password=)[^&]*", re.IGNORECASE)
_HOST = re.compile(r"(\[[^\]\s]*\]|[^:\[\]#\s]*)(?::(?P<port>\d{0,5}))?")
"""A host and a port; an IPv6 address is in brackets."""
_EXPECTED = (
    "sqlite:///a/path, sqlite:////an/absolute/path or postgresql://user:password@host:port/database "
    "(or memory:// within a program, since no other process can open it)"
)


@dataclass(frozen=True, slots=True)
class EngineUrl:
    """A parsed URL: the engine, and where its data is. Printing it does not show a password."""

    engine: str
    """`sqlite`, `postgresql` or `memory`."""
    path: str = ""
    """Of the file or folder of `sqlite`: relative to the working directory unless it starts with a slash."""
    dsn: str = field(default="", repr=False)
    """The whole URL of `postgresql`, as its drivers take it, with the password."""

    def __str__(self) -> str:
        """The URL, without a password."""
        match self.engine:
            case "sqlite":
                return f"{_SQLITE}{self.path}"
            case "postgresql":
                return without_password(self.dsn)
            case _:
                return f"{self.engine}://"


def parse_url(what: str, url: object) -> EngineUrl:
    """The engine that `url` names; `what` (`log`, `registry`) is what an error calls it.

    `sqlite:///data/log` is relative to the working directory, `sqlite:////data/log` is absolute. The URL of a
    `postgresql://` database may have the options that libpq knows, such as `?sslmode=verify-full`. `memory://` lasts as
    long as the object. `InvalidValue` for anything else; it does not show a password that the URL may contain.
    """
    if not isinstance(url, str):
        raise InvalidValue(f"{what} URL", url, f"a string: {_EXPECTED}")
    if url == "memory://":
        return EngineUrl("memory")
    if url.startswith(_POSTGRESQL) and "\0" not in url:
        return EngineUrl("postgresql", dsn=_checked_dsn(what, url))
    path = url.removeprefix(_SQLITE)
    if path == url or path in {"", ":memory:"} or "\0" in path:
        raise InvalidValue(f"{what} URL", without_password(url), _EXPECTED)
    return EngineUrl("sqlite", path)


def beside(what: str, url: str, file: str) -> str:
    """Where a store that goes with another one is unless it is named: in the same database, or in a file in the same
    folder. `url` is that of the other one, which errors call `what`."""
    other = parse_url(what, url)
    if not other.path:
        return url
    folder, slash, _ = other.path.rstrip("/").rpartition("/")
    return f"{_SQLITE}{folder}{slash}{file}"


def without_password(url: str) -> str:
    """The URL with user and password replaced by `***`, for messages."""
    shown = _CREDENTIALS.sub("//***@", url)
    if shown == url:
        shown = _PASSWORD_WITHOUT_HOST.sub(r"//\1:***", url)
    return _PASSWORD_OPTION.sub(r"\1***", shown)


def _split_dsn(url: str) -> tuple[str, str, str]:
    """Credentials, hosts and path, as libpq takes a URL apart. In some versions, Python's own function refuses several
    hosts if one of them is in brackets."""
    rest = url.partition("://")[2]
    credentials, at, _ = rest.partition("/")[0].rpartition("@")
    rest = rest[len(credentials) + len(at) :]
    hosts = re.split("[/?]", rest, maxsplit=1)[0]
    return credentials, hosts, rest[len(hosts) :].partition("?")[0]


def _is_host(text: str) -> bool:
    found = _HOST.fullmatch(text)
    return found is not None and int(found["port"] or 0) < 2**16


def _checked_dsn(what: str, url: str) -> str:
    credentials, hosts, path = _split_dsn(url)
    if not all(map(_is_host, hosts.split(","))):  # one, or several that stand by
        raise InvalidValue(f"{what} URL", without_password(url), _EXPECTED)
    named = path.strip("/")
    if "@" in credentials:
        raise InvalidValue(f"{what} URL", without_password(url), "%40 instead of @ in a user or password: " + _EXPECTED)
    if not named or "/" in named:
        raise InvalidValue(f"{what} URL", without_password(url), "the name of a database after the host: " + _EXPECTED)
    return url
