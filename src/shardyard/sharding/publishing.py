"""`Publisher`: routes messages, and stores them in the slots of their queues."""

import asyncio
import itertools
import uuid
import zlib
from collections.abc import Callable, Sequence

from shardyard.log import Log
from shardyard.log.requests import AppendRequest
from shardyard.log.router import append_with_retry
from shardyard.model import (
    Busy,
    Fenced,
    Outdated,
    PartitionDraining,
    QueueFull,
    Record,
    RetryLater,
    ShardyardError,
    Stamp,
    UnknownExchange,
    Unroutable,
)
from shardyard.model.limits import Limits, Validated, validate
from shardyard.model.sharding import OutgoingMessage, Overflow, Queue
from shardyard.runtime.clock import Clock, now_ms
from shardyard.runtime.metrics import SHARDING_PUBLISHED, SHARDING_UNROUTABLE
from shardyard.sharding.messages import check_message, to_record, version_header
from shardyard.sharding.routing import Distribution, distribute
from shardyard.sharding.slot_writer import SlotWriter
from shardyard.sharding.topology import Topology
from shardyard.sharding.topology_cache import TopologyCache

STORE_SECONDS = 10.0
"""How long storing is retried while the log is busy, or queues of the exchange take no messages for the moment."""
AGAIN_SECONDS = 0.02
"""Before messages that were refused are routed again by the same topology."""
NO_GENERATION = -1
LIMITS = Limits()

ToRecord = Callable[[int, tuple[str, bytes]], Record]
"""Makes the record of the message with this index; the second argument is the header with the topology's version."""
Parts = dict[str, list[int]]
"""By the name of a queue, the indexes of messages."""


