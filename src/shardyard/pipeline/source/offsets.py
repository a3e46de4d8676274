"""Which records to read: plain functions on offsets, without Spark and without a log."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Self

from shardyard.model import InvalidCall, InvalidValue, Span


@dataclass(frozen=True, slots=True)
class Extent:
    """What a topic holds: the span of each partition."""

    epoch: int
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class TopicOffsets:
    """An offset for each partition of a topic, in this life of it."""

    epoch: int
    offsets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Offsets:
    """A place in some topics: all records below it are read."""

    topics: Mapping[str, TopicOffsets]

    def to_json(self) -> dict[str, Any]:
        """As Spark keeps it in a checkpoint."""
        return {name: {"epoch": t.epoch, "offsets": list(t.offsets)} for name, t in self.topics.items()}

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> Self:
        try:
            return cls({name: TopicOffsets(int(t["epoch"]), tuple(t["offsets"])) for name, t in stored.items()})
        except (KeyError, TypeError, ValueError, AttributeError):
            raise InvalidValue("offsets in the checkpoint", stored, "those of a shardyard stream") from None


@dataclass(frozen=True, slots=True)
class Range:
    """Records of one partition, from `start` up to, but without, `end`: the work of one task."""

    topic: str
    partition: int
    epoch: int
    start: int
    end: int

    def __len__(self) -> int:
        return self.end - self.start


class DataLost(InvalidCall):
    """Raised when records that were to be read are gone: trimmed away, or their topic was deleted or made anew."""

    def __init__(self, what: str) -> None:
        super().__init__(f"{what}; to go on with what is there, set failOnDataLoss to false")


def earliest(extents: Mapping[str, Extent]) -> Offsets:
    return _each(extents, lambda _, span: span.first)


def latest(extents: Mapping[str, Extent]) -> Offsets:
    return _each(extents, lambda _, span: span.end)


def explicit(
    extents: Mapping[str, Extent], wanted: Mapping[str, Mapping[int, int | str]], option: str, otherwise: str
) -> Offsets:
    """What the option says for a partition ("earliest", "latest" or an offset); `otherwise` for the rest."""
    for topic, partitions in wanted.items():
        if topic not in extents:
            raise InvalidValue(f"option {option!r}", topic, "topics that are read: " + ", ".join(sorted(extents)))
        for partition in partitions:
            if not 0 <= partition < len(extents[topic].spans):
                last = len(extents[topic].spans) - 1
                raise InvalidValue(f"option {option!r}", partition, f"partitions 0 to {last} of {topic!r}")

    def offset(place: tuple[str, int], span: Span) -> int:
        topic, partition = place
        value = wanted.get(topic, {}).get(partition, otherwise)
        if value in ("earliest", "latest"):
            return span.first if value == "earliest" else span.end
        if not span.first <= int(value) <= span.end:
            there = f"an offset from {span.first} to {span.end}, which is what {topic}/{partition} holds"
            raise InvalidValue(f"option {option!r}", value, there)
        return int(value)

    return _each(extents, offset)


def _each(extents: Mapping[str, Extent], offset: Any) -> Offsets:
    return Offsets(
        {
            topic: TopicOffsets(extent.epoch, tuple(offset((topic, i), span) for i, span in enumerate(extent.spans)))
            for topic, extent in extents.items()
        }
    )


def reconcile(start: Offsets, extents: Mapping[str, Extent], *, fail: bool) -> Offsets:
    """`start` as far as the topics still have it.

    New topics and partitions begin with their first record. What is gone raises `DataLost` if it is to `fail`; else
    reading goes on with what is there.
    """
    topics = {}
    for name, extent in extents.items():
        known = start.topics.get(name)
        if known is not None and known.epoch != extent.epoch:
            _lost(fail, f"topic {name!r} was deleted and made anew (epoch {known.epoch}, now {extent.epoch})")
            known = None
        offsets = []
        for i, span in enumerate(extent.spans):
            at = known.offsets[i] if known is not None and i < len(known.offsets) else 0
            if at < span.first:
                _lost(fail and known is not None, f"offsets {at} to {span.first - 1} of {name}/{i} were trimmed away")
            if at > span.end:
                _lost(fail, f"{name}/{i} ends at {span.end}, before offset {at} which was read already")
                at = span.end
            offsets.append(max(at, span.first))
        topics[name] = TopicOffsets(extent.epoch, tuple(offsets))
    for name in start.topics.keys() - extents.keys():
        _lost(fail, f"topic {name!r} is no longer read or does not exist any more")
    return Offsets(topics)


def _lost(fail: bool, what: str) -> None:
    if fail:
        raise DataLost(what)


def advance(start: Offsets, end: Offsets, most: int | None) -> Offsets:
    """How far to go from `start` towards `end` with at most `most` records: every partition by its share.

    Both are about the same topics and partitions. Whoever has anything left gets ahead, unless there are more such
    partitions than records to read.
    """
    left = {
        (name, i): to - at
        for name, topic in end.topics.items()
        for i, (at, to) in enumerate(zip(start.topics[name].offsets, topic.offsets, strict=True))
        if to > at
    }
    total = sum(left.values())
    if most is None or total <= most:
        return end
    take = {place: count * most // total for place, count in left.items()}
    spare = most - sum(take.values())
    for place in sorted(left, key=lambda place: (take[place] > 0, -left[place], place))[:spare]:
        take[place] += 1
    return Offsets(
        {
            name: TopicOffsets(topic.epoch, tuple(at + take.get((name, i), 0) for i, at in enumerate(topic.offsets)))
            for name, topic in start.topics.items()
        }
    )


def capped(end: Offsets, limit: Offsets) -> Offsets:
    """`end`, but nowhere beyond `limit`; partitions that `limit` does not know are left out of it."""
    topics = {}
    for name, topic in end.topics.items():
        known = limit.topics.get(name)
        bounds = known.offsets if known is not None and known.epoch == topic.epoch else ()
        offsets = tuple(min(at, bounds[i] if i < len(bounds) else 0) for i, at in enumerate(topic.offsets))
        topics[name] = TopicOffsets(topic.epoch, offsets)
    return Offsets(topics)


def as_far_as(end: Offsets, extents: Mapping[str, Extent]) -> Offsets:
    """What is still there of what was planned: nothing of topics that are gone or were made anew."""
    there = {name: t for name, t in end.topics.items() if name in extents and extents[name].epoch == t.epoch}
    return Offsets(
        {
            name: TopicOffsets(
                t.epoch, tuple(min(at, s.end) for at, s in zip(t.offsets, extents[name].spans, strict=False))
            )
            for name, t in there.items()
        }
    )


def at_least(end: Offsets, start: Offsets) -> Offsets:
    """`end`, but nowhere before `start`, which is about the same topics and partitions."""
    return Offsets(
        {
            name: TopicOffsets(t.epoch, tuple(map(max, t.offsets, start.topics[name].offsets)))
            for name, t in end.topics.items()
        }
    )


def ranges(start: Offsets, end: Offsets) -> list[Range]:
    """What lies between, by topic and partition. A partition that `start` does not know is read from offset 0."""
    found = []
    for name, topic in sorted(end.topics.items()):
        known = start.topics.get(name)
        same = known is not None and known.epoch == topic.epoch
        begins: Sequence[int] = known.offsets if known is not None and same else ()
        for i, to in enumerate(topic.offsets):
            at = begins[i] if i < len(begins) else 0
            if to > at:
                found.append(Range(name, i, topic.epoch, at, to))
    return found


def split(whole: Iterable[Range], most: int) -> list[Range]:
    """Ranges of at most `most` records, in the same order: large partitions are read by several tasks."""
    parts = []
    for r in whole:
        pieces = -(-len(r) // most)
        edges = [r.start + len(r) * i // pieces for i in range(pieces + 1)]
        parts += [Range(r.topic, r.partition, r.epoch, a, b) for a, b in pairwise(edges)]
    return parts
