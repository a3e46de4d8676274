"""`MessagingClient`: send and receive messages as a user, through the messaging server that serves this user."""

import asyncio
import contextlib
import logging
import secrets
from collections.abc import AsyncIterator, Iterable, Sequence
from types import TracebackType
from typing import Literal, Self

import aiohttp
from msgspec import structs

from shardyard.client.brokers import server_address
from shardyard.client.messaging_calls import Calls
from shardyard.client.messaging_channels import ChannelCalls
from shardyard.client.messaging_checks import (
    checked_before,
    checked_device,
    checked_id,
    checked_message,
    checked_number,
    checked_page_size,
    checked_user,
    checked_users,
)
from shardyard.client.messaging_directory import Directory, FetchToken
from shardyard.client.messaging_inbox import Event, Inbox, ResumePoint
from shardyard.client.messaging_link import Link
from shardyard.client.messaging_marks import DeliveredMarks
from shardyard.model import (
    Closed,
    InvalidCall,
    InvalidValue,
    ShardyardError,
    Unreachable,
    whole_number,
)
from shardyard.model.url import without_password
from shardyard.runtime.clock import Clock, SystemClock, timeout
from shardyard.wire.inbox import MarkKind
from shardyard.wire.messaging import (
    CaughtUp,
    Channels,
    Chat,
    Chats,
    Format,
    Gap,
    GetChats,
    GetHistory,
    History,
    IsTyping,
    IsTypingIn,
    Marked,
    Membership,
    Message,
    Posted,
    Posts,
    Presence,
    Send,
    Sent,
    SessionGranted,
    SetMark,
    Typing,
    Watch,
)

__all__ = [
    "CaughtUp",
    "Channels",
    "Chat",
    "Chats",
    "Event",
    "Gap",
    "History",
    "IsTyping",
    "IsTypingIn",
    "Marked",
    "Membership",
    "Message",
    "MessagingClient",
    "Posted",
    "Posts",
    "Presence",
    "Sent",
]

_log = logging.getLogger(__name__)

DEFAULT_PORT = 7500
CLOSING_SECONDS = 1.0
"""For the last marks when the client is closed."""


