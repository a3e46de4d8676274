"""How a group shares its partitions."""

from dataclasses import dataclass

from shardyard.model import InvalidValue, whole_number
from shardyard.placement import ASSIGNORS
from shardyard.registry import GroupRow


@dataclass(frozen=True, slots=True)
class GroupConfig:
    """How a group shares its partitions. It is stored with the group, and nowhere else."""

    assignor: str = "sticky"
    max_active: int | None = None
    """How many members get partitions; the others stand by. None: all of them."""
    release_after: float | None = None
    """Seconds without progress after which a member that still heartbeats is evicted; None: never."""
    broadcast: bool = False
    """Each member gets every record."""

    def __post_init__(self) -> None:
        if self.assignor not in ASSIGNORS:
            raise InvalidValue("assignor", self.assignor, "one of " + ", ".join(ASSIGNORS))
        if self.max_active is not None:
            whole_number("max_active", self.max_active, at_least=1)
        if self.release_after is not None and not self.release_after > 0:
            raise InvalidValue("release_after", self.release_after, "a number of seconds, more than 0")


DEFAULT_CONFIG = GroupConfig()


def config_of(row: GroupRow) -> GroupConfig:
    """The configuration that is stored with a group."""
    return GroupConfig(row.assignor, row.max_active, row.release_after, row.broadcast)
