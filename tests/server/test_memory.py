"""The memory of a broker process: small after the start, and bounded against its callers."""

import contextlib
import http.client
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.queues.brokers import BrokerProcess

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the memory of a process from /proc"),
]

MB = 10**6
CALLERS = 40
DECLARED, SENT = 31 * 2**20, 30 * 2**20
"""Bytes of a body that each of them announces, and sends."""


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[BrokerProcess]:
    with BrokerProcess(tmp_path) as process:
        process.listens()
        assert request(process, "POST", "/v1/topics", b'{"name": "orders", "partitions": 2}') == 201
        yield process


def request(broker: BrokerProcess, method: str, path: str, body: bytes | None = None) -> int:
    """The status of the response."""
    with contextlib.closing(http.client.HTTPConnection(broker.address, timeout=30)) as connection:
        connection.request(method, path, body)
        return connection.getresponse().status


def test_a_broker_takes_little_memory_before_its_first_record(broker: BrokerProcess) -> None:
    # 96 MB when this was written; the room is for other versions of Python and of the packages. Another 50 to 90 MB are
    # files of libraries: how much of them is mapped depends on what the kernel has in its cache.
    status = Path(f"/proc/{broker.process.pid}/status").read_text()
    own = next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("RssAnon:"))
    assert own < 115 * MB
    loaded = Path(f"/proc/{broker.process.pid}/maps").read_text()
    assert "pyarrow" in loaded
    for package in ("aiohttp", "llvmlite", "matplotlib", "numba", "pandas", "scipy/"):
        assert f"site-packages/{package}" not in loaded


def test_callers_that_stop_in_the_middle_of_a_body_do_not_fill_the_memory(broker: BrokerProcess) -> None:
    before = broker.resident_bytes
    head = f"POST /v1/topics/orders/records HTTP/1.1\r\nHost: broker\r\nContent-Length: {DECLARED}\r\n\r\n".encode()
    with contextlib.ExitStack() as stack:
        refused = 0
        for _ in range(CALLERS):
            host, _, port = broker.address.rpartition(":")
            caller = stack.enter_context(socket.create_connection((host, int(port)), timeout=30))
            caller.sendall(head)
            refused += send_until_refused(caller)
        assert refused > CALLERS // 2
        assert broker.resident_bytes - before < 250 * MB
        assert request(broker, "POST", "/v1/topics/orders/records", b'{"value": "x"}') == 200
        assert request(broker, "GET", "/readyz") == 200


def send_until_refused(caller: socket.socket) -> bool:
    """Send the body but for its end, as far as the broker wants it. Returns whether it was refused."""
    part = b"x" * 2**20
    for _ in range(SENT // len(part)):
        caller.sendall(part)
        caller.setblocking(False)
        try:
            assert caller.recv(65536).startswith(b"HTTP/1.1 503")
        except BlockingIOError:
            caller.settimeout(30)
        else:
            return True
    return False
