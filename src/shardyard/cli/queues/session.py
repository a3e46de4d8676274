"""Requests to brokers: where the brokers are, and a client for commands, which wait for each response."""

# ruff: noqa: PLC0415 commands start quickly: what is slow to import is imported by those that need it

import asyncio
import contextlib
import getpass
import os
from collections.abc import Coroutine, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

import msgspec

from shardyard.model import Denied, InvalidCall, NotABroker, RetryLater, Unreachable, WrongToken

if TYPE_CHECKING:
    from shardyard.client.brokers import CarrierName

T = TypeVar("T")

DEFAULT_BROKER = "http://127.0.0.1:7400"
RETRY_SECONDS = 2.0
"""How long a request is retried while no broker can be reached."""


def addresses(brokers: Sequence[str] | None) -> list[str]:
    """The brokers' addresses: the given ones, else those of SHARDYARD_BROKER, else one on this machine."""
    given = brokers or [os.environ.get("SHARDYARD_BROKER", "")]
    return [url.strip() for urls in given for url in urls.split(",") if url.strip()] or [DEFAULT_BROKER]


def token() -> str | None:
    return os.environ.get("SHARDYARD_TOKEN") or None


@contextlib.contextmanager
def explain_errors() -> Iterator[None]:
    """Raise errors that say what the user of a command can do about them."""
    try:
        yield
    except NotABroker as error:
        raise RetryLater(f"{error}: check --broker, or SHARDYARD_BROKER") from None
    except Unreachable as error:
        more = "name more: --broker may be repeated" if len(error.brokers) == 1 else "name others with --broker"
        raise RetryLater(f"{error}: start one with `shardyard broker`, or {more}") from None
    except WrongToken as error:
        raise Denied(f"{error}: set SHARDYARD_TOKEN") from None
    except UnicodeEncodeError as error:
        raise InvalidCall(f"{error.object!r} cannot be encoded as UTF-8") from None


class Session:
    """A connection to brokers, open while its `with` block is, for a command that waits for each response."""

    def __init__(
        self, brokers: Sequence[str] | None, retry_seconds: float = RETRY_SECONDS, carrier: "CarrierName" = "http"
    ) -> None:
        """`carrier`: as for the client; a single request takes HTTP."""
        from shardyard.client import Brokers as Client

        self.brokers = Client(addresses(brokers), token=token(), retry_seconds=retry_seconds, carrier=carrier)
        self._runner = asyncio.Runner()

    def __enter__(self) -> Self:
        try:
            self.run(self.brokers.__aenter__())
        except BaseException:  # such as Ctrl-C, which comes when it is open already
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._runner.run(self.brokers.__aexit__(kind, error, trace))
        self._runner.close()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        with explain_errors():
            return self._runner.run(work)

    def request(self, method: str, path: str, content: object = None, **query: object) -> Any:
        """The broker's response, decoded from JSON. The request names the user, for the audit log."""
        body = None if content is None else _encode_json(content)
        headers = {"Content-Type": "application/json", "X-Shardyard-User": _user()}
        with explain_errors():
            for value in query.values():
                str(value).encode()  # the HTTP client would silently drop what is not UTF-8
        response = self.run(self.brokers.call(method, path, body, headers, query=query))
        return response.json() if response.body else None


def request(brokers: Sequence[str] | None, method: str, path: str, content: object = None, **query: object) -> Any:
    """Send a single request, and return the broker's response."""
    with Session(brokers) as session:
        return session.request(method, path, content, **query)


def _encode_json(content: object) -> bytes:
    with explain_errors():
        return msgspec.json.encode(content)


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container may run as a user without a name
        return str(os.getuid())
