"""`Scheduler`: moving delayed records down the ladder, and delivering them when they are due."""

import asyncio
import contextlib
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import Any

import pyarrow as pa
from msgspec import structs

from shardyard.groups import Node, OwnedBatch, Reader
from shardyard.log import Sender
from shardyard.model import Conflict, Fenced, InvalidCall, Partition, Record, RetryLater, TooLarge
from shardyard.placement import DEFAULT_HASH, partitioner_named
from shardyard.queues.delays.delayed import await_all
from shardyard.queues.delays.delivery import Delivery, due_time, own_headers
from shardyard.queues.delays.ladder import (
    LADDER_MS,
    RUNG_PARTITIONS,
    Ladder,
    check_delay,
    create_internal_topic,
    creating_topic,
)
from shardyard.runtime.clock import Clock
from shardyard.runtime.retry import Backoff, retry
from shardyard.wire.headers import REASON

_log = logging.getLogger(__name__)

GROUP = "shardyard.delays"
"""The group of all schedulers."""
UNDELIVERABLE = "shardyard.undeliverable"
"""The topic of records that could not be delivered, with the headers they waited with and the reason."""

RETRY_MS = 1_000
"""How long records wait before the next attempt when their target temporarily refuses them."""
BACKOFF = Backoff(first=0.02, longest=0.5)
MAX_SLEEP_SECONDS = 1.0
"""The wall clock is read again at least this often, because it may have been set."""
TRIM_SECONDS = 5.0
"""How often, at most, the processed records of a rung's partition are trimmed."""
REASON_BYTES = 500


