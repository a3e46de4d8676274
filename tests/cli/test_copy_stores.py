"""`shardyard copy`, as a user runs it."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from shardyard.groups import Node
from shardyard.log import open_log
from shardyard.model import Partition, Record
from shardyard.registry import open_registry
from shardyard.sharding.administration import Administration
from shardyard.sharding.rows import read_topology
from tests.cli.invocation import invoke


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of a log with a topic, beside a registry with a setting."""
    monkeypatch.chdir(tmp_path)

    async def fill() -> None:
        async with open_log("sqlite:///data/log") as log:
            await log.create_topic("orders", 2)
            await log.append(Partition("orders", 0), [Record.new(b"a"), Record.new(b"b")])

    asyncio.run(fill())
    with open_registry("sqlite:///data/registry.db") as registry:
        registry.run(lambda tx: tx.put_setting("topic/orders", "owner", "ann"))
    return "sqlite:///data/log"


def test_a_copy_reports_what_it_did_and_a_second_one_continues(
    source: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert invoke(monkeypatch, "copy", "--from", source, "--to", "sqlite:///new/log", "--json") == 0
    assert json.loads(capsys.readouterr().out) == {
        "topics": [{"topic": "orders", "partitions": 2, "copied": 2, "records": 2, "remaining": 0}],
        "registry": {"groups": 0, "positions": 0, "settings": 1},
        "verified": True,
    }
    assert Path("new/registry.db").is_file(), "the registry is beside the log"
    assert invoke(monkeypatch, "copy", "--from", source, "--to", "sqlite:///new/log") == 0
    printed = capsys.readouterr()
    assert printed.out == "topic\tpartitions\tcopied\trecords\tremaining\norders\t2\t0\t2\t0\n"
    assert printed.err == "copied 0 groups, 0 positions, 1 settings; every record was compared\n"


def test_sharded_queues_are_not_copied_as_their_acknowledgements_name_offsets(
    source: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def administrate(change: Callable[[Administration], Awaitable[object]]) -> None:
        with open_registry("sqlite:///data/registry.db") as registry:
            async with open_log(source) as log, Node(log, registry) as node:
                await change(Administration(node))

    asyncio.run(administrate(lambda administration: administration.declare_queue("mail", "test")))
    before = sorted(Path().rglob("*"))
    assert invoke(monkeypatch, "copy", "--from", source, "--to", "sqlite:///new/log") == 1
    assert "such as 'mail', which can't be copied" in " ".join(capsys.readouterr().err.split())
    assert sorted(Path().rglob("*")) == before

    asyncio.run(administrate(lambda administration: administration.delete_queue("mail", "test")))
    assert invoke(monkeypatch, "copy", "--from", source, "--to", "sqlite:///new/log", "--json") == 0
    assert [topic["topic"] for topic in json.loads(capsys.readouterr().out)["topics"]] == ["orders"]
    with open_registry("sqlite:///new/registry.db") as registry:
        assert not registry.read(read_topology).free_slots


@pytest.mark.parametrize(
    ("origin", "destination", "message"),
    [
        ("sqlite:///nothing/log", "sqlite:///new/log", "--from is 'sqlite:///nothing/log': expected a log that exists"),
        ("sqlite:///data/log", "sqlite:///data/log", "expected another log than --from"),
        ("sqlite:///data/log", "memory://", "expected storage that outlives the command"),
        ("sqlite:///data/log", "redis://u:secret@host/0", "log URL is 'redis://***@host/0'"),
    ],
)
def test_what_cannot_be_copied_is_refused_and_nothing_is_created(
    origin: str,
    destination: str,
    message: str,
    source: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert source
    before = sorted(Path().rglob("*"))
    assert invoke(monkeypatch, "copy", "--from", origin, "--to", destination) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert sorted(Path().rglob("*")) == before
