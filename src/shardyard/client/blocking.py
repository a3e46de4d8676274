"""The client for programs without an event loop: it has one of its own, in a thread."""

import asyncio
import threading
from collections.abc import Coroutine, Iterator, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

import pyarrow as pa

from shardyard.client.consumer import Consumer, next_of
from shardyard.client.handling import Handler
from shardyard.client.producer import Producer
from shardyard.groups import OwnedBatch
from shardyard.model import Record

T = TypeVar("T")


class _Loop:
    """An event loop in a thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="shardyard-client", daemon=True)
        self._thread.start()

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`; an interrupt cancels it."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class BlockingProducer:
    """`Producer`, blocking. May be used from several threads."""

    def __init__(self, brokers: str | Sequence[str], **options: Any) -> None:
        self._producer = Producer(brokers, **options)

    def __enter__(self) -> Self:
        self._loop = _Loop()
        self._loop.wait(self._producer.__aenter__())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._loop.wait(self._producer.__aexit__(kind, error, trace))
        finally:
            self._loop.close()

    def send(self, topic: str, value: bytes | str, **options: Any) -> str:
        return self._loop.wait(self._producer.send(topic, value, **options))

    def publish(
        self, topic: str, records: Sequence[Record] | pa.RecordBatch, *, partition: int | None = None
    ) -> list[dict[str, Any]]:
        return self._loop.wait(self._producer.publish(topic, records, partition=partition))


class BlockingBatch:
    """`OwnedBatch`, blocking."""

    def __init__(self, loop: _Loop, batch: OwnedBatch) -> None:
        self._loop, self.batch = loop, batch

    def records(self) -> list[Record]:
        return self.batch.records()

    def commit(self, upto: int | None = None) -> None:
        self._loop.wait(self.batch.commit(upto))


class BlockingConsumer:
    """`Consumer`, blocking."""

    def __init__(self, brokers: str | Sequence[str], group: str, topics: Sequence[str], **options: Any) -> None:
        self._asked, self._options = (brokers, group, topics), options

    def __enter__(self) -> Self:
        self._loop = _Loop()
        try:
            self._consumer = self._loop.wait(self._entered())
        except BaseException:
            self._loop.close()
            raise
        return self

    async def _entered(self) -> Consumer:
        return await Consumer(*self._asked, **self._options).__aenter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._loop.wait(self._consumer.__aexit__(kind, error, trace))
        finally:
            self._loop.close()

    def __iter__(self) -> Iterator[BlockingBatch]:
        batches = self._consumer.__aiter__()
        while True:
            yield BlockingBatch(self._loop, self._loop.wait(next_of(batches)))

    def run(self, handler: Handler, *, concurrency: int | None = None) -> None:
        """Until Ctrl-C, or an error. After Ctrl-C it returns: what is done is committed, the rest comes again to
        whoever gets the partitions. Iterating raises `KeyboardInterrupt`, as a loop of one's own would."""
        try:
            self._loop.wait(self._consumer.run(handler, concurrency=concurrency))
        except KeyboardInterrupt:
            self._loop.wait(self._consumer.stop())
