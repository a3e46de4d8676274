"""The messaging client and channels, against a server that follows a script."""

# ruff: noqa: PLW2901 after a loss, `peer` is the next connection

import asyncio
import logging
from typing import Any

import pytest

from shardyard.client import MessagingClient
from shardyard.client.messaging import Gap, IsTypingIn, Marked, Membership, Message, Posted
from shardyard.model import InvalidValue, NotAcknowledged, ShardyardError, TooLarge, Unsupported
from shardyard.runtime.clock import ManualClock
from shardyard.wire import messaging as wire
from shardyard.wire.messaging import Channels, Done, Join, Leave, Position, Post, Posts, Refused, Sent
from tests.client.messaging_server import ScriptedServer, message, post, until
from tests.client.test_messaging import advance_until, background, connected, run, take


async def next_events(client: MessagingClient, count: int) -> list[object]:
    async with asyncio.timeout(20):
        return [await client.next_event() for _ in range(count)]


# Posting


def test_a_post_returns_when_the_server_says_that_it_is_durable() -> None:
    async def scenario(server: ScriptedServer) -> None:
        async with connected(server) as (client, peer):
            posting = background(client.post("general", "grüße"))
            sent = await peer.get(Post)
            assert (sent.channel, sent.text) == ("general", "grüße")
            assert not posting.done()
            await peer.send(Sent(sent.number, "77", 5, duplicate=True))
            assert await posting == Sent(sent.number, "77", 5, duplicate=True)

    run(scenario)


def test_posts_to_one_channel_are_sent_one_after_the_other_and_those_to_others_do_not_wait() -> None:
    async def scenario(server: ScriptedServer) -> None:
        async with connected(server) as (client, peer):
            first, second = background(client.post("general", "1")), background(client.post("general", "2"))
            other, direct = background(client.post("random", "3")), background(client.send("general", "4"))
            frames: list[Post | wire.Send] = [await peer.get(Post), await peer.get(Post), await peer.get(wire.Send)]
            assert [each.text for each in frames] == ["1", "3", "4"]
            for frame in frames[1:]:
                await peer.send(Sent(frame.number, str(frame.number), 5))
            await asyncio.gather(other, direct)
            await peer.send(Refused(frames[0].number, "retry_later", "not now", retry=True))
            again = await peer.get(Post)
            assert again == frames[0]  # the second one has not overtaken it
            await peer.send(Sent(again.number, "10", 5))
            await first
            last = await peer.get(Post)
            assert (last.text, last.number > again.number) == ("2", True)
            await peer.send(Sent(last.number, "11", 5))
            assert (await second).id == "11"

    run(scenario)


def test_a_post_is_sent_again_under_the_same_number_after_a_lost_connection() -> None:
    async def scenario(server: ScriptedServer) -> None:
        async with connected(server) as (client, peer):
            posting = background(client.post("general", "once"))
            sent = await peer.get(Post)
            peer.abort()
            peer, _ = await server.accept()
            await peer.welcome(resume="position")
            assert await peer.get(Post) == sent
            await peer.send(Sent(sent.number, "10", 5, duplicate=True))
            assert (await posting).duplicate

    run(scenario)


def test_a_post_that_is_not_acknowledged_in_time_can_be_repeated_by_its_number() -> None:
    async def scenario(server: ScriptedServer) -> None:
        clock = ManualClock()
        async with connected(server, clock=clock) as (client, peer):
            posting = background(client.post("general", "hello", timeout=2))
            sent = await peer.get(Post)
            with pytest.raises(NotAcknowledged, match="the post to 'general'") as caught:
                await advance_until(clock, posting)
            assert caught.value.number == sent.number
            again = background(client.post("general", "hello", number=caught.value.number))
            assert await peer.get(Post) == sent
            await peer.send(Sent(sent.number, "10", 5))
            await again

    run(scenario)


def test_the_id_of_an_own_post_is_not_taken_for_one_of_a_message() -> None:
    """A client resumes by the newest message of its user. The ids of posts belong to their channels."""

    async def scenario(server: ScriptedServer) -> None:
        async with connected(server) as (client, peer):
            sending = background(client.send("bob", "hello"))
            await peer.send(Sent((await peer.get(wire.Send)).number, "50", 5))
            await sending
            posting = background(client.post("general", "hello"))
            await peer.send(Sent((await peer.get(Post)).number, "99", 5))
            await posting
            await peer.deliver(post(70, sender="alice", offset=3))  # of another client of the user
            await peer.send(wire.CaughtUp(Position(3, 1, 4)))
            assert await take(client, 1) == ["p70"]
            peer.abort()
            _, hello = await server.accept()
            assert (hello.position, hello.last, hello.sent) == (Position(3, 1, 4), None, "50")

    run(scenario)


