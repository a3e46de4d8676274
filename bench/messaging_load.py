"""A process with many clients of a messaging system, and what they do: connect, send at a rate, send as much as
possible, live through a restart."""

import asyncio
import gc
import itertools
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from multiprocessing.connection import Connection

import uvloop
from bench.messengers.messenger import Callbacks, Client

TEXT_BYTES = 100
TICK_SECONDS = 0.001
"""How often what is due is sent."""
CONNECTING_AT_ONCE = 100
CONNECT_ATTEMPTS = 5
"""Of each client in the beginning."""
CONNECT_PAUSE_SECONDS = 0.5
"""After a failed attempt."""
WARM_UP_SECONDS = 1.0
SETTLE_SECONDS = 60.0
"""The longest wait for messages after the last one was sent."""
QUIET_SECONDS = 3.0
"""Without a change, after which nothing more is expected."""
POLL_SECONDS = 0.05

Condition = Callable[[], bool]


@dataclass(frozen=True, slots=True)
class Exchanged:
    """Texts that were sent at a rate. The latencies begin when a text was due."""

    received: list[float]
    """Seconds until its recipient had it."""
    acknowledged: list[float]
    """Seconds until its sender knew that the server had it."""
    copied: list[float]
    """Seconds until another client of its sender had it."""
    per_second: float
    """Texts that were received during the time of the load."""
    refusals: list[str]


@dataclass(frozen=True, slots=True)
class Audit:
    """What became of the texts that were sent while servers were killed."""

    sent: int
    lost: int
    """Acknowledged, and never received."""
    unacknowledged: int
    """Not acknowledged in the end."""
    doubled: int
    """Received more than once, each time counted."""
    reordered: int
    """Received after a later one of the same sender."""
    disconnected: int
    """Clients that lost their connection."""
    missing: int
    """Clients that have no connection in the end."""
    away: list[float]
    """Seconds that they were without one."""
    refusals: list[str]

    def __add__(self, other: "Audit") -> "Audit":
        return Audit(*(getattr(self, item.name) + getattr(other, item.name) for item in fields(self)))


@dataclass(slots=True)
class Moved:
    """Clients that were told to go elsewhere."""

    away: list[float]
    """Seconds from losing the connection to having the next one."""
    last_back_at: int
    """By the monotonic clock, in ns."""
    missing: int
    """Clients that have no connection in the end."""
    refusals: list[str]


def make_text(due_at: int, sender: int, number: int) -> str:
    return f"{due_at} {sender} {number} ".ljust(TEXT_BYTES, "x")


def parse_text(text: str) -> tuple[int, int, int]:
    """When it was due, its sender and the sender's number of it."""
    due_at, sender, number, _ = text.split(" ", 3)
    return int(due_at), int(sender), int(number)


@dataclass(slots=True)
class Seen:
    """What the clients have seen of the texts of a measurement."""

    received: list[tuple[int, int, int, int]] = field(default_factory=list)
    """When each was due, sender, number, and when it was received."""
    copied: list[tuple[int, int]] = field(default_factory=list)
    """When each was due, and when another client of the sender got it."""
    acknowledged: list[tuple[int, int, int, int]] = field(default_factory=list)


