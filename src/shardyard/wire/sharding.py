"""The bodies of requests and responses for sharded queues, and messages in JSON. No I/O."""

import base64
import binascii
from typing import Annotated, Literal

from msgspec import Meta, Struct, structs

from shardyard.model import Headers, InvalidValue
from shardyard.model.sharding import (
    MAX_SHARDS_PER_NODE,
    Binding,
    Exchange,
    ExchangeType,
    OutgoingMessage,
    Overflow,
    Policy,
    Queue,
    QueueLimits,
    Rebalanced,
    Remaining,
)
from shardyard.wire.requests import Amount, Count, Whole

PROPERTY_PREFIX = "property."
"""Of the headers that hold a message's properties."""
RESERVED_PREFIX = "shardyard."
"""Of the headers that Shardyard itself sets."""
DEATHS = f"{RESERVED_PREFIX}deaths"
"""The header with the history of a dead letter."""
DEATH_HEADER = "x-death"
"""As which consumers see it."""
TypeName = Literal["x-modulus-hash", "x-consistent-hash", "direct", "fanout"]
Priority = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
MAX_GET = 1000
"""Messages that one request gets at most."""


# Requests


class NewExchange(Struct, forbid_unknown_fields=True):
    """An exchange to declare. If it exists already, it must be the same."""

    name: str
    type: TypeName = "x-modulus-hash"
    hash_header: str | None = None
    """The hashing types hash this header instead of the routing key."""
    hash_property: str | None = None
    """Likewise, this property."""

    def exchange(self) -> Exchange:
        return Exchange(self.name, ExchangeType(self.type), self.hash_header, self.hash_property)


class NewQueue(Struct, forbid_unknown_fields=True):
    """A queue to declare."""

    name: str


class NewBinding(Struct, forbid_unknown_fields=True):
    """A queue to bind to an exchange."""

    queue: str
    routing_key: str = ""
    declare: bool = False
    """Whether the queue is declared first, if it does not exist. If it can't be bound, it is not."""


class NewPolicy(Struct, forbid_unknown_fields=True):
    """A policy, without its name."""

    pattern: str
    shards_per_node: Annotated[int, Meta(ge=1, le=MAX_SHARDS_PER_NODE)]
    routing_key: str = ""
    priority: Priority = 0
    message_ttl_ms: Amount | None = None
    max_length: Amount | None = None
    overflow: Literal["drop-head", "reject-publish"] = "drop-head"
    delivery_limit: Count | None = None
    dead_letter_exchange: str | None = None

    def policy(self, name: str) -> Policy:
        limits = QueueLimits(
            self.message_ttl_ms,
            self.max_length,
            Overflow(self.overflow),
            self.delivery_limit,
            self.dead_letter_exchange,
        )
        return Policy(name, self.pattern, self.shards_per_node, self.routing_key, self.priority, limits)


class JsonMessage(Struct, omit_defaults=True, forbid_unknown_fields=True):
    """A message to publish in JSON."""

    body: str | None = None
    body_base64: str | None = None
    """Instead of `body`, if it is not UTF-8."""
    routing_key: str = ""
    headers: dict[str, str] = {}
    headers_base64: dict[str, str] = {}
    cc: list[str] = []
    bcc: list[str] = []
    properties: dict[str, str] = {}
    expiration_ms: Whole | None = None

    def message(self) -> OutgoingMessage:
        """`InvalidValue` says what is wrong with it."""
        if (self.body is None) == (self.body_base64 is None):
            raise InvalidValue("body", self.body, "either body or body_base64")
        body = _decoded("body_base64", self.body_base64) if self.body is None else self.body.encode()
        texts = ((name, value.encode()) for name, value in self.headers.items())
        others = ((name, _decoded("headers_base64", value)) for name, value in self.headers_base64.items())
        return OutgoingMessage(
            body,
            self.routing_key,
            (*texts, *others),
            tuple(self.cc),
            tuple(self.bcc),
            tuple(self.properties.items()),
            self.expiration_ms,
        )


