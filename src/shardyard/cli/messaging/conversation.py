"""A chat in a terminal: prints what arrives, and carries out what the user enters."""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import TYPE_CHECKING, Any

from shardyard.cli.messaging.places import InChannel, Place, WithUser, channel_name, joined
from shardyard.cli.messaging.screen import Screen, chat_row, local_time
from shardyard.cli.output import print_table
from shardyard.client.messaging import (
    Gap,
    IsTyping,
    IsTypingIn,
    Marked,
    Membership,
    Message,
    MessagingClient,
    Posted,
    Presence,
)
from shardyard.model import ShardyardError

if TYPE_CHECKING:
    from shardyard.client.messaging import Event

PAGE = 20
"""Messages that are shown at once."""
MAX_SENDING = 32
"""Lines that are not durable yet, before the next one is read."""
QUIT_SECONDS = 3.0
"""How long quitting waits for what was entered before it."""
TYPING_SECONDS = 5.0
"""Between two lines that say that the same user is typing."""
MAX_CHANNELS = 1000
"""Channels that are listed."""
HELP = (
    "/with USER  /channel NAME  /chats  /channels  /history  /leave  /who USER  /quit    "
    "//... sends a line that begins with a slash"
)


class _Line:
    """A line that the user entered. Two with the same text are not the same."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.is_command = text.startswith("/") and not text.startswith("//")


class Conversation:
    """What a user sees and does. What is entered goes to one user or channel at a time; what arrives from others is
    shown, too."""

    def __init__(self, client: MessagingClient) -> None:
        self._client = client
        self._screen = Screen(client.user)
        self._place: Place | None = None
        self._oldest: str | None = None
        """The oldest message that was shown of the conversation."""
        self._shown: dict[str, None] = {}
        """Messages of the conversation that came with its history, which may arrive as well."""
        self._channels: set[str] = set()
        """Those that the user has joined, as far as it was shown."""
        self._watched: dict[str, str] = {}
        """What was shown last of the users who are watched, the last one at the end."""
        self._typing = "", 0.0
        """What was shown last about who is typing, and when."""
        self._sent: dict[str, int] = {}
        """The newest message to each user."""
        self._see: tuple[str, str] | None = None
        self._seeing: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._sending = asyncio.Semaphore(MAX_SENDING)
        self._opened = asyncio.Event()
        """Set when what the conversation begins with was shown."""
        self._entered: asyncio.Queue[_Line | None] = asyncio.Queue()
        """Lines that were not looked at yet; None after the last one."""
        self._unsent: dict[_Line, None] = {}

    @property
    def unsent(self) -> list[str]:
        """The messages that were entered and are not durable, unless the user was told that they failed."""
        return [line.text for line in self._unsent]

    async def run(self, peer: str | None, channel: str | None, lines: AsyncIterator[bytes]) -> None:
        """Begin with a user, a channel or neither, and go on until the input ends, or the user quits. Returns when
        everything that was entered is durable, or could not be sent for some seconds: `unsent` has it then."""
        self._screen.say(f"you are {self._client.user}; /help shows the commands")
        receiving = asyncio.create_task(self._receive())
        reading = asyncio.create_task(self._read(lines))
        working = asyncio.create_task(self._work(peer, channel))
        try:
            done, _ = await asyncio.wait([receiving, reading, working], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
            await self._finish(working)
        finally:
            tasks = (receiving, reading, working, *self._tasks)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _finish(self, working: "asyncio.Task[None]") -> None:
        """Wait for what was entered, but not for answers while there is no connection."""
        if self._unsent and not self._client.is_connected:
            self._screen.say("not connected: waiting a moment for what is not sent yet")
        loop = asyncio.get_running_loop()
        deadline = loop.time() + QUIT_SECONDS
        while pending := [task for task in (working, *self._tasks) if not task.done()]:
            if loop.time() >= deadline or not (self._unsent or self._client.is_connected):
                return
            await asyncio.wait(pending, timeout=deadline - loop.time(), return_when=asyncio.FIRST_COMPLETED)
        working.result()

    # What the user enters

    async def _read(self, lines: AsyncIterator[bytes]) -> None:
        """Read lines also while a command waits for its answer, so that /quit is always noticed."""
        async for each in lines:
            line = _Line(each.decode(errors="replace"))
            if line.is_command and line.text.partition(" ")[0] == "/quit":
                break
            if line.text and not line.is_command:
                self._unsent[line] = None
            self._entered.put_nowait(line)
        self._entered.put_nowait(None)

    async def _work(self, peer: str | None, channel: str | None) -> None:
        """Do what was entered, one line after the other."""
        if peer is not None:
            await self._attempt(self._talk_to(peer))
        if channel is not None:
            await self._attempt(self._enter(channel))
        self._opened.set()
        while (line := await self._entered.get()) is not None:
            if line.is_command:
                command, _, argument = line.text.partition(" ")
                await self._attempt(self._command(command, argument.strip()))
            elif line.text:
                await self._send(line)

    async def _command(self, command: str, argument: str) -> None:
        if command == "/with" and argument:
            await self._talk_to(argument)
        elif command in ("/channel", "/join") and argument:
            await self._enter(argument)
        elif command == "/leave" and (argument or isinstance(self._place, InChannel)):
            await self._leave(argument)
        elif command == "/who" and (argument or isinstance(self._place, WithUser)):
            await self._watch(argument)
        elif command == "/chats":
            await self._show_chats()
        elif command == "/channels":
            await self._show_channels()
        elif command == "/history" and self._place is not None:
            await self._show_history(self._place)
        else:
            self._screen.say(HELP)

    async def _talk_to(self, peer: str) -> None:
        await self._open(WithUser(self._client, peer))
        await self._watch(peer)

    async def _enter(self, channel: str) -> None:
        place = await joined(self._client, channel)
        self._channels.add(place.channel)
        await self._open(place)

    async def _leave(self, name: str) -> None:
        """A channel; by default the one that the user is in."""
        place = self._place if isinstance(self._place, InChannel) else None
        channel = place.channel if place is not None and not name else channel_name(name)
        await self._client.leave(channel)
        self._note_left(channel)

    def _note_left(self, channel: str) -> None:
        if isinstance(self._place, InChannel) and self._place.channel == channel:
            self._place = None
        if channel in self._channels:
            self._channels.discard(channel)
            self._screen.say(f"you left #{channel}")

    async def _open(self, place: Place) -> None:
        messages, more = await place.page(None, PAGE)
        self._place, self._oldest, self._shown = place, None, {}
        self._screen.say(place.opening)
        self._show_page(messages, more=more)

    async def _show_history(self, place: Place) -> None:
        messages, more = await place.page(self._oldest, PAGE)
        if not messages:
            self._screen.say("there are no older messages")
        self._show_page(messages, more=more)

    def _show_page(self, messages: list[Message] | list[Posted], *, more: bool) -> None:
        """Show a page, which comes newest first."""
        if more:
            self._screen.say("/history shows older messages")
        shown: Sequence[Message | Posted] = messages
        for message in reversed(shown):
            self._shown[_key(message)] = None
            self._show_message(message)
        if messages:
            self._oldest = messages[-1].id

    async def _show_chats(self) -> None:
        chats = (await self._client.chats()).chats
        print_table([chat_row(chat) for chat in chats])
        if not chats:
            self._screen.say("you have no conversations")

    async def _show_channels(self) -> None:
        page = await self._client.channels(limit=200)
        names = list(page.channels)
        while page.more and page.channels and len(names) < MAX_CHANNELS:
            page = await self._client.channels(after=names[-1], limit=200)
            names += page.channels
        print_table([{"channel": name} for name in names])
        if not names:
            self._screen.say("you have joined no channels: /channel NAME joins one")

    async def _watch(self, user: str) -> None:
        """Show whether a user is online, now and when that changes; by default the one who is talked to."""
        if not user and isinstance(self._place, WithUser):
            user = self._place.peer
        self._watched.pop(user, None)
        self._watched[user] = ""
        if len(self._watched) > PAGE:
            del self._watched[next(iter(self._watched))]
        await self._client.watch(self._watched)

    async def _send(self, line: "_Line") -> None:
        if self._place is None:
            del self._unsent[line]
            self._screen.say("nobody to send this to: /with USER or /channel NAME says where it goes")
            return
        await self._sending.acquire()
        self._start(self._send_to(self._place, line))

    async def _send_to(self, place: Place, line: "_Line") -> None:
        try:
            sent = await place.send(line.text.removeprefix("/"))
            del self._unsent[line]
            if place is self._place and (self._oldest is None or int(sent.id) < int(self._oldest)):
                self._oldest = sent.id
            if isinstance(place, WithUser):
                self._sent[place.peer] = max(self._sent.get(place.peer, 0), int(sent.id))
        except ShardyardError:
            self._unsent.pop(line, None)  # the error is shown
            raise
        finally:
            self._sending.release()

    # What arrives

    async def _receive(self) -> None:
        await self._opened.wait()  # what the history shows may arrive as well
        async for event in self._client.events():
            self._show(event)

    def _show(self, event: "Event") -> None:
        match event:
            case Message() | Posted():
                if _key(event) not in self._shown:
                    self._show_message(event)
                    if self._is_here(event):
                        self._oldest = self._oldest or event.id
            case Marked():
                self._show_mark(event)
            case IsTyping():
                self._show_typing(f"{event.sender} is typing")
            case IsTypingIn():
                self._show_typing(f"{event.sender} is typing in #{event.channel}")
            case Membership():
                self._show_membership(event)
            case Presence():
                self._show_presence(event)
            case Gap():
                self._screen.say(
                    f"some messages are missing here ({event.reason}): /chats, /channel NAME and /history show them"
                )
            case _:
                pass

    def _show_message(self, message: Message | Posted) -> None:
        self._screen.message(message)
        if isinstance(message, Message) and message.sender != self._client.user and self._is_here(message):
            self._mark_seen(message)

    def _is_here(self, message: Message | Posted) -> bool:
        """Whether it belongs to the conversation or channel that the user is in."""
        place = self._place
        if isinstance(message, Posted):
            return isinstance(place, InChannel) and message.channel == place.channel
        return isinstance(place, WithUser) and place.peer in (message.sender, message.recipient)

    def _show_typing(self, text: str) -> None:
        now = asyncio.get_running_loop().time()
        if self._typing[0] != text or now - self._typing[1] >= TYPING_SECONDS:
            self._typing = text, now
            self._screen.say(text)

    def _show_membership(self, change: Membership) -> None:
        """Also one by another client of the user, or by an administrator."""
        if not change.joined:
            self._note_left(change.channel)
        elif change.channel not in self._channels:
            self._channels.add(change.channel)
            self._screen.say(f"you joined #{change.channel}")

    def _show_mark(self, mark: Marked) -> None:
        """Of the newest message to the user only: it says the same of all before it."""
        newest = self._sent.get(mark.sender)
        if newest is not None and int(mark.upto) >= newest:
            seen = mark.kind == "seen"
            self._screen.say(f"{'✓✓' if seen else '✓'} {mark.kind} {'by' if seen else 'to'} {mark.sender}")
            if seen:
                del self._sent[mark.sender]

    def _show_presence(self, presence: Presence) -> None:
        """A change, or what was asked for. How many clients a user has does not matter."""
        state = "online" if presence.online else "offline"
        if self._watched.get(presence.user, state) != state:
            self._watched[presence.user] = state
            since = f" since {local_time(presence.since)}" if presence.since else ""
            self._screen.say(f"{presence.user} is {state}{since}")

    def _mark_seen(self, message: Message) -> None:
        """One mark at a time: the next one is for all messages that came meanwhile."""
        self._see = message.sender, message.id
        if self._seeing is None or self._seeing.done():
            self._seeing = self._start(self._mark_all_seen())

    async def _mark_all_seen(self) -> None:
        while self._see is not None:
            (sender, id_), self._see = self._see, None
            await self._client.mark_seen(sender, id_)

    # The terminal

    def _start(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = asyncio.create_task(self._attempt(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _attempt(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except ShardyardError as error:
            self._screen.error(str(error))


def _key(message: Message | Posted) -> str:
    """By what a message is recognised: the ids of a channel's posts are its own."""
    return f"{message.id} {message.channel}" if isinstance(message, Posted) else message.id
