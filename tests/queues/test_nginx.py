"""Two brokers behind a real Nginx, each of them killed under load."""

import asyncio
import contextlib
import io
import os
import shutil
import subprocess
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import aiohttp
import pytest

from shardyard.client import Brokers, Consumer, Message, Producer
from shardyard.client.brokers import CarrierName
from shardyard.log import open_log
from shardyard.model import InvalidValue, Record
from shardyard.server.nginx import nginx_config
from shardyard.wire.media import MAX_BODY_BYTES
from tests.log.samples import contents
from tests.queues.brokers import BrokerProcess
from tests.servers import free_port

pytestmark = pytest.mark.timeout(60)

SESSION_SECONDS = 3.0
CURE_SECONDS = 10.0
"""Within which a retry must help."""


@pytest.fixture
def nginx() -> str:
    """Where it is. Debian puts it beside what only root is expected to run."""
    found = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")
    if found is None:
        say = "Nginx is missing: apt-get install nginx-light"
        if os.environ.get("CI") == "true":
            pytest.fail(say)
        pytest.skip(say)
    return found


@pytest.fixture
def folder() -> Iterator[Path]:
    """One that Nginx's workers may enter too: if root runs the tests, they are another user."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


@contextlib.contextmanager
def proxying(nginx: str, folder: Path, brokers: list[BrokerProcess]) -> Iterator[str]:
    """An Nginx before the brokers; its address."""
    listen = f"127.0.0.1:{free_port()}"
    (folder / "nginx.conf").write_text(nginx_config([broker.address for broker in brokers], listen))
    command = [nginx, "-p", str(folder), "-c", "nginx.conf", "-e", "error.log"]
    checked = subprocess.run([*command, "-t"], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr
    assert "[warn]" not in checked.stderr
    process = subprocess.Popen([*command, "-g", "daemon off;"])
    try:
        yield f"http://{listen}"
    finally:
        process.terminate()
        process.wait(10)


class Load:
    """Publishes and consumes until stopped, and records what was acknowledged and what was delivered."""

    def __init__(self, url: str, carrier: CarrierName) -> None:
        self._url = url
        self._carrier: CarrierName = carrier
        self.batched: set[str] = set()
        self.posted: set[str] = set()
        self.delivered: Counter[str] = Counter()
        self.stopped = asyncio.Event()

    @property
    def acknowledged(self) -> set[str]:
        return self.batched | self.posted

    async def batches(self) -> None:
        """By the client, which tries again by itself."""
        async with Producer(self._url, retry_seconds=CURE_SECONDS, carrier=self._carrier) as producer:
            while not self.stopped.is_set():
                records = [Record.new(b"x" * 256, b"%d" % n) for n in range(50)]
                await producer.publish("orders", records)
                self.batched |= {record.id for record in records}

    async def posts(self) -> None:
        """By plain HTTP; what fails is posted again as it was."""
        async with aiohttp.ClientSession() as session:
            while not self.stopped.is_set():
                record = {"id": uuid.uuid4().hex, "value": "by hand"}
                async with asyncio.timeout(CURE_SECONDS):
                    while not await self._post(session, record):  # noqa: ASYNC110 it may be answered the next time
                        await asyncio.sleep(0.05)
                self.posted.add(record["id"])

    async def _post(self, session: aiohttp.ClientSession, record: dict[str, str]) -> bool:
        try:
            async with session.post(f"{self._url}/v1/topics/orders/records", json=record) as response:
                assert response.status == 200 or response.status >= 500, await response.text()
                return response.status == 200
        except aiohttp.ClientError:
            return False

    async def consume(self) -> None:
        async with Consumer(
            self._url, "billing", ["orders"], session_timeout=SESSION_SECONDS, carrier=self._carrier
        ) as consumer:
            await consumer.run(self._note)

    async def _note(self, message: Message) -> None:
        self.delivered[message.record.id] += 1

    def _counts(self) -> tuple[int, int, int]:
        return len(self.batched), len(self.posted), self.delivered.total()

    async def goes_on(self) -> None:
        """Until more was published both ways, and consumed."""
        enough = [count + 100 for count in self._counts()]
        await self._until(lambda: all(now >= then for now, then in zip(self._counts(), enough, strict=True)))

    async def all_delivered(self) -> None:
        await self._until(lambda: self.acknowledged <= self.delivered.keys())

    async def _until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(2 * CURE_SECONDS):
            while not condition():  # noqa: ASYNC110 it shows in the state of several processes
                await asyncio.sleep(0.02)


async def killed_in_turn(url: str, brokers: list[BrokerProcess], carrier: CarrierName) -> Load:
    """Both brokers are killed under load, one after the other; the second when the first is back."""
    load = Load(url, carrier)
    consumers = [asyncio.create_task(load.consume()) for _ in range(2)]
    producers = [asyncio.create_task(work) for work in (load.batches(), load.posts(), load.posts())]
    first, second = brokers
    await load.goes_on()
    first.kill()
    await load.goes_on()
    first.start()
    await asyncio.to_thread(first.listens)
    await load.goes_on()
    second.kill()
    await load.goes_on()  # which takes the first one to be called again
    load.stopped.set()
    await asyncio.gather(*producers)
    await load.all_delivered()
    for consumer in consumers:
        assert not consumer.done(), consumer
        consumer.cancel()
    await asyncio.gather(*consumers, return_exceptions=True)
    return load


async def stored(folder: Path) -> Counter[str]:
    """How often each record is in the log."""
    async with open_log(f"sqlite:///{folder / 'log'}") as log:
        found = [await contents(log, partition) for partition in await log.topic("orders")]
    return Counter(record.id for records in found for record in records)


async def made(url: str) -> None:
    """The topic; Nginx may need a moment until it listens."""
    async with Brokers(url) as brokers:
        await brokers.post("/v1/topics", {"name": "orders", "partitions": 4})


async def sizes(url: str, carrier: CarrierName) -> None:
    """A body that goes by Nginx's disk arrives, and a large message; one that is too large is refused in JSON."""
    async with Producer(url, carrier=carrier) as producer, aiohttp.ClientSession() as session:
        (part,) = await producer.publish("orders", [Record.new(b"x" * 1_000_000) for _ in range(8)], partition=0)
        assert part.count == 8
        beyond = io.BytesIO(b" " * (MAX_BODY_BYTES + 1))
        async with session.post(f"{url}/v1/topics/orders/records", data=beyond) as response:
            assert (response.status, response.content_type) == (413, "application/json")
            assert (await response.json())["error"]["code"] == "too_large"


