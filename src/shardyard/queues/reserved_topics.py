"""Shardyard's own topics. Callers of a broker may read them; only Shardyard creates, writes and resizes them."""

from collections.abc import Iterable, Sequence

from shardyard.model import InvalidCall, InvalidValue
from shardyard.model.limits import INTERNAL_PREFIX
from shardyard.queues.delays import UNDELIVERABLE
from shardyard.wire.channels import EVENTS, FANOUT, MEMBERS, PRESENCE
from shardyard.wire.companions import DEAD, RETRY
from shardyard.wire.inbox import TOPIC as INBOX

SYSTEM_TOPICS = (EVENTS, FANOUT, INBOX, MEMBERS, PRESENCE)
"""Topics that messaging servers, coordinators and workers create themselves, as they need them."""
_RETENTION = frozenset({"retention_ms", "retention_bytes"})


def check_not_reserved(name: str, names: Sequence[str] = ()) -> None:
    """Refuse a topic that is Shardyard's own: of groups, of messaging and of channels. `names`: all those of an
    existing topic, as by `lineage`; one that was resharded stays Shardyard's own."""
    for each in names or (name,):
        continues = "" if each == name else f"; this topic and {each!r} continue each other"
        if each in SYSTEM_TOPICS:
            system = ", ".join(SYSTEM_TOPICS)
            expected = f"another name: {system} are the topics of messaging and channels"
            raise InvalidValue("topic name", name, f"{expected}{continues}")
        if each.startswith(INTERNAL_PREFIX) or each.endswith((RETRY, DEAD)):
            expected = f"a name that neither begins with {INTERNAL_PREFIX!r} nor ends with {RETRY!r} or {DEAD!r}"
            raise InvalidValue(
                "topic name", name, f"{expected}: those are reserved for Shardyard's own topics{continues}"
            )


def check_can_be_set(name: str, names: Sequence[str], settings: Iterable[str]) -> None:
    """Refuse settings of Shardyard's own topics, except the retention of those on which no record waits for Shardyard:
    nothing else limits how many dead letters there are."""
    if not _RETENTION.issuperset(settings):
        check_not_reserved(name, names)
    elif waiting := [each for each in names if not _holds_no_work(each)]:
        check_not_reserved(name, waiting)


def check_can_be_deleted(name: str, names: Sequence[str]) -> None:
    """Refuse to delete a topic that Shardyard works with. Companion topics can be deleted, as a topic or a group that
    is deleted may leave some behind."""
    for each in names:
        if each in SYSTEM_TOPICS or (each.startswith(INTERNAL_PREFIX) and each != UNDELIVERABLE):
            raise InvalidCall(f"topic {name!r} can't be deleted: Shardyard works with it")


def _holds_no_work(name: str) -> bool:
    return name in SYSTEM_TOPICS or name == UNDELIVERABLE or name.endswith(DEAD)
