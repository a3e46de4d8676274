"""`shardyard demo`: a group consumes a topic while members join and leave."""

# ruff: noqa: PLC0415 commands start quickly: what is slow to import is imported by those that need it

import asyncio
import itertools
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.console import Console

from shardyard.cli.options import Json, Partitions, integer_option
from shardyard.cli.output import Row, print_json, print_table
from shardyard.model import InvalidValue, Partition, Record, whole_number
from shardyard.model.extras import require
from shardyard.placement import plan

if TYPE_CHECKING:
    from shardyard.groups import Node
    from shardyard.log import Log
    from shardyard.registry import Registry

TOPIC, GROUP = "orders", "billing"
KEYS = 1000
BATCH_RECORDS = 50
STAGE_SECONDS = 1.0
TIMEOUT_SECONDS = 30.0
MAX_COUNT = 64
"""Of members, and of partitions for each: with more, the demo's one event loop would be the bottleneck."""


def demo(
    partitions: Partitions = 12,
    members: Annotated[
        int, integer_option("--members", help="The number of members at the start; one joins, then one leaves.")
    ] = 3,
    json: Json = False,
) -> None:
    """Run a group on the embedded log while records flow, one member joins and one leaves.

    It runs in a temporary folder, and takes a few seconds.

    Examples:

      shardyard demo

      shardyard demo --partitions 64 --members 5
    """
    require("server", "this command")
    whole_number("partitions", partitions, at_least=1)
    if not 1 <= whole_number("members", members, at_least=1) <= MAX_COUNT or partitions > MAX_COUNT * members:
        raise InvalidValue("members", members, f"at most {MAX_COUNT}, with at most {MAX_COUNT} partitions each")
    with tempfile.TemporaryDirectory(prefix="shardyard-demo-") as folder:
        rows, summary = asyncio.run(_run_stages(Path(folder), partitions, members))
    if json:
        print_json({"stages": rows, "summary": summary})
    else:
        print_table(rows)
        Console(highlight=False, soft_wrap=True).print(
            f"{summary['sent']:,} records sent, {summary['delivered']:,} delivered, {summary['lost']} lost, "
            f"{summary['twice']} duplicated, {summary['out_of_order']} out of order per key."
        )


async def _run_stages(folder: Path, partitions: int, members: int) -> tuple[list[Row], dict[str, int]]:
    from shardyard.groups import Node
    from shardyard.log import open_log
    from shardyard.registry import open_registry

    registry = open_registry(f"sqlite:///{folder / 'registry.db'}")
    async with open_log(f"sqlite:///{folder / 'log'}") as log, Node(log, registry) as node:
        await log.create_topic(TOPIC, partitions)
        group = _DemoGroup(log, registry, node, partitions)
        producer = asyncio.create_task(group.produce())
        for i in range(members):
            group.start(f"member-{i + 1}")
        rows = [await group.run_stage(f"{members} members", members)]
        group.start(f"member-{members + 1}")
        rows.append(await group.run_stage("one more joins", members + 1))
        await group.stop("member-1")
        rows.append(await group.run_stage("member-1 leaves", members))
        group.stop_producing = True
        await producer
        await group.wait_until_consumed()
        for name in list(group.tasks):
            await group.stop(name)
    registry.close()
    return rows, group.summary()


class _DemoGroup:
    """A producer and the members of a group, with counts of what was sent and received."""

    def __init__(self, log: "Log", registry: "Registry", node: "Node", partitions: int) -> None:
        self.log, self.registry, self.node = log, registry, node
        from shardyard.placement import Modulus

        self.place = Modulus("fnv1a32", partitions).place
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self.leaving: set[str] = set()
        self.stop_producing = False
        self.owners: Mapping[Partition, str] = {}
        self.sent: Counter[str] = Counter()
        self.received: defaultdict[str, list[int]] = defaultdict(list)

    async def produce(self) -> None:
        """Send numbered records of many keys; only acknowledged ones count as sent."""
        keys = [f"customer-{i}" for i in range(KEYS)]
        for start in itertools.cycle(range(0, KEYS, BATCH_RECORDS)):
            batches: defaultdict[int, list[Record]] = defaultdict(list)
            for key in keys[start : start + BATCH_RECORDS]:
                batches[self.place(key)].append(Record.new(str(self.sent[key]).encode(), key.encode()))
            await asyncio.gather(*(self.log.append(Partition(TOPIC, p), r) for p, r in batches.items()))
            self.sent.update(keys[start : start + BATCH_RECORDS])
            if self.stop_producing:
                break

    def start(self, name: str) -> None:
        self.tasks[name] = asyncio.create_task(self.consume(name))

    async def stop(self, name: str) -> None:
        """Let a member leave after its current batch, or cancel it if it is waiting for records."""
        task = self.tasks.pop(name)
        self.leaving.add(name)
        done, _ = await asyncio.wait([task], timeout=0.5)
        if not done:
            task.cancel()
        await asyncio.gather(task, return_exceptions=not done)

    async def consume(self, name: str) -> None:
        from shardyard.groups import Reader

        async with Reader(GROUP, [TOPIC], node=self.node, name=name) as member:
            async for batch in member:
                for record in batch.records():
                    self.received[(record.key or b"").decode()].append(int(record.value))
                await batch.commit()
                if name in self.leaving:
                    break

    async def run_stage(self, title: str, members: int) -> Row:
        """Wait until that many members own all partitions, run for a moment, and return what moved."""
        started = time.monotonic()
        before = self.owners
        async with asyncio.timeout(TIMEOUT_SECONDS):
            while not await self._is_settled(members):  # noqa: ASYNC110 no single event says so
                await asyncio.sleep(0.01)
        seconds = time.monotonic() - started
        await asyncio.sleep(STAGE_SECONDS)
        sizes = Counter(self.owners.values())
        return {
            "stage": title,
            "partitions each": " ".join(str(size) for _, size in sorted(sizes.items())),
            "moved": len(plan(before, self.owners).moves) if before else 0,
            "settled after s": round(seconds, 3),
            "records so far": sum(self.sent.values()),
        }

    async def _is_settled(self, members: int) -> bool:
        from shardyard.groups import status

        if any(task.done() for task in self.tasks.values()):
            await asyncio.gather(*self.tasks.values())  # raise the error that ended it
        if self.registry.read(lambda tx: tx.group(GROUP)) is None:
            return False
        rows = await status(self.log, self.registry, GROUP)
        self.owners = {row.partition: row.owner for row in rows if row.owner is not None and row.target is None}
        return len(self.owners) == len(rows) > 0 and len(set(self.owners.values())) == min(members, len(rows))

    async def wait_until_consumed(self) -> None:
        from shardyard.groups import status

        async with asyncio.timeout(TIMEOUT_SECONDS):
            while any(row.lag for row in await status(self.log, self.registry, GROUP)):  # noqa: ASYNC110 as above
                await asyncio.sleep(0.01)

    def summary(self) -> dict[str, int]:
        delivered = sum(map(len, self.received.values()))
        distinct = sum(len(set(numbers)) for numbers in self.received.values())
        sent = sum(self.sent.values())
        return {
            "sent": sent,
            "delivered": delivered,
            "lost": sum(n not in set(self.received[key]) for key in self.sent for n in range(self.sent[key])),
            "twice": delivered - distinct,
            "out_of_order": sum(a >= b for numbers in self.received.values() for a, b in itertools.pairwise(numbers)),
        }
