"""The commands for queues, as a user runs them, with one real broker."""

import asyncio
import contextlib
import http.server
import io
import json
import logging
import os
import pty
import re
import signal
import subprocess
import sys
import threading
import time
import tty
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from shardyard.cli.logs import logs_on_stderr
from shardyard.cli.queues.consume import print_warnings
from shardyard.cli.queues.session import request
from shardyard.client import Consumer, Message
from shardyard.model import Unreachable
from shardyard.queues.delays.scheduler import GROUP as DELAYS_GROUP
from shardyard.registry import open_registry
from shardyard.wire.settings import GroupSettings
from tests.cli.invocation import Shell
from tests.queues.brokers import BrokerProcess

pytestmark = pytest.mark.xdist_group("cli broker")  # it takes long to start
NO_BROKER = "http://127.0.0.1:1"
SHARDYARD = str(Path(sys.executable).with_name("shardyard"))
_numbers = count()


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a running broker."""
    with BrokerProcess(tmp_path_factory.mktemp("broker")) as process:
        process.listens()
        yield process.url


@pytest.fixture
def shell(broker: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    monkeypatch.setenv("SHARDYARD_BROKER", f"{NO_BROKER},{broker}")  # one reachable broker is enough
    monkeypatch.delenv("SHARDYARD_TOKEN", raising=False)
    return Shell(monkeypatch, capsys)


@pytest.fixture
def topic(shell: Shell) -> str:
    """The name of a new topic with 3 partitions."""
    name = f"orders-{next(_numbers)}"
    shell("topics", "create", name, "--partitions", "3")
    return name


@pytest.fixture
def group() -> str:
    return f"billing-{next(_numbers)}"


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def partition_rows(shell: Shell, group: str, topic: str) -> dict[int, dict[str, Any]]:
    """A group's partitions of a topic, by index."""
    partitions = shell.json("groups", "show", group)["partitions"]
    return {row["partition"]: row for row in partitions if row["topic"] == topic}


# Topics


def test_a_topic_is_created_listed_shown_resized_configured_and_deleted(shell: Shell) -> None:
    created = shell.json("topics", "create", "parcels", "-p", "2", "--partitioner", "jump", "--retention-ms", "60000")
    assert (created["partitions"], created["partitioner"], created["retention_ms"]) == (2, "jump", 60000)
    assert "parcels\t2\t2\tnormal\tjump\txxh64\n" in shell("topics", "list")
    assert shell.json("topics", "expand", "parcels", "-p", "5")["partitions"] == 5
    shell("publish", "parcels", "late", "--partition", "4")
    contracted = shell.json("topics", "contract", "parcels", "-p", "3")
    assert (contracted["partitions"], contracted["receiving"]) == (5, 3)
    shell("topics", "set", "parcels", "retention_ms=none", "records_per_second=900")
    shown = shell.json("topics", "show", "parcels")
    assert (shown["retention_ms"], shown["records_per_second"], shown["receiving"]) == (None, 900, 3)
    shell("topics", "delete", "parcels")
    assert "parcels" not in [found["name"] for found in shell.json("topics", "list")]


def test_internal_topics_and_groups_are_listed_with_all_only(shell: Shell, topic: str) -> None:
    shell("publish", topic, "later", "--delay", "3700")
    internal = {found["name"] for found in shell.json("topics", "list", "--all")}
    internal -= {found["name"] for found in shell.json("topics", "list")}
    assert "shardyard.delay.1h" in internal
    assert all(name.startswith("shardyard.") or name.endswith((".retry", ".dead")) for name in internal)
    assert not any(
        name.endswith((".retry", ".dead")) for name in {found["name"] for found in shell.json("topics", "list")}
    )
    assert "shardyard.delays" not in shell("groups", "list")
    deadline = time.monotonic() + 30
    while "shardyard.delays" not in shell("groups", "list", "--all"):  # the broker starts it in the background
        assert time.monotonic() < deadline
    assert shell.err == ""  # the number of hidden ones is printed on a terminal only


@pytest.mark.processes
def test_a_terminal_shows_how_many_topics_are_hidden(shell: Shell, topic: str, group: str) -> None:
    shell("consume", group, topic, "--seconds", "0.5")
    shown = terminal("topics", "list")
    assert topic in shown
    assert f"{group}.{topic}.retry" not in shown
    assert " internal topics not shown; --all shows them" in shown
    assert "not shown" not in terminal("topics", "list", "--all")


def test_contract_says_which_groups_a_draining_partition_waits_for(shell: Shell, topic: str, group: str) -> None:
    shell("publish", topic, "a", "b", "--partition", "2")
    shell("publish", topic, "c", "--partition", "1")
    shell("consume", group, topic, "--seconds", "1", "--count", "1")
    shell("groups", "reset", group, topic, "--to", "earliest")
    shell("topics", "contract", topic, "-p", "1")
    assert shell.err.splitlines() == [
        f"{topic}/1 will be deleted once {group} has read 1 more record",
        f"{topic}/2 will be deleted once {group} has read 2 more records",
    ]
    assert f"# draining\npartition\tdeleted\n{topic}/1\tonce {group} has read 1 more record\n" in shell(
        "topics", "show", topic
    )


@pytest.mark.processes
def test_a_subscribed_topic_is_deleted_only_with_force(shell: Shell, topic: str, group: str) -> None:
    with ConsumeProcess(group, topic):
        wait_until(lambda: any(found["group"] == group and found["members"] for found in shell.json("groups", "list")))
        assert shell.run("topics", "delete", topic) == (1, "")
        assert f"topic '{topic}' is subscribed to by {group}: stop their members, or use --force" in shell.err
        shell("topics", "delete", topic, "--force")