class MessagingClient(ChannelCalls):
    """One client of a user. It finds the user's server, stays connected, and resumes by itself where it was.

        async with MessagingClient("http://127.0.0.1:7500", user="alice") as client:
            await client.send("bob", "hello")
            async for message in client:
                print(message.sender, message.text)

    Iterating yields the messages for the user, and those that the user's other clients sent: each once, in the order
    of each conversation, also across lost connections and servers that move. A message is a `Message`; one that was
    posted to a channel which the user has joined is a `Posted`, which has a `channel` and no `recipient`. `events()`
    yields marks, presence and the rest as well. Both read one queue, so that the order between a message and a mark
    stays visible, and nothing piles up in a second queue that nobody reads: use one of them, in one task.

    The queue is bounded. While the program does not take messages, the client stops reading; they are delivered later.
    """

    def __init__(
        self,
        servers: str | Sequence[str],
        user: str,
        *,
        secret: str | None = None,
        token: str | FetchToken | None = None,
        device: str | None = None,
        resume: str | None = None,
        format: Literal["msgpack", "json"] = "msgpack",  # noqa: A002 the word of the protocol
        timeout: float = 30.0,
        connect_timeout: float | None = None,
        mark_delivered: bool = True,
        max_queued: int = 1000,
        clock: Clock | None = None,
    ) -> None:
        """`servers`: addresses of some messaging servers; any of them knows where the user's is, and which others there
        are: so one that runs at the start is enough. `secret`, or a signed
        `token` (or a function that gets one, if they expire): as the servers require. `device`: the name of this
        client, which no other client of the user has; by default the one of `resume`, or a new one. `resume`: what
        `position` was, maybe in another process; by default the client begins with what arrives from now on.
        `timeout`: how long `send` and other calls are retried, in seconds. `connect_timeout`: the same for the first
        connection, if it is another time. `mark_delivered`: tell senders that the program has got their messages.
        `max_queued`: how many events wait for the program."""
        self._urls = [
            server_address(url, "server", DEFAULT_PORT) for url in ([servers] if isinstance(servers, str) else servers)
        ]
        if not self._urls:
            raise InvalidValue("servers", servers, f"at least one address such as http://127.0.0.1:{DEFAULT_PORT}")
        if format not in ("msgpack", "json"):
            raise InvalidValue("format", format, "msgpack or json")
        self.user = checked_user(user)
        self._clock = clock or SystemClock()
        start = ResumePoint(secrets.token_hex(8), 0) if resume is None else ResumePoint.parse(resume)
        device = start.device if device is None else checked_device(device)
        self.device = device
        self._secret, self._token = secret, token
        self._timeout = timeout
        self._connect_timeout = timeout if connect_timeout is None else connect_timeout
        self._format = Format.JSON if format == "json" else Format.MSGPACK
        start = structs.replace(start, device=device)
        self._inbox = Inbox(user, whole_number("max_queued", max_queued, at_least=1), start)
        # Numbers must ascend over the life of a device, and its earlier process may not have stored its last one.
        # Nobody sends a message in every microsecond.
        self._calls = Calls(max(start.number, int(self._clock.now() * 1_000_000)), self._format, self._clock)
        self._marks = DeliveredMarks(self._mark_delivered, self._clock) if mark_delivered else None
        self._link: Link | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._http: aiohttp.ClientSession | None = None

    # Opening and closing

    async def __aenter__(self) -> Self:
        """Connect. `Unreachable` if that fails for as long as `connect_timeout`."""
        if self._http is not None:
            raise InvalidCall("a messaging client can be entered once: make a new one, with resume=client.position")
        self._http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        directory = Directory(self._http, self._urls)

        async def new_session() -> SessionGranted:
            return await directory.session(self.user, self._secret, self._token)

        self._link = Link(self._http, new_session, directory.learn, self._inbox, self._calls, self._format, self._clock)
        running = asyncio.create_task(self._link.run(), name=f"messaging client of {self.user}")
        running.add_done_callback(self._note_end)
        self._tasks = [running]
        if self._marks is not None:
            self._tasks.append(asyncio.create_task(self._marks.run(), name="delivered marks"))
        try:
            await self._wait_for_connection(self._link, running)
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection. Calls that wait get `Closed`, and iterating ends."""
        if self._http is None or self._http.closed:
            return
        if self._marks is not None and self.is_connected:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CLOSING_SECONDS):
                    await self._marks.flush()
        self._calls.end(Closed("the messaging client"))
        self._inbox.end(None)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._http.close()

    async def _wait_for_connection(self, link: Link, running: "asyncio.Task[None]") -> None:
        opened = asyncio.create_task(link.opened.wait())
        try:
            async with timeout(self._clock, self._connect_timeout):
                await asyncio.wait([opened, running], return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError:
            names = [without_password(url) for url in self._urls]
            raise Unreachable(names, self._connect_timeout, str(link.failure or "no answer")) from None
        finally:
            opened.cancel()
        if running.done():
            running.result()

    def _note_end(self, running: "asyncio.Task[None]") -> None:
        """The client has given up: say why to everyone who waits."""
        error = None if running.cancelled() else running.exception()
        if error is not None:
            self._inbox.end(error)
            self._calls.end(error if isinstance(error, ShardyardError) else Closed("the messaging client"))

    # Receiving

    def __aiter__(self) -> AsyncIterator[Message | Posted]:
        return _Messages(self)

    def events(self) -> AsyncIterator[Event]:
        """Everything that arrives: `Message`, `Posted`, `Marked`, `IsTyping`, `IsTypingIn`, `Presence`, `Membership` if
        the user has joined or left a channel by any client, `CaughtUp` after what was missed while there was no
        connection, and `Gap` if some of that can't be delivered any more: then load the history, and the `posts` of
        channels. A change of membership while there is no connection is not repeated: `channels()` has it."""
        return _Events(self)

    async def next_event(self) -> Event:
        """The next of `events()`. `StopAsyncIteration` if the client is closed."""
        _ = self._opened  # nothing would ever come
        event = await self._inbox.next()
        if isinstance(event, Message) and self._marks is not None and event.sender != self.user:
            self._marks.delivered(event.sender, event.id)
        return event

    @property
    def position(self) -> str:
        """How far the program has taken what arrives: pass it as `resume` to go on from there, also in another process.
        Store it after a message is dealt with."""
        return str(self._inbox.resume_point(self._calls.next_number))

    @property
    def is_connected(self) -> bool:
        return self._link is not None and self._link.is_connected

    # Sending

    async def send(self, to: str, text: str, *, number: int | None = None, timeout: float | None = None) -> Sent:  # noqa: ASYNC109 it is part of what the error means
        """Send a message. Returns when it is durable.

        What is sent to one user is stored in the order of the calls. A refusal is raised as the server's error, after
        retries if it may pass. `NotAcknowledged`: no answer came in time; pass its `number` to send the same again,
        which is then stored once."""
        checked_user(to)
        checked_message(text)
        return await self._opened.calls.store(
            f"the message to {to!r}",
            lambda given: Send(given, to, text),
            ("send", to),
            self._timeout if timeout is None else timeout,
            checked_number(number),
        )

    async def mark_seen(self, sender: str, upto: str) -> Sent:
        """Tell a user that the messages up to this one were read."""
        if self._marks is not None:
            self._marks.seen(sender, checked_id("upto", upto))
        return await self._mark("seen", sender, upto, self._timeout)

    async def mark_delivered(self, sender: str, upto: str) -> Sent:
        """Tell a user that the messages up to this one were delivered. The client does so by itself by default."""
        return await self._mark("delivered", sender, upto, self._timeout)

    async def _mark_delivered(self, sender: str, upto: str) -> Sent:
        return await self._mark("delivered", sender, upto, None)

    async def _mark(self, kind: MarkKind, sender: str, upto: str, seconds: float | None) -> Sent:
        checked_user(sender)
        checked_id("upto", upto)
        return await self._opened.calls.store(
            f"the mark for {sender!r}", lambda given: SetMark(given, sender, kind, upto), (kind, sender), seconds
        )

    async def typing(self, to: str) -> None:
        """Show another user that this one is typing. It is dropped if there is no connection."""
        self._opened.send(Typing(checked_user(to)))

    async def watch(self, users: Iterable[str]) -> None:
        """Get the presence of these users as events, instead of those of the last call: now and after every change."""
        watched = checked_users(users)
        self._opened.watched = watched
        self._opened.send(Watch(watched))

    # Asking

    async def history(self, peer: str, *, before: str | None = None, limit: int = 50) -> History:
        """Messages of a conversation, newest first. `before`: only older ones than the message with this id."""
        checked_user(peer)
        before, limit = checked_before(before), checked_page_size(limit)
        return await self._opened.calls.ask(
            "the history", lambda number: GetHistory(number, peer, before, limit), History, self._timeout
        )

    async def chats(self, *, before: str | None = None, limit: int = 50) -> Chats:
        """The user's conversations, the one with the newest message first. `before`: only those whose last message is
        older than the one with this id."""
        before, limit = checked_before(before), checked_page_size(limit)
        return await self._opened.calls.ask(
            "the list of chats", lambda number: GetChats(number, before, limit), Chats, self._timeout
        )

    @property
    def _opened(self) -> Link:
        if self._link is None:
            raise InvalidCall("the client is not open: enter it by `async with` first")
        return self._link


class _Events(AsyncIterator[Event]):
    def __init__(self, client: MessagingClient) -> None:
        self._client = client

    async def __anext__(self) -> Event:
        return await self._client.next_event()


class _Messages(AsyncIterator[Message | Posted]):
    def __init__(self, client: MessagingClient) -> None:
        self._client = client

    async def __anext__(self) -> Message | Posted:
        while True:
            event = await self._client.next_event()
            if isinstance(event, Message | Posted):
                return event
            if isinstance(event, Gap):
                _log.warning(
                    "messages for %r are missing, load the history, and the posts of channels: %s",
                    self._client.user,
                    event.reason,
                )
