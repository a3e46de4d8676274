"""`Delays`: storing records that are to be delivered later."""

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Iterable, Sequence
from typing import Any

from msgspec import structs

from shardyard.log import Log, Sender
from shardyard.model import Fence, InvalidValue, Partition, PartitionOutOfRange, Record, whole_number
from shardyard.model.checks import check_int64, check_text
from shardyard.model.limits import ANY_SIZE, check_records
from shardyard.queues.delays.delivery import Delivery
from shardyard.queues.delays.ladder import LADDER_MS, Ladder, check_delay, creating_topic
from shardyard.runtime.clock import Clock, SystemClock
from shardyard.wire.headers import RESERVED


class Delays:
    """Stores records that are to be delivered later. They are delivered while a `Scheduler` runs on the same log.

    **Time.** A record is never delivered before it is due, and normally within 0.2 s after that.

    **Partition.** As a `Sender` would choose it at that moment, or the one that was named. If that one no longer takes
    records, the partition of the key. Id, key, value and headers are preserved; the timestamp is that of the delivery.

    **Order.** By due time. Records that are due within a fraction of a second of each other have no order.

    **At least once.** A record may be delivered twice, with the same id, when a scheduler dies, stalls or loses its
    partitions.
    """

    def __init__(self, log: Log, *, ladder: Iterable[int] = LADDER_MS, clock: Clock | None = None) -> None:
        """`ladder`: the waiting times of the rungs in ms. Every user of a log must have the same."""
        self._log = log
        self._clock = clock or SystemClock()
        self._ladder = Ladder(ladder)
        self._senders = {topic: Sender(log, topic, clock=clock) for topic in self._ladder.topics}

    def due_in(self, delay_ms: int) -> int:
        """The due time, in ms since 1970, of a record with this delay; `InvalidValue` if it is negative or too long."""
        return self._now_ms() + check_delay(whole_number("delay", delay_ms, at_least=0))

    async def put(
        self,
        target: str,
        records: Sequence[Record],
        due: int | Sequence[int],
        *,
        partition: int | None = None,
        fence: Fence | None = None,
    ) -> None:
        """Deliver the records to the topic `target` when they are due (in ms since 1970; one time for all of them, or
        one for each). Records that are due already are delivered before this returns, and the others are durable then.
        `fence`: the ownership on which the caller relies; `Fenced` if it is over.

        Nothing is stored on `InvalidValue`, for a due time more than `MAX_DELAY_MS` ahead, and on `UnknownTopic` or
        `PartitionOutOfRange`, if the target does not exist. If the log refuses some of the records, or the call is
        cancelled, others may have been stored; repeating the call then delivers those twice.
        """
        rows, _ = check_records(records, ANY_SIZE)
        for record in rows:
            if reserved := [name for name, _ in record.headers if name in RESERVED]:
                raise InvalidValue("header", reserved[0], "another name: this one is reserved")
        now = self._now_ms()
        dues = _check_dues(due, len(rows), now)
        await self._check_target(target, partition)

        due_now: list[Record] = []
        waiting: defaultdict[str, list[Record]] = defaultdict(list)
        for record, when in zip(rows, dues, strict=True):
            if when <= now:
                due_now.append(structs.replace(record, timestamp=0))
            else:
                waiting[self._ladder.rung(when - now)].append(Delivery(when, target, partition).add_to(record, now))
        appends: list[Awaitable[Any]] = [self._append_to_rung(rung, rows, fence) for rung, rows in waiting.items()]
        if due_now and partition is not None:
            appends.append(self._log.append(Partition(target, partition), due_now, fence=fence))
        elif due_now:
            appends.append(Sender(self._log, target, clock=self._clock).send(due_now, fence=fence))
        await await_all(appends)

    async def _append_to_rung(self, rung: str, records: list[Record], fence: Fence | None) -> None:
        await creating_topic(self._log, rung, lambda: self._senders[rung].send(records, fence=fence))

    async def _check_target(self, target: str, partition: int | None) -> None:
        check_text("target", target)
        topic = await self._log.topic(target)
        if partition is not None and whole_number("partition", partition, at_least=0) >= topic.partitions:
            raise PartitionOutOfRange(Partition(target, partition), topic.partitions)

    def _now_ms(self) -> int:
        return int(self._clock.now() * 1000)


def _check_dues(due: int | Sequence[int], count: int, now: int) -> list[int]:
    dues = list(due) if isinstance(due, Sequence) else [due] * count
    if len(dues) != count:
        raise InvalidValue("due", due, f"a time for each of the {count} records, or one for all")
    dues = [check_int64("due", when, at_least=0) for when in dues]
    for when in set(dues):
        check_delay(when - now)
    return dues


async def await_all(calls: Iterable[Awaitable[Any]]) -> None:
    """Wait until all calls have ended, then raise the first error."""
    for outcome in await asyncio.gather(*calls, return_exceptions=True):
        if isinstance(outcome, BaseException):
            raise outcome
