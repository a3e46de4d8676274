"""One interface to all messaging systems: servers that can be killed and started again, and clients that reconnect."""

import asyncio
import contextlib
import os
import random
import signal
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

from tests.servers import run_server

RECONNECT_SECONDS = (0.05, 1.0)
"""The first and the longest pause before a client connects again. Each is doubled, and then a random part of it is
waited."""
CONNECT_TIMEOUT_SECONDS = 30.0

OnText = Callable[["Client", str], None]
"""Called with each text that a client receives."""


@dataclass(frozen=True, slots=True)
class Callbacks:
    """What a client calls as things happen to it."""

    received: OnText
    """A text for its user."""
    copied: OnText
    """A text that another client of its user has sent."""
    acknowledged: OnText
    """The server has acknowledged a text that it sent."""


@dataclass(slots=True)
class Absence:
    """A time without a connection, by the monotonic clock in ns."""

    lost_at: int
    back_at: int = 0


class Client(ABC):
    """A connection of one user to a server, as the system's own client would use it.

    What is not acknowledged is sent again after the client has reconnected, in the same order.
    """

    max_in_flight = 1_000_000
    """Texts that may be unacknowledged; more of them wait."""

    def __init__(self, addresses: Sequence[str], user: str, device: str, callbacks: Callbacks) -> None:
        self.user = user
        self.device = device
        self.absences: list[Absence] = []
        self.refusals: list[str] = []
        """Why sends were refused for good, or connections closed by the server for a reason."""
        self.addresses = addresses
        self._callbacks = callbacks
        self._number = 0
        self._unacknowledged: dict[int, tuple[str, str]] = {}
        self._waiting: deque[int] = deque()
        self._in_flight = 0
        self._is_connected = False
        self._is_closed = False
        self._reconnecting: asyncio.Task[None] | None = None

    @classmethod  # noqa: B027 most need nothing
    async def prepare(cls, addresses: Sequence[str], users: Sequence[str]) -> None:
        """What these users need once, before any of their clients connects."""

    @property
    def is_connected(self) -> bool:
        return self._is_connected

    @property
    def unacknowledged(self) -> int:
        return len(self._unacknowledged)

    async def connect(self) -> None:
        """Connect; returns when the client can send and will receive. Raises `OSError` if that fails."""
        async with asyncio.timeout(CONNECT_TIMEOUT_SECONDS):
            await self._open()
        self._is_connected = True
        self._waiting = deque(self._unacknowledged)
        self._in_flight = 0
        self._flush()

    def send(self, recipient: str, text: str) -> None:
        """Send a text now, or as soon as there is a connection."""
        self._number += 1
        self._unacknowledged[self._number] = (recipient, text)
        self._waiting.append(self._number)
        self._flush()

    async def close(self) -> None:
        self._is_closed = True
        self._is_connected = False
        if self._reconnecting is not None:
            self._reconnecting.cancel()
            await asyncio.gather(self._reconnecting, return_exceptions=True)
        self._disconnect()

    # For the systems

    @abstractmethod
    async def _open(self) -> None:
        """Connect and resume; returns when the client can send and will receive."""

    @abstractmethod
    def _transmit(self, number: int, recipient: str, text: str) -> None:
        """Send a text on the open connection. `number` is the client's own, and ascends."""

    @abstractmethod
    def _disconnect(self) -> None:
        """Close the connection, if there is one."""

    def _acknowledge(self, number: int) -> None:
        if sent := self._unacknowledged.pop(number, None):
            self._in_flight -= 1
            self._callbacks.acknowledged(self, sent[1])
            self._flush()

    def _send_again(self, number: int, after: float) -> None:
        """The server did not take it, and may take it later."""

        def again() -> None:
            if number in self._unacknowledged and self._is_connected:
                self._transmit(number, *self._unacknowledged[number])

        asyncio.get_running_loop().call_later(after, again)

    def _refuse(self, number: int, reason: str) -> None:
        self.refusals.append(reason)
        if self._unacknowledged.pop(number, None):
            self._in_flight -= 1

    def _receive(self, text: str) -> None:
        self._callbacks.received(self, text)

    def _receive_copy(self, text: str) -> None:
        self._callbacks.copied(self, text)

    def _lose(self) -> None:
        """The connection has ended: connect again, unless the client was closed."""
        if not self._is_connected:
            return
        self._is_connected = False
        if not self._is_closed:
            self.absences.append(Absence(time.monotonic_ns()))
            self._reconnecting = asyncio.create_task(self._reconnect())

    def _pause(self) -> float | None:
        """Seconds to wait before the first attempt to reconnect, if the server has said so."""
        return None

    async def _reconnect(self) -> None:
        pause, longest = RECONNECT_SECONDS
        given = self._pause()
        await asyncio.sleep(pause * random.random() if given is None else given)
        while True:
            try:
                await self.connect()
            except (OSError, TimeoutError):
                self._disconnect()
            else:
                self.absences[-1].back_at = time.monotonic_ns()
                return
            pause = min(2 * pause, longest)
            await asyncio.sleep(pause * random.random())

    def _flush(self) -> None:
        while self._is_connected and self._waiting and self._in_flight < self.max_in_flight:
            number = self._waiting.popleft()
            self._in_flight += 1
            self._transmit(number, *self._unacknowledged[number])


