"""Bodies and queries of the HTTP calls about channels on a messaging server. No I/O."""

from typing import Annotated

from msgspec import Meta, Struct

from shardyard.wire.inbox import User
from shardyard.wire.messaging import Id

MAX_MEMBERS = 1_000
"""Of one page."""


class NewEvent(Struct, frozen=True, forbid_unknown_fields=True):
    """The body of `POST /v1/channels/{channel}/events`."""

    text: str
    sender: User | None = None
    """Whom clients show as the sender."""
    id: Id | None = None
    """A call with the same id again is the same event again, and is stored once. Without it, the server chooses one."""


class EventStored(Struct, frozen=True):
    """The answer to it."""

    channel: str
    id: str
    at: int
    """In milliseconds since 1970."""
    duplicate: bool
    """It had been stored before."""


class MembersQuery(Struct, frozen=True):
    """The query of `GET /v1/channels/{channel}/members`."""

    after: Annotated[str, Meta(max_length=128)] = ""
    """Only members whose names come after this one."""
    limit: Annotated[int, Meta(ge=1, le=MAX_MEMBERS)] = 100


class ChannelMembers(Struct, frozen=True):
    """The answer to it: members in the order of their names."""

    channel: str
    members: list[str]
    more: bool


class MembershipChanged(Struct, frozen=True):
    """The answer to `PUT` and `DELETE /v1/channels/{channel}/members/{user}`, when that is durable."""

    channel: str
    user: str
    joined: bool
