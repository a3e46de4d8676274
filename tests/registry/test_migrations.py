"""The versions of the registry's schema, in SQLite."""

import json
import sqlite3
import threading
from pathlib import Path

import pytest
from sqlalchemy import Connection, create_engine, inspect, text
from sqlalchemy.engine import Inspector

from shardyard.model import Damaged, Partition, Position, WrongSchemaVersion
from shardyard.registry import (
    AuditRow,
    GroupRow,
    MemberRow,
    OwnershipRow,
    Registry,
    SettingRow,
    Transaction,
    migrations,
    open_registry,
    schema,
)
from shardyard.runtime.clock import ManualClock

VERSION_1 = """
CREATE TABLE shardyard_registry (version INTEGER NOT NULL);
INSERT INTO shardyard_registry VALUES (1);
CREATE TABLE groups (
    name TEXT NOT NULL, epoch BIGINT NOT NULL, inputs BIGINT NOT NULL, assigned BIGINT NOT NULL, shape BIGINT NOT NULL,
    assignor TEXT NOT NULL, max_active BIGINT, release_after DOUBLE, PRIMARY KEY (name)
) WITHOUT ROWID;
CREATE TABLE members (
    group_name TEXT NOT NULL, name TEXT NOT NULL, epoch BIGINT NOT NULL, weight BIGINT NOT NULL, topics TEXT NOT NULL,
    static BOOLEAN NOT NULL, manual TEXT, session_timeout DOUBLE NOT NULL, expires_at DOUBLE NOT NULL,
    PRIMARY KEY (group_name, name)
) WITHOUT ROWID;
CREATE TABLE ownerships (
    group_name TEXT NOT NULL, topic TEXT NOT NULL, partition_index BIGINT NOT NULL, owner TEXT, epoch BIGINT NOT NULL,
    target TEXT, committed_epoch BIGINT, committed_offset BIGINT, progress_at DOUBLE NOT NULL,
    PRIMARY KEY (group_name, topic, partition_index)
) WITHOUT ROWID;
CREATE TABLE leases (
    name TEXT NOT NULL, holder TEXT NOT NULL, token BIGINT NOT NULL, expires_at DOUBLE NOT NULL, PRIMARY KEY (name)
) WITHOUT ROWID;
CREATE TABLE settings (
    scope TEXT NOT NULL, name TEXT NOT NULL, value TEXT, version BIGINT NOT NULL, PRIMARY KEY (scope, name)
) WITHOUT ROWID;
CREATE TABLE audit (
    number BIGINT NOT NULL, at DOUBLE NOT NULL, who TEXT NOT NULL, action TEXT NOT NULL, subject TEXT NOT NULL,
    detail TEXT NOT NULL, PRIMARY KEY (number)
);
CREATE TABLE changes (name TEXT NOT NULL, version BIGINT NOT NULL, PRIMARY KEY (name)) WITHOUT ROWID;
"""


