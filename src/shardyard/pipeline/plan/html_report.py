"""A plan as one self-contained HTML file: tables, plots, and the plan itself as JSON."""

import re
from collections.abc import Sequence
from importlib import resources
from io import StringIO
from itertools import groupby
from typing import Any, TypeVar

import matplotlib as mpl
import numpy as np
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from shardyard.pipeline.plan.recommendation import format_bytes, format_percent
from shardyard.pipeline.plan.report import PlanReport
from shardyard.pipeline.plan.routing_size import (
    ACTIVATE_BYTES,
    ACTIVATE_USERS,
    CHANNELS_PER_USER,
    GB,
    MEMBERSHIP_BYTES,
    STATED_SHARE,
)

MAX_STEPS = 8
"""Groups of bars in a plot; the tables show all steps."""
MAX_BARS = 1000
"""Up to this number each partition gets its own bar; beyond it, a bar shows the fullest of several partitions."""
WIDTH = 7.6
"""Of a plot in inches. The page scales plots to its own width."""

Row = TypeVar("Row")

# Placeholder colours. They are replaced by variables of the page, whose values depend on its light or dark scheme.
_INK, _FAINT, _MEAN, _PAGE = "#010101", "#010102", "#010103", "#010104"
_SERIES = ("#010111", "#010112", "#010113", "#010114")
_VARIABLES = {_INK: "ink", _FAINT: "faint", _MEAN: "mean", _PAGE: "page"} | {
    c: f"series-{i}" for i, c in enumerate(_SERIES)
}
_STYLE: Any = {  # matplotlib has a type with every possible key
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 9,
    "text.color": _INK,
    "axes.labelcolor": _INK,
    "axes.edgecolor": _FAINT,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 9.5,
    "grid.color": _FAINT,
    "grid.linewidth": 0.4,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "legend.frameon": False,
}


