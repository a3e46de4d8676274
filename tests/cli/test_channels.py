"""`shardyard channels` and `shardyard fanout`, with a log and a registry in files."""

import asyncio
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shardyard.fanout.modes import ModeState, begin_migration, read_state
from shardyard.log import open_log
from shardyard.registry import open_registry
from shardyard.server.fanout.app import FanoutOptions, running_fanout
from shardyard.wire.channels import EVENTS, decode_event
from tests.cli.invocation import Shell
from tests.fanout.yard import CONFIG, until


class Yard(Shell):
    """Runs commands on the stores of a folder."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        super().__init__(monkeypatch, capsys)
        self.log, self.registry = f"sqlite:///{folder / 'log'}", f"sqlite:///{folder / 'registry.db'}"
        self.options = ("--log", self.log, "--registry", self.registry)

    def create(self) -> None:
        async def opened() -> None:
            async with open_log(self.log) as log:
                await log.topics()

        asyncio.run(opened())
        open_registry(self.registry).close()


@pytest.fixture
def yard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Yard:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SHARDYARD_TOKEN", raising=False)
    return Yard(tmp_path, monkeypatch, capsys)


def test_members_join_and_leave(yard: Yard) -> None:
    yard.create()
    assert yard.json("channels", "join", "general", "alice", "bob", "--log", yard.log) == {
        "channel": "general",
        "changes": 2,
    }
    assert yard("channels", "leave", "general", "bob", "carol", "--log", yard.log) == "channel\tchanges\ngeneral\t2\n"
    found = yard.json("channels", "members", "general", "--log", yard.log)
    assert found == {"channel": "general", "members": ["alice"]}
    assert yard("channels", "members", "general", "--log", yard.log) == "user\nalice\n"
    assert yard("channels", "members", "dev", "--log", yard.log) == ""
    assert "no members of dev" in yard.err


def test_an_event_is_published_once_for_an_id(yard: Yard) -> None:
    yard.create()
    arguments = ("channels", "publish", "general", "hello", "--sender", "alice", "--log", yard.log)
    first = yard.json(*arguments, "--id", "7")
    assert (first["channel"], first["id"], first["duplicate"]) == ("general", "7", False)
    assert yard.json(*arguments, "--id", "7")["duplicate"] is True
    assert "general" in yard(*arguments)

    async def stored() -> list[str]:
        async with open_log(yard.log) as log:
            batches = [await log.read(partition, 0) for partition in await log.topic(EVENTS)]
            return [decode_event(record.value).text for batch in batches for record in batch.records()]

    assert asyncio.run(stored()) == ["hello", "hello"]


def test_memberships_are_loaded_from_files(yard: Yard, tmp_path: Path) -> None:
    yard.create()
    pq.write_table(pa.table({"channel": ["general", "dev"], "user": ["alice", "bob"]}), tmp_path / "m.parquet")
    counts = {"rows": 2, "joins": 2, "leaves": 0, "malformed": 0}
    assert yard.json("channels", "load", "m.parquet", "--log", yard.log) == counts
    (tmp_path / "m.csv").write_text("channel,user,action\ngeneral,alice,leave\ngeneral,,join\n")
    code, out = yard.run("channels", "load", "m.csv", "--log", yard.log)
    assert (code, out) == (2, "")
    assert "row 2 of m.csv is malformed: user is ''" in yard.err
    assert yard.json("channels", "members", "general", "--log", yard.log)["members"] == ["alice"]
    out = yard("channels", "load", "m.csv", "--skip-malformed", "--log", yard.log)
    assert out == "rows\tjoins\tleaves\tmalformed\n2\t0\t1\t1\n"
    assert yard.json("channels", "members", "general", "--log", yard.log)["members"] == []


def test_a_file_of_another_kind_is_refused_in_one_printable_line(yard: Yard, tmp_path: Path) -> None:
    yard.create()
    (tmp_path / "junk.bin").write_bytes(bytes(range(128, 256)) * 20 + b"\n\x1b[2J,\xff\n")
    assert yard.run("channels", "load", "junk.bin", "--log", yard.log) == (2, "")
    assert yard.err == ("error: file is 'junk.bin': expected a Parquet file, or a CSV file whose text is in UTF-8\n")
    (tmp_path / "header.csv").write_bytes(b"\x1b[2Jchannel,user\n")
    assert yard.run("channels", "load", "header.csv", "--log", yard.log) == (2, "")
    assert "\x1b" not in yard.err


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("channels", "join", "", "alice"), 2, "channel at index 0 is ''"),
        (("channels", "join", "general", "x" * 129), 2, "a name of 1 to 128 characters"),
        (("channels", "join", "general"), 2, "Missing argument"),
        (("channels", "publish", "general", "hello"), 2, "Missing option '--sender'"),
        (("channels", "publish", "general", "hello", "--sender", "a", "--id", "-1"), 2, "id is -1"),
        (("channels", "publish", "general", "hello", "--sender", "a", "--id", "x"), 2, "expected an integer"),
        (("channels", "load", "missing.csv"), 2, "a file that can be read"),
        (("channels", "members", "general", "--log", "memory://"), 2, "storage that other processes use"),
        (("channels", "members", "general", "--log", "sqlite:///elsewhere"), 1, "there is no log at"),
    ],
)
def test_wrong_calls_of_channels_say_what_was_expected(
    yard: Yard, arguments: tuple[str, ...], code: int, message: str
) -> None:
    yard.create()
    log = () if "--log" in arguments else ("--log", yard.log)
    assert yard.run(*arguments, *log) == (code, "")
    assert message in " ".join(yard.err.split())


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("fanout", "migrate"), 2, "Missing option '--to'"),
        (("fanout", "migrate", "--to", "sharded"), 2, "expected partitioned or replicated"),
        (("fanout", "migrate", "--to", "replicated", "--wait", "0"), 2, "more than 0 seconds"),
        (("fanout", "migrate", "--to", "replicated"), 1, "no fan-out worker is running"),
        (("fanout", "advise"), 1, "no fan-out worker is running"),
        (("fanout", "advise", "--max-online", "0"), 2, "at least 1"),
        (("fanout", "advise", "--max-gigabytes", "0"), 2, "more than 0"),
        (("coordinator", "--port", "70000"), 2, "0 to 65535"),
        (("coordinator", "--host", "0.0.0.0", "--port", "0"), 2, "--address with it"),
        (("messenger", "--host", "0.0.0.0", "--port", "0"), 2, "--address with it"),
        (("fanout-worker", "--processes", "0"), 2, "at least 1"),
        (("fanout-worker", "--assignor", "random"), 2, "sticky or contiguous"),
        (("fanout-worker", "--address", "ws://here", "--port", "0"), 2, "a URL such as"),
    ],
)
def test_wrong_calls_of_fanout_say_what_was_expected(
    yard: Yard, arguments: tuple[str, ...], code: int, message: str
) -> None:
    yard.create()
    assert yard.run(*arguments, *yard.options) == (code, "")
    assert message in " ".join(yard.err.split())


def test_commands_create_no_stores(yard: Yard, tmp_path: Path) -> None:
    for command in (("status",), ("advise",), ("migrate", "--to", "replicated")):
        assert yard.run("fanout", *command, *yard.options) == (1, "")
        assert "there is no log at" in yard.err
    assert list(tmp_path.iterdir()) == []
    for option in ("--log", "--registry"):
        assert yard.run("coordinator", option, "memory://") == (2, "")


def test_status_without_anything_says_so(yard: Yard) -> None:
    yard.create()
    status = yard.json("fanout", "status", *yard.options)
    assert (status["mode"], status["phase"], status["processes"]) == ("partitioned", "running", [])
    out = yard("fanout", "status", *yard.options)
    assert out.startswith("# mode\nmode\tphase\tto\tversion\npartitioned\trunning\t-\t0\n")
    assert "no coordinator is running" in yard.err
    assert "no worker is running" in yard.err


def test_a_migration_by_force_ends_at_once_if_nothing_runs(yard: Yard) -> None:
    yard.create()
    done = yard.json("fanout", "migrate", "--to", "replicated", "--force", *yard.options)
    assert done == {"mode": "replicated", "version": 4, "changed": True}
    assert yard("fanout", "migrate", "--to", "replicated", *yard.options) == ""
    assert "the mode is replicated already" in yard.err
    with open_registry(yard.registry) as registry:
        registry.run(lambda tx: begin_migration(tx, "partitioned", "a command that was killed"))
    assert yard.json("fanout", "status", *yard.options)["to"] == "partitioned"
    assert yard.json("fanout", "migrate", "--to", "partitioned", *yard.options)["mode"] == "partitioned"
    with open_registry(yard.registry) as registry:
        assert registry.read(read_state) == ModeState("partitioned", version=7)


def test_commands_with_processes_that_run(yard: Yard) -> None:
    """The commands run in threads of their own, beside a coordinator and a worker in this process."""

    async def scenario() -> None:
        options = FanoutOptions(config=CONFIG)
        with open_registry(yard.registry) as registry:
            async with (
                open_log(yard.log) as log,
                running_fanout(log, registry, "coordinator", options),
                running_fanout(log, registry, "worker", options) as worker,
            ):
                await shell(yard, "channels", "join", "general", "alice", "bob", "--log", yard.log)

                async def is_loaded() -> bool:
                    found = json.loads(await shell(yard, "fanout", "advise", "--json", *yard.options))
                    return bool(found["memberships"] == 2)

                await until(is_loaded, "the routing table")
                advice = json.loads(await shell(yard, "fanout", "advise", "--json", *yard.options))
                assert (advice["mode"], advice["advised"], advice["workers"]) == ("partitioned", "replicated", 1)
                assert advice["replicated_bytes"] >= advice["partitioned_bytes"] > 0
                out = await shell(yard, "fanout", "advise", *yard.options)
                assert "every worker can hold all of it" in out
                assert "shardyard fanout migrate --to replicated" in yard.err
                out = await shell(yard, "fanout", "migrate", "--to", "replicated", "--json", *yard.options)
                assert json.loads(out)["mode"] == "replicated"
                assert all(": waiting for " in line for line in yard.err.splitlines())  # none for what takes no time
                status = json.loads(await shell(yard, "fanout", "status", "--json", *yard.options))
                assert {each["role"] for each in status["processes"]} == {"coordinator", "worker"}
                assert worker in {each["address"] for each in status["processes"]}
                assert status["topics"][0]["waiting"] == 0
                fanout = status["topics"][1]
                assert (fanout["topic"], fanout["in_use"], fanout["unowned"]) == ("fanout", False, 0)

    asyncio.run(scenario())


async def shell(yard: Yard, *arguments: str) -> str:
    """Run a command while this event loop goes on."""
    return await asyncio.to_thread(yard, *arguments)


@pytest.mark.parametrize(
    "command",
    ["coordinator", "fanout-worker", "fanout status", "fanout advise", "fanout migrate"]
    + [f"channels {name}" for name in ("join", "leave", "members", "publish", "load")],
)
def test_help_has_examples(yard: Yard, command: str) -> None:
    assert f"  shardyard {command}" in yard(*command.split(), "--help")
