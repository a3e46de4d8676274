"""How a node serves sharded queues: bounds and times."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ShardingConfig:
    """The configuration of a node."""

    session_timeout: float = 5.0
    """Seconds after which the queues of a node that has died go to others."""
    read_ahead_records: int = 4_000
    read_ahead_bytes: int = 4 * 1024 * 1024
    """What is kept in memory of each queue that is consumed, before it is delivered."""
    in_flight_records: int = 20_000
    in_flight_bytes: int = 64 * 1024 * 1024
    """What may be delivered and not acknowledged, of each queue, for all of its consumers together."""
    batch_records: int = 500
    batch_bytes: int = 1024 * 1024
    """Messages of one delivery to a consumer. One that is larger is delivered alone."""
    store_seconds: float = 0.05
    """How often the acknowledgements of a queue are stored while there are new ones."""
    trim_records: int = 5_000
    """After so many settled messages, the log may drop them."""
    close_seconds: float = 5.0
    """How long a queue that moves to another node stores its state and its dead letters."""


DEFAULT_CONFIG = ShardingConfig()
