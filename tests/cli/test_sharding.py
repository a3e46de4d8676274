"""The commands for sharded queues, as a user runs them, with one real broker."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from tests.cli.invocation import Shell
from tests.queues.brokers import BrokerProcess

pytestmark = pytest.mark.xdist_group("cli sharding")  # the broker takes long to start
TIMEOUT_SECONDS = 30.0
NO_BROKER = "http://127.0.0.1:1"
_numbers = count()


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a running broker."""
    with BrokerProcess(tmp_path_factory.mktemp("broker"), options=["--node-name", "a"]) as process:
        process.listens()
        yield process.url


@pytest.fixture
def shell(broker: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    monkeypatch.setenv("SHARDYARD_BROKER", broker)
    monkeypatch.delenv("SHARDYARD_TOKEN", raising=False)
    return Shell(monkeypatch, capsys)


@pytest.fixture
def images(shell: Shell) -> Iterator[str]:
    """The name of a new exchange with 2 shards."""
    name = f"images-{next(_numbers)}"
    shell("exchanges", "declare", name)
    shell("policies", "set", name, f"^{name}$", "--shards-per-node", "2")
    yield name
    shell.run("policies", "clear", name)
    shell.run("exchanges", "delete", name, "--discard")


def table(text: str) -> list[dict[str, str]]:
    header, *lines = [line.split("\t") for line in text.splitlines()]
    return [dict(zip(header, line, strict=True)) for line in lines]


def test_exchanges_are_declared_listed_and_shown(shell: Shell, images: str) -> None:
    declared = {"name": images, "type": "x-modulus-hash", "hash_header": None, "hash_property": None}
    assert shell.json("exchanges", "declare", images) == declared
    assert declared in shell.json("exchanges", "list")
    shown = shell.json("exchanges", "show", images)
    assert (shown["exchange"], shown["policy"]["shards_per_node"]) == (declared, 2)
    assert [shard["name"] for shard in shown["shards"]] == [f"sharding: {images} - a - {index}" for index in (0, 1)]
    text = shell("exchanges", "show", images)
    assert "# shards\nname\tstate\towner\tready\tunacknowledged\tconsumers\n" in text
    assert "# bindings" not in text  # those of shards are not repeated
    code, _ = shell.run("exchanges", "declare", images, "--type", "fanout")
    assert code == 1
    assert "exists already" in shell.err


def test_messages_are_published_got_and_consumed(shell: Shell, images: str) -> None:
    assert shell.json("exchanges", "publish", images, "m0", "m1", "m2", "-k", "cat.png") == {
        "messages": 3,
        "stored": 3,
        "unroutable": 0,
    }
    assert shell("exchanges", "publish", images, stdin=b"m3\nm4\n\nm5\n") == "messages\tstored\tunroutable\n3\t3\t0\n"
    got = shell.json("exchanges", "get", images)
    assert len(got) == 1
    assert got[0]["queue"].startswith(f"sharding: {images} - a - ")
    lines = shell("exchanges", "consume", images, "--count", "5").splitlines()
    assert shell.err == "messages: 5\n"
    bodies = [line.split("\t")[2] for line in lines] + [got[0]["body"]]
    assert sorted(bodies) == ["m0", "m1", "m2", "m3", "m4", "m5"]
    assert shell("exchanges", "get", images) == ""
    assert shell.err == f"no messages in '{images}'\n"


def test_consumed_messages_are_printed_with_everything_as_json(shell: Shell, images: str) -> None:
    options = ["--header", "source=import", "--property", "message_id=7", "--cc", "x", "--expiration-ms", "60000"]
    shell("exchanges", "publish", images, "a\tb", "-k", "k", *options)
    (line,) = shell("exchanges", "consume", images, "-n", "1", "--json").splitlines()
    message = json.loads(line)
    assert message.pop("queue").startswith("sharding: ")
    assert message == {
        "routing_key": "k",
        "body": "a\tb",
        "headers": {"source": "import"},
        "properties": {"message_id": "7"},
        "redelivered": False,
        "delivery_count": 0,
    }


def test_a_consumer_ends_after_its_time_and_by_a_signal(shell: Shell, images: str, broker: str) -> None:
    assert shell("exchanges", "consume", images, "--seconds", "0.2") == ""
    command = [sys.executable, "-m", "shardyard.cli", "exchanges", "consume", images, "--broker", broker]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    shell("exchanges", "publish", images, "hello")
    assert process.stdout.readline().endswith("\thello\n")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=20)
    assert (process.returncode, err) == (0, "messages: 1\n")


