"""Errors, grouped by what the caller should do about them.

    ShardyardError
        InvalidCall     the call is wrong: fix it, the same call will fail again
        Conflict        the call is fine, but the state does not allow it: change the state, or look again and decide
        Denied          the caller may not do this: show another token, or ask for the right
        RetryLater      the call is fine: the same call may succeed later
        Fenced          the caller lost its ownership: stop, and join again
        Damaged         stored data is not what was written: stop, and inspect it

Each error carries its numbers as fields, and its message says what was expected. HTTP statuses and exit codes follow
from the branch (`shardyard.wire.errors`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardyard.model.words import Partition


class ShardyardError(Exception):
    """The root: everything Shardyard raises on purpose is one of these."""

    def __reduce__(self) -> tuple[Any, ...]:  # an error crosses processes whole, whatever its constructor takes
        return _rebuild, (type(self), self.args, self.__dict__)


def _rebuild(kind: type[ShardyardError], args: tuple[Any, ...], fields: dict[str, Any]) -> ShardyardError:
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(fields)
    return error


class InvalidCall(ShardyardError):
    """Raised when a call can never succeed as it is. Nothing was changed."""


class Conflict(ShardyardError):
    """Raised when the call was fine and the state was not: something exists already, is in use, or has changed since
    the caller looked. Nothing was changed."""


class Denied(ShardyardError):
    """Raised when the caller has not shown that it may do this. Nothing was changed."""


class RetryLater(ShardyardError):
    """Raised when a call failed for a reason that may pass. Nothing was changed unless the error says so."""


class Fenced(ShardyardError):
    """Raised when the caller acts on an ownership it no longer has. Nothing was changed."""


class Damaged(ShardyardError):
    """Raised when stored data fails its check. It is never served."""

    def __init__(self, where: str, what: str) -> None:
        super().__init__(f"{where} is damaged: {what}; restore it from a copy, or delete it to start afresh")
        self.where = where
        self.what = what


# Fix your call -----------------------------------------------------------------------------------------------


class InvalidValue(InvalidCall, ValueError):
    """Raised when an argument is not what its place calls for."""

    def __init__(self, name: str, value: object, expected: str) -> None:
        super().__init__(f"{name} is {_in_words(value)}: expected {expected}")
        self.name = name
        self.value = value
        self.expected = expected


def _in_words(value: object) -> str:
    if value is None:
        return "missing"
    return repr(str(value) if hasattr(value, "__fspath__") else value)


class MissingExtra(InvalidCall):
    """Raised when a call needs packages that are not installed."""

    def __init__(self, what: str, extra: str) -> None:
        super().__init__(f"{what} needs the {extra} packages: pip install 'shardyard[{extra}]'")
        self.what = what
        self.extra = extra


class UnknownTopic(InvalidCall):
    """Raised when a topic does not exist."""

    def __init__(self, topic: str) -> None:
        super().__init__(f"topic {topic!r} does not exist")
        self.topic = topic


class TopicExists(Conflict):
    """Raised when a topic of that name exists already. `advice` says what helps."""

    def __init__(self, topic: str, partitions: int, where: str = "", advice: str = "") -> None:
        """`where`: in which of several logs, such as "in the target"."""
        place, what_helps = f" {where}" if where else "", f": {advice}" if advice else ""
        super().__init__(f"topic {topic!r} exists already{place}, with {partitions} partitions{what_helps}")
        self.topic = topic
        self.partitions = partitions


class PartitionOutOfRange(InvalidCall):
    """Raised when a topic has no such partition."""

    def __init__(self, partition: Partition, partitions: int) -> None:
        super().__init__(f"{partition} does not exist: {partition.topic!r} has partitions 0 to {partitions - 1}")
        self.partition = partition
        self.partitions = partitions


class Moved(Conflict):
    """Raised when a topic takes no more records because another topic continues it."""

    def __init__(self, topic: str, successor: str) -> None:
        super().__init__(f"topic {topic!r} continues as {successor!r}: append there")
        self.topic = topic
        self.successor = successor


class PartitionDraining(Conflict):
    """Raised when a partition takes no more records because its topic is being contracted."""

    def __init__(self, partition: Partition, receiving: int) -> None:
        super().__init__(
            f"{partition} is draining because its topic is being contracted: append to partitions 0 to {receiving - 1}"
        )
        self.partition = partition
        self.receiving = receiving


class Outdated(Conflict):
    """Raised when records were placed under another generation of their topic: it was changed or recreated since."""

    def __init__(self, topic: str, generation: int, current: int) -> None:
        super().__init__(
            f"topic {topic!r} has changed: the records were placed under generation {generation}, the current one is "
            f"{current}: look the topic up and place them again"
        )
        self.topic = topic
        self.generation = generation
        self.current = current


class SealLost(Conflict):
    """Raised when a topic is to be moved by a holder whose seal is no longer in force: records may have been appended
    since."""

    def __init__(self, topic: str, holder: str) -> None:
        super().__init__(
            f"topic {topic!r} is not sealed by {holder!r} any more, and may have taken records since: seal it again, "
            "copy what is new, then move it"
        )
        self.topic = topic
        self.holder = holder


class OffsetTrimmed(Conflict):
    """Raised when an offset was trimmed; `first` is the first one that is still there."""

    def __init__(self, partition: Partition, offset: int, first: int) -> None:
        super().__init__(f"offset {offset} of {partition} was trimmed away: the first one there is {first}")
        self.partition = partition
        self.offset = offset
        self.first = first


class OffsetBeyondEnd(InvalidCall):
    """Raised when an offset lies beyond the end, where the next record will go."""

    def __init__(self, partition: Partition, offset: int, end: int) -> None:
        super().__init__(f"offset {offset} of {partition} is beyond its end, {end}")
        self.partition = partition
        self.offset = offset
        self.end = end


class WrongEpoch(Conflict):
    """Raised when a position belongs to a partition that is gone: the topic was deleted and recreated."""

    def __init__(self, partition: Partition, epoch: int, current: int) -> None:
        super().__init__(
            f"epoch {epoch} of {partition} is over, the current one is {current}: its topic was deleted and created "
            "again, start from its first offset"
        )
        self.partition = partition
        self.epoch = epoch
        self.current = current


class SequenceTooOld(Conflict):
    """Raised when a retried append is so old that whether it was stored is no longer known."""

    def __init__(self, partition: Partition, producer: str, sequence: int, last: int) -> None:
        super().__init__(
            f"sequence {sequence} of producer {producer!r} on {partition} is too far behind its last, {last}: "
            "whether it was stored is no longer known"
        )
        self.partition = partition
        self.producer = producer
        self.sequence = sequence
        self.last = last


class TooLarge(InvalidCall):
    """Raised when a record or a batch exceeds a limit."""

    def __init__(self, what: str, size: int, limit: int) -> None:
        super().__init__(f"{what} is {size}, beyond the limit of {limit}")
        self.what = what
        self.size = size
        self.limit = limit


class Unsupported(InvalidCall):
    """Raised when a call needs a capability that the engine does not have; `instead` is another way."""

    def __init__(self, what: str, instead: str) -> None:
        super().__init__(f"this log does not support {what}: {instead}")
        self.what = what
        self.instead = instead


class Closed(InvalidCall):
    """Raised when something is used after it was closed."""

    def __init__(self, what: str) -> None:
        super().__init__(f"{what} is closed")
        self.what = what


class NotOurs(InvalidCall):
    """Raised when a file or folder is not one that Shardyard created. `advice` says what helps."""

    def __init__(self, path: str, expected: str, advice: str = "choose another path, or move the file away") -> None:
        super().__init__(f"{path} is not {expected}: {advice}")
        self.path = path


class WrongSchemaVersion(InvalidCall):
    """Raised when stored data was written by another version of Shardyard."""

    def __init__(self, path: str, found: int, expected: int) -> None:
        super().__init__(
            f"{path} has schema version {found}, this Shardyard works with {expected}: upgrade the older one"
        )
        self.path = path
        self.found = found
        self.expected = expected


class NotWritable(Conflict):
    """Raised when a folder or file can't be written."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(f"{path} can't be written ({why}): check its permissions and mount")
        self.path = path


