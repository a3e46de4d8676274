"""Versions of the tables in PostgreSQL, and how each becomes the next."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from psycopg import sql

from shardyard.model import Damaged, WrongSchemaVersion
from shardyard.model.url import EngineUrl
from shardyard.runtime.postgresql.connection import SCHEMA, Connection
from shardyard.runtime.postgresql.errors import translated_errors

Migration = Callable[[Connection], None]
"""Turns one version into the next, in the transaction that the connection is in."""

_LOCK = int.from_bytes(b"shardyrd", "big")
"""The advisory lock that a process holds while it migrates; one for all components, as they share the schema."""
_MIGRATION_SECONDS = 600.0


def migrate(connection: Connection, url: EngineUrl, component: str, migrations: Sequence[Migration]) -> None:
    """Bring the tables of `component` (`registry`, `log`) up to date, and create the schema if it does not exist.

    The version is in the table `<component>_version`: the number of `migrations` that were carried out. All that are
    missing are carried out in one transaction, by one process at a time. `WrongSchemaVersion` if the tables are newer
    than the last of `migrations`. `connection` must not be in a transaction.
    """
    with translated_errors(url):
        if _version(connection, url, component, len(migrations)) == len(migrations):
            return
        with _patient(connection), connection.transaction():
            connection.execute("SELECT pg_advisory_xact_lock(%s)", [_LOCK])
            if connection.execute("SELECT to_regnamespace(%s)", [SCHEMA]).fetchone() == (None,):
                connection.execute(sql.SQL("CREATE SCHEMA {}").format(sql.Identifier(SCHEMA)))
            table = sql.Identifier(f"{component}_version")
            found = _version(connection, url, component, len(migrations))
            if found is None:
                connection.execute(sql.SQL("CREATE TABLE {} (version integer NOT NULL)").format(table))
                connection.execute(sql.SQL("INSERT INTO {} VALUES (0)").format(table))
            for migration in migrations[found or 0 :]:
                migration(connection)
            connection.execute(sql.SQL("UPDATE {} SET version = %s").format(table), [len(migrations)])


@contextmanager
def _patient(connection: Connection) -> Iterator[None]:
    """Another process may be migrating, and tables may be large."""
    usual, connection.response_seconds = connection.response_seconds, _MIGRATION_SECONDS
    try:
        yield
    finally:
        connection.response_seconds = usual


def _version(connection: Connection, url: EngineUrl, component: str, known: int) -> int | None:
    """The version of the tables that exist; None if there are none. `WrongSchemaVersion` if it is above `known`."""
    name = f"{component}_version"
    if connection.execute("SELECT to_regclass(%s)", [f"{SCHEMA}.{name}"]).fetchone() == (None,):
        return None
    row = connection.execute(sql.SQL("SELECT version FROM {}").format(sql.Identifier(name))).fetchone()
    if row is None:
        raise Damaged(str(url), f"its schema version is missing (the table {SCHEMA}.{name} has no row)")
    version: int = row[0]
    if version > known:
        raise WrongSchemaVersion(f"the {component} in {url}", version, known)
    return version
