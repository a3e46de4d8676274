"""The rules that every engine applies: what is refused, and what a change makes of a topic."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from shardyard.log.port import Capabilities
from shardyard.log.requests import ReadRequest
from shardyard.model import (
    Fence,
    Fenced,
    InvalidValue,
    Moved,
    OffsetBeyondEnd,
    OffsetTrimmed,
    Outdated,
    Partition,
    PartitionDraining,
    Retention,
    Sealed,
    SealLost,
    Span,
    Stamp,
    Topic,
    Unsupported,
    WrongEpoch,
)
from shardyard.model.checks import check_int64, check_text, whole_number
from shardyard.runtime.clock import Clock

_LONGEST_SEAL_SECONDS = 24 * 3600.0
_ROUNDING_MS = 0.001
"""More than a float of seconds is off by: without it, the time could be a millisecond behind that of `now_ms`."""


def milliseconds(clock: Clock) -> int:
    """The time of a clock in milliseconds since 1970."""
    return int(clock.now() * 1000 + _ROUNDING_MS)


# Arguments


def check_partition(partition: object) -> None:
    """Refuse what is not a partition."""
    if not isinstance(partition, Partition) or (type(partition.topic), type(partition.index)) != (str, int):
        raise InvalidValue("partition", partition, "a Partition: a string as topic and an int as index")


def check_append_options(stamp: object, fence: object, generation: object) -> None:
    """Refuse options of an append that have a wrong type."""
    if not isinstance(stamp, Stamp | None):
        raise InvalidValue("stamp", stamp, "a Stamp or None")
    if not isinstance(fence, Fence | None) and not (isinstance(fence, Sequence) and set(map(type, fence)) <= {Fence}):
        raise InvalidValue("fence", fence, "a Fence or None, or a list of fences")
    if not isinstance(generation, int | None):
        raise InvalidValue("generation", generation, "that of a Topic, or None")


def check_reads(
    requests: Sequence[ReadRequest], max_records: object, max_bytes: object, total_bytes: object = None
) -> None:
    """The arguments of `read_many`, whatever the partitions hold."""
    whole_number("max_records", max_records, at_least=1)
    whole_number("max_bytes", max_bytes, at_least=1)
    if total_bytes is not None:
        whole_number("total_bytes", total_bytes, at_least=1)
    for request in requests:
        if type(request.partition.index) is not int:  # a bool or a float would be found under the number it equals
            check_partition(request.partition)
        if not isinstance(request.offset, int) or request.offset < 0:
            whole_number("offset", request.offset, at_least=0)


def all_fences(fence: Fence | Sequence[Fence] | None) -> Sequence[Fence]:
    """The fences that an append carries."""
    if fence is None:
        return ()
    return (fence,) if isinstance(fence, Fence) else fence


def check_retention(retention: object) -> Retention:
    """`retention`, if it can be stored."""
    if not isinstance(retention, Retention):
        raise InvalidValue("retention", retention, "a Retention")
    for name in ("age_ms", "bytes_per_partition"):
        if getattr(retention, name) is not None:
            check_int64(name, getattr(retention, name))
    return retention


def check_placement(partitioner: object, partitions: int, hash_: object) -> tuple[str, str | None]:
    """The names of a partitioner and of its hash, if they exist and fit each other."""
    if not isinstance(partitioner, str):
        raise InvalidValue("partitioner", partitioner, "a string")
    if not isinstance(hash_, str | None):
        raise InvalidValue("hash", hash_, "a string or None")
    from shardyard.placement import DEFAULT_HASH, partitioner_named  # noqa: PLC0415 its compiler takes half a second

    partitioner_named(partitioner, partitions, hash_)
    default = DEFAULT_HASH[partitioner]
    return partitioner, default and (hash_ or default)


def check_seal(holder: object, seconds: object) -> int:
    """The duration of a seal in milliseconds, if holder and duration are valid."""
    check_text("holder", holder)
    if not isinstance(seconds, int | float) or not 0 < seconds <= _LONGEST_SEAL_SECONDS:
        raise InvalidValue("seconds", seconds, f"more than 0 and at most {_LONGEST_SEAL_SECONDS:g}")
    return math.ceil(seconds * 1000)


def check_contraction(capabilities: Capabilities) -> None:
    """Refuse to contract a topic where the engine can't."""
    if not capabilities.contraction:
        raise Unsupported("fewer partitions for a topic", "reshard it to fewer partitions instead")


# Records