class UnknownDatabase(InvalidCall):
    """Raised when a server has no database of the name in the URL."""

    def __init__(self, where: str, why: str) -> None:
        super().__init__(f"{where} can't be opened ({why}): create the database, or correct its name in the URL")
        self.where = where
        self.why = why


class UnknownGroup(InvalidCall):
    """Raised when a group does not exist: no member ever joined it, and it was never configured."""

    def __init__(self, group: str) -> None:
        super().__init__(
            f"group {group!r} does not exist; a group is created when it is configured or a member joins it"
        )
        self.group = group


class GroupInUse(Conflict):
    """Raised when a group is to be deleted while it has members."""

    def __init__(self, group: str, member: str) -> None:
        super().__init__(f"group {group!r} has members, such as {member!r}: stop them first")
        self.group = group
        self.member = member


class MemberExists(Conflict):
    """Raised when the group has a live member of that name."""

    def __init__(self, group: str, member: str) -> None:
        super().__init__(f"group {group!r} has a member {member!r} already: stop that one, or take another name")
        self.group = group
        self.member = member


class PartitionTaken(Conflict):
    """Raised when a member claims a partition that another member has claimed."""

    def __init__(self, partition: Partition, member: str) -> None:
        super().__init__(f"{partition} is named by member {member!r} already")
        self.partition = partition
        self.member = member


