"""Typing notices for channels: from the worker that knows where members are online to their messaging servers."""

from collections.abc import Iterable
from types import TracebackType
from typing import Self

from shardyard.groups import Directory, Node
from shardyard.log.router import current_topic
from shardyard.messaging.peers import Peers
from shardyard.messaging.tokens import Tokens
from shardyard.model import Partition, UnknownTopic
from shardyard.wire.inbox import GROUP, TOPIC
from shardyard.wire.peers import ChannelTyping


class ChannelTypingSender:
    """Sends typing notices to the servers that own some inbox partitions. Nothing is stored or retried: what does not
    arrive is lost."""

    def __init__(self, node: Node, tokens: Tokens) -> None:
        self._node = node
        self._servers = Directory(node, GROUP)
        self._peers = Peers(node.name, tokens)
        self._inbox = TOPIC
        self._catalog_version = -1

    async def __aenter__(self) -> Self:
        await self._servers.__aenter__()
        await self._peers.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._peers.__aexit__(kind, error, trace)
        await self._servers.__aexit__(kind, error, trace)

    async def send(self, notice: ChannelTyping, inbox_partitions: Iterable[int]) -> None:
        """Tell each of the servers once."""
        await self._look_up_inbox()
        owners = [self._servers.owner_of(Partition(self._inbox, index)) for index in inbox_partitions]
        for address in {owner.address for owner in owners if owner is not None and owner.address is not None}:
            self._peers.channel_typing(address, notice)

    async def _look_up_inbox(self) -> None:
        """The name of the topic changes when it is moved."""
        if (version := await self._node.log.catalog_version()) != self._catalog_version:
            try:
                self._inbox = (await current_topic(self._node.log, self._inbox)).name
            except UnknownTopic:
                self._inbox = TOPIC
            self._catalog_version = version
