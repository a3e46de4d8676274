"""Consumer processes that tests kill, stall and hang: `python -m tests.queues.worker` forks a process for each line on
its standard input. A fork starts quickly, because all modules are imported already.

A line is a `ConsumerSpec` as JSON. The worker prints `P name pid` when a process has started, and `D pid status` when
it has ended. A consumer writes its events to its journal, one line each:

    at joined epoch                                    it is a member
    at handled partition epoch offset key id           it has handled a record
    at committed partition epoch offset
    at fenced partition epoch offset                   a commit was refused
    at hangs partition - offset key id
    at left                                            it got a signal to stop, and left the group
    at ended error                                     it ended although it should not have

`at` is in nanoseconds, on a clock that all processes of a machine share.
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
from shardyard.client.brokers import CarrierName
from shardyard.groups import OwnedBatch
from shardyard.model import Fenced, Partition, Record


@dataclass(frozen=True, slots=True)
class ConsumerSpec:
    """How to start a consumer."""

    name: str
    brokers: list[str]
    group: str
    topic: str
    journal: str
    go: str | None = None
    """A file: the consumer joins when it exists."""
    by_batch: bool = False
    """It iterates over batches and commits each one; otherwise its handler is called for each record."""
    pause: float = 0.0
    """Seconds of handling for each record."""
    hang_on: str | None = None
    """The id of the record on which its handler blocks forever."""
    session: float = 2.0
    max_records: int = 500
    carrier: CarrierName = "auto"

    def to_json(self) -> str:
        return json.dumps(asdict(self))


@dataclass(frozen=True, slots=True)
class Event:
    """A line of a journal."""

    at: int
    member: str
    kind: str
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


def events(journals: Iterable[Path], *kinds: str) -> list[Event]:
    """The events of consumers, by time. The last line of a consumer that was killed may be incomplete."""
    found = []
    for path in journals:
        for line in path.read_text().splitlines(keepends=True) if path.exists() else ():
            at, kind, *words = line.split()
            if line.endswith("\n") and (kind in kinds or not kinds):
                found.append(Event(int(at), path.stem, kind, words))
    return sorted(found, key=lambda event: event.at)


class Worker:
    """A consumer in its own process."""

    def __init__(self, spec: ConsumerSpec) -> None:
        self._spec = spec
        self._journal = os.open(spec.journal, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    async def run(self) -> None:
        task = asyncio.ensure_future(self._consume())
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        try:
            await task
        except asyncio.CancelledError:
            self._record("left")
        except BaseException as error:
            self._record("ended", repr(error))
            raise

    async def _consume(self) -> None:
        spec = self._spec
        while spec.go is not None and not Path(spec.go).exists():  # noqa: ASYNC110, ASYNC240 another process creates it
            await asyncio.sleep(0.01)
        async with Consumer(
            spec.brokers,
            spec.group,
            [spec.topic],
            name=spec.name,
            session_timeout=spec.session,
            max_records=spec.max_records,
            carrier=spec.carrier,
        ) as consumer:
            self._record("joined", consumer.member.identity.epoch)
            if spec.by_batch:
                async for batch in consumer:
                    await self._handle_batch(batch)
            else:
                await consumer.run(self._hang if spec.hang_on else self._handle)

    async def _handle_batch(self, batch: OwnedBatch) -> None:
        for offset, record in zip(batch.offsets(), batch.records(), strict=True):
            await asyncio.sleep(self._spec.pause)
            self._handled(batch.partition, batch.epoch, offset, record)
        where = (batch.partition, batch.epoch, batch.end)
        try:
            await batch.commit()
        except Fenced:
            self._record("fenced", *where)
        else:
            self._record("committed", *where)

    async def _handle(self, message: Message) -> None:
        await asyncio.sleep(self._spec.pause)
        self._handled(message.partition, message.epoch, message.offset, message.record)

    def _hang(self, message: Message) -> None:
        if message.record.id == self._spec.hang_on:
            self._record("hangs", message.partition, "-", message.offset, *_key_and_id(message.record))
            threading.Event().wait()
        self._handled(message.partition, message.epoch, message.offset, message.record)

    def _handled(self, partition: Partition, epoch: int, offset: int, record: Record) -> None:
        self._record("handled", partition, epoch, offset, *_key_and_id(record))

    def _record(self, *words: object) -> None:
        """One write, so that the line is complete, and there even if the process is killed next."""
        os.write(self._journal, (" ".join(map(str, (time.monotonic_ns(), *words))) + "\n").encode())


def _key_and_id(record: Record) -> tuple[str, str]:
    return "-" if record.key is None else record.key.decode(), record.id


def report(*words: object) -> None:
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def reap(_: int, __: FrameType | None) -> None:
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            children.discard(ended[0])
            report("D", ended[0], os.waitstatus_to_exitcode(ended[1]))


def run_child(spec: ConsumerSpec) -> None:
    """Run in the child process. It never returns to the loop of the parent."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    nothing, errors = os.open(os.devnull, os.O_RDWR), os.open(f"{spec.journal}.err", os.O_WRONLY | os.O_CREAT)
    for number, file in enumerate((nothing, nothing, errors)):
        os.dup2(file, number)
    status = 1
    try:
        asyncio.run(Worker(spec).run())
        status = 0
    except BaseException:  # noqa: BLE001 whatever it is, the child must not enter the loop of the parent
        traceback.print_exc()
    finally:
        os._exit(status)


children: set[int] = set()

if __name__ == "__main__":
    signal.signal(signal.SIGCHLD, reap)
    for line in sys.stdin:
        spec = ConsumerSpec(**json.loads(line))
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
        if (pid := os.fork()) == 0:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
            run_child(spec)
        children.add(pid)
        report("P", spec.name, pid)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
    for pid in list(children):
        os.kill(pid, signal.SIGKILL)
