"""A messaging server with channels, in memory: what the chat page and `shardyard chat` need of one, without a log, a
coordinator and workers behind it. Every connection is of another device, and nothing is resumed."""

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import AsyncIterator
from importlib import resources

from aiohttp import WSMsgType, web

from shardyard.runtime.clock import now_ms
from shardyard.server.messaging.routes import PAGE_HEADERS, PAGES
from shardyard.wire import messaging as wire
from shardyard.wire.messaging import Format, Position
from tests.client.proxies import serving

NO_CHANNELS = "channels need `shardyard coordinator` and `shardyard fanout-worker`: start them"
NOT_A_MEMBER = "join the channel first"
GAP = "posts were missed while the user was offline"


class _Connection:
    def __init__(self, user: str, socket: web.WebSocketResponse) -> None:
        self.user = user
        self.socket = socket
        self._format = Format(socket.ws_protocol)
        self._count = 0

    async def send(self, *frames: wire.ServerFrame) -> None:
        for frame in frames:
            message = wire.encode(frame, self._format)
            if self._format is Format.JSON:
                await self.socket.send_str(message.decode())
            else:
                await self.socket.send_bytes(message)

    async def deliver(self, entry: wire.Message | wire.Posted) -> None:
        self._count += 1
        await self.send(wire.Deliver(self._count - 1, 1, [entry]))


