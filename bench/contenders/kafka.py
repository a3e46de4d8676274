"""Kafka: one broker, `acks=all`, through confluent-kafka. Once as it is by default, when it leaves it to the operating
system when to write to disk, and once with a sync before each acknowledgement."""

import random
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import ClassVar, Self

from bench.contenders.system import (
    BATCH_RECORDS,
    BATCHES_IN_FLIGHT,
    GROUP,
    PARTITIONS,
    QUEUE,
    ROUND_RECORDS,
    ROUND_SECONDS,
    VALUES,
    Contender,
    Deliver,
    Schedule,
    System,
)
from confluent_kafka import Consumer, KafkaError, KafkaException, Message, Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic
from tests.kafka import find_kafka, kafka_server

POLL_SECONDS = 10.0
BATCH_LINGER_MS = 5
"""The client's default."""
SINGLES_LINGER_MS = 1
"""From a number of single records in flight on; below it, they are sent at once."""
PRODUCER_SETTINGS: dict[str, str | int | float | bool] = {
    "acks": "all",
    "socket.nagle.disable": True,  # otherwise a request waits for the acknowledgement of the last packet, up to 40 ms
    "max.in.flight": 5,  # of requests, as in Kafka's own client: what waits meanwhile is sent together
    "sticky.partitioning.linger.ms": 10,  # it depends on linger.ms otherwise, and 0 would split batches up
}


class Kafka(System):
    """The loops of the documentation: `produce`, and `poll` for the acknowledgements, all in one thread."""

    linger_from: ClassVar[int] = 512
    """Records in flight from which on lingering makes single records faster."""

    def __init__(self, port: str) -> None:
        super().__init__()
        self._server: dict[str, str | int | float | bool] = {"bootstrap.servers": f"127.0.0.1:{port}"}
        self._producers: dict[int, Producer] = {}

    async def __aenter__(self) -> Self:
        return self

    def _producer(self, linger_ms: int) -> Producer:
        if linger_ms not in self._producers:
            self._producers[linger_ms] = Producer({**self._server, **PRODUCER_SETTINGS, "linger.ms": linger_ms})
        return self._producers[linger_ms]

    async def create(self) -> None:
        topic = NewTopic(QUEUE, num_partitions=PARTITIONS, replication_factor=1)
        admin = AdminClient(self._server)
        for created in admin.create_topics([topic]).values():
            created.result()

    async def send(self, value: bytes) -> None:
        producer = self._producer(linger_ms=0)
        producer.produce(QUEUE, value, on_delivery=_check)
        producer.flush()

    async def publish_batches(self) -> int:
        """The client makes the batches."""
        latencies = self._produce(BATCH_LINGER_MS, BATCHES_IN_FLIGHT * BATCH_RECORDS, ROUND_RECORDS)
        return len(latencies)

    async def send_singles(self, in_flight: int) -> list[float]:
        return self._produce(SINGLES_LINGER_MS if in_flight >= self.linger_from else 0, in_flight, sys.maxsize)

    def _produce(self, linger_ms: int, in_flight: int, max_records: int) -> list[float]:
        """Produce for one round; returns how long each record took."""
        producer = self._producer(linger_ms)
        latencies: list[float] = []

        def acknowledged(sent_at: float, error: KafkaError | None, message: Message) -> None:
            _check(error, message)
            latencies.append(time.perf_counter() - sent_at)

        start, sent = time.perf_counter(), 0
        while (sent_at := time.perf_counter()) - start < ROUND_SECONDS and sent < max_records:
            producer.produce(QUEUE, random.choice(VALUES), on_delivery=partial(acknowledged, sent_at))
            sent += 1
            producer.poll(0)
            while sent - len(latencies) >= in_flight:
                producer.poll(POLL_SECONDS)
        producer.flush()
        return latencies

    async def send_on_schedule(self, schedule: Schedule) -> None:
        producer = self._producer(linger_ms=0)
        while not schedule.is_done:
            for value in schedule.due():
                producer.produce(QUEUE, value, on_delivery=_check)
            producer.poll(schedule.seconds_until_next())
        producer.flush()

    async def consume(self, count: int, deliver: Deliver) -> None:
        """One commit is under way at a time, while records go on being delivered."""
        is_committing = False

        def committed(error: KafkaError | None, _: object) -> None:
            nonlocal is_committing
            is_committing = False
            if error is not None:
                raise KafkaException(error)

        settings = {
            **self._server,
            "group.id": GROUP,
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            "on_commit": committed,
        }
        consumer = Consumer(settings)
        consumer.subscribe([QUEUE])
        remaining = count
        while remaining > 0:
            first = consumer.poll(POLL_SECONDS)
            if first is None:
                raise RuntimeError(f"{remaining} of {count} records never arrived")
            messages = [first, *consumer.consume(BATCH_RECORDS - 1, timeout=0)]
            deliver([_value(message) for message in messages])
            remaining -= len(messages)
            if not is_committing and remaining > 0:
                is_committing = True
                consumer.commit(asynchronous=True)
        consumer.commit(asynchronous=False)
        consumer.close()


class FlushedKafka(Kafka):
    """A request costs a sync, so fewer requests are faster sooner."""

    linger_from: ClassVar[int] = 64


def _check(error: KafkaError | None, _: Message) -> None:
    if error is not None:
        raise KafkaException(error)


def _value(message: Message) -> bytes:
    error, value = message.error(), message.value()
    if error is not None or not isinstance(value, bytes):
        raise KafkaException(error)
    return value


@contextmanager
def serve(folder: Path, **settings: object) -> Iterator[str | None]:
    if jars := find_kafka():
        with kafka_server(jars, folder, **settings) as port:
            yield str(port)
    else:
        yield None


KAFKA = Contender("Kafka", serve, Kafka)
KAFKA_FLUSHED = Contender("Kafka, flushed", partial(serve, log_flush_interval_messages=1), FlushedKafka)
