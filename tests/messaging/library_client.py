"""A user's client by `shardyard.client.MessagingClient`, which keeps a ledger."""

import asyncio
import random

from shardyard.client import MessagingClient
from shardyard.client.messaging import Gap, Message, Presence
from shardyard.model import Closed, NotAcknowledged, Unreachable
from tests.messaging.ledger import ClientLedger, Ledger, Sending

IMPATIENT_SECONDS = 1.0


class LibraryClient:
    """One client of a user, which is closed and opened again from its position."""

    def __init__(self, ledger: Ledger, notes: ClientLedger, urls: list[str]) -> None:
        self.notes = notes
        self.unanswered = 0
        self._ledger = ledger
        self._urls = urls
        self._client: MessagingClient | None = None
        self._resume: str | None = None
        self._reading: asyncio.Task[None] | None = None
        self._opened = asyncio.Event()
        self._sending: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        while True:
            client = MessagingClient(
                self._urls,
                self.notes.user,
                device=self.notes.device,
                resume=self._resume,
                format=random.choice(["msgpack", "json"]),
                timeout=120.0,
                mark_delivered=random.random() < 0.3,
            )
            try:
                await client.__aenter__()
            except Unreachable as error:
                self.notes.note(f"no connection: {error}")
                continue
            break
        self.notes.note("opened")
        self.notes.note_creation()
        self._client = client
        self._reading = asyncio.create_task(self._read(client))
        self._opened.set()

    async def stop(self) -> None:
        """Close the client. What was not answered is given up."""
        self._opened.clear()
        if self._client is not None and self._reading is not None:
            await self._client.close()
            await asyncio.gather(self._reading)  # it has taken what was received before
            await asyncio.gather(*self._sending)
            self._resume = self._client.position
            self.notes.note(f"closed at {self._resume}")
            self._client = None

    async def restart(self, seconds: float) -> None:
        await self.stop()
        await asyncio.sleep(seconds)
        await self.start()

    @property
    def is_caught_up(self) -> bool:
        return self._client is not None and self._client.is_connected

    async def _read(self, client: MessagingClient) -> None:
        async for event in client.events():
            self._receive(event)

    def _receive(self, event: object) -> None:
        if isinstance(event, Message):
            self.notes.received(event.id, event.sender, event.recipient, event.text)
        elif isinstance(event, Gap):
            self.notes.problems.append(f"{self.notes.name}: {event}")
        elif not isinstance(event, Presence):
            self.notes.note(f"{type(event).__name__} {getattr(event, 'position', '')}")

    # Sending

    async def send(self, recipients: list[str], padding: str) -> None:
        """Send to these users without waiting for answers."""
        await self._opened.wait()
        for recipient in recipients:
            sending = self._ledger.new_sending(self.notes, recipient, padding)
            self.unanswered += 1
            task = asyncio.create_task(self._send(sending, None))
            self._sending.add(task)
            task.add_done_callback(self._sending.discard)
        while self.unanswered > 40:
            await asyncio.wait(self._sending, return_when=asyncio.FIRST_COMPLETED)

    async def send_impatiently(self, recipient: str) -> None:
        """Send one message with a short timeout, again and again under the same number."""
        await self._opened.wait()
        if not self._sending:
            sending = self._ledger.new_sending(self.notes, recipient)
            self.unanswered += 1
            await self._send(sending, IMPATIENT_SECONDS)

    async def _submit(
        self,
        client: MessagingClient,
        sending: Sending,
        number: int | None,
        timeout: float | None,  # noqa: ASYNC109 it is that of the client
    ) -> str:
        """Returns the id of the message."""
        return (await client.send(sending.recipient, sending.text, number=number, timeout=timeout)).id

    async def _send(self, sending: Sending, timeout: float | None) -> None:  # noqa: ASYNC109 it is that of the client
        number: int | None = None
        try:
            while self._client is not None:
                try:
                    id_ = await self._submit(self._client, sending, number, timeout)
                except NotAcknowledged as error:
                    number = error.number if error.number is not None else number
                    continue
                sending.id = id_
                return
            sending.given_up = True
        except Closed:
            sending.given_up = True
        finally:
            self.unanswered -= 1
