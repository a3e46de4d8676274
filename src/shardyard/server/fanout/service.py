"""What the routes of a coordinator or worker call."""

from collections import defaultdict

from shardyard.fanout.process import FanoutProcess
from shardyard.fanout.worker import Worker
from shardyard.messaging.tokens import Tokens
from shardyard.model import RetryLater
from shardyard.server.fanout.typing import ChannelTypingSender
from shardyard.wire.fanout import ProcessStatus, TableFigures
from shardyard.wire.peers import ChannelTyping


class FanoutService:
    """A coordinator or worker as its callers see it."""

    def __init__(self, process: FanoutProcess, tokens: Tokens, typing: ChannelTypingSender) -> None:
        self.process = process
        self.tokens = tokens
        self._typing = typing

    async def route_typing(self, notice: ChannelTyping) -> int:
        """Tell the messaging servers with online members of the channel. Returns in how many inbox partitions there
        are some. `RetryLater` if the channel is served by another worker."""
        part = self.process.part
        partitions = part.lookup(notice.channel) if isinstance(part, Worker) else None
        if partitions is None:
            raise RetryLater(
                f"this worker does not serve channel {notice.channel!r} now: ask the owner of its partition"
            )
        await self._typing.send(notice, partitions)
        return len(partitions)

    def status(self) -> ProcessStatus:
        process = self.process
        partitions: defaultdict[str, list[int]] = defaultdict(list)
        for partition in sorted(process.part.owned if process.part is not None else ()):
            partitions[partition.topic].append(partition.index)
        return ProcessStatus(
            process.node.name,
            process.role,
            process.progress.state.mode,
            process.progress.state.phase,
            process.is_ready,
            None if process.plan is None else process.plan.kind,
            partitions,
            self._table(),
        )

    def _table(self) -> TableFigures | None:
        part = self.process.part
        if not isinstance(part, Worker):
            return None
        size = part.table.size()
        return TableFigures(size.bytes, size.channels, size.users, size.online, size.memberships)
