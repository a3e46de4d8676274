"""The names of companion topics: where a group keeps the retries and the dead letters of a topic."""

from typing import NamedTuple

RETRY, DEAD = ".retry", ".dead"


class Companion(NamedTuple):
    """What the name of a retry or dead-letter topic says."""

    group: str
    topic: str
    suffix: str


def parse_companion(name: str) -> Companion | None:
    """The group and topic whose retry or dead-letter topic has this name; None if it is not such a name. The answer is
    unambiguous, because names of groups have no dots."""
    group, _, rest = name.partition(".")
    for suffix in (RETRY, DEAD):
        if group and (topic := rest.removesuffix(suffix)) and topic != rest:
            return Companion(group, topic, suffix)
    return None
