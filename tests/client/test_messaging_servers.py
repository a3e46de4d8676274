"""The messaging client with real messaging servers: in this process, and in processes that are killed."""

import asyncio
import contextlib
import itertools
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any, Literal

import pytest

from shardyard.client import MessagingClient
from shardyard.client.messaging import Chat, Event, IsTyping, Marked, Presence
from shardyard.client.messaging_directory import locate
from shardyard.log import open_log
from shardyard.messaging.config import DEFAULT_CONFIG, MessagingConfig
from shardyard.messaging.history import open_history
from shardyard.model import RetryLater, WrongToken
from shardyard.registry import open_registry
from shardyard.runtime.metrics import CLIENTS_CUT
from shardyard.server.messaging.app import MessengerOptions, running_messenger
from shardyard.wire.messaging import PATH
from tests.client.messaging_server import until

Mirror = Literal["log", "local"]
MIRRORS: list[Mirror] = ["log", "local"]


def run(
    scenario: Callable[[list[str]], Coroutine[Any, Any, None]],
    *,
    mirror: Mirror = "log",
    servers: int = 1,
    rate: float = DEFAULT_CONFIG.rate,
    queued: int = DEFAULT_CONFIG.queued,
    **options: Any,
) -> None:
    """Run a scenario with messaging servers on one log; it gets their URLs."""

    async def with_servers() -> None:
        config = MessagingConfig(mirror=mirror, rate=rate, queued=queued)
        chosen = MessengerOptions(topic_partitions=4, config=config, **options)
        async with asyncio.timeout(60), contextlib.AsyncExitStack() as stack:
            registry = stack.enter_context(open_registry("memory://"))
            log = await stack.enter_async_context(open_log("memory://"))
            history = await stack.enter_async_context(open_history("memory://"))
            urls = [
                await stack.enter_async_context(running_messenger(log, registry, history, chosen))
                for _ in range(servers)
            ]
            await scenario(urls)

    asyncio.run(with_servers())


async def take(client: MessagingClient, count: int) -> list[str]:
    """The texts of the next messages."""
    texts = []
    async with asyncio.timeout(30):
        async for each in client:
            texts.append(each.text)
            if len(texts) == count:
                break
    return texts


async def next_of(client: MessagingClient, kind: type[Event]) -> Any:
    """The next event of a kind."""
    async with asyncio.timeout(30):
        while not isinstance(event := await client.next_event(), kind):
            pass
    return event


@pytest.mark.parametrize("format_", ["msgpack", "json"])
@pytest.mark.parametrize("mirror", MIRRORS)
def test_a_message_reaches_the_recipient_and_the_senders_other_client(
    mirror: Mirror, format_: Literal["msgpack", "json"]
) -> None:
    async def scenario(urls: list[str]) -> None:
        async with (
            MessagingClient(urls, "alice", format=format_) as alice,
            MessagingClient(urls, "alice", format=format_) as phone,
            MessagingClient(urls, "bob", format=format_) as bob,
        ):
            for number in range(20):
                sent = await alice.send("bob", f"m{number}")
                assert not sent.duplicate
            expected = [f"m{number}" for number in range(20)]
            assert await take(bob, 20) == expected
            assert await take(phone, 20) == expected
            await bob.send("alice", "thanks")
            assert await take(alice, 1) == await take(phone, 1) == ["thanks"]

    run(scenario, mirror=mirror, servers=2)


def test_marks_typing_and_presence_reach_the_other_user() -> None:
    async def scenario(urls: list[str]) -> None:
        async with MessagingClient(urls, "alice") as alice, MessagingClient(urls, "bob") as bob:
            sent = await alice.send("bob", "hello")
            await take(bob, 1)
            delivered: Marked = await next_of(alice, Marked)
            assert (delivered.sender, delivered.kind, delivered.upto) == ("bob", "delivered", sent.id)
            await bob.mark_seen("alice", sent.id)
            seen: Marked = await next_of(alice, Marked)
            assert (seen.kind, seen.upto) == ("seen", sent.id)
            await bob.typing("alice")
            assert await next_of(alice, IsTyping) == IsTyping("bob")
            await alice.watch(["bob"])
            assert (await next_of(alice, Presence)).online == 1

    run(scenario)


def test_history_and_chats_show_what_was_said() -> None:
    async def scenario(urls: list[str]) -> None:
        async with MessagingClient(urls, "alice") as alice, MessagingClient(urls, "bob") as bob:
            for number in range(5):
                await alice.send("bob", f"m{number}")
            chats: list[Chat] = []
            async with asyncio.timeout(30):
                while not chats or chats[0].unread < 5:
                    chats = (await bob.chats()).chats
            assert (chats[0].peer, chats[0].last.text) == ("alice", "m4")
            page = await bob.history("alice", limit=3)
            assert ([each.text for each in page.messages], page.more) == (["m4", "m3", "m2"], True)
            older = await bob.history("alice", before=page.messages[-1].id)
            assert [each.text for each in older.messages] == ["m1", "m0"]

    run(scenario)


@pytest.mark.parametrize("mirror", MIRRORS)
def test_another_process_resumes_where_the_program_was(mirror: Mirror) -> None:
    async def scenario(urls: list[str]) -> None:
        async with MessagingClient(urls, "alice") as alice, MessagingClient(urls, "bob") as bob:
            for number in range(6):
                await bob.send("alice", f"m{number}")
            assert await take(alice, 3) == ["m0", "m1", "m2"]
            position = alice.position
            await alice.close()
            await bob.send("alice", "m6")
            async with MessagingClient(urls, "alice") as laptop:
                await laptop.send("bob", "from my laptop")
            async with MessagingClient(urls, "alice", resume=position) as resumed:
                assert sorted(await take(resumed, 5)) == ["from my laptop", "m3", "m4", "m5", "m6"]

    run(scenario, mirror=mirror)


