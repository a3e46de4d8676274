"""Waking readers that wait for new records: at once for records of this process, by NOTIFY for those of others."""

import logging
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from shardyard.log.postgresql.catalog import CHANGED, CHANNEL
from shardyard.log.waiters import GONE, Waiters
from shardyard.model import ShardyardError
from shardyard.model.url import EngineUrl
from shardyard.runtime.postgresql import Listener

if TYPE_CHECKING:
    import asyncio

_log = logging.getLogger(__name__)

CHECK_SECONDS = 2.0
"""How often to look whether records arrived without a notification, which a process that dies may not send."""


class Tail:
    """Wakes readers when a partition grows or is gone. Its threads start with the first reader that waits."""

    def __init__(self, url: EngineUrl, ends: Callable[[list[int]], dict[int, int]]) -> None:
        """`ends` looks up the ends of partitions that still exist, by id."""
        self._ends = ends
        self._waiters = Waiters()
        self._listener = Listener(url, "log", {CHANNEL: self._on_notify}, self._check_soon)
        self._check = threading.Event()
        self._closing = False
        self._thread = threading.Thread(target=self._watch, name="shardyard-log-tail", daemon=True)
        self._lock = threading.Lock()

    @property
    def news(self) -> int:
        """What a reader notes before it reads, for `wait_for`."""
        return self._waiters.news

    def wait_for(self, places: Mapping[int, int], since: int) -> "asyncio.Future[None]":
        """A future that is done when one of the partitions, given by id, has a record at its offset or is gone, and
        soon if that is so already. `since`: the `news` before the caller saw that there is no such record. The caller
        cancels the future when it no longer waits."""
        arrived = self._waiters.wait_for(places)
        with self._lock:
            if self._closing:  # since the caller read
                self._waiters.notify_all()
            elif self._thread.ident is None:
                self._thread.start()
                self._listener.start()  # it checks everything once it listens
        if self.news != since:
            self._check_soon()
        return arrived

    def notify(self, ends: dict[int, int]) -> None:
        """Wake the readers that waited for offsets below these ends, by partition id. Callable from any thread."""
        self._waiters.notify(ends)

    def close(self) -> None:
        """Stop, and wake all waiting readers: they will find the log closed."""
        with self._lock:
            self._closing = True
        self._check.set()
        self._listener.close()
        self._waiters.notify_all()
        if self._thread.ident is not None:
            self._thread.join()

    def _on_notify(self, payloads: list[str]) -> None:
        ends: dict[int, int] = {}
        for payload in payloads:
            if payload == CHANGED:
                self._check_soon()
                continue
            for pair in payload.split(","):
                partition_id, end = map(int, pair.split(":"))
                ends[partition_id] = max(end, ends.get(partition_id, 0))
        self._waiters.notify(ends)

    def _check_soon(self) -> None:
        self._check.set()

    def _watch(self) -> None:
        has_failed = False
        while not self._closing:
            self._check.wait(CHECK_SECONDS)
            self._check.clear()
            awaited = self._waiters.awaited()
            if not awaited or self._closing:
                continue
            try:
                ends = self._ends(awaited)
            except ShardyardError as error:  # the readers get it, too, when their time is over
                _log.debug("looking for new records failed: %s", error)
            except Exception as error:  # noqa: BLE001 without this thread readers might wait in vain
                if not has_failed and not self._closing:
                    _log.warning("looking for new records failed and will be retried", exc_info=error)
                has_failed = True
            else:
                has_failed = False
                self._waiters.notify({partition_id: ends.get(partition_id, GONE) for partition_id in awaited})
