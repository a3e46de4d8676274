"""What may be declared: the checks of names, exchanges, queues, bindings and policies. They read and change nothing."""

from typing import TypeVar, cast

from shardyard.model import InvalidValue, ShardManaged, TooLarge, whole_number
from shardyard.model.checks import check_int64, check_text, encoded_size
from shardyard.model.sharding import (
    DEAD_PREFIX,
    MAX_SHARDS_PER_NODE,
    SHARD_PREFIX,
    Binding,
    Exchange,
    ExchangeType,
    Overflow,
    Policy,
    QueueLimits,
)
from shardyard.sharding.patterns import check_pattern

E = TypeVar("E", ExchangeType, Overflow)

MAX_NAME_BYTES = 255
"""Of the name of an exchange, a queue, a policy or a node, and of a routing key, as in AMQP."""
MAX_WEIGHT = 1000
"""Of a binding. A message is compared with as many points as the weights of all bindings add up to."""
HASH_PROPERTIES = ("message_id", "correlation_id", "timestamp")


def check_name(what: str, name: object) -> str:
    """`name`, if something may have it: a string that is not empty, of at most `MAX_NAME_BYTES`."""
    check_text(what, name)
    text = cast(str, name)
    if (size := encoded_size(what, text)) > MAX_NAME_BYTES:
        raise TooLarge(f"{what} in bytes", size, MAX_NAME_BYTES)
    return text


def check_node_name(name: object) -> str:
    """Names of nodes have no spaces: so the name of a shard says which exchange and which node it is of. They have no
    slashes: so it fits into a path."""
    checked = check_name("node name", name)
    if "/" in checked or any(character.isspace() for character in checked):
        raise InvalidValue("node name", name, "a name without spaces and '/', such as shardyard-7400@host")
    return checked


def check_queue_name(name: object, operation: str) -> str:
    """`name`, if a caller may declare, bind or unbind a queue of that name, apart from what exists."""
    checked = check_name("queue name", name)
    if checked.startswith((SHARD_PREFIX, DEAD_PREFIX)):
        raise ShardManaged(checked, operation)
    return checked


def check_routing_key(key: object) -> str:
    """`key`, if it may be a routing key. It may be empty."""
    if key == "":
        return ""
    return check_name("routing key", key)


def check_exchange(exchange: Exchange) -> Exchange:
    """The exchange as it is stored."""
    check_name("exchange name", exchange.name)
    kind = _one_of(ExchangeType, "exchange type", exchange.type)
    if exchange.hash_header is not None:
        check_name("hash-header", exchange.hash_header)
    if exchange.hash_property is not None and exchange.hash_property not in HASH_PROPERTIES:
        raise InvalidValue("hash-property", exchange.hash_property, "one of " + ", ".join(HASH_PROPERTIES))
    if exchange.hash_header is not None and exchange.hash_property is not None:
        raise InvalidValue("hash-property", exchange.hash_property, "none, because there is a hash-header")
    if not kind.is_hashing and (exchange.hash_header is not None or exchange.hash_property is not None):
        name = "hash-header" if exchange.hash_header is not None else "hash-property"
        raise InvalidValue(name, exchange.hash_header or exchange.hash_property, f"none for an exchange of type {kind}")
    return Exchange(exchange.name, kind, exchange.hash_header, exchange.hash_property)


def check_limits(limits: QueueLimits) -> QueueLimits:
    """The limits as they are stored."""
    for name, value, least in (
        ("message-ttl", limits.message_ttl_ms, 0),
        ("max-length", limits.max_length, 1),
        ("delivery-limit", limits.delivery_limit, 0),
    ):
        if value is not None:
            check_int64(name, value, at_least=least)
    if limits.dead_letter_exchange is not None:
        check_name("dead-letter-exchange", limits.dead_letter_exchange)
    _one_of(Overflow, "overflow", limits.overflow)
    return limits


def check_policy(policy: Policy) -> Policy:
    """The policy as it is stored."""
    check_name("policy name", policy.name)
    check_pattern(policy.pattern)
    shards = whole_number("shards-per-node", policy.shards_per_node, at_least=1)
    if shards > MAX_SHARDS_PER_NODE:
        raise TooLarge("shards-per-node", shards, MAX_SHARDS_PER_NODE)
    check_int64("priority", policy.priority)
    check_routing_key(policy.routing_key)
    check_limits(policy.limits)
    return policy


def check_binding(binding: Binding, kind: ExchangeType) -> Binding:
    """The binding, if an exchange of this type takes its key. That of a consistent-hash exchange is a weight."""
    check_routing_key(binding.routing_key)
    if kind is ExchangeType.CONSISTENT_HASH:
        weight_of(binding)
    return binding


def weight_of(binding: Binding) -> int:
    """The weight of a queue that is bound to a consistent-hash exchange."""
    key = binding.routing_key
    if not (key.isascii() and key.isdigit() and len(key) <= 4 and 1 <= int(key) <= MAX_WEIGHT):
        expected = f"the weight of the queue as routing key, a whole number from 1 to {MAX_WEIGHT}"
        raise InvalidValue("routing key", key, expected)
    return int(key)


def _one_of(kind: type[E], name: str, value: object) -> E:
    try:
        return kind(cast(str, value))
    except ValueError:
        raise InvalidValue(name, value, "one of " + ", ".join(kind)) from None