@pytest.mark.parametrize("mirror", MIRRORS)
def test_another_process_that_resumes_does_not_get_the_users_own_messages_again(mirror: Mirror) -> None:
    async def scenario(urls: list[str]) -> None:
        async with MessagingClient(urls, "alice") as laptop:
            phone = MessagingClient(urls, "alice")
            for number in range(3):
                async with phone:
                    await laptop.send("bob", f"m{number}")
                    assert await take(phone, 1) == [f"m{number}"]
                phone = MessagingClient(urls, "alice", resume=phone.position)

    run(scenario, mirror=mirror)


def test_a_message_to_oneself_arrives_once() -> None:
    async def scenario(urls: list[str]) -> None:
        async with MessagingClient(urls, "alice") as alice, MessagingClient(urls, "alice") as phone:
            await alice.send("alice", "remember the milk")
            await alice.send("alice", "and the bread")
            expected = ["remember the milk", "and the bread"]
            assert await take(alice, 2) == expected
            assert await take(phone, 2) == expected

    run(scenario)


def test_only_the_right_secret_opens_a_session() -> None:
    secret = "a" * 32

    async def scenario(urls: list[str]) -> None:
        for given in (None, "b" * 32):
            with pytest.raises(WrongToken):
                async with MessagingClient(urls, "alice", secret=given):
                    pass
        async with MessagingClient(urls, "alice", secret=secret) as alice:
            await alice.send("bob", "hello")

    run(scenario, secret=secret)


def test_a_slow_program_is_cut_off_by_the_server_and_gets_everything_later() -> None:
    async def scenario(urls: list[str]) -> None:
        async with (
            MessagingClient(urls, "alice", max_queued=50, mark_delivered=False) as alice,
            MessagingClient(urls, "bob") as bob,
        ):
            text, cut = "x" * 16_000, CLIENTS_CUT.value  # together more than the buffers of a connection hold
            for start in range(0, 900, 20):
                await asyncio.gather(*(bob.send("alice", f"{start + i} {text}") for i in range(20)))
            assert CLIENTS_CUT.value > cut
            assert (await alice.send("carol", "still here")).id  # though nothing was taken
            taken = await take(alice, 900)
            assert [int(each.split()[0]) for each in taken] == list(range(900))

    run(scenario, rate=10_000.0, queued=100)  # it is the receiver who is slow


@contextlib.asynccontextmanager
async def server_process(folder: Path) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """`shardyard messenger` on a free port."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SHARDYARD_")}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "shardyard.cli", "messenger", "--port", "0", "--partitions", "8", "--rate", "2000"),
        cwd=folder,
        env=environment,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(60):
            line = (await process.stdout.readline()).decode()
        yield process, line.removeprefix("listening on ").strip()
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def until_it_serves(url: str, users: list[str]) -> None:
    """Wait until the server at this URL serves one of the users."""
    port = url.rpartition(":")[2]
    for user in itertools.cycle(users):
        with contextlib.suppress(RetryLater):  # nobody does, in this moment
            if f":{port}/" in (await locate([url], user)).address:
                return


@pytest.mark.processes
def test_a_client_with_one_address_goes_on_when_that_server_is_killed(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with server_process(tmp_path) as (process, given), server_process(tmp_path) as (_, other):
            users = [f"user {number}" for number in range(20)]
            await until_it_serves(other, users)
            address = "ws" + given.removeprefix("http") + PATH
            served = [each for each in users if (await locate([given], each)).address == address]
            async with MessagingClient(given, user := served[0]) as client:
                process.send_signal(signal.SIGKILL)
                await process.wait()
                await client.send(user, "still here")
                assert await take(client, 1) == ["still here"]

    asyncio.run(asyncio.wait_for(scenario(), 110))


@pytest.mark.processes
def test_nothing_is_lost_or_doubled_when_servers_are_killed(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with contextlib.AsyncExitStack() as stack:
            _, steady = await stack.enter_async_context(server_process(tmp_path))
            users = [f"user {number}" for number in range(6)]
            clients = {
                user: await stack.enter_async_context(MessagingClient(steady, user, timeout=60)) for user in users
            }
            expected: dict[str, dict[str, list[str]]] = {user: {} for user in users}
            got: dict[str, dict[str, list[str]]] = {user: {} for user in users}

            async def receive(user: str) -> None:
                async for message in clients[user]:
                    got[user].setdefault(message.sender, []).append(message.text)

            async def send(user: str, done: asyncio.Event) -> None:
                number = 0
                while not done.is_set():
                    to = users[(users.index(user) + 1 + number % 2) % len(users)]
                    await clients[user].send(to, f"{number}")
                    expected[to].setdefault(user, []).append(f"{number}")
                    number += 1

            def received() -> int:
                return sum(len(texts) for by_sender in got.values() for texts in by_sender.values())

            receiving = [asyncio.create_task(receive(user)) for user in users]
            done = asyncio.Event()
            sending = [asyncio.create_task(send(user, done)) for user in users]
            for _ in range(2):
                async with server_process(tmp_path) as (process, url):
                    await until_it_serves(url, users)
                    before = received()
                    await until(lambda enough=before + 300: received() >= enough)  # type: ignore[misc]
                    process.send_signal(signal.SIGKILL)
                    await process.wait()
            done.set()
            await asyncio.gather(*sending)
            await until(lambda: got == expected)
            for task in receiving:
                task.cancel()
            await asyncio.gather(*receiving, return_exceptions=True)

    asyncio.run(asyncio.wait_for(scenario(), 110))