class Load:
    """The clients of this process. Users send to users of the same process."""

    def __init__(self, client: type[Client], addresses: Sequence[str], process: int) -> None:
        self._client = client
        self._addresses = addresses
        self._process = process
        self._seen = Seen()
        self._saturation: Saturation | None = None
        self._numbers = itertools.count(1)
        self.senders: list[Client] = []
        """The first client of each user."""
        self._clients: list[Client] = []
        self._callbacks = Callbacks(self._received, self._copied, self._acknowledged)

    # Called by the benchmark

    async def sign_in(self, count: int, prefix: str) -> None:
        """Whatever the users need before they connect."""
        await self._client.prepare(self._addresses, self._users(count, prefix))

    async def connect(self, count: int, devices: int, prefix: str) -> list[int]:
        """Connect this many users with so many clients each. When each was connected, by the monotonic clock."""
        clients = [
            self._client(self._addresses, user, f"{prefix}{device}", self._callbacks)
            for user in self._users(count, prefix)
            for device in range(devices)
        ]
        self._clients += clients
        self.senders += clients[::devices]
        waiting = clients[::-1]
        times = []

        async def connect_some() -> None:
            while waiting:
                client = waiting.pop()
                try:
                    await client.connect()
                except (OSError, TimeoutError) as error:
                    client.refusals.append(f"connecting failed: {error!r}")
                    if len(client.refusals) == CONNECT_ATTEMPTS:
                        raise
                    waiting.append(client)
                    await asyncio.sleep(CONNECT_PAUSE_SECONDS)
                else:
                    times.append(time.monotonic_ns())

        await asyncio.gather(*(connect_some() for _ in range(CONNECTING_AT_ONCE)))
        gc.collect()
        gc.freeze()  # so that collections do not pause the clients for all of them
        return times

    async def exchange(self, per_second: float, seconds: float) -> Exchanged:
        """Send between random pairs at a rate, and wait until everything was received."""
        self._seen = Seen()
        sent = await self._send_at_rate(per_second, seconds)
        await self._settle(lambda: len(self._seen.received) >= len(sent) and not self._unacknowledged())
        first = min(due_at for due_at, _ in sent.values())
        start, end = first + WARM_UP_SECONDS * 1e9, first + seconds * 1e9
        meanwhile = sum(start <= at < end for *_, at in self._seen.received)
        return Exchanged(
            [(at - due_at) / 1e9 for due_at, *_, at in self._seen.received if due_at >= start],
            [(at - due_at) / 1e9 for due_at, *_, at in self._seen.acknowledged if due_at >= start],
            [(at - due_at) / 1e9 for due_at, at in self._seen.copied if due_at >= start],
            meanwhile / (seconds - WARM_UP_SECONDS),
            self._refusals(),
        )

    async def exchange_and_audit(self, per_second: float, seconds: float) -> Audit:
        """The same, and find out what was lost."""
        self._seen = Seen()
        sent = await self._send_at_rate(per_second, seconds)
        await self._settle(self._has_everything(sent))
        acknowledged = {(sender, number) for _, sender, number, _ in self._seen.acknowledged}
        latest: defaultdict[tuple[int, int], int] = defaultdict(int)
        got: set[tuple[int, int]] = set()
        doubled = reordered = 0
        for _, sender, number, _ in self._seen.received:
            key = (sender, sent[sender, number][1])
            if (sender, number) in got:
                doubled += 1
            elif number < latest[key]:
                reordered += 1
            got.add((sender, number))
            latest[key] = max(latest[key], number)
        absences = [absence for client in self._clients for absence in client.absences]
        return Audit(
            sent=len(sent),
            lost=len(acknowledged - got),
            unacknowledged=len(sent.keys() - acknowledged),
            doubled=doubled,
            reordered=reordered,
            disconnected=sum(bool(client.absences) for client in self._clients),
            missing=sum(not client.is_connected for client in self._clients),
            away=[(absence.back_at - absence.lost_at) / 1e9 for absence in absences if absence.back_at],
            refusals=self._refusals(),
        )

    async def saturate(self, window: int, seconds: float, devices: int = 1, recipients: str = "") -> float:
        """Keep so many texts of each user in flight; deliveries per second. A text is in flight until it is
        acknowledged, and all clients of its recipient have it."""
        users = [client.user for client in self.senders if client.user.startswith(recipients)]
        senders = [client for client in self.senders if not recipients or client.user not in set(users)]
        self._saturation = Saturation(senders, users, devices, self._numbers)
        self._saturation.begin(window)
        await asyncio.sleep(WARM_UP_SECONDS)
        before, start = self._saturation.delivered, time.perf_counter()
        await asyncio.sleep(seconds)
        delivered, duration = self._saturation.delivered - before, time.perf_counter() - start
        self._saturation.end()
        await self._settle(lambda: self._saturation is None or not self._saturation.in_flight)
        self._saturation = None
        return delivered / duration

    async def collect_moves(self, seconds: float) -> Moved:
        """Wait until clients have lost their connections, all have one again and nothing changes, but no longer than
        this."""
        deadline = time.monotonic() + seconds
        quiet_since = time.monotonic()
        count = 0
        while time.monotonic() < deadline:
            await asyncio.sleep(POLL_SECONDS)
            absences = [absence for client in self._clients for absence in client.absences]
            if len(absences) != count or not all(absence.back_at for absence in absences):
                count, quiet_since = len(absences), time.monotonic()
            elif count and time.monotonic() - quiet_since > QUIET_SECONDS:
                break
        back = [absence for client in self._clients for absence in client.absences if absence.back_at]
        return Moved(
            [(absence.back_at - absence.lost_at) / 1e9 for absence in back],
            max((absence.back_at for absence in back), default=0),
            sum(not client.is_connected for client in self._clients),
            self._refusals(),
        )

    async def refusals(self) -> list[str]:
        return self._refusals()

    async def close(self) -> None:
        await asyncio.gather(*(client.close() for client in self._clients))

    # Inside

    def _users(self, count: int, prefix: str) -> list[str]:
        return user_names(self._process, count, prefix)

    def _refusals(self) -> list[str]:
        return [refusal for client in self._clients for refusal in client.refusals]

    def _unacknowledged(self) -> int:
        return sum(client.unacknowledged for client in self.senders)

    async def _send_at_rate(self, per_second: float, seconds: float) -> dict[tuple[int, int], tuple[int, int]]:
        """Send between random pairs. When each text was due and its recipient, by sender and number."""
        sent: dict[tuple[int, int], tuple[int, int]] = {}
        start = time.monotonic_ns()
        count = round(per_second * seconds)
        while len(sent) < count:
            due = min(count, int((time.monotonic_ns() - start) * per_second / 1e9) + 1)
            while len(sent) < due:
                number = len(sent)
                sender, recipient = random.sample(range(len(self.senders)), 2)
                due_at = start + round(number * 1e9 / per_second)
                sent[sender, number] = (due_at, recipient)
                self.senders[sender].send(self.senders[recipient].user, make_text(due_at, sender, number))
            await asyncio.sleep(TICK_SECONDS)
        return sent

    def _has_everything(self, sent: dict[tuple[int, int], tuple[int, int]]) -> Condition:
        checked, missing = 0, set(sent)

        def check() -> bool:
            nonlocal checked
            received = self._seen.received
            missing.difference_update((sender, number) for _, sender, number, _ in received[checked:])
            checked = len(received)
            return not missing and not self._unacknowledged() and all(c.is_connected for c in self._clients)

        return check

    async def _settle(self, is_settled: Condition) -> None:
        """Wait until the condition is true, or everything is acknowledged and nothing happens any more."""
        deadline = time.monotonic() + SETTLE_SECONDS
        quiet_since, seen = time.monotonic(), 0
        while time.monotonic() < deadline and not is_settled():
            await asyncio.sleep(POLL_SECONDS)
            now = len(self._seen.received) + len(self._seen.acknowledged) + len(self._seen.copied)
            now += self._saturation.delivered if self._saturation else 0
            if now != seen or not all(client.is_connected for client in self._clients):
                quiet_since, seen = time.monotonic(), now
            elif time.monotonic() - quiet_since > QUIET_SECONDS:
                return

    def _received(self, _: Client, text: str) -> None:
        if self._saturation is not None:
            self._saturation.note_received(text)
        else:
            self._seen.received.append((*parse_text(text), time.monotonic_ns()))

    def _copied(self, _: Client, text: str) -> None:
        if self._saturation is None:
            self._seen.copied.append((parse_text(text)[0], time.monotonic_ns()))

    def _acknowledged(self, _: Client, text: str) -> None:
        if self._saturation is not None:
            self._saturation.note_acknowledged(text)
        else:
            self._seen.acknowledged.append((*parse_text(text), time.monotonic_ns()))


