"""`Producer`: publishes through brokers, in batches where records come at the same time."""

import asyncio
import math
import random
import uuid
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Self

from shardyard.client.bodies import packed
from shardyard.client.brokers import Brokers
from shardyard.client.paths import path
from shardyard.log import SequenceWindow
from shardyard.model import TAG, TRACE, Appended, Closed, Headers, InvalidValue, Record
from shardyard.model.checks import check_int64
from shardyard.model.given import GivenHeaders, GivenValue, encoded_headers, encoded_text
from shardyard.model.limits import Limits, check_records, is_arrow
from shardyard.runtime.clock import Clock
from shardyard.wire import frames, requests
from shardyard.wire.codec import encode
from shardyard.wire.media import MSGPACK
from shardyard.wire.records import PackedRecord, PackedRecords

if TYPE_CHECKING:
    import pyarrow as pa

MAX_BATCH_RECORDS = 500
MAX_BATCH_BYTES = 1024 * 1024
"""The limits of what `send` puts into one request."""
BUSY_SECONDS = 0.1
"""A lane is busy if a request follows the last one within this time."""
MAX_IN_FLIGHT = 16
"""Batches of `publish` per topic."""
_LIMITS = Limits()


@dataclass(slots=True)
class _Lane:
    """The records that wait to be sent to one topic."""

    clock: Clock
    waiting: list[tuple[Record, asyncio.Future[None]]] = field(default_factory=list)
    sending: asyncio.Task[None] | None = None
    window: SequenceWindow = field(default_factory=SequenceWindow)
    round_robin_start: int = 0
    sent_at: float = -math.inf
    capacity: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_IN_FLIGHT))

    def distribute(self, count: int) -> tuple[int, int]:
        """`round_robin_start` and `together` of the next request: how its records without a key are distributed.

        Round-robin over the partitions; on a busy lane, a whole request goes to one partition, which is chosen at
        random: if these were chosen round-robin too, alternating small and large requests would always meet the same
        partitions."""
        if count > 1 and self.clock.monotonic() - self.sent_at < BUSY_SECONDS:
            return random.getrandbits(31), 1
        start = self.round_robin_start
        self.round_robin_start += count
        return start, 0

    def close(self) -> None:
        """Fail the records that were not sent."""
        for _, done in self.waiting:
            if not done.done():
                done.set_exception(Closed("the producer"))
        self.waiting.clear()


