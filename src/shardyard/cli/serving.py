"""What commands that serve until they are interrupted have in common."""

import asyncio
import contextlib
import ctypes
import errno
import gc
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib.abc import MetaPathFinder
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Self

from shardyard.model import ShardyardError
from shardyard.model.url import parse_url

if TYPE_CHECKING:
    import uvicorn


PR_SET_THP_DISABLE = 41
"""From Linux' `prctl.h`."""


class _Hidden(MetaPathFinder):
    """Packages that count as not installed. (None in `sys.modules` would do for Python code, but not for PyArrow's.)"""

    def __init__(self, packages: Sequence[str]) -> None:
        self._packages = packages

    def find_spec(self, fullname: str, *_: object) -> None:
        if fullname in self._packages:
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)


@contextlib.contextmanager
def without_packages(*packages: str) -> Iterator[None]:
    """Within the block, these packages count as not installed, unless they are loaded already."""
    hidden = _Hidden(packages)
    sys.meta_path.insert(0, hidden)
    try:
        yield
    finally:
        sys.meta_path.remove(hidden)


def at_end_of_input(stop: Callable[[], object]) -> None:
    """Call `stop` at the end of standard input: when the process that has its other end is gone."""
    loop, descriptor = asyncio.get_running_loop(), sys.stdin.fileno()

    def read() -> None:
        if not os.read(descriptor, 1024):
            loop.remove_reader(descriptor)
            stop()

    loop.add_reader(descriptor, read)


class Sigterm:
    """What SIGTERM does within the block: it stops the server, also if it comes before that has started. Uvicorn raises
    the signal again after it has stopped; then it does nothing, so that what was opened is closed, and members leave
    their groups."""

    def __init__(self, *others: signal.Signals) -> None:
        """`others`: signals that do the same."""
        self._signals = (signal.SIGTERM, *others)
        self._server: uvicorn.Server | None = None
        self._received = False

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._receive) for number in self._signals}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)

    def stops(self, server: "uvicorn.Server") -> None:
        """From now on it stops this server; at once if it has come already."""
        self._server = server
        if self._received:
            server.handle_exit(signal.SIGTERM, None)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._received = True
        if self._server is not None and not self._server.should_exit:
            self._server.handle_exit(number, frame)


def reduce_stalls() -> None:
    """Keep Python and the kernel from stopping the event loop for milliseconds at a time.

    With thousands of connections, the garbage collector would take more time than everything else that a broker does
    while nothing happens. It finds next to nothing: only reference cycles need it. The newest objects are examined
    a thousand at a time, which takes some tenths of a millisecond: clients would notice if it were ten times as
    many.

    Arrow's allocator asks the kernel for huge pages. It takes milliseconds to clear one, and small pages do as well."""
    gc.freeze()
    gc.set_threshold(1_000, 1_000, 20)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0)


def listening_socket(host: str, port: int, backlog: int) -> socket.socket:
    """Listen before anything else is opened: a wrong address fails without side effects, and early clients wait."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=backlog)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ShardyardError(
                f"{host}:{port} is in use: choose another port with --port (0 picks a free one)"
            ) from None
        code = error.errno or 0
        reason = os.strerror(code) if code >= 0 else "it cannot be resolved"  # below 0 are codes of getaddrinfo
        raise ShardyardError(
            f"cannot listen on {host}:{port} ({reason}): choose another address with --host and --port"
        ) from None


def absolute_url(what: str, url: str) -> str:
    """The URL without a password and with an absolute path, since the same relative one is another log in another
    working directory."""
    engine = parse_url(what, url)
    return str(replace(engine, path=str(Path(engine.path).absolute())) if engine.engine == "sqlite" else engine)
