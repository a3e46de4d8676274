"""`Consumer`: a share of a group's partitions, through brokers."""

import asyncio
import logging
import socket
import uuid
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any, Self

from shardyard.client.brokers import Brokers
from shardyard.client.handling import Caller, Handler, Handling, Slots
from shardyard.client.remote import RemoteHost
from shardyard.groups import OwnedBatch, Reader
from shardyard.groups.partition_reader import Start
from shardyard.model import InvalidCall, Partition, RetryLater

_log = logging.getLogger(__name__)


class Consumer:
    """A member of a group, from entering the block to leaving it.

    `run` calls a handler for each record, several at once, those of one key in order. A record whose handler raises is
    tried again later, and is a dead letter when that did not help; others are not held up by it. Iterating gives whole
    batches instead, to be committed by hand; see `Reader`. How often to try, how many at once, tags and the like are
    set on the group, and take effect while it runs.
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
        patience: float = 30.0,
    ) -> None:
        """As of `Reader`; `patience`: seconds for which brokers may be out of reach."""
        self._brokers = brokers if isinstance(brokers, Brokers) else Brokers(brokers, token=token, patience=patience)
        self._own = not isinstance(brokers, Brokers)
        self._node = RemoteHost(self._brokers, f"{socket.gethostname()}-{uuid.uuid4().hex[:8]}")
        self.member = Reader(
            group,
            topics,
            node=self._node,
            name=name,
            static=static,
            weight=weight,
            partitions=partitions,
            session_timeout=session_timeout,
            start=start,
            max_records=max_records,
        )
        self._session_timeout = session_timeout
        self._stack = AsyncExitStack()
        self._work: set[asyncio.Task[None]] = set()

    @property
    def owned(self) -> set[Partition]:
        """The partitions it owns, as far as it knows."""
        return self.member.owned

    @property
    def settings(self) -> dict[str, Any]:
        """What is set on the group, as last heard."""
        return self._node.coordinator.settings

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:  # what was opened is closed if joining fails
            if self._own:
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
                "no broker could be told that member %s of group %s is gone: others get its partitions in %g s",
                self.member.name,
                self.member.group,
                self._session_timeout,
            )

    def __aiter__(self) -> AsyncIterator[OwnedBatch]:
        return self.member.__aiter__()

    async def run(self, handler: Handler, *, concurrency: int | None = None) -> None:
        """Handle records until cancelled. `handler` is a coroutine function, or a plain one, which runs in threads.

        `concurrency`: by default as the group has it.
        """
        if self._work:
            raise InvalidCall("the consumer runs already")
        slots = Slots(concurrency or self.settings["concurrency"])
        if concurrency is None:
            self._node.coordinator.heard = lambda settings: slots.set(settings["concurrency"])
        caller = Caller(handler, lambda: self.settings["handler_seconds"])
        broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        try:
            batches = self.member.__aiter__()
            while True:
                batch = await _or_broken(batches, broken)
                handling = Handling(batch, self._fail)
                task = asyncio.create_task(handling.run(caller, slots), name=f"handling {batch!r}")
                self._work.add(task)
                task.add_done_callback(lambda done: self._finished(done, broken))
        finally:
            await self.stop()
            caller.close()

    async def stop(self) -> None:
        """End the handling that is under way, after a `run` that was cancelled; what is done of it is committed."""
        for task in self._work:
            if not task.cancelling():  # one that is told twice would not commit
                task.cancel()
        await asyncio.gather(*self._work, return_exceptions=True)

    def _finished(self, task: "asyncio.Task[None]", broken: "asyncio.Future[None]") -> None:
        self._work.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not broken.done():
            broken.set_exception(error)

    async def _fail(self, failures: Sequence[tuple[Partition, int, int, str]]) -> None:
        await self._node.coordinator.fail(self.member.identity, failures)


async def _or_broken(batches: AsyncIterator[OwnedBatch], broken: "asyncio.Future[None]") -> OwnedBatch:
    """The next batch; what broke meanwhile is raised."""
    coming: asyncio.Task[OwnedBatch] = asyncio.create_task(next_of(batches))
    try:
        both: set[asyncio.Future[Any]] = {coming, broken}
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if broken.done():
            broken.result()
        return coming.result()
    finally:
        if not coming.done():
            coming.cancel()
            await asyncio.gather(coming, return_exceptions=True)


async def next_of(batches: AsyncIterator[OwnedBatch]) -> OwnedBatch:
    return await anext(batches)
