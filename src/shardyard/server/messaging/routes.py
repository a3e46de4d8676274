"""The HTTP routes of a messaging server: sessions, the directory, health, metrics, and the chat page."""

from importlib import resources
from typing import Annotated

from fastapi import APIRouter, Depends, Path, Request, Response

from shardyard.messaging.server import MessagingServer
from shardyard.messaging.tokens import Authenticator, Credentials
from shardyard.model import Conflict, RetryLater
from shardyard.runtime import metrics
from shardyard.server.auth import token_of
from shardyard.server.http import read_body, request_body, respond
from shardyard.server.messaging.admin import check_admin
from shardyard.wire import responses
from shardyard.wire.inbox import MAX_USER_LENGTH
from shardyard.wire.messaging import PATH, Drained, SessionGranted, Where
from shardyard.wire.peers import PEER_PATH, PeerCall

router = APIRouter(tags=["messaging"])
User = Annotated[str, Path(min_length=1, max_length=MAX_USER_LENGTH)]


def server_of(request: Request) -> MessagingServer:
    server: MessagingServer = request.app.state.server
    return server


Server = Annotated[MessagingServer, Depends(server_of)]


@router.post("/v1/session", openapi_extra=request_body(Credentials))
async def open_session(request: Request, server: Server) -> Response:
    """Exchange credentials for an access token, and the address of the user's server."""
    authenticator: Authenticator = request.app.state.authenticator
    user = await authenticator.authenticate(await read_body(request, Credentials))
    token = server.tokens.issue(user)
    address = server.address if server.owned_of(user) is not None else server.address_of(user)
    return respond(SessionGranted(user, token.text, int(token.expires_at * 1000), address or server.address))


@router.get("/v1/where/{user:path}")
async def find_user(user: User, server: Server) -> Response:
    """The partition that a user belongs to, and the server that owns it."""
    partition = server.inbox.partition_of(user)
    owner = server.directory.owner_of(partition)
    if owner is None or owner.address is None:
        raise RetryLater(f"no messaging server owns {partition} now, to which {user!r} belongs: try again in a moment")
    return respond(Where(user, partition.index, owner.address, owner.member, owner.epoch))


@router.post(PEER_PATH, include_in_schema=False)
async def answer_peer(request: Request, server: Server) -> Response:
    """What another messaging server tells and asks."""
    server.tokens.check_peer(token_of(request.headers))
    return respond(server.answer_peer(await read_body(request, PeerCall)))


@router.post("/v1/drain", dependencies=[Depends(check_admin)])
async def drain(server: Server, unless_last: bool = False) -> Response:
    """Send all clients to other servers, and own nothing any more. The process stays until it is stopped.
    `unless_last`: refuse if there is no other server."""
    if unless_last and not server.is_draining and not _others(server):
        raise Conflict("there is no other messaging server, so nobody would serve the users of this one")
    await server.drain()
    return respond(Drained(others=_others(server)))


def _others(server: MessagingServer) -> int:
    """How many other servers there are."""
    return len(server.directory.members().keys() - {server.name})


@router.get("/healthz")
async def check_alive() -> Response:
    """Whether the process responds."""
    return respond(responses.Liveness())


@router.get("/readyz")
async def check_ready(server: Server) -> Response:
    """Whether the server serves the users of its partitions."""
    if not server.is_ready:
        raise RetryLater("this server is about to stop, or waits for its group: use another one")
    return respond(responses.Liveness())


@router.get("/metrics", dependencies=[Depends(check_admin)])
async def export_metrics() -> Response:
    """Metrics of this process, in the text format of Prometheus."""
    return Response(metrics.render(), headers={"Content-Type": metrics.CONTENT_TYPE})


@router.get(PATH, include_in_schema=False)
async def refuse_without_upgrade() -> Response:
    """A plain request where only WebSocket connections are taken."""
    return Response(status_code=426, headers={"Connection": "Upgrade", "Upgrade": "websocket"})


PAGES = {
    "/": ("chat.html", "text/html"),
    "/chat.css": ("chat.css", "text/css"),
    "/chat.js": ("chat.js", "text/javascript"),
    "/chat-model.js": ("chat-model.js", "text/javascript"),
    "/chat-view.js": ("chat-view.js", "text/javascript"),
    "/chat-elements.js": ("chat-elements.js", "text/javascript"),
    "/shardyard-messaging.js": ("shardyard-messaging.js", "text/javascript"),
}
"""The chat page, and the JavaScript client that it uses."""
PAGE_HEADERS = {
    "Cache-Control": "no-cache",
    # Nothing but these files is loaded or run. The page connects to whichever server serves its user.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self' http: https: ws: wss:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def _serve(path: str, file: str, media_type: str) -> None:
    @router.get(path, include_in_schema=False)
    async def page() -> Response:
        content = (resources.files("shardyard.server.messaging") / "pages" / file).read_bytes()
        return Response(content, media_type=media_type, headers=PAGE_HEADERS)


for _path, (_file, _media_type) in PAGES.items():
    _serve(_path, _file, _media_type)
