"""`Producer`: publishes through brokers, records together where they come together."""

import asyncio
import contextlib
import math
import random
import time
import uuid
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import pyarrow as pa

from shardyard.client.brokers import Brokers, path
from shardyard.model import SEQUENCE_WINDOW, TAG, TRACE, Closed, Headers, InvalidValue, Record
from shardyard.model.batch import from_records, now_ms
from shardyard.model.limits import Limits, check_records
from shardyard.wire import records as wire

MOST_RECORDS = 500
MOST_BYTES = 1024 * 1024
"""Of what `send` puts into one request."""
FLOWING_SECONDS = 0.1
"""After a request of `send`, within which the next one follows it."""
UNDER_WAY = 16
"""Batches of `publish` on one topic at once."""
_LIMITS = Limits()


@dataclass(slots=True)
class _Lane:
    """The records that wait to be sent to one topic."""

    waiting: list[tuple[Record, asyncio.Future[None]]] = field(default_factory=list)
    sending: asyncio.Task[None] | None = None
    sequence: int = 0
    turn: int = 0
    sent_at: float = -math.inf
    under_way: dict[int, asyncio.Event] = field(default_factory=dict)
    """By sequence, the oldest first."""
    room: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(UNDER_WAY))

    def deal(self, count: int) -> dict[str, int]:
        """Records without a key go round the partitions. Where request follows request, each has one of them, by
        chance: if requests took turns, small and large ones in alternation would meet the same ones again and again."""
        if count > 1 and time.monotonic() - self.sent_at < FLOWING_SECONDS:
            return {"turn": random.getrandbits(31), "together": 1}
        turn, self.turn = self.turn, self.turn + count
        return {"turn": turn}

    @contextlib.asynccontextmanager
    async def stamp(self) -> AsyncIterator[int]:
        """The next sequence, once it is not too far ahead of the oldest that is under way: that may be tried again."""
        while self.under_way and self.sequence - next(iter(self.under_way)) >= SEQUENCE_WINDOW:
            await next(iter(self.under_way.values())).wait()
        sequence, self.sequence = self.sequence, self.sequence + 1
        done = self.under_way[sequence] = asyncio.Event()
        try:
            yield sequence
        finally:
            del self.under_way[sequence]
            done.set()

    def give_up(self) -> None:
        """Tell those who wait that nothing more is sent."""
        for _, done in self.waiting:
            if not done.done():
                done.set_exception(Closed("the producer"))
        self.waiting.clear()


class Producer:
    """Sends records; each call returns when what it sent is durable.

    What is tried again, through whichever broker, is stored once; only records with a delay may come twice then, with
    the same id. `send` keeps the order of calls: records that come while a request is under way go together in the next
    one. Batches of `publish` that are under way at once have no order between them.
    """

    def __init__(
        self,
        brokers: str | Sequence[str] | Brokers,
        *,
        token: str | None = None,
        patience: float = 30.0,
        linger: float = 0.0,
    ) -> None:
        """`linger`: seconds for which `send` waits for more records to come along."""
        self._brokers = brokers if isinstance(brokers, Brokers) else Brokers(brokers, token=token, patience=patience)
        self._own = not isinstance(brokers, Brokers)
        self._name = uuid.uuid4().hex
        self._linger = linger
        self._lanes: defaultdict[str, _Lane] = defaultdict(_Lane)
        self._closed = False

    async def __aenter__(self) -> Self:
        if self._own:
            await self._brokers.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """What was given to `send` is sent first, unless an error came up."""
        self._closed = True
        tasks = [lane.sending for lane in self._lanes.values() if lane.sending is not None]
        for task in tasks if kind is not None else ():
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for lane in self._lanes.values():
            lane.give_up()
        if self._own:
            await self._brokers.__aexit__(kind, error, trace)

    async def send(
        self,
        topic: str,
        value: bytes | str,
        *,
        key: bytes | str | None = None,
        id: str | None = None,  # noqa: A002 as the record calls it
        tag: str | None = None,
        trace: str | None = None,
        headers: Headers = (),
        delay: float | None = None,
        deliver_at: int | None = None,
    ) -> str:
        """Send one record; returns its id when it is durable. `delay`: seconds until it is delivered; `deliver_at`: the
        time of that, in milliseconds since 1970."""
        if self._closed:
            raise Closed("the producer")
        named = [(TAG, tag), (TRACE, trace)]
        marks = tuple((name, text.encode()) for name, text in named if text is not None)
        record = Record.new(_bytes(value), None if key is None else _bytes(key), marks + headers)
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
        self, topic: str, records: Sequence[Record] | pa.RecordBatch, *, partition: int | None = None
    ) -> list[dict[str, Any]]:
        """Send a batch in one request; returns where its parts are stored."""
        if self._closed:
            raise Closed("the producer")
        rows = records if isinstance(records, pa.RecordBatch) else _rows(records)
        lane = self._lanes[topic]
        async with lane.room:
            return await self._post(topic, rows, lane, partition)

    async def _post(
        self, topic: str, rows: pa.RecordBatch, lane: _Lane, partition: int | None = None, **dealing: int
    ) -> list[dict[str, Any]]:
        """`dealing`: how those without a key are distributed, as the broker takes it."""
        async with lane.stamp() as sequence:
            query = {"producer": self._name, "sequence": sequence, "partition": partition, **dealing}
            headers = {"Content-Type": wire.ARROW}
            told = await self._brokers.call(
                "POST",
                path("topics", topic, "records"),
                wire.arrow_body(rows),
                headers,
                query=query,
                timeout=self._brokers.turn_seconds,
            )
        stored: list[dict[str, Any]] = told.json()["stored"]
        return stored

    async def _delay(self, topic: str, record: Record, delay: float | None, deliver_at: int | None) -> None:
        if delay is not None:
            if deliver_at is not None or not 0 <= delay < 2**40:
                raise InvalidValue("delay", delay, "seconds, at least 0; or deliver_at instead")
            deliver_at = now_ms() + round(delay * 1000)
        packed = wire.PackedRecord(record.value, record.key, record.id, list(record.headers), 0, deliver_at)
        body = wire.packed(wire.PackedRecords([packed]))
        await self._brokers.call("POST", path("topics", topic, "records"), body, {"Content-Type": wire.MSGPACK})

    async def _drain(self, topic: str, lane: _Lane) -> None:
        """Send what waits, request after request, until nothing does."""
        while lane.waiting:
            if self._linger and len(lane.waiting) < MOST_RECORDS:
                await asyncio.sleep(self._linger)
            batch = _fitting(lane.waiting)
            del lane.waiting[: len(batch)]
            try:
                await self._post(topic, _rows([record for record, _ in batch]), lane, **lane.deal(len(batch)))
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
            lane.sent_at = time.monotonic()


def _fitting(waiting: Sequence[tuple[Record, "asyncio.Future[None]"]]) -> list[tuple[Record, "asyncio.Future[None]"]]:
    """As much from the front as goes into one request."""
    size, count = 0, 0
    for record, _ in waiting[:MOST_RECORDS]:
        size += len(record.value)
        if count and size > MOST_BYTES:
            break
        count += 1
    return list(waiting[:count])


def _rows(records: Sequence[Record]) -> pa.RecordBatch:
    return from_records(check_records(records, _LIMITS)[0], now_ms())


def _bytes(data: bytes | str) -> bytes:
    return data.encode() if isinstance(data, str) else data
