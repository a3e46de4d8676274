"""`shardyard coordinator` and `shardyard fanout-worker` as processes, which are stopped and killed."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shardyard.fanout.channels import Channels
from shardyard.log import Log, open_log
from shardyard.wire.channels import decode_event
from shardyard.wire.inbox import TOPIC
from tests.fanout.yard import until

pytestmark = pytest.mark.processes
STOP_SECONDS = 20.0


class FanoutServer:
    """One of the two commands, on the stores of a folder."""

    def __init__(self, folder: Path, command: str, name: str, port: str = "0") -> None:
        self._errors = folder / f"{name}.err"
        stores = ("--log", f"sqlite:///{folder / 'log'}", "--registry", f"sqlite:///{folder / 'registry.db'}")
        environment = {**os.environ, "SHARDYARD_TOKEN": "secret"}
        with self._errors.open("a") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "shardyard.cli", command, "--port", port, *stores],
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=environment,
            )
        self.url = ""

    def listens(self) -> None:
        """Wait until it listens."""
        assert self.process.stdout is not None
        said = self.process.stdout.readline()
        assert said.startswith("listening on http://127.0.0.1:"), self.errors
        self.url = said.removeprefix("listening on ").strip()

    @property
    def errors(self) -> str:
        return self._errors.read_text()

    def get(self, path: str, token: str = "") -> tuple[int, bytes]:
        request = urllib.request.Request(f"{self.url}{path}", headers={"Authorization": f"Bearer {token}"})
        try:
            with urllib.request.urlopen(request, timeout=10) as response:
                return response.status, response.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()

    def status(self) -> Any:
        return msgspec.json.decode(self.get("/v1/status", "secret")[1])

    def stop(self) -> int:
        """By SIGTERM. Returns its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(STOP_SECONDS)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@contextlib.contextmanager
def started(folder: Path, *commands: tuple[str, str]) -> Iterator[list[FanoutServer]]:
    """Servers by command and name, which listen; killed at the end of the block."""
    servers = [FanoutServer(folder, command, name) for command, name in commands]
    try:
        for server in servers:
            server.listens()
        yield servers
    finally:
        for server in servers:
            server.kill()
            assert server.process.stdout is not None
            server.process.stdout.close()


async def received(log: Log) -> list[str]:
    batches = [await log.read(partition, 0) for partition in await log.topic(TOPIC)]
    return [decode_event(record.value).text for batch in batches for record in batch.records()]


@pytest.mark.timeout(120)
def test_events_are_delivered_while_processes_are_stopped_and_killed(tmp_path: Path) -> None:
    async def scenario(log: Log) -> None:
        channels, texts = Channels(log), list[str]()
        await channels.join("general", "alice")
        await channels.set_presence("alice", "phone", online=True)

        async def deliver(what: str) -> None:
            """Publish, and wait until all that was published is delivered."""
            for number in range(20):
                texts.append(f"{what} {number}")
                await channels.publish("general", texts[-1], sender="bob")

            async def arrived() -> bool:
                return len(await received(log)) >= len(texts)

            await until(arrived, what)
            assert await received(log) == texts

        with started(tmp_path, ("coordinator", "coordinator-1"), ("fanout-worker", "worker-1")) as (
            coordinator,
            worker,
        ):
            for server, role in ((coordinator, "coordinator"), (worker, "worker")):
                assert server.get("/healthz")[0] == 200
                await until(lambda s=server: s.get("/readyz")[0] == 200, "readiness")  # type: ignore[misc]
                assert server.get("/metrics")[0] == 401
                assert server.get("/metrics", "secret")[0] == 200
                assert server.status()["role"] == role
            taken = worker.url.rpartition(":")[2]
            failed = FanoutServer(tmp_path, "coordinator", "failed", port=taken)
            assert failed.process.stdout is not None
            assert failed.process.stdout.read() == ""
            assert failed.process.wait(STOP_SECONDS) == 1
            failed.process.stdout.close()
            assert f"127.0.0.1:{taken} is in use" in failed.errors
            await deliver("at first")
            with started(tmp_path, ("coordinator", "coordinator-2"), ("fanout-worker", "worker-2")) as others:
                await until(lambda: len(others[1].status()["partitions"].get("fanout", ())) == 128, "half of it")
                await deliver("by two of each")
                coordinator.kill()
                worker.kill()
                await deliver("after kills")
                assert others[1].stop() == 0
                assert others[0].stop() == 0
                assert "stopped" in others[1].errors
                for server in others:
                    assert " ERROR " not in server.errors

    async def whole() -> None:
        async with open_log(f"sqlite:///{tmp_path / 'log'}") as log:
            await scenario(log)

    asyncio.run(whole())
