"""What the commands that talk to brokers have in common: where those are, asking them, and how settings are written."""

import asyncio
import contextlib
import getpass
import os
import re
import sys
from collections.abc import Coroutine, Iterator, Sequence
from datetime import UTC, datetime
from types import TracebackType
from typing import Annotated, Any, Self, TypeVar

import msgspec
import typer

from shardyard.cli.help import Rows
from shardyard.cli.output import Row, print_json, print_table, say
from shardyard.model import InvalidCall, InvalidValue, RetryLater, Unreachable

T = TypeVar("T")

DEFAULT_BROKER = "http://127.0.0.1:7400"
PATIENCE_SECONDS = 2.0
"""For which brokers may be out of reach before a person hears of it."""
OWN = "shardyard."
"""How the names of topics and groups begin that Shardyard keeps for itself."""
_NAME = re.compile(r"(?!\.+$)[A-Za-z0-9._~-]+")

Brokers = Annotated[
    list[str] | None,
    typer.Option(
        "--broker",
        "-b",
        metavar="URL",
        help="A broker, such as http://10.0.0.5:7400 or 10.0.0.5:7400; may be given several times. "
        f"Default: SHARDYARD_BROKER, or {DEFAULT_BROKER}.",
        show_default=False,
    ),
]
Topic = Annotated[str, typer.Argument(metavar="TOPIC", help="The topic's name.", show_default=False)]
Group = Annotated[str, typer.Argument(metavar="GROUP", help="The group's name.", show_default=False)]
Settings = Annotated[
    list[str],
    typer.Argument(
        metavar="NAME=VALUE...", help="What to set. A list is written a,b; none takes it away.", show_default=False
    ),
]
TIME = "2026-01-31T12:00:00Z, or ms since 1970"


def Text(*names: str, metavar: str, help: str) -> Any:  # noqa: A002, N802 it stands where typer.Option would
    """An option that takes a text, or a number that is no whole one."""
    return typer.Option(*names, metavar=metavar, help=help, show_default=False)


def addresses(brokers: Sequence[str] | None) -> list[str]:
    """Where the brokers are: as named, as the environment has it, or on this machine."""
    told = brokers or [os.environ.get("SHARDYARD_BROKER", "")]
    return [url.strip() for some in told for url in some.split(",") if url.strip()] or [DEFAULT_BROKER]


def token() -> str | None:
    return os.environ.get("SHARDYARD_TOKEN") or None


def checked(name: str) -> str:
    """A name of a topic or a group, as it can stand in a path."""
    if _NAME.fullmatch(name) is None:
        raise InvalidValue("name", name, "letters, digits, '.', '_' and '-'")
    return name


@contextlib.contextmanager
def told_plainly() -> Iterator[None]:
    """Says what to do when no broker is there."""
    try:
        yield
    except Unreachable as error:
        more = "name others too: --broker may be repeated" if len(error.brokers) == 1 else "name others by --broker"
        raise RetryLater(f"{error}: start one by `shardyard broker`, or {more}") from None
    except UnicodeEncodeError as error:
        raise InvalidCall(f"{error.object!r} is not text that UTF-8 can hold") from None


class Session:
    """Calls brokers, from entering the block to leaving it, for a command that waits for each answer."""

    def __init__(self, brokers: Sequence[str] | None, patience: float = PATIENCE_SECONDS) -> None:
        from shardyard.client import Brokers as Client  # noqa: PLC0415 slow to import, and other commands need none

        self.brokers = Client(addresses(brokers), token=token(), patience=patience)
        self._runner = asyncio.Runner()

    def __enter__(self) -> Self:
        self.wait(self.brokers.__aenter__())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._runner.run(self.brokers.__aexit__(kind, error, trace))
        self._runner.close()

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        with told_plainly():
            return self._runner.run(work)

    def ask(self, method: str, path: str, content: object = None, **query: object) -> Any:
        """What a broker answers. It is told who asks, for its audit."""
        body = None if content is None else _json(content)
        headers = {"Content-Type": "application/json", "X-Shardyard-User": _user()}
        with told_plainly():
            for value in query.values():
                str(value).encode()  # else what is not UTF-8 would be left out
        told = self.wait(self.brokers.call(method, path, body, headers, query=query))
        return told.json() if told.body else None


def ask(brokers: Sequence[str] | None, method: str, path: str, content: object = None, **query: object) -> Any:
    """The answer to a single question."""
    with Session(brokers) as session:
        return session.ask(method, path, content, **query)


def _json(content: object) -> bytes:
    with told_plainly():
        return msgspec.json.encode(content)


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container may run as a user without a name
        return str(os.getuid())


def changes(kind: type[msgspec.Struct], told: Sequence[str]) -> dict[str, Any]:
    """Settings written as NAME=VALUE, as what they are in `kind`. A list is written 1,5,30; none is null."""
    from shardyard.wire.validation import in_words, masked, unknown  # noqa: PLC0415 slow to import

    fields = {field.name: field for field in msgspec.structs.fields(kind)}
    found = {}
    for pair in told:
        name, equals, text = pair.partition("=")
        if not equals:
            raise InvalidValue("setting", pair, f"NAME=VALUE, with a name of {', '.join(fields)}")
        if name not in fields:
            raise unknown("setting", name, fields)
        value: object = None if text == "none" else text
        if isinstance(fields[name].default, tuple):
            value = [part for part in text.split(",") if part]
        try:
            found[name] = msgspec.to_builtins(msgspec.convert(value, fields[name].type, strict=False))
        except msgspec.ValidationError:
            raise InvalidValue(name, masked(name, text), in_words(fields[name].type, "none")) from None
    return found


def print_listed(rows: Sequence[Row], what: str, hidden: int = 0, *, json: bool) -> None:
    """A list, and a remark if there is nothing on it. On a terminal also on how many are hidden."""
    if json:
        print_json(rows)
    else:
        print_table(rows)
        if not rows:
            say(f"no {what}")
    if hidden and sys.stderr.isatty():
        say(f"--all shows {hidden} more, which Shardyard keeps for itself")


def settings_help(kind: type[msgspec.Struct]) -> Rows:
    """The settings there are, with what they take and what they are by default."""
    from shardyard.wire.validation import in_words  # noqa: PLC0415 slow to import

    return [
        (field.name, f"{in_words(field.type, 'none')}{_by_default(field.default)}")
        for field in msgspec.structs.fields(kind)
    ]


def _by_default(value: object) -> str:
    if value is msgspec.UNSET:
        return ""
    return f" [default: {shown_setting(value) or 'empty'}]"


def shown_setting(value: object) -> str:
    """A setting as it is written: a list 1,5,30; nothing none."""
    if isinstance(value, list | tuple):
        return ",".join(map(shown_setting, value))
    if isinstance(value, float):
        return f"{value:g}"
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def time_ms(name: str, text: str | None) -> int | None:
    """A time as milliseconds since 1970."""
    if text is None or text.isdecimal():
        return None if text is None else int(text)
    try:
        when = datetime.fromisoformat(text)
    except ValueError:
        expected = "a time such as 2026-01-31T12:00:00Z, or milliseconds since 1970"
        raise InvalidValue(name, text, expected) from None
    return int((when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp() * 1000)


def shown_time(ms: float) -> str:
    return datetime.fromtimestamp(ms / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
