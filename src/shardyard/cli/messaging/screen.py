"""What a chat prints on a terminal. Nothing that others wrote can control the terminal."""

from datetime import datetime

from rich.console import Console
from rich.text import Text

from shardyard.cli.output import printable
from shardyard.client.messaging import Chat, Message, Posted


class Screen:
    """The terminal of a user."""

    def __init__(self, user: str) -> None:
        self._user = user
        self._console = Console(highlight=False, soft_wrap=True)

    def message(self, message: Message | Posted) -> None:
        """A message of a conversation, or one of a channel with the channel's name."""
        own = message.sender == self._user
        if isinstance(message, Posted):
            name = f"#{message.channel} {message.sender}".rstrip()  # what a program posts may have no sender
        else:
            name = f"{message.sender} → {message.recipient}" if own else message.sender
        self._console.print(
            Text.assemble(
                (f"{local_time(message.at)} ", "dim"),
                (f"{printable(name)}: ", "green" if own else "bold cyan"),
                printable(message.text),
            )
        )

    def say(self, text: str) -> None:
        self._console.print(Text(f"  {printable(text)}", "dim"))

    def error(self, text: str) -> None:
        self._console.print(Text(f"  {printable(text)}", "red"))


def chat_row(chat: Chat) -> dict[str, object]:
    """For a table of conversations."""
    return {
        "with": chat.peer,
        "unread": chat.unread,
        "last": local_time(chat.last.at),
        "from": chat.last.sender,
        "text": chat.last.text if len(chat.last.text) <= 60 else chat.last.text[:59] + "…",
    }


def local_time(ms: int) -> str:
    """Local time, with the date unless it is today."""
    time, now = datetime.fromtimestamp(ms / 1000).astimezone(), datetime.now().astimezone()
    return time.strftime("%H:%M:%S" if time.date() == now.date() else "%Y-%m-%d %H:%M")
