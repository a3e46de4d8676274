"""What a client needs of the connection to one broker, whether it is HTTP or a WebSocket."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import msgspec

from shardyard.runtime.clock import Clock
from shardyard.wire import frames, responses
from shardyard.wire.errors import ErrorResponse, error_of
from shardyard.wire.media import JSON
from shardyard.wire.settings import GroupSettings

HTML = "text/html"
NOT_IMPLEMENTED = 501
"""The one status above 500 that neither a broker nor a proxy gives: of a server that knows only some methods."""
RESPONSE_SECONDS = 15.0
"""The longest time for a response, beyond the time for which the broker was asked to wait."""


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """A request of the HTTP API, as any of the brokers gets it."""

    method: str
    path: str
    body: bytes | None
    headers: Mapping[str, str]
    query: Mapping[str, str]
    wait: float
    """Seconds for which the broker was asked to wait."""
    timeout: float
    """Seconds without a response, beyond that, after which the broker counts as unreachable."""


@dataclass(frozen=True, slots=True)
class HeartbeatAnswer:
    """What a broker says to a heartbeat."""

    settings: GroupSettings | None
    """Of the group; None if the member has these already."""
    version: str
    """Of these settings, for the next heartbeat."""
    assignment: responses.Assignment | None
    """None if a watch tells of its changes."""


class AssignmentWatch(Protocol):
    """Tells of changes of a member's assignment."""

    async def wait(self, seconds: float) -> bool:
        """Return after a change, or after `seconds`. Returns whether there may have been a change. `ConnectionError` if
        the broker can't be reached; then another watch is needed."""

    def close(self) -> None: ...


class Carrier(Protocol):
    """Carries calls to one broker. All of them raise the errors of the broker as they were raised there, and
    `ConnectionError`, with the reason, if it does not answer within `timeout` seconds."""

    @property
    def keeps_order(self) -> bool:
        """Whether publishes of a lane can be in flight at the same time."""

    async def request(self, request: HttpRequest) -> bytes:
        """The body of the response."""

    async def publish(self, call: frames.Publish, timeout: float, lane: object = None) -> responses.Published:  # noqa: ASYNC109
        """Publish. If this carrier keeps order, publishes with the same `lane` are stored in the order of their calls:
        one is refused if the one before it is refused for now, and both are in flight at the same time."""

    async def read(self, call: frames.Read, timeout: float) -> bytes:  # noqa: ASYNC109
        """A `PackedBatch`. `timeout` is beyond the time for which the broker was asked to wait."""

    async def commit(self, call: frames.Commit, timeout: float) -> None: ...  # noqa: ASYNC109
    async def heartbeat(self, call: frames.Heartbeat, timeout: float) -> HeartbeatAnswer: ...  # noqa: ASYNC109
    async def set_fence(self, call: frames.Fence, timeout: float) -> None: ...  # noqa: ASYNC109
    async def span(self, call: frames.Span, timeout: float) -> responses.PartitionSpan: ...  # noqa: ASYNC109
    async def assignment(self, call: frames.Assignment, timeout: float) -> responses.Assignment: ...  # noqa: ASYNC109
    def watch(self, call: frames.Watch, timeout: float, clock: Clock) -> AssignmentWatch: ...


class WrongAnswer(ConnectionError):
    """Raised when an answer is not that of a broker: something else is at its address, or a proxy has answered."""

    def __init__(self, answer: str) -> None:
        """`answer`: what was answered, such as "404 with text/html"."""
        super().__init__(f"it is not a Shardyard broker: it answered {answer}")
        self.answer = answer


def response_body(status: int, body: bytes, media: str = JSON) -> bytes:
    """The body of a response, unless it reports an error. An error of a proxy counts as a broker that can't be
    reached. `media`: the media type of the body; a broker's is never HTML."""
    if status < 400 and media != HTML:
        return body
    try:
        error = error_of(msgspec.json.decode(body, type=ErrorResponse).error)
    except msgspec.DecodeError:
        if status >= 500 and status != NOT_IMPLEMENTED:
            raise ConnectionError(f"status {status}") from None
        raise WrongAnswer(f"{status} with {media}") from None
    raise error
