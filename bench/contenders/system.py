"""The interface to a work queue, and what all of them are measured with."""

import asyncio
import ctypes
import os
import random
import struct
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Self, TypeVar

PARTITIONS = 8
"""Of a topic, in the systems that have partitions."""
BATCH_RECORDS = 500
BATCHES_IN_FLIGHT = 8
RECORD_BYTES = 256
QUEUE, GROUP = "bench", "bench"
PREFETCH = 4 * BATCH_RECORDS
"""Records that RabbitMQ and NATS deliver ahead of their acknowledgements."""
ROUND_SECONDS = 2.0
ROUND_RECORDS = 300_000
"""A round of publishing in batches ends early once it has sent this many records."""

_ABSOLUTE = 1
"""`TFD_TIMER_ABSTIME`: the first expiration is a time of the clock."""
_libc = ctypes.CDLL(None, use_errno=True)

VALUES = [os.urandom(RECORD_BYTES) for _ in range(BATCH_RECORDS)]
"""Random bytes, which no system can compress."""

Deliver = Callable[[Sequence[bytes]], None]


class Schedule:
    """Records that are due at fixed times, which each of them carries, whether or not the sender keeps up."""

    RECORDS_PER_SECOND = 5_000
    SECONDS = 5
    RECORDS = RECORDS_PER_SECOND * SECONDS
    GROUP_RECORDS = 5
    """Records that are due at the same time."""
    GROUP_NS = GROUP_RECORDS * 1_000_000_000 // RECORDS_PER_SECOND
    _STAMP = struct.Struct("<8sq")  # a mark, and the time in ns of the monotonic clock, which all processes share
    _MARK = b"schedule"

    def __init__(self) -> None:
        self.start = time.monotonic_ns()
        """When the first records are due."""
        self._sent = 0

    @property
    def is_done(self) -> bool:
        return self._sent >= self.RECORDS

    def due(self) -> list[bytes]:
        """The records whose time has come since the last call."""
        groups = (time.monotonic_ns() - self.start) // self.GROUP_NS + 1
        numbers = range(self._sent, min(groups * self.GROUP_RECORDS, self.RECORDS))
        self._sent = numbers.stop
        return [self._record(number) for number in numbers]

    def _record(self, number: int) -> bytes:
        stamp = self._STAMP.pack(self._MARK, self.start + number // self.GROUP_RECORDS * self.GROUP_NS)
        return stamp + VALUES[number % len(VALUES)][len(stamp) :]

    def seconds_until_next(self) -> float:
        """Until further records are due."""
        due_at = self.start + self._sent // self.GROUP_RECORDS * self.GROUP_NS
        return max((due_at - time.monotonic_ns()) / 1e9, 0.0)

    @classmethod
    def due_at(cls, value: bytes) -> int:
        """When the record was due, in ns of the monotonic clock."""
        mark, due_at = cls._STAMP.unpack_from(value)
        if mark != cls._MARK:
            raise ValueError("a record of an earlier round was delivered again")
        return int(due_at)


class SlowSchedule(Schedule):
    """For systems of which some can't keep up with 5,000/s."""

    RECORDS_PER_SECOND = 2_000
    RECORDS = RECORDS_PER_SECOND * Schedule.SECONDS
    GROUP_RECORDS = 2
    GROUP_NS = GROUP_RECORDS * 1_000_000_000 // RECORDS_PER_SECOND


class Ticks:
    """Wakes a task whenever records are due, within some microseconds: an event loop's own timers have a resolution of
    1 ms, so a sender would be late by more than most systems take to deliver a record."""

    def __init__(self, schedule: Schedule) -> None:
        clock = time.CLOCK_MONOTONIC
        self._timer: int = _libc.timerfd_create(clock, os.O_NONBLOCK | os.O_CLOEXEC)
        interval, first = (divmod(ns, 10**9) for ns in (schedule.GROUP_NS, schedule.start + schedule.GROUP_NS))
        if self._timer < 0 or _libc.timerfd_settime(self._timer, _ABSOLUTE, struct.pack("4q", *interval, *first), None):
            raise OSError(ctypes.get_errno(), "a timer could not be set")
        self._has_come = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._timer, self._come)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.remove_reader(self._timer)
        os.close(self._timer)

    def _come(self) -> None:
        os.read(self._timer, 8)
        self._has_come.set()

    async def next(self) -> None:
        """Wait until the next records are due."""
        await self._has_come.wait()
        self._has_come.clear()