class Scheduler:
    """Moves delayed records to the next rung, and delivers those that are due. Any number of schedulers may run on a
    log and registry: they share the partitions of the rungs, and when one dies, the others take over.

    Every append is fenced by the ownership of the rung's partition, so a scheduler that lost it cannot append.

    A target that temporarily refuses records is retried about every second. A record that cannot be delivered, for
    instance because its target was deleted, goes to the topic `UNDELIVERABLE`. Neither delays other records.
    """

    def __init__(
        self,
        node: Node,
        *,
        ladder: Iterable[int] = LADDER_MS,
        session_timeout: float = 10.0,
        clock: Clock | None = None,
    ) -> None:
        """`ladder`: as for `Delays`. `session_timeout`: seconds until others take over from a scheduler that died."""
        self._node = node
        self._log = node.log
        self._ladder = Ladder(ladder)
        self._session = session_timeout
        self._clock = clock or node.clock
        self._trim_at: dict[Partition, float] = {}

    async def run(self) -> None:
        """Until cancelled. Errors that it cannot recover from, such as a closed log, are raised in an
        `ExceptionGroup`."""
        await asyncio.to_thread(_load_placement)
        for topic in self._ladder.topics:
            await self._retry(partial(create_internal_topic, self._log, topic))
        reader = Reader(GROUP, self._ladder.topics, node=self._node, session_timeout=self._session)
        async with reader, asyncio.TaskGroup() as tasks:
            async for batch in reader:
                tasks.create_task(self._process(batch), name=f"delays of {batch.partition}")

    async def _process(self, batch: OwnedBatch) -> None:
        """Move each record of the batch when it has waited long enough, until all are moved or the partition is to be
        released."""
        records = batch.records()
        commits = [*batch.offsets()[1:], batch.end]  # what to commit after each record
        wait_ms = self._ladder.wait_ms.get(batch.partition.topic, 0)
        move_at = [min(due_time(record), record.timestamp + wait_ms) for record in records]
        done = 0
        try:
            while done < len(records) and not batch.stale:
                now = self._now_ms()
                upto = next((i for i in range(done, len(records)) if move_at[i] > now), len(records))
                if upto == done:
                    batch.defer()
                    await self._clock.sleep(min((move_at[done] - now) / 1000, MAX_SLEEP_SECONDS))
                    continue
                batch.resume()
                await self._move(batch, records[done:upto], now)
                await self._retry(partial(batch.commit, commits[upto - 1]))
                done = upto
        except Fenced as error:
            _log.info("left to the next owner of %s: %s", batch.partition, error)
        finally:
            if batch.stale:
                batch.abandon()
        if done:
            await self._trim(batch.partition, commits[done - 1])

    async def _move(self, batch: OwnedBatch, records: Sequence[Record], now: int) -> None:
        """Store each record where it goes next: on another rung, or on its target."""
        waiting: defaultdict[str, list[Record]] = defaultdict(list)
        due: defaultdict[tuple[str, int | None], list[Record]] = defaultdict(list)
        appends: list[Awaitable[None]] = []
        for record in records:
            try:
                delivery = Delivery.of(record)
                check_delay(delivery.due - now)
            except ValueError as error:
                appends.append(self._append_undeliverable(batch, [record], str(error)))
                continue
            if delivery.due > now:
                waiting[self._ladder.rung(delivery.due - now)].append(structs.replace(record, timestamp=now))
            else:
                due[delivery.target, delivery.partition].append(record)
        appends += [self._append_to_rung(batch, rung, delayed) for rung, delayed in waiting.items()]
        appends += [self._deliver(batch, target, pinned, delayed) for (target, pinned), delayed in due.items()]
        await await_all(appends)

    async def _append_to_rung(self, batch: OwnedBatch, rung: str, records: list[Record]) -> None:
        try:
            await self._append(batch, rung, records)
        except (InvalidCall, Conflict) as error:
            await self._append_undeliverable(batch, records, str(error))

    async def _deliver(self, batch: OwnedBatch, target: str, partition: int | None, records: list[Record]) -> None:
        """Deliver to one target. If it temporarily refuses the records, they wait and are retried."""
        bare = [structs.replace(record, headers=own_headers(record), timestamp=0) for record in records]
        try:
            if partition is None or not await self._append_pinned(batch, Partition(target, partition), bare):
                await Sender(self._log, target, timeout=0.0, clock=self._clock).send(bare, fence=batch.fence)
        except RetryLater as error:
            _log.warning("%d records for %r will be retried: %s", len(records), target, error)
            now = self._now_ms()
            delivery = Delivery(now + RETRY_MS, target, partition)
            delayed = [delivery.add_to(record, now) for record in records]
            await self._append_to_rung(batch, self._ladder.rung(RETRY_MS), delayed)
        except (InvalidCall, Conflict) as error:
            await self._append_undeliverable(batch, records, str(error))

    async def _append_pinned(self, batch: OwnedBatch, partition: Partition, records: list[Record]) -> bool:
        """False if the partition takes no more records: it was dropped, or its topic has moved."""
        try:
            await batch.append(partition, records)
        except (InvalidCall, Conflict):
            return False
        return True

    async def _append_undeliverable(self, batch: OwnedBatch, records: list[Record], reason: str) -> None:
        _log.warning("%d records of %s go to %r: %s", len(records), batch.partition, UNDELIVERABLE, reason)
        header = (REASON, reason.encode(errors="replace")[:REASON_BYTES])
        with_reason = [structs.replace(record, headers=(*record.headers, header), timestamp=0) for record in records]
        try:
            await self._append(batch, UNDELIVERABLE, with_reason)
        except TooLarge:  # without the reason they fit: they were stored like that
            await self._append(batch, UNDELIVERABLE, records)

    async def _append(self, batch: OwnedBatch, topic: str, records: list[Record]) -> None:
        """Append to an internal topic. A key stays on partitions with the same index, so its records stay in order."""
        to = Partition(topic, batch.partition.index % RUNG_PARTITIONS)
        await self._retry(lambda: creating_topic(self._log, topic, lambda: batch.append(to, records)))

    async def _retry(self, call: Callable[[], Awaitable[Any]]) -> None:
        await retry(call, clock=self._clock, backoff=BACKOFF, on_retry=_log_retry)

    async def _trim(self, partition: Partition, before: int) -> None:
        """Not every time: processed records that are still stored cost space, and nothing else."""
        now = self._clock.monotonic()
        if now >= self._trim_at.get(partition, now):
            self._trim_at[partition] = now + TRIM_SECONDS
            with contextlib.suppress(InvalidCall, Conflict, RetryLater):
                await self._log.trim(partition, before)

    def _now_ms(self) -> int:
        return int(self._clock.now() * 1000)


def _log_retry(error: RetryLater) -> None:
    _log.warning("delays will be retried: %s", error)


def _load_placement() -> None:
    """Load the code that places keys. Its first use takes a while and blocks everything else, so this is done before
    any record is due."""
    for partitioner, hash_ in DEFAULT_HASH.items():
        partitioner_named(partitioner, 1, hash_).place_array(pa.array([b""]))
