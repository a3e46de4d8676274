"""Handling the records of a batch: in parallel, those of the same key in order, committing what is done."""

import asyncio
import contextlib
import inspect
import logging
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType

from shardyard.client.failures import HandlerExit, HandlerFailure, LoggedKinds, handler_exit
from shardyard.client.threads import Threads
from shardyard.groups import InFlight, OwnedBatch
from shardyard.model import Fenced, Partition, PartitionOutOfRange, Record, RetryLater, ShardyardError, UnknownTopic
from shardyard.runtime.clock import Clock, timeout
from shardyard.runtime.retry import Backoff, first_only, retry
from shardyard.wire.companions import DEAD, RETRY, parse_companion
from shardyard.wire.headers import ATTEMPT, ORIGIN
from shardyard.wire.requests import Failed

_log = logging.getLogger(__name__)

COMMIT_SECONDS = 0.2
"""How often, at most, a part of a batch is committed."""
COMMIT_BACKOFF = Backoff(first=0.1, longest=1.0)
LEAVE_SECONDS = 2.0
"""For committing what is done, when the consumer stops."""


@dataclass(frozen=True, slots=True)
class Message:
    """A record as a handler gets it."""

    record: Record
    partition: Partition
    offset: int
    epoch: int
    """Of the ownership under which it is handled. Later owners have a higher one, so other systems can fence by it."""

    @property
    def key(self) -> bytes | None:
        return self.record.key

    @property
    def value(self) -> bytes:
        return self.record.value

    @property
    def origin(self) -> str:
        """Where it was published, such as `orders/3/17`; the same for a retry, which comes from the retry topic."""
        origin = self._our_header(ORIGIN, (RETRY, DEAD))
        return f"{self.partition}/{self.offset}" if origin is None else origin.decode(errors="replace")

    @property
    def attempt(self) -> int:
        """1 at first, one more for each retry. A dead letter that is handled by another group begins anew."""
        failed = self._our_header(ATTEMPT, (RETRY,)) or b"0"
        return int(failed) + 1 if failed.isdigit() else 1

    def _our_header(self, name: str, suffixes: Sequence[str]) -> bytes | None:
        """A header that Shardyard sets on the companion topics with these suffixes. On other topics it is a
        publisher's, or that of a failed record which was published again, and means nothing."""
        companion = parse_companion(self.partition.topic)
        return None if companion is None or companion.suffix not in suffixes else self.record.header(name)


Handler = Callable[[Message], Awaitable[object] | object]
Fail = Callable[[Sequence[Failed]], Awaitable[None]]
"""Reports failed records."""


