"""Versions of the tables in SQLite, and how each becomes the next."""

from collections.abc import Callable, Sequence

from sqlalchemy import Column, Connection, Integer, MetaData, Table, insert, inspect, select, update

from shardyard.model import Damaged, WrongSchemaVersion

Migration = Callable[[Connection], None]
"""Turns one version into the next, in the transaction that the connection is in."""


def migrate(connection: Connection, where: str, version_table: str, migrations: Sequence[Migration]) -> None:
    """Bring the schema up to date, in the transaction of `connection`.

    The version is in `version_table`: the number of `migrations` that were carried out. `WrongSchemaVersion` if it is
    newer than the last of them. `where` is what errors call the database.
    """
    table = Table(version_table, MetaData(), Column("version", Integer, nullable=False))
    if inspect(connection).has_table(version_table):
        found = connection.execute(select(table.c.version)).scalar()
        if found is None:
            raise Damaged(where, f"its schema version is missing (the table {version_table} has no row)")
    else:
        found = 0
        table.create(connection)
        connection.execute(insert(table).values(version=found))
    if found > len(migrations):
        raise WrongSchemaVersion(where, found, len(migrations))
    for migration in migrations[found:]:
        migration(connection)
    if found < len(migrations):
        connection.execute(update(table).values(version=len(migrations)))