# Receiving


def test_posts_come_once_and_in_order_with_the_messages() -> None:
    async def scenario(server: ScriptedServer) -> None:
        async with connected(server) as (client, peer):
            await peer.deliver(post(3), message(4), post(5))
            await peer.deliver(post(5), post(7))
            await peer.deliver(post(5, offset=8), post(5, "random", offset=9))  # stored twice; another channel's
            assert await take(client, 5) == ["p3", "m4", "p5", "p7", "p5"]

    run(scenario)


def test_a_known_post_is_dropped_after_a_reconnect_and_the_position_goes_on() -> None:
    async def scenario(server: ScriptedServer) -> None:
        async with connected(server) as (client, peer):
            await peer.deliver(message(40), post(41))
            await take(client, 2)
            peer.abort()
            peer, hello = await server.accept()
            assert (hello.position, hello.last) == (Position(3, 1, 42), "1040")
            await peer.welcome(Position(4, 2, 90), resume="id")
            await peer.deliver(post(41, offset=0), post(42, offset=1), epoch=2)
            assert await take(client, 1) == ["p42"]
            peer.abort()
            _, hello = await server.accept()
            assert (hello.position, hello.last) == (Position(4, 2, 2), "1040")

    run(scenario)


def test_a_post_has_its_channel_and_is_not_marked_as_delivered() -> None:
    async def scenario(server: ScriptedServer) -> None:
        async with connected(server, mark_delivered=True) as (client, peer):
            await peer.deliver(post(3), message(4))
            first, second = await next_events(client, 2)
            assert isinstance(first, Posted)
            assert (first.channel, first.sender, first.text) == ("general", "bob", "p3")
            assert isinstance(second, Message)
            mark = await peer.get(wire.SetMark)
            assert mark.upto == second.id  # the only one
            await peer.send(Sent(mark.number, "5000", 5))

    run(scenario)


def test_another_process_resumes_after_the_last_post_that_was_taken() -> None:
    async def scenario(server: ScriptedServer) -> None:
        async with connected(server) as (client, peer):
            await peer.deliver(post(3), post(4))
            await take(client, 1)
            position = client.position
        resumed = MessagingClient(server.url, "alice", resume=position)
        entering = background(resumed.__aenter__())
        peer, hello = await server.accept()
        assert hello.position == Position(3, 1, 4)
        await peer.welcome(resume="position")
        await entering
        await resumed.close()

    run(scenario)


def test_membership_typing_and_gaps_are_events_in_the_order_of_the_server(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)

    async def scenario(server: ScriptedServer) -> None:
        async with connected(server) as (client, peer):
            frames: list[wire.ServerFrame] = [
                Membership("general", joined=True),
                IsTypingIn("general", "bob"),
                Gap("posts were missed while the user was offline"),
            ]
            await peer.send(*frames)
            await peer.deliver(post(3), Marked("5", "bob", "alice", "seen", "900", 5, 4))
            assert (await next_events(client, 5))[:3] == frames
            await peer.send(*frames)
            await peer.deliver(post(5))
            assert await take(client, 1) == ["p5"]
            assert "load the history, and the posts of channels: posts were missed" in caplog.text

    run(scenario)


def test_a_program_that_takes_nothing_can_still_join_and_gets_the_posts_later() -> None:
    async def scenario(server: ScriptedServer) -> None:
        async with connected(server, max_queued=2) as (client, peer):
            await peer.deliver(post(1), post(2))
            await peer.deliver(post(3))
            joining = background(client.join("random"))
            await peer.send(Done((await peer.get(Join)).number))
            await joining
            assert await take(client, 2) == ["p1", "p2"]
            peer, hello = await server.accept()
            assert hello.position == Position(3, 1, 3)
            await peer.welcome(resume="position")
            await peer.deliver(post(3))
            assert await take(client, 1) == ["p3"]

    run(scenario)


# Joining and leaving