def test_a_message_that_is_refused_is_named_with_the_number_of_those_published_before_it(
    shell: Shell, images: str
) -> None:
    assert shell.run("exchanges", "publish", images, stdin=b"a" * 1_100_000) == (2, "")
    assert shell.json("exchanges", "get", images) == []
    lines = b"x\n" * 600 + b"a" * 1_100_000 + b"\nx\n"
    assert shell.run("exchanges", "publish", images, "-k", "n", stdin=lines) == (1, "")
    assert shell.err.startswith("error: message in bytes is 1100000, beyond the limit of ")
    assert shell.err.endswith(" (the first 600 messages were published)\n")
    assert shell.json("exchanges", "purge", images)["messages"] == 600


def test_an_exchange_without_a_policy_cannot_be_consumed_and_the_error_says_what_to_do(shell: Shell) -> None:
    shell("exchanges", "declare", "unsharded")
    assert shell.run("exchanges", "consume", "unsharded") == (2, "")
    assert "exchange 'unsharded' has no shards: `shardyard policies set NAME '^unsharded$'" in shell.err
    shell("exchanges", "delete", "unsharded")


def test_lines_are_published_as_they_come_until_it_is_interrupted(shell: Shell, images: str, broker: str) -> None:
    command = [sys.executable, "-m", "shardyard.cli", "exchanges", "publish", images, "--broker", broker]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, bufsize=0, stdin=pipe, stdout=pipe, stderr=pipe) as process:
        assert process.stdin is not None
        process.stdin.write(b"first\n")  # and no end of the input
        assert shell("exchanges", "consume", images, "--count", "1").endswith("\tfirst\n")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, b"")
    assert err.startswith(b"interrupted (the first ")


def test_shards_are_listed_shown_and_purged(shell: Shell, images: str) -> None:
    shell("exchanges", "publish", images, "a", "b", "c", "-k", "same")
    rows = table(shell("shards", "list", "--exchange", images))
    assert sorted(row["ready"] for row in rows) == ["0", "3"]
    assert {(row["owner"], row["state"]) for row in rows} == {("a", "active")}
    full = next(row["name"] for row in rows if row["ready"] == "3")
    shown = shell.json("shards", "show", full)
    assert (shown["ready"], shown["exchange"], shown["node"]) == (3, images, "a")
    assert shell.json("shards", "purge", full) == {"name": full, "messages": 3}
    shell("exchanges", "publish", images, "d")
    assert shell.json("exchanges", "purge", images) == {"name": images, "messages": 1}


