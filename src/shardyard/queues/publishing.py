"""Publishing through a broker: which partition a record goes to, that it is stored once, and how many are allowed."""

import zlib
from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from shardyard.log import Log
from shardyard.log.distribution import RoundRobin, Turns
from shardyard.log.router import Router
from shardyard.log.rules import milliseconds
from shardyard.model import Appended, Fence, InvalidValue, OverQuota, Stamp
from shardyard.model.limits import Limits, Validated, validate
from shardyard.queues.delays import Delays
from shardyard.runtime.clock import Clock, SystemClock
from shardyard.wire.records import Posted

RETRY_SECONDS = 3.0
"""How long a publish retries what the log refuses for now. Then the client gets the error, and retries before it fails
over to another broker."""
WHOLE_FROM_RECORDS = 100
"""From this size on, a stamped batch without keys is not split: the whole batch goes to the next partition."""
MAX_ROUTERS = 1000
"""Topics whose current state a publisher keeps in memory."""
_LIMITS = Limits()


class Publisher:
    """Publishes to the topics of a log, on behalf of clients.

    A record goes to the partition of its key. Records without a key are distributed round-robin, as by `Sender`. A
    batch with a stamp is distributed by producer and sequence, so that a retry through any broker goes to the same
    partitions as the first attempt.
    """

    def __init__(self, log: Log, delays: Delays, clock: Clock | None = None) -> None:
        self._log = log
        self._delays = delays
        self._clock = clock or SystemClock()
        self._routers: dict[str, Router] = {}

    async def publish(
        self,
        topic: str,
        posted: pa.RecordBatch | Sequence[Posted],
        *,
        partition: int | None = None,
        stamp: Stamp | None = None,
        fence: Fence | None = None,
        round_robin_start: int | None = None,
        together: bool = False,
    ) -> list[Appended]:
        """Append the records; durable when it returns. Delayed records are not in the result: they have no offset yet.

        `round_robin_start`: where the round-robin of stamped records without a key starts, by default at their
        sequence. `together`: all of them go to that one partition, as a large batch does anyway.
        """
        now = milliseconds(self._clock)
        if isinstance(posted, pa.RecordBatch):
            records = validate(posted, _LIMITS, now)
        else:
            records = validate([p.record for p in posted], _LIMITS, now)
            records = await self._delay(topic, posted, records, now, partition, stamp, fence)
        if not len(records):
            return []
        deadline = self._clock.monotonic() + RETRY_SECONDS
        router = await self._router(topic, deadline)
        try:
            if partition is not None:
                return [await router.send_to(partition, records, deadline=deadline, stamp=stamp, fence=fence)]
            if stamp is not None:
                round_robin = _round_robin(stamp, round_robin_start, together or len(posted) >= WHOLE_FROM_RECORDS)
                return await router.send(records, deadline=deadline, stamp=stamp, fence=fence, round_robin=round_robin)
            if len(records) == 1 and fence is None:
                one = await router.send_one(records, deadline=deadline)
                if one is not None:
                    return [one]
            return await router.send(records, deadline=deadline, fence=fence)
        finally:
            if router.name != topic:  # it has moved, and a topic of the old name may be created again
                self._routers.pop(topic, None)

    async def _delay(
        self,
        topic: str,
        posted: Sequence[Posted],
        records: Validated,
        now: int,
        partition: int | None,
        stamp: Stamp | None,
        fence: Fence | None,
    ) -> Validated:
        """Hand records that are due later to `Delays`. Returns the others."""
        dues = [p.due for p in posted if p.due is not None]
        for due in dues:
            if due < 0:
                raise InvalidValue("deliver_at", due, "milliseconds since 1970, at least 0")
        if not any(due > now for due in dues):
            return records
        if stamp is not None:
            raise InvalidValue("sequence", stamp.sequence, "none with delayed records: give each an id instead")
        if fence is not None:
            raise InvalidValue("fence", fence.name, "none with delayed records: they outlast an ownership")
        await self._log.topic(topic)
        later = [(p.record, p.due) for p in posted if p.due is not None and p.due > now]
        await self._delays.put(topic, [record for record, _ in later], [due for _, due in later], partition=partition)
        return records.part(tuple(p.record for p in posted if p.due is None or p.due <= now))

    async def _router(self, topic: str, deadline: float) -> Router:
        router = self._routers.get(topic)
        if router is None:
            router = Router(self._log, topic, clock=self._clock)
            await router.current(deadline)  # a topic that does not exist is not kept
            if len(self._routers) >= MAX_ROUTERS:
                self._routers.clear()
            router = self._routers.setdefault(topic, router)
        return router


def _round_robin(stamp: Stamp, round_robin_start: int | None, together: bool) -> RoundRobin:
    """The round-robin of a stamped batch. Different producers start with different partitions."""
    first = zlib.crc32(stamp.producer.encode()) + (stamp.sequence if round_robin_start is None else round_robin_start)
    turns = Turns(first, 0 if together else 1)
    return lambda _: turns


class Quota:
    """Limits the records per second of one topic through one broker: a token bucket that holds one second's worth."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._left = 0.0
        self._at = -np.inf

    def take(self, topic: str, count: int, per_second: int) -> None:
        """Take `count` records from the bucket; `OverQuota` if it does not hold enough now. A batch of more than a
        second's worth needs a full bucket."""
        now = self._clock.monotonic()
        self._left = min(float(per_second), self._left + (now - self._at) * per_second)
        self._at = now
        need = min(count, per_second)
        if self._left < need:
            raise OverQuota(topic, per_second, (need - self._left) / per_second)
        self._left -= count