TIMEOUT_SECONDS = 60.0
"""How long a test waits for what must happen soon."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "registry.db"


def opened(path: Path) -> Registry:
    return open_registry(f"sqlite:///{path}", clock=ManualClock())


def write(path: Path, script: str) -> None:
    connection = sqlite3.connect(path)
    connection.executescript(script)
    connection.close()


def version(path: Path) -> int:
    connection = sqlite3.connect(path)
    try:
        return int(connection.execute("SELECT version FROM shardyard_registry").fetchone()[0])
    finally:
        connection.close()


def put(registry: Registry, name: str) -> None:
    registry.run(lambda tx: tx.put_group(GroupRow(name)))


def names(registry: Registry) -> list[str]:
    return registry.read(lambda tx: [row.name for row in tx.groups()])


def shape(inspector: Inspector, schema: str | None = None) -> dict[str, object]:
    """Everything about the tables that statements depend on."""
    return {
        table: (
            [
                (c["name"], c["type"]._type_affinity, c["nullable"], getattr(c["type"], "collation", None))
                for c in inspector.get_columns(table, schema)
            ],
            inspector.get_pk_constraint(table, schema)["constrained_columns"],
            [(index["name"], index["column_names"]) for index in inspector.get_indexes(table, schema)],
        )
        for table in inspector.get_table_names(schema)
        if table not in {migrations.VERSION_TABLE, "registry_version"}
    }


@pytest.mark.parametrize("script", ["", VERSION_1], ids=["new", "version 1"])
def test_the_migrations_result_in_the_tables_of_the_schema(path: Path, script: str) -> None:
    write(path, script)
    opened(path).close()
    migrated, created = create_engine(f"sqlite:///{path}"), create_engine("sqlite://")
    schema.METADATA.create_all(created)
    assert shape(inspect(migrated)) == shape(inspect(created))
    assert version(path) == 5
    migrated.dispose()
    created.dispose()


def test_the_rows_of_version_1_are_kept(path: Path) -> None:
    write(
        path,
        VERSION_1
        + """
INSERT INTO groups VALUES ('billing', 7, 5, 4, 12, 'even', 3, 2.5);
INSERT INTO members VALUES ('billing', 'a', 3, 2, '["orders"]', TRUE, '[["orders", 1]]', 30.0, 1700000030.5);
INSERT INTO ownerships VALUES ('billing', 'orders', 1, 'a', 6, 'b', 2, 9, 1700000000.25);
INSERT INTO settings VALUES ('policy', 'x', '[1]', 4), ('policy', 'deleted', NULL, 3);
INSERT INTO audit VALUES (1, 12.5, 'ann', 'create', 'x', 'null'), (2, 13.5, 'bob', 'delete', 'x', '{"a": 1}');
INSERT INTO changes VALUES ('group/billing', 40), ('group/shipping', 7);
""",
    )
    partition = Partition("orders", 1)
    with opened(path) as registry:

        def check(tx: Transaction) -> None:
            assert tx.groups() == [GroupRow("billing", 7, 5, 4, 12, "even", max_active=3, release_after=2.5)]
            member = MemberRow("billing", "a", 3, 2, ("orders",), True, (partition,), 30.0, 1_700_000_030.5)
            assert tx.members("billing") == [member]
            owned = OwnershipRow("billing", partition, "a", 6, "b", Position(2, 9), 1_700_000_000.25)
            assert tx.ownerships("billing") == [owned]
            assert tx.settings("policy") == [SettingRow("policy", "x", [1], 4)]
            assert tx.put_setting("policy", "deleted", 1).version == 4
            tx.audit("ann", "open", "x")
            rows = tx.audit_log()
            assert rows[0].number > 2
            assert rows[1:] == [
                AuditRow(2, 13.5, "bob", "delete", "x", {"a": 1}),
                AuditRow(1, 12.5, "ann", "create", "x", None),
            ]

        registry.run(check)


def test_a_watch_of_a_migrated_registry_is_called_for_a_name_that_was_touched_less_often(path: Path) -> None:
    write(path, VERSION_1 + "INSERT INTO changes VALUES ('group/billing', 40), ('group/shipping', 7);")
    called = threading.Event()
    with opened(path) as registry:
        registry.watch("group/shipping", called.set)
        registry.run(lambda tx: tx.touch("group/shipping"))
        assert called.wait(TIMEOUT_SECONDS)


def test_the_configuration_of_a_group_is_moved_from_its_settings_to_the_group(path: Path) -> None:
    both = {"backoff": [1.0], "assignor": "even", "max_active": 2, "release_after": None, "broadcast": True}
    alone = {"assignor": "contiguous", "max_active": None, "release_after": 60.0, "broadcast": False, "paused": True}
    settings = {
        ("group/billing", "queue"): both,
        ("group/shipping", "queue"): alone,
        ("group/plain", "queue"): {"paused": True},
        ("group/billing", "other"): both,
        ("topic/orders", "queue"): {"broadcast": True},
    }
    rows = ",".join(f"('{scope}', '{name}', '{json.dumps(value)}', 3)" for (scope, name), value in settings.items())
    write(
        path,
        VERSION_1
        + f"""