class Producer:
    """Sends records; each call returns when what it sent is durable.

    What is retried, through any broker, is stored once; only records with a delay may be stored twice then, with the
    same id. `send` keeps the order of its calls: records that come while a request is in flight are sent together in
    the next one. Batches of `publish` that are in flight at the same time have no order among them.
    """

    def __init__(
        self,
        brokers: str | Sequence[str] | Brokers,
        *,
        token: str | None = None,
        retry_seconds: float = 30.0,
        linger: float = 0.0,
        clock: Clock | None = None,
    ) -> None:
        """`token` and `retry_seconds` as for `Brokers`. `linger`: seconds for which `send` waits for more records,
        to send them together."""
        self._owns_brokers = not isinstance(brokers, Brokers)
        if not isinstance(brokers, Brokers):
            brokers = Brokers(brokers, token=token, retry_seconds=retry_seconds, clock=clock)
        self._brokers = brokers
        self._clock = clock or brokers.clock
        self._name = uuid.uuid4().hex
        self._linger = linger
        self._lanes: defaultdict[str, _Lane] = defaultdict(lambda: _Lane(self._clock))
        self._closed = False

    async def __aenter__(self) -> Self:
        if self._owns_brokers:
            await self._brokers.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Send what is waiting, unless the block ends with an error."""
        self._closed = True
        tasks = [lane.sending for lane in self._lanes.values() if lane.sending is not None]
        for task in tasks if kind is not None else ():
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for lane in self._lanes.values():
            lane.close()
        if self._owns_brokers:
            await self._brokers.__aexit__(kind, error, trace)

    async def send(
        self,
        topic: str,
        value: GivenValue,
        *,
        key: bytes | str | None = None,
        id: str | None = None,  # noqa: A002 as the record calls it
        tag: str | None = None,
        trace: str | None = None,
        headers: GivenHeaders = (),
        delay: float | None = None,
        deliver_at: int | None = None,
    ) -> str:
        """Send one record. Returns its id when it is durable. Strings are sent as UTF-8; a dict or a list as a value is
        sent as JSON. `headers`: a mapping, or pairs. `delay`: seconds until it is delivered; `deliver_at`: the same as
        a time, in milliseconds since 1970. A record that is sent twice with the same `id` is stored twice."""
        if self._closed:
            raise Closed("the producer")
        named = [(TAG, tag), (TRACE, trace)]
        own: Headers = tuple((name, encoded_text(name, text, "a string")) for name, text in named if text is not None)
        record = Record.new(value, key, (*own, *encoded_headers(headers)))
        if id is not None:
            record = Record(id, record.key, record.value, record.headers)
        check_records([record], _LIMITS)
        if delay is not None or deliver_at is not None:
            await self._delay(topic, record, delay, deliver_at)
            return record.id
        lane = self._lanes[topic]
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        lane.waiting.append((record, done))
        if lane.sending is None or lane.sending.done():
            lane.sending = asyncio.create_task(self._drain(topic, lane), name=f"sending to {topic}")
        await done
        return record.id

    async def publish(
        self, topic: str, records: "Sequence[Record] | pa.RecordBatch", *, partition: int | None = None
    ) -> list[Appended]:
        """Send a batch in one request. Returns where its parts are stored."""
        if self._closed:
            raise Closed("the producer")
        rows = records if is_arrow(records) else check_records(records, _LIMITS)[0]
        lane = self._lanes[topic]
        async with lane.capacity:
            return await self._post(topic, rows, lane, partition=partition)

    async def _post(
        self,
        topic: str,
        rows: "Sequence[Record] | pa.RecordBatch",
        lane: _Lane,
        *,
        partition: int | None = None,
        round_robin_start: int | None = None,
        together: int = 0,
    ) -> list[Appended]:
        records = packed(rows)
        async with lane.window.sequence() as sequence:
            options = requests.Publish(partition, self._name, sequence, round_robin_start, together)
            published = await self._brokers.publish(frames.Publish(topic, records, options), is_stamped=True)
        return [part.appended() for part in published.stored]

    async def _delay(self, topic: str, record: Record, delay: float | None, deliver_at: int | None) -> None:
        if delay is not None:
            is_number = isinstance(delay, int | float) and not isinstance(delay, bool)
            if deliver_at is not None or not is_number or not 0 <= delay < 2**40:
                raise InvalidValue("delay", delay, "a number of seconds, at least 0; or deliver_at instead")
            deliver_at = round((self._clock.now() + delay) * 1000)
        check_int64("deliver_at", deliver_at, at_least=0)
        packed = PackedRecord(record.value, record.key, record.id, list(record.headers), 0, deliver_at)
        body = encode(PackedRecords([packed]), MSGPACK)
        await self._brokers.call("POST", path("topics", topic, "records"), body, {"Content-Type": MSGPACK})

    async def _drain(self, topic: str, lane: _Lane) -> None:
        """Send what is waiting, request after request, until nothing is left."""
        while lane.waiting:
            if self._linger and len(lane.waiting) < MAX_BATCH_RECORDS:
                await self._clock.sleep(self._linger)
            batch = _fitting(lane.waiting)
            del lane.waiting[: len(batch)]
            round_robin_start, together = lane.distribute(len(batch))
            try:
                rows = [record for record, _ in batch]
                await self._post(topic, rows, lane, round_robin_start=round_robin_start, together=together)
            except BaseException as error:
                for _, done in batch:
                    if not done.done():
                        done.set_exception(error if isinstance(error, Exception) else Closed("the producer"))
                if not isinstance(error, Exception):
                    raise
            else:
                for _, done in batch:
                    if not done.done():
                        done.set_result(None)
            lane.sent_at = self._clock.monotonic()


def _fitting(waiting: Sequence[tuple[Record, "asyncio.Future[None]"]]) -> list[tuple[Record, "asyncio.Future[None]"]]:
    """As much from the front as fits into one request."""
    size, count = 0, 0
    for record, _ in waiting[:MAX_BATCH_RECORDS]:
        size += len(record.value)
        if count and size > MAX_BATCH_BYTES:
            break
        count += 1
    return list(waiting[:count])
