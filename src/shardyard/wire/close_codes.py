"""The codes with which a broker closes a WebSocket connection, and what each of them asks of the client."""

from enum import Enum, IntEnum


class CloseCode(IntEnum):
    """Why a connection is closed. Each hundred asks the same of the client; see `Advice`."""

    IDLE = 4000
    """Nothing came from the client for a while, not even a ping."""
    NOT_READING = 4001
    """The client did not read what was sent to it."""
    STALLED = 4002
    """The client began a message and did not go on with it."""
    OVERLOADED = 4003
    """The broker has too many messages in memory."""
    DRAINING = 4100
    """The broker is about to stop."""
    MALFORMED = 4200
    """A message was not a valid array of frames."""


class Advice(Enum):
    """What a client does when its connection was closed."""

    RECONNECT = "reconnect"
    """To the same broker or another one, with back-off."""
    GO_ELSEWHERE = "go elsewhere"
    """To another broker if there is one."""
    GIVE_UP = "give up"
    """The same would happen again: the client has a bug, or is too old for this broker."""


_STANDARD = {
    1001: Advice.GO_ELSEWHERE,  # a server goes away
    1002: Advice.GIVE_UP,  # not WebSocket
    1003: Advice.GIVE_UP,  # text instead of binary
    1007: Advice.GIVE_UP,  # text that is no UTF-8
    1009: Advice.GIVE_UP,  # too large
    1012: Advice.GO_ELSEWHERE,  # a server restarts
}
"""Of codes that proxies and WebSocket libraries send."""


def advice(code: int) -> Advice:
    """What to do when a connection was closed with this code. Unknown codes, and no code at all, mean to reconnect."""
    if 4100 <= code < 4200:
        return Advice.GO_ELSEWHERE
    if 4200 <= code < 4300:
        return Advice.GIVE_UP
    return _STANDARD.get(code, Advice.RECONNECT)
