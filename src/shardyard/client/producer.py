"""`Producer`: publishes through brokers, in batches where records come at the same time."""

import asyncio
import contextlib
import math
import random
import uuid
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

from shardyard.client.bodies import packed
from shardyard.client.brokers import Brokers, CarrierName
from shardyard.client.carrier import Carrier
from shardyard.client.paths import path
from shardyard.log import SequenceWindow
from shardyard.model import TAG, TRACE, Appended, Closed, InvalidValue, Record, RetryLater
from shardyard.model.checks import check_int64, check_text
from shardyard.model.given import GivenHeaders, GivenValue, encoded_headers, encoded_text
from shardyard.model.limits import Limits, check_new_record, check_records, is_arrow
from shardyard.runtime.clock import Clock
from shardyard.wire import frames, requests
from shardyard.wire.codec import encode
from shardyard.wire.media import MSGPACK
from shardyard.wire.records import PackedRecord, PackedRecords

if TYPE_CHECKING:
    import pyarrow as pa

MAX_BATCH_RECORDS = 256
MAX_BATCH_BYTES = 1024 * 1024
"""The limits of what `send` puts into one batch."""
MAX_PIPELINED = 2
"""Batches of `send` per topic that are in flight at the same time, on a connection that keeps their order."""
PIPELINED_RECORDS = 16
"""How many must wait for a second batch to be worth its cost if the first one was just sent."""
PIPELINED_SECONDS = 0.0005
"""A record that is added so long after the last batch was sent does not wait until that batch is durable."""
BUSY_SECONDS = 0.1
"""A lane is busy if a batch follows the last one within this time."""
MAX_IN_FLIGHT = 16
"""Batches of `publish` per topic."""
_LIMITS = Limits()

Waiting = tuple[Record, "asyncio.Future[None]"]
"""A record, and who waits for it to be durable."""
InFlight = tuple["asyncio.Task[None]", "_Batch"]


class _Batch:
    """Records of `send` that are sent together."""

    def __init__(self, records: "Sequence[Waiting]") -> None:
        self.records = records
        self.carrier: Carrier | None = None
        """The connection on which it is in flight; None before, and when it is sent again."""

    def settle(self, error: Exception | None = None) -> None:
        """Tell those who still wait that it is durable, or why not."""
        for _, done in self.records:
            if done.done():
                continue
            if error is None:
                done.set_result(None)
            else:
                done.set_exception(error)


class _Lane:
    """The records that are sent to one topic."""

    def __init__(self, clock: Clock) -> None:
        self.waiting: list[Waiting] = []
        self.draining: asyncio.Task[None] | None = None
        self.batches: dict[asyncio.Task[None], _Batch] = {}
        """Those in flight, in their order."""
        self.changed = asyncio.Event()
        """A record was added to those that wait, or a batch is no longer in flight."""
        self.retrying = 0
        """How many of them are sent again: then each waits for the one before it."""
        self.window = SequenceWindow()
        self.capacity = asyncio.Semaphore(MAX_IN_FLIGHT)
        self._clock = clock
        self._round_robin_start = 0
        self._next_together = random.getrandbits(16)
        self._sent_at = -math.inf

    def put(self, waiting: Waiting) -> None:
        self.waiting.append(waiting)
        self.changed.set()

    def can_send(self, *, keeps_order: bool) -> bool:
        """Whether another batch is to be sent now. `keeps_order`: the connection stores batches in their order."""
        if not keeps_order or not self.batches:
            return not self.batches
        is_worth_it = (
            len(self.waiting) >= PIPELINED_RECORDS or self._clock.monotonic() - self._sent_at > PIPELINED_SECONDS
        )
        return is_worth_it and len(self.batches) < MAX_PIPELINED

    def start(self, sending: "asyncio.Task[None]", batch: _Batch) -> None:
        """The task that sends a batch was created."""
        self.batches[sending] = batch
        sending.add_done_callback(self._ended)

    def _ended(self, sending: "asyncio.Task[None]") -> None:
        del self.batches[sending]
        self.changed.set()

    def distribute(self, count: int) -> tuple[int, int]:
        """`round_robin_start` and `together` of the next batch: how its records without a key are distributed.

        Round-robin over the partitions. On a busy lane, a whole batch goes to the next partition, or at random to the
        one after it, so that alternating small and large batches do not always meet the same partitions."""
        now = self._clock.monotonic()
        busy, self._sent_at = now - self._sent_at < BUSY_SECONDS, now
        if count > 1 and busy:
            self._next_together += 1 + random.getrandbits(1)
            return self._next_together, 1
        start = self._round_robin_start
        self._round_robin_start += count
        return start, 0

    async def close(self, *, at_once: bool) -> None:
        """Send what is waiting. `at_once`: fail the records that are not durable yet."""
        drainings = () if self.draining is None else (self.draining,)
        if at_once:
            for task in (*drainings, *self.batches):
                task.cancel()
        await asyncio.gather(*drainings, return_exceptions=True)
        batches = [*self.batches.values(), _Batch(self.waiting)]
        await asyncio.gather(*self.batches, return_exceptions=True)
        for batch in batches:
            batch.settle(Closed("the producer"))  # a task that was cancelled before it began has not done it
        self.waiting = []