class CommitBehind(Conflict):
    """Raised when a commit would move a group backwards."""

    def __init__(self, partition: Partition, offset: int, committed: int) -> None:
        super().__init__(f"offset {offset} of {partition} lies behind what is committed, {committed}")
        self.partition = partition
        self.offset = offset
        self.committed = committed


class CommitBeyond(Conflict):
    """Raised when a commit would skip records that were not delivered."""

    def __init__(self, partition: Partition, offset: int, delivered: int) -> None:
        super().__init__(f"offset {offset} of {partition} lies beyond what was delivered, {delivered}")
        self.partition = partition
        self.offset = offset
        self.delivered = delivered


class Malformed(InvalidCall):
    """Raised when a message from the network can't be decoded."""

    def __init__(self, what: str, why: str) -> None:
        super().__init__(f"the {what} can't be read: {why}")
        self.what = what


class WrongToken(Denied):
    """Raised when a call does not carry the token that is required."""

    def __init__(self, what: str, which: str = "a token") -> None:
        super().__init__(f"{what} requires {which}, and the call has none or another one")
        self.what = what


class DatabaseDenied(Denied):
    """Raised when a database does not let this user in, or does not let it do what is needed. `advice` says what
    helps."""

    def __init__(self, where: str, why: str, advice: str) -> None:
        super().__init__(f"{where} denies access ({why}): {advice}")
        self.where = where
        self.why = why
        self.advice = advice


class NotAllowed(Denied):
    """Raised when a group's allow and deny lists keep a member out."""

    def __init__(self, group: str, member: str) -> None:
        super().__init__(f"member {member!r} is not allowed in group {group!r}: see its allow and deny lists")
        self.group = group
        self.member = member


class TopicInUse(Conflict):
    """Raised when a topic is to be deleted while members of groups are subscribed to it."""

    def __init__(self, topic: str, groups: list[str]) -> None:
        super().__init__(
            f"topic {topic!r} is subscribed to by {', '.join(groups)}: stop their members, or delete it by force"
        )
        self.topic = topic
        self.groups = groups


class UnknownDeliveryTag(InvalidCall):
    """Raised when a delivery is settled that is not outstanding: it was settled before, or never existed."""

    def __init__(self, tag: int, why: str) -> None:
        super().__init__(f"delivery tag {tag} is unknown: {why}. Nothing was changed")
        self.tag = tag
        self.why = why


class NotStored(Conflict):
    """Raised when messages were not stored although nothing is wrong with them; the branches say why."""

    refused: Sequence[int] = ()
    """If they were published with others: their places among them, from 0. The others are stored."""

    def in_batch(self, refused: Sequence[int], size: int) -> Self:
        """The same error, saying which of the `size` messages of a batch were not stored."""
        self.refused = list(refused)
        if size > 1:
            shown = ", ".join(map(str, refused[:10])) + (", ..." if len(refused) > 10 else "")
            others = "" if len(refused) == size else "; the others are stored"
            self.args = (f"{self} (not stored are {len(refused)} of {size} messages, at {shown} from 0{others})",)
        return self


class QueueFull(NotStored):
    """Raised when a queue would exceed its maximum length and refuses further messages."""

    def __init__(self, queue: str, max_length: int, messages: int = 1) -> None:
        """`messages`: how many it was to take at once."""
        if messages > max_length:
            text = f"and never takes {messages} at once: publish at most {max_length} at a time"
        else:
            text = f"and has no room for {messages} more: publish again when some of them were consumed"
        super().__init__(f"queue {queue!r} has a maximum length of {max_length} messages {text}")
        self.queue = queue
        self.max_length = max_length


class Unroutable(NotStored):
    """Raised when no queue takes a message that must be routed."""

    def __init__(self, exchange: str, routing_key: str, count: int = 1) -> None:
        others = f" (and {count - 1} more of the batch)" if count > 1 else ""
        super().__init__(
            f"exchange {exchange!r} routes the message with routing key {routing_key!r}{others} to no queue: bind a "
            "queue, set a policy, or publish with mandatory=False (--optional in commands)"
        )
        self.exchange = exchange
        self.routing_key = routing_key
        self.count = count


