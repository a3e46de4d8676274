"""Shardyard's messaging servers, and a client that speaks their protocol in MessagePack."""

import asyncio
import contextlib
import random
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import aiohttp
from bench.messengers.messenger import Messenger, Server, Service, running
from bench.messengers.websocket import WebSocketClient
from tests.servers import READY_SECONDS, free_port

from shardyard.wire import messaging as wire
from shardyard.wire.messaging import Format

SESSIONS_AT_ONCE = 16
KNOWN_IDS = 2_000
"""Ids that a client remembers, to drop what it has got before."""
RETRY_SECONDS = 0.1
PROBES = 32
"""Users by whom it is seen which servers own partitions."""


class ShardyardClient(WebSocketClient):
    """Resumes from its position, and drops entries that it knows."""

    max_in_flight = 32
    sessions: dict[str, tuple[str, str]] = {}  # noqa: RUF012 of all clients of the process
    """The access token and the address of each user."""

    def __init__(self, addresses: Sequence[str], *arguments: object) -> None:
        super().__init__(addresses, *arguments)  # type: ignore[arg-type]
        self._position: wire.Position | None = None
        self._last: str | None = None
        self._sent: str | None = None
        self._known: dict[str, None] = {}
        self._after: float | None = None
        self._has_moved = False

    @classmethod
    async def prepare(cls, addresses: Sequence[str], users: Sequence[str]) -> None:
        """Sign in all users."""
        waiting = list(users)
        async with aiohttp.ClientSession() as http:

            async def sign_in_some() -> None:
                while waiting:
                    user = waiting.pop()
                    cls.sessions[user] = await sign_in(http, random.choice(addresses), user)

            await asyncio.gather(*(sign_in_some() for _ in range(SESSIONS_AT_ONCE)))

    async def _open(self) -> None:
        if self._has_moved:  # and nobody has said where to
            async with aiohttp.ClientSession() as http:
                self.sessions[self.user] = await sign_in(http, random.choice(self.addresses), self.user)
        self._has_moved = True  # until the server has said that it is the right one
        await super()._open()
        self._has_moved = False

    def _url(self) -> str:
        return self.sessions[self.user][1]

    def _headers(self) -> dict[str, str]:
        return {"Sec-WebSocket-Protocol": Format.MSGPACK.value}

    def _greet(self) -> None:
        token = self.sessions[self.user][0]
        self._send(wire.Hello(token, self.device, self._position, self._last, self._sent))

    def _send(self, frame: object) -> None:
        self._send_binary(wire.encode(frame, Format.MSGPACK))

    def _transmit(self, number: int, recipient: str, text: str) -> None:
        self._send(wire.Send(number, recipient, text))

    def handle(self, message: bytes) -> None:
        for frame in wire.decode_from_server(message, Format.MSGPACK):
            match frame:
                case wire.Deliver():
                    self._take(frame)
                case wire.Sent():
                    self._sent = frame.id
                    self._acknowledge(frame.number)
                case wire.Welcome():
                    self._position = frame.position
                    self._opened()
                case wire.Refused(retry=True, number=int(number)):
                    self._send_again(number, RETRY_SECONDS)
                case wire.Refused():
                    self._refuse(frame.number or 0, f"{frame.code}: {frame.message}")
                case wire.Gap():
                    self.refusals.append(f"gap: {frame.reason}")
                case wire.Elsewhere():
                    self._after = frame.after
                    if frame.address is not None:
                        self.sessions[self.user] = (self.sessions[self.user][0], frame.address)
                    self._has_moved = frame.address is None

    def _take(self, frame: wire.Deliver) -> None:
        for entry in frame.entries:
            if entry.offset is not None and self._position is not None:
                if entry.offset < self._position.offset and frame.epoch == self._position.epoch:
                    continue
                self._position = wire.Position(self._position.partition, frame.epoch, entry.offset + 1)
                self._last = entry.id
            if entry.id in self._known:
                continue
            self._known[entry.id] = None
            if len(self._known) > KNOWN_IDS:
                del self._known[next(iter(self._known))]
            if isinstance(entry, wire.Message):
                if entry.sender == self.user:
                    self._sent = entry.id
                    self._receive_copy(entry.text)
                else:
                    self._receive(entry.text)

    def closing(self, code: int, reason: str) -> None:
        if not 4100 <= code < 4200 and code not in {1001, 1012}:
            self.refusals.append(f"closed with {code} {reason}")

    def _pause(self) -> float | None:
        pause, self._after = self._after, None
        return pause


async def sign_in(http: aiohttp.ClientSession, server: str, user: str) -> tuple[str, str]:
    """The access token and the address of a user. Servers without a secret take anyone."""
    try:
        async with http.post(f"{server}/v1/session", json={"user": user}) as response:
            session = await response.json()
            if response.status != 200:
                raise ConnectionError(f"no session for {user}: status {response.status}, {session}")
            return session["token"], session["address"]
    except aiohttp.ClientError as error:
        raise ConnectionError(str(error)) from error


@contextlib.contextmanager
def serve(mirror: str, folder: Path, count: int) -> Iterator[Service]:
    """Run `count` messaging servers on the default log, which survives a power cut, each as a process of its own."""
    ports = [free_port() for _ in range(count)]
    stores = {"--log": "log", "--registry": "registry.db", "--history": "history.db"}
    engines = [word for option, name in stores.items() for word in (option, f"sqlite:///{folder}/{name}")]
    command = [sys.executable, "-m", "shardyard.cli", "messenger", *engines, "--mirror", mirror]
    servers = [Server([*command, "--port", str(port)], port, folder) for port in ports]
    addresses = [f"http://127.0.0.1:{port}" for port in ports]
    with running(servers):
        asyncio.run(wait_until_shared(addresses))
        yield Service(servers, addresses, folder=folder)


async def wait_until_shared(addresses: Sequence[str]) -> None:
    """Until each of the servers owns partitions."""
    async with asyncio.timeout(READY_SECONDS), aiohttp.ClientSession() as http:
        owners: set[str] = set()
        while len(owners) < len(addresses):
            await asyncio.sleep(0.1)
            owners = set()
            for i in range(PROBES):
                with contextlib.suppress(ConnectionError):
                    owners.add((await sign_in(http, addresses[0], f"probe-{i}"))[1])


SHARDYARD_LOG = Messenger("Shardyard, mirror log", ShardyardClient, partial(serve, "log"), max_servers=3)
SHARDYARD_LOCAL = Messenger("Shardyard, mirror local", ShardyardClient, partial(serve, "local"), max_servers=3)