class Slots:
    """Limits how many records are handled at once. The limit can change at any time, until a handler wants to end the
    process: from then on none is given out."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._taken = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._drained: asyncio.Event | None = None
        self._has_ended = False

    def set(self, count: int) -> None:
        if not self._has_ended:
            self._count = count
            self._wake()

    async def __aenter__(self) -> None:
        while self._taken >= self._count:
            slot: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(slot)
            try:
                await slot
            except asyncio.CancelledError:
                self._wake()  # the slot may have been given to us
                raise
        self._taken += 1

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, HandlerExit):
            self._has_ended, self._count = True, 0
        self._taken -= 1
        self._wake()
        if self._drained is not None and not self._taken:
            self._drained.set()

    async def drain(self) -> None:
        """Give out no more slots, and wait until none is taken."""
        self._count = 0
        self._drained = asyncio.Event()
        if self._taken:
            await self._drained.wait()

    def _wake(self) -> None:
        free = self._count - self._taken
        while free > 0 and self._waiting:
            slot = self._waiting.popleft()
            if not slot.done():
                slot.set_result(None)
                free -= 1


class Caller:
    """Calls a handler. A plain function runs in a thread, so that it does not block the event loop. Failures are logged
    when they happen, those that repeat themselves in one line."""

    def __init__(
        self, handler: Handler, seconds: Callable[[], float | None], attempts: Callable[[], int], clock: Clock
    ) -> None:
        """`seconds`: returns how long a call may take; None sets no limit. `attempts`: returns how often a record is
        handled before it becomes a dead letter."""
        self._handler = handler
        self._seconds = seconds
        self._attempts = attempts
        self._clock = clock
        self._logged = LoggedKinds()
        self._threads = None if inspect.iscoroutinefunction(handler) else Threads()

    def close(self) -> None:
        """Handlers that still run in a thread are not waited for."""
        if self._threads is not None:
            self._threads.close()

    async def call(self, message: Message) -> HandlerFailure | None:
        """Why the handler failed; None if it did not. `HandlerExit` if it wants to end the process."""
        if (failure := await self._call(message)) is not None:
            last = message.attempt >= self._attempts()
            in_full = self._logged.add(failure, self._clock.monotonic())
            failure.log(message.origin, message.record.id, message.attempt, last=last, in_full=in_full)
        return failure

    async def _call(self, message: Message) -> HandlerFailure | None:
        seconds = self._seconds()
        try:
            async with timeout(self._clock, seconds) as limit:
                call = partial(self._handler, message)
                result = call() if self._threads is None else await self._threads.call(call)
                if inspect.isawaitable(result):
                    await result
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            return HandlerFailure("the handler was cancelled")
        except (SystemExit, KeyboardInterrupt) as error:
            raise HandlerExit(error) from None
        except Exception as error:  # noqa: BLE001 whatever a handler raises, its record has failed
            return HandlerFailure.of(error, f"not done after {seconds} s" if limit.expired() else None)
        return None


class Handling:
    """A batch in flight: which of its records are done, which failed, and how far it is committed."""

    def __init__(self, batch: OwnedBatch, fail: Fail, clock: Clock) -> None:
        self._batch = batch
        self._fail = fail
        self._clock = clock
        self._offsets = batch.offsets()
        self._in_flight = InFlight(self._offsets, batch.end)
        self._reported = 0
        """Failures before this index were reported."""
        self._committed: int | None = None
        self._failed: dict[int, Failed] = {}
        self._committed_at = self._clock.monotonic()
        self._committing = asyncio.Lock()
        self._storing: asyncio.Task[None] | None = None

    async def run(self, caller: Caller, slots: Slots) -> None:
        """Handle all records. Returns when the batch is committed, or when the partition has another owner. If this is
        cancelled, or a handler wants to end the process (`HandlerExit`), what is done so far is committed."""
        try:
            await self._run(caller, slots)
        except asyncio.CancelledError:
            await self._store_what_is_done()
            raise
        except ExceptionGroup as errors:
            if (exit_ := handler_exit(errors)) is None:
                raise
            try:
                await self._store_what_is_done()
            except asyncio.CancelledError:  # the consumer is stopped, too
                await self._store_what_is_done()
            raise exit_ from None
        finally:
            if self._storing is not None:
                self._storing.cancel()

    async def _store_what_is_done(self) -> None:
        with contextlib.suppress(ShardyardError, TimeoutError):
            async with timeout(self._clock, LEAVE_SECONDS):
                await self._store()

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
            await self._commit(last=True)
        except* (Fenced, UnknownTopic, PartitionOutOfRange):
            pass  # its next owner handles the rest; or it was deleted

    async def _until_lost(self) -> None:
        """Raises when the partition has another owner, so that handlers that hang do not keep their slots."""
        await self._batch.finished.wait()
        self._check()

    async def _lane(self, lane: list[int], messages: list[Message], caller: Caller, slots: Slots) -> None:
        """Handle the records of one key, one after the other."""
        for index in lane:
            async with slots:
                self._check()
                if (failure := await caller.call(messages[index])) is not None:
                    where, epoch = str(self._batch.partition), self._batch.epoch
                    offset = self._offsets[index]
                    self._failed[index] = Failed(where, epoch, offset, failure.reason, failure.traceback)
            self._in_flight.acknowledge(index)
            if self._clock.monotonic() - self._committed_at > COMMIT_SECONDS:
                await self._commit(last=False)

    async def _commit(self, *, last: bool) -> None:
        """Commit the prefix of the batch that is done. Failures in it are reported first, so that none is lost.

        `last`: all of it is done, and must be committed; otherwise a commit in progress is enough.
        """
        if self._storing is not None and not self._storing.done() and not last:
            return
        self._storing = asyncio.create_task(self._store())
        await asyncio.shield(self._storing)  # if cancelled, `run` waits for it instead of doing it twice

    async def _store(self) -> None:
        async with self._committing:
            prefix, upto = self._in_flight.prefix, self._in_flight.committable
            if failed := [index for index in sorted(self._failed) if self._reported <= index < prefix]:
                await self._retry(partial(self._fail, [self._failed[index] for index in failed]))
            self._reported = prefix
            self._committed_at = self._clock.monotonic()
            if upto is not None and upto != self._committed:
                await self._retry(partial(self._batch.commit, upto))
                self._committed = upto

    async def _retry(self, call: Callable[[], Awaitable[None]]) -> None:
        """Retry while brokers are out of reach, as long as this member owns the partition."""

        async def attempt() -> None:
            self._check()
            await call()

        await retry(attempt, clock=self._clock, backoff=COMMIT_BACKOFF, on_retry=first_only(self._log_retry))

    def _log_retry(self, error: RetryLater) -> None:
        _log.warning("the commit of %r will be retried: %s", self._batch, error)

    def _check(self) -> None:
        if self._batch.lost:
            raise Fenced(f"{self._batch.partition} has another owner now")
