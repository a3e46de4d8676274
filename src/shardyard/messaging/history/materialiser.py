"""`Materialiser`: a member of the group that reads `inbox` and stores what it finds in the history."""

import asyncio
import logging
from collections.abc import Iterator
from contextlib import AsyncExitStack

from shardyard.groups import OwnedBatch, Reader
from shardyard.groups.coordinator import Host
from shardyard.messaging.history.checks import check_storable
from shardyard.messaging.history.port import History, PlacedEntry
from shardyard.model import Fenced, InvalidCall, Partition, RetryLater
from shardyard.runtime.metrics import HISTORY_MALFORMED_RECORDS
from shardyard.runtime.retry import Backoff, first_only, retry
from shardyard.wire.inbox import POST_KEY, TOPIC, decode_entry

GROUP = "messaging.history"

_BACKOFF = Backoff(first=0.05, longest=2.0)
"""While the history or the registry is out of reach, in seconds."""

LINGER_SECONDS = 0.25
"""After a batch of a partition was stored, for the next one to become larger."""

_log = logging.getLogger(__name__)


class Materialiser:
    """Stores the entries of its partitions of `inbox`, and commits them when they are durable.

    Every entry is stored at least once, and the history knows it by its id. A record that is none is logged, once for
    each partition, counted and skipped.
    """

    def __init__(self, node: Host, history: History, *, name: str | None = None, session_timeout: float = 10.0) -> None:
        self._node = node
        self._history = history
        self._clock = node.clock
        self._name = name
        self._session_timeout = session_timeout
        self._warned: set[Partition] = set()
        """The partitions with a malformed record that was logged."""

    async def run(self) -> None:
        """Until cancelled. While the history or the registry is out of reach, calls are retried; an error that retrying
        does not mend is raised."""
        reader = Reader(GROUP, [TOPIC], node=self._node, name=self._name, session_timeout=self._session_timeout)
        try:
            async with AsyncExitStack() as stack:
                await retry(
                    lambda: stack.enter_async_context(reader),
                    clock=self._clock,
                    backoff=_BACKOFF,
                    on_retry=first_only(lambda error: _log.warning("joining %s will be retried: %s", GROUP, error)),
                )
                # Partitions are stored side by side, so that they share transactions. Each has one batch in flight.
                tasks = await stack.enter_async_context(asyncio.TaskGroup())
                async for batch in reader:
                    tasks.create_task(self._store(batch), name=f"storing {batch.partition}")
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _store(self, batch: OwnedBatch) -> None:
        entries = list(self._entries(batch))

        def retried(error: RetryLater) -> None:
            if batch.lost:  # whoever owns the partition now stores it
                raise error
            warn(error)

        warn = first_only(lambda error: _log.warning("storing %r will be retried: %s", batch, error))
        try:
            await retry(lambda: self._history.store(entries), clock=self._clock, backoff=_BACKOFF, on_retry=retried)
            await self._clock.sleep(LINGER_SECONDS)
            await retry(batch.commit, clock=self._clock, backoff=_BACKOFF, on_retry=retried)
        except (Fenced, RetryLater) as error:
            _log.info("%r is left to the next owner of its partition: %s", batch, error)

    def _entries(self, batch: OwnedBatch) -> Iterator[PlacedEntry]:
        epoch = batch.position(batch.first).epoch  # of the topic; the batch's own is that of the ownership
        for offset, record in zip(batch.offsets(), batch.records(), strict=True):
            if record.key is not None and record.key.startswith(POST_KEY):  # the history has it from `events`
                continue
            try:
                entry = decode_entry(record.value)
                check_storable(entry)
            except InvalidCall as error:
                HISTORY_MALFORMED_RECORDS.add()
                if batch.partition not in self._warned:
                    self._warned.add(batch.partition)
                    _log.warning(
                        "the record at offset %d of %s is skipped, as others like it will be: %s",
                        offset,
                        batch.partition,
                        error,
                    )
                continue
            if not entry.away:
                yield PlacedEntry(batch.partition, epoch, offset, entry)
