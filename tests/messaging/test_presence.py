"""Presence and typing, on one server and between two."""

import asyncio
from pathlib import Path

import pytest

from shardyard.wire import messaging as wire
from tests.messaging.clients import Client
from tests.messaging.servers import JumpingClock, Running, Yard, config, eventually, partition_of, run, user_of


def told(client: Client, user: str) -> list[int]:
    """How many clients of the user were online, as the client was told."""
    return [frame.online for frame in client.frames if isinstance(frame, wire.Presence) and frame.user == user]


async def two_servers(yard: Yard, clock: JumpingClock | None = None) -> tuple[Running, str, Running, str]:
    """Two servers, and a user of each."""
    first, second = await yard.start(clock=clock), await yard.start(clock=clock)
    await eventually(lambda: (len(first.owned), len(second.owned)) == (2, 2))
    users = user_of(min(first.owned), "here"), user_of(min(second.owned), "there")
    assert len({partition_of(user) for user in users}) == 2
    return first, users[0], second, users[1]


def test_the_clients_of_a_user_are_counted(tmp_path: Path) -> None:
    async def scenario(yard: Yard) -> None:
        server = await yard.start()
        watcher = await yard.join(server, "watcher")
        await watcher.send(wire.Watch(["bob", "carol"]))
        await watcher.until(lambda: told(watcher, "bob") == [0] == told(watcher, "carol"))
        phone = await yard.join(server, "bob", "phone")
        tablet = await yard.join(server, "bob", "tablet")
        await watcher.until(lambda: told(watcher, "bob") == [0, 1, 2])
        await phone.close()
        await watcher.until(lambda: told(watcher, "bob") == [0, 1, 2, 1])
        await tablet.vanish()
        await watcher.until(lambda: told(watcher, "bob") == [0, 1, 2, 1, 0])
        assert told(watcher, "carol") == [0]

    run(tmp_path, scenario)


def test_since_tells_when_the_user_came_and_went_not_when_clients_did(tmp_path: Path) -> None:
    async def scenario(yard: Yard) -> None:
        clock = JumpingClock()
        server = await yard.start(config(idle_seconds=1e6), clock=clock)
        watcher = await yard.join(server, "watcher")
        await watcher.send(wire.Watch(["bob"]))
        assert await watcher.get(wire.Presence) == wire.Presence("bob", 0, 0)
        phone = await yard.join(server, "bob", "phone")
        came = await watcher.get(wire.Presence)
        assert came.since / 1000 == pytest.approx(clock.now(), abs=30)
        clock.jump(100.0)
        tablet = await yard.join(server, "bob", "tablet")
        assert await watcher.get(wire.Presence) == wire.Presence("bob", 2, came.since)
        clock.jump(100.0)
        await phone.close()
        assert await watcher.get(wire.Presence) == wire.Presence("bob", 1, came.since)
        clock.jump(100.0)
        again = await yard.join(server, "bob", "tablet")  # it replaces its connection, and stays online
        assert await tablet.closed() == 4012
        clock.jump(100.0)
        await again.close()
        went = await watcher.get(wire.Presence)
        assert went.online == 0
        assert went.since - came.since >= 399_000

    run(tmp_path, scenario)


def test_a_client_watches_the_users_of_its_last_watch(tmp_path: Path) -> None:
    async def scenario(yard: Yard) -> None:
        server = await yard.start()
        watcher = await yard.join(server, "watcher")
        await watcher.send(wire.Watch(["bob", "carol"]))
        await watcher.send(wire.Watch(["carol", "watcher"]))
        await watcher.until(lambda: told(watcher, "watcher") == [1])
        await yard.join(server, "bob")
        await yard.join(server, "carol")
        await watcher.until(lambda: told(watcher, "carol")[-1:] == [1])
        assert told(watcher, "bob") == [0]
        await watcher.close()
        await eventually(lambda: not server.server.presence._watchers)

    run(tmp_path, scenario)


def test_the_presence_of_users_of_another_server_is_told(tmp_path: Path) -> None:
    async def scenario(yard: Yard) -> None:
        clock = JumpingClock()
        first, here, second, there = await two_servers(yard, clock)
        watcher = await yard.join(first, here)
        await yard.join(second, there, "phone")

        async def until_told(online: int) -> None:
            while told(watcher, there)[-1:] != [online]:
                clock.jump(0.5)
                await asyncio.sleep(0.01)

        await watcher.send(wire.Watch([there]))
        async with asyncio.timeout(60):
            await until_told(1)
            tablet = await yard.join(second, there, "tablet")
            await until_told(2)
            await tablet.close()
            await until_told(1)

    run(tmp_path, scenario)


def test_typing_reaches_all_clients_of_the_other_user_here_and_on_another_server(tmp_path: Path) -> None:
    async def scenario(yard: Yard) -> None:
        first, here, second, there = await two_servers(yard)
        one, other = await yard.join(first, here, "phone"), await yard.join(first, here, "tablet")
        far = await yard.join(second, there)
        near_user = user_of(min(first.owned), "near")
        near = await yard.join(first, near_user)
        await near.send(wire.Typing(here))
        for client in (one, other):
            assert (await client.get(wire.IsTyping)).sender == near_user
        await far.send(wire.Typing(here))
        for client in (one, other):
            assert (await client.get(wire.IsTyping)).sender == there
        await one.send(wire.Typing(there))
        assert (await far.get(wire.IsTyping)).sender == here
        await one.send(wire.Typing("a user who is not connected"))
        await one.sync()
        assert await yard.stored() == []

    run(tmp_path, scenario)
