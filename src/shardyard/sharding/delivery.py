"""Deliveries, and the subscription of a consumer that gets and settles them."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from shardyard.model import NotOwner, Record, ShardyardError, UnknownDeliveryTag, whole_number


@dataclass(slots=True)
class Deliveries:
    """A batch of messages for one consumer, in the order of the queue. The lists have one entry for each message."""

    first_tag: int
    """The delivery tag of the first message; those after it follow."""
    offsets: list[int]
    records: list[Record]
    counts: list[int]
    """How many deliveries of the message failed before."""
    redelivered: list[bool]
    """Whether the message may have been delivered before."""

    def __len__(self) -> int:
        return len(self.offsets)


Receiver = Callable[[Deliveries], None]
"""Gets deliveries. It is called in the event loop, must return at once, and does not raise."""
Ended = Callable[[ShardyardError], None]
"""Called when a subscription ends because this node does not serve the queue any more."""


class Deliverer(Protocol):
    """The queue as its subscriptions see it."""

    @property
    def name(self) -> str: ...

    def settle(self, offsets: Sequence[int]) -> None:
        """They were acknowledged."""

    def give_back(self, offsets: Sequence[int], *, failed: bool = True) -> None:
        """Deliver them again. `failed`: their delivery counts as failed."""

    def reject(self, offsets: Sequence[int]) -> None:
        """Their delivery failed for good: they are dead letters."""

    def dispatch_soon(self) -> None:
        """Something may be deliverable now."""

    def remove(self, subscription: "Subscription") -> None:
        """It takes no more deliveries."""


class Subscription:
    """A consumer of a queue. Its delivery tags count from 1, and are its own.

    An unknown tag, or one that was settled before, is an `UnknownDeliveryTag` that changes nothing.
    """

    __slots__ = (
        "__weakref__",
        "_ended",
        "_has_ended",
        "_is_cancelled",
        "_is_paused",
        "_next_tag",
        "_queue",
        "_unacked",
        "no_ack",
        "prefetch",
    )

    def __init__(self, queue: Deliverer, *, prefetch: int, no_ack: bool, ended: Ended | None) -> None:
        self.no_ack = no_ack
        self.prefetch = whole_number("prefetch", prefetch, at_least=0)
        self._queue = queue
        self._ended = ended
        self._next_tag = 1
        self._unacked: dict[int, int] = {}
        """By tag, ascending: the offset."""
        self._is_paused = False
        self._is_cancelled = False
        self._has_ended = False

    @property
    def unacked(self) -> int:
        """How many of its deliveries are not settled."""
        return len(self._unacked)

    @property
    def is_active(self) -> bool:
        """Whether it is served."""
        return not self._is_cancelled

    def credit(self, most: int) -> int:
        """How many messages it takes now, if there are so many."""
        if self._is_paused or self._is_cancelled:
            return 0
        return most if self.no_ack or not self.prefetch else min(most, self.prefetch - len(self._unacked))

    def set_prefetch(self, prefetch: int) -> None:
        """How many unsettled deliveries it may have; 0 for as many as the queue allows."""
        self.prefetch = whole_number("prefetch", prefetch, at_least=0)
        self._queue.dispatch_soon()

    def pause(self) -> None:
        """Take no messages until `resume`: the consumer reads slowly."""
        self._is_paused = True

    def resume(self) -> None:
        self._is_paused = False
        self._queue.dispatch_soon()

    # Settling

    def ack(self, tag: int, *, multiple: bool = False) -> None:
        """The message is done; with `multiple`, all up to this one (0: all of them)."""
        self._queue.settle(self._taken(tag, multiple))

    def ack_tags(self, tags: Sequence[int]) -> None:
        """These messages are done: all of them, or none if one is unknown or given twice."""
        self._queue.settle(self._taken_tags(tags))

    def nack(self, tag: int, *, multiple: bool = False, requeue: bool = True) -> None:
        """The message failed. It is delivered again, from its place in the queue, or becomes a dead letter."""
        offsets = self._taken(tag, multiple)
        if requeue:
            self._queue.give_back(offsets)
        else:
            self._queue.reject(offsets)

    def nack_tags(self, tags: Sequence[int], *, requeue: bool = True, failed: bool = True) -> None:
        """These messages failed: all of them, or none if one is unknown or given twice. `failed`: False if the consumer
        did not try; then they are delivered again, and the delivery does not count."""
        offsets = self._taken_tags(tags)
        if requeue or not failed:
            self._queue.give_back(offsets, failed=failed)
        else:
            self._queue.reject(offsets)

    def cancel(self) -> None:
        """Take no more messages; those that are not settled are delivered to others. May be called twice."""
        self.stop_taking()
        offsets = list(self._unacked.values())
        self._unacked.clear()
        if offsets:
            self._queue.give_back(offsets)

    def stop_taking(self) -> None:
        """Take no more messages; those that were delivered can still be settled."""
        if not self._is_cancelled:
            self._is_cancelled = True
            self._queue.remove(self)

    # For the queue

    def add(self, offsets: Sequence[int]) -> int:
        """Number deliveries. Returns the first tag."""
        first = self._next_tag
        self._next_tag += len(offsets)
        if not self.no_ack:
            self._unacked.update(zip(range(first, self._next_tag), offsets, strict=True))
        return first

    def end(self, error: ShardyardError) -> None:
        """This node does not serve the queue any more. What is unsettled is delivered again, by its next owner."""
        self._is_cancelled = self._has_ended = True
        self._unacked.clear()
        if self._ended is not None:
            self._ended(error)

    def _taken(self, tag: int, multiple: bool) -> list[int]:
        """The offsets of these deliveries, which are not outstanding any more."""
        unacked = self._unacked
        if not multiple:
            offset = unacked.pop(tag, None)
            if offset is None:
                raise self._unknown(tag)
            return [offset]
        if tag == 0:
            offsets = list(unacked.values())
            unacked.clear()
            return offsets
        if tag not in unacked:
            raise self._unknown(tag)
        tags = list(_up_to(unacked, tag))
        return [unacked.pop(each) for each in tags]

    def _taken_tags(self, tags: Sequence[int]) -> list[int]:
        """The same for several tags, which are all outstanding."""
        unacked = self._unacked
        try:
            offsets = [unacked[tag] for tag in tags]
        except KeyError as error:
            raise self._unknown(error.args[0]) from None
        if len(set(tags)) < len(tags):
            raise UnknownDeliveryTag(next(tag for tag in tags if list(tags).count(tag) > 1), "it is given twice")
        for tag in tags:
            del unacked[tag]
        return offsets

    def _unknown(self, tag: int) -> ShardyardError:
        if self._has_ended:
            return NotOwner(self._queue.name, None)
        if self.no_ack:
            return UnknownDeliveryTag(tag, "this consumer gets messages that need no acknowledgement")
        if isinstance(tag, int) and 1 <= tag < self._next_tag:
            return UnknownDeliveryTag(tag, "it was settled before")
        return UnknownDeliveryTag(tag, f"the last one that was delivered is {self._next_tag - 1}")


def _up_to(ascending: Iterable[int], last: int) -> Iterable[int]:
    for each in ascending:
        if each > last:
            return
        yield each
