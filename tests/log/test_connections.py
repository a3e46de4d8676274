"""How the embedded log's connections to its file are set."""

import sqlite3
from pathlib import Path
from typing import Any

import pytest

from shardyard.log.sqlite import SqliteLog
from shardyard.log.sqlite.files import Durability
from tests.log.samples import T0, awaited, records


@pytest.mark.parametrize("durability", ["power", "process"])
@awaited
async def test_no_connection_overwrites_what_is_deleted(
    tmp_path: Path, durability: Durability, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some builds of SQLite, such as Debian's, do so unless they are told otherwise."""
    connect, connections = sqlite3.connect, list[sqlite3.Connection]()

    def connect_as_debian(*arguments: Any, **options: Any) -> sqlite3.Connection:
        connections.append(connect(*arguments, **options))
        connections[-1].execute("PRAGMA secure_delete = ON")
        return connections[-1]

    monkeypatch.setattr(sqlite3, "connect", connect_as_debian)
    async with SqliteLog(tmp_path / "log", durability=durability, maintain_every=None) as log:
        await log.create_topic("t", 1)
        (created,) = connections[:1]
        with pytest.raises(sqlite3.ProgrammingError, match="closed database"):  # it has deleted nothing
            created.execute("PRAGMA secure_delete")
        await log.append(T0, records(0))
        await log.span(T0)
        await log.ends("t")
        deletes = [connection.execute("PRAGMA secure_delete").fetchone() for connection in connections[1:]]
        assert len(deletes) >= 4, "the writer's, that for checkpoints, and two that read"
        assert set(deletes) == {(0,)}
