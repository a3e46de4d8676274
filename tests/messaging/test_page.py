"""The chat page and its JavaScript client, in Chromium."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import pytest

from shardyard.log import open_log
from shardyard.messaging.history import PlacedEntry, open_history
from shardyard.model import Partition
from shardyard.registry import open_registry
from shardyard.server.messaging.app import MessengerOptions, running_messenger
from shardyard.wire.inbox import InboxEntry
from tests.messaging.chromium import Window, chromium, find_chromium

pytestmark = [pytest.mark.server, pytest.mark.processes, pytest.mark.timeout(120)]

SECRET = "a secret of at least 32 characters"
MISCHIEF = '<img src=x onerror="window.isHarmed = true"><script>window.isHarmed = true</script>'
TEXTS = "[...document.querySelectorAll('.message .text')].map((text) => text.textContent)"


@pytest.fixture
def program() -> str:
    return find_chromium()


async def sign_in(window: Window, url: str, user: str, secret: str = "") -> None:
    await window.open(f"{url}/")
    await window.type_into("#secret", secret, enter=False)
    await window.type_into("#name", user)


async def is_connected(window: Window) -> None:
    await window.wait_for("document.querySelector('#connection').dataset.state === 'connected'")


async def shows(window: Window, texts: list[str]) -> None:
    """Wait until the open chat has as many messages, and check that they are these, in this order."""
    await window.wait_for(f"document.querySelectorAll('.message').length >= {len(texts)}")
    assert await window.evaluate(TEXTS) == texts


async def reads(window: Window, selector: str, text: str) -> None:
    """Wait until an element shows a text."""
    await window.wait_for(f"document.querySelector('{selector}')?.textContent.includes({json.dumps(text)})")


@contextlib.asynccontextmanager
async def messenger(folder: Path, secret: str | None = None) -> AsyncIterator[str]:
    """A messaging server in this process."""
    with open_registry("memory://") as registry:
        async with (
            open_log("memory://") as log,
            open_history(f"sqlite:///{folder / 'history.db'}") as history,
            running_messenger(log, registry, history, MessengerOptions(secret=secret, topic_partitions=4)) as url,
        ):
            yield url


def test_two_people_chat_in_two_windows(program: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with messenger(tmp_path, SECRET) as url, chromium(program) as browser:
            alice, bob = await browser.window(), await browser.window(width=400)
            await sign_in(alice, url, "alice", "not the secret at all, but as long")
            await reads(alice, "#sign-in-error", "The secret is wrong")
            for window, user in (alice, "alice"), (bob, "bob"):
                await sign_in(window, url, user, SECRET)
                await is_connected(window)

            await alice.type_into("#new-peer", "bob")
            await reads(alice, "#peer-state", "online")
            await alice.type_into("#text", MISCHIEF)
            await alice.wait_for("document.querySelector('.message').dataset.state === 'delivered'")
            await reads(bob, "#chats .unread", "1")
            await bob.evaluate("document.querySelector('#chats button').focus()")
            await bob.press("Enter", "\r")
            await bob.wait_for("document.activeElement.id === 'text'")
            await shows(bob, [MISCHIEF])
            await alice.wait_for("document.querySelector('.message').dataset.state === 'seen'")
            assert await bob.evaluate("document.querySelector('#chats .unread').hidden")

            await bob.type_into("#text", "two\nlines", enter=False)
            await reads(alice, "#peer-state", "typing")
            await bob.press("Enter", "\r")
            await shows(alice, [MISCHIEF, "two\nlines"])
            await alice.evaluate("document.querySelector('#sign-out').click()")
            await reads(bob, "#peer-state", "offline")

            assert await bob.evaluate("document.querySelectorAll('.message img, .message script').length") == 0
            assert not await bob.evaluate("Boolean(window.isHarmed)")
            assert alice.errors == bob.errors == []

    asyncio.run(scenario())


def test_older_messages_are_loaded_when_the_conversation_is_scrolled_up(program: str, tmp_path: Path) -> None:
    texts = [f"message {n}" for n in range(130)]

    async def scenario() -> None:
        async with open_history(f"sqlite:///{tmp_path / 'history.db'}") as history:
            entries = [InboxEntry(n + 1, "carol", "bob", "phone", n, n, text) for n, text in enumerate(texts)]
            await history.store([PlacedEntry(Partition("inbox", 0), 1, entry.number, entry) for entry in entries])
        async with messenger(tmp_path) as url, chromium(program) as browser:
            bob = await browser.window()
            await sign_in(bob, url, "bob")
            await reads(bob, "#chats .unread", "130")
            await bob.evaluate("document.querySelector('#chats button').click()")
            await shows(bob, texts[-50:])
            for loaded in (100, 130):
                await bob.evaluate("document.querySelector('#messages').scrollTop = 0")
                await bob.wait_for(f"document.querySelectorAll('.message').length === {loaded}")
            await shows(bob, texts)
            assert bob.errors == []

    asyncio.run(scenario())


class Messenger:
    """A messaging server as a process, on the stores of its folder."""

    def __init__(self, folder: Path) -> None:
        command = [sys.executable, "-m", "shardyard.cli", "messenger", "--port", "0", "--partitions", "4"]
        environment = {name: value for name, value in os.environ.items() if name != "SHARDYARD_SECRET"}
        with (folder / "errors.log").open("a") as errors:
            self.process = subprocess.Popen(
                command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True
            )

    def listens(self) -> str:
        """Wait for its URL."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().removeprefix("listening on ").strip()

    def kill(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
            self.process.communicate()


@pytest.fixture
def messengers(tmp_path: Path) -> Iterator[dict[str, Messenger]]:
    """Two of them, by URL."""
    started = [Messenger(tmp_path), Messenger(tmp_path)]
    try:
        yield {each.listens(): each for each in started}
    finally:
        for each in started:
            each.kill()


async def owner_of(user: str, url: str) -> str:
    """The URL of the server that serves the user."""
    async with aiohttp.ClientSession() as http, http.get(f"{url}/v1/where/{user}") as response:
        address: str = (await response.json())["address"]
        return address.replace("ws://", "http://").removesuffix("/v1/messaging")


SECOND_CLIENT = """import("/shardyard-messaging.js").then(({ MessagingClient }) => {
    const client = new MessagingClient({ user: "bob", storage: null, servers: ["SERVER"] });
    window.received = [];
    client.on("message", ({ text }) => window.received.push(text));
    return client.connect();
})"""
"""Another client of Bob, without the history that the page loads. It was given one server."""


def test_a_server_is_killed_while_its_user_is_written_to_and_nothing_is_lost_or_doubled(
    program: str, messengers: dict[str, Messenger]
) -> None:
    """Bob's window is on the page of the server that survives, and connected to the one that is killed, which is the
    only one that Bob's second client was given. That one hangs at first, so what Bob sends to it is lost with it."""
    texts = [f"message {n}" for n in range(40)]

    async def scenario() -> None:
        killed = await owner_of("bob", next(iter(messengers)))
        survivor = next(each for each in messengers if each != killed)
        async with chromium(program) as browser:
            alice, bob = await browser.window(), await browser.window()
            for window, user, peer in (alice, "alice", "bob"), (bob, "bob", "alice"):
                await sign_in(window, survivor, user)
                await is_connected(window)
                await window.type_into("#new-peer", peer)
            await bob.evaluate(SECOND_CLIENT.replace("SERVER", killed))
            for text in texts[:20]:
                await alice.type_into("#text", text)
            await shows(bob, texts[:20])
            messengers[killed].process.send_signal(signal.SIGSTOP)
            await bob.type_into("#text", "and back")
            await bob.wait_for("document.querySelector('.message[data-state=waiting]')")
            messengers[killed].kill()
            for text in texts[20:]:
                await alice.type_into("#text", text)

            for window in alice, bob:
                await window.wait_for("document.querySelectorAll('.message').length >= 41", 30)
                await window.wait_for("!document.querySelector('.message[data-state=waiting]')")
                shown = await window.evaluate(TEXTS)
                assert [text for text in shown if text != "and back"] == texts
                assert len(shown) == 41
            await bob.wait_for("window.received.length >= 41")  # with the copy of what the first client sent
            received = await bob.evaluate("window.received")
            assert [text for text in received if text != "and back"] == texts
            assert len(received) == 41

            shown = await bob.evaluate(TEXTS)
            await bob.reload()
            await is_connected(bob)
            await shows(bob, shown)
            assert alice.errors == bob.errors == []

    asyncio.run(scenario())
