"""A chat in a terminal: prints what arrives, and carries out what the user enters."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from datetime import datetime
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from shardyard.cli.output import print_table, printable
from shardyard.client.messaging import Chat, Gap, IsTyping, Marked, Message, MessagingClient, Presence
from shardyard.model import ShardyardError

if TYPE_CHECKING:
    from shardyard.client.messaging import Event

PAGE = 20
"""Messages that are shown at once."""
MAX_SENDING = 32
"""Lines that are not durable yet, before the next one is read."""
TYPING_SECONDS = 5.0
"""Between two lines that say that the same user is typing."""
HELP = "/with USER  /chats  /history  /who USER  /quit    //... sends a line that begins with a slash"


class Conversation:
    """What a user sees and does. One user at a time is talked to; messages of others are shown, too."""

    def __init__(self, client: MessagingClient) -> None:
        self._client = client
        self._console = Console(highlight=False, soft_wrap=True)
        self._peer: str | None = None
        self._oldest: str | None = None
        """The oldest message that was shown of the conversation."""
        self._shown: dict[str, None] = {}
        """Messages of the conversation that came with its history, which may arrive as well."""
        self._watched: dict[str, str] = {}
        """What was shown last of the users who are watched, the last one at the end."""
        self._typing = "", 0.0
        """Who was typing last, and when that was shown."""
        self._sent: dict[str, int] = {}
        """The newest message to each user."""
        self._see: tuple[str, str] | None = None
        self._seeing: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._sending = asyncio.Semaphore(MAX_SENDING)

    async def run(self, peer: str | None, lines: AsyncIterator[bytes]) -> None:
        """Until the input ends, or the user quits. Returns when everything that was entered is durable."""
        self._say(f"you are {self._client.user}; /help shows the commands")
        if peer is not None:
            await self._attempt(self._talk_to(peer))  # first: what the history shows may arrive as well
        receiving = asyncio.create_task(self._receive())
        reading = asyncio.create_task(self._read(lines))
        try:
            await asyncio.wait([receiving, reading], return_when=asyncio.FIRST_COMPLETED)
            (receiving if receiving.done() else reading).result()
            if self._tasks:
                await asyncio.wait(self._tasks)
        finally:
            for task in (receiving, reading, *self._tasks):
                task.cancel()
            await asyncio.gather(receiving, reading, *self._tasks, return_exceptions=True)

    # What the user enters

    async def _read(self, lines: AsyncIterator[bytes]) -> None:
        async for line in lines:
            text = line.decode(errors="replace")
            if text.startswith("/") and not text.startswith("//"):
                command, _, argument = text.partition(" ")
                if command == "/quit":
                    return
                await self._attempt(self._command(command, argument.strip()))
            elif text:
                await self._send(text.removeprefix("/"))

    async def _command(self, command: str, argument: str) -> None:
        if command == "/with" and argument:
            await self._talk_to(argument)
        elif command == "/who" and (argument or self._peer):
            await self._watch(argument or str(self._peer))
        elif command == "/chats":
            await self._show_chats()
        elif command == "/history" and self._peer is not None:
            await self._show_history()
        else:
            self._say(HELP)

    async def _talk_to(self, peer: str) -> None:
        page = await self._client.history(peer, limit=PAGE)
        self._peer, self._oldest, self._shown = peer, None, {}
        self._say(f"you talk to {peer}")
        self._show_page(page.messages, more=page.more)
        await self._watch(peer)

    async def _show_history(self) -> None:
        peer = str(self._peer)
        page = await self._client.history(peer, before=self._oldest, limit=PAGE)
        if not page.messages:
            self._say("there are no older messages")
        self._show_page(page.messages, more=page.more)

    def _show_page(self, messages: list[Message], *, more: bool) -> None:
        """Show a page, which comes newest first."""
        if more:
            self._say("/history shows older messages")
        for message in reversed(messages):
            self._shown[message.id] = None
            self._show_message(message)
        if messages:
            self._oldest = messages[-1].id

    async def _show_chats(self) -> None:
        chats = (await self._client.chats()).chats
        print_table([_chat_row(chat) for chat in chats])
        if not chats:
            self._say("you have no conversations")

    async def _watch(self, user: str) -> None:
        """Show whether a user is online, now and when that changes."""
        self._watched.pop(user, None)
        self._watched[user] = ""
        if len(self._watched) > PAGE:
            del self._watched[next(iter(self._watched))]
        await self._client.watch(self._watched)

    async def _send(self, text: str) -> None:
        if self._peer is None:
            self._say("nobody to send this to: /with USER says whom you talk to")
            return
        await self._sending.acquire()
        self._start(self._send_to(self._peer, text))

    async def _send_to(self, peer: str, text: str) -> None:
        try:
            sent = await self._client.send(peer, text)
            self._sent[peer] = max(self._sent.get(peer, 0), int(sent.id))
        finally:
            self._sending.release()

    # What arrives

    async def _receive(self) -> None:
        async for event in self._client.events():
            self._show(event)

    def _show(self, event: "Event") -> None:
        match event:
            case Message():
                if event.id not in self._shown:
                    self._show_message(event)
                    self._oldest = self._oldest or event.id
            case Marked():
                self._show_mark(event)
            case IsTyping():
                now = asyncio.get_running_loop().time()
                if self._typing[0] != event.sender or now - self._typing[1] >= TYPING_SECONDS:
                    self._typing = event.sender, now
                    self._say(f"{event.sender} is typing")
            case Presence():
                self._show_presence(event)
            case Gap():
                self._say(f"some messages are missing here ({event.reason}): /chats and /history show them")
            case _:
                pass

    def _show_message(self, message: Message) -> None:
        own = message.sender == self._client.user
        name = f"{message.sender} → {message.recipient}" if own else message.sender
        self._print(
            Text.assemble(
                (f"{_time(message.at)} ", "dim"),
                (f"{printable(name)}: ", "green" if own else "bold cyan"),
                printable(message.text),
            )
        )
        if not own and message.sender == self._peer:
            self._mark_seen(message)

    def _show_mark(self, mark: Marked) -> None:
        """Of the newest message to the user only: it says the same of all before it."""
        newest = self._sent.get(mark.sender)
        if newest is not None and int(mark.upto) >= newest:
            seen = mark.kind == "seen"
            self._say(f"{'✓✓' if seen else '✓'} {mark.kind} {'by' if seen else 'to'} {mark.sender}")
            if seen:
                del self._sent[mark.sender]

    def _show_presence(self, presence: Presence) -> None:
        """A change, or what was asked for. How many clients a user has does not matter."""
        state = "online" if presence.online else "offline"
        if self._watched.get(presence.user, state) != state:
            self._watched[presence.user] = state
            since = f" since {_time(presence.since)}" if presence.since else ""
            self._say(f"{presence.user} is {state}{since}")

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
            self._print(Text(f"  {printable(str(error))}", "red"))

    def _say(self, text: str) -> None:
        self._print(Text(f"  {printable(text)}", "dim"))

    def _print(self, text: Text) -> None:
        self._console.print(text)


def _chat_row(chat: Chat) -> dict[str, object]:
    return {
        "with": chat.peer,
        "unread": chat.unread,
        "last": _time(chat.last.at),
        "from": chat.last.sender,
        "text": chat.last.text if len(chat.last.text) <= 60 else chat.last.text[:59] + "…",
    }


def _time(ms: int) -> str:
    """Local time, with the date unless it is today."""
    time, now = datetime.fromtimestamp(ms / 1000).astimezone(), datetime.now().astimezone()
    return time.strftime("%H:%M:%S" if time.date() == now.date() else "%Y-%m-%d %H:%M")
