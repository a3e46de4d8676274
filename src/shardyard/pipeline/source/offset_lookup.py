"""What the log says about topics, as the planning of offsets wants it."""

import asyncio
import json
from collections.abc import Iterable, Mapping

from shardyard.log import Log
from shardyard.model import UnknownTopic
from shardyard.pipeline.source import offsets
from shardyard.pipeline.source.offsets import Extent, Offsets, TopicOffsets
from shardyard.pipeline.source.options import Where


async def extents(log: Log, topics: Iterable[str], *, fail: bool = True) -> dict[str, Extent]:
    """What each of the topics holds; one that does not exist raises `UnknownTopic`, or is left out if not to `fail`."""
    found = {}
    for name in topics:
        try:
            topic = await log.topic(name)
        except UnknownTopic:
            if fail:
                raise
            continue
        spans = await asyncio.gather(*(log.span(partition) for partition in topic))
        found[name] = Extent(topic.epoch, tuple(spans))
    return found


async def locate(log: Log, known: Mapping[str, Extent], where: Where) -> Offsets:
    """The offsets of a place that the options name."""
    if where.timestamp is not None:
        return await _at(log, known, where.timestamp)
    if where.explicit:
        return offsets.explicit(known, where.explicit, where.option, where.name)
    return offsets.earliest(known) if where.name == "earliest" else offsets.latest(known)


async def fixed_range(log: Log, topics: Iterable[str]) -> dict[str, str]:
    """Options that read what the topics hold now, however often they are read and whatever is appended meanwhile."""
    known = await extents(log, topics)
    return {
        option: json.dumps({name: dict(enumerate(at.offsets)) for name, at in place.topics.items()})
        for option, place in (
            ("startingOffsets", offsets.earliest(known)),
            ("endingOffsets", offsets.latest(known)),
        )
    }


async def _at(log: Log, known: Mapping[str, Extent], timestamp: int) -> Offsets:
    found = {}
    for name, extent in known.items():
        topic = await log.topic(name)
        at = await asyncio.gather(*(log.offset_at(partition, timestamp) for partition in topic))
        within = zip(at, extent.spans, strict=False)  # what was appended after `known` is not in it
        found[name] = TopicOffsets(extent.epoch, tuple(min(offset, span.end) for offset, span in within))
    return Offsets(found)
