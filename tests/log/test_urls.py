"""What a log's URL says about it, without opening it."""

import asyncio
import traceback
from pathlib import Path

import pytest

from shardyard.log import Log, absolute_url, is_shared, local_folder, log_exists, open_log
from shardyard.log.sqlite import SqliteLog
from shardyard.model import InvalidValue
from shardyard.model.url import parse_url


def test_a_url_names_a_folder_that_other_processes_can_open_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    relative, absolute = "sqlite:///data/log", f"sqlite:///{tmp_path}/data/log"
    assert (local_folder(relative), local_folder(absolute)) == (Path("data/log"), tmp_path / "data/log")
    assert absolute_url(relative) == absolute_url(absolute) == absolute
    assert is_shared(relative)
    assert not log_exists(relative)
    assert not (tmp_path / "data").exists(), "asking creates nothing"

    async def opened_and_closed() -> None:
        async with open_log(relative):
            pass

    asyncio.run(opened_and_closed())
    assert log_exists(relative)
    assert log_exists(absolute)


def test_a_log_in_memory_has_no_folder_and_belongs_to_its_process() -> None:
    assert local_folder("memory://") is None
    assert absolute_url("memory://") == "memory://"
    assert not is_shared("memory://")
    assert not log_exists("memory://")


@pytest.mark.parametrize("ask", [local_folder, log_exists, is_shared, absolute_url])
def test_a_url_that_names_no_engine_is_refused_without_its_password(ask: object) -> None:
    assert callable(ask)
    with pytest.raises(InvalidValue, match="expected sqlite:///a/path") as refused:
        ask("redis://user:secret@host/0")
    assert "secret" not in str(refused.value)


def test_a_database_on_a_server_is_shared_and_has_no_folder() -> None:
    url = "postgresql://user:secret@host:5432/yard?sslmode=verify-full"
    assert local_folder(url) is None
    assert absolute_url(url) == url
    assert is_shared(url)


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://user:secret@host",
        "postgresql://user:secret@host/",
        "postgresql://user:secret@host:port/yard",
        "postgresql://user:secret@host:5432,other:port/yard",
        "postgresql://user:secret@host/a/b",
        "postgresql://host?password=secret",
        "postgresql://host?Password=secret",
        "postgresql://user:secret/yard",
        "postgresql://user:pass@secret@host/yard",
        "postgresql://user:secret/more@host/yard",
        "postgresql://user:secret@host?sslrootcert=/ca.pem",
        "postgresql://?host=/tmp",
        "postgresql://host?dbname=a/b",
        "postgresql://host#/yard",
        "postgresql://host:99999/yard",
        "postgresql://user:5#secret/yard",
        "postgresql://user:5?secret/yard",
    ],
)
def test_a_postgresql_url_names_a_database(url: str) -> None:
    with pytest.raises(InvalidValue, match="postgresql://") as refused:
        is_shared(url)
    assert "secret" not in "".join(traceback.format_exception(refused.value))


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://127.0.0.1,[::1]/yard?port=1",
        "postgresql://user:secret@127.0.0.1:5432,[::1]:5433/yard",
        "postgresql://user:se?cr#et@host/yard",
        "postgresql:///yard",
        "postgresql://%2Fvar%2Frun/yard?sslrootcert=/ca.pem",
    ],
)
def test_a_postgresql_url_may_name_several_hosts_or_a_socket(url: str) -> None:
    assert parse_url("log", url).dsn == url


def test_a_parsed_url_does_not_print_its_password() -> None:
    for url in (
        "postgresql://user:sec:ret@host/yard",
        "postgresql://host/yard?user=me&password=secret&sslmode=require",
    ):
        parsed = parse_url("log", url)
        assert parsed.dsn == url
        assert "ret" not in f"{parsed} {parsed!r}"
    assert str(parsed) == "postgresql://host/yard?user=me&password=***&sslmode=require"


def test_a_log_that_does_not_maintain_leaves_merging_to_others(tmp_path: Path) -> None:
    async def is_maintained(log: Log) -> bool:
        assert isinstance(log, SqliteLog)
        async with log:
            await log.topics()
            return log._maintenance is not None

    url = f"sqlite:///{tmp_path}/log"
    assert asyncio.run(is_maintained(open_log(url)))
    assert not asyncio.run(is_maintained(open_log(url, maintains=False)))
