"""Questions to RabbitMQ whose answer may be no.

RabbitMQ answers such a question by closing the channel, and clients get into trouble if they go on with the connection
then. So each question has a connection of its own, which ends with the first no.
"""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator

import aio_pika
from aio_pika.abc import AbstractChannel, AbstractConnection
from aio_pika.exceptions import (
    AMQPConnectionError,
    AuthenticationError,
    ChannelNotFoundEntity,
    InvalidFrameError,
    ProbableAuthenticationError,
)
from aiormq.exceptions import ChannelLockedResource

from shardyard.client.rabbitmq.errors import translated
from shardyard.model import Denied, RetryLater
from shardyard.model.url import without_password

HEARTBEAT_SECONDS = 10
"""After twice this time without a sign of life, RabbitMQ takes a client for dead, and its consumers are replaced."""
ANSWER_SECONDS = 30.0
LOCK_SECONDS = (0.005, 0.05)
"""Between two attempts to get a lock, at random."""


async def connect(url: str) -> AbstractConnection:
    """A connection; `RetryLater` if RabbitMQ can't be reached, `Denied` if it does not let this user in."""
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            return await aio_pika.connect(url, heartbeat=HEARTBEAT_SECONDS)
    except (AuthenticationError, ProbableAuthenticationError) as error:
        where = without_password(url)
        raise Denied(f"RabbitMQ at {where} refused the user or the password: correct them in the address") from error
    except InvalidFrameError as error:
        where = without_password(url)
        raise Denied(
            f"RabbitMQ at {where} refused the virtual host, which is the path of the address: check that it exists, "
            "and that the user may use it"
        ) from error
    except (OSError, AMQPConnectionError) as error:
        why = str(error) or f"no answer within {ANSWER_SECONDS:g} s"
        raise RetryLater(f"RabbitMQ could not be reached: {why}; check the address, and that it runs") from error


@contextlib.asynccontextmanager
async def asking(url: str) -> AsyncIterator[AbstractChannel]:
    """A channel, for some questions up to the first no, which is raised as the error of the API that it means."""
    with translated():
        async with asyncio.timeout(ANSWER_SECONDS):
            connection = await connect(url)
            try:
                yield await connection.channel(publisher_confirms=False)
            finally:
                await connection.close()


async def name_of(channel: AbstractChannel, queue: str) -> str | None:
    """The name of a queue as RabbitMQ knows it; None if there is none, and no more questions then."""
    under = await channel.get_underlay_channel()
    try:
        return str((await under.queue_declare(queue, passive=True)).queue)
    except ChannelNotFoundEntity:
        return None


async def is_taken(url: str, queue: str) -> bool:
    """Whether there is a queue of that name, also one that belongs to another connection."""
    async with asking(url) as channel:
        try:
            return await name_of(channel, queue) is not None
        except ChannelLockedResource:
            return True


@contextlib.asynccontextmanager
async def locked(url: str, queue: str) -> AsyncIterator[AbstractChannel]:
    """A channel, while nobody else has the lock of that name. A queue that is declared exclusive is the lock: it goes
    with its connection, however that ends."""
    while True:
        async with asking(url) as channel:
            try:
                await channel.declare_queue(queue, exclusive=True)
            except ChannelLockedResource:
                pass
            else:
                yield channel
                return
        await asyncio.sleep(random.uniform(*LOCK_SECONDS))
