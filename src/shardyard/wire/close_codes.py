"""The codes with which a server closes a WebSocket connection, and what each of them asks of the client."""

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
    TOKEN_EXPIRED = 4010
    """The client's access token has expired: get a new one, then reconnect. This and the others with
    a 1 as the third digit are codes of messaging servers."""
    TOO_MANY_CONNECTIONS = 4011
    """The user has too many clients connected, or the server too many connections."""
    REPLACED = 4012
    """The same client has connected again."""
    UNAVAILABLE = 4013
    """The server could not store a message, or find out what the client missed, for too long."""
    DRAINING = 4100
    """The broker is about to stop."""
    NOT_HERE = 4110
    """Another messaging server serves this user: the frame `elsewhere` before it says which."""
    MOVED = 4111
    """The user's partition has moved to another messaging server: likewise."""
    MALFORMED = 4200
    """A message was not a valid array of frames."""
    WRONG_TOKEN = 4210
    """The access token is not valid."""
    NO_HELLO = 4211
    """The first frame was not `hello`, or a later one was."""


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
