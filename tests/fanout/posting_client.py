"""A client that posts to channels, and keeps a ledger."""

import asyncio

from shardyard.client import MessagingClient
from shardyard.client.messaging import Posted
from shardyard.model import Closed, NotAcknowledged, Unsupported
from tests.messaging.ledger import Sending
from tests.messaging.library_client import LibraryClient


class PostingClient(LibraryClient):
    """One client of a user, which is closed and opened again from its position."""

    async def join(self, channel: str) -> None:
        """Join a channel, retrying until it is acknowledged."""
        self._ledger.joining[channel].add(self.notes.user)
        while True:
            await self._opened.wait()
            if self._client is None:
                continue
            try:
                await self._client.join(channel)
            except Unsupported as error:  # the server has not seen the topics that the coordinator created
                self.notes.note(f"joining {channel} is retried: {error}")
                await asyncio.sleep(0.2)
                continue
            except (NotAcknowledged, Closed) as error:
                self.notes.note(f"joining {channel} is retried: {error}")
                continue
            self._ledger.members[channel].add(self.notes.user)
            self.notes.note(f"has joined {channel}")
            return

    async def post(self, channels: list[str], padding: str) -> None:
        """Post to these channels without waiting for answers."""
        await self.send(channels, padding)

    async def page_through(self, channel: str, limit: int) -> list[tuple[int, str]]:
        """All posts of a channel, newest first, as (id, text)."""
        await self._opened.wait()
        if self._client is None:
            return []
        found: list[tuple[int, str]] = []
        before: str | None = None
        while True:
            page = await self._client.posts(channel, before=before, limit=limit)
            found += [(int(post.id), post.text) for post in page.posts]
            if not page.more:
                return found
            before = page.posts[-1].id

    def _receive(self, event: object) -> None:
        if isinstance(event, Posted):
            self.notes.received(event.id, event.sender, event.channel, event.text)
        else:
            super()._receive(event)

    async def _submit(
        self,
        client: MessagingClient,
        sending: Sending,
        number: int | None,
        timeout: float | None,  # noqa: ASYNC109 it is that of the client
    ) -> str:
        return (await client.post(sending.recipient, sending.text, number=number, timeout=timeout)).id