def test_publishers_must_send_the_token_of_a_topic(shell: Shell, topic: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert shell.json("topics", "set", topic, "token=-", stdin=b"open-sesame\n")["token"] is True
    assert shell.run("publish", topic, "a") == (1, "")
    assert f"topic '{topic}' requires a token" in shell.err
    monkeypatch.setenv("SHARDYARD_TOKEN", "open-sesame")
    assert shell.json("publish", topic, "a")["records"] == 1
    assert "open-sesame" not in shell("audit-log")


# Publishing and consuming


def test_values_are_published_and_printed_records_are_committed(shell: Shell, topic: str, group: str) -> None:
    published = shell.json("publish", topic, "a", "b\tc", "d", "--key", "k")
    (row,) = published["stored"]
    assert (published["records"], published["delayed"]) == (3, 0)
    assert (row["records"], row["first"]) == (3, 0)
    partition = f"{topic}/{row['partition']}"
    assert shell("consume", group, topic, "--count", "2") == f"{partition}\t0\tk\ta\n{partition}\t1\tk\tb\\tc\n"
    shown = partition_rows(shell, group, topic)[row["partition"]]
    assert (shown["committed"], shown["end"], shown["lag"], shown["owner"]) == (2, 3, 1, None)
    (last,) = shell.lines("consume", group, topic, "--count", "1")
    assert (last["value"], last["offset"], last["partition"]) == ("d", 2, partition)


def test_lines_of_standard_input_are_published_in_order(shell: Shell, topic: str, group: str) -> None:
    values = [b"%d" % n for n in range(1200)] + [b"", b"\xff no text"]  # an empty line is not a record
    published = shell.json("publish", topic, "--partition", "1", stdin=b"\n".join(values))
    assert published["stored"] == [{"partition": 1, "records": 1201, "first": 0}]
    printed = shell.lines("consume", group, topic, "--count", "1201")
    assert shell.err == "1201 printed\n"
    assert [row.get("value") for row in printed] == [*map(str, range(1200)), None]
    assert printed[-1]["value_base64"] == "/yBubyB0ZXh0"


def test_what_is_consumed_as_json_can_be_published_again(shell: Shell, topic: str, group: str) -> None:
    headers = ("--tag", "eu", "--trace", "t-1", "--header", "source=cli", "--header", "empty=")
    shell("publish", topic, "a", "--key", "k", *headers)
    printed = shell("consume", group, topic, "--count", "1", "--json")
    copied = shell.json("publish", topic, "--json-lines", stdin=printed.encode() + b"\n")
    assert copied["records"] == 1
    first, second = (shell.lines("consume", group, topic, "--count", "1")[0], json.loads(printed))
    assert (first.pop("offset"), second.pop("offset")) == (1, 0)
    assert first == second
    assert (first["tag"], first["trace"], first["headers"]) == ("eu", "t-1", {"source": "cli", "empty": ""})


def test_delayed_records_are_delivered_later_and_do_not_block_others(shell: Shell, topic: str, group: str) -> None:
    line = b'{"value": "by line", "delay": 1.5}\n{"value": "at once"}\n'
    published = shell.json("publish", topic, "--json-lines", stdin=line)
    assert (published["records"], published["delayed"]) == (2, 1)
    assert sum(row["records"] for row in published["stored"]) == 1
    pinned = shell.json("publish", topic, "pinned", "--delay", "2", "--partition", "2")
    assert (pinned["delayed"], pinned["stored"]) == (1, [])
    printed = shell.lines("consume", group, topic, "--count", "3")
    assert [row["value"] for row in printed] == ["at once", "by line", "pinned"]
    assert printed[2]["partition"] == f"{topic}/2"


def test_publish_prints_when_delayed_records_will_be_delivered(shell: Shell, topic: str) -> None:
    at = datetime.fromtimestamp(time.time() + 3600, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    assert shell("publish", topic, "a", "--id", "new-year", "--deliver-at", at) == ""
    assert shell.err == f"record new-year will be delivered at {at}\n"
    before = time.time() * 1000
    published = shell.json("publish", topic, "a", "b", "--delay", "60")
    assert len({later["id"] for later in published["later"]}) == published["delayed"] == 2
    assert all(before + 60_000 <= later["deliver_at"] < before + 90_000 for later in published["later"])
    line = b'{"value": "late", "id": "late", "delay": 60}\n{"value": "due", "deliver_at": 1000}\n'
    published = shell.json("publish", topic, "--json-lines", stdin=line)
    assert ([later["id"] for later in published["later"]], published["delayed"]) == (["late"], 1)
    shell("publish", topic, *map(str, range(12)), "--delay", "60")
    assert len(shell.err.splitlines()) == 11
    assert shell.err.endswith("\n2 more records will be delivered later\n")


def test_a_record_whose_delivery_time_has_passed_is_delivered_at_once(shell: Shell, topic: str) -> None:
    published = shell.json("publish", topic, "a", "--deliver-at", "2020-01-01", "--id", "x")
    assert (published["delayed"], published["later"], len(published["stored"])) == (0, [], 1)
    assert shell.json("search", topic, "--id", "x")[0]["value"] == "a"


def test_consume_stops_after_the_given_seconds(shell: Shell, topic: str, group: str) -> None:
    started = time.monotonic()
    assert shell("consume", group, topic, "--seconds", "0.5") == ""
    assert 0.5 <= time.monotonic() - started < 10


def test_a_new_group_can_skip_the_records_that_are_already_stored(shell: Shell, topic: str, group: str) -> None:
    shell("publish", topic, "early", "--partition", "0")
    shell("consume", group, topic, "--latest", "--seconds", "1")
    shell("publish", topic, "late", "--partition", "0")
    assert [row["value"] for row in shell.lines("consume", group, topic, "--count", "1", "--latest")] == ["late"]


def terminal(*arguments: str) -> str:
    """What a command prints on a terminal of 80 columns."""
    master, slave = pty.openpty()
    tty.setraw(slave)
    environment = {**os.environ, "COLUMNS": "80", "TERM": "dumb"}
    with subprocess.Popen([SHARDYARD, *arguments], stdout=slave, stderr=slave, env=environment) as process:
        os.close(slave)
        output = b""
        with contextlib.suppress(OSError):  # raised at the end of a terminal's output
            while chunk := os.read(master, 65536):
                output += chunk
        os.close(master)
    assert process.returncode == 0, output
    return output.decode()


@pytest.mark.processes
def test_control_characters_are_escaped_on_a_terminal_and_only_there(shell: Shell, topic: str, group: str) -> None:
    value = "\x1b[31mred\x07 \x9b1mé\x7f\r\u202e\U000e0041👨\u200d👩"
    shell("publish", topic, "--key", "k\x1b]0;title\x07", stdin=value.encode() + b"\n\xff\xfe\n")
    escaped = "k\\x1b]0;title\\x07\t\\x1b[31mred\\x07 \\x9b1mé\\x7f\\x0d\\u202e\\U000e0041👨\u200d👩"
    printed = terminal("consume", group, topic, "--count", "2")
    assert {line.split("\t", 2)[2] for line in printed.splitlines() if "\t" in line} == {
        escaped,
        "k\\x1b]0;title\\x07\t\\xff\\xfe",
    }
    shell("groups", "reset", group, topic, "--to", "earliest")
    lines = [
        line for line in terminal("consume", group, topic, "--count", "2", "--json").splitlines() if line[0] == "{"
    ]
    assert not any(character in "".join(lines) for character in "\x1b\x9b\u202e\U000e0041")
    assert value in {json.loads(line).get("value") for line in lines}
    for options in ([], ["--json"]):
        found = terminal("search", topic, "--key", "k\x1b]0;title\x07", *options)
        assert not any(character in found for character in "\x1b\x9b\u202e\U000e0041")
    assert value in {row.get("value") for row in json.loads(found)}
    command = [SHARDYARD, "consume", f"{group}-2", topic, "--count", "2"]
    piped = subprocess.run(command, capture_output=True, check=True).stdout
    assert value.encode() in piped
    assert b"\xff\xfe" in piped


def test_the_log_on_a_terminal_escapes_what_errors_quote(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stderr", printed := Terminal())
    monkeypatch.setenv("TERM", "dumb")
    with logs_on_stderr():
        logging.getLogger("shardyard.test").warning("it failed: %s\nnext line", "\x1b[31mred\x07")
    assert "\\x1b[31mred\\x07" in printed.getvalue()
    assert not any(character in printed.getvalue() for character in "\x1b\x07")
    assert "next line" in printed.getvalue()


class ConsumeProcess:
    """`shardyard consume` in a process of its own."""

    def __init__(self, *arguments: str) -> None:
        command = [SHARDYARD, "consume", *arguments]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def __enter__(self) -> "subprocess.Popen[bytes]":
        return self.process

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()


def member_count(shell: Shell, group: str) -> int:
    return sum(found["members"] for found in shell.json("groups", "list") if found["group"] == group)


@pytest.mark.processes
def test_an_interrupted_consumer_leaves_the_group(shell: Shell, topic: str, group: str) -> None:
    shell("publish", topic, "a")
    with ConsumeProcess(group, topic) as process:
        assert process.stdout is not None
        assert process.stdout.readline().endswith(b"\ta\n")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=20)
    assert (process.returncode, out, err) == (0, b"", b"1 printed\n")
    assert member_count(shell, group) == 0
    rows = partition_rows(shell, group, topic).values()
    assert sum(row["committed"] or 0 for row in rows) == 1
    assert {row["stuck_for"] for row in rows} == {0.0}, "there is nothing to do"


@pytest.mark.processes
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("options", [[], ["--exec", "cat"]])
def test_a_consumer_that_is_interrupted_before_it_is_done_says_so_by_its_exit_code(
    shell: Shell, topic: str, group: str, options: list[str], number: signal.Signals
) -> None:
    shell("publish", topic, "a")
    with ConsumeProcess(group, topic, "--count", "5", *options) as process:
        assert process.stdout is not None
        assert process.stdout.read(1)
        process.send_signal(number)
        process.communicate(timeout=20)
    assert process.returncode == 128 + number


def test_a_consumer_that_never_joined_says_so(shell: Shell, topic: str, group: str) -> None:
    shell("groups", "set", group, "deny=*")
    assert shell.run("consume", group, topic, "--seconds", "0.2") == (1, "")
    assert shell.err.splitlines()[-1] == f"stopped before it had joined group '{group}'"


def test_with_a_single_broker_the_missing_failover_is_explained_once(capsys: pytest.CaptureFixture[str]) -> None:
    unreachable = Unreachable([NO_BROKER], 4.0, "connection refused")
    logger = logging.getLogger("shardyard.groups")
    for single_broker in (True, False):
        with print_warnings(single_broker=single_broker):
            for _ in range(2):
                logger.warning("heartbeat of %s will be retried: %s", "m1", unreachable)
        lines = capsys.readouterr().err.splitlines()
        assert lines.count(f"heartbeat of m1 will be retried: {unreachable}") == 2
        assert sum("--broker may be repeated" in line for line in lines) == (1 if single_broker else 0)


@pytest.mark.processes
def test_consume_ends_quietly_when_its_output_is_closed(shell: Shell, topic: str, group: str) -> None:
    shell("publish", topic, "a")
    with ConsumeProcess(group, topic) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.close()
        shell("publish", topic, "b")
        assert process.wait(20) == 0
        assert process.stderr is not None
        assert process.stderr.read() == b""
    assert member_count(shell, group) == 0
    assert sum(row["lag"] for row in partition_rows(shell, group, topic).values()) == 1


# Commands that handle records, and records that fail


def test_exec_runs_the_command_for_each_record(shell: Shell, topic: str, group: str, tmp_path: Path) -> None:
    shell("publish", topic, "a", "b", "--key", "k")
    command = f"cat > {tmp_path}/$SHARDYARD_KEY-$SHARDYARD_OFFSET-$SHARDYARD_ATTEMPT"
    shell("consume", group, topic, "--count", "2", "--exec", command)
    assert shell.err == "2 done, 0 failed\n"
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"k-0-1": "a", "k-1-1": "b"}
    assert sum(row["lag"] for row in partition_rows(shell, group, topic).values()) == 0


def test_a_command_need_not_read_its_standard_input(shell: Shell, topic: str, group: str) -> None:
    shell("publish", topic, "x" * 100_000)  # more than a pipe holds
    shell("consume", group, topic, "--count", "1", "--exec", "exit 0", "--concurrency", "1")
    assert shell.err == "1 done, 0 failed\n"


def test_a_record_on_which_the_command_fails_is_retried_then_dead_then_redriven(
    shell: Shell, topic: str, group: str
) -> None:
    shell("groups", "set", group, "backoff=0.2")
    shell("publish", topic, "bad", "--key", "k")
    failing = ("consume", group, topic, "--exec", "printf 'no such \\033[32mcustomer' >&2; exit 3")
    shell(*failing, "--count", "2")
    assert shell.err.endswith("\n0 done, 2 failed\n")
    assert f"{topic}/" in shell.err
    assert shell.err.count(": exit code 3: no such \\x1b[32mcustomer\n") == 2
    assert "traceback" not in shell.err

    (letter,) = shell.json("dead", "list", group, topic)
    assert (letter["attempts"], letter["record"]["value"]) == (2, "bad")
    assert letter["reason"].endswith("exit code 3: no such \x1b[32mcustomer")
    record_id = letter["record"]["id"]
    assert shell.json("dead", "show", group, topic, record_id) == letter
    assert f"\nid\t{record_id}\n" in shell("dead", "show", group, topic, record_id)
    assert record_id in terminal("dead", "list", group, topic)
    row = dict(zip(*(line.split("\t") for line in shell("dead", "list", group, topic).splitlines()), strict=True))
    assert (row["id"], row["key"], row["value"], row["attempts"]) == (record_id, "k", "bad", "2")
    assert row["published"] < row["died"]
    assert row["published"].endswith("Z")

    assert shell.run("dead", "redrive", group, topic, "another") == (2, "")
    assert "expected ids of existing dead letters" in shell.err
    assert shell.json("dead", "redrive", group, topic, record_id) == {"redriven": 1}
    assert [row["value"] for row in shell.lines("consume", group, topic, "--count", "1")] == ["bad"]
    assert shell.json("dead", "list", group, topic) == []
    assert shell("dead", "list", group, topic) == ""
    assert shell.err == "no dead letters\n"
    assert shell.json("dead", "redrive", group, topic, "--all") == {"redriven": 0}


@pytest.mark.processes
def test_the_traceback_of_a_dead_letter_is_printed_line_by_line(
    shell: Shell, broker: str, topic: str, group: str
) -> None:
    shell("groups", "set", group, "backoff=none")
    shell("publish", topic, "bad")

    def fail(_: Message) -> None:
        raise ValueError("no such \x1b customer")

    async def consume_until_dead() -> Any:
        async with Consumer(broker, group, [topic]) as consumer:
            work = asyncio.create_task(consumer.run(fail))
            while not (letters := await asyncio.to_thread(shell.json, "dead", "list", group, topic)):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            work.cancel()
            await asyncio.wait([work])
        return letters

    (letter,) = asyncio.run(consume_until_dead())
    shown = shell("dead", "show", group, topic, letter["id"])
    table, _, lines = shown.partition("\n\n")
    assert "traceback" not in table
    assert lines == letter["traceback"]
    assert lines.startswith("Traceback (most recent call last):\n  File ")
    assert lines.endswith("\nValueError: no such \x1b customer\n")
    on_terminal = terminal("dead", "show", group, topic, letter["id"])
    assert on_terminal.endswith("\nValueError: no such \\x1b customer\n")


@pytest.mark.processes
def test_an_interrupted_command_does_not_count_as_failed(shell: Shell, topic: str, group: str, tmp_path: Path) -> None:
    shell("publish", topic, "a")
    with ConsumeProcess(group, topic, "--exec", f"touch {tmp_path}/started; sleep 60") as process:
        wait_until((tmp_path / "started").exists)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=20)
    assert (process.returncode, err) == (0, b"0 done, 0 failed\n")
    assert [row["value"] for row in shell.lines("consume", group, topic, "--count", "1")] == ["a"]


