"""The client for programs without an event loop. It runs one of its own, in a thread."""

from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from shardyard.client.consumer import Consumer, next_of
from shardyard.client.handling import Handler
from shardyard.client.producer import Producer
from shardyard.groups import OwnedBatch
from shardyard.model import Appended, Record
from shardyard.runtime.loop_thread import LoopThread

if TYPE_CHECKING:
    import pyarrow as pa

_THREAD = "shardyard-client"


class BlockingProducer:
    """`Producer`, blocking. May be used from several threads."""

    def __init__(self, brokers: str | Sequence[str], **options: Any) -> None:
        self._producer = Producer(brokers, **options)

    def __enter__(self) -> Self:
        self._loop = LoopThread(_THREAD)
        self._loop.run(self._producer.__aenter__())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._loop.run(self._producer.__aexit__(kind, error, trace))
        finally:
            self._loop.close()

    def send(self, topic: str, value: bytes | str, **options: Any) -> str:
        return self._loop.run(self._producer.send(topic, value, **options))

    def publish(
        self, topic: str, records: "Sequence[Record] | pa.RecordBatch", *, partition: int | None = None
    ) -> list[Appended]:
        return self._loop.run(self._producer.publish(topic, records, partition=partition))


class BlockingBatch:
    """`OwnedBatch`, blocking."""

    def __init__(self, loop: LoopThread, batch: OwnedBatch) -> None:
        self._loop, self.batch = loop, batch

    def records(self) -> list[Record]:
        return self.batch.records()

    def commit(self, upto: int | None = None) -> None:
        self._loop.run(self.batch.commit(upto))


class BlockingConsumer:
    """`Consumer`, blocking."""

    def __init__(self, brokers: str | Sequence[str], group: str, topics: Sequence[str], **options: Any) -> None:
        self._arguments, self._options = (brokers, group, topics), options

    def __enter__(self) -> Self:
        self._loop = LoopThread(_THREAD)
        try:
            self._consumer = self._loop.run(self._open())
        except BaseException:
            self._loop.close()
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
            self._loop.close()

    def __iter__(self) -> Iterator[BlockingBatch]:
        batches = self._consumer.__aiter__()
        while True:
            yield BlockingBatch(self._loop, self._loop.run(next_of(batches)))

    def run(self, handler: Handler, *, concurrency: int | None = None) -> None:
        """Handle records until Ctrl-C, or an error. After Ctrl-C it returns: what is done is committed, and the next
        owners of the partitions get the rest. (Iterating raises `KeyboardInterrupt` instead.)"""
        try:
            self._loop.run(self._consumer.run(handler, concurrency=concurrency))
        except KeyboardInterrupt:
            self._loop.run(self._consumer.stop())
