"""What is asked of several partitions in one call of a log."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

from msgspec import Struct

from shardyard.model import Fence, Partition, ShardyardError, Stamp
from shardyard.model.limits import Records

if TYPE_CHECKING:
    from shardyard.model.batch import Batch


class ReadRequest(Struct, frozen=True):
    """The arguments of `Log.read` for one partition."""

    partition: Partition
    offset: int
    epoch: int | None = None
    fence: Fence | None = None


class AppendRequest(Struct, frozen=True):
    """The arguments of `Log.append` for one partition."""

    partition: Partition
    records: Records
    stamp: Stamp | None = None
    fence: Fence | Sequence[Fence] | None = None
    generation: int | None = None


Outcomes: TypeAlias = "dict[Partition, Batch | ShardyardError]"
"""What was read of the partitions that have news."""


class News:
    """Collects what `read_many` returns, until it is enough."""

    def __init__(self, total_bytes: int | None) -> None:
        self.outcomes: Outcomes = {}
        self._left = total_bytes

    @property
    def is_enough(self) -> bool:
        """Whether as many bytes were read as the caller wants at most."""
        return self._left is not None and self._left <= 0

    def add(self, request: ReadRequest, outcome: "Batch | ShardyardError") -> None:
        """Note an outcome if it is news."""
        if has_news(request, outcome):
            self.outcomes[request.partition] = outcome
            if self._left is not None and not isinstance(outcome, ShardyardError):
                self._left -= outcome.size


def has_news(request: ReadRequest, outcome: "Batch | ShardyardError") -> bool:
    """Whether a read has brought its caller on: it has records, passes over a gap, or was refused."""
    return isinstance(outcome, ShardyardError) or len(outcome) > 0 or outcome.end > request.offset