@dataclass(slots=True)
class Server:
    """A server process that can be killed and started again on the same port."""

    command: Sequence[str]
    port: int
    folder: Path
    settings: Mapping[str, str] = field(default_factory=dict)
    pid: int = 0
    _stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def start(self) -> None:
        """Start it; returns when it accepts connections."""
        self.pid = self._stack.enter_context(run_server(self.command, self.port, self.folder, self.settings))

    def kill(self) -> None:
        """SIGKILL, to the processes that it has started as well."""
        for pid in reversed(process_tree(self.pid)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def terminate(self) -> None:
        """SIGTERM: it stops as it does for a deploy."""
        os.kill(self.pid, signal.SIGTERM)

    def stop(self) -> None:
        self._stack.close()


@dataclass(slots=True)
class Service:
    """The running servers of a system."""

    servers: list[Server]
    """The first may be killed."""
    addresses: list[str]
    """Where clients connect."""
    helpers: list[int] = field(default_factory=list)
    """Processes beside the servers, such as Redis, whose memory counts."""
    folder: Path = Path()
    """Where the system keeps its data."""
    register: Callable[[Sequence[str]], None] = lambda _: None
    """Create these users, if the system has users that must exist."""

    def memory_bytes(self) -> int:
        """The resident sets of all processes."""
        return sum(map(resident_bytes, self._pids()))

    def written_bytes(self) -> int:
        """What all processes have written to disk."""
        return sum(map(written_bytes, self._pids()))

    def _pids(self) -> list[int]:
        roots = [*(server.pid for server in self.servers), *self.helpers]
        return [pid for root in roots for pid in process_tree(root)]


@contextlib.contextmanager
def running(servers: Sequence[Server]) -> Iterator[None]:
    """Run the servers until the block ends."""
    with contextlib.ExitStack() as stack:
        for server in servers:
            stack.callback(server.stop)
            server.start()
        yield


@dataclass(frozen=True, slots=True)
class Messenger:
    """A system to compare."""

    name: str
    client: type[Client]
    serve: Callable[[Path, int], AbstractContextManager[Service | None]]
    """Start so many servers in a folder, until the block ends. None if it can't be run here; the reason is printed."""
    max_servers: int = 2
    """More than one if a server that is killed leaves another one to reconnect to."""


def process_tree(pid: int) -> list[int]:
    """A process and all processes that it has started, parents first."""
    pids = [pid]
    for parent in pids:
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{parent}/task").iterdir():
                pids.extend(map(int, (task / "children").read_text().split()))
    return pids


def resident_bytes(pid: int) -> int:
    with contextlib.suppress(OSError):
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")
    return 0


def written_bytes(pid: int) -> int:
    with contextlib.suppress(OSError):
        counts = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
        return int(counts["write_bytes"])
    return 0