def test_policies_are_set_shown_and_cleared_and_what_remains_is_said(shell: Shell, images: str) -> None:
    options = ["--priority", "5", "--message-ttl", "1000", "--delivery-limit", "3", "--max-length", "10"]
    policy = shell.json("policies", "set", f"{images}-2", f"^{images}$", "-s", "3", "-k", "1234", *options)
    assert (policy["shards_per_node"], policy.pop("remaining")) == (3, [])
    assert shell.json("policies", "show", f"{images}-2") == policy
    (listed,) = [row for row in table(shell("policies", "list")) if row["name"] == f"{images}-2"]
    expected = {"message_ttl_ms": "1000", "max_length": "10", "overflow": "drop-head", "delivery_limit": "3"}
    assert {name: listed[name] for name in expected} == expected
    assert "dead_letter_exchange" not in listed
    shown = {row["setting"]: row["value"] for row in table(shell("policies", "show", f"{images}-2"))}
    assert (shown["max_length"], shown["dead_letter_exchange"]) == ("10", "-")
    assert shell.json("exchanges", "show", images)["policy"] == policy
    shell("policies", "clear", f"{images}-2")
    assert len(shell.json("shards", "list", "--exchange", images)) == 2
    shell("exchanges", "publish", images, "unread")
    (remaining,) = table(shell("policies", "clear", images))
    assert remaining["messages"] == "1"
    assert f"policy '{images}' was cleared" in shell.err
    assert f"`shardyard exchanges consume '{remaining['queue']}'`" in shell.err
    assert f"`shardyard exchanges consume '{images}'`" in shell.err
    assert "unread" in shell("exchanges", "consume", remaining["queue"])
    assert shell.err == f"messages: 1\n'{remaining['queue']}' is drained and gone\n"
    assert shell.run("exchanges", "consume", remaining["queue"])[0] == 2
    assert f"'{remaining['queue']}' does not exist" in shell.err.replace("\n", " ")


def test_consuming_all_shards_that_drain_ends_when_they_are_gone(shell: Shell, images: str) -> None:
    shell("exchanges", "publish", images, "m1", "-k", "same")
    shell("exchanges", "publish", images, "m2", "-k", "cat.png")  # in the other shard
    shell("policies", "clear", images)
    assert len(shell("exchanges", "consume", images).splitlines()) == 2
    assert shell.err == f"messages: 2\n'{images}' is drained and gone\n"


def test_shards_that_are_left_with_messages_are_listed_whatever_closed_them(shell: Shell, images: str) -> None:
    shell("exchanges", "publish", images, "m1", "-k", "same")
    shell("exchanges", "publish", images, "m2", "-k", "cat.png")  # in the other shard
    setting = ["policies", "set", images, f"^{images}$", "-s", "1"]
    _, remaining = shell(*setting).split("\n\n")
    surplus = f"sharding: {images} - a - 1"
    assert table(remaining) == [{"queue": surplus, "messages": "1"}]
    assert f"`shardyard exchanges consume '{images}'`" in shell.err
    assert shell.json(*setting)["remaining"] == [{"queue": surplus, "messages": 1, "node": "a"}]  # it still is there
    left = shell.json("policies", "clear", images)["remaining"]
    assert sorted(each["queue"] for each in left) == [f"sharding: {images} - a - {index}" for index in (0, 1)]
    assert shell.json("exchanges", "delete", images)["remaining"] == left


def test_an_exchange_is_deleted_with_or_without_its_unread_messages(shell: Shell, images: str) -> None:
    shell("exchanges", "publish", images, "unread")
    removed = shell.json("exchanges", "delete", images)
    assert [left["messages"] for left in removed["remaining"]] == [1]
    assert shell.json("shards", "delete", removed["remaining"][0]["queue"])["messages"] == 1
    shell("exchanges", "declare", images)
    shell("exchanges", "publish", images, "unread")
    assert shell.json("exchanges", "delete", images, "--discard")["remaining"] == []
    assert images not in [shard["exchange"] for shard in shell.json("shards", "list")]


def test_dead_letters_are_listed_with_what_remains(shell: Shell, images: str) -> None:
    dead = f"dead letters: {images}"
    shell("policies", "set", images, f"^{images}$", "-s", "1", "--dead-letter-exchange", "none", "--max-length", "1")
    shell("exchanges", "publish", images, "m1", "m2")
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while (dead, 1) not in [(queue["name"], queue["ready"]) for queue in shell.json("shards", "list")]:
        assert time.monotonic() < deadline  # it comes soon: the exchange for dead letters does not exist
    shard, letters = table(shell("policies", "clear", images))
    assert (shard["queue"], letters) == (f"sharding: {images} - a - 0", {"queue": dead, "messages": "1"})
    assert f"policy '{images}' was cleared" in shell.err
    assert f"`shardyard shards delete '{dead}'`" in shell.err.replace("\n", " ")
    assert table(shell("exchanges", "delete", images, "--discard")) == [letters]
    assert shell.err.startswith(f"exchange '{images}' was deleted\ndead letters stay")
    assert shell.json("shards", "delete", dead)["messages"] == 1


