"""Handling the records of a batch: in parallel, those of one key in order, and committing what is done."""

import asyncio
import contextlib
import inspect
import logging
import time
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial

from shardyard.client.threads import Threads
from shardyard.groups import OwnedBatch
from shardyard.model import Fenced, Partition, PartitionOutOfRange, Record, RetryLater, ShardyardError, UnknownTopic
from shardyard.wire.headers import ATTEMPT, ORIGIN, REASON_CHARACTERS

_log = logging.getLogger(__name__)

COMMIT_SECONDS = 0.2
"""How often, at most, a part of a batch is committed."""
AGAIN_SECONDS = 0.2
LEAVE_SECONDS = 2.0
"""For committing what is done, when told to stop."""


@dataclass(frozen=True, slots=True)
class Message:
    """A record as a handler gets it."""

    record: Record
    partition: Partition
    offset: int
    epoch: int
    """Of the ownership under which it is handled, higher for each later owner: other systems can fence by it."""

    @property
    def key(self) -> bytes | None:
        return self.record.key

    @property
    def value(self) -> bytes:
        return self.record.value

    @property
    def origin(self) -> str:
        """Where it was published, such as `orders/3/17`: also of a record that is tried again, which comes from the
        group's retry topic."""
        told = self.record.header(ORIGIN)
        return f"{self.partition}/{self.offset}" if told is None else told.decode(errors="replace")

    @property
    def attempt(self) -> int:
        """1 at first, one more each time that handling it failed."""
        told = self.record.header(ATTEMPT) or b"0"
        return int(told) + 1 if told.isdigit() else 1


Handler = Callable[[Message], Awaitable[object] | object]
Fail = Callable[[Sequence[tuple[Partition, int, int, str]]], Awaitable[None]]
"""Hands over failed records: (partition, epoch of the ownership, offset, reason)."""


class Slots:
    """So many records are handled at once as is set, also when that changes meanwhile."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._taken = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    def set(self, count: int) -> None:
        self._count = count
        self._wake()

    async def __aenter__(self) -> None:
        while self._taken >= self._count:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                self._wake()  # it may have been our turn
                raise
        self._taken += 1

    async def __aexit__(self, *_: object) -> None:
        self._taken -= 1
        self._wake()

    def _wake(self) -> None:
        free = self._count - self._taken
        while free > 0 and self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                free -= 1


class Caller:
    """Calls a handler. A plain function gets a thread of its own, so that it holds up nobody."""

    def __init__(self, handler: Handler, seconds: Callable[[], float | None]) -> None:
        """`seconds`: how long a call may take, as of now."""
        self._handler = handler
        self._seconds = seconds
        self._threads = None if inspect.iscoroutinefunction(handler) else Threads()

    def close(self) -> None:
        """What still runs in a thread is not waited for."""
        if self._threads is not None:
            self._threads.close()

    async def call(self, message: Message) -> str | None:
        """Why it failed, if it did."""
        seconds = self._seconds()
        try:
            async with asyncio.timeout(seconds) as limit:
                call = partial(self._handler, message)
                result = call() if self._threads is None else await self._threads.call(call)
                if inspect.isawaitable(result):
                    await result
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            return "it was cancelled"
        except Exception as error:  # noqa: BLE001 whatever a handler raises, its record has failed
            return f"not done after {seconds} s" if limit.expired() else _reason(error)
        return None


def _reason(error: Exception) -> str:
    """What to say of an error: text that can be sent, whatever the error says of itself."""
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001 its __str__ is the handler's too
        text = f"{type(error).__name__}, which can't be told as text"
    return text[:REASON_CHARACTERS].encode(errors="replace").decode()


class Handling:
    """One batch in the making: what of it is done, what failed, how far it is committed."""

    def __init__(self, batch: OwnedBatch, fail: Fail) -> None:
        self._batch = batch
        self._fail = fail
        self._offsets = batch.offsets()
        self._done = [False] * len(batch)
        self._prefix = 0
        self._told = 0
        """Failures before this one were handed over."""
        self._committed = 0
        self._failed: dict[int, str] = {}
        self._committed_at = time.monotonic()
        self._committing = asyncio.Lock()
        self._storing: asyncio.Task[None] | None = None

    async def run(self, caller: Caller, slots: Slots) -> None:
        """Handle all of it; returns when it is committed, or when the partition has gone to another member. If it is
        cancelled, what is done so far is committed."""
        try:
            await self._run(caller, slots)
        except asyncio.CancelledError:
            with contextlib.suppress(ShardyardError, TimeoutError):
                async with asyncio.timeout(LEAVE_SECONDS):
                    await self._store(everything=False)
            raise
        finally:
            if self._storing is not None:
                self._storing.cancel()

    async def _run(self, caller: Caller, slots: Slots) -> None:
        lanes: defaultdict[bytes | int, list[int]] = defaultdict(list)
        messages = []
        for index, record in enumerate(self._batch.records()):
            lanes[index if record.key is None else record.key].append(index)
            messages.append(Message(record, self._batch.partition, self._offsets[index], self._batch.epoch))
        try:
            async with asyncio.TaskGroup() as group:
                watching = group.create_task(self._until_lost())
                work = [group.create_task(self._lane(lane, messages, caller, slots)) for lane in lanes.values()]
                await asyncio.wait(work)
                watching.cancel()
            await self._commit(everything=True)
        except* (Fenced, UnknownTopic, PartitionOutOfRange):
            pass  # another member has it, and does the rest; or nobody has it any more

    async def _until_lost(self) -> None:
        """Raises when the partition has gone to another member: what hangs here must not keep its slot."""
        await self._batch.finished.wait()
        self._check()

    async def _lane(self, lane: list[int], messages: list[Message], caller: Caller, slots: Slots) -> None:
        """The records of one key, one after the other."""
        for index in lane:
            async with slots:
                self._check()
                if (why := await caller.call(messages[index])) is not None:
                    self._failed[index] = why
            self._done[index] = True
            if time.monotonic() - self._committed_at > COMMIT_SECONDS:
                await self._commit(everything=False)

    async def _commit(self, *, everything: bool) -> None:
        """Commit what is done from the front on. Failures are handed over first: then the record is safe elsewhere."""
        if self._storing is not None and not self._storing.done() and not everything:
            return
        self._storing = asyncio.create_task(self._store(everything=everything))
        await asyncio.shield(self._storing)  # who is cancelled meanwhile waits for it, and does not do it twice

    async def _store(self, *, everything: bool) -> None:
        async with self._committing:
            while self._prefix < len(self._done) and self._done[self._prefix]:
                self._prefix += 1
            if failed := [index for index in sorted(self._failed) if self._told <= index < self._prefix]:
                where, epoch = self._batch.partition, self._batch.epoch
                told = [(where, epoch, self._offsets[index], self._failed[index]) for index in failed]
                await self._insist(partial(self._fail, told))
            self._told = self._prefix
            self._committed_at = time.monotonic()
            if everything:
                await self._insist(self._batch.commit)
            elif self._prefix > self._committed:
                await self._insist(partial(self._batch.commit, self._offsets[self._prefix - 1] + 1))
            self._committed = self._prefix

    async def _insist(self, call: Callable[[], Awaitable[None]]) -> None:
        """Until it is done: brokers may be out of reach. If that lasts, the partition goes to another member."""
        while True:
            self._check()
            try:
                return await call()
            except RetryLater as error:
                _log.warning("%r waits to be committed: %s", self._batch, error)
                await asyncio.sleep(AGAIN_SECONDS)

    def _check(self) -> None:
        if self._batch.lost:
            raise Fenced(f"{self._batch.partition} has gone to another member")
