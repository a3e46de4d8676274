"""A client of a messaging server that has nothing in common with `shardyard.client`: JSON frames over aiohttp, written
from the description of the protocol, so that a mistake of the library can't hide one of the server."""

import asyncio
import contextlib
import json
import random
import time
from collections import OrderedDict
from typing import Any

import aiohttp

from tests.messaging.ledger import ClientLedger, Ledger, Sending

SUBPROTOCOL = "shardyard.messaging.1.json"
KNOWN_IDS = 2000
MAX_UNANSWERED = 24
PING_SECONDS = 1.0
FRAMES_PER_MESSAGE = 8
PAGE_SECONDS = 60.0
ANSWER_SECONDS = 3.0
GIVE_UP = range(4200, 4300)


class RawClient:
    """One client of a user. `is_patient`: it stays with a server that does not answer until the connection ends."""

    def __init__(
        self, ledger: Ledger, notes: ClientLedger, urls: list[str], *, is_patient: bool, is_hasty: bool
    ) -> None:
        """`is_hasty`: it sends what is unanswered right after its `hello`, before it is welcomed."""
        self.notes = notes
        self.is_caught_up = False
        self._ledger = ledger
        self._urls = urls
        self._is_patient, self._is_hasty = is_patient, is_hasty
        self._number = 0
        self._written = 0
        """The last number that was sent on this connection."""
        self._unanswered: OrderedDict[int, Sending] = OrderedDict()
        self._answered = asyncio.Event()
        self._position: dict[str, int] | None = None
        self._last: str | None = None
        self._sent: str | None = None
        self._known: OrderedDict[str, int | None] = OrderedDict()
        self._count = 0
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._questions = 0
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._is_welcome = False
        self._pong_at = 0.0
        self._task: asyncio.Task[None] | None = None
        self._http: aiohttp.ClientSession | None = None

    async def start(self) -> None:
        self._http = aiohttp.ClientSession()
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        assert self._task is not None
        assert self._http is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self._http.close()
        for sending in self._unanswered.values():
            sending.given_up = True

    async def restart(self, seconds: float) -> None:
        """Break the connection, and be away for a while. Numbers, position and what is unanswered stay."""
        assert self._task is not None
        self.notes.note("goes away")
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await asyncio.sleep(seconds)
        self._task = asyncio.create_task(self._run())

    # Sending

    async def send(self, recipients: list[str], padding: str) -> None:
        """Send to these users without waiting for answers, except while too many are missing."""
        for recipient in recipients:
            while self._unanswered and (
                len(self._unanswered) >= MAX_UNANSWERED
                or self._number - next(iter(self._unanswered)) >= 2 * MAX_UNANSWERED
            ):
                self._answered.clear()
                await self._answered.wait()
            self._number += 1
            sending = self._ledger.new_sending(self.notes, recipient, padding)
            self._unanswered[self._number] = sending
            if self._is_welcome:
                await self._write(*self._unwritten())

    @property
    def unanswered(self) -> int:
        return len(self._unanswered)

    async def page(self, peer: str, before: str | None, limit: int) -> dict[str, Any]:
        """A page of the history. It is asked for again if the client is sent elsewhere meanwhile."""
        async with asyncio.timeout(PAGE_SECONDS):
            while True:
                self._questions += 1
                number = 10**9 + self._questions
                future = self._waiting[number] = asyncio.get_running_loop().create_future()
                await self._write({"type": "history", "number": number, "with": peer, "before": before, "limit": limit})
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(ANSWER_SECONDS):
                        page: dict[str, Any] = await future
                        return page
                self._waiting.pop(number, None)

    def _unwritten(self) -> list[dict[str, Any]]:
        """What is unanswered and was not sent on this connection yet. The caller sends it."""
        numbers = [number for number in self._unanswered if number > self._written]
        self._written = self._number
        return [_send_frame(number, self._unanswered[number]) for number in numbers]

    async def _write(self, *frames: dict[str, Any]) -> None:
        if self._socket is not None and frames:
            with contextlib.suppress(ConnectionError, RuntimeError, aiohttp.ClientError):
                for first in range(0, len(frames), FRAMES_PER_MESSAGE):
                    await self._socket.send_str(json.dumps(frames[first : first + FRAMES_PER_MESSAGE]))

    # Connections

    async def _run(self) -> None:
        address: str | None = None
        token = ""
        while True:
            try:
                if address is None:
                    token, address = await self._session()
                address = await self._connection(token, address)
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                self.notes.note(f"no connection: {error!r:.80}")
                address = None
            finally:
                self._socket, self._is_welcome, self.is_caught_up = None, False, False
            await asyncio.sleep(random.uniform(0.02, 0.3))

    async def _session(self) -> tuple[str, str]:
        assert self._http is not None
        async with (
            asyncio.timeout(2),
            self._http.post(random.choice(self._urls) + "/v1/session", json={"user": self.notes.user}) as response,
        ):
            response.raise_for_status()
            body = await response.json()
            return body["token"], body["address"]

    async def _connection(self, token: str, address: str) -> str | None:
        """One connection. Returns where to connect next, if the server has said so."""
        assert self._http is not None
        async with asyncio.timeout(5):
            socket = await self._http.ws_connect(address, protocols=[SUBPROTOCOL], max_msg_size=2**26)
        try:
            self._socket, self._count, self._pong_at = socket, 0, time.monotonic()
            hello: dict[str, Any] = {"type": "hello", "token": token, "device": self.notes.device}
            hello |= {"position": self._position, "last": self._last, "sent": self._sent}
            self._written = 0
            await self._write(hello, *(self._unwritten() if self._is_hasty else ()))
            pings = asyncio.create_task(self._ping(socket))
            try:
                async for message in socket:
                    frames = json.loads(message.data)
                    for frame in frames if isinstance(frames, list) else [frames]:
                        if frame["type"] == "elsewhere":
                            self.notes.note(f"sent elsewhere: {frame}")
                            await asyncio.sleep(min(frame["after"], 5.0))
                            next_address: str | None = frame["address"]
                            return next_address
                        await self._handle(frame)
            finally:
                pings.cancel()
        finally:
            _drop(socket)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(2):
                    await socket.close()
        self.notes.note(f"connection to {address} has ended with code {socket.close_code}")
        if socket.close_code in GIVE_UP:
            self.notes.problems.append(f"{self.notes.name} was told to give up with code {socket.close_code}")
        return None

    async def _ping(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        """An impatient client leaves a server that does not answer."""
        while True:
            await asyncio.sleep(PING_SECONDS)
            await self._write({"type": "ping"})
            if not self._is_patient and time.monotonic() - self._pong_at > 3 * PING_SECONDS:
                self.notes.note("gets no answer")
                _drop(socket)

    # Frames

    async def _handle(self, frame: dict[str, Any]) -> None:
        self._pong_at = time.monotonic()
        match frame["type"]:
            case "welcome":
                await self._welcome(frame)
            case "deliver":
                self._deliver(frame)
            case "caught-up":
                self._position = frame["position"]
                self.is_caught_up = True
            case "pong":
                if frame["position"] is not None:
                    self._position = frame["position"]
            case "sent":
                sending = self._unanswered.pop(frame["number"], None)
                self._answered.set()
                if sending is not None:
                    sending.id = frame["id"]
                    self._note_sent(frame["id"])
            case "page":
                if (asked := self._waiting.pop(frame["number"], None)) is not None:
                    asked.set_result(frame)
            case _:
                self.notes.problems.append(f"{self.notes.name} got {frame}")

    async def _welcome(self, frame: dict[str, Any]) -> None:
        self.notes.note_creation()
        self.notes.note(f"welcomed by {frame['server']} ({frame['ownership']}), {frame['resume']} {frame['position']}")
        self._ledger.owners[self.notes.user, frame["ownership"]].add(frame["server"])
        if self._position is not None and frame["position"]["offset"] > self._position["offset"]:
            self.notes.problems.append(f"{self.notes.name} at {self._position} was welcomed at {frame['position']}")
        self._position = frame["position"]
        if self._sent is None and frame.get("sent") is not None:
            self._sent = frame["sent"]
        self._is_welcome = True
        await self._write(*self._unwritten())

    def _deliver(self, frame: dict[str, Any]) -> None:
        assert self._position is not None
        if frame["seq"] != self._count:
            self.notes.problems.append(f"{self.notes.name}: sequence {frame['seq']} after {self._count} entries")
        self._count += len(frame["entries"])
        for entry in frame["entries"]:
            offset = entry.get("offset")
            if entry["from"] == self.notes.user:
                self._note_sent(entry["id"])
            if offset is not None:
                if offset < self._position["offset"]:
                    continue
                self._position = {**self._position, "epoch": frame["epoch"], "offset": offset + 1}
                self._last = entry["id"]
            known = self._known.get(entry["id"], offset)
            if known != offset and known is not None and offset is not None:
                self.notes.problems.append(f"{self.notes.name}: {entry} was at offset {known} before")
            if entry["id"] in self._known:
                continue
            self._known[entry["id"]] = offset
            if len(self._known) > KNOWN_IDS:
                self._known.popitem(last=False)
            if entry["type"] == "message":
                self.notes.received(entry["id"], entry["from"], entry["to"], entry["text"])

    def _note_sent(self, id_: str) -> None:
        if self._sent is None or int(id_) > int(self._sent):
            self._sent = id_


def _send_frame(number: int, sending: Sending) -> dict[str, Any]:
    return {"type": "send", "number": number, "to": sending.recipient, "text": sending.text}


def _drop(socket: aiohttp.ClientWebSocketResponse) -> None:
    """End the connection without a close frame. aiohttp has no public way to do that."""
    connection = socket._response.connection
    if connection is not None and connection.transport is not None:
        connection.transport.abort()
