"""Short runs of `chaos`; `make chaos` runs long ones. And ledgers that its check must not let pass."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from tests.messaging import chaos
from tests.messaging.ledger import ClientLedger, Ledger, Receipt, Sending
from tests.postgresql import postgresql_server

SECONDS = 15.0


@pytest.mark.processes
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("engine", "mirror"),
    [
        ("sqlite", "log"),
        ("sqlite", "local"),
        pytest.param("postgresql", "log", marks=pytest.mark.server),
    ],
)
def test_every_client_gets_every_message_once_while_servers_are_killed_stalled_and_stopped(
    tmp_path: Path, spark: SparkSession, engine: str, mirror: str
) -> None:
    with postgresql_server() if engine == "postgresql" else nullcontext() as database:
        report = chaos.run(tmp_path, SECONDS, seed=7, mirror=mirror, database=database, spark=spark)
    assert report.problems == []
    assert report.faults >= chaos.LEAST_FAULTS
    assert report.moves > 0, "no user was served by another server"
    assert report.acknowledged > 500, "too little happened to prove anything"
    assert report.received > report.acknowledged
    assert report.paged > 0


def receipt(at: float, sending: Sending, id_: str | None = None) -> Receipt:
    return Receipt(at, id_ or sending.id or "99", sending.sender, sending.recipient, sending.text)


class Told:
    """A ledger of alice, who has two clients and sends three messages to bob from one of them; all is well."""

    def __init__(self) -> None:
        self.ledger = Ledger()
        self.sender, self.other, self.bob = (
            self._client(user, device) for user, device in (("alice", "d1"), ("alice", "d2"), ("bob", "d1"))
        )
        self.messages = [self.ledger.new_sending(self.sender, "bob") for _ in range(3)]
        for number, message in enumerate(self.messages):
            message.at, message.id = 10.0 + number, str(number)
            for client in (self.other, self.bob):
                client.receipts.append(receipt(20.0 + number, message))

    def _client(self, user: str, device: str) -> ClientLedger:
        client = self.ledger.new_client(user, device)
        client.created = 1.0
        return client


def test_the_check_passes_what_is_right(spark: SparkSession) -> None:
    told = Told()
    assert told.ledger.problems() == []
    assert chaos.audit(told.ledger, spark) == []


def not_acknowledged_and_received_by_nobody(told: Told) -> None:
    told.messages[2].id = None
    told.other.receipts.pop()
    told.bob.receipts.pop()


def created_after_it(told: Told) -> None:
    told.bob.created = 11.5
    del told.bob.receipts[:2]


def given_up_and_stored_late(told: Told) -> None:
    told.messages[0].id, told.messages[0].given_up = None, True
    for client in (told.bob, told.other):
        client.receipts.append(client.receipts.pop(0))


@pytest.mark.parametrize(
    "change", [not_acknowledged_and_received_by_nobody, created_after_it, given_up_and_stored_late]
)
def test_the_check_passes_what_may_happen(spark: SparkSession, change: Callable[[Told], None]) -> None:
    told = Told()
    change(told)
    assert told.ledger.problems() == []
    assert chaos.audit(told.ledger, spark) == []


@pytest.mark.parametrize(
    ("change", "problem", "audited"),
    [
        (lambda told: told.bob.receipts.pop(1), "bob/d1 did not receive alice/d1>bob#1", "1 lost"),
        (lambda told: told.other.receipts.pop(0), "alice/d2 did not receive alice/d1>bob#0", "1 lost"),
        (lambda told: told.bob.receipts.append(told.bob.receipts[2]), "bob/d1 received alice/d1>bob#2 twice", "1 dup"),
        (lambda told: told.bob.receipts.reverse(), "bob/d1 received alice/d1>bob#1 after alice/d1>bob#2", "2 out_of"),
        (
            lambda told: told.bob.receipts.append(Receipt(30.0, "7", "alice", "bob", "hello")),
            "which nobody sent",
            "1 unexpected",
        ),
        (
            lambda told: told.sender.receipts.append(receipt(30.0, told.messages[0])),
            "alice/d1 received its own message",
            None,
        ),
        (
            lambda told: told.bob.receipts.__setitem__(0, receipt(20.0, told.messages[0], "77")),
            "which was acknowledged with id 0",
            None,
        ),
        (
            lambda told: told.ledger.owners["bob", 5].update(("server-0", "server-1")),
            "bob was served under epoch 5 by",
            None,
        ),
    ],
)
def test_the_check_reports_what_must_not_happen(
    spark: SparkSession, change: Callable[[Told], None], problem: str, audited: str | None
) -> None:
    told = Told()
    change(told)
    assert any(problem in found for found in told.ledger.problems()), told.ledger.problems()
    if audited is not None:
        assert any(audited in found for found in chaos.audit(told.ledger, spark))
