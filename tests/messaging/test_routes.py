"""HTTP: sessions, the directory, administration, what opens a WebSocket connection, TLS."""

import shutil
import ssl
import subprocess
import time
from pathlib import Path
from typing import Any

import aiohttp
import jwt
import msgspec
import pytest
from yarl import URL

from shardyard.client.paths import path
from shardyard.messaging.tokens import AUDIENCE
from shardyard.model import InvalidCall
from shardyard.wire import messaging as wire
from shardyard.wire.messaging import Format
from shardyard.wire.peers import PeerAnswer
from tests.messaging.clients import Client, address
from tests.messaging.servers import Running, Yard, partition_of, run
from tests.messaging.test_sending import ODD_NAMES

SECRET = "a secret of more than 32 characters"
JSON = f"Sec-WebSocket-Protocol: {Format.JSON.value}"


async def post(yard: Yard, url: str, body: Any = None, **headers: str) -> tuple[int, Any]:
    """Status and body of a response."""
    async with yard.clients.http.post(url, json=body, headers=headers) as response:
        return response.status, msgspec.json.decode(await response.read())


async def session(yard: Yard, server: Running, **credentials: object) -> tuple[int, Any]:
    return await post(yard, f"{server.url}/v1/session", credentials)


# Sessions


def test_an_open_server_believes_everybody(tmp_path: Path) -> None:
    async def scenario(yard: Yard) -> None:
        server = await yard.start()
        before = time.time()
        status, granted = await session(yard, server, user="alice")
        assert (status, granted["user"], granted["address"]) == (200, "alice", address(server.url))
        assert (before + 3599) * 1000 < granted["expires_at"] < (time.time() + 3601) * 1000
        client = await yard.join(server, "alice", token=granted["token"])
        assert client.position is not None
        for wrong in ({}, {"user": ""}, {"user": "x" * 129}):
            status, body = await session(yard, server, **wrong)
            assert (status, body["error"]["code"]) == (400, "invalid_value"), wrong
        for body in ({"user": 5}, [], "alice"):
            status, answer = await post(yard, f"{server.url}/v1/session", body)
            assert status == 400, answer

    run(tmp_path, scenario)


def test_a_server_with_a_secret_takes_it_or_what_was_signed_with_it(tmp_path: Path) -> None:
    async def scenario(yard: Yard) -> None:
        server = await yard.start(secret=SECRET)
        soon = int(time.time()) + 60

        def signed(key: str = SECRET, **claims: object) -> str:
            return jwt.encode({"sub": "alice", "exp": soon, **claims}, key, "HS256")

        for good in ({"user": "alice", "secret": SECRET}, {"token": signed()}, {"token": signed(aud="another")}):
            status, granted = await session(yard, server, **good)
            assert (status, granted["user"]) == (200, "alice"), good
            await yard.join(server, "alice", token=granted["token"])
        expired = jwt.encode({"sub": "alice", "exp": soon - 120}, SECRET, "HS256")
        signature, name = "signed with", "a token whose sub is a name of 1 to 128 characters"
        for wrong, reason in (
            ({"user": "alice"}, "its secret"),
            ({"user": "alice", "secret": ""}, "its secret"),
            ({"user": "alice", "secret": SECRET + "x"}, "its secret"),
            ({"user": "alice", "secret": SECRET, "token": "garbage"}, signature),
            ({"token": expired}, "has not expired"),
            ({"token": signed("another key of more than 32 characters")}, signature),
            ({"token": jwt.encode({"sub": "alice", "exp": soon}, None, "none")}, signature),
            ({"token": jwt.encode({"sub": "alice"}, SECRET)}, "sub and exp"),
            ({"token": jwt.encode({"exp": soon}, SECRET)}, "sub and exp"),
            ({"token": signed(nbf=soon)}, "whose time (nbf, iat) has come"),
            ({"token": signed(sub="")}, name),
            ({"token": signed(sub="x" * 200)}, name),
            ({"token": signed(sub=7)}, name),
            ({"token": server.server.tokens.issue("alice").text}, signature),
        ):
            status, body = await session(yard, server, **wrong)
            assert (status, body["error"]["code"]) == (401, "wrong_token"), wrong
            assert reason in body["error"]["message"], wrong
        assert (await session(yard, server, secret=SECRET))[0] == 400  # it names no user
        # What an application signed is no access token
        client = await yard.clients.hello(server.url, "alice", token=signed(aud=AUDIENCE))
        assert await client.closed() == 4210

    run(tmp_path, scenario)


# The directory


def test_every_user_has_a_place_whatever_the_name(tmp_path: Path) -> None:
    async def scenario(yard: Yard) -> None:
        server = await yard.start()
        for user in ODD_NAMES:
            if "\n" in user:  # routes do not match it
                continue
            async with yard.clients.http.get(URL(server.url + path("where", user), encoded=True)) as response:
                assert response.status == 200, (user, await response.text())
                where = msgspec.json.decode(await response.read(), type=wire.Where)
            assert (where.user, where.partition, where.address) == (user, partition_of(user), address(server.url))
        async with yard.clients.http.get(f"{server.url}/v1/where/{'x' * 129}") as response:
            assert response.status == 400

    run(tmp_path, scenario)


# Administration and other servers


