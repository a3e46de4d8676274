"""Which consumer of a sharded exchange of RabbitMQ is attached to which shard, agreed between all of them.

RabbitMQ's plugin picks a shard for each consumer without a lock, so that consumers that come at the same time end up
uneven, and shards without a consumer are not read. Here consumers agree among themselves, with RabbitMQ's own means:

- A queue that is declared exclusive is a lock: only one connection can have it, and it goes with the connection.
- A durable queue holds one message with the attachments of all consumers, which is read and replaced under the lock.
- Each consumer has an exclusive queue of its own. It shows that the consumer is alive, and receives the new attachments
  when they change.

If the stored attachments are lost, consumers add themselves again.
"""

import asyncio
import contextlib
import logging
import random
import uuid
from collections.abc import Awaitable, Callable, Collection, Sequence
from types import TracebackType
from typing import Self

import msgspec
from aio_pika import DeliveryMode, ExchangeType, Message
from aio_pika.abc import AbstractChannel, AbstractConnection, AbstractIncomingMessage

from shardyard.client.rabbitmq.errors import LOST, loss_ignored
from shardyard.client.rabbitmq.questions import is_taken, locked
from shardyard.model import ShardyardError
from shardyard.placement.spread import Spread, spread

_log = logging.getLogger(__name__)

CHECK_SECONDS = 5.0
"""How often a consumer checks whether the next one is alive, and whether there are other shards."""
_LOST = (*LOST, ShardyardError)
"""What is raised when a connection or a channel is lost, or was before."""


class _Stored(msgspec.Struct, frozen=True):
    """The attachments of all consumers."""

    version: int = 0
    consumers: tuple[str, ...] = ()
    """Their names, in the order in which they came."""
    own: dict[str, str] = {}
    """The shard of each consumer."""
    covered_by: dict[str, str] = {}
    """The consumer of each shard that is nobody's own."""

    def shards_of(self, consumer: str) -> list[str]:
        covered = [shard for shard, reader in self.covered_by.items() if reader == consumer]
        return sorted({*covered, *([self.own[consumer]] if consumer in self.own else [])})

    def spread(self, shards: Collection[str], consumers: tuple[str, ...]) -> Self:
        """With these shards and consumers instead."""
        new = spread(shards, (), consumers, Spread(self.own, self.covered_by))
        own, covered_by = dict(new.own), dict(new.covered_by)
        if (consumers, own, covered_by) == (self.consumers, self.own, self.covered_by):
            return self
        return msgspec.structs.replace(
            self, version=self.version + 1, consumers=consumers, own=own, covered_by=covered_by
        )


_decode = msgspec.json.Decoder(_Stored).decode


