"""A program with the client alone: it publishes batches of several sizes, consumes them, and prints what it got.

    python round_trip.py BROKER TOPIC [MODULE...]

Importing one of the modules fails, as if it were not installed. It imports nothing of the tests, so that it runs where
only the client is installed.
"""

import asyncio
import sys

SIZES = (1, 30, 99, 100, 500)
"""Brokers take small and large batches in different ways."""


async def main(broker: str, topic: str) -> None:
    from shardyard.client import Consumer, Producer  # noqa: PLC0415 after the modules are blocked
    from shardyard.model import Record  # noqa: PLC0415

    async with Producer(broker) as producer:
        number = 0
        for size in SIZES:
            records = []
            for _ in range(size):
                key = None if number % 5 == 0 else b"key-%d" % (number % 7)
                headers = (("tag", b"red"), ("raw", b"\xff\x00")) if number % 3 == 0 else ()
                records.append(Record(f"ü{number:05}", key, b"\x00%d\xff" % number, headers, 1 + number))
                number += 1
            await producer.publish(topic, records)
        await asyncio.gather(*(producer.send(topic, f"sent {i}", key="k", id=f"z{i}", tag="blue") for i in range(20)))
        number += 20
    lines: list[str] = []
    async with Consumer(broker, f"group-of-{topic}", [topic]) as consumer:
        async for batch in consumer:
            assert list(batch.offsets()) == list(range(batch.first, batch.end))
            for record in batch.records():
                time = record.timestamp if record.id.startswith("ü") else "now"
                fields = (record.id, record.key, record.value, record.headers, time)
                lines.append(f"{batch.partition.index if record.key else 'any'} {fields}")
            await batch.commit()
            if len(lines) >= number:
                break
    sys.stdout.write("\n".join(sorted(lines)) + "\n")


if __name__ == "__main__":
    for name in sys.argv[3:]:
        sys.modules[name] = None  # type: ignore[assignment]  # that is how an import is made to fail
    asyncio.run(main(*sys.argv[1:3]))
