"""Metrics: what Prometheus gets, and that the documentation lists all of them."""

import threading
from pathlib import Path

import pytest

from shardyard.model import InvalidValue
from shardyard.runtime import metrics

DOCUMENT = Path(__file__).parents[2] / "docs" / "metrics.md"


@pytest.fixture(autouse=True)
def _restore_declarations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "METRICS", list(metrics.METRICS))


def test_a_counter_and_a_gauge_are_rendered_with_help_type_and_labels() -> None:
    calls = metrics.counter("calls_total", "calls", "Calls.", "route", "status")
    calls.series("/v1/topics", "200").add()
    calls.series("/v1/topics", "200").add(2)
    calls.series('a "path"\\\n', "404").add()
    waiting = metrics.gauge("waiting", "requests", "Those that wait.").series()
    waiting.add(3)
    waiting.add(-1)
    assert list(calls.render()) == [
        "# HELP calls_total Calls.",
        "# TYPE calls_total counter",
        'calls_total{route="/v1/topics",status="200"} 3',
        'calls_total{route="a \\"path\\"\\\\\\n",status="404"} 1',
    ]
    assert metrics.render().endswith("# HELP waiting Those that wait.\n# TYPE waiting gauge\nwaiting 2\n")


def test_a_histogram_has_cumulative_buckets_a_sum_and_a_count() -> None:
    sizes = metrics.histogram("sizes", "units", "Sizes.", bounds=(1, 2.5))
    for size in (0.5, 1, 2, 99):
        sizes.series().observe(size)
    assert list(sizes.render())[2:] == [
        'sizes_bucket{le="1"} 2',
        'sizes_bucket{le="2.5"} 3',
        'sizes_bucket{le="+Inf"} 4',
        "sizes_sum 102.5",
        "sizes_count 4",
    ]


def test_a_name_is_declared_once_and_each_label_has_a_value() -> None:
    calls = metrics.counter("calls_total", "calls", "Calls.", "route")
    with pytest.raises(InvalidValue, match="calls_total"):
        metrics.gauge("calls_total", "calls", "Calls.")
    with pytest.raises(InvalidValue, match="a value for each of route"):
        calls.series()


def test_no_update_is_lost_between_threads() -> None:
    count = metrics.counter("calls_total", "calls", "Calls.").series()
    sizes = metrics.histogram("sizes", "units", "Sizes.", bounds=(1,)).series()

    def update() -> None:
        for _ in range(50_000):
            count.add()
            sizes.observe(1)

    threads = [threading.Thread(target=update) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert count.value == sizes.sum == sizes.counts[0] == 200_000


def test_all_metrics_are_documented_as_they_are_declared() -> None:
    assert metrics.markdown_table() in DOCUMENT.read_text()
    for metric in metrics.METRICS:
        assert metric.name.startswith("shardyard_")
        assert metric.name.endswith("_total") == (metric.kind == "counter")
        assert metric.meaning.endswith(".")
        assert metric.unit
