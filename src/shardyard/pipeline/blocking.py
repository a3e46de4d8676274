"""The log, for code that has no event loop: Spark's tasks and the jobs' own steps."""

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from shardyard.log import Log, is_shared, log_exists, open_log
from shardyard.model import InvalidValue

T = TypeVar("T")


class BlockingLog:
    """A log with an event loop of its own, in a thread, so that it also works where a loop is running already."""

    def __init__(self, url: str, *, create: bool = False) -> None:
        """A log that is not there is refused unless it is to be created: a name that was mistyped makes nothing."""
        if not is_shared(url):
            raise InvalidValue("log", url, "a log that other processes can open: Spark's workers are some")
        if not create and not log_exists(url):
            raise InvalidValue("log", url, "a log that exists")
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="shardyard-log", daemon=True)
        self._thread.start()
        try:
            self.log: Log = self.wait(_opened(url))
        except BaseException:
            self._end()
            raise

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of what the log does; its error, if it fails."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def close(self) -> None:
        self.wait(self.log.close())
        self._end()

    def _end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _opened(url: str) -> Log:
    return open_log(url)


@contextmanager
def blocking(url: str, *, create: bool = False) -> Iterator[BlockingLog]:
    """A blocking log for a while."""
    log = BlockingLog(url, create=create)
    try:
        yield log
    finally:
        log.close()