# Try again later ---------------------------------------------------------------------------------------------


class NoRoom(RetryLater):
    """Raised when the disk is full. The call succeeds again once there is space."""

    def __init__(self, path: str) -> None:
        super().__init__(f"no space left on the disk for {path}: free some, then try again")
        self.path = path


class Sealed(RetryLater):
    """Raised when a topic takes no records for now, because a process has sealed it to move it."""

    def __init__(self, topic: str) -> None:
        super().__init__(f"topic {topic!r} takes no records while it is being moved: try again in a moment")
        self.topic = topic


class Busy(RetryLater):
    """Raised when a resource was in use by others for longer than the caller waits."""

    def __init__(self, what: str, seconds: float) -> None:
        super().__init__(f"{what} was busy for {seconds:g} s: try again")
        self.what = what
        self.seconds = seconds


class OverQuota(RetryLater):
    """Raised when a topic has taken as many records as its quota allows for now."""

    def __init__(self, topic: str, per_second: int, wait: float) -> None:
        super().__init__(f"topic {topic!r} takes {per_second} records a second: try again in {wait:.2g} s")
        self.topic = topic
        self.per_second = per_second
        self.wait = wait


class Overloaded(RetryLater):
    """Raised when a server has as many connections, or holds as much of requests, as its limit allows."""

    def __init__(self, what: str, limit: int) -> None:
        super().__init__(f"this broker is at its limit of {limit} {what}: try again in a moment, or use another one")
        self.what = what
        self.limit = limit


class BodyStalled(RetryLater):
    """Raised when a caller has stopped sending the body of its request."""

    def __init__(self, received: int, seconds: float) -> None:
        super().__init__(f"after {received} bytes, no more of the body came for {seconds:g} s: send all of it again")
        self.received = received
        self.seconds = seconds


class EarlierPublishFailed(RetryLater):
    """Raised when records were to be stored after others, and those were refused for now. Nothing was stored."""

    def __init__(self) -> None:
        super().__init__("the publish before this one was not stored: send that one again first, then this one")


class DatabaseUnavailable(RetryLater):
    """Raised when a database can't be reached, or can't be written to for now. Nothing was changed."""

    def __init__(self, where: str, why: str, advice: str = "try again in a moment") -> None:
        super().__init__(f"{where} is unavailable ({why}): {advice}")
        self.where = where
        self.why = why
        self.advice = advice


class OutcomeUnknown(RetryLater):
    """Raised when the connection to a database was lost during a commit. Whether it was carried out is not known."""

    def __init__(self, where: str, why: str) -> None:
        super().__init__(
            f"the connection to {where} was lost during a commit ({why}), which may have been carried out: look again, "
            "or repeat the call"
        )
        self.where = where
        self.why = why


class Unreachable(RetryLater):
    """Raised when no broker could be reached. Whether the request was carried out is not known."""

    def __init__(self, brokers: list[str], seconds: float, why: str) -> None:
        super().__init__(f"none of {', '.join(brokers)} could be reached for {seconds:g} s ({why})")
        self.brokers = brokers


class NotAcknowledged(RetryLater):
    """Raised when a messaging server did not acknowledge a message in time. Whether it was stored is not known."""

    def __init__(self, what: str, seconds: float, why: str, number: int | None) -> None:
        """`number`: under which it was sent; None if it was not sent at all."""
        again = "it was not sent" if number is None else f"send it again with number={number}, which stores it once"
        super().__init__(f"{what} was not acknowledged within {seconds:g} s ({why}): {again}")
        self.what = what
        self.seconds = seconds
        self.why = why
        self.number = number


class NotABroker(Unreachable):
    """Raised when something else answers at the addresses of all brokers."""

    def __init__(self, brokers: list[str], answer: str) -> None:
        """`answer`: what was answered, such as "404 with text/html"."""
        one = len(brokers) == 1
        what = f"{brokers[0]} is not a" if one else f"none of {', '.join(brokers)} is a"
        RetryLater.__init__(self, f"{what} Shardyard broker: {'it' if one else 'they'} answered {answer}")
        self.brokers = brokers
        self.answer = answer


class NotOwner(RetryLater):
    """Raised when a queue is served by another node, or by none for the moment. Nothing was changed."""

    def __init__(self, queue: str, address: str | None) -> None:
        """`address`: of the node that serves it, as far as is known."""
        where = "by no node at the moment: try again" if address is None else f"at {address}: call that node"
        super().__init__(f"queue {queue!r} is not served here but {where}")
        self.queue = queue
        self.address = address
