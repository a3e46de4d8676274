"""A subscription to a queue at its owner, on one connection."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Literal

from shardyard.client.sharding.connection import Connection
from shardyard.model import Malformed
from shardyard.wire import sharding_frames as frames
from shardyard.wire.errors import error_of

_log = logging.getLogger(__name__)

Outcome = Literal["ack", "requeue", "discard", "return"]
"""What becomes of a delivery. `return`: the program never got it."""


class Feed:
    """Gets the deliveries of a queue, and settles them: what is settled in the same turn of the event loop travels in
    one frame. When it is lost, so are its deliveries; the node delivers them again, perhaps to another consumer."""

    def __init__(
        self,
        queue: str,
        connection: Connection,
        call: frames.Subscribe | frames.Get,
        deliver: Callable[["Feed", frames.Deliveries], None],
    ) -> None:
        """`deliver`: gets what is delivered. `ConnectionError` if the connection is lost."""
        self.queue = queue
        self.no_ack = call.no_ack
        self.ended = asyncio.Event()
        """No more deliveries follow."""
        self.error: Exception | None = None
        """Why it was lost."""
        self.unsettled: dict[int, None] = {}
        """The tags of deliveries that are not acknowledged, in their order."""
        self._connection = connection
        self._deliver = deliver
        self._outcome: Outcome = "ack"
        self._tags: list[int] = []
        """What is settled next, with this outcome."""
        self._is_cancelled = False
        self._number = connection.open(call, self._receive, self._lose)

    @property
    def is_lost(self) -> bool:
        return self.error is not None

    @property
    def is_done(self) -> bool:
        """Whether no more deliveries follow, and all that came are settled or lost."""
        return self.ended.is_set() and not self.unsettled and not self._tags

    def settle(self, tags: Sequence[int], outcome: Outcome) -> None:
        """Settle deliveries; nothing happens to those of a feed that is lost, which come again."""
        for tag in tags:
            self.unsettled.pop(tag, None)
        if self.is_lost or self.no_ack:
            return
        if self._tags and outcome != self._outcome:
            self.flush()
        if not self._tags:
            asyncio.get_running_loop().call_soon(self.flush)
        self._outcome = outcome
        self._tags += tags

    def flush(self) -> None:
        """Send what was settled."""
        if not self._tags or self.is_lost:
            return
        tags, self._tags = self._tags, []
        if self._outcome == "ack":
            call: frames.Ack | frames.Nack = frames.Ack(self._number, tags)
        else:
            is_failed = self._outcome != "return"
            call = frames.Nack(self._number, tags, self._outcome != "discard", failed=is_failed)
        self._connection.notify(call, self._refused)
        self._forget_if_done()

    def cancel(self) -> None:
        """Ask for no more deliveries. Those that came can still be settled."""
        if not self._is_cancelled:
            self._is_cancelled = True
            self._connection.send(self._number, frames.Cancel())

    def _receive(self, answer: frames.Answer) -> None:
        if isinstance(answer, frames.Deliveries):
            if not self.no_ack:
                self.unsettled.update(dict.fromkeys(answer.tags))
            self._deliver(self, answer)
        elif isinstance(answer, frames.Ended):
            self.complete()
        elif isinstance(answer, frames.Failed):
            self._connection.forget(self._number)
            self._lose(error_of(answer.error))
        else:
            self._connection.forget(self._number)
            self._lose(Malformed("answer", "a subscription is answered with deliveries"))

    def complete(self) -> None:
        """No more deliveries follow: it was cancelled, or it is that of a `Get`, which was answered."""
        self.ended.set()
        self._forget_if_done()

    def _forget_if_done(self) -> None:
        if self.is_done:
            self._connection.forget(self._number)

    def _refused(self, error: Exception) -> None:
        """The node did not take what was settled: it has lost these deliveries, and they come again."""
        _log.debug("deliveries of %s were not settled: %s", self.queue, error)

    def _lose(self, error: Exception) -> None:
        self.error = error
        self.unsettled.clear()
        self._tags.clear()
        self.ended.set()
