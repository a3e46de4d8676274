"""Real messaging servers that fail: processes are killed (SIGKILL), stalled (SIGSTOP), stopped (SIGTERM) and drained at
random while users' clients send, receive, go away and come back; on PostgreSQL its connections are cut, too.

    python -m tests.messaging.chaos run --seconds 60 --seed 1 --engine postgresql --mirror local

Clients keep a ledger of what they sent and received: see `Ledger.problems` for what is checked. At the end `audit`
compares the same ledgers, and the history is paged through.
"""

import argparse
import asyncio
import contextlib
import logging
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import aiohttp

from tests.messaging.ledger import Ledger
from tests.messaging.library_client import LibraryClient
from tests.messaging.raw_client import RawClient
from tests.postgresql import PostgresqlServer, postgresql_server
from tests.server_process import ServerProcess

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SERVERS = 3
USERS = 40
PARTITIONS = 12
LEAST_FAULTS = 2
"""Of servers, in every run."""
SESSION_SECONDS = 5.0
QUIET_SECONDS = 60.0
"""How long it may take at the end until every client has everything."""
MOST_PRINTED = 5
"""Problems."""

Client = RawClient | LibraryClient


class Server(ServerProcess):
    """A messaging server."""

    def __init__(self, folder: Path, name: str, stores: list[str], mirror: str) -> None:
        options = ["messenger", *stores, "--mirror", mirror, "--partitions", str(PARTITIONS), "--rate", "1000"]
        super().__init__(folder, name, options)


@dataclass
class Report:
    kills: int = 0
    stalls: int = 0
    stops: int = 0
    drains: int = 0
    database_faults: int = 0
    clients: int = 0
    away: int = 0
    """How often a client broke its connection."""
    sent: int = 0
    acknowledged: int = 0
    received: int = 0
    moves: int = 0
    """Pairs of a user and an ownership under which it was served, beyond the first of each user."""
    paged: int = 0
    """Messages of the history."""
    problems: list[str] = field(default_factory=list)

    @property
    def faults(self) -> int:
        """Of servers."""
        return self.kills + self.stalls + self.stops + self.drains

    def __str__(self) -> str:
        figures = ", ".join(f"{value} {name}" for name, value in vars(self).items() if name != "problems")
        return f"{figures}; {len(self.problems)} problems"


