"""How long it takes until 1 000 consumers of 64 shards are attached, at one node and at four, on SQLite and PostgreSQL.

`python -m bench.sharding_attach`. Nodes are in one process, without the connections of the consumers.
"""

import asyncio
import tempfile
import time
from collections import Counter
from pathlib import Path

from bench.figures import pin_to_cores, table
from tests.postgresql import postgresql_server
from tests.queues.engines import databases
from tests.sharding.yard import AttachingNode, sharding_yard

CONSUMERS = 1000
SHARDS = 64


async def measure(engine: str, nodes: int, together: bool) -> tuple[float, int]:
    """Seconds until all are attached, and the difference between the most and the fewest consumers of a shard."""
    with tempfile.TemporaryDirectory() as folder:
        async with sharding_yard(engine, Path(folder)) as yard, asyncio.timeout(170):
            await yard.administration.register_node("node-0")
            await yard.declare("images")
            await yard.set_policy(SHARDS)
            attaching = [AttachingNode(yard, f"node-{n}") for n in range(nodes)]
            for node in attaching:
                await node.__aenter__()
            started = time.perf_counter()
            if together:
                calls = [attaching[n % nodes].attachments.attach("images") for n in range(CONSUMERS)]
                consumers = await asyncio.gather(*calls)
            else:
                consumers = [await attaching[n % nodes].attachments.attach("images") for n in range(CONSUMERS)]
            seconds = time.perf_counter() - started
            counts = Counter(consumer.attached.own for consumer in consumers)
            for node in attaching:
                await node.__aexit__()
            return seconds, max(counts.values()) - min(counts.values())


def main() -> None:
    print(f"{CONSUMERS} consumers attach to {SHARDS} shards, {pin_to_cores()}")
    rows = []
    with postgresql_server() as server, databases(server):
        for engine in ("sqlite", "postgresql"):
            for nodes in (1, 4):
                for together in (True, False):
                    seconds, difference = asyncio.run(measure(engine, nodes, together))
                    how = "at once" if together else "one after another"
                    rows.append([f"{engine}, {nodes} nodes, {how}", f"{seconds:.2f} s", str(difference)])
    table(["", "all attached after", "most - fewest"], rows)


if __name__ == "__main__":
    main()
