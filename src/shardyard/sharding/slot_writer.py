"""Stores what is published to one slot: everything of one turn of the event loop with one append."""

import asyncio
from collections.abc import Iterator
from itertools import chain

from shardyard.log import Log
from shardyard.log.router import append_with_retry
from shardyard.log.sequences import SequenceWindow
from shardyard.model import Fence, Partition, Record, Stamp
from shardyard.model.limits import Limits, Validated
from shardyard.model.sharding import Queue
from shardyard.runtime.clock import Clock

_Waiting = tuple[Fence, Validated, float, "asyncio.Future[None]"]


class SlotWriter:
    """Appends to a slot under stamps of its own, so that an append that is retried is stored once."""

    def __init__(self, log: Log, partition: Partition, producer: str, clock: Clock, limits: Limits) -> None:
        self._log = log
        self._partition = partition
        self._producer = producer
        self._clock = clock
        self._limits = limits
        self._sequences = SequenceWindow()
        self._waiting: list[_Waiting] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def append(self, queue: Queue, records: Validated, deadline: float) -> None:
        """Store records in the queue that has this slot; durable on return. `Fenced` if it receives no more."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._flush)
        self._waiting.append((queue.routing_fence, records, deadline, done))
        await done

    def _flush(self) -> None:
        waiting, self._waiting = self._waiting, []
        for group in self._groups(waiting):
            task = asyncio.create_task(self._store(group), name=f"append to {self._partition}")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _groups(self, waiting: list[_Waiting]) -> Iterator[list[_Waiting]]:
        """What goes into one append: under the same fence, and within the limits of a batch."""
        group: list[_Waiting] = []
        size = count = 0
        for each in waiting:
            records = each[1]
            is_full = (
                size + records.most > self._limits.batch_bytes or count + len(records) > self._limits.batch_records
            )
            if group and (is_full or each[0] != group[0][0]):
                yield group
                group, size, count = [], 0, 0
            group.append(each)
            size += records.most
            count += len(records)
        if group:
            yield group

    async def _store(self, group: list[_Waiting]) -> None:
        fence, first, _, _ = group[0]
        deadline = max(each[2] for each in group)
        records: Validated | tuple[Record, ...] = first
        if len(group) > 1:
            records = tuple(chain.from_iterable(each[1].rows for each in group))
        error: BaseException | None = None
        try:
            async with self._sequences.sequence() as number:
                stamp = Stamp(self._producer, number)
                await append_with_retry(
                    *(self._log, self._partition, records),
                    clock=self._clock,
                    deadline=deadline,
                    stamp=stamp,
                    fence=fence,
                )
        except BaseException as caught:  # noqa: BLE001 the callers get it
            error = caught
        for *_, done in group:
            if not done.done():
                if error is None:
                    done.set_result(None)
                else:
                    done.set_exception(error)