class Chaos:
    """One run."""

    def __init__(self, servers: list[Server], rng: random.Random, database: PostgresqlServer | None) -> None:
        self.ledger = Ledger()
        self.report = Report()
        self._servers = servers
        self._rng = rng
        self._database = database
        self._users = [f"user-{i}" for i in range(USERS)]
        self._clients: list[Client] = []
        self._until = 0.0
        self._devices: defaultdict[str, int] = defaultdict(int)

    async def run(self, seconds: float) -> Report:
        await asyncio.gather(*(server.ready() for server in self._servers))
        for user in self._users:
            for _ in range(self._rng.choice([1, 2, 2, 3])):
                self._new_client(user)
        await asyncio.gather(*(client.start() for client in self._clients))
        try:
            await self._cause_trouble(seconds)
        finally:
            await asyncio.gather(*(client.stop() for client in self._clients))
        await asyncio.gather(*(self._stop(server) for server in self._servers))
        return self._finish()

    async def _cause_trouble(self, seconds: float) -> None:
        self._until = time.monotonic() + seconds
        async with asyncio.TaskGroup() as group:
            for client in list(self._clients):
                group.create_task(self._use(client))
            group.create_task(self._cause_faults())
        await self._become_quiet()
        if not self.report.problems:
            await self._page_through_history()

    async def _stop(self, server: Server) -> None:
        try:
            await server.end(signal.SIGTERM)
        except subprocess.TimeoutExpired:
            self.report.problems.append(f"{server.name} does not stop: {server.output.read_text()[-500:]}")
            await server.end()

    def _new_client(self, user: str) -> Client:
        self._devices[user] += 1
        notes = self.ledger.new_client(user, f"d{self._devices[user]}")
        urls = [server.url for server in self._servers]
        client: Client
        if self._rng.random() < 0.5:
            is_patient, is_hasty = self._rng.random() < 0.5, self._rng.random() < 0.5
            client = RawClient(self.ledger, notes, urls, is_patient=is_patient, is_hasty=is_hasty)
        else:
            client = LibraryClient(self.ledger, notes, urls)
        self._clients.append(client)
        return client

    # Load

    async def _use(self, client: Client) -> None:
        """Send bursts to a few users, go away at times, and maybe never come back: another client takes its place."""
        others = self._rng.sample([user for user in self._users if user != client.notes.user], 4)
        while time.monotonic() < self._until:
            await asyncio.sleep(self._rng.expovariate(1.0))
            chance = self._rng.random()
            if chance < 0.06:
                self.report.away += 1
                await client.restart(self._rng.choice([0.0, 0.0, 0.3, 2.0, 7.0]))
            elif chance < 0.07:
                client.notes.is_abandoned = True
                await client.stop()
                self._clients.remove(client)
                client = self._new_client(client.notes.user)
                await client.start()
            elif chance < 0.2 and isinstance(client, LibraryClient):
                await client.send_impatiently(self._rng.choice(others))
            else:
                recipients = [self._rng.choice(others) for _ in range(self._rng.choice([1, 2, 5, 20]))]
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._until - time.monotonic()):
                        await client.send(recipients, "." * self._rng.choice([0, 0, 100, 3000]))

    # Faults

    async def _cause_faults(self) -> None:
        """One after another. On a slow machine it takes longer until there were a few."""
        while (are_few := self.report.faults < LEAST_FAULTS) or time.monotonic() < self._until:
            if are_few:
                self._until = max(self._until, time.monotonic() + 3.0)
            await asyncio.sleep(self._rng.uniform(0.2, 1.5))
            if self._database is not None and self._rng.random() < 0.25:
                await self._harm_database(self._database)
            else:
                await self._harm(self._rng.choice(self._servers))

    async def _harm(self, server: Server) -> None:
        kind = self._rng.choices(["kill", "stall", "stop", "drain"], [4, 4, 2, 1])[0]
        if kind == "kill":
            self.report.kills += 1
            self.ledger.note(f"{server.name} is killed")
            await server.end()
        elif kind == "stall":
            await self._stall(server)
            return
        elif kind == "stop":
            self.report.stops += 1
            self.ledger.note(f"{server.name} is stopped")
            await self._stop(server)
        else:
            self.report.drains += 1
            self.ledger.note(f"{server.name} is drained")
            async with aiohttp.ClientSession() as http:
                with contextlib.suppress(aiohttp.ClientError, OSError):
                    await http.post(f"{server.url}/v1/drain")
            self.ledger.note(f"{server.name} has drained")
            await self._stop(server)
        await asyncio.sleep(self._rng.choice([0.0, 0.0, SESSION_SECONDS + 1]))
        server.start()
        self.ledger.note(f"{server.name} starts")
        if self._rng.random() < 0.7:
            with contextlib.suppress(TimeoutError):
                await server.ready(10.0)

    async def _stall(self, server: Server) -> None:
        self.report.stalls += 1
        self.ledger.note(f"{server.name} is stalled")
        server.send_signal(signal.SIGSTOP)
        await asyncio.sleep(self._rng.choice([0.3, 2.0, SESSION_SECONDS + 1.5]))
        server.send_signal(signal.SIGCONT)
        self.ledger.note(f"{server.name} goes on")

    async def _harm_database(self, database: PostgresqlServer) -> None:
        self.report.database_faults += 1
        if self._rng.random() < 0.7:
            self.ledger.note("connections to the database are cut")
            await asyncio.to_thread(database.cut_connections)
        else:
            self.ledger.note("the database is killed")
            await asyncio.to_thread(database.kill)
            await asyncio.to_thread(database.start)

    # The end

    async def _become_quiet(self) -> None:
        """Wait until every client is connected and has everything; then a moment longer, for what comes twice."""
        for server in self._servers:
            if server.handle.poll() is not None:
                server.start()
        await asyncio.gather(*(server.ready() for server in self._servers))
        self.ledger.note("all servers run")
        until = time.monotonic() + QUIET_SECONDS
        while time.monotonic() < until:
            if all(client.is_caught_up and not client.unanswered for client in self._clients) and not any(
                True for _ in self.ledger.missing()
            ):
                break
            await asyncio.sleep(0.3)
        else:
            self.report.problems += [
                f"{client.notes.name} is not at rest: {client.unanswered} unanswered, {client.notes.events[-10:]}"
                for client in self._clients
                if client.unanswered or not client.is_caught_up
            ]
        self.ledger.note("quiet")
        await asyncio.sleep(1.5)

    async def _page_through_history(self) -> None:
        """Each stored message is in its conversation once."""
        by_pair: defaultdict[frozenset[str], set[str]] = defaultdict(set)
        for each in self.ledger.stored().values():
            by_pair[frozenset((each.sender, each.recipient))].add(each.text)
        readers = {client.notes.user: client for client in self._clients if isinstance(client, RawClient)}
        for pair, expected in by_pair.items():
            user, peer = sorted(pair)
            if user not in readers:
                user, peer = peer, user
            if user not in readers:
                continue
            found: list[tuple[int, str]] = []
            for _ in range(50):
                found = await self._history(readers[user], peer)
                if len(found) >= len(expected):
                    break
                await asyncio.sleep(0.2)
            texts = [text for _, text in found]
            self.report.paged += len(texts)
            if [id_ for id_, _ in found] != sorted({id_ for id_, _ in found}, reverse=True):
                self.report.problems.append(f"the history of {user} and {peer} is not in order, or has something twice")
            if set(texts) - expected or expected - set(texts):
                self.report.problems.append(
                    f"the history of {user} and {peer} has {set(texts) - expected} and lacks {expected - set(texts)}"
                )

    async def _history(self, reader: RawClient, peer: str) -> list[tuple[int, str]]:
        found: list[tuple[int, str]] = []
        before: str | None = None
        limit = self._rng.choice([7, 50, 200])
        while True:
            page = await reader.page(peer, before, limit)
            found += [(int(message["id"]), message["text"]) for message in page["messages"]]
            if not page["more"]:
                return found
            before = page["messages"][-1]["id"]

    def _finish(self) -> Report:
        ledger, report = self.ledger, self.report
        report.clients = len(ledger.clients)
        report.sent = len(ledger.sendings)
        report.acknowledged = sum(each.id is not None for each in ledger.sendings.values())
        report.received = sum(len(client.receipts) for client in ledger.clients)
        report.moves = len(ledger.owners) - len({user for user, _ in ledger.owners})
        report.problems += ledger.problems()
        for server in self._servers:
            text = server.output.read_text()
            if "Traceback" in text:
                at = text.index("Traceback")
                report.problems.append(f"{server.output} has a traceback: {text[max(at - 300, 0) : at + 3000]}")
        return report


