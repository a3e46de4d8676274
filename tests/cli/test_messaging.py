"""`shardyard chat` and `shardyard where`, with a messaging server in this process."""

import asyncio
import contextlib
import json
import logging
import os
import pty
import signal
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest

from shardyard.cli.messaging.chat import status_lines
from shardyard.client import MessagingClient, messaging_link
from shardyard.client.messaging import Marked
from shardyard.log import open_log
from shardyard.messaging.history import open_history
from shardyard.registry import open_registry
from shardyard.server.messaging.app import MessengerOptions, running_messenger

pytestmark = pytest.mark.processes

SECRET = "s" * 32


def run(scenario: Callable[[str], Coroutine[Any, Any, None]], secret: str | None = None, servers: int = 1) -> None:
    async def with_server() -> None:
        options = MessengerOptions(topic_partitions=4, secret=secret)
        async with (
            asyncio.timeout(100),
            open_log("memory://") as log,
            open_history("memory://") as history,
            contextlib.AsyncExitStack() as stack,
        ):
            registry = stack.enter_context(open_registry("memory://"))
            for _ in range(servers):
                url = await stack.enter_async_context(running_messenger(log, registry, history, options))
            await scenario(url)

    asyncio.run(with_server())


def environment(url: str) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("SHARDYARD_")}
    return inherited | {"SHARDYARD_MESSENGER": url, "COLUMNS": "200"}


