"""Options that the commands for messaging share, and where the servers are."""

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import Annotated

import typer

from shardyard.client.brokers import server_address
from shardyard.model import Denied, RetryLater, Unreachable, WrongToken

DEFAULT_SERVER = "http://127.0.0.1:7500"
PORT = 7500

Servers = Annotated[
    list[str] | None,
    typer.Option(
        "--server",
        "-s",
        metavar="URL",
        help="A messaging server, such as http://10.0.0.5:7500 or 10.0.0.5:7500; may be repeated. Any of them knows "
        f"where users are. Default: SHARDYARD_MESSENGER, or {DEFAULT_SERVER}.",
        show_default=False,
    ),
]


def addresses(servers: Sequence[str] | None) -> list[str]:
    """The servers' addresses: the given ones, else those of SHARDYARD_MESSENGER, else one on this machine."""
    given = servers or [os.environ.get("SHARDYARD_MESSENGER", "")]
    named = [url.strip() for urls in given for url in urls.split(",") if url.strip()] or [DEFAULT_SERVER]
    return [server_address(url, "--server", PORT) for url in named]


@contextlib.contextmanager
def explain_errors() -> Iterator[None]:
    """Raise errors that say what the user of a command can do about them."""
    try:
        yield
    except Unreachable as error:
        more = "start one with `shardyard messenger`, or name others with --server"
        raise RetryLater(f"{error}: {more}") from None
    except WrongToken as error:
        raise Denied(f"{error}: give the secret with --secret or in SHARDYARD_SECRET") from None
