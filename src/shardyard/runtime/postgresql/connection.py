"""Connections to PostgreSQL that never hang."""

import time
from collections.abc import Generator, Mapping
from itertools import cycle
from typing import Any, TypeVar

import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.rows import TupleRow

from shardyard.model import DatabaseUnavailable, InvalidCall, InvalidValue
from shardyard.model.url import EngineUrl
from shardyard.runtime.postgresql.errors import ON_STANDBY, translated_errors

SCHEMA = "shardyard"
"""The PostgreSQL schema of all our tables, so that they can be in the same database as a team's own."""
OLDEST_VERSION = 15
RESPONSE_SECONDS = 10.0
"""How long a statement may go without a response before its connection is given up."""

_DEFAULTS: dict[str, str | int] = {
    "connect_timeout": 5,  # seconds
    "keepalives_idle": 10,  # seconds; with the two below a connection that was cut is noticed within 20 s
    "keepalives_interval": 5,  # seconds
    "keepalives_count": 2,
    "tcp_user_timeout": 10_000,  # milliseconds
}
"""Of libpq, unless the URL says otherwise."""

_SETTINGS: dict[str, str | int | float] = {
    "search_path": SCHEMA,
    "client_encoding": "UTF8",
    # Our statements take microseconds. To compile one takes a hundred milliseconds, which PostgreSQL does where it
    # takes a plan for an expensive one.
    "jit": "off",
}
"""Of the server, for our connections."""

_DURABLE = "SELECT set_config('synchronous_commit', 'on', false) WHERE current_setting('synchronous_commit') = 'off'"
"""A server or a role may have switched it off, and we promise durable commits."""

T = TypeVar("T")


class Connection(psycopg.Connection[TupleRow]):
    """A connection whose statements raise `OperationalError` when the server does not respond for `response_seconds`:
    TCP does not notice a server that was stopped, since its operating system still acknowledges packets. The connection
    is closed then."""

    response_seconds: float | None = RESPONSE_SECONDS
    """None: wait for as long as it takes."""

    def wait(self, gen: Generator[Any, Any, T], interval: float = 0.1, timeout: float | None = None) -> T:
        """Every statement waits here for its response."""
        if timeout is not None or self.response_seconds is None:
            return super().wait(gen, interval, timeout)
        deadline = time.monotonic() + self.response_seconds
        try:
            return super().wait(gen, interval, self.response_seconds)
        except psycopg.OperationalError as error:
            if time.monotonic() < deadline or error.sqlstate is not None:
                raise
            self.pgconn.finish()
            raise psycopg.OperationalError(f"no response for {self.response_seconds:g} s") from error


def connect(
    url: EngineUrl,
    purpose: str,
    *,
    response_seconds: float | None = RESPONSE_SECONDS,
    settings: Mapping[str, str | int | float] | None = None,
) -> Connection:
    """A connection that commits each statement by itself, and looks for tables in our schema.

    `purpose` (`registry`, `log`) is part of the name under which the server lists the connection; `settings` are the
    server's own, for this connection. Errors are ours (see `errors`), and show no password.
    """
    options = _DEFAULTS | {"application_name": f"shardyard {purpose}"} | _parsed(url)
    with translated_errors(url, _addresses(options)):
        connection = Connection.connect(make_conninfo("", **options), autocommit=True)
    with translated_errors(url):
        try:
            connection.response_seconds = response_seconds
            _check_server(connection, url)
            connection.execute(_setup(_SETTINGS | dict(settings or {})))
        except BaseException:
            connection.close()
            raise
    return connection


def _parsed(url: EngineUrl) -> dict[str, Any]:
    try:
        return conninfo_to_dict(url.dsn)
    except psycopg.ProgrammingError as error:
        # Its message may contain a piece of the password, except when an option is wrong.
        why = str(error).strip() if "invalid URI query parameter" in str(error) else "libpq can't parse it"
        raise InvalidValue(
            "PostgreSQL URL", str(url), f"postgresql://user:password@host:port/database ({why})"
        ) from None


def _addresses(options: Mapping[str, Any]) -> str:
    """Host and port of the server, for messages; of all servers if the URL has several."""
    defaults = {option.keyword.decode(): (option.val or b"").decode() for option in psycopg.pq.Conninfo.get_defaults()}
    hosts = str(options.get("host") or options.get("hostaddr") or defaults["host"]).split(",")
    ports = str(options.get("port", "")).split(",")
    pairs = zip(hosts, cycle(ports), strict=False)  # one port for all hosts, or one for each
    return ", ".join(f"{host or 'the local socket'}:{port or defaults['port']}" for host, port in pairs)


def _check_server(connection: Connection, url: EngineUrl) -> None:
    version, encoding = connection.info.server_version // 10_000, connection.info.parameter_status("server_encoding")
    if version < OLDEST_VERSION:
        raise InvalidCall(f"{url} is PostgreSQL {version}: Shardyard needs {OLDEST_VERSION} or later")
    if connection.info.parameter_status("in_hot_standby") == "on":
        raise DatabaseUnavailable(str(url), "it is a standby, which is read-only", ON_STANDBY)
    if encoding != "UTF8":
        raise InvalidCall(f"{url} has the encoding {encoding}: create a database with ENCODING 'UTF8'")


def _setup(settings: Mapping[str, str | int | float]) -> sql.Composed:
    """All settings in one round trip."""
    statements = [sql.SQL("SET {} = {}").format(sql.Identifier(name), value) for name, value in settings.items()]
    return sql.SQL("; ").join([*statements, sql.SQL(_DURABLE)])
