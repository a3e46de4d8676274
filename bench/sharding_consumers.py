"""How fast many consumers are attached to shards."""

import asyncio
import os
import time
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path

from bench.contenders.system import QUEUE
from bench.servers import shardyard_broker

from shardyard.client.sharding import ShardingClient

CONSUMERS, SHARDS = 1_000, 64


def measure(root: Path) -> None:
    """Attach consumers that come at the same time, over one connection. Print how long that took, and how they are
    spread."""
    folder = root / "attach"
    folder.mkdir()
    with shardyard_broker(folder) as broker:
        seconds, spread = asyncio.run(_attach(broker.url))
    counts = ", ".join(f"{shards} shards with {consumers}" for consumers, shards in sorted(spread.items()))
    print(
        f"{CONSUMERS:,} consumers were attached to {SHARDS} shards, and subscribed, in {seconds:.2f} s ({counts});"
        f" load average {os.getloadavg()[0]:.1f}"
    )


async def _attach(url: str) -> tuple[float, Counter[int]]:
    async with AsyncExitStack() as stack:
        client = ShardingClient(url)
        await stack.enter_async_context(client)
        await client.declare_exchange(QUEUE)
        await client.set_policy("bench", f"^{QUEUE}$", shards_per_node=SHARDS)
        channel = await stack.enter_async_context(client.channel(prefetch=1))
        start = time.perf_counter()
        reading = [asyncio.ensure_future(anext(channel.consume(QUEUE))) for _ in range(CONSUMERS)]
        queues = await client.queues(QUEUE)
        while sum(queue.consumers or 0 for queue in queues) < CONSUMERS:
            await asyncio.sleep(0.05)
            queues = await client.queues(QUEUE)
        seconds = time.perf_counter() - start
        for task in reading:
            task.cancel()
        await asyncio.gather(*reading, return_exceptions=True)
        return seconds, Counter(queue.consumers or 0 for queue in queues)