def test_a_queue_of_ones_own_is_bound_and_unbound(shell: Shell) -> None:
    shell("exchanges", "declare", "events", "--type", "direct")
    assert shell.json("exchanges", "bind", "events", "audit", "-k", "paid") == {
        "exchange": "events",
        "queue": "audit",
        "routing_key": "paid",
    }
    assert "# bindings\nqueue\trouting_key\naudit\tpaid\n" in shell("exchanges", "show", "events")
    assert shell.json("exchanges", "publish", "events", "x", "-k", "paid")["stored"] == 1
    code, _ = shell.run("exchanges", "publish", "events", "x", "-k", "sent")
    assert code == 1
    assert "to no queue: bind a queue, set a policy" in shell.err
    assert "--optional" in shell.err
    assert shell.json("exchanges", "publish", "events", "x", "-k", "sent", "--optional")["unroutable"] == 1
    shell("exchanges", "unbind", "events", "audit", "-k", "sent")
    assert shell.err == "nothing has changed: queue 'audit' was not bound to 'events' with key 'sent'\n"
    assert shell.json("exchanges", "unbind", "events", "audit", "-k", "paid")["was_bound"] is True
    assert shell.json("exchanges", "unbind", "events", "audit", "-k", "paid")["was_bound"] is False
    assert shell.json("shards", "delete", "audit")["messages"] == 1
    shell("exchanges", "delete", "events")


def test_a_queue_that_can_not_be_bound_is_not_declared(shell: Shell) -> None:
    shell("exchanges", "declare", "weighted", "--type", "x-consistent-hash")
    for exchange, key, says in (("none", "1", "'none' does not exist"), ("weighted", "0", "the weight of the queue")):
        assert shell.run("exchanges", "bind", exchange, "large", "-k", key)[0] == 2
        assert says in shell.err.replace("\n", " ")
        assert "large" not in [queue["name"] for queue in shell.json("shards", "list")]
    shell("exchanges", "delete", "weighted")


def test_a_backlog_is_rebalanced(shell: Shell, images: str) -> None:
    shell("exchanges", "publish", images, *(f"m{number}" for number in range(4)), "-k", "same")
    shell("policies", "set", images, f"^{images}$", "-s", "3")
    rows = table(shell("exchanges", "rebalance", images))
    assert sorted(row["messages"] for row in rows) == ["0", "0", "4"]
    lines = shell("exchanges", "consume", images, "-n", "4").splitlines()
    assert [line.split("\t")[2] for line in lines] == ["m0", "m1", "m2", "m3"]  # in order


def test_a_dead_letter_says_why_it_is_one(shell: Shell, images: str) -> None:
    shell("exchanges", "declare", "dead", "--type", "fanout")
    shell("exchanges", "bind", "dead", "failures")
    limits = ["--max-length", "1", "--dead-letter-exchange", "dead"]
    shell("policies", "set", images, f"^{images}$", "-s", "1", *limits)
    shell("exchanges", "publish", images, "m1", "m2", "m3", "-k", "same", "--header", "x-death=mine", "--header", "a=b")
    (line,) = shell("exchanges", "consume", "failures", "-n", "1", "--json").splitlines()
    consumed = json.loads(line)["headers"]
    (got,) = shell.json("exchanges", "get", "failures")
    for headers in (consumed, got["headers"]):
        assert headers["a"] == "b"
        (death,) = json.loads(headers["x-death"])
        expected = {"queue": f"sharding: {images} - a - 0", "reason": "maxlen", "count": 1}
        assert {name: death[name] for name in expected} == expected
    shell("exchanges", "delete", "dead")
    shell("shards", "delete", "failures")


