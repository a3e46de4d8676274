"""The readers of this process that wait for a partition to grow."""

import asyncio
import contextlib
import threading
from collections import defaultdict
from collections.abc import Mapping

GONE = 2**63
"""An end beyond every offset: readers that wait for a partition that is gone are woken, and find that out."""


class Waiters:
    """Futures of readers, by partition ids and offsets. Readers wait in any event loop; wakes come from any thread."""

    def __init__(self) -> None:
        self._waiters: defaultdict[int, set[tuple[int, asyncio.Future[None]]]] = defaultdict(set)
        """Those that wait for one partition."""
        self._waiters_of_many: dict[asyncio.Future[None], Mapping[int, int]] = {}
        """Those that wait for any of several: to list them under each would take longer than all else that they do."""
        self._lock = threading.Lock()
        self.news = 0
        """Rises when readers are notified or listed. A reader notes it before it reads. If it is the same when the
        reader starts to wait, no news was given out in between, so news of its record will find the reader waiting."""

    def __bool__(self) -> bool:
        return bool(self._waiters or self._waiters_of_many)

    def __contains__(self, partition_id: int) -> bool:
        """Whether a reader waits for this partition."""
        if partition_id in self._waiters:
            return True
        with self._lock:
            return any(partition_id in places for places in self._waiters_of_many.values())

    def awaited(self) -> list[int]:
        """The ids of the partitions for which readers wait; for a thread that then looks for their records."""
        with self._lock:
            self.news += 1  # a reader that starts to wait from now on is not in the list
            return list(set(self._waiters).union(*self._waiters_of_many.values()))

    def wait_for(self, places: Mapping[int, int]) -> "asyncio.Future[None]":
        """A future that is done once `notify` gets an end above the offset of one of these partition ids and offsets.
        The caller cancels it when it no longer waits. If there was news since the caller read, it has to look again
        whether a record is there."""
        arrived: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        arrived.add_done_callback(lambda _: self._forget(places, arrived))
        with self._lock:
            if len(places) > 1:
                self._waiters_of_many[arrived] = places
            else:
                for partition_id, offset in places.items():
                    self._waiters[partition_id].add((offset, arrived))
        return arrived

    def notify(self, ends: dict[int, int]) -> None:
        """Wake the readers that wait for offsets below these ends, by partition id."""
        with self._lock:
            self.news += 1
            arrived = {
                future
                for partition_id, end in ends.items()
                for offset, future in self._waiters.get(partition_id, ())
                if offset < end
            }
            arrived.update(future for future, places in self._waiters_of_many.items() if _has_grown(places, ends))
        here = asyncio._get_running_loop()  # None in a thread without one
        for future in arrived:
            if (loop := future.get_loop()) is here:
                _settle(future)
                continue
            with contextlib.suppress(RuntimeError):  # the loop is closed, and nobody waits any more
                loop.call_soon_threadsafe(_settle, future)

    def notify_all(self) -> None:
        """Wake all readers, such as when the log is closed: they will find that out."""
        self.notify(dict.fromkeys(self.awaited(), GONE))

    def _forget(self, places: Mapping[int, int], arrived: "asyncio.Future[None]") -> None:
        with self._lock:
            if self._waiters_of_many.pop(arrived, None) is not None:
                return
            for partition_id, offset in places.items():
                waiters = self._waiters[partition_id]
                waiters.discard((offset, arrived))
                if not waiters:
                    del self._waiters[partition_id]


def _has_grown(places: Mapping[int, int], ends: Mapping[int, int]) -> bool:
    """Whether one of the partitions ends beyond its offset."""
    if len(ends) < len(places):
        return any(places.get(partition_id, GONE) < end for partition_id, end in ends.items())
    return any(ends.get(partition_id, 0) > offset for partition_id, offset in places.items())


def _settle(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)
