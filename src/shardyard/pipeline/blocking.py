"""A log for code without an event loop: Spark's tasks, and the jobs in the driver."""

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from shardyard.log import Log, open_log
from shardyard.log.sqlite.files import FILE
from shardyard.model import InvalidValue

T = TypeVar("T")


class BlockingLog:
    """A log with its own event loop in a thread, so that it can also be used where a loop is already running."""

    def __init__(self, url: str, *, create: bool = False) -> None:
        """Open the log. One that does not exist is an error unless `create` is set, so that a typo creates nothing."""
        if url == "memory://":
            raise InvalidValue("log", url, "a log that other processes can open, since Spark's workers are processes")
        folder = url.removeprefix("sqlite:///")
        if not create and folder != url and not Path(folder, FILE).is_file():
            raise InvalidValue("log", url, "a log that exists")
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="shardyard-log", daemon=True)
        self._thread.start()
        try:
            self.log: Log = self.wait(_open(url))
        except BaseException:
            self._stop_loop()
            raise

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a call of the log to its end. Returns its result, or raises its error."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def close(self) -> None:
        self.wait(self.log.close())
        self._stop_loop()

    def _stop_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _open(url: str) -> Log:
    return open_log(url)


@contextmanager
def blocking(url: str, *, create: bool = False) -> Iterator[BlockingLog]:
    """A `BlockingLog` that is closed at the end of the block."""
    log = BlockingLog(url, create=create)
    try:
        yield log
    finally:
        log.close()
