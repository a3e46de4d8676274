"""The statements of the catalog in SQLite. A transaction that writes is alone, so nothing needs a lock of its own."""

import sqlite3

from shardyard.log.catalog import TOPIC_COLUMNS, StoredCatalog, TopicRow

_COLUMNS = TOPIC_COLUMNS.split(", ")
_VALUES = ", ".join("?" for _ in _COLUMNS)
_SETTINGS = ", ".join(f"{column} = ?" for column in _COLUMNS)


class SqliteCatalog(StoredCatalog):
    """The catalog within a transaction that the caller has started."""

    def __init__(self, db: sqlite3.Connection, now: int) -> None:
        super().__init__(now)
        self._db = db

    def rows(self, name: str | None = None) -> list[TopicRow]:
        found = self._db.execute(
            f"SELECT {TOPIC_COLUMNS} FROM topics WHERE ?1 IS NULL OR name = ?1 ORDER BY name",  # noqa: S608 names of ours
            (name,),
        )
        return [TopicRow(*row) for row in found]

    def lock(self, name: str) -> None:
        pass

    def insert(self, row: TopicRow) -> None:
        self._db.execute(f"INSERT INTO topics ({TOPIC_COLUMNS}) VALUES ({_VALUES})", row)  # noqa: S608 names of ours

    def update(self, row: TopicRow) -> None:
        self._db.execute(f"UPDATE topics SET {_SETTINGS} WHERE name = ?", (*row, row.name))  # noqa: S608 names of ours

    def remove(self, name: str) -> None:
        self._db.execute('UPDATE partitions SET topic = NULL, first = "end" WHERE topic = ?', (name,))
        self._db.execute("DELETE FROM topics WHERE name = ?", (name,))

    def add_partitions(self, name: str, start: int, stop: int) -> None:
        numbers = ((name, number) for number in range(start, stop))
        self._db.executemany("INSERT OR IGNORE INTO partitions (topic, number) VALUES (?, ?)", numbers)

    def empty_partitions(self, name: str, start: int) -> None:
        self._db.execute(
            'UPDATE partitions SET first = "end", merged = "end" WHERE topic = ? AND number >= ?', (name, start)
        )

    def last_number(self) -> int:
        (last,) = self._db.execute("SELECT last FROM epochs").fetchone()
        return int(last)

    def set_last_number(self, number: int) -> None:
        self._db.execute("UPDATE epochs SET last = ?", (number,))
