"""`shardyard chat`: chat in a terminal, or send the lines of a pipe."""

# ruff: noqa: PLC0415 commands start quickly: what is slow to import is imported by those that need it

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from shardyard.cli.messaging.lines import stdin_lines
from shardyard.cli.messaging.options import Servers, addresses, explain_errors
from shardyard.cli.options import value_option
from shardyard.cli.output import print_message, printable
from shardyard.model import InvalidCall, ShardyardError, Unsupported

if TYPE_CHECKING:
    from shardyard.cli.messaging.places import Place
    from shardyard.client import MessagingClient

CONNECT_SECONDS = 5.0
"""How long to try that."""
LINK_LOGGER = "shardyard.client.messaging_link"
"""It says that the connection was lost, and that it is back."""


def chat(
    user: Annotated[str, typer.Option("--as", metavar="USER", help="Who you are.", show_default=False)],
    peer: Annotated[str | None, value_option("--with", metavar="USER", help="Whom to talk to.")] = None,
    channel: Annotated[
        str | None,
        value_option("--channel", metavar="NAME", help="Or the channel to be in; you join it unless you are a member."),
    ] = None,
    servers: Servers = None,
    secret: Annotated[
        str | None,
        value_option(
            "--secret", metavar="SECRET", help="The secret of the servers. Default: SHARDYARD_SECRET, if they have one."
        ),
    ] = None,
) -> None:
    """Chat with other users. Each line that you enter is sent to the user or the channel that you talk to.

    Shows the last messages of the conversation or channel, then what arrives, who is online and who is typing, and
    when your messages were delivered and seen. Lines that begin with a slash are commands: /with USER talks to another
    user, /channel NAME joins a channel and talks there, /chats and /channels list yours, /history shows older messages,
    /leave leaves the channel, /who USER shows whether a user is online, /quit ends, and so do Ctrl-D and Ctrl-C. To
    send a line that begins with a slash, write two.

    If standard input is not a terminal, its lines are sent, and the command ends when all of them are durable.

    Channels need `shardyard coordinator` and `shardyard fanout-worker` to run, which forward what is posted.

    Examples:

      shardyard chat --as alice --with bob

      shardyard chat --as alice --channel general

      echo "The build is done." | shardyard chat --as ci --channel builds

      shardyard chat --as alice --server http://10.0.0.5:7500
    """
    if peer is not None and channel is not None:
        raise InvalidCall("--with and --channel were both given: expected one of them")
    from shardyard.client import MessagingClient

    secret = secret or os.environ.get("SHARDYARD_SECRET") or None
    interactive = sys.stdin.isatty()
    client = MessagingClient(
        addresses(servers), user, secret=secret, connect_timeout=CONNECT_SECONDS, mark_delivered=interactive
    )
    with explain_errors():
        asyncio.run(_chat(client, peer, channel) if interactive else _send_lines(client, peer, channel))


async def _send_lines(client: "MessagingClient", peer: str | None, channel: str | None) -> None:
    """Send the lines of standard input, one after the other."""
    count = 0
    has_joined = False
    async with client:
        try:
            place = await _place(client, peer, channel)
            has_joined = channel is not None
            async for line in stdin_lines():
                text = line.decode()
                if text.startswith("/") and not text.startswith("//"):
                    command, _, name = text.partition(" ")
                    if command not in ("/with", "/channel") or not name:
                        expected = "expected /with USER, /channel NAME, or // at the start"
                        raise InvalidCall(f"{command} is a command for terminals: {expected}")
                    place = await (_place(client, name, None) if command == "/with" else _place(client, None, name))
                    has_joined = has_joined or command == "/channel"
                elif text:
                    if place is None:
                        raise InvalidCall("nobody to send this to: expected --with USER or --channel NAME")
                    await place.send(text.removeprefix("/"))
                    count += 1
        except (ShardyardError, UnicodeDecodeError) as error:
            reason = "a line is not UTF-8" if isinstance(error, UnicodeDecodeError) else str(error)
            # that the servers have no channels yet is not the caller's mistake
            is_invalid = isinstance(error, InvalidCall | UnicodeDecodeError) and not isinstance(error, Unsupported)
            kind = InvalidCall if is_invalid and not (count or has_joined) else ShardyardError
            first = "the first message was" if count == 1 else f"the first {count} messages were"
            raise kind(f"{reason} ({first if count else 'nothing was'} sent)") from None
    if sys.stderr.isatty():
        print_message(f"{count} sent")


async def _place(client: "MessagingClient", peer: str | None, channel: str | None) -> "Place | None":
    """Where lines go to."""
    from shardyard.cli.messaging.places import WithUser, joined

    if channel is not None:
        return await joined(client, channel)
    return None if peer is None else WithUser(client, peer)


async def _chat(client: "MessagingClient", peer: str | None, channel: str | None) -> None:
    """Chat until the user has enough, or a signal comes."""
    from shardyard.cli.messaging.conversation import Conversation

    with status_lines():
        async with client:
            conversation = Conversation(client)
            running = asyncio.create_task(conversation.run(peer, channel, stdin_lines()))
            loop = asyncio.get_running_loop()
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.add_signal_handler(number, running.cancel)
            await asyncio.gather(running, return_exceptions=True)
            unsent = conversation.unsent
            for text in unsent:
                print_message(f"  not sent: {printable(text)}")
            if not running.cancelled():
                running.result()
            if unsent:
                count = "1 message was" if len(unsent) == 1 else f"{len(unsent)} messages were"
                raise ShardyardError(f"{count} not sent, because no server acknowledged that")


@contextlib.contextmanager
def status_lines() -> Iterator[None]:
    """Show warnings of the client meanwhile, and that a lost connection is back."""
    logger, link = logging.getLogger("shardyard"), logging.getLogger(LINK_LOGGER)
    handler, level = _StatusLines(), link.level
    logger.addHandler(handler)
    link.setLevel(logging.INFO)
    try:
        yield
    finally:
        link.setLevel(level)
        logger.removeHandler(handler)


class _StatusLines(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        print_message(f"  {printable(record.getMessage())}")