async def waited(url: str, carrier: CarrierName) -> float:
    """How long a call took that waits for 1.5 s, and is answered by then."""
    begun = time.monotonic()
    async with Brokers(url, carrier=carrier) as brokers:
        await brokers.get("/v1/groups/nobody/changes", wait=1.5, seen="", wait_seconds=1.5)
    return time.monotonic() - begun


@pytest.mark.server
@pytest.mark.parametrize("carrier", ["websocket", "http"])
def test_brokers_behind_nginx_are_killed_under_load_and_nothing_is_lost(
    nginx: str, folder: Path, carrier: CarrierName
) -> None:
    with BrokerProcess(folder, "one") as one, BrokerProcess(folder, "two") as two:
        brokers = [one, two]
        for broker in brokers:
            broker.listens()
        with proxying(nginx, folder, brokers) as url:
            asyncio.run(made(url))
            load = asyncio.run(killed_in_turn(url, brokers, carrier))
            asyncio.run(sizes(url, carrier))
            assert 1.4 < asyncio.run(waited(url, carrier)) < 4
    found = asyncio.run(stored(folder))
    assert load.acknowledged <= found.keys()
    assert max(found[id_] for id_ in load.batched) == 1
    assert load.delivered.keys() <= found.keys()
    assert len(load.posted) > 100


@pytest.mark.parametrize(
    ("brokers", "listen", "says"),
    [
        ([], "7480", "brokers is []: expected at least one"),
        (["localhost"], "7480", "brokers is 'localhost': expected addresses such as"),
        (["http://localhost:7400"], "7480", "expected addresses such as"),
        (["a:7400; } evil {"], "7480", "expected addresses such as"),
        (["a:70000"], "7480", "brokers is 'a:70000'"),
        (["a:1", "a:1"], "7480", "expected each of them once"),
        (["a:1"], "0", "listen is '0': expected a port"),
        (["a:1"], "7480 ssl", "listen is '7480 ssl'"),
    ],
)
def test_an_invalid_address_is_refused(brokers: list[str], listen: str, says: str) -> None:
    with pytest.raises(InvalidValue) as error:
        nginx_config(brokers, listen)
    assert says in str(error.value)


def test_nginx_listens_on_the_given_host_and_port() -> None:
    config = nginx_config(["[::1]:7400", "b.example.org:7401"], "[::]:7480")
    assert "listen [::]:7480;" in config
    assert "server [::1]:7400 " in config
    assert "server b.example.org:7401 " in config