INSERT INTO groups VALUES ('billing', 7, 5, 4, 12, 'sticky', NULL, 2.5), ('other', 1, 1, 1, 1, 'even', 1, 1.0);
INSERT INTO settings VALUES {rows}, ('group/deleted', 'queue', NULL, 2);
""",
    )
    with opened(path) as registry:
        assert registry.read(lambda tx: tx.groups()) == [
            GroupRow("billing", 7, 6, 4, 12, "even", max_active=2, release_after=None, broadcast=True),
            GroupRow("other", 1, 1, 1, 1, "even", max_active=1, release_after=1.0, broadcast=False),
            GroupRow("shipping", 1_700_000_000_000, 1, assignor="contiguous", release_after=60.0, broadcast=False),
        ]
        kept = registry.read(lambda tx: {key: tx.setting(*key) for key in [*settings, ("group/deleted", "queue")]})
    values = {key: None if row is None else (row.value, row.version) for key, row in kept.items()}
    assert values == {
        ("group/billing", "queue"): ({"backoff": [1.0]}, 3),
        ("group/shipping", "queue"): ({"paused": True}, 3),
        ("group/plain", "queue"): ({"paused": True}, 3),
        ("group/billing", "other"): (both, 3),
        ("topic/orders", "queue"): ({"broadcast": True}, 3),
        ("group/deleted", "queue"): None,
    }


def test_settings_of_version_1_that_are_not_json_are_reported_and_left_as_they_are(path: Path) -> None:
    write(path, VERSION_1 + "INSERT INTO settings VALUES ('group/billing', 'queue', '{', 1);")
    with pytest.raises(Damaged, match=r"setting 'queue' of 'group/billing' .* is not JSON"):
        opened(path)
    assert version(path) == 1


def test_an_older_version_is_migrated(path: Path) -> None:
    write(path, "CREATE TABLE shardyard_registry (version INTEGER NOT NULL); INSERT INTO shardyard_registry VALUES (0)")
    with opened(path) as registry:
        put(registry, "billing")
    assert version(path) == len(migrations.MIGRATIONS)


def test_only_the_missing_migrations_run_and_rows_are_kept(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(path) as registry:
        put(registry, "billing")

    def rename(connection: Connection, _now: float) -> None:
        connection.execute(text("UPDATE groups SET name = name || ' department'"))

    monkeypatch.setattr(migrations, "MIGRATIONS", [*migrations.MIGRATIONS, rename])
    for _ in range(2):
        with opened(path) as registry:
            assert names(registry) == ["billing department"]
    assert version(path) == len(migrations.MIGRATIONS)


def test_a_migration_that_fails_leaves_the_older_version_whole(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(path) as registry:
        put(registry, "billing")
    before = version(path)

    def fail(connection: Connection, _now: float) -> None:
        connection.execute(text("DROP TABLE members"))
        raise ZeroDivisionError

    with monkeypatch.context() as patched:
        patched.setattr(migrations, "MIGRATIONS", [*migrations.MIGRATIONS, fail])
        with pytest.raises(ZeroDivisionError):
            opened(path)
    assert version(path) == before
    with opened(path) as registry:
        assert registry.read(lambda tx: tx.members("billing")) == []


def test_a_newer_version_is_refused_and_left_alone(path: Path) -> None:
    opened(path).close()
    write(path, "UPDATE shardyard_registry SET version = 99")
    with pytest.raises(WrongSchemaVersion, match="version 99") as refused:
        opened(path)
    assert (refused.value.found, refused.value.expected) == (99, len(migrations.MIGRATIONS))
    assert version(path) == 99
