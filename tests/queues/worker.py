"""Consumers to be killed, stalled and hung: `python -m tests.queues.worker` makes a process for each line on its
standard input, once all imports are paid for.

A line is an `Order` as JSON. It says `P name pid` when a process lives, and `D pid status` when it is dead. What a
consumer does it notes in its order's journal, a line each:

    at joined epoch                                    it is a member
    at handled partition epoch offset key id           it is done with a record; in `run` it is not told the epoch
    at committed partition epoch offset
    at fenced partition epoch offset                   a commit was refused
    at hangs partition - offset key id
    at left                                            it was told to end, and left the group
    at ended error                                     it should not have

`at` is in nanoseconds, by a clock that all processes of a machine share.
"""

import asyncio
import contextlib
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType

from shardyard.client import Consumer, Message
from shardyard.groups import OwnedBatch
from shardyard.model import Fenced, Partition, Record


@dataclass(frozen=True, slots=True)
class Order:
    """A consumer to start."""

    name: str
    brokers: list[str]
    group: str
    topic: str
    journal: str
    go: str | None = None
    """A file: it joins when that exists."""
    by_batch: bool = False
    """Iterates over batches and commits each; else it is called for each record."""
    pause: float = 0.0
    """Seconds for each record."""
    hang_on: str | None = None
    """The id of the record on which it blocks for good."""
    session: float = 2.0
    max_records: int = 500

    def to_json(self) -> str:
        return json.dumps(asdict(self))


@dataclass(frozen=True, slots=True)
class Note:
    """A line of a journal."""

    at: int
    member: str
    what: str
    words: list[str]

    @property
    def partition(self) -> str:
        return self.words[0]

    @property
    def epoch(self) -> int:
        return int(self.words[1])

    @property
    def offset(self) -> int:
        return int(self.words[2])

    @property
    def key(self) -> str:
        return self.words[3]

    @property
    def id(self) -> str:
        return self.words[4]


def notes(journals: Iterable[Path], *whats: str) -> list[Note]:
    """What consumers noted, by time; the last line of one that was killed may be torn."""
    found = []
    for path in journals:
        for line in path.read_text().splitlines(keepends=True) if path.exists() else ():
            at, what, *words = line.split()
            if line.endswith("\n") and (what in whats or not whats):
                found.append(Note(int(at), path.stem, what, words))
    return sorted(found, key=lambda note: note.at)


class Work:
    """One consumer, in a process of its own."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._journal = os.open(order.journal, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    async def until_told_to_end(self) -> None:
        task = asyncio.ensure_future(self._consume())
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        try:
            await task
        except asyncio.CancelledError:
            self._note("left")
        except BaseException as error:
            self._note("ended", repr(error))
            raise

    async def _consume(self) -> None:
        order = self._order
        while order.go is not None and not Path(order.go).exists():  # noqa: ASYNC110, ASYNC240 another process makes it
            await asyncio.sleep(0.01)
        async with Consumer(
            order.brokers,
            order.group,
            [order.topic],
            name=order.name,
            session_timeout=order.session,
            max_records=order.max_records,
        ) as consumer:
            self._note("joined", consumer.member.identity.epoch)
            if order.by_batch:
                async for batch in consumer:
                    await self._work_through(batch)
            else:
                await consumer.run(self._hang if order.hang_on else self._handle)

    async def _work_through(self, batch: OwnedBatch) -> None:
        for offset, record in zip(batch.offsets(), batch.records(), strict=True):
            await asyncio.sleep(self._order.pause)
            self._handled(batch.partition, batch.epoch, offset, record)
        where = (batch.partition, batch.epoch, batch.end)
        try:
            await batch.commit()
        except Fenced:
            self._note("fenced", *where)
        else:
            self._note("committed", *where)

    async def _handle(self, message: Message) -> None:
        await asyncio.sleep(self._order.pause)
        self._handled(message.partition, message.epoch, message.offset, message.record)

    def _hang(self, message: Message) -> None:
        if message.record.id == self._order.hang_on:
            self._note("hangs", message.partition, "-", message.offset, *_told(message.record))
            threading.Event().wait()
        self._handled(message.partition, message.epoch, message.offset, message.record)

    def _handled(self, partition: Partition, epoch: int, offset: int, record: Record) -> None:
        self._note("handled", partition, epoch, offset, *_told(record))

    def _note(self, *words: object) -> None:
        """At once, and whole."""
        os.write(self._journal, (" ".join(map(str, (time.monotonic_ns(), *words))) + "\n").encode())


def _told(record: Record) -> tuple[str, str]:
    return "-" if record.key is None else record.key.decode(), record.id


def say(*words: object) -> None:
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def reap(_: int, __: FrameType | None) -> None:
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            children.discard(ended[0])
            say("D", ended[0], os.waitstatus_to_exitcode(ended[1]))


def run(order: Order) -> None:
    """As a child: never returns to the loop of the parent."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    nothing, errors = os.open(os.devnull, os.O_RDWR), os.open(f"{order.journal}.err", os.O_WRONLY | os.O_CREAT)
    for number, file in enumerate((nothing, nothing, errors)):
        os.dup2(file, number)
    status = 1
    try:
        asyncio.run(Work(order).until_told_to_end())
        status = 0
    except BaseException:  # noqa: BLE001 whatever it is, the parent's loop is not for the child
        traceback.print_exc()
    finally:
        os._exit(status)


children: set[int] = set()

if __name__ == "__main__":
    signal.signal(signal.SIGCHLD, reap)
    for line in sys.stdin:
        order = Order(**json.loads(line))
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
        if (pid := os.fork()) == 0:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
            run(order)
        children.add(pid)
        say("P", order.name, pid)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
    for pid in list(children):
        os.kill(pid, signal.SIGKILL)
