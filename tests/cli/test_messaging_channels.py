"""`shardyard chat` in channels, with a server that has them in memory."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from shardyard.wire import messaging as wire
from tests.cli.test_messaging import chatting, shell
from tests.client.channel_server import GAP, ChannelServer
from tests.client.messaging_server import until

pytestmark = pytest.mark.processes


def run(scenario: Callable[[ChannelServer], Coroutine[Any, Any, None]], *, has_channels: bool = True) -> None:
    async def with_server() -> None:
        async with asyncio.timeout(100), ChannelServer(has_channels=has_channels).running() as server:
            await scenario(server)

    asyncio.run(with_server())


def test_a_user_talks_in_a_channel_in_a_terminal() -> None:
    async def scenario(server: ChannelServer) -> None:
        for n in range(25):
            await server.post("general", "bob", f"earlier {n}")
        async with chatting(server.url, "--as", "alice", "--channel", "#general") as (terminal, process):
            await terminal.shows("you are in #general")
            await terminal.shows("/history shows older messages")
            await terminal.shows("#general bob: earlier 5")
            await terminal.shows("#general bob: earlier 24")
            assert "you joined" not in terminal.screen
            assert server.members["general"] == {"alice"}
            terminal.enter("/history")
            await terminal.shows("#general bob: earlier 4")

            await server.tell("alice", wire.IsTypingIn("general", "carol"))
            await terminal.shows("carol is typing in #general")
            await server.post("general", "carol", "clear \x1b[2J this")
            await terminal.shows("#general carol: clear \\x1b[2J this")
            await server.post("general", "", "of a program")
            await terminal.shows("#general: of a program")
            terminal.enter("hello, everyone")
            await until(lambda: [each.text for each in server.posts["general"]][-1] == "hello, everyone")

            await server.change("random", "alice", joined=True)
            await terminal.shows("you joined #random")
            await server.post("random", "bob", "elsewhere")
            await terminal.shows("#random bob: elsewhere")
            terminal.enter("/channels")
            await terminal.shows("general")
            await terminal.shows("random")
            await server.tell("alice", wire.Gap(GAP))
            await terminal.shows(f"some messages are missing here ({GAP}): /chats, /channel NAME and /history")

            terminal.enter("/with bob")
            await terminal.shows("you talk to bob")
            terminal.enter("/channel random")
            await terminal.shows("you are in #random")
            await terminal.shows("#random bob: elsewhere")
            terminal.enter("/leave")
            await terminal.shows("you left #random")
            terminal.enter("lost")
            await terminal.shows("nobody to send this to: /with USER or /channel NAME")
            terminal.enter("/quit")
            async with asyncio.timeout(30):
                assert await process.wait() == 0
        assert server.members["random"] == set()
        assert [each.text for each in server.posts["random"]] == ["elsewhere"]

    run(scenario)


def test_lines_of_a_pipe_are_posted_in_order_by_a_user_who_joins_first() -> None:
    async def scenario(server: ChannelServer) -> None:
        lines = b"one\ntwo\n/channel random\n//three\n/with bob\nfour\n"
        assert await shell(server.url, "chat", "--as", "ci", "--channel", "general", stdin=lines) == (0, "", "")
        posted = {channel: [each.text for each in posts] for channel, posts in server.posts.items()}
        assert posted == {"general": ["one", "two"], "random": ["/three"]}
        assert server.members == {"general": {"ci"}, "random": {"ci"}}

    run(scenario)


def test_a_user_and_a_channel_at_once_are_refused() -> None:
    async def scenario(server: ChannelServer) -> None:
        both = ("chat", "--as", "alice", "--with", "bob", "--channel", "general")
        code, _, err = await shell(server.url, *both, stdin=b"a\n")
        assert (code, "expected one of them" in err) == (2, True)
        code, _, err = await shell(server.url, "chat", "--as", "alice", "--channel", "x" * 129, stdin=b"a\n")
        assert (code, "at most 128 characters" in err) == (2, True)

    run(scenario)


def test_a_server_without_channels_says_what_is_missing() -> None:
    async def scenario(server: ChannelServer) -> None:
        code, _, err = await shell(server.url, "chat", "--as", "alice", "--channel", "general", stdin=b"a\n")
        assert code != 0
        assert "channels need `shardyard coordinator` and `shardyard fanout-worker`" in err
        async with chatting(server.url, "--as", "alice", "--channel", "general") as (terminal, _):
            await terminal.shows("channels need `shardyard coordinator`")

    run(scenario, has_channels=False)