def test_deleting_an_exchange_as_a_queue_says_what_to_delete(shell: Shell, images: str) -> None:
    assert shell.run("shards", "delete", images)[0] == 2
    assert "can't be deleted as a queue: delete the exchange" in shell.err.replace("\n", " ")


def test_nodes_are_listed_and_not_forgotten_while_they_run(shell: Shell, images: str, broker: str) -> None:
    (node,) = shell.json("nodes", "list")
    assert (node["name"], node["address"], node["is_running"]) == ("a", broker, True)
    assert node["shards"] >= 2
    code, _ = shell.run("nodes", "forget", "a")
    assert code == 1
    assert "is running: stop it first" in shell.err
    assert images


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["policies", "set", "p", "^a$", "--shards-per-node", "0"], 2, "a whole number from 1 to 1000"),
        (["policies", "set", "p", "^a$", "--shards-per-node", "1001"], 2, "a whole number from 1 to 1000"),
        (["policies", "set", "p", "^a$", "-s", "1", "--max-length", "0"], 2, "--max-length is 0: expected a whole"),
        (["policies", "set", "p", "^a$", "--shards-per-node", "2.5"], 2, "'2.5': expected an integer"),
        (["policies", "set", "p", "(", "-s", "1"], 2, "regular expression"),
        (
            ["policies", "set", "p", "^a$", "-s", "1", "--overflow", "x"],
            2,
            "--overflow is 'x': expected one of drop-head",
        ),
        (["policies", "show", "none"], 2, "'none' does not exist"),
        (["exchanges", "declare", "x", "--type", "topic"], 2, "x-modulus-hash"),
        (["exchanges", "declare", "a/b"], 2, "without '/'"),
        (["exchanges", "show", "none"], 2, "exchanges declare NAME"),
        (["exchanges", "delete", "none"], 2, "`shardyard exchanges list` shows those that do"),
        (["exchanges", "get", "none", "-n", "1001"], 2, "--count is 1001: expected a whole number from 1 to 1000"),
        (["exchanges", "publish", "none", "x"], 2, "exchanges declare NAME"),
        (["exchanges", "publish", "none", "x", "--header", "x"], 2, "NAME=VALUE"),
        (["exchanges", "consume", "none"], 2, "'none' does not exist"),
        (["exchanges", "consume", "none", "--count", "0"], 2, "at least 1"),
        (["exchanges", "get", "none"], 2, "'none' does not exist"),
        (["shards", "show", "none"], 2, "`shardyard exchanges bind EXCHANGE QUEUE` declares one"),
        (["nodes", "forget", "none"], 2, "'none' is not known"),
    ],
)
def test_wrong_calls_fail_with_what_was_expected(shell: Shell, arguments: list[str], code: int, says: str) -> None:
    found, out = shell.run(*arguments)
    assert (found, out) == (code, "")
    assert says in shell.err.replace("\n", " ")


@pytest.mark.parametrize("command", [["exchanges", "list"], ["exchanges", "publish", "x", "y"], ["nodes", "list"]])
def test_without_a_broker_the_error_says_what_to_do(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    monkeypatch.setenv("SHARDYARD_BROKER", NO_BROKER)
    shell.skip_waits()
    assert shell.run(*command)[0] == 1
    assert "start one with `shardyard broker`" in shell.err


def test_a_broker_refuses_a_wrong_node_name_and_address(shell: Shell) -> None:
    for option, value in (("--node-name", "a b"), ("--node-name", ""), ("--address", "10.0.0.5:7400")):
        assert shell.run("broker", option, value)[0] == 2
        assert option in shell.err


@pytest.mark.parametrize("name", ["exchanges", "policies", "shards", "nodes"])
def test_every_command_has_help_with_examples(name: str) -> None:
    environment = os.environ | {"COLUMNS": "100"}
    command = [str(Path(sys.executable).with_name("shardyard")), name, "--help"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout
    assert "Commands:" in listed
