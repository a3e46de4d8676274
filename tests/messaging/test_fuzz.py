"""Whatever a client sends, the server stays up, logs no error, and serves the others."""

import asyncio
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import uvloop
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardyard.wire import messaging as wire
from shardyard.wire.messaging import Format
from tests.messaging.channel_yard import create_topics
from tests.messaging.clients import Client, Clients
from tests.messaging.frame_damage import damaged, whole_messages
from tests.messaging.servers import Running, config, no_errors_logged, yard
from tests.server.websockets import BINARY, CLOSE, CONTINUATION, PING, TEXT, frame
from tests.wire.messaging_samples import FROM_CLIENT

EXAMPLES = settings(
    max_examples=min(150, 2 * settings().max_examples), deadline=None, suppress_health_check=list(HealthCheck)
)
KINDS = {Format.JSON: TEXT, Format.MSGPACK: BINARY}


class Attacked:
    """A server with a healthy client, for as many examples as one likes."""

    def __init__(self, runner: asyncio.Runner, server: Running, clients: Clients, healthy: Client) -> None:
        self._runner = runner
        self._server = server
        self._clients = clients
        self._healthy = healthy
        self._token = server.server.tokens.issue("mallory").text
        self._number = 0

    def send(self, data: bytes, format_: Format | None = Format.JSON, *, hello: bool = True) -> None:
        """Send bytes on a connection of their own, which has said hello or not, or is none of WebSocket (None)."""
        self._runner.run(self._send(data, format_, hello))

    async def _send(self, data: bytes, format_: Format | None, hello: bool) -> None:
        async with asyncio.timeout(30):
            if format_ is None:
                raw = await self._clients.tcp(self._server.url)
            else:
                raw = await self._clients.raw(self._server.url, format_)
                if hello:
                    first = wire.encode(wire.Hello(self._token, "device"), format_)
                    await raw.frame(first, KINDS[format_])
            await raw.write(data)
            if raw._writer.can_write_eof() and not raw._writer.is_closing():
                raw._writer.write_eof()
            await raw.ended()
            raw.close()
            self._number += 1
            await self._healthy.say(self._number, self._healthy.user, "still here")
            await self._healthy.received(self._number)


@contextmanager
def attacked(folder: Path) -> Iterator[Attacked]:
    with no_errors_logged(), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        opened = yard(folder, "memory")
        made = runner.run(opened.__aenter__())
        try:
            runner.run(create_topics(made))
            server = runner.run(made.start(config(burst=10**6, rate=1e6, mirror="local")))
            healthy = runner.run(made.join(server, "alice"))
            yield Attacked(runner, server, made.clients, healthy)
        finally:
            runner.run(opened.__aexit__(None, None, None))


def some_json(depth: int = 3) -> st.SearchStrategy[Any]:
    names = st.sampled_from(
        ["type", "number", "to", "text", "token", "device", "position", "users", "with", "limit", "channel", "x"]
    )
    types = st.sampled_from([kind.__struct_config__.tag for kind in wire.ClientFrame.__args__])
    leaves = (
        st.none()
        | st.booleans()
        | st.integers(-(2**70), 2**70)
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.text(max_size=200)
        | types
    )
    return st.recursive(
        leaves,
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(names, inner | types, max_size=6),
        max_leaves=depth * 6,
    )


def messages() -> st.SearchStrategy[tuple[Format, bytes]]:
    """Messages in a format that are valid frames, nearly so, or anything."""

    def made(format_: Format, seed: int, anything: Any, choice: int) -> tuple[Format, bytes]:
        chance = random.Random(seed)
        match choice:
            case 0:
                return format_, chance.randbytes(chance.choice((0, 1, 20, 500)))
            case 1:
                if format_ is Format.JSON:
                    return format_, msgspec.json.encode(anything)
                try:
                    return format_, msgspec.msgpack.encode(anything)
                except OverflowError:
                    return format_, b"\xc1"
            case 2:
                valid = [each for each, *_ in FROM_CLIENT if not isinstance(each, wire.Hello)]
                return format_, wire.encode(chance.choices(valid, k=chance.randrange(1, 6)), format_)
            case _:
                return format_, damaged(chance.choice(whole_messages(format_)), format_, chance)[: wire.MAX_FRAME_BYTES]

    return st.builds(made, st.sampled_from(list(Format)), st.integers(0, 2**32), some_json(), st.integers(0, 4))


def test_messages_of_any_content_harm_nobody(tmp_path: Path) -> None:
    with attacked(tmp_path) as server:

        @EXAMPLES
        @given(st.lists(messages(), min_size=1, max_size=4), st.booleans())
        def check(sent: list[tuple[Format, bytes]], hello: bool) -> None:
            format_ = sent[0][0]
            data = b"".join(frame(message, KINDS[format_]) for _, message in sent)
            server.send(data, format_, hello=hello)

        check()


def test_websocket_frames_of_any_kind_and_bytes_harm_nobody(tmp_path: Path) -> None:
    kinds = st.sampled_from([CONTINUATION, TEXT, BINARY, 3, 7, CLOSE, PING, 10, 15])
    made = st.builds(
        lambda payload, kind, fin, declared: frame(payload, kind, fin=fin, declared=declared),
        st.binary(max_size=300),
        kinds,
        st.booleans(),
        st.none() | st.integers(0, 2**63 - 1),
    )
    with attacked(tmp_path) as server:

        @EXAMPLES
        @given(
            st.lists(made | st.binary(max_size=100), min_size=1, max_size=5),
            st.sampled_from(list(Format)),
            st.booleans(),
        )
        def check(parts: list[bytes], format_: Format, hello: bool) -> None:
            server.send(b"".join(parts), format_, hello=hello)

        check()


def test_bytes_that_are_no_request_harm_nobody(tmp_path: Path) -> None:
    start = f"GET {wire.PATH} HTTP/1.1\r\n".encode()
    headers = st.sampled_from(
        [
            b"Host: localhost\r\n",
            b"Upgrade: websocket\r\n",
            b"Connection: Upgrade\r\n",
            b"Sec-WebSocket-Version: 13\r\n",
            b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n",
            b"Sec-WebSocket-Key: x\r\n",
            b"Sec-WebSocket-Protocol: \xff\r\n",
            f"Sec-WebSocket-Protocol: {Format.JSON.value}\r\n".encode(),
            b"Origin: http://[\r\n",
            b"Origin: \xe4\r\n",
            b"no header\r\n",
            b"\r\n",
        ]
    )
    request = st.builds(
        lambda first, lines, rest: first + b"".join(lines) + rest,
        st.sampled_from(
            [start, start[:10], b"GET /v1/messaging\xff HTTP/1.1\r\n", b"GET /v1/messaging HTTP/9\r\n", b"POST / "]
        ),
        st.lists(headers, max_size=8),
        st.sampled_from([b"\r\n", b"", b"\r\n\xff\xff", b"\0" * 100]),
    )
    with attacked(tmp_path) as server:

        @EXAMPLES
        @given(request | st.binary(max_size=200))
        def check(data: bytes) -> None:
            server.send(data, None)

        check()


@pytest.mark.processes
def test_damaged_messages_are_frames_or_malformed() -> None:
    """In a process of its own, whose memory is measured."""
    command = [sys.executable, "-m", "tests.messaging.frame_damage", "5", "2000"]
    result = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr[-2000:]
