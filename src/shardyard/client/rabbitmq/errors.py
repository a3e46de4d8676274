"""What RabbitMQ answers, and what its library raises, as the errors of the API."""

import asyncio
import contextlib
import re
from collections.abc import Iterator

from aio_pika.exceptions import AMQPError, ChannelPreconditionFailed
from aiormq.exceptions import ChannelAccessRefused, ChannelLockedResource

from shardyard.model import (
    Conflict,
    Denied,
    ExchangeExists,
    InvalidValue,
    QueueExists,
    RetryLater,
    ShardyardError,
    UnknownExchange,
    UnknownQueue,
)

LOST = (AMQPError, OSError, RuntimeError)
"""What the library raises when a connection or a channel is lost, or was before, and when RabbitMQ says no."""

_MISSING = re.compile(r"no (exchange|queue) '(.*)' in vhost")
_DIFFERENT = re.compile(r"inequivalent arg '(.*)' for (exchange|queue) '(.*)' in vhost .* but current is (.*)")
_UNKNOWN_TYPE = re.compile(r"invalid exchange type '(.*)'")


@contextlib.contextmanager
def translated(advice: str = "try again") -> Iterator[None]:
    """Raise the errors of RabbitMQ's library as those of the API. `advice`: what helps if the connection was lost."""
    try:
        yield
    except LOST as error:
        raise _translation(error, advice) from error
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        # The library cancels those that wait for an answer when RabbitMQ has given no sign of life for too long.
        raise RetryLater(
            f"the connection to RabbitMQ was lost before it answered, and it is not known what it has done: {advice}"
        ) from error


@contextlib.contextmanager
def loss_ignored() -> Iterator[None]:
    """For closing what may be lost already: nothing else needs to be done then."""
    with contextlib.suppress(ShardyardError), translated():
        yield


def unknown_exchange(name: str) -> UnknownExchange:
    """Of a name that no exchange of RabbitMQ has."""
    return UnknownExchange(name, "RabbitMQ has none of that name; declare it there first")


def unknown_queue(name: str) -> UnknownQueue:
    """Of a name that neither a queue nor a sharded exchange of RabbitMQ has."""
    return UnknownQueue(name, "RabbitMQ has none of that name, nor a sharded exchange; declare it there first")


def _translation(error: Exception, advice: str) -> ShardyardError:
    text = str(error)
    if missing := _MISSING.search(text):
        return unknown_exchange(missing[2]) if missing[1] == "exchange" else unknown_queue(missing[2])
    if different := _DIFFERENT.search(text.replace("''", "'")):
        return _exists(*different.groups())
    if unknown := _UNKNOWN_TYPE.search(text):
        expected = "a type that this RabbitMQ has; the plugins rabbitmq_sharding and rabbitmq_consistent_hash_exchange"
        return InvalidValue("type", unknown[1], f"{expected} add x-modulus-hash and x-consistent-hash")
    if isinstance(error, ChannelAccessRefused):
        return Denied(f"RabbitMQ does not allow this: {text}")
    if isinstance(error, ChannelPreconditionFailed | ChannelLockedResource):
        return Conflict(f"RabbitMQ refuses this: {text}")
    return RetryLater(f"the connection to RabbitMQ was lost ({text or type(error).__name__}): {advice}")


def _exists(argument: str, kind: str, name: str, current: str) -> ShardyardError:
    if kind == "exchange":
        return ExchangeExists(name, f"with {argument} {current}")
    return QueueExists(name, f"declared with {argument} {current}: declare it so, or delete it")
