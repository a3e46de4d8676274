"""Loading the channels of users who connect, for many of them at a time."""

import asyncio
import logging
from typing import TYPE_CHECKING

from shardyard.groups import Node
from shardyard.messaging.channels.following import MembersFollower
from shardyard.messaging.channels.members import LocalMembers
from shardyard.messaging.history.channel_materialiser import GROUP
from shardyard.messaging.history.channel_port import ChannelHistory
from shardyard.model import PartitionOutOfRange, RetryLater, ShardyardError, UnknownTopic, WrongEpoch

if TYPE_CHECKING:
    from collections.abc import Sequence

_log = logging.getLogger(__name__)

USERS_AT_A_TIME = 500
LOOK_SECONDS = 0.05
"""How often to look whether the history has caught up."""

_Waiting = tuple[str, LocalMembers, "asyncio.Future[None]"]


class MembershipLoader:
    """Loads from the history, and adds what was followed since: everything that was changed before `load` was called.
    Those who come while it loads are loaded together."""

    def __init__(self, node: Node, history: ChannelHistory, follower: MembersFollower, wait_seconds: float) -> None:
        """`wait_seconds`: how long a history is waited for that is too far behind."""
        self._node = node
        self._history = history
        self._follower = follower
        self._wait_seconds = wait_seconds
        self._covered = list(follower.recent.firsts)
        """For each partition of `members`: the history has everything before this offset."""
        self._waiting: list[_Waiting] = []
        self._task: asyncio.Task[None] | None = None

    async def load(self, user: str, members: LocalMembers) -> None:
        """Load the user's channels, unless they are known. `RetryLater` if the history can't be read now."""
        if members.knows(user):
            return
        loaded: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((user, members, loaded))
        if self._task is None:
            self._task = asyncio.create_task(self._load_all(), name="memberships")
        await loaded

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        for _, _, loaded in self._waiting:
            if not loaded.done():
                loaded.set_exception(RetryLater("this server has no channels any more"))

    async def _load_all(self) -> None:
        try:
            while self._waiting:
                some = self._waiting[:USERS_AT_A_TIME]
                try:
                    await self._load(some)
                except ShardyardError as error:
                    _fail(some, error)
                except Exception as error:  # noqa: BLE001 nobody awaits this
                    _log.exception("the channels of %d users could not be loaded", len(some))
                    _fail(some, RetryLater(f"the user's channels could not be loaded: {error}"))
                del self._waiting[: len(some)]
        finally:
            self._task = None

    async def _load(self, some: "Sequence[_Waiting]") -> None:
        await self._catch_up()
        recent = self._follower.recent
        found = None
        while found is None or not self._is_covered():  # what is remembered has become less while it was read
            await self._wait_for_history()
            found = await self._history.channels_of(list({user for user, _, _ in some}))
        for user, members, loaded in some:
            if not members.knows(user):
                members.load(user, recent.applied_to(user, set(found.get(user, ()))))
            if not loaded.done():
                loaded.set_result(None)

    async def _catch_up(self) -> None:
        """Follow everything that was changed before. A server that has just started may not have read yet what a client
        joined elsewhere; without it, the client would miss the posts that were stored since, and not be told so."""
        try:
            await self._follower.catch_up_with_all()
        except (UnknownTopic, WrongEpoch, PartitionOutOfRange) as error:
            raise RetryLater(f"the channels are being created anew: try again ({error})") from None

    def _is_covered(self) -> bool:
        """Whether history and memory together have all changes."""
        return all(end >= first for end, first in zip(self._covered, self._follower.recent.firsts, strict=True))

    async def _wait_for_history(self) -> None:
        topic, clock = self._follower.topic, self._node.clock
        deadline = clock.monotonic() + self._wait_seconds
        while not self._is_covered():
            rows = await self._node.transactions.read(lambda tx: tx.ownerships(GROUP))
            committed = {row.partition: row.committed for row in rows if row.committed is not None}
            for index, partition in enumerate(topic):
                known = committed.get(partition)
                if known is not None and known.epoch == topic.epoch:
                    self._covered[index] = max(self._covered[index], known.offset)
            if self._is_covered():
                return
            if clock.monotonic() > deadline:
                raise RetryLater("the history of memberships is too far behind: try again later")
            await clock.sleep(LOOK_SECONDS)


def _fail(some: "Sequence[_Waiting]", error: ShardyardError) -> None:
    for _, _, loaded in some:
        if not loaded.done():
            loaded.set_exception(error)