class Publisher:
    """Publishes messages for any exchange, through any node.

    A message is stored under the routing fence of its queue. If the queue receives no more messages, the log refuses
    it: then the topology is read again, and the message goes where it leads now. So nothing gets into a queue that was
    removed.
    """

    def __init__(self, log: Log, topology: TopologyCache, clock: Clock, *, limits: Limits = LIMITS) -> None:
        self._log = log
        self._topology = topology
        self._clock = clock
        self._limits = limits
        self._producer = uuid.uuid4().hex
        self._numbers = itertools.count()
        self._writers: dict[int, SlotWriter] = {}

    async def publish(
        self,
        exchange: str,
        messages: Sequence[OutgoingMessage],
        *,
        mandatory: bool = True,
        stamp: Stamp | None = None,
    ) -> list[int]:
        """Publish messages; durable on return. Returns for each how many queues took it.

        `mandatory`: `Unroutable` if there is no queue for one of them. `QueueFull` if a queue refuses them because of
        its maximum length. In both cases nothing is stored, unless the queue of a message is removed meanwhile.

        `stamp`: the same call again, through any node, stores nothing twice, as long as the exchange routes as before
        and its queues have the same limits.
        `Stamp` says how many calls a producer may have in flight.
        """
        for message in messages:
            check_message(message)
        prefix = f"{self._producer}:{next(self._numbers):x}" if stamp is None else f"{stamp.producer}:{stamp.sequence}"
        now = now_ms()  # a log keeps records that have a time at hand for readers that wait; others are read again
        work = PublishWork(
            exchange, messages, lambda i, version: to_record(messages[i], f"{prefix}:{i}", version, now), stamp
        )
        return await self.carry_out(work, mandatory=mandatory)

    async def carry_out(self, work: "PublishWork", *, mandatory: bool) -> list[int]:
        """Publish messages whose records the caller makes."""
        if not work.messages:
            return []
        deadline = self._clock.monotonic() + STORE_SECONDS
        topology, found = await self._route(work, mandatory)
        await self._check_lengths(work, topology, found)
        parts = found.by_queue
        while refused := await self._store_parts(work, topology, parts, deadline):
            if self._clock.monotonic() > deadline:
                raise Busy(f"exchange {work.exchange!r}", STORE_SECONDS)
            topology, parts = await self._route_again(work, refused, topology.version)
        SHARDING_PUBLISHED.add(sum(work.taken))
        if 0 in work.taken:  # also if the queue of a message was removed just now
            if mandatory:
                raise work.unroutable(work.taken)
            SHARDING_UNROUTABLE.add(work.taken.count(0))
        return work.taken

    async def store(self, queue: Queue, records: Sequence[Record]) -> None:
        """Store records in one queue, without an exchange. `Fenced` if it receives no more messages."""
        validated = validate(records, self._limits, now_ms())
        await self._writer(queue).append(queue, validated, self._clock.monotonic() + STORE_SECONDS)
        SHARDING_PUBLISHED.add(len(records))

    # Routing

    async def _route(self, work: "PublishWork", mandatory: bool) -> tuple[Topology, Distribution]:
        """Where the messages go. If one goes nowhere, the topology in memory may be outdated, and is read again."""
        topology = self._topology.current
        found = None
        if work.exchange in topology.exchanges:
            found = distribute(topology, work.exchange, work.messages)
        if found is None or 0 in found.counts:
            topology = await self._topology.refresh()
            found = distribute(topology, work.exchange, work.messages)
        if mandatory and 0 in found.counts:
            raise work.unroutable(found.counts)
        return topology, found

    async def _route_again(self, work: "PublishWork", refused: Parts, version: int) -> tuple[Topology, Parts]:
        """Where the messages go that were refused, except to queues that have them already."""
        topology = await self._topology.refresh()
        if topology.version == version:  # the queue is between two states
            await self._clock.sleep(AGAIN_SECONDS)
            topology = await self._topology.refresh()
        indexes = sorted({index for part in refused.values() for index in part})
        try:
            found = distribute(topology, work.exchange, [work.messages[index] for index in indexes])
        except UnknownExchange:
            if any(work.taken):
                return topology, {}  # it was deleted, and has taken what it could
            raise
        parts = {name: [indexes[i] for i in part] for name, part in found.by_queue.items()}
        stored = work.stored()
        missing = {name: [i for i in part if (name, i) not in stored] for name, part in parts.items()}
        work.round += 1
        return topology, {name: part for name, part in missing.items() if part}

    async def _check_lengths(self, work: "PublishWork", topology: Topology, found: Distribution) -> None:
        """`QueueFull` if a part has no room in its queue. The length of a queue is counted from its first message that
        was not acknowledged, because the log knows no more."""
        for name, part in found.by_queue.items():
            queue = topology.queues[name]
            limits = queue.limits
            if limits.max_length is not None and limits.overflow is Overflow.REJECT_PUBLISH:
                span = await self._log.span(queue.partition)
                is_full = span.end - max(span.first, queue.first) + len(part) > limits.max_length
                if is_full and not await self._is_stored(work, topology, queue, part):
                    raise QueueFull(name, limits.max_length, len(part))

    async def _is_stored(self, work: "PublishWork", topology: Topology, queue: Queue, part: Sequence[int]) -> bool:
        """Whether an earlier call has stored this part under the same stamp. The log is asked by an append under a
        generation that no topic has: it recognises the stamp, and refuses what it does not know."""
        stamp = work.stamp_under(topology)
        if stamp is None:
            return False
        version = version_header(topology.version)
        records = validate([work.to_record(index, version) for index in part], self._limits, now_ms())
        try:
            await self._log.append(queue.partition, records, stamp=stamp, generation=NO_GENERATION)
        except (Outdated, PartitionDraining):
            return False
        return True

    # Storing

    async def _store_parts(self, work: "PublishWork", topology: Topology, parts: Parts, deadline: float) -> Parts:
        """Store each part in its queue. Returns those that were refused because their queue receives no more."""
        version = version_header(topology.version)
        now = now_ms()
        records = [
            validate([work.to_record(index, version) for index in part], self._limits, now) for part in parts.values()
        ]
        queues = [topology.queues[name] for name in parts]
        stamp = work.stamp_under(topology)
        outcomes: Sequence[ShardyardError | None]
        if stamp is not None:
            outcomes = await self._append(queues, records, stamp, deadline)
        else:
            outcomes = await asyncio.gather(*map(self._write, queues, records, itertools.repeat(deadline)))
        refused, errors = {}, []
        for (name, part), outcome in zip(parts.items(), outcomes, strict=True):
            if outcome is None:
                work.took(name, part)
            elif isinstance(outcome, Fenced | PartitionDraining):
                refused[name] = part
            else:
                errors.append(outcome)
        if errors:
            raise errors[0]
        return refused

    async def _append(
        self, queues: Sequence[Queue], parts: Sequence[Validated], stamp: Stamp, deadline: float
    ) -> list[ShardyardError | None]:
        """Store parts by one call of the log, and those again that it refuses for now. None for what is stored."""
        requests = [
            AppendRequest(queue.partition, part, stamp, queue.routing_fence)
            for queue, part in zip(queues, parts, strict=True)
        ]
        outcomes: list[ShardyardError | None] = []
        for request, outcome in zip(requests, await self._log.append_many(requests), strict=True):
            if isinstance(outcome, RetryLater):
                outcomes.append(await self._append_again(request, deadline))
            else:
                outcomes.append(outcome if isinstance(outcome, ShardyardError) else None)
        return outcomes

    async def _append_again(self, request: AppendRequest, deadline: float) -> ShardyardError | None:
        try:
            await append_with_retry(
                *(self._log, request.partition, request.records),
                clock=self._clock,
                deadline=deadline,
                stamp=request.stamp,
                fence=request.fence,
            )
        except ShardyardError as error:
            return error
        return None

    async def _write(self, queue: Queue, records: Validated, deadline: float) -> ShardyardError | None:
        """Store a part without a stamp of its own, together with what else is for its queue."""
        try:
            await self._writer(queue).append(queue, records, deadline)
        except ShardyardError as error:
            return error
        return None

    def _writer(self, queue: Queue) -> SlotWriter:
        writer = self._writers.get(queue.slot)
        if writer is None:
            writer = SlotWriter(self._log, queue.partition, self._producer, self._clock, self._limits)
            self._writers[queue.slot] = writer
        return writer


