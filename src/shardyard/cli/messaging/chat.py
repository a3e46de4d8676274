"""`shardyard chat`: chat in a terminal, or send the lines of a pipe."""

# ruff: noqa: PLC0415 commands start quickly: what is slow to import is imported by those that need it

import asyncio
import logging
import os
import signal
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from shardyard.cli.messaging.lines import stdin_lines
from shardyard.cli.messaging.options import Servers, addresses, explain_errors
from shardyard.cli.options import value_option
from shardyard.cli.output import print_message, printable
from shardyard.model import InvalidCall, ShardyardError

if TYPE_CHECKING:
    from shardyard.client import MessagingClient

CONNECT_SECONDS = 5.0
"""How long to try that."""


def chat(
    user: Annotated[str, typer.Option("--as", metavar="USER", help="Who you are.", show_default=False)],
    peer: Annotated[str | None, value_option("--with", metavar="USER", help="Whom to talk to.")] = None,
    servers: Servers = None,
    secret: Annotated[
        str | None,
        value_option(
            "--secret", metavar="SECRET", help="The secret of the servers. Default: SHARDYARD_SECRET, if they have one."
        ),
    ] = None,
) -> None:
    """Chat with other users. Each line that you enter is sent to the user that you talk to.

    Shows the last messages of the conversation, then what arrives, who is online, and when your messages were
    delivered and seen. Lines that begin with a slash are commands: /with USER talks to another user, /chats lists your
    conversations, /history shows older messages, /who USER shows whether a user is online, /quit ends, and so does
    Ctrl-D. To send a line that begins with a slash, write two.

    If standard input is not a terminal, its lines are sent, and the command ends when all of them are durable.

    Examples:

      shardyard chat --as alice --with bob

      echo "The build is done." | shardyard chat --as ci --with alice

      shardyard chat --as alice --server http://10.0.0.5:7500
    """
    from shardyard.client import MessagingClient

    secret = secret or os.environ.get("SHARDYARD_SECRET") or None
    interactive = sys.stdin.isatty()
    client = MessagingClient(
        addresses(servers), user, secret=secret, connect_timeout=CONNECT_SECONDS, mark_delivered=interactive
    )
    with explain_errors():
        asyncio.run(_chat(client, peer) if interactive else _send_lines(client, peer))


async def _send_lines(client: "MessagingClient", peer: str | None) -> None:
    """Send the lines of standard input, one after the other."""
    count = 0
    async with client:
        try:
            async for line in stdin_lines():
                text = line.decode()
                if text.startswith("/") and not text.startswith("//"):
                    command, _, peer = text.partition(" ")
                    if command != "/with" or not peer:
                        raise InvalidCall(
                            f"{command} is a command for terminals: expected /with USER, or // at the start"
                        )
                elif text:
                    if peer is None:
                        raise InvalidCall("nobody to send this to: expected --with USER")
                    await client.send(peer, text.removeprefix("/"))
                    count += 1
        except (ShardyardError, UnicodeDecodeError) as error:
            reason = "a line is not UTF-8" if isinstance(error, UnicodeDecodeError) else str(error)
            kind = InvalidCall if isinstance(error, InvalidCall | UnicodeDecodeError) else ShardyardError
            raise kind(f"{reason} (the first {count} messages were sent)") from None
    if sys.stderr.isatty():
        print_message(f"{count} sent")


async def _chat(client: "MessagingClient", peer: str | None) -> None:
    """Chat until the user has enough, or a signal comes."""
    from shardyard.cli.messaging.conversation import Conversation

    handler = _StatusLines()
    logging.getLogger("shardyard").addHandler(handler)
    try:
        async with client:
            conversation = Conversation(client)
            running = asyncio.create_task(conversation.run(peer, stdin_lines()))
            loop = asyncio.get_running_loop()
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.add_signal_handler(number, running.cancel)
            await asyncio.gather(running, return_exceptions=True)
            if not running.cancelled():
                running.result()
    finally:
        logging.getLogger("shardyard").removeHandler(handler)


class _StatusLines(logging.Handler):
    """Shows that the connection was lost, or is back."""

    def emit(self, record: logging.LogRecord) -> None:
        print_message(f"  {printable(record.getMessage())}")
