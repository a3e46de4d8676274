"""What coordinators and fan-out workers say about themselves. No I/O."""

from msgspec import Struct


class TableFigures(Struct, frozen=True):
    """What the routing table of a worker holds."""

    bytes: int
    channels: int
    users: int
    """That it knows, online or not."""
    online: int
    """Users that are online. Every worker knows all of them."""
    memberships: int


class ProcessStatus(Struct, frozen=True):
    """A coordinator or a worker: the response of `/v1/status`."""

    name: str
    role: str
    mode: str
    phase: str
    ready: bool
    working: str | None
    """What it does in this mode: `coordinator`, `worker` or `replicated`; None if it stands by."""
    partitions: dict[str, list[int]] = {}
    """The partitions that it owns, by topic."""
    table: TableFigures | None = None
    """None for a coordinator."""