class PublishMessages(Struct, forbid_unknown_fields=True):
    """Messages to publish."""

    messages: Annotated[list[JsonMessage], Meta(min_length=1)]
    producer: str | None = None
    """With `sequence`: makes a retry of the same request harmless."""
    sequence: Whole | None = None
    mandatory: bool = True
    """Whether it is an error if a message is not stored. The others are stored in any case."""


class GetMessages(Struct, forbid_unknown_fields=True):
    """How many messages to get at most. They are acknowledged with the response."""

    max_messages: Annotated[int, Meta(ge=1, le=MAX_GET)] = 1


class QueueNames(Struct, forbid_unknown_fields=True):
    """The queues that a node asks another one about."""

    names: list[str]


# Responses


class ExchangeInfo(Struct):
    """An exchange."""

    name: str
    type: str
    hash_header: str | None
    hash_property: str | None

    @classmethod
    def of(cls, exchange: Exchange) -> "ExchangeInfo":
        return cls(exchange.name, str(exchange.type), exchange.hash_header, exchange.hash_property)

    def exchange(self) -> Exchange:
        return Exchange(self.name, ExchangeType(self.type), self.hash_header, self.hash_property)


class PolicyInfo(Struct):
    """A policy."""

    name: str
    pattern: str
    shards_per_node: int
    routing_key: str
    priority: int
    message_ttl_ms: int | None
    max_length: int | None
    overflow: str
    delivery_limit: int | None
    dead_letter_exchange: str | None

    @classmethod
    def of(cls, policy: Policy) -> "PolicyInfo":
        limits = policy.limits
        return cls(
            policy.name,
            policy.pattern,
            policy.shards_per_node,
            policy.routing_key,
            policy.priority,
            limits.message_ttl_ms,
            limits.max_length,
            str(limits.overflow),
            limits.delivery_limit,
            limits.dead_letter_exchange,
        )

    def policy(self) -> Policy:
        limits = QueueLimits(
            self.message_ttl_ms,
            self.max_length,
            Overflow(self.overflow),
            self.delivery_limit,
            self.dead_letter_exchange,
        )
        return Policy(self.name, self.pattern, self.shards_per_node, self.routing_key, self.priority, limits)


class QueueCounts(Struct):
    """What the owner of a queue says about it."""

    ready: int
    """Messages that can be delivered now."""
    unacknowledged: int
    consumers: int


class QueueInfo(Struct):
    """A queue, and what is in it."""

    name: str
    kind: str
    state: str
    exchange: str | None
    node: str | None
    """Of a shard: the node that it was created for."""
    index: int | None
    slot: int
    owner: str | None
    """The node that serves it now."""
    address: str | None
    """Of the owner."""
    ready: int | None
    """None, as the others, if no owner could be asked."""
    unacknowledged: int | None
    consumers: int | None

    @classmethod
    def of(
        cls, queue: Queue, owner: str | None = None, address: str | None = None, counts: QueueCounts | None = None
    ) -> "QueueInfo":
        return cls(
            queue.name,
            str(queue.kind),
            str(queue.state),
            queue.exchange,
            queue.node,
            queue.index,
            queue.slot,
            owner,
            address,
            None if counts is None else counts.ready,
            None if counts is None else counts.unacknowledged,
            None if counts is None else counts.consumers,
        )


class BindingInfo(Struct):
    """A binding of a queue to an exchange."""

    exchange: str
    queue: str
    routing_key: str

    @classmethod
    def of(cls, binding: Binding) -> "BindingInfo":
        return cls(binding.exchange, binding.queue, binding.routing_key)


class Unbound(BindingInfo):
    """A binding that does not exist any more."""

    was_bound: bool
    """Whether it existed until now."""


class ExchangeDescription(Struct):
    """An exchange with its effective policy, its bindings and its shards."""

    exchange: ExchangeInfo
    policy: PolicyInfo | None
    bindings: list[BindingInfo]
    shards: list[QueueInfo]