def render(report: PlanReport, title: str) -> str:
    """The whole page. The same plan and title always give the same text."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"bytes": format_bytes, "percent": format_percent}
    environment.policies["json.dumps_kwargs"] = {"sort_keys": False, "allow_nan": False}
    template = environment.from_string(resources.files(__package__).joinpath("report.html.j2").read_text("utf-8"))
    with mpl.rc_context(_STYLE):
        plots = {
            "moves": _svg("moves", _moves(report), "Partitions that move when members are added, for each assignor"),
            "bytes": _svg("bytes", _bytes(report), "Bytes of each partition") if report.load.partition_bytes else "",
            "partitions": _svg("keys", _keys(report), "Keys that move when partitions are added, for each partitioner"),
            "memory": _svg("memory", _memory(report), "Memory of a routing table in each worker")
            if report.tables
            else "",
        }
    return template.render(
        title=title,
        report=report,
        data=report.to_json(),
        plots=plots,
        assignors=list(dict.fromkeys(step.assignor for step in report.member_steps)),
        partitioners=list(dict.fromkeys((step.partitioner, step.hash) for step in report.partition_steps)),
        member_rows=_grouped(report.member_steps, "partitions", "before", "after"),
        partition_rows=_grouped(report.partition_steps, "before", "after"),
        worker_rows=_grouped(report.worker_memory, "scale", "mode"),
        design={
            "users": ACTIVATE_USERS,
            "bytes": ACTIVATE_BYTES,
            "channels": CHANNELS_PER_USER,
            "membership": MEMBERSHIP_BYTES,
            "scale": STATED_SHARE.scale,
            "workers": STATED_SHARE.workers,
            "share": STATED_SHARE.stated_bytes,
        },
    )


def _grouped(rows: Sequence[Row], *names: str) -> list[list[Row]]:
    """Groups of the rows that have the same values in these fields."""

    def key(row: Row) -> tuple[object, ...]:
        return tuple(getattr(row, name) for name in names)

    order = {k: i for i, k in enumerate(dict.fromkeys(map(key, rows)))}
    return [list(same) for _, same in groupby(sorted(rows, key=lambda row: order[key(row)]), key)]


def _svg(name: str, figure: Figure, label: str) -> Markup:
    """The figure as an SVG element that uses the colours of the page."""
    out = StringIO()
    with mpl.rc_context({"svg.hashsalt": name}):
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
    text = out.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", text, flags=re.DOTALL)
    text = (
        re.sub(r' (xmlns(:\w+)?|width|height|version)="[^"]*"', "", text[: text.index(">")]) + text[text.index(">") :]
    )
    used = set(re.findall(r"#([\w-]+)", text))
    text = re.sub(r' id="([^"]*)"', lambda m: m[0] if m[1] in used else "", text)  # figure_1 would occur in every plot
    for colour, variable in _VARIABLES.items():
        text = text.replace(colour, f"var(--{variable})")
    return Markup("<svg role='img' aria-label='{}'").format(label) + Markup(text.removeprefix("<svg"))  # noqa: S704 ours


def _bars(axes: Axes, groups: Sequence[str], series: dict[str, list[float]], ideal: list[float]) -> None:
    """Groups of labelled bars with percentages, and a line across each group for its ideal."""
    width = 0.8 / len(series)
    for i, (name, values) in enumerate(series.items()):
        left = np.arange(len(groups)) - 0.4 + width * (i + 0.5)
        bars = axes.bar(left, np.multiply(values, 100), width * 0.92, color=_SERIES[i % len(_SERIES)], label=name)
        box = {"facecolor": _PAGE, "edgecolor": "none", "pad": 0.6}  # the line for the ideal may be behind it
        axes.bar_label(bars, fmt=_label, fontsize=7, padding=3, bbox=box)
    at = np.arange(len(groups))
    axes.hlines(np.multiply(ideal, 100), at - 0.44, at + 0.44, color=_MEAN, linewidth=1.2, label="the new ones' share")
    axes.set_xticks(at, groups)
    axes.grid(axis="x", visible=False)
    axes.set_ylim(0, 109)


def _label(percents: float) -> str:
    """With a decimal only for small values and for those just below 100."""
    return f"{percents:.1f}" if 0 < percents < 10 or 99 < percents < 100 else f"{percents:.0f}"


def _step(before: int, after: int) -> str:
    return f"{before} → {after}" if after < 10_000 else f"{before}\n→ {after}"


def _moves(report: PlanReport) -> Figure:
    steps = [s for s in report.member_steps if s.partitions == report.recommended_partitions]
    rows = _grouped(steps, "before", "after")[:MAX_STEPS]
    figure = Figure(figsize=(WIDTH, 3.0), layout="constrained")
    axes = figure.subplots()
    series = {step.assignor: [row[i].fraction for row in rows] for i, step in enumerate(rows[0])}
    groups = [_step(row[0].before, row[0].after) for row in rows]
    _bars(axes, groups, series, [row[0].ideal_fraction for row in rows])
    axes.set(ylabel=f"% of {report.recommended_partitions} partitions", xlabel="members")
    figure.legend(loc="outside upper center", ncols=5)
    return figure


def _keys(report: PlanReport) -> Figure:
    rows = _grouped(report.partition_steps, "before", "after")[:MAX_STEPS]
    figure = Figure(figsize=(WIDTH, 3.0), layout="constrained")
    axes = figure.subplots()
    series = {step.partitioner: [row[i].fraction for row in rows] for i, step in enumerate(rows[0])}
    groups = [_step(row[0].before, row[0].after) for row in rows]
    _bars(axes, groups, series, [row[0].ideal_fraction for row in rows])
    axes.set(ylabel="% of keys", xlabel="partitions")
    figure.legend(loc="outside upper center", ncols=5)
    return figure


def _bytes(report: PlanReport) -> Figure:
    sizes = np.array(report.load.partition_bytes, np.float64)
    mean = float(sizes.mean())
    every = -(-len(sizes) // MAX_BARS)
    starts = np.arange(0, len(sizes), every)
    figure = Figure(figsize=(WIDTH, 2.6), layout="constrained")
    axes = figure.subplots()
    edges = np.append(starts, len(sizes)) - 0.5
    axes.stairs(np.maximum.reduceat(sizes, starts), edges, fill=True, color=_SERIES[0], linewidth=0)
    axes.axhline(mean, color=_MEAN, linewidth=1.2, label=f"mean {format_bytes(mean)}")
    axes.set_xlabel("partition" if every == 1 else f"partition (the fullest of every {every})")
    axes.set_xlim(-0.5, len(sizes) - 0.5)
    axes.set_ylim(0, float(sizes.max()) * 1.08 or 1)
    axes.yaxis.set_major_formatter(lambda value, _: format_bytes(value))
    axes.grid(axis="x", visible=False)
    figure.legend(loc="outside upper right")
    return figure


def _memory(report: PlanReport) -> Figure:
    figure = Figure(figsize=(WIDTH, 3.2), layout="constrained")
    panels = figure.subplots(1, len(report.tables), sharey=True, squeeze=False)[0]
    for axes, size in zip(panels, report.tables, strict=True):
        rows = [row for row in report.worker_memory if row.scale == size.scale]
        for mode, dashes in (("replicated", "-"), ("partitioned", "--")):
            of_mode = [row for row in rows if row.mode == mode]
            at = range(len(of_mode))
            for colour, name, label in ((1, "formula_bytes", "by formula"), (0, "measured_bytes", "ours")):
                sizes = [getattr(row, name) / GB for row in of_mode]
                axes.plot(
                    at, sizes, dashes, color=_SERIES[colour], marker="o", markersize=3.5, label=f"{label}, {mode}"
                )
            axes.set_xticks(at, [str(row.workers) for row in of_mode])
        axes.plot([0], [size.stated_bytes / GB], "x", color=_MEAN, markersize=7, label="stated in the design")
        axes.set(yscale="log", xlabel="workers", title=f"{size.scale}: {size.users:,} users")
        axes.minorticks_off()
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    panels[0].set_ylabel("GB in each worker")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=3)
    return figure