def test_draining_and_metrics_require_the_token_for_administration(tmp_path: Path) -> None:
    async def scenario(yard: Yard) -> None:
        server = await yard.start(admin_token="admin")
        http = yard.clients.http
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic admin"}):
            async with http.get(f"{server.url}/metrics", headers=headers) as response:
                assert response.status == 401
            assert (await post(yard, f"{server.url}/v1/drain", **headers))[0] == 401
        token = (await yard.clients.session(server.url, "alice")).token
        assert (await post(yard, f"{server.url}/v1/drain", Authorization=f"Bearer {token}"))[0] == 401
        assert len(server.owned) == 4
        admin = {"Authorization": "Bearer admin"}
        async with http.get(f"{server.url}/metrics", headers=admin) as response:
            assert response.status == 200
            assert "shardyard_" in await response.text()
        for page in ("/healthz", "/readyz", "/", "/shardyard-messaging.js"):
            async with http.get(server.url + page) as response:
                assert response.status == 200, page
        assert (await post(yard, f"{server.url}/v1/drain", **admin))[0] == 200
        assert (await post(yard, f"{server.url}/v1/drain", **admin))[0] == 200
        assert server.owned == set()

    run(tmp_path, scenario)


def test_only_servers_may_make_the_calls_of_servers(tmp_path: Path) -> None:
    async def scenario(yard: Yard) -> None:
        server = await yard.start()
        alice = await yard.join(server, "alice")
        call = {"typing": [["bob", "alice"]], "presence": ["alice", "bob"]}
        url = f"{server.url}/v1/peer"
        access = (await yard.clients.session(server.url, "alice")).token
        for headers in ({}, {"Authorization": "Bearer x"}, {"Authorization": f"Bearer {access}"}):
            assert (await post(yard, url, call, **headers))[0] == 401
        await alice.sync()
        assert not [frame for frame in alice.frames if isinstance(frame, wire.IsTyping)]
        token = server.server.tokens.issue_for_peer("a server")
        status, body = await post(yard, url, call, Authorization=f"Bearer {token}")
        assert status == 200
        answer = msgspec.convert(body, PeerAnswer)
        assert [(each.user, each.online) for each in answer.presence] == [("alice", 1), ("bob", 0)]
        assert (await alice.get(wire.IsTyping)).sender == "bob"
        assert (await post(yard, url, {"typing": 5}, Authorization=f"Bearer {token}"))[0] == 400

    run(tmp_path, scenario)


# Opening a connection


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        ("http://localhost", 101),
        ("https://localhost", 101),
        ("https://chat.example.com", 101),
        ("https://evil.example.com", 401),
        ("http://localhost.evil.example.com", 401),
        ("https://chat.example.com.evil.example.com", 401),
        ("null", 401),
        ("http://[", 401),
        ("", 401),
    ],
)
def test_only_pages_of_this_server_and_of_given_origins_may_connect(tmp_path: Path, origin: str, status: int) -> None:
    async def scenario(yard: Yard) -> None:
        server = await yard.start(origins=["https://chat.example.com"])
        tcp = await yard.clients.tcp(server.url)
        assert await tcp.upgrade(JSON, f"Origin: {origin}", path=wire.PATH) == status

    run(tmp_path, scenario)


def test_what_is_no_connection_of_ours_is_refused_with_a_reason(tmp_path: Path) -> None:
    async def scenario(yard: Yard) -> None:
        server = await yard.start()
        for where, headers, status in (
            (wire.PATH, [], 400),
            (wire.PATH, ["Sec-WebSocket-Protocol: chat"], 400),
            (wire.PATH + "x", [JSON], 400),
            (wire.PATH + "?x=1", [JSON], 101),
            (wire.PATH, ["Sec-WebSocket-Protocol: chat, " + Format.MSGPACK.value], 101),
            ("/v1/session", [JSON], 400),
        ):
            tcp = await yard.clients.tcp(server.url)
            assert await tcp.upgrade(*headers, path=where) == status, where
        async with yard.clients.http.get(server.url + wire.PATH) as response:
            assert response.status in (400, 426)
        # A connection that was used for HTTP before becomes one for WebSocket
        tcp = await yard.clients.tcp(server.url)
        await tcp.write(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b"200" in await tcp._reader.readuntil(b"}")
        assert await tcp.upgrade(JSON, path=wire.PATH) == 101

    run(tmp_path, scenario)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is missing")
def test_clients_connect_over_tls(tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
            *("-keyout", str(key), "-out", str(certificate), "-days", "2", "-subj", "/CN=localhost"),
            *("-addext", "subjectAltName=IP:127.0.0.1"),
        ],
        check=True,
        capture_output=True,
    )

    async def scenario(yard: Yard) -> None:
        server = await yard.start(tls_certificate=str(certificate), tls_key=str(key))
        trusted = ssl.create_default_context(cafile=str(certificate))
        url = server.url.replace("http:", "https:")
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=trusted)) as http:
            async with http.post(f"{url}/v1/session", json={"user": "alice"}) as response:
                granted = msgspec.json.decode(await response.read(), type=wire.SessionGranted)
            assert granted.address == address(url)
            for format_ in Format:
                socket = await http.ws_connect(granted.address, protocols=[format_.value])
                client = Client(socket, "alice", format_.name)
                await client.send(wire.Hello(granted.token, format_.name))
                await client.get(wire.CaughtUp)
                await client.say(1, "alice", "x" * 10_000)
                await client.received(1)
                await client.close()

    run(tmp_path, scenario)


def test_servers_that_let_users_sign_in_in_different_ways_do_not_mix(tmp_path: Path) -> None:
    async def scenario(yard: Yard) -> None:
        await yard.start(secret=SECRET)
        for other in (None, SECRET + "x"):
            with pytest.raises(InvalidCall, match="another SHARDYARD_SECRET, or none"):
                await yard.start(secret=other)
        await yard.start(secret=SECRET)

    run(tmp_path, scenario)