class Saturation:
    """Users that each keep some texts in flight."""

    def __init__(
        self, senders: Sequence[Client], recipients: Sequence[str], devices: int, numbers: Iterator[int]
    ) -> None:
        self.delivered = 0
        self.in_flight: dict[tuple[int, int], int] = {}
        """What is still to happen to each text: an acknowledgement and some deliveries."""
        self._senders = senders
        self._recipients = recipients
        self._devices = devices
        self._numbers = numbers
        self._is_running = True

    def begin(self, window: int) -> None:
        for _ in range(window):
            for sender in range(len(self._senders)):
                self._send(sender)

    def end(self) -> None:
        self._is_running = False

    def note_received(self, text: str) -> None:
        self.delivered += 1
        self._note(text)

    def note_acknowledged(self, text: str) -> None:
        self._note(text)

    def _send(self, sender: int) -> None:
        number = next(self._numbers)
        client = self._senders[sender]
        recipient = client.user
        while recipient == client.user:
            recipient = random.choice(self._recipients)
        self.in_flight[sender, number] = 1 + self._devices
        client.send(recipient, make_text(time.monotonic_ns(), sender, number))

    def _note(self, text: str) -> None:
        _, sender, number = parse_text(text)
        remaining = self.in_flight.get((sender, number), 0) - 1
        if remaining > 0:
            self.in_flight[sender, number] = remaining
        elif remaining == 0:
            del self.in_flight[sender, number]
            if self._is_running:
                self._send(sender)


def user_names(process: int, count: int, prefix: str) -> list[str]:
    return [f"{prefix}{process}-{i}" for i in range(count)]


def run_load(connection: Connection, client: type[Client], addresses: Sequence[str], process: int) -> None:
    """Run the requested methods of `Load` one after the other, until the request is None."""

    async def run() -> None:
        load = Load(client, addresses, process)
        while (request := await asyncio.to_thread(connection.recv)) is not None:
            name, *arguments = request
            connection.send(await getattr(load, name)(*arguments))

    uvloop.run(run())
