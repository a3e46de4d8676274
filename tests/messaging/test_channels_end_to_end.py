"""Channels from end to end: the client, the chat page and `shardyard chat`, with a messaging server, a coordinator and
a fan-out worker in this process."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from shardyard.client import MessagingClient
from shardyard.client.messaging import Membership, Posted
from shardyard.log import open_log
from shardyard.messaging.history import open_history
from shardyard.model import Denied
from shardyard.registry import open_registry
from shardyard.server.fanout.app import running_fanout
from shardyard.server.messaging.app import MessengerOptions, running_messenger
from tests.cli.test_messaging import chatting
from tests.messaging.chromium import chromium, find_chromium
from tests.messaging.test_page import is_connected, reads, shows, sign_in

pytestmark = [pytest.mark.server, pytest.mark.processes, pytest.mark.timeout(120)]


@contextlib.asynccontextmanager
async def servers(folder: Path) -> AsyncIterator[str]:
    """The URL of the messaging server."""
    with open_registry("memory://") as registry:
        async with (
            asyncio.timeout(100),
            open_log("memory://") as log,
            open_history(f"sqlite:///{folder / 'history.db'}") as history,
            running_fanout(log, registry, "coordinator"),
            running_fanout(log, registry, "worker"),
            running_messenger(log, registry, history, MessengerOptions()) as url,
        ):
            yield url


def test_programs_talk_in_a_channel(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with (
            servers(tmp_path) as url,
            MessagingClient(url, "alice") as alice,
            MessagingClient(url, "alice") as phone,
            MessagingClient(url, "bob") as bob,
        ):
            with pytest.raises(Denied, match="join it first"):
                await alice.post("general", "too early")
            await alice.join("general")
            await bob.join("general")
            while await phone.next_event() != Membership("general", joined=True):
                pass
            sent = [await alice.post("general", f"post {n}") for n in range(20)]
            for client in bob, phone:
                got = []
                async for message in client:
                    assert isinstance(message, Posted)
                    got.append((message.id, message.sender, message.text))
                    if len(got) == len(sent):
                        break
                assert got == [(each.id, "alice", f"post {n}") for n, each in enumerate(sent)]
            page = await bob.posts("general", limit=5)
            assert ([each.text for each in page.posts], page.more) == ([f"post {n}" for n in range(19, 14, -1)], True)
            assert (await bob.channels()).channels == ["general"]
            await bob.leave("general")
            assert (await bob.channels()).channels == []
            with pytest.raises(Denied):
                await bob.posts("general")

    asyncio.run(scenario())


def test_the_page_and_a_terminal_talk_in_a_channel(tmp_path: Path) -> None:
    program = find_chromium()

    async def scenario() -> None:
        async with servers(tmp_path) as url, chromium(program) as browser:
            alice = await browser.window()
            await sign_in(alice, url, "alice")
            await is_connected(alice)
            await alice.type_into("#new-channel", "general")
            await reads(alice, "#peer", "general")
            await alice.type_into("#text", "is anybody here?")
            await alice.wait_for("document.querySelector('.message')?.dataset.state === 'sent'")
            async with chatting(url, "--as", "bob", "--channel", "general") as (terminal, _):
                await terminal.shows("#general alice: is anybody here?")
                terminal.enter("I am")
                await shows(alice, ["is anybody here?", "I am"])
                await reads(alice, ".message:not(.is-mine) .sender", "bob")
                await alice.type_into("#text", "good", enter=False)
                await terminal.shows("alice is typing in #general")
                await alice.press("Enter", "\r")
                await terminal.shows("#general alice: good")
            await alice.reload()
            await is_connected(alice)
            await shows(alice, ["is anybody here?", "I am", "good"])
            assert alice.errors == []

    asyncio.run(scenario())
