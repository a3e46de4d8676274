"""What clients sent and received during a run of `chaos`, and whether that is what the servers promise."""

import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

AROUND_SECONDS = (3.0, 8.0)
"""Events that are printed with a problem: from so long before a message was sent to so long after it."""


@dataclass(slots=True)
class Sending:
    """A message that a client has sent, maybe several times."""

    text: str
    """No two have the same."""
    sender: str
    device: str
    recipient: str
    """A user, or a channel."""
    audience: frozenset[str]
    """The users whose clients get it."""
    order: int
    """Its place among those of its device to its recipient."""
    at: float = field(default_factory=time.monotonic)
    """Before it was sent for the first time."""
    id: str | None = None
    """If it was acknowledged."""
    given_up: bool = False
    """The client has ended without an acknowledgement. It may be stored or not, before or after later ones."""

    @property
    def conversation(self) -> tuple[str, str, str]:
        return self.sender, self.device, self.recipient


@dataclass(frozen=True, slots=True)
class Receipt:
    """A message that a client gave to its program."""

    at: float
    id: str
    sender: str
    recipient: str
    text: str


@dataclass(slots=True)
class ClientLedger:
    """What one client of a user received."""

    user: str
    device: str
    created: float | None = None
    """When it was welcomed for the first time."""
    is_abandoned: bool = False
    """It has gone for good, and need not have received everything."""
    receipts: list[Receipt] = field(default_factory=list)
    events: list[tuple[float, str]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    """What the client itself found wrong."""

    @property
    def name(self) -> str:
        return f"{self.user}/{self.device}"

    def note(self, event: str) -> None:
        self.events.append((time.monotonic(), event))

    def note_creation(self) -> None:
        """It was welcomed."""
        if self.created is None:
            self.created = time.monotonic()

    def received(self, id_: str, sender: str, recipient: str, text: str) -> None:
        self.receipts.append(Receipt(time.monotonic(), id_, sender, recipient, text))

    def must_have(self, sending: Sending) -> bool:
        """Whether it has to receive this, if it was stored."""
        return (
            not self.is_abandoned
            and self.created is not None
            and self.created < sending.at
            and self.user in sending.audience
            and (self.user, self.device) != (sending.sender, sending.device)
        )


class Ledger:
    """Everything that happened in a run."""

    def __init__(self) -> None:
        self.sendings: dict[str, Sending] = {}
        self.clients: list[ClientLedger] = []
        self.members: defaultdict[str, set[str]] = defaultdict(set)
        """Of each channel: the users that have joined it for sure."""
        self.joining: defaultdict[str, set[str]] = defaultdict(set)
        """The users that have joined it, or may have."""
        self.owners: defaultdict[tuple[str, int], set[str]] = defaultdict(set)
        """The servers that welcomed a user under an epoch."""
        self.faults: list[tuple[float, str]] = []
        self._orders: defaultdict[tuple[str, str, str], int] = defaultdict(int)

    def new_client(self, user: str, device: str) -> ClientLedger:
        client = ClientLedger(user, device)
        self.clients.append(client)
        return client

    def new_sending(self, client: ClientLedger, recipient: str, padding: str = "") -> Sending:
        order = self._orders[client.user, client.device, recipient]
        self._orders[client.user, client.device, recipient] += 1
        text = f"{client.user}/{client.device}>{recipient}#{order}{padding}"
        audience = frozenset(self.members.get(recipient, {client.user, recipient}))
        sending = self.sendings[text] = Sending(text, client.user, client.device, recipient, audience, order)
        return sending

    def note(self, fault: str) -> None:
        self.faults.append((time.monotonic(), fault))

    # What must be true

    def stored(self) -> dict[str, Sending]:
        """What was acknowledged, and what anybody received: that is durable, too."""
        seen = {receipt.text for client in self.clients for receipt in client.receipts}
        return {text: each for text, each in self.sendings.items() if each.id is not None or text in seen}

    def missing(self) -> Iterator[tuple[ClientLedger, Sending]]:
        """Clients, and what they should have received."""
        by_user: defaultdict[str, list[ClientLedger]] = defaultdict(list)
        for client in self.clients:
            by_user[client.user].append(client)
        texts = {id(client): {receipt.text for receipt in client.receipts} for client in self.clients}
        for sending in self.stored().values():
            for user in sending.audience:
                for client in by_user[user]:
                    if client.must_have(sending) and sending.text not in texts[id(client)]:
                        yield client, sending

    def problems(self) -> list[str]:
        """What is not as promised, each with the events around it."""
        found = [
            f"{client.name} did not receive {sending.text} ({sending.id}){self._around(sending, sending.at, client)}"
            for client, sending in self.missing()
        ]
        for client in self.clients:
            found += client.problems
            found += self._wrong_receipts(client)
            found += self._disorder(client)
        found += [
            f"{user} was served under epoch {epoch} by {servers}"
            for (user, epoch), servers in self.owners.items()
            if len(servers) > 1
        ]
        return found

    def _wrong_receipts(self, client: ClientLedger) -> Iterator[str]:
        """Each once, with the id that was acknowledged, by nobody but the users of the conversation."""
        known: set[str] = set()
        for receipt in client.receipts:
            sending = self.sendings.get(receipt.text)
            if sending is None or (sending.sender, sending.recipient) != (receipt.sender, receipt.recipient):
                yield f"{client.name} received {receipt}, which nobody sent"
                continue
            if client.user not in sending.audience | self.joining[sending.recipient]:
                yield f"{client.name} received {receipt}, which is not for its user"
            if (client.user, client.device) == (sending.sender, sending.device):
                yield f"{client.name} received its own message {receipt}"
            if receipt.text in known:
                yield f"{client.name} received {receipt.text} twice{self._around(sending, receipt.at, client)}"
            known.add(receipt.text)
            if sending.id is not None and receipt.id != sending.id:
                yield f"{client.name} received {receipt}, which was acknowledged with id {sending.id}"

    def _disorder(self, client: ClientLedger) -> Iterator[str]:
        """Of what was sent since the client exists: it may get earlier messages of its own user when it resumes."""
        latest: dict[tuple[str, str, str], Sending] = {}
        for receipt in client.receipts:
            sending = self.sendings.get(receipt.text)
            if sending is None or sending.given_up or not (client.created or 0.0) < sending.at:
                continue
            before = latest.get(sending.conversation)
            if before is not None and before.order > sending.order:
                events = self._around(sending, receipt.at, client)
                yield f"{client.name} received {sending.text} after {before.text}{events}"
            else:
                latest[sending.conversation] = sending

    def _around(self, sending: Sending, at: float, client: ClientLedger) -> str:
        """The events around a moment, of servers, of the client, and of the one that sent the message."""
        name = f"{sending.sender}/{sending.device}"
        events = [(when, f"-- {what}") for when, what in self.faults]
        events += [
            (when, f"{each.name}: {what}")
            for each in self.clients
            if each is client or each.name == name
            for when, what in each.events
        ]
        events.append((sending.at, f"{name}: sends it"))
        before, after = AROUND_SECONDS
        return "".join(
            f"\n    {when - at:+8.3f} s  {what}" for when, what in sorted(events) if at - before < when < at + after
        )
