"""Messages of Shardyard's API as messages of AMQP, and the other way round."""

import json
from datetime import UTC, datetime

from aio_pika import DeliveryMode, Message
from aio_pika.abc import AbstractIncomingMessage, HeadersType

from shardyard.model import Headers, InvalidValue
from shardyard.model.sharding import OutgoingMessage
from shardyard.wire.sharding import PROPERTY_PREFIX, RESERVED_PREFIX

CC, BCC = "CC", "BCC"
"""Headers with further routing keys."""
PROPERTIES = ("content_type", "content_encoding", "correlation_id", "reply_to", "message_id", "type", "app_id")
"""Those that AMQP has, besides `timestamp`, which is a number of seconds."""


def to_amqp(message: OutgoingMessage) -> Message:
    """A persistent message. `InvalidValue` for a property that AMQP does not have."""
    properties = dict(message.properties)
    if unknown := properties.keys() - {*PROPERTIES, "timestamp"}:
        raise InvalidValue("properties", ", ".join(sorted(unknown)), "some of " + ", ".join(PROPERTIES) + ", timestamp")
    headers: HeadersType = {name: _text(value) for name, value in message.headers}
    for name, keys in ((CC, message.cc), (BCC, message.bcc)):
        if keys:
            headers[name] = list(keys)
    at = properties.pop("timestamp", None)
    return Message(
        message.body,
        headers=headers,
        delivery_mode=DeliveryMode.PERSISTENT,
        expiration=None if message.expiration_ms is None else message.expiration_ms / 1000,
        timestamp=None if at is None else datetime.fromtimestamp(int(at), UTC),
        **properties,  # type: ignore[arg-type]  # each of them is a string
    )


def from_amqp(message: AbstractIncomingMessage) -> OutgoingMessage:
    """A message as it would be published again. BCC is gone: RabbitMQ removes it."""
    headers, cc = headers_of(message)
    return OutgoingMessage(
        message.body,
        message.routing_key or "",
        headers=headers,
        cc=cc,
        properties=tuple(properties_of(message).items()),
        expiration_ms=None if message.expiration is None else int(_seconds(message.expiration) * 1000),
    )


def headers_of(message: AbstractIncomingMessage) -> tuple[Headers, tuple[str, ...]]:
    """The headers of a message as bytes, and the keys of its CC header. Numbers, lists and tables become JSON; names
    that are reserved in Shardyard get the prefix `rabbitmq.`."""
    cc = message.headers.get(CC)
    kept = tuple((_name(name), _bytes(value)) for name, value in message.headers.items() if name != CC)
    return kept, tuple(map(str, cc)) if isinstance(cc, list) else ()


def properties_of(message: AbstractIncomingMessage) -> dict[str, str]:
    """Those that the message has."""
    found = {name: str(value) for name in PROPERTIES if (value := getattr(message, name)) not in (None, "")}
    if message.timestamp is not None:
        found["timestamp"] = str(int(message.timestamp.timestamp()))
    return found


def _name(header: str) -> str:
    return f"rabbitmq.{header}" if header.startswith((RESERVED_PREFIX, PROPERTY_PREFIX)) else header


def _text(value: bytes) -> str | bytes:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value


def _bytes(value: object) -> bytes:
    if isinstance(value, bytes | bytearray):
        return bytes(value)
    return (value if isinstance(value, str) else json.dumps(value, default=str)).encode()


def _seconds(expiration: object) -> float:
    return expiration.total_seconds() if hasattr(expiration, "total_seconds") else float(expiration)  # type: ignore[arg-type]
