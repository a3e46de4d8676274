"""`shardyard exchanges move`, from a real RabbitMQ to a real broker."""

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardyard.client.rabbitmq import RabbitMQClient
from shardyard.client.sharding import OutgoingMessage
from tests.cli.invocation import Shell
from tests.queues.brokers import BrokerProcess
from tests.rabbitmq import RabbitMQ
from tests.servers import free_port

COUNT = 100


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Shell]:
    with BrokerProcess(tmp_path, options=["--node-name", "a"]) as process:
        process.listens()
        monkeypatch.setenv("SHARDYARD_BROKER", process.url)
        yield Shell(monkeypatch, capsys)


def publish(rabbitmq: RabbitMQ, exchange: str) -> None:
    async def whole() -> None:
        async with RabbitMQClient(rabbitmq.url) as client:
            declared = await client.declare_exchange(exchange)
            await declared.publish_batch([OutgoingMessage(b"x", f"key{n}") for n in range(COUNT)])

    asyncio.run(whole())


def test_the_messages_of_an_exchange_are_moved(rabbitmq: RabbitMQ, shell: Shell) -> None:
    rabbitmq.set_policy("cli", "^moved-by-command$", '{"shards-per-node": 4}')
    publish(rabbitmq, "moved-by-command")
    code, _ = shell.run("exchanges", "move", "moved-by-command", "--from", rabbitmq.url)
    assert code == 2
    assert "exchanges declare NAME" in shell.err.replace("\n", " ")
    shell("exchanges", "declare", "images")
    shell("policies", "set", "all", ".*", "--shards-per-node", "4")
    moved = shell.json("exchanges", "move", "moved-by-command", "--from", rabbitmq.url, "--to", "images")
    assert [row["moved"] for row in moved] == [24, 27, 20, 29]
    shards = shell.json("exchanges", "show", "images")["shards"]
    assert [shard["ready"] for shard in shards] == [24, 27, 20, 29]


def test_the_exchanges_at_both_ends_must_exist_also_if_there_is_nothing_to_move(
    rabbitmq: RabbitMQ, shell: Shell
) -> None:
    rabbitmq.set_policy("empty", "^nothing-in-it$", '{"shards-per-node": 2}')

    async def declare() -> None:
        async with RabbitMQClient(rabbitmq.url) as client:
            await client.declare_exchange("nothing-in-it")

    asyncio.run(declare())
    code, _ = shell.run("exchanges", "move", "nothing-in-it", "--from", rabbitmq.url)
    assert code == 2
    assert "'nothing-in-it' does not exist: `shardyard exchanges list`" in shell.err.replace("\n", " ")
    shell("exchanges", "declare", "nope")
    code, _ = shell.run("exchanges", "move", "nope", "--from", rabbitmq.url)
    assert code == 2
    assert "RabbitMQ has none of that name" in shell.err.replace("\n", " ")


def test_a_rabbitmq_that_does_not_run_or_refuses_the_password(rabbitmq: RabbitMQ, shell: Shell) -> None:
    shell("exchanges", "declare", "images")
    where = f"amqp://guest:secret@127.0.0.1:{free_port()}/"
    result = subprocess.run(
        [sys.executable, "-m", "shardyard.cli", "exchanges", "move", "images", "--from", where],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 1
    assert "RabbitMQ could not be reached" in result.stderr
    assert "error when creating transport" not in result.stderr
    code, _ = shell.run("exchanges", "move", "images", "--from", rabbitmq.url.replace("guest:guest", "guest:secret"))
    assert code == 1
    assert "refused the user or the password" in shell.err.replace("\n", " ")
    assert "secret" not in shell.err


def test_an_address_that_is_wrong_is_explained_without_its_password(shell: Shell) -> None:
    code, _ = shell.run("exchanges", "move", "images", "--from", "http://guest:secret@127.0.0.1/")
    assert code == 2
    assert "amqp://user:password@host/" in shell.err
    assert "secret" not in shell.err
