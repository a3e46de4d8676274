"""The HTTP routes of channels on a messaging server, for administrators and other programs."""

from typing import Annotated, Any
from urllib.parse import unquote

import msgspec
from fastapi import APIRouter, Depends, Path, Request, Response

from shardyard.model import InvalidValue
from shardyard.server.http import read_body, read_query, request_body, respond
from shardyard.server.messaging.admin import check_admin
from shardyard.server.messaging.routes import Server, User
from shardyard.server.routing import StrictRoute, query_parameters
from shardyard.wire import channels, inbox
from shardyard.wire.channel_calls import ChannelMembers, EventStored, MembershipChanged, MembersQuery, NewEvent
from shardyard.wire.channels import MAX_CHANNEL_LENGTH
from shardyard.wire.validation import in_words

router = APIRouter(tags=["channels"], dependencies=[Depends(check_admin)], route_class=StrictRoute)
MEMBERS_PATH = "/members/"
"""Between the names of the channel and the user."""
Channel = Annotated[str, Path(min_length=1, max_length=MAX_CHANNEL_LENGTH)]


@router.put("/v1/channels/{channel:path}/members/{user:path}")
async def add_member(request: Request, channel: Channel, user: User, server: Server) -> Response:
    """Let a user join a channel. Joining twice changes nothing."""
    return await _change_member(request, channel, user, server, joined=True)


@router.delete("/v1/channels/{channel:path}/members/{user:path}")
async def remove_member(request: Request, channel: Channel, user: User, server: Server) -> Response:
    """Let a user leave a channel. A user who is not a member may leave, too."""
    return await _change_member(request, channel, user, server, joined=False)


async def _change_member(request: Request, channel: str, user: str, server: Server, *, joined: bool) -> Response:
    channel, user = _names(request, channel, user)
    _check("channel", channel, channels.Channel)
    _check("user", user, inbox.User)
    await server.channel_calls.change_member(channel, user, joined=joined)
    return respond(MembershipChanged(channel, user, joined=joined))


def _names(request: Request, channel: str, user: str) -> tuple[str, str]:
    """The channel and the user of a path. A name that has `/members/` in it is only told from the rest if its slashes
    are percent-encoded."""
    raw = request.scope.get("raw_path", b"").partition(b"?")[0].decode("ascii")
    _, _, names = raw.partition("/v1/channels/")
    if MEMBERS_PATH not in channel and MEMBERS_PATH not in user:
        return channel, user
    if names.count(MEMBERS_PATH) != 1:
        raise InvalidValue("path", raw, f"slashes of names as %2F, because there is {MEMBERS_PATH!r} in one of them")
    channel, _, user = names.partition(MEMBERS_PATH)
    return unquote(channel), unquote(user)


@router.get("/v1/channels/{channel:path}/members", openapi_extra=query_parameters(MembersQuery))
async def list_members(channel: Channel, request: Request, server: Server) -> Response:
    """Members of a channel, in the order of their names. The list may be some moments behind."""
    _check("channel", channel, channels.Channel)
    query = read_query(request, MembersQuery)
    members, more = await server.channel_calls.members(channel, query.after, query.limit)
    return respond(ChannelMembers(channel, list(members), more))


@router.post("/v1/channels/{channel:path}/events", openapi_extra=request_body(NewEvent))
async def post_event(channel: Channel, request: Request, server: Server) -> Response:
    """Post to a channel. Its members who are online get it, and the others find it in the channel's history."""
    _check("channel", channel, channels.Channel)
    event = await read_body(request, NewEvent)
    id_ = None if event.id is None else int(event.id)
    stored, duplicate = await server.channel_calls.post(channel, event.text, sender=event.sender or "", id_=id_)
    return respond(EventStored(channel, stored.id, stored.at, duplicate), 200 if duplicate else 201)


def _check(what: str, name: str, kind: Any) -> None:
    """`InvalidValue` if a name can't be stored."""
    try:
        msgspec.convert(name, kind)
    except msgspec.ValidationError:
        raise InvalidValue(what, name, in_words(kind)) from None
