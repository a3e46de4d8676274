"""Where the lines go that a user enters: to another user, or to a channel."""

from typing import Protocol

from shardyard.client.messaging import Message, MessagingClient, Posted, Sent


class Place(Protocol):
    """A conversation or a channel."""

    @property
    def opening(self) -> str:
        """What is shown when it is opened."""
        ...

    async def page(self, before: str | None, limit: int) -> tuple[list[Message] | list[Posted], bool]:
        """Messages, newest first, and whether there are older ones. `before`: only those before this id."""
        ...

    async def send(self, text: str) -> Sent:
        """Returns when it is durable."""
        ...


class WithUser:
    """The conversation with another user."""

    def __init__(self, client: MessagingClient, peer: str) -> None:
        self.peer = peer
        self._client = client

    @property
    def opening(self) -> str:
        return f"you talk to {self.peer}"

    async def page(self, before: str | None, limit: int) -> tuple[list[Message], bool]:
        page = await self._client.history(self.peer, before=before, limit=limit)
        return page.messages, page.more

    async def send(self, text: str) -> Sent:
        return await self._client.send(self.peer, text)


class InChannel:
    """A channel that the user has joined."""

    def __init__(self, client: MessagingClient, channel: str) -> None:
        self.channel = channel
        self._client = client

    @property
    def opening(self) -> str:
        return f"you are in #{self.channel}"

    async def page(self, before: str | None, limit: int) -> tuple[list[Posted], bool]:
        page = await self._client.posts(self.channel, before=before, limit=limit)
        return page.posts, page.more

    async def send(self, text: str) -> Sent:
        return await self._client.post(self.channel, text)


async def joined(client: MessagingClient, name: str) -> InChannel:
    """A channel, joined if the user is not a member yet."""
    channel = channel_name(name)
    await client.join(channel)
    return InChannel(client, channel)


def channel_name(name: str) -> str:
    """The name of a channel as a user writes it: `#general` is general."""
    return name.removeprefix("#")
