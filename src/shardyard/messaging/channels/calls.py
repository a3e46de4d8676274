"""What clients, other servers and administrators ask of channels."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from shardyard.groups import Node
from shardyard.messaging.channels.channels import Channels, absent
from shardyard.messaging.channels.posts import Posts
from shardyard.messaging.config import MessagingConfig
from shardyard.messaging.history.channel_port import ChannelHistory
from shardyard.messaging.session import Session, State
from shardyard.messaging.snowflakes import LeasedSnowflakes
from shardyard.model import Denied, Fence, Record, Stamp
from shardyard.runtime.metrics import CHANNEL_POSTS
from shardyard.wire import messaging as wire
from shardyard.wire.channels import change

if TYPE_CHECKING:
    from shardyard.messaging.owned import OwnedPartition

ChannelCall = wire.Post | wire.Join | wire.Leave
ChannelQuestion = wire.GetPosts | wire.GetChannels


class ChannelCalls:
    """Carries out calls about channels. They raise `Unsupported` as long as there are none."""

    def __init__(
        self,
        channels: Channels,
        node: Node,
        ids: LeasedSnowflakes,
        history: ChannelHistory | None,
        config: MessagingConfig,
    ) -> None:
        self._channels = channels
        self._clock = node.clock
        self._ids = ids
        self._history = history
        self._config = config
        self._posts = None if history is None else Posts(node, channels.events, ids, history)

    async def store(self, session: Session, owned: "OwnedPartition", call: ChannelCall) -> wire.Sent | wire.Done:
        """Carry out a call of a client. Returns when that is durable."""
        user, channel = session.user, call.channel
        if not isinstance(call, wire.Post):
            self._channels.require(owned)
            await self.change_member(channel, user, joined=isinstance(call, wire.Join), fence=owned.fence)
            return wire.Done(call.number)
        await self._check_member(owned, user, channel)
        deadline = self._clock.monotonic() + self._config.store_seconds
        event, duplicate = await self._require_posts().store(
            channel,
            call.text,
            sender=user,
            device=session.device,
            number=call.number,
            stamp=Stamp(f"{len(user)}:{user}/{session.device}", call.number),
            fence=owned.fence,
            deadline=deadline,
        )
        CHANNEL_POSTS.add()
        return wire.Sent(call.number, str(event.id), event.at, duplicate)

    async def look_up(self, owned: "OwnedPartition", user: str, frame: ChannelQuestion) -> wire.Posts | wire.Channels:
        """A page of a channel, or the user's channels."""
        if isinstance(frame, wire.GetPosts):
            await self._check_member(owned, user, frame.channel)
            before = None if frame.before is None else wire.number_of(frame.before)
            page = await self._require_posts().page(frame.channel, before, frame.limit)
            return wire.Posts(frame.number, list(page.posts), page.more)
        names = sorted(self._channels.require(owned).members.channels_of(user))
        found = [name for name in names if frame.after is None or name > frame.after]
        return wire.Channels(frame.number, found[: frame.limit], len(found) > frame.limit)

    def typing(self, session: Session, owned: "OwnedPartition", channel: str) -> None:
        """Tell the other members who are online."""
        if owned.channels is not None and channel in owned.channels.members.channels_of(session.user):
            self._channels.typing.send(
                self._channels.members.partition_of(channel).index, channel, session.user, session.device
            )

    def notify_typing(self, channel: str, sender: str) -> None:
        """A member of a channel is typing: tell the members here, except the sender."""
        frame = wire.IsTypingIn(channel, sender)
        for owned in self._channels.partitions:
            if owned.channels is None or owned.ended:
                continue
            for user in owned.channels.members.users_of(channel):
                if user != sender:
                    for session in owned.sessions_of(user):
                        if session.state is State.OPEN:
                            session.notify(frame)

    # Administration

    async def change_member(self, channel: str, user: str, *, joined: bool, fence: Fence | None = None) -> None:
        """Let a user join or leave a channel. Returns when that is durable, and this server knows it."""
        running = self._channels.require_running()
        record = Record(str(self._ids.next()), channel.encode(), change(user, added=joined), (), 0)
        deadline = self._clock.monotonic() + self._config.store_seconds
        appended = await self._channels.members.append(channel, (record,), deadline=deadline, fence=fence)
        await running.follower.catch_up(appended.partition.index, appended.first.offset + 1)

    async def post(
        self, channel: str, text: str, *, sender: str = "", id_: int | None = None
    ) -> tuple[wire.Posted, bool]:
        """Post to a channel from outside. Returns the post, and whether one of the same id was stored before."""
        self._channels.require_running()
        deadline = self._clock.monotonic() + self._config.store_seconds
        event, duplicate = await self._require_posts().store(channel, text, sender=sender, id_=id_, deadline=deadline)
        CHANNEL_POSTS.add()
        return wire.Posted(str(event.id), channel, event.sender, event.text, event.at), duplicate

    async def members(self, channel: str, after: str, limit: int) -> tuple[Sequence[str], bool]:
        """Members of a channel, as far as the history knows, and whether there are more."""
        self._channels.require_running()
        if self._history is None:
            raise absent()
        page = await self._history.members_of(channel, after=after, limit=limit)
        return page.members, page.more

    # Details

    def _require_posts(self) -> Posts:
        if self._posts is None:
            raise absent()
        return self._posts

    async def _check_member(self, owned: "OwnedPartition", user: str, channel: str) -> None:
        """`Denied` unless the user has joined the channel. What others have changed just now counts."""
        members = self._channels.require(owned).members
        if channel in members.channels_of(user):
            return
        await self._channels.require_running().follower.catch_up(self._channels.members.partition_of(channel).index)
        if channel not in members.channels_of(user):
            raise Denied(f"{user!r} is not a member of the channel {channel!r}: join it first")
