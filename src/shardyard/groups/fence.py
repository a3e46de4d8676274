"""The fence that goes with the ownership of a partition: the log refuses an owner whose epoch is over."""

from shardyard.model import Fence, Partition


def ownership_fence(group: str, partition: Partition, epoch: int) -> Fence:
    """The fence of an owner: everything that it does as the owner carries it."""
    return Fence(f"{group}/{partition}", epoch)


def fenced_partition(fence: Fence) -> tuple[str, Partition]:
    """The group and the partition that a fence of `ownership_fence` is about."""
    group, topic, index = fence.name.rsplit("/", 2)
    return group, Partition(topic, int(index))
