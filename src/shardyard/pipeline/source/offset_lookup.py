"""Offsets that only the log knows: what topics hold, and where a read starts and ends."""

import asyncio
import json
from collections.abc import Iterable, Mapping

from shardyard.log import Log
from shardyard.model import UnknownTopic
from shardyard.pipeline.source import offsets
from shardyard.pipeline.source.offsets import Offsets, TopicOffsets, TopicSpans
from shardyard.pipeline.source.options import ReadBound


async def topic_spans(
    log: Log, topics: Iterable[str], *, fail: bool = True, dropped: bool = False
) -> dict[str, TopicSpans]:
    """What each topic holds; with partitions that were dropped, if `dropped`. A topic that does not exist raises
    `UnknownTopic`, or is left out if `fail` is False."""
    found = {}
    for name in topics:
        try:
            topic, spans = await log.topic(name), await log.ends(name, dropped=dropped)
        except UnknownTopic:
            if fail:
                raise
            continue
        found[name] = TopicSpans(spans[0].epoch, topic.partitions, tuple(spans[index] for index in sorted(spans)))
    return found


async def resolve(log: Log, spans: Mapping[str, TopicSpans], bound: ReadBound) -> Offsets:
    """The offsets at which a read starts or ends, for what the options say."""
    if bound.timestamp is not None:
        return await _at_timestamp(log, spans, bound.timestamp)
    if bound.explicit:
        return offsets.explicit(spans, bound.explicit, bound.option, bound.name)
    return offsets.earliest(spans) if bound.name == "earliest" else offsets.latest(spans)


async def fixed_range(log: Log, topics: Iterable[str]) -> dict[str, str]:
    """Read options for exactly the records that the topics hold now, even if more are appended before the read."""
    spans = await topic_spans(log, topics)
    return {
        option: json.dumps({name: dict(enumerate(at.offsets)) for name, at in bound.topics.items()})
        for option, bound in (("startingOffsets", offsets.earliest(spans)), ("endingOffsets", offsets.latest(spans)))
    }


async def _at_timestamp(log: Log, spans: Mapping[str, TopicSpans], timestamp: int) -> Offsets:
    found = {}
    for name, has in spans.items():
        topic = await log.topic(name)
        at = await asyncio.gather(*(log.offset_at(partition, timestamp) for partition in topic))
        known = zip(at, has.spans, strict=False)  # without partitions and records that were added after `spans`
        found[name] = TopicOffsets(has.epoch, tuple(min(offset, span.end) for offset, span in known))
    return Offsets(found)