# Topics


def test_a_topic_with_a_token_is_changed_only_by_those_who_know_it(
    shell: Shell, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shell("topics", "set", topic, "token=open-sesame")
    changes = ("token=none", "token=", "token=another-one", "token=open-sesame", "records_per_second=500")
    for call in (*(("set", topic, change) for change in changes), ("delete", topic)):
        assert shell.run("topics", *call) == (1, "")
        assert shell.err == (
            f"error: changing or deleting topic '{topic}' requires its current token, or that of the broker, and the "
            "call has none or another one: set SHARDYARD_TOKEN\n"
        )
    monkeypatch.setenv("SHARDYARD_TOKEN", "open-sesame")
    assert shell.json("topics", "set", topic, "token=another-one")["token"] is True
    assert shell.run("topics", "set", topic, "token=none")[0] == 1
    monkeypatch.setenv("SHARDYARD_TOKEN", "another-one")
    assert shell.json("topics", "set", topic, "token=none")["token"] is False


def test_retries_and_dead_letters_of_a_topic_with_a_token_are_redriven_and_deleted_only_by_those_who_know_it(
    shell: Shell, topic: str, group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    retry, dead = f"{group}.{topic}.retry", f"{group}.{topic}.dead"
    shell("groups", "set", group, "backoff=none")
    shell("publish", topic, "bad")
    shell("consume", group, topic, "--exec", "exit 3", "--count", "1")
    wait_until(lambda: shell.json("dead", "list", group, topic))
    shell("topics", "set", topic, "token=open-sesame")
    for call, refused in (
        (("groups", "delete", group), retry),
        (("groups", "delete", group, "--force"), dead),
        (("dead", "redrive", group, topic, "--all"), dead),
    ):
        assert shell.run(*call) == (1, "")
        assert shell.err == (
            f"error: changing or deleting topic '{refused}' requires its current token, or that of the broker, and the "
            "call has none or another one: set SHARDYARD_TOKEN\n"
        )
    assert len(shell.json("dead", "list", group, topic)) == 1
    assert group in [found["group"] for found in shell.json("groups", "list")]
    assert {retry, dead} <= {found["name"] for found in shell.json("topics", "list", "--all")}
    monkeypatch.setenv("SHARDYARD_TOKEN", "open-sesame")
    assert shell.json("dead", "redrive", group, topic, "--all") == {"redriven": 1}
    assert sorted(shell.json("groups", "delete", group, "--force")["also_deleted"]) == [dead, retry]


@pytest.mark.parametrize("name", ["events", "fanout", "inbox", "members", "presence"])
def test_names_of_the_topics_of_messaging_and_channels_are_refused(shell: Shell, name: str) -> None:
    assert shell.run("topics", "create", name) == (2, "")
    assert shell.err == (
        f"error: topic name is '{name}': expected another name: events, fanout, inbox, members, presence are the "
        "topics of messaging and channels\n"
    )


@pytest.mark.parametrize("name", ["shardyard.mine", "orders.dead", "billing.orders.retry"])
def test_names_of_internal_topics_are_refused(shell: Shell, name: str) -> None:
    assert shell.run("topics", "create", name) == (2, "")
    assert shell.err == (
        f"error: topic name is '{name}': expected a name that neither begins with 'shardyard.' nor ends with '.retry' "
        "or '.dead': those are reserved for Shardyard's own topics\n"
    )


@pytest.mark.parametrize("name", [".", "..", "..."])
def test_names_of_dots_only_are_refused(shell: Shell, name: str) -> None:
    assert shell.run("topics", "create", name) == (2, "")
    assert shell.err == f"error: topic name is '{name}': expected not only dots, which have a meaning in paths\n"


def test_deletions_are_reported_as_json(shell: Shell, topic: str, group: str) -> None:
    shell("publish", topic, "a")
    shell("consume", group, topic, "--count", "1")
    deleted = shell.json("groups", "delete", group)
    assert (deleted["group"], deleted["also_deleted"], deleted["kept"]) == (group, [f"{group}.{topic}.retry"], [])
    assert shell.json("topics", "delete", topic) == {"topic": topic, "also_deleted": [], "kept": []}


def test_a_time_without_a_zone_is_local_and_that_is_said(
    shell: Shell, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TZ", "Etc/GMT-3")
    time.tzset()
    try:
        local = datetime.fromtimestamp(time.time() + 3600).isoformat(timespec="seconds")  # noqa: DTZ006 as a user types it
        published = shell.json("publish", topic, "a", "--deliver-at", local)
        assert shell.err == f"--deliver-at has no zone, and is taken as local time: {local}+03:00\n"
        assert published["later"][0]["deliver_at"] == datetime.fromisoformat(f"{local}+03:00").timestamp() * 1000
        shell("publish", topic, "a", "--deliver-at", f"{local}+03:00", "--json")
        assert shell.err == ""
    finally:
        monkeypatch.undo()
        time.tzset()


# Groups


def test_settings_of_a_group_are_changed_one_by_one(shell: Shell, group: str) -> None:
    changed = shell.json("groups", "set", group, "backoff=1,5.5", "tags=eu,us", "concurrency=3", "release_after=none")
    assert (changed["backoff"], changed["tags"], changed["concurrency"], changed["release_after"]) == (
        [1, 5.5],
        ["eu", "us"],
        3,
        None,
    )
    changed = shell.json("groups", "set", group, "tags=", "assignor=even", "broadcast=true")
    assert (changed["backoff"], changed["tags"], changed["assignor"], changed["broadcast"]) == (
        [1, 5.5],
        [],
        "even",
        True,
    )
    assert "\nconcurrency\t3\n" in shell("groups", "show", group)


def test_none_and_no_value_take_a_setting_away_whether_it_is_a_list_or_not(
    shell: Shell, topic: str, group: str
) -> None:
    names = ("tags", "allow", "deny", "paused_partitions", "lag_alarm", "webhook", "max_active", "handler_seconds")
    given = ("tags=eu", "allow=a", "deny=b", f"paused_partitions={topic}/0", "lag_alarm=5", "webhook=http://x")
    for nothing in ("none", ""):
        shell("groups", "set", group, *given, "max_active=2", "handler_seconds=3")
        assert "\ntags\teu\n" in shell("groups", "show", group)
        changed = shell.json("groups", "set", group, *(f"{name}={nothing}" for name in names))
        assert [changed[name] for name in names] == [[], [], [], [], None, None, None, None]
        assert "\ntags\tnone\n" in shell("groups", "show", group)
    shell("topics", "set", topic, "records_per_second=5", "retention_ms=1000")
    changed = shell.json("topics", "set", topic, "records_per_second=", "retention_ms=")
    assert (changed["records_per_second"], changed["retention_ms"]) == (None, None)


def test_a_group_can_be_configured_before_a_member_joins(shell: Shell, topic: str, group: str) -> None:
    assert "concurrency\t3\n" in shell("groups", "set", group, "concurrency=3")
    assert shell.err == f"no member has joined group '{group}' yet: the settings will apply when one does\n"
    assert shell("groups", "show", group).startswith("# settings\nsetting\tvalue\n")
    assert shell.err == f"no member has joined group '{group}' yet\n"
    shown = shell.json("groups", "show", group)
    assert (shown["joined"], shown["partitions"], shown["members"]) == (False, [], [])
    assert shown["settings"] == shell.json("groups", "set", group, "concurrency=3")

    shell("publish", topic, "a")
    shell("consume", group, topic, "--count", "1")
    shown = shell.json("groups", "show", group)
    assert (shown["joined"], shown["members"], shown["settings"]["concurrency"]) == (True, [], 3)
    assert "setting\tvalue\n" in shell("groups", "show", group)
    assert shell.err == ""
    shell("groups", "set", group, "concurrency=4")
    assert shell.err == ""


@pytest.mark.processes
def test_a_group_is_shown_as_tables_with_titles(shell: Shell, topic: str, group: str) -> None:
    shell("publish", topic, "a", "--partition", "0")
    shell("consume", group, topic, "--count", "1")
    with ConsumeProcess(group, topic, "--name", "ann"):
        wait_until(lambda: partition_rows(shell, group, topic)[2]["owner"] == "ann")
        partitions, members, settings = shell("groups", "show", group).split("\n\n")
        shown = terminal("groups", "show", group)
    title, names, *lines = partitions.splitlines()
    assert title == "# partitions"
    columns = ["partition", "owner", "next_owner", "epoch", "committed", "end", "lag", "stuck_for", "dropped_unread"]
    assert names.split("\t") == columns
    found = {line.split("\t")[0]: line.split("\t")[1:] for line in lines}
    assert found[f"{topic}/0"][:2] == ["ann", "-"]
    assert found[f"{topic}/0"][3:] == ["1", "1", "0", "-", "0"]
    assert found[f"{topic}/1"][3] == "-"
    assert members.splitlines()[2].split("\t")[:2] == ["ann", topic]
    assert settings.startswith("# settings\nsetting\tvalue\nbackoff\t1,5,30,120,600\n")
    assert "epoch" in shown
    assert "│         - │" in shown, "committed offsets are aligned right, as numbers are"
    assert not any(word in shown for word in ("next_owner", "stuck_for", "standby", "…"))


def test_help_of_groups_set_lists_all_settings(shell: Shell) -> None:
    settings = shell("groups", "set", "--help").partition("Settings:")[2].partition("Options:")[0]
    assert all(f"\n  {name} " in settings for name in GroupSettings.__struct_fields__)


def test_a_misspelt_setting_gets_a_suggestion(shell: Shell, group: str) -> None:
    assert shell.run("groups", "set", group, "concurency=3") == (2, "")
    assert shell.err.endswith("release_after (did you mean concurrency?)\n")
    assert shell.run("groups", "show", group) == (2, "")
    assert f"group '{group}' does not exist" in shell.err


def test_a_group_is_paused_and_resumed_entirely_or_by_partition(shell: Shell, topic: str, group: str) -> None:
    shell("publish", topic, "first", "--partition", "2")
    shell("consume", group, topic, "--count", "1")
    for index in range(2):
        shell("publish", topic, f"on {index}", "--partition", str(index))
    assert shell.json("groups", "pause", group)["paused"] is True
    assert shell.lines("consume", group, topic, "--seconds", "0.5") == []
    shell("groups", "resume", group)
    paused = shell.json("groups", "pause", group, "--partition", f"{topic}/0")
    assert (paused["paused"], paused["paused_partitions"]) == (False, [f"{topic}/0"])
    assert [row["value"] for row in shell.lines("consume", group, topic, "--count", "1")] == ["on 1"]
    assert shell.json("groups", "resume", group, "--partition", f"{topic}/0")["paused_partitions"] == []
    assert [row["value"] for row in shell.lines("consume", group, topic, "--count", "1")] == ["on 0"]


def test_a_group_is_reset_and_deleted(shell: Shell, topic: str, group: str) -> None:
    shell("publish", topic, "a", "b", "c", "--partition", "0")
    before = shell.json("search", topic, "--since", "0")[0]["timestamp"]
    shell("consume", group, topic, "--count", "3")

    def committed_after_reset(*options: str) -> Any:
        shell("groups", "reset", group, topic, *options)
        return partition_rows(shell, group, topic)[0]["committed"]

    assert committed_after_reset("--to", "earliest") == 0
    assert committed_after_reset("--to", "latest") == 3
    assert committed_after_reset("--offset", "1", "--partition", "0") == 1
    assert committed_after_reset("--time", str(before)) == 0
    assert committed_after_reset("--time", "2100-01-01") == 3
    assert shell.json("groups", "reset", group, topic, "--offset", "2", "--partition", "0") == {f"{topic}/0": 2}
    assert [row["value"] for row in shell.lines("consume", group, topic, "--count", "1")] == ["c"]
    shell("groups", "delete", group)
    assert group not in [found["group"] for found in shell.json("groups", "list")]


# Search, audit log and Nginx


def test_records_are_found_by_key_trace_id_tag_and_time(shell: Shell, topic: str) -> None:
    shell("publish", topic, "a", "--key", "alice", "--trace", "t-9", "--tag", "eu")
    shell("publish", topic, "b", "--key", "bob")
    (hit,) = shell.json("search", topic, "--key", "alice")
    assert (hit["value"], hit["trace"], hit["offset"]) == ("a", "t-9", 0)
    assert shell.json("search", topic, "--trace", "t-9") == shell.json("search", topic, "--id", hit["id"]) == [hit]
    assert shell.json("search", topic, "--tag", "eu") == [hit]
    assert shell.json("search", topic, "--tag", "us") == []
    assert len(shell.json("search", topic, "--since", "2000-01-01", "--until", "2100-01-01T00:00:00Z")) == 2
    assert shell.json("search", topic, "--until", "2000-01-01") == []
    assert shell("search", topic, "--key", "bob").splitlines()[1].endswith("\tbob\tb")
    assert shell("search", topic, "--key", "carol") == ""
    assert shell.err == "no records found\n"


def test_the_audit_log_says_who_changed_what(shell: Shell, topic: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOGNAME", "ann")
    shell("topics", "expand", topic, "-p", "4")
    newest, before = shell.json("audit-log", "--limit", "2")
    assert (newest["who"], newest["action"], newest["subject"]) == ("ann@127.0.0.1", "topic expanded", topic)
    assert newest["detail"] == {"partitions": 4}
    assert shell.json("audit-log", "--limit", "1", "--before", str(newest["number"])) == [before]
    assert f"\tann@127.0.0.1\ttopic expanded\t{topic}\t" in shell("audit-log", "--limit", "1")


def test_an_nginx_configuration_names_the_brokers(shell: Shell) -> None:
    config = shell("nginx-config", "--brokers", "10.0.0.1:7400, http://10.0.0.2:7400/", "--listen", "127.0.0.1:8080")
    assert "server 10.0.0.1:7400 " in config
    assert "server 10.0.0.2:7400 " in config
    assert "listen 127.0.0.1:8080;" in config


# Invalid calls

COUNT = "an integer from 1 to 2147483647"
INVALID = [
    ("broker --max-connections 0", "--max-connections is 0: expected at least 1"),
    ("broker --trust-proxy proxy", "--trust-proxy is 'proxy': expected an IP address or a network"),
    ("broker --trust-proxy 10.0.0.1 --trust-proxy 10.0.0.1/8", "--trust-proxy is '10.0.0.1/8': expected"),
    ("topics show nope", "topic 'nope' does not exist"),
    ("topics show a/b", "name is 'a/b': expected letters, digits"),
    ("topics show ..", "name is '..': expected letters, digits"),
    ("topics create new -p 0", "partitions is 0: expected a whole number of at least 1"),
    ("topics create new --retention-ms -5", "--retention-ms is -5: expected a whole number of at least 1"),
    ("topics create new --retention-bytes 0", "--retention-bytes is 0: expected a whole number of at least 1"),
    ("topics create a[/]b", "topic name is 'a[/]b': expected letters"),
    ("topics contract there -p 0", "partitions is 0: expected"),
    ("topics expand there -p 1", "partitions is 1: expected"),
    ("topics set there colour=red", "setting is 'colour': expected one of token, records_per_second, retention_ms, "),
    ("topics set there tokens=sesame", "setting is 'tokens': expected one of token, "),
    ("topics set there token", "setting is 'token': expected NAME=VALUE, with a name of token, "),
    ("topics set there records_per_second=fast", f"records_per_second is 'fast': expected {COUNT}, or none"),
    ("topics set there retention_ms=0", "retention_ms is '0': expected an integer from 1 to 46116860"),
    (
        "topics set there token=short",
        "token is '***': expected at least 8 ASCII characters without spaces, or none to require none",
    ),
    ("topics delete nope", "topic 'nope' does not exist"),
    ("publish nope a", "topic 'nope' does not exist: `shardyard topics create nope` creates it"),
    ("publish there a --delay -1", "--delay is -1.0: expected seconds, 0 to 7776000 (90 days)"),
    ("publish there a --delay 99999999", "--delay is 99999999.0: expected seconds, 0 to 7776000 (90 days)"),
    ("publish there a --delay nan", "--delay is nan: expected seconds, 0 to 7776000"),
    (
        "publish there a --deliver-at 2999-01-01T00:00Z",
        "--deliver-at is '2999-01-01T00:00Z': expected a time within the next 90 days",
    ),
    ("publish there a --deliver-at soon", "--deliver-at is 'soon': expected a time such as"),
    ("publish there a --delay 1 --deliver-at 1", "expected --delay or --deliver-at, not both"),
    ("publish there a b --id x", "--id is for a single record: expected one value, got 2"),
    ("publish there --id x", "--id is for a single record: expected one value, got 0"),
    ("publish there a --partition 99", "there/99 does not exist: 'there' has partitions 0 to"),
    ("publish there a --header x", "--header is 'x': expected NAME=VALUE"),
    ("publish there a --json-lines", "--json-lines takes everything about a record from its line: expected no values"),
    ("consume g nope", "topic 'nope' does not exist"),
    ("consume g there --count 0", "--count is 0: expected a whole number of at least 1"),
    ("consume g there --seconds 0", "--seconds is 0.0: expected a number of more than 0"),
    ("consume g there --exec cat --json", "expected --exec or --json, not both"),
    ("groups show nope", "group 'nope' does not exist"),
    ("groups set nope speed=9", "setting is 'speed': expected one of backoff, tags, "),
    ("groups set nope concurrency=abc", f"concurrency is 'abc': expected {COUNT}"),
    ("groups set nope concurrency=0", f"concurrency is '0': expected {COUNT}"),
    ("groups set nope backoff=1,soon", "backoff is '1,soon': expected a list, each item a number of more than 0"),
    ("groups set nope backoff=inf", "backoff is 'inf': expected a list, each item a number of more than 0"),
    ("groups set nope handler_seconds=nan", "handler_seconds is 'nan': expected a number of more than 0, or none"),
    ("groups set a/b tags=eu", "group is 'a/b': expected letters, digits, '_' and '-'"),
    ("consume a.b there", "group is 'a.b': expected 1 to 100 letters, digits, '_' and '-', and no '.'"),
    ("publish x.dead a", "topic name is 'x.dead': expected a name that neither begins with 'shardyard.' nor ends"),
    ("publish . a", "name is '.': expected letters, digits, '.', '_' and '-', and not only dots"),
    ("groups set nope broadcast=maybe", "broadcast is 'maybe': expected true or false"),
    ("groups set nope webhook=ftp://sesame", "webhook is '***': expected an address that begins with http:// or "),
    ("groups set nope assignor=random", "assignor is 'random': expected one of contiguous, even, least_loaded, "),
    ("groups pause nope", "group 'nope' does not exist"),
    ("groups reset nope there --to earliest", "group 'nope' does not exist"),
    ("groups reset idle there", "expected exactly one of --to, --offset and --time"),
    ("groups reset idle there --to latest --offset 3", "expected exactly one of --to, --offset and --time"),
    ("groups reset idle there --offset 99", "offset 99 of there/0 is beyond its end, 0"),
    ("groups reset idle there --time noon", "--time is 'noon': expected a time such as"),
    ("groups reset idle there --to earliest --partition 99", "there/99 does not exist"),
    ("groups pause idle --partition there/9", "--partition is 'there/9': expected one of the group's partitions"),
    ("groups resume idle --partition there/0", "--partition is 'there/0': expected a paused partition"),
    ("groups delete nope", "group 'nope' does not exist"),
    ("dead list nope nope", "topic 'nope' does not exist"),
    ("dead show idle there x", "ID is 'x': expected the id of one of the newest"),
    ("dead redrive idle there", "expected either ids of dead letters, or --all"),
    ("search there", "expected at least one of --id, --key, --trace, --tag, --since, --until"),
    (
        "search there --since 2026-01-02T00:00Z --until 2026-01-01T00:00Z",
        "--until is '2026-01-01T00:00Z': expected a time after --since",
    ),
    ("search nope --key a", "topic 'nope' does not exist"),
    ("search there --key \udcff", "'\\udcff' cannot be encoded as UTF-8"),
    ("topics list --broker localhost", "broker is 'localhost': expected an address such as http://127.0.0.1:7400, or"),
    ("topics list --broker 127.0.0.1:1 --broker ftp://b", "broker is 'ftp://b': expected an address such as http://"),
    ("topics list --broker http://", "broker is 'http://': expected an address such as http://"),
    ("topics list --broker http://b:99999", "broker is 'http://b:99999': expected an address such as http://"),
    ("broker --log memory://", "--log is 'memory://': expected storage that outlives the broker, such as sqlite:///"),
    ("broker --registry memory://", "--registry is 'memory://': expected storage that outlives the broker, such as"),
    (
        "broker --log rabbit://",
        (
            "log URL is 'rabbit://': expected sqlite:///a/path, sqlite:////an/absolute/path or "
            "postgresql://user:password@host:port/database (or memory:// within a program, since no other"
        ),
    ),
    ("nginx-config --brokers localhost", "brokers is 'localhost': expected addresses such as 127.0.0.1:7400"),
]


@pytest.fixture(scope="module")
def _named_by_invalid_calls(broker: str) -> None:
    """Create the topic `there` and the group `idle`, which the invalid calls name."""
    request([broker], "POST", "/v1/topics", {"name": "there", "partitions": 3})
    request([broker], "PATCH", "/v1/groups/idle", {"concurrency": 4})


@pytest.mark.usefixtures("_named_by_invalid_calls")
@pytest.mark.parametrize(("call", "message"), INVALID, ids=[ascii(call) for call, _ in INVALID])
def test_an_invalid_call_prints_one_line(shell: Shell, call: str, message: str) -> None:
    assert shell.run(*call.split()) == (2, "")
    assert f"error: {message}" in shell.err
    assert len(shell.err.splitlines()) == 1


def test_a_valid_call_that_is_refused_exits_with_1(shell: Shell, topic: str) -> None:
    assert shell.run("topics", "create", topic) == (1, "")
    assert shell.err == f"error: topic '{topic}' exists already, with 3 partitions\n"


def test_a_broker_address_needs_no_http(shell: Shell, broker: str, topic: str) -> None:
    assert topic in shell("topics", "list", "--broker", broker.removeprefix("http://"))


def test_a_broker_that_cannot_listen_says_why_in_one_line(shell: Shell, broker: str, tmp_path: Path) -> None:
    port = broker.rpartition(":")[2]
    storage = ("--log", f"sqlite:///{tmp_path}/log", "--registry", f"sqlite:///{tmp_path}/registry.db")
    assert shell.run("broker", "--port", port, *storage) == (1, "")
    assert shell.err == f"error: 127.0.0.1:{port} is in use: choose another port with --port (0 picks a free one)\n"
    assert list(tmp_path.iterdir()) == []
    assert shell.run("broker", "--host", "nowhere.invalid", *storage) == (1, "")
    assert shell.err.startswith("error: cannot listen on nowhere.invalid:7400 (it cannot be resolved)")


def test_a_malformed_line_is_named_with_the_number_of_records_published_before_it(shell: Shell, topic: str) -> None:
    assert shell.run("publish", topic, "--json-lines", stdin=b'{"value": "a"}\n{"valeu": "b"}\n') == (2, "")
    assert shell.err.startswith("error: line 2: ")
    lines = b'{"value": "a"}\n' * 600 + b"nonsense\n"
    assert shell.run("publish", topic, "--json-lines", stdin=lines) == (1, "")
    assert shell.err.startswith("error: line 601: ")
    assert shell.err.endswith("(the first 500 records were published)\n")


@pytest.mark.parametrize("call", ["publish orders a", "consume g orders"])
def test_without_a_broker_the_error_says_how_to_start_one(shell: Shell, call: str) -> None:
    shell.skip_waits()
    assert shell.run(*call.split(), "--broker", NO_BROKER) == (1, "")
    assert shell.err.startswith(f"error: none of {NO_BROKER} could be reached for 2 s")
    assert (
        "(connection refused): start one with `shardyard broker`, or name more: --broker may be repeated" in shell.err
    )
    assert len(shell.err.splitlines()) == 1


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Print nothing."""


@pytest.mark.parametrize("call", ["topics list", "topics create new", "publish orders a", "consume g orders"])
def test_an_address_of_something_else_than_a_broker_is_named_in_one_line(shell: Shell, call: str) -> None:
    shell.skip_waits()
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), QuietHandler) as server:
        serving = threading.Thread(target=server.serve_forever, args=(0.01,))
        serving.start()
        url = f"http://127.0.0.1:{server.server_port}"
        try:
            assert shell.run(*call.split(), "--broker", url) == (1, "")
        finally:
            server.shutdown()
            serving.join()
    told = rf"error: {url} is not a Shardyard broker: it answered (404|501) with text/html: check --broker, or .*\n"
    assert re.fullmatch(told, shell.err)


@pytest.mark.parametrize(
    "command",
    [
        *(f"topics {name}" for name in ("list", "create", "show", "expand", "contract", "set", "delete")),
        *(f"groups {name}" for name in ("list", "show", "set", "pause", "resume", "reset", "delete")),
        *(f"dead {name}" for name in ("list", "show", "redrive")),
        *("publish", "consume", "search", "audit-log", "nginx-config"),
    ],
)
def test_help_has_examples(shell: Shell, command: str) -> None:
    assert f"shardyard {command}" in shell(*command.split(), "--help").partition("Examples")[2]


def test_examples_are_not_wrapped_and_options_show_their_values(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    text = shell("publish", "--help")
    example = "  shardyard publish orders 'remind me' --delay 3600 --tag reminder --header source=cli\n"
    assert example in text
    assert "publish [OPTIONS] TOPIC [VALUE...]\n" in text.replace("TOPIC\n", "TOPIC ")
    assert "\n  --delay SECONDS " in text
    assert "\n  --json " in text
    assert all(len(line) <= 60 for line in text.partition("Arguments:")[2].splitlines())


def test_help_says_how_to_start(shell: Shell) -> None:
    text = shell("--help")
    assert all(word in text for word in ("shardyard tour", "SHARDYARD_BROKER", "SHARDYARD_TOKEN", "Exit codes:"))
    assert shell() == text
    assert shell.run("topcs") == (2, "")
    assert "Did you mean 'topics'?" in shell.err


@pytest.mark.processes
def test_a_broker_ends_cleanly_at_sigterm_and_logs_with_time_and_level_why_it_stopped(tmp_path: Path) -> None:
    with subprocess.Popen(
        [SHARDYARD, "broker", "--port", "0"],
        cwd=tmp_path,
        env={**os.environ, "SHARDYARD_TOKEN": "open-sesame"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        with open_registry(f"sqlite:///{tmp_path}/data/registry.db") as registry:
            wait_until(lambda: registry.read(lambda tx: tx.members(DELAYS_GROUP)) != [])
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 0
            assert registry.read(lambda tx: tx.members(DELAYS_GROUP)) == [], "its member has left"
        logged = process.stderr.read()
        assert "sesame" not in logged
        times, levels, _, messages = zip(*(line.split(" ", 3) for line in logged.splitlines()), strict=True)
        assert all(datetime.fromisoformat(time).utcoffset() == timedelta(0) for time in times)
        assert list(times) == sorted(times)
        assert set(levels) == {"INFO"}
        assert messages[0].startswith("log sqlite:///")
        assert messages[1:] == ("stopping: SIGTERM was received; 0 connections are open", "stopped")


@pytest.mark.processes
def test_a_broker_on_a_terminal_logs_time_and_level_too_and_stops_also_while_it_starts(tmp_path: Path) -> None:
    master, slave = pty.openpty()
    tty.setraw(slave)
    environment = {**os.environ, "TERM": "dumb"}
    with subprocess.Popen(
        [SHARDYARD, "broker", "--port", "0"], cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=slave
    ) as process:
        os.close(slave)
        assert process.stdout is not None
        process.stdout.readline()
        logged = os.read(master, 65536)
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(OSError):  # raised at the end of a terminal's output
            while chunk := os.read(master, 65536):
                logged += chunk
        os.close(master)
    stamped = re.findall(r"^\d\d:\d\d:\d\d (\w+) +(\w+)", logged.decode(), re.MULTILINE)
    assert stamped == [("INFO", "log"), ("INFO", "stopping"), ("INFO", "stopped")]
