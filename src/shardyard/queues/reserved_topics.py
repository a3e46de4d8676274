"""Shardyard's own topics. Callers of a broker may read them; only Shardyard creates, writes and resizes them."""

from collections.abc import Iterable

from shardyard.model import InvalidCall, InvalidValue
from shardyard.model.limits import INTERNAL_PREFIX
from shardyard.queues.delays import UNDELIVERABLE
from shardyard.wire.channels import EVENTS, FANOUT, MEMBERS, PRESENCE
from shardyard.wire.companions import DEAD, RETRY
from shardyard.wire.inbox import TOPIC as INBOX

SYSTEM_TOPICS = (EVENTS, FANOUT, INBOX, MEMBERS, PRESENCE)
"""Topics that messaging servers, coordinators and workers create themselves, as they need them."""
_RETENTION = frozenset({"retention_ms", "retention_bytes"})


def check_not_reserved(name: str) -> None:
    """Refuse a topic that is Shardyard's own: of groups, of messaging and of channels."""
    if name in SYSTEM_TOPICS:
        names = ", ".join(SYSTEM_TOPICS)
        raise InvalidValue("topic name", name, f"another name: {names} are the topics of messaging and channels")
    if name.startswith(INTERNAL_PREFIX) or name.endswith((RETRY, DEAD)):
        expected = f"a name that neither begins with {INTERNAL_PREFIX!r} nor ends with {RETRY!r} or {DEAD!r}"
        raise InvalidValue("topic name", name, f"{expected}: those are reserved for Shardyard's own topics")


def check_can_be_set(name: str, settings: Iterable[str]) -> None:
    """Refuse settings of Shardyard's own topics, except the retention of those on which no record waits for Shardyard:
    nothing else limits how many dead letters there are."""
    only_retention = _RETENTION.issuperset(settings)
    if not only_retention or not (name in SYSTEM_TOPICS or name == UNDELIVERABLE or name.endswith(DEAD)):
        check_not_reserved(name)


def check_can_be_deleted(name: str) -> None:
    """Refuse to delete a topic that Shardyard works with. Companion topics can be deleted, as a topic or a group that
    is deleted may leave some behind."""
    if name.startswith(INTERNAL_PREFIX) and name != UNDELIVERABLE:
        raise InvalidCall(f"topic {name!r} can't be deleted: Shardyard works with it")
