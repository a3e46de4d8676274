"""A log in which `events` ends at given offsets, for readers of the old mode that finish before a migration."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any, cast

from shardyard.groups import Node
from shardyard.log import Log
from shardyard.log.port import READ_BYTES, READ_RECORDS
from shardyard.log.requests import Outcomes, ReadRequest, has_news
from shardyard.model.batch import Batch
from shardyard.runtime.clock import Clock
from shardyard.wire.channels import EVENTS


class BoundedLog:
    """A log, except that `read_many`, by which members read, returns no records of `events` from the bound of their
    partition on."""

    def __init__(self, log: Log, until: Mapping[int, tuple[int, int]], clock: Clock) -> None:
        """`until`: for each partition of `events` its epoch, and the offset before which it is read. Those that are not
        in it, or have another epoch, are not read at all."""
        self._log = log
        self._until = until
        self._clock = clock

    def __getattr__(self, name: str) -> Any:
        return getattr(self._log, name)

    async def read_many(
        self,
        requests: Sequence[ReadRequest],
        *,
        max_records: int = READ_RECORDS,
        max_bytes: int = READ_BYTES,
        total_bytes: int | None = None,  # noqa: ARG002 partitions that are read to their bound would use it up
        wait: float = 0.0,
    ) -> Outcomes:
        """As `Log.read_many`, without `total_bytes`. Beyond the bound it waits as at the end of a partition, and
        nothing arrives."""
        found = await self._log.read_many(requests, max_records=max_records, max_bytes=max_bytes)
        outcomes: Outcomes = {}
        for request in requests:
            outcome = found.get(request.partition)
            if isinstance(outcome, Batch):
                outcome = self._bounded(outcome)
            if outcome is not None and has_news(request, outcome):
                outcomes[request.partition] = outcome
        if wait > 0 and not outcomes:
            await self._clock.sleep(wait)
        return outcomes

    def _bounded(self, batch: Batch) -> Batch:
        if batch.partition.topic != EVENTS:
            return batch
        epoch, bound = self._until.get(batch.partition.index, (batch.epoch, 0))
        if epoch != batch.epoch or batch.first >= bound:
            return batch.emptied()
        return batch.before(bound)


def bounded(node: Node, until: Mapping[int, tuple[int, int]]) -> Node:
    """The same node, whose members read `events` only up to the bounds."""
    host = copy.copy(node)
    host.log = cast(Log, BoundedLog(node.log, until, node.clock))
    return host
