"""The settings of a group, in requests and responses."""

import fnmatch
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, structs

from shardyard.model import Partition

Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Seconds = Annotated[float, Meta(gt=0)]
PartitionName = Annotated[str, Meta(pattern="^[^/]+/[0-9]{1,9}$", description="a partition such as orders/3")]
Address = Annotated[
    str, Meta(pattern=r"^https?://[^/\s]+", description="an address that begins with http:// or https://")
]


class GroupSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """The settings of a group."""

    backoff: tuple[Seconds, ...] = (1.0, 5.0, 30.0, 120.0, 600.0)
    """Seconds before each retry of a record whose handler failed; after the last one it becomes a dead letter."""
    tags: tuple[str, ...] = ()
    """Only records with one of these tags are delivered; empty delivers all."""
    paused: bool = False
    paused_partitions: tuple[PartitionName, ...] = ()
    """Names such as `orders/3`."""
    allow: tuple[str, ...] = ()
    """Patterns (`*`, `?`) of members or hosts that may join; empty allows all."""
    deny: tuple[str, ...] = ()
    broadcast: bool = False
    """Each member gets all records."""
    concurrency: Count = 16
    """How many records a consumer handles at once. Records of the same key are handled one after the other."""
    max_records: Count = 500
    """The most records of one batch."""
    handler_seconds: Seconds | None = None
    """How long handling one record may take before it counts as failed; None sets no limit."""
    lag_alarm: Count | None = None
    """The lag on a topic, in records, from which on an alarm is raised."""
    webhook: Address | None = None
    """The URL that alarms are posted to, as JSON. They are always logged too."""
    assignor: Literal["sticky", "even", "contiguous", "least_loaded"] = "sticky"
    max_active: Count | None = None
    """The most members that own partitions; the others stand by."""
    release_after: Seconds | None = 60.0
    """Seconds without progress after which a member is evicted, because its handler hangs; None never evicts it."""

    def is_paused(self, partition: Partition) -> bool:
        return self.paused or str(partition) in self.paused_partitions

    def admits(self, member: str, host: str) -> bool:
        """Whether a member of this name may join, or stay, from this host."""
        return not _any(self.deny, member, host) and (not self.allow or _any(self.allow, member, host))


def without_null_lists(kind: type[Struct], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Changes of settings in which null takes a list away, as it does any other setting that need not have a value."""
    lists = {field.name for field in structs.fields(kind) if isinstance(field.default, tuple)}
    return {name: () if value is None and name in lists else value for name, value in changes.items()}


def _any(patterns: tuple[str, ...], *names: str) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns for name in names)