class System(AsyncExitStack, ABC):
    """A client of a queue, connected inside its `async with` block. It may block: its process does nothing else."""

    schedule: type[Schedule] = Schedule

    @abstractmethod
    async def __aenter__(self) -> Self: ...

    @abstractmethod
    async def create(self) -> None:
        """Create the queue."""

    @abstractmethod
    async def send(self, value: bytes) -> None:
        """Publish one record; returns when it is acknowledged."""

    @abstractmethod
    async def publish_batches(self) -> int:
        """Publish batches for one round, several in flight. Returns how many records when all are acknowledged."""

    @abstractmethod
    async def send_singles(self, in_flight: int) -> list[float]:
        """Send single records for one round, with `in_flight` under way at any time; returns how long each took."""

    @abstractmethod
    async def send_on_schedule(self, schedule: Schedule) -> None:
        """Send records when they are due, whether or not earlier ones are acknowledged. Returns when all are."""

    @abstractmethod
    async def consume(self, count: int, deliver: Deliver) -> None:
        """Join the consumers; call `deliver` with what arrives and then commit it, until `count` records are committed;
        leave again."""


class AsyncSystem(System):
    """One whose client is made for tasks: each waits for the acknowledgement of what it has sent."""

    @abstractmethod
    async def publish(self, values: Sequence[bytes]) -> None:
        """Publish a batch; returns when all of its records are acknowledged."""

    async def publish_batches(self) -> int:
        sent = 0
        start = time.perf_counter()

        async def publish_one_after_another() -> None:
            nonlocal sent
            while time.perf_counter() - start < ROUND_SECONDS and sent < ROUND_RECORDS:
                sent += BATCH_RECORDS
                await self.publish(VALUES)

        await asyncio.gather(*(publish_one_after_another() for _ in range(BATCHES_IN_FLIGHT)))
        return sent

    async def send_singles(self, in_flight: int) -> list[float]:
        latencies: list[float] = []
        start = time.perf_counter()

        async def send_one_after_another() -> None:
            while (sent_at := time.perf_counter()) - start < ROUND_SECONDS:
                await self.send(random.choice(VALUES))
                latencies.append(time.perf_counter() - sent_at)

        await asyncio.gather(*(send_one_after_another() for _ in range(in_flight)))
        return latencies

    async def send_on_schedule(self, schedule: Schedule) -> None:
        with Ticks(schedule) as ticks:
            async with asyncio.TaskGroup() as tasks:
                while not schedule.is_done:
                    for value in schedule.due():
                        tasks.create_task(self.send(value))
                    await ticks.next()


@dataclass(frozen=True, slots=True)
class Contender:
    """A system of the comparison."""

    name: str
    serve: Callable[[Path], AbstractContextManager[str | None]]
    """Runs its server with its data in the folder. Yields how to connect to it: a URL, or a port; None if the server is
    missing, after printing that."""
    connect: Callable[[str], System]
    """Its class of clients."""


Message = TypeVar("Message")


class CumulativeAcks(Generic[Message]):
    """Acknowledges pushed messages: one acknowledgement covers all before it, up to a batch."""

    def __init__(self, count: int, deliver: Deliver, acknowledge: Callable[[Message], Awaitable[object]]) -> None:
        self._remaining = count
        self._deliver = deliver
        self._acknowledge = acknowledge
        self._arrived = asyncio.Event()
        self._waiting: list[Message] = []

    def arrived(self, message: Message, value: bytes) -> None:
        self._deliver([value])
        self._waiting.append(message)
        self._arrived.set()

    async def run(self) -> None:
        """Returns when `count` messages are acknowledged."""
        while self._remaining > 0:
            await self._arrived.wait()
            self._arrived.clear()
            while batch := self._waiting[:BATCH_RECORDS]:
                del self._waiting[:BATCH_RECORDS]
                await self._acknowledge(batch[-1])
                self._remaining -= len(batch)