class Producer:
    """Sends records; each call returns when what it sent is durable.

    What is retried, through any broker, is stored once; only records with a delay may be stored twice then, with the
    same id. `send` keeps the order of its calls and sends batches: records that come soon after one was sent, or while
    two are in flight, are sent together in the next one. Batches of `publish` that are in flight at the same time have
    no order among them.
    """

    def __init__(
        self,
        brokers: str | Sequence[str] | Brokers,
        *,
        token: str | None = None,
        retry_seconds: float = 30.0,
        linger: float = 0.0,
        carrier: CarrierName = "auto",
        clock: Clock | None = None,
    ) -> None:
        """`token`, `retry_seconds` and `carrier` as for `Brokers`. `linger`: seconds for which `send` waits for more
        records, to send them together."""
        self._owns_brokers = not isinstance(brokers, Brokers)
        if not isinstance(brokers, Brokers):
            brokers = Brokers(brokers, token=token, retry_seconds=retry_seconds, carrier=carrier, clock=clock)
        self._brokers = brokers
        self._clock = clock or brokers.clock
        self._name = uuid.uuid4().hex
        self._linger = linger
        self._lanes: dict[str, _Lane] = {}
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
        for lane in self._lanes.values():
            await lane.close(at_once=kind is not None)
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
        if tag is not None or trace is not None:
            named = [(TAG, tag), (TRACE, trace)]
            own = [(name, encoded_text(name, text, "a string")) for name, text in named if text is not None]
            headers = (*own, *encoded_headers(headers))
        record = Record.new(value, key, headers)
        if id is None:
            check_new_record(record, _LIMITS)
        else:
            record = Record(id, record.key, record.value, record.headers)
            check_records([record], _LIMITS)
        lane = self._lane(topic)
        if delay is not None or deliver_at is not None:
            await self._delay(topic, record, delay, deliver_at)
            return record.id
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        lane.put((record, done))
        if lane.draining is None or lane.draining.done():
            lane.draining = asyncio.create_task(self._drain(topic, lane), name=f"sending to {topic}")
        await done
        return record.id

    async def publish(
        self, topic: str, records: "Sequence[Record] | pa.RecordBatch", *, partition: int | None = None
    ) -> list[Appended]:
        """Send a batch in one request. Returns where its parts are stored."""
        if self._closed:
            raise Closed("the producer")
        rows = records if is_arrow(records) else check_records(records, _LIMITS)[0]
        if partition is not None:
            partition = check_int64("partition", partition, at_least=0)
        lane = self._lane(topic)
        async with lane.capacity, lane.window.sequence() as sequence:
            call = self._call(topic, rows, sequence, partition=partition)
            published = await self._brokers.publish(call, is_stamped=True)
        return [part.appended() for part in published.stored]

    def _lane(self, topic: str) -> _Lane:
        try:
            return self._lanes[topic]
        except (KeyError, TypeError):  # its first record, or not the name of a topic
            check_text("topic", topic)
        lane = self._lanes[topic] = _Lane(self._clock)
        return lane

    def _call(
        self,
        topic: str,
        rows: "Sequence[Record] | pa.RecordBatch",
        sequence: int,
        *,
        partition: int | None = None,
        round_robin_start: int | None = None,
        together: int = 0,
    ) -> frames.Publish:
        options = requests.Publish(partition, self._name, sequence, round_robin_start, together)
        return frames.Publish(topic, packed(rows), options)

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
        """Send what is waiting, batch after batch, until nothing is left."""
        while lane.waiting:
            if not lane.can_send(keeps_order=self._brokers.keeps_order):
                lane.changed.clear()
                await lane.changed.wait()
                continue
            if self._linger and len(lane.waiting) < MAX_BATCH_RECORDS:
                await self._clock.sleep(self._linger)
            batch = _Batch(_fitting(lane.waiting))
            del lane.waiting[: len(batch.records)]
            before = next(reversed(lane.batches.items()), None)
            sending = asyncio.create_task(self._send_batch(topic, lane, batch, before))
            lane.start(sending, batch)

    async def _send_batch(self, topic: str, lane: _Lane, batch: _Batch, before: InFlight | None) -> None:
        """Send a batch of `send`, after the one before it, and report to those who wait."""
        try:
            async with lane.window.sequence() as sequence:
                start, together = lane.distribute(len(batch.records))
                rows = [record for record, _ in batch.records]
                call = self._call(topic, rows, sequence, round_robin_start=start, together=together)
                await self._publish_in_order(lane, call, batch, before)
        except asyncio.CancelledError:
            batch.settle(Closed("the producer"))
            raise
        except Exception as error:  # noqa: BLE001 those who wait get it
            batch.settle(error)
        else:
            batch.settle()

    async def _publish_in_order(
        self, lane: _Lane, call: frames.Publish, batch: _Batch, before: InFlight | None
    ) -> None:
        """Publish without waiting for the batch before, if that is in flight on a connection that keeps their order.
        When that fails, wait for it after all, and publish again."""

        async def publish(carrier: Carrier) -> None:
            if before is not None:
                task, earlier = before
                if lane.retrying or not carrier.keeps_order or earlier.carrier is not carrier:
                    await asyncio.wait([task])
            batch.carrier = carrier
            await carrier.publish(call, self._brokers.failover_seconds, lane)

        with contextlib.suppress(ConnectionError, RetryLater):
            await self._brokers.attempt(publish, timeout=self._brokers.failover_seconds)
            return
        batch.carrier = None
        lane.retrying += 1
        try:
            if before is not None:
                await asyncio.wait([before[0]])
            await self._brokers.publish(call, is_stamped=True)
        finally:
            lane.retrying -= 1


def _fitting(waiting: Sequence[Waiting]) -> list[Waiting]:
    """As much from the front as fits into one request."""
    size, count = 0, 0
    for record, _ in waiting[:MAX_BATCH_RECORDS]:
        size += len(record.value)
        if count and size > MAX_BATCH_BYTES:
            break
        count += 1
    return list(waiting[:count])
