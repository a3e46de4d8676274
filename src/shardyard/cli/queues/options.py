"""Arguments and options that the commands for queues share, and how names and times are read and written."""

import re
from base64 import b64decode
from datetime import UTC, datetime
from typing import Annotated, Any

import typer

from shardyard.cli.output import print_message
from shardyard.cli.queues.session import DEFAULT_BROKER
from shardyard.model import InvalidValue

_NAME = re.compile(r"(?!\.+$)[A-Za-z0-9._~-]+")

Brokers = Annotated[
    list[str] | None,
    typer.Option(
        "--broker",
        "-b",
        metavar="URL",
        help="A broker, such as http://10.0.0.5:7400 or 10.0.0.5:7400; may be repeated. "
        f"Default: SHARDYARD_BROKER, or {DEFAULT_BROKER}.",
        show_default=False,
    ),
]
Topic = Annotated[str, typer.Argument(metavar="TOPIC", help="The topic's name.", show_default=False)]
Group = Annotated[str, typer.Argument(metavar="GROUP", help="The group's name.", show_default=False)]
Settings = Annotated[
    list[str],
    typer.Argument(
        metavar="NAME=VALUE...",
        help="The settings to change. Write a list as a,b; the value none, or no value, takes a setting away.",
        show_default=False,
    ),
]
TIME = "2026-01-31T12:00:00Z (without a zone: local time), or ms since 1970"


def check_name(name: str) -> str:
    """The name of a topic, once it is known to be safe in a URL's path."""
    if _NAME.fullmatch(name) is None:
        raise InvalidValue("name", name, "letters, digits, '.', '_' and '-', and not only dots")
    return name


def check_group(name: str) -> str:
    """The same for the name of a group. Those of Shardyard's own groups have dots, which others may not have."""
    if _NAME.fullmatch(name) is None:
        raise InvalidValue("group", name, "letters, digits, '_' and '-'")
    return name


def parse_time(option: str, text: str | None) -> int | None:
    """The time in milliseconds since 1970. One without a zone is local time, which is said on standard error."""
    if text is None or text.isdecimal():
        return None if text is None else int(text)
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        expected = "a time such as 2026-01-31T12:00:00Z, or milliseconds since 1970"
        raise InvalidValue(option, text, expected) from None
    if time.tzinfo is None:
        time = time.astimezone()
        print_message(f"{option} has no zone, and is taken as local time: {time.isoformat()}")
    return int(time.timestamp() * 1000)


def text_of(record: dict[str, Any], name: str) -> str | None:
    """The `value` or `key` of a record in JSON; what is not UTF-8 in it is escaped, as `consume` does."""
    encoded: str | None = record.get(f"{name}_base64")
    if encoded is not None:
        return b64decode(encoded).decode(errors="backslashreplace")
    text: str | None = record.get(name)
    return text


def format_time(ms: float) -> str:
    return datetime.fromtimestamp(ms / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
