"""`Consumer`: a member of a group, through brokers."""

import asyncio
import contextlib
import logging
import socket
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any, Self

from shardyard.client.brokers import Brokers, CarrierName
from shardyard.client.failures import HandlerExit
from shardyard.client.handling import Caller, Handler, Handling, Slots
from shardyard.client.remote import RemoteHost
from shardyard.client.signals import stop_signals
from shardyard.groups import OwnedBatch, Reader
from shardyard.groups.partition_reader import Start
from shardyard.model import InvalidCall, InvalidValue, Partition, RetryLater, whole_number
from shardyard.model.checks import check_text
from shardyard.runtime.clock import Clock, timeout
from shardyard.wire.requests import Failed
from shardyard.wire.settings import GroupSettings

_log = logging.getLogger(__name__)

FINISH_SECONDS = 5.0
"""For handlers that run when a signal comes: as long as a broker takes to finish its calls."""


class Consumer:
    """A member of a group, from entering the block to leaving it.

    `run` calls a handler for each record: several at once, those of the same key in order. A record whose handler
    raises is retried later, without holding up others, and becomes a dead letter after the last retry. Iterating yields
    whole batches instead, to be committed by the caller; see `Reader`. Retries, concurrency, tags and the like are
    settings of the group, and changes take effect while the consumer runs.
    """

    def __init__(
        self,
        brokers: str | Sequence[str] | Brokers,
        group: str,
        topics: Iterable[str],
        *,
        token: str | None = None,
        name: str | None = None,
        static: bool = False,
        weight: int = 1,
        partitions: Iterable[Partition] | None = None,
        session_timeout: float = 10.0,
        start: Start = "earliest",
        max_records: int = 500,
        retry_seconds: float = 30.0,
        carrier: CarrierName = "auto",
        clock: Clock | None = None,
    ) -> None:
        """As for `Reader`; `token`, `retry_seconds` and `carrier` as for `Brokers`."""
        check_text("group", group)
        self._owns_brokers = not isinstance(brokers, Brokers)
        if not isinstance(brokers, Brokers):
            brokers = Brokers(brokers, token=token, retry_seconds=retry_seconds, carrier=carrier, clock=clock)
        self._brokers = brokers
        self._clock = clock or brokers.clock
        self._host = RemoteHost(brokers, f"{socket.gethostname()}-{uuid.uuid4().hex[:8]}", clock=self._clock)
        self.member = Reader(
            group,
            topics,
            node=self._host,
            name=name,
            static=static,
            weight=weight,
            partitions=partitions,
            session_timeout=session_timeout,
            start=start,
            max_records=max_records,
        )
        self._is_manual = partitions is not None
        self._session_timeout = session_timeout
        self._stack = AsyncExitStack()
        self._work: set[asyncio.Task[None]] = set()
        self._running = asyncio.Lock()
        self._run_task: asyncio.Task[Any] | None = None

    @property
    def owned(self) -> set[Partition]:
        """The partitions that it owns, as far as it knows."""
        return self.member.owned

    @property
    def settings(self) -> GroupSettings:
        """The settings of the group, as of the last heartbeat."""
        return self._host.coordinator.settings

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:  # closes what was opened if joining fails
            if self._owns_brokers:
                await stack.enter_async_context(self._brokers)
            await stack.enter_async_context(self.member)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()
        try:
            await self._stack.aclose()
        except RetryLater:
            _log.warning(
                "member %s could not leave group %s, because no broker could be reached: "
                "its partitions get other owners when its session expires in %g s",
                self.member.name,
                self.member.group,
                self._session_timeout,
            )

    def __aiter__(self) -> AsyncIterator[OwnedBatch]:
        return self.member.__aiter__()

    async def run(self, handler: Handler, *, concurrency: int | None = None, stop_on_signals: bool = False) -> None:
        """Handle records until cancelled. `handler` is a coroutine function, or a plain one, which runs in threads.

        `concurrency`: how many records are handled at once; by default the setting of the group. `stop_on_signals`:
        SIGINT (Ctrl-C) and SIGTERM end it, too, and it returns; handlers that run then have 5 s to finish. That is for
        programs that do nothing else, in their main thread. In all cases, what is done is committed.

        If the handler calls `sys.exit`, that ends it as well, and the `SystemExit` is raised here. The record counts as
        not handled, and is delivered again.
        """
        try:
            if stop_on_signals:
                await self._run_until_signal(handler, concurrency)
            else:
                await self.run_until_exit(handler, concurrency)
        except HandlerExit as exit_:
            raise exit_.error from None

    async def _run_until_signal(self, handler: Handler, concurrency: int | None) -> None:
        with stop_signals(lambda: work.cancel()) as stopped:  # noqa: PLW0108 there is no task yet
            work = asyncio.create_task(self.run_until_exit(handler, concurrency, may_finish=stopped), name="consuming")
            try:
                await work
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if not stopped() or (task is not None and task.cancelling()):
                    raise

    async def run_until_exit(
        self, handler: Handler, concurrency: int | None = None, *, may_finish: Callable[[], bool] = lambda: False
    ) -> None:
        """`run`, but raises `HandlerExit` if the handler calls `sys.exit`. `may_finish`: returns, when it is cancelled,
        whether handlers that run have a while to finish; no more are started."""
        if not callable(handler):
            raise InvalidValue("handler", handler, "a function, or a coroutine function, that takes a message")
        if concurrency is not None:
            whole_number("concurrency", concurrency, at_least=1)
        if self._running.locked():
            raise InvalidCall("the consumer is running already")
        async with self._running:
            self._run_task = asyncio.current_task()
            await self._run(handler, concurrency, may_finish)

    async def until_stopped(self) -> None:
        """Cancel `run_until_exit`, unless that was done already, and wait until it has ended. Raises what it raises."""
        task, self._run_task = self._run_task, None
        if task is not None:
            if not task.cancelling():  # a second cancellation would interrupt handlers that may finish
                task.cancel()
            await asyncio.wait({task})
            if not task.cancelled():
                task.result()

    async def _run(self, handler: Handler, concurrency: int | None, may_finish: Callable[[], bool]) -> None:
        slots = Slots(concurrency or self.settings.concurrency)
        if concurrency is None:
            self._host.coordinator.on_settings = lambda settings: slots.set(settings.concurrency)
        caller = Caller(handler, lambda: self.settings.handler_seconds, self._attempts, self._clock)
        failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        try:
            batches = self.member.__aiter__()
            while True:
                batch = await _next_or_raise(batches, failed)
                handling = Handling(batch, self._fail, self._clock)
                task = asyncio.create_task(handling.run(caller, slots), name=f"handling {batch!r}")
                self._work.add(task)
                task.add_done_callback(lambda done: self._finished(done, failed))
        except asyncio.CancelledError:
            if may_finish():
                self._host.coordinator.on_settings = None
                with contextlib.suppress(TimeoutError):
                    async with timeout(self._clock, FINISH_SECONDS):
                        await slots.drain()
            await self.stop()
            if failed.done():  # meanwhile a handler has called `sys.exit`
                failed.result()
            raise
        finally:
            await self.stop()
            caller.close()

    async def stop(self) -> None:
        """End the handling of batches in flight, after `run` was cancelled. What is done is committed."""
        for task in self._work:
            if not task.cancelling():  # a second cancellation would interrupt its commit
                task.cancel()
        await asyncio.gather(*self._work, return_exceptions=True)

    def _finished(self, task: "asyncio.Task[None]", failed: "asyncio.Future[None]") -> None:
        self._work.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not failed.done():
            failed.set_exception(error)

    def _attempts(self) -> int:
        """How often a record is handled before it becomes a dead letter. Retries come through the retry topic, which
        neither members of broadcast groups nor those with partitions of their own choice read."""
        has_retries = not self.settings.broadcast and not self._is_manual
        return 1 + len(self.settings.backoff) if has_retries else 1

    async def _fail(self, failures: Sequence[Failed]) -> None:
        await self._host.coordinator.fail(self.member.identity, failures)


async def _next_or_raise(batches: AsyncIterator[OwnedBatch], failed: "asyncio.Future[None]") -> OwnedBatch:
    """The next batch; what broke meanwhile is raised."""
    coming: asyncio.Task[OwnedBatch] = asyncio.create_task(next_of(batches))
    try:
        both: set[asyncio.Future[Any]] = {coming, failed}
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if failed.done():
            failed.result()
        return coming.result()
    finally:
        if not coming.done():
            coming.cancel()
            await asyncio.gather(coming, return_exceptions=True)


async def next_of(batches: AsyncIterator[OwnedBatch]) -> OwnedBatch:
    return await anext(batches)
