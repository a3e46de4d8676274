"""What is known of partitions that are read at their ends, without asking the database."""

import threading

from msgspec import structs

from shardyard.log.appending import PartitionState
from shardyard.model import Fence, Partition


class KnownEnds:
    """The partitions that were read to their ends, and how they have grown since. It is all forgotten when anything
    other than an append of this process may have changed the log. Safe to use from several threads."""

    def __init__(self) -> None:
        self._partitions: dict[Partition, PartitionState] = {}
        self._names: dict[int, Partition] = {}
        """By id."""
        self._fences: set[Fence] = set()
        """Fences that are known to hold."""
        self._lock = threading.Lock()
        self.version = 0
        """A reader notes it before it reads, for `add`."""

    def find(self, partition: Partition, fence: Fence | None) -> PartitionState | None:
        """The state of a partition, if it is known and is known to be readable under this fence."""
        with self._lock:
            return self._partitions.get(partition) if fence is None or fence in self._fences else None

    def add(self, partition: Partition, state: PartitionState, fence: Fence | None, version: int) -> None:
        """A partition was read under a fence that holds. Ignored if something has changed since the `version`."""
        with self._lock:
            if version == self.version:
                self._partitions[partition] = state
                self._names[state.id] = partition
                if fence is not None:
                    self._fences.add(fence)

    def grew(self, ends: dict[int, int]) -> None:
        """Records were appended, up to these ends by partition id."""
        with self._lock:
            self.version += 1
            for partition_id, end in ends.items():
                partition = self._names.get(partition_id)
                state = None if partition is None else self._partitions[partition]
                if partition is not None and state is not None and state.id == partition_id and state.end < end:
                    self._partitions[partition] = structs.replace(state, end=end)

    def clear(self) -> None:
        """Something else has changed."""
        with self._lock:
            self.version += 1
            self._partitions.clear()
            self._names.clear()
            self._fences.clear()
