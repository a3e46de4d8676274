"""Planning of reads: pure functions on offsets, without Spark and without a log.

Offsets of a partition ascend but may have gaps, for example where Kafka stores transaction markers. A difference of
offsets is therefore an upper bound of a number of records. It is used here to split work and to limit a trigger, never
to decide whether everything was read.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Self

from shardyard.model import InvalidCall, InvalidValue, Span


@dataclass(frozen=True, slots=True)
class TopicSpans:
    """What a topic holds: the span of each of its partitions, and behind them of those that were dropped.

    A dropped partition is an empty one here, so that offsets never forget it: if it is gone before it was read to its
    end, that is noticed as a trim is, and if it is added again, the stream continues there.
    """

    epoch: int
    partitions: int
    """How many there are. Those from this index on were dropped."""
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class TopicOffsets:
    """An offset in each partition of a topic. The epoch tells the topic from a deleted one of the same name."""

    epoch: int
    offsets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Offsets:
    """Where to read next, in each partition of some topics."""

    topics: Mapping[str, TopicOffsets]

    def to_json(self) -> dict[str, Any]:
        """The form in which Spark keeps the offsets in a checkpoint."""
        return {name: {"epoch": t.epoch, "offsets": list(t.offsets)} for name, t in self.topics.items()}

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> Self:
        try:
            return cls({name: TopicOffsets(int(t["epoch"]), tuple(t["offsets"])) for name, t in stored.items()})
        except (KeyError, TypeError, ValueError, AttributeError):
            raise InvalidValue("offsets in the checkpoint", stored, "those of a shardyard stream") from None


@dataclass(frozen=True, slots=True)
class Range:
    """The records of one partition with offsets from `start` up to, but not including, `end`: the work of one task."""

    topic: str
    partition: int
    epoch: int
    start: int
    end: int

    @property
    def max_records(self) -> int:
        """An upper bound of the number of records: there are fewer if the offsets have gaps."""
        return self.end - self.start


class DataLost(InvalidCall):
    """Raised when records cannot be read any more: they were trimmed, or their topic was deleted or recreated."""

    def __init__(self, what: str) -> None:
        super().__init__(f"{what}; to continue with the records that are left, set failOnDataLoss to false")


def earliest(spans: Mapping[str, TopicSpans]) -> Offsets:
    return _map_spans(spans, lambda _, span: span.first)


def latest(spans: Mapping[str, TopicSpans]) -> Offsets:
    return _map_spans(spans, lambda _, span: span.end)


def explicit(
    spans: Mapping[str, TopicSpans], wanted: Mapping[str, Mapping[int, int | str]], option: str, default: str
) -> Offsets:
    """The offsets that the option names for a partition ("earliest", "latest" or a number); `default` for the rest."""
    for topic, partitions in wanted.items():
        if topic not in spans:
            raise InvalidValue(f"option {option!r}", topic, "topics that are read: " + ", ".join(sorted(spans)))
        for partition in partitions:
            if not 0 <= partition < len(spans[topic].spans):
                last = len(spans[topic].spans) - 1
                raise InvalidValue(f"option {option!r}", partition, f"partitions 0 to {last} of {topic!r}")

    def offset(partition: tuple[str, int], span: Span) -> int:
        topic, index = partition
        value = wanted.get(topic, {}).get(index, default)
        if value in ("earliest", "latest"):
            return span.first if value == "earliest" else span.end
        if not span.first <= int(value) <= span.end:
            expected = f"an offset from {span.first} to {span.end}, which is what {topic}/{index} holds"
            raise InvalidValue(f"option {option!r}", value, expected)
        return int(value)

    return _map_spans(spans, offset)


def _map_spans(spans: Mapping[str, TopicSpans], offset: Any) -> Offsets:
    return Offsets(
        {
            topic: TopicOffsets(has.epoch, tuple(offset((topic, i), span) for i, span in enumerate(has.spans)))
            for topic, has in spans.items()
        }
    )


def reconcile(start: Offsets, spans: Mapping[str, TopicSpans], *, fail: bool) -> Offsets:
    """`start`, adjusted to what the topics still hold.

    New topics and partitions are read from their first record. If records are gone, this raises `DataLost`, or moves on
    to the next records that exist if `fail` is False. Whether records are gone of a partition that was dropped and that
    `start` does not name is not known: it was dropped before the stream first saw it.
    """
    topics = {}
    for name, has in spans.items():
        known = start.topics.get(name)
        if known is not None and known.epoch != has.epoch:
            _lost(fail, f"topic {name!r} was deleted and recreated (epoch {known.epoch}, now {has.epoch})")
            known = None
        offsets = []
        for i, span in enumerate(has.spans):
            is_named = known is not None and i < len(known.offsets)
            at = known.offsets[i] if known is not None and is_named else 0
            if at < span.first and known is not None and (is_named or i < has.partitions):
                gone = "trimmed" if i < has.partitions else "dropped with it, when the topic was contracted"
                _lost(fail, f"offsets {at} to {span.first - 1} of {name}/{i} were {gone}")
            if at > span.end:
                _lost(fail, f"{name}/{i} ends at {span.end}, before offset {at} up to which it was already read")
                at = span.end
            offsets.append(max(at, span.first))
        topics[name] = TopicOffsets(has.epoch, tuple(offsets))
    for name in start.topics.keys() - spans.keys():
        _lost(fail, f"topic {name!r} is no longer read or no longer exists")
    return Offsets(topics)


def _lost(fail: bool, what: str) -> None:
    if fail:
        raise DataLost(what)


def advance(start: Offsets, end: Offsets, max_records: int | None) -> Offsets:
    """How far one trigger reads from `start` towards `end`: at most `max_records`, shared in proportion to the backlog.

    Both offsets name the same topics and partitions. Every partition with a backlog makes progress, unless there are
    more of them than `max_records`. The limit counts offsets, so a trigger reads fewer records where offsets have gaps.
    """
    backlog = {
        (name, i): to - at
        for name, topic in end.topics.items()
        for i, (at, to) in enumerate(zip(start.topics[name].offsets, topic.offsets, strict=True))
        if to > at
    }
    total = sum(backlog.values())
    if max_records is None or total <= max_records:
        return end
    take = {partition: count * max_records // total for partition, count in backlog.items()}
    spare = max_records - sum(take.values())
    for partition in sorted(backlog, key=lambda p: (take[p] > 0, -backlog[p], p))[:spare]:
        take[partition] += 1
    return Offsets(
        {
            name: TopicOffsets(topic.epoch, tuple(at + take.get((name, i), 0) for i, at in enumerate(topic.offsets)))
            for name, topic in start.topics.items()
        }
    )


def cap(end: Offsets, limit: Offsets) -> Offsets:
    """`end`, but nowhere beyond `limit`. Nothing is read of partitions that `limit` does not name."""
    topics = {}
    for name, topic in end.topics.items():
        known = limit.topics.get(name)
        limits = known.offsets if known is not None and known.epoch == topic.epoch else ()
        offsets = tuple(min(at, limits[i] if i < len(limits) else 0) for i, at in enumerate(topic.offsets))
        topics[name] = TopicOffsets(topic.epoch, offsets)
    return Offsets(topics)


def still_available(end: Offsets, spans: Mapping[str, TopicSpans]) -> Offsets:
    """The part of a planned end that still exists: nothing of topics that were deleted or recreated since."""
    existing = {name: t for name, t in end.topics.items() if name in spans and spans[name].epoch == t.epoch}
    return Offsets(
        {
            name: TopicOffsets(
                t.epoch, tuple(min(at, span.end) for at, span in zip(t.offsets, spans[name].spans, strict=False))
            )
            for name, t in existing.items()
        }
    )


def not_before(end: Offsets, start: Offsets) -> Offsets:
    """`end`, but nowhere before `start`, which names the same topics and partitions."""
    return Offsets(
        {
            name: TopicOffsets(t.epoch, tuple(map(max, t.offsets, start.topics[name].offsets)))
            for name, t in end.topics.items()
        }
    )


def ranges(start: Offsets, end: Offsets) -> list[Range]:
    """What lies between the two, by topic and partition. A partition that `start` does not name starts at offset 0."""
    found = []
    for name, topic in sorted(end.topics.items()):
        known = start.topics.get(name)
        same = known is not None and known.epoch == topic.epoch
        starts: Sequence[int] = known.offsets if known is not None and same else ()
        for i, to in enumerate(topic.offsets):
            at = starts[i] if i < len(starts) else 0
            if to > at:
                found.append(Range(name, i, topic.epoch, at, to))
    return found


def split(whole: Iterable[Range], max_records: int) -> list[Range]:
    """The same ranges in the same order, cut to at most `max_records` each: several tasks read a large partition."""
    parts = []
    for r in whole:
        pieces = -(-r.max_records // max_records)
        edges = [r.start + r.max_records * i // pieces for i in range(pieces + 1)]
        parts += [Range(r.topic, r.partition, r.epoch, a, b) for a, b in pairwise(edges)]
    return parts
