"""The client for programs without an event loop. It runs one of its own, in a thread."""

from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from shardyard.client.consumer import Consumer, next_of
from shardyard.client.failures import HandlerExit
from shardyard.client.handling import Handler
from shardyard.client.producer import Producer
from shardyard.client.signals import sigterm_as_interrupt
from shardyard.groups import OwnedBatch
from shardyard.model import Appended, InvalidCall, Record
from shardyard.model.given import GivenHeaders, GivenValue
from shardyard.runtime.loop_thread import LoopThread

if TYPE_CHECKING:
    import pyarrow as pa

_THREAD = "shardyard-client"


class _Blocking:
    """The event loop of a client, which runs from entering the block to leaving it."""

    _running: LoopThread | None = None

    @property
    def _loop(self) -> LoopThread:
        if self._running is None:
            name = type(self).__name__
            raise InvalidCall(f"the {name} is not open: use it inside a block, `with {name}(...) as ...:`")
        return self._running

    def _start(self) -> LoopThread:
        self._running = LoopThread(_THREAD)
        return self._running

    def _close(self) -> None:
        loop, self._running = self._loop, None
        loop.close()


class BlockingProducer(_Blocking):
    """`Producer`, blocking. May be used from several threads."""

    def __init__(self, brokers: str | Sequence[str], **options: Any) -> None:
        self._producer = Producer(brokers, **options)

    def __enter__(self) -> Self:
        loop = self._start()
        try:
            loop.run(self._producer.__aenter__())
        except BaseException as error:
            self.__exit__(type(error), error, error.__traceback__)  # it may be open all the same
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._loop.run(self._producer.__aexit__(kind, error, trace))
        finally:
            self._close()

    def send(self, topic: str, value: GivenValue, *, headers: GivenHeaders = (), **options: Any) -> str:
        loop = self._loop
        return loop.run(self._producer.send(topic, value, headers=headers, **options))

    def publish(
        self, topic: str, records: "Sequence[Record] | pa.RecordBatch", *, partition: int | None = None
    ) -> list[Appended]:
        loop = self._loop
        return loop.run(self._producer.publish(topic, records, partition=partition))


class BlockingBatch:
    """`OwnedBatch`, blocking."""

    def __init__(self, loop: LoopThread, batch: OwnedBatch) -> None:
        self._loop, self.batch = loop, batch

    def records(self) -> list[Record]:
        return self.batch.records()

    def commit(self, upto: int | None = None) -> None:
        self._loop.run(self.batch.commit(upto))


class BlockingConsumer(_Blocking):
    """`Consumer`, blocking."""

    def __init__(self, brokers: str | Sequence[str], group: str, topics: Sequence[str], **options: Any) -> None:
        self._arguments, self._options = (brokers, group, topics), options

    def __enter__(self) -> Self:
        loop = self._start()
        try:
            self._consumer = loop.run(self._open())
        except BaseException:
            self._close()
            raise
        return self

    async def _open(self) -> Consumer:
        """In the loop, which the consumer belongs to."""
        return await Consumer(*self._arguments, **self._options).__aenter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._loop.run(self._consumer.__aexit__(kind, error, trace))
        finally:
            self._close()

    def __iter__(self) -> Iterator[BlockingBatch]:
        loop = self._loop
        batches = self._consumer.__aiter__()
        while True:
            yield BlockingBatch(loop, loop.run(next_of(batches)))

    def run(self, handler: Handler, *, concurrency: int | None = None) -> None:
        """Handle records until Ctrl-C, SIGTERM (in the main thread, unless the program handles it itself), or an error.
        After a signal it returns: handlers that run then have 5 s to finish, what is done is committed, and the next
        owners of the partitions get the rest. (Iterating raises `KeyboardInterrupt` at Ctrl-C instead.)

        If the handler calls `sys.exit`, what is done is committed, too, and the `SystemExit` is raised here. The record
        counts as not handled, and is delivered again.
        """
        loop = self._loop
        try:
            self._run(loop, handler, concurrency)
        except HandlerExit as exit_:
            raise exit_.error from None

    def _run(self, loop: LoopThread, handler: Handler, concurrency: int | None) -> None:
        try:
            with sigterm_as_interrupt():
                loop.run(self._consumer.run_until_exit(handler, concurrency, may_finish=lambda: True))
        except KeyboardInterrupt:
            loop.run(self._consumer.until_stopped())
