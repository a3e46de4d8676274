"""Traffic for the pipeline's demo: producers and a group on one topic, in a thread of their own."""

import asyncio
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from shardyard.groups import Node, Reader, status
from shardyard.log import Log, Sender, open_log
from shardyard.model.batch import SCHEMA
from shardyard.registry import Registry, open_registry

TOPIC, GROUP = "orders", "billing"
MEMBERS = 3
PRODUCERS = 2
KEYS = 5_000
ZIPF_EXPONENT = 1.25
"""The exponent of the keys' Zipf distribution: the most frequent key has about a quarter of the records."""
BATCH_RECORDS = 100
VALUE_BYTES = 200
PAUSE_SECONDS = 0.1
"""Between two batches of a producer; a tenth of it during a burst."""
BURST_SECONDS = 0.5
BURST_EVERY_SECONDS = 3.0
POLL_SECONDS = 0.1


class Traffic:
    """Runs while its `with` block does, and keeps what was delivered for the audit."""

    def __init__(self, log: str, registry: str, partitions: int) -> None:
        self._log_url, self._registry_url, self._partitions = log, registry, partitions
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="traffic")
        self._ready = threading.Event()
        self._stop_producing = threading.Event()
        self._stop_consuming = threading.Event()
        self._delivered: list[tuple[pa.Array, float]] = []
        self._error: BaseException | None = None
        self.sent = 0

    def __enter__(self) -> Self:
        self._thread.start()
        self._ready.wait()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop_producing.set()
        self._stop_consuming.set()
        self._thread.join()
        if self._error is not None and error is None:
            raise self._error

    @property
    def delivered(self) -> int:
        return sum(len(ids) for ids, _ in self._delivered)

    def finish(self) -> None:
        """Stop producing, and return when the group has consumed everything."""
        self._stop_producing.set()
        self._thread.join()

    def write_deliveries(self, path: Path) -> None:
        """Write a Parquet file with a row for each delivery, in order of delivery."""
        ids = pa.concat_arrays([ids for ids, _ in self._delivered])
        at = np.repeat([int(at * 1e6) for _, at in self._delivered], [len(ids) for ids, _ in self._delivered])
        table = pa.table({"id": ids, "n": np.arange(len(ids)), "at": pa.array(at, pa.timestamp("us", "UTC"))})
        pq.write_table(table, path)

    async def _run(self) -> None:
        try:
            with open_registry(self._registry_url) as registry:
                async with open_log(self._log_url) as log, Node(log, registry) as node:
                    await log.create_topic(TOPIC, self._partitions)
                    self._ready.set()
                    consumers = [asyncio.create_task(self._consume(node)) for _ in range(MEMBERS)]
                    await asyncio.gather(*(self._produce(log, n) for n in range(PRODUCERS)))
                    await self._wait_until_consumed(log, registry)
                    for consumer in consumers:
                        consumer.cancel()
                    await asyncio.gather(*consumers, return_exceptions=True)
        except BaseException as error:  # noqa: BLE001 raised again by __exit__
            self._error = error
        finally:
            self._ready.set()

    async def _produce(self, log: Log, number: int) -> None:
        sender = Sender(log, TOPIC)
        rng = np.random.default_rng(number)
        while not self._stop_producing.is_set():
            await sender.send(_orders(rng, number, self.sent))
            self.sent += BATCH_RECORDS
            is_burst = time.monotonic() % BURST_EVERY_SECONDS < BURST_SECONDS
            await asyncio.sleep(PAUSE_SECONDS / 10 if is_burst else PAUSE_SECONDS)

    async def _consume(self, node: Node) -> None:
        async with Reader(GROUP, [TOPIC], node=node) as member:
            async for batch in member:
                self._delivered.append((batch.data["id"].combine_chunks(), time.time()))
                await batch.commit()

    async def _wait_until_consumed(self, log: Log, registry: Registry) -> None:
        while not self._stop_consuming.is_set() and any(row.lag for row in await status(log, registry, GROUP)):  # noqa: ASYNC110
            await asyncio.sleep(POLL_SECONDS)


def _orders(rng: np.random.Generator, producer: int, first: int) -> pa.RecordBatch:
    """A batch of orders, most of them from a few customers."""
    customers = pa.array(rng.zipf(ZIPF_EXPONENT, BATCH_RECORDS) % KEYS).cast(pa.string())
    numbers = pa.array(np.arange(first, first + BATCH_RECORDS)).cast(pa.string())
    body = rng.bytes(VALUE_BYTES // 2).hex().encode()
    return pa.RecordBatch.from_arrays(
        [
            pc.binary_join_element_wise(f"order-{producer}-", numbers, ""),
            pc.binary_join_element_wise("customer-", customers, "").cast(pa.binary()),
            pa.repeat(pa.scalar(body, pa.binary()), BATCH_RECORDS),
            pa.nulls(BATCH_RECORDS, SCHEMA.field("headers").type),
            pa.repeat(0, BATCH_RECORDS),
        ],
        schema=SCHEMA,
    )
