"""Topics that continue one another: a topic that was resharded has another name, and the same records and owners."""

from collections.abc import Iterable, Mapping

from shardyard.model import Topic
from shardyard.wire.companions import parse_companion


def moves_of(topics: Iterable[Topic]) -> dict[str, str]:
    """The topics that have moved, each with its successor."""
    return {topic.name: topic.successor for topic in topics if topic.successor is not None}


def lineage(name: str, moves: Mapping[str, str]) -> tuple[str, ...]:
    """The names of a topic: that of the topic where its records go now first, its own, and then those of the topics
    that have moved to it, the nearest first."""
    if not moves:
        return (name,)
    names = [name]
    while (successor := moves.get(names[0])) is not None and successor not in names:
        names.insert(0, successor)
    for known in names:  # which grows meanwhile
        names += sorted(old for old, successor in moves.items() if successor == known and old not in names)
    return tuple(names)


def with_protectors(name: str, moves: Mapping[str, str]) -> tuple[str, ...]:
    """The names of a topic, and if it has retries or dead letters, those of the topic whose records these are. The
    token of the first one that has a token protects it."""
    names = list(lineage(name, moves))
    for known in names:  # which grows meanwhile
        if (companion := parse_companion(known)) is not None:
            names += [each for each in lineage(companion.topic, moves) if each not in names]
    return tuple(names)
