"""How coordinators and fan-out workers run."""

from dataclasses import dataclass

from shardyard.model import InvalidValue, whole_number
from shardyard.placement import ASSIGNORS

EVENTS_GROUP = "fanout.events"
"""The group that reads `events`: coordinators, or in the mode `replicated` the workers."""
WORKERS_GROUP = "fanout.workers"
"""The group of the workers, which reads `fanout`."""


@dataclass(frozen=True, slots=True)
class FanoutConfig:
    """The configuration of coordinators and fan-out workers."""

    session_timeout: float = 5.0
    """Seconds after which the partitions of a process that has died go to others."""
    prepare_seconds: float = 60.0
    """How long the owner of a partition keeps it while its next owner loads the partition's routing table."""
    assignor: str = "sticky"
    """How workers share the partitions of `fanout`; `contiguous` gives each worker a range."""
    buffer_seconds: float = 300.0
    """A coordinator stops reading `events` while a record of `fanout` has waited longer than this."""
    buffer_records: int = 2_000_000
    """The same while more records than this wait in a partition of `fanout`."""
    buffer_look_seconds: float = 1.0
    """How often the buffer is measured."""
    keep_seconds: float = 3600.0
    """How long `fanout` keeps what the workers have processed, at least."""
    read_records: int = 20_000
    """The most records of one partition in a step of a coordinator."""
    read_bytes: int = 8 * 1024 * 1024
    worker_records: int = 5_000
    """The most records of one partition in a step of a worker."""
    worker_bytes: int = 2 * 1024 * 1024
    step_bytes: int = 64 * 1024 * 1024
    """About how much a step reads of all partitions together. Partitions take turns if they hold more."""
    commit_seconds: float = 0.05
    """Between two commits of positions."""
    load_records: int = 50_000
    """The most changes of memberships and presence that are read at once."""
    clock_skew_seconds: float = 10.0
    """By how much the clocks of the machines may differ that append to the log. Timestamps of events that a program
    chooses itself must not lie further ahead."""
    hot_seconds: float = 5.0
    """The time over which the load of channels is measured."""
    hot_load: float = 200_000.0
    """A channel is hot if its events per second times its online members are more than this."""
    cool_load: float = 50_000.0
    """A hot channel is no longer hot if they are fewer than this."""
    hot_members: int = 1000
    """A channel with fewer online members is never hot."""
    hot_ways: int = 4
    """Over how many partitions of `fanout` a hot channel is split: a power of two, at most `MAX_WAYS`."""
    forget_hot_seconds: float = 600.0
    """How long coordinators remember that a channel was hot. It is longer than records wait in the buffer, so that the
    order of its events is kept when its coordinator changes meanwhile."""

    def __post_init__(self) -> None:
        if self.assignor not in ASSIGNORS:
            raise InvalidValue("assignor", self.assignor, "one of " + ", ".join(ASSIGNORS))
        for name in (
            "buffer_records",
            "read_records",
            "read_bytes",
            "worker_records",
            "worker_bytes",
            "step_bytes",
            "load_records",
        ):
            whole_number(name, getattr(self, name), at_least=1)
        for name in ("prepare_seconds", "buffer_seconds", "buffer_look_seconds", "keep_seconds", "hot_seconds"):
            if not getattr(self, name) > 0:
                raise InvalidValue(name, getattr(self, name), "a number of seconds, more than 0")
        if self.hot_ways not in WAYS:
            raise InvalidValue("hot_ways", self.hot_ways, f"one of {', '.join(map(str, WAYS))}")


MAX_WAYS = 16
WAYS = (1, 2, 4, 8, MAX_WAYS)
"""Over how many partitions a channel can be split."""
DEFAULT_CONFIG = FanoutConfig()
