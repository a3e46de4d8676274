"""The process that stores the history beside a messaging server. In the same process, the two would hold each other up:
only one thread of a Python process runs at a time."""

# ruff: noqa: PLC0415 commands start quickly: what is slow to import is imported by those that need it

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Coroutine, Sequence
from types import TracebackType
from typing import Any, Self

import msgspec

from shardyard.cli.logs import logs_on_stderr
from shardyard.cli.serving import at_end_of_input, reduce_stalls, without_packages

_log = logging.getLogger(__name__)

COMMAND = "history-worker"
NICE = 5
"""Serving clients comes first."""
RESTART_SECONDS = 1.0
STOP_SECONDS = 5.0
STOPPED_SECONDS = 10.0
"""Before it is started again, if it was stopped."""


class Stores(msgspec.Struct, frozen=True):
    """URLs of what a messaging server stores."""

    log: str
    registry: str
    history: str


class HistoryWorker:
    """Runs the process from entering the block to leaving it, and starts it again if it ends by itself."""

    def __init__(self, stores: Stores) -> None:
        self._stores = stores
        self._process: asyncio.subprocess.Process | None = None
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._keep_running(), name=COMMAND)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._process is not None and self._process.returncode is None:
            if self._process.stdin is not None:
                self._process.stdin.close()  # it stops by itself
            try:
                await asyncio.wait_for(self._process.wait(), STOP_SECONDS)
            except TimeoutError:
                self._process.kill()
                await self._process.wait()

    async def _keep_running(self) -> None:
        while True:
            command = [sys.executable, "-m", "shardyard.cli", COMMAND]
            try:
                self._process = await asyncio.create_subprocess_exec(*command, stdin=asyncio.subprocess.PIPE)
            except OSError as error:
                _log.error("the process that stores the history could not be started, and will be: %s", error)
                await asyncio.sleep(RESTART_SECONDS)
                continue
            with contextlib.suppress(ConnectionError):
                if self._process.stdin is not None:
                    self._process.stdin.write(msgspec.json.encode(self._stores) + b"\n")
                    await self._process.stdin.drain()
            code = await self._process.wait()
            if code:
                _log.error("the process that stores the history has ended (%d), and is started again", code)
            else:  # it was stopped: probably this one is about to be stopped, too
                await asyncio.sleep(STOPPED_SECONDS)
                _log.warning("the process that stores the history was stopped, and is started again")
            await asyncio.sleep(RESTART_SECONDS)


def history_worker() -> None:
    """Store the history beside a messaging server, which starts this command by itself.

    It reads the URLs of its stores from standard input, and stops at the end of the input: when the server has ended.
    """
    import uvloop

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches it, too: the server stops it
    os.nice(NICE)
    line = sys.stdin.buffer.readline()
    if not line:
        return
    stores = msgspec.json.decode(line, type=Stores)
    with without_packages("numba", "pandas"), logs_on_stderr(), contextlib.suppress(asyncio.CancelledError):
        uvloop.run(_work(stores))


async def _work(stores: Stores) -> None:
    from shardyard.groups import Node
    from shardyard.log import open_log
    from shardyard.messaging.config import DEFAULT_CONFIG
    from shardyard.messaging.history import open_history
    from shardyard.messaging.history.channel_materialiser import ChannelMaterialiser
    from shardyard.messaging.history.materialiser import Materialiser
    from shardyard.registry import open_registry

    reduce_stalls()
    with open_registry(stores.registry) as registry:
        async with (
            open_log(stores.log, maintains=False) as log,  # its server maintains it: this would delay appends
            open_history(stores.history) as history,
            Node(log, registry) as node,
        ):
            parts = [Materialiser(node, history, session_timeout=DEFAULT_CONFIG.session_timeout).run()]
            if history.channels is not None:
                parts.append(ChannelMaterialiser(node, history.channels).run())
            work = asyncio.create_task(_all(parts), name="materialiser")
            for number in (signal.SIGTERM, signal.SIGHUP):
                asyncio.get_running_loop().add_signal_handler(number, work.cancel)
            at_end_of_input(work.cancel)
            await asyncio.gather(work, return_exceptions=True)
            if not work.cancelled() and (error := work.exception()) is not None:
                raise error


async def _all(parts: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Run all of them until the first one fails."""
    try:
        async with asyncio.TaskGroup() as tasks:
            for part in parts:
                tasks.create_task(part)
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
