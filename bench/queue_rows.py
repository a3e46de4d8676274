"""The rows of the comparison: what one round of each measures, and how it is shown."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean

from bench.contenders.system import BATCH_RECORDS, Schedule
from bench.figures import milliseconds, percentile, rate
from bench.queue_workers import Worker

WARM_UP_SECONDS = 1
"""Records that are due in this time are left out of the latencies."""


@dataclass(slots=True)
class Figures:
    """The measurements of one system over all rounds, by the title of the line that shows them."""

    rates: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """Records per second, one for each round."""
    latencies: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """Seconds, of all records of all rounds."""


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the table."""

    title: str
    percents: tuple[float, ...] = ()
    """For latencies: the percentiles that are shown. The last one is compared."""
    is_limited: bool = False
    """For rates: whether the benchmark itself limits it. Then the mean of all rounds is shown, and it is not compared;
    otherwise it is the best round, because other work on the machine can only slow a round down."""

    def cell(self, figures: Figures) -> str:
        if self.percents:
            return milliseconds(figures.latencies[self.title], *self.percents)
        rates = figures.rates[self.title]
        return rate(fmean(rates) if self.is_limited else max(rates))

    def score(self, figures: Figures) -> float:
        """The higher the better."""
        if self.percents:
            return 1 / percentile(figures.latencies[self.title], self.percents[-1])
        return max(figures.rates[self.title])


@dataclass(frozen=True, slots=True)
class Row:
    """Lines that are measured together."""

    name: str
    """For `--rows`."""
    lines: tuple[Line, ...]
    measure: Callable[[Worker, Worker, Figures], None]
    """Runs one round with a process that publishes and another that consumes. All records are consumed in the end."""


PUBLISHED = Line(f"published in batches of {BATCH_RECORDS}, records/s")
CONSUMED = Line("consumed with commits, records/s")


def measure_batches(publisher: Worker, consumer: Worker, figures: Figures) -> None:
    sent, per_second = publisher.call("publish")
    figures.rates[PUBLISHED.title].append(per_second)
    figures.rates[CONSUMED.title].append(consumer.call("consume", sent))


def in_flight_row(in_flight: int) -> Row:
    sent = Line(f"single records, {in_flight} in flight, records/s")
    latency = Line(f"single records, {in_flight} in flight, p50 / p99 ms", (50, 99))
    return Row(f"in-flight-{in_flight}", (sent, latency), partial(measure_singles, in_flight, sent, latency))


def measure_singles(
    in_flight: int, sent: Line, latency: Line, publisher: Worker, consumer: Worker, figures: Figures
) -> None:
    per_second, latencies = publisher.call("send_singles", in_flight)
    figures.rates[sent.title].append(per_second)
    figures.latencies[latency.title] += latencies
    consumer.call("consume", len(latencies))


ONE_AT_A_TIME = Line("one at a time, p50 ms", (50,))


def measure_one_at_a_time(publisher: Worker, consumer: Worker, figures: Figures) -> None:
    _, latencies = publisher.call("send_singles", 1)
    figures.latencies[ONE_AT_A_TIME.title] += latencies
    consumer.call("consume", len(latencies))


DELIVERED = Line("  delivered meanwhile, records/s", is_limited=True)


def schedule_row(schedule: type[Schedule]) -> Row:
    latency = Line(f"due -> delivered at {schedule.RECORDS_PER_SECOND:,} records/s, p50 / p99 ms", (50, 99))
    return Row("schedule", (latency, DELIVERED), partial(measure_schedule, latency))


def measure_schedule(latency: Line, publisher: Worker, consumer: Worker, figures: Figures) -> None:
    """The rate is what was delivered from the second second to the last one of the schedule."""
    consumer.start("follow")
    publisher.call("send_one")
    consumer.result()  # it has joined
    publisher.call("send_on_schedule")
    times: list[tuple[int, int]] = consumer.result()
    first_due_at = min(due_at for due_at, _ in times)
    start, end = first_due_at + WARM_UP_SECONDS * 10**9, first_due_at + Schedule.SECONDS * 10**9
    figures.latencies[latency.title] += [(at - due_at) / 1e9 for due_at, at in times if due_at >= start]
    delivered = sum(start <= at < end for _, at in times)
    figures.rates[DELIVERED.title].append(delivered / (Schedule.SECONDS - WARM_UP_SECONDS))


ROWS = (
    Row("batches", (PUBLISHED, CONSUMED), measure_batches),
    in_flight_row(64),
    in_flight_row(512),
    Row("one", (ONE_AT_A_TIME,), measure_one_at_a_time),
    schedule_row(Schedule),
)