class Attachments:
    """The attachment of one consumer, from entering the block to leaving it."""

    def __init__(
        self,
        url: str,
        connection: AbstractConnection,
        exchange: str,
        find_shards: Callable[[], Awaitable[Sequence[str]]],
        apply: Callable[[Sequence[str]], Awaitable[None]],
    ) -> None:
        """`connection`: of the consumer, to RabbitMQ at `url`. `apply` gets the shards of the consumer, at once and
        whenever they change."""
        self._url = url
        self._connection = connection
        self._exchange = exchange
        self._find_shards = find_shards
        self._apply = apply
        self._name = uuid.uuid4().hex
        self._known = _Stored()
        self._mine: list[str] = []
        self._changed = asyncio.Event()
        self._channel: AbstractChannel | None = None
        self._stack = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Self:
        self._channel = channel = await self._connection.channel()
        self._stack.push_async_callback(channel.close)
        queue = await channel.declare_queue(_alive(self._name), exclusive=True)
        changes = await channel.declare_exchange(self._changes, ExchangeType.FANOUT, auto_delete=True)
        await queue.bind(changes)
        await queue.consume(self._notified, no_ack=True)
        await self._update()
        task = asyncio.create_task(self._follow(), name=f"attachment to {self._exchange}")
        self._stack.push_async_callback(_cancel, task)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        lost = self._is_lost
        with loss_ignored():
            await self._stack.aclose()
        if not lost:  # otherwise the others notice by themselves, somewhat later
            with loss_ignored():
                await self._leave()

    @property
    def _is_lost(self) -> bool:
        """Whether the queue is gone that shows that this consumer is alive. The connection itself does not notice that
        RabbitMQ has closed it."""
        return self._channel is None or self._channel.is_closed

    @property
    def _changes(self) -> str:
        """The exchange by which consumers hear of changes."""
        return f"shardyard: changes of {self._exchange}"

    @property
    def _states(self) -> str:
        """The queue with the attachments."""
        return f"shardyard: attachments of {self._exchange}"

    async def _notified(self, message: AbstractIncomingMessage) -> None:
        stored = _decode(message.body)
        if stored.version > self._known.version:
            self._known = stored
            self._changed.set()

    async def _follow(self) -> None:
        """Attach to other shards when the attachment changes; look after the next consumer, and for other shards, now
        and then."""
        while True:
            try:
                async with asyncio.timeout(CHECK_SECONDS * random.uniform(0.8, 1.2)):
                    await self._changed.wait()
            except TimeoutError:
                is_known = False
            else:
                self._changed.clear()
                is_known = self._name in self._known.consumers
            if self._is_lost:  # it must not add itself again: nobody reads its shards
                return
            try:
                await (self._attach() if is_known else self._update())
            except _LOST as error:
                if not self._is_lost:
                    _log.warning("the attachment to %s will be checked again: %s", self._exchange, error)

    async def _update(self) -> None:
        """Correct the attachments, and apply what concerns this consumer."""
        shards = await self._find_shards()
        gone = await self._gone()
        async with self._locked() as channel:
            stored, messages = await self._read(channel)
            names = [name for name in stored.consumers if name not in gone]
            if self._name not in names:
                names.append(self._name)
            self._known = await self._replace(channel, messages, stored, shards, tuple(names))
        await self._attach()

    async def _attach(self) -> None:
        """Read the shards that are this consumer's by what is known."""
        mine = self._known.shards_of(self._name)
        if mine != self._mine:
            self._mine = mine
            await self._apply(mine)

    async def _leave(self) -> None:
        async with self._locked() as channel:
            stored, messages = await self._read(channel)
            shards = {*stored.own.values(), *stored.covered_by}
            names = tuple(name for name in stored.consumers if name != self._name)
            await self._replace(channel, messages, stored, shards, names)

    async def _gone(self) -> set[str]:
        """Those after this consumer, in the order of names, that are not alive, up to the first that is."""
        names = sorted({*self._known.consumers, self._name})
        at = names.index(self._name)
        gone: set[str] = set()
        for name in names[at + 1 :] + names[:at]:
            if await is_taken(self._url, _alive(name)):
                break
            gone.add(name)
        return gone

    def _locked(self) -> contextlib.AbstractAsyncContextManager[AbstractChannel]:
        """A channel, while nobody else changes the attachments."""
        return locked(self._url, f"shardyard: lock of {self._exchange}")

    async def _read(self, channel: AbstractChannel) -> tuple[_Stored, list[AbstractIncomingMessage]]:
        """What is stored, and its messages: one; or none at first, and if it was lost; or several if a consumer died
        while another one took over."""
        queue = await channel.declare_queue(self._states, durable=True)
        messages: list[AbstractIncomingMessage] = []
        while (message := await queue.get(fail=False)) is not None:
            messages.append(message)
        stored = [_decode(message.body) for message in messages]
        return max(stored, key=lambda one: one.version, default=_Stored()), messages

    async def _replace(
        self,
        channel: AbstractChannel,
        messages: list[AbstractIncomingMessage],
        stored: _Stored,
        shards: Collection[str],
        consumers: tuple[str, ...],
    ) -> _Stored:
        """Spread the consumers, store that if it is new, and notify the others. Returns what is stored then."""
        new = stored.spread(shards, consumers)
        if new is stored:
            return stored
        async with channel.transaction():
            body = msgspec.json.encode(new)
            await channel.default_exchange.publish(Message(body, delivery_mode=DeliveryMode.PERSISTENT), self._states)
            for message in messages:
                await message.ack()
            if consumers:  # otherwise the exchange is gone with the last of them
                changes = await channel.get_exchange(self._changes, ensure=False)
                await changes.publish(Message(body), "")
        return new


def _alive(name: str) -> str:
    """The queue that a consumer has for as long as it lives."""
    return f"shardyard: consumer {name}"


async def _cancel(task: "asyncio.Task[None]") -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
