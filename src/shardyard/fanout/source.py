"""A partition that a `ForwardingMember` owns, and the batch of it that is being forwarded."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

from shardyard.fanout.forwarding import Forwarded
from shardyard.groups.fence import ownership_fence
from shardyard.groups.protocol import Grant
from shardyard.log.requests import ReadRequest
from shardyard.model import Fence, Partition, Position
from shardyard.model.batch import Batch


@dataclass(slots=True, eq=False)
class Source:
    """A partition from the moment it was assigned to the member until it is released or lost."""

    partition: Partition
    epoch: int
    """Of the ownership."""
    fence: Fence
    position: Position | None
    """Where to read next; None if nothing was ever committed, until it is open."""
    end: int = 0
    """Where the partition ended when its fence was set: nobody else has forwarded what came after that."""
    is_open: bool = False
    """It is known what earlier owners have forwarded: it can be read."""
    forwarded: "Forwarded | None" = None
    """What earlier owners have forwarded from `position` on; None if nothing."""
    in_flight: "InFlight | None" = None
    """What was read of it and is not done. Nothing more is read meanwhile."""
    stopping: bool = False
    """It is revoked or lost: no further step is taken with it."""
    lost: bool = False
    extra: Any = None
    """What a subclass of the member knows of it."""
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    """No step with it is being taken."""
    _next_read: ReadRequest | None = None

    @classmethod
    def assigned(cls, group: str, partition: Partition, grant: Grant) -> "Source":
        source = cls(partition, grant.epoch, ownership_fence(group, partition, grant.epoch), grant.committed)
        source.idle.set()
        return source

    @property
    def is_readable(self) -> bool:
        return self.is_open and self.in_flight is None and not self.stopping

    def next_read(self) -> ReadRequest:
        """What is read next of a source that is open."""
        position, request = self.position or Position(0, 0), self._next_read
        if request is None or (request.offset, request.epoch) != (position.offset, position.epoch):
            request = ReadRequest(self.partition, position.offset, position.epoch, self.fence)
            self._next_read = request
        return request

    def take(self, batch: Batch) -> "InFlight":
        """Take a batch that was read from `position` on."""
        if self.forwarded is not None and batch.first >= self.forwarded.next_offsets.max():
            self.forwarded = None  # earlier owners did not get that far
        self.position = Position(batch.epoch, batch.end)
        self.in_flight = InFlight(self, batch, self.forwarded)
        return self.in_flight


@dataclass(slots=True, eq=False)
class InFlight:
    """A batch of a partition that is to be forwarded."""

    source: Source
    batch: Batch
    forwarded: Forwarded | None = None
    """What earlier owners have forwarded of it; None if nothing."""
    start: int = 0
    """The first row that is not done."""
    stop: int = 0
    """The rows of the step that is being taken end here."""
    extra: Any = None
    """What a subclass of the member knows of it."""

    @property
    def partition(self) -> Partition:
        return self.source.partition