async def shell(url: str, *arguments: str, stdin: bytes = b"", **variables: str) -> tuple[int | None, str, str]:
    """Exit code, standard output and standard error of a command."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "shardyard.cli", *arguments),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=environment(url) | variables,
    )
    out, err = await process.communicate(stdin)
    return process.returncode, out.decode(), err.decode()


class Terminal:
    """A terminal in which `shardyard chat` runs."""

    def __init__(self, master: int) -> None:
        self._master = master
        self._changed = asyncio.Event()
        self.screen = ""
        asyncio.get_running_loop().add_reader(master, self._read)

    def _read(self) -> None:
        try:
            self.screen += os.read(self._master, 65536).decode()
        except OSError:  # the command has ended
            asyncio.get_running_loop().remove_reader(self._master)
        self._changed.set()

    def enter(self, line: str) -> None:
        os.write(self._master, line.encode() + b"\n")

    async def shows(self, text: str) -> None:
        """Wait until the text appears, and forget everything up to it."""
        try:
            async with asyncio.timeout(30):
                while text not in self.screen:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise AssertionError(f"{text!r} is not on the screen: {self.screen!r}") from None
        self.screen = self.screen.partition(text)[2]


@contextlib.asynccontextmanager
async def chatting(url: str, *arguments: str) -> AsyncIterator[tuple[Terminal, asyncio.subprocess.Process]]:
    master, slave = pty.openpty()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "shardyard.cli", "chat", *arguments),
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env=environment(url) | {"TERM": "dumb"},
    )
    os.close(slave)
    terminal = Terminal(master)
    try:
        yield terminal, process
    finally:
        asyncio.get_running_loop().remove_reader(master)
        if process.returncode is None:
            process.kill()
        await process.wait()
        os.close(master)


async def next_mark(client: MessagingClient, kind: str) -> Marked:
    async with asyncio.timeout(30):
        async for event in client.events():
            if isinstance(event, Marked) and event.kind == kind:
                return event
    raise AssertionError("the client was closed")


def test_two_people_chat_in_a_terminal() -> None:
    async def scenario(url: str) -> None:
        async with MessagingClient(url, "bob") as bob:
            earlier = await bob.send("alice", "are you there?")
            async with asyncio.timeout(30):
                while not (await bob.history("alice")).messages:
                    pass
            async with chatting(url, "--as", "alice", "--with", "bob") as (terminal, process):
                await terminal.shows("you talk to bob")
                await terminal.shows("bob: are you there?")
                assert (await next_mark(bob, "seen")).upto == earlier.id
                await terminal.shows("bob is online")

                terminal.enter("hello")
                terminal.enter("//with two slashes")
                messages = aiter(bob)
                sent = [await anext(messages), await anext(messages)]
                assert [(each.sender, each.text) for each in sent] == [
                    ("alice", "hello"),
                    ("alice", "/with two slashes"),
                ]
                await terminal.shows("✓ delivered to bob")
                await bob.mark_seen("alice", sent[1].id)
                await terminal.shows("✓✓ seen by bob")

                await bob.typing("alice")
                await terminal.shows("bob is typing")
                await bob.send("alice", "clear \x1b[2J this")
                await terminal.shows("bob: clear \\x1b[2J this")

                terminal.enter("/who carol")
                await terminal.shows("carol is offline")
                terminal.enter("/chats")
                await terminal.shows("unread")
                await terminal.shows("bob")
                terminal.enter("/with carol")
                await terminal.shows("you talk to carol")
                terminal.enter("/history")
                await terminal.shows("no older messages")
                terminal.enter("/nonsense")
                await terminal.shows("/with USER")
                terminal.enter("for carol")
                async with asyncio.timeout(30), MessagingClient(url, "carol") as carol:
                    while not (page := await carol.history("alice")).messages:
                        pass
                assert [each.text for each in page.messages] == ["for carol"]
                terminal.enter("/history")  # it is on the screen already
                await terminal.shows("no older messages")
                terminal.enter("and this")
                terminal.enter("/quit")
                async with asyncio.timeout(30):
                    assert await process.wait() == 0
            async with asyncio.timeout(30), MessagingClient(url, "carol") as carol:
                while len((page := await carol.history("alice")).messages) < 2:
                    pass
            assert [each.text for each in page.messages] == ["and this", "for carol"]

    run(scenario)


def test_lines_of_a_pipe_are_sent_in_order_and_durable_when_the_command_ends() -> None:
    async def scenario(url: str) -> None:
        async with MessagingClient(url, "bob") as bob, MessagingClient(url, "carol") as carol:
            lines = b"one\n\ntwo\n/with carol\n//three\nfour without an end"
            assert await shell(url, "chat", "--as", "alice", "--with", "bob", stdin=lines) == (0, "", "")
            for client, expected in ((bob, ["one", "two"]), (carol, ["/three", "four without an end"])):
                messages = aiter(client)
                assert [(await anext(messages)).text for _ in expected] == expected

    run(scenario)


@pytest.mark.parametrize(
    ("stdin", "arguments", "code", "reason"),
    [
        (b"a\n", (), 2, "expected --with USER or --channel NAME (nothing was sent)"),
        (b"a\n/chats\n", ("--with", "bob"), 1, "(the first message was sent)"),
        (b"\xff\n", ("--with", "bob"), 2, "a line is not UTF-8 (nothing was sent)"),
        (b"a\nb\n\xff\n", ("--with", "bob"), 1, "a line is not UTF-8 (the first 2 messages were sent)"),
        (b"a\n" + b"x" * 16385, ("--with", "bob"), 1, "beyond the limit of 16384"),
        (b"a\n", ("--channel", "general"), 1, "start `shardyard coordinator`"),
        (b"a", ("--with", "bob", "--server", "ftp://x"), 2, "expected an address such as http://127.0.0.1:7500"),
        (b"a", ("--with", "bob", "--server", "127.0.0.1:9"), 1, "start one with `shardyard messenger`"),
    ],
)
def test_a_chat_that_fails_says_why(stdin: bytes, arguments: tuple[str, ...], code: int, reason: str) -> None:
    async def scenario(url: str) -> None:
        exit_code, out, err = await shell(url, "chat", "--as", "alice", *arguments, stdin=stdin)
        assert (exit_code, out) == (code, "")
        assert reason in err

    run(scenario)


def test_a_server_with_a_secret_takes_it_from_the_option_or_the_environment() -> None:
    async def scenario(url: str) -> None:
        arguments = ("chat", "--as", "alice", "--with", "bob")
        code, _, err = await shell(url, *arguments, stdin=b"a\n")
        assert (code, "give the secret with --secret or in SHARDYARD_SECRET" in " ".join(err.split())) == (1, True)
        assert (await shell(url, *arguments, "--secret", SECRET, stdin=b"a\n"))[0] == 0
        assert (await shell(url, *arguments, stdin=b"a\n", SHARDYARD_SECRET=SECRET))[0] == 0

    run(scenario, SECRET)


def test_a_chat_shows_that_the_connection_is_lost_and_back(capsys: pytest.CaptureFixture[str]) -> None:
    with status_lines():
        logging.getLogger(messaging_link.__name__).warning("not connected")
        logging.getLogger(messaging_link.__name__).info("connected to a server")
    logging.getLogger(messaging_link.__name__).info("connected again")
    assert [line.strip() for line in capsys.readouterr().err.splitlines()] == ["not connected", "connected to a server"]


@pytest.mark.parametrize("ending", ["/quit", "interrupt"])
def test_a_chat_whose_only_server_is_drained_says_so_and_what_it_did_not_send(ending: str) -> None:
    async def scenario(url: str) -> None:
        async with chatting(url, "--as", "alice", "--with", "bob") as (terminal, process):
            await terminal.shows("bob is offline")
            code, _, err = await shell(url, "drain", url, "--force")
            assert (code, err) == (0, "")
            await terminal.shows("not connected to a messaging server (no server serves this user now)")
            terminal.enter("is anybody there?")
            if ending == "/quit":
                terminal.enter("/chats")  # it has no answer
                terminal.enter("/quit")
            else:
                terminal.enter("/help")
                await terminal.shows("//... sends a line")  # so it has read the line before this one
                process.send_signal(signal.SIGINT)
            await terminal.shows("not sent: is anybody there?")
            await terminal.shows("1 message was not sent")
            async with asyncio.timeout(30):
                assert await process.wait() == 1

    run(scenario)


def test_the_last_server_is_drained_only_by_force() -> None:
    async def scenario(url: str) -> None:
        code, out, err = await shell(url, "drain", url)
        assert (code, out) == (1, "")
        assert "--force" in err
        assert (await shell(url, "where", "bob"))[0] == 0
        code, out, _ = await shell(url, "drain", url, "--force", "--json")
        assert (code, json.loads(out)) == (0, {"server": url, "others": 0})
        assert (await shell(url, "where", "bob"))[0] == 1

    run(scenario)


def test_a_server_is_drained_if_there_is_another_one() -> None:
    async def scenario(url: str) -> None:
        code, out, err = await shell(url, "drain", url)
        assert (code, out, err) == (0, f"{url} is drained\n", "")

    run(scenario, servers=2)


def test_where_shows_the_server_of_a_user() -> None:
    async def scenario(url: str) -> None:
        address = f"ws{url.removeprefix('http')}/v1/messaging"
        code, out, _ = await shell(url, "where", "bob", "--json")
        assert (code, f'"address": "{address}"' in out, '"user": "bob"' in out) == (0, True, True)
        code, out, _ = await shell(url, "where", "bob")
        assert out.splitlines()[0] == "user\tpartition\taddress\tmember\tepoch"
        assert out.splitlines()[1].split("\t")[:3:2] == ["bob", address]
        assert (await shell(url, "where", "bob", "--server", "127.0.0.1:9"))[0] == 1

    run(scenario)
