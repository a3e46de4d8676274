"""The result of an audit, for people and for programs."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

COUNTS = ("lost", "duplicated", "unexpected", "out_of_order")


@dataclass(frozen=True, slots=True)
class Latency:
    """Time from sent to first delivered, over the `records` for which both times are known."""

    records: int
    p50_ms: float
    p90_ms: float
    p99_ms: float
    p999_ms: float
    max_ms: float


@dataclass(frozen=True, slots=True)
class AuditReport:
    """The result of an audit. `lost`, `duplicated`, `unexpected` and `out_of_order` are numbers of distinct records."""

    exactly_once: bool
    """The guarantee that was checked: exactly once, or at least once."""
    sent: int
    delivered: int
    """Deliveries: a record that was delivered twice counts twice."""
    lost: int
    duplicated: int
    unexpected: int
    out_of_order: int
    ordered: int
    """Records that have an order: they were sent with a key and delivered at a known position."""
    latency: Latency | None
    examples: Mapping[str, tuple[Mapping[str, Any], ...]]
    """For each of `COUNTS`, the first such records by partition and position."""

    @property
    def broken(self) -> list[str]:
        """The names of the guarantees that do not hold."""
        counts = {"lost": self.lost, "out of order": self.out_of_order}
        if self.exactly_once:
            counts |= {"duplicated": self.duplicated, "unexpected": self.unexpected}
        return [name for name, count in counts.items() if count]

    @property
    def ok(self) -> bool:
        return not self.broken

    def to_json(self) -> dict[str, Any]:
        """Plain data. Keys are strings; bytes that are not UTF-8 are escaped with backslashes."""
        return {
            "guarantee": "exactly once" if self.exactly_once else "at least once",
            "ok": self.ok,
            "broken": self.broken,
            **{name: getattr(self, name) for name in ("sent", "delivered", *COUNTS, "ordered")},
            "latency": self.latency and asdict(self.latency),
            "examples": {name: [_plain(one) for one in found] for name, found in self.examples.items()},
        }

    def sentence(self) -> str:
        """The result in one sentence: the counts, and whether the guarantee holds."""
        order = f"{self.out_of_order:,} out of order" if self.ordered else "no order known"
        found = [f"{self.lost:,} lost", f"{self.duplicated:,} twice", order]
        if self.unexpected:
            found.append(f"{self.unexpected:,} never sent")
        guarantee = "exactly once" if self.exactly_once else "at least once"
        verdict = f"{guarantee} holds" if self.ok else f"broken ({', '.join(self.broken)})"
        return f"{self.sent:,} sent, {self.delivered:,} delivered: {', '.join(found)}: {verdict}"


def _plain(example: Mapping[str, Any]) -> dict[str, Any]:
    """The example with bytes as strings."""
    return {
        name: value.decode(errors="backslashreplace") if isinstance(value, bytes | bytearray) else value
        for name, value in example.items()
    }
