"""A log for code without an event loop: Spark's tasks, and the jobs in the driver."""

from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from shardyard.log import Log, is_shared, log_exists, open_log
from shardyard.model import InvalidValue
from shardyard.runtime.loop_thread import LoopThread

T = TypeVar("T")


class BlockingLog:
    """A log with its own event loop in a thread, so that it can also be used where a loop is already running."""

    def __init__(self, url: str, *, create: bool = False) -> None:
        """Open the log. One that does not exist is an error unless `create` is set, so that a typo creates nothing."""
        if not is_shared(url):
            raise InvalidValue("log", url, "a log that other processes can open, since Spark's workers are processes")
        if not create and not log_exists(url):
            raise InvalidValue("log", url, "a log that exists")
        self._loop = LoopThread("shardyard-log")
        try:
            self.log: Log = self.wait(_open(url))
        except BaseException:
            self._loop.close()
            raise

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a call of the log to its end. Returns its result, or raises its error."""
        return self._loop.run(work)

    def close(self) -> None:
        self.wait(self.log.close())
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
