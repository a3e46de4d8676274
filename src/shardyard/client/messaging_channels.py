"""What a messaging client does with channels: joining, posting, and reading what was posted."""

from shardyard.client.messaging_checks import (
    checked_before,
    checked_channel,
    checked_message,
    checked_number,
    checked_page_size,
)
from shardyard.client.messaging_link import Link
from shardyard.wire.messaging import (
    Channels,
    Done,
    GetChannels,
    GetPosts,
    Join,
    Leave,
    Post,
    Posts,
    Sent,
    TypingIn,
)


class ChannelCalls:
    """The calls of `MessagingClient` that concern channels.

    A server that has no channels, or where nobody forwards posts, refuses these calls: the error says what to do.
    """

    _timeout: float

    @property
    def _opened(self) -> Link:
        raise NotImplementedError

    async def join(self, channel: str) -> None:
        """Join a channel; it exists as soon as somebody joins. Returns when that is durable: everything that is posted
        from then on is delivered. Joining a channel twice changes nothing."""
        checked_channel(channel)
        await self._opened.calls.ask(
            f"joining {channel!r}", lambda number: Join(number, channel), Done, self._timeout, ("member", channel)
        )

    async def leave(self, channel: str) -> None:
        """Leave a channel. Returns when that is durable. Leaving a channel that the user is not in changes nothing."""
        checked_channel(channel)
        await self._opened.calls.ask(
            f"leaving {channel!r}", lambda number: Leave(number, channel), Done, self._timeout, ("member", channel)
        )

    async def post(
        self,
        channel: str,
        text: str,
        *,
        number: int | None = None,
        timeout: float | None = None,  # noqa: ASYNC109 it is part of what the error means
    ) -> Sent:
        """Send a message to all members of a channel, of which the user has to be one. Returns when it is durable.

        What is posted to one channel is stored in the order of the calls. Errors are those of `send`: pass the `number`
        of `NotAcknowledged` to post the same again, which is then stored once."""
        checked_channel(channel)
        checked_message(text)
        return await self._opened.calls.store(
            f"the post to {channel!r}",
            lambda given: Post(given, channel, text),
            ("post", channel),
            self._timeout if timeout is None else timeout,
            checked_number(number),
            is_post=True,
        )

    async def typing_in(self, channel: str) -> None:
        """Show the members of a channel that this user is typing. It is dropped if there is no connection."""
        self._opened.send(TypingIn(checked_channel(channel)))

    async def posts(self, channel: str, *, before: str | None = None, limit: int = 50) -> Posts:
        """What was posted to a channel that the user has joined, newest first. `before`: only older posts than the one
        with this id."""
        checked_channel(channel)
        before, limit = checked_before(before), checked_page_size(limit)
        return await self._opened.calls.ask(
            f"the posts of {channel!r}", lambda number: GetPosts(number, channel, before, limit), Posts, self._timeout
        )

    async def channels(self, *, after: str | None = None, limit: int = 50) -> Channels:
        """The channels that the user has joined, in the order of their names. `after`: only those that come after this
        name, which is the last one of the page before."""
        after, limit = None if after is None else checked_channel(after), checked_page_size(limit)
        return await self._opened.calls.ask(
            "the list of channels", lambda number: GetChannels(number, after, limit), Channels, self._timeout
        )