class PublishWork:
    """Messages on their way to the queues of an exchange."""

    def __init__(
        self, exchange: str, messages: Sequence[OutgoingMessage], to_record: ToRecord, stamp: Stamp | None = None
    ) -> None:
        """`messages` decide about the routing, `to_record` what is stored."""
        self.exchange = exchange
        self.messages = messages
        self.to_record = to_record
        self.taken = [0] * len(messages)
        """How many queues have taken each message."""
        self._stored: list[tuple[str, Sequence[int]]] = []
        self.round = 0
        """How often messages were routed again."""
        self._stamp = stamp

    def took(self, queue: str, part: Sequence[int]) -> None:
        self._stored.append((queue, part))
        for index in part:
            self.taken[index] += 1

    def stored(self) -> set[tuple[str, int]]:
        """Which queue has which message."""
        return {(queue, index) for queue, part in self._stored for index in part}

    def unroutable(self, counts: Sequence[int]) -> Unroutable:
        first = self.messages[counts.index(0)]
        return Unroutable(self.exchange, first.routing_key, counts.count(0))

    def stamp_under(self, topology: Topology) -> Stamp | None:
        """The stamp of the parts. The same batch has other parts when the exchange routes otherwise, so that is part of
        the stamp."""
        if self._stamp is None:
            return None
        routing = topology.derived(("routing", self.exchange), lambda: _routing_number(topology, self.exchange))
        again = f"/{self.round}" if self.round else ""
        return Stamp(f"{self._stamp.producer}/{routing:x}{again}", self._stamp.sequence)


def _routing_number(topology: Topology, exchange: str) -> int:
    """A number that differs, most probably, between two ways of routing."""
    bound = [(b, q.slot, q.incarnation) for b in topology.bindings(exchange) for q in (topology.queues[b.queue],)]
    return zlib.crc32(repr(bound).encode())