def test_joining_and_leaving_return_when_they_are_durable_and_keep_their_order() -> None:
    async def scenario(server: ScriptedServer) -> None:
        async with connected(server) as (client, peer):
            joining, leaving = background(client.join("general")), background(client.leave("general"))
            join = await peer.get(Join)
            assert join.channel == "general"
            await peer.send(Refused(join.number, "retry_later", "not now", retry=True))
            assert await peer.get(Join) == join
            assert not leaving.done()
            peer.abort()
            peer = await server.accept_new()
            assert await peer.get(Join) == join
            await peer.send(Done(join.number))
            await joining
            leave = await peer.get(Leave)
            assert leave.channel == "general"
            await peer.send(Done(leave.number))
            await leaving

    run(scenario)


@pytest.mark.parametrize("call", ["join", "leave", "post", "posts", "channels"])
def test_a_refusal_is_raised_with_the_message_of_the_server(call: str) -> None:
    say = "channels need `shardyard coordinator` and `shardyard fanout-worker`: start them"

    async def scenario(server: ScriptedServer) -> None:
        async with connected(server) as (client, peer):
            calling = background(_call(client, call))
            frame: Any = await peer.frames.get()
            await peer.send(Refused(frame.number, "unsupported", say))
            with pytest.raises(Unsupported, match="shardyard fanout-worker"):
                await calling
            calling = background(_call(client, call))
            frame = await peer.frames.get()
            await peer.send(Refused(frame.number, "not_a_member", "join the channel first"))
            with pytest.raises(ShardyardError, match="join the channel first"):  # a code that this client does not know
                await calling

    run(scenario)


async def _call(client: MessagingClient, call: str) -> None:
    match call:
        case "join":
            await client.join("general")
        case "leave":
            await client.leave("general")
        case "post":
            await client.post("general", "hello")
        case "posts":
            await client.posts("general")
        case _:
            await client.channels()


# Asking


def test_posts_and_channels_are_read_in_pages() -> None:
    async def scenario(server: ScriptedServer) -> None:
        async with connected(server) as (client, peer):
            asking = background(client.posts("general", before="50", limit=2))
            asked = await peer.get(wire.GetPosts)
            assert (asked.channel, asked.before, asked.limit) == ("general", "50", 2)
            page = Posts(asked.number, [post(49), post(48)], more=True)
            await peer.send(page)
            assert await asking == page

            listing = background(client.channels(after="general", limit=3))
            listed = await peer.get(wire.GetChannels)
            assert (listed.after, listed.limit) == ("general", 3)
            await peer.send(Channels(listed.number, ["random"], more=False))
            assert (await listing).channels == ["random"]

    run(scenario)


def test_a_question_is_asked_again_on_a_new_connection() -> None:
    async def scenario(server: ScriptedServer) -> None:
        async with connected(server) as (client, peer):
            asking = background(client.posts("general"))
            asked = await peer.get(wire.GetPosts)
            peer.abort()
            peer = await server.accept_new()
            assert await peer.get(wire.GetPosts) == asked
            await peer.send(Posts(asked.number, [], more=False))
            await asking

    run(scenario)


def test_typing_in_a_channel_is_sent_and_dropped_without_a_connection() -> None:
    async def scenario(server: ScriptedServer) -> None:
        async with connected(server) as (client, peer):
            await client.typing_in("general")
            assert (await peer.get(wire.TypingIn)).channel == "general"
            peer.abort()
            await until(lambda: not client.is_connected)
            await client.typing_in("general")
            peer = await server.accept_new()
            await until(lambda: client.is_connected)
            await client.typing_in("random")
            assert (await peer.get(wire.TypingIn)).channel == "random"

    run(scenario)


def test_wrong_values_are_refused_before_anything_is_sent() -> None:
    async def scenario(server: ScriptedServer) -> None:
        async with connected(server) as (client, peer):
            for name in ("", "x" * 129, "a\0b", 7):
                wrong: Any = name
                for work in (
                    client.join(wrong),
                    client.leave(wrong),
                    client.post(wrong, "text"),
                    client.posts(wrong),
                    client.typing_in(wrong),
                    client.channels(after=wrong),
                ):
                    with pytest.raises(InvalidValue, match="channel"):
                        await work
            with pytest.raises(TooLarge):
                await client.post("general", "x" * 16385)
            with pytest.raises(InvalidValue, match="before"):
                await client.posts("general", before="yesterday")
            with pytest.raises(InvalidValue, match="limit"):
                await client.posts("general", limit=201)
            assert peer.frames.empty()

    run(scenario)
