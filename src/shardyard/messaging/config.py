"""How a messaging server runs: limits, and what it does for the clients of a sender."""

from dataclasses import dataclass
from typing import Literal

from shardyard.model import InvalidValue

Mirror = Literal["log", "local"]


@dataclass(frozen=True, slots=True)
class MessagingConfig:
    """The configuration of a messaging server. All servers of a group have the same `mirror`."""

    mirror: Mirror = "log"
    """How the sender's other clients get a copy: through the sender's partition, or handed over by the server."""
    session_timeout: float = 5.0
    """Seconds after which the partitions of a server that has died go to others."""
    connections_per_user: int = 20
    rate: float = 50.0
    """Frames per second that a client may send in the long run. One that sends more is read more slowly."""
    burst: int = 200
    """Frames that it may send at once."""
    unanswered: int = 32
    """Sends of a client that are being stored. No more are read from it meanwhile."""
    queued: int = 1000
    """Entries that wait for a client which reads slowly. One more, and it is disconnected."""
    unread_seconds: float = 10.0
    """How long a client may read nothing while something waits for it."""
    idle_seconds: float = 60.0
    """Without anything from a client, not even a ping."""
    hello_seconds: float = 10.0
    """From connecting to the first frame."""
    store_seconds: float = 10.0
    """How long storing a message is retried before the client is disconnected, to try again elsewhere."""
    pace_seconds: float = 0.002
    """What clients send within this time is stored together, if there was something to store just before."""
    tail_records: int = 5_000
    tail_bytes: int = 4 * 1024 * 1024
    """What is kept in memory of each partition for clients that reconnect."""
    spread: float = 4_000.0
    """Clients per second that are sent to another server when partitions move."""

    away_seconds: float = 30.0
    """How long a client that has disconnected counts as online in channels, in case that it comes back."""
    presence_records: int = 10_000
    """After so many records, `presence` gets the current state once more, and what lies before it is trimmed."""
    recent_changes: int = 50_000
    """Joins and leaves that are kept in memory for users who connect before the history has them."""
    history_seconds: float = 10.0
    """How long a client that connects waits for a history that is further behind than that."""

    def __post_init__(self) -> None:
        if self.mirror not in ("log", "local"):
            raise InvalidValue("mirror", self.mirror, "'log' or 'local'")


DEFAULT_CONFIG = MessagingConfig()
