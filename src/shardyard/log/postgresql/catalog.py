"""The statements of the catalog in PostgreSQL."""

from typing import Any, LiteralString

from psycopg import sql

from shardyard.log.catalog import TOPIC_COLUMNS, StoredCatalog, TopicRow
from shardyard.model import Partition
from shardyard.runtime.postgresql import Connection

CHANNEL = "shardyard_log"
"""The channel of notifications. A payload is `id:end,id:end,...` of partitions that have grown, or `CHANGED`."""
CHANGED = "*"
"""The payload when partitions were dropped or deleted: look at all that you wait for."""
NOW: LiteralString = "(extract(epoch FROM clock_timestamp()) * 1000)::bigint"
"""The database's time in milliseconds."""

_COLUMNS = sql.SQL(", ").join(map(sql.Identifier, TOPIC_COLUMNS.split(", ")))
_VALUES = sql.SQL(", ").join(sql.Placeholder() * len(TopicRow._fields))
_ROWS = sql.SQL(
    "SELECT {}, {} FROM (SELECT) AS always LEFT JOIN log_topics ON %s::text IS NULL OR name = %s ORDER BY name"
).format(sql.SQL(NOW), _COLUMNS)
_INSERT = sql.SQL("INSERT INTO log_topics ({}) VALUES ({})").format(_COLUMNS, _VALUES)
_UPDATE = sql.SQL("UPDATE log_topics SET ({}) = ROW({}) WHERE name = %s").format(_COLUMNS, _VALUES)


class PostgresqlCatalog(StoredCatalog):
    """The catalog within a transaction, or for statements that only read."""

    def __init__(self, connection: Connection, now: int | None) -> None:
        """`now`: None for the database's time, as of the last query."""
        super().__init__(now or 0)
        self._is_given = now is not None
        self._connection = connection

    @classmethod
    def to_change(cls, connection: Connection, now: int | None) -> "PostgresqlCatalog":
        """Wait for other changes of the catalog to end. Every change begins here, and locks partitions after it."""
        connection.execute("SELECT FROM log_counter FOR UPDATE")
        return cls(connection, now)

    def rows(self, name: str | None = None) -> list[TopicRow]:
        if name is not None and not may_be_topic(name):
            return []
        found = self._connection.execute(_ROWS, (name, name)).fetchall()
        if not self._is_given:
            self.now = found[0][0]
        return [TopicRow(*row[1:]) for row in found if row[1] is not None]

    def lock(self, name: str) -> None:
        """An append locks the rows of its partitions, too, and looks at the topic afterwards. The order by id is the
        same everywhere, so that nobody waits in a circle."""
        if not may_be_topic(name):
            return
        self._execute("SELECT FROM log_partitions WHERE topic = %s ORDER BY id FOR UPDATE", name)

    def insert(self, row: TopicRow) -> None:
        self._connection.execute(_INSERT, row)

    def update(self, row: TopicRow) -> None:
        self._connection.execute(_UPDATE, (*row, row.name))

    def remove(self, name: str) -> None:
        self._execute('UPDATE log_partitions SET topic = NULL, first = "end" WHERE topic = %s', name)
        self._execute("DELETE FROM log_topics WHERE name = %s", name)
        self._notify()

    def add_partitions(self, name: str, start: int, stop: int) -> None:
        self._execute(
            "INSERT INTO log_partitions (topic, number) SELECT %s, number FROM generate_series(%s::int, %s::int) number"
            " ON CONFLICT (topic, number) DO NOTHING",
            name,
            start,
            stop - 1,
        )

    def empty_partitions(self, name: str, start: int) -> None:
        self._execute(
            'UPDATE log_partitions SET first = "end", merged = "end" WHERE topic = %s AND number >= %s', name, start
        )
        self._notify()

    def last_number(self) -> int:
        ((last,),) = self._connection.execute("SELECT last FROM log_counter").fetchall()
        return int(last)

    def set_last_number(self, number: int) -> None:
        self._execute("UPDATE log_counter SET last = %s", number)

    def _notify(self) -> None:
        self._execute("SELECT pg_notify(%s, %s)", CHANNEL, CHANGED)

    def _execute(self, statement: Any, *parameters: object) -> None:
        self._connection.execute(statement, parameters)


def may_be_topic(name: str) -> bool:
    """Whether a topic may have this name: PostgreSQL refuses to look for text that it can't store."""
    return name.isascii() and "\0" not in name


def number_of(partition: Partition) -> int:
    """The number to look for; -1, which no partition has, instead of one that its column can't have."""
    return partition.index if 0 <= partition.index < 2**31 else -1
