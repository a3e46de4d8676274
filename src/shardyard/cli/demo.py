"""`shardyard demo`: a group shares a log, while members come and go."""

import asyncio
import itertools
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from rich.console import Console

from shardyard.cli.output import Count, Json, Row, print_json, print_table
from shardyard.groups import Node, Reader, status
from shardyard.log import Log, open_log
from shardyard.model import InvalidValue, Partition, Record, whole_number
from shardyard.placement import Modulus, plan
from shardyard.registry import Registry, open_registry

TOPIC, GROUP = "orders", "billing"
KEYS = 1000
BATCH = 50
SECONDS_EACH = 1.0
PATIENCE_SECONDS = 30.0
MOST = 64
"""Members, or partitions for each: what one event loop shows without being the bottleneck itself."""


def demo(
    partitions: Annotated[int, Count("--partitions", "-p", help="Partitions of the topic.")] = 12,
    members: Annotated[int, Count("--members", help="Members to begin with; one more joins, then one leaves.")] = 3,
    json: Json = False,
) -> None:
    """Let members share a topic on the embedded log while records flow, one joining and one leaving.

    Everything happens in a temporary folder, and takes a few seconds.

    Examples:

      shardyard demo

      shardyard demo --partitions 64 --members 5
    """
    whole_number("partitions", partitions, at_least=1)
    if not 1 <= whole_number("members", members, at_least=1) <= MOST or partitions > MOST * members:
        raise InvalidValue("members", members, f"at most {MOST}, with at most {MOST} partitions each")
    with tempfile.TemporaryDirectory(prefix="shardyard-demo-") as folder:
        rows, summary = asyncio.run(_show(Path(folder), partitions, members))
    if json:
        print_json({"stages": rows, "summary": summary})
    else:
        print_table(rows)
        Console(highlight=False, soft_wrap=True).print(
            f"{summary['sent']:,} records sent, {summary['delivered']:,} delivered, {summary['lost']} lost, "
            f"{summary['twice']} twice, {summary['out_of_order']} out of order per key."
        )


async def _show(folder: Path, partitions: int, members: int) -> tuple[list[Row], dict[str, int]]:
    registry = open_registry(f"sqlite:///{folder / 'registry.db'}")
    async with open_log(f"sqlite:///{folder / 'log'}") as log, Node(log, registry) as node:
        await log.create_topic(TOPIC, partitions)
        yard = _Yard(log, registry, node, partitions)
        producer = asyncio.create_task(yard.produce())
        for i in range(members):
            yard.start(f"member-{i + 1}")
        rows = [await yard.stage(f"{members} members", members)]
        yard.start(f"member-{members + 1}")
        rows.append(await yard.stage("one more joins", members + 1))
        await yard.stop("member-1")
        rows.append(await yard.stage("member-1 leaves", members))
        yard.enough = True
        await producer
        await yard.until_done()
        for name in list(yard.tasks):
            await yard.stop(name)
    registry.close()
    return rows, yard.summary()


class _Yard:
    """What the demo keeps count of."""

    def __init__(self, log: Log, registry: Registry, node: Node, partitions: int) -> None:
        self.log, self.registry, self.node = log, registry, node
        self.place = Modulus("fnv1a32", partitions).place
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self.leaving: set[str] = set()
        self.enough = False
        self.owners: Mapping[Partition, str] = {}
        self.sent: Counter[str] = Counter()
        self.got: defaultdict[str, list[int]] = defaultdict(list)

    async def produce(self) -> None:
        """Numbered records of many keys; what was sent is what was acknowledged."""
        keys = [f"customer-{i}" for i in range(KEYS)]
        for start in itertools.cycle(range(0, KEYS, BATCH)):
            batches: defaultdict[int, list[Record]] = defaultdict(list)
            for key in keys[start : start + BATCH]:
                batches[self.place(key)].append(Record.new(str(self.sent[key]).encode(), key.encode()))
            await asyncio.gather(*(self.log.append(Partition(TOPIC, p), r) for p, r in batches.items()))
            self.sent.update(keys[start : start + BATCH])
            if self.enough:
                break

    def start(self, name: str) -> None:
        self.tasks[name] = asyncio.create_task(self.consume(name))

    async def stop(self, name: str) -> None:
        """Let a member leave after the batch it is at; one that waits for records is at none."""
        task = self.tasks.pop(name)
        self.leaving.add(name)
        done, _ = await asyncio.wait([task], timeout=0.5)
        if not done:
            task.cancel()
        await asyncio.gather(task, return_exceptions=not done)

    async def consume(self, name: str) -> None:
        async with Reader(GROUP, [TOPIC], node=self.node, name=name) as member:
            async for batch in member:
                for record in batch.records():
                    self.got[(record.key or b"").decode()].append(int(record.value))
                await batch.commit()
                if name in self.leaving:
                    break

    async def stage(self, what: str, members: int) -> Row:
        """Wait until everything is owned by that many members, let it run for a moment, and say what moved."""
        began = time.monotonic()
        before = self.owners
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not await self._settled(members):  # noqa: ASYNC110 the state of several parts, with no one event for it
                await asyncio.sleep(0.01)
        seconds = time.monotonic() - began
        await asyncio.sleep(SECONDS_EACH)
        sizes = Counter(self.owners.values())
        return {
            "stage": what,
            "partitions each": " ".join(str(size) for _, size in sorted(sizes.items())),
            "moved": len(plan(before, self.owners).moves) if before else 0,
            "settled after s": round(seconds, 3),
            "records so far": sum(self.sent.values()),
        }

    async def _settled(self, members: int) -> bool:
        if any(task.done() for task in self.tasks.values()):
            await asyncio.gather(*self.tasks.values())  # raises what ended it
        with self.registry.snapshot() as tx:
            if tx.group(GROUP) is None:
                return False
        rows = await status(self.log, self.registry, GROUP)
        self.owners = {row.partition: row.owner for row in rows if row.owner is not None and row.target is None}
        return len(self.owners) == len(rows) > 0 and len(set(self.owners.values())) == min(members, len(rows))

    async def until_done(self) -> None:
        async with asyncio.timeout(PATIENCE_SECONDS):
            while any(row.lag for row in await status(self.log, self.registry, GROUP)):  # noqa: ASYNC110 as above
                await asyncio.sleep(0.01)

    def summary(self) -> dict[str, int]:
        delivered = sum(map(len, self.got.values()))
        distinct = sum(len(set(numbers)) for numbers in self.got.values())
        sent = sum(self.sent.values())
        return {
            "sent": sent,
            "delivered": delivered,
            "lost": sum(n not in set(self.got[key]) for key in self.sent for n in range(self.sent[key])),
            "twice": delivered - distinct,
            "out_of_order": sum(a >= b for numbers in self.got.values() for a, b in itertools.pairwise(numbers)),
        }
