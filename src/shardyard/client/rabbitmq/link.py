"""A connection to RabbitMQ that is opened again when it was lost."""

import asyncio

from aio_pika.abc import AbstractChannel, AbstractConnection

from shardyard.client.rabbitmq.errors import loss_ignored, translated
from shardyard.client.rabbitmq.questions import connect
from shardyard.model import Closed, InvalidCall


class Link:
    """A channel with a connection of its own. Both are opened again after one of them was closed: RabbitMQ says no by
    closing a channel, and clients get into trouble if they go on with the connection then."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._opening = asyncio.Lock()
        self._connection: AbstractConnection | None = None
        self._channel: AbstractChannel | None = None
        self._is_open: bool | None = None
        """None before it is opened at first."""

    def open(self) -> None:
        """From now on it connects when it is used."""
        self._is_open = True

    async def close(self) -> None:
        """It connects no more."""
        async with self._opening:
            self._is_open = False
            await self._disconnect()

    async def channel(self) -> AbstractChannel:
        """The channel, on which publishes are confirmed. `RetryLater` while RabbitMQ can't be reached."""
        return (await self._both())[1]

    async def connection(self) -> AbstractConnection:
        """The connection, for channels that RabbitMQ has no reason to close."""
        return (await self._both())[0]

    async def _both(self) -> tuple[AbstractConnection, AbstractChannel]:
        async with self._opening:
            if self._is_open is None:
                raise InvalidCall("the client is not open: enter it by `async with` first")
            if not self._is_open:
                raise Closed("the client")
            if self._connection is None or self._channel is None or self._channel.is_closed:
                await self._disconnect()
                self._connection = await connect(self._url)
                with translated():
                    self._channel = await self._connection.channel(publisher_confirms=True, on_return_raises=False)
            return self._connection, self._channel

    async def _disconnect(self) -> None:
        if self._connection is not None:
            with loss_ignored():
                await self._connection.close()
