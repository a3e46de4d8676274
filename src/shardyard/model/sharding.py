"""The words of sharded queues, as RabbitMQ uses them."""

from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from msgspec import Struct

from shardyard.model.given import Headers
from shardyard.model.words import Fence, Partition

SHARDS_TOPIC = "shardyard.shards"
"""Holds the messages of all queues: each queue has one partition, its slot."""
STATES_TOPIC = "shardyard.shard-states"
"""Holds what was acknowledged, in the partition with the number of the slot."""
MAX_SHARDS_PER_NODE = 1000
"""Of a policy."""
NODES_GROUP = "shardyard.sharding"
"""The nodes, which own the slots."""


class ExchangeType(StrEnum):
    """How an exchange chooses the queues of a message."""

    MODULUS_HASH = "x-modulus-hash"
    """One queue, by the hash of the routing key modulo the number of bindings, exactly as RabbitMQ chooses it."""
    CONSISTENT_HASH = "x-consistent-hash"
    """One queue, by rendezvous hashing: when a queue comes or goes, only its own keys move."""
    DIRECT = "direct"
    """All queues that are bound with the routing key."""
    FANOUT = "fanout"
    """All queues that are bound."""

    @property
    def is_hashing(self) -> bool:
        """Whether a message goes to at most one queue."""
        return self in (ExchangeType.MODULUS_HASH, ExchangeType.CONSISTENT_HASH)


class QueueKind(StrEnum):
    """Where a queue comes from."""

    PLAIN = "plain"
    """It was declared."""
    SHARD = "shard"
    """A policy created it."""
    DEAD = "dead"
    """It keeps the dead letters of an exchange or a queue."""


class QueueState(StrEnum):
    """Whether a queue receives messages."""

    ACTIVE = "active"
    DRAINING = "draining"
    """It receives no messages, can be read, and is removed once it is empty."""


class Overflow(StrEnum):
    """What happens to a message for a queue that has its maximum length."""

    DROP_HEAD = "drop-head"
    """The oldest message makes room for it."""
    REJECT_PUBLISH = "reject-publish"
    """It is refused."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """Takes messages, and routes them to queues."""

    name: str
    type: ExchangeType
    hash_header: str | None = None
    """The hashing types hash this header instead of the routing key."""
    hash_property: str | None = None
    """Likewise, this property: `message_id`, `correlation_id` or `timestamp`."""


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """What a policy says about the messages of its shards."""

    message_ttl_ms: int | None = None
    max_length: int | None = None
    overflow: Overflow = Overflow.DROP_HEAD
    delivery_limit: int | None = None
    """How many deliveries may fail; the next failure makes the message a dead letter."""
    dead_letter_exchange: str | None = None


NO_LIMITS = QueueLimits()


@dataclass(frozen=True, slots=True)
class Policy:
    """Turns the exchanges whose names match its pattern into sharded ones."""

    name: str
    pattern: str
    shards_per_node: int
    routing_key: str = ""
    """With which the shards are bound. Only direct exchanges look at it."""
    priority: int = 0
    """Of several policies that match, the one with the highest priority applies; among equals, the first by name."""
    limits: QueueLimits = NO_LIMITS


@dataclass(frozen=True)
class Queue:
    """Stores messages until they are acknowledged."""

    name: str
    slot: int
    incarnation: int
    """Rises whenever the slot is used for another queue, or messages routed before must not be stored any more."""
    first: int = 0
    """The offset in its partition where it begins. What lies before belonged to an earlier queue in the same slot."""
    kind: QueueKind = QueueKind.PLAIN
    state: QueueState = QueueState.ACTIVE
    exchange: str | None = None
    """Of a shard, the exchange that it belongs to."""
    node: str | None = None
    """Of a shard, the node that it was created for. Its owner may be another one."""
    index: int | None = None
    limits: QueueLimits = NO_LIMITS

    @cached_property
    def partition(self) -> Partition:
        """Where its messages are."""
        return Partition(SHARDS_TOPIC, self.slot)

    @cached_property
    def state_partition(self) -> Partition:
        """Where it is stored what was acknowledged."""
        return Partition(STATES_TOPIC, self.slot)

    @cached_property
    def routing_fence(self) -> Fence:
        """Carried by every append of messages to it: once it no longer receives, such appends are refused."""
        return Fence(f"{self.partition}/routing", self.incarnation)


@dataclass(frozen=True, slots=True, order=True)
class Binding:
    """Lets an exchange route messages to a queue. The same queue may be bound with several keys."""

    exchange: str
    queue: str
    routing_key: str = ""


class OutgoingMessage(Struct, frozen=True, gc=False):
    """A message to publish."""

    body: bytes
    """A client also takes what `publish` takes, such as a string."""
    routing_key: str = ""
    headers: Headers = ()
    cc: tuple[str, ...] = ()
    """Further routing keys. They are kept in the message."""
    bcc: tuple[str, ...] = ()
    """Further routing keys that are removed from the message."""
    properties: tuple[tuple[str, str], ...] = ()
    """Such as `message_id`, `correlation_id` and `content_type`."""
    expiration_ms: int | None = None
    """After this time in a queue, the message is no longer delivered."""


@dataclass(frozen=True, slots=True)
class RemainingQueue:
    """A queue that is not empty: a shard that takes no more messages, or dead letters. It can be consumed by its
    name."""

    queue: str
    messages: int
    """At most so many are left: those that were acknowledged just now may be counted."""
    node: str | None = None
    """Of a shard, the node that it was created for."""


@dataclass(frozen=True, slots=True)
class Remaining:
    """What is left of the queues that a change has closed, and dead letters. Those that were empty are gone."""

    queues: tuple[RemainingQueue, ...] = ()

    def __add__(self, other: "Remaining") -> "Remaining":
        return Remaining(self.queues + other.queues)

    @property
    def messages(self) -> int:
        return sum(queue.messages for queue in self.queues)


@dataclass(frozen=True, slots=True)
class Rebalanced:
    """What a rebalance of a backlog did."""

    exchange: str
    messages: tuple[tuple[str, int], ...]
    """The name of each shard, and how many unread messages it has been given."""

    @property
    def total(self) -> int:
        return sum(count for _, count in self.messages)


SHARD_PREFIX = "sharding: "
DEAD_PREFIX = "dead letters: "
"""Names of queues that begin with one of these belong to queues that Shardyard creates itself."""


def shard_name(exchange: str, node: str, index: int) -> str:
    """The name of a shard, as RabbitMQ's plugin builds it."""
    return f"{SHARD_PREFIX}{exchange} - {node} - {index}"


def dead_letter_queue_name(source: str) -> str:
    """The queue for the dead letters of an exchange's shards or of a queue, unless a policy names an exchange."""
    return f"{DEAD_PREFIX}{source}"