def audit(ledger: Ledger, spark: "SparkSession") -> list[str]:
    """What the audit job finds. Each client is a partition, and each of its conversations a key."""
    from shardyard.pipeline.audit import audit as auditing  # noqa: PLC0415 Spark: not every run needs it

    stored = ledger.stored()
    sent, delivered = [], []
    for index, client in enumerate(ledger.clients):
        if client.is_abandoned:
            continue
        expected = {text for text, each in stored.items() if client.must_have(each)}
        for text in expected:
            each = stored[text]
            key = "".join(each.conversation).encode()
            sent.append((f"{index}:{text}", None if each.given_up else key, index, each.order, None))
        delivered += [
            (f"{index}:{receipt.text}", None, index, turn, None)
            for turn, receipt in enumerate(client.receipts)
            if receipt.text in expected or receipt.text not in stored
        ]
    found = auditing.audit(
        spark.createDataFrame(sent, auditing.SENT),
        spark.createDataFrame(delivered, auditing.DELIVERED),
        exactly_once=True,
    )
    names = ("lost", "duplicated", "unexpected", "out_of_order")
    return [
        f"audit: {getattr(found, name)} {name}, such as {found.to_json()['examples'][name][0]}"
        for name in names
        if getattr(found, name)
    ]


@contextlib.contextmanager
def _servers(folder: Path, database: PostgresqlServer | None, mirror: str) -> Iterator[list[Server]]:
    with contextlib.ExitStack() as stack:
        if database is None:
            stores = ["--log", f"sqlite:///{folder / 'log'}", "--registry", f"sqlite:///{folder / 'registry.db'}"]
            stores += ["--history", f"sqlite:///{folder / 'history.db'}"]
        else:
            stores = ["--log", stack.enter_context(database.new_database())]
        servers = [Server(folder, f"server-{i}", stores, mirror) for i in range(SERVERS)]
        try:
            yield servers
        finally:
            for server in servers:
                server.discard()


def run(
    folder: Path,
    seconds: float,
    seed: int,
    *,
    mirror: str,
    database: PostgresqlServer | None = None,
    spark: "SparkSession | None" = None,
) -> Report:
    """Cause faults for that long, then check. With `spark`, the audit job checks as well."""
    with _servers(folder, database, mirror) as servers:
        chaos = Chaos(servers, random.Random(seed), database)
        report = asyncio.run(chaos.run(seconds))
    if spark is not None:
        report.problems += audit(chaos.ledger, spark)
    return report


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("role", choices=["run"])
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--engine", choices=["sqlite", "postgresql"], default="sqlite")
    parser.add_argument("--mirror", choices=["log", "local"], default="log")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--audit", action="store_true", help="let the audit job check, too")
    options = parser.parse_args()
    logging.getLogger("shardyard.client").setLevel(logging.ERROR)  # that connections are lost is no news here
    folder = options.folder or Path(tempfile.mkdtemp(prefix="shardyard-chaos-"))
    print(f"seed {options.seed}, {options.seconds:g} s, {options.engine}, mirror {options.mirror}, in {folder}")
    spark: SparkSession | None = None
    if options.audit:
        from shardyard.pipeline.session import session  # noqa: PLC0415 as in `audit`

        spark = session("chaos", master="local[2]", memory="1g", settings={"spark.sql.shuffle.partitions": "2"})
    with contextlib.ExitStack() as stack:
        database = stack.enter_context(postgresql_server()) if options.engine == "postgresql" else None
        report = run(folder, options.seconds, options.seed, mirror=options.mirror, database=database, spark=spark)
    print(f"seed {options.seed}: {report}")
    for problem in report.problems[:MOST_PRINTED]:
        print(problem)
    if report.problems:
        return 1
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