def check_offset(partition: Partition, has: Span, offset: int, epoch: int | None = None) -> None:
    """Refuse to read from an offset that a partition with the span `has` can't be read from."""
    if epoch is not None and epoch != has.epoch:
        raise WrongEpoch(partition, epoch, has.epoch)
    if offset < has.first:
        raise OffsetTrimmed(partition, offset, has.first)
    if offset > has.end:
        raise OffsetBeyondEnd(partition, offset, has.end)


def check_fence(fence: Fence, known: int | None) -> bool:
    """Whether this epoch is higher than the known one; `Fenced` if it is lower."""
    if known is not None and known > fence.epoch:
        raise Fenced(f"epoch {fence.epoch} of {fence.name} is over: the current one is {known}")
    return known is None or known < fence.epoch


def check_same_batch(stamp: Stamp, stored: int, count: int) -> None:
    """Refuse a stamp that was used for another batch."""
    if stored != count:
        raise InvalidValue("stamp", stamp, f"one that was not used for another batch: it has {stored} records stored")


def check_open(topic: str, sealed: bool, successor: str | None) -> None:
    """Refuse to add to a topic that is sealed or has moved."""
    if successor is not None:
        raise Moved(topic, successor)
    if sealed:
        raise Sealed(topic)


def check_receives(
    partition: Partition, sealed: bool, successor: str | None, receiving: int, current: int, generation: int | None
) -> None:
    """Refuse an append to a topic that is sealed or has moved, to a partition that is draining, or under another
    generation than the `current` one."""
    check_open(partition.topic, sealed, successor)
    if partition.index >= receiving:
        raise PartitionDraining(partition, receiving)
    if generation is not None and generation != current:
        raise Outdated(partition.topic, generation, current)


# Topics


def expanded(topic: Topic, partitions: int) -> Topic:
    """The topic with that many open partitions, if it can be expanded to them."""
    check_open(topic.name, topic.sealed, topic.successor)
    if partitions < topic.receiving:
        raise InvalidValue("partitions", partitions, f"at least the {topic.receiving} that {topic.name!r} has open")
    return _with_open(topic, partitions)


def contracted(topic: Topic, partitions: int) -> Topic:
    """The topic with that many open partitions, if it can be contracted to them."""
    check_open(topic.name, topic.sealed, topic.successor)
    if partitions > topic.receiving:
        raise InvalidValue("partitions", partitions, f"at most the {topic.receiving} that {topic.name!r} has open")
    return _with_open(topic, partitions)


def _with_open(topic: Topic, count: int) -> Topic:
    partitions = max(count, topic.partitions)
    return replace(topic, partitions=partitions, open_partitions=count if count < partitions else None)


def without_draining(topic: Topic, partitions: int) -> Topic:
    """The topic after its draining partitions were dropped, if `partitions` are those that are open."""
    if partitions != topic.receiving:
        raise InvalidValue("partitions", partitions, f"the {topic.receiving} that {topic.name!r} has open")
    if topic.open_partitions is not None:
        check_open(topic.name, topic.sealed, topic.successor)
    return replace(topic, partitions=topic.receiving, open_partitions=None)


def raises_generation(before: Topic, after: Topic) -> bool:
    """Whether anything changed that a generation stands for: all but the retention."""
    return replace(after, retention=before.retention) != before


# Seals


def is_in_force(since: int, until: int, now: int) -> bool:
    """Whether a seal is in force. A clock that went back ends it: otherwise it would last longer than its holder asked
    for."""
    return since <= now < until


@dataclass(frozen=True, slots=True)
class Seal:
    """A seal of a topic. It ends by itself, so that a holder that died does not stop producers for long."""

    holder: str
    since: int
    """When it was set or last renewed, in milliseconds of the engine's clock."""
    until: int

    def in_force(self, now: int) -> bool:
        return is_in_force(self.since, self.until, now)


def check_sealable(topic: Topic, seal: Seal | None, holder: str, now: int) -> bool:
    """Whether sealing the topic only renews the seal that `holder` has; `Sealed` while another holder has it."""
    check_open(topic.name, sealed=False, successor=topic.successor)
    if seal is None or not seal.in_force(now):
        return False
    if seal.holder != holder:
        raise Sealed(topic.name)
    return True


def check_move(topic: Topic, successor: Topic, seal: Seal | None, holder: str, generation: int, now: int) -> None:
    """Refuse to move a topic that has not moved yet, unless `holder` has had it sealed since `generation`."""
    if topic.name == successor.name:
        raise InvalidValue("successor", successor.name, "another topic")
    if successor.successor is not None:
        expected = f"a topic that does not continue as another one, {successor.successor!r}"
        raise InvalidValue("successor", successor.name, expected)
    if seal is None or seal.holder != holder or not seal.in_force(now) or topic.generation != generation:
        raise SealLost(topic.name, holder)
