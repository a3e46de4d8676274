"""Publishing to exchanges: what comes at the same time travels together, in the order of the calls."""

import asyncio
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from msgspec import structs

from shardyard.client.sharding.connection import Connection
from shardyard.client.sharding.nodes import Nodes
from shardyard.model import Closed, InvalidValue, Malformed, ShardyardError, Stamp, TooLarge
from shardyard.model.checks import check_int64, check_text, encoded_size
from shardyard.model.given import encoded_headers, encoded_value
from shardyard.model.limits import Limits
from shardyard.model.sharding import OutgoingMessage
from shardyard.wire import sharding_frames as frames
from shardyard.wire.errors import error_of
from shardyard.wire.sharding import PROPERTY_PREFIX, RESERVED_PREFIX

MAX_BATCH_MESSAGES = 1_000
MAX_BATCH_BYTES = 1024 * 1024
"""Of what is sent together. A larger message is sent alone."""
_RECORD_BYTES = Limits().record_bytes

Outcome = int | ShardyardError
"""How many queues took a message, or why it was refused."""


@dataclass(slots=True)
class _Unit:
    """Messages of one call, which are sent together."""

    messages: list[OutgoingMessage]
    size: int
    done: "asyncio.Future[list[Outcome]]"


class Lane:
    """The messages that a client publishes to one exchange. One frame is in flight at a time, which keeps their order
    also when it has to be sent again; what comes meanwhile travels in the next one."""

    def __init__(self, nodes: Nodes, exchange: str) -> None:
        self._nodes = nodes
        self._exchange = exchange
        self._producer = uuid.uuid4().hex
        self._sequence = 0
        self._waiting: list[_Unit] = []
        self._sending: asyncio.Task[None] | None = None
        self._is_closed = False

    async def publish(self, messages: list[OutgoingMessage]) -> list[Outcome]:
        """Returns the outcome for each message when they are durable."""
        if len(messages) == 1:
            return await self._put(messages, len(messages[0].body)).done
        units = [self._put(part, size) for part, size in _parts(messages)]
        return [outcome for outcomes in await asyncio.gather(*(unit.done for unit in units)) for outcome in outcomes]

    async def publish_stamped(self, messages: list[OutgoingMessage], stamp: Stamp) -> list[Outcome]:
        """The same, for a producer that numbers its batches itself, over restarts: the same messages under the same
        stamp are stored once. They do not wait for others."""
        outcomes: list[Outcome] = []
        for index, (part, _) in enumerate(_parts(messages)):
            producer = f"{stamp.producer}/{index}" if index else stamp.producer
            call = frames.Publish(self._exchange, frames.MessageColumns.of(part), producer, stamp.sequence)
            outcomes += await self._send(call)
        return outcomes

    def _put(self, messages: list[OutgoingMessage], size: int) -> _Unit:
        if self._is_closed:
            raise Closed("the client")
        unit = _Unit(messages, size, asyncio.get_running_loop().create_future())
        self._waiting.append(unit)
        if self._sending is None or self._sending.done():
            self._sending = asyncio.create_task(self._send_all(), name=f"publishing to {self._exchange}")
        return unit

    async def close(self, *, at_once: bool) -> None:
        """Send what is waiting. `at_once`: fail what is not durable yet."""
        self._is_closed = True
        if self._sending is not None:
            if at_once:
                self._sending.cancel()
            await asyncio.gather(self._sending, return_exceptions=True)
        _settle(self._waiting, Closed("the client"))

    async def _send_all(self) -> None:
        while self._waiting:
            units = self._take()
            messages = [message for unit in units for message in unit.messages]
            self._sequence += 1
            columns = frames.MessageColumns.of(messages)
            call = frames.Publish(self._exchange, columns, self._producer, self._sequence)
            try:
                outcomes = await self._send(call)
            except asyncio.CancelledError:
                _settle(units, Closed("the client"))
                raise
            except Exception as error:  # noqa: BLE001 those who wait get it
                _settle(units, error)
                continue
            at = 0
            for unit in units:
                if not unit.done.done():
                    unit.done.set_result(outcomes[at : at + len(unit.messages)])
                at += len(unit.messages)

    def _take(self) -> list[_Unit]:
        """As much from the front as fits into one frame."""
        count = size = taken = 0
        for unit in self._waiting:
            count, size = count + len(unit.messages), size + unit.size
            if taken and (count > MAX_BATCH_MESSAGES or size > MAX_BATCH_BYTES):
                break
            taken += 1
        units = self._waiting[:taken]
        del self._waiting[:taken]
        return units

    async def _send(self, call: frames.Publish) -> list[Outcome]:
        async def send(connection: Connection) -> frames.Answer:
            return await connection.call(call, self._nodes.response_seconds)

        answer = await self._nodes.run(send)
        if not isinstance(answer, frames.Routed) or len(answer.counts) != len(call.messages):
            raise Malformed("answer", "a publish is answered with a count for each message")
        outcomes: list[Outcome] = list(answer.counts)
        for place, error in answer.refused.items():
            outcomes[place] = error_of(error)
        return outcomes


