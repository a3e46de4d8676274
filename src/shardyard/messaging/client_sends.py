"""What a client sends that is being stored."""

import asyncio
import logging
from collections import deque
from typing import TYPE_CHECKING

from shardyard.messaging.outgoing import Outgoing
from shardyard.model import SEQUENCE_WINDOW, Fenced, RetryLater, ShardyardError
from shardyard.wire import messaging as wire
from shardyard.wire.close_codes import CloseCode
from shardyard.wire.errors import error_body

if TYPE_CHECKING:
    from shardyard.messaging.session import Session

_log = logging.getLogger(__name__)

MOVE_SECONDS = 10.0
"""After which a client whose partition has moved is disconnected at the latest."""


class ClientSends:
    """Everything for one recipient is stored in order, one after the other."""

    __slots__ = ("_held_back", "_lanes", "_numbers", "_session", "unanswered")

    def __init__(self, session: "Session") -> None:
        self._session = session
        self._lanes: dict[str, deque[Outgoing]] = {}
        """By recipient. The first of each is being stored, once the session is open."""
        self._numbers: set[int] = set()
        """Of what is in the lanes."""
        self._held_back: deque[Outgoing] = deque()
        """What is stored later: the log knows a number that was sent before only within a window."""
        self.unanswered = 0

    @property
    def is_storing(self) -> bool:
        return bool(self._lanes)

    def submit(self, outgoing: Outgoing) -> None:
        """Store it after everything that the client sent to the same recipient before."""
        self.unanswered += 1
        if self._held_back or not self._is_in_window(outgoing):
            self._held_back.append(outgoing)
        else:
            self._queue_up(outgoing)

    def start(self) -> None:
        """The session is open: begin to store what has waited for that."""
        for lane in list(self._lanes.values()):
            self._session.store(lane[0])

    def stored(self, outgoing: Outgoing, answer: object) -> None:
        """It is durable."""
        self._session.answer(answer)
        self._next(outgoing)

    def failed(self, outgoing: Outgoing, error: Exception) -> None:
        """It could not be stored. If the client can send it again elsewhere or later, it is disconnected."""
        session, lane = self._session, self._lanes.get(outgoing.recipient)
        if isinstance(error, Fenced):
            _log.debug("%s belongs to another server now", session.user)
            self._lanes.pop(outgoing.recipient, None)  # the client gets this error, and sends again there
            asyncio.get_running_loop().call_later(MOVE_SECONDS, session.close, CloseCode.MOVED, "")
        elif isinstance(error, RetryLater):
            session.close(CloseCode.UNAVAILABLE, str(error))
        elif isinstance(error, ShardyardError):
            body = error_body(error)
            session.answer(wire.Refused(outgoing.number, body.code, body.message))
            if lane is not None:
                self._next(outgoing)
        else:
            _log.error("a message of %s could not be stored", session.user, exc_info=error)
            session.close(CloseCode.UNAVAILABLE, "the message could not be stored")

    def _is_in_window(self, outgoing: Outgoing) -> bool:
        if not outgoing.is_numbered or not self._numbers:
            return True
        return outgoing.number - min(self._numbers) < SEQUENCE_WINDOW

    def _queue_up(self, outgoing: Outgoing) -> None:
        if outgoing.is_numbered:
            self._numbers.add(outgoing.number)
        lane = self._lanes.get(outgoing.recipient)
        if lane is not None:
            lane.append(outgoing)
            return
        self._lanes[outgoing.recipient] = deque([outgoing])
        if self._session.is_open:  # else `start` does
            self._session.store(outgoing)

    def _next(self, outgoing: Outgoing) -> None:
        """It needs no more to be stored: go on with its lane, and with those that are in the window now."""
        lane = self._lanes.get(outgoing.recipient)
        if lane and lane[0] is outgoing:
            lane.popleft()
        self.unanswered -= 1
        if outgoing.is_numbered:
            self._numbers.discard(outgoing.number)
        if not lane or self._session.is_closed:
            self._lanes.pop(outgoing.recipient, None)
        else:
            self._session.store(lane[0])
        while self._held_back and self._is_in_window(self._held_back[0]):
            self._queue_up(self._held_back.popleft())