class RemainingShard(Struct):
    """A shard that takes no more messages, can be consumed by its name, and is removed once it is empty; or a queue of
    dead letters, which stays."""

    queue: str
    messages: int
    node: str | None


class Removed(Struct):
    """A policy, an exchange or a node was removed: what is left of the shards that it had."""

    name: str
    remaining: list[RemainingShard]

    @classmethod
    def of(cls, name: str, remaining: Remaining) -> "Removed":
        return cls(name, _remaining_shards(remaining))


class PolicySet(PolicyInfo):
    """A policy that was set, and what is left of the shards of its exchanges that take no more messages."""

    remaining: list[RemainingShard]

    @classmethod
    def after(cls, policy: Policy, remaining: Remaining) -> "PolicySet":
        return cls(**structs.asdict(PolicyInfo.of(policy)), remaining=_remaining_shards(remaining))


def _remaining_shards(remaining: Remaining) -> list[RemainingShard]:
    return [RemainingShard(left.queue, left.messages, left.node) for left in remaining.queues]


class EffectivePolicy(Struct):
    """The policy that applies to an exchange, if one does."""

    exchange: str
    policy: PolicyInfo | None


class NodeInfo(Struct):
    """A node: a broker process with a stable name."""

    name: str
    address: str | None
    """None if it does not run."""
    is_running: bool
    shards: int
    """That were created for it."""
    owned: int
    """Queues that it serves now."""


class PublishResult(Struct):
    """How many queues took each message."""

    routed: list[int]
    refused: dict[str, str] = {}
    """Messages that were not stored, by their place, and why."""


class Purged(Struct):
    """How many messages were removed."""

    name: str
    messages: int


class RebalanceResult(Struct):
    """The result of a rebalance."""

    name: str
    total: int
    messages: dict[str, int]
    """By the name of each shard, how many unread messages it has been given."""

    @classmethod
    def of(cls, rebalanced: Rebalanced) -> "RebalanceResult":
        return cls(rebalanced.exchange, rebalanced.total, dict(rebalanced.messages))


class GotMessage(Struct, omit_defaults=True):
    """A message that a request got."""

    queue: str
    body: str | None
    body_base64: str | None
    routing_key: str
    headers: dict[str, str]
    headers_base64: dict[str, str]
    properties: dict[str, str]
    redelivered: bool
    delivery_count: int
    timestamp: int

    @classmethod
    def of(
        cls,
        queue: str,
        body: bytes,
        routing_key: str,
        headers: Headers,
        timestamp: int,
        *,
        redelivered: bool,
        delivery_count: int,
    ) -> "GotMessage":
        text, own = _text(body), [(name, value, _text(value)) for name, value in user_headers(headers)]
        return cls(
            queue,
            text,
            None if text is not None else base64.b64encode(body).decode(),
            routing_key,
            {name: value for name, _, value in own if value is not None},
            {name: base64.b64encode(raw).decode() for name, raw, value in own if value is None},
            properties_of(headers),
            redelivered,
            delivery_count,
            timestamp,
        )


def user_headers(headers: Headers) -> Headers:
    """The headers that the publisher gave. A dead letter has one more, `x-death`, instead of one that the publisher
    gave: where and why it became one."""
    given = tuple(each for each in headers if not each[0].startswith((PROPERTY_PREFIX, RESERVED_PREFIX)))
    deaths = tuple((DEATH_HEADER, value) for name, value in headers if name == DEATHS)
    return (*deaths, *(each for each in given if each[0] != DEATH_HEADER)) if deaths else given


def properties_of(headers: Headers) -> dict[str, str]:
    """The properties among the headers of a stored message."""
    skip = len(PROPERTY_PREFIX)
    return {name[skip:]: value.decode(errors="replace") for name, value in headers if name.startswith(PROPERTY_PREFIX)}


def _decoded(name: str, encoded: str | None) -> bytes:
    try:
        return base64.b64decode(encoded or "", validate=True)
    except (binascii.Error, ValueError):
        raise InvalidValue(name, f"{str(encoded)[:50]}...", "base64") from None


def _text(data: bytes) -> str | None:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None
