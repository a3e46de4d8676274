"""The tables of the log on PostgreSQL."""

from typing import LiteralString

from shardyard.runtime.postgresql import Connection, Migration

_TABLES: tuple[LiteralString, ...] = (
    # One row. Every change of the catalog locks it first, so they come one after the other.
    "CREATE TABLE log_counter (last bigint NOT NULL)",
    "INSERT INTO log_counter VALUES (0)",
    """
    CREATE TABLE log_topics (
        name text COLLATE "C" PRIMARY KEY,
        partitions integer NOT NULL,
        kind text NOT NULL,
        age_ms bigint,
        bytes_per_partition bigint,
        epoch bigint NOT NULL,
        partitioner text NOT NULL,
        hash text,
        sealed boolean NOT NULL,
        successor text,
        open_partitions integer,
        generation bigint NOT NULL,
        sealed_by text,
        sealed_since bigint NOT NULL,
        sealed_until bigint NOT NULL
    )
    """,
    # A partition of a deleted topic has no topic until its batches are deleted. A dropped partition, whose number is
    # beyond those of its topic, keeps its end in case that it is added again. Each append updates a row in its place,
    # which takes free room in the page.
    """
    CREATE TABLE log_partitions (
        id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
        topic text COLLATE "C",
        number integer NOT NULL,
        first bigint NOT NULL DEFAULT 0,
        "end" bigint NOT NULL DEFAULT 0,
        merged bigint NOT NULL DEFAULT 0,
        UNIQUE (topic, number)
    ) WITH (fillfactor = 50)
    """,
    "CREATE INDEX log_partitions_of_deleted_topics ON log_partitions (id) WHERE topic IS NULL",
    # The key includes what queries by time and size need, so they do not read the rows.
    """
    CREATE TABLE log_batches (
        partition bigint NOT NULL,
        first bigint NOT NULL,
        count integer NOT NULL,
        latest bigint NOT NULL,
        bytes integer NOT NULL,
        checksum bigint NOT NULL,
        data bytea NOT NULL,
        PRIMARY KEY (partition, first) INCLUDE (count, latest, bytes)
    )
    """,
    "ALTER TABLE log_batches ALTER data SET STORAGE EXTERNAL",  # compressing takes longer than it saves
    """
    CREATE TABLE log_stamps (
        partition bigint NOT NULL,
        producer text COLLATE "C" NOT NULL,
        sequence bigint NOT NULL,
        first bigint NOT NULL,
        count integer NOT NULL,
        at bigint NOT NULL,
        PRIMARY KEY (partition, producer, sequence)
    )
    """,
    'CREATE TABLE log_fences (name text COLLATE "C" PRIMARY KEY, epoch bigint NOT NULL) WITH (fillfactor = 50)',
)


def _create(connection: Connection) -> None:
    for statement in _TABLES:
        connection.execute(statement)


def _allow_few_records(_: Connection) -> None:
    """Batches of a few records are stored in MessagePack from here on, which earlier versions can't read."""


MIGRATIONS: tuple[Migration, ...] = (_create, _allow_few_records)
"""Each turns a version of the tables into the next. A new database goes through all of them, so all are alike."""
