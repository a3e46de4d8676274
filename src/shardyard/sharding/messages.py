"""Messages as records: the key is the routing key, and what Shardyard and the sender say about a message are headers.

Reserved headers come first, the version of the topology before all others: so what carries only that one is known by
the number of its headers.
"""

import json
from collections.abc import Iterable
from typing import Any

from msgspec import structs

from shardyard.model import Headers, InvalidValue, Record
from shardyard.model.given import encoded_text
from shardyard.model.sharding import OutgoingMessage

RESERVED = "shardyard."
"""The names of headers that begin so are Shardyard's own."""
VERSION = "shardyard.version"
"""The version of the topology by which the message was routed."""
CC = "shardyard.cc"
"""Further routing keys, as a JSON list."""
EXPIRATION = "shardyard.expiration"
"""Milliseconds."""
DEATHS = "shardyard.deaths"
"""Where the message was a dead letter, as a JSON list; the last time comes first."""
PROPERTY = "property."
"""Before the name of a property."""


def check_message(message: OutgoingMessage) -> None:
    """Refuse what can't be published; `InvalidValue` says why. What a record can't hold, the log's limits refuse."""
    for name, _ in message.headers:
        if name.startswith((RESERVED, PROPERTY)):
            raise InvalidValue("header", name, f"a name that begins neither with {RESERVED!r} nor with {PROPERTY!r}")
    expiration = message.expiration_ms
    if expiration is not None and (type(expiration) is not int or expiration < 0):
        raise InvalidValue("expiration_ms", expiration, "a whole number of milliseconds of at least 0")


def to_record(message: OutgoingMessage, id_: str, version: tuple[str, bytes], now: int = 0) -> Record:
    """The record of a message. `version`: see `version_header`. `now`: the time in milliseconds; 0 for that of the log.
    BCC is not stored."""
    headers: Headers = (version,)
    if message.cc:
        headers += ((CC, json.dumps(message.cc, ensure_ascii=False).encode()),)
    if message.expiration_ms is not None:
        headers += ((EXPIRATION, b"%d" % message.expiration_ms),)
    if message.properties:
        headers += tuple(
            (PROPERTY + name, encoded_text(f"property {name}", value)) for name, value in message.properties
        )
    if message.headers:
        headers += message.headers
    try:
        return Record(id_, message.routing_key.encode(), message.body, headers, now)
    except UnicodeEncodeError:
        raise InvalidValue("routing key", message.routing_key, "text that UTF-8 can hold") from None


def version_header(version: int) -> tuple[str, bytes]:
    """The header of messages that were routed by this version of the topology."""
    return VERSION, b"%d" % version


def version_of(record: Record) -> int:
    """The version of the topology by which the message was routed; 0 if it does not say."""
    found = record.header(VERSION)
    return 0 if found is None else int(found)


def routed_by(record: Record, version: tuple[str, bytes]) -> Record:
    """The same message, routed by this version of the topology."""
    kept = tuple(header for header in record.headers if header[0] != VERSION)
    return structs.replace(record, headers=(version, *kept))


def to_message(record: Record) -> OutgoingMessage:
    """The message of a record, as it was published, except for BCC and the reserved headers that are no part of it."""
    cc: tuple[str, ...] = ()
    expiration = None
    properties, headers = [], []
    for name, value in record.headers:
        if name == CC:
            cc = tuple(json.loads(value))
        elif name == EXPIRATION:
            expiration = int(value)
        elif name.startswith(PROPERTY):
            properties.append((name.removeprefix(PROPERTY), value.decode()))
        elif not name.startswith(RESERVED):
            headers.append((name, value))
    key = (record.key or b"").decode()
    return OutgoingMessage(record.value, key, tuple(headers), cc, (), tuple(properties), expiration)


def may_expire(records: Iterable[Record]) -> bool:
    """Whether one of these has an expiration of its own."""
    for record in records:
        if len(record.headers) > 1:
            for name, _ in record.headers:
                if name == EXPIRATION:
                    return True
    return False


def expires_at(record: Record, ttl_ms: int | None) -> int | None:
    """When a message expires that came into its queue at its timestamp, in milliseconds since 1970; None: never."""
    if len(record.headers) > 1 and (own := record.header(EXPIRATION)) is not None:
        ttl_ms = int(own) if ttl_ms is None else min(int(own), ttl_ms)
    return None if ttl_ms is None else record.timestamp + ttl_ms


def deaths_of(record: Record) -> list[dict[str, Any]]:
    """Where the message was a dead letter; the last time comes first."""
    found = record.header(DEATHS)
    deaths: list[dict[str, Any]] = [] if found is None else json.loads(found)
    return deaths