class ChannelServer:
    """Serves any user. `has_channels`: whether calls that concern channels are refused."""

    def __init__(self, *, has_channels: bool = True) -> None:
        self.url = ""
        self.has_channels = has_channels
        self.members: defaultdict[str, set[str]] = defaultdict(set)
        self.posts: defaultdict[str, list[wire.Posted]] = defaultdict(list)
        self._messages: list[wire.Message] = []
        self._connections: list[_Connection] = []
        self._next_id = 1000

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator["ChannelServer"]:
        app = web.Application()
        app.router.add_post("/v1/session", self._session)
        app.router.add_get("/v1/where/{user}", self._where)
        app.router.add_get(wire.PATH, self._connect)
        for path in PAGES:
            app.router.add_get(path, self._page)
        async with serving(app) as self.url:
            try:
                yield self
            finally:
                await self.disconnect()

    async def disconnect(self) -> None:
        """End all connections."""
        await asyncio.gather(*(each.socket.close(code=1012) for each in self._connections))

    # What happens elsewhere

    async def post(self, channel: str, sender: str, text: str) -> wire.Posted:
        """Store a post, and deliver it to all members of the channel."""
        posted = wire.Posted(self._new_id(), channel, sender, text, now_ms())
        self.posts[channel].append(posted)
        await asyncio.gather(*(each.deliver(posted) for each in self._members(channel) if each.user != sender))
        return posted

    async def change(self, channel: str, user: str, *, joined: bool) -> None:
        """Join or leave a channel, by another client of the user."""
        (self.members[channel].add if joined else self.members[channel].discard)(user)
        await self.tell(user, wire.Membership(channel, joined))

    async def tell(self, user: str, frame: wire.ServerFrame) -> None:
        await asyncio.gather(*(each.send(frame) for each in self._connections if each.user == user))

    async def message(self, sender: str, recipient: str, text: str) -> wire.Message:
        stored = wire.Message(self._new_id(), sender, recipient, text, now_ms())
        self._messages.append(stored)
        await asyncio.gather(*(each.deliver(stored) for each in self._connections if each.user == recipient))
        return stored

    # Connections

    async def _page(self, request: web.Request) -> web.Response:
        file, media_type = PAGES[request.path]
        content = (resources.files("shardyard.server.messaging") / "pages" / file).read_bytes()
        return web.Response(body=content, content_type=media_type, headers=PAGE_HEADERS)

    async def _session(self, request: web.Request) -> web.Response:
        user = (await request.json())["user"]
        expires_at = now_ms() + 3_600_000
        return web.json_response({"user": user, "token": user, "expires_at": expires_at, "address": self._address})

    async def _where(self, request: web.Request) -> web.Response:
        user = request.match_info["user"]
        return web.json_response({"user": user, "partition": 0, "address": self._address, "member": "m", "epoch": 1})

    @property
    def _address(self) -> str:
        return "ws" + self.url.removeprefix("http") + wire.PATH

    async def _connect(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse(protocols=[each.value for each in Format])
        await socket.prepare(request)
        connection: _Connection | None = None
        try:
            async for message in socket:
                assert message.type in (WSMsgType.TEXT, WSMsgType.BINARY)
                data = message.data.encode() if isinstance(message.data, str) else message.data
                for frame in wire.decode_from_client(data, Format(socket.ws_protocol)):
                    if connection is None:
                        assert isinstance(frame, wire.Hello)
                        connection = _Connection(frame.token, socket)
                        await connection.send(wire.Welcome(frame.token, Position(0, 1, 0), "log", "new"))
                        self._connections.append(connection)
                    else:
                        await self._handle(connection, frame)
        finally:
            if connection in self._connections:
                self._connections.remove(connection)
        return socket

    async def _handle(self, client: _Connection, frame: wire.ClientFrame) -> None:
        match frame:
            case wire.Send():
                stored = await self.message(client.user, frame.recipient, frame.text)
                await client.send(wire.Sent(frame.number, stored.id, stored.at))
            case wire.SetMark():
                await client.send(wire.Sent(frame.number, self._new_id(), now_ms()))
            case wire.GetHistory():
                pair = {client.user, frame.peer}
                found = [each for each in self._messages if {each.sender, each.recipient} == pair]
                await client.send(wire.History(frame.number, found[::-1], more=False))
            case wire.GetChats():
                await client.send(wire.Chats(frame.number, self._chats(client.user), more=False))
            case wire.Watch():
                online = {each.user for each in self._connections}
                await client.send(*(wire.Presence(user, int(user in online), 0) for user in frame.users))
            case wire.Ping():
                await client.send(wire.Pong(None))
            case wire.Typing():
                await self.tell(frame.recipient, wire.IsTyping(client.user))
            case wire.TypingIn():
                others = [each for each in self._members(frame.channel) if each is not client]
                await asyncio.gather(*(each.send(wire.IsTypingIn(frame.channel, client.user)) for each in others))
            case wire.Post() | wire.Join() | wire.Leave() | wire.GetPosts() | wire.GetChannels():
                await self._handle_channels(client, frame)
            case _:
                raise AssertionError(f"unexpected: {frame}")

    async def _handle_channels(
        self, client: _Connection, frame: wire.Post | wire.Join | wire.Leave | wire.GetPosts | wire.GetChannels
    ) -> None:
        if not self.has_channels:
            await client.send(wire.Refused(frame.number, "unsupported", NO_CHANNELS))
            return
        match frame:
            case wire.Join() | wire.Leave():
                await self.change(frame.channel, client.user, joined=isinstance(frame, wire.Join))
                await client.send(wire.Done(frame.number))
            case wire.GetChannels():
                names = sorted(name for name, users in self.members.items() if client.user in users)
                names = [name for name in names if frame.after is None or name > frame.after]
                page = names[: frame.limit]
                await client.send(wire.Channels(frame.number, page, more=len(names) > len(page)))
            case _ if client.user not in self.members[frame.channel]:
                await client.send(wire.Refused(frame.number, "denied", NOT_A_MEMBER))
            case wire.Post():
                posted = await self.post(frame.channel, client.user, frame.text)
                await client.send(wire.Sent(frame.number, posted.id, posted.at))
            case wire.GetPosts():
                before = 2**63 if frame.before is None else int(frame.before)
                found = [each for each in reversed(self.posts[frame.channel]) if int(each.id) < before]
                posts = found[: frame.limit]
                await client.send(wire.Posts(frame.number, posts, more=len(found) > len(posts)))

    def _members(self, channel: str) -> list[_Connection]:
        return [each for each in self._connections if each.user in self.members[channel]]

    def _chats(self, user: str) -> list[wire.Chat]:
        last: dict[str, wire.Message] = {}
        for each in self._messages:
            if user in (each.sender, each.recipient):
                last[each.recipient if each.sender == user else each.sender] = each
        return [wire.Chat(peer, each, 0, None, None, None) for peer, each in last.items()]

    def _new_id(self) -> str:
        self._next_id += 1
        return str(self._next_id)