def _settle(units: list[_Unit], error: Exception) -> None:
    for unit in units:
        if not unit.done.done():
            unit.done.set_exception(error)


def _parts(messages: list[OutgoingMessage]) -> list[tuple[list[OutgoingMessage], int]]:
    """Cut into parts that fit into a frame, with their bytes."""
    parts: list[tuple[list[OutgoingMessage], int]] = []
    part: list[OutgoingMessage] = []
    size = 0
    for message in messages:
        if part and (len(part) == MAX_BATCH_MESSAGES or size + len(message.body) > MAX_BATCH_BYTES):
            parts.append((part, size))
            part, size = [], 0
        part.append(message)
        size += len(message.body)
    return [*parts, (part, size)]


def new_message(
    body: object,
    routing_key: str,
    headers: object,
    cc: Sequence[str],
    bcc: Sequence[str],
    expiration_ms: int | None,
    properties: Mapping[str, str] | None,
    message_id: str | None,
) -> OutgoingMessage:
    """The message of these arguments, checked."""
    value = body if type(body) is bytes else encoded_value(body)
    is_plain = headers == cc == bcc == () and expiration_ms is None and not properties and message_id is None
    if is_plain and len(value) <= _RECORD_BYTES:
        check_routing_key("routing_key", routing_key)
        return OutgoingMessage(value, routing_key)
    given = dict(properties or {})
    if message_id is not None:
        given["message_id"] = message_id
    return checked(
        OutgoingMessage(
            value,
            routing_key,
            encoded_headers(headers) if headers != () else (),
            _texts("cc", cc),
            _texts("bcc", bcc),
            tuple(given.items()),
            expiration_ms,
        )
    )


def checked(message: object) -> OutgoingMessage:
    """The message. `InvalidValue` or `TooLarge` says what is wrong with it."""
    if not isinstance(message, OutgoingMessage):
        raise InvalidValue("message", message, "an OutgoingMessage")
    body: object = message.body
    if not isinstance(body, bytes):
        message = structs.replace(message, body=encoded_value(body))
    check_routing_key("routing_key", message.routing_key)
    size = len(message.body)
    for name, value in encoded_headers(message.headers) if message.headers != () else ():
        if name.startswith((RESERVED_PREFIX, PROPERTY_PREFIX)):
            expected = f"a name that does not begin with {RESERVED_PREFIX!r} or {PROPERTY_PREFIX!r}: those are reserved"
            raise InvalidValue("header", name, expected)
        size += len(name) + len(value)
    for key, text in message.properties:
        check_text("property", key)
        check_text(f"property {key!r}", text)
        size += len(key) + len(text)
    for keys in (message.cc, message.bcc):
        for key in keys:
            check_routing_key("routing key", key)
    if message.expiration_ms is not None:
        check_int64("expiration_ms", message.expiration_ms, at_least=0)
    if size > _RECORD_BYTES:
        raise TooLarge("message in bytes", size, _RECORD_BYTES)
    return message


def check_routing_key(name: str, key: object) -> None:
    """`InvalidValue` unless it is a string, which may be empty."""
    if not isinstance(key, str):
        raise InvalidValue(name, key, "a string")
    encoded_size(name, key)


def _texts(name: str, given: Iterable[str]) -> tuple[str, ...]:
    if given == ():
        return ()
    if isinstance(given, str | bytes) or not isinstance(given, Iterable):
        raise InvalidValue(name, given, "a list of routing keys")
    return tuple(given)
