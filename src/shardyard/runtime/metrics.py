"""Metrics: each is declared once, below, with its type, unit and meaning, and rendered for Prometheus.

    HEARTBEATS.add()
    REQUESTS.series("/v1/topics", "200").add()

Updating a series takes no lock: it is one in-place addition, which CPython's GIL does not interrupt. They count for the
whole process.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator
from typing import Any, Generic, Protocol, TypeVar

from shardyard.model import InvalidValue

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""The media type of what `render` returns."""


class Series(Protocol):
    """One time series: a metric with certain labels."""

    def samples(self) -> Iterator[tuple[str, str, float]]:
        """Suffix of the name, further label if any, and value of each sample."""
        ...


class _Value:
    """A series with a single sample."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: float = 0

    def add(self, amount: float = 1) -> None:
        self.value += amount

    def samples(self) -> Iterator[tuple[str, str, float]]:
        yield "", "", self.value


class Counter(_Value):
    """Goes up only."""

    __slots__ = ()


class Gauge(_Value):
    """Goes up and down."""

    __slots__ = ()

    def set(self, value: float) -> None:
        self.value = value


class Histogram:
    """Counts observations by size, in buckets with upper bounds."""

    __slots__ = ("_bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        """Observations in each bucket; the last one has no upper bound."""
        self.sum: float = 0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self._bounds, value)] += 1
        self.sum += value

    def samples(self) -> Iterator[tuple[str, str, float]]:
        total = 0
        for bound, count in zip((*self._bounds, None), list(self.counts), strict=True):
            total += count
            yield "_bucket", f'le="{"+Inf" if bound is None else f"{bound:g}"}"', total
        yield "_sum", "", self.sum
        yield "_count", "", total


S = TypeVar("S", bound=Series)


class Metric(Generic[S]):
    """A declared metric, with one series for each combination of label values.

    Keep the number of combinations small and fixed: every series stays in memory.
    """

    def __init__(
        self, kind: str, name: str, unit: str, meaning: str, labels: tuple[str, ...], new: Callable[[], S]
    ) -> None:
        if any(metric.name == name for metric in METRICS):
            raise InvalidValue("metric", name, "a name that is not declared yet")
        self.kind = kind
        self.name: str = name
        self.unit = unit
        self.meaning = meaning
        self.labels = labels
        self._new = new
        self._series: dict[tuple[str, ...], S] = {}
        METRICS.append(self)

    def series(self, *labels: str) -> S:
        """The series with these label values, in the order in which the labels were declared."""
        found = self._series.get(labels)
        if found is None:
            if len(labels) != len(self.labels):
                raise InvalidValue(f"labels of {self.name}", labels, f"a value for each of {', '.join(self.labels)}")
            found = self._series.setdefault(labels, self._new())
        return found

    def clear(self) -> None:
        """Drop all series: those of things that are gone would stay otherwise."""
        self._series.clear()

    def render(self) -> Iterator[str]:
        yield f"# HELP {self.name} {self.meaning}"
        yield f"# TYPE {self.name} {self.kind}"
        for values, series in sorted(self._series.items()):
            named = [f'{name}="{_escape(value)}"' for name, value in zip(self.labels, values, strict=True)]
            for suffix, label, value in series.samples():
                labels = ",".join([*named, label] if label else named)
                yield f"{self.name}{suffix}{{{labels}}} {value!r}" if labels else f"{self.name}{suffix} {value!r}"


METRICS: list[Metric[Any]] = []
"""All that are declared."""


def render() -> str:
    """All metrics in the text format of Prometheus."""
    return "\n".join(line for metric in METRICS for line in metric.render()) + "\n"


def markdown_table() -> str:
    """All metrics as the table of the documentation."""
    rows = ["| metric | type | unit | labels | meaning |", "|---|---|---|---|---|"]
    for m in METRICS:
        labels = ", ".join(f"`{label}`" for label in m.labels)
        rows.append(f"| `{m.name}` | {m.kind} | {m.unit} | {labels} | {m.meaning} |")
    return "\n".join(rows) + "\n"


def _escape(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def counter(name: str, unit: str, meaning: str, *labels: str) -> Metric[Counter]:
    return Metric("counter", name, unit, meaning, labels, Counter)


def gauge(name: str, unit: str, meaning: str, *labels: str) -> Metric[Gauge]:
    return Metric("gauge", name, unit, meaning, labels, Gauge)


def histogram(name: str, unit: str, meaning: str, *labels: str, bounds: tuple[float, ...]) -> Metric[Histogram]:
    return Metric("histogram", name, unit, meaning, labels, lambda: Histogram(bounds))


_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_BATCH_SECONDS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)

# The server

REQUESTS = counter(
    "shardyard_requests_total", "requests", "HTTP requests answered, by route and status.", "route", "status"
)
REQUEST_SECONDS = histogram(
    "shardyard_request_seconds",
    "seconds",
    "Time from a request to its response, with the waiting of long polls.",
    "route",
    bounds=_SECONDS,
)
REQUESTS_IN_FLIGHT = gauge(
    "shardyard_requests_in_flight", "requests", "HTTP requests that are being answered, with the long polls."
).series()
LONG_POLLS_WAITING = gauge(
    "shardyard_long_polls_waiting", "requests", "Long polls that wait for records or for a change in their group."
).series()
CONNECTIONS = gauge("shardyard_connections", "connections", "Open connections, HTTP and WebSocket.").series()
WEBSOCKETS = gauge("shardyard_websockets", "connections", "Open WebSocket connections.").series()
CALLS = counter("shardyard_calls_total", "calls", "Calls on WebSocket connections, by kind.", "kind")
CALL_SECONDS = histogram(
    "shardyard_call_seconds",
    "seconds",
    "Time from a call on a WebSocket connection to its answer, with the waiting of reads; a watch has no end.",
    "kind",
    bounds=_SECONDS,
)
BODY_BYTES = gauge(
    "shardyard_body_bytes",
    "bytes",
    "Request bodies, and messages, of more than 64 KiB that are being handled.",
).series()
ERRORS = counter(
    "shardyard_errors_total",
    "responses",
    "Requests refused with an error, by its code; `fenced` are calls of members that no longer own a partition.",
    "code",
)

# Records

PUBLISHED_RECORDS = counter(
    "shardyard_published_records_total", "records", "Records stored by publishes, with the delayed ones."
).series()
PUBLISHED_BYTES = counter(
    "shardyard_published_bytes_total", "bytes", "Bodies of publishes that were stored; on a connection, the values."
).series()
DELIVERED_RECORDS = counter(
    "shardyard_delivered_records_total", "records", "Records delivered to the owners of partitions."
).series()
DELIVERED_BYTES = counter("shardyard_delivered_bytes_total", "bytes", "Bodies of responses to these reads.").series()
RETRIES = counter(
    "shardyard_retries_total", "records", "Records whose handler failed and that will be retried."
).series()
DEAD_LETTERS = counter(
    "shardyard_dead_letters_total", "records", "Records that became dead letters after their last retry."
).series()
DROPPED_UNREAD_RECORDS = counter(
    "shardyard_dropped_unread_records_total",
    "records",
    "Records that retention dropped before the group had read them, by group.",
    "group",
)

# Groups

JOINS = counter("shardyard_joins_total", "members", "Members that joined a group through this broker.").series()
HEARTBEATS = counter("shardyard_heartbeats_total", "heartbeats", "Heartbeats of members.").series()
COMMITS = counter("shardyard_commits_total", "commits", "Commits of positions.").series()
REBALANCES = counter(
    "shardyard_rebalances_total", "rebalances", "Assignments of a group that this process changed as the leader."
).series()
LEADER = gauge("shardyard_leader", "0 or 1", "Whether this broker leads, that is, runs the rebalancer.").series()

# Messaging

CLIENTS = gauge("shardyard_messaging_clients", "connections", "Clients of users that are connected.").series()
MESSAGES_SENT = counter(
    "shardyard_messaging_sent_total", "messages", "Messages and marks of connected clients that were stored."
).series()
DELIVERED_ENTRIES = counter(
    "shardyard_messaging_delivered_total", "entries", "Messages and marks that were sent to clients."
).series()
CLIENTS_CUT = counter(
    "shardyard_messaging_clients_cut_total",
    "connections",
    "Clients that were disconnected because they read too slowly.",
).series()
CLIENTS_MOVED = counter(
    "shardyard_messaging_clients_moved_total", "connections", "Clients that were sent to another server."
).series()
MALFORMED_INBOX_RECORDS = counter(
    "shardyard_messaging_malformed_records_total", "records", "Records of the inbox that could not be decoded."
).series()
RESUMES = counter(
    "shardyard_messaging_resumes_total",
    "connections",
    "How clients resumed: new, position, id, or lost.",
    "how",
)
CHANNEL_POSTS = counter("shardyard_messaging_posts_total", "posts", "Posts to channels that were stored.").series()
CHANNEL_MEMBERSHIPS = gauge(
    "shardyard_messaging_memberships", "memberships", "Channels of the users who are online, added up."
).series()
PRESENCE_CHANGES = counter(
    "shardyard_messaging_presence_changes_total",
    "clients",
    "Clients that were published in `presence`: online or offline.",
    "change",
)
MALFORMED_MEMBER_RECORDS = counter(
    "shardyard_messaging_malformed_members_total", "records", "Records of `members` that could not be decoded."
).series()

# Storage

GROUP_COMMIT_UNITS = histogram(
    "shardyard_group_commit_units", "units", "Appends or transactions that shared one sync to disk.", bounds=_SIZES
).series()

# Messaging

HISTORY_MALFORMED_RECORDS = counter(
    "shardyard_history_malformed_records_total",
    "records",
    "Records of `inbox`, `events` and `members` that are malformed, and are not in the history.",
).series()

# Fan-out

FANOUT_FORWARDED = counter(
    "shardyard_fanout_forwarded_events_total", "events", "Events that coordinators appended to `fanout`."
).series()
FANOUT_SKIPPED = counter(
    "shardyard_fanout_skipped_events_total",
    "records",
    "Records of `events` without a channel, or too large, which were not forwarded.",
).series()
FANOUT_BUFFER_FULL = gauge(
    "shardyard_fanout_buffer_full", "0 or 1", "Whether coordinators wait because the workers are too far behind."
).series()
FANOUT_BUFFER_RECORDS = gauge(
    "shardyard_fanout_buffer_records", "records", "Records of `fanout` that workers have not committed."
).series()
FANOUT_BUFFER_SECONDS = gauge(
    "shardyard_fanout_buffer_seconds",
    "seconds",
    "How long the oldest of these has waited; 0 if it has waited for less than a second or so.",
).series()
FANOUT_ROUTED = counter("shardyard_fanout_routed_events_total", "events", "Events that workers routed.").series()
FANOUT_POSTS = counter(
    "shardyard_fanout_posts_total", "records", "Posts that workers appended to partitions of `inbox`."
).series()
FANOUT_ROUTE_SECONDS = histogram(
    "shardyard_fanout_route_seconds",
    "seconds",
    "Time from the oldest event of a step in `fanout` until the step is durable in `inbox`.",
    bounds=_SECONDS,
).series()
FANOUT_HOT_CHANNELS = gauge(
    "shardyard_fanout_hot_channels", "channels", "Channels that are split over several partitions of `fanout`."
).series()
FANOUT_SPLIT_EVENTS = counter(
    "shardyard_fanout_split_events_total", "events", "Events of hot channels that coordinators split."
).series()

# The pipeline

INGEST_RECORDS = counter(
    "shardyard_ingest_records_total", "records", "Records that a continuous ingest has written to its lake."
).series()
INGEST_RECORDS_PER_SECOND = gauge(
    "shardyard_ingest_records_per_second", "records/s", "How fast the last batch of an ingest was written."
).series()
INGEST_LAG_RECORDS = gauge(
    "shardyard_ingest_lag_records",
    "records",
    "Records of the topics that were not in the lake of an ingest after its last batch, by offsets.",
).series()
INGEST_BATCH_SECONDS = histogram(
    "shardyard_ingest_batch_seconds",
    "seconds",
    "Time that a batch of an ingest took, from the planning until it was durable in the lake.",
    bounds=_BATCH_SECONDS,
).series()
INGEST_RESTARTS = counter(
    "shardyard_ingest_restarts_total", "restarts", "Restarts of the query of a continuous ingest after a failure."
).series()
# Sharded queues

SHARDING_PUBLISHED = counter(
    "shardyard_sharding_published_messages_total",
    "messages",
    "Messages stored in queues, once for each queue.",
).series()
SHARDING_UNROUTABLE = counter(
    "shardyard_sharding_unroutable_messages_total",
    "messages",
    "Messages that no queue took.",
).series()
SHARDING_DELIVERED = counter(
    "shardyard_sharding_delivered_messages_total", "messages", "Messages that were delivered to consumers."
).series()
SHARDING_REDELIVERED = counter(
    "shardyard_sharding_redelivered_messages_total",
    "messages",
    "Those of them that may have been delivered before.",
).series()
SHARDING_ACKNOWLEDGED = counter(
    "shardyard_sharding_acknowledged_messages_total", "messages", "Messages that consumers have acknowledged."
).series()
SHARDING_DEAD_LETTERS = counter(
    "shardyard_sharding_dead_letters_total",
    "messages",
    "Messages that became dead letters: rejected, delivery_limit, expired or maxlen.",
    "reason",
)
SHARDING_DROPPED = counter(
    "shardyard_sharding_dropped_messages_total",
    "messages",
    "Messages that were dropped: expired or maxlen without a dead-letter exchange, rejected dead letters, and those "
    "that came back to a queue by itself.",
    "reason",
)
SHARDING_QUEUES = gauge("shardyard_sharding_queues", "queues", "Queues that this node serves.").series()
SHARDING_READY = gauge(
    "shardyard_sharding_ready_messages",
    "messages",
    "Messages that wait for delivery, in each queue that this node serves (the first 500 by name).",
    "queue",
)
SHARDING_UNACKNOWLEDGED = gauge(
    "shardyard_sharding_unacknowledged_messages",
    "messages",
    "Messages that were delivered and not acknowledged, likewise.",
    "queue",
)
SHARDING_CONSUMERS = gauge(
    "shardyard_sharding_consumers", "consumers", "Consumers that read a queue, likewise.", "queue"
)
