"""Channels on the chat page and in its JavaScript client, in Chromium, with a server that has channels in memory."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from shardyard.wire import messaging as wire
from tests.client.channel_server import GAP, ChannelServer
from tests.client.messaging_server import until
from tests.messaging.chromium import Browser, Window, chromium, find_chromium
from tests.messaging.test_page import MISCHIEF, is_connected, reads, shows, sign_in

pytestmark = [pytest.mark.server, pytest.mark.processes, pytest.mark.timeout(120)]

CHANNELS = "[...document.querySelectorAll('#channels .name')].map((name) => name.textContent)"


def run(scenario: Callable[[ChannelServer, Browser], Coroutine[Any, Any, None]], *, has_channels: bool = True) -> None:
    program = find_chromium()

    async def with_server() -> None:
        async with ChannelServer(has_channels=has_channels).running() as server, chromium(program) as browser:
            await scenario(server, browser)

    asyncio.run(with_server())


async def signed_in(server: ChannelServer, browser: Browser, user: str, **size: int) -> Window:
    window = await browser.window(**size)
    await sign_in(window, server.url, user)
    await is_connected(window)
    return window


async def lists(window: Window, channels: list[str]) -> None:
    """Wait until the list of channels has as many, and check that they are these."""
    await window.wait_for(f"document.querySelectorAll('#channels button').length === {len(channels)}")
    assert await window.evaluate(CHANNELS) == channels


async def open_channel(window: Window, channel: str) -> None:
    """With the keyboard."""
    await window.evaluate(f"document.querySelector('#channels [data-chat=\"#{channel}\"]').focus()")
    await window.press("Enter", "\r")
    await window.wait_for("document.activeElement.id === 'text'")
    await reads(window, "#peer", channel)


def has_dot(channel: str, is_shown: str) -> str:
    return f"document.querySelector('#channels [data-chat=\"#{channel}\"] .dot')?.hidden === {is_shown}"


def test_two_people_talk_in_a_channel() -> None:
    async def scenario(server: ChannelServer, browser: Browser) -> None:
        server.members["random"].add("bob")
        alice, bob = await signed_in(server, browser, "alice"), await signed_in(server, browser, "bob", width=400)
        await reads(alice, "#no-channels", "No channels yet")
        await lists(bob, ["random"])
        for window, name in (alice, "general"), (bob, "#general"):
            await window.type_into("#new-channel", name)
            await reads(window, "#peer", "general")
        await bob.press("Escape")
        await bob.wait_for("document.activeElement.dataset.chat === '#general'")
        await lists(bob, ["general", "random"])

        await alice.type_into("#text", MISCHIEF, enter=False)
        await reads(bob, "#channels .preview", "alice is typing")
        await alice.press("Enter", "\r")
        await alice.wait_for("document.querySelector('.message').dataset.state === 'sent'")
        await bob.wait_for(has_dot("general", "false"))
        assert await bob.evaluate(has_dot("random", "true"))
        await open_channel(bob, "general")
        await shows(bob, [MISCHIEF])
        await bob.wait_for(has_dot("general", "true"))
        await reads(bob, ".message .sender", "alice")

        await bob.type_into("#text", "two\nlines")
        await shows(alice, [MISCHIEF, "two\nlines"])
        await reads(alice, ".message:not(.is-mine) .sender", "bob")
        await server.post("general", "alice", "from my phone")  # not delivered to this client of alice
        await server.post("general", "", "of a program")
        await shows(bob, [MISCHIEF, "two\nlines", "from my phone", "of a program"])
        await reads(bob, ".message:last-child .sender", "#general")

        await bob.evaluate("document.querySelector('#leave').click()")
        await lists(bob, ["random"])
        assert await bob.evaluate("document.querySelector('#open-chat').hidden")
        assert server.members["general"] == {"alice"}
        assert await bob.evaluate("document.querySelectorAll('.message img, .message script').length") == 0
        assert not await bob.evaluate("Boolean(window.isHarmed)")
        assert alice.errors == bob.errors == []

    run(scenario)


def test_older_posts_are_loaded_when_the_channel_is_scrolled_up_and_a_reload_shows_the_same() -> None:
    texts = [f"post {n}" for n in range(130)]

    async def scenario(server: ChannelServer, browser: Browser) -> None:
        server.members["general"].add("bob")
        for text in texts:
            await server.post("general", "carol", text)
        bob = await signed_in(server, browser, "bob")
        await lists(bob, ["general"])
        await open_channel(bob, "general")
        await shows(bob, texts[-50:])
        for loaded in (100, 130):
            await bob.evaluate("document.querySelector('#messages').scrollTop = 0")
            await bob.wait_for(f"document.querySelectorAll('.message').length === {loaded}")
        await shows(bob, texts)
        await bob.reload()
        await is_connected(bob)
        await shows(bob, texts[-50:])
        assert bob.errors == []

    run(scenario)


def test_what_was_missed_is_shown_and_dotted_after_a_gap_and_a_new_connection() -> None:
    async def scenario(server: ChannelServer, browser: Browser) -> None:
        for channel in ("constructor", "general", "random"):
            server.members[channel].add("alice")
            await server.post(channel, "bob", "seen")
        alice = await signed_in(server, browser, "alice")
        await lists(alice, ["constructor", "general", "random"])
        await open_channel(alice, "general")
        await shows(alice, ["seen"])
        await alice.wait_for("sessionStorage['shardyard.chat'].includes('random')")  # it knows the last post of each
        # What a client misses while its user is offline: nothing of it is delivered.
        server.members["constructor"].discard("alice")
        for channel in ("general", "random"):
            server.posts[channel].append(wire.Posted(f"{len(channel)}000000", channel, "bob", "missed", 5))
        await server.disconnect()
        await lists(alice, ["general", "random"])
        await server.tell("alice", wire.Gap(GAP))
        await shows(alice, ["seen", "missed"])
        await alice.wait_for(has_dot("random", "false"))
        assert await alice.evaluate(has_dot("general", "true"))
        await alice.reload()
        await alice.wait_for(has_dot("random", "false"))

        await server.change("general", "alice", joined=False)  # by another client
        await lists(alice, ["random"])
        assert await alice.evaluate("document.querySelector('#open-chat').hidden")
        await server.change("general", "alice", joined=True)
        await lists(alice, ["general", "random"])
        assert alice.errors == []

    run(scenario)


def test_a_server_without_channels_says_what_is_missing_and_the_rest_works() -> None:
    async def scenario(server: ChannelServer, browser: Browser) -> None:
        alice = await signed_in(server, browser, "alice")
        await reads(alice, "#no-channels", "channels need `shardyard coordinator`")
        await alice.type_into("#new-channel", "general")
        await reads(alice, "#channels-error", "Not joined: channels need")
        await alice.type_into("#new-peer", "bob")
        await alice.type_into("#text", "hello")
        await shows(alice, ["hello"])
        assert alice.errors == []

    run(scenario, has_channels=False)


PROGRAM = """import("/shardyard-messaging.js").then(async ({ MessagingClient }) => {
    const client = window.client = new MessagingClient({ user: "alice", storage: null });
    window.events = [];
    for (const name of ["post", "sent", "refused", "membership", "typingIn", "gap"]) {
        client.on(name, ({ channel, post, reason }) => window.events.push([name, channel ?? post?.channel ?? reason]));
    }
    await client.connect();
    return client.post("general", "too early").catch((error) => error.message);
})"""


def test_a_program_joins_posts_and_reads_by_the_javascript_client() -> None:
    async def scenario(server: ChannelServer, browser: Browser) -> None:
        window = await browser.window()
        await window.open(f"{server.url}/")
        assert await window.evaluate(PROGRAM) == "join the channel first"
        await window.evaluate("client.join('general')")
        sent = await window.evaluate("client.post('general', 'grüße')")
        assert (sent["channel"], sent["from"], sent["text"]) == ("general", "alice", "grüße")
        await server.post("general", "bob", "hello")
        await server.tell("alice", wire.IsTypingIn("general", "bob"))
        await server.tell("alice", wire.Gap(GAP))
        await window.wait_for("window.events.length >= 6")
        page = await window.evaluate("client.posts('general', { limit: 1 })")
        assert ([each["text"] for each in page["posts"]], page["more"]) == (["hello"], True)
        older = await window.evaluate(f"client.posts('general', {{ before: '{page['posts'][0]['id']}' }})")
        assert ([each["text"] for each in older["posts"]], older["more"]) == (["grüße"], False)
        assert await window.evaluate("client.channels()") == {"channels": ["general"], "more": False}
        assert await window.evaluate("client.recentPosts.map(({ text }) => text)") == ["grüße", "hello"]
        assert await window.evaluate("client.recent") == []

        # A post that waits for a connection is sent on the next one.
        await window.evaluate("client.close()")
        await window.evaluate("void client.post('general', 'later')")
        assert await window.evaluate("client.unsent.map(({ key, ...rest }) => rest)") == [
            {"channel": "general", "text": "later"}
        ]
        await window.evaluate("client.connect()")
        await until(lambda: server.posts["general"][-1].text == "later")
        await window.wait_for("client.unsent.length === 0")
        await window.evaluate("client.leave('general')")
        await window.wait_for("window.events.length >= 8")
        assert await window.evaluate("window.events") == [
            ["refused", "general"],
            ["membership", "general"],
            ["sent", "general"],
            ["post", "general"],
            ["typingIn", "general"],
            ["gap", GAP],
            ["sent", "general"],
            ["membership", "general"],
        ]
        wrong = "try { client.join('') } catch (error) { error.code }"
        assert await window.evaluate(wrong) == "invalid_value"
        assert window.errors == []

    run(scenario)
