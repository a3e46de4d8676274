"""`shardyard messenger` as a process: what it says at its start."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from shardyard.cli import processes
from shardyard.client import MessagingClient
from shardyard.log import open_log
from shardyard.model import ShardyardError
from shardyard.wire.inbox import TOPIC
from tests.cli.invocation import Shell
from tests.server_process import ServerProcess
from tests.servers import free_port

pytestmark = pytest.mark.processes


def failing(folder: Path, *arguments: str) -> str:
    """What a messenger that ends by itself with exit code 1 says on standard error."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SHARDYARD_")}
    command = [sys.executable, "-m", "shardyard.cli", "messenger", *arguments]
    ended = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert (ended.returncode, ended.stdout) == (1, ""), ended.stderr
    return ended.stderr


@contextmanager
def port_in_use() -> Iterator[int]:
    """A port that is in use, while the one before it is free."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            port: int = listening.getsockname()[1]
            try:
                processes.check_port("127.0.0.1", port - 1)
            except ShardyardError:
                continue
            yield port
            return


@pytest.mark.parametrize("count", [1, 2])
def test_a_port_in_use_is_all_that_is_said(tmp_path: Path, count: int) -> None:
    with port_in_use() as port:
        said = failing(tmp_path, "--port", str(port - count + 1), "--processes", str(count))
    assert said == f"error: 127.0.0.1:{port} is in use: choose another port with --port (0 picks a free one)\n"


def test_a_port_that_is_taken_while_processes_start_ends_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    with port_in_use() as port:
        looks: list[int] = []
        check = processes.check_port

        def free_at_first(host: str, looked_at: int) -> None:
            looks.append(looked_at)
            if len(looks) > 2:
                check(host, looked_at)

        monkeypatch.setattr(processes, "check_port", free_at_first)
        monkeypatch.setattr(sys, "argv", ["shardyard", "place", "--processes", "2"])  # it fails at once
        before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
        try:
            with pytest.raises(ShardyardError, match="is in use"):
                processes.run_processes(2, "127.0.0.1", port - 1)
        finally:
            for number, handler in zip((signal.SIGTERM, signal.SIGINT), before, strict=True):
                signal.signal(number, handler)


@pytest.mark.parametrize(
    ("secret", "arguments", "says"),
    [
        ("short", (), "SHARDYARD_SECRET is too short: use 32 characters or more"),
        ("", ("--host", "192.0.2.1"), "without SHARDYARD_SECRET anyone could sign in as anyone at 192.0.2.1"),
        ("s" * 32, ("--tls-key", "nope"), "--tls-key is 'nope': expected a key and a certificate together"),
        ("s" * 32, ("--tls-certificate", "nope"), "--tls-key is missing: expected a key and a certificate together"),
    ],
)
def test_a_wrong_call_says_what_was_expected(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    secret: str,
    arguments: tuple[str, ...],
    says: str,
) -> None:
    monkeypatch.setenv("SHARDYARD_SECRET", secret)
    shell = Shell(monkeypatch, capsys)
    assert shell.run("messenger", *arguments) == (2, "")
    assert says in shell.err


def test_servers_stop_when_the_command_that_started_them_is_killed(tmp_path: Path) -> None:
    port = free_port()
    command = [sys.executable, "-m", "shardyard.cli", "messenger", "--port", str(port), "--processes", "2"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        listening = {parent.stdout.readline() for _ in range(2)}
        parent.kill()
        _, said = parent.communicate(timeout=60)  # until nobody has its output open any more
    assert listening == {f"listening on http://127.0.0.1:{each}\n" for each in (port, port + 1)}
    assert said.count("stopped\n") == 2, said


@pytest.mark.parametrize(
    ("requested", "warns"), [(("--partitions", "8"), True), (("--partitions", "4"), False), ((), False)]
)
def test_partitions_that_differ_from_those_of_the_topic_are_warned_of(
    tmp_path: Path, requested: tuple[str, ...], warns: bool
) -> None:
    async def scenario() -> str:
        async with open_log(f"sqlite:///{tmp_path}/data/log") as log:
            await log.create_topic(TOPIC, 4)
        server = ServerProcess(tmp_path, "messenger", ["messenger", *requested])
        try:
            await server.ready()
            await server.end(signal.SIGTERM)
        finally:
            server.discard()
        return server.output.read_text()

    said = asyncio.run(scenario())
    assert ("--partitions 8 has no effect: the topic inbox exists with 4" in said) == warns, said


def test_a_server_that_stops_says_how_many_clients_are_connected(tmp_path: Path) -> None:
    async def scenario() -> str:
        server = ServerProcess(tmp_path, "messenger", ["messenger"])
        try:
            await server.ready()
            async with MessagingClient(server.url, "ann"):
                await server.end(signal.SIGTERM)
        finally:
            server.discard()
        return server.output.read_text()

    assert "1 connections are open" in asyncio.run(scenario())
